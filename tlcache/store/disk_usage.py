"""What the things under a cache root take of the disk.

Invariant: a file with several names counts once, at the first of them in the order of their paths;
and with no filter the sum is what `du` says of the root, directories included.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from tlcache.store import layout, scan
from tlcache.store.entry import Entry
from tlcache.store.select import Filter

__all__ = ["Measured", "Usage", "measure"]

OWN, REST, UNKNOWN, UNRECORDED = "tlcache", "directories", "unknown", "no record"
_BLOCK = 512  # what st_blocks counts, on every system


class Usage(NamedTuple):
    """What some things take.

    Attributes:
        bytes: Of the disk.
        apparent: The sum of the files' sizes, each name counted.
        things: How many entries they are.
    """

    bytes: int = 0
    apparent: int = 0
    things: int = 0

    def plus(self, other: Usage) -> Usage:
        return Usage(*(a + b for a, b in zip(self, other, strict=True)))


class Measured:
    """Usages by the names of what they are of.

    Attributes:
        parts: The usage of each.
    """

    def __init__(self) -> None:
        self.parts: dict[str, Usage] = {}

    def add(self, name: str, usage: Usage) -> None:
        self.parts[name] = self.parts.get(name, Usage()).plus(usage)

    def total(self) -> Usage:
        total = Usage()
        for part in self.parts.values():
            total = total.plus(part)
        return total


def measure(root: str | os.PathLike[str], wanted: Filter | None = None) -> dict[str, Measured]:
    """Measure everything under a root, or what a filter selects.

    Returns:
        By `version`, `target`, `op` and `kind`: the usage of each of its values. An op is known of
        what has a record, and of the cuda-binaries that were made for it. What is no entry is
        `tlcache` (records and the like) or `directories`; only where nothing is filtered.
    """
    base = os.fspath(root)
    known = list(scan.scan(base))
    ops = {one.payload: one.record.name for one in known if one.record and one.payload}
    owners = {one.place.location: one for one in known if not wanted or wanted.matches(one)}
    told = {by: Measured() for by in ("version", "target", "op", "kind")}
    places = {path: path for path in owners}
    if not wanted:
        places |= {os.path.join(inner, "tlcache"): OWN for inner in layout.roots(base)}
    taken: dict[str, Usage] = {}
    rest = {OWN: Usage(), REST: Usage()}
    for owner, usage in _walk(base, places, REST if not wanted else None):
        of_whom = taken if owner in owners else rest
        of_whom[owner] = of_whom.get(owner, Usage()).plus(usage)
    for path, one in owners.items():
        usage = taken.get(path, Usage())._replace(things=1)
        told["version"].add(one.place.tilelang or UNKNOWN, usage)
        told["target"].add(one.target or UNKNOWN, usage)
        told["op"].add(_op(one, ops), usage)
        told["kind"].add(one.place.kind, usage)
    if not wanted:
        for name, usage in rest.items():
            if usage.bytes or usage.apparent:
                for measured in told.values():
                    measured.add(name, usage)
    return told


def _op(one: Entry, ops: dict[str, str]) -> str:
    if one.record is not None:
        return one.record.name
    return (ops.get(one.payload) if one.payload else None) or UNRECORDED


def _walk(base: str, owners: dict[str, str], nobody: str | None) -> Iterator[tuple[str, Usage]]:
    """Everything at a path and below it with its owner: that of the nearest path above it that has
    one, else `nobody`; what is nobody's is passed over where that is None. Links are not followed.
    """
    seen: set[tuple[int, int]] = set()
    places: list[tuple[str, str | None]] = [(base, nobody)]
    try:
        if nobody is not None:
            yield nobody, _usage(os.lstat(base), seen)
    except OSError:
        return
    while places:
        place, above = places.pop()
        try:
            with os.scandir(place) as items:
                found = sorted(items, key=lambda item: item.name)
        except OSError:
            continue
        below: list[tuple[str, str | None]] = []
        for item in found:
            owner = owners.get(item.path) or owners.get(item.path.removesuffix(".sha256"), above)
            try:
                status = item.stat(follow_symlinks=False)
            except OSError:
                continue  # it has vanished
            if stat.S_ISDIR(status.st_mode):
                below.append((item.path, owner))
            if owner is not None:
                yield owner, _usage(status, seen)
        places += reversed(below)


def _usage(status: os.stat_result, seen: set[tuple[int, int]]) -> Usage:
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
        inode = status.st_dev, status.st_ino
        if inode in seen:
            return Usage(0, size)
        seen.add(inode)
    return Usage(status.st_blocks * _BLOCK, size)
