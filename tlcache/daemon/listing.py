"""Pages of entries: which ones, in which order, and from where on.

A page ends with a cursor that holds the sort key of its last entry; the next one begins behind it.
So entries that come and go between two pages shift no other out of them.

Invariant: entries are in one total order for each sort. Any text is a cursor, or a refusal.
"""

from __future__ import annotations

import base64
import binascii
import heapq
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tlcache.daemon.api import Refused
from tlcache.store import select
from tlcache.store.described import KINDS
from tlcache.store.entry import Entry

__all__ = ["SORTS", "Page", "filtered", "page"]

Key = tuple[Any, str]

SORTS: dict[str, Callable[[Entry], Any]] = {
    "key": lambda one: one.place.key,
    "kernel": lambda one: one.kernel or "",
    "target": lambda one: one.target or "",
    "tilelang": lambda one: one.place.tilelang or "",
    "size": lambda one: -one.bytes,
    "used": lambda one: -one.last_used.timestamp() if one.last_used else 0.0,
    "created": lambda one: -one.created.timestamp() if one.created else 0.0,
}
"""By which entries are ordered; the largest and the newest first."""


class Page(NamedTuple):
    """Some entries.

    Attributes:
        entries: They, in order.
        next: The cursor of the next page; None where this is the last one.
        total: How many are selected in all.
        bytes: Their bytes.
    """

    entries: list[Entry]
    next: str | None
    total: int
    bytes: int


def filtered(query: Mapping[str, Any]) -> select.Filter:
    """The filter that parameters make, which are those of `tlcache ls`.

    Raises:
        UsageError: One of them means nothing.
    """
    older, unused, larger = query["older_than"], query["unused_for"], query["larger_than"]
    return select.Filter(
        targets=tuple(query["target"]),
        ops=tuple(query["op"]),
        kernels=tuple(query["kernel"]),
        tilelang=query["tilelang"],
        toolkit=query["toolkit"],
        older_than=select.age(older) if older is not None else None,
        unused_for=select.age(unused) if unused is not None else None,
        larger_than=select.bytes_of(larger) if larger is not None else None,
        no_record=query["no_record"],
    )


def page(
    entries: Iterable[Entry],
    sort: str,
    limit: int,
    cursor: str | None,
    kinds: tuple[str, ...] = (),
) -> Page:
    """One page of entries.

    Args:
        entries: All that are selected, in any order.
        sort: One of `SORTS`.
        limit: So many at most.
        cursor: Where the page before ended.
        kinds: Only things of these kinds.

    Raises:
        Refused: The cursor is none, or is one of another sort.
    """
    start = _read(cursor, sort) if cursor is not None else None
    by = SORTS[sort]

    def key(one: Entry) -> Key:
        return by(one), one.place.location

    found = [one for one in entries if not kinds or _kind(one) in kinds]
    behind = found if start is None else [one for one in found if key(one) > start]
    some = heapq.nsmallest(limit + 1, behind, key=key)
    more = _written(key(some[limit - 1]), sort) if len(some) > limit else None
    return Page(some[:limit], more, len(found), sum(one.bytes for one in found))


def _kind(one: Entry) -> str:
    return KINDS.get(one.place.kind, one.place.kind)


def _written(key: Key, sort: str) -> str:
    text = json.dumps([sort, *key])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read(cursor: str, sort: str) -> Key:
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        text = base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True)
        found = json.loads(text)
    except (ValueError, RecursionError, binascii.Error):
        found = None
    number = sort in ("size", "used", "created")
    if (
        not isinstance(found, list)
        or len(found) != 3
        or found[0] != sort
        or isinstance(found[1], bool)
        or not isinstance(found[1], (int, float) if number else str)
        or not isinstance(found[2], str)
    ):
        raise Refused(
            400, f"cursor is none of this listing sorted by {sort}", "begin without a cursor"
        )
    return found[1], found[2]
