"""What the tests of units share: settings of a machine on which nothing is set, and a `tlcache`."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tlcache import config
from tlcache.units.rendering import Wanted


@pytest.fixture(autouse=True)
def bare(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("TLCACHE_", "TILELANG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(config, "SYSTEM", str(tmp_path / "etc/tlcache.toml"))
    config._files.cache_clear()
    yield
    config._files.cache_clear()


@pytest.fixture
def program(tmp_path) -> Path:
    """Something that units may run."""
    path = tmp_path / "bin/tlcache"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\nfrom tlcache.cli import main\nmain()\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def wanted(program) -> Callable[..., Wanted]:
    def wanted(scope="system", given=None, **more) -> Wanted:
        return Wanted(scope, more.pop("executable", program), config.load(given), **more)

    return wanted
