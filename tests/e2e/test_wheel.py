"""The wheel has the units' templates, once; a tlcache that was installed from it renders them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (found,) = place.glob("*.whl")
    return found


def test_the_wheel_has_every_template_once(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for scope in ("system", "user"):
            for file in (ROOT / "systemd" / scope).iterdir():
                name = f"tlcache/units/{scope}/{file.name}"
                assert names.count(name) == 1
                assert archive.read(name) == file.read_bytes()
    held = [name for name in names if name.endswith((".service", ".socket", ".timer", ".conf"))]
    assert len(held) == sum(
        1 for scope in ("system", "user") for _ in (ROOT / "systemd" / scope).iterdir()
    )


def test_an_installed_tlcache_renders_them(wheel, run, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = tmp_path / "tlcache"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    source = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import tlcache; print(tlcache.__file__, file=sys.stderr)\n"
        "from tlcache.cli import main; main()"
    )
    install = ["daemon", "install", "--user", "--dry-run", "--executable", str(program)]
    ran = run([sys.executable, "-c", source, *install])
    assert ran.code == 0, ran.err
    assert str(tmp_path / "site") in ran.err
    assert f"ExecStart={program} daemon run" in ran.out
