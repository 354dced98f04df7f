"""The Slurm scripts, run by their shell as Slurm would run them: each task with its variables."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tlcache.store import layout

SCRIPTS = Path(__file__).parents[2] / "examples" / "slurm"
DOCUMENT = {
    "version": 1,
    "targets": ["cpu"],
    "workloads": [{"op": "rms_norm", "M": [1, 2, 3], "N": 64, "eps": 1e-6, "dtype": "float32"}],
}


@pytest.fixture
def sbatch(run, tmp_path, monkeypatch):
    """Run a script with the variables that Slurm sets, after those of the person who submits it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    command = f'#!/bin/sh\nexec {sys.executable} -c "from tlcache.cli import main; main()" "$@"\n'
    (programs / "tlcache").write_text(command)
    (programs / "tlcache").chmod(0o755)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "shapes.json").write_text(json.dumps(DOCUMENT))
    for name in [name for name in os.environ if name.startswith(("SLURM_", "JOB_", "RANK"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(scratch))
    asked = {"SHAPES": "shapes.json", "ARCHIVES": str(tmp_path / "archives")}

    def sbatch(script, **told):
        done = run(["bash", str(SCRIPTS / script)], env={**asked, **told})
        assert list(scratch.iterdir()) == []
        return done

    return sbatch


def task(number: int, first: int = 0, count: int = 2) -> dict[str, str]:
    told = {"ID": number, "MIN": first, "MAX": first + count - 1, "COUNT": count, "STEP": 1}
    array = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in told.items()}
    return {"SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_ID": "7", **array}


def test_an_array_warms_and_the_gathering_has_all_kernels(sbatch, tmp_path):
    root = tmp_path / "root"
    first = sbatch("warm.sbatch", **task(0), TARGET="cpu")
    assert first.code == 0, first.err
    assert "shard 1 of 2: 2 of 3 kernels" in first.err
    early = sbatch("gather.sbatch", ROOT=str(root))
    assert early.code == 1
    assert "lacking: shard 2 of 2" in early.err
    assert "1 of 3 kernels is missing" in early.out
    second = sbatch("warm.sbatch", **task(1))
    assert second.code == 0, second.err
    done = sbatch("gather.sbatch", ROOT=str(root))
    assert done.code == 0, done.err
    assert len(list(layout.records(root))) == 3
    names = sorted(path.name for path in (tmp_path / "archives").iterdir())
    assert [name[:13] for name in names] == ["shard-1-of-2-", "shard-2-of-2-"]


@pytest.mark.parametrize(
    ("script", "env", "said"),
    [
        ("warm.sbatch", {"SHAPES": "", **task(0)}, "SHAPES: is not set"),
        ("warm.sbatch", {"ARCHIVES": "", **task(0)}, "ARCHIVES: is not set"),
        ("gather.sbatch", {}, "ROOT: is not set"),
        ("warm.sbatch", {}, "`--shard auto` finds no scheduler"),
        ("gather.sbatch", {"ROOT": "root"}, "nothing matches"),
    ],
)
def test_what_is_not_given_is_said_and_the_job_fails(sbatch, script, env, said):
    done = sbatch(script, **env)
    assert done.code != 0
    assert said in done.err


def test_shellcheck_finds_nothing(run):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed here")
    done = run(
        [
            "shellcheck",
            "--norc",
            "--enable=all",
            "--exclude=SC2250",
            *map(str, SCRIPTS.glob("*.sbatch")),
        ]
    )
    assert done.code == 0, done.out


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sbatch")), ids=lambda path: path.name)
def test_slurm_reads_the_options_of_a_script(script):
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    options = [line for line in lines if line.startswith("#SBATCH")]
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert options == lines[1 : 1 + len(options)]  # what follows a command is not read
    assert len(options) < first
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+=\S+", line) for line in options)
    assert ("--array" in script.read_text()) == (script.name == "warm.sbatch")


def test_the_page_names_each_script():
    page = (SCRIPTS / "README.md").read_text()
    assert {path.name for path in SCRIPTS.glob("*.sbatch")} == set(re.findall(r"\]\((\S+)\)", page))
