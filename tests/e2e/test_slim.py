"""A runtime without a compiler: everything read-only, compilers and toolkits hidden, as a slim
image has it. `examples/container/slim.sh` makes that of this machine, for one command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLIM = ROOT / "examples/container/slim.sh"
SHAPES = ROOT / "examples/container/shapes.json"
SERVE = [sys.executable, str(ROOT / "examples/serve.py"), "--json"]
TLCACHE = [sys.executable, "-c", "from tlcache.cli import main; main()"]


def _can() -> bool:
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    command.append("mount -t tmpfs tmpfs /mnt && mount -o remount,bind,ro /")
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not _can(), reason="no mount namespaces here")


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache as an image has it, with the example's kernels."""
    place = tmp_path_factory.mktemp("image")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TLCACHE_", "TILELANG_"))}
    kept["TILELANG_CACHE_DIR"] = str(place / "kernels")
    warm = [*TLCACHE, "warm", "--shapes", str(SHAPES), "--target", "cpu"]
    subprocess.run(warm, cwd=place, env=kept, check=True, capture_output=True)
    return place


@pytest.fixture
def slim(run, baked, tmp_path):
    """Run `tlcache` in a slim container with the cache baked in; `written` is what can be."""

    def slim(*arguments: str, **env: str):
        env["TILELANG_CACHE_DIR"] = str(baked / "kernels")
        env["TLCACHE_RUNTIME_DIR"] = str(tmp_path / "written" / "run")
        command = [str(SLIM), str(tmp_path / "written"), "--", *TLCACHE, *arguments]
        before = {path: path.stat().st_mtime_ns for path in (baked / "kernels").rglob("*")}
        ran = run(command, env=env)
        after = {path: path.stat().st_mtime_ns for path in (baked / "kernels").rglob("*")}
        assert after == before
        return ran

    return slim


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
    ran = slim("run", "--no-hooks", "--", sys.executable, "-c", code)
    assert ran.json == [None, None, None, "EROFS", "EROFS", "EROFS"], ran.err


def test_the_example_serves_from_a_baked_cache_without_a_compiler(slim, tmp_path):
    options = ["--shapes", str(SHAPES), "--target", "cpu", "--require", "all"]
    ran = slim("run", *options, "--on-compile", "error", "--from", "start", "--", *SERVE)
    assert ran.code == 0, ran.err
    assert ran.err.startswith("tlcache: 3 of 3 kernels ready in ")
    assert ran.json["kernels_compiled"] == 0 and ran.json["kernels_restored"] == 2
    assert not ran.json["tilelang_imported"]


def test_what_is_missing_is_told_with_its_reason_and_required_kernels_stop_the_start(
    slim, tmp_path
):
    more = {"op": "rms_norm", "M": 7, "N": 1024, "eps": 1e-5, "dtype": "bfloat16"}
    document = json.loads(SHAPES.read_text())
    document["workloads"].append(more)
    (tmp_path / "more.json").write_text(json.dumps(document))
    options = ["--shapes", str(tmp_path / "more.json"), "--target", "cpu"]
    options += ["--overlay", str(tmp_path / "written" / "kernels")]
    ran = slim("run", *options, "--require", "all", "--", "echo", "started")
    assert (ran.code, ran.out) == (3, "")
    assert "3 of 4 kernels ready" in ran.err
    assert "no C++ compiler for target cpu" in ran.err
    ran = slim("run", *options, "--", "echo", "started")
    assert (ran.code, ran.out) == (0, "started\n")
