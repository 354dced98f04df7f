"""What agents count, as counters that outlive their processes."""

from __future__ import annotations

from tlcache import readings
from tlcache.daemon import tally
from tlcache.daemon.history import Counter

DOCUMENT = {
    "process": {"pid": 7, "started": "2026-01-31T12:00:00+00:00"},
    "layers": {
        "workload": [
            {"key": "rms_norm(N=64)", "hits": 10, "misses": 2},
            {"key": "rms_norm(N=128)", "hits": 5, "misses": 1},
        ],
        "jit": [{"factory": "ops.kernels.rms_norm:rms_norm", "hits": 3, "misses": 4}],
        "compile": {
            "kernels": [
                {
                    "kernel": "ops.kernels.rms_norm:rms_norm",
                    "memory": 1,
                    "restored": 2,
                    "compiled": 1,
                    "after_ready": 1,
                    "compile_seconds": 1.5,
                }
            ],
        },
    },
}


def labels(**values):
    return tuple(sorted(values.items()))


def test_the_three_layers_are_counted_by_op_and_outcome():
    found = tally.counted(readings.read(DOCUMENT, 7))
    assert found == {
        Counter("requests", labels(layer="3", op="rms_norm", outcome="memory")): 15,
        Counter("requests", labels(layer="3", op="rms_norm", outcome="missed")): 3,
        Counter("requests", labels(layer="2", op="rms_norm", outcome="memory")): 3,
        Counter("requests", labels(layer="2", op="rms_norm", outcome="missed")): 4,
        Counter("requests", labels(layer="1", op="rms_norm", outcome="memory")): 1,
        Counter("requests", labels(layer="1", op="rms_norm", outcome="restored")): 2,
        Counter("requests", labels(layer="1", op="rms_norm", outcome="compiled")): 1,
        Counter("compile_seconds", labels(op="rms_norm")): 1.5,
        Counter("compiles_after_ready", labels(op="rms_norm")): 1,
    }


def test_any_document_counts_and_a_process_has_a_name_of_its_own():
    assert tally.counted(readings.read({}, 7)) == {}
    assert tally.counted(readings.read({"layers": {"jit": [{"hits": -5}]}}, 7)) == {}
    one, two = readings.read(DOCUMENT, 7), readings.read(DOCUMENT, 8)
    assert tally.source(one) != tally.source(two)
