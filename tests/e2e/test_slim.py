"""A runtime without a compiler: the image of `examples/container`, as far as that goes here.

Its build commands and its entrypoint are taken from the Dockerfile and run. `slim.sh` makes of this
machine, for one command, what a slim image is: everything read-only, compilers and toolkits hidden.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import clean_environment

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "examples/container"
SHAPES = CONTAINER / "shapes.json"
TLCACHE = [sys.executable, "-c", "from tlcache.cli import main; main()"]
BIN = os.path.dirname(sys.executable)


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and their arguments."""
    text = re.sub(r"^\s*#.*\n", "", (CONTAINER / "Dockerfile").read_text(), flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def _namespaces() -> bool:
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    command.append("mount -t tmpfs tmpfs /mnt && mount -o remount,bind,ro /")
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_namespaces = pytest.mark.skipif(not _namespaces(), reason="no mount namespaces here")


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of such an image for the CPU."""
    place = tmp_path_factory.mktemp("image")
    kept = clean_environment()
    subprocess.run(
        [*TLCACHE, "warm", "--shapes", str(SHAPES), "--target", "cpu"],
        cwd=place,
        env={**kept, "TILELANG_CACHE_DIR": str(place / "kernels")},
        check=True,
        capture_output=True,
    )
    return place / "kernels"


@pytest.fixture
def slim(run, baked, tmp_path):
    """Run a command in a slim container with the cache baked in; `written` is what can be."""

    def slim(*command: str):
        before = {path: path.stat().st_mtime_ns for path in baked.rglob("*")}
        ran = run(
            [str(CONTAINER / "slim.sh"), str(tmp_path / "written"), "--", *command],
            cwd=CONTAINER,
            env={
                "TILELANG_CACHE_DIR": str(baked),
                "TLCACHE_RUNTIME_DIR": str(tmp_path / "written" / "run"),
                "CUDA_VISIBLE_DEVICES": "",
                "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            },
        )
        assert {path: path.stat().st_mtime_ns for path in baked.rglob("*")} == before
        return ran

    return slim


@needs_namespaces
def test_compilers_are_hidden_and_nothing_but_one_directory_can_be_written(slim, tmp_path):
    code = (
        "import errno, json, os, shutil\n"
        "from tlcache.warm import toolchain\n"
        "found = [toolchain.host_compiler(), toolchain.nvcc(), shutil.which('gcc')]\n"
        f"for place in {str(tmp_path)!r}, os.environ['TILELANG_CACHE_DIR'], '/':\n"
        "    try:\n"
        "        open(os.path.join(place, 'probe'), 'w')\n"
        "    except OSError as error:\n"
        "        found.append(errno.errorcode[error.errno])\n"
        "print(json.dumps(found))\n"
    )
    ran = slim(*TLCACHE, "run", "--no-hooks", "--", sys.executable, "-c", code)
    assert ran.json == [None, None, None, "EROFS", "EROFS", "EROFS"], ran.err


@needs_namespaces
def test_the_images_entrypoint_serves_from_the_baked_cache_without_a_compiler(slim, tmp_path):
    said = dict(instructions())
    entrypoint, command = json.loads(said["ENTRYPOINT"]), json.loads(said["CMD"])
    assert (entrypoint[:2], entrypoint[-1]) == (["tlcache", "run"], "--")
    written = tmp_path / "written"
    here = {"/var/kernels": written / "kernels", "/tmp/ready.json": written / "ready.json"}
    options = [str(here.get(word, word)) for word in entrypoint[2:-1]]
    options += ["--on-compile", "error", "--from", "start", "--", "sh", "-c"]
    server = f"{sys.executable} ../{command[1]} --json && cat {written / 'ready.json'}"
    ran = slim(*TLCACHE, "run", *options, server)
    assert ran.code == 0, ran.err
    assert ran.err.startswith("tlcache: 3 of 3 kernels ready in ")
    told = json.loads(ran.out.splitlines()[0])
    assert told["kernels_compiled"] == 0 and told["kernels_restored"] == 2
    assert not told["tilelang_imported"]
    assert json.loads(ran.out.partition("\n")[2])["state"] == "ready"


@needs_namespaces
def test_what_is_missing_is_told_with_its_reason_and_required_kernels_stop_the_start(
    slim, tmp_path
):
    more = {"op": "rms_norm", "M": 7, "N": 1024, "eps": 1e-5, "dtype": "bfloat16"}
    document = json.loads(SHAPES.read_text())
    document["workloads"].append(more)
    (tmp_path / "more.json").write_text(json.dumps(document))
    options = ["--shapes", str(tmp_path / "more.json"), "--target", "cpu"]
    options += ["--overlay", str(tmp_path / "written" / "kernels")]
    ran = slim(*TLCACHE, "run", *options, "--require", "all", "--", "echo", "started")
    assert (ran.code, ran.out) == (3, "")
    assert "3 of 4 kernels ready" in ran.err
    assert "no C++ compiler for target cpu" in ran.err
    ran = slim(*TLCACHE, "run", *options, "--", "echo", "started")
    assert (ran.code, ran.out) == (0, "started\n")


@needs_namespaces
def test_a_document_that_nobody_warmed_is_planned_anew_and_needs_nothing_written(slim, tmp_path):
    document = json.loads(SHAPES.read_text())
    (tmp_path / "same.json").write_text(json.dumps(document, indent=7))
    options = ["--shapes", str(tmp_path / "same.json"), "--require", "all"]
    ran = slim(*TLCACHE, "run", *options, "--", "echo", "started")
    assert (ran.code, ran.out) == (0, "started\n"), ran.err
    assert "3 of 3 kernels ready" in ran.err


@pytest.mark.nvcc
def test_the_images_build_commands_compile_for_three_families_and_verify(
    run, tlcache, cache_root, shapes
):
    shapes({**json.loads(SHAPES.read_text())["workloads"][0], "M": 1})  # one of them is enough
    build = [said for name, said in instructions() if name == "RUN" and "tlcache warm" in said]
    assert len(build) == 1
    commands = " && ".join(
        f"{sys.executable} -c 'from tlcache.cli import main; main()' {one.strip()[8:]}"
        for one in build[0].split("&&")
    )
    ran = run(["sh", "-c", commands])
    assert ran.code == 0, ran.err
    totals = tlcache("ls", "--json").json["totals"]
    assert totals["targets"] == {"sm_80": 1, "sm_90a": 1, "sm_100a": 1}


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("hadolint", ["Dockerfile"]),
        ("check-jsonschema", ["--builtin-schema", "vendor.compose-spec", "compose.yaml"]),
        ("shellcheck", ["slim.sh"]),
    ],
)
def test_the_linters_of_such_files_have_nothing_to_say(run, tool, arguments):
    program = shutil.which(tool, path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"{tool} is not installed")
    ran = run([program, *arguments], cwd=CONTAINER)
    assert ran.code == 0, ran.out + ran.err
