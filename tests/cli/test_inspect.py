"""`tlcache inspect`: everything about one kernel, found by any unique prefix of its keys."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tlcache.fingerprint import tilelang_version
from tlcache.store import layout, record

TLCACHE = [sys.executable, "-c", "from tlcache.cli import main; main()"]

# A kernel with a record, by the runtime, and one without, by TileLang alone.
MAKE = """
import tilelang
import tilelang.language as T
from tlcache import operators, runtime, targets

values = {"M": "dynamic", "N": 64, "dtype": "float32"}
runtime.resolve(operators.get("rms_norm").spec(values, targets.CPU))


@tilelang.jit(out_idx=[1], target={"kind": "c"}, execution_backend="cython")
def scale(N):
    @T.prim_func
    def scale(x: T.Tensor((N, 8), "float32"), y: T.Tensor((N, 8), "float32")):
        with T.Kernel(1):
            for i in T.serial(N):
                for j in T.serial(8):
                    y[i, j] = x[i, j] * 2.0

    return scale


scale(32)
"""


@pytest.fixture
def filed(root: Path) -> dict:
    """The one record, as JSON."""
    (path,) = layout.records(root)
    return record.parse(path.read_bytes(), path).to_json()


@pytest.fixture
def recorded(root: Path, filed: dict) -> Path:
    """The entry that has the record."""
    return root / filed["entry"]


@pytest.fixture
def bare(root: Path, recorded: Path) -> Path:
    """The entry that has no record."""
    (path,) = (place.path for place in layout.entries(root) if place.path != recorded)
    return path


def facts(ran):
    """The lines of `inspect` by their names."""
    assert ran.code == 0, ran.err
    return {line[:16].rstrip(): line[16:] for line in ran.out.splitlines()}


def test_a_kernel_with_a_record_tells_what_it_is_and_how_it_is_called(tlcache, recorded, filed):
    told = facts(tlcache("inspect", recorded.name))
    assert told["key"] == recorded.name
    assert told["path"] == str(recorded)
    assert told["kernel"] == "rms_norm"
    assert told["backend"] == "cython"
    assert told["tilelang"] == tilelang_version()
    assert told["library"] == "kernel_lib.so"
    assert told["factory"] == "ops.kernels.rms_norm:rms_norm"
    assert told["workload"] == "M=dynamic N=64 eps=1e-06 fp32"
    assert told["schedule"] == "block_m=1 threads=1 each=1 prefetch=False"
    assert told["target"] == "cpu"
    assert told["param x"] == "in  float32 [rows, 64]"
    assert told["param w"] == "in  float32 [64]"
    assert told["param y"] == "out  float32 [rows, 64]"
    assert told["calling"] == "c, call"
    assert told["host compiler"] == filed["toolkit"]["host_compiler"]
    assert told["source digest"] == filed["source_digest"]
    assert told["sha256"] == f"{filed['library']['sha256']}  matches"
    assert told["record"] == filed["action_key"]


def test_a_kernel_without_a_record_tells_what_its_files_tell(tlcache, bare):
    told = facts(tlcache("inspect", bare.name))
    assert told["kernel"] == "scale"
    assert told["param 0"] == told["param 1"] == "float32 [32, 8]"
    assert told["record"].startswith("none: ")
    assert told["target"] == "cpu" and told["toolkit"] == "unknown"
    assert "sha256" not in told


def test_json_is_the_entry_as_ls_has_it_with_its_record(tlcache, root, recorded, bare, filed):
    listed = {entry["key"]: entry for entry in tlcache("ls", "--json").json["entries"]}
    ran = tlcache("inspect", recorded.name, "--json")
    assert ran.code == 0 and ran.err == ""
    assert ran.json == {
        "schema": 1,
        "root": str(root),
        "entry": listed[recorded.name],
        "record": json.loads(json.dumps(filed)),
        "sound": True,
        "kernels": [],
        "cuda_binaries": [],
        "made": [],
        "code": ran.json["code"],
        "files": {file.name: file.stat().st_size for file in recorded.iterdir()},
    }
    assert len(ran.json["code"]) == 64
    ran = tlcache("inspect", bare.name, "--json")
    assert ran.code == 0 and ran.err == ""
    assert ran.json == {
        "schema": 1,
        "root": str(root),
        "entry": listed[bare.name],
        "record": None,
        "sound": None,
        "kernels": [],
        "cuda_binaries": [],
        "made": [],
        "code": ran.json["code"],
        "files": {file.name: file.stat().st_size for file in bare.iterdir()},
    }
    assert len(ran.json["code"]) == 64


def test_any_unique_prefix_of_either_key_finds_a_kernel(tlcache, recorded, bare, filed):
    for prefix in (recorded.name[:12], recorded.name[:12].upper(), filed["action_key"][:12]):
        assert facts(tlcache("inspect", prefix))["key"] == recorded.name
    assert facts(tlcache("inspect", bare.name[:12]))["key"] == bare.name


def test_a_prefix_that_several_kernels_have_is_an_error_that_shows_them(tlcache, bare):
    prefix, digit, rest = bare.name[:6], bare.name[6], bare.name[7:]
    twin = bare.with_name(f"{prefix}{'0' if digit != '0' else '1'}{rest}")
    shutil.copytree(bare, twin)
    ran = tlcache("inspect", prefix)
    assert ran.code == 2
    assert ran.out == ""
    shown, blank, hint = ran.err.splitlines()
    assert shown.startswith(f"error: 2 entries have keys that begin with '{prefix}': ")
    # What is shown tells them apart, and is enough to ask again.
    told = shown.rpartition(": ")[2].split(", ")
    found = [facts(tlcache("inspect", key))["key"] for key in told]
    assert sorted(found) == sorted([bare.name, twin.name])
    assert (blank, hint) == ("", "hint: give more of the key")


@pytest.mark.parametrize("key", ["xyz", "0" * 64])
def test_an_unknown_key_is_an_error(tlcache, root, key):
    ran = tlcache("inspect", key)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err == (
        f"error: no entry in {root} has a key that begins with '{key}'\n"
        "\nhint: `tlcache ls --all` lists the keys\n"
    )


def test_an_empty_key_finds_nothing(tlcache, root):
    ran = tlcache("inspect", "")
    assert ran.code == 2
    assert ran.out == "" and ran.err.startswith("error: ")


def test_a_missing_root_has_no_kernel_to_inspect(tlcache, cache_root):
    ran = tlcache("inspect", "abc", "--cache-dir", cache_root / "nowhere")
    assert ran.code == 2
    assert ran.err.startswith(f"error: no entry in {cache_root / 'nowhere'} has a key ")


def test_a_flipped_byte_shows(tlcache, recorded, filed):
    library = recorded / "kernel_lib.so"
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)
    told = facts(tlcache("inspect", recorded.name))
    assert told["sha256"] == f"{filed['library']['sha256']}  DOES NOT MATCH the library"
    assert tlcache("inspect", recorded.name, "--json").json["sound"] is False
    data[len(data) // 2] ^= 1
    library.write_bytes(data)
    assert tlcache("inspect", recorded.name, "--json").json["sound"] is True


def test_a_library_that_is_gone_shows(tlcache, recorded):
    (recorded / "kernel_lib.so").unlink()
    told = facts(tlcache("inspect", recorded.name))
    assert told["library"] == "none"
    assert told["sha256"].endswith("DOES NOT MATCH the library")


def test_to_inspect_a_kernel_is_not_to_use_it(tlcache, root, recorded):
    library = recorded / "kernel_lib.so"
    week = 7 * 86400
    os.utime(library, (time.time() - week, time.time() - 2 * week))
    for path in layout.records(root):
        os.utime(path, (1, 1))
    (before,) = [
        entry["last_used"]
        for entry in tlcache("ls", "--json").json["entries"]
        if entry["key"] == recorded.name
    ]
    told = facts(tlcache("inspect", recorded.name))
    assert told["last used"] == "7 days ago"
    assert tlcache("inspect", recorded.name, "--json").json["entry"]["last_used"] == before


@pytest.mark.parametrize("options", [[], ["--source", "host"], ["--json"]], ids=str)
def test_a_reader_that_leaves_early_is_no_error(recorded, tmp_path, options):
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [*TLCACHE, "inspect", recorded.name, *options],
        cwd=tmp_path,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writing)
    assert "Traceback" not in process.stderr and "BrokenPipe" not in process.stderr
    assert process.returncode == 0


# --- entries that are no kernels, several roots, sources and SASS ---


def test_a_cuda_binary_tells_the_kernel_that_was_made_from_it(tlcache, mixed_root):
    told = facts(tlcache("inspect", "3996", "--cache-dir", mixed_root))
    assert (told["kind"], told["target"], told["toolkit"]) == ("binary", "sm_90a", "13.0.88")
    assert told["made"].startswith("76068e2d2c06")
    assert "record" not in told


def test_a_record_in_one_of_several_roots_is_compared_with_that_roots_library(
    tlcache, root, recorded, tmp_path
):
    base = tmp_path / "base"
    for name in ("one", "two"):
        shutil.copytree(root, base / name)
    within = f"one/{os.path.relpath(recorded, root)}"
    (base / within / "kernel_lib.so").write_bytes(b"x")
    ran = tlcache("inspect", recorded.name, "--cache-dir", base)
    assert ran.code == 2 and "2 entries have keys" in ran.err
    for name, word in (("one", "DOES NOT MATCH"), ("two", "matches")):
        path = f"{name}/{os.path.relpath(recorded, root)}"
        assert word in facts(tlcache("inspect", path, "--cache-dir", base))["sha256"]


@pytest.mark.parametrize(
    ("key", "side", "name"),
    [
        ("7606", "device", "device_kernel.cu"),
        ("7606", "host", "host_kernel.cu"),
        ("1f2e", "device", "kernel.cu"),  # 0.1.6
        ("1f2e", "host", "wrapped_kernel.cu"),
        ("fbd1", "device", "device_kernel.cu"),
    ],
)
def test_a_source_in_a_pipe_is_its_bytes(tlcache, mixed_root, key, side, name):
    (path,) = mixed_root.glob(f"**/{key}*/{name}")
    ran = tlcache("inspect", key, "--source", side, "--cache-dir", mixed_root)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.encode() == path.read_bytes()
    told = tlcache("inspect", key, "--source", side, "--json", "--cache-dir", mixed_root).json
    assert told == {"schema": 1, "name": name, "text": path.read_text()}


def test_a_source_on_a_terminal_is_colored_unless_it_may_not_be(terminal, mixed_root):
    asked = ("inspect", "7606", "--source", "device", "--cache-dir", mixed_root)
    colored = terminal(*asked, width=160)
    assert any("\x1b[" in line for line in colored)
    plain = terminal(*asked, width=160, NO_COLOR="1")
    assert not any("\x1b" in line for line in plain)
    (path,) = mixed_root.glob("**/7606*/device_kernel.cu")
    assert plain == [line.expandtabs(4).rstrip() for line in path.read_text().splitlines()]


def test_what_would_move_the_cursor_is_shown_and_not_done(terminal, mixed):
    (path,) = mixed.glob("**/7606*/device_kernel.cu")
    path.write_text("int x; // \x1b[2J\x1b]0;title\x07\rhidden\n")
    for env in ({}, {"NO_COLOR": "1"}):
        shown = "".join(terminal("inspect", "7606", "--source", "device", **env))
        assert "\x1b[2J" not in shown and "\x07" not in shown and "\\x1b[2J" in shown


def test_an_entry_without_a_source_is_an_error_that_says_what_there_is(tlcache, mixed_root):
    ran = tlcache("inspect", "3996", "--source", "host", "--cache-dir", mixed_root)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == (
        "error: 3996e911df1c holds no source of the host's side\n"
        "\nhint: `tlcache inspect 3996e911df1c` shows its files\n"
    )


@pytest.fixture
def disassembler(tmp_path, monkeypatch):
    """One that says what it was given, in a folder that is the whole of PATH."""
    place = tmp_path / "bin"
    place.mkdir()

    def write(name="nvdisasm", text='echo "$1"; head -c 4 "$2"'):
        path = place / name
        path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{text}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", str(place))
    return write


@pytest.mark.parametrize(("key", "cubins"), [("7606", 1), ("f758", 2), ("9d21", 1), ("314d", 1)])
def test_each_cubin_of_an_entry_is_disassembled(tlcache, mixed_root, disassembler, key, cubins):
    disassembler()
    ran = tlcache("inspect", key, "--sass", "--cache-dir", mixed_root)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.split() == ["-c", "\x7fELF"] * cubins


def test_cuobjdump_does_where_there_is_no_nvdisasm(tlcache, mixed_root, disassembler):
    disassembler("cuobjdump")
    ran = tlcache("inspect", "7606", "--sass", "--json", "--cache-dir", mixed_root)
    assert ran.json["text"] == "-sass\n\x7fELF\n"


def test_a_disassembler_that_fails_is_an_error_with_its_words(tlcache, mixed_root, disassembler):
    disassembler(text='echo "fatal: $2: SM 90a is not known" >&2; exit 255')
    ran = tlcache("inspect", "7606", "--sass", "--cache-dir", mixed_root)
    assert (ran.code, ran.out) == (1, "")
    assert "does not understand the device code of 76068e2d2c06: fatal: it: SM 90a" in ran.err


def test_a_host_without_a_disassembler_is_told_so(mixed_root, monkeypatch):
    from tlcache.cli import disassembly
    from tlcache.errors import ToolchainError
    from tlcache.store import scan, select

    monkeypatch.setattr(disassembly.shutil, "which", lambda name, path=None: None)
    one = select.called(scan.scan(mixed_root), "7606", mixed_root)
    with pytest.raises(ToolchainError, match="neither nvdisasm nor cuobjdump") as caught:
        disassembly.sass(one)
    assert caught.value.exit_code == 3


def test_a_kernel_for_the_cpu_has_no_sass(tlcache, mixed_root):
    ran = tlcache("inspect", "fbd1", "--sass", "--cache-dir", mixed_root)
    assert ran.code == 1
    assert ran.err.startswith("error: fbd1fef84b3e has no device code for an NVIDIA GPU: ")


def test_the_real_disassembler_reads_what_the_real_compiler_wrote(tlcache, mixed_root, cache_root):
    from tlcache.cli import disassembly

    if disassembly.disassembler() is None:
        pytest.skip("no nvdisasm and no cuobjdump here")
    ran = tlcache("inspect", "f758", "--sass", "--cache-dir", mixed_root)
    assert ran.code == 0, ran.err
    assert "sm_80" in ran.out and "sm_90" in ran.out and "EXIT" in ran.out


def test_a_source_and_sass_at_once_is_a_usage_error(tlcache, mixed_root):
    ran = tlcache("inspect", "7606", "--sass", "--source", "host", "--cache-dir", mixed_root)
    assert (ran.code, ran.out) == (2, "")
