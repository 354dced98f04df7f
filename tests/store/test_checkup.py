"""What may be wrong with a root, on the real entries of six TileLang releases and on records."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tlcache import doctor
from tlcache.spec import KernelSpec
from tlcache.store import checkup, layout, record
from tlcache.store.checkup import Here
from tlcache.targets import Target
from tlcache.warm import toolchain

VERSIONS = {"tilelang": "0.1.15", "tvm_ffi": "0.1.12", "platform": "linux-x86_64"}
HERE = Here(None, VERSIONS, "13.0.88", None)
H200 = Here(Target("sm_90a"), VERSIONS, "13.0.88", "CUDA 13.0")


@pytest.fixture
def recorded(filed, cache_root):
    """A root with one record and its library."""
    record.write(filed.root, filed.record)
    return filed


def find(check, root, here=HERE):
    (at, *_) = checkup.contents(root)
    return check(at, here)


def kernel(root, start):
    (place,) = [one for one in layout.places(root) if one.key.startswith(start)]
    return place.path


@pytest.mark.parametrize("check", checkup.CHECKS, ids=lambda check: check.__name__)
def test_an_empty_root_and_one_that_is_not_there_are_sound(check, tmp_path, cache_root):
    assert find(check, tmp_path).level == "ok"
    assert find(check, tmp_path / "nowhere").level == "ok"


@pytest.mark.parametrize("check", checkup.CHECKS, ids=lambda check: check.__name__)
def test_a_root_with_one_kernel_of_this_environment_is_sound(check, recorded):
    found = find(check, recorded.root)
    assert (found.level, found.remedy) == ("ok", None), found


def test_a_kernel_for_plain_sm_90_is_never_hit_by_auto_on_hopper(mixed):
    found = find(checkup.unreachable, mixed, H200)
    assert found.level == "warn"
    assert "2 kernels for sm_90: this GPU asks for sm_90a" in found.detail
    assert "`tlcache prune --target sm_90` frees" in found.remedy
    assert "warm with `--target sm_90a`" in found.remedy
    without = find(checkup.unreachable, mixed)
    assert "2 kernels for sm_90: a GPU of this family asks for sm_90a" in without.detail


def test_sm_50_is_what_cuda_means_without_a_gpu_and_nothing_asks_for_it(recorded):
    spec = recorded.record.spec
    spec = KernelSpec(spec.kernel, spec.workload, spec.schedule, Target("sm_50"))
    record.write(recorded.root, recorded.but(spec=spec))
    found = find(checkup.unreachable, recorded.root)
    assert "1 kernel for sm_50" in found.detail and "where no GPU is visible" in found.detail
    assert found.remedy.startswith("`tlcache prune --target sm_50`")


def test_kernels_for_other_gpus_are_told_and_are_no_fault(mixed):
    for start in ("a80a", "75e7", "f758"):  # for sm_90, and for two architectures
        shutil.rmtree(kernel(mixed, start))
    found = find(checkup.unreachable, mixed, H200)
    assert found.level == "ok" and "sm_80 4" in found.detail and "sm_100a 1" in found.detail


def test_other_versions_than_the_installed_one_are_counted_with_their_bytes(mixed):
    found = find(checkup.versions, mixed)
    assert found.level == "warn" and found.remedy == "`tlcache prune --tilelang '!=0.1.15'`"
    assert "13 kernels" in found.detail and "0.1.11 3 · 0.1.13 3 · 0.1.14 3" in found.detail
    assert "0.1.8 or earlier 4" in found.detail


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"tvm_ffi": "0.1.11"}, "tvm-ffi 0.1.11 1"), ({"tilelang": "0.1.14"}, "TileLang 0.1.14 1")],
)
def test_records_of_other_versions_are_told_though_their_entries_are_of_this_one(
    recorded, changes, told
):
    record.write(recorded.root, recorded.but(versions={**VERSIONS, **changes}))
    found = find(checkup.versions, recorded.root)
    assert found.level == "warn" and told in found.detail


def test_a_root_for_another_deployment_is_not_compared_with_the_installed_versions(mixed):
    base = mixed.parent / "base"
    shutil.copytree(mixed, base / "tl0.1.14-aaaaaaaa")
    _, nested = checkup.contents(base)
    assert checkup.versions(nested, HERE).level == "ok"
    assert checkup.unreachable(nested, HERE).level == "warn"


def test_code_of_two_toolkits_under_one_root_is_told_with_the_fewest(mixed):
    path = kernel(mixed, "7606") / "executable.so"
    data = path.read_bytes()
    assert b"V13.0.88" in data
    path.write_bytes(data.replace(b"V13.0.88", b"V12.8.93"))
    found = find(checkup.toolkits, mixed)
    assert found.level == "warn" and "12.8.93 1" in found.detail
    assert "`tlcache prune --toolkit 12.8.93`" in found.remedy and "tlcache env" in found.remedy


def test_an_nvcc_other_than_the_one_that_compiled_the_root_is_told(mixed):
    assert find(checkup.toolkits, mixed).level == "ok"
    found = find(checkup.toolkits, mixed, Here(None, VERSIONS, "13.2.1", None))
    assert found.level == "warn" and "13.0.88, and 13.2.1 is installed" in found.detail


def test_a_kernel_that_is_there_by_two_keys_is_a_duplicate(mixed):
    assert find(checkup.duplicates, mixed).level == "ok"
    one = kernel(mixed, "7606")
    shutil.copytree(one, one.with_name("c5" * 32))
    found = find(checkup.duplicates, mixed)
    assert found.level == "warn" and "1 kernel is there again" in found.detail
    assert "out_idx=[2]" in found.remedy


def test_a_kernel_of_a_newer_cuda_than_the_driver_knows_cannot_be_loaded(mixed):
    assert find(checkup.driver, mixed, H200).level == "ok"
    found = find(checkup.driver, mixed, Here(Target("sm_90a"), VERSIONS, None, "CUDA 12.8"))
    assert found.level == "fail" and "13.0.88" in found.detail and "CUDA 12.8" in found.detail


def test_a_host_without_compilers_that_has_its_kernels_is_runtime_only_and_sound(
    monkeypatch, filed, cache_root
):
    monkeypatch.setattr(toolchain, "nvcc", lambda: None)
    spec = filed.record.spec
    spec = KernelSpec(spec.kernel, spec.workload, spec.schedule, Target("sm_90a"))
    record.write(filed.root, filed.but(spec=spec))
    found = doctor.compilers(H200, checkup.contents(filed.root)[0])
    assert found.level == "ok" and "runtime-only host. 1 kernel for sm_90a" in found.detail


# --- damage ---


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("start", ["3996", "56aa"])  # a directory of 0.1.15, a file of 0.1.14
def test_a_cubin_that_fails_its_checksum_is_told_since_tilelang_never_replaces_it(mixed, start):
    assert find(checkup.damaged, mixed).level == "ok"
    place = kernel(mixed, start)
    flip(place / "kernel.cubin" if place.is_dir() else place)
    found = find(checkup.damaged, mixed)
    assert found.level == "fail" and found.remedy == "`tlcache verify --repair`"
    assert found.detail.startswith("1 cubin in cuda-binaries fails its checksum")


def test_a_cubin_without_its_metadata_is_damaged(mixed):
    (kernel(mixed, "3996") / "metadata.json").unlink()
    assert find(checkup.damaged, mixed).level == "fail"


def test_a_damaged_record_and_a_lost_library_are_told_each(recorded):
    recorded.library.unlink()
    assert "1 record points at a library" in find(checkup.damaged, recorded.root).detail
    flip(next(layout.records(recorded.root)))
    assert "1 record fails its own checksum" in find(checkup.damaged, recorded.root).detail


def test_a_library_that_others_can_write_is_told_with_the_command_that_helps(recorded):
    recorded.library.chmod(0o666)
    found = find(checkup.untrusted, recorded.root)
    assert found.level == "fail" and "1 recorded kernel cannot be restored" in found.detail
    assert "chmod" in found.remedy


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"entry": 1},
        {"entry": "a", "library": {}},
        {"entry": "a\0", "library": {"name": "b"}},
        {"entry": "../..", "library": {"name": "x", "size": "1"}},
        {"versions": 7},
    ],
)
def test_a_record_of_another_schema_is_a_finding_at_most(cache_root, data):
    path = Path(layout.record_path(cache_root, "ab" * 32))
    path.parent.mkdir(parents=True)
    path.write_bytes(record.encode({"schema": 99, **data}))
    (at,) = checkup.contents(cache_root)
    assert all(check(at, H200).detail for check in checkup.CHECKS)
