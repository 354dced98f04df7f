"""The workloads that this process met, as a shapes document, and the file that they are recorded
into.

Invariant: a workload is in the file at most a fraction of a second after it was met, and nothing on
the way to a kernel waits for that: a thread writes, and only where there is something new. A fork
has all that its parent met, and writes for itself.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlcache import operators, recorded
from tlcache.errors import SpecError, TlcacheError
from tlcache.recorded import Document
from tlcache.runtime.resolve import Resolver, on_new, resolvers
from tlcache.spec import KernelSpec

__all__ = ["document", "flush", "met", "met_unreplayable", "recording", "start", "workload_of"]

_log = logging.getLogger(__name__)
DELAY = 0.1
"""Seconds that a new workload waits for others, so that a burst is one write."""


class _Met:
    """What was met that is no spec of a resolver."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kernels: dict[str, dict[str, Any]] = {}
        self.lost: dict[str, dict[str, Any]] = {}
        self.places: dict[str, None] = {}


class _File:
    """The file of this process, and the thread that writes it."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.written: Document = {}
        self.changed = threading.Event()
        self.writing = threading.Lock()
        self.thread: threading.Thread | None = None
        self.finalizer: Any = None


_met = _Met()
_file = _File()


# --- what was met ---


def met(
    workload: Mapping[str, Any], place: str | None, key: str | None, environment: str
) -> dict[str, Any]:
    """Note a kernel that TileLang was asked for.

    Args:
        workload: The workload that makes it again.
        place: A directory that has to be on `sys.path` for that.
        key: TileLang's key for it; None where it was not asked for one.
        environment: What that key belongs to: release, machine and target.

    Returns:
        The workload as it is recorded.
    """
    kept = dict(workload)
    if key is not None:
        kept[recorded.KEYS] = {environment: key}
    with _met.lock:
        _met.kernels.setdefault(key or recorded.identity(workload), kept)
        if place is not None:
            _met.places[place] = None
    _touch()
    return kept


def met_unreplayable(
    kernel: str, params: list[str], key: str | None, reason: str | None, remedy: str | None
) -> None:
    """Note a kernel that no other process can make again.

    Args:
        kernel: What it is called.
        params: Its parameters, like `A float16[128,128]`.
        key: TileLang's key for it.
        reason: Why it cannot be made again.
        remedy: What to do about that.
    """
    entry = {"kernel": kernel, "params": params, "reason": reason, "remedy": remedy}
    kept = {name: value for name, value in entry.items() if value is not None}
    with _met.lock:
        _met.lost.setdefault(key or recorded.identity(kept), kept)
    _touch()


def document() -> Document:
    """All that this process met, as a shapes document."""
    found = recorded.empty()
    specs = [spec for resolver in resolvers() for spec in resolver.specs()]
    with _met.lock:
        kernels, lost = list(_met.kernels.values()), list(_met.lost.values())
        places = list(_met.places)
    found["workloads"] = [*(workload_of(spec) for spec in specs), *kernels]
    if lost:
        found["unreplayable"] = lost
    if places:
        found["paths"] = places
    return recorded.merged(recorded.empty(), found)


def workload_of(spec: KernelSpec) -> dict[str, Any]:
    """The workload of shapes.json that asks for a spec; without its target."""
    return dict(_asked(spec))


@functools.cache
def _asked(spec: KernelSpec) -> dict[str, Any]:
    data = spec.to_json()
    workload, schedule = data["workload"], data["schedule"]
    assert isinstance(workload, dict)
    operator = _operator(spec)
    if operator is None:
        kept = {"kernel": spec.kernel, "args": workload, "schedule": schedule}
        kept |= {name: data[name] for name in ("pass_configs", "compile_flags")}
        return {name: value for name, value in kept.items() if value or name == "args"}
    asked = {"op": operator.name, **workload}
    # A schedule that `warm` would choose as well is left to it: it may have become a better one.
    default = operator.spec(spec.workload, spec.target)
    if spec == default or any(one.tuned(operator, default) == spec for one in _holders(spec)):
        return asked
    return {**asked, "schedule": schedule}


def _holders(spec: KernelSpec) -> list[Resolver]:
    return [resolver for resolver in resolvers() if spec in resolver.specs()]


def _operator(spec: KernelSpec) -> operators.Operator | None:
    try:
        known = operators.installed().values()
    except SpecError:
        return None
    return next((one for one in known if one.kernel == spec.kernel and one.accepts(spec)), None)


# --- the file ---


def start(path: str | os.PathLike[str]) -> None:
    """Record into a file from here on, and what was met already; merge with what it holds."""
    _file.path = Path(os.path.abspath(path))
    if _touch not in on_new:
        on_new.append(_touch)
        atexit.register(flush)
        os.register_at_fork(after_in_child=_forked)
    _touch()


def recording() -> str | None:
    """The file that this process records into."""
    return str(_file.path) if _file.path is not None else None


def _touch() -> None:
    """Have what is new written soon."""
    if _file.path is None:
        return
    _file.changed.set()
    if _file.thread is None:
        with _file.writing:
            if _file.thread is None:
                _file.thread = threading.Thread(
                    target=_write_on, args=(_file.changed,), name="tlcache-recorder", daemon=True
                )
                _file.thread.start()
    _at_end_of_worker()


def _write_on(changed: threading.Event) -> None:
    pause = threading.Event()
    while True:
        changed.wait()
        pause.wait(DELAY)
        changed.clear()
        flush()


def flush() -> None:
    """Write what is new, now. A file that cannot be written is told once, and not tried again."""
    with _file.writing:
        if _file.path is None:
            return
        try:
            found = document()
            if found == _file.written or not (found["workloads"] or found.get("unreplayable")):
                return
            recorded.update(_file.path, found)
            _file.written = found
        except (TlcacheError, OSError) as error:
            message = error.message if isinstance(error, TlcacheError) else str(error)
            _log.error("%s; this process records no more", message)
            _file.path = None


def _at_end_of_worker() -> None:
    """Write at the end of a process of `multiprocessing`, too, which may run nothing of `atexit`.
    It forgets what was asked for before it began its work.
    """
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None and (_file.finalizer is None or not _file.finalizer.still_active()):
        _file.finalizer = util.Finalize(None, flush, exitpriority=0)


def _forked() -> None:
    """The parent's thread is not in a fork, and its locks may be held for ever."""
    _met.lock = threading.Lock()
    _file.writing = threading.Lock()
    _file.changed = threading.Event()
    _file.thread = None
