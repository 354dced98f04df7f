"""What is read from an agent's answer, whatever is in it; ranks together; rates."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlcache import readings
from tlcache.advice import advise
from tlcache.agents import Answer
from tlcache.cli.overview import overview, since_ready
from tlcache.cli.single import single
from tlcache.readings import Compile, Process, Reading, Workload

STATS = {
    "schema": 1,
    "process": {
        "pid": 7, "started": "2026-01-31T12:00:00.000+00:00", "uptime_seconds": 61,
        "command": ["python", "serve.py"], "name": "serve.py", "user": "me", "rank": 1,
        "world_size": 2, "group": "pid:5", "ready": "2026-01-31T12:00:06.000+00:00",
        "ready_after_seconds": 6.0, "frozen": False, "python": "3.11.7", "tlcache": "0.1.0",
        "tilelang": None, "hooks": True, "root": "/cache", "recording": None,
    },
    "layers": {
        "workload": [
            {"op": "rms_norm", "key": "rms_norm(N=64)", "instances": 2, "workloads": 3,
             "hits": 100, "misses": 3},
        ],
        "jit": [
            {"factory": "my:attn", "hits": 311, "misses": 988, "maxsize": 32, "currsize": 32,
             "evictions": 956, "thrashes": True},
            {"factory": "my:free", "hits": 1, "misses": 2, "maxsize": None, "currsize": 2,
             "evictions": 0, "thrashes": False},
        ],
        "compile": {
            "memory": 5, "restored": 3, "disk": 1, "compiled": 2, "failed": 1, "after_ready": 1,
            "restore_seconds": 0.5, "compile_seconds": 3.4, "saved_seconds": 41,
            "restore_latency": {"count": 3, "p50": 0.1, "p90": 0.2, "p99": 0.2, "max": 0.2},
            "compile_latency": None,
            "kernels": [
                {"kernel": "my:attn", "memory": 5, "restored": 3, "disk": 1, "compiled": 2,
                 "failed": 1, "compile_seconds": 3.4},
            ],
        },
        "tilelang": [{"cache": "KernelCache._memory_cache", "owner": "tvm_ffi", "size": 12}],
    },
    "incidents": [
        {"time": "2026-01-31T12:00:09.000+00:00", "kind": "compiled", "title": "attn M=96",
         "seconds": 1.7, "thread": "MainThread", "rank": 1, "after_ready": True,
         "origin": "foreign", "spec": None, "workload": {"kernel": "my:attn", "args": {"M": 96}},
         "reason": None},
    ],
    "incidents_total": 1,
}  # fmt: skip


def test_every_field_of_an_answer_is_read():
    one = readings.read(STATS, 41873)
    assert (one.process.pid, one.process.name, one.process.rank) == (41873, "serve.py", 1)
    assert one.process.uptime_seconds == 61.0
    assert (one.process.tilelang, one.process.hooks) == ("", True)
    assert one.workload == (Workload("rms_norm(N=64)", 2, 3, 100, 3),)
    assert [row.maxsize for row in one.jit] == [32, None]
    assert one.compile == Compile(5, 3, 1, 2, 1, 1, 0.5, 3.4, 41.0)
    assert (one.restores.p99, one.compiles.count) == (0.2, 0)
    assert one.tilelang[0].size == 12
    assert one.incidents[0].workload == {"kernel": "my:attn", "args": {"M": 96}}
    assert one.hits == 105


@pytest.mark.parametrize("document", [{}, {"process": 1, "layers": []}, {"layers": {"jit": {}}}])
def test_what_is_missing_is_zero_or_unknown(document):
    assert readings.read(document, 3) == Reading(Process(pid=3))


@pytest.mark.parametrize("value", [True, "5", None, 2**64, [5], {"a": 1}, 1.5])
def test_a_count_that_is_none_is_zero(value):
    document = {"layers": {"compile": {"memory": value}}}
    assert readings.read(document, 3).compile.memory == 0


@pytest.mark.parametrize("value", [True, "5", math.nan, math.inf, pytest.param(10**400, id="huge")])
def test_a_duration_that_is_none_is_zero(value):
    document = {"layers": {"compile": {"saved_seconds": value}}}
    assert readings.read(document, 3).compile.saved_seconds == 0.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def damaged(value, draw):
    """A document of which any part may be anything."""
    if draw(st.integers(0, 12)) == 0:
        return draw(JSON)
    if isinstance(value, dict):
        return {name: damaged(part, draw) for name, part in value.items()}
    if isinstance(value, list):
        return [damaged(part, draw) for part in value] * draw(st.integers(0, 2))
    return value


@st.composite
def documents(draw):
    value = damaged(STATS, draw)
    return json.loads(json.dumps(value)) if isinstance(value, dict) else {}


@settings(deadline=None)
@given(st.lists(documents(), max_size=3), st.integers(20, 200))
def test_whatever_agents_say_can_be_shown(found, width):
    read = [readings.read(document, pid) for pid, document in enumerate(found, 1)]
    groups = readings.grouped(read)
    assert sum(len(group.readings) for group in groups) == len(read)
    silent = [Answer(2**22 + 1, "/run/1.sock", None, "does not answer")]
    rates = {one.process.pid: readings.rates(one, one, 1.0) for one in read}
    views = [overview(groups, silent), overview(groups, silent, rates)]
    views += [since_ready(groups, silent)]
    views += [single(one, one.incidents, rates[one.process.pid], True) for one in read]
    for view in views:
        for line in view.lines(width):
            assert line.isprintable()
        assert len({len(row) for row in view.rows} | {len(view.header)}) == 1
    for group in groups:
        for advice in advise(group.readings):
            assert advice.pids and advice.what and advice.remedy


def test_incidents_that_are_not_listed_are_told_of():
    document = {**STATS, "incidents": STATS["incidents"] * 20, "incidents_total": 37}
    one = readings.read(document, 7)
    assert one.unseen == 17
    view = since_ready(readings.grouped([one]), [])
    assert "pid 7: the newest 20 of 37 are shown" in "\n".join(view.lines(200))
    assert readings.read(STATS, 7).unseen == 0


# --- together ---


def process(pid, name="serve.py", group="", rank=None, **counts):
    return Reading(
        Process(pid=pid, name=name, group=group, rank=rank, started="then"),
        compile=Compile(**counts),
    )


def test_the_ranks_of_one_server_are_together_in_the_order_of_their_ranks():
    found = readings.grouped(
        [
            process(11, group="a", rank=1), process(12, group="b", rank=0),
            process(13, name="eval.py"), process(14, group="a", rank=0), process(15),
        ]
    )  # fmt: skip
    assert [[one.process.pid for one in group.readings] for group in found] == [
        [13], [12], [14, 11], [15],
    ]  # fmt: skip
    assert [group.name for group in found] == ["", "b", "a", ""]


def test_processes_without_a_group_are_never_together():
    assert len(readings.grouped([process(1), process(2)])) == 2


# --- over time ---


def test_rates_are_what_was_counted_between_two_readings_a_second():
    before, after = process(1, memory=10, compiled=1), process(1, memory=30, compiled=2)
    found = readings.rates(before, after, 2.0)
    assert (found.hits, found.misses) == (10.0, 0.5)


def test_a_workload_that_is_new_counts_from_zero_and_one_that_was_cleared_is_not_negative():
    before = Reading(workload=(Workload("a", hits=9),))
    after = Reading(workload=(Workload("a", hits=4), Workload("b", hits=6)))
    assert readings.rates(before, after, 2.0).workload == {"a": 0.0, "b": 3.0}


def test_there_are_no_rates_between_two_processes_of_one_pid():
    before = Reading(Process(pid=1, started="then"))
    assert readings.rates(before, Reading(Process(pid=1, started="now")), 1.0) is None
    assert readings.rates(None, before, 1.0) is None
    assert readings.rates(before, before, 0.0) is None


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01T00:00:00Z"])
def test_a_time_that_is_none_is_unknown(text):
    assert readings.when(text) is None


def test_times_have_a_zone():
    assert readings.when("2026-01-31T12:00:00Z") == readings.when("2026-01-31T12:00:00+00:00")
    assert readings.when("2026-01-31T12:00:00").tzinfo is not None


def test_why_calls_were_not_restored_is_read_and_what_is_malformed_is_not():
    rows = [{"reason": "it calls open()", "count": 3}, {"reason": 4, "count": "x"}, None]
    found = readings.read({"layers": {"compile": {"not_restored": rows}}}, 1)
    told = [(one.reason, one.count) for one in found.refusals]
    assert told == [("it calls open()", 3), ("", 0), ("", 0)]
    shown = single(found, [], None, False).foot
    assert "not restored: 3 calls: it calls open()" in shown
    assert readings.read({"layers": {"compile": {"not_restored": 5}}}, 1).refusals == ()
