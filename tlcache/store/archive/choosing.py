"""What of a cache root an export means: TileLang's things, and the keys of records.

Invariant: reads only. Chosen are kernels, results of TileLang's tuner and cuda-binaries of one
root; roots below it, front-end indexes, staging leftovers and unknown things are not.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tlcache.errors import MissError
from tlcache.store import layout
from tlcache.store.archive import packing
from tlcache.store.archive.shard import Part
from tlcache.store.layout import EntryPlace

if TYPE_CHECKING:
    from tlcache.store.entry import Entry  # what it needs takes a third of an export's start
    from tlcache.store.select import Filter

__all__ = ["Choice", "by_filter", "by_keys", "everything"]

_KINDS = ("kernel", "autotuner", "cuda-binary")
_SOURCE = "device_kernel.cu"


@dataclass(frozen=True)
class Choice:
    """What to export.

    Attributes:
        root: The cache root.
        places: TileLang's things, in the order of their paths.
        keys: The action keys of the records that may go along; None for all.
        asked: The specs that a shapes file named, for the index's coverage; None without one.
        part: Which shard of a warm it is, for the coverage, too; None where it is none.
    """

    root: str
    places: tuple[EntryPlace, ...]
    keys: frozenset[str] | None = None
    asked: int | None = None
    part: Part | None = None


def everything(root: str) -> Choice:
    """All that a root holds."""
    return Choice(root, _sorted(layout.places_in(root)))


def by_filter(root: str, wanted: Filter) -> Choice:
    """The things that a filter selects, with the cuda-binaries of its kernels."""
    found = _scanned(root)
    return Choice(root, _joined(list(wanted.select(found)), found))


def by_keys(root: str, keys: Collection[str], wanted: Filter | None = None) -> Choice:
    """The kernels of some records, with their cuda-binaries; and the same kernels under other keys
    of TileLang's, which have no records, as a warm leaves them for programs without hooks.

    Args:
        root: The cache root.
        keys: Action keys of records; each has to be there, with the library that it tells of.
        wanted: What the kernels have to be besides.

    Raises:
        MissError: One is not there.
    """
    from tlcache.store import record

    entries = set()
    for key in keys:
        filed = record.read(root, key)
        if filed is None or record.sound_library(root, filed) is None:
            raise MissError(
                f"the kernel {key[:12]} is not in {root}", hint="`tlcache warm` compiles it"
            )
        entries.add(os.path.join(root, os.path.normpath(filed.entry)))
    found = _scanned(root)
    some = [one for one in found if one.place.location in entries]
    same = {code for one in some if (code := _code(one)) is not None}
    some += [
        one
        for one in found
        if one.place.kind == "kernel" and one.record is None and _code(one) in same
    ]
    places = _joined(list(wanted.select(some)) if wanted else some, found)
    return Choice(root, places, frozenset(keys), len(keys))


def _scanned(root: str) -> list[Entry]:
    from tlcache.store import scan

    return [one for one in scan.scan(root) if layout.root_of(root, one.place) == root]


def _code(one: Entry) -> tuple[str | None, str | None, str | bytes] | None:
    """What a kernel is by its device code, else by its source; None where it tells neither."""
    told: str | bytes | None = one.payload
    if told is None:
        try:
            told = packing.read(os.path.join(one.place.location, _SOURCE))
        except OSError:
            return None
    return one.place.tilelang, one.place.platform, told


def _joined(some: list[Entry], found: list[Entry]) -> tuple[EntryPlace, ...]:
    from tlcache.store import entry

    binaries = entry.cuda_binaries(found)
    places = {one.place.location: one.place for one in some}
    for one in some:
        if one.place.kind == "kernel" and one.payload is not None:
            for binary in binaries.get(one.payload, ()):
                places[binary.place.location] = binary.place
    return _sorted(places.values())


def _sorted(places: Iterable[EntryPlace]) -> tuple[EntryPlace, ...]:
    kept = (place for place in places if place.kind in _KINDS)
    return tuple(sorted(kept, key=lambda place: place.location))
