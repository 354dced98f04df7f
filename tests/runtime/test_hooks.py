"""The hooks on TileLang, in processes of their own, with the kernels of `tests/e2e/programs`."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "e2e" / "programs"

# Runs a body with the kernels imported, and tells what became of its requests.
REPORT = """
import json, os, sys
def report(**more):
    from tlcache import runtime
    from tlcache.runtime import events, recorder
    print("REPORT " + json.dumps({
        "counters": vars(runtime.counters()),
        "events": [event.to_json() for event in events.log.all()],
        "document": recorder.document(),
        **more,
    }))
"""


INSTALL = "from tlcache.runtime import hooks; hooks.install()"


@pytest.fixture
def hooked(run, tmp_path):
    """Run code with the hooks installed, before TileLang is imported or where the code says."""

    def hooked(code: str, *, first: str = INSTALL, **env):
        (tmp_path / "cpu_kernels.py").write_text((PROGRAMS / "cpu_kernels.py").read_text())
        script = tmp_path / "program.py"
        body = textwrap.indent(code.strip(), "    ")
        script.write_text(f"{REPORT}\n{first}\nif __name__ == '__main__':\n{body}\n")
        told = {"TILELANG_DEFAULT_TARGET": "c", "TLCACHE_RESTORE": "0", **env}
        ran = run([sys.executable, script], env=told)
        assert ran.code == 0, ran.err
        return json.loads(ran.out.rpartition("REPORT ")[2])

    return hooked


def outcomes(report):
    return {name: report["counters"][name] for name in ("memory", "disk", "compiled", "failed")}


def test_each_request_is_counted_by_what_became_of_it(hooked):
    report = hooked("""
import cpu_kernels as k, tilelang
k.add(4); k.add(8)                       # compiled
k.add(4)                                 # no request: the JITImpl has it
type(k.add).compile(k.add, 4)            # TileLang's memory
from tilelang.cache import _dispatch_map
_dispatch_map["cython"]._memory_cache.clear()
type(k.add).compile(k.add, 4)            # its disk
try:
    k.add("four")                        # it does not come as far as a request
except Exception:
    pass
report()
""")
    assert outcomes(report) == {"memory": 1, "disk": 1, "compiled": 2, "failed": 0}
    assert [event["kind"] for event in report["events"]] == ["compiled", "compiled", "disk"]
    assert {event["origin"] for event in report["events"]} == {"foreign"}
    assert [event["title"] for event in report["events"]] == ["add N=4", "add N=8", "add N=4"]
    assert report["events"][0]["seconds"] > report["events"][2]["seconds"] > 0
    warms = report["events"][1]["workload"]
    assert (warms["kernel"], warms["args"]) == ("cpu_kernels:add", {"N": 8})


def test_a_compile_that_fails_is_counted_and_told(hooked):
    report = hooked("""
import tilelang, tilelang.language as T
import cpu_kernels as k
bad = tilelang.jit(out_idx=[-1], compile_flags=["--no-such-flag"])(k.add.func.orig_func)
try:
    bad(4)
except Exception as error:
    print(error)
report()
""")
    assert outcomes(report) == {"memory": 0, "disk": 0, "compiled": 0, "failed": 1}
    (event,) = report["events"]
    assert event["kind"] == "failed" and event["reason"]
    assert report["document"]["workloads"] == []


def test_the_resolvers_own_compiles_are_counted_by_it_alone(hooked):
    report = hooked("""
import torch, ops
ops.rms_norm(torch.ones(2, 64), torch.ones(64))
report()
""")
    assert outcomes(report) == {"memory": 0, "disk": 0, "compiled": 1, "failed": 0}
    assert [event["origin"] for event in report["events"]] == ["ops"]
    (workload,) = report["document"]["workloads"]
    assert workload["op"] == "rms_norm" and workload["N"] == 64


@pytest.mark.parametrize("order", ["before", "after"])
def test_wrappers_of_the_same_functions_chain_whoever_comes_first(hooked, order):
    """As vLLM's monitor does it: plain functions in the place of two methods."""
    theirs = """
import functools
from tilelang.jit import JITImpl
from tilelang.jit.kernel import JITKernel
seen = []
def watched(owner, name):
    original = getattr(owner, name)
    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        seen.append(name)
        return original(self, *args, **kwargs)
    setattr(owner, name, wrapper)
watched(JITKernel, "__init__"); watched(JITImpl, "compile")
"""
    ours = "from tlcache.runtime import hooks; hooks.install()"
    first = theirs + ours if order == "before" else ours + theirs
    report = hooked(
        """
import cpu_kernels as k, torch
assert k.add(4)(torch.ones(4), torch.ones(4)).sum() == 8
report(seen=seen)
""",
        first=first,
    )
    assert outcomes(report) == {"memory": 0, "disk": 0, "compiled": 1, "failed": 0}
    assert report["seen"] == ["compile", "__init__"]


def test_hooks_that_come_after_the_kernels_were_made_read_the_closures(hooked):
    report = hooked(
        """
import cpu_kernels as k
made = k.scaled(8, k.Config(k.Mode.PLAIN))
from tlcache.runtime import hooks
hooks.install(); hooks.install()
made(2); k.add(4)
report(jits=len(hooks.jits()), factories=hooks.factories())
""",
        first="",
    )
    assert outcomes(report)["compiled"] == 2
    scaled, add = report["document"]["workloads"]
    assert (scaled["kernel"], scaled["args"]["N"]) == ("cpu_kernels:scaled", 8)
    assert scaled["schedule"] == {"unroll": 2}
    assert (add["kernel"], add["args"]) == ("cpu_kernels:add", {"N": 4})
    assert report["factories"] == [["cpu_kernels", "scaled"]]
    assert report["jits"] == 2


def test_jits_are_held_weakly(hooked):
    report = hooked("""
import cpu_kernels as k, gc
from tlcache.runtime import hooks
before = len(hooks.jits())
k.scaled(8, k.Config(k.Mode.PLAIN)); during = len(hooks.jits())
k.scaled.cache_clear(); gc.collect()
report(jits=[before, during, len(hooks.jits())])
""")
    before, during, after = report["jits"]
    assert (during, after) == (before + 1, before)


def test_the_callers_list_of_outputs_is_left_as_it_was(hooked):
    report = hooked("""
import cpu_kernels as k
k.add(4); k.add(6)
report(out_idx=k.add.out_idx)
""")
    assert report["out_idx"] == [-1]


# --- the policy ---


def test_a_compile_after_ready_is_an_error_where_it_was_ruled_out(hooked):
    report = hooked(
        """
import cpu_kernels as k
from tlcache import runtime
from tlcache.errors import MissError
k.add(4)
runtime.mark_ready()
k.add(4)
try:
    k.add(6)
except MissError as error:
    told = str(error)
report(told=told)
""",
        TLCACHE_ON_COMPILE="error",
    )
    assert outcomes(report) == {"memory": 0, "disk": 0, "compiled": 1, "failed": 0}
    assert report["events"][-1]["kind"] == "failed" and report["events"][-1]["after_ready"]
    assert report["events"][-1]["workload"]["args"] == {"N": 6}
    assert "A float32[6]" in report["told"] and "hint: `tlcache run --record" in report["told"]


def test_a_compile_is_warned_of_after_ready_or_where_asked_for(hooked):
    # Each in a fork of one process, which has TileLang already.
    report = hooked("""
import cpu_kernels as k, logging, os
from tlcache import runtime
def compile(N, policy, marks):
    said = []
    handler = logging.Handler(); handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("tlcache.runtime.hooks").addHandler(handler)
    os.environ["TLCACHE_ON_COMPILE"] = policy
    exec(marks)
    k.add(N)
    return said
told = {}
from_start = "os.environ['TLCACHE_ON_COMPILE_FROM'] = 'start'"
for N, case in enumerate([
    ("allow", ""), ("allow", "runtime.mark_ready()"), ("warn", ""),
    ("warn", "runtime.mark_ready()"), ("warn", from_start),
], 4):
    reading, writing = os.pipe()
    if not os.fork():
        os.write(writing, json.dumps(compile(N, *case)).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        told[" ".join([*case, f"add N={N}"])] = json.load(answer)
report(told=told)
""")
    assert {case: len(said) for case, said in report["told"].items()} == {
        "allow  add N=4": 0,
        "allow runtime.mark_ready() add N=5": 1,
        "warn  add N=6": 0,
        "warn runtime.mark_ready() add N=7": 1,
        "warn os.environ['TLCACHE_ON_COMPILE_FROM'] = 'start' add N=8": 1,
    }
    for case, said in report["told"].items():
        assert all(case[-7:] in one for one in said), (case, said)


TUNED = """
import tilelang, tilelang.language as T
@tilelang.jit(out_idx=[-1])
def copying(N, unroll=None):
    M = N + 0 * unroll
    @T.prim_func
    def main(A: T.Tensor((M,), "float32"), B: T.Tensor((M,), "float32")):
        with T.Kernel(1):
            for i in T.serial(M // unroll):
                for j in T.serial(unroll):
                    B[i * unroll + j] = A[i * unroll + j]
    return main
tuned = tilelang.autotune(configs=[{"unroll": 1}, {"unroll": 2}], warmup=1, rep=1)(copying)
def copying_on_gpu(threads=None):
    N = 256
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=threads):
            for i in T.Parallel(N):
                B[i] = A[i]
    return main
"""


def test_a_tuner_whose_candidates_were_refused_is_refused_itself(hooked, tmp_path):
    """TileLang's tuner keeps the best of those that compile, and says nothing of the others."""
    (tmp_path / "tuned.py").write_text(TUNED)
    report = hooked(
        """
from tuned import copying, tuned
from tlcache.errors import MissError
copying(8, unroll=1)                                # one of the two is there
os.environ["TLCACHE_ON_COMPILE"] = "error"
try:
    tuned(8)
except MissError as error:
    told = str(error)
report(told=told)
""",
        TLCACHE_ON_COMPILE_FROM="start",
    )
    assert "the kernel copying N=8 unroll=2 (A float32[8], B float32[8]) is not" in report["told"]
    assert outcomes(report)["compiled"] == 1
    assert [(event["kind"], event["title"]) for event in report["events"]] == [
        ("compiled", "copying N=8 unroll=1"),
        ("failed", "copying N=8 unroll=2"),
    ]
    assert not list(tmp_path.glob("cache/*/*/autotuner/*/best_config.json"))


def test_a_parallel_compile_that_ignores_errors_says_which_were_refused(hooked, tmp_path):
    (tmp_path / "tuned.py").write_text(TUNED)
    report = hooked(
        """
from tuned import copying
import logging, tilelang
said = []
handler = logging.Handler(); handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("tilelang.jit").addHandler(handler)
kernels = copying.par_compile([{"N": 8, "unroll": 2}], ignore_error=True)
report(said=said, kernels=[kernel is None for kernel in kernels])
""",
        TLCACHE_ON_COMPILE="error",
        TLCACHE_ON_COMPILE_FROM="start",
    )
    assert report["kernels"] == [True]
    assert any("is not in the cache" in said for said in report["said"])
    (event,) = report["events"]
    assert event["kind"] == "failed" and event["reason"].startswith("MissError")


@pytest.mark.nvcc
@pytest.mark.parametrize("policy", ["allow", "error"])
def test_candidates_that_are_compiled_in_a_group_are_requests_like_others(hooked, tmp_path, policy):
    (tmp_path / "tuned.py").write_text(TUNED)
    report = hooked(
        """
from tuned import copying_on_gpu
from tilelang.autotuner import AutoTuner
tuner = AutoTuner.from_kernel(copying_on_gpu, [{"threads": 64}, {"threads": 128}])
gpu = json.loads(os.environ["TILELANG_DEFAULT_TARGET"])
tuner.set_compile_args(out_idx=[-1], target=gpu, execution_backend="tvm_ffi")
try:
    tuner.run(enable_grouped_compile=True, warmup=1, rep=1)
except Exception as error:
    told = type(error).__name__               # nothing can be measured here
report(told=told)
""",
        TILELANG_DEFAULT_TARGET='{"kind": "cuda", "arch": "sm_90a"}',
        TLCACHE_ON_COMPILE=policy,
        TLCACHE_ON_COMPILE_FROM="start",
    )
    titles = [(event["kind"], event["title"]) for event in report["events"]]
    if policy == "error":
        assert report["told"] == "MissError"
        assert titles == [("failed", "copying_on_gpu")] * 2
        assert report["document"].get("unreplayable") is None
    else:
        assert titles == [("compiled", "copying_on_gpu")] * 2
        assert outcomes(report) == {"memory": 0, "disk": 0, "compiled": 2, "failed": 0}
        (lost,) = report["document"]["unreplayable"]
        assert "in a group" in lost["reason"]


# --- where a kernel cannot be replayed ---


LOST = """
import tilelang, tilelang.language as T
def copying(N):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(1):
            for i in T.serial(N):
                B[i] = A[i]
    return main
class Thing:
    def __init__(self, size=5):
        self.size = size
    def method(self):
        N = self.size
        @tilelang.jit(out_idx=[-1])
        def kernel():
            return copying(N)
        return kernel()
def with_object(thing):
    N = thing.size
    @tilelang.jit(out_idx=[-1])
    def kernel():
        return copying(N)
    return kernel()
def without_names(*sizes):
    N = sum(sizes)
    @tilelang.jit(out_idx=[-1])
    def kernel():
        return copying(N)
    return kernel()
def nameless():
    return tilelang.jit(out_idx=[-1])(copying)(7)
def made_elsewhere(N):
    M = N + 0
    @T.prim_func
    def main(A: T.Tensor((M,), "float32"), B: T.Tensor((M,), "float32")):
        with T.Kernel(1):
            for i in T.serial(M):
                B[i] = A[i]
    return main
def compiled(N):
    return tilelang.compile(made_elsewhere(N))
"""


def test_what_cannot_be_made_again_is_listed_with_the_reason(hooked, tmp_path):
    (tmp_path / "lost.py").write_text(LOST)
    reasons = {
        "Thing().method()": "it is made in a method, lost:Thing.method",
        "with_object(Thing(4))": "its argument thing cannot be written down: a lost.Thing has",
        "without_names(2, 4)": "without_names takes any number of arguments without names",
        "nameless()": "lost has no name for it",
        "compiled(8)": "its closure does not tell the N of made_elsewhere",
    }
    report = hooked("\n".join(["from lost import *", *reasons, "report()"]))
    assert report["document"]["workloads"] == []
    listed = {one["params"][0]: one for one in report["document"]["unreplayable"]}
    assert len(listed) == len(report["document"]["unreplayable"]) == len(reasons)
    for (call, reason), size in zip(reasons.items(), (5, 4, 6, 7, 8), strict=True):
        lost = listed[f"A float32[{size}]"]
        assert reason in lost["reason"], call
        assert lost["params"] == [f"A float32[{size}]", f"B float32[{size}]"]
        assert lost["remedy"], call


def test_what_a_script_without_a_guard_has_is_listed_with_the_remedy(tlcache, tmp_path):
    script = tmp_path / "script.py"
    body = (PROGRAMS / "cpu_kernels.py").read_text() + "\n\nadd(4)\n"
    script.write_text(body)
    record = tmp_path / "shapes.json"
    env = {"TILELANG_DEFAULT_TARGET": "c"}
    ran = tlcache("run", "--record", record, "--", sys.executable, script, env=env)
    assert ran.code == 0, ran.err
    document = json.loads(record.read_text())
    (lost,) = document["unreplayable"]
    assert "the script script.py, which would run as a whole" in lost["reason"]
    assert 'if __name__ == "__main__"' in lost["remedy"]
    warmed = tlcache("warm", "--shapes", record, "--target", "cpu")
    assert warmed.code == 0
    assert "not to be warmed: __main__:add (A float32[4], " in warmed.err
