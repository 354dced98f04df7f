"""`tlcache ls`: every kernel under a cache root, with its record's facts or with its own."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
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
    assert list(told) == ["schema", "root", "below", "entries", "totals"]
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
            "target": "cpu",
            "toolkit": None,
            "machine": platform_name().partition("-")[2],
            "payload": None,
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
                **dict.fromkeys(("host", "op", "workload", "schedule", "record")),
            }
        else:
            m, n = data["spec"]["workload"]["M"], data["spec"]["workload"]["N"]
            dtype = {64: "float32", 100: "uint16"}[n]  # bfloat16 travels as uint16 on the CPU
            assert entry == {
                **known,
                "kernel": "rms_norm",
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
        "targets": {"cpu": 4},
        "tilelang": {tilelang_version(): 4},
        "others": {},
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
        ["scale", "[32,8] [32,8]", "–", "cpu"],
        ["scale", "[size,8] [size,8]", "–", "cpu"],
    ]
    keys = {place.key[:12]: place.path for place in layout.entries(root)}
    assert {row[0] for row in rows} == set(keys)
    for row in rows:
        assert row[6] == tilelang_version()
        assert row[7] == f"{size(keys[row[0]]) / 1024:.0f} KiB"
        assert row[8].endswith(" ago")
    assert [row[5] == "–" for row in rows] == [False, False, True, True]
    total = sum(map(size, keys.values()))
    assert ran.err == f"4 kernels, {total / 1024:.0f} KiB in {home(root)}      cpu 4\n"


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
    for path in layout.records(root):
        os.utime(path, (1, 1))  # a record that is read is a use of its kernel, too
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


def test_what_is_no_kernel_is_counted_beside_the_kernels(tlcache, root):
    version = root / tilelang_version()
    (version / platform_name() / ".staging" / "half").mkdir()
    (version / platform_name() / ".staging/half/kernel_lib.so").write_bytes(b"x" * 2048)
    (version / "note.txt").write_text("ours")
    totals = tlcache("ls", "--json").json["totals"]
    assert totals["entries"] == 4
    assert totals["others"] == {
        "staging": {"count": 1, "bytes": 2048},
        "unknown": {"count": 1, "bytes": 4},
    }
    assert tlcache("ls").err.splitlines()[1] == "besides: staging 1, 2.0 KiB · unknown 1, 4 B"
    assert (version / "note.txt").read_text() == "ours"


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
        "below": [],
        "entries": [],
        "totals": {"entries": 0, "bytes": 0, "targets": {}, "tilelang": {}, "others": {}},
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
    assert {entry["target"] for entry in entries} == {"cpu"}
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


# --- filters, trees and other things, on the root of many releases ---


def listed(tlcache, root, *args):
    ran = tlcache("ls", "--json", "--cache-dir", root, *args)
    assert ran.code == 0, ran.err
    return sorted(entry["key"][:4] for entry in ran.json["entries"])


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--target", "sm90", "--tilelang", "0.1.15"], "314d 7606 9d21 a80a f008 f758"),
        (["--target", "sm_90"], "75e7 a80a f758"),
        (["--target", "sm_100a", "--target", "sm80"], "cb47 d7de e9ec f21e f758 fb5d"),
        (["--tilelang", "<0.1.14", "--target", "cpu"], "1bb1 6cb7 b0f7 ccde cd84"),
        (["--kernel", "scale_?*", "--kernel", "tuned", "--tilelang", "0.1.15"],
         "f008 f758 f881 fbd1"),
        (["--toolkit", "13.0", "--larger-than", "900KiB"], "1f2e 9d21"),
        (["--toolkit", "12"], ""),
        (["--older-than", "1d"], "fb5d"),
        (["--unused-for", "1h"], ""),
        (["--op", "rms_norm"], ""),
        (["--no-record", "--target", "sm_100a", "--all"], "f21e"),
        (["--all", "--target", "sm_100a"], "8a66 f21e"),
        (["--all", "--kernel", "tuned", "--tilelang", "0.1.13"], "6cb7 abab"),
    ],
)  # fmt: skip
def test_filters_select_among_the_kernels_of_all_releases(tlcache, mixed, options, keys):
    (old,) = mixed.glob("**/kernels/fb5d*")
    day = 86400
    os.utime(old, (1_700_000_000 - day,) * 2)
    assert listed(tlcache, mixed, *options) == keys.split()


def test_all_lists_what_is_no_kernel_under_the_names_of_the_schema(tlcache, mixed):
    (mixed / "notes.txt").write_text("x")
    told = tlcache("ls", "--all", "--json").json
    kinds = {entry["kind"] for entry in told["entries"]}
    assert kinds == {"kernel", "binary", "autotune", "unknown"}
    assert told["totals"]["others"] == {} and told["totals"]["entries"] == 34
    others = tlcache("ls", "--json").json["totals"]["others"]
    assert {kind: one["count"] for kind, one in others.items()} == {
        "autotune": 3,
        "binary": 8,
        "unknown": 1,
    }
    header, *rows = [line.split("\t") for line in tlcache("ls", "--all").out.splitlines()]
    assert header == [*HEADER, "KIND"] and len(rows) == 34


def test_a_filter_that_selects_nothing_says_so(tlcache, mixed_root):
    ran = tlcache("ls", "--target", "sm89", "--cache-dir", mixed_root)
    assert ran.code == 0
    assert ran.out == f"no kernels like that in {home(mixed_root)}\n"
    assert ran.err == "\nhint: `tlcache ls` without filters lists all there are\n"


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("--target", "h1000", "unknown target 'h1000'"),
        ("--target", "sm_9x", "unknown target 'sm_9x'"),
        ("--tilelang", "older", "'older' is no version or range of versions"),
        ("--older-than", "30", "'30' is no time span"),
        ("--unused-for", "1 month", "'1 month' is no time span"),
        ("--larger-than", "big", "'big' is no size"),
    ],
)
def test_a_filter_that_means_nothing_is_a_usage_error(tlcache, mixed_root, option, value, error):
    ran = tlcache("ls", option, value, "--cache-dir", mixed_root)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {error}") and "\n\nhint: " in ran.err


def test_totals_are_by_target_and_by_version(tlcache, mixed_root):
    ran = tlcache("ls", "--cache-dir", mixed_root)
    first, second, _ = ran.err.splitlines()
    assert first.endswith("      cpu 8 · sm_80 4 · sm_80,sm_90 1 · sm_90 2 · sm_90a 6 · sm_100a 1")
    assert second == "by TileLang: 0.1.11 3 · 0.1.13 3 · 0.1.14 3 · 0.1.15 9 · unknown 4"


def test_a_base_directory_names_the_root_of_each_kernel(tlcache, mixed_root, tmp_path):
    base = tmp_path / "base"
    for name in ("tl0.1.15-cu13.0-3f9c2ab1", "tl0.1.14-cu13.0-77aa0001"):
        shutil.copytree(mixed_root, base / name)
    ran = tlcache("ls", "--cache-dir", base, "--target", "sm_100a")
    header, *rows = [line.split("\t") for line in ran.out.splitlines()]
    assert header == [*HEADER, "ROOT"]
    assert sorted(row[-1] for row in rows) == sorted(os.listdir(base))


def test_a_tree_tells_each_version_target_and_kernel_once(tlcache, mixed_root):
    ran = tlcache("ls", "--tree", "--all", "--tilelang", "0.1.14", "--cache-dir", mixed_root)
    assert ran.code == 0, ran.err
    told = [re.sub(r"[0-9a-f]{12}.*", "KEY", line) for line in ran.out.splitlines()[1:]]
    told = [re.sub(r"\d+(\.\d)? KiB", "SIZE", line) for line in told]
    assert told == [
        "└─ TileLang 0.1.14  5 things, SIZE",
        "   ├─ cpu  1 kernel, SIZE",
        "   │  └─ scale_cpu  KEY",
        "   ├─ sm_80  2 things, SIZE",
        "   │  ├─ scale  KEY",
        "   │  └─ scale (binary)  KEY",
        "   └─ sm_90  2 things, SIZE",
        "      ├─ scale_dyn  KEY",
        "      └─ scale_dyn (binary)  KEY",
    ]
    ran = tlcache("ls", "--tree", "--target", "sm_90a", "--cache-dir", mixed_root)
    assert "│     │  ├─ 314d5a853fdb  [128,64] [128,64]  128 KiB  " in ran.out


def test_a_tree_has_no_line_that_is_wider_than_the_terminal(terminal, mixed_root):
    shown = terminal("ls", "--tree", "--cache-dir", mixed_root, width=50, NO_COLOR="1")
    tree = [line for line in shown if line.strip(" │").startswith(("├─", "└─"))]
    assert len(tree) > 30 and max(map(len, tree)) == 50
    assert any(line.endswith("…") for line in tree)


@pytest.mark.parametrize("width", [80, 160])
def test_a_table_fits_the_terminal_and_keeps_keys_and_targets(terminal, mixed_root, width):
    shown = terminal("ls", "--cache-dir", mixed_root, width=width, NO_COLOR="1")
    header, *rows = shown[:23]
    assert max(map(len, shown[:23])) <= width
    assert {"KEY", "KERNEL", "WORKLOAD", "TARGET", "SIZE"} <= set(header.split())
    assert ("TOOLKIT" in header) == (width == 160)
    assert all(len(row.split()[0]) == 12 for row in rows)


def test_a_name_that_would_move_the_cursor_or_is_no_text_is_shown_as_what_it_is(tlcache, mixed):
    for name in (b"a\x1b[2J\nb\tc", b"\xff\xfe"):
        os.mkdir(os.fsencode(mixed / "0.1.15") + b"/" + name)
    ran = tlcache("ls", "--all")
    assert ran.code == 0, ran.err
    assert "\x1b" not in ran.out and "a\\x1b[2J\\nb\\" in ran.out
    assert len(ran.out.splitlines()) == 36
    assert len(tlcache("ls", "--all", "--json").json["entries"]) == 35
    assert tlcache("ls", "--all", "--tree").code == 0
    assert tlcache("du").code == 0


def test_packaging_is_imported_for_versions_alone(python, mixed_root):
    source = (
        "import sys\nfrom tlcache.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print('packaging' in sys.modules, 'rich' in sys.modules, file=sys.stderr)"
    )
    ran = python(source, "ls", "--target", "sm90", "--tree", "--cache-dir", str(mixed_root))
    assert ran.err.splitlines()[-1] == "False False"
    ran = python(source, "ls", "--tilelang", "<0.1.14", "--cache-dir", str(mixed_root))
    assert ran.err.splitlines()[-1] == "True False"
