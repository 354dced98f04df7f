"""What a process met gets into its file, whatever ends the process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

RESOLVE = """
import os, sys
from tlcache import operators, runtime, targets
def resolve(M, **more):
    values = {"M": M, "N": 64, "dtype": "float32", **more}
    return runtime.resolve(operators.get("rms_norm").spec(values, targets.CPU))
"""


@pytest.fixture
def recording(python, tmp_path, monkeypatch):
    """Run code with TLCACHE_RECORD; the workloads in its file."""
    record = tmp_path / "shapes.json"
    monkeypatch.setenv("TLCACHE_RECORD", str(record))
    monkeypatch.setenv("TILELANG_PRINT_ON_COMPILATION", "0")

    def recording(code: str, expected: int = 0):
        ran = python(RESOLVE + code)
        assert ran.code == expected, ran.err
        return json.loads(record.read_text())["workloads"] if record.exists() else None

    return recording


def test_the_specs_that_were_resolved_are_their_operators_workloads(recording, tlcache, tmp_path):
    met = recording("resolve(1); resolve(1); resolve(2, eps=0.5)")
    assert met == [
        {"op": "rms_norm", "M": 1, "N": 64, "eps": 1e-06, "dtype": "float32"},
        {"op": "rms_norm", "M": 2, "N": 64, "eps": 0.5, "dtype": "float32"},
    ]
    checked = tlcache("warm", "--shapes", tmp_path / "shapes.json", "--target", "cpu", "--check")
    assert checked.out.startswith("2 kernels  0 compiled  2 already there")


def test_a_schedule_of_ones_own_is_recorded_and_the_default_is_left_open(recording):
    met = recording("""
spec = operators.get("rms_norm").spec({"M": 1, "N": 64, "dtype": "float32"}, targets.CPU)
other = {**spec.schedule}
name = next(name for name, value in other.items() if isinstance(value, int) and value > 0)
candidates = operators.get("rms_norm").candidates
from ops.kernels.rms_norm import RMSNormWorkload
found = [c for c in candidates(RMSNormWorkload(1, 64, dtype="float32"), targets.CPU) if c != other]
if found:
    runtime.resolve(operators.get("rms_norm").spec(spec.workload, targets.CPU, found[0]))
resolve(1)
""")
    assert {"op": "rms_norm", "M": 1, "N": 64, "eps": 1e-06, "dtype": "float32"} in met
    assert all(workload.get("schedule") != {} for workload in met)


@pytest.mark.usefixtures("restorable")
def test_restarts_add_to_the_file(recording):
    recording("resolve(1)")
    assert [workload["M"] for workload in recording("resolve(3)")] == [1, 3]


@pytest.mark.usefixtures("restorable")
@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(3)", 3), ("raise SystemExit(4)", 4), ("1 / 0", 1)],
)
def test_an_end_writes_what_is_new(recording, end, code):
    assert len(recording(f"resolve(1)\n{end}", code)) == 1


@pytest.mark.usefixtures("restorable")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_loses_nothing_that_was_there_a_moment_before(tmp_path, cache_root, number):
    record = tmp_path / "shapes.json"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{RESOLVE}\nresolve(1); print(flush=True); sys.stdin.read()"],
        env={**os.environ, "TLCACHE_RECORD": str(record)},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    process.stdout.readline()
    deadline = time.monotonic() + 60
    while not record.exists():
        assert time.monotonic() < deadline
    process.send_signal(number)
    assert process.wait(60) == -number
    process.stdin.close()
    process.stdout.close()
    assert [workload["M"] for workload in json.loads(record.read_text())["workloads"]] == [1]


@pytest.mark.usefixtures("restorable")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_multiprocessing_record_into_one_file(run, tmp_path, monkeypatch, method):
    record = tmp_path / "shapes.json"
    monkeypatch.setenv("TLCACHE_RECORD", str(record))
    script = tmp_path / "parent.py"
    script.write_text(
        f"import multiprocessing\n{RESOLVE}\n"
        "if __name__ == '__main__':\n"
        "    resolve(1)\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    processes = [context.Process(target=resolve, args=(n,)) for n in (2, 3)]\n"
        "    for process in processes: process.start()\n"
        "    for process in processes: process.join(); assert process.exitcode == 0\n"
    )
    ran = run([sys.executable, script])
    assert ran.code == 0, ran.err
    met = json.loads(record.read_text())["workloads"]
    assert sorted(workload["M"] for workload in met) == [1, 2, 3]


@pytest.mark.usefixtures("restorable")
def test_a_damaged_file_is_told_once_left_alone_and_does_not_stop_the_program(python, tmp_path):
    record = tmp_path / "shapes.json"
    record.write_text("{")
    ran = python(f"{RESOLVE}\nresolve(1); resolve(2)", env={"TLCACHE_RECORD": str(record)})
    assert ran.code == 0
    assert record.read_text() == "{"
    assert ran.err.count("nothing was recorded into it; this process records no more") == 1


@pytest.mark.usefixtures("restorable")
def test_what_is_met_is_told_without_a_file_too(python):
    ran = python(
        f"{RESOLVE}\nimport json\nfrom tlcache.runtime import recorder\nresolve(1)\n"
        "print(json.dumps([recorder.document(), recorder.recording()]))"
    )
    document, path = json.loads(ran.out.splitlines()[-1])
    assert path is None
    assert [workload["M"] for workload in document["workloads"]] == [1]
