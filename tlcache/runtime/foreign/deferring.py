"""The rewriting of a function's source, put off until it is asked for.

`@tilelang.jit` rewrites every function that it decorates, which takes 5 to 50 ms. Of a function
that defines a prim_func and returns it, nothing ever asks for that.

Invariant: what is made later is made of what there was when the function was decorated: its source,
and what its closure held. Only functions with a prim_func in them are put off, and none whose
parameters are annotated in the body, of which TileLang asks at once.

This module imports TileLang.
"""

from __future__ import annotations

import ast
import textwrap
import threading
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from tilelang.language.eager.ast import IRGenerator

from tlcache.runtime.foreign.source import lines
from tlcache.runtime.foreign.stream import Unseen

__all__ = ["Deferred", "deferred"]


class Deferred(IRGenerator):  # type: ignore[misc]
    """What TileLang's `mutate` gives, made when it is asked for."""

    def __init__(self, function: FunctionType, mutate: Callable[..., Any]) -> None:
        self.extra_type_hints: dict[str, Any] = {}
        self._tlcache_function = function
        self._tlcache_mutate = mutate
        self._tlcache_lock = threading.Lock()
        self._tlcache_made: Any = None

    def _tlcache_rewritten(self) -> Any:
        with self._tlcache_lock:
            if self._tlcache_made is None:
                self._tlcache_made = self._tlcache_mutate(self._tlcache_function)
        return self._tlcache_made

    @property
    def gen(self) -> Any:
        return self._tlcache_rewritten().gen

    @property
    def source(self) -> Any:
        return self._tlcache_rewritten().source


def deferred(function: Any, mutate: Callable[..., Any]) -> Any:
    """What `mutate` would give for a function, put off if it can be."""
    if type(function) is not FunctionType or hasattr(function, "__wrapped__"):
        return mutate(function)
    try:
        found = lines(function)
    except Unseen:
        found = None
    if found is None or "prim_func" not in found.text or not _defines_prim_func(found.text):
        return mutate(function)
    return Deferred(_as_now(function), mutate)


def _defines_prim_func(source: str) -> bool:
    """Whether a text is a function with a prim_func in it, without annotations of its parameters in
    its body.
    """
    try:
        body = ast.parse(textwrap.dedent(source)).body
    except (SyntaxError, ValueError, RecursionError):
        return False
    if not body or not isinstance(body[0], ast.FunctionDef):
        return False
    within = body[0].body
    if any(isinstance(node, ast.AnnAssign) and node.value is None for node in within):
        return False
    return any(
        isinstance(decorator, ast.Attribute) and decorator.attr == "prim_func"
        for node in within
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
    )


def _as_now(function: FunctionType) -> FunctionType:
    """A copy whose closure nobody changes any more."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(CellType(cell.cell_contents))
        except ValueError:
            cells.append(CellType())
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells) or None,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    copy.__dict__.update(function.__dict__)
    return copy
