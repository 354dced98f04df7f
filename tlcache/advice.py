"""What to do about a bad number that an agent tells.

Invariant: an advice names the number, and a command or a change that makes it better. Processes of
one server that suffer from the same get one advice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tlcache.readings import Factory, Incident, Reading

__all__ = ["Advice", "advise", "came_late"]

_MANY = 3
_LONG = 5.0


@dataclass(frozen=True)
class Advice:
    """One advice.

    Attributes:
        pids: The processes that it is about.
        what: What is bad, with the numbers.
        remedy: What to do.
        workloads: Lines for a shapes.json that would have helped.
    """

    pids: tuple[int, ...]
    what: str
    remedy: str
    workloads: tuple[Mapping[str, Any], ...] = ()


def advise(readings: Sequence[Reading]) -> list[Advice]:
    """What to do about processes: one, or the ranks of one server."""
    return [*_late(readings), *_cold(readings), *_failed(readings), *_thrashing(readings)]


def came_late(incidents: Iterable[Incident]) -> list[Incident]:
    """The kernels among incidents that came after the process was ready."""
    return [one for one in incidents if one.after_ready and one.kind in ("compiled", "disk")]


def _pids(readings: Iterable[Reading]) -> tuple[int, ...]:
    return tuple(one.process.pid for one in readings)


def _record(pids: Sequence[int]) -> str:
    return (
        f"`tlcache record --pid {pids[0]} -o shapes.json` writes what it met, and "
        "`tlcache warm --shapes shapes.json` has it there at the next start"
    )


def _late(readings: Sequence[Reading]) -> list[Advice]:
    bad = [one for one in readings if one.compile.after_ready]
    if not bad:
        return []
    count = sum(one.compile.after_ready for one in bad)
    incidents = [event for one in bad for event in came_late(one.incidents)]
    lines = {json.dumps(one.workload): one.workload for one in incidents if one.workload}
    what = f"{count:,} compile{'s' if count > 1 else ''} after ready"
    return [Advice(_pids(bad), what, _record(_pids(bad)), tuple(lines.values()))]


def _cold(readings: Sequence[Reading]) -> list[Advice]:
    """Nothing was restored: the server started on an empty cache, or another one."""
    bad = [
        one
        for one in readings
        if not one.compile.restored
        and one.compile.compiled - one.compile.after_ready > 0
        and (one.compile.compiled >= _MANY or one.compile.compile_seconds >= _LONG)
    ]
    if not bad:
        return []
    count = sum(one.compile.compiled for one in bad)
    seconds = sum(one.compile.compile_seconds for one in bad)
    what = f"nothing was restored, and {count:,} kernels were compiled in {seconds:.1f} s"
    return [Advice(_pids(bad), what, _record(_pids(bad)))]


def _failed(readings: Sequence[Reading]) -> list[Advice]:
    bad = [one for one in readings if one.compile.failed]
    if not bad:
        return []
    count = sum(one.compile.failed for one in bad)
    what = f"{count:,} kernel{'s were' if count > 1 else ' was'} not to be had"
    remedy = f"`tlcache stats --pid {bad[0].process.pid}` says why; the process's log says more"
    return [Advice(_pids(bad), what, remedy)]


def _thrashing(readings: Sequence[Reading]) -> list[Advice]:
    bad: dict[str, list[tuple[Reading, Factory]]] = {}
    for one in readings:
        for factory in one.jit:
            if factory.thrashes:
                bad.setdefault(factory.factory, []).append((one, factory))
    found = []
    for name, rows in bad.items():
        worst = max((factory for _, factory in rows), key=lambda factory: factory.misses)
        room = worst.maxsize or 0
        what = (
            f"{name} thrashes: {worst.misses:,} misses and {worst.hits:,} hits, "
            f"{worst.evictions:,} evicted, room for {room:,}"
        )
        if name.startswith("ops."):
            remedy = f"`for cache in ops.jit_caches(): cache.resize({max(2 * room, 1)})`, or more"
        else:
            remedy = (
                "raise its maxsize above the number of different arguments that it gets "
                f"(at most {worst.misses:,}), as in `@functools.lru_cache(maxsize={2 * room})`"
            )
        found.append(Advice(_pids(one for one, _ in rows), what, remedy))
    return found
