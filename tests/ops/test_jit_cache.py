"""Layer 2: one value a key, the least recently used one goes first, all are counted."""

from __future__ import annotations

import gc
import threading
import time
from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import ops
from ops import catalog
from ops.jit_cache import JitCache, jit_cache, jit_caches


class Made:
    """What a factory makes."""

    def __init__(self, key):
        self.key = key


def _counting(maxsize=128):
    made = []

    def factory(m, n=1, *, dtype="float32"):
        """Make one."""
        made.append((m, n, dtype))
        return Made((m, n, dtype))

    return JitCache(factory, maxsize), made


# --- keys ---


def test_equal_arguments_make_one_value_however_they_are_written():
    cache, made = _counting()
    first = cache(3)
    for call in (
        lambda: cache(m=3),
        lambda: cache(3, 1),
        lambda: cache(3, n=1),
        lambda: cache(3, dtype="float32"),
        lambda: cache(n=1, m=3, dtype="float32"),
    ):
        assert call() is first
    assert made == [(3, 1, "float32")]
    assert cache.cache_info() == (5, 1, 128, 1, 0)


def test_other_arguments_make_another_value():
    cache, made = _counting()
    assert len({id(cache(m, n, dtype=d)) for m in (1, 2) for n in (1, 2) for d in "ab"}) == 8
    assert len(made) == 8


@pytest.mark.parametrize("call", [lambda c: c(), lambda c: c(1, 2, 3), lambda c: c(1, k=2)])
def test_arguments_that_the_factory_does_not_take_are_its_type_error(call):
    cache, made = _counting()
    with pytest.raises(TypeError):
        call(cache)
    assert not made
    assert cache.cache_info() == (0, 0, 128, 0, 0)


def test_what_is_not_hashable_is_refused():
    cache, made = _counting()
    with pytest.raises(TypeError, match="unhashable"):
        cache([1])
    assert not made


def test_none_is_a_value_like_any_other():
    calls = []
    cache = JitCache(lambda m: calls.append(m))
    assert cache(1) is cache(1) is None
    assert calls == [1]


def test_it_goes_by_the_factorys_name_and_docstring():
    @jit_cache
    def rms_norm(m):
        """Make an rms_norm."""

    assert (rms_norm.__name__, rms_norm.__doc__) == ("rms_norm", "Make an rms_norm.")
    assert rms_norm.__module__ == __name__


# --- size ---


def test_the_least_recently_used_value_goes_first_and_is_counted():
    cache, made = _counting(2)
    first, second = cache(1), cache(2)
    assert cache(1) is first  # 2 is now the oldest
    cache(3)
    assert cache.cache_info() == (1, 3, 2, 2, 1)
    assert cache(1) is first
    assert cache(2) is not second
    assert [m for m, *_ in made] == [1, 2, 3, 2]
    assert cache.cache_info().evictions == 2


def test_a_smaller_size_drops_the_oldest_and_a_larger_one_drops_nothing():
    cache, _ = _counting(4)
    values = [cache(m) for m in range(4)]
    cache.resize(2)
    assert cache.cache_info() == (0, 4, 2, 2, 2)
    cache.resize(8)
    assert [cache(2), cache(3)] == values[2:]
    assert cache(0) is not values[0]
    assert cache.cache_info() == (2, 5, 8, 3, 2)


@pytest.mark.parametrize("size", [0, -1])
def test_a_cache_of_nothing_is_refused(size):
    cache, _ = _counting(2)
    cache(1)
    with pytest.raises(ValueError, match=f"maxsize is {size}"):
        cache.resize(size)
    assert cache.cache_info() == (0, 1, 2, 1, 0)
    with pytest.raises(ValueError, match="at least 1"):
        JitCache(Made, size)


def test_clearing_forgets_values_and_counts_and_keeps_the_size():
    cache, _ = _counting(2)
    first = cache(1)
    cache(1), cache(2), cache(3)
    cache.cache_clear()
    assert cache.cache_info() == (0, 0, 2, 0, 0)
    assert cache(1) is not first


def test_an_evicted_value_lives_as_long_as_somebody_holds_it():
    cache, _ = _counting(1)
    held = cache(1)
    cache(2)
    gc.collect()
    assert held.key == (1, 1, "float32")


# --- a factory that fails ---


def test_a_failure_is_raised_and_not_kept():
    outcomes = [ValueError("no such arch"), KeyboardInterrupt(), "made"]

    def factory(m):
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    cache = JitCache(factory)
    with pytest.raises(ValueError, match="no such arch"):
        cache(1)
    with pytest.raises(KeyboardInterrupt):
        cache(1)
    assert cache(1) == cache(1) == "made"
    assert cache.cache_info() == (1, 3, 128, 1, 0)
    assert not cache._flights


# --- threads ---


def _together(count, call):
    """Call from so many threads at once; what each got, or raised."""
    results = [None] * count
    barrier = threading.Barrier(count)

    def work(index):
        barrier.wait()
        try:
            results[index] = call(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_sixteen_threads_that_ask_for_one_key_make_it_once():
    made = []

    def factory(m):
        made.append(m)
        time.sleep(0.05)
        return Made(m)

    cache = JitCache(factory)
    results = _together(16, lambda _: cache(7))
    assert made == [7]
    assert len({id(one) for one in results}) == 1
    assert cache.cache_info() == (15, 1, 128, 1, 0)
    assert not cache._flights


def test_different_keys_are_made_side_by_side():
    meeting = threading.Barrier(4)

    def factory(m):
        meeting.wait(30)  # breaks unless four are made at a time
        return m

    cache = JitCache(factory)
    assert _together(4, lambda index: cache(index)) == [0, 1, 2, 3]


def test_after_a_failure_those_who_waited_try_one_at_a_time():
    under_way, most, calls = 0, 0, 0
    lock = threading.Lock()

    def factory(m):
        nonlocal under_way, most, calls
        with lock:
            under_way += 1
            calls += 1
            most = max(most, under_way)
            fails = calls < 6
        time.sleep(0.01)
        with lock:
            under_way -= 1
        if fails:
            raise ValueError("not yet")
        return Made(m)

    cache = JitCache(factory)
    results = _together(16, lambda _: cache(1))
    assert most == 1
    assert sum(isinstance(one, ValueError) for one in results) == 5
    assert len({id(one) for one in results if isinstance(one, Made)}) == 1
    assert cache.cache_info() == (10, 6, 128, 1, 0)


def test_a_key_that_went_while_others_waited_is_made_one_at_a_time():
    under_way: dict[int, int] = {}
    lock = threading.Lock()
    twice = []

    def factory(m):
        with lock:
            under_way[m] = under_way.get(m, 0) + 1
            if under_way[m] > 1:
                twice.append(m)
        time.sleep(0.001)
        with lock:
            under_way[m] -= 1
        return m

    cache = JitCache(factory, 1)
    results = _together(8, lambda index: [cache(turn % 3) for turn in range(30)])
    assert results == [[turn % 3 for turn in range(30)]] * 8
    assert not twice
    info = cache.cache_info()
    assert info.hits + info.misses == 240
    assert info.evictions == info.misses - 1
    assert not cache._flights


def test_a_factory_may_ask_its_own_cache_for_another_key():
    cache = JitCache(lambda m: cache(m - 1) + 1 if m else 0)
    assert cache(5) == 5
    assert cache.cache_info() == (0, 6, 128, 6, 0)


def test_sizes_change_and_values_clear_while_threads_ask():
    cache, _ = _counting(4)

    def work(index):
        for turn in range(200):
            if index == 0:
                cache.resize(1 + turn % 5)
            elif index == 1 and turn % 20 == 0:
                cache.cache_clear()
            else:
                assert cache(turn % 7).key[0] == turn % 7
        return True

    assert _together(6, work) == [True] * 6
    info = cache.cache_info()
    assert info.currsize <= info.maxsize


# --- all caches ---


def test_every_operator_has_a_cache_of_its_own_in_the_list():
    names = {cache.__name__ for cache in jit_caches() if cache.__module__.startswith("ops.")}
    assert names == set(catalog.OPERATORS)
    assert ops.jit_caches is jit_caches
    order = [(cache.__module__, cache.__name__) for cache in jit_caches()]
    assert order == sorted(order)


def test_a_cache_that_nobody_holds_leaves_the_list():
    @jit_cache
    def passing(m):
        return m

    assert passing in jit_caches()
    del passing
    gc.collect()
    assert "passing" not in [cache.__name__ for cache in jit_caches()]


# --- against a model ---


class Model(RuleBasedStateMachine):
    """The cache does what an ordered dictionary with counters does."""

    def __init__(self):
        super().__init__()
        self.fails = False
        self.size = 3
        self.cache = JitCache(self.make, 3)
        self.kept: OrderedDict[int, Made] = OrderedDict()
        self.hits = self.misses = self.evictions = 0

    def make(self, key):
        if self.fails:
            raise ValueError(key)
        return Made(key)

    @rule(key=st.integers(0, 7))
    def ask(self, key):
        value = self.cache(key)
        if key in self.kept:
            self.hits += 1
            assert value is self.kept[key]
            self.kept.move_to_end(key)
        else:
            self.misses += 1
            assert value.key == key
            assert all(value is not one for one in self.kept.values())
            self.kept[key] = value
            self.shrink()

    @rule(key=st.integers(0, 7))
    @precondition(lambda self: len(self.kept) < 8)
    def fail(self, key):
        if key in self.kept:
            return
        self.fails = True
        with pytest.raises(ValueError):
            self.cache(key)
        self.fails = False
        self.misses += 1

    @rule(size=st.integers(1, 9))
    def resize(self, size):
        self.cache.resize(size)
        self.size = size
        self.shrink()

    @rule()
    def clear(self):
        self.cache.cache_clear()
        self.kept.clear()
        self.hits = self.misses = self.evictions = 0

    def shrink(self):
        while len(self.kept) > self.size:
            self.kept.popitem(last=False)
            self.evictions += 1

    @invariant()
    def counts_agree(self):
        assert self.cache.cache_info() == (
            self.hits,
            self.misses,
            self.size,
            len(self.kept),
            self.evictions,
        )


TestAgainstAModel = Model.TestCase
TestAgainstAModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
