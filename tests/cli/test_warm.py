"""`tlcache warm`: what it says, what it writes, and that the next process restores it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest

from tests.environment import clean_environment
from tlcache import operators, targets
from tlcache.errors import TargetError
from tlcache.fingerprint import platform_name, tilelang_version
from tlcache.store import layout, record

TLCACHE = [sys.executable, "-c", "from tlcache.cli import main; main()"]
ROWS = (1, 2)
ONLY = "block_m=1 threads=1 each=1 prefetch=False"  # the schedule on the CPU

# Restores kernels by their specs (JSON in argv), runs those of the CPU, and imports TileLang last.
RESTORE = """
import json, sys, torch
from tlcache import runtime
from tlcache.spec import KernelSpec
torch.manual_seed(0)
for text, by in json.loads(sys.argv[1]):
    launcher = runtime.resolve(KernelSpec.from_json(text), on_miss="error")
    x = torch.randn(64)
    torch.testing.assert_close(launcher(x), x * by, rtol=0, atol=0)
assert "tilelang" not in sys.modules
import tilelang
print(runtime.counters().restored, runtime.counters().compiled)
"""

# The same for rms_norm on a root that cannot be written; the second root holds no kernel.
SERVE_READ_ONLY = """
import errno, json, os, sys, torch
from tlcache import runtime
from tlcache.spec import KernelSpec
for root in os.environ["TILELANG_CACHE_DIR"], sys.argv[2]:
    try:
        open(os.path.join(root, "probe"), "w")
    except OSError as error:
        assert error.errno == errno.EROFS
    else:
        sys.exit(f"{root} is not read-only")
w = torch.randn(64)
for data in json.loads(sys.argv[1]):
    spec = KernelSpec.from_json(data)
    x = torch.randn(spec.workload["M"], 64)
    want = torch.nn.functional.rms_norm(x, (64,), w, 1e-6)
    torch.testing.assert_close(runtime.resolve(spec)(x, w), want, rtol=1e-5, atol=1e-6)
print(runtime.counters().restored, runtime.counters().compiled)
assert "tilelang" not in sys.modules
os.environ["TILELANG_CACHE_DIR"] = sys.argv[2]
import tilelang
"""

NOTHING = {"version": 1, "workloads": []}

FACTORIES = '''
import time
from pathlib import Path

import tilelang
import tilelang.language as T


@tilelang.jit(out_idx=[1])
def plain(N: int, by: float):
    @T.prim_func
    def plain(x: T.Tensor((N,), "float32"), y: T.Tensor((N,), "float32")):
        with T.Kernel(1):
            for i in T.serial(N):
                y[i] = x[i] * by

    return plain


def body(N, by):
    @T.prim_func
    def scale(x: T.Tensor((N,), "float32"), y: T.Tensor((N,), "float32")):
        with T.Kernel(1):
            for i in T.serial(N):
                y[i] = x[i] * by

    return scale


def lazy(N, target):
    @tilelang.jit(out_idx=[1], target={"kind": {"cpu": "c"}[target]})
    def lazy(by):
        return body(N, by)

    return lazy


def ready(N, by, target):
    return tilelang.compile(body(N, by), out_idx=[1], target={"kind": {"cpu": "c"}[target]})


def meets(N, me, other, seconds, target):
    """Says in a file whether `other` is being compiled while it is."""
    Path(f"{me}.here").touch()
    give_up = time.monotonic() + seconds
    while not (met := Path(f"{other}.here").exists()) and time.monotonic() < give_up:
        time.sleep(0.02)
    if met:
        Path(f"{me}.met").touch()
        while not Path(f"{other}.met").exists() and time.monotonic() < give_up:
            time.sleep(0.02)
    Path(f"{me}.here").unlink()
    return ready(N, 2.0, target)
'''


def rms_norm(*rows, **fields):
    return {"op": "rms_norm", "M": list(rows), "N": 64, "dtype": "float32", **fields}


def tree(root):
    """Every path below a root, with when it was changed."""
    return {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]}


def has_gpu():
    try:
        targets.detect()
    except TargetError:
        return False
    return True


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess]:
    """A root with two kernels for the CPU, and what the warm said; tests work on copies."""
    place = tmp_path_factory.mktemp("warmed")
    (place / "shapes.json").write_text(json.dumps({"version": 1, "workloads": [rms_norm(*ROWS)]}))
    done = subprocess.run(
        [*TLCACHE, "warm", "--shapes", "shapes.json", "--target", "cpu"],
        cwd=place,
        env=clean_environment(TILELANG_CACHE_DIR=str(place / "cache")),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return place / "cache", done


@pytest.fixture
def copied(warmed: tuple[Path, object], cache_root: Path) -> Path:
    shutil.copytree(warmed[0], cache_root)
    return cache_root


@pytest.fixture
def warm(tlcache: Callable, shapes: Callable) -> Callable:
    """`tlcache warm --shapes` for workloads, with further arguments."""
    return lambda *args, rows=ROWS, **fields: tlcache(
        "warm", "--shapes", shapes(rms_norm(*rows), **fields), *args
    )


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    path = tmp_path / "project_kernels.py"
    path.write_text(FACTORIES)
    return path


# --- what it says ---


def test_a_warm_says_what_it_compiled_and_what_that_saves(warmed):
    root, done = warmed
    counts, saves = done.stdout.splitlines()
    assert re.fullmatch(
        r"2 kernels  2 compiled  0 already there  0 failed      \d+ KiB written", counts
    )
    assert re.fullmatch(
        r"The next start saves about \d+(\.\d)? m?s of compiling on each process\.", saves
    )
    assert done.stderr == ""
    assert len(list(layout.records(root))) == len(list(layout.entries(root))) == 2


def test_a_second_warm_compiles_nothing_and_writes_nothing(warm, copied):
    before = tree(copied)
    ran = warm("--target", "cpu")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("2 kernels  0 compiled  2 already there  0 failed\n")
    assert tree(copied) == before


def test_a_dry_run_writes_nothing_and_says_what_it_would_compile(warm, cache_root):
    ran = warm("--target", "cpu", "--dry-run")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines() == [
        f"would compile  rms_norm M=1 N=64 eps=1e-06 fp32 {ONLY} cpu",
        f"would compile  rms_norm M=2 N=64 eps=1e-06 fp32 {ONLY} cpu",
        "2 kernels  2 to compile  0 already there",
    ]
    assert ran.err == ""
    assert not cache_root.exists()


def test_a_dry_run_counts_what_is_there_and_leaves_it_alone(warm, copied):
    before = tree(copied)
    ran = warm("--target", "cpu", "--dry-run", rows=(1, 2, 3))
    assert ran.code == 0, ran.err
    assert ran.out.splitlines() == [
        f"would compile  rms_norm M=3 N=64 eps=1e-06 fp32 {ONLY} cpu",
        "3 kernels  1 to compile  2 already there",
    ]
    assert tree(copied) == before


def test_a_check_exits_with_0_where_nothing_is_missing(warm, copied):
    before = tree(copied)
    ran = warm("--target", "cpu", "--check")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("2 kernels  0 compiled  2 already there  0 failed\n")
    assert ran.err == ""
    assert tree(copied) == before


def test_a_check_exits_with_1_and_names_what_is_missing(warm, copied, tmp_path):
    before = tree(copied)
    ran = warm("--target", "cpu", "--check", rows=(1, 3, 2, 4))
    assert ran.code == 1
    assert ran.out == (
        "2 of 4 kernels are missing: "
        "rms_norm M=3 N=64 eps=1e-06 fp32 cpu, rms_norm M=4 N=64 eps=1e-06 fp32 cpu\n"
    )
    path = tmp_path / "shapes.json"
    assert ran.err.startswith(f"\nhint: `tlcache warm --shapes {path} --target cpu` compiles them")
    assert tree(copied) == before


def test_a_check_names_five_missing_kernels_at_most(warm, cache_root):
    ran = warm("--target", "cpu", "--check", rows=range(1, 9))
    assert ran.code == 1
    assert ran.out.startswith("8 of 8 kernels are missing: ")
    assert ran.out.count("rms_norm M=") == 5 and ran.out.endswith(" and 3 more\n")
    assert not cache_root.exists()


def test_the_command_in_the_hint_of_a_check_compiles_what_was_missing(
    tlcache, run, shapes, tmp_path, cache_root
):
    path = shapes(rms_norm(1)).rename(tmp_path / "the shapes.json")
    command = ("warm", "--shapes", path, "--cache-dir", tmp_path / "other", "--target", "cpu")
    ran = tlcache(*command, "--check")
    assert ran.code == 1
    hinted = re.search(r"hint: `(tlcache warm [^`]*)`", ran.err)
    assert hinted is not None, ran.err
    # `tlcache` as these tests start it, whether or not its script is on PATH.
    program = tmp_path / "bin" / "tlcache"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{TLCACHE[-1]}" "$@"\n')
    program.chmod(0o755)
    path_variable = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    done = run(["sh", "-c", hinted[1]], env={"PATH": path_variable})
    assert done.code == 0, done.err
    assert tlcache(*command, "--check").code == 0
    assert not cache_root.exists()


def test_json_is_all_of_stdout_and_says_what_became_of_each_kernel(warm, copied, tmp_path):
    ran = warm("--target", "sm90", "--target", "cpu", "--check", "--json", rows=(2, 3))
    assert ran.code == 1
    told = ran.json
    assert list(told) == [
        *("schema", "root", "targets", "shard", "published", "kernels", "unreplayable", "summary")
    ]
    assert told["shard"] is told["published"] is None
    assert told["schema"] == 1
    assert told["root"] == str(copied)
    assert told["targets"] == ["sm_90a", "cpu"]
    spec = operators.get("rms_norm").spec({"M": 2, "N": 64, "dtype": "float32"}, targets.CPU)
    assert told["kernels"][2] == {
        "action_key": spec.action_key(),
        "where": "workloads[0]",
        "op": "rms_norm",
        "kernel": "ops.kernels.rms_norm:rms_norm",
        "title": "rms_norm M=2 N=64 eps=1e-06 fp32 cpu",
        "workload": {"M": 2, "N": 64, "eps": 1e-06, "dtype": "float32"},
        "schedule": {"block_m": 1, "threads": 1, "each": 1, "prefetch": False},
        "target": "cpu",
        "status": "present",
        "seconds": 0.0,
        "bytes": 0,
        "error": None,
        "hint": None,
        "way": "record",
        "reason": None,
    }
    assert [(kernel["workload"]["M"], kernel["status"]) for kernel in told["kernels"]] == [
        *((2, "missing"), (3, "missing"), (2, "present"), (3, "missing")),
    ]
    saved = told["summary"].pop("saved_seconds")
    assert 0.05 < saved < 60
    assert told["summary"] == {
        "total": 4,
        "compiled": 0,
        "present": 1,
        "unrecorded": 0,
        "failed": 0,
        "missing": 3,
        "planned": 0,
        "bytes": 0,
    }
    assert ran.err.startswith("Target sm90 means sm_90a, ")


# --- targets ---


def test_without_a_target_option_the_targets_of_the_file_are_taken(warm):
    ran = warm("--dry-run", "--json", rows=[1], targets=["sm80", "cpu", "a100"])
    assert ran.code == 0, ran.err
    assert ran.json["targets"] == ["sm_80", "cpu"]
    assert [kernel["target"] for kernel in ran.json["kernels"]] == ["sm_80", "cpu"]
    assert ran.err == ""


def test_the_target_option_wins_over_the_targets_of_the_file(warm):
    ran = warm("--dry-run", "--json", "--target", "8.9", rows=[1], targets=["sm80", "cpu"])
    assert ran.code == 0, ran.err
    assert ran.json["targets"] == ["sm_89"]


@pytest.mark.skipif(has_gpu(), reason="a GPU is here, and would be the target")
def test_without_any_target_and_without_a_gpu_the_cpu_is_taken_and_said(warm):
    ran = warm("--dry-run", "--json", rows=[1])
    assert ran.code == 0, ran.err
    assert ran.json["targets"] == ["cpu"]
    assert ran.err.splitlines() == [
        "No GPU here, and no target in the file or by `--target`: warming for cpu."
    ]


def test_a_target_that_is_spelt_in_several_ways_is_warmed_once(warm):
    options = [text for name in ("sm90", "h100", "9.0", "sm_90a", "c", "cpu") for text in
               ("--target", name)]  # fmt: skip
    ran = warm("--dry-run", "--json", *options, rows=[1])
    assert ran.code == 0, ran.err
    assert ran.json["targets"] == ["sm_90a", "cpu"]
    assert len(ran.json["kernels"]) == 2


def test_that_sm90_means_sm_90a_is_said_and_what_means_itself_is_not(warm):
    ran = warm("--dry-run", "--target", "sm90", "--target", "sm_80", "--target", "cpu", rows=[1])
    assert ran.code == 0, ran.err
    assert ran.err.splitlines() == [
        "Target sm90 means sm_90a, which is what TileLang detects on this GPU family."
    ]
    schedule = "block_m=4 threads=128 each=1 prefetch=True"
    assert f"would compile  rms_norm M=1 N=64 eps=1e-06 fp32 {schedule} sm_90a" in ran.out
    assert warm("--dry-run", "--target", "sm_90a", rows=[1]).err == ""


# --- compiling ---


@pytest.mark.parametrize(("jobs", "met"), [(2, True), (1, False)])
def test_as_many_kernels_as_jobs_are_compiled_at_a_time(
    tlcache, shapes, factories, tmp_path, jobs, met
):
    # With one worker they cannot meet, however long they wait; so they need not wait long.
    seconds = 60 if met else 0.5
    path = shapes(
        *(
            {
                "kernel": "project_kernels:meets",
                "args": {"N": n, "me": me, "other": other, "seconds": seconds},
            }
            for n, me, other in ((64, "left", "right"), (65, "right", "left"))
        )
    )
    ran = tlcache("warm", "--shapes", path, "--target", "cpu", "--jobs", jobs)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("2 kernels  2 compiled  0 already there  0 failed ")
    assert [(tmp_path / f"{name}.met").exists() for name in ("left", "right")] == [met, met]


def test_a_factory_of_the_working_directory_is_warmed_and_then_restored_without_tilelang(
    tlcache, python, shapes, factories, tmp_path, cache_root
):
    kernels = [
        ({"N": 64, "by": 2.0}, {}, "plain"),
        ({"N": 64}, {"by": 3.0}, "lazy"),
        ({"N": 64, "by": 4.0}, {}, "ready"),
    ]
    path = shapes(
        *(
            {"kernel": f"project_kernels:{name}", "args": args, "schedule": schedule}
            for args, schedule, name in kernels
        )
    )
    root = tmp_path / "named"
    command = ("warm", "--shapes", path, "--target", "cpu", "--cache-dir", root)
    ran = tlcache(*command, "--json")
    assert ran.code == 0, ran.err
    told = ran.json
    assert [(kernel["kernel"], kernel["op"], kernel["status"]) for kernel in told["kernels"]] == [
        (f"project_kernels:{name}", None, "compiled") for _, _, name in kernels
    ]
    assert all(kernel["seconds"] > 0 and kernel["bytes"] > 4096 for kernel in told["kernels"])
    assert told["summary"]["compiled"] == 3
    assert told["summary"]["bytes"] == sum(kernel["bytes"] for kernel in told["kernels"])
    assert told["root"] == str(root)
    assert not cache_root.exists()
    filed = [
        record.parse(Path(layout.record_path(root, kernel["action_key"])).read_bytes(), "")
        for kernel in told["kernels"]
    ]
    specs = [[one.spec.to_json(), by] for one, by in zip(filed, (2.0, 3.0, 4.0), strict=True)]
    restored = python(RESTORE, json.dumps(specs), env={"TILELANG_CACHE_DIR": str(root)})
    assert restored.code == 0, restored.err
    assert restored.out.split() == ["3", "0"]


@pytest.mark.nvcc
def test_kernels_are_cross_compiled_for_gpus_that_are_not_here(warm, cache_root):
    ran = warm("--target", "sm90", "--target", "sm80", "--json", rows=[1])
    assert ran.code == 0, ran.err
    told = ran.json
    assert told["targets"] == ["sm_90a", "sm_80"]
    assert [kernel["status"] for kernel in told["kernels"]] == ["compiled", "compiled"]
    for kernel, target in zip(told["kernels"], told["targets"], strict=True):
        path = Path(layout.record_path(cache_root, kernel["action_key"]))
        filed = record.parse(path.read_bytes(), path)
        assert filed.spec.target.name == target
        assert filed.launch.abi == "tvm_ffi"
        assert filed.library.name == "executable.so"
        assert record.sound_library(cache_root, filed) is not None
        assert re.fullmatch(r"\d+\.\d+\.\d+", filed.toolkit["nvcc"])
        note = f"-arch {target}".encode()
        assert note in (cache_root / filed.entry / "executable.so").read_bytes()


def test_a_warm_that_compiles_nothing_still_creates_the_directories_that_tilelang_expects(
    tlcache, shapes, cache_root
):
    ran = tlcache("warm", "--shapes", shapes(document=NOTHING), "--target", "cpu")
    assert ran.code == 0, ran.err
    place = cache_root / tilelang_version() / platform_name()
    assert (place / "kernels").is_dir() and (place / ".staging").is_dir()


def test_a_warmed_root_serves_when_it_is_read_only_and_tilelang_can_be_imported_on_it(
    run, tlcache, shapes, copied, tmp_path
):
    mounts = 'for root in "$0" "$1"; do mount --bind "$root" "$root" && '
    mounts += 'mount -o remount,bind,ro "$root" || exit; done; shift'
    bare = tmp_path / "bare"
    named = ("--shapes", shapes(document=NOTHING), "--target", "cpu", "--cache-dir", bare)
    assert tlcache("warm", *named).code == 0
    private = ["unshare", "--mount", "sh", "-c", f'{mounts}; "$@"', str(copied), str(bare)]
    if shutil.which("unshare") is None or run([*private, "true"]).code != 0:
        pytest.skip("mounting is not permitted here")
    specs = [
        operators.get("rms_norm").spec({"M": rows, "N": 64, "dtype": "float32"}, targets.CPU)
        for rows in ROWS
    ]
    data = json.dumps([spec.to_json() for spec in specs])
    ran = run([*private, sys.executable, "-c", SERVE_READ_ONLY, data, str(bare)])
    assert ran.code == 0, ran.err
    assert ran.out.split() == ["2", "0"]


# --- on a terminal ---


def test_on_a_terminal_a_bar_shows_the_progress_and_then_the_summary(shapes, tmp_path, cache_root):
    path = str(shapes(rms_norm(1, 2)))
    terminal = pexpect.spawn(
        sys.executable,
        [*TLCACHE[1:], "warm", "--shapes", path, "--target", "cpu", "--jobs", "1"],
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "30"},
        dimensions=(30, 120),
        encoding="utf-8",
        timeout=90,
    )
    try:
        terminal.expect("warming")
        terminal.expect("0/2")
        terminal.expect(r"rms_norm M=[12] N=64")
        terminal.expect("1/2")
        terminal.expect(r"2 kernels  2 compiled  0 already there  0 failed")
        terminal.expect(r"The next start saves about")
        terminal.expect(pexpect.EOF)
    finally:
        terminal.close(force=True)
    assert terminal.exitstatus == 0
    assert len(list(layout.records(cache_root))) == 2


def test_a_root_that_is_made_without_a_umask_can_be_loaded_from(warm, tmp_path):
    before = os.umask(0)
    try:
        made = warm("--target", "cpu", "--cache-dir", tmp_path / "open", rows=(3,))
        again = warm("--target", "cpu", "--cache-dir", tmp_path / "open", rows=(3,))
    finally:
        os.umask(before)
    assert made.code == again.code == 0, made.err + again.err
    assert "1 kernel  1 compiled" in made.out
    assert "1 kernel  0 compiled  1 already there" in again.out


def test_a_warm_whose_kernels_tilelang_would_not_keep_is_refused(warm, tmp_path, monkeypatch):
    root = tmp_path / "none"
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    ran = warm("--target", "cpu", "--cache-dir", root, rows=(3,))
    assert ran.code == 3
    assert ran.err.startswith("error: TILELANG_DISABLE_CACHE is set")
    assert "hint: `unset TILELANG_DISABLE_CACHE`" in ran.err
    assert not root.exists()


def test_steps_are_told_to_a_program_as_lines_of_json(tlcache, shapes):
    path = shapes({"op": "rms_norm", "M": [1, 2], "N": 64, "dtype": "float32"}, targets=["cpu"])
    done = tlcache("warm", "--shapes", path, "--json", "--steps")
    steps = [json.loads(line) for line in done.err.splitlines()]
    assert steps[0] == {"step": "planned", "counts": {"total": 2}}
    keys = {one["action_key"] for one in done.json["kernels"]}
    for kind in ("started", "ended"):
        assert {one["action_key"] for one in steps if one["step"] == kind} == keys
    assert {one["status"] for one in steps if one["step"] == "ended"} == {"compiled"}
    again = tlcache("warm", "--shapes", path, "--json", "--steps")
    assert json.loads(again.err) == {"step": "planned", "counts": {"total": 2, "present": 2}}
