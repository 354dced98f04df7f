"""What is advised about which number, and that good numbers are left alone."""

from __future__ import annotations

import pytest

from tlcache.advice import advise
from tlcache.readings import Compile, Factory, Incident, Process, Reading

LATE = Incident(
    kind="compiled", title="attn M=96", seconds=1.7, after_ready=True,
    workload={"kernel": "my:attn", "args": {"M": 96}},
)  # fmt: skip


def process(pid=7, jit=(), incidents=(), **counts):
    return Reading(Process(pid=pid), jit=jit, compile=Compile(**counts), incidents=incidents)


@pytest.mark.parametrize(
    "counts",
    [
        {},
        {"restored": 40, "compiled": 3, "compile_seconds": 9.0},
        {"compiled": 2, "compile_seconds": 3.0},
        {"disk": 40, "compile_seconds": 9.0},
        {"restored": 40, "memory": 10**9},
    ],
)
def test_numbers_that_are_not_bad_get_no_advice(counts):
    roomy = Factory("my:attn", hits=3, misses=40, maxsize=None, currsize=40)
    assert advise([process(jit=(roomy,), **counts)]) == []


def test_compiles_after_ready_come_with_the_lines_that_would_have_warmed_them():
    (found,) = advise([process(restored=1, compiled=2, after_ready=2, incidents=(LATE, LATE))])
    assert (found.pids, found.what) == ((7,), "2 compiles after ready")
    assert "`tlcache record --pid 7 -o shapes.json`" in found.remedy
    assert "`tlcache warm --shapes shapes.json`" in found.remedy
    assert found.workloads == (LATE.workload,)


def test_the_same_of_several_ranks_is_one_advice():
    ranks = [process(pid, restored=1, after_ready=1, incidents=(LATE,)) for pid in (1, 2, 3)]
    (found,) = advise(ranks)
    assert (found.pids, found.what) == ((1, 2, 3), "3 compiles after ready")
    assert found.workloads == (LATE.workload,)


@pytest.mark.parametrize("counts", [{"compiled": 3}, {"compiled": 1, "compile_seconds": 10.0}])
def test_a_start_that_restored_nothing_and_compiled_much_is_a_cold_one(counts):
    (found,) = advise([process(**counts)])
    assert found.what.startswith(f"nothing was restored, and {counts['compiled']} kernels were")
    assert "`tlcache warm" in found.remedy


def test_compiles_after_ready_alone_make_no_cold_start():
    (found,) = advise([process(compiled=5, after_ready=5)])
    assert found.what == "5 compiles after ready"


def test_a_factory_that_thrashes_needs_room():
    attn = Factory("my:attn", 311, 988, 32, 32, 956, thrashes=True)
    (found,) = advise([process(jit=(attn,))])
    assert found.what == ("my:attn thrashes: 988 misses and 311 hits, 956 evicted, room for 32")
    assert "`@functools.lru_cache(maxsize=64)`" in found.remedy
    ours = Factory("ops.kernels.gemm:gemm", 0, 300, 128, 128, 172, thrashes=True)
    (found,) = advise([process(jit=(ours,))])
    assert "ops.jit_caches()" in found.remedy and "resize(256)" in found.remedy


def test_kernels_that_were_not_to_be_had_are_told():
    (found,) = advise([process(failed=1)])
    assert found.what == "1 kernel was not to be had"
    assert "`tlcache stats --pid 7`" in found.remedy
