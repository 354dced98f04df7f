"""`tlcache diff`: what differs between two entries, and nothing that does not."""

from __future__ import annotations

import os

import pytest

from tlcache.spec import KernelSpec
from tlcache.store import record
from tlcache.store.record import Launch, Library, Param, Record
from tlcache.targets import Target


@pytest.fixture
def diff(tlcache, mixed_root):
    def diff(*args):
        ran = tlcache("diff", *args, "--cache-dir", mixed_root)
        assert ran.code == 0, ran.err
        return ran

    return diff


def table(ran):
    rows = [line.split("\t") for line in ran.out.splitlines() if "\t" in line]
    return {name: tuple(values) for name, *values in rows if len(values) == 2}


def test_two_targets_of_one_kernel_differ_in_the_target_alone(diff):
    ran = diff("7606", "a80a")
    assert table(ran) == {
        "WHAT": ("76068e2d2c06", "a80a77200c65"),
        "target": ("sm_90a", "sm_90"),
    }
    assert ran.err == "the machine code is the same\n"


def test_an_entry_does_not_differ_from_itself(diff):
    ran = diff("7606", "7606")
    assert (ran.out, ran.err) == ("", "both keys name the same entry\n")


def test_two_releases_differ_in_what_they_write(diff):
    told = diff("fb5d", "e9ec", "--json").json
    assert told["fields"]["tilelang"] == ["0.1.14", None]
    assert told["same_code"] is False
    assert told["fields"]["bytes"][0] != told["fields"]["bytes"][1]
    assert [line for line in told["sources"]["host"] if line.startswith("+")]
    assert len(told["entries"]) == 2 and told["entries"][0].endswith(told["entries"][0][-64:])


def test_parameters_registers_and_shared_memory_are_compared_one_by_one(diff):
    told = table(diff("75e7", "fb5d"))
    assert told["param 0"] == ("float16 [rows,64]", "float16 [128,64]")
    assert told["kernel 0 registers"] == ("11", "12")
    assert told["kernel 0 shared"] == ("1024", "0")


def test_a_cuda_binary_and_a_kernel_can_be_compared(diff):
    ran = diff("7606", "3996")
    assert table(ran)["kind"] == ("kernel", "binary")
    assert "+++ /dev/null" in ran.out
    assert ran.err == "the machine code is the same\n"


def test_a_spec_is_compared_field_by_field(tlcache, mixed):
    made = {}
    for key, rows, schedule, flags in (("7606", 128, {"t": 128}, ()), ("f21e", 4, {}, ("-O3",))):
        (place,) = mixed.glob(f"**/kernels/{key}*")
        spec = KernelSpec(
            "pkg.mod:scale", {"M": rows, "N": 64}, schedule, Target("sm_90a"), compile_flags=flags
        )
        made[key] = Record(
            action_key=key * 16,
            spec=spec,
            entry=os.path.relpath(place, mixed),
            library=Library("executable.so", 1, "0" * 64),
            launch=Launch("tvm_ffi", "main", (Param("x", "float16", (rows, 64)),), (0,), ()),
            versions={"tilelang": "0.1.15", "tvm_ffi": "0.1.12", "platform": "linux-x86_64"},
            toolkit={"nvcc": "13.0.88" if rows == 4 else "13.2.51", "host_compiler": "g++ 12"},
            source_digest="0f" * 32,
            compile_seconds=1.0,
            created="2026-01-31T12:00:00+00:00",
        )
        record.write(mixed, made[key])
    ran = tlcache("diff", *(one.action_key[:12] for one in made.values()))
    told = table(ran)
    assert told["workload M"] == ("128", "4") and "workload N" not in told
    assert told["schedule t"] == ("128", "–")
    assert told["flags"] == ("–", "-O3")
    assert told["toolkit"] == told["with nvcc"] == ("13.2.51", "13.0.88")
    assert "source digest" not in told and "factory" not in told


def test_added_and_removed_lines_are_colored_on_a_terminal_alone(terminal, mixed_root):
    asked = ("diff", "7606", "f758", "--cache-dir", mixed_root)
    assert any(line.startswith("\x1b[32m+") for line in terminal(*asked, width=200))
    assert not any("\x1b" in line for line in terminal(*asked, width=200, NO_COLOR="1"))


@pytest.mark.parametrize("keys", [("7606", "zzzz"), ("zzzz", "7606"), ("7606", "a")])
def test_a_key_that_names_nothing_or_too_much_is_a_usage_error(tlcache, mixed_root, keys):
    ran = tlcache("diff", *keys, "--cache-dir", mixed_root)
    assert (ran.code, ran.out) == (2, "")
    assert "begin" in ran.err and "\n\nhint: " in ran.err


def test_a_single_key_is_not_enough(tlcache, mixed_root):
    ran = tlcache("diff", "7606", "--cache-dir", mixed_root)
    assert (ran.code, ran.out) == (2, "")


def test_a_source_without_end_is_compared_as_a_whole(tlcache, mixed):
    for key in ("7606", "a80a"):
        (path,) = mixed.glob(f"**/{key}*/device_kernel.cu")
        path.write_text("".join(f"int {key}_{number};\n" for number in range(30_000)))
    ran = tlcache("diff", "7606", "a80a")
    assert ran.out.splitlines()[-1] == (
        "76068e2d2c06/device_kernel.cu and a80a77200c65/device_kernel.cu differ"
    )
