"""Entries: what their files tell, None where they do not, and never an error."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tlcache.store import entry, layout, record, scan
from tlcache.store.entry import EntryParam
from tlcache.store.filings import Filing
from tlcache.store.layout import EntryPlace

SHARED = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
KEY = "3c" * 32


def node(kind, data=None):
    return {"type": kind} if data is None else {"type": kind, "data": data}


# As TileLang 0.1.15 writes it for x (rows, 64) and w (64,), both float32, and y (4, 64) of int8.
GRAPH = {
    "root_index": 19,
    "nodes": [
        node("ffi.String", "dtype"),
        node("ffi.String", "float32"),
        node("ffi.String", "shape"),
        node("None"),
        node("ffi.String", "rows"),
        node("ir.PrimType", {"span": 3, "dtype": "int32"}),
        node("tirx.Var", {"span": 3, "dtype": "int32", "name": 4, "type_annotation": 5}),
        node("int", 64),
        node("ffi.Array", [6, 7]),
        node("ffi.Map", [0, 1, 2, 8]),
        node("ffi.Array", [7]),
        node("ffi.Map", [0, 1, 2, 10]),
        node("int", 4),
        node("ffi.Array", [12, 7]),
        node("ffi.String", "int8"),
        node("ffi.Map", [0, 14, 2, 13]),
        node("tirx.Add", {"span": 3, "a": 6, "b": 12}),
        node("ffi.Array", [16, 16]),
        node("ffi.Map", [2, 17, 0, 1]),
        node("ffi.Array", [9, 11, 15, 18]),
    ],
    "metadata": {"tvm_version": "0.25.dev0"},
}
PARAMS = (
    EntryParam("float32", ("rows", 64)),
    EntryParam("float32", (64,)),
    EntryParam("int8", (4, 64)),
    EntryParam("float32", (None, None)),
)
CUDA = b"""// tilelang target: {}
#include <tl_templates/cuda/gemm.h>
extern "C" __global__ void rms_norm_kernel(const float* __restrict__ w, int rows);
extern "C" __global__ void __launch_bounds__(256, 1) rms_norm_kernel(const float* w, int rows) {
"""
CPU = b"""#include <tl_templates/cpp/common.h>
extern "C" int32_t rms_norm_kernel(float* w, float* x, float* y);
"""


@pytest.fixture
def place(tmp_path):
    path = tmp_path / "0.1.15/linux-x86_64/kernels" / KEY
    path.mkdir(parents=True)
    return EntryPlace(KEY, str(path), "0.1.15", "linux-x86_64")


def written(place, **files):
    for name, content in files.items():
        name = name.replace("__", ".")
        content = json.dumps(content) if isinstance(content, dict | list) else content
        data = content.encode() if isinstance(content, str) else content
        (place.path / name).write_bytes(data)
    return entry.read(place)


# --- without a record ---


def test_an_entry_tells_its_backend_kernel_parameters_and_size(place):
    found = written(place, executable__so=b"x" * 100, params__json=GRAPH, device_kernel__cu=CUDA)
    assert (found.backend, found.library) == ("tvm_ffi", "executable.so")
    assert found.kernel == "rms_norm"
    assert found.params == PARAMS
    assert found.bytes == 100 + len(CUDA) + len(json.dumps(GRAPH))
    assert found.place == place
    assert (found.record, found.target) == (None, None)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("executable.so", "tvm_ffi"),
        ("kernel_lib.so", "cython"),
        ("kernel.cubin", "nvrtc"),
        ("kernel.py", "cutedsl"),
        ("other.so", None),
    ],
)
def test_the_librarys_name_tells_the_backend(place, name, backend):
    found = written(place, **{name: b"x"})
    assert (found.backend, found.library) == (backend, name if backend else None)


def test_a_kernel_py_beside_a_cubin_is_a_launcher_and_not_the_library(place):
    assert written(place, **{"kernel.cubin": b"x", "kernel.py": b"x"}).backend == "nvrtc"


@pytest.mark.parametrize(
    ("name", "source", "kernel"),
    [
        ("device_kernel.cu", CUDA, "rms_norm"),
        ("device_kernel.cu", CPU, "rms_norm"),
        ("kernel.cu", CUDA, "rms_norm"),
        ("device_kernel.cu", CUDA.replace(b"rms_norm_kernel", b"main_kernel"), "main"),
        ("device_kernel.cu", CUDA.replace(b"rms_norm_kernel", b"softmax"), "softmax"),
        ("device_kernel.cu", b"\n" * 100_000 + CUDA, None),
        ("device_kernel.cu", b"", None),
        ("device_kernel.cu", bytes(range(256)) * 10, None),
        ("device_kernel.py", b"def kernel(): pass", None),
        ("host_kernel.cu", CUDA, None),
    ],
)
def test_a_kernels_name_is_read_from_its_source(place, name, source, kernel):
    assert written(place, **{name: source}).kernel == kernel


def test_an_entrys_dates_are_those_of_its_directory_and_its_library_in_utc(place):
    written(place, executable__so=b"x", params__json=GRAPH)
    os.utime(place.path / "executable.so", (2_000_000_000, 1_500_000_000))
    os.utime(place.path, (1, 1_600_000_000))
    found = entry.read(place)
    assert found.created == datetime(2020, 9, 13, 12, 26, 40, tzinfo=timezone.utc)
    assert found.last_used == datetime(2033, 5, 18, 3, 33, 20, tzinfo=timezone.utc)
    os.utime(place.path / "executable.so", (1, 1_500_000_000))
    assert entry.read(place).last_used == datetime(2017, 7, 14, 2, 40, tzinfo=timezone.utc)


def test_a_date_that_no_calendar_has_is_none(mounted):
    root = mounted("size=64k")
    path = root / KEY
    path.mkdir()
    (path / "executable.so").write_bytes(b"x")
    for item in (path / "executable.so", path):
        os.utime(item, (2**50, 2**50))
    found = entry.read(EntryPlace(KEY, str(path), None, None))
    assert (found.library, found.created, found.last_used) == ("executable.so", None, None)


def test_an_entry_that_has_vanished_is_all_none(place):
    place.path.rmdir()
    found = entry.read(place)
    assert (found.backend, found.library, found.kernel, found.params) == (None,) * 4
    assert (found.bytes, found.created, found.last_used) == (0, None, None)


def test_an_empty_entry_is_none_but_for_its_date(place):
    found = entry.read(place)
    assert (found.backend, found.kernel, found.params, found.bytes) == (None, None, None, 0)
    assert found.created is not None


def test_links_directories_and_pipes_are_not_an_entrys_files(place, tmp_path):
    (tmp_path / "outside").write_bytes(b"x" * 1000)
    (place.path / "executable.so").symlink_to(tmp_path / "outside")
    (place.path / "device_kernel.cu").mkdir()
    os.mkfifo(place.path / "params.json")
    found = entry.read(place)
    assert (found.backend, found.kernel, found.params, found.bytes) == (None, None, None, 0)


# --- params.json ---


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        b'{"root_index": 0, "nodes": []}',
        b'{"root_index": 0, "nodes": [{"type": "None"}]}',
        b'{"root_index": "0", "nodes": {"0": {"data": 5}}}',
    ],
    ids=lambda text: repr(text[:30]),
)
def test_params_that_are_no_graph_are_none(place, text):
    assert written(place, executable__so=b"x", params__json=text).params is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("root_index",), 99),
        (("root_index",), -1),
        (("root_index",), True),
        (("root_index",), 1.0),
        (("nodes", 7, "data"), float("inf")),
        (("nodes", 7, "data"), float("nan")),
        (("nodes", 7, "data"), "many"),
        (("nodes", 7, "data"), 64.5),
        (("nodes", 7, "data"), None),
        (("nodes", 8, "data"), "67"),
        (("nodes", 8, "data"), [-1]),
        (("nodes", 9, "data"), [0, 1, 2]),
        (("nodes", 9, "data"), [2, 8]),
        (("nodes", 1, "data"), 5),
        (("nodes", 1, "data"), None),
        (("nodes", 6, "data", "name"), 99),
    ],
    ids=str,
)
def test_params_with_an_impossible_value_are_none_and_not_a_guess(place, path, value):
    graph = json.loads(json.dumps(GRAPH))
    inner = graph
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert written(place, executable__so=b"x", params__json=graph).params is None


def sound(found):
    for param in found.params or ():
        assert type(param.dtype) is str
        assert all(d is None or type(d) in (int, str) for d in param.shape)


@SHARED
@given(st.binary(max_size=64) | st.text().map(str.encode))
def test_any_bytes_in_params_json_are_none(place, data):
    assert written(place, params__json=data).params is None


@SHARED
@given(st.data())
def test_params_with_damaged_bytes_are_none_or_parameters(place, data):
    whole = json.dumps(GRAPH).encode()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 6)))
    patch = data.draw(st.binary(max_size=4) | st.sampled_from([b"1e999", b"NaN", b"-1", b"{}"]))
    sound(written(place, params__json=whole[:start] + patch + whole[end:]))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 30) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@SHARED
@given(st.integers(0, 19), st.sampled_from(["type", "data"]), VALUES)
def test_params_with_any_value_anywhere_are_none_or_parameters(place, index, key, value):
    graph = json.loads(json.dumps(GRAPH))
    graph["nodes"][index][key] = value
    sound(written(place, params__json=graph))


# --- with records ---


def test_an_entry_with_a_record_tells_what_the_record_does(filed):
    record.write(filed.root, filed.record)
    (found,) = scan.scan(filed.root)
    assert found.record == Filing.of(filed.record)
    assert (found.kernel, found.target, found.backend) == ("rms_norm", "cpu", "cython")
    assert found.params == (
        EntryParam("float32", ("rows", 64)),
        EntryParam("float32", (64,)),
        EntryParam("float32", ("rows", 64)),
    )
    assert found.bytes == filed.record.library.size


def test_an_entrys_record_is_the_newest_that_points_at_it(filed):
    newest = filed.but(action_key="bb" * 32, created="2026-03-01T00:00:00+00:00")
    for made in (
        filed.but(action_key="aa" * 32, created="2026-02-01T00:00:00+00:00"),
        newest,
        filed.but(action_key="cc" * 32, created="2025-12-01T00:00:00+00:00"),
    ):
        record.write(filed.root, made)
    (found,) = scan.scan(filed.root)
    assert found.record == Filing.of(newest)


def test_a_record_of_an_entry_that_is_gone_is_no_entry(filed):
    record.write(filed.root, replace(filed.record, entry="0.1.15/linux-x86_64/kernels/" + KEY))
    (found,) = scan.scan(filed.root)
    assert found.record is None


@pytest.mark.parametrize("text", [b"", b"{", b"null", b"[" * 100_000, b'{"schema": 99}'])
def test_a_damaged_record_leaves_its_entry_without_one(filed, text):
    record.write(filed.root, filed.record).write_bytes(text)
    (found,) = scan.scan(filed.root)
    assert (found.record, found.library) == (None, "kernel_lib.so")


def test_a_record_that_is_filed_under_another_key_is_no_entrys_record(filed):
    other = Path(layout.record_path(filed.root, "ab" * 32))
    other.parent.mkdir(parents=True)
    record.write(filed.root, filed.record).rename(other)
    (found,) = scan.scan(filed.root)
    assert found.record is None


def test_a_record_that_cannot_be_read_leaves_its_entry_without_one(filed):
    path = record.write(filed.root, filed.record)
    path.unlink()
    path.mkdir()
    (found,) = scan.scan(filed.root)
    assert found.record is None


def test_entries_that_vanish_while_they_are_scanned_do_no_harm(filed):
    for index in range(5):
        (filed.root / (f"{index}" * 64)).mkdir()
    found = scan.scan(filed.root)
    next(found)
    subprocess.run(["rm", "-rf", *map(str, filed.root.iterdir())], check=True)
    assert all(one.bytes == 0 for one in found)


def test_a_root_is_scanned_by_a_relative_path_too(filed, monkeypatch):
    record.write(filed.root, filed.record)
    monkeypatch.chdir(filed.root.parent)
    (found,) = scan.scan(Path("root"))
    assert found.record == Filing.of(filed.record)


def test_what_tilelang_writes_tells_the_same_as_its_record(tlcache, shapes, cache_root):
    path = shapes({"op": "rms_norm", "M": "dynamic", "N": 48, "dtype": "float32"})
    done = tlcache("warm", "--shapes", path, "--target", "cpu")
    assert done.code == 0, done.err
    (recorded,) = scan.scan(cache_root)
    Path(layout.record_path(cache_root, recorded.record.action_key)).unlink()
    (alone,) = scan.scan(cache_root)
    # To file a record counts as a use.
    assert alone == replace(recorded, record=None, last_used=alone.last_used)
    assert alone.last_used <= recorded.last_used
    assert [param.shape for param in alone.params] == [("rows", 48), (48,), ("rows", 48)]
