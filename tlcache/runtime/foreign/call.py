"""What a call of a function of TileLang's means: its front and its key (`key.py`), each computed
once in one call of the program's.

Invariant: what was computed is used again only while nothing of the program's has run since.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from tlcache.runtime import ownership
from tlcache.runtime.foreign import key as keys
from tlcache.runtime.foreign import mode, place, texts
from tlcache.runtime.foreign.place import Place, Roots
from tlcache.runtime.foreign.reach import Finder
from tlcache.runtime.foreign.stream import Unseen
from tlcache.store.calls import Answer, Style

__all__ = ["LAZY", "Call", "Front", "asked", "forget", "front", "lazily", "own_indices", "within"]

LAZY = Style("lazy", None, {})
"""How a function is called that returns a prim_func."""


class _Ahead(NamedTuple):
    """What a call of a JITImpl means if it is lazy."""

    impl: Any
    where: keys.Context
    key: str
    answers: Iterator[tuple[Place, Answer]] | None


class Front:
    """The front of a call, and what is known by it of the call of a JITImpl that asked.

    Attributes:
        function: The function.
        given: What it is called with, other than tensors.
        asked: All that it is called with, and that as TileLang binds it, where that was asked for.
        roots: The roots in force.
        around: What is around the call.
        said: The front.
        ahead: What the call means if it is lazy, where that was looked for.
    """

    def __init__(
        self,
        function: Any,
        given: dict[str, Any],
        roots: Roots | None,
        around: keys.Surroundings,
        said: str,
    ) -> None:
        self.function = function
        self.given = given
        self.asked: tuple[tuple[Any, ...], dict[str, Any], Any] | None = None
        self.roots = roots
        self.around = around
        self.said = said
        self.ahead: _Ahead | None = None

    def of(self, function: Any, given: dict[str, Any]) -> bool:
        """Whether it is that of a call."""
        return self.function is function and _same(self.given, given)

    def style(self) -> Style | None:
        """How the function is called, if that is known."""
        return None if self.roots is None else self.roots.style(self.said)


class _Thread(threading.local):
    front: tuple[FrameType, int, Front] | None = None


_thread = _Thread()
_outer: CodeType | None = None
_inner: CodeType | None = None


def within(outer: CodeType, inner: CodeType) -> None:
    """Say what one call of the program's is: a frame of `outer`, else one of `inner`."""
    global _outer, _inner
    _outer, _inner = outer, inner


def asked(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Front]:
    """A call's arguments, as TileLang binds them, and its front; see `front`.

    Raises:
        Unseen: Something decides about the kernel that cannot be seen.
    """
    known = _known(_calling())
    if known is not None and known.asked is not None and known.function is function:
        before, named, bound = known.asked
        same = len(before) == len(args) and all(map(operator.is_, before, args))
        if same and _same(named, kwargs):
            return bound, known
    bound = function._argument_binder.bind(args, kwargs)
    found = front(function, bound.compile_kwargs)
    found.asked = (args, dict(kwargs), bound)
    return bound, found


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two calls' named arguments are the very same objects."""
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def front(function: Any, given: dict[str, Any]) -> Front:
    """The front of a call. Within one call of a JITImpl it is taken once, as long as nothing of the
    program's has run meanwhile.

    Args:
        function: A JITFunc of TileLang's.
        given: The arguments that are not tensors, by name.

    Raises:
        Unseen: Something decides about the kernel that cannot be seen.
    """
    frame = _calling()
    known = _known(frame)
    if known is not None and known.of(function, given):
        return known
    _thread.front = None
    roots = place.in_force()
    around = keys.surroundings()
    said = keys.front(function, given, Finder(texts.reading(roots)), around)
    found = Front(function, given, roots, around, said)
    if frame is not None:
        _thread.front = (frame, mode.made(), found)
    return found


def _known(frame: FrameType | None) -> Front | None:
    """The front that was taken in the call of this frame, unless something was made since."""
    known = _thread.front
    return known[2] if known is not None and known[:2] == (frame, mode.made()) else None


def _calling() -> FrameType | None:
    """The frame of the call of the program's that asks, if one does."""
    frame: FrameType | None = sys._getframe(2)
    found = None
    for _ in range(12):
        if frame is None:
            break
        if frame.f_code is _outer:
            return frame
        if frame.f_code is _inner:
            found = frame
        frame = frame.f_back
    return found


def forget() -> None:
    """Keep nothing of the call of this thread any more: its frame has the program's tensors."""
    _thread.front = None


def lazily(impl: Any, front: Front) -> bool:
    """Whether there is a kernel of a call as a lazy one: then its function has returned a
    prim_func, and is lazy. It is looked for where no parameter is a tensor, as in nearly all lazy
    functions, so that these do without the file of a style.

    Raises:
        Unseen: It cannot be restored.
    """
    if front.roots is None or impl.func.tensor_args:
        return False
    own_indices(impl)
    where = keys.context(impl, front.around)
    key = keys.key(impl, front.said, "lazy", {}, where)
    answers = front.roots.answers(key)
    first = next(answers, None)
    known = None if first is None else itertools.chain((first,), answers)
    front.ahead = _Ahead(impl, where, key, known)
    return known is not None


class Call:
    """A call of `JITImpl.compile`: its key, and what is needed to make its kernel later.

    Attributes:
        impl: The JITImpl.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        bound: The same, as TileLang binds them.
        roots: The roots in force.
        where: How the JITImpl's kernels are compiled.
        front: The front.
        constants: What an eager function takes from its tensors.
        key: The key.
        fresh: Whether TileLang has not traced the function for such arguments in this process.

    Raises:
        Unseen: It cannot be restored.
    """

    def __init__(self, impl: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        function = impl.func
        if not hasattr(function, "_argument_binder"):
            raise Unseen("a prim_func, which is made already")
        if _thread.front is None and place.in_force() is None:
            raise Unseen(_NO_ROOT)
        own_indices(impl)
        self.impl = impl
        self.args, self.kwargs = args, kwargs
        if impl.mode == "auto":
            impl.initialize_jit_mode(*args, **kwargs)
        self.bound, came = asked(function, args, kwargs)
        if came.roots is None:
            raise Unseen(_NO_ROOT)
        self.roots = came.roots
        self.front = came.said
        self.constants: dict[str, Any] = {}
        self._answers: Iterator[tuple[Place, Answer]] | None = None
        template = function.p1_cache.get(self.bound.p1_key)
        self.fresh = template is None
        ahead = came.ahead
        if ahead is not None and ahead.impl is impl and impl.mode == "lazy" and self.fresh:
            self.where, self.key, self._answers = ahead.where, ahead.key, ahead.answers
            return
        self.where = keys.context(impl, came.around)
        if impl.mode == "eager" and template is None:
            template = function._build_tir_template(**self.bound.compile_kwargs)
            function.p1_cache[self.bound.p1_key] = template
            self.fresh = False
        if template is not None:
            if getattr(template, "_tlcache_front", None) != self.front:
                raise Unseen("a call that was made before, of something that has changed since")
            if template.matcher is not None:
                values = template._parse_phase2_key(
                    **self.bound.tensor_args, **self.bound.compile_kwargs
                )
                names = [str(one[3]) for one in template.matcher.values()]
                self.constants = dict(zip(names, values, strict=True))
        self.key = keys.key(impl, self.front, impl.mode, self.constants, self.where)

    def answers(self) -> Iterator[tuple[Place, Answer]]:
        """What is known of the call, from the first root on; what was looked up when the call began
        comes from there once.
        """
        known, self._answers = self._answers, None
        return self.roots.answers(self.key) if known is None else known

    def maker(self, original: Callable[..., Any]) -> Callable[[], Any]:
        """What makes the kernel, later, the slow way. It keeps no tensor alive: constants say what
        was taken from them.

        Args:
            original: TileLang's own `JITImpl.compile`.
        """
        impl, given = self.impl, {**self.bound.compile_kwargs, **self.constants}
        fields = ("execution_backend", "target", "target_host", "verbose", "mode")
        kept = {name: getattr(impl, name) for name in fields}
        kept["out_idx"] = list(impl.out_idx) if isinstance(impl.out_idx, list) else impl.out_idx
        kept["pass_configs"] = None if impl.pass_configs is None else dict(impl.pass_configs)
        flags = impl.compile_flags
        kept["compile_flags"] = list(flags) if isinstance(flags, list) else flags

        def make() -> Any:
            with mode.making(), ownership.own():
                return original(dataclasses.replace(impl, **kept), **given)

        return make


_NO_ROOT = "the cache is switched off, or others can write it"


def own_indices(impl: Any) -> None:
    """Give a JITImpl a list of output indices that nobody has written in: TileLang makes negative
    ones positive in place, and would have another key for the next kernel.
    """
    indices = impl.out_idx
    if isinstance(indices, list):
        known = vars(impl).get("_tlcache_indices")
        declared = known[1] if known is not None and known[0] is indices else tuple(indices)
        fresh = list(declared)
        vars(impl)["_tlcache_indices"] = (fresh, declared)
        impl.out_idx = fresh
