"""`tlcache du`: what takes how much of the disk."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tlcache.cli.render import home, size


def du(path):
    done = subprocess.run(
        ["du", "-s", "--block-size=1", str(path)], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split("\t")[0])


def test_the_table_splits_one_sum_by_version_target_op_and_kind(tlcache, mixed_root):
    ran = tlcache("du", "--cache-dir", mixed_root)
    assert ran.code == 0, ran.err
    header, *rows = [line.split("\t") for line in ran.out.splitlines()]
    assert header == ["BY", "WHAT", "SIZE", "SHARE", "THINGS"]
    by = {(row[0], row[1]): row[2:] for row in rows}
    assert {name for name, _ in by} == {"version", "target", "op", "kind"}
    assert by["op", "no record"][2] == "33" and by["target", "sm_80,sm_90"][2] == "2"
    assert by["kind", "binary"][2] == "8" and by["kind", "directories"][2] == "–"
    assert by["version", "0.1.15"][2] == "15"
    assert ran.err.startswith(f"{size(du(mixed_root))} in {home(mixed_root)}, ")


def test_json_has_the_bytes_of_each(tlcache, mixed_root):
    told = tlcache("du", "--json", "--cache-dir", mixed_root).json
    assert list(told) == [
        *("schema", "root", "bytes", "apparent", "tilelang", "targets", "ops", "kinds"),
    ]
    assert told["schema"] == 1 and told["bytes"] == du(mixed_root)
    for by in ("tilelang", "targets", "ops", "kinds"):
        assert sum(part["bytes"] for part in told[by].values()) == told["bytes"]
        assert sum(part["things"] for part in told[by].values()) == 33
    assert told["kinds"].keys() == {"kernel", "binary", "autotune", "directories"}


def test_hard_links_count_once_over_several_roots(tlcache, mixed_root, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(mixed_root, base / "one")
    shutil.copytree(base / "one", base / "two", copy_function=os.link)
    told = tlcache("du", "--json", "--cache-dir", base).json
    assert told["bytes"] == du(base) < told["apparent"]
    assert told["kinds"]["kernel"]["things"] == 44


def test_a_filter_leaves_the_rest_out(tlcache, mixed_root):
    told = tlcache("du", "--json", "--target", "cpu", "--cache-dir", mixed_root).json
    assert told["targets"].keys() == {"cpu"}
    assert told["bytes"] == told["targets"]["cpu"]["bytes"] < du(mixed_root)
    assert told["kinds"]["kernel"]["things"] == 8


@pytest.mark.parametrize("arguments", [[], ["--target", "sm89"]], ids=["missing", "nothing"])
def test_nothing_takes_nothing(tlcache, cache_root, arguments):
    ran = tlcache("du", *arguments)
    assert (ran.code, ran.out, ran.err) == (0, "", f"0 B in {home(cache_root)}\n")
    assert tlcache("du", "--json", *arguments).json["bytes"] == 0
