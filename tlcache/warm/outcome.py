"""What became of one kernel of a warm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Outcome", "Status", "Way"]

Status = Literal["compiled", "present", "unrecorded", "failed", "missing", "planned", "same"]

Way = Literal["record", "call", "tilelang"]
"""How a process gets a kernel: by its record, or by what its call means, both without tracing it;
or from TileLang's own cache, after that."""


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel.

    Attributes:
        status: `compiled`; `present`: it is there already; `unrecorded`: it is in TileLang's own
            cache, and nothing can be filed by which it would be restored; `failed`; `missing` (with
            `--check`); `planned` (a dry run); `same`: its replay asks TileLang for the key that was
            recorded.
        seconds: What the compile took.
        saved_seconds: What the next start saves.
        bytes: Size of the entry that was written.
        error: Why it failed, in one line.
        hint: What to do about that.
        fault: The machine failed (no compiler, disk full), not the kernel.
        entry: TileLang's entry, relative to the root, of a kernel without a record.
        way: How a process gets it, of a kernel that is there.
        reason: Why that is not by what it means.
    """

    status: Status
    seconds: float = 0.0
    saved_seconds: float = 0.0
    bytes: int = 0
    error: str | None = None
    hint: str | None = None
    fault: bool = False
    entry: str | None = None
    way: Way | None = None
    reason: str | None = None
