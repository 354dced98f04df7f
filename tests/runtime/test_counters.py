"""Counts in all, by kernel, and by duration."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlcache.runtime.counters import RECENT, Counters, Ledger, percentiles


def counts(counters):
    return {name: value for name, value in vars(counters).items() if value}


def test_a_ledger_counts_in_all_and_by_kernel():
    ledger = Ledger()
    ledger.remembered("a:f")
    ledger.add("a:f", "restored", 0.5, saved=2.0)
    ledger.add("a:f", "compiled", 3.0, after_ready=True)
    ledger.add("b:g", "disk", 1.0)
    ledger.add("b:g", "failed", 9.0, after_ready=True)
    assert counts(ledger.kernels["a:f"]) == {
        "memory": 1,
        "restored": 1,
        "compiled": 1,
        "after_ready": 1,
        "restore_seconds": 0.5,
        "saved_seconds": 2.0,
        "compile_seconds": 3.0,
    }
    assert counts(ledger.kernels["b:g"]) == {"disk": 1, "failed": 1, "compile_seconds": 1.0}
    for name in vars(Counters()):
        parts = [getattr(part, name) for part in ledger.kernels.values()]
        assert getattr(ledger.total, name) == sum(parts), name
    assert (list(ledger.restores), list(ledger.compiles)) == ([0.5], [3.0, 1.0])


def test_threads_count_at_once_and_nothing_is_lost():
    ledger = Ledger()

    def count():
        for _ in range(2000):
            ledger.remembered("a:f")
            ledger.add("a:f", "restored", 1.0, saved=1.0)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (ledger.total.memory, ledger.total.restored) == (16_000, 16_000)
    assert ledger.kernels["a:f"].saved_seconds == 16_000
    assert len(ledger.restores) == RECENT


def test_percentiles_are_those_of_the_nearest_rank():
    assert percentiles([]) is None
    assert percentiles([0.25]) == {"count": 1, "p50": 0.25, "p90": 0.25, "p99": 0.25, "max": 0.25}
    assert percentiles([n / 100 for n in range(100, 0, -1)]) == {
        "count": 100,
        "p50": 0.5,
        "p90": 0.9,
        "p99": 0.99,
        "max": 1.0,
    }


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_values_that_occurred_in_order(seconds):
    told = percentiles(seconds)
    assert told.pop("count") == len(seconds)
    assert list(told.values()) == sorted(told.values())
    assert told["max"] == round(max(seconds), 6)
    assert set(told.values()) <= {round(one, 6) for one in seconds}
    below = sum(round(one, 6) <= told["p50"] for one in seconds)
    assert below >= len(seconds) / 2


@pytest.mark.parametrize("outcome", ["restored", "compiled", "disk"])
def test_what_is_in_memory_is_held_in_the_order_of_its_coming(outcome):
    ledger = Ledger()
    ledger.hold("first", outcome, 0.5, entry="0.1.15/kernels/ab")
    ledger.hold("second", "compiled", 1.0, origin="foreign")
    assert [(one.title, one.origin, one.outcome) for one in ledger.held] == [
        ("first", "ops", outcome),
        ("second", "foreign", "compiled"),
    ]
    assert ledger.held[0].loaded <= ledger.held[1].loaded
