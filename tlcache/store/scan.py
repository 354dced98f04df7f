"""Scanning: everything under a cache root, each thing with its facts and its record.

The facts of an entry are read from its files once, and then taken from the scan cache while those
files are as they were. So a first listing of 60,000 entries takes some seconds, and the next ones
little more than the time to look at all files.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator

from tlcache.store import entry, files, layout, record
from tlcache.store.entry import Entry, Facts, Listing
from tlcache.store.layout import EntryPlace
from tlcache.store.record import Record
from tlcache.store.scan_cache import ScanCache

__all__ = ["kernels", "records", "scan"]

_SETTLED = 2.0  # seconds: a file that is younger may change again and keep its time


def kernels(root: str | os.PathLike[str]) -> Iterator[Entry]:
    """All kernel entries at a root."""
    return (one for one in scan(root) if one.place.kind == "kernel")


def scan(root: str | os.PathLike[str]) -> Iterator[Entry]:
    """Everything at a root and in the roots below it, whoever wrote it; see `layout.places`.

    Reads only. What vanishes meanwhile is an entry of which nothing is known.
    """
    base = os.fspath(root)
    with ScanCache.opened(base) as cache:
        for inner in layout.roots(base):
            filed, used = records(inner)
            for place in layout.places_in(inner, nested=inner != base):
                one = _entry(place, cache)
                if filed:
                    one = _with_record(one, filed, used, inner)
                yield one


def _entry(place: EntryPlace, cache: ScanCache) -> Entry:
    known = cache.get(place.location)
    if known is None:
        found = entry.listing(place)
    else:
        found = entry.listing(place, known.directory, known.names)
    stamp = found.stamp()
    if not stamp:
        return entry.made(place, found, _NOTHING, None)
    if known is not None and known.stamp == stamp:
        facts = cache.facts(known)
        if facts is not None:
            if known.directory != found.directory:
                _keep(cache, place, found, stamp, facts, known.payload)
            return entry.made(place, found, facts, known.payload)
    facts, payload, sound = entry.facts_of(place, found)
    if sound:
        _keep(cache, place, found, stamp, facts, payload)
    return entry.made(place, found, facts, payload)


_NOTHING = Facts()


def _keep(
    cache: ScanCache,
    place: EntryPlace,
    found: Listing,
    stamp: bytes,
    facts: Facts,
    payload: str | None,
) -> None:
    """Keep facts, unless a file is so young that it may change again without a trace."""
    if max(found.newest(), found.created or 0.0) < time.time() - _SETTLED:
        cache.put(place.location, found.directory, found.names, stamp, facts, payload)


def _with_record(one: Entry, filed: dict[str, Record], used: dict[str, float], root: str) -> Entry:
    name = os.path.relpath(one.place.location, root)
    known = filed.get(name)
    if known is None:
        return one
    last = entry.utc(used[name])
    if last is None or (one.last_used is not None and last < one.last_used):
        last = one.last_used
    return dataclasses.replace(one, record=known, last_used=last)


def records(root: str) -> tuple[dict[str, Record], dict[str, float]]:
    """The records of a root by the entries that they point at, the newest of each; and when one of
    them was last used, in seconds since 1970.
    """
    filed: dict[str, Record] = {}
    used: dict[str, float] = {}
    for path in layout.records(root):
        try:
            found = record.parse(files.read(os.fspath(path), unseen=True), path)
            last = path.stat().st_mtime
        except OSError:
            continue
        if found is not None and found.action_key == path.stem:
            used[found.entry] = max(last, used.get(found.entry, last))
            older = filed.get(found.entry)
            if older is None or older.created < found.created:
                filed[found.entry] = found
    return filed, used
