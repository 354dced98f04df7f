"""`tlcache ls --duplicates` on what TileLang really writes: one kernel under two keys."""

from __future__ import annotations

import os

import pytest

# A negative out_idx and the same as a positive one are two keys; the third has another body.
MAKE = """
import tilelang
import tilelang.language as T


def scale(factor, out_idx):
    @T.prim_func
    def scale(x: T.Tensor((32, 8), "float32"), y: T.Tensor((32, 8), "float32")):
        with T.Kernel(1):
            for i in T.serial(32):
                for j in T.serial(8):
                    y[i, j] = x[i, j] * factor

    tilelang.compile(scale, out_idx=out_idx, target={"kind": "c"}, execution_backend="cython")


scale(2.0, [1])
scale(2.0, [-1])
scale(3.0, [1])
"""


@pytest.fixture
def pair(tlcache, root):
    told = tlcache("ls", "--json", "--duplicates").json["entries"]
    assert len(told) == 2
    return told


def test_a_kernel_that_was_compiled_twice_is_listed_with_the_newest_first(tlcache, root, pair):
    assert len(tlcache("ls", "--json").json["entries"]) == 3
    first, second = pair
    assert first["duplicate_of"] is None
    assert second["duplicate_of"] == first["key"]
    assert first["created"] > second["created"]
    assert first["key"] != second["key"]


def test_the_table_says_of_which_kernel_another_is_a_duplicate(tlcache, pair):
    header, *rows = [line.split("\t") for line in tlcache("ls", "--duplicates").out.splitlines()]
    assert header[-1] == "SAME AS"
    assert [row[-1] for row in rows] == ["–", pair[0]["key"][:12]]


def test_a_filter_is_asked_of_each_duplicate_by_itself(tlcache, pair):
    os.utime(pair[1]["path"], (1, 1))
    ran = tlcache("ls", "--json", "--duplicates", "--older-than", "1d").json["entries"]
    assert [entry["key"] for entry in ran] == [pair[1]["key"]]
    assert ran[0]["duplicate_of"] == pair[0]["key"]


def test_diff_says_that_only_the_keys_differ(tlcache, pair):
    keys = [entry["key"][:12] for entry in pair]
    ran = tlcache("diff", *keys)
    assert (ran.code, ran.out) == (0, "")
    assert ran.err.startswith(
        "the machine code is the same: the keys differ by what no entry keeps"
    )
    told = tlcache("diff", *keys, "--json").json
    assert (told["fields"], told["same_code"]) == ({}, True)
    assert told["sources"] == {"device": [], "host": []}


def test_diff_shows_the_lines_of_the_source_that_differ(tlcache, root, pair):
    listed = tlcache("ls", "--json").json["entries"]
    (other,) = {entry["key"] for entry in listed} - {entry["key"] for entry in pair}
    ran = tlcache("diff", pair[0]["key"], other)
    assert ran.code == 0 and ran.err == "the machine code differs\n"
    changed = [line for line in ran.out.splitlines() if line[:1] in "+-"]
    assert changed[:2] == [
        f"--- {pair[0]['key'][:12]}/device_kernel.cu",
        f"+++ {other[:12]}/device_kernel.cu",
    ]
    assert "2.0" in changed[2] and "3.0" in changed[3]


def test_without_duplicates_there_are_none_to_list(tlcache, root, pair):
    ran = tlcache("ls", "--duplicates", "--target", "sm90")
    assert ran.code == 0 and ran.out.startswith("no kernels like that in ")
    assert tlcache("ls", "--duplicates", "--json", "--target", "sm90").json["entries"] == []
