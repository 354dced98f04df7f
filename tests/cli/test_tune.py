"""`tlcache tune`: what it would try, what it refuses, and that its file is used elsewhere."""

from __future__ import annotations

import json

import pytest

from tlcache import operators, targets
from tlcache.store import schedules
from tlcache.store.schedules import Tuned
from tlcache.warm import tuning

SM90 = targets.parse("sm90")
RMS_NORM = operators.get("rms_norm")
NO_GPU = "No GPU here: showing what would be tried for sm_90a."


def rms_norm(**fields):
    return {"op": "rms_norm", "M": 4, "N": 256, **fields}


RMS = rms_norm()


def number(**values):
    """Candidates of an rms_norm, the default included."""
    return 1 + len(
        tuning.plan(RMS_NORM, RMS_NORM.spec({"M": 4, "N": 256, **values}, SM90)).candidates
    )


def entry(M=4, N=128):
    """A tuned schedule that some other GPU found."""
    spec = RMS_NORM.spec({"M": M, "N": N}, SM90)
    best = tuning.plan(RMS_NORM, spec).candidates[-1]
    return Tuned("rms_norm", best, 1.5, dict(spec.schedule), 2.0, "NVIDIA H100", {"rows": [M]})


@pytest.fixture
def tune(tlcache, shapes, cache_root):
    """`tlcache tune` on a host without a GPU, whatever this one has."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    return lambda *args, workloads=(RMS,): tlcache(
        "tune", "--shapes", shapes(*workloads), *args, env=hidden
    )


# --- what it would try ---


def test_a_dry_run_says_what_would_be_tried_and_writes_nothing(tune, cache_root, tmp_path):
    ran = tune("--dry-run", "-o", tmp_path / "schedules.json", workloads=[rms_norm(M=[4, 8])])
    assert ran.code == 0, ran.err
    assert ran.out.splitlines() == [
        f"would try  {number()} candidates of rms_norm M=4 N=256 eps=1e-06 bf16 sm_90a",
        f"would try  {number(M=8)} candidates of rms_norm M=8 N=256 eps=1e-06 bf16 sm_90a",
        f"2 workloads  {number() + number(M=8)} candidates",
    ]
    assert ran.err.splitlines() == [NO_GPU]
    assert not cache_root.exists() and not (tmp_path / "schedules.json").exists()


def test_the_json_of_a_dry_run_has_every_schedule_with_the_default_first(tune):
    workloads = [rms_norm(), {"op": "gemm", "M": "dynamic", "N": 64, "K": 64}]
    ran = tune("--dry-run", "--json", "--rows", "2,30", "--limit", 3, workloads=workloads)
    assert ran.code == 0, ran.err
    told = ran.json
    assert list(told) == ["schema", "tasks", "candidates"]
    assert (told["schema"], told["candidates"]) == (1, 8)
    first, second = told["tasks"]
    default = RMS_NORM.spec({"M": 4, "N": 256}, SM90)
    task = tuning.plan(RMS_NORM, default, limit=3)
    assert first == {
        "op": "rms_norm",
        "workload": dict(default.workload),
        "target": "sm_90a",
        "rows": [4],
        "candidates": [dict(spec.schedule) for spec in (default, *task.candidates)],
    }
    assert (second["op"], second["rows"], len(second["candidates"])) == ("gemm", [2, 30], 4)


def test_a_shapes_file_that_asks_for_nothing_has_nothing_to_try(tune, tlcache, shapes):
    path = shapes(document={"version": 1, "workloads": []})
    ran = tlcache("tune", "--shapes", path, "--dry-run", env={"CUDA_VISIBLE_DEVICES": ""})
    assert (ran.code, ran.out) == (0, "0 workloads  0 candidates\n"), ran.err


def test_a_dry_run_imports_neither_torch_nor_tilelang(python, shapes):
    ran = python(
        "import sys\n"
        "from tlcache.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    heavy = {'torch', 'tilelang', 'tvm', 'tvm_ffi', 'numpy'} & set(sys.modules)\n"
        "    print('HEAVY', sorted(heavy))",
        *("tune", "--shapes", str(shapes(rms_norm())), "--dry-run"),
    )
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[-1] == "HEAVY []"


def test_workloads_with_a_schedule_of_their_own_and_factories_are_named_and_left(tune, tmp_path):
    (tmp_path / "project.py").write_text("def plain(N):\n    raise RuntimeError('not called')\n")
    own = dict(entry(4, 256).spec.schedule)
    workloads = [
        {"kernel": "project:plain", "args": {"N": 64}},
        rms_norm(schedule=own),
        rms_norm(M=8),
    ]
    ran = tune("--dry-run", "--json", workloads=workloads)
    assert ran.code == 0, ran.err
    assert [task["workload"]["M"] for task in ran.json["tasks"]] == [8]
    assert ran.err.splitlines() == [
        NO_GPU,
        "note: plain N=64 sm_90a has no schedule space; left as it is",
        "note: workloads[1] has a schedule of its own; left as it is",
    ]


def test_an_operator_of_another_package_is_tuned_too(tune, trial_op):
    ran = tune("--dry-run", workloads=[{"op": "trial", "M": [1, 64]}])
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[-1] == "2 workloads  14 candidates"


# --- what it refuses ---


def test_without_a_gpu_nothing_is_done_and_the_hint_says_where_to_go(tune, cache_root, tmp_path):
    path = tmp_path / "schedules.json"
    schedules.dump(path, [entry()])
    before = path.read_bytes()
    ran = tune("-o", path)
    assert (ran.code, ran.out) == (3, "")
    assert ran.err == (
        "error: tuning measures kernels on a GPU, and there is none here\n\n"
        "hint: run `tlcache tune` on a GPU host, and give its file to "
        "`tlcache warm --schedules` here\n"
    )
    assert path.read_bytes() == before
    assert not cache_root.exists()


@pytest.mark.parametrize("rows", ["", "0", "1,-1", "1,,2", "1.5", "dynamic"])
def test_rows_that_are_no_positive_numbers_are_refused(tune, rows):
    ran = tune("--dry-run", "--rows", rows)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        f"error: --rows is {rows!r}; it is positive numbers with commas between them\n\n"
        "hint: `--rows 1,128,4096`\n"
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [("--limit", 0), ("--limit", "x"), ("--jobs", 0), ("--timeout", 0), ("--timeout", -1)],
)
def test_a_number_that_is_none_is_refused(tune, option, value):
    ran = tune("--dry-run", option, value)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: Invalid value for '{option}'")


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (rms_norm(M=0), "workloads[0].M: M is 0"),
        (rms_norm(op="rmsnorm"), "workloads[0].op: unknown operator 'rmsnorm'"),
        (rms_norm(width=3), "workloads[0].width: rms_norm has no field 'width'"),
    ],
)
def test_bad_shapes_are_refused(tune, workload, message):
    ran = tune("--dry-run", workloads=[workload])
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err and "\nhint: " in ran.err


def test_missing_shapes_are_refused(tlcache, tmp_path):
    ran = tlcache("tune", "--shapes", tmp_path / "none.json", "--dry-run")
    assert (ran.code, ran.out) == (2, "")
    assert "none.json cannot be read: no such file" in ran.err


@pytest.mark.parametrize("text", ["", "{}", '{"version": 1, "schedules": [{}]}', "[" * 100_000])
def test_a_damaged_output_file_is_refused_before_anything_is_done_and_stays(
    tune, tmp_path, cache_root, text
):
    path = tmp_path / "schedules.json"
    path.write_text(text)
    ran = tune("--dry-run", "-o", path)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.splitlines()[-3].startswith(f"error: {path}")
    assert path.read_text() == text
    assert not cache_root.exists()


# --- on a GPU ---

SERVE = """
import json, sys, torch
import ops
from tlcache import operators, runtime, targets
best = json.loads(sys.argv[1])
op = ops.RMSNormFwdOp(256, 1e-6, torch.bfloat16, rows="exact", on_miss="error")
x, w = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((4, 256), (256,)))
want = torch.nn.functional.rms_norm(x.float(), (256,), w.float(), 1e-6)
torch.testing.assert_close(op(x, w).float(), want, rtol=1.6e-2, atol=1e-2)
(kernel,) = op.state.kernels.values()
assert dict(kernel.schedule) == best["rms_norm"], kernel.schedule
trial = operators.get("trial")
spec = runtime.tuned(trial, trial.spec({"M": 64}, targets.detect()))
assert dict(spec.schedule) == best["trial"] == {"kind": "fast"}, spec
x = torch.randn(64, 256, device="cuda")
assert torch.equal(runtime.resolve(spec, on_miss="error")(x), x * 2)
assert (runtime.counters().restored, runtime.counters().compiled) == (2, 0)
assert not {"tilelang", "tvm"} & set(sys.modules)
"""


@pytest.mark.gpu
@pytest.mark.nvcc
def test_what_was_tuned_is_warmed_in_another_root_and_served_from_there(
    tlcache, python, shapes, trial_op, tmp_path, cache_root
):
    path, output = shapes(rms_norm(), {"op": "trial", "M": 64}), tmp_path / "schedules.json"
    schedules.dump(output, [entry(4, 128), entry(4, 256)])
    named = ("--shapes", path, "-o", output, "--limit", 4, "--timeout", 30)
    ran = tlcache("tune", *named, "--verbose")
    assert ran.code == 0, ran.err
    print(ran.out, ran.err)
    header, first, second, counts = ran.out.splitlines()
    assert header.split() == ["OP", "WORKLOAD", "DEFAULT", "TUNED", "GAIN", "SCHEDULE"]
    assert first.startswith("rms_norm") and second.startswith("trial")
    assert second.split()[-1] == "kind=fast"
    assert counts.startswith("2 workloads  10 candidates  ")
    assert "no_such_function" in ran.err
    assert f"`tlcache warm --shapes {path} --schedules {output}`" in ran.err

    found = {schedules.key(one.spec): one for one in schedules.load(output)}
    assert len(found) == 3
    assert found[schedules.key(entry(4, 128).spec)] == entry(4, 128)
    mine = found[schedules.key(entry(4, 256).spec)]
    assert mine.device != "NVIDIA H100" and mine.default_microseconds is not None

    best = {one.op: dict(one.spec.schedule) for one in found.values() if one != entry(4, 128)}
    other = {"TILELANG_CACHE_DIR": str(tmp_path / "other")}
    warmed = tlcache("warm", "--shapes", path, "--target", "auto", "--schedules", output, env=other)
    assert warmed.code == 0, warmed.err
    assert warmed.out.startswith("2 kernels  2 compiled")
    for place in ({}, other):  # where it was tuned, and where it was carried
        served = python(SERVE, json.dumps(best), env=place)
        assert served.code == 0, served.err


@pytest.mark.gpu
@pytest.mark.nvcc
def test_a_workload_that_cannot_be_tuned_is_said_and_the_others_are_kept(
    tlcache, shapes, trial_op, tmp_path
):
    path = shapes({"op": "trial", "M": 64, "start": ["broken", "slow"]})
    output = tmp_path / "schedules.json"
    named = ("--shapes", path, "-o", output, "--limit", 1, "--json")
    ran = tlcache("tune", *named)
    assert ran.code == 1, ran.err
    broken, slow = ran.json["tasks"]
    assert broken["tuned"] is None and "no_such_function" in broken["error"]
    assert slow["error"] is None and slow["tuned"]["spec"]["schedule"] == {"kind": "fast"}
    assert [trial["schedule"]["kind"] for trial in slow["trials"]] == ["slow", "fast"]
    assert [one.to_json() for one in schedules.load(output)] == [slow["tuned"]]
