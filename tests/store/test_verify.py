"""Verifying roots that are damaged in every way: each damage is one finding of its kind, nothing
that is sound is one, and what is repaired is out of the way and can be brought back.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.conftest import RECORD
from tlcache.store import closures, layout, record, schedules, soundness, trash, verify
from tlcache.store.record import Library

SHARED = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
KERNELS = "0.1.15/linux-x86_64/kernels"


@pytest.fixture
def root(mixed_root, cache_root):
    """Two kernels of 0.1.15, for sm_90a and the CPU, the one's cuda-binary, the other's record."""
    for start in (f"{KERNELS}/7606", f"{KERNELS}/fbd1", "0.1.15/cuda-binaries/3996"):
        (source,) = mixed_root.glob(f"{start}*")
        shutil.copytree(source, cache_root / source.relative_to(mixed_root))
    file_record(cache_root)
    return cache_root


def file_record(root):
    library = next(root.glob(f"{KERNELS}/fbd1*/kernel_lib.so"))
    data = library.read_bytes()
    told = Library("kernel_lib.so", len(data), hashlib.sha256(data).hexdigest())
    entry = os.path.relpath(library.parent, root)
    filed = dataclasses.replace(RECORD, entry=entry, library=told)
    return record.write(root, filed)


def kernel(root):
    return next(root.glob(f"{KERNELS}/7606*"))


def cpu(root):
    return next(root.glob(f"{KERNELS}/fbd1*"))


def cubin(root):
    return next(root.glob("0.1.15/cuda-binaries/3996*"))


def the_record(root):
    return next(layout.records(root))


def found(root, **kwargs):
    return list(verify.plan(root, **kwargs))


def faults(root, **kwargs):
    """What counts, as (kind, severity, name of the thing, what)."""
    return [
        (one.kind, one.severity, os.path.basename(one.path)[:4], one.what)
        for one in found(root, **kwargs)
        if one.severity != "note"
    ]


def only(root, **kwargs):
    (one,) = [one for one in found(root, **kwargs) if one.severity != "note"]
    return one


def repaired(root):
    batch = trash.batch(trash.QUARANTINE)
    return [verify.repair(one, batch) for one in found(root) if one.repairable]


def flip(path, bit=None):
    data = bytearray(path.read_bytes())
    bit = len(data) * 4 if bit is None else bit
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


# --- what is sound ---


def test_a_real_root_of_six_releases_has_no_error_and_its_pickles_are_flagged(mixed):
    tally = verify.Tally()
    notes = found(mixed, tally=tally)
    assert {(one.kind, one.severity) for one in notes} == {("code", "note")}
    told = sorted(f"{one.path.split('/')[-2]} {one.what.split()[0]}" for one in notes)
    assert told == ["autotuner function.pkl"] * 3 + ["kernels prim_func.pkl"] * 3
    assert tally.things == {"kernel": 22, "autotuner": 3, "cuda-binary": 8}
    assert not any(one.repairable for one in notes)


def test_a_sound_root_has_no_findings(root):
    assert found(root) == []


def test_many_threads_find_the_same_as_one(mixed):
    for path in mixed.glob("**/params.*"):
        flip(path)
    assert len(faults(mixed)) > 10 and found(mixed) == found(mixed, threads=8)


@pytest.mark.parametrize("there", [True, False])
def test_a_root_that_is_empty_or_not_there_has_no_findings(cache_root, there):
    if there:
        cache_root.mkdir()
    assert found(cache_root) == []


def test_verifying_does_not_count_as_a_use(root):
    paths = [path for path in root.glob("**/*") if path.is_file()]
    for path in paths:
        os.utime(path, (1_000_000_000, 1_500_000_000))
    assert found(root) == []
    assert {path.stat().st_atime for path in paths} == {1_000_000_000}


# --- flipped bits, in every kind of file ---


@pytest.mark.parametrize(
    ("which", "name"),
    [
        (kernel, "executable.so"), (kernel, "params.json"), (kernel, "device_kernel.cu"),
        (kernel, "host_kernel.cu"), (cpu, "kernel_lib.so"), (cubin, "kernel.cubin"),
    ],
)  # fmt: skip
def test_a_flipped_bit_fails_the_files_checksum(root, which, name):
    flip(which(root) / name)
    one = next(one for one in found(root) if one.kind == "damaged")
    assert one.severity == "error" and one.path == str(which(root))
    by = "metadata.json" if which is cubin else "manifest.json"
    assert one.what.startswith(f"{name} fails its checksum in {by}")
    assert one.repairable


@SHARED
@given(share=st.floats(0, 1, exclude_max=True), which=st.sampled_from(["manifest", "metadata"]))
def test_every_flipped_bit_of_a_manifest_is_found(root, share, which):
    path = next(root.glob(f"**/{'7606' if which == 'manifest' else '3996'}*/{which}.json"))
    before = path.read_bytes()
    try:
        flip(path, int(share * len(before) * 8))
        assert only(root).repairable
    finally:
        path.write_bytes(before)


@SHARED
@given(share=st.floats(0, 1, exclude_max=True))
def test_every_flipped_bit_of_a_record_is_found(root, share):
    path = the_record(root)
    before = path.read_bytes()
    try:
        flip(path, int(share * len(before) * 8))
        one = only(root)
        assert (one.kind, one.severity, one.path) == ("damaged", "error", str(path))
    finally:
        path.write_bytes(before)


def test_a_cubin_of_an_older_release_is_held_to_the_checksum_beside_it(mixed):
    path = next(mixed.glob("0.1.14/cuda-binaries/56aa*.cubin"))
    flip(path, path.stat().st_size * 8 - 1)
    assert only(mixed).what.startswith("fails its checksum in .cubin.sha256")
    flip(path, path.stat().st_size * 8 - 1)
    flip(path.with_name(f"{path.name}.sha256"))
    assert only(mixed).kind == "damaged"
    (moved,) = repaired(mixed)
    assert moved.endswith(path.name) and faults(mixed) == []


# --- cut off, empty, missing, misplaced ---


@pytest.mark.parametrize("share", [0, 1, 63, 64, 0.3, 0.9, -1])
@pytest.mark.parametrize(
    "pattern",
    [
        "0.1.11-x86_64/kernels/7cfe*/executable.so", "b0f7*/kernel_lib.so",
        "0.1.13/cuda-binaries/5cbf*.cubin", "0.1.13/linux-x86_64/autotuner/*/kernel_lib.so",
    ],
)  # fmt: skip
def test_a_binary_without_a_checksum_that_is_cut_off_is_found(mixed, pattern, share):
    path = next(mixed.glob(pattern))
    data = path.read_bytes()
    path.write_bytes(data[: share if isinstance(share, int) else int(len(data) * share)])
    one = only(mixed)
    assert (one.kind, one.severity) == ("damaged", "error")
    if share == 0:
        assert "is empty" in one.what


def test_a_library_that_its_manifest_agrees_with_is_still_read(root):
    """As a file system leaves it that lost a crash: the manifest was made of the damaged file."""
    library = kernel(root) / "executable.so"
    library.write_bytes(library.read_bytes()[:5000])
    remanifest(kernel(root))
    assert only(root).what.startswith("executable.so is damaged: ")
    library.write_bytes(next(root.glob(f"{KERNELS}/fbd1*/kernel_lib.so")).read_bytes())
    data = bytearray(library.read_bytes())
    data[18:20] = (183).to_bytes(2, "little")
    library.write_bytes(data)
    remanifest(kernel(root))
    assert "is for the machine aarch64, not x86_64" in only(root).what


def test_parameters_that_are_wrong_under_a_manifest_that_agrees_are_a_miss_at_each_start(root):
    (kernel(root) / "params.json").write_text('{"nodes": []}')
    remanifest(kernel(root))
    assert only(root).what == (
        "params.json does not hold parameters, so TileLang misses this kernel at each start"
    )


def remanifest(entry, **more):
    files = {
        path.name: {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in entry.iterdir()
        if path.name != "manifest.json"
    }
    (entry / "manifest.json").write_text(json.dumps({"version": 1, "files": {**files, **more}}))


def test_an_entry_of_empty_files_is_one_finding(root):
    for path in kernel(root).iterdir():
        path.write_bytes(b"")
    one = only(root)
    assert one.what.startswith("manifest.json is empty, ") and one.what.endswith(" more")


@pytest.mark.parametrize(
    "name", ["executable.so", "params.json", "manifest.json", "host_kernel.cu", "device_kernel.cu"]
)
def test_a_missing_file_is_found(root, name):
    (kernel(root) / name).unlink()
    one = only(root)
    assert one.kind == "missing" and f"{name} is missing" in one.what


@pytest.mark.parametrize(
    ("name", "what"),
    [("kernel.cubin", "has no binary"), ("metadata.json", "metadata.json is missing")],
)
def test_a_cuda_binary_without_one_of_its_files_is_found(root, name, what):
    (cubin(root) / name).unlink()
    one = only(root)
    assert what in one.what
    assert "it never replaces one that is there" in one.remedy


def test_an_empty_entry_and_an_empty_cuda_binary_are_found(root):
    for path in (kernel(root), cubin(root)):
        shutil.rmtree(path)
        path.mkdir()
    assert [fault[:3] for fault in faults(root)] == [
        ("missing", "error", "3996"),
        ("missing", "error", "7606"),
    ]


@pytest.mark.parametrize("name", ["executable.so", "params.json", "manifest.json"])
def test_a_directory_where_a_file_should_be_is_found(root, name):
    (kernel(root) / name).unlink()
    (kernel(root) / name / "inner").mkdir(parents=True)
    one = only(root)
    assert f"{name} is a directory" in one.what and one.repairable


def test_a_pipe_where_a_file_should_be_does_not_block(root):
    for name in ("executable.so", "manifest.json"):
        (kernel(root) / name).unlink()
        os.mkfifo(kernel(root) / name)
    assert "manifest.json is no file" in only(root).what


@pytest.mark.parametrize("where", [KERNELS, "0.1.15/cuda-binaries", "."])
def test_a_file_where_an_entry_should_be_is_a_miss_at_each_start(root, where):
    (root / where / ("0f" * 32)).write_text("x")
    one = only(root)
    assert (one.kind, one.severity, one.repairable) == ("misplaced", "error", True)


# --- hostile manifests ---


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "..", ".", "", "a/b", "executable.so/", "nul\0", "../x"],
)
def test_a_path_in_a_manifest_is_never_followed(root, name):
    entry = kernel(root)
    remanifest(entry, **{name: {"size": 1, "sha256": "00"}})
    opened = []
    sys.addaudithook(
        lambda event, args: opened.append(str(args[0])) if event == "open" and hooked else None
    )
    hooked = [True]
    one = only(root)
    hooked.clear()
    assert not any("passwd" in path or ".." in path for path in opened)
    assert one.kind == "damaged" and "which is no file of the entry" in one.what
    assert "\0" not in one.what


@pytest.mark.parametrize(
    "files",
    [
        {"x" * 10_000: {"size": 1, "sha256": ""}},
        {"\ud800": {"size": 1, "sha256": ""}},
        {"\x1b[2J": {"size": 1, "sha256": ""}},
        {"executable.so": None},
        {"executable.so": {"size": True, "sha256": 3}},
        {f"file{number}": {} for number in range(5000)},
        [],
        "text",
    ],
)
def test_impossible_names_and_values_in_a_manifest_are_short_printable_findings(root, files):
    entry = kernel(root)
    (entry / "manifest.json").write_text(json.dumps({"version": 1, "files": files}))
    one = only(root)
    assert one.repairable and one.what.isprintable() and len(one.what) < 400


@pytest.mark.parametrize("name", ["manifest.json", "params.json"])
def test_deep_json_is_damage(root, name):
    (kernel(root) / name).write_text("[" * 200_000)
    assert only(root).kind == "damaged"


def test_deep_json_in_a_record_and_in_metadata_is_damage(root):
    the_record(root).write_text("[" * 200_000)
    (cubin(root) / "metadata.json").write_text('{"a":' * 200_000)
    assert [fault[0] for fault in faults(root)] == ["damaged", "damaged"]


# --- links ---


def test_a_link_in_place_of_an_entry_is_not_followed_and_is_moved_as_itself(root, tmp_path):
    outside = tmp_path / "outside"
    os.rename(kernel(root), outside)
    flip(outside / "executable.so")
    link = root / KERNELS / ("76" * 32)
    link.symlink_to(outside)
    one = only(root)
    assert (one.kind, one.severity, one.path) == ("link", "error", str(link))
    (moved,) = repaired(root)
    assert os.path.islink(moved) and (outside / "executable.so").is_file()
    assert found(root) == []


@pytest.mark.parametrize("name", ["executable.so", "manifest.json", "extra"])
def test_a_link_in_an_entry_is_not_followed(root, tmp_path, name):
    path = kernel(root) / name
    target = tmp_path / "outside"
    target.write_bytes(path.read_bytes() if path.exists() else b"x")
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    one = only(root)
    assert one.severity == "error" and f"{name} is a link" in one.what
    assert repaired(root)[0] is not None
    assert target.is_file() and faults(root) == []


def test_a_version_that_is_a_link_is_said_and_left_alone(root, tmp_path):
    os.rename(root / "0.1.15", tmp_path / "moved")
    the_record(root).unlink()
    (root / "0.1.15").symlink_to(tmp_path / "moved")
    one = only(root)
    assert (one.kind, one.severity, one.repairable) == ("link", "warning", False)


# --- who could have written it ---


def exposed(root, path, mode):
    os.chmod(path, mode)
    return only(root)


@pytest.mark.parametrize(
    ("which", "inside"),
    [(kernel, "executable.so"), (kernel, ""), (cubin, "kernel.cubin"), (the_record, "")],
)
def test_what_everybody_can_write_is_an_error_that_only_a_person_can_judge(root, which, inside):
    path = which(root) / inside
    one = exposed(root, path, 0o777)
    assert (one.kind, one.severity, one.repairable) == ("permissions", "error", False)
    assert one.path == str(path) and "can be written by everybody (mode 0777)" in one.what
    assert one.remedy.startswith(f"`chmod -R go-w {path}`")
    os.chmod(path, 0o755)
    assert found(root) == []


def test_what_a_group_can_write_is_a_warning_unless_the_group_is_trusted(root, monkeypatch):
    path = kernel(root)
    os.chown(path, -1, 12345)
    one = exposed(root, path, 0o775)
    assert (one.kind, one.severity) == ("permissions", "warning")
    assert "can be written by group 12345" in one.what
    monkeypatch.setenv("TLCACHE_TRUST", "group")
    assert found(root) == []
    os.chmod(path, 0o777)
    assert only(root).severity == "error"
    monkeypatch.setenv("TLCACHE_TRUST", "any")
    assert found(root) == []


def test_what_belongs_to_somebody_else_is_an_error(root):
    if os.geteuid():
        pytest.skip("only root can give files away")
    path = kernel(root) / "executable.so"
    os.chown(path, 4321, -1)
    one = only(root)
    assert (one.kind, one.severity, one.what) == ("permissions", "error", "belongs to uid 4321")
    assert one.remedy.startswith("`chown -R ")


def test_a_root_that_is_open_as_a_whole_is_one_finding(root):
    for path in (root, *root.glob("**/*")):
        os.chmod(path, 0o777)
    one = only(root)
    assert one.path == str(root) and f"{root} can be written by everybody" in one.what


def test_many_open_entries_in_one_directory_are_one_finding(root):
    for path in (root / KERNELS).iterdir():
        os.chmod(path, 0o777)
    one = only(root)
    assert one.path == str(root / KERNELS) and " and 1 more: can be written by" in one.what


# --- records, schedules, closures ---


def test_a_record_whose_entry_is_gone_is_an_orphan(root):
    shutil.rmtree(cpu(root))
    one = only(root)
    assert (one.kind, one.severity, one.path) == ("orphan", "warning", str(the_record(root)))
    assert "which is gone" in one.what
    repaired(root)
    assert found(root) == [] and not list(layout.records(root))


def test_a_record_of_another_library_is_an_orphan_and_the_entry_stays(root):
    shutil.copy(next(root.glob(f"{KERNELS}/7606*/executable.so")), cpu(root) / "kernel_lib.so")
    remanifest(cpu(root))
    one = only(root)
    assert one.kind == "orphan" and "tells of another library than" in one.what
    repaired(root)
    assert found(root) == [] and cpu(root).is_dir()


def test_the_record_of_an_entry_that_is_put_aside_goes_along(root):
    flip(cpu(root) / "host_kernel.cu")  # which the record says nothing about
    assert [fault[:2] for fault in faults(root)] == [("damaged", "error"), ("orphan", "warning")]
    assert len(repaired(root)) == 2
    assert found(root) == [] and not list(layout.records(root))


def test_a_record_under_another_name_is_misplaced_and_one_of_another_schema_is_left_alone(root):
    path = the_record(root)
    data = json.loads(path.read_text())
    data.pop("checksum")
    os.rename(path, path.with_name("ab" * 32 + ".json"))
    assert only(root).what == "is filed under another key than its own"
    path.with_name("ab" * 32 + ".json").unlink()
    path.write_bytes(record.encode({**data, "schema": 99}))
    (one,) = found(root)
    assert (one.kind, one.severity, one.repairable) == ("unknown", "note", False)
    assert one.what == "is of schema 99, which is not read here"


def test_what_a_killed_writer_left_among_the_records_is_stale_after_an_hour(root):
    path = the_record(root)
    left = path.with_name(f".{path.name}.123.0a1b2c3d.tmp")
    left.write_bytes(b"half")
    assert found(root) == []
    assert only(root, now=time.time() + 3700).kind == "stale"


def test_names_that_nothing_reads_and_links_among_the_records_are_found(root):
    folder = the_record(root).parent
    (folder / "x.json").write_text("{}")
    (folder / "notes").write_text("x")
    (folder / ("cd" * 32 + ".json")).symlink_to(the_record(root))
    kinds = sorted((one.kind, one.severity) for one in found(root))
    assert kinds == [("link", "error"), ("misplaced", "error"), ("unknown", "note")]


TUNED = schedules.Tuned("rms_norm", RECORD.spec, 4.5, {"block_m": 1}, 5.0, "NVIDIA H200")


def test_a_damaged_schedule_is_found_and_one_without_a_record_is_only_said(root):
    schedules.write(root, TUNED)
    assert found(root) == []
    (path,) = root.glob("tlcache/schedules/*/*.json")
    the_record(root).unlink()
    (one,) = found(root)
    assert (one.kind, one.severity) == ("orphan", "note")
    data = path.read_bytes()
    for damage in (data[:-20], b"", b"[]", b"[" * 100_000, data.replace(b"4.5", b"NaN")):
        path.write_bytes(damage)
        assert only(root).kind == "damaged", damage[:40]
    path.write_bytes(data)
    os.rename(path, path.with_name("ab" * 32 + ".json"))
    assert only(root).kind == "misplaced"
    repaired(root)
    assert found(root) == []


def test_a_damaged_closure_is_found_and_one_of_other_sources_is_only_said(root):
    closures.remember(str(root), RECORD.spec.kernel)
    assert found(root) == []
    (path,) = root.glob("tlcache/closures/*.json")
    data = json.loads(path.read_text())
    name = next(iter(data["sources"]))
    sound = path.read_bytes()
    for damage in (
        b"{}", b"", b"null", sound[:100], b"[" * 100_000,
        json.dumps({**data, "digest": "0" * 64}).encode(),
        json.dumps({**data, "sources": 3}).encode(),
        json.dumps({**data, "kernel": "../../etc:passwd"}).encode(),
    ):  # fmt: skip
        path.write_bytes(damage)
        one = only(root)
        assert (one.kind, one.severity) == ("damaged", "error"), damage[:60]
    for other in ({"algorithm": 99}, {"sources": {**data["sources"], name: "1" * 64}}):
        path.write_text(json.dumps({**data, **other}))
        (one,) = found(root)
        assert one.severity == "note" and not one.repairable
    path.write_bytes(b"{}")
    repaired(root)
    assert found(root) == []
    closures.remember(str(root), RECORD.spec.kernel)  # which leaves alone what is there
    assert path.read_bytes() == sound


# --- staging ---


def staged(root, where=f"{KERNELS[:-8]}/.staging", name="7b" * 32 + "_123_0a1b2c3d"):
    path = root / where / name
    path.mkdir(parents=True)
    (path / "executable.so").write_bytes(b"half")
    return path


@pytest.mark.parametrize("where", [None, "0.1.15/.staging/cuda-binaries", "tmp"])
def test_staging_is_stale_after_an_hour_and_a_live_writers_is_none(root, where):
    path = staged(root) if where is None else staged(root, where)
    assert found(root) == []
    old = time.time() - 3700
    os.utime(path / "executable.so", (old, old))
    assert found(root) == []
    os.utime(path, (old, old))
    one = only(root)
    assert (one.kind, one.severity, one.path) == ("stale", "warning", str(path))
    (path / "params.json").write_text("still writing")
    assert found(root) == []
    os.utime(path / "params.json", (old, old))
    os.utime(path, (old, old))
    repaired(root)
    assert found(root) == [] and not path.exists()


# --- tuners' results, and what is unknown ---


@pytest.mark.parametrize("version", ["0.1.13", "0.1.15"])
@pytest.mark.parametrize("name", ["best_config.json", "latency.json", "function.pkl"])
def test_a_damaged_result_of_the_tuner_is_found_without_unpickling(mixed, version, name):
    path = next(mixed.glob(f"{version}/linux-x86_64/autotuner/*/{name}"))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    one = only(mixed)
    assert one.kind == "damaged" and one.what.startswith(f"{name} is ")
    path.unlink()
    assert only(mixed).what == f"{name} is missing"


class Bomb:
    def __reduce__(self):
        return (os.mkdir, (os.environ["BOMB"],))


def test_pickles_are_read_and_never_run(mixed, monkeypatch, tmp_path):
    monkeypatch.setenv("BOMB", str(tmp_path / "went-off"))
    for path in mixed.glob("**/*.pkl"):
        path.write_bytes(pickle.dumps(Bomb()))
    told = found(mixed)
    assert not (tmp_path / "went-off").exists()
    notes = [one for one in told if one.severity == "note"]
    assert len(notes) == 6 and {one.kind for one in notes} == {"code"}
    errors = [one for one in told if one.severity == "error"]
    assert len(errors) == 15
    assert all("params.pkl does not hold parameters as" in one.what for one in errors)


def test_unknown_files_are_said_and_never_touched(root):
    strangers = [
        root / "notes.txt", root / "lost+found", root / "0.1.15/README", root / KERNELS / "x",
        kernel(root) / "extra.txt", cubin(root) / "extra.txt",
    ]  # fmt: skip
    for path in strangers:
        path.write_text("x")
    told = found(root)
    assert len(told) == len(strangers)
    assert {(one.kind, one.severity, one.repairable) for one in told} == {
        ("unknown", "note", False)
    }
    assert repaired(root) == [] and all(path.is_file() for path in strangers)


def test_an_entry_of_a_newer_tilelang_is_held_to_its_own_checksums_alone(root):
    os.rename(root / "0.1.15", root / "0.9.1")
    the_record(root).unlink()
    entry = next((root / "0.9.1").glob("*/kernels/7606*"))
    (entry / "params.json").write_text("another format")
    (entry / "device_kernel.cu").unlink()
    remanifest(entry)
    assert found(root) == []
    flip(entry / "params.json")
    assert only(root).kind == "damaged"


# --- who may not read, and what changes meanwhile ---


def test_what_cannot_be_read_is_said_and_not_moved(root):
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    (kernel(root) / "executable.so").chmod(0)
    cubin(root).chmod(0)
    for path in (root, *root.parents):
        if path != Path("/"):
            os.chmod(path, path.stat().st_mode | 0o055)
    program = (
        "import os, sys, grp, pwd\n"
        "from tlcache.store import pickled, verify\n"
        "os.setgroups([]); os.setegid(65534); os.seteuid(65534)\n"
        "for one in verify.plan(sys.argv[1]):\n"
        "    print(one.kind, one.severity, one.repairable, one.what)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "unreadable error False cannot be read: permission denied",
        "unreadable error False executable.so cannot be read: permission denied",
    ]


def test_what_vanishes_while_it_is_looked_at_is_no_finding(root, monkeypatch):
    real = soundness.judge

    def judge(place):
        shutil.rmtree(place.location)
        return real(place)

    monkeypatch.setattr(soundness, "judge", judge)
    the_record(root).unlink()
    assert found(root) == []


def test_what_is_written_while_it_is_looked_at_is_looked_at_again(root, monkeypatch, mixed_root):
    place_of = str(kernel(root))
    whole = mixed_root / os.path.relpath(place_of, root)
    (kernel(root) / "executable.so").unlink()
    real, calls = soundness.judge, []

    def judge(place):
        verdict = real(place)
        if place.location == place_of and not calls:
            calls.append(verdict)
            shutil.rmtree(place.location)
            shutil.copytree(whole, place.location)
        return verdict

    monkeypatch.setattr(soundness, "judge", judge)
    assert found(root) == [] and calls[0].faults


def test_files_that_come_and_go_are_no_findings(root, mixed_root):
    """A program that removes and publishes entries by rename, as TileLang does."""
    whole = mixed_root / os.path.relpath(kernel(root), root)
    the_record(root).unlink()
    stop = threading.Event()

    def churn():
        number = 0
        while not stop.is_set():
            number += 1
            staging = root / f"{KERNELS[:-8]}/.staging/{number}"
            shutil.copytree(whole, staging)
            place = root / KERNELS / f"{number % 3:064x}"
            gone = root / f"{KERNELS[:-8]}/.staging/gone{number}"
            if place.exists():
                os.rename(place, gone)
                shutil.rmtree(gone)
            os.rename(staging, place)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(40):
            assert faults(root) == []
    finally:
        stop.set()
        thread.join()


def test_what_was_healed_since_it_was_found_is_left_alone(root, mixed_root):
    flip(kernel(root) / "executable.so")
    one = only(root)
    place = kernel(root)
    shutil.move(place, root / "aside")
    shutil.copytree(mixed_root / os.path.relpath(place, root), place)
    assert verify.repair(one, trash.batch(trash.QUARANTINE)) is None
    assert place.is_dir()
    shutil.rmtree(place)
    assert verify.repair(one, trash.batch(trash.QUARANTINE)) is None


# --- repair ---


def test_a_corrupt_cuda_binary_is_moved_out_of_the_way_and_can_be_brought_back(root):
    flip(cubin(root) / "kernel.cubin")
    place = cubin(root)
    (moved,) = repaired(root)
    assert not place.exists() and place.parent.is_dir() and found(root) == []
    os.rename(moved, place)
    assert only(root).path == str(place)


def test_roots_below_a_base_have_quarantines_of_their_own(root, tmp_path):
    base = tmp_path / "base"
    for name in ("one", "two"):
        shutil.copytree(root, base / name)
    flip(kernel(base / "two") / "params.json")
    one = only(base)
    assert one.root == str(base / "two")
    (moved,) = repaired(base)
    assert moved.startswith(str(base / "two/tlcache/quarantine/"))
    assert found(base) == []


# --- any damage at all ---

DAMAGE = st.one_of(
    st.tuples(st.just("write"), st.binary(max_size=300)),
    st.tuples(st.just("cut"), st.floats(0, 1)),
    st.tuples(st.just("flip"), st.floats(0, 1, exclude_max=True)),
    st.tuples(st.just("json"), st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(
            st.sampled_from(["files", "version", "size", "sha256", "nodes", "root_index", "data",
                             "executable.so", "params.json", "schema", "format"]) | st.text(),
            inner),
        max_leaves=20)),
    st.tuples(st.sampled_from(["unlink", "directory", "link", "pipe", "loop"]), st.none()),
)  # fmt: skip


@settings(SHARED, max_examples=100)
@given(damages=st.lists(st.tuples(st.integers(0, 200), DAMAGE), min_size=1, max_size=4))
def test_no_damage_makes_verifying_fail_and_after_a_repair_nothing_is_left(
    mixed, mixed_root, damages
):
    shutil.rmtree(mixed)
    keep = ("0.1.14", "0.1.11-x86_64", "autotuner")
    for name in keep:
        shutil.copytree(mixed_root / name, mixed / name)
    for start in (f"{KERNELS}/7606", f"{KERNELS}/fbd1", "0.1.15/cuda-binaries/3996"):
        (source,) = mixed_root.glob(f"{start}*")
        shutil.copytree(source, mixed / source.relative_to(mixed_root))
    file_record(mixed)
    schedules.write(mixed, TUNED)
    paths = sorted(path for path in mixed.glob("**/*") if path.is_file())
    for number, (how, value) in damages:
        damage(paths[number % len(paths)], how, value)
    assert {one.kind for one in found(mixed)} <= verify.KINDS.keys()
    repaired(mixed)
    assert faults(mixed) == []


def damage(path, how, value):
    if not path.is_file() or path.is_symlink():
        return
    data = path.read_bytes()
    if how == "write":
        path.write_bytes(value)
    elif how == "cut":
        path.write_bytes(data[: int(len(data) * value)])
    elif how == "flip" and data:
        flip(path, int(value * len(data) * 8))
    elif how == "json":
        path.write_text(json.dumps(value))
    elif how != "flip":
        path.unlink()
        if how == "directory":
            path.mkdir()
        elif how == "link":
            path.symlink_to("/etc/passwd")
        elif how == "loop":
            path.symlink_to(path.name)
        elif how == "pipe":
            os.mkfifo(path)
