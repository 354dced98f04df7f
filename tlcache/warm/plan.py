"""What a warm has to do: which kernels have a valid record, and which must be compiled.

Invariant: planning writes nothing and imports neither torch nor TileLang.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tlcache import operators
from tlcache.store import calls, record
from tlcache.store.record import Record
from tlcache.warm import toolchain
from tlcache.warm.outcome import Outcome
from tlcache.warm.shapes import Wanted

__all__ = ["Item", "look", "make", "without_toolchain"]


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


def make(wanted: Iterable[Wanted], roots: Sequence[Path]) -> list[Item]:
    """Look up every kernel in the roots in force. What is present has its outcome already."""
    items = [Item(one, one.spec.action_key()) for one in wanted]
    look(items, roots)
    return items


def look(items: Iterable[Item], roots: Sequence[Path]) -> None:
    """Settle the kernels that are there, of those that are not settled yet."""
    for item in items:
        own = not operators.owns(item.wanted.spec.kernel)
        for root in roots if item.outcome is None else ():
            found = record.read(root, item.action_key, spec=item.wanted.spec)
            there = found is not None and record.present(root, found, item.wanted.key)
            if own:
                item.outcome = _own(item, root, found if there else None)
            elif there and found is not None:
                item.outcome = Outcome("present", saved_seconds=found.compile_seconds, way="record")
            if item.outcome is not None:
                break


def _own(item: Item, root: Path, found: Record | None) -> Outcome | None:
    """What of a program's own kernel is in a root: with what a warm came to, if one did."""
    warmed = calls.read_warmed(os.fspath(root), item.action_key)
    if warmed is not None and item.wanted.key in (None, os.path.basename(warmed.entry)):
        there = warmed.call is None or calls.is_sound(root, warmed.call)
        if there and (found is not None or record.sound_library(root, warmed) is not None):
            return Outcome(
                "present",
                saved_seconds=warmed.compile_seconds,
                entry=None if found is not None else warmed.entry,
                way="tilelang" if warmed.call is None else "call",
                reason=warmed.reason,
            )
        if not there:
            return None
    if found is None:
        return None
    return Outcome("present", saved_seconds=found.compile_seconds)


def without_toolchain(items: Iterable[Item]) -> None:
    """Settle the kernels that no compiler here can make."""
    for item in items:
        if item.outcome is None and (fault := toolchain.missing(item.wanted.spec.target)):
            item.outcome = Outcome("failed", error=fault.message, hint=fault.hint, fault=True)
