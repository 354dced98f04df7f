"""What an agent tells of its process, as JSON documents.

Invariant: a document is made of copies taken while other threads go on; it waits for nobody. All of
them have `"schema": 1`.
"""

from __future__ import annotations

import functools
import os
import platform
import pwd
import sys
import time
from typing import Any

from tlcache import __version__
from tlcache.runtime import events as happened
from tlcache.runtime import layers
from tlcache.runtime.events import iso
from tlcache.runtime.process import place, process
from tlcache.runtime.resolve import ledgers
from tlcache.store import layout

__all__ = ["SCHEMA", "events", "health", "kernels", "stats", "workloads"]

SCHEMA = 1
_INCIDENTS = 20


def health() -> dict[str, Any]:
    """That the process is there, and whether it was marked ready."""
    return {"schema": SCHEMA, "status": "ok", "pid": os.getpid(), "ready": process.ready}


def stats() -> dict[str, Any]:
    """The process, the counts of each layer, and the latest incidents, newest first."""
    incidents = [event for event in happened.log.all() if event.incident]
    return {
        "schema": SCHEMA,
        "process": _process(),
        "layers": {
            "workload": layers.workloads(),
            "jit": layers.factories(),
            "compile": layers.compiles(),
            "tilelang": layers.tilelang(),
        },
        "incidents": [event.to_json() for event in incidents[: -_INCIDENTS - 1 : -1]],
        "incidents_total": len(incidents),
    }


def events(since: float = 0.0) -> dict[str, Any]:
    """The events, oldest first.

    Args:
        since: Leave out those before, in seconds since the epoch.
    """
    kept = [event.to_json() for event in happened.log.all() if event.when >= since]
    return {"schema": SCHEMA, "events": kept}


def kernels() -> dict[str, Any]:
    """The kernels in memory, in the order of their coming."""
    return {
        "schema": SCHEMA,
        "kernels": [
            {
                "title": held.title,
                "origin": held.origin,
                "spec": None if held.spec is None else held.spec.to_json(),
                "outcome": held.outcome,
                "entry": held.entry,
                "seconds": round(held.seconds, 6),
                "loaded": iso(held.loaded),
            }
            for ledger in ledgers()
            for held in list(ledger.held)
        ],
    }


def workloads() -> dict[str, Any]:
    """The workloads that the process met, as a shapes.json."""
    from tlcache.runtime import recorder

    return {"schema": SCHEMA, "shapes": recorder.document()}


def _process() -> dict[str, Any]:
    where, started = place(), _started(os.getpid())
    ready = process.ready_since
    tilelang = sys.modules.get("tilelang")
    hooks: Any = sys.modules.get("tlcache.runtime.hooks")  # who has none need not have wrapt, too
    recorder: Any = sys.modules.get("tlcache.runtime.recorder")
    return {
        "pid": os.getpid(),
        "started": iso(started),
        "uptime_seconds": round(time.time() - started, 3),
        "command": list(sys.orig_argv),
        "name": _name(),
        "user": _user(os.geteuid()),
        "rank": where.rank,
        "world_size": where.world_size,
        "group": where.group,
        "ready": None if ready is None else iso(ready),
        "ready_after_seconds": None if ready is None else round(ready - started, 3),
        "frozen": process.frozen,
        "python": platform.python_version(),
        "tlcache": __version__,
        "tilelang": getattr(tilelang, "__version__", None),
        "hooks": hooks is not None and hooks.installed(),
        "root": layout.default_root(),
        "recording": None if recorder is None else recorder.recording(),
    }


@functools.lru_cache(maxsize=1)
def _started(pid: int) -> float:
    """When a process started, in seconds since the epoch. The kernel counts from boot."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _name() -> str:
    """What the process runs, in short: `server.py`, or `package` for `python -m package`."""
    script: str = (getattr(sys, "argv", None) or [""])[0]
    directory, name = os.path.split(script)
    if name == "__main__.py":
        return os.path.basename(directory)
    return f"python {name}" if name in ("-c", "-m") else name or "python"


@functools.lru_cache(maxsize=1)
def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
