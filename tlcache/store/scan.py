"""Scanning: everything under a cache root, each thing with its facts and its record.

What an entry's files and records tell is read once, and then taken from the scan cache while those
files are as they were. So a first listing of 60,000 entries takes some seconds, and the next ones
little more than the time to look at all files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from tlcache.store import entry, layout, record
from tlcache.store.entry import Entry, Facts, Listing
from tlcache.store.filings import Filing, Filings
from tlcache.store.layout import EntryPlace
from tlcache.store.record import Record
from tlcache.store.scan_cache import ScanCache

__all__ = ["kernels", "look", "record_of", "scan", "scan_all", "sound"]


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
    root: str | os.PathLike[str],
    filings: dict[str, Filings] | None = None,
    unreadable: set[str] | None = None,
) -> Iterator[Entry]:
    """Everything at a root and in the roots below it, whoever wrote it; see `layout.places`.

    Reads only. What vanishes meanwhile is an entry of which nothing is known.

    Args:
        root: A cache root, or a directory of some.
        filings: Where to put the records of each root, for who needs them besides.
        unreadable: Where to put the locations of what could not be read.
    """
    base = os.fspath(root)
    with ScanCache.opened(base) as cache:
        for inner in layout.roots(base):
            filed = Filings(inner, cache)
            if filings is not None:
                filings[inner] = filed
            for place in layout.places_in(inner, nested=inner != base):
                yield _entry(place, cache, filed, unreadable)


def scan_all(roots: Iterable[str | os.PathLike[str]]) -> Iterator[Entry]:
    """The same for the roots in force, in their order; what several of them have comes as often."""
    for root in roots:
        yield from scan(root)


def look(
    place: EntryPlace,
    filings: Filings,
    known: Entry | None = None,
    unreadable: set[str] | None = None,
) -> Entry | None:
    """One thing, as a scan would find it now.

    Args:
        place: Where it lies.
        filings: The records of its root.
        known: What it was; while it has the same files, of the same size, those are not read again.
        unreadable: As for `scan`; what can be read is taken out of it.

    Returns:
        None where there is nothing any more.
    """
    found = entry.listing(place)
    if found.created is None:
        return None
    filed, called = filings.newest(place.location), filings.called(place.location)
    if known is not None and known.place == place:
        same = entry.made(place, found, known.facts, known.payload, filed, called)
        if (same.library, same.bytes, same.created) == (known.library, known.bytes, known.created):
            return known if same == known else same
    facts, payload, sound = entry.facts_of(place, found)
    if unreadable is not None:
        (unreadable.discard if sound else unreadable.add)(place.location)
    return entry.made(place, found, facts, payload, filed, called)


def _entry(
    place: EntryPlace, cache: ScanCache, filings: Filings, unreadable: set[str] | None
) -> Entry:
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
    elif unreadable is not None:
        unreadable.add(place.location)
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
