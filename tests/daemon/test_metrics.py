from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tlcache.agents import Answer
from tlcache.daemon.broadcast import Broadcast
from tlcache.daemon.history import History
from tlcache.daemon.index import Group, Index, Total
from tlcache.daemon.jobs import Jobs
from tlcache.daemon.metrics import COUNTERS, SERIES, VALUES, Metrics

NAMES = {
    "tlcache_agents", "tlcache_agents_silent", "tlcache_bytes", "tlcache_compile_seconds",
    "tlcache_compiles_after_ready", "tlcache_daemon_info", "tlcache_entries",
    "tlcache_evicted_bytes",
    "tlcache_evictions", "tlcache_jit_thrashing", "tlcache_job_kernels", "tlcache_requests",
    "tlcache_restore_seconds", "tlcache_root_up", "tlcache_scan_seconds",
}  # fmt: skip


class _Totals(Index):
    """An index of which only the totals are asked."""

    def __init__(self) -> None:
        super().__init__(Broadcast())
        self.told: dict[Group, Total] = {}

    def totals(self) -> dict[Group, Total]:
        return self.told


def _service(**more):
    given = {"index": _Totals(), "history": History(), "followers": [], "agents": list, **more}
    return SimpleNamespace(events=Broadcast(), **given)


def _read(metrics: Metrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    families = list(text_string_to_metric_families(metrics.text().decode()))
    assert all(family.documentation for family in families)
    return {
        family.name: {tuple(sorted(one.labels.items())): one.value for one in family.samples}
        for family in families
    }


def test_the_names_are_stable_and_said_by_prometheus_own_parser():
    service = _service()
    told = _read(Metrics(service, Jobs(service.events)))
    assert set(told) == NAMES
    assert told["tlcache_agents"] == {(): 0.0}
    assert set(told["tlcache_job_kernels"]) == {
        (("state", state),) for state in ("compiled", "present", "failed", "left")
    }


def test_counters_are_those_of_the_history():
    service = _service()
    labels = {"layer": "1", "op": "rms_norm", "outcome": "restored"}
    service.history.count("requests", labels, 3)
    service.history.count("evictions", {"root": "/r", "reason": "max-size"}, 2)
    service.history.count("compiles_after_ready", {}, 5)
    service.history.count("something_else", {}, 5)
    told = _read(Metrics(service, Jobs(service.events)))
    assert told["tlcache_requests"] == {tuple(sorted(labels.items())): 3.0}
    assert told["tlcache_evictions"] == {(("reason", "max-size"), ("root", "/r")): 2.0}
    assert sum(told["tlcache_compiles_after_ready"].values()) == 5.0
    assert "tlcache_something_else" not in told
    assert all(name.isidentifier() for name in COUNTERS)


def test_what_agents_say_now_is_told_and_what_is_no_sense_is_nothing():
    jit = [
        {"factory": "a:f", "hits": 1, "misses": 9, "maxsize": 2, "thrashes": True},
        {"factory": "b:g", "hits": 9, "misses": 1, "maxsize": 2, "thrashes": False},
    ]
    answers = [
        Answer(1, "s", {"layers": {"jit": jit}}),
        Answer(2, "s", {"layers": {"jit": jit[:1]}}),
        Answer(3, "s", {"layers": 7}),
        Answer(4, "s", None, "is silent"),
    ]
    service = _service(agents=lambda: answers)
    told = _read(Metrics(service, Jobs(service.events)))
    assert told["tlcache_agents"] == {(): 3.0}
    assert told["tlcache_agents_silent"] == {(): 1.0}
    assert told["tlcache_jit_thrashing"] == {
        (("factory", "a:f"),): 2.0,
        (("factory", "b:g"),): 0.0,
    }


def test_labels_are_bounded_and_nothing_is_left_out_of_the_sums():
    service = _service()
    metrics = Metrics(service, Jobs(service.events))
    for turn in range(3):
        service.index.told = {
            Group("/r", f"0.{turn}.{number}", f"sm_{number % 7}", "kernel"): Total(1, 10)
            for number in range(500)
        }
        told = _read(metrics)["tlcache_entries"]
        versions = {dict(labels)["version"] for labels in told}
        assert len(versions) <= VALUES + 1
        assert sum(told.values()) == 500
        assert len(told) <= SERIES + 1
    assert versions == {"other"}


def test_series_are_bounded_too():
    service = _service()
    metrics = Metrics(service, Jobs(service.events))
    service.index.told = {
        Group(f"/{number % 90}", f"0.{number // 90}", "cpu", "kernel"): Total(1, 1)
        for number in range(4000)
    }
    told = _read(metrics)["tlcache_bytes"]
    assert len(told) <= SERIES + 1
    assert sum(told.values()) == 4000


@settings(max_examples=50)
@given(st.text(st.characters(codec=None)), st.text())
def test_whatever_a_label_is_made_of_the_text_can_be_read(root, target):
    service = _service()
    service.index.told = {Group(root, "0.1.15", target, "kernel"): Total(1, 1)}
    told = _read(Metrics(service, Jobs(service.events)))
    assert sum(told["tlcache_entries"].values()) == 1
