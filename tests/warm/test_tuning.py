"""Tuning: which schedules are tried, and that whatever goes wrong with one is its own affair."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from ops.catalog import OPERATORS
from tlcache import operators, targets
from tlcache.spec import KernelSpec
from tlcache.targets import CPU
from tlcache.warm import tuning

SM90, SM80 = targets.parse("sm90"), targets.parse("sm80")
WORKLOADS = {
    "rms_norm": [{"M": 4, "N": 256}, {"M": "dynamic", "N": 4096}, {"M": 1, "N": 65536}],
    "fused_add_rms_norm": [{"M": "dynamic", "N": 4096}, {"M": 8192, "N": 1000, "dtype": "fp32"}],
    "layer_norm": [{"M": "dynamic", "N": 4096}, {"M": 3, "N": 255}],
    "silu_and_mul": [{"M": "dynamic", "N": 4096}, {"M": 1, "N": 64}],
    "rope": [{"M": "dynamic", "H": 8, "D": 128}],
    "softmax": [{"M": "dynamic", "N": 4096}, {"M": 16384, "N": 128}],
    "gemm": [{"M": "dynamic", "N": 4096, "K": 4096}, {"M": 1, "N": 64, "K": 64}],
}
CASES = [(name, values) for name in WORKLOADS for values in WORKLOADS[name]]

# Tunes the workloads of argv (operator, values, limit), prints the results, and for each candidate
# whether its record was in the scratch root when it was said to be compiled.
TUNE = """
import json, os, sys
from pathlib import Path
from tlcache import operators, targets
from tlcache.store import record
from tlcache.warm import tuning

target = targets.parse(sys.argv[2])
timeout = float(sys.argv[3])
tasks = []
for name, values, limit in json.loads(sys.argv[1]):
    operator = operators.get(name)
    spec = operator.spec(values, target)
    tasks.append(tuning.plan(operator, spec, (1, 64), limit))
compiled, scratch = [], set()

def on_compiled(spec):
    root = os.environ["TILELANG_CACHE_DIR"]
    found = record.read(root, spec.action_key())
    sound = found is not None and record.sound_library(root, found) is not None
    compiled.append([dict(spec.schedule), sound])
    scratch.add(root)

measured, results = [], []
def tune():
    for result in tuning.tune(
        tasks, jobs=2, timeout=timeout, reps=10, on_compiled=on_compiled,
        on_measured=lambda spec: measured.append(dict(spec.schedule)),
    ):
        results.append({
            "tuned": result.tuned and result.tuned.to_json(),
            "reason": result.reason,
            "trials": [[dict(trial.spec.schedule), list(trial.microseconds), trial.reason]
                       for trial in result.trials],
        })
"""
SAY = """
print("RESULT " + json.dumps({
    "compiled": compiled, "measured": measured, "results": results, "scratch": list(scratch),
    "left": [path for path in scratch if os.path.exists(path)],
    "root": os.environ.get("TILELANG_CACHE_DIR"),
    **told,
}))
"""
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
"""A host without a GPU, whatever this one has."""


@pytest.fixture
def tune(python, trial_op):
    """Run TUNE and what comes after it in a fresh process; what it says."""

    def tune(then, tasks, target, timeout=60, **kwargs):
        ran = python(
            TUNE + "told = {}\n" + then + SAY, json.dumps(tasks), target, str(timeout), **kwargs
        )
        assert ran.code == 0, ran.err
        return json.loads(ran.out.rpartition("RESULT ")[2])

    return tune


def gone(pids: list[int], within: float = 10) -> bool:
    """Whether processes end, soon after the one that started them."""
    give_up = time.monotonic() + within
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < give_up:
        time.sleep(0.05)
    return not any(psutil.pid_exists(pid) for pid in pids)


# --- the plan ---


def test_every_operator_of_the_catalog_has_a_schedule_space_and_is_in_these_tests():
    assert set(WORKLOADS) == set(OPERATORS)
    for operator in OPERATORS.values():
        assert operator.candidates is not None and operator.example is not None, operator.name


@pytest.mark.parametrize("target", [SM90, SM80], ids=str)
@pytest.mark.parametrize(("name", "values"), CASES, ids=str)
def test_candidates_are_distinct_fit_the_kernel_and_leave_out_the_default(name, values, target):
    operator = OPERATORS[name]
    default = operator.spec(values, target)
    task = tuning.plan(operator, default)
    assert task.default == default
    assert default not in task.candidates
    assert 0 < len(task.candidates) <= 200
    assert len(set(task.candidates)) == len(task.candidates)
    workload = operator.workload(**values)
    for spec in task.candidates:
        operator.check_schedule(workload, spec.schedule, target)
        assert operator.accepts(spec), spec
        assert (spec.kernel, spec.workload, spec.target) == (
            default.kernel,
            default.workload,
            default.target,
        )


@pytest.mark.parametrize(("name", "values"), CASES, ids=str)
def test_nothing_is_tried_on_the_cpu(name, values):
    operator = OPERATORS[name]
    assert tuning.plan(operator, operator.spec(values, CPU)).candidates == ()


def test_an_operator_without_a_schedule_space_has_no_candidates():
    plain = replace(OPERATORS["rms_norm"], candidates=None)
    assert tuning.plan(plain, plain.spec({"M": 4, "N": 256}, SM90)).candidates == ()


def test_a_candidate_that_comes_twice_is_tried_once():
    operator = OPERATORS["rms_norm"]

    def twice(workload, target):
        return [*operator.candidates(workload, target)] * 2

    doubled = replace(operator, candidates=twice)
    spec = operator.spec({"M": 4, "N": 256}, SM90)
    assert tuning.plan(doubled, spec).candidates == tuning.plan(operator, spec).candidates


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7, 1000])
def test_a_limit_spreads_evenly_over_the_schedule_space(limit):
    operator = OPERATORS["gemm"]
    spec = operator.spec({"M": 4096, "N": 4096, "K": 4096}, SM90)
    every = tuning.plan(operator, spec).candidates
    some = tuning.plan(operator, spec, limit=limit).candidates
    assert len(some) == min(limit, len(every))
    places = [every.index(one) for one in some]
    assert places[0] == 0 and places == sorted(set(places))
    steps = {
        after - before for before, after in zip(places, [*places[1:], len(every)], strict=True)
    }
    assert max(steps) - min(steps) <= 1


def test_a_limit_of_as_many_as_there_are_leaves_out_none():
    operator = OPERATORS["softmax"]
    spec = operator.spec({"M": 4, "N": 256}, SM90)
    every = tuning.plan(operator, spec).candidates
    assert tuning.plan(operator, spec, limit=len(every)).candidates == every


def test_a_kernel_is_measured_at_its_own_rows_and_one_with_a_symbolic_m_at_those_asked_for():
    operator = OPERATORS["rms_norm"]
    own = operator.spec({"M": 17, "N": 256}, SM90)
    symbolic = operator.spec({"M": "dynamic", "N": 256}, SM90)
    assert tuning.plan(operator, own, (2, 3)).rows == (17,)
    assert tuning.plan(operator, symbolic, (2, 3)).rows == (2, 3)
    assert tuning.plan(operator, symbolic).rows == tuning.DYNAMIC_ROWS


def test_an_operator_without_an_m_is_measured_once():
    @dataclass(frozen=True)
    class Sized:
        N: int

    sized = replace(
        OPERATORS["softmax"],
        workload=Sized,
        schedule=lambda workload, target: {"threads": 128},
        check_schedule=lambda workload, schedule, target: None,
        candidates=lambda workload, target: [{"threads": 64}],
    )
    assert tuning.plan(sized, sized.spec({"N": 256}, SM90)).rows == (1,)


# --- without a GPU ---

NO_GPU = """
import psutil
from tlcache.errors import EnvironmentFault
from tlcache.warm import pool
try:
    tune()
except EnvironmentFault as error:
    told["error"] = [error.message, error.hint, error.exit_code]
children = psutil.Process().children(recursive=True)
told["children"] = [child.pid for child in children]
told["working"] = [
    child.pid for child in children if child.ppid() != os.getpid() or "spawn_main" in
    " ".join(child.cmdline())
]
"""


def test_without_a_gpu_tuning_is_a_fault_that_leaves_nothing_behind(tune, cache_root, tmp_path):
    # After it the best are compiled into a root of their own, by the fork server that was started
    # with the scratch root in its environment.
    told = tune(
        'os.environ.pop("TILELANG_CACHE_DIR")'
        + NO_GPU
        + """
told["unset"] = "TILELANG_CACHE_DIR" not in os.environ
(kept,) = pool.run([tasks[0].default], os.path.abspath("other"), jobs=1)
found = record.read("other", tasks[0].default.action_key())
told["kept"] = [kept[1].status, record.sound_library("other", found) is not None]
""",
        [["rms_norm", {"M": 4, "N": 64}, None]],
        "cpu",
        env=HIDDEN,
    )
    message, hint, code = told["error"]
    assert message == "the measuring process could not start on the GPU"
    assert "torch.zeros(1).cuda()" in hint
    assert code == 3
    assert [sound for _, sound in told["compiled"]] == [True]
    assert (told["results"], told["measured"]) == ([], [])
    assert len(told["scratch"]) == 1 and Path(told["scratch"][0]).name.startswith("tlcache-tune-")
    assert told["left"] == []
    assert told["unset"]
    assert told["working"] == []
    assert gone(told["children"])
    assert not cache_root.exists()
    assert told["kept"] == ["compiled", True]
    assert len(list((tmp_path / "other").glob("*/*/kernels/*"))) == 1


@pytest.mark.nvcc
def test_all_candidates_are_compiled_and_one_that_does_not_compile_stops_none(tune, cache_root):
    told = tune(NO_GPU, [["trial", {"M": 64}, None]], "sm90", env=HIDDEN)
    assert told["error"][2] == 3
    compiled = {schedule["kind"]: sound for schedule, sound in told["compiled"]}
    assert len(told["compiled"]) == len(compiled)
    assert compiled == {
        "slow": True,
        "fast": True,
        "broken": False,
        "spills": True,
        "wrong": True,
        "crashes": True,
        "hangs": True,
    }
    assert told["left"] == []
    assert told["root"] == str(cache_root)
    assert told["working"] == []
    assert gone(told["children"])


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.nvcc
def test_what_goes_wrong_is_dropped_with_the_reason_and_the_best_of_the_rest_is_kept(tune):
    told = tune("tune()\n", [["trial", {"M": 64}, None]], "auto", timeout=30)
    (result,) = told["results"]
    reasons = {schedule["kind"]: reason for schedule, _, reason in result["trials"]}
    times = {schedule["kind"]: times for schedule, times, _ in result["trials"]}
    print(json.dumps(result, indent=1))
    assert reasons.pop("slow") is None and reasons.pop("fast") is None
    assert "no_such_function" in reasons.pop("broken")
    spilled = re.fullmatch(r"spills: (\d+) bytes of local memory a thread", reasons.pop("spills"))
    assert spilled is not None and int(spilled[1]) >= 2048
    assert reasons.pop("wrong") == "its result at 64 rows is not that of the default schedule"
    assert "illegal memory access" in reasons.pop("crashes")
    assert reasons.pop("hangs") == "it did not end within 30 s"
    assert reasons == {}
    assert [kind for kind in times if times[kind]] == ["slow", "fast"]
    assert all(len(times[kind]) == 1 and times[kind][0] > 0 for kind in ("slow", "fast"))
    tuned = result["tuned"]
    assert tuned["spec"]["schedule"] == {"kind": "fast"}
    assert tuned["default"] == {"kind": "slow"}
    assert 0 < tuned["microseconds"] < 0.99 * tuned["default_microseconds"]
    assert tuned["device"]
    assert tuned["measured"]["rows"] == [64]
    assert (tuned["measured"]["candidates"], tuned["measured"]["dropped"]) == (7, 5)
    assert len(told["measured"]) == 7
    assert told["left"] == []


@pytest.mark.gpu
@pytest.mark.nvcc
def test_a_default_that_does_not_run_is_said_and_the_next_workload_is_tuned_all_the_same(tune):
    tasks = [
        ["trial", {"M": 64, "start": "broken"}, 1],
        ["trial", {"M": 64, "start": "crashes"}, 1],
        ["trial", {"M": "dynamic"}, 1],
        ["trial", {"M": 64, "start": "fast"}, 1],
    ]
    told = tune("tune()\n", tasks, "auto", timeout=30)
    broken, crashes, dynamic, fast = told["results"]
    for result, reason in ((broken, "no_such_function"), (crashes, "illegal memory access")):
        assert result["tuned"] is None
        assert result["reason"].startswith("the default schedule does not run: ")
        assert reason in result["reason"]
    assert dynamic["tuned"]["spec"]["schedule"] == {"kind": "fast"}
    assert dynamic["tuned"]["measured"]["rows"] == [1, 64]
    assert [len(times) for _, times, _ in dynamic["trials"]] == [2, 2]
    # Where no candidate is better, the default is the best.
    assert fast["tuned"]["spec"]["schedule"] == fast["tuned"]["default"] == {"kind": "fast"}
    assert fast["tuned"]["microseconds"] == fast["tuned"]["default_microseconds"]


@pytest.mark.gpu
def test_candidates_of_an_operator_of_the_catalog_are_measured(tune):
    told = tune("tune()\n", [["rms_norm", {"M": 16, "N": 1024}, 3]], "auto")
    (result,) = told["results"]
    assert [reason for _, _, reason in result["trials"]] == [None] * 4
    assert all(times[0] > 0 for _, times, _ in result["trials"])
    assert operators.get("rms_norm").accepts(KernelSpec.from_json(result["tuned"]["spec"]))
