"""`tlcache ls`: every kernel under a cache root, with its record's facts or with its own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from tlcache.cli.render import home
from tlcache.fingerprint import platform_name, tilelang_version
from tlcache.store import layout

TLCACHE = [sys.executable, "-c", "from tlcache.cli import main; main()"]
HEADER = ["KEY", "KERNEL", "WORKLOAD", "SCHEDULE", "TARGET", "TOOLKIT", "TILELANG", "SIZE", "USED"]

# Two kernels with records, by the runtime, and two without, by TileLang alone.
MAKE = """
import tilelang
import tilelang.language as T
from tlcache import operators, runtime, targets

for values in {"M": 128, "N": 64, "dtype": "float32"}, {"M": 16, "N": 100, "dtype": "bfloat16"}:
    runtime.resolve(operators.get("rms_norm").spec(values, targets.CPU))


@tilelang.jit(out_idx=[1], target={"kind": "c"}, execution_backend="cython")
def scale(N):
    size = T.dynamic("size") if N == 0 else N

    @T.prim_func
    def scale(x: T.Tensor((size, 8), "float32"), y: T.Tensor((size, 8), "float32")):
        with T.Kernel(1):
            for i in T.serial(size):
                for j in T.serial(8):
                    y[i, j] = x[i, j] * 2.0

    return scale


scale(32)
scale(0)
"""


def size(path):
    return sum(file.stat().st_size for file in path.iterdir())


def test_json_has_every_fact_of_a_record_and_null_for_what_an_entry_does_not_tell(tlcache, root):
    ran = tlcache("ls", "--json")
    assert ran.code == 0, ran.err
    assert ran.err == ""
    told = ran.json
    assert list(told) == ["schema", "root", "entries", "totals"]
    assert told["schema"] == 1 and told["root"] == str(root)
    records = {
        data["entry"]: data
        for data in (json.loads(path.read_text()) for path in layout.records(root))
    }
    assert len(told["entries"]) == 4 and len(records) == 2
    for entry in told["entries"]:
        path = Path(entry["path"])
        assert path.name == entry["key"] and path.parent.name == "kernels"
        assert entry.pop("created").endswith("+00:00")
        assert entry.pop("last_used").endswith("+00:00")
        data = records.get(os.path.relpath(path, root))
        known = {
            "key": path.name,
            "kind": "kernel",
            "path": str(path),
            "tilelang": tilelang_version(),
            "platform": platform_name(),
            "backend": "cython",
            "bytes": size(path),
        }
        if data is None:
            first = entry["params"][0]["shape"][0]
            shape = [first, 8]
            assert first in (32, "size")
            assert entry == {
                **known,
                "kernel": "scale",
                "params": [{"dtype": "float32", "shape": shape}] * 2,
                **dict.fromkeys(
                    ("target", "toolkit", "host", "op", "workload", "schedule", "record")
                ),
            }
        else:
            m, n = data["spec"]["workload"]["M"], data["spec"]["workload"]["N"]
            dtype = {64: "float32", 100: "uint16"}[n]  # bfloat16 travels as uint16 on the CPU
            assert entry == {
                **known,
                "kernel": "rms_norm",
                "target": "cpu",
                "toolkit": None,
                "host": data["toolkit"]["host_compiler"],
                "params": [{"dtype": dtype, "shape": shape} for shape in ([m, n], [n], [m, n])],
                "op": "rms_norm",
                "workload": data["spec"]["workload"],
                "schedule": {"block_m": 1, "threads": 1, "each": 1, "prefetch": False},
                "record": data["action_key"],
            }
    assert {tuple(entry["params"][0]["shape"]) for entry in told["entries"]} == {
        *((128, 64), (16, 100), (32, 8), ("size", 8)),
    }
    assert told["totals"] == {
        "entries": 4,
        "bytes": sum(entry["bytes"] for entry in told["entries"]),
        "targets": {"cpu": 2, "unknown": 2},
        "tilelang": {tilelang_version(): 4},
    }


def test_in_a_pipe_a_listing_is_lines_with_tabs_and_the_totals_go_to_stderr(tlcache, root):
    ran = tlcache("ls")
    assert ran.code == 0, ran.err
    header, *rows = [line.split("\t") for line in ran.out.splitlines()]
    assert header == HEADER
    assert all(len(row) == len(HEADER) for row in rows)
    facts = [row[1:5] for row in rows]
    assert facts == [
        [
            "rms_norm",
            "M=16 N=100 eps=1e-06 bf16",
            "block_m=1 threads=1 each=1 prefetch=False",
            "cpu",
        ],
        [
            "rms_norm",
            "M=128 N=64 eps=1e-06 fp32",
            "block_m=1 threads=1 each=1 prefetch=False",
            "cpu",
        ],
        ["scale", "[32,8] [32,8]", "–", "–"],
        ["scale", "[size,8] [size,8]", "–", "–"],
    ]
    keys = {place.key[:12]: place.path for place in layout.entries(root)}
    assert {row[0] for row in rows} == set(keys)
    for row in rows:
        assert row[6] == tilelang_version()
        assert row[7] == f"{size(keys[row[0]]) / 1024:.0f} KiB"
        assert row[8].endswith(" ago")
    assert [row[5] == "–" for row in rows] == [False, False, True, True]
    total = sum(map(size, keys.values()))
    assert ran.err == f"4 kernels, {total / 1024:.0f} KiB in {home(root)}      cpu 2 · unknown 2\n"


def test_on_a_terminal_a_listing_is_a_table_in_columns(root, tmp_path):
    terminal = pexpect.spawn(
        sys.executable,
        [*TLCACHE[1:], "ls"],
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", "NO_COLOR": "1"},
        dimensions=(30, 200),
        encoding="utf-8",
        timeout=30,
    )
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    lines = [line.rstrip() for line in terminal.before.splitlines()]
    start = next(i for i, line in enumerate(lines) if "KEY" in line)
    table = lines[start : start + 5]
    assert not any("\t" in line for line in table)
    column = table[0].index("WORKLOAD")
    assert table[0].split() == HEADER
    assert table[2][column:].startswith("M=128 N=64 eps=1e-06 fp32 ")
    assert table[3][column:].startswith("[32,8] [32,8] ")


def test_a_listing_is_sorted_by_what_is_asked_for(tlcache, root):
    paths = {place.key: place.path for place in layout.entries(root)}
    keys = sorted(paths)
    used = [keys[2], keys[0], keys[3], keys[1]]
    created = [keys[1], keys[3], keys[0], keys[2]]
    sizes = [keys[3], keys[1], keys[2], keys[0]]
    for rank, key in enumerate(sizes):
        (paths[key] / "note").write_bytes(b"\0" * 100_000 * (4 - rank))
    now = 1_700_000_000
    for rank, key in enumerate(used):
        # The newer of access and change counts, whichever it is.
        times = (now - rank * 1000, now - 9000)
        os.utime(paths[key] / "kernel_lib.so", times if rank % 2 else times[::-1])
    for rank, key in enumerate(created):
        os.utime(paths[key], (now - rank * 1000,) * 2)

    def order(*args):
        ran = tlcache("ls", "--json", *args)
        assert ran.code == 0, ran.err
        return [entry["key"] for entry in ran.json["entries"]]

    assert order("--sort", "key") == keys
    assert order("--sort", "used") == used
    assert order("--sort", "created") == created
    assert order("--sort", "size") == sizes
    assert order("--sort", "kernel") == order()
    workloads = [
        entry["params"][0]["shape"][0] for entry in tlcache("ls", "--json").json["entries"]
    ]
    assert workloads == [16, 128, 32, "size"]


def test_an_unknown_sort_is_a_usage_error(tlcache, root):
    ran = tlcache("ls", "--sort", "colour")
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("error: Invalid value for '--sort': 'colour' is not one of ")
    assert ran.err.endswith("\n\nhint: `tlcache ls --help` shows what there is\n")


@pytest.mark.parametrize("exists", [True, False], ids=["empty", "missing"])
def test_a_root_without_kernels_lists_nothing_and_says_how_to_get_some(tlcache, cache_root, exists):
    if exists:
        cache_root.mkdir()
    ran = tlcache("ls")
    assert ran.code == 0
    assert ran.out == f"no kernels in {home(cache_root)}\n"
    assert ran.err.startswith("\nhint: `tlcache warm --shapes FILE` compiles some; ")
    ran = tlcache("ls", "--json")
    assert ran.code == 0 and ran.err == ""
    assert ran.json == {
        "schema": 1,
        "root": str(cache_root),
        "entries": [],
        "totals": {"entries": 0, "bytes": 0, "targets": {}, "tilelang": {}},
    }
    assert cache_root.exists() == exists


def test_a_cache_dir_on_the_command_line_wins_over_the_environment(tlcache, made, cache_root):
    told = tlcache("ls", "--json", "--cache-dir", made).json
    assert told["root"] == str(made) and len(told["entries"]) == 4
    assert not cache_root.exists()


def test_a_damaged_record_leaves_its_kernel_in_the_listing_with_its_own_facts(tlcache, root):
    for path in layout.records(root):
        path.write_text(path.read_text()[:200])
    ran = tlcache("ls", "--json")
    assert ran.code == 0, ran.err
    entries = ran.json["entries"]
    assert [entry["kernel"] for entry in entries] == ["rms_norm", "rms_norm", "scale", "scale"]
    assert {entry["target"] for entry in entries} == {None}
    assert [entry["params"][0]["shape"] for entry in entries[:2]] == [[16, 100], [128, 64]]


def test_listing_leaves_the_root_as_it_is(tlcache, root):
    def tree():
        return {
            path.relative_to(root): hashlib.sha256(path.read_bytes()).digest()
            if path.is_file()
            else None
            for path in root.rglob("*")
        }

    before = tree()
    assert tlcache("ls").code == 0
    assert tlcache("ls", "--json").code == 0
    assert tree() == before


@pytest.mark.parametrize("arguments", [["ls"], ["ls", "--json"]], ids=["lines", "json"])
def test_a_reader_that_leaves_early_is_no_error(root, tmp_path, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [*TLCACHE, *arguments],
        cwd=tmp_path,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writing)
    assert "Traceback" not in process.stderr and "BrokenPipe" not in process.stderr
    assert process.returncode == 0


def test_the_first_line_alone_can_be_taken_by_head(run, root):
    command = " ".join(f"'{word}'" for word in TLCACHE)
    ran = run(["sh", "-c", f"{command} ls | head -1"])
    assert ran.code == 0
    assert ran.out.rstrip("\n").split("\t") == HEADER
    assert "Traceback" not in ran.err and "Exception" not in ran.err
