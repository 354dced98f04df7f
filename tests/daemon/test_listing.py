from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlcache.daemon import listing
from tlcache.daemon.api import Refused
from tlcache.store import scan


def _all(entries, sort: str, limit: int) -> list:
    found, cursor = [], None
    while True:
        page = listing.page(entries, sort, limit, cursor)
        assert len(page.entries) <= limit
        found += page.entries
        if page.next is None:
            return found
        assert len(page.entries) == limit
        cursor = page.next


@pytest.mark.parametrize("sort", listing.SORTS)
@pytest.mark.parametrize("limit", [1, 2, 7, 500])
def test_the_pages_together_are_everything_in_order(mixed_root, sort, limit):
    entries = list(scan.scan(mixed_root))
    found = _all(entries, sort, limit)
    assert sorted(one.place.location for one in found) == sorted(
        one.place.location for one in entries
    )
    by = listing.SORTS[sort]
    assert all(by(one) <= by(other) for one, other in pairwise(found))


def test_entries_that_come_and_go_between_two_pages_move_no_other_one(mixed_root):
    entries = sorted(scan.scan(mixed_root), key=lambda one: one.place.key)
    first = listing.page(entries, "key", 10, None)
    assert first.entries == entries[:10]
    assert listing.page(entries[5:], "key", 10, first.next).entries == entries[10:20]
    assert listing.page(entries[:9] + entries[12:], "key", 5, first.next).entries == entries[12:17]


def test_totals_are_those_of_all_pages(mixed_root):
    entries = list(scan.scan(mixed_root))
    page = listing.page(entries, "size", 1, None, ("binary",))
    binaries = [one for one in entries if one.place.kind == "cuda-binary"]
    assert (page.total, page.bytes) == (len(binaries), sum(one.bytes for one in binaries))


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_any_text_is_a_cursor_or_a_refusal(text):
    for sort in listing.SORTS:
        with pytest.raises(Refused):
            listing.page((), sort, 1, text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=4),
    )
)
def test_any_json_in_a_cursor_is_one_or_a_refusal(value):
    import base64
    import json

    text = base64.urlsafe_b64encode(json.dumps(value).encode()).decode()
    for sort in listing.SORTS:
        try:
            listing.page((), sort, 1, text)
        except Refused:
            pass


def test_a_cursor_of_another_sort_is_refused(mixed_root):
    cursor = listing.page(scan.scan(mixed_root), "size", 1, None).next
    with pytest.raises(Refused, match="sorted by used"):
        listing.page(scan.scan(mixed_root), "used", 1, cursor)
