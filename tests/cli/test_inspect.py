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
    assert "target" not in told and "sha256" not in told


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
    }
    ran = tlcache("inspect", bare.name, "--json")
    assert ran.code == 0 and ran.err == ""
    assert ran.json == {
        "schema": 1,
        "root": str(root),
        "entry": listed[bare.name],
        "record": None,
        "sound": None,
    }


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
    assert shown.startswith(f"error: 2 kernels have keys that begin with '{prefix}': ")
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
        f"error: no kernel in {root} has a key that begins with '{key}'\n"
        "\nhint: `tlcache ls` lists the keys\n"
    )


def test_an_empty_key_finds_nothing(tlcache, root):
    ran = tlcache("inspect", "")
    assert ran.code == 2
    assert ran.out == "" and ran.err.startswith("error: ")


def test_a_missing_root_has_no_kernel_to_inspect(tlcache, cache_root):
    ran = tlcache("inspect", "abc", "--cache-dir", cache_root / "nowhere")
    assert ran.code == 2
    assert ran.err.startswith(f"error: no kernel in {cache_root / 'nowhere'} has a key ")


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


def test_to_inspect_a_kernel_is_not_to_use_it(tlcache, recorded):
    library = recorded / "kernel_lib.so"
    week = 7 * 86400
    os.utime(library, (time.time() - week, time.time() - 2 * week))
    (before,) = [
        entry["last_used"]
        for entry in tlcache("ls", "--json").json["entries"]
        if entry["key"] == recorded.name
    ]
    told = facts(tlcache("inspect", recorded.name))
    assert told["last used"] == "7 days ago"
    assert tlcache("inspect", recorded.name, "--json").json["entry"]["last_used"] == before


def test_a_reader_that_leaves_early_is_no_error(recorded, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [*TLCACHE, "inspect", recorded.name],
        cwd=tmp_path,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writing)
    assert "Traceback" not in process.stderr and "BrokenPipe" not in process.stderr
    assert process.returncode == 0
