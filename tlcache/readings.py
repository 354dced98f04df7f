"""What an agent says of its process, field by field, with what is missing filled in; the ranks of
one server together; and what changed between two readings.

Invariant: any JSON object makes a reading. A field that is missing, or is not what it should be, is
zero or unknown: the agent may be of another version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from typing import Any, TypeVar

__all__ = ["Compile", "Factory", "Group", "Incident", "InProcess", "Kernel", "Latency", "Process"]
__all__ += ["Rates", "Reading", "Refusal", "Workload", "grouped", "incidents", "rates", "read"]
__all__ += ["when"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Process:
    """The process. See the README for the fields of `/v1/stats`."""

    pid: int = 0
    started: str = ""
    uptime_seconds: float = 0.0
    name: str = ""
    user: str = ""
    rank: int | None = None
    world_size: int | None = None
    group: str = ""
    ready: str = ""
    ready_after_seconds: float = 0.0
    frozen: bool = False
    tlcache: str = ""
    tilelang: str = ""
    hooks: bool = False
    root: str = ""
    recording: str = ""


@dataclass(frozen=True)
class Workload:
    """Layer 3: the workloads of equal ops."""

    key: str = ""
    instances: int = 0
    workloads: int = 0
    hits: int = 0
    misses: int = 0


@dataclass(frozen=True)
class Factory:
    """Layer 2: the JITImpls of a factory."""

    factory: str = ""
    hits: int = 0
    misses: int = 0
    maxsize: int | None = None
    currsize: int = 0
    evictions: int = 0
    thrashes: bool = False


@dataclass(frozen=True)
class Kernel:
    """Layer 1, one kernel's part of it."""

    kernel: str = ""
    memory: int = 0
    restored: int = 0
    disk: int = 0
    compiled: int = 0
    failed: int = 0
    after_ready: int = 0
    compile_seconds: float = 0.0


@dataclass(frozen=True)
class Refusal:
    """Why calls of a program's own functions were not restored, and how many."""

    reason: str = ""
    count: int = 0


@dataclass(frozen=True)
class Latency:
    """How long something took, in seconds."""

    count: int = 0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


@dataclass(frozen=True)
class Compile:
    """Layer 1 in all."""

    memory: int = 0
    restored: int = 0
    disk: int = 0
    compiled: int = 0
    failed: int = 0
    after_ready: int = 0
    restore_seconds: float = 0.0
    compile_seconds: float = 0.0
    saved_seconds: float = 0.0


@dataclass(frozen=True)
class InProcess:
    """A cache of TileLang's in the process."""

    cache: str = ""
    owner: str = ""
    size: int = 0


@dataclass(frozen=True)
class Incident:
    """Something that happened to a kernel; after `ready`, it should not have.

    Attributes:
        workload: The line of a shapes.json that would have warmed it; None where there is none.
    """

    time: str = ""
    kind: str = ""
    title: str = ""
    seconds: float = 0.0
    thread: str = ""
    after_ready: bool = False
    reason: str = ""
    workload: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Reading:
    """All that one agent said at one time."""

    process: Process = field(default_factory=Process)
    workload: tuple[Workload, ...] = ()
    jit: tuple[Factory, ...] = ()
    compile: Compile = field(default_factory=Compile)
    kernels: tuple[Kernel, ...] = ()
    restores: Latency = field(default_factory=Latency)
    compiles: Latency = field(default_factory=Latency)
    tilelang: tuple[InProcess, ...] = ()
    incidents: tuple[Incident, ...] = ()
    incidents_total: int = 0
    refusals: tuple[Refusal, ...] = ()

    @property
    def unseen(self) -> int:
        """Incidents that there were besides those that it tells: it tells the newest only."""
        compiled = sum(1 for one in self.incidents if one.after_ready and one.kind != "failed")
        listed = self.incidents_total - len(self.incidents)
        return max(0, listed, self.compile.after_ready - compiled)

    @property
    def hits(self) -> int:
        """Requests for a kernel that the process had in memory already."""
        return self.compile.memory + sum(row.hits for row in self.workload)


def read(document: Mapping[str, Any], pid: int) -> Reading:
    """The reading that an answer of `/v1/stats` makes.

    Args:
        document: The answer.
        pid: The process as the kernel says, which in a container counts otherwise than it does.
    """
    layers = _mapping(document.get("layers"))
    compiling = _mapping(layers.get("compile"))
    return Reading(
        _fitted(Process, {**_mapping(document.get("process")), "pid": pid}),
        _rows(Workload, layers.get("workload")),
        _rows(Factory, layers.get("jit")),
        _fitted(Compile, compiling),
        _rows(Kernel, compiling.get("kernels")),
        _fitted(Latency, compiling.get("restore_latency")),
        _fitted(Latency, compiling.get("compile_latency")),
        _rows(InProcess, layers.get("tilelang")),
        incidents(document.get("incidents")),
        _fit(document.get("incidents_total"), 0, "int"),
        _rows(Refusal, compiling.get("not_restored")),
    )


def incidents(rows: object) -> tuple[Incident, ...]:
    """The incidents among rows of `/v1/stats` or `/v1/events`, in their order."""
    return tuple(_fitted(Incident, row) for row in (rows if isinstance(rows, list) else ()))


def when(text: str) -> datetime | None:
    """A time that an agent says; None where it is none."""
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _rows(kind: type[_T], value: object) -> tuple[_T, ...]:
    return tuple(_fitted(kind, row) for row in value) if isinstance(value, list) else ()


def _fitted(kind: type[_T], value: object) -> _T:
    given = _mapping(value)
    return kind(**{
        one.name: _fit(given.get(one.name), one.default, str(one.type))
        for one in fields(kind)  # type: ignore[arg-type]
    })  # fmt: skip


_MOST = 2**63


def _fit(value: object, default: Any, kind: str) -> Any:
    """A value where it is of the field's type, else the default."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind.startswith("float"):
        sound = number and abs(value) < _MOST  # type: ignore[arg-type]
        return float(value) if sound else default  # type: ignore[arg-type]
    if kind.startswith("int"):
        return value if number and isinstance(value, int) and abs(value) < _MOST else default
    if kind.startswith("Mapping"):
        return value if isinstance(value, Mapping) else default
    return value if isinstance(value, bool if kind == "bool" else str) else default


# --- together ---


@dataclass(frozen=True)
class Group:
    """The processes of one server.

    Attributes:
        name: What its ranks have in common; empty for a process that is none's rank.
        readings: By rank.
    """

    name: str
    readings: tuple[Reading, ...]


def grouped(readings: Iterable[Reading]) -> list[Group]:
    """Processes by server: the ranks of one together, in the order of their ranks."""
    together: dict[str, list[Reading]] = {}
    for reading in readings:
        process = reading.process
        together.setdefault(process.group or f"{process.pid}", []).append(reading)
    groups = [
        Group(
            found[0].process.group,
            tuple(sorted(found, key=lambda one: (one.process.rank or 0, one.process.pid))),
        )
        for found in together.values()
    ]
    return sorted(
        groups, key=lambda group: (group.readings[0].process.name, group.readings[0].process.pid)
    )


# --- over time ---


@dataclass(frozen=True)
class Rates:
    """What happened between two readings, a second.

    Attributes:
        hits: Requests that were answered from memory.
        misses: Kernels that were restored, found on disk, or compiled.
        workload: Hits of layer 3, by key.
        jit: Hits and misses of layer 2, by factory.
    """

    hits: float
    misses: float
    workload: Mapping[str, float]
    jit: Mapping[str, float]


def rates(before: Reading | None, after: Reading, seconds: float) -> Rates | None:
    """What happened between two readings of one process; None where they are not of one."""
    if before is None or seconds <= 0 or before.process.started != after.process.started:
        return None

    def speed(then: int, now: int) -> float:
        return max(0, now - then) / seconds

    def came(one: Compile) -> int:
        return one.restored + one.disk + one.compiled

    def each(then: Sequence[tuple[str, int]], now: Sequence[tuple[str, int]]) -> dict[str, float]:
        known = dict(then)
        return {name: speed(known.get(name, 0), count) for name, count in now}

    return Rates(
        speed(before.hits, after.hits),
        speed(came(before.compile), came(after.compile)),
        each([(r.key, r.hits) for r in before.workload], [(r.key, r.hits) for r in after.workload]),
        each(
            [(row.factory, row.hits + row.misses) for row in before.jit],
            [(row.factory, row.hits + row.misses) for row in after.jit],
        ),
    )
