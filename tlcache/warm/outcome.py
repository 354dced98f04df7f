"""What became of one kernel of a warm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Asked", "Outcome", "Status", "Way", "Work"]

Status = Literal[
    "compiled", "present", "unrecorded", "failed", "missing", "planned", "same", "asked"
]

Way = Literal["record", "call", "tilelang"]
"""How a process gets a kernel: by its record, or by what its call means, both without tracing it;
or from TileLang's own cache, after that."""

Work = Literal["compile", "compare", "ask"]
"""What a worker does: compile; see whether a replay comes to a key; find the call of a replay."""


class Asked(NamedTuple):
    """What a program's own call is asked for by.

    Attributes:
        key: The call's key; None where it cannot be restored.
        reason: Why it cannot.
        front: The key of how its function is called.
        styled: Whether that has to be known, too.
        kernel: What made it, like `package.module:factory`.
        made_of: What its key is made of, as `Answer.ingredients`.
        recorded: Whether it means the very kernel that was recorded.
    """

    key: str | None = None
    reason: str | None = None
    front: str = ""
    styled: bool = False
    kernel: str = ""
    made_of: Mapping[str, str] = {}
    recorded: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel.

    Attributes:
        status: `compiled`; `present`: it is there already; `unrecorded`: it is in TileLang's own
            cache, and nothing can be filed by which it would be restored; `failed`; `missing` (with
            `--check`); `planned` (a dry run); `same`: its replay asks TileLang for the key that was
            recorded; `asked`: its call is told.
        seconds: What the compile took.
        saved_seconds: What the next start saves.
        bytes: Size of the entry that was written.
        error: Why it failed, in one line.
        hint: What to do about that.
        fault: The machine failed (no compiler, disk full), not the kernel.
        entry: TileLang's entry, relative to the root, of a kernel without a record.
        way: How a process gets it, of a kernel that is there.
        reason: Why that is not by what it means.
        asked: Its call.
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
    asked: Asked | None = None
