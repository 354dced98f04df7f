"""Programs that know nothing of tlcache: run and recorded, warmed into an empty root, and run again
where nothing may be compiled.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import clean_environment

TLCACHE = [sys.executable, "-c", "from tlcache.cli import main; main()"]
PROGRAMS = Path(__file__).parent / "programs"
GPU = '{"kind": "cuda", "arch": "sm_90a"}'
ALL = os.environ.get("TEST_ALL_KERNELS") == "1"  # 20 of one package, 13 of the other: minutes
STRICT = ["--on-compile", "error", "--from", "start"]


@pytest.fixture
def program(tlcache, tmp_path):
    """Run a program under `tlcache run`, with a cache root of its own."""

    def program(name: str, root: str, *options: str, target: str = "c", hooks: bool = True):
        env = {
            "TILELANG_CACHE_DIR": str(tmp_path / root),
            "TILELANG_DEFAULT_TARGET": target,
            "TLCACHE_RUNTIME_DIR": str(tmp_path / "run"),
            "EVERY": "1" if ALL else "13",
        }
        return tlcache("run", *options, "--", sys.executable, PROGRAMS / name, env=env, timeout=600)

    return program


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    """Where the first run of the CPU's program left its root, `cache`, and its `shapes.json`; to be
    read only.
    """
    place = tmp_path_factory.mktemp("first")
    ran = subprocess.run(
        [
            *TLCACHE,
            "run",
            "--record",
            "shapes.json",
            "--",
            sys.executable,
            PROGRAMS / "cpu_program.py",
        ],
        cwd=place,
        env=clean_environment(
            TILELANG_CACHE_DIR=str(place / "cache"),
            TILELANG_DEFAULT_TARGET="c",
            TLCACHE_RUNTIME_DIR=str(place / "run"),
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "done", ran.stderr
    return place


def recorded(program, record: Path, name: str, target: str) -> Path:
    """Run a program in an empty root; what it recorded."""
    ran = program(name, "first", "--record", str(record), target=target)
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[-1] == "done", ran.err
    return record


def replayed(
    program, tlcache, tmp_path, name: str, target: str, spelled: str, record: Path
) -> dict:
    """Warm what a program recorded, and run it again; the document that was recorded."""
    document = json.loads(record.read_text())
    root = tmp_path / "second"
    warm = ["warm", "--shapes", record, "--target", spelled, "--cache-dir", root, "--json"]
    warmed = tlcache(*warm, timeout=600)
    assert warmed.code == 0, warmed.err + warmed.out
    assert {kernel["status"] for kernel in warmed.json["kernels"]} <= {"compiled", "unrecorded"}
    assert len(warmed.json["kernels"]) == len(document["workloads"])
    asked = tlcache("why", *warm[1:], timeout=600)
    assert asked.code == 0, asked.out + asked.err
    told = {one["kernel"]: one["cause"] for one in asked.json["kernels"]}
    assert set(told.values()) <= {"hit", "not restorable"}, told
    again = program(name, "second", *STRICT, "--record", str(record), target=target)
    assert again.code == 0, again.err
    assert again.out.splitlines()[-1] == "done"
    assert json.loads(record.read_text()) == document
    return document


def test_a_program_on_the_cpu_compiles_nothing_after_its_recording_was_warmed(
    program, tlcache, tmp_path, first
):
    record = Path(shutil.copy(first / "shapes.json", tmp_path))
    document = replayed(program, tlcache, tmp_path, "cpu_program.py", "c", "cpu", record)
    assert "unreplayable" not in document
    made = [workload["kernel"] for workload in document["workloads"]]
    assert sorted(set(made)) == [
        f"cpu_kernels:{name}" for name in ("add", "any_rows", "compiled", "negated", "scaled")
    ]
    assert len(made) == 8


def test_a_program_without_the_hooks_finds_the_keys_that_negative_outputs_drift_to(
    tlcache, run, tmp_path, first
):
    record = first / "shapes.json"
    root = tmp_path / "second"
    elsewhere, some = tmp_path / "elsewhere", ("--shapes", record, "--target", "cpu")
    warmed = tlcache("warm", *some, "--cache-dir", elsewhere, "--publish", tmp_path / "shards")
    assert warmed.code == 0, warmed.err
    assert tlcache("import", tmp_path / "shards/*", "--cache-dir", root).code == 0
    entries = sorted(root.glob("*/*/kernels/*"))
    assert len(entries) == 8 + 5  # three of `add`, one of `scaled`, one of `compiled`
    env = {"TILELANG_CACHE_DIR": str(root), "TILELANG_DEFAULT_TARGET": "c"}
    for _ in range(2):
        assert run([sys.executable, PROGRAMS / "cpu_program.py"], env=env).code == 0
    assert sorted(root.glob("*/*/kernels/*")) == entries


def test_under_the_hooks_a_negative_output_does_not_drift(program, tmp_path, first):
    shutil.copytree(first / "cache", tmp_path / "only")
    assert program("cpu_program.py", "only").code == 0
    assert len(list((tmp_path / "only").glob("*/*/kernels/*"))) == 8
    ran = program("cpu_program.py", "only", *STRICT)
    assert ran.code == 0, ran.err


def test_a_miss_where_nothing_may_be_compiled_names_the_kernel_and_what_to_run(program):
    ran = program("cpu_program.py", "empty", *STRICT)
    assert ran.code == 1
    error = ran.err[ran.err.index("tlcache.errors.MissError: ") :]
    assert "the kernel add N=4 (A float32[4], B float32[4], C float32[4]) is not in" in error
    assert "hint: `tlcache run --record shapes.json -- COMMAND`" in error
    assert "`tlcache warm --shapes shapes.json`" in error


@pytest.mark.nvcc
def test_a_program_for_a_gpu_compiles_nothing_after_its_recording_was_warmed(
    program, tlcache, tmp_path
):
    record = recorded(program, tmp_path / "shapes.json", "gpu_program.py", GPU)
    document = replayed(program, tlcache, tmp_path, "gpu_program.py", GPU, "sm90", record)
    assert "unreplayable" not in document
    made = {workload["kernel"] for workload in document["workloads"]}
    assert made == {
        *(
            f"gpu_kernels:{name}"
            for name in ("_scaling", "any_rows", "attention", "cached_compile", "eager_matmul")
        ),
        "gpu_kernels:matmul",
        "gpu_kernels:tunable",
        "gpu_program:in_the_script",
    }
    assert len(document["workloads"]) == 11


@pytest.mark.nvcc
@pytest.mark.parametrize("package", ["tile_kernels", "fla"])
def test_a_package_compiles_nothing_after_its_recording_was_warmed(
    program, tlcache, tmp_path, package
):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    record = recorded(program, tmp_path / "shapes.json", f"{package}_program.py", GPU)
    document = replayed(program, tlcache, tmp_path, f"{package}_program.py", GPU, "sm90", record)
    assert "unreplayable" not in document
    assert len(document["workloads"]) >= (10 if ALL else 1)
    assert os.path.isdir(tmp_path / "second")
