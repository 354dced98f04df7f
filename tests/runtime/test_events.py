"""Events: what is noted, what of it is kept, and what a reader is told."""

from __future__ import annotations

import threading
from datetime import datetime, timezone

import pytest

from tlcache import operators, targets
from tlcache.runtime import events, process


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(process.process, "ready_since", None)
    monkeypatch.setattr(events, "log", events.Log())
    return events.log


def spec(rows):
    return operators.get("rms_norm").spec({"M": rows, "N": 64}, targets.CPU)


def test_an_event_says_when_where_what_and_what_would_have_warmed_it(log):
    before = datetime.now(timezone.utc)

    def note():
        log.note("compiled", spec(4).title, seconds=1.25, spec=spec(4))

    thread = threading.Thread(target=note, name="worker-3")
    thread.start()
    thread.join()
    (event,) = log.all()
    told = event.to_json()
    when = datetime.fromisoformat(told.pop("time"))
    assert abs((when - before).total_seconds()) < 60
    assert told == {
        "kind": "compiled",
        "title": "rms_norm M=4 N=64 eps=1e-06 bf16 cpu",
        "seconds": 1.25,
        "thread": "worker-3",
        "rank": None,
        "after_ready": False,
        "origin": "ops",
        "spec": spec(4).to_json(),
        "workload": {"op": "rms_norm", "M": 4, "N": 64, "eps": 1e-6, "dtype": "bfloat16"},
        "reason": None,
    }


def test_a_workload_that_the_caller_knows_is_told_as_it_is(log):
    entry = {"kernel": "package.module:kernel", "args": {"n": 3}}
    log.note("failed", "kernel n=3", origin="foreign", workload=entry, reason="ValueError: odd")
    told = log.all()[0].to_json()
    assert (told["workload"], told["spec"], told["origin"]) == (entry, None, "foreign")
    assert told["reason"] == "ValueError: odd"


def test_the_last_events_are_kept(log):
    for number in range(events.KEPT + 10):
        log.note("restored", str(number))
    assert [event.title for event in log.all()] == [str(n) for n in range(10, events.KEPT + 10)]


def test_what_a_serving_process_should_not_have_had_to_do_is_an_incident(log):
    for kind in "restored", "disk", "compiled", "failed":
        log.note(kind, "before")
    process.mark_ready()
    process.mark_ready()
    for kind in "restored", "disk", "compiled", "failed":
        log.note(kind, "after")
    assert [event.kind for event in log.all()].count("ready") == 1
    assert [(e.kind, e.title) for e in log.all() if e.incident] == [
        ("disk", "after"),
        ("compiled", "after"),
        ("failed", "after"),
    ]
    process.mark_ready(False)
    log.note("compiled", "taken back")
    assert not log.all()[-1].incident


def test_threads_note_at_once_and_nothing_is_lost(log):
    def note(name):
        for _ in range(16):
            log.note("restored", name)

    threads = [threading.Thread(target=note, args=(str(n),)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    titles = [event.title for event in log.all()]
    assert sorted(titles) == sorted(str(n) for n in range(16) for _ in range(16))
