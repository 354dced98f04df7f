"""Kernels restored from what the roots know of a call, and what is filed of those that TileLang
made.

Invariant: a kernel is loaded only of a library that is, byte for byte, the one that was filed; one
thread at a time restores or makes what one key means.

This module imports TileLang.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from tlcache.fingerprint import versions
from tlcache.runtime.foreign import explaining, mode, telling
from tlcache.runtime.foreign.call import Call
from tlcache.runtime.foreign.kernel import restored as loaded
from tlcache.runtime.foreign.place import filed
from tlcache.runtime.foreign.stream import Unseen
from tlcache.runtime.foreign.trouble import trouble
from tlcache.store import calls, locks, record
from tlcache.store.calls import Answer

__all__ = ["flight", "keep", "restored"]

_LIBRARIES = {"tvm_ffi": "executable.so", "cython": "kernel_lib.so"}


class _State:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.flights: dict[str, threading.Lock] = {}
        self.kernels: dict[tuple[str, str, str], Any] = {}


_state = _State()


@contextmanager
def flight(key: str) -> Iterator[None]:
    """One thread at a time for a key; another one finds what the first has made."""
    with _state.lock:
        lock = _state.flights.setdefault(key, threading.Lock())
    with lock:
        yield


def restored(call: Call, original: Callable[..., Any], start: float) -> Any:
    """The kernel of a call, from memory or from its file; None where TileLang has to make it.

    Args:
        call: The call.
        original: TileLang's own `JITImpl.compile`.
        start: When the call began, as `time.perf_counter` tells.
    """
    try:
        for place, answer in call.answers():
            known = call.where.cache._memory_cache.get(answer.key)
            where = (place.path, answer.key, call.where.backend)
            kernel = known if known is not None else _state.kernels.get(where)
            new = kernel is None
            if new:
                library = record.sound_library(place.path, answer, place.trust, use=True)
                if library is None:
                    continue
                made = loaded(answer, os.path.dirname(library), call.maker(original))
                kernel = _state.kernels.setdefault(where, made)
                call.roots.used(place, call.key)
            telling.tell(call, answer, kernel, time.perf_counter() - start, known=not new)
            return kernel
    except Exception as error:
        trouble(error)
    return None


def keep(call: Call, kernel: Any, seconds: float) -> None:
    """File what TileLang has made of a call.

    Args:
        call: The call.
        kernel: TileLang's kernel.
        seconds: What it took to make.

    Raises:
        Unseen: It cannot be restored.
    """
    path = call.roots.path
    template = call.impl.func.p1_cache.get(call.bound.p1_key)
    if call.fresh and template is not None:
        template._tlcache_front = call.front
    answer = _answer(call, kernel, seconds)
    if (noted := mode.filed()) is not None:
        noted.calls[answer.key] = call.key
    for place, known in call.roots.answers(call.key):
        same = known._replace(created=answer.created, compile_seconds=answer.compile_seconds)
        if place.path == path and same == answer:
            return

    def write() -> None:
        with locks.recording(path):
            calls.write_answer(path, call.key, answer)

    filed(write)


def _answer(call: Call, kernel: Any, seconds: float) -> Answer:
    path = getattr(kernel, "_tilelang_cache_path", None)
    if path is None or os.path.relpath(path, call.roots.path).startswith(os.pardir):
        raise Unseen("a kernel that TileLang did not keep")
    try:
        library = record.library_at(path, _LIBRARIES[kernel.execution_backend])
    except OSError:
        raise Unseen("a kernel that TileLang did not keep") from None
    adapter = kernel.adapter
    outputs = tuple(int(index) % len(adapter.params) for index in adapter.result_idx or ())
    callee = bool(getattr(adapter, "_ffi_callee_allocated_output_abi", False))
    signature = ""
    if kernel.execution_backend == "cython":
        signature = _signature(kernel.prim_func)
    elif outputs and not callee:
        raise Unseen("a kernel whose outputs its launcher allocates")
    origin = telling.origin_of(call)
    flags = kernel.compile_flags
    return Answer(
        kernel=origin.kernel,
        title=origin.title,
        entry=os.path.relpath(path, call.roots.path),
        library=library,
        backend=kernel.execution_backend,
        target=call.where.target,
        inputs=len(adapter.params) - len(outputs),
        outputs=outputs,
        callee=callee,
        signature=signature,
        pass_configs=dict(kernel.pass_configs or {}) if signature else {},
        compile_flags=None if flags is None else tuple(map(str, flags)),
        compile_seconds=round(seconds, 3),
        versions=versions(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        made_of=json.dumps(explaining.made_of(call), sort_keys=True),
    )


def _signature(function: Any) -> str:
    """A prim_func without what it does, as JSON."""
    import tvm

    bare = tvm.tirx.PrimFunc(
        function.params,
        tvm.tirx.Evaluate(0),
        function.ret_type,
        function.buffer_map,
        attrs=function.attrs,
    )
    return str(tvm.ir.save_json(bare))


def _forked() -> None:
    """Locks that other threads of the parent held are held for ever in a fork."""
    _state.lock = threading.Lock()
    _state.flights = {}


os.register_at_fork(after_in_child=_forked)
