"""Kernels dealt to shards: each to one, alike for all who deal, and no shard with much more than
another.
"""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlcache.errors import UsageError
from tlcache.warm import shards
from tlcache.warm.shards import Shard

KEYS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(60)]
some_keys = st.lists(st.sampled_from(KEYS), unique=True)
seconds = st.dictionaries(
    st.sampled_from(KEYS), st.floats(0, 1e9, allow_nan=False, allow_infinity=False)
)


@given(some_keys, st.integers(1, 70), seconds)
def test_each_kernel_is_in_one_shard_and_no_shard_is_much_longer_than_another(keys, total, known):
    dealt = shards.deal(keys, total, known)
    assert set(dealt.shard_of) == set(keys)
    assert set(dealt.shard_of.values()) <= set(range(1, total + 1))
    assert len(dealt.seconds) == total
    told = [known[key] for key in keys if key in known]
    longest = max([*told, sum(told) / len(told) if told else 1]) + 0.01
    assert max(dealt.seconds) - min(dealt.seconds) <= longest * (1 + 1e-9)


@given(st.permutations(KEYS), st.integers(1, 70), seconds, st.randoms())
def test_the_order_of_what_is_dealt_and_known_does_not_matter(keys, total, known, chance):
    shuffled = list(known.items())
    chance.shuffle(shuffled)
    assert shards.deal(keys, total, dict(shuffled)) == shards.deal(sorted(KEYS), total, known)


def test_without_seconds_the_numbers_differ_by_one_at_most():
    dealt = shards.deal(KEYS, 7, {})
    numbers = [list(dealt.shard_of.values()).count(number) for number in range(1, 8)]
    assert sorted(numbers) == [8, 8, 8, 9, 9, 9, 9]


def test_the_longest_kernels_go_to_shards_of_their_own():
    long, *short = KEYS[:9]
    dealt = shards.deal(KEYS[:9], 2, {long: 8.0, **dict.fromkeys(short, 1.0)})
    assert dealt.seconds == (8.0, 8.0)
    assert [key for key, number in dealt.shard_of.items() if number == 1] == [long]


def test_what_is_not_known_counts_as_the_mean():
    dealt = shards.deal(KEYS[:4], 2, {KEYS[0]: 1.0, KEYS[1]: 3.0})
    assert sum(dealt.seconds) == 8.0
    assert dealt.seconds == (4.0, 4.0)


def test_seconds_of_other_kernels_do_not_matter():
    known = {KEYS[0]: 2.0, KEYS[1]: 4.0}
    assert shards.deal(KEYS[:9], 3, known) == shards.deal(KEYS[:9], 3, known | {KEYS[50]: 999.0})


def test_a_deal_has_another_name_where_anything_is_otherwise():
    names = {
        shards.deal(KEYS[:9], 2, {}).name,
        shards.deal(KEYS[:9], 3, {}).name,
        shards.deal(KEYS[:8], 2, {}).name,
        shards.deal(KEYS[:9], 2, {KEYS[0]: 9.0, KEYS[1]: 1.0}).name,
    }
    assert len(names) == 4


def test_a_deal_is_what_it_was_in_earlier_releases():
    # Hosts of a fleet may be updated one after the other.
    keys = random.Random(0).sample(KEYS, 20)
    known = {key: float(number) for number, key in enumerate(sorted(keys)[:10], 1)}
    assert shards.deal(keys, 3, known).name[:16] == "c0fc6657ac8a18c4"


@pytest.mark.parametrize(
    ("text", "shard"), [("1/1", (1, 1)), ("2/8", (2, 8)), (" 10000/10000 ", (10000, 10000))]
)
def test_a_shard_is_read(text, shard):
    assert shards.parse(text) == Shard(*shard)
    assert str(shards.parse(text)) == text.strip()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0/4", "there is no shard 0 of 4"),
        ("5/4", "there is no shard 5 of 4"),
        ("1/0", "1/0 asks for 0 shards"),
        ("1/10001", "1/10001 asks for 10,001 shards"),
        ("-1/4", "'-1/4' is no shard"),
        ("1", "'1' is no shard"),
        ("1/4/8", "'1/4/8' is no shard"),
        ("1.0/4", "'1.0/4' is no shard"),
        ("١/٤", "'١/٤' is no shard"),
        ("1/9999999999", "is no shard"),
        ("", "'' is no shard"),
    ],
)
def test_what_is_no_shard_is_said(text, said):
    with pytest.raises(UsageError) as caught:
        shards.parse(text)
    assert said in caught.value.message
    assert caught.value.hint
