"""How the caches of operator packages are read while they change."""

from __future__ import annotations

import threading

import pytest

from tlcache import sources


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(sources, "_sources", {"workload": [], "jit": [], "impl": []})


def test_a_layer_has_the_rows_of_all_who_added_some():
    assert sources.rows("jit") == []
    sources.add("jit", lambda: [1, 2])
    sources.add("jit", lambda: (row for row in "a"))
    sources.add("impl", lambda: [3])
    assert sources.rows("jit") == [1, 2, "a"]


def test_a_collection_that_changes_under_its_reader_is_read_again():
    changing, attempts = set(range(100)), []

    def read():
        attempts.append(1)
        for number in changing:
            if len(attempts) == 1 and number == 50:
                changing.add(1000)
            yield number

    assert sources.steady(read) == sorted([*range(100), 1000])
    assert len(attempts) == 2


def test_one_that_never_holds_still_is_an_error_in_the_end():
    def read():
        raise RuntimeError("dictionary changed size during iteration")
        yield

    with pytest.raises(RuntimeError, match="changed size"):
        sources.steady(read)


def test_what_other_threads_fill_is_read_without_a_fault():
    filled, done = {}, threading.Event()

    def fill():
        for number in range(200_000):
            filled[number % 5000] = number
            if number % 7 == 0:
                filled.pop((number * 3) % 5000, None)
        done.set()

    thread = threading.Thread(target=fill)
    sources.add("workload", filled.values)
    thread.start()
    while not done.is_set():
        assert len(sources.rows("workload")) <= 5000
    thread.join()
