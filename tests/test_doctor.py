"""What is checked of the machine and the root: each fault with its remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tlcache import doctor, fingerprint, targets
from tlcache.store import checkup, layout
from tlcache.store.checkup import Here
from tlcache.targets import Target
from tlcache.warm import toolchain

VERSIONS = {"tilelang": "0.1.15", "tvm_ffi": "0.1.12", "platform": "linux-x86_64"}
H200 = Here(Target("sm_90a"), VERSIONS, "13.0.88", "CUDA 13.0")


@pytest.fixture(autouse=True)
def environment(cache_root, monkeypatch):
    for name in ("CXX", "CC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    found = toolchain.nvcc  # a test may put another one in its place
    found.cache_clear()
    yield
    found.cache_clear()


def test_a_sound_machine_has_no_finding_and_every_check_has_its_own_name(cache_root):
    found = doctor.examine()
    assert {one.level for one in found if one.what != "compiler"} == {"ok"}, found
    assert len({one.what for one in found}) == len(found) == 7 + len(checkup.CHECKS)
    assert not cache_root.exists()


# --- the root ---


@pytest.mark.parametrize(
    ("value", "level", "told"),
    [
        (None, "ok", "default; TILELANG_CACHE_DIR is not set"),
        ("/var/cache/tilelang", "ok", "/var/cache/tilelang (of TILELANG_CACHE_DIR)"),
        ("~/cache", "warn", "does not expand the ~"),
        ("cache", "warn", "another directory for each working directory"),
        ("", "fail", "set and empty"),
    ],
)
def test_it_is_told_who_set_the_root_and_what_is_wrong_with_it(monkeypatch, value, level, told):
    if value is None:
        monkeypatch.delenv("TILELANG_CACHE_DIR")
    else:
        monkeypatch.setenv("TILELANG_CACHE_DIR", value)
    found = doctor.set_root(None)
    assert found.level == level and told in found.detail
    assert (found.remedy is None) == (level == "ok")


def test_a_root_of_the_command_line_is_told_with_the_one_that_tilelang_uses(cache_root):
    found = doctor.set_root("/elsewhere")
    assert "of --cache-dir" in found.detail and str(cache_root) in found.detail


@pytest.mark.parametrize("value", ["1", "TRUE", "on"])
def test_a_cache_that_is_switched_off_is_a_fault(monkeypatch, value):
    assert doctor.caching().level == "ok"
    monkeypatch.setenv("TILELANG_AUTO_TUNING_DISABLE_CACHE", value)
    assert doctor.caching().level == "warn"
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", value)
    found = doctor.caching()
    assert found.level == "fail" and found.remedy == "`unset TILELANG_DISABLE_CACHE`"


MOUNTS = r"""
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:30 / /shared rw - nfs4 host:/x rw
31 30 0:31 / /shared/local rw - xfs /dev/b rw
32 22 0:32 / /with\040space ro,nosuid - tmpfs tmpfs rw
33 22 0:33 / /covered rw - ext4 /dev/c rw
34 22 0:34 / /covered rw - lustre x rw
35 22 0:35 / /fuse rw shared:1 master:2 - fuse.hf3fs x rw
"""


@pytest.mark.parametrize(
    ("place", "kind", "read_only"),
    [
        ("/", "ext4", False),
        ("/sharedness", "ext4", False),
        ("/shared", "nfs4", False),
        ("/shared/a/b", "nfs4", False),
        ("/shared/local/a", "xfs", False),
        ("/with space/a", "tmpfs", True),
        ("/covered/a", "lustre", False),
        ("/fuse/a", "fuse.hf3fs", False),
    ],
)
def test_the_file_system_of_a_path_is_that_of_the_innermost_mount(
    monkeypatch, tmp_path, place, kind, read_only
):
    (tmp_path / "mountinfo").write_text(MOUNTS.lstrip())
    monkeypatch.setattr(doctor, "MOUNTS", str(tmp_path / "mountinfo"))
    found = doctor.mount_of(place)
    assert (found.kind, found.read_only) == (kind, read_only)


@pytest.mark.parametrize("text", ["", "x", "1 2 3 4 / - ", "a b c d e f - \n"])
def test_a_mount_table_that_tells_nothing_is_an_unknown_file_system(monkeypatch, tmp_path, text):
    (tmp_path / "mountinfo").write_text(text)
    monkeypatch.setattr(doctor, "MOUNTS", str(tmp_path / "mountinfo"))
    assert doctor.mount_of("/") is None
    assert "unknown" in doctor.file_system(tmp_path).detail


@pytest.mark.parametrize(
    ("kind", "level"),
    [("nfs4", "warn"), ("fuse.sshfs", "warn"), ("fuse.fuse-overlayfs", "ok"), ("overlay", "ok")],
)
def test_a_network_file_system_is_warned_of(monkeypatch, tmp_path, kind, level):
    (tmp_path / "mountinfo").write_text(f"1 0 0:1 / / rw - {kind} x rw\n")
    monkeypatch.setattr(doctor, "MOUNTS", str(tmp_path / "mountinfo"))
    found = doctor.file_system(tmp_path)
    assert found.level == level and kind in found.detail


class Room:
    """What statvfs says of a disk with so many bytes and inodes left."""

    def __init__(self, free, inodes=100):
        self.f_bavail, self.f_frsize, self.f_files, self.f_favail = free, 1, 1000, inodes


@pytest.mark.parametrize(
    ("room", "level"),
    [(Room(2**40), "ok"), (Room(2**29), "warn"), (Room(2**20), "fail"), (Room(2**40, 0), "fail")],
)
def test_little_room_is_a_warning_and_none_a_fault(monkeypatch, tmp_path, room, level):
    monkeypatch.setattr(doctor.os, "statvfs", lambda place: room)
    found = doctor.file_system(tmp_path)
    assert found.level == level and (found.remedy is None) == (level == "ok")


def test_a_root_that_others_can_write_is_a_fault(cache_root):
    cache_root.mkdir()
    assert doctor.access(cache_root).level == "ok"
    cache_root.chmod(0o777)
    found = doctor.access(cache_root)
    assert found.level == "fail" and "0777" in found.detail and "chmod" in found.remedy


def test_a_root_that_is_a_file_is_a_fault(cache_root):
    cache_root.write_text("")
    assert "is not a directory" in doctor.access(cache_root).detail


def test_a_read_only_root_works_if_it_has_its_directories_and_breaks_the_import_if_not(
    cache_root, tmp_path, monkeypatch
):
    cache_root.mkdir()
    (tmp_path / "mountinfo").write_text("1 0 0:1 / / ro - ext4 x rw\n")
    monkeypatch.setattr(doctor, "MOUNTS", str(tmp_path / "mountinfo"))
    found = doctor.access(cache_root)
    assert found.level == "fail" and "`import tilelang` fails" in found.detail
    layout.make_skeleton(cache_root, fingerprint.tilelang_version(), fingerprint.platform_name())
    assert doctor.access(cache_root).level == "warn"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_root_that_cannot_be_made_is_a_fault():
    assert doctor.access(Path("/proc/nowhere/cache")).level == "fail"


# --- the machine ---


def test_what_auto_means_here_is_told(monkeypatch):
    assert "`auto` means sm_90a" in doctor.gpu(H200).detail
    assert doctor.gpu(Here()).level == "ok"
    monkeypatch.setenv("TILELANG_DEFAULT_TARGET", "cuda")
    found = doctor.gpu(Here())
    assert found.level == "warn" and "sm_50" in found.detail


def test_a_driver_that_cannot_load_what_nvcc_makes_is_a_fault():
    found = doctor.gpu(Here(Target("sm_90a"), VERSIONS, "13.0.88", "CUDA 12.8"))
    assert found.level == "fail" and "CUDA 12.8" in found.detail and "13.0.88" in found.detail


def at(root):
    return checkup.contents(root)[0]


def test_a_cuda_home_without_nvcc_is_a_fault_since_nothing_else_is_looked_at(
    monkeypatch, tmp_path, cache_root
):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = doctor.compilers(H200, at(cache_root))
    assert found.level == "fail" and str(tmp_path) in found.detail


def test_a_cxx_that_is_no_program_is_a_fault(monkeypatch, cache_root):
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = doctor.compilers(H200, at(cache_root))
    assert found.level == "fail" and "'no-such-compiler'" in found.detail


def test_a_host_without_compilers_and_kernels_is_warned_of(monkeypatch, cache_root):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(toolchain, "nvcc", lambda: None)
    found = doctor.compilers(H200, at(cache_root))
    assert found.level == "warn" and "no nvcc and C++ compiler" in found.detail
    assert "pip install" in found.remedy and "g++" in found.remedy


def test_without_tilelang_that_is_the_finding(monkeypatch):
    for name in ("tilelang_path", "tilelang_version", "versions"):
        getattr(fingerprint, name).cache_clear()
    real = fingerprint.importlib.util.find_spec
    monkeypatch.setattr(
        fingerprint.importlib.util,
        "find_spec",
        lambda name: None if name == "tilelang" else real(name),
    )
    try:
        found = {one.what: one for one in doctor.examine()}
        assert found["TileLang"].level == "fail" and "pip install" in found["TileLang"].remedy
    finally:
        monkeypatch.undo()
        for name in ("tilelang_path", "tilelang_version", "versions"):
            getattr(fingerprint, name).cache_clear()


def test_this_machine_is_known(monkeypatch):
    monkeypatch.setattr(targets, "_driver_capability", lambda: (9, 0))
    assert doctor.here().gpu == Target("sm_90a")
    assert doctor.here().versions == fingerprint.versions()
