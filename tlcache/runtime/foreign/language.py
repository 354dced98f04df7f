"""TileLang's own objects: what `@tilelang.jit` and `T.macro` made of functions, buffers, variables,
targets.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from tlcache.runtime.foreign.source import cells
from tlcache.runtime.foreign.stream import MISSING, Stream, Unseen

__all__ = ["Language"]


class Language(Stream):
    """The part of a `Finder` that knows TileLang's objects."""

    def _tilelang(self, value: Any, kind: type) -> None:
        name = kind.__name__
        if name == "Macro" and hasattr(value, "ir_gen"):
            if self._first(value):
                self.say("macro", value.name)
                self.value(value.orig_func)
                self._rewritten(value.ir_gen, value.orig_func)
                self._annotations(value.annotations)
        elif name == "JITFunc":
            self.jit_function(value)
        elif name == "JITImpl":
            self.say("jit")
            for field in ("out_idx", "execution_backend", "target_host", "pass_configs"):
                self.value(getattr(value, field))
            self.value(value.compile_flags)
            self.say(str(value.target))
            self.jit_function(value.func)
        elif name in ("Var", "SizeVar"):
            if self._first(value):
                self.say(name, str(value.name), str(value.dtype))
        elif name in ("IntImm", "FloatImm", "StringImm"):
            self.say(name, str(getattr(value, "dtype", "")))
            self.value(value.value)
        elif name == "Buffer":
            self._buffer(value)
        elif (known := _name_of(value)) is not None:
            self.say("outside", known)
        elif name == "Target":
            self.say("target", str(value))
        else:
            raise Unseen(f"an object of {kind.__module__}.{name}")

    def jit_function(self, function: Any) -> None:
        """Digest what `@tilelang.jit` made of a function: the function, and what it kept of it.

        Raises:
            Unseen: Something in it cannot be seen into.
        """
        if type(function).__name__ != "JITFunc":
            raise Unseen("a prim_func, which is made already")
        if not self._first(function):
            return
        self.say("jit function")
        self.value(function.orig_func)
        self._rewritten(function.ir_gen, function.orig_func)
        self._annotations(function.tensor_args)
        self._annotations(function.tensor_args_defaults)

    def _rewritten(self, generator: Any, function: FunctionType) -> None:
        """The function that TileLang rewrote: its closure is as it was when that was done."""
        self._annotations(generator.extra_type_hints)
        put_off = getattr(generator, "_tlcache_function", None)
        rewritten = generator.gen if put_off is None else put_off
        now, then = cells(function), cells(rewritten)
        for name in sorted(then):
            if then[name] is not rewritten and then[name] is not now.get(name, MISSING):
                self.say("then", name)
                self.value(then[name])

    def _annotations(self, annotations: Mapping[str, Any]) -> None:
        for name, value in annotations.items():
            self.say("annotation", name)
            # TileLang names parameters after the arguments, when it first traces the function.
            if type(value).__name__ == "Var" and type(value).__module__.startswith("tvm."):
                if self._first(value):
                    self.say("parameter", str(value.dtype))
            elif type(value).__name__ == "Buffer" and type(value).__module__.startswith("tvm."):
                self._buffer(value, named=False)
            else:
                self.value(value)

    def _buffer(self, buffer: Any, named: bool = True) -> None:
        if not self._first(buffer):
            return
        self.say("buffer", str(buffer.name) if named else "", str(buffer.dtype))
        self.say(str(buffer.scope()))
        self.say(str(buffer.data_alignment), str(buffer.offset_factor))
        for part in (buffer.shape, buffer.strides):
            self.say(str(len(part)))
            for item in part:
                self.value(item)
        if buffer.elem_offset is not None:
            self.value(buffer.elem_offset)


@functools.cache
def _named() -> dict[int, tuple[Any, str]]:
    """The objects of TileLang's language that have names there but no name of their own."""
    found: dict[int, tuple[Any, str]] = {}
    for module in ("tilelang.language", "tvm.tirx", "tilelang"):
        for name, value in vars(sys.modules.get(module) or inspect).items():
            found.setdefault(id(value), (value, f"{module}.{name}"))
    return found


def _name_of(value: Any) -> str | None:
    known = _named().get(id(value))
    return known[1] if known is not None and known[0] is value else None
