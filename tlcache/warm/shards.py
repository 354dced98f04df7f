"""The kernels of a warm dealt to hosts that do not talk to each other.

Invariant: who deals the same kernels by the same seconds deals alike, whatever their order and
whatever his own root holds; each kernel is in exactly one shard. A deal has a name, so that shards
of different deals are told apart when they are gathered.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tlcache.errors import UsageError

__all__ = ["MOST", "Deal", "Shard", "deal", "parse"]

MOST = 10_000
"""Shards that a warm may have; more is a slip of the pen."""


class Shard(NamedTuple):
    """One of the shards of a warm.

    Attributes:
        number: Which one, from 1.
        total: Of how many.
    """

    number: int
    total: int

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


class Deal(NamedTuple):
    """Which kernels are whose.

    Attributes:
        name: The sha256 of the deal.
        shard_of: The number of its shard for each action key, from 1.
        seconds: What each shard is expected to compile, one after the other; in order. In kernels
            where no seconds are known.
    """

    name: str
    shard_of: Mapping[str, int]
    seconds: tuple[float, ...]


def parse(text: str) -> Shard:
    """Read a shard like `2/8`.

    Raises:
        UsageError: It is none.
    """
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is no shard", hint="`--shard 2/8` is the second of eight; or `--shard auto`"
        )
    number, total = int(match[1]), int(match[2])
    if not 1 <= total <= MOST:
        raise UsageError(
            f"{text} asks for {total:,} shards", hint=f"a warm has at least 1 and at most {MOST:,}"
        )
    if not 1 <= number <= total:
        raise UsageError(
            f"there is no shard {number} of {total}",
            hint=f"they count from 1: `--shard 1/{total}` to `--shard {total}/{total}`",
        )
    return Shard(number, total)


def deal(keys: Iterable[str], total: int, seconds: Mapping[str, float]) -> Deal:
    """Deal kernels to shards: the longest first, each to the shard that has the least by then.

    Args:
        keys: Their action keys.
        total: How many shards there are.
        seconds: What compiling each takes, as far as it is known; the others count as their mean,
            and all alike where none is known.
    """
    ordered = sorted(set(keys))
    known = {key: round(seconds[key] * 1000) for key in ordered if key in seconds}
    mean = max(round(sum(known.values()) / len(known)), 1) if known else 1000
    cost = {key: max(known.get(key, mean), 1) for key in ordered}
    shards = [(0, 0, number) for number in range(1, total + 1)]
    shard_of = {}
    for key in sorted(ordered, key=lambda key: (-cost[key], key)):
        load, kernels, number = shards[0]
        heapq.heapreplace(shards, (load + cost[key], kernels + 1, number))
        shard_of[key] = number
    loads = {number: load for load, _, number in shards}
    lines = [f"{key} {shard_of[key]}\n" for key in ordered]
    digest = hashlib.sha256("".join([f"{total}\n", *lines]).encode())
    return Deal(
        digest.hexdigest(), shard_of, tuple(loads[number] / 1000 for number in range(1, total + 1))
    )
