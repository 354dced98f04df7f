"""`tlcache record`: what running processes met, asked of their agents."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SERVER = """
import sys
from tlcache import operators, runtime, targets
for M in sys.argv[1:]:
    values = {"M": int(M), "N": 64, "dtype": "float32"}
    runtime.resolve(operators.get("rms_norm").spec(values, targets.CPU))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server(cache_root, tmp_path, monkeypatch):
    """Start processes with agents that met the row counts given."""
    monkeypatch.setenv("TLCACHE_RUNTIME_DIR", str(tmp_path / "run"))
    started = []

    def server(*rows: int) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, *map(str, rows)],
            env={**os.environ, "TLCACHE_AGENT": "1", "TILELANG_PRINT_ON_COMPILATION": "0"},
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process.pid

    yield server
    for process in started:
        process.communicate(timeout=60)


def rows(document):
    return sorted(workload["M"] for workload in document["workloads"])


def test_one_process_or_all_are_asked(server, tlcache):
    first, second = server(1, 2), server(2, 3)
    assert rows(tlcache("record").json) == [1, 2, 3]
    assert rows(tlcache("record", "--pid", first).json) == [1, 2]
    assert rows(tlcache("record", "--pid", first, "--pid", second, "-o", "-").json) == [1, 2, 3]


def test_a_file_grows_and_warm_takes_it(server, tlcache, tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"version": 1, "workloads": [{"op": "softmax", "M": 1, "N": 8}]}))
    pid = server(1, 2)
    ran = tlcache("record", "--pid", pid, "-o", path)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"2 workloads of 1 process  2 new in {path}\n"
    told = tlcache("record", "-o", path, "--json").json
    assert told == {
        "schema": 1, "file": str(path), "pids": [pid], "workloads": 3, "added": 0,
        "unreplayable": [],
    }  # fmt: skip
    checked = tlcache("warm", "--shapes", path, "--target", "cpu", "--check")
    assert checked.out.startswith("1 of 3 kernels is missing: softmax")


def test_a_file_that_is_no_shapes_document_is_left_alone(server, tlcache, tmp_path):
    server(1)
    path = tmp_path / "notes.txt"
    path.write_text("notes")
    ran = tlcache("record", "-o", path)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {path} is not JSON")
    assert path.read_text() == "notes"


def test_a_process_without_an_agent_is_an_error_with_the_remedy(server, tlcache, tmp_path):
    server(1)
    ran = tlcache("record", "--pid", os.getpid())
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == (
        f"error: the process {os.getpid()} has no agent\n\n"
        "hint: start it by `tlcache run`, or set TLCACHE_AGENT=1 where it imports tlcache\n"
    )
    assert "is not running" in tlcache("record", "--pid", 2**22 - 1).err


def test_where_nobody_has_an_agent_it_says_so(tlcache, tmp_path):
    ran = tlcache("record", env={"TLCACHE_RUNTIME_DIR": str(tmp_path / "none")})
    assert ran.code == 1
    assert ran.err.startswith("error: no process here has an agent")


def test_json_needs_a_file(tlcache):
    ran = tlcache("record", "--json")
    assert ran.code == 2
    assert "without -o that is on standard output already" in ran.err
