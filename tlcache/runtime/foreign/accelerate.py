"""The hooks that restore kernels of TileLang's own `@tilelang.jit`, and file what was made of a
call.

Invariant: the program gets what it would get without them, sooner. What goes wrong in a hook is
logged once and leaves the call to TileLang. A launch passes no hook. While nobody patched the same
functions later, `stop` puts TileLang's own ones back, the very objects; otherwise the hooks stay in
between and do nothing.

Four functions are hooked. `JITImpl._infer_jit_mode` runs a function to see whether it returns a
kernel or launches one; `JITFunc._build_tir_template` runs an eager one to see what it takes from
its tensors; `JITImpl.compile` makes the kernel. And `mutate` rewrites a function's source, which is
put off (`deferring.py`).
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tlcache import switches
from tlcache.runtime import ownership
from tlcache.runtime.foreign import mode
from tlcache.runtime.foreign.mode import Filed
from tlcache.runtime.foreign.trouble import refusals, trouble

__all__ = ["RESTORE", "active", "filing", "refusals", "start", "stop", "wanted"]

RESTORE = "TLCACHE_RESTORE"
"""The environment variable that rules restoring out (0)."""


class _State:
    def __init__(self) -> None:
        self.restoring = False
        self.patched: list[tuple[Any, str, Any, Any]] = []
        self.lock = threading.Lock()
        self.waiting = False


_state = _State()


# --- switching ---


def wanted() -> bool:
    """Whether the environment lets kernels be restored."""
    return switches.said(RESTORE) is not False


def start() -> None:
    """Restore kernels from here on; where TileLang is not imported yet, once it is."""
    _state.restoring = True
    _hook()


def stop() -> None:
    """Restore nothing any more. Kernels that were restored stay."""
    _state.restoring = False
    with _state.lock:
        left = []
        for owner, name, original, ours in reversed(_state.patched):
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)
            else:
                left.append((owner, name, original, ours))  # somebody's patch calls it
        _state.patched = left[::-1]


def active() -> bool:
    """Whether kernels are restored."""
    return _state.restoring


@contextmanager
def filing() -> Iterator[Filed]:
    """File what this thread makes meanwhile, though the resolver asked for it; restore nothing."""
    _hook()
    with mode.filing() as filed:
        yield filed


def _hook() -> None:
    if "tilelang.jit" in sys.modules and hasattr(sys.modules["tilelang.jit"], "JITImpl"):
        _patch()
    elif not _state.waiting:
        import wrapt

        _state.waiting = True
        wrapt.register_post_import_hook(lambda _: _patch_late(), "tilelang.jit")


def _patch_late() -> None:
    try:
        if _state.restoring:
            _patch()
    except Exception as error:
        trouble(error)


def _patch() -> None:
    from tilelang.jit import JITImpl
    from tilelang.language.eager import builder

    # Here, where TileLang is imported anyway, rather than at the first kernel.
    from tlcache.runtime.foreign import call, deferring, hooked

    with _state.lock:
        if _state.patched:
            return
        call.within(JITImpl.__call__.__code__, hooked.compiled.__code__)
        for owner, name, hook in (
            (JITImpl, "_infer_jit_mode", hooked.inferred),
            (builder.JITFunc, "_build_tir_template", hooked.templated),
            (JITImpl, "compile", hooked.compiled),
        ):
            original = vars(owner)[name]
            ours = _wrapped(original, hook)
            setattr(owner, name, ours)
            _state.patched.append((owner, name, original, ours))
        mutate = builder.mutate

        @functools.wraps(mutate)
        def put_off(func: Any) -> Any:
            return deferring.deferred(func, mutate) if _state.restoring else mutate(func)

        builder.mutate = put_off
        _state.patched.append((builder, "mutate", mutate, put_off))


def _wrapped(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = mode.is_filing() or (_state.restoring and not ownership.is_own())
        if mode.is_making() or not ours:
            return original(self, *args, **kwargs)
        return hook(original, self, args, kwargs)

    return wrapper


def _forked() -> None:
    """A lock that another thread of the parent held is held for ever in a fork."""
    _state.lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)
