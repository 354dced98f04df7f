"""Scanning: everything under a cache root, each thing with its facts and its record.

What an entry's files and records tell is read once, and then taken from the scan cache while those
files are as they were. So a first listing of 60,000 entries takes some seconds, and the next ones
little more than the time to look at all files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from tlcache.store import entry, layout, record
from tlcache.store.entry import Entry, Facts, Listing
from tlcache.store.filings import Filing, Filings
from tlcache.store.layout import EntryPlace
from tlcache.store.record import Record
from tlcache.store.scan_cache import ScanCache

__all__ = ["kernels", "record_of", "scan", "sound"]


def kernels(root: str | os.PathLike[str]) -> Iterator[Entry]:
    """All kernel entries at a root."""
    return (one for one in scan(root) if one.place.kind == "kernel")


def record_of(one: Entry) -> Record | None:
    """The record that a scan found for an entry, whole; None where it has none, or it is gone."""
    if one.record is None:
        return None
    return record.read(_home(one.place, one.record), one.record.action_key)


def sound(one: Entry) -> bool:
    """Whether an entry has a record, and its library is what that says."""
    found = record_of(one)
    if one.record is None or found is None:
        return False
    return record.sound_library(_home(one.place, one.record), found) is not None


def _home(place: EntryPlace, filing: Filing) -> str:
    """The root that a record is in: it names its entry from there."""
    return os.path.abspath(place.location).removesuffix(filing.entry)


def scan(
    root: str | os.PathLike[str], filings: dict[str, Filings] | None = None
) -> Iterator[Entry]:
    """Everything at a root and in the roots below it, whoever wrote it; see `layout.places`.

    Reads only. What vanishes meanwhile is an entry of which nothing is known.

    Args:
        root: A cache root, or a directory of some.
        filings: Where to put the records of each root, for who needs them besides.
    """
    base = os.fspath(root)
    with ScanCache.opened(base) as cache:
        for inner in layout.roots(base):
            filed = Filings(inner, cache)
            if filings is not None:
                filings[inner] = filed
            for place in layout.places_in(inner, nested=inner != base):
                yield _entry(place, cache, filed)


def _entry(place: EntryPlace, cache: ScanCache, filings: Filings) -> Entry:
    known = cache.get(place.location)
    if known is None:
        found = entry.listing(place)
    else:
        found = entry.listing(place, known.directory, known.names)
    filed, called = filings.newest(place.location), filings.called(place.location)
    stamp = found.stamp()
    if not stamp:
        return entry.made(place, found, _NOTHING, None, filed, called)
    if known is not None and known.stamp == stamp:
        facts = cache.facts(known)
        if facts is not None:
            if known.directory != found.directory:
                _keep(cache, place, found, stamp, facts, known.payload)
            return entry.made(place, found, facts, known.payload, filed, called)
    facts, payload, sound = entry.facts_of(place, found)
    if sound:
        _keep(cache, place, found, stamp, facts, payload)
    return entry.made(place, found, facts, payload, filed, called)


_NOTHING = Facts()


def _keep(
    cache: ScanCache,
    place: EntryPlace,
    found: Listing,
    stamp: bytes,
    facts: Facts,
    payload: str | None,
) -> None:
    changed = max(found.newest(), found.created or 0.0)
    cache.put(place.location, found.directory, found.names, stamp, facts, payload, changed)
