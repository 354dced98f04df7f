"""Which shard of a warm an archive says it is, and what a gathering of such archives lacks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlcache.store.archive import choosing, sending, shard
from tlcache.store.archive.index import Index
from tlcache.store.archive.shard import Lack, Part

DEAL, OTHER = "ab" * 32, "cd" * 32


def index_of(told: object, records: int = 0) -> Index:
    return Index({}, dict.fromkeys(map(str, range(records))), {}, {"shard": told})


def part(number: int, total: int, *, deal: str = DEAL, kernels: int = 2) -> Index:
    return index_of(Part(number, total, deal, kernels)._asdict(), records=2)


def test_an_archive_tells_its_shard(source, taken, tmp_path):
    told = Part(2, 3, DEAL, 40)
    path = tmp_path / told.file
    sending.send(replace(choosing.everything(str(source)), part=told), str(path))
    imported = taken(path)
    assert shard.part_of(imported.archives[0].index) == told
    (lack,) = imported.lacking
    records = len(imported.archives[0].index.records)
    assert lack == Lack(DEAL, 3, (1, 3), {2: 40 - records})


def test_an_archive_of_no_shard_lacks_nothing(archive, taken):
    assert taken(archive).lacking == []


def test_the_names_of_shards_sort_as_their_numbers_and_none_is_anothers():
    names = [Part(number, 12, DEAL, 0).file for number in range(1, 13)]
    assert names == sorted(set(names))
    assert names[0] == "shard-01-of-12-abababababab.tar.zst"
    assert Part(1, 12, OTHER, 0).file not in names


@pytest.mark.parametrize(
    ("indexes", "lacks"),
    [
        ([part(1, 2), part(2, 2)], []),
        ([part(1, 2), part(1, 2)], [Lack(DEAL, 2, (2,), {})]),
        ([part(2, 2), part(1, 2, deal=OTHER)], [Lack(DEAL, 2, (1,), {}), Lack(OTHER, 2, (2,), {})]),
        ([part(1, 1, kernels=5)], [Lack(DEAL, 1, (), {1: 3})]),
        ([part(1, 1, kernels=5), part(1, 1)], []),
        ([part(1, 1, kernels=0)], []),
    ],
)
def test_what_a_gathering_lacks(indexes, lacks):
    assert shard.lacking(indexes) == lacks


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(DEAL),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(Part._fields), inner),
)


@given(anything | st.fixed_dictionaries(dict.fromkeys(Part._fields, anything)))
def test_whatever_an_index_tells_it_is_a_shard_that_could_be_or_none(told):
    found = shard.part_of(index_of(told))
    if found is not None:
        assert 1 <= found.number <= found.total <= 10_000
        assert found.kernels >= 0
    assert len(shard.lacking([index_of(told)])) <= 1
