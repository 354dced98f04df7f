"""What the tests of commands share: a root that a module's own program makes, once, and a warm that
two hosts shared.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.environment import clean_environment
from tlcache.store import layout, record

RESOLVE = """
import json, sys
from tlcache import runtime
from tlcache.spec import KernelSpec

for spec in json.loads(sys.argv[1]):
    runtime.resolve(KernelSpec.from_json(spec))
counted = runtime.counters()
print(json.dumps({name: getattr(counted, name) for name in ("restored", "disk", "compiled")}))
"""


@pytest.fixture
def terminal(tmp_path: Path) -> Callable[..., list[str]]:
    """Run `tlcache` on a terminal of some width; the lines that it shows."""
    import pexpect

    def terminal(*arguments: str, width: int = 80, **env: str) -> list[str]:
        child = pexpect.spawn(
            sys.executable,
            ["-c", "from tlcache.cli import main; main()", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(width), **env},
            dimensions=(200, width),
            encoding="utf-8",
            timeout=60,
        )
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 0, child.before
        return [line.rstrip() for line in child.before.splitlines()]

    return terminal


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root that the program `MAKE` of the test's module leaves behind."""
    place = tmp_path_factory.mktemp("made")
    (place / "make.py").write_text(request.module.MAKE)
    kept = clean_environment()
    subprocess.run(
        [sys.executable, "make.py"],
        cwd=place,
        env={**kept, "TILELANG_CACHE_DIR": str(place / "cache")},
        check=True,
        capture_output=True,
    )
    return place / "cache"


@pytest.fixture
def root(made: Path, cache_root: Path) -> Path:
    """A copy of that root, in force for the test's commands."""
    shutil.copytree(made, cache_root)
    return cache_root


@pytest.fixture(scope="session")
def warmed(once: Callable[..., Path], whole: Path) -> Path:
    """Roots of the CPU's kernels of `whole.json`: `whole` has all four; `one` and `two` are those
    of two hosts, one started by Kubernetes and one by Slurm, that published their shards into
    `shards`. `some.json` asks for two of the four.
    """
    return once("warmed", lambda place: _warm(place, whole))


_AMBIENT = ("TLCACHE_", "TILELANG_", "JOB_", "SLURM_", "RANK", "WORLD_SIZE")
_SECOND_OF_TWO = {"ID": "4", "MIN": "3", "MAX": "4", "COUNT": "2", "STEP": "1"}


def _warm(place: Path, whole: Path) -> None:
    shutil.copytree(whole, place / "whole")
    shutil.copy(whole.parent / "whole.json", place)
    document = json.loads((place / "whole.json").read_text())
    document["workloads"][0]["M"] = [1, 2]
    (place / "some.json").write_text(json.dumps(document))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_AMBIENT)}
    for name, env in (
        ("one", {"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "2"}),
        ("two", {f"SLURM_ARRAY_TASK_{k}": v for k, v in _SECOND_OF_TWO.items()}),
    ):
        program = [sys.executable, "-c", "from tlcache.cli import main; main()"]
        command = [*program, "warm", "--shapes", "whole.json", "--cache-dir", name]
        command += ["--shard", "auto", "--publish", "shards"]
        subprocess.run(command, cwd=place, env=kept | env, check=True, capture_output=True)


@pytest.fixture
def resolved(python: Callable[..., Any]) -> Callable[[Path], dict[str, int]]:
    """Have a process resolve all kernels of which a root has records, in the root in force; what
    became of them.
    """

    def resolved(root: Path) -> dict[str, int]:
        found = [record.read(root, path.stem) for path in layout.records(root)]
        done = python(RESOLVE, json.dumps([one.spec.to_json() for one in found if one]))
        assert done.code == 0, done.err
        counts: dict[str, int] = done.json
        return counts

    return resolved
