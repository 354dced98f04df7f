"""What happened to kernels in this process, the last 256 things of it.

Invariant: to note an event takes no lock and a few microseconds; whatever has to be looked up is
looked up by whoever reads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, Literal, NamedTuple

from tlcache.operators import shapes_entry
from tlcache.runtime.process import place, process
from tlcache.spec import KernelSpec

__all__ = ["INCIDENTS", "Event", "Kind", "Log", "Origin", "iso", "log"]

KEPT = 256
"""Events that are kept; older ones go."""

Kind = Literal["restored", "disk", "compiled", "failed", "ready"]
Origin = Literal["ops", "foreign"]
INCIDENTS = frozenset({"disk", "compiled", "failed"})
"""Kinds of which one after ready is an incident."""


class Event(NamedTuple):
    """Something that happened.

    Attributes:
        when: In seconds since the epoch.
        kind: `restored`, `disk`, `compiled` or `failed`: what became of a kernel; or `ready`.
        title: The kernel for people, like `rms_norm M=1 N=4096 bf16 sm_90a`.
        seconds: How long it took.
        thread: The name of the thread that it happened in.
        after_ready: Whether the process had been marked ready.
        origin: `ops` for what `resolve` was asked for, `foreign` for what TileLang was.
        spec: The kernel, where it was named by a spec.
        workload: The entry of a shapes.json that would have warmed it, where the caller knows it.
        reason: Why it failed.
    """

    when: float
    kind: Kind
    title: str
    seconds: float
    thread: str
    after_ready: bool
    origin: Origin
    spec: KernelSpec | None
    workload: Mapping[str, Any] | None
    reason: str | None

    @property
    def incident(self) -> bool:
        """Whether a process that serves should not have had to do this."""
        return self.after_ready and self.kind in INCIDENTS

    def to_json(self) -> dict[str, Any]:
        """The event as JSON values, with what its spec tells."""
        workload = self.workload
        if workload is None and self.spec is not None:
            workload = shapes_entry(self.spec)
        return {
            "time": iso(self.when),
            "kind": self.kind,
            "title": self.title,
            "seconds": round(self.seconds, 6),
            "thread": self.thread,
            "rank": place().rank,
            "after_ready": self.after_ready,
            "origin": self.origin,
            "spec": None if self.spec is None else self.spec.to_json(),
            "workload": workload,
            "reason": self.reason,
        }


class Log:
    """The last events, oldest first."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEPT)

    def note(
        self,
        kind: Kind,
        title: str,
        *,
        seconds: float = 0.0,
        spec: KernelSpec | None = None,
        origin: Origin = "ops",
        workload: Mapping[str, Any] | None = None,
        reason: str | None = None,
    ) -> None:
        """Note that something happened just now, in this thread. See `Event`."""
        thread = threading.current_thread().name
        self._events.append(
            Event(
                *(time.time(), kind, title, seconds, thread, process.ready),
                *(origin, spec, workload, reason),
            )
        )

    def all(self) -> list[Event]:
        """The events, oldest first."""
        return list(self._events)


log = Log()
"""The events of this process."""


def iso(when: float) -> str:
    """A time since the epoch as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(when, timezone.utc).isoformat(timespec="milliseconds")
