"""Counts of what became of each request for a kernel: in all, by kernel, and how long it took.

Invariant: they are plain numbers, changed under the ledger's lock; to read them takes none.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Literal, NamedTuple

from tlcache.spec import KernelSpec

__all__ = ["Counters", "Held", "Ledger", "Outcome", "percentiles"]

RECENT = 1024
"""Durations of each kind that percentiles are taken of: the latest ones."""

Outcome = Literal["restored", "disk", "compiled", "failed"]


class Counters(SimpleNamespace):
    """Outcomes of `resolve`, one to a request.

    Attributes:
        memory: Answered from process memory.
        restored: Loaded from a record, without TileLang.
        disk: TileLang found its entry on disk, after elaborating the kernel; the record was
            missing.
        compiled: Compiled by TileLang in this process.
        failed: Neither.
        after_ready: Of `disk` and `compiled`, those after `mark_ready()`.
        restore_seconds: Spent on loading records' libraries.
        compile_seconds: Spent in TileLang, for `disk` and `compiled`.
        saved_seconds: What the restored kernels took to compile, by their records.
    """

    memory: int
    restored: int
    disk: int
    compiled: int
    failed: int
    after_ready: int
    restore_seconds: float
    compile_seconds: float
    saved_seconds: float

    def __init__(self) -> None:
        super().__init__(
            memory=0,
            restored=0,
            disk=0,
            compiled=0,
            failed=0,
            after_ready=0,
            restore_seconds=0.0,
            compile_seconds=0.0,
            saved_seconds=0.0,
        )


class Held(NamedTuple):
    """A kernel that this process has in memory.

    Attributes:
        title: The kernel for people.
        origin: `ops` for what `resolve` was asked for, `foreign` for what TileLang was.
        spec: The kernel, where it was named by a spec.
        outcome: `restored`, `disk` or `compiled`.
        entry: Its TileLang entry, relative to the cache root; None where it has none.
        seconds: What it took to have it.
        loaded: When it was there, in seconds since the epoch.
    """

    title: str
    origin: str
    spec: KernelSpec | None
    outcome: str
    entry: str | None
    seconds: float
    loaded: float


class Ledger:
    """What became of the requests to one resolver.

    Attributes:
        total: The counts of all kernels.
        kernels: The counts of each, by its factory's import path.
        restores: Seconds of the latest restores.
        compiles: Seconds of the latest compiles and disk hits.
        held: What is in memory, in the order of its coming.
    """

    def __init__(self) -> None:
        self.total = Counters()
        self.kernels: dict[str, Counters] = {}
        self.restores: deque[float] = deque(maxlen=RECENT)
        self.compiles: deque[float] = deque(maxlen=RECENT)
        self.held: list[Held] = []
        self._lock = threading.Lock()

    def remembered(self, kernel: str) -> None:
        """Count an answer from memory."""
        with self._lock:
            self.total.memory += 1
            self._of(kernel).memory += 1

    def add(
        self,
        kernel: str,
        outcome: Outcome,
        seconds: float,
        *,
        saved: float = 0.0,
        after_ready: bool = False,
    ) -> None:
        """Count an outcome.

        Args:
            kernel: The factory's import path.
            outcome: What became of the request.
            seconds: How long it took.
            saved: For a restore, what its compile took.
            after_ready: Whether the process had been marked ready.
        """
        with self._lock:
            for counters in (self.total, self._of(kernel)):
                setattr(counters, outcome, getattr(counters, outcome) + 1)
                if outcome == "restored":
                    counters.restore_seconds += seconds
                    counters.saved_seconds += saved
                elif outcome != "failed":
                    counters.compile_seconds += seconds
                    counters.after_ready += after_ready
            if outcome == "restored":
                self.restores.append(seconds)
            elif outcome != "failed":
                self.compiles.append(seconds)

    def hold(
        self,
        title: str,
        outcome: Outcome,
        seconds: float,
        *,
        origin: str = "ops",
        spec: KernelSpec | None = None,
        entry: str | None = None,
    ) -> None:
        """Note that a kernel is in memory from now on; see `Held`."""
        self.held.append(Held(title, origin, spec, outcome, entry, seconds, time.time()))

    def _of(self, kernel: str) -> Counters:
        found = self.kernels.get(kernel)
        if found is None:
            found = self.kernels[kernel] = Counters()
        return found


def percentiles(seconds: Iterable[float]) -> dict[str, float] | None:
    """The count, median, 90th and 99th percentile (nearest rank) and greatest of durations; None
    where there are none.
    """
    ordered = sorted(seconds)
    if not ordered:
        return None

    def rank(share: float) -> float:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 6)

    return {
        "count": len(ordered),
        "p50": rank(0.5),
        "p90": rank(0.9),
        "p99": rank(0.99),
        "max": rank(1.0),
    }
