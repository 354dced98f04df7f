"""`tlcache run --shapes`: the kernels are there first, or beside; the command is the process."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environment import clean_environment

TLCACHE = [sys.executable, "-c", "from tlcache.cli import main; main()"]
WORKLOAD = {"op": "rms_norm", "M": [1, 2], "N": 64, "dtype": "float32"}
DOCUMENT = {"version": 1, "targets": ["cpu"], "workloads": [WORKLOAD]}

# Says what there is when the command is about to start, and what was started before.
WATCHED = """
import sys
started = []
def watch(event, arguments):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        started.append(event)
    if event == "os.exec":
        heavy = {"torch", "tilelang", "tvm", "tvm_ffi", "pydantic", "filelock", "rich"}
        print(sorted(heavy & set(sys.modules)), started, flush=True)
sys.addaudithook(watch)
from tlcache.cli import main
main()
"""

# A kernel with a scalar argument has no record.
SCALAR = """
import tilelang
import tilelang.language as T

@tilelang.jit(out_idx=[-1])
def scaled(N):
    @T.prim_func
    def main(by: T.float32, A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(1):
            for i in T.serial(N):
                B[i] = A[i] * by

    return main
"""

# Says as JSON what the process that a command became is.
COMMAND = """
import json, os, sys
def stats():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = open(f"/proc/{pid}/stat").read()
        except OSError:
            continue
        yield int(pid), *text.rpartition(")")[2].split()[:2]
mine = [(pid, state) for pid, state, parent in stats() if int(parent) == os.getpid()]
print(json.dumps({"pid": os.getpid(), "children": mine}), flush=True)
"""


def until(there: Callable[[], object], what: str) -> object:
    """Wait until something is so, for a minute at most."""
    give_up = time.monotonic() + 60
    while not (found := there()):
        assert time.monotonic() < give_up, what
        time.sleep(0.02)
    return found


def marked(word: str) -> list[int]:
    """The processes that have a word in their environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if word.encode() in Path("/proc", pid, "environ").read_bytes():
                found.append(int(pid))
        except OSError:
            pass
    return [pid for pid in found if pid != os.getpid()]


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root that has the document's kernels; tests work on copies."""
    place = tmp_path_factory.mktemp("warmed")
    (place / "shapes.json").write_text(json.dumps(DOCUMENT))
    subprocess.run(
        [*TLCACHE, "warm", "--shapes", "shapes.json"],
        cwd=place,
        env=clean_environment(TILELANG_CACHE_DIR=str(place / "cache")),
        check=True,
        capture_output=True,
    )
    return place / "cache"


@pytest.fixture
def copied(warmed: Path, cache_root: Path) -> Path:
    shutil.copytree(warmed, cache_root)
    return cache_root


@pytest.fixture
def document(shapes: Callable[..., Path]) -> Path:
    return shapes(document=DOCUMENT)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a script in front of the C++ compiler that says in a log when it compiles a library."""

    def compiler(meanwhile: str = "") -> Path:
        script, log = tmp_path / "cxx", tmp_path / "compiled"
        script.write_text(
            "#!/bin/sh\n"
            'case "$*" in *-shared*)\n'
            f'  echo "$(nice)" >> {log}\n  {meanwhile or ":"}\n;; esac\n'
            f'exec {shutil.which("g++")} "$@"\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return log

    return compiler


# --- all there ---


def test_where_all_is_there_nothing_is_started_and_nothing_heavy_imported(run, copied, document):
    ran = run([sys.executable, "-c", WATCHED, "run", "--shapes", document, "--", "echo", "served"])
    assert ran.code == 0, ran.err
    *before, served = ran.out.splitlines()
    assert (set(before), served) == ({"[] []"}, "served")
    assert ran.err.startswith("tlcache: 2 of 2 kernels ready in ")
    assert ran.err.endswith(" (cpu), starting `echo served`\n")


def test_what_is_no_longer_there_byte_for_byte_is_compiled_again(tlcache, copied, document):
    library = next(copied.rglob("kernel_lib.so"))
    data = bytearray(library.read_bytes())
    data[-1] ^= 1
    library.write_bytes(data)
    record = next(copied.glob("tlcache/records/*/*.json"))
    ran = tlcache("run", "--shapes", document, "--ready-file", "ready.json", "--", "true")
    assert ran.code == 0, ran.err
    assert "2 of 2 kernels ready" in ran.err
    assert library.read_bytes() != bytes(data) or record.exists()
    assert tlcache("warm", "--shapes", document, "--check").code == 0


def test_a_kernel_that_only_tilelang_can_load_counts_as_there_once_it_is(
    run, tlcache, cache_root, shapes, tmp_path
):
    (tmp_path / "project.py").write_text(SCALAR)
    path = shapes({"kernel": "project:scaled", "args": {"N": 4}}, targets=["cpu"])
    ran = tlcache("run", "--shapes", path, "--require", "all", "--", "true")
    assert ran.code == 0 and "1 of 1 kernel ready" in ran.err, ran.err
    assert not list(cache_root.glob("tlcache/records/*/*.json"))
    ran = run([sys.executable, "-c", WATCHED, "run", "--shapes", path, "--", "true"])
    assert set(ran.out.splitlines()) == {"[] []"}, ran.err
    shutil.rmtree(next(cache_root.rglob("kernel_lib.so")).parent)
    ran = tlcache("run", "--shapes", path, "--require", "all", "--", "true")
    assert ran.code == 0 and "1 of 1 kernel ready" in ran.err, ran.err


# --- what is missing ---


def test_what_is_missing_is_compiled_first_and_the_command_inherits_no_process(
    tlcache, cache_root, document, tmp_path
):
    ready = tmp_path / "ready.json"
    ready.write_text("of an earlier start")
    ran = tlcache(
        *("run", "--shapes", document, "--require", "all", "--ready-file", ready, "--"),
        *(sys.executable, "-c", f"{COMMAND}\nsys.exit(42)"),
    )
    assert ran.code == 42, ran.err
    assert ran.json["children"] == []
    told = json.loads(ready.read_text())
    assert told.pop("seconds") > 0
    assert told == {
        "schema": 1,
        "state": "ready",
        "total": 2,
        "ready": 2,
        "failed": [],
        "left": [],
        "targets": ["cpu"],
        "budget_spent": False,
        "error": None,
    }
    assert len(list(cache_root.glob("tlcache/coverage/*.json"))) == 1


def test_a_spent_budget_is_told_and_the_command_starts(tlcache, cache_root, document, compiler):
    compiler("sleep 1000")
    marker = f"TEST_MARKER={os.getpid()}-budget"
    ran = tlcache(
        *("run", "--shapes", document, "--budget", "4s", "--ready-file", "ready.json"),
        *("--", "cat", "ready.json"),
        env=dict([marker.split("=")]),
    )
    assert ran.code == 0, ran.err
    assert ran.json["state"] == "cold" and ran.json["budget_spent"]
    assert "; the budget of 4.0 s is spent" in ran.err
    assert f"hint: `tlcache warm --shapes {document}` compiles what is missing" in ran.err
    assert marked(marker) == []


def test_where_all_is_required_and_the_budget_is_spent_it_exits_with_3(
    tlcache, copied, document, compiler, tmp_path
):
    compiler("sleep 1000")
    shutil.rmtree(next(copied.rglob("kernel_lib.so")).parent)
    ran = tlcache(
        *("run", "--shapes", document, "--budget", "800ms", "--require", "all"),
        *("--ready-file", "ready.json", "--", "echo", "started"),
    )
    assert (ran.code, ran.out) == (3, "")
    assert "1 of 2 kernels ready" in ran.err and "not started, as --require all says" in ran.err
    assert not (tmp_path / "ready.json").exists()


def test_a_hung_compiler_is_killed_at_its_timeout(tlcache, cache_root, document, compiler):
    compiler("sleep 1000")
    marker = f"TEST_MARKER={os.getpid()}-timeout"
    ran = tlcache(
        *("run", "--shapes", document, "--timeout", "2", "--", "echo", "started"),
        env=dict([marker.split("=")]),
    )
    assert (ran.code, ran.out) == (0, "started\n")
    assert ran.err.count("its compile was killed after 2 s") == 2
    assert marked(marker) == []


def test_who_waits_goes_on_when_its_budget_is_spent_and_sigterm_ends_all_of_a_warm(
    tlcache, cache_root, document, compiler
):
    log = compiler("sleep 1000")
    marker = f"TEST_MARKER={os.getpid()}-terminated"
    process = subprocess.Popen(
        [*TLCACHE, "run", "--shapes", document, "--", "echo", "started"],
        stdout=subprocess.PIPE,
        env={**os.environ, **dict([marker.split("=")])},
    )
    until(log.exists, "no compiler was started")
    ran = tlcache("run", "--shapes", document, "--budget", "500ms", "--", "echo", "started")
    assert (ran.code, ran.out) == (0, "started\n")
    assert "0 of 2 kernels ready" in ran.err and "left: rms_norm M=1" in ran.err
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == b""
    assert process.returncode == 128 + signal.SIGTERM
    assert marked(marker) == []


# --- several ---


def test_eight_that_start_together_compile_each_kernel_once(cache_root, document, compiler):
    log = compiler()
    command = [*TLCACHE, "run", "--shapes", document, "--require", "all", "--", "true"]
    ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    told = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 8, told
    assert all("2 of 2 kernels ready" in one for one in told)
    assert len(log.read_text().splitlines()) == 2


def test_what_fails_for_the_one_that_leads_is_not_tried_again_by_those_that_wait(
    cache_root, document, compiler, tmp_path
):
    go = tmp_path / "go"
    log = compiler(f"while [ ! -e {go} ]; do sleep 0.05; done; exit 1")
    command = [*TLCACHE, "run", "--shapes", document, "--", "true"]
    ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    until(log.exists, "no compiler was started")
    waiting = [rank.stderr for rank in ranks]
    until(
        lambda: sum(len(marked(f"TLCACHE_STARTED_BY={rank.pid}-")) > 0 for rank in ranks) == 1,
        "not one alone compiles",
    )
    while len(waiting) > 1:
        line = (one := select.select(waiting, [], [])[0][0]).readline()
        assert "another process compiles these kernels" in line
        waiting.remove(one)
    go.touch()
    told = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 3
    assert all("0 of 2 kernels ready" in one and one.count("failed: ") == 2 for one in told), told
    assert len(log.read_text().splitlines()) == 2


def test_who_waits_takes_over_when_the_one_that_leads_is_killed(
    cache_root, document, compiler, tmp_path
):
    go = tmp_path / "go"
    log = compiler(f"[ -e {go} ] || sleep 1000")
    marker = f"TEST_MARKER={os.getpid()}-leads"
    command = [*TLCACHE, "run", "--shapes", document, "--require", "all", "--", "true"]
    first = subprocess.Popen(command, env={**os.environ, **dict([marker.split("=")])})
    until(log.exists, "no compiler was started")
    second = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert "another process compiles these kernels" in second.stderr.readline()
    go.touch()
    for pid in marked(marker):
        os.kill(pid, signal.SIGKILL)
    first.wait(60)
    assert "2 of 2 kernels ready" in second.communicate(timeout=120)[1]
    assert second.returncode == 0


# --- in the background ---


def test_in_the_background_the_command_starts_at_once_and_a_niced_sibling_finishes(
    tlcache, cache_root, document, compiler, tmp_path
):
    started, ready = tmp_path / "started", tmp_path / "ready.json"
    log = compiler(f"while [ ! -e {started} ]; do sleep 0.05; done")
    wait = (
        f"{COMMAND}\nimport pathlib, time\npathlib.Path({str(started)!r}).touch()\n"
        f"while not os.path.exists({str(ready)!r}): time.sleep(0.05)\n"
        f"print(open({str(ready)!r}).read())"
    )
    ran = tlcache(
        *("run", "--shapes", document, "--background", "--ready-file", ready, "--"),
        *(sys.executable, "-c", wait),
    )
    assert ran.code == 0, ran.err
    first, _, told = ran.out.partition("\n")
    assert json.loads(first)["children"] == []
    assert json.loads(told)["state"] == "ready"
    assert set(log.read_text().split()) == {str(os.nice(0) + 10)}


def test_a_sibling_ends_when_the_command_does(tlcache, cache_root, document, compiler):
    log = compiler("sleep 1000")
    marker = f"TEST_MARKER={os.getpid()}-sibling"
    ran = tlcache(
        *("run", "--shapes", document, "--background", "--"),
        *("sh", "-c", f"while [ ! -e {log} ]; do sleep 0.05; done"),
        env=dict([marker.split("=")]),
    )
    assert ran.code == 0, ran.err
    until(lambda: not marked(marker), "the sibling went on")


# --- as pid 1 ---


def _namespaces() -> bool:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_namespaces = pytest.mark.skipif(not _namespaces(), reason="no pid namespaces here")
INIT = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *TLCACHE]


@needs_namespaces
def test_as_pid_1_sigterm_reaches_the_command_and_its_exit_code_is_the_containers(
    cache_root, document, tmp_path
):
    code = (
        f"{COMMAND}\nimport signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n"
        f"print(json.dumps([state for _, state, _ in stats()]), flush=True)\n"
        "while True: signal.pause()\n"
    )
    command = [*INIT, "run", "--shapes", document, "--", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert json.loads(process.stdout.readline()) == {"pid": 1, "children": []}
            # It is alone, and nothing is a zombie.
            assert json.loads(process.stdout.readline()) == ["R"]
            with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
                os.kill(int(file.read()), signal.SIGTERM)
            assert process.wait(60) == 42
        finally:
            process.kill()


@needs_namespaces
def test_as_pid_1_a_background_warm_leaves_no_zombie(run, cache_root, document, tmp_path):
    ready = tmp_path / "ready.json"
    code = (
        f"{COMMAND}\nimport time\nwhile not os.path.exists({str(ready)!r}): time.sleep(0.05)\n"
        "time.sleep(0.5)\nprint(json.dumps([state for _, state, _ in stats()]))\n"
    )
    command = [*INIT, "run", "--shapes", document, "--background", "--ready-file", ready]
    ran = run([*command, "--", sys.executable, "-c", code])
    assert ran.code == 0, ran.err
    assert json.loads(ran.out.splitlines()[0])["pid"] == 1
    assert "Z" not in json.loads(ran.out.splitlines()[1])
    assert json.loads(ready.read_text())["state"] == "ready"


# --- options ---


def test_the_options_combine_and_without_hooks_the_command_starts_untouched(
    tlcache, copied, document
):
    show = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    plain = {**os.environ}
    bare = tlcache("run", "--shapes", document, "--no-hooks", "--", *show).json
    assert bare == {**plain, **{k: v for k, v in bare.items() if k == "LC_CTYPE"}}
    options = ["--record", "met.json", "--on-compile", "error", "--from", "start"]
    told = tlcache("run", "--shapes", document, *options, "--require", "all", "--", *show).json
    changed = {name for name in told if told[name] != plain.get(name)}
    assert changed - {"LC_CTYPE"} == {
        *("PYTHONPATH", "TLCACHE_AGENT", "TLCACHE_RECORD"),
        *("TLCACHE_ON_COMPILE", "TLCACHE_ON_COMPILE_FROM"),
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "60s"], "--budget is about kernels, and nothing says which"),
        (["--shapes", "nowhere.json"], "nowhere.json cannot be read: no such file or directory"),
        (["--shapes", "nowhere.json", "--background"], "nowhere.json cannot be read"),
        (["--shapes", "s", "--budget", "soon"], "--budget 'soon' is no time span"),
        (["--shapes", "s", "--background", "--require", "all"], "--require all waits for the"),
        (["--shapes", "s", "--ready-file", "/proc/x/y"], None),
    ],
)
def test_what_cannot_be_meant_is_told_before_anything_starts(tlcache, options, said):
    ran = tlcache("run", *options, "--", "echo", "started")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {said or ''}")


def test_a_document_that_says_nonsense_is_refused_as_warm_refuses_it(tlcache, cache_root, shapes):
    path = shapes(document={"version": 2, "workloads": []})
    ran = tlcache("run", "--shapes", path, "--", "echo", "started")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == tlcache("warm", "--shapes", path).err
