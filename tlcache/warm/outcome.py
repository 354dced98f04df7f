"""What became of one kernel of a warm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Outcome", "Status"]

Status = Literal["compiled", "present", "unrecorded", "failed", "missing", "planned", "same"]


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel.

    Attributes:
        status: `compiled`; `present`: it has a valid record; `unrecorded`: it is in TileLang's own
            cache, but no record can be made for its kind; `failed`; `missing` (with `--check`);
            `planned` (a dry run); `same`: its replay asks TileLang for the key that was recorded.
        seconds: What the compile took.
        saved_seconds: What the next start saves.
        bytes: Size of the entry that was written.
        error: Why it failed, in one line.
        hint: What to do about that.
        fault: The machine failed (no compiler, disk full), not the kernel.
    """

    status: Status
    seconds: float = 0.0
    saved_seconds: float = 0.0
    bytes: int = 0
    error: str | None = None
    hint: str | None = None
    fault: bool = False
