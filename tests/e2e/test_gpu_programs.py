"""On a GPU: a program that knows nothing of tlcache, recorded, warmed, run again without a compile,
and looked into while it runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
PROGRAM = str(Path(__file__).parent / "programs" / "gpu_launches.py")
MAIN = [sys.executable, "-c", "from tlcache.cli import main; main()"]
STRICT = ["--on-compile", "error", "--from", "start"]


def test_a_programs_kernels_are_recorded_warmed_and_then_never_compiled(
    tlcache, cache_root, tmp_path, monkeypatch
):
    monkeypatch.setenv("TLCACHE_RUNTIME_DIR", str(tmp_path / "run"))
    record = tmp_path / "shapes.json"
    first = tlcache("run", "--record", record, "--", sys.executable, PROGRAM, timeout=400)
    assert first.code == 0 and first.out.splitlines()[-1] == "done", first.err
    document = json.loads(record.read_text())
    assert "unreplayable" not in document
    assert len(document["workloads"]) == 7
    second = tmp_path / "second"
    warmed = tlcache("warm", "--shapes", record, "--cache-dir", second, "--json", timeout=400)
    assert warmed.code == 0, warmed.err + warmed.out
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(second))
    again = tlcache("run", *STRICT, "--", sys.executable, PROGRAM, timeout=400)
    assert again.code == 0 and again.out.splitlines()[-1] == "done", again.err


def test_a_process_on_the_gpu_tells_what_it_compiled_and_then_what_it_found(
    tlcache, cache_root, tmp_path, monkeypatch
):
    monkeypatch.setenv("TLCACHE_RUNTIME_DIR", str(tmp_path / "run"))
    for outcome in ("compiled", "disk"):
        command = [*MAIN, "run", "--no-restore", "--", sys.executable, PROGRAM, "--wait"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
        ) as program:
            assert program.stdout is not None and program.stdin is not None
            lines = iter(program.stdout.readline, "")
            assert any(line == "done\n" for line in lines)
            told = tlcache("stats", "--pid", program.pid, "--json")
            shown = tlcache("stats", "--pid", program.pid)
            outside = tlcache(
                "stats", "--pid", program.pid, env={"TLCACHE_RUNTIME_DIR": str(tmp_path)}
            )
            program.stdin.close()
        assert program.returncode == 0
        (process,) = told.json["processes"]
        counts = process["layers"]["compile"]
        assert (counts[outcome], counts["failed"]) == (7, 0), counts
        assert shown.code == outside.code == 0, shown.err + outside.err
        print(shown.out, outside.out)
