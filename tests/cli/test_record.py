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
def server(restorable, tmp_path, monkeypatch):
    """Start processes with agents that met the row counts given, and found them there."""
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


# --- check ---


@pytest.fixture
def recording(tlcache, tmp_path, monkeypatch):
    """A recording of two kernels of a module of the test's own, and that module's file."""
    source = tmp_path / "mine.py"
    source.write_text(
        "import tilelang, tilelang.language as T\n"
        "FACTOR = 2\n"
        "@tilelang.jit(out_idx=[-1])\n"
        "def plain(N):\n" + COPY.format(value="A[i]") + "@tilelang.jit(out_idx=[-1])\n"
        "def scaled(N):\n" + COPY.format(value="A[i] * FACTOR")
    )
    monkeypatch.setenv("TILELANG_DEFAULT_TARGET", "c")
    monkeypatch.setenv("TLCACHE_RUNTIME_DIR", str(tmp_path / "run"))
    path = tmp_path / "shapes.json"
    program = [sys.executable, "-c", "import mine; mine.plain(4); mine.scaled(4)"]
    ran = tlcache("run", "--record", path, "--", *program)
    assert ran.code == 0, ran.err
    return path, source


COPY = """    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(1):
            for i in T.serial(N):
                B[i] = {value}
    return main
"""


def names(path, which="workloads"):
    return [one["kernel"] for one in json.loads(path.read_text()).get(which, [])]


def test_a_recording_is_checked_by_its_keys_and_nothing_is_compiled(recording, tlcache, cache_root):
    path, source = recording
    before, entries = path.read_text(), sorted(cache_root.rglob("*"))
    ran = tlcache("record", "--check", path)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "2 recorded kernels  2 with the same key  0 not to be replayed\n"
    assert path.read_text() == before
    assert sorted(cache_root.rglob("*")) == entries

    # One kernel becomes another, and is listed as such; and is what it was again.
    text = source.read_text()
    source.write_text(text.replace("FACTOR = 2", "FACTOR = 3"))
    ran = tlcache("record", "--check", path)
    assert ran.code == 1
    assert ran.out == "2 recorded kernels  1 with the same key  1 not to be replayed\n"
    assert "not to be warmed: mine:scaled: its replay makes another kernel than the" in ran.err
    assert (names(path), names(path, "unreplayable")) == (["mine:plain"], ["mine:scaled"])
    warmed = tlcache("warm", "--shapes", path, "--target", "cpu", "--check")
    assert "not to be warmed: mine:scaled" in warmed.err
    source.write_text(text)
    told = tlcache("record", "--check", path, "--json").json
    assert (told["checked"], told["same"], told["unreplayable"]) == (2, 2, [])
    assert json.loads(path.read_text()) == json.loads(before)


def test_a_recorded_kernel_whose_factory_is_gone_or_fails_is_listed_with_the_reason(
    recording, tlcache
):
    path, source = recording
    text = source.read_text().replace("def plain(N):", "def plainer(N):")
    source.write_text(text.replace("def scaled(N):\n", "def scaled(N):\n    N = N / 0\n"))
    ran = tlcache("record", "--check", path, "--json")
    assert ran.code == 1
    assert names(path) == []
    reasons = {one["kernel"]: one["reason"] for one in ran.json["unreplayable"]}
    assert "plain" in reasons["mine:plain"]
    assert "ZeroDivisionError" in reasons["mine:scaled"]


def test_check_is_about_a_file_and_not_about_processes(tlcache):
    ran = tlcache("record", "--check", "shapes.json", "--pid", 7)
    assert ran.code == 2
    assert "hint: `tlcache record --check shapes.json`" in ran.err
    assert "cannot be read" in tlcache("record", "--check", "shapes.json").err
