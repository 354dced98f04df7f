"""Which call of a program's own a spec's replay makes, and the key of that. This module imports
TileLang.

Invariant: nothing is compiled, and of cache roots only the one in force is touched, which is a
worker's scratch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tilelang.jit import JITImpl

from tlcache.errors import FactoryError
from tlcache.runtime.foreign import accelerate, explaining, telling
from tlcache.runtime.foreign.call import Call, forget
from tlcache.runtime.foreign.stream import Unseen
from tlcache.spec import KernelSpec
from tlcache.store import calls
from tlcache.warm import replaying
from tlcache.warm.outcome import Asked

__all__ = ["asked"]


class _Stand(NamedTuple):
    """What stands for the kernel of a call."""

    call: Asked


def asked(spec: KernelSpec, key: str | None, root: str) -> Asked:
    """The call of a spec, by a process that answers as if it had the target's GPU.

    Args:
        spec: The kernel.
        key: TileLang's key for it, where a recording tells it: it decides between several calls.
        root: The cache root in force.

    Raises:
        FactoryError: The factory cannot be imported, or yields no kernel, or several and none of
            that key, or one for another target.
    """
    met: list[Asked] = []
    keys: list[str] = []
    made: Any = None
    with accelerate.filing(), _watched(met, root, key):
        try:
            keys, made = replaying.keys_asked(spec, key, targeted=True)
        except Exception:
            if not met:
                raise
    if isinstance(made, _Stand):
        met = [made.call]
    if not met and keys:
        return Asked(reason="`tilelang.compile` of a prim_func", recorded=key in keys)
    if not met or (len(met) > 1 and key is None):
        raise replaying.no_kernel(spec, made)
    if len(met) > 1 and key not in keys:
        raise FactoryError(
            f"the factory {spec.kernel} makes {len(met)} kernels, and none of them is the one that "
            "was recorded",
            hint="record it anew if its source has changed",
        )
    found = met[-1]._replace(recorded=key in keys)
    target = found.made_of.get("target", spec.target.name)
    if target != spec.target.name:
        raise FactoryError(
            f"{spec.kernel} was asked for {spec.target} and compiles for {target}",
            hint="let the factory take a `target`, or leave the target of its decorator unset",
        )
    return found


@contextmanager
def _watched(met: list[Asked], root: str, key: str | None) -> Iterator[None]:
    """Note every call. With a key to look for, TileLang goes on to its own key for each."""
    hooked = vars(JITImpl)["compile"]
    original = getattr(hooked, "__wrapped__", hooked)

    def compile(impl: Any, *args: Any, **kwargs: Any) -> Any:
        met.append(_described(impl, args, kwargs, root))
        return _Stand(met[-1]) if key is None else original(impl, *args, **kwargs)

    JITImpl.compile = compile
    try:
        yield
    finally:
        JITImpl.compile = hooked


def _described(impl: Any, args: tuple[Any, ...], kwargs: dict[str, Any], root: str) -> Asked:
    try:
        call = Call(impl, args, kwargs)
    except Unseen as unseen:
        return Asked(reason=unseen.reason)
    finally:
        forget()
    return Asked(
        key=call.key,
        front=call.front,
        styled=os.path.exists(calls.path_of(root, call.front)),
        kernel=telling.origin_of(call).kernel,
        made_of=explaining.made_of(call),
    )
