"""The metrics: names, labels, and where each figure comes from.

Names are stable, begin with `tlcache_`, and end with their unit. What is there now is read from the
index and the processes; what happened is counted by the history, which outlives the daemon.

Invariant: a label has at most `VALUES` values over the daemon's life, the empty one and `other` not
counted, and a family at most `SERIES` series. Which value is `other` never changes, so that no
counter goes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import tlcache
from tlcache import readings
from tlcache.daemon.jobs import Jobs
from tlcache.daemon.served import Served
from tlcache.store.described import KINDS

__all__ = ["CONTENT_TYPE", "COUNTERS", "SERIES", "VALUES", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
VALUES = 100
SERIES = 1000
_LONGEST = 200

COUNTERS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "requests": (
        "tlcache_requests",
        "Requests for kernels in processes with agents; what a layer missed, the one below has.",
        ("layer", "op", "outcome"),
    ),
    "compile_seconds": ("tlcache_compile_seconds", "Seconds spent on compiling.", ("op",)),
    "restore_seconds": ("tlcache_restore_seconds", "Seconds spent on restoring.", ()),
    "compiles_after_ready": (
        "tlcache_compiles_after_ready",
        "Kernels that processes had to compile after they said that they were ready.",
        ("op",),
    ),
    "evictions": ("tlcache_evictions", "Kernels deleted by a bound.", ("root", "reason")),
    "evicted_bytes": ("tlcache_evicted_bytes", "Bytes that went with them.", ("root", "reason")),
}
"""Counters of the history by their name there: the metric's, its help, and its labels."""

_HELD = ("root", "version", "target", "kind")


class Metrics(Collector):
    """The metrics of a daemon.

    Args:
        service: Whose figures.
        jobs: Whose kernels.
    """

    def __init__(self, service: Served, jobs: Jobs) -> None:
        self._service, self._jobs = service, jobs
        self._values: dict[tuple[str, str], set[str]] = {}
        self._series: dict[str, set[tuple[str, ...]]] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """They, as Prometheus reads them."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._held()
        yield from self._counted()
        yield from self._processes()
        yield from self._daemon()

    def _held(self) -> Iterator[Metric]:
        totals = {
            (*group[:3], KINDS.get(group.kind, group.kind)): total
            for group, total in self._service.index.totals().items()
        }
        yield self._gauge(
            "tlcache_entries",
            "Things in the cache: kernels, cuda-binaries and whatever else there is.",
            _HELD,
            ((group, total.entries) for group, total in totals.items()),
        )
        yield self._gauge(
            "tlcache_bytes",
            "Bytes of their files.",
            _HELD,
            ((group, total.bytes) for group, total in totals.items()),
        )

    def _counted(self) -> Iterator[Metric]:
        found: dict[str, list[tuple[tuple[str, ...], float]]] = {name: [] for name in COUNTERS}
        for counter, value in self._service.history.counters().items():
            if counter.name in COUNTERS:
                given = dict(counter.labels)
                values = tuple(given.get(label, "") for label in COUNTERS[counter.name][2])
                found[counter.name].append((values, value))
        for name, (metric, told, labels) in COUNTERS.items():
            family = CounterMetricFamily(metric, told, labels=labels)
            rows = found[name] if labels else found[name] or [((), 0.0)]
            for values, value in self._bounded(metric, labels, rows):
                family.add_metric(values, value)
            yield family

    def _processes(self) -> Iterator[Metric]:
        answers = self._service.agents()
        found = [readings.read(one.document, one.pid) for one in answers if one.document]
        yield self._gauge("tlcache_agents", "Processes that answered.", (), [((), len(found))])
        silent = len(answers) - len(found)
        yield self._gauge("tlcache_agents_silent", "Processes that did not.", (), [((), silent)])
        thrashing: dict[str, int] = {}
        for one in found:
            for factory in one.jit:
                count = thrashing.get(factory.factory, 0)
                thrashing[factory.factory] = count + factory.thrashes
        yield self._gauge(
            "tlcache_jit_thrashing",
            "Processes in which a factory's layer 2 has less room than it needs.",
            ("factory",),
            (((factory,), count) for factory, count in thrashing.items()),
        )

    def _daemon(self) -> Iterator[Metric]:
        yield self._gauge(
            "tlcache_job_kernels",
            "Kernels of the warm jobs of now and of the last hour, by what became of them.",
            ("state",),
            (((state,), count) for state, count in self._jobs.kernels().items()),
        )
        followers = self._service.followers
        yield self._gauge(
            "tlcache_root_up",
            "Whether a watched root is there.",
            ("root",),
            (((one.root,), one.state.identity is not None) for one in followers),
        )
        seconds = max((one.scan_seconds for one in followers), default=0.0)
        yield self._gauge(
            "tlcache_scan_seconds", "How long the last scan of a root took.", (), [((), seconds)]
        )
        info = InfoMetricFamily("tlcache_daemon", "The daemon.")
        info.add_metric((), {"version": tlcache.__version__})
        yield info

    # --- bounds ---

    def _gauge(
        self,
        name: str,
        told: str,
        labels: Sequence[str],
        rows: Iterable[tuple[tuple[str, ...], float]],
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, told, labels=labels)
        for values, value in self._bounded(name, labels, rows):
            family.add_metric(values, value)
        return family

    def _bounded(
        self,
        name: str,
        labels: Sequence[str],
        rows: Iterable[tuple[tuple[str, ...], float]],
    ) -> Iterator[tuple[tuple[str, ...], float]]:
        """Rows with few enough values of each label; what is too much is added up as `other`."""
        together: dict[tuple[str, ...], float] = {}
        series = self._series.setdefault(name, set())
        for given, value in rows:
            values = tuple(map(self._value, [name] * len(labels), labels, given))
            if values not in series:
                if len(series) >= SERIES:
                    values = ("other",) * len(labels)
                series.add(values)
            together[values] = together.get(values, 0.0) + value
        yield from together.items()

    def _value(self, name: str, label: str, given: Any) -> str:
        text = str(given)[:_LONGEST].encode("utf-8", "backslashreplace").decode()
        known = self._values.setdefault((name, label), {"", "other"})
        if text not in known:
            if len(known) >= VALUES + 2:
                return "other"
            known.add(text)
        return text
