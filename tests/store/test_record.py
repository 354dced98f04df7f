"""Records: what is read back is what was written, or a miss; never an error, never half."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tlcache.errors import CacheRootError, SpecError
from tlcache.spec import KernelSpec
from tlcache.store import layout, record
from tlcache.store.record import Dynamic, Launch, Library, Param, Record
from tlcache.targets import Target

SHARED = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


FAULTS = (ValueError, KeyError, TypeError, SpecError)  # what `from_json` says that it raises


@pytest.fixture
def whole(filed):
    """The bytes of a record's file."""
    return record.write(filed.root, filed.record).read_bytes()


def sound(found: Record, root: Path) -> None:
    """Check everything that whoever gets a record relies on."""
    assert Record.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found
    for text in (found.action_key, found.entry, found.source_digest, found.created):
        assert isinstance(text, str)
    assert found.spec.target.kind
    place = os.path.normpath(os.path.join(root, found.entry, found.library.name))
    assert place.startswith(os.path.normpath(root) + os.sep)
    assert "\0" not in place
    assert type(found.library.size) is int
    assert found.library.size >= 0
    assert type(found.compile_seconds) is float
    assert all(isinstance(item, str) for pair in found.versions.items() for item in pair)
    for name, value in found.toolkit.items():
        assert isinstance(name, str)
        assert value is None or isinstance(value, str)
    for param in found.launch.params:
        assert all(type(d) is str or (type(d) is int and d >= 0) for d in param.shape)
    for index in found.launch.outputs:
        assert found.launch.params[index]
    for dynamic in found.launch.dynamic:
        assert type(dynamic.axis) is int
        assert type(found.launch.params[dynamic.param].shape[dynamic.axis]) is str
    path = record.sound_library(root, found)
    assert path is None or os.path.normpath(path) == place


# --- round trip ---


def test_a_record_that_is_written_is_read_back(filed):
    path = record.write(filed.root, filed.record)
    assert record.read(filed.root, filed.record.action_key) == filed.record
    assert path == filed.root / "tlcache/records/c5" / ("c5" * 32 + ".json")
    assert path == Path(layout.record_path(filed.root, filed.record.action_key))
    assert os.listdir(path.parent) == [path.name]
    assert json.loads(path.read_bytes())["entry"] == filed.record.entry


def test_a_record_that_is_written_again_replaces_the_old_one(filed):
    record.write(filed.root, filed.record)
    newer = filed.but(compile_seconds=9.0)
    path = record.write(filed.root, newer)
    assert record.read(filed.root, newer.action_key) == newer
    assert os.listdir(path.parent) == [path.name]


def test_a_root_is_named_by_a_text_or_a_path_and_may_be_relative(filed, monkeypatch):
    monkeypatch.chdir(filed.root.parent)
    record.write("root", filed.record)
    assert record.read("root", filed.record.action_key) == filed.record
    assert record.read(str(filed.root), filed.record.action_key) == filed.record
    assert record.sound_library("root", filed.record) is not None


@pytest.mark.parametrize("root", ["absent", "absent/deeper", "file", "file/deeper"])
def test_a_record_that_is_not_there_is_a_miss_without_a_warning(tmp_path, root, caplog):
    (tmp_path / "file").write_text("")
    assert record.read(tmp_path / root, "c5" * 32) is None
    assert caplog.records == []


TEXTS = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)
NAMES = st.text("abcdefgh_0", min_size=1, max_size=8)
PARAMS = st.builds(
    Param, TEXTS, TEXTS, st.lists(st.integers(0, 2**40) | NAMES, min_size=1, max_size=3).map(tuple)
)


@st.composite
def launches(draw):
    params = tuple(draw(st.lists(PARAMS, min_size=1, max_size=4)))
    axes: dict[str, tuple[int, int]] = {}
    for index, param in enumerate(params):
        for axis, dim in enumerate(param.shape):
            if isinstance(dim, str):
                axes.setdefault(dim, (index, axis))
    dynamic = [Dynamic(name, draw(TEXTS), *at) for name, at in axes.items()]
    outputs = draw(st.lists(st.integers(0, len(params) - 1), max_size=2))
    return Launch(draw(TEXTS), draw(TEXTS), params, tuple(outputs), tuple(dynamic))


RECORDS = st.builds(
    Record,
    action_key=TEXTS,
    spec=st.builds(
        KernelSpec,
        TEXTS,
        st.dictionaries(TEXTS, st.integers() | TEXTS, max_size=2),
        st.dictionaries(TEXTS, st.integers() | TEXTS, max_size=2),
        st.sampled_from(["sm_90a", "cpu", '{"kind":"llvm"}']).map(Target),
    ),
    entry=st.lists(NAMES, min_size=1, max_size=3).map("/".join),
    library=st.builds(Library, NAMES, st.integers(0, 2**40), TEXTS),
    launch=launches(),
    versions=st.dictionaries(TEXTS, TEXTS, max_size=3),
    toolkit=st.dictionaries(TEXTS, st.none() | TEXTS, max_size=3),
    source_digest=TEXTS,
    compile_seconds=st.floats(0, 1e6),
    created=TEXTS,
)


@settings(max_examples=60, deadline=None)
@given(RECORDS)
def test_any_sound_record_survives_its_json(made):
    assert Record.from_json(json.loads(json.dumps(made.to_json(), indent=1))) == made


# --- damage ---


def test_a_record_that_is_truncated_is_a_miss(filed, whole, caplog):
    path = Path(layout.record_path(filed.root, filed.record.action_key))
    for length in range(0, len(whole.rstrip()), 5):
        path.write_bytes(whole[:length])
        assert record.read(filed.root, filed.record.action_key) is None, length
    assert {entry.levelno for entry in caplog.records} == {logging.WARNING}
    assert "is damaged" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\0" * 512,
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b"{}",
        b'"record"',
        b"1" * 5000,
        b"[" * 100_000,
        b'{"schema":' * 50_000,
        b"NaN",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_a_file_that_holds_no_record_is_a_miss(filed, text):
    record.write(filed.root, filed.record).write_bytes(text)
    assert record.read(filed.root, filed.record.action_key) is None


@SHARED
@given(st.data())
def test_a_record_with_damaged_bytes_is_a_miss_or_sound(filed, whole, data):
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 8)))
    patch = data.draw(st.binary(max_size=8) | st.sampled_from([b"1e999", b"NaN", b'"\\ud800"']))
    found = record.parse(whole[:start] + patch + whole[end:], "x.json")
    if found is not None:
        sound(found, filed.root)


@SHARED
@given(st.integers(0), st.integers(0, 7))
def test_a_record_with_a_flipped_bit_is_a_miss_or_says_the_same(filed, whole, at, bit):
    damaged = bytearray(whole)
    damaged[at % len(whole)] ^= 1 << bit
    assert record.parse(bytes(damaged), "x.json") in (None, filed.record)


def test_a_record_whose_rows_have_become_longer_by_a_flipped_bit_is_a_miss(filed, whole):
    """A kernel for rows of 64 elements, called with rows of 65, would write past its output."""
    damaged = bytearray(whole)
    damaged[whole.rindex(b"64\n") + 1] ^= 1
    assert record.parse(bytes(damaged), "x.json") is None


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1])
    | st.floats()
    | st.text(st.characters(), max_size=6)
    | st.sampled_from(["..", "/", "a/b", "\ud800", "\0", "12"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def places(value, path=()):
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def either(data, root):
    """Read JSON as a record's: it is sound, or one of the faults that are documented."""
    try:
        found = Record.from_json(data)
    except FAULTS:
        return
    sound(found, root)


@settings(SHARED, max_examples=150)
@given(st.data())
def test_a_record_with_any_value_anywhere_is_a_miss_or_sound(filed, whole, data):
    original = json.loads(whole)
    path = data.draw(st.sampled_from(list(places(original))))
    damaged = replaced(original, path, data.draw(JSON))
    either(damaged, filed.root)
    if isinstance(damaged, dict):
        record.parse(record.encode(damaged), "x.json")


@SHARED
@given(st.data())
def test_a_record_that_lacks_anything_is_a_miss_or_sound(filed, whole, data):
    original = json.loads(whole)
    path = data.draw(st.sampled_from([path for path in places(original) if path]))
    parent = original
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    either(original, filed.root)
    record.parse(record.encode(original), "x.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), 2),
        (("schema",), "1"),
        (("schema",), True),
        (("action_key",), None),
        (("spec", "target"), "{m_90a"),
        (("spec", "workload"), {"N": float("nan")}),
        (("entry",), ["a"]),
        (("entry",), "\ud800"),
        (("library", "name"), 5),
        (("library", "name"), "\ud800.so"),
        (("library", "size"), float("inf")),
        (("library", "size"), float("nan")),
        (("library", "size"), -1),
        (("library", "size"), 12.5),
        (("library", "size"), "12"),
        (("library", "sha256"), None),
        (("launch", "params"), {}),
        (("launch", "params", 0, "shape"), "rows"),
        (("launch", "params", 0, "shape"), ["rows", -64]),
        (("launch", "params", 0, "shape"), ["rows", 64.0]),
        (("launch", "params", 0, "shape"), ["rows", True]),
        (("launch", "outputs"), [3]),
        (("launch", "outputs"), [-1]),
        (("launch", "outputs"), [True]),
        (("launch", "dynamic", 0, "axis"), 2),
        (("launch", "dynamic", 0, "axis"), float("inf")),
        (("launch", "dynamic", 0, "axis"), 0.5),
        (("launch", "dynamic", 0, "axis"), 1),
        (("launch", "dynamic", 0, "param"), 9),
        (("versions",), {"tilelang": 5}),
        (("versions",), [["tilelang", "0.1.15"]]),
        (("toolkit",), {"nvcc": ["13.0"]}),
        (("compile_seconds",), 10**400),
        (("compile_seconds",), float("nan")),
        (("compile_seconds",), float("inf")),
        (("compile_seconds",), "1.5"),
        (("created",), 0),
    ],
    ids=lambda part: repr(part)[:40],
)
def test_a_record_with_an_impossible_value_is_a_miss(filed, whole, path, value, caplog):
    damaged = replaced(json.loads(whole), path, value)
    assert record.parse(record.encode(damaged), "x.json") is None
    assert "is damaged" in caplog.text
    with pytest.raises(FAULTS):
        Record.from_json(damaged)


@pytest.mark.parametrize(
    "entry", ["../../etc/passwd", "/etc", "..", "a/..", "a/../../b", "a/b/..", "\0", "a\0b"]
)
def test_a_record_whose_entry_is_not_below_the_root_is_refused(filed, entry):
    record.write(filed.root, filed.but(entry=entry))
    assert record.read(filed.root, filed.record.action_key) is None


@pytest.mark.parametrize(
    "name", ["../kernel_lib.so", "sub/kernel_lib.so", "/lib/libc.so.6", "..", ".", "", "a\0.so"]
)
def test_a_record_whose_librarys_name_is_a_path_is_refused(filed, name):
    record.write(filed.root, filed.but(library=filed.record.library._replace(name=name)))
    assert record.read(filed.root, filed.record.action_key) is None


def test_a_record_that_is_filed_under_another_key_is_ignored(filed, caplog):
    other = Path(layout.record_path(filed.root, "ab" * 32))
    other.parent.mkdir(parents=True)
    record.write(filed.root, filed.record).rename(other)
    assert record.read(filed.root, "ab" * 32) is None
    assert "filed under another key" in caplog.text
    assert record.read(filed.root, filed.record.action_key) is None


def test_a_record_that_cannot_be_read_is_a_miss_with_a_warning(filed, caplog):
    path = record.write(filed.root, filed.record)
    path.unlink()
    path.mkdir()
    assert record.read(filed.root, filed.record.action_key) is None
    assert "cannot be read" in caplog.text


# --- libraries ---


def test_a_library_that_is_what_its_record_says_is_handed_out(filed):
    assert record.sound_library(filed.root, filed.record) == str(filed.library)


def test_a_library_with_a_flipped_byte_is_not_handed_out(filed, caplog):
    whole = filed.library.read_bytes()
    for at in (0, len(whole) // 2, len(whole) - 1):
        filed.library.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert record.sound_library(filed.root, filed.record) is None
    assert caplog.text.count("fails its record's checksum") == 3


def test_a_library_of_another_size_is_not_handed_out(filed, caplog):
    whole = filed.library.read_bytes()
    for changed in (b"", whole[:-1], whole + b"\0"):
        filed.library.write_bytes(changed)
        assert record.sound_library(filed.root, filed.record) is None
    assert caplog.text.count("has another size") == 3


def test_a_library_that_is_gone_is_a_miss_without_a_warning(filed, caplog):
    filed.library.unlink()
    assert record.sound_library(filed.root, filed.record) is None
    filed.library.parent.rmdir()
    assert record.sound_library(filed.root, filed.record) is None
    assert caplog.records == []


def test_a_library_that_cannot_be_read_is_a_miss_with_a_warning(filed, caplog):
    filed.library.unlink()
    filed.library.mkdir()
    assert record.sound_library(filed.root, filed.record) is None
    assert "cannot be read" in caplog.text


# --- writing ---

WRITER = """
import sys
from dataclasses import replace
from tlcache.store import record
made = record.parse(sys.stdin.buffer.read(), "x.json")
for count in range(10**9):
    for key in ("c5" * 32, "c6" * 32):
        changes = {"compile_seconds": float(count), "created": "x" * (count % 3000)}
        record.write(sys.argv[1], replace(made, action_key=key, **changes))
    if not count:
        print("writing", flush=True)
"""


def test_a_writer_that_is_killed_leaves_whole_records_only(filed, whole):
    rng = random.Random(7)
    for round in range(1, 7):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(filed.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as writer:
            writer.stdin.write(whole)
            writer.stdin.close()
            assert writer.stdout.readline() == b"writing\n"
            end = time.perf_counter() + rng.uniform(0.001, 0.06)
            while time.perf_counter() < end:  # a reader sees the old record or the new
                assert record.read(filed.root, "c5" * 32) is not None
            writer.send_signal(signal.SIGKILL)
        for key in ("c5" * 32, "c6" * 32):
            assert record.read(filed.root, key).action_key == key
        left = [path for path in (filed.root / "tlcache").rglob("*") if path.is_file()]
        filed_ones = [path for path in left if path.suffix == ".json"]
        stray = [path for path in left if path not in filed_ones]
        assert list(layout.records(filed.root)) == sorted(filed_ones)
        assert len(stray) <= round
        assert all(path.name.startswith(".") and path.suffix == ".tmp" for path in stray)


def test_writers_of_one_key_do_not_disturb_each_other(filed, whole):
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER.replace("10**9", "60"), str(filed.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        for _ in range(3)
    ]
    for writer in writers:
        writer.stdin.write(whole)
        writer.stdin.close()
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert record.read(filed.root, "c5" * 32).compile_seconds == 59
    assert len(os.listdir(filed.root / "tlcache/records/c5")) == 1


def filled(place):
    """Leave no room on a small file system."""
    filler = place / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 512):
                pass
        except OSError:
            return filler


def test_a_disk_that_is_full_is_said_and_the_old_record_stays(filed, mounted):
    root = mounted("size=64k")
    path = record.write(root, filed.record)
    filler = filled(root)
    newer = filed.but(compile_seconds=9.0)
    with pytest.raises(CacheRootError, match=f"the disk of the cache root {root} is full") as full:
        record.write(root, newer)
    assert f"df -h {root}" in full.value.hint
    with pytest.raises(CacheRootError, match="is full"):
        record.write(root, filed.but(action_key="ab" * 32))
    assert record.read(root, filed.record.action_key) == filed.record
    assert record.read(root, "ab" * 32) is None
    assert os.listdir(path.parent) == [path.name]
    filler.unlink()
    record.write(root, newer)
    assert record.read(root, filed.record.action_key) == newer


def test_a_disk_without_a_free_inode_is_full_too(filed, mounted):
    root = mounted("size=1m,nr_inodes=2")
    with pytest.raises(CacheRootError, match="is full"):
        record.write(root, filed.record)


def test_a_read_only_root_is_said_and_its_records_are_read(filed, mounted):
    root = mounted("size=64k")
    record.write(root, filed.record)
    done = subprocess.run(["mount", "-o", "remount,ro", str(root)], check=False)
    if done.returncode:
        pytest.skip("remounting is not permitted here")
    assert record.read(root, filed.record.action_key) == filed.record
    for key in (filed.record.action_key, "ab" * 32):
        with pytest.raises(CacheRootError, match=f"{root} cannot be written: read-only") as caught:
            record.write(root, filed.but(action_key=key))
        assert "--cache-dir" in caught.value.hint


def test_a_root_that_is_a_file_is_said(filed, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheRootError, match="cannot be written: not a directory"):
        record.write(tmp_path / "file", filed.record)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_root_without_permission_is_said(filed, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(CacheRootError, match="cannot be written: permission denied"):
        record.write(locked, filed.record)
