"""What a host can load: the rest of an archive is left, and said."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import replace

import pytest

from tlcache import fingerprint
from tlcache.errors import TargetError
from tlcache.store import calls, layout, record, verify
from tlcache.store.archive import choosing, compatible, receiving, sending
from tlcache.store.archive.compatible import Host


@pytest.fixture
def here() -> Host:
    """A host that has the TileLang of the archive's records, and no GPU."""
    return Host("linux-x86_64", "0.1.15", fingerprint.tvm_ffi_version(), (2, 36), ())


@pytest.fixture
def imported(taken, archive, cache_root):
    """Import for some host: the kernels that landed, and what was left, with reasons."""

    def imported(host: Host):
        done = taken(archive, here=host)
        found = {os.path.relpath(p.location, cache_root): p for p in layout.entries(cache_root)}
        assert {one.severity for one in verify.plan(cache_root)} <= {"note"}
        return found, done.published.left

    return imported


def test_other_tilelangs_are_left(imported, here):
    found, left = imported(here)
    assert {place.tilelang for place in found.values()} == {"0.1.15"}
    assert "of TileLang 0.1.14, not 0.1.15" in left.values()
    assert "of TileLang 0.1.8 or earlier, not 0.1.15" in left.values()


def test_without_a_tilelang_and_a_gpu_all_that_is_known_to_load_is_taken(imported, here, source):
    found, left = imported(replace(here, tilelang=None, glibc=None))
    assert len(found) == sum(1 for _ in layout.entries(source))
    assert left == {}


def test_kernels_for_other_gpus_are_left(imported, here):
    found, left = imported(replace(here, targets=("sm80",)))
    assert "for sm_90a, not sm80" in left.values()
    reasons = {left.get(name) for name in left if "/kernels/" in name}
    assert all("sm_90" in why or "TileLang" in why for why in reasons if why)
    assert all("tlcache" not in name for name in found)


def test_records_go_with_the_kernels_that_are_left(imported, here, cache_root):
    imported(replace(here, targets=("sm80",)))
    assert not list(layout.records(cache_root))


def test_a_gpus_whole_family_is_taken(imported, here, source):
    found, _ = imported(replace(here, tilelang=None, targets=("sm90",)))
    recorded = {record.read(source, path.stem).entry for path in layout.records(source)}
    assert recorded <= set(found)


def test_another_platform_is_left_where_it_would_be_refused(taken, forgery, here, cache_root):
    above = f"0.1.15/linux-aarch64/kernels/{'ab' * 32}"
    library = b"\x7fELF\x02\x01" + bytes(12) + (183).to_bytes(2, "little") + bytes(100)
    forgery.add(f"{above}/kernel_lib.so", library)
    forgery.add(f"{above}/params.json", b"[]")
    import hashlib
    import json

    files = {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in (("kernel_lib.so", library), ("params.json", b"[]"))
    }
    manifest = json.dumps({"version": 1, "files": files}).encode()
    forgery.add(f"{above}/manifest.json", manifest)
    left = taken(forgery.pack(), here=here).published.left
    assert left[above] == "for linux-aarch64, not linux-x86_64"
    assert not (cache_root / "0.1.15" / "linux-aarch64").exists()


def test_records_and_calls_of_another_tvm_ffi_are_left_and_their_kernels_taken(
    imported, here, cache_root
):
    found, left = imported(replace(here, tvm_ffi="0.0.1"))
    assert found
    assert not list(layout.records(cache_root))
    assert calls.uses(cache_root) == {}
    told = f"for tvm-ffi {fingerprint.tvm_ffi_version()}, not 0.0.1"
    assert told in left.values()


def test_the_calls_of_a_kernel_that_is_left_are_left_with_it(imported, here, cache_root):
    found, _ = imported(here)  # which has not the TileLang of one of the two
    (entry,) = calls.uses(cache_root)
    assert found[entry].tilelang == "0.1.15"


def test_libraries_of_a_newer_glibc_are_left(imported, here):
    found, left = imported(replace(here, glibc=(2, 1)))
    assert any(why.startswith("for glibc 2.") for why in left.values())
    assert not [name for name in found if name in left]


def test_the_glibc_that_a_library_needs_is_what_readelf_says(tmp_path):
    if shutil.which("gcc") is None or shutil.which("readelf") is None:
        pytest.skip("there is no gcc here")
    source, library = tmp_path / "x.c", tmp_path / "x.so"
    source.write_text("#include <math.h>\ndouble f(double x) { return exp(x); }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-lm"], check=True)
    told = subprocess.run(["readelf", "-V", library], capture_output=True, text=True, check=True)
    names = {word for word in told.stdout.split() if word.startswith("GLIBC_2.")}
    needed = max(tuple(map(int, name[6:].split(".")[:2])) for name in names)
    assert compatible.glibc_needed(library.read_bytes()) == needed
    ctypes.CDLL(str(library))


@pytest.mark.parametrize("data", [b"", b"\x7fELF", bytes(100), b"\0GLIBC_9.9\0"])
def test_what_is_no_library_asks_for_no_glibc(data):
    assert compatible.glibc_needed(data) is None


def test_this_host_is_what_is_installed_here():
    here = compatible.host(["sm90"])
    assert here.platform == fingerprint.platform_name()
    assert here.tilelang == fingerprint.tilelang_version().replace("+", "_")
    assert here.targets == ("sm90",)
    assert here.glibc is None or here.glibc > (2, 0)


def test_a_target_that_is_unknown_is_wrong_usage():
    with pytest.raises(TargetError):
        compatible.host(["sm9000000"])


def test_what_is_there_already_is_not_judged(taken, archive, source, cache_root, here):
    shutil.copytree(source, cache_root)
    done = taken(archive, here=replace(here, targets=("sm80",)))
    assert done.published.left == {}
    assert done.published.new == {}


def test_an_archive_of_one_gpu_is_taken_whole_by_a_host_that_has_it(source, tmp_path, here):
    path = tmp_path / "some.tar.zst"
    keys = [path.stem for path in layout.records(source)]
    sending.send(choosing.by_keys(str(source), keys), str(path))
    root = tmp_path / "root"
    done = receiving.receive(str(root), [str(path)], here=replace(here, targets=("h100",)))
    assert not [name for name in done.published.left if "/kernels/" in name]
    assert done.published.new["record"] == len(keys)
