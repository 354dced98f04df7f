"""`tlcache env`: what a shell evaluates puts its processes on a root of their own key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tlcache import version_key


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    for name in version_key.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_shell_that_evaluates_it_has_the_root_whatever_characters_are_in_its_path(
    tlcache, tmp_path
):
    base = tmp_path / "a base'$(touch x)"
    ran = tlcache("env", "--base", base)
    assert ran.code == 0 and ran.err == "" and len(ran.out.splitlines()) == 1
    script = f'{ran.out}\n"$0" -c \'import os; print(os.environ["TILELANG_CACHE_DIR"])\''
    done = subprocess.run(
        ["sh", "-euc", script, sys.executable], capture_output=True, text=True, check=True
    )
    key = tlcache("key", "--short").out.strip()
    assert done.stdout.strip() == str(base / key)
    assert not base.exists() and not Path("x").exists()


def test_by_default_the_root_in_force_is_the_base_and_stays_it(tlcache, cache_root):
    first = tlcache("env", "--json").json
    assert first["base"] == str(cache_root)
    again = tlcache("env", "--json", env=first["exports"]).json
    assert again == first
    assert first["exports"] == {"TILELANG_CACHE_DIR": str(cache_root / first["key"])}


def test_a_kernel_that_is_warmed_there_is_found_there_and_the_base_lists_it(
    tlcache, cache_root, shapes
):
    path = shapes({"op": "rms_norm", "M": 1, "N": 64, "dtype": "float32"})
    exports = tlcache("env", "--target", "cpu", "--json").json["exports"]
    warm = ["warm", "--shapes", path, "--target", "cpu"]
    assert tlcache(*warm, env=exports).code == 0
    assert tlcache(*warm, "--check", env=exports).code == 0
    assert tlcache(*warm, "--check").code == 1
    (one,) = tlcache("ls", "--json", "--cache-dir", cache_root).json["entries"]
    assert one["path"].startswith(exports["TILELANG_CACHE_DIR"] + os.sep)
    told = tlcache("why", "--shapes", path, "--target", "cpu", "--json")
    assert told.code == 1 and told.json["kernels"][0]["cause"] == "other root"


def test_it_is_said_where_others_keys_are_there_and_not_this_ones(tlcache, tmp_path):
    base = tmp_path / "base"
    key = "tl0.1.15-cu13.0-sm_90a-01234567"
    (base / key / "0.1.15" / "linux-x86_64" / "kernels").mkdir(parents=True)
    ran = tlcache("env", "--base", base)
    assert ran.code == 0 and key in ran.err and "hint: " in ran.err
    named = tlcache("env", "--base", base, "--key", key)
    assert named.out == f"export TILELANG_CACHE_DIR={base / key}\n" and named.err == ""


@pytest.mark.parametrize("arguments", [["--key", "../x"], ["--base", ""], ["--target", "sm"]])
def test_wrong_input_exports_nothing(tlcache, arguments):
    ran = tlcache("env", *arguments)
    assert (ran.code, ran.out) == (2, "") and "hint: " in ran.err
