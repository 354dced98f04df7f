"""What the tests of commands share: a root that a module's own program makes, once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


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
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TLCACHE_", "TILELANG_"))}
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
