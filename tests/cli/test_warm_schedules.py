"""`tlcache warm --schedules`: carried schedules are compiled, filed and used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import clean_environment
from tlcache import operators, targets
from tlcache.spec import KernelSpec
from tlcache.store import record, schedules
from tlcache.store.schedules import Tuned
from tlcache.warm import tuning

SM90 = targets.parse("sm90")
RMS_NORM = operators.get("rms_norm")
WARM = [sys.executable, "-c", "from tlcache.cli import main; main()", "warm"]

# What the resolver says of rms_norm, on the rows in argv, in a process that serves.
ASK = """
import json, sys
from tlcache import operators, runtime, targets
operator, gpu = operators.get("rms_norm"), targets.parse("sm90")
told = []
for rows in json.loads(sys.argv[1]):
    spec = runtime.tuned(operator, operator.spec({"M": rows, "N": 256}, gpu))
    origin = runtime.resolve(spec, on_miss="error").origin
    told.append([dict(spec.schedule), origin])
assert not {"tilelang", "tvm"} & set(sys.modules)
print("RESULT " + json.dumps(told))
"""


def default(M: int = 4) -> KernelSpec:
    return RMS_NORM.spec({"M": M, "N": 256}, SM90)


def tuned(M: int = 4, which: int = 0) -> Tuned:
    """As from a GPU: one of the candidates, which are never the default."""
    best = tuning.plan(RMS_NORM, default(M)).candidates[which]
    return Tuned("rms_norm", best, 1.5, dict(default(M).schedule), 2.0, "NVIDIA H200", {})


def unfit(M: int = 4) -> Tuned:
    spec = KernelSpec(default().kernel, default(M).workload, {"stages": 2}, SM90)
    return Tuned("rms_norm", spec, 1.5, {}, 2.0, "NVIDIA H200", {})


def is_there(root: Path, spec: KernelSpec) -> bool:
    found = record.read(root, spec.action_key())
    return found is not None and record.sound_library(root, found) is not None


def tree(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in root.rglob("*")}


def filed(root: Path) -> list[Path]:
    return list(root.glob("tlcache/schedules/*/*.json"))


@pytest.fixture
def carried(tmp_path):
    """Write tuned schedules to a file, and return its path."""

    def carried(*several: Tuned) -> Path:
        path = tmp_path / "schedules.json"
        schedules.dump(path, several)
        return path

    return carried


@pytest.fixture
def warm(tlcache, shapes):
    """`tlcache warm` of rms_norm for sm_90a."""
    return lambda *args, rows=(4,), **kwargs: tlcache(
        *("warm", "--target", "sm_90a", "--shapes"),
        shapes({"op": "rms_norm", "M": list(rows), "N": 256}),
        *args,
        **kwargs,
    )


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """A root that was warmed with a tuned schedule, and what the warm said."""
    place = tmp_path_factory.mktemp("tuned")
    workload = {"op": "rms_norm", "M": [4], "N": 256}
    (place / "shapes.json").write_text(json.dumps({"version": 1, "workloads": [workload]}))
    schedules.dump(place / "schedules.json", [tuned(), tuned(5)])
    kept = clean_environment()
    done = subprocess.run(
        [*WARM, "--shapes", "shapes.json", "--target", "sm_90a", "--schedules", "schedules.json"],
        cwd=place,
        env={**kept, "TILELANG_CACHE_DIR": str(place / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return place / "cache", done


@pytest.fixture
def root(warmed, cache_root):
    """A copy of that root, in force."""
    shutil.copytree(warmed[0], cache_root)
    return cache_root


# --- what is compiled and filed ---


@pytest.mark.nvcc
def test_the_tuned_kernel_is_compiled_and_its_schedule_filed(warmed):
    root, done = warmed
    assert done.stdout.startswith("1 kernel  1 compiled  0 already there  0 failed ")
    assert done.stderr == ""
    assert is_there(root, tuned().spec)
    assert not is_there(root, default())
    assert schedules.find(root, default()) == tuned()


@pytest.mark.nvcc
def test_a_schedule_for_a_workload_that_the_shapes_do_not_ask_for_is_not_filed(warmed):
    assert len(filed(warmed[0])) == 1
    assert schedules.find(warmed[0], default(5)) is None


@pytest.mark.nvcc
def test_a_second_warm_finds_all_there_and_writes_nothing_with_the_file_or_without(
    warm, root, carried
):
    before = tree(root)
    for args in (("--schedules", carried(tuned())), ()):
        ran = warm(*args)
        assert ran.code == 0, ran.err
        assert ran.out.startswith("1 kernel  0 compiled  1 already there  0 failed\n")
        assert ran.err == ""
        assert tree(root) == before


@pytest.mark.nvcc
def test_a_check_passes_on_such_a_root_with_the_file_and_without(warm, root, carried):
    for args in (("--schedules", carried(tuned())), ()):
        ran = warm("--check", *args)
        assert ran.code == 0, ran.out
        assert ran.out.startswith("1 kernel  0 compiled  1 already there")


@pytest.mark.nvcc
def test_only_the_schedules_of_kernels_that_were_compiled_are_filed(
    tlcache, shapes, trial_op, python, tmp_path, cache_root
):
    made = python(
        "import sys\n"
        "from tlcache import operators, targets\n"
        "from tlcache.store import schedules\n"
        "trial, gpu, several = operators.get('trial'), targets.parse('sm90'), []\n"
        "for rows, kind in ((2, 'broken'), (3, 'fast')):\n"
        "    spec = trial.spec({'M': rows}, gpu, {'kind': kind})\n"
        "    several.append(schedules.Tuned('trial', spec, 1.0, {}, None, '', {}))\n"
        "schedules.dump('schedules.json', several)\n"
    )
    assert made.code == 0, made.err
    path = shapes({"op": "trial", "M": [2, 3]})
    named = ("--shapes", path, "--target", "sm_90a", "--schedules", tmp_path / "schedules.json")
    ran = tlcache("warm", *named)
    assert ran.code == 1
    assert ran.out.startswith("2 kernels  1 compiled  0 already there  1 failed")
    (path,) = filed(cache_root)
    assert json.loads(path.read_text())["spec"]["workload"]["M"] == 3
    assert tlcache("warm", *named, "--check").out.startswith(
        "1 of 2 kernels is missing: double M=2"
    )


def test_where_the_compile_is_ruled_out_nothing_is_filed(warm, carried, cache_root):
    # No nvcc: CUDA_HOME names a directory without one.
    ran = warm("--schedules", carried(tuned()), env={"CUDA_HOME": "/nonexistent"})
    assert ran.code == 3
    assert filed(cache_root) == []


@pytest.mark.nvcc
def test_a_carried_schedule_replaces_the_filed_one_after_its_kernel_is_there(
    warm, root, carried, python
):
    better = carried(tuned(which=1))
    assert warm("--check", "--schedules", better).code == 1
    assert schedules.find(root, default()) == tuned()
    ran = warm("--schedules", better)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("1 kernel  1 compiled")
    assert schedules.find(root, default()) == tuned(which=1)
    assert is_there(root, tuned().spec) and is_there(root, tuned(which=1).spec)
    assert warm("--check").code == 0


# --- what a check and a dry run say ---


@pytest.mark.nvcc
def test_a_check_fails_where_the_kernel_is_there_and_its_schedule_is_not(warm, root, carried):
    path = carried(tuned())
    shutil.rmtree(root / "tlcache" / "schedules")
    ran = warm("--check", "--schedules", path)
    assert ran.code == 1
    assert ran.out == "1 of 1 kernel is missing: rms_norm M=4 N=256 eps=1e-06 bf16 sm_90a\n"
    again = warm("--schedules", path)
    assert again.code == 0
    assert again.out.startswith("1 kernel  0 compiled  1 already there")
    assert warm("--check", "--schedules", path).code == 0
    assert schedules.find(root, default()) == tuned()


def test_a_check_on_an_empty_root_fails_and_its_hint_names_the_file(warm, carried, cache_root):
    path = carried(tuned())
    ran = warm("--check", "--schedules", path)
    assert ran.code == 1
    assert ran.out == "1 of 1 kernel is missing: rms_norm M=4 N=256 eps=1e-06 bf16 sm_90a\n"
    assert f" --schedules {path}` compiles them" in ran.err
    assert not cache_root.exists()


def test_a_dry_run_shows_the_tuned_schedule_and_writes_nothing(warm, carried, cache_root):
    ran = warm("--dry-run", "--schedules", carried(tuned()), rows=(4, 5))
    assert ran.code == 0, ran.err
    assert ran.out.splitlines() == [
        f"would compile  {tuned().spec}",
        f"would compile  {default(5)}",
        "2 kernels  2 to compile  0 already there",
    ]
    assert not cache_root.exists()


def test_a_filed_schedule_is_what_a_dry_run_without_the_file_shows(warm, cache_root):
    schedules.write(cache_root, tuned())
    ran = warm("--dry-run", "--json")
    assert [kernel["schedule"] for kernel in ran.json["kernels"]] == [dict(tuned().spec.schedule)]


def test_a_schedule_that_the_shapes_give_wins_over_a_carried_one(
    tlcache, shapes, carried, cache_root
):
    own = dict(tuned(which=1).spec.schedule)
    path = shapes({"op": "rms_norm", "M": 4, "N": 256, "schedule": own})
    named = ("--shapes", path, "--target", "sm_90a", "--schedules", carried(tuned()))
    ran = tlcache("warm", *named, "--dry-run", "--json")
    assert [kernel["schedule"] for kernel in ran.json["kernels"]] == [own]
    assert not cache_root.exists()


# --- what does not fit ---


@pytest.mark.parametrize("where", ["carried", "filed"])
def test_a_schedule_that_does_not_fit_any_more_is_noted_and_the_default_is_compiled(
    warm, carried, cache_root, where
):
    if where == "filed":
        schedules.write(cache_root, unfit())
    args = ("--schedules", carried(unfit())) if where == "carried" else ()
    ran = warm("--dry-run", *args)
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[0] == f"would compile  {default()}"
    (note,) = ran.err.splitlines()
    assert note.startswith(
        "note: the tuned schedule of rms_norm M=4 N=256 eps=1e-06 bf16 sm_90a (stages=2) "
        "does not fit the kernel any more"
    )


def test_a_schedule_that_does_not_fit_is_noted_once_however_often_it_is_asked_for(
    tlcache, shapes, carried
):
    workload = {"op": "rms_norm", "M": 4, "N": 256}
    named = ("--shapes", shapes(workload, workload), "--schedules", carried(unfit()))
    ran = tlcache("warm", *named, "--target", "sm_90a", "--dry-run")
    assert ran.code == 0, ran.err
    assert ran.err.count("note: the tuned schedule") == 1


@pytest.mark.parametrize("text", ["", "{}", '{"version": 1, "schedules": [{}]}', "[" * 100_000])
def test_a_damaged_file_is_refused_before_anything_is_done(warm, tmp_path, cache_root, text):
    path = tmp_path / "schedules.json"
    path.write_text(text)
    ran = warm("--schedules", path)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {path}")
    assert "\nhint: `tlcache tune " in ran.err
    assert path.read_text() == text
    assert not cache_root.exists()


def test_a_missing_file_is_refused(warm, tmp_path, cache_root):
    ran = warm("--schedules", tmp_path / "none.json")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {tmp_path}/none.json cannot be read: no such file")


@pytest.mark.nvcc
def test_a_damaged_record_in_the_root_means_the_default(warm, root):
    (path,) = filed(root)
    path.write_text(path.read_text()[:-20])
    ran = warm("--check", "--json")
    assert ran.code == 1  # the default is what a process asks for now, and it is not there
    assert [kernel["schedule"] for kernel in ran.json["kernels"]] == [dict(default().schedule)]


# --- what a process gets ---


@pytest.mark.nvcc
def test_a_process_without_a_gpu_and_without_tilelang_gets_the_tuned_kernel(python, root):
    ran = python(ASK, "[4]")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out.rpartition("RESULT ")[2]) == [
        [dict(tuned().spec.schedule), "restored"],
    ]
