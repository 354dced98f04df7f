"""Which part of a warm an archive holds, as its index tells it; and what a gathering of such parts
lacks.

Invariant: what an index tells is believed only where it can be so, and leads to words, never to
what is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tlcache.store.archive.index import Index

__all__ = ["Lack", "Part", "lacking", "part_of"]

_DEAL = re.compile(r"[0-9a-f]{64}")
_MOST = 10_000_000
_MOST_SHARDS = 10_000


class Part(NamedTuple):
    """A shard of a warm.

    Attributes:
        number: Which one, from 1.
        total: Of how many.
        deal: The sha256 that all shards of one deal tell.
        kernels: How many kernels the shard has; the archive may hold fewer.
    """

    number: int
    total: int
    deal: str
    kernels: int

    @property
    def file(self) -> str:
        """The name of the archive's file: that of no other shard, and always this."""
        width = len(str(self.total))
        return f"shard-{self.number:0{width}d}-of-{self.total}-{self.deal[:12]}.tar.zst"


class Lack(NamedTuple):
    """What the gathered shards of one deal lack.

    Attributes:
        deal: Its sha256.
        total: How many shards it has.
        absent: The shards that were not gathered.
        short: By the shards that hold not all of their kernels: how many they lack.
    """

    deal: str
    total: int
    absent: tuple[int, ...]
    short: Mapping[int, int]


def part_of(index: Index) -> Part | None:
    """What shard an archive is; None where it is none, or tells it in no way that could be."""
    told = index.coverage.get("shard")
    if not isinstance(told, dict):
        return None
    numbers: list[Any] = [told.get(name) for name in ("number", "total", "kernels")]
    deal = told.get("deal")
    if not all(type(each) is int and 0 <= each <= _MOST for each in numbers):
        return None
    if not isinstance(deal, str) or not _DEAL.fullmatch(deal):
        return None
    number, total, kernels = numbers
    return Part(number, total, deal, kernels) if 1 <= number <= total <= _MOST_SHARDS else None


def lacking(indexes: Iterable[Index]) -> list[Lack]:
    """What is not there of each deal of which there is a shard, in the order of the deals."""
    gathered: dict[tuple[str, int], dict[int, int]] = {}
    for index in indexes:
        if (part := part_of(index)) is not None:
            shards = gathered.setdefault((part.deal, part.total), {})
            short = max(part.kernels - len(index.records), 0)
            shards[part.number] = min(short, shards.get(part.number, short))
    lacks = []
    for (deal, total), shards in sorted(gathered.items()):
        absent = tuple(number for number in range(1, total + 1) if number not in shards)
        short_of = {number: short for number, short in sorted(shards.items()) if short}
        if absent or short_of:
            lacks.append(Lack(deal, total, absent, short_of))
    return lacks
