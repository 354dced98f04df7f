"""Resolving: from memory, from a record, by compiling; each once, and counted as what it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.environment import clean_environment
from tlcache import errors, operators, targets
from tlcache.runtime import Counters, Resolver
from tlcache.store import layout, record

# What every process of these tests begins with.
PRELUDE = """
import json, os, sys, threading, time
from tlcache import errors, operators, runtime, targets
from tlcache.runtime import Resolver

root = os.environ["TILELANG_CACHE_DIR"]


def spec(rows, target=targets.CPU):
    values = {"M": rows, "N": 64, "dtype": "float32"}
    return operators.get("rms_norm").spec(values, target)


def counts(resolver):
    counters = resolver.counters
    names = ("memory", "restored", "disk", "compiled", "failed")
    return {name: n for name in names if (n := getattr(counters, name))}


def check(launcher, rows):
    import torch

    x, w = torch.randn(rows, 64), torch.randn(64)
    want = torch.nn.functional.rms_norm(x, (64,), w, 1e-6)
    got = launcher(x, w)
    assert got.shape == want.shape and got.dtype == want.dtype
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), (got - want).abs().max()


def say(**told):
    print("RESULT " + json.dumps({**told, "tilelang": "tilelang" in sys.modules}))
"""


def spec(rows, target=targets.CPU):
    values = {"M": rows, "N": 64, "dtype": "float32"}
    return operators.get("rms_norm").spec(values, target)


def result(code, out, err):
    assert code == 0, err
    return json.loads(out.rpartition("RESULT ")[2])


def tree(root):
    """Every file below a root but the locks, with what it holds."""
    return {
        path.relative_to(root): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.parent.name != "locks"
    }


@pytest.fixture
def told(python: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Run source after PRELUDE in a fresh process, and return what it says."""

    def told(source, *args, **kwargs):
        ran = python(PRELUDE + source, *map(str, args), **kwargs)
        return result(ran.code, ran.out, ran.err)

    return told


MAKE = """
resolver = Resolver(root)
steps = []
for rows in 1, 1, 4, "dynamic", 4:
    launcher = resolver.resolve(spec(rows))
    check(launcher, 7 if rows == "dynamic" else rows)
    steps.append([launcher.origin, counts(resolver)])
say(steps=steps, seconds=resolver.counters.compile_seconds,
    restore=resolver.counters.restore_seconds, saved=resolver.counters.saved_seconds)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A root with rms_norm for 1, 4 and any number of rows, and what its maker said."""
    root = tmp_path_factory.mktemp("made") / "cache"
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + MAKE],
        cwd=root.parent,
        env=clean_environment(TILELANG_CACHE_DIR=str(root)),
        capture_output=True,
        text=True,
    )
    return root, result(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def root(made: tuple[Path, Any], cache_root: Path) -> Path:
    """A copy of that root, in force for the test and its processes."""
    shutil.copytree(made[0], cache_root)
    return cache_root


# --- outcomes ---


def test_a_cold_kernel_is_compiled_once_and_then_answered_from_memory(made):
    root, told = made
    assert told["steps"] == [
        ["compiled", {"compiled": 1}],
        ["compiled", {"compiled": 1, "memory": 1}],
        ["compiled", {"compiled": 2, "memory": 1}],
        ["compiled", {"compiled": 3, "memory": 1}],
        ["compiled", {"compiled": 3, "memory": 2}],
    ]
    assert told["seconds"] > 0.1
    assert told["restore"] == told["saved"] == 0
    assert told["tilelang"]
    assert len(list(layout.records(root))) == len(list(layout.entries(root))) == 3


def test_the_next_process_restores_from_the_records_without_tilelang(told, root):
    said = told(
        """
resolver, other = Resolver(root), Resolver(root)
origins = []
for rows in 1, 1, 4, "dynamic":
    launcher = resolver.resolve(spec(rows), on_miss="error")
    check(launcher, 7 if rows == "dynamic" else rows)
    origins.append(launcher.origin)
again = resolver.lookup(spec(4)) is resolver.resolve(spec(4))
other.resolve(spec(4))
say(origins=origins, again=again, counts=counts(resolver), other=counts(other),
    saved=resolver.counters.saved_seconds, seconds=resolver.counters.compile_seconds,
    restore=resolver.counters.restore_seconds)
"""
    )
    assert said["origins"] == ["restored"] * 4
    assert said["again"]
    assert said["counts"] == {"restored": 3, "memory": 3}
    assert said["other"] == {"restored": 1}
    assert not said["tilelang"]
    assert said["seconds"] == 0
    assert 0 < said["restore"] < 5
    taken = [json.loads(path.read_text())["compile_seconds"] for path in layout.records(root)]
    assert said["saved"] == pytest.approx(sum(taken))


def test_an_entry_of_tilelangs_without_a_record_is_counted_as_disk_and_gets_its_record(told, root):
    for path in layout.records(root):
        path.unlink()
    said = told(
        """
first, second = Resolver(root), Resolver(root)
for resolver in first, second:
    check(resolver.resolve(spec(4)), 4)
say(first=counts(first), second=counts(second), origin=first.resolve(spec(4)).origin)
"""
    )
    assert said["first"] == {"disk": 1}
    assert said["second"] == {"restored": 1}
    assert said["origin"] == "disk"
    assert [path.stem for path in layout.records(root)] == [spec(4).action_key()]


def test_a_compile_that_fails_is_counted_and_tried_again_at_the_next_request(told, tmp_path):
    (tmp_path / "unlucky.py").write_text('def kernel(N):\n    raise ValueError(f"{N} is odd")\n')
    said = told(
        """
from tlcache.spec import KernelSpec
resolver, said = Resolver(root), []
for _ in range(2):
    try:
        resolver.resolve(KernelSpec("unlucky:kernel", {"N": 3}, {}, targets.CPU))
    except errors.CompileError as error:
        said.append([error.message, counts(resolver)])
say(said=said)
"""
    )
    message = "kernel N=3 cpu does not compile: ValueError: 3 is odd"
    assert said["said"] == [[message, {"failed": 1}], [message, {"failed": 2}]]


# --- once ---


def test_sixteen_threads_on_one_cold_kernel_compile_it_once(told, cache_root):
    said = told(
        """
import torch
resolver, start, found = Resolver(root), threading.Barrier(16), []
def serve():
    start.wait()
    found.append(resolver.resolve(spec(3)))
threads = [threading.Thread(target=serve) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
check(found[0], 3)
say(counts=counts(resolver), found=len(found), distinct=len(set(map(id, found))))
"""
    )
    assert said["counts"] == {"compiled": 1, "memory": 15}
    assert (said["found"], said["distinct"]) == (16, 1)
    assert len(list(layout.records(cache_root))) == 1


def test_sixteen_threads_on_one_recorded_kernel_load_it_once(told, root):
    said = told(
        """
import torch
resolver, start = Resolver(root), threading.Barrier(16)
def serve():
    start.wait()
    check(resolver.resolve(spec(4)), 4)
threads = [threading.Thread(target=serve) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
say(counts=counts(resolver))
"""
    )
    assert said["counts"] == {"restored": 1, "memory": 15}
    assert not said["tilelang"]


def test_eight_processes_on_one_cold_kernel_compile_it_once_in_sum(told, cache_root, tmp_path):
    told(
        """
import traceback, torch
children = []
for number in range(8):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            while not os.path.exists("go"):
                time.sleep(0.001)
            resolver = Resolver(root)
            check(resolver.resolve(spec(3)), 3)
            with open(f"{number}.json", "w") as file:
                json.dump([counts(resolver), "tilelang" in sys.modules], file)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    children.append(pid)
open("go", "w").close()
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert codes == [0] * 8, codes
say()
"""
    )
    said = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(8)]
    assert sorted(said, key=str) == [[{"compiled": 1}, True], *[[{"restored": 1}, False]] * 7]
    assert len(list(layout.entries(cache_root))) == len(list(layout.records(cache_root))) == 1


# --- a miss that must not be compiled ---


def test_with_on_miss_error_a_miss_says_how_to_warm_it_and_compiles_nothing(cache_root):
    resolver = Resolver(cache_root)
    assert resolver.lookup(spec(9)) is None
    with pytest.raises(errors.MissError) as raised:
        resolver.resolve(spec(9), on_miss="error")
    assert raised.value.exit_code == 1
    assert raised.value.message == (
        "rms_norm M=9 N=64 eps=1e-06 fp32 block_m=1 threads=1 each=1 prefetch=False cpu "
        f"is not in the cache {cache_root}, and compiling was ruled out"
    )
    assert "`tlcache warm --shapes shapes.json --target cpu`" in raised.value.hint
    assert resolver.counters == Counters()
    assert not cache_root.exists()


def test_a_frozen_process_serves_what_is_recorded_and_raises_for_the_rest(told, root):
    said = told(
        """
check(runtime.resolve(spec(1)), 1)
runtime.freeze()
check(runtime.resolve(spec(1)), 1)
check(runtime.resolve(spec(4)), 4)
try:
    runtime.resolve(spec(9))
except errors.MissError as error:
    say(message=error.message, hint=error.hint, counts=counts(runtime))
""".replace("counts(runtime)", "[runtime.counters().restored, runtime.counters().compiled]")
    )
    assert said["message"].endswith("and resolving is frozen")
    assert "`tlcache warm --shapes shapes.json --target cpu`" in said["hint"]
    assert said["counts"] == [2, 0]
    assert not said["tilelang"]


def test_with_tilelangs_cache_disabled_records_are_neither_read_nor_written(told, root, tmp_path):
    before = tree(root)
    empty = tmp_path / "empty"
    said = told(
        """
told = {}
for name, place in ("warm", root), ("cold", sys.argv[1]):
    resolver = Resolver(place)
    assert resolver.lookup(spec(4)) is None
    launcher = resolver.resolve(spec(4))
    check(launcher, 4)
    told[name] = [launcher.origin, counts(resolver)]
say(**told)
""",
        empty,
        env={"TILELANG_DISABLE_CACHE": "1"},
    )
    assert said["warm"] == ["compiled", {"compiled": 1}]
    assert said["cold"] == ["compiled", {"compiled": 1}]
    assert tree(root) == before
    assert not empty.exists() or tree(empty) == {}


# --- damage ---


def _edit(change):
    """A record that says something else, and is otherwise in order: its checksum is right."""

    def damage(path, library):
        data = json.loads(path.read_text())
        data.pop("checksum", None)
        change(data)
        path.write_bytes(record.encode(data))

    return damage


DAMAGE = {
    "the record is empty": lambda path, library: path.write_bytes(b""),
    "the record is truncated": lambda path, library: path.write_bytes(path.read_bytes()[:-20]),
    "the record is not text": lambda path, library: path.write_bytes(os.urandom(512)),
    "a digit of the record is another": lambda path, library: path.write_text(
        path.read_text().replace('"size": ', '"size": 1', 1)
    ),
    "the record is not an object": lambda path, library: path.write_text("[1, 2]"),
    "the record is nested too deeply": lambda path, library: path.write_text("[" * 200_000),
    "the record is a directory": lambda path, library: (path.unlink(), path.mkdir()),
    "the record is of another schema": _edit(lambda data: data.update(schema=0)),
    "the record lacks a field": _edit(lambda data: data.pop("launch")),
    "the record has another key": _edit(lambda data: data.update(action_key="0" * 64)),
    "the record is another spec's": _edit(lambda data: data["spec"]["workload"].update(M=5)),
    "the entry is null": _edit(lambda data: data.update(entry=None)),
    "the entry is outside": _edit(lambda data: data.update(entry="../" + data["entry"])),
    "the entry is not there": _edit(lambda data: data.update(entry="0.1.15/nothing")),
    "the library's name is a path": _edit(lambda data: data["library"].update(name="../x.so")),
    "the library's size is a text": _edit(lambda data: data["library"].update(size="big")),
    "the ABI is unknown": _edit(lambda data: data["launch"].update(abi="fortran")),
    "the ABI is null": _edit(lambda data: data["launch"].update(abi=None)),
    "the symbol is not in the library": _edit(lambda data: data["launch"].update(symbol="nothing")),
    "a dtype is none of torch's": _edit(
        lambda data: data["launch"]["params"][0].update(dtype="float63")
    ),
    "a dimension has an unknown dtype": _edit(
        lambda data: data["launch"].update(
            dynamic=[{"name": "rows", "dtype": "int7", "param": 0, "axis": 0}]
        )
    ),
    "an output is out of range": _edit(lambda data: data["launch"].update(outputs=[3])),
    "the outputs are null": _edit(lambda data: data["launch"].update(outputs=None)),
    "the seconds are null": _edit(lambda data: data.update(compile_seconds=None)),
    "the library is gone": lambda path, library: library.unlink(),
    "the library is empty": lambda path, library: library.write_bytes(b""),
    "the library is longer": lambda path, library: library.write_bytes(
        library.read_bytes() + b"\0"
    ),
    "the library is a directory": lambda path, library: (library.unlink(), library.mkdir()),
    "a bit of the library is flipped": lambda path, library: library.write_bytes(
        (data := library.read_bytes())[:1000] + bytes([data[1000] ^ 1]) + data[1001:]
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_or_library_is_a_miss_and_never_an_error(root, damage):
    path = Path(layout.record_path(root, spec(4).action_key()))
    filed = record.parse(path.read_bytes(), path)
    assert record.sound_library(root, filed) is not None
    DAMAGE[damage](path, root / filed.entry / filed.library.name)
    resolver = Resolver(root)
    assert resolver.lookup(spec(4)) is None
    with pytest.raises(errors.MissError):
        resolver.resolve(spec(4), on_miss="error")
    assert resolver.counters == Counters()


# --- roots that cannot be written, or are not TileLang's ---


def test_a_miss_on_a_read_only_root_still_yields_a_kernel_for_this_process(told, run, root):
    mounts = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    private = ["unshare", "--mount", "sh", "-c", mounts, str(root)]
    if shutil.which("unshare") is None or run([*private, "true"]).code != 0:
        pytest.skip("mounting is not permitted here")
    before = tree(root)
    source = """
import errno
try:
    open(os.path.join(root, "probe"), "w")
except OSError as error:
    assert error.errno == errno.EROFS
resolver = Resolver(root)
check(resolver.resolve(spec(4)), 4)
fresh = resolver.resolve(spec(9))
check(fresh, 9)
check(resolver.resolve(spec(9)), 9)
check(resolver.resolve(spec(4)), 4)
say(origin=fresh.origin, counts=counts(resolver))
"""
    ran = run([*private, sys.executable, "-c", PRELUDE + source])
    said = result(ran.code, ran.out, ran.err)
    assert said["origin"] == "compiled"
    assert said["counts"] == {"restored": 1, "compiled": 1, "memory": 2}
    assert tree(root) == before


def test_a_root_that_is_not_tilelangs_is_read_from_and_gets_no_unsound_record(told, root, tmp_path):
    theirs = tmp_path / "theirs"
    said = told(
        """
resolver = Resolver(sys.argv[1])
check(resolver.resolve(spec(4)), 4)
check(resolver.resolve(spec(9)), 9)
say(counts=counts(resolver))
""",
        root,
        env={"TILELANG_CACHE_DIR": str(theirs)},
    )
    assert said["counts"] == {"restored": 1, "compiled": 1}
    for place in (root, theirs):
        for path in layout.records(place):
            filed = record.parse(path.read_bytes(), path)
            assert filed is not None, path
            assert record.sound_library(place, filed) is not None, path


# --- launching ---


def test_a_launcher_refuses_arguments_that_do_not_fit_and_says_which_and_why(told, root):
    said = told(
        """
import torch
fixed, dynamic = (Resolver(root).resolve(spec(rows)) for rows in (4, "dynamic"))
x, w = torch.randn(4, 64), torch.randn(64)
calls = {
    "rows": lambda: fixed(torch.randn(3, 64), w),
    "columns": lambda: fixed(torch.randn(4, 63), w),
    "axes": lambda: fixed(torch.randn(4, 64, 1), w),
    "second": lambda: fixed(x, torch.randn(1, 64)),
    "swapped": lambda: fixed(w, x),
    "dynamic": lambda: dynamic(torch.randn(9, 65), w),
    "dtype": lambda: fixed(x.double(), w),
    "half": lambda: fixed(x, w.half()),
    "strided": lambda: fixed(torch.randn(64, 4).t(), w),
    "expanded": lambda: fixed(torch.randn(1, 64).expand(4, 64), w),
    "device": lambda: fixed(torch.empty(4, 64, device="meta"), w),
    "few": lambda: fixed(x),
    "none": lambda: fixed(),
    "many": lambda: fixed(x, w, torch.empty(4, 64)),
}
said = {}
for name, call in calls.items():
    try:
        call()
    except (TypeError, ValueError) as error:
        said[name] = [type(error).__name__, str(error)]
check(fixed, 4)
check(dynamic, 9)
say(said=said, none=list(dynamic(torch.empty(0, 64), w).shape))
"""
    )
    assert said["said"] == {
        "rows": ["ValueError", "x has shape [3, 64]; the kernel takes [4, 64]"],
        "columns": ["ValueError", "x has shape [4, 63]; the kernel takes [4, 64]"],
        "axes": ["ValueError", "x has shape [4, 64, 1]; the kernel takes [4, 64]"],
        "second": ["ValueError", "w has shape [1, 64]; the kernel takes [64]"],
        "swapped": ["ValueError", "x has shape [64]; the kernel takes [4, 64]"],
        "dynamic": ["ValueError", "x has shape [9, 65]; the kernel takes [rows=9, 64]"],
        "dtype": ["TypeError", "x is torch.float64; the kernel takes torch.float32"],
        "half": ["TypeError", "w is torch.float16; the kernel takes torch.float32"],
        "strided": ["ValueError", "x is not contiguous; the kernel takes contiguous tensors"],
        "expanded": ["ValueError", "x is not contiguous; the kernel takes contiguous tensors"],
        "device": ["ValueError", "x is on meta; the kernel takes CPU tensors"],
        "few": ["TypeError", "the kernel takes 2 tensors, not 1"],
        "none": ["TypeError", "the kernel takes 2 tensors, not 0"],
        "many": ["TypeError", "the kernel takes 2 tensors, not 3"],
    }
    assert said["none"] == [0, 64]


# --- side by side with TileLang ---


def test_restored_and_compiled_kernels_run_side_by_side_once_tilelang_is_imported(told, root):
    said = told(
        """
import torch
resolver = Resolver(root)
first = resolver.resolve(spec(1))
check(first, 1)
assert "tilelang" not in sys.modules
import tilelang
second = resolver.resolve(spec(4))
fresh = resolver.resolve(spec(9))
from ops.kernels.rms_norm import rms_norm
theirs = rms_norm(4, 64, 1e-6, "float32", "cpu")(1, 1, 1, False)
late = Resolver(root).resolve(spec("dynamic"))
for _ in range(3):
    check(first, 1)
    check(second, 4)
    check(theirs, 4)
    check(fresh, 9)
    check(late, 6)
x, w = torch.randn(4, 64), torch.randn(64)
assert torch.equal(second(x, w), theirs(x, w)) and torch.equal(second(x, w), late(x, w))
say(origins=[first.origin, second.origin, fresh.origin, late.origin], counts=counts(resolver))
"""
    )
    assert said["origins"] == ["restored", "restored", "compiled", "restored"]
    assert said["counts"] == {"restored": 2, "compiled": 1}


def test_a_kernel_is_restored_where_tilelang_was_imported_first(told, root):
    said = told(
        """
import tilelang
resolver = Resolver(root)
check(resolver.resolve(spec(4)), 4)
say(counts=counts(resolver))
"""
    )
    assert said["counts"] == {"restored": 1}


@pytest.fixture(scope="module")
def cuda_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with rms_norm for 1 and 2 rows on sm_90a."""
    place = tmp_path_factory.mktemp("cuda")
    workload = {"op": "rms_norm", "M": [1, 2], "N": 64, "dtype": "float32"}
    (place / "shapes.json").write_text(json.dumps({"version": 1, "workloads": [workload]}))
    command = "from tlcache.cli import main; main()"
    subprocess.run(
        [sys.executable, "-c", command, "warm", "--shapes", "shapes.json", "--target", "sm90"],
        cwd=place,
        env=clean_environment(TILELANG_CACHE_DIR=str(place / "cache")),
        check=True,
        capture_output=True,
    )
    return place / "cache"


@pytest.mark.nvcc
def test_a_library_for_a_gpu_loads_without_one_before_and_after_tilelang_is_imported(
    told, cuda_root
):
    said = told(
        """
resolver, gpu = Resolver(root), targets.parse("sm90")
before = resolver.resolve(spec(1, gpu), on_miss="error")
early = "tilelang" in sys.modules
import tilelang
after = resolver.resolve(spec(2, gpu), on_miss="error")
again = Resolver(root).resolve(spec(1, gpu), on_miss="error")
say(callable=[callable(one.call) for one in (before, after, again)], early=early,
    counts=counts(resolver), target=before.spec.target.name)
""",
        env={"TILELANG_CACHE_DIR": str(cuda_root)},
    )
    assert said == {
        "callable": [True, True, True],
        "early": False,
        "counts": {"restored": 2},
        "target": "sm_90a",
        "tilelang": True,
    }


@pytest.mark.nvcc
def test_a_library_for_a_gpu_loads_where_tilelang_was_imported_first(told, cuda_root):
    said = told(
        """
import tilelang
resolver = Resolver(root)
launcher = resolver.resolve(spec(1, targets.parse("sm90")), on_miss="error")
say(callable=callable(launcher.call), counts=counts(resolver))
""",
        env={"TILELANG_CACHE_DIR": str(cuda_root)},
    )
    assert said == {"callable": True, "counts": {"restored": 1}, "tilelang": True}
