"""`tlcache run`: the command becomes the process, and every Python in it has the hooks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tlcache import bootstrap

TLCACHE = [sys.executable, "-c", "from tlcache.cli import main; main()"]

# Says what a program can see of tlcache, once TileLang was asked for.
SEEN = """
import json, os, sys
early = [name for name in sys.modules if name.partition(".")[0] in ("tlcache", "wrapt", "click")]
import importlib.util
importlib.util.find_spec("tilelang")
print(json.dumps({
    "early": early,
    "hooks": "tlcache.runtime.hooks" in sys.modules,
    "path": [place for place in sys.path if "bootstrap" in place],
    "argv": sys.argv[1:],
}))
"""


@pytest.fixture
def started(tlcache, tmp_path, monkeypatch):
    monkeypatch.setenv("TLCACHE_RUNTIME_DIR", str(tmp_path / "run"))
    return tlcache


def test_the_hooks_come_with_tilelang_and_nothing_is_there_before(started):
    ran = started("run", "--", sys.executable, "-c", SEEN, "--port", "1")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out) == {
        "early": [],
        "hooks": True,
        "path": [],
        "argv": ["--port", "1"],
    }


@pytest.mark.parametrize(
    "start",
    [
        "subprocess.run([sys.executable, '-c', code], check=True)",
        "pid = os.fork(); exec(code) if not pid else os.waitpid(pid, 0)",
        "multiprocessing.get_context('spawn').Process(target=exec, args=(code,)).start()",
    ],
    ids=["started", "forked", "spawned"],
)
def test_child_processes_have_the_hooks(started, start, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        f"import multiprocessing, os, subprocess, sys\ncode = {SEEN!r}\n"
        f"if __name__ == '__main__':\n    {start}\n"
    )
    ran = started("run", "--", sys.executable, script)
    assert ran.code == 0, ran.err
    seen = json.loads(ran.out.splitlines()[0])
    assert seen["hooks"], seen


def test_ranks_of_torchrun_have_the_hooks_and_record_into_one_file(started, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, tilelang, tilelang.language as T\n"
        "@tilelang.jit(out_idx=[-1])\n"
        "def copied(N):\n"
        "    @T.prim_func\n"
        "    def main(A: T.Tensor((N,), 'float32'), B: T.Tensor((N,), 'float32')):\n"
        "        with T.Kernel(1):\n"
        "            for i in T.serial(N):\n"
        "                B[i] = A[i]\n"
        "    return main\n"
        "if __name__ == '__main__':\n"
        "    copied(4 + int(os.environ['RANK']))\n"
    )
    record = tmp_path / "shapes.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--master-port", "0", "--standalone"]
    ran = started(
        "run", "--record", record, "--", *launch, script, env={"TILELANG_DEFAULT_TARGET": "c"}
    )
    assert ran.code == 0, ran.err
    met = json.loads(record.read_text())["workloads"]
    assert sorted(workload["args"]["N"] for workload in met) == [4, 5]


def test_a_sitecustomize_that_is_shadowed_runs_as_if_nothing_stood_before_it(started, tmp_path):
    text = "import sys; WHO = 'the shadowed one'; sys.seen = 1\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    code = "import sys, sitecustomize; print(sys.seen, sitecustomize.WHO, sitecustomize.__file__)"
    ran = started(*("run", "--", sys.executable, "-c", code), env={"PYTHONPATH": str(tmp_path)})
    assert ran.out.split() == ["1", "the", "shadowed", "one", str(tmp_path / "sitecustomize.py")]


def test_what_a_shadowed_sitecustomize_raises_is_told_by_python_as_ever(started, run, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('theirs')\n")
    env = {"PYTHONPATH": str(tmp_path)}
    alone = run([sys.executable, "-c", "print(1)"], env=env)
    ran = started("run", "--", sys.executable, "-c", "print(1)", env=env)
    # The Python that `tlcache` itself runs in says it, too.
    assert (ran.code, ran.out, ran.err) == (alone.code, alone.out, 2 * alone.err)


def test_a_python_without_tlcache_says_so_once_and_goes_on(started, tmp_path):
    package = tmp_path / "tilelang"
    package.mkdir()
    (package / "__init__.py").write_text("WHO = 'not the real one'\n")
    # -S leaves out the installed packages; then the bootstrap has to be imported by hand.
    code = "import sitecustomize, tilelang; print(tilelang.WHO)"
    env = {"PYTHONPATH": str(tmp_path)}
    ran = started("run", "--", sys.executable, "-S", "-c", code, env=env, cwd="/")
    assert (ran.code, ran.out) == (0, "not the real one\n")
    assert ran.err.count("runs without tlcache's hooks: ModuleNotFoundError") == 1


def test_the_command_is_the_process_with_its_signals_its_input_and_its_exit_code(tmp_path):
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.stdin.readline())))\n"
        "print(os.getpid(), flush=True)\n"
        "while True: signal.pause()\n"
    )
    process = subprocess.Popen(
        [*TLCACHE, "run", "--", sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert int(process.stdout.readline()) == process.pid
    process.stdin.write("42\n")
    process.stdin.flush()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 42
    process.stdin.close()
    process.stdout.close()


def test_a_pipe_that_is_closed_ends_the_command_as_it_would_alone():
    command = [*TLCACHE, "run", "--", "sh", "-c", "yes | head -1; echo after"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "y\nafter\n", "")


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["no-such-program"], 127, "error: no-such-program: not found"),
        (["/etc/passwd"], 126, "error: /etc/passwd: permission denied"),
        ([], 2, "error: there is no command to run"),
    ],
)
def test_a_command_that_does_not_start_exits_as_in_a_shell(tlcache, command, code, said):
    ran = tlcache("run", "--", *command)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith(said)


def test_the_options_reach_the_program_by_its_environment(tlcache, tmp_path):
    options = ["--record", "seen.json", "--on-compile", "warn", "--from", "start"]
    names = ["TLCACHE_RECORD", "TLCACHE_ON_COMPILE", "TLCACHE_ON_COMPILE_FROM", "TLCACHE_AGENT"]
    code = f"import os; print(*map(os.environ.get, {names!r}))"
    said = [str(tmp_path / "seen.json"), "warn", "start", "1"]
    ran = tlcache("run", *options, sys.executable, "-c", code)
    assert ran.out.split() == said
    nested = [sys.executable, "-c", "from tlcache.cli import main; main()", "run", "--"]
    ran = tlcache(
        "run", *options, *nested, sys.executable, "-c", f"{code}; print(os.environ['PYTHONPATH'])"
    )
    assert ran.out.splitlines()[0].split() == said
    assert ran.out.splitlines()[1].count("bootstrap") == 1


def test_a_recording_that_would_spoil_a_file_is_refused_before_the_program_runs(tlcache, tmp_path):
    spoiled = tmp_path / "notes.json"
    spoiled.write_text("my notes")
    ran = tlcache("run", "--record", spoiled, "--", "echo", "started")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {spoiled} is not JSON")
    assert spoiled.read_text() == "my notes"
    ran = tlcache("run", "--record", tmp_path / "nowhere" / "f.json", "--", "echo", "started")
    assert (ran.code, ran.out) == (2, "")
    assert "is not there" in ran.err


def test_a_program_without_tilelang_imports_nothing_for_it(python):
    code = "import sys; print(*sys.modules)"
    place = os.path.dirname(bootstrap.__file__)
    alone, hooked = python(code), python(code, env={"PYTHONPATH": place})
    assert set(hooked.out.split()) - set(alone.out.split()) <= {"sitecustomize", "__future__"}
