"""Bad input and bad luck: whatever makes a warm or a restore go wrong is said, with the exit code
and the hint that belong to it, and the next run can use the root.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.environment import clean_environment
from tlcache import operators, targets
from tlcache.store import layout, record

TLCACHE = [sys.executable, "-c", "from tlcache.cli import main; main()"]
ROWS = (1, 2, 3, 4, "dynamic")

# Resolves rms_norm for the row counts in argv, compares each with torch, and says what happened:
# also which libraries below the cache root were opened at all, by their digests.
SERVE = """
import hashlib, json, os, sys
root, loaded = os.environ["TILELANG_CACHE_DIR"], []
def on_event(event, arguments):
    if event == "ctypes.dlopen" and str(arguments[0]).startswith(root):
        with open(arguments[0], "rb") as file:
            loaded.append(hashlib.sha256(file.read()).hexdigest())
sys.addaudithook(on_event)
import torch
from tlcache import errors, operators, runtime, targets
torch.manual_seed(0)
origins, error = [], None
for rows in json.loads(sys.argv[1]):
    spec = operators.get("rms_norm").spec({"M": rows, "N": 64, "dtype": "float32"}, targets.CPU)
    try:
        launcher = runtime.resolve(spec)
    except errors.TlcacheError as fault:
        error = [type(fault).__name__, fault.message, fault.hint]
        break
    x, w = torch.randn(5 if rows == "dynamic" else rows, 64), torch.randn(64)
    want = torch.nn.functional.rms_norm(x, (64,), w, 1e-6)
    torch.testing.assert_close(launcher(x, w), want, rtol=1e-5, atol=1e-6)
    origins.append(launcher.origin)
counters = runtime.counters()
print("RESULT " + json.dumps({
    "origins": origins, "error": error, "loaded": loaded, "tilelang": "tilelang" in sys.modules,
    "counts": [getattr(counters, name) for name in ("restored", "disk", "compiled", "failed")],
}))
"""

# Factories that go wrong, each in its own way; they lie in the working directory of the warm.
ODD_KERNELS = '''
import logging
import os
import signal
import subprocess
import time
from pathlib import Path

import tilelang
import tilelang.language as T


def good(N):
    @tilelang.jit(out_idx=[1], target={"kind": "c"})
    def double():
        @T.prim_func
        def double(x: T.Tensor((N,), "float32"), y: T.Tensor((N,), "float32")):
            with T.Kernel(1):
                for i in T.serial(N):
                    y[i] = x[i] * 2.0

        return double

    return double


def raises(N):
    logging.getLogger("tilelang").warning("as TileLang does when something goes wrong")
    raise ValueError(f"N={N} is unlucky")


def rejected(N, target):
    cpu = target == "cpu"

    @tilelang.jit(out_idx=[1], target={"kind": "c"} if cpu else {"kind": "cuda", "arch": target})
    def call():
        @T.prim_func
        def call(x: T.Tensor((N,), "float32"), y: T.Tensor((N,), "float32")):
            with T.Kernel(1, threads=None if cpu else 32):
                for i in T.serial(N):
                    y[i] = T.call_extern("float32", "no_such function", x[i])

        return call

    return call


def hangs(N):
    subprocess.run(["sleep", "600"])


def dies(N):
    os.kill(os.getpid(), signal.SIGKILL)


def number(N):
    return N


def held(N):
    """Waits, with a program of its own running, until there is a file `go`."""
    waiting = subprocess.Popen(["sleep", "600"])
    Path("begun").touch()
    while not Path("go").exists():
        time.sleep(0.02)
    waiting.kill()
    waiting.wait()
    return good(N)
'''


def rms_norm(*rows, **fields):
    return {"op": "rms_norm", "M": list(rows), "N": 64, "dtype": "float32", **fields}


def odd(name, n=64):
    return {"kernel": f"odd_kernels:{name}", "args": {"N": n}}


def result(ran):
    assert ran.code == 0, ran.err
    return json.loads(ran.out.rpartition("RESULT ")[2])


def record_path(root, rows):
    values = {"M": rows, "N": 64, "dtype": "float32"}
    return Path(
        layout.record_path(root, operators.get("rms_norm").spec(values, targets.CPU).action_key())
    )


def library_path(root, rows):
    filed = json.loads(record_path(root, rows).read_text())
    return root / filed["entry"] / filed["library"]["name"]


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def tree(root):
    """Every path below a root, with what it holds."""
    return {
        path.relative_to(root): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def assert_error(ran, code, error, hint):
    """One sentence, a blank line, one hint, and nothing else: no traceback, and no data."""
    assert ran.code == code, ran.err
    assert ran.out == ""
    lines = ran.err.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("error: "))
    assert len(lines) == start + 3, ran.err
    assert error in lines[start]
    assert lines[start + 1] == ""
    assert lines[start + 2].startswith("hint: ") and hint in lines[start + 2], ran.err


def assert_nothing_is_half_written(root):
    """Each record and what it points at is sound; each entry is all that its manifest says."""
    for path in layout.records(root):
        filed = record.parse(path.read_bytes(), path)
        assert filed is not None, path
        assert filed.action_key == path.stem
        assert ".staging" not in filed.entry and ".tmp" not in filed.entry + filed.library.name
        assert record.sound_library(root, filed) is not None, path
    for place in layout.entries(root):
        for name, said in json.loads((place.path / "manifest.json").read_text())["files"].items():
            data = (place.path / name).read_bytes()
            assert len(data) == said["size"], place.path / name
            assert hashlib.sha256(data).hexdigest() == said["sha256"], place.path / name


def count(root):
    return len(list(layout.records(root)))


def until(condition, what, *, during=None, seconds=60.0):
    """Wait until something is so; it must become so while the process `during` runs."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"after {seconds:g} s still not so: {what}"
        assert during is None or during.poll() is None, during.communicate()
        time.sleep(0.01)


def running(root):
    """The processes that were started for a root: it stands in their environment or arguments."""
    found = []
    for process in psutil.process_iter():
        try:
            told = [process.environ().get("TILELANG_CACHE_DIR", ""), *process.cmdline()]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(root) in text for text in told):
            found.append(f"{process.pid} {process.cmdline()}")
    return found


@pytest.fixture
def odd_kernels(tmp_path: Path) -> Path:
    path = tmp_path / "odd_kernels.py"
    path.write_text(ODD_KERNELS)
    return path


@pytest.fixture
def start(cache_root: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a warm in a process group of its own, and go on; none outlives the test."""
    started = []
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def start(*args):
        process = subprocess.Popen(
            [*TLCACHE, "warm", *map(str, args)],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            for member in [process, *family]:
                try:
                    member.kill()
                except psutil.NoSuchProcess:
                    pass
        process.communicate()


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with rms_norm for every row count of ROWS; tests work on copies."""
    place = tmp_path_factory.mktemp("warmed")
    (place / "shapes.json").write_text(json.dumps({"version": 1, "workloads": [rms_norm(*ROWS)]}))
    inherited = clean_environment()
    subprocess.run(
        [*TLCACHE, "warm", "--shapes", "shapes.json", "--target", "cpu", "--cache-dir", "cache"],
        cwd=place,
        env=inherited,
        check=True,
        capture_output=True,
    )
    return place / "cache"


@pytest.fixture
def copied(warmed: Path, cache_root: Path) -> Path:
    """A copy of the warmed root, in force for the test's commands."""
    shutil.copytree(warmed, cache_root)
    return cache_root


@pytest.fixture
def mount() -> Iterator[Callable[..., None]]:
    """Mount; skip the test where that is not permitted; unmount at its end."""
    mounted = []

    def mount(path, *args):
        done = subprocess.run(["mount", *args, str(path)], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"mounting is not permitted here: {done.stderr.splitlines()[0]}")
        if path not in mounted:
            mounted.append(path)

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def read_only(mount: Callable[..., None]) -> Callable[[Path], None]:
    """Make a directory one that cannot be written, also not by root."""

    def read_only(path):
        if os.geteuid() != 0:
            for place in [path, *filter(Path.is_dir, path.rglob("*"))]:
                place.chmod(0o555)
            return
        mount(path, "--bind", str(path))
        mount(path, "-o", "remount,bind,ro")

    return read_only


# --- bad input: exit code 2, and the cache root is not even created ---


def test_a_missing_shapes_file_is_an_error(tlcache, cache_root):
    ran = tlcache("warm", "--shapes", "nowhere.json", "--target", "cpu")
    assert_error(
        ran, 2, "error: nowhere.json cannot be read: no such file or directory", "`--shapes`"
    )
    assert not cache_root.exists()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"version": 1,', "shapes.json is not JSON: "),
        ("", "shapes.json is not JSON: "),
        ('{"version": 1}', "shapes.json: workloads is missing"),
        ('{"version": 2, "workloads": []}', "shapes.json: version is 2; "),
        ('{"version": 1, "workloads": [], "colour": 1}', "shapes.json: colour is not a field"),
        (
            '{"version": 1, "workloads": [{"kernel": "a:b", "colour": 1}]}',
            "shapes.json: workloads[0].colour is not a field",
        ),
        ("[1]", "shapes.json: the document is [1]; "),
    ],
)
def test_a_file_that_is_not_a_shapes_document_is_an_error(
    tlcache, cache_root, tmp_path, text, error
):
    (tmp_path / "shapes.json").write_text(text)
    ran = tlcache("warm", "--shapes", "shapes.json", "--target", "cpu")
    assert_error(ran, 2, f"error: {error}", "")
    assert not cache_root.exists()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"M": None}, "workloads[2].M is null; it takes a number"),
        ({"M": [1, {}]}, "workloads[2].M is [1, {}]; it takes a number"),
        ({"M": 1.5}, "workloads[2].M: M is 1.5; "),
        ({"N": -64}, "workloads[2].N: N is -64; a row has from 1 to 65536 elements"),
        ({"dtype": "float63"}, "workloads[2].dtype: dtype is 'float63'; "),
        ({"schedule": 3}, "workloads[2].schedule is 3; "),
        ({"M": []}, "workloads[2].M is an empty list; "),
        ({"epsilon": 1e-5}, "workloads[2].epsilon: rms_norm has no field 'epsilon'"),
        ({"op": "rms_nrom"}, "workloads[2].op: unknown operator 'rms_nrom'"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_its_path(tlcache, shapes, cache_root, fields, error):
    path = shapes(rms_norm(1), rms_norm(2), {**rms_norm(3), **fields})
    ran = tlcache("warm", "--shapes", path, "--target", "cpu")
    assert_error(ran, 2, f"error: {path}: {error}", "")
    assert not cache_root.exists()


def test_the_hint_for_a_misspelt_operator_or_field_is_the_right_spelling(tlcache, shapes):
    ran = tlcache("warm", "--shapes", shapes(rms_norm(1, op="rms_nrom")), "--target", "cpu")
    assert_error(ran, 2, "unknown operator 'rms_nrom'", "did you mean `rms_norm`?")
    ran = tlcache("warm", "--shapes", shapes(rms_norm(1, epz=1e-5)), "--target", "cpu")
    assert_error(ran, 2, "rms_norm has no field 'epz'", "did you mean `eps`?")


@pytest.mark.parametrize(
    ("kernel", "error"),
    [
        ("no_such_module:factory", "no module named 'no_such_module'"),
        ("odd_kernels:no_such_factory", "defines no 'no_such_factory'"),
        ("odd_kernels", "the kernel 'odd_kernels' is not an import path"),
    ],
)
def test_an_unknown_factory_is_an_error(tlcache, shapes, odd_kernels, cache_root, kernel, error):
    path = shapes(rms_norm(1), {"kernel": kernel, "args": {"N": 64}})
    ran = tlcache("warm", "--shapes", path, "--target", "cpu")
    assert_error(ran, 2, f"error: {path}: workloads[1].kernel: ", "")
    assert error in ran.err
    assert not cache_root.exists()


def test_an_unknown_target_is_an_error_on_the_command_line_and_in_the_file(
    tlcache, shapes, cache_root
):
    ran = tlcache("warm", "--shapes", shapes(rms_norm(1)), "--target", "cpu", "--target", "sm9o")
    assert_error(ran, 2, "error: unknown target 'sm9o'", "did you mean `sm90`?")
    path = shapes(rms_norm(1), targets=["cpu", "xpu9"])
    ran = tlcache("warm", "--shapes", path)
    assert_error(
        ran, 2, f"error: {path}: targets[1]: unknown target 'xpu9'", "targets are written like"
    )
    assert not cache_root.exists()


# --- the machine cannot do it: exit code 3 ---


def test_without_nvcc_the_cuda_kernels_fail_and_the_cpu_kernels_are_still_done(
    tlcache, shapes, cache_root
):
    without = [
        place
        for place in os.environ["PATH"].split(os.pathsep)
        if not (Path(place) / "nvcc").exists() or (Path(place) / "g++").exists()
    ]
    path = shapes(rms_norm(1))
    ran = tlcache(
        *("warm", "--shapes", path, "--target", "sm80", "--target", "cpu"),
        env={"CUDA_HOME": "/nowhere", "PATH": os.pathsep.join(without)},
    )
    assert ran.code == 3, ran.err
    assert "2 kernels  1 compiled  0 already there  1 failed" in ran.out
    lines = ran.err.splitlines()
    failed = [line for line in lines if line.startswith("failed: ")]
    assert len(failed) == 1
    assert failed[0].startswith("failed: rms_norm M=1 N=64 ")
    assert "no nvcc for target sm_80: not in CUDA_HOME" in failed[0]
    assert "hint: `pip install 'tlcache[cuda]'` brings one, or set CUDA_HOME" in lines
    assert tlcache("warm", "--shapes", path, "--target", "cpu", "--check").code == 0
    assert tlcache("warm", "--shapes", path, "--target", "sm80", "--check").code == 1


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"CXX": "", "CC": ""}, "g++, clang++, c++ are not on PATH"),
        ({"CXX": "no-such-g++"}, "'no-such-g++' (of CXX or CC) is not a program"),
    ],
)
def test_without_a_cpp_compiler_nothing_can_be_compiled(
    tlcache, shapes, tmp_path, cache_root, variables, reason
):
    (tmp_path / "bin").mkdir()
    ran = tlcache(
        *("warm", "--shapes", shapes(rms_norm(1, 2)), "--target", "cpu"),
        env={"PATH": str(tmp_path / "bin"), **variables},
    )
    assert ran.code == 3, ran.err
    assert "2 kernels  0 compiled  0 already there  2 failed" in ran.out
    lines = ran.err.splitlines()
    failed = [line for line in lines if line.startswith("failed: rms_norm M=")]
    assert len(failed) == 2
    assert all(f"no C++ compiler for target cpu: {reason}" in line for line in failed)
    assert lines[-2:] == ["", "hint: `apt-get install g++`, or name one in CXX"]
    assert count(cache_root) == 0


def test_a_cache_directory_that_cannot_be_written_is_an_error(
    tlcache, shapes, cache_root, read_only
):
    cache_root.mkdir()
    read_only(cache_root)
    ran = tlcache("warm", "--shapes", shapes(rms_norm(1)), "--target", "cpu")
    assert_error(
        ran, 3, f"error: the cache root {cache_root} cannot be written: ", "`--cache-dir DIR`"
    )
    assert list(cache_root.iterdir()) == []


def test_a_cache_directory_below_a_regular_file_is_an_error(tlcache, shapes, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    for root in (tmp_path / "file", tmp_path / "file" / "cache"):
        ran = tlcache(
            "warm", "--shapes", shapes(rms_norm(1)), "--target", "cpu", "--cache-dir", root
        )
        assert_error(
            ran, 3, f"error: the cache root {root} cannot be written: ", "`--cache-dir DIR`"
        )


def test_a_root_that_became_read_only_serves_what_it_has_and_takes_nothing_more(
    tlcache, shapes, copied, read_only
):
    read_only(copied)
    ran = tlcache("warm", "--shapes", shapes(rms_norm(1, 9)), "--target", "cpu")
    assert ran.code == 3, ran.err
    assert "2 kernels  0 compiled  1 already there  1 failed" in ran.out
    assert f"the cache root {copied} cannot be written: read-only file system" in ran.err or (
        f"the cache root {copied} cannot be written: permission denied" in ran.err
    )
    assert ran.err.splitlines()[-1].startswith("hint: name a writable directory")


def test_a_temporary_directory_may_have_a_long_path(tlcache, shapes, tmp_path):
    place = tmp_path / ("long" * 30)
    place.mkdir()
    ran = tlcache(
        *("warm", "--shapes", shapes(rms_norm(1)), "--target", "cpu"), env={"TMPDIR": str(place)}
    )
    assert ran.code == 0, ran.err
    assert not list(place.iterdir())


READ_ONLY_TMP = """
mount --bind /tmp /tmp && mount -o remount,bind,ro /tmp || exit 77
mount --bind "$1" "$1" && mount -o remount,bind,rw "$1" || exit 77
shift && exec "$@"
"""


def test_a_temporary_directory_may_have_a_long_path_where_nothing_is_written_to_tmp(
    run, shapes, tmp_path
):
    place = tmp_path / ("long" * 30)
    place.mkdir()
    warm = [*TLCACHE, "warm", "--shapes", shapes(rms_norm(1)), "--target", "cpu"]
    namespace = ["unshare", "--mount", "sh", "-c", READ_ONLY_TMP, "sh", tmp_path]
    if shutil.which("unshare") is None:
        pytest.skip("there is no `unshare` here")
    ran = run([*namespace, *warm], env={"TMPDIR": str(place)})
    if ran.code == 77 or ran.err.startswith("unshare: "):
        pytest.skip(f"mounting is not permitted here: {ran.err.splitlines()[0]}")
    assert ran.code == 0, ran.err


def test_a_full_disk_is_named_and_the_rerun_on_a_larger_one_completes(
    tlcache, shapes, cache_root, mount
):
    cache_root.mkdir()
    mount(cache_root, "-t", "tmpfs", "-o", "size=64k,mode=0755", "tmpfs")
    command = ("warm", "--shapes", shapes(rms_norm(1, 2)), "--target", "cpu", "--jobs", "1")
    ran = tlcache(*command)
    assert ran.code == 3, ran.err
    assert "2 kernels  1 compiled  0 already there  1 failed" in ran.out
    failed = [line for line in ran.err.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 1
    assert failed[0].startswith("failed: rms_norm M=2 ")
    assert f"the disk of the cache root {cache_root} is full: no space left" in failed[0]
    assert f"\nhint: free space (`df -h {cache_root}`), or name another root" in ran.err
    assert_nothing_is_half_written(cache_root)
    mount(cache_root, "-o", "remount,size=8m")
    ran = tlcache(*command)
    assert ran.code == 0, ran.err
    assert "2 kernels  1 compiled  1 already there  0 failed" in ran.out
    assert_nothing_is_half_written(cache_root)


def test_a_root_that_others_can_write_is_refused_by_warm_and_by_the_runtime(
    tlcache, python, run, shapes, copied
):
    copied.chmod(0o777)
    before = tree(copied)
    for option in ((), ("--check",), ("--dry-run",)):
        ran = tlcache("warm", "--shapes", shapes(rms_norm(1, 9)), "--target", "cpu", *option)
        assert_error(
            ran,
            3,
            f"error: kernels are not loaded from {copied}: {copied} can be written by everybody "
            "(mode 0777)",
            f"`chmod -R go-w {copied}`",
        )
    told = result(python(SERVE, "[1, 9]"))
    assert told["error"][0] == "UntrustedRootError"
    assert f"{copied} can be written by everybody (mode 0777)" in told["error"][1]
    assert told["loaded"] == [] and told["counts"] == [0, 0, 0, 0] and not told["tilelang"]
    assert tree(copied) == before
    hinted = re.search(r"`(chmod [^`]*)`", told["error"][2])
    assert hinted is not None and run(["sh", "-c", hinted[1]]).code == 0
    told = result(python(SERVE, "[1]"))
    assert told["error"] is None and told["counts"] == [1, 0, 0, 0]


# --- kernels that fail among good ones: exit code 1 ---


@pytest.fixture(scope="module")
def bad_day(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess]:
    """One warm in which five kernels go wrong, each in its own way, and two are good."""
    place = tmp_path_factory.mktemp("bad_day")
    (place / "odd_kernels.py").write_text(ODD_KERNELS)
    names = ("raises", "rejected", "hangs", "dies", "number")
    workloads = [odd("good", 64), *map(odd, names), odd("good", 65)]
    (place / "shapes.json").write_text(json.dumps({"version": 1, "workloads": workloads}))
    inherited = clean_environment()
    (place / "scratch").mkdir()
    done = subprocess.run(
        [
            *(*TLCACHE, "warm", "--shapes", "shapes.json", "--target", "cpu"),
            *("--cache-dir", str(place / "cache"), "--jobs", "2", "--timeout", "6"),
        ],
        cwd=place,
        env={**inherited, "TMPDIR": str(place / "scratch")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return place, done


def failure(done, name):
    lines = [line for line in done.stderr.splitlines() if line.startswith(f"failed: {name} ")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"failed: {name} N=64 cpu")
    return lines[0]


def test_good_kernels_are_compiled_whatever_happens_to_the_others(bad_day, tlcache):
    place, done = bad_day
    assert done.returncode == 1, done.stderr
    assert "7 kernels  2 compiled  0 already there  5 failed" in done.stdout
    assert_nothing_is_half_written(place / "cache")
    checked = tlcache(
        *("warm", "--shapes", "shapes.json", "--target", "cpu", "--check", "--json"),
        *("--cache-dir", place / "cache"),
        cwd=place,
    )
    assert checked.code == 1
    there = [kernel["status"] == "present" for kernel in checked.json["kernels"]]
    assert there == [True, False, False, False, False, False, True]


def test_a_warm_says_its_failures_and_its_hints_and_nothing_else(bad_day):
    said = [line.partition(" ")[0] for line in bad_day[1].stderr.splitlines() if line]
    assert said == ["failed:"] * 5 + ["hint:"] * 2, bad_day[1].stderr


def test_nothing_is_left_in_the_temporary_directory_whatever_happened(bad_day):
    assert list((bad_day[0] / "scratch").iterdir()) == []


def test_a_factory_that_raises_is_reported_in_one_line_with_its_message(bad_day):
    assert "ValueError: N=64 is unlucky" in failure(bad_day[1], "raises")


def test_code_that_the_cpp_compiler_rejects_is_reported_with_its_own_words(bad_day):
    assert re.search(r"error: .*(no_such|function)", failure(bad_day[1], "rejected"))


@pytest.mark.nvcc
def test_code_that_nvcc_rejects_is_reported_with_its_own_words(tlcache, shapes, odd_kernels):
    ran = tlcache("warm", "--shapes", shapes(odd("rejected")), "--target", "sm80")
    assert ran.code == 1, ran.err
    failed = [line for line in ran.err.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 1 and failed[0].startswith("failed: rejected N=64 sm_80")
    assert 'error: identifier "no_such" is undefined' in failed[0]


def test_a_compile_that_hangs_is_killed_with_its_children_when_its_time_is_over(bad_day):
    place, done = bad_day
    assert "its compile was killed after 6 s" in failure(done, "hangs")
    assert "hint: `--timeout` gives it longer" in done.stderr.splitlines()
    assert running(place) == []


def test_a_worker_that_dies_is_reported_with_its_signal(bad_day):
    assert "its compiling process ended by signal 9 (SIGKILL)" in failure(bad_day[1], "dies")


def test_a_factory_that_yields_no_kernel_is_reported_with_what_it_should_yield(bad_day):
    _, done = bad_day
    line = failure(done, "number")
    assert re.search(r"odd_kernels:number yields .*\bint\b.* not a TileLang kernel", line)
    assert any(
        line.startswith("hint: ") and "@tilelang.jit" in line for line in done.stderr.splitlines()
    )


def test_with_fail_fast_the_first_failure_ends_the_warm(tlcache, shapes, odd_kernels, cache_root):
    path = shapes(odd("raises"), odd("good", 64), odd("good", 65))
    ran = tlcache("warm", "--shapes", path, "--target", "cpu", "--jobs", "1", "--fail-fast")
    assert ran.code == 1, ran.err
    assert "3 kernels  0 compiled  0 already there  1 failed  2 not reached" in ran.out
    assert ran.err.startswith("failed: raises N=64 cpu")
    again = f"`tlcache warm --shapes {path} --target cpu`"
    assert f"hint: {again} compiles what is missing, and only that" in ran.err.splitlines()
    assert count(cache_root) == 0
    assert running(cache_root) == []


# --- damage on disk: a miss, never an error, and never loaded ---


def damage_the_records(root):
    """One record truncated, one that is no JSON, one that points at nothing, and one whose entry is
    gone; the fifth stays as it is.
    """
    first, second, third, fourth = (record_path(root, rows) for rows in ROWS[:4])
    shutil.rmtree(library_path(root, 4).parent)
    first.write_bytes(first.read_bytes()[:400])
    second.write_text("kernels of this kind are always in stock\n")
    filed = record.parse(third.read_bytes(), third)
    nowhere = f"{os.path.dirname(filed.entry)}/{'0' * 64}"
    record.write(root, dataclasses.replace(filed, entry=nowhere))
    assert record.parse(third.read_bytes(), third).entry == nowhere
    assert record.parse(fourth.read_bytes(), fourth) is not None


def test_the_runtime_takes_a_damaged_record_for_a_miss_and_writes_a_sound_one(python, copied):
    damage_the_records(copied)
    told = result(python(SERVE, json.dumps(ROWS)))
    assert told["origins"] == ["disk", "disk", "disk", "compiled", "restored"]
    assert told["counts"] == [1, 3, 1, 0] and told["error"] is None
    assert_nothing_is_half_written(copied)
    told = result(python(SERVE, json.dumps(ROWS)))
    assert told["counts"] == [5, 0, 0, 0] and not told["tilelang"]


def test_warm_finds_damaged_records_and_libraries_missing_and_repairs_them(tlcache, shapes, copied):
    damage_the_records(copied)
    damaged = flip_a_byte(library_path(copied, "dynamic"))
    command = ("warm", "--shapes", shapes(rms_norm(*ROWS)), "--target", "cpu")
    before = tree(copied)
    checked = tlcache(*command, "--check")
    assert checked.code == 1
    assert "5 of 5 kernels are missing: rms_norm M=1 N=64 " in checked.out
    assert tree(copied) == before
    ran = tlcache(*command)
    assert ran.code == 0, ran.err
    assert "5 kernels  5 compiled  0 already there  0 failed" in ran.out
    assert tlcache(*command, "--check").code == 0
    assert_nothing_is_half_written(copied)
    assert hashlib.sha256(library_path(copied, "dynamic").read_bytes()).hexdigest() != damaged


def test_a_library_with_one_flipped_byte_is_never_loaded_and_is_compiled_again(python, copied):
    damaged = flip_a_byte(library_path(copied, 1))
    told = result(python(SERVE, "[1, 2]"))
    assert told["origins"] == ["compiled", "restored"]
    assert told["counts"] == [1, 0, 1, 0]
    assert damaged not in told["loaded"]
    sound = hashlib.sha256(library_path(copied, 1).read_bytes()).hexdigest()
    assert sound in told["loaded"]
    told = result(python(SERVE, "[1, 2]"))
    assert told["origins"] == ["restored", "restored"] and not told["tilelang"]
    assert sound in told["loaded"]


# --- stopped in the middle, and two at once ---


def test_after_a_sigkill_nothing_is_half_written_and_the_rerun_compiles_only_the_rest(
    tlcache, start, shapes, cache_root
):
    rows = (1, 2, 3, 4, 5)
    command = ("--shapes", shapes(rms_norm(*rows)), "--target", "cpu", "--jobs", "2")
    # Once only the process group that a shell would kill: the workers notice, and leave.
    victim = start(*command)
    until(lambda: count(cache_root) >= 1, "a first record is written", during=victim)
    os.killpg(victim.pid, signal.SIGKILL)
    assert victim.wait(timeout=10) == -signal.SIGKILL
    until(lambda: not running(cache_root), "the workers are gone", seconds=20)
    assert_nothing_is_half_written(cache_root)
    # And once every process, wherever each of them is.
    done = count(cache_root)
    assert 1 <= done < len(rows)
    victim = start(*command)
    until(lambda: count(cache_root) > done, "one more record is written", during=victim)
    family = psutil.Process(victim.pid).children(recursive=True)
    os.killpg(victim.pid, signal.SIGKILL)
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            pass
    assert victim.wait(timeout=10) == -signal.SIGKILL
    until(lambda: not running(cache_root), "every process is gone", seconds=20)
    assert_nothing_is_half_written(cache_root)
    checked = tlcache("warm", *command, "--check", "--json").json["summary"]
    assert checked["present"] == count(cache_root) > done
    assert checked["missing"] == len(rows) - checked["present"]
    ran = tlcache("warm", *command, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["summary"]["compiled"] == checked["missing"]
    assert ran.json["summary"]["present"] == checked["present"]
    assert_nothing_is_half_written(cache_root)


@pytest.mark.parametrize(
    ("number", "code", "send"),
    [(signal.SIGINT, 130, os.killpg), (signal.SIGTERM, 143, os.kill)],
    ids=["ctrl_c_from_a_terminal", "sigterm_to_the_process"],
)
def test_an_interrupted_warm_ends_its_workers_and_the_rerun_compiles_only_the_rest(
    tlcache, start, shapes, odd_kernels, tmp_path, cache_root, number, code, send
):
    command = ("--shapes", shapes(odd("good", 64), odd("held", 65)))
    command = (*command, "--target", "cpu", "--jobs", "1")
    victim = start(*command)
    until((tmp_path / "begun").exists, "the second kernel is being compiled", during=victim)
    assert count(cache_root) == 1
    send(victim.pid, number)
    out, err = victim.communicate(timeout=20)
    assert victim.returncode == code, err
    until(lambda: not running(cache_root), "the workers are gone", seconds=5)
    assert "Traceback" not in err
    assert "2 kernels  1 compiled  0 already there  0 failed  1 not reached" in out
    assert err.splitlines()[-1].endswith("compiles what is missing, and only that")
    assert_nothing_is_half_written(cache_root)
    assert list((tmp_path / "scratch").iterdir()) == []
    (tmp_path / "go").touch()
    ran = tlcache("warm", *command, "--json")
    assert ran.code == 0, ran.err
    statuses = [kernel["status"] for kernel in ran.json["kernels"]]
    assert statuses == ["present", "compiled"]


def test_ctrl_c_while_tilelang_is_still_being_imported_shows_no_traceback(
    start, shapes, cache_root
):
    victim = start("--shapes", shapes(rms_norm(1)), "--target", "cpu")
    until(
        lambda: any("forkserver" in process for process in running(cache_root)),
        "the fork server is there, and imports TileLang",
        during=victim,
    )
    time.sleep(0.3)
    os.killpg(victim.pid, signal.SIGINT)
    _, err = victim.communicate(timeout=20)
    assert victim.returncode == 130
    assert "Traceback" not in err and "KeyboardInterrupt" not in err, err
    until(lambda: not running(cache_root), "every process is gone", seconds=10)
    assert count(cache_root) == 0


def test_two_warms_at_once_on_one_root_compile_each_kernel_once(start, shapes, cache_root):
    rows = (1, 2, 3)
    command = ("--shapes", shapes(rms_norm(*rows)), "--target", "cpu", "--jobs", "1", "--json")
    both = [start(*command) for _ in range(2)]
    summaries = []
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        summaries.append(json.loads(out)["summary"])
    assert sum(summary["compiled"] for summary in summaries) == len(rows)
    assert sum(summary["present"] for summary in summaries) == len(rows)
    assert count(cache_root) == len(list(layout.entries(cache_root))) == len(rows)
    assert_nothing_is_half_written(cache_root)
