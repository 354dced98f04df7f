"""The compilers: found where TileLang finds them, and said where they are missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tlcache.targets import CPU, Target
from tlcache.warm import toolchain

REPORT = """
import json, sys
from tlcache.targets import CPU, Target
from tlcache.warm import toolchain
def said(target):
    error = toolchain.missing(target)
    return None if error is None else [type(error).__name__, error.message, error.hint]
print("RESULT " + json.dumps({
    "nvcc": toolchain.nvcc(),
    "host": toolchain.host_compiler(),
    "cpu": said(CPU),
    "cuda": said(Target("sm_90a")),
    "fat": said(Target('{"arch":"sm_90a","code":"compute_90a","kind":"cuda"}')),
    "provenance": toolchain.provenance(),
    "imported": sorted({"torch", "tilelang", "tvm"} & set(sys.modules)),
}))
"""
NAMES = ("CUDA_HOME", "CUDA_PATH", "CXX", "CC")


def program(path: Path, says: str = "") -> Path:
    """A program that prints a text: only for its place, where the real one cannot be put."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """No variable that names a compiler."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def report(python):
    """What a fresh process finds with other variables."""

    def report(**env):
        done = python(REPORT, env={name: str(value) for name, value in env.items()})
        assert done.code == 0, done.err
        found = json.loads(done.out.rpartition("RESULT ")[2])
        assert found["imported"] == []
        return found

    return report


@pytest.fixture
def empty(tmp_path):
    """A PATH without any program."""
    place = tmp_path / "empty"
    place.mkdir()
    return place


def test_cuda_home_is_believed_before_cuda_path_and_path(report, tmp_path):
    home, other = program(tmp_path / "home/bin/nvcc"), program(tmp_path / "other/bin/nvcc")
    path = os.pathsep.join([str(other.parent), os.environ["PATH"]])
    assert report(CUDA_HOME=home.parents[1], CUDA_PATH=other.parents[1], PATH=path)["nvcc"] == str(
        home
    )
    assert report(CUDA_PATH=home.parents[1], PATH=path)["nvcc"] == str(home)
    assert report(CUDA_HOME="", CUDA_PATH=home.parents[1])["nvcc"] == str(home)
    assert report(PATH=path)["nvcc"] == str(other)


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_a_toolkit_that_is_named_and_not_there_is_missing_whatever_else_is_there(
    report, tmp_path, name
):
    there = program(tmp_path / "there/bin/nvcc").parent
    plain = tmp_path / "plain/bin"
    plain.mkdir(parents=True)
    (plain / "nvcc").write_text("not a program")
    for home in (tmp_path / "absent", plain.parent):
        found = report(**{name: home}, PATH=f"{there}{os.pathsep}{os.environ['PATH']}")
        assert found["nvcc"] is None
        assert found["provenance"]["nvcc"] is None
        for target in ("cuda", "fat"):
            kind, message, hint = found[target]
            assert kind == "ToolchainError"
            assert message.startswith("no nvcc for target ")
            assert "tlcache[cuda]" in hint
        assert found["cuda"][1].startswith("no nvcc for target sm_90a: ")
        assert found["cpu"] is None


def test_without_any_compiler_nothing_can_be_compiled(report, empty):
    found = report(PATH=empty)
    assert found["host"] is None
    assert found["provenance"]["host_compiler"] is None
    for target, name in (("cpu", "cpu"), ("cuda", "sm_90a")):
        kind, message, hint = found[target]
        assert kind == "ToolchainError"
        assert message == f"no C++ compiler for target {name}: g++, clang++, c++ are not on PATH"
        assert "g++" in hint


def test_without_nvcc_on_path_a_toolkit_in_the_usual_place_is_found(report, empty):
    usual = Path("/usr/local/cuda/bin/nvcc")
    found = report(PATH=empty)["nvcc"]
    if found is None:
        assert not os.access(usual, os.X_OK)
    else:
        assert found == str(usual) or "site-packages" in found  # of the pip package


@pytest.mark.parametrize("first", ["g++", "clang++", "c++"])
def test_the_first_compiler_of_path_is_taken_in_tilelangs_order(report, tmp_path, first):
    names = ["g++", "clang++", "c++"]
    for name in names[names.index(first) :]:
        program(tmp_path / "bin" / name, f"{name} (test) 1.0")
    program(tmp_path / "bin/gcc", "gcc is no C++ compiler")
    found = report(PATH=f"{tmp_path / 'bin'}{os.pathsep}/nowhere")
    assert found["host"] == str(tmp_path / "bin" / first)
    assert found["cpu"] is None


def test_a_compiler_in_cxx_is_believed_before_cc_and_path(report, tmp_path):
    cxx, cc = program(tmp_path / "my/cxx", "mine 1.0"), program(tmp_path / "my/cc", "yours 2.0")
    found = report(CXX=cxx, CC=cc)
    assert (found["host"], found["provenance"]["host_compiler"]) == (str(cxx), "mine 1.0")
    assert report(CC=cc)["host"] == str(cc)
    assert report(CXX="", CC=cc)["host"] == str(cc)
    by_name = report(CXX="cxx", PATH=f"{cxx.parent}{os.pathsep}{os.environ['PATH']}")
    assert by_name["host"] == str(cxx)


@pytest.mark.parametrize("name", ["CXX", "CC"])
def test_a_compiler_that_is_named_and_not_there_is_missing(report, name):
    found = report(**{name: "no-such-compiler"})
    assert found["host"] is None
    assert found["cpu"][:2] == [
        "ToolchainError",
        "no C++ compiler for target cpu: 'no-such-compiler' (of CXX or CC) is not a program",
    ]
    assert found["cuda"][1].startswith("no C++ compiler for target sm_90a")


def test_a_compiler_that_says_nothing_or_fails_has_no_version(report, tmp_path):
    silent = program(tmp_path / "silent")
    failing = program(tmp_path / "failing")
    failing.write_text("#!/bin/sh\necho 'failing 1.0'\nexit 3\n")
    for path in (silent, failing):
        found = report(CXX=path)
        assert found["host"] == str(path)
        assert found["provenance"]["host_compiler"] is None or path == silent
        assert not found["provenance"]["host_compiler"]


def test_the_host_compilers_version_is_its_first_line():
    gxx = shutil.which("g++")
    if gxx is None:
        pytest.skip("no g++ here")
    done = subprocess.run([gxx, "--version"], capture_output=True, text=True, check=True)
    assert toolchain.host_compiler() == gxx
    assert toolchain.provenance()["host_compiler"] == done.stdout.splitlines()[0]
    assert toolchain.missing(CPU) is None


@pytest.mark.nvcc
def test_nvccs_build_is_its_own(report):
    found = report()
    done = subprocess.run([found["nvcc"], "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["provenance"]["nvcc"])
    assert f"V{found['provenance']['nvcc']}" in done.stdout
    assert toolchain.missing(Target("sm_90a")) is None


def test_the_driver_is_none_where_there_is_none(report):
    driver = report()["provenance"]["driver"]
    assert driver is None or re.fullmatch(r"CUDA \d+\.\d", driver)


TILELANG = """
import json, os, sys
import tilelang
env = sys.modules["tilelang.env"]
from tilelang.contrib import cc
from tlcache.warm import toolchain
report = []
for changes in json.loads(sys.argv[1]):
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "CC"):
        os.environ.pop(name, None)
    os.environ["PATH"] = sys.argv[2]
    os.environ.update(changes)
    toolchain.nvcc.cache_clear()
    cc.get_cplus_compiler.cache_clear()
    home = env._find_cuda_home()
    nvcc = os.path.join(home, "bin", "nvcc") if home else None
    theirs = os.path.realpath(nvcc) if nvcc and os.path.exists(nvcc) else None
    ours = toolchain.nvcc() and os.path.realpath(toolchain.nvcc())
    report.append([changes, [ours, theirs], [toolchain.host_compiler(), cc.get_cplus_compiler()]])
print("RESULT " + json.dumps(report))
"""


def test_the_compilers_are_those_that_tilelang_finds(python, tmp_path, empty):
    nvcc, gxx = program(tmp_path / "kit/bin/nvcc"), program(tmp_path / "tools/g++")
    linked = tmp_path / "linked/nvcc"
    linked.parent.mkdir()
    linked.symlink_to(nvcc)
    home, absent = str(nvcc.parents[1]), str(tmp_path / "absent")
    changes = [
        {},
        {"PATH": str(empty)},
        {"CUDA_HOME": home},
        {"CUDA_PATH": home},
        {"CUDA_HOME": "", "CUDA_PATH": home},
        {"CUDA_HOME": absent},
        {"CUDA_PATH": ""},
        {"PATH": str(nvcc.parent)},
        {"PATH": str(linked.parent)},
        {"PATH": str(gxx.parent)},
        {"CXX": str(gxx)},
        {"CC": str(gxx)},
        {"CXX": "", "CC": str(gxx)},
    ]
    done = python(TILELANG, json.dumps(changes), os.environ["PATH"])
    assert done.code == 0, done.err
    report = json.loads(done.out.rpartition("RESULT ")[2])
    assert len(report) == len(changes)
    for change, (our_nvcc, their_nvcc), (our_host, their_host) in report:
        assert our_nvcc == their_nvcc, change
        assert our_host == their_host, change
