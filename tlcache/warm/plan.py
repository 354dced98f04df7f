"""What a warm has to do: which kernels have a valid record, and which must be compiled.

Invariant: planning writes nothing and imports neither torch nor TileLang.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tlcache.store import record
from tlcache.warm import toolchain
from tlcache.warm.outcome import Outcome
from tlcache.warm.shapes import Wanted

__all__ = ["Item", "make", "without_toolchain"]


@dataclass
class Item:
    """One kernel of a plan.

    Attributes:
        wanted: What was asked for.
        action_key: Its record's key.
        outcome: What became of it; None while it has to be compiled.
    """

    wanted: Wanted
    action_key: str
    outcome: Outcome | None = None


def make(wanted: Iterable[Wanted], root: Path) -> list[Item]:
    """Look up every kernel. What is present, or cannot be compiled here, has its outcome
    already.
    """
    items = []
    for one in wanted:
        item = Item(one, one.spec.action_key())
        found = record.read(root, item.action_key, spec=one.spec)
        if found is not None and record.present(root, found, one.key):
            item.outcome = Outcome("present", saved_seconds=found.compile_seconds)
        items.append(item)
    return items


def without_toolchain(items: Iterable[Item]) -> None:
    """Settle the kernels that no compiler here can make."""
    for item in items:
        if item.outcome is None and (fault := toolchain.missing(item.wanted.spec.target)):
            item.outcome = Outcome("failed", error=fault.message, hint=fault.hint, fault=True)
