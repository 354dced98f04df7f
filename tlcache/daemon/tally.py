"""What an agent's process has counted, as counters of the history."""

from __future__ import annotations

from collections import Counter as Sum

from tlcache.daemon.history import Counter
from tlcache.readings import Reading

__all__ = ["counted", "source"]

_OUTCOMES = ("memory", "restored", "disk", "compiled", "failed")


def source(reading: Reading) -> str:
    """A name that only this process has, ever."""
    return f"{reading.process.pid} {reading.process.started[:40]}"


def counted(reading: Reading) -> dict[Counter, float]:
    """All that a process has counted since its start.

    `requests` are by layer, op and outcome: from `memory`, or at layer 1 how else a kernel was had;
    at layers 3 and 2, what was `missed` is asked of the layer below.
    """
    found: Sum[Counter] = Sum()

    def add(name: str, value: float, **labels: str) -> None:
        if value > 0:
            found[Counter(name, tuple(sorted(labels.items())))] += value  # type: ignore[assignment]

    for row in reading.workload:
        op = row.key.partition("(")[0]
        add("requests", row.hits, layer="3", op=op, outcome="memory")
        add("requests", row.misses, layer="3", op=op, outcome="missed")
    for factory in reading.jit:
        op = _op(factory.factory)
        add("requests", factory.hits, layer="2", op=op, outcome="memory")
        add("requests", factory.misses, layer="2", op=op, outcome="missed")
    for kernel in reading.kernels:
        op = _op(kernel.kernel)
        for outcome in _OUTCOMES:
            add("requests", getattr(kernel, outcome), layer="1", op=op, outcome=outcome)
        add("compile_seconds", kernel.compile_seconds, op=op)
        add("compiles_after_ready", kernel.after_ready, op=op)
    add("restore_seconds", reading.compile.restore_seconds)
    return dict(found)


def _op(factory: str) -> str:
    return factory.rpartition(":")[2]
