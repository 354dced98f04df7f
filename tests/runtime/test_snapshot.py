"""What an agent tells of a process of which every hit, miss, eviction and restore is known."""

from __future__ import annotations

import os
import sys
from datetime import datetime

import pytest

from tlcache.spec import KernelSpec
from tlcache.store import layout, record
from tlcache.store.trust import Trust

SERVER = """
import torch, ops, tlcache.agent
from tlcache import errors, runtime, targets
from tlcache.spec import KernelSpec
from ops.kernels.rms_norm import rms_norm as factory


def norm(N, **options):
    return ops.RMSNormFwdOp(N, 1e-6, torch.float32, rows="dynamic", **options)


def call(op, *rows):
    N = op.state.values["N"]
    for count in rows:
        op(torch.randn(count, N), torch.randn(N))
"""

PREPARED = (
    SERVER
    + """
for N in 64, 48:
    norm(N).warmup([1])
step()
"""
)

SCRIPTED = (
    SERVER
    + """
path = tlcache.agent.start()
step(path)

first, second = norm(64), norm(64)
call(first, 1, 2, 3)
call(second, 1, 2, 3, 3)
call(first, 2, 0)
step(path)

factory.resize(1)
call(norm(48), 5)
other = norm(32)
call(other, 1, 1, 1)
call(norm(16), 1)
step(path)

del first
ops.mark_ready()
late = norm(8)
call(late, 1, 2)
for _ in range(2):
    try:
        call(norm(4, on_miss="error"), 1)
    except errors.MissError:
        pass
try:
    runtime.resolve(KernelSpec("unlucky:kernel", {"N": 3}, {}, targets.CPU))
except errors.CompileError:
    pass
step(path)
"""
)


@pytest.fixture
def scripted(serve, cache_root, tmp_path):
    """The process of SCRIPTED before its first step, on a root that has N = 64 and, without a
    record, N = 48.
    """
    (tmp_path / "unlucky.py").write_text("def kernel(N):\n    raise ValueError(f'{N} is odd')\n")
    assert serve(PREPARED).end() == 0
    for path in layout.records(cache_root):
        if record.read(str(cache_root), path.stem, Trust(cache_root)).spec.workload["N"] == 48:
            path.unlink()
    return serve(SCRIPTED)


def layers(served):
    return served.agent.get("/v1/stats")["layers"]


def row(rows, **chosen):
    """The row with these values, without them."""
    (found,) = [one for one in rows if chosen.items() <= one.items()]
    return {name: value for name, value in found.items() if name not in chosen}


def third(served, N):
    key = f"rms_norm(N={N},eps=1e-06,dtype=float32,rows=dynamic)"
    return row(layers(served)["workload"], op="rms_norm", key=key)


COUNTS = ("memory", "restored", "disk", "compiled", "failed", "after_ready")


def first(served, names=COUNTS):
    compiles = layers(served)["compile"]
    return tuple(compiles[name] for name in names)


def test_a_scripted_process_reads_back_at_each_layer_exactly_what_it_did(scripted, cache_root):
    assert layers(scripted)["workload"] == []
    assert layers(scripted)["tilelang"] == []
    assert first(scripted) == (0, 0, 0, 0, 0, 0)
    assert layers(scripted)["compile"]["restore_latency"] is None

    # Three row counts miss in layer 3, of which two find the dynamic kernel in memory.
    scripted.said = scripted.go()
    assert third(scripted, 64) == {"instances": 2, "workloads": 3, "hits": 5, "misses": 3}
    assert first(scripted) == (2, 1, 0, 0, 0, 0)
    compiles = layers(scripted)["compile"]
    assert compiles["restore_latency"]["count"] == 1
    assert 0 < compiles["restore_latency"]["p50"] == compiles["restore_latency"]["max"]
    assert compiles["restore_seconds"] == compiles["restore_latency"]["p50"]
    (filed,) = [
        record.read(str(cache_root), path.stem, Trust(cache_root))
        for path in layout.records(cache_root)
    ]
    assert compiles["saved_seconds"] == filed.compile_seconds > 0
    assert compiles["compile_latency"] is None
    assert all(one["misses"] == 0 for one in layers(scripted)["jit"])

    # One disk hit and two compiles go through layer 2, which has room for one.
    scripted.said = scripted.go()
    assert first(scripted) == (2, 1, 1, 2, 0, 0)
    kernel = "ops.kernels.rms_norm:rms_norm"
    assert row(layers(scripted)["jit"], factory=kernel) == {
        "hits": 0,
        "misses": 3,
        "maxsize": 1,
        "currsize": 1,
        "evictions": 2,
        "thrashes": True,
    }
    assert third(scripted, 32) == {"instances": 1, "workloads": 1, "hits": 2, "misses": 1}
    assert len(layers(scripted)["workload"]) == 2  # an op that is gone took its row along
    told = row(layers(scripted)["compile"]["kernels"], kernel=kernel)
    assert told.pop("compile_seconds") == layers(scripted)["compile"]["compile_seconds"] > 0
    assert told == {
        "memory": 2,
        "restored": 1,
        "disk": 1,
        "compiled": 2,
        "failed": 0,
        "after_ready": 0,
    }
    assert layers(scripted)["compile"]["compile_latency"]["count"] == 3
    assert row(layers(scripted)["tilelang"], cache="KernelCache._memory_cache", owner="cython") == {
        "size": 3
    }
    impls = [one for one in layers(scripted)["tilelang"] if one["cache"] == "JITImpl._kernel_cache"]
    assert [one["size"] for one in impls] == [1]
    assert impls[0]["owner"].startswith("ops.kernels.rms_norm:")

    # After ready: a compile, two refusals of one kernel, and a kernel that does not compile.
    scripted.said = scripted.go()
    assert first(scripted) == (3, 1, 1, 3, 1, 1)
    assert third(scripted, 64) == {"instances": 1, "workloads": 3, "hits": 5, "misses": 3}
    told = scripted.agent.get("/v1/stats")
    assert [(one["kind"], one["title"]) for one in told["incidents"]] == [
        ("failed", "kernel N=3 cpu"),
        ("failed", "rms_norm M=dynamic N=4 eps=1e-06 fp32 cpu"),
        ("compiled", "rms_norm M=dynamic N=8 eps=1e-06 fp32 cpu"),
    ]
    events = scripted.agent.get("/v1/events")["events"]
    assert [one["kind"] for one in events] == [
        *("restored", "disk", "compiled", "compiled", "ready", "compiled", "failed", "failed")
    ]
    assert told["incidents"] == [one for one in events[::-1] if one["after_ready"]][:3]
    assert [one["seconds"] > 0 for one in events] == [*[True] * 4, False, True, False, True]
    assert {one["thread"] for one in events} == {"MainThread"}
    assert told["process"]["ready"] == events[4]["time"]
    times = [datetime.fromisoformat(one["time"]) for one in events]
    assert times == sorted(times)
    assert scripted.agent.get(f"/v1/events?since={events[6]['time'].replace('+', '%2B')}") == {
        "schema": 1,
        "events": [one for one in events if one["time"] >= events[6]["time"]],
    }

    kernels = scripted.agent.get("/v1/kernels")["kernels"]
    assert [(one["spec"]["workload"]["N"], one["outcome"]) for one in kernels] == [
        *((64, "restored"), (48, "disk"), (32, "compiled"), (16, "compiled"), (8, "compiled"))
    ]
    for one in kernels:
        assert KernelSpec.from_json(one["spec"]).title == one["title"]
        assert (cache_root / one["entry"] / "kernel_lib.so").exists()
        assert one["origin"] == "ops"


def test_each_event_says_what_would_have_warmed_it(scripted, tlcache, shapes):
    for _ in range(3):
        scripted.said = scripted.go()
    events = scripted.agent.get("/v1/events")["events"]
    compiled = [one for one in events if one["kind"] == "compiled"]
    assert compiled[0]["workload"] == {
        "op": "rms_norm",
        "M": "dynamic",
        "N": 32,
        "eps": 1e-6,
        "dtype": "float32",
    }
    refused, broken = [one for one in events if one["kind"] == "failed"]
    assert refused["reason"] == "MissError: compiling was ruled out"
    assert broken["reason"] == "CompileError: kernel N=3 cpu does not compile: ValueError: 3 is odd"
    assert broken["workload"] == {"kernel": "unlucky:kernel", "args": {"N": 3}}
    path = shapes(*[one["workload"] for one in compiled], targets=["cpu"])
    assert tlcache("warm", "--shapes", path, "--check").code == 0
    path = shapes(refused["workload"], targets=["cpu"])
    assert tlcache("warm", "--shapes", path, "--check").code == 1
    assert tlcache("warm", "--shapes", path).code == 0
    assert tlcache("warm", "--shapes", path, "--check").code == 0


def test_a_rank_says_which_it_is_and_of_what(serve):
    source = "import tlcache.agent\nstep(tlcache.agent.start())"

    def told(**env):
        served = serve(source, env=env)
        return {
            name: served.agent.get("/v1/stats")["process"][name]
            for name in ("rank", "world_size", "group")
        }

    assert told() == {"rank": None, "world_size": None, "group": None}
    ranked = {"RANK": "3", "WORLD_SIZE": "8"}
    assert told(**ranked) == {"rank": 3, "world_size": 8, "group": f"pid:{os.getpid()}"}
    launched = {"TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    assert told(**ranked, **launched) == {"rank": 3, "world_size": 8, "group": "job h:29500"}
    assert told(RANK="x", WORLD_SIZE="")["rank"] is None


def test_a_process_that_torch_made_a_rank_says_so_without_the_environments_help(serve, tmp_path):
    served = serve(
        f"""
import torch.distributed as dist, tlcache.agent
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
step(tlcache.agent.start())
"""
    )
    told = served.agent.get("/v1/stats")["process"]
    assert (told["rank"], told["world_size"]) == (0, 1)


def test_a_process_says_what_it_runs(serve, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(
        "import tlcache.agent, time, sys\nprint('\"' + tlcache.agent.start() + '\"', flush=True)\n"
        "sys.stdin.read()\n"
    )
    served = serve(
        "import subprocess\nos.execv(sys.executable, [sys.executable, '-m', 'package', '--port=1'])"
    )
    told = served.agent.get("/v1/stats")["process"]
    assert told["name"] == "package"
    assert told["command"][1:] == ["-m", "package", "--port=1"]
    assert told["pid"] == served.pid
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert told["tilelang"] is None
    assert told["ready"] is told["ready_after_seconds"] is None
    assert told["root"] == os.environ["TILELANG_CACHE_DIR"]
    assert 0 <= told["uptime_seconds"] < 600


# --- layer 2 of others ---


def test_lru_caches_that_the_hooks_found_are_read_with_their_evictions(monkeypatch):
    import functools
    import types

    from tlcache.runtime import layers as read

    module = types.ModuleType("someones.kernels")

    def kernel(n):
        if n < 0:
            raise ValueError(n)
        return object()

    module.kernel = functools.lru_cache(4)(kernel)
    module.Holder = types.SimpleNamespace(unbounded=functools.cache(kernel))
    module.plain = kernel
    found = [("someones.kernels", name) for name in ("kernel", "Holder.unbounded", "plain")]
    hooks = types.SimpleNamespace(
        factories=lambda: [
            *found,
            ("someones.kernels", "outer.<locals>.inner"),
            ("gone", "kernel"),
        ],
        jits=list,
    )
    monkeypatch.setitem(sys.modules, "someones.kernels", module)
    monkeypatch.setitem(sys.modules, "tlcache.runtime.hooks", hooks)

    def told(name):
        found = [one for one in read.factories() if one["factory"] == f"someones.kernels:{name}"]
        return row(found, factory=f"someones.kernels:{name}") if found else None

    for n in 1, 2, 3, 3:
        module.kernel(n)
    assert told("kernel") == {
        "hits": 1,
        "misses": 3,
        "maxsize": 4,
        "currsize": 3,
        "evictions": 0,
        "thrashes": False,
    }
    for _ in range(3):
        for n in range(5):
            module.kernel(n)
            module.Holder.unbounded(n)
    assert told("kernel") == {
        "hits": 4,
        "misses": 15,
        "maxsize": 4,
        "currsize": 4,
        "evictions": 11,
        "thrashes": True,
    }
    assert told("Holder.unbounded") == {
        "hits": 10,
        "misses": 5,
        "maxsize": None,
        "currsize": 5,
        "evictions": 0,
        "thrashes": False,
    }
    assert told("plain") is None


@pytest.mark.parametrize(
    "hits, misses, maxsize, evictions, thrash",
    [
        (0, 66, 32, 34, True),  # 33 keys in turn, room for 32
        (31 * 100, 32, 32, 0, False),
        (0, 40, 32, 8, False),  # filled once, and a little over
        (1000, 200, 32, 168, False),  # it misses, and mostly hits
        (0, 1000, None, 0, False),
        (0, 2, 1, 1, False),
    ],
)
def test_a_cache_thrashes_when_more_than_its_size_went_and_most_calls_miss(
    hits, misses, maxsize, evictions, thrash
):
    from tlcache.runtime.layers import thrashes

    assert thrashes(hits, misses, maxsize, evictions) is thrash
