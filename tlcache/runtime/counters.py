"""Counts of what became of each request for a kernel. Plain numbers, changed under the resolver's
lock.
"""

from __future__ import annotations

from types import SimpleNamespace

__all__ = ["Counters"]


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
