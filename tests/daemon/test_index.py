"""What is at the roots, in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tlcache.daemon.broadcast import Broadcast
from tlcache.daemon.index import Group, Index, Total
from tlcache.errors import UsageError
from tlcache.store import scan
from tlcache.store.select import Filter


@pytest.fixture
def events():
    return Broadcast()


@pytest.fixture
def index(events):
    return Index(events)


@pytest.fixture
def found(mixed_root):
    return list(scan.scan(mixed_root))


def test_what_is_counted_is_what_is_listed(index, found, mixed_root):
    root = str(mixed_root)
    for one in found:
        index.put(root, one)
    for one in found[::2]:
        index.drop(root, one.place.location)
    left = index.entries()
    assert sorted(left, key=str) == sorted(found[1::2], key=str)
    counted: dict[Group, Total] = {}
    for one in left:
        group = Group(root, one.place.tilelang or "", one.target or "", one.place.kind)
        before = counted.get(group, Total(0, 0))
        counted[group] = Total(before.entries + 1, before.bytes + one.bytes)
    assert index.totals() == counted


def test_what_lies_below_a_directory_goes_with_it(index, found, mixed_root):
    root = str(mixed_root)
    index.renew(root, found)
    index.drop(root, f"{root}/0.1.15")
    assert index.entries() == [
        one for one in index.entries() if not one.place.location.startswith(f"{root}/0.1.15/")
    ]
    assert 0 < len(index.entries()) < len(found)


def test_an_entry_that_is_the_same_again_stays_the_same_object(index, found, mixed_root):
    root = str(mixed_root)
    index.renew(root, found)
    generation = index.generation
    index.renew(root, list(scan.scan(mixed_root)))
    index.put(root, replace(found[0]))
    assert index.generation == generation
    assert {id(one) for one in index.entries()} == {id(one) for one in found}


def test_what_comes_changes_and_goes_is_told_but_not_what_is_used(index, events, found, mixed_root):
    root, one = str(mixed_root), found[0]
    index.put(root, one)
    index.put(root, replace(one, last_used=one.created))
    index.put(root, replace(one, bytes=one.bytes + 1))
    index.renew(root, [])
    assert [told["kind"] for told in events.recent()] == [
        "entry-added", "entry-changed", "entry-removed"
    ]  # fmt: skip
    assert events.recent()[0]["key"] == one.place.key
    assert index.generation == 4


def test_an_entry_is_found_by_its_key_a_prefix_or_not_at_all(index, found, mixed_root):
    index.renew(str(mixed_root), found)
    one = next(one for one in found if one.place.kind == "kernel")
    assert index.get(one.place.key) is one
    assert index.get(one.place.key[:12]) is one
    assert index.at(str(mixed_root), one.place.location) is one
    with pytest.raises(UsageError, match="no entry"):
        index.get("0123456789")


def test_a_key_that_two_roots_have_names_none_by_itself(index, found, mixed_root):
    one = next(one for one in found if one.place.kind == "kernel")
    place = one.place._replace(location=f"/other/{one.place.key}")
    index.put(str(mixed_root), one)
    index.put("/other", replace(one, place=place))
    with pytest.raises(UsageError, match="2 entries"):
        index.get(one.place.key)
    assert len(index.entries(root="/other")) == 1
    index.forget("/other")
    assert index.get(one.place.key) is one


def test_a_filter_selects_as_in_a_listing(index, found, mixed_root):
    index.renew(str(mixed_root), found)
    wanted = Filter(tilelang="0.1.15")
    assert sorted(index.entries(wanted), key=str) == sorted(wanted.select(found), key=str)


def test_what_is_added_counts_at_the_most_that_it_can_take(index, found, mixed_root):
    root = str(mixed_root)
    one = next(one for one in found if one.place.kind == "kernel")
    index.put(root, one)
    index.drop(root, one.place.location)
    assert index.grown(root) >= one.bytes
    index.put(root, one)
    assert index.grown(root) >= 2 * one.bytes
