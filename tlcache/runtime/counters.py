"""Counts of what became of each request for a kernel. Plain numbers, changed under the resolver's
lock.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counters"]


@dataclass
class Counters:
    """Outcomes of `resolve`, one to a request.

    Attributes:
        memory: Answered from process memory.
        restored: Loaded from a record, without TileLang.
        disk: TileLang found its entry on disk, after elaborating the kernel; the record was
            missing.
        compiled: Compiled by TileLang in this process.
        failed: Neither.
        restore_seconds: Spent on loading records' libraries.
        compile_seconds: Spent in TileLang, for `disk` and `compiled`.
        saved_seconds: What the restored kernels took to compile, by their records.
    """

    memory: int = 0
    restored: int = 0
    disk: int = 0
    compiled: int = 0
    failed: int = 0
    restore_seconds: float = 0.0
    compile_seconds: float = 0.0
    saved_seconds: float = 0.0
