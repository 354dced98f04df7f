"""`tlcache stats` and `tlcache top`, asked about real processes with real agents and kernels."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.environment import clean_environment

# One process that compiled three kernels and whose layer 2 is too small, and the two ranks of a
# server that it forks; the second of them compiles a fourth kernel after it is ready.
SERVE = """
import json, os, sys, time
import torch
torch.set_num_threads(1)
import ops
from tlcache import agent

op = ops.RMSNormFwdOp(64, 1e-6, torch.float32, rows="exact")
w = torch.ones(64)
for cache in ops.jit_caches():
    cache.resize(1)
agent.start()
for rows in (1, 2, 3):
    op(torch.ones(rows, 64), w)
pids = [os.getpid()]
for rank in (0, 1):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        ops.mark_ready()
        if rank:
            op(torch.ones(5, 64), w)
        os.write(write, b"x")
        while True:
            op(torch.ones(1, 64), w)
            time.sleep(0.01)
    os.read(read, 1)
    pids.append(child)
print(json.dumps(pids), flush=True)
sys.stdin.read()
for child in pids[1:]:
    os.kill(child, 9)
"""
HOLD = """
import mmap, sys
held = []
for name in sys.argv[1:]:
    with open(name, "rb") as file:
        held.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
print("ready", flush=True)
sys.stdin.read()
"""
AGENT = """
import sys
from tlcache import agent
print(agent.start(), flush=True)
sys.stdin.read()
"""
LINE = {"op": "rms_norm", "M": 5, "N": 64, "eps": 1e-06, "dtype": "float32"}


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """Those three processes: their pids, their runtime directory and their cache root."""
    place = tmp_path_factory.mktemp("serving")
    (place / "runtime").mkdir(mode=0o700)
    (place / "serve.py").write_text(SERVE)
    kept = clean_environment()
    env = {"TILELANG_CACHE_DIR": f"{place}/cache", "TLCACHE_RUNTIME_DIR": f"{place}/runtime"}
    env["TILELANG_PRINT_ON_COMPILATION"] = "0"
    process = subprocess.Popen(
        [sys.executable, "serve.py"],
        cwd=place,
        env={**kept, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = json.loads(process.stdout.readline())
    yield pids, place / "runtime", place / "cache"
    process.communicate()


@pytest.fixture
def pids(serving, cache_root, monkeypatch):
    """Their pids, with their runtime directory in force."""
    monkeypatch.setenv("TLCACHE_RUNTIME_DIR", str(serving[1]))
    return serving[0]


@pytest.fixture
def runtime(tmp_path, cache_root, monkeypatch):
    """An empty runtime directory, in force."""
    place = tmp_path / "runtime"
    place.mkdir(mode=0o700)
    monkeypatch.setenv("TLCACHE_RUNTIME_DIR", str(place))
    return place


@pytest.fixture
def start():
    """Start programs that print a line when they are ready, and end with their input."""
    running = []

    def start(source, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", source, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout.readline()
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def table(out):
    header, *rows = [line.split("\t") for line in out.splitlines() if "\t" in line]
    return [dict(zip(header, row, strict=True)) for row in rows]


# --- all ---


def test_all_agents_are_in_one_table_with_the_ranks_of_a_server_together(tlcache, pids):
    ran = tlcache("stats")
    assert ran.code == 0, ran.err
    rows = table(ran.out)
    assert [row["PID"] for row in rows] == [str(pids[0]), "", str(pids[1]), str(pids[2])]
    assert [row["PROGRAM"] for row in rows] == [
        "serve.py", "serve.py (2 of 2 ranks)", "  rank 0", "  rank 1",
    ]  # fmt: skip
    assert [row["COMPILED"] for row in rows] == ["3", "7", "3", "4"]
    assert [row["LATE"] for row in rows] == ["0", "1", "0", "1"]
    assert rows[0]["READY"] == "–" and rows[2]["READY"].startswith("after ")
    assert "thrashes" in rows[0]["NOTE"]
    assert "3 agents, 2 servers" in ran.out.splitlines()


def test_bad_numbers_come_with_what_to_do(tlcache, pids):
    err = tlcache("stats").err
    assert f"pid {pids[2]}: 1 compile after ready" in err
    assert f"hint: `tlcache record --pid {pids[2]} -o shapes.json`" in err
    assert "2 ranks of serve.py: nothing was restored, and 7 kernels were compiled" in err
    assert f"pid {pids[0]}: ops.kernels.rms_norm:rms_norm thrashes: 3 misses and 0 hits" in err


def test_json_has_what_the_agents_said_and_the_advice(tlcache, pids):
    ran = tlcache("stats", "--json")
    assert (ran.code, ran.err) == (0, "")
    told = ran.json
    assert told["schema"] == 1
    assert [one["pid"] for one in told["processes"]] == sorted(pids)
    assert all(one["trouble"] is None and one["layers"] for one in told["processes"])
    assert told["groups"] == [{"name": f"pid:{pids[0]}", "pids": pids[1:]}]
    late = [one for one in told["advice"] if one["what"] == "1 compile after ready"]
    assert late[0]["workloads"] == [LINE]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_terminal_of_any_width_holds_the_table(terminal, pids, width):
    lines = terminal("stats", width=width, NO_COLOR="1")
    assert lines[0].split()[:2] == ["PID", "PROGRAM"]
    assert all(len(line) <= width for line in lines[:6])


def test_since_ready_tells_each_kernel_that_came_late(tlcache, pids):
    ran = tlcache("stats", "--since-ready")
    (row,) = table(ran.out)
    assert (row["PID"], row["RANK"], row["WHAT"]) == (str(pids[2]), "1", "compiled")
    assert row["KERNEL"] == "rms_norm M=5 N=64 eps=1e-06 fp32 cpu"
    assert "1 compile after ready; 2 of 3 agents said that they are ready" in ran.out
    assert f"  {json.dumps(LINE)}" in ran.err.splitlines()
    (late,) = [
        one for one in tlcache("stats", "--since-ready", "--json").json["processes"]
        if one["after_ready"]
    ]  # fmt: skip
    assert (late["pid"], len(late["incidents"]), "layers" in late) == (pids[2], 1, False)


# --- one ---


def test_one_process_is_shown_layer_by_layer(tlcache, pids):
    ran = tlcache("stats", "--pid", pids[2])
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert re.match(rf"serve.py  pid {pids[2]}  rank 1 of 2  up .*  ready after ", lines[0])
    rows = {(row["LAYER"], row["WHAT"].split(" ")[0]): row for row in table(ran.out)}
    third = rows["3 workload", "rms_norm(N=64,eps=1e-06,dtype=float32,rows=exact)"]
    assert (third["MISSES"], third["SIZE"]) == ("4", "4")
    second = rows["2 jit", "ops.kernels.rms_norm:rms_norm"]
    assert (second["MISSES"], second["SIZE"], second["EVICTED"]) == ("4", "1/1", "3")
    assert second["NOTE"] == "thrashes: room for 1"
    first = rows["1 compile", "ops.kernels.rms_norm:rms_norm"]
    assert (first["MISSES"], first["NOTE"]) == ("4", "compiled 4")
    assert any(line.startswith("restored 0 · disk 0 · compiled 4 (") for line in lines)
    assert any("1 compile after ready: rms_norm M=5 N=64" in line for line in lines)
    assert f"  {json.dumps(LINE)}" in ran.err.splitlines()


def test_one_process_as_json_is_alone(tlcache, pids):
    told = tlcache("stats", "--pid", pids[1], "--json").json
    assert [one["pid"] for one in told["processes"]] == [pids[1]]


def test_a_process_with_another_runtime_directory_is_found_by_its_pid(tlcache, serving, runtime):
    assert tlcache("stats").out == "no process here has an agent\n"
    ran = tlcache("stats", "--pid", serving[0][1])
    assert ran.code == 0, ran.err
    assert ran.out.startswith(f"serve.py  pid {serving[0][1]}  rank 0 of 2")


# --- live ---


def test_a_live_view_is_redrawn_in_place_with_rates_and_ends_with_ctrl_c(pids, tmp_path):
    import pexpect

    for arguments in (["stats", "--watch", "0.2"], ["top", "--every", "0.2"]):
        child = pexpect.spawn(
            sys.executable,
            ["-c", "from tlcache.cli import main; main()", *arguments],
            cwd=tmp_path,
            env={**os.environ, "TERM": "xterm-256color"},
            dimensions=(30, 160),
            encoding="utf-8",
            timeout=60,
        )
        child.expect_exact("\x1b[?1049h")  # the other screen of the terminal
        child.expect("HITS/S")
        child.expect(r"rank 1 [^\r\n]* [1-9]\d* ")
        child.expect("HITS/S")
        child.sendintr()
        child.expect_exact("\x1b[?1049l")
        child.expect(pexpect.EOF)
        child.close()
        assert (child.exitstatus, child.signalstatus) == (0, None)


def test_a_live_view_cuts_what_a_terminal_has_no_room_for(pids, tmp_path):
    import pexpect

    child = pexpect.spawn(
        sys.executable,
        ["-c", "from tlcache.cli import main; main()", "top", "--every", "0.2"],
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm-256color"},
        dimensions=(6, 60),
        encoding="utf-8",
        timeout=60,
    )
    child.expect("… [0-9]+ more lines")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_watching_as_json_is_a_document_a_line(pids, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", "from tlcache.cli import main; main()", "top", "--every", "0.1",
         "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        for _ in range(2):
            told = json.loads(process.stdout.readline())
            assert [one["pid"] for one in told["processes"]] == sorted(pids)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0


def test_watching_into_a_pipe_that_closes_ends(pids, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", "from tlcache.cli import main; main()", "stats", "--watch", "0.1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout.readline().startswith("PID\t")
    process.stdout.close()
    assert process.wait(60) == 0


# --- what went wrong ---


def test_without_agents_it_says_how_to_have_one(tlcache, runtime):
    ran = tlcache("stats")
    assert (ran.code, ran.out) == (0, "no process here has an agent\n")
    assert "hint: `TLCACHE_AGENT=1`" in ran.err
    assert tlcache("stats", "--json").json["processes"] == []


def test_processes_that_were_killed_leave_nothing_that_breaks_it(tlcache, runtime, start):
    killed = [start(AGENT) for _ in range(3)]
    lives = start(AGENT)
    for process in killed:
        process.kill()
        process.wait()
    assert len(list(runtime.glob("*.sock"))) == 4
    ran = tlcache("stats")
    assert (ran.code, ran.err) == (0, "")
    assert [row["PID"] for row in table(ran.out)] == [str(lives.pid)]
    (gone,) = [killed[0]]
    assert tlcache("stats", "--pid", gone.pid).code == 2


def test_a_process_that_hangs_is_shown_as_one_that_does_not_answer(tlcache, runtime, start):
    stopped, lives = start(AGENT), start(AGENT)
    stopped.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    ran = tlcache("stats", "--timeout", "0.3")
    assert ran.code == 0, ran.err
    rows = {row["PID"]: row for row in table(ran.out)}
    assert rows[str(stopped.pid)]["NOTE"] == "does not answer within 0.3 s"
    assert rows[str(lives.pid)]["NOTE"] == ""
    one = tlcache("stats", "--pid", stopped.pid, "--timeout", "0.3")
    assert one.code == 0, one.err
    assert "its agent does not answer within 0.3 s; seen from outside:" in one.out.splitlines()
    assert "0 kernels mapped" in one.out
    told = tlcache("stats", "--pid", stopped.pid, "--timeout", "0.3", "--json").json
    assert told["processes"][0]["trouble"] == "does not answer within 0.3 s"
    assert told["outside"]["pid"] == stopped.pid


def test_a_runtime_directory_that_is_not_the_users_alone_is_an_error(tlcache, runtime):
    runtime.chmod(0o755)
    ran = tlcache("stats")
    assert ran.code == 3
    assert "error: others can get into the runtime directory" in ran.err
    assert "hint: `chmod 700 " in ran.err


def test_another_users_agents_are_not_asked(pids, serving, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can be two users")
    # What the other one could not read is imported before: the environment may be root's alone.
    other = "import importlib, os, pkgutil, tlcache.cli\n"
    other += "for one in pkgutil.iter_modules(tlcache.cli.__path__, 'tlcache.cli.'):\n"
    other += "    importlib.import_module(one.name)\n"
    other += "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    other += "tlcache.cli.main(['stats'])\n"
    ran = subprocess.run(
        [sys.executable, "-c", other],
        cwd="/",
        env={**os.environ, "HOME": "/"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 3, ran.stdout + ran.stderr
    assert "the runtime directory" in ran.stderr


# --- from outside ---


def test_a_process_without_an_agent_is_seen_from_outside(tlcache, serving, runtime, start):
    cache = serving[2]
    libraries = sorted(cache.glob("*/*/kernels/*/kernel_lib.so"))
    process = start(HOLD, *libraries)
    ran = tlcache("stats", "--pid", process.pid)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert re.match(rf"python.*  pid {process.pid}  user \w+  up .*  TileLang is not", lines[0])
    assert lines[1] == "it has no agent; seen from outside:"
    rows = table(ran.out)
    assert {row["WORKLOAD"] for row in rows} == {
        f"M={rows} N=64 eps=1e-06 fp32" for rows in (1, 2, 3, 5)
    }
    assert {(row["KERNEL"], row["TARGET"], row["ROOT"]) for row in rows} == {
        ("rms_norm", "cpu", str(cache))
    }
    assert re.fullmatch(rf"4 kernels mapped, \d+ KiB from {cache}", lines[-1])
    assert "hint: with an agent it says more: `TLCACHE_AGENT=1`" in ran.err
    told = tlcache("stats", "--pid", process.pid, "--json").json
    assert len(told["outside"]["kernels"]) == 4
    assert told["outside"]["kernels"][0]["root"] == str(cache)


def test_a_pid_that_is_none_is_wrong_input(tlcache, runtime):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    for arguments in ((), ("--json",), ("--watch", "1")):
        ran = tlcache("stats", "--pid", process.pid, *arguments)
        assert (ran.code, ran.out) == (2, "")
        assert f"error: there is no process {process.pid}" in ran.err
    assert tlcache("stats", "--pid", 0).code == 2
