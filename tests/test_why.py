"""Why a kernel is missing: each cause on a real record, and never one that is not so."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.environment import clean_environment
from tlcache import fingerprint, operators, targets, why
from tlcache.closure import factory_digest
from tlcache.spec import KernelSpec
from tlcache.store import evictions, layout, record
from tlcache.store.evictions import Eviction

SPEC = operators.get("rms_norm").spec({"M": 1, "N": 64, "dtype": "float32"}, targets.CPU)
MAKE = "import json, sys; from tlcache import runtime; from tlcache.spec import KernelSpec; "
MAKE += "runtime.resolve(KernelSpec.from_json(json.loads(sys.argv[1])))"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A root with one real kernel of the CPU and its record."""
    place = tmp_path_factory.mktemp("why")
    kept = clean_environment()
    subprocess.run(
        [sys.executable, "-c", MAKE, SPEC.canonical()],
        cwd=place,
        env={**kept, "TILELANG_CACHE_DIR": str(place / "cache")},
        check=True,
        capture_output=True,
    )
    return place / "cache"


@pytest.fixture
def root(compiled, cache_root):
    shutil.copytree(compiled, cache_root)
    return cache_root


def filed(root):
    (path,) = layout.records(root)
    return record.parse(path.read_bytes(), path)


def instead(root, one=None, *, variables=None, to=None, **changes):
    """Take the root's record away, and file it as another environment would have."""
    if one is None:
        one = filed(root)
        Path(layout.record_path(root, one.action_key)).unlink()
    spec = changes.pop("spec", one.spec)
    changed = dataclasses.replace(one, spec=spec, **changes)
    key = why.action_key(changed.spec, changed.versions, variables or {}, changed.source_digest)
    changed = dataclasses.replace(changed, action_key=key)
    record.write(to or root, changed)
    return changed


def spec_but(**changes):
    return KernelSpec.from_json({**SPEC.to_json(), **changes})


def library(root):
    one = filed(root)
    return root / one.entry / one.library.name


def cause(root, spec=SPEC):
    return why.Reader(root).cause(spec)


# --- hits ---


def test_a_kernel_with_its_record_and_library_is_a_hit(root):
    found = cause(root)
    assert (found.kind, found.action_key, found.differences) == ("hit", filed(root).action_key, ())


def test_the_key_of_another_environment_is_the_one_that_a_spec_has_there(monkeypatch):
    versions, digest = fingerprint.versions(), factory_digest(SPEC.kernel)
    assert SPEC.action_key() == why.action_key(SPEC, versions, {}, digest)
    variables = {"TILELANG_LAYOUT_COST_MODEL": "greedy"}
    monkeypatch.setenv(*variables.popitem())
    variables = fingerprint.key_variables()
    assert SPEC.action_key() == why.action_key(SPEC, versions, variables, digest)
    assert SPEC.action_key() != why.action_key(SPEC, versions, {}, digest)


# --- one thing that differs ---


VERSIONS = {"tilelang": "0.1.14", "tvm-ffi": "0.1.11", "platform": "linux-aarch64"}


@pytest.mark.parametrize("kind", VERSIONS)
def test_another_version_is_the_cause_and_both_versions_are_told(root, kind):
    versions, name = fingerprint.versions(), kind.replace("-", "_")
    made = instead(root, versions={**versions, name: VERSIONS[kind]})
    found = cause(root)
    assert found.kind == kind
    assert found.differences == (why.Difference(kind, VERSIONS[kind], versions[name]),)
    assert (found.nearest, found.loadable, found.root) == (made.action_key, True, str(root))
    assert VERSIONS[kind] in found.detail and versions[name] in found.detail


SPECS = {
    "target spelling": ("sm_90a", "sm_90", {}),
    "other target": ("sm_90a", "sm_80", {}),
    "schedule": ("cpu", "cpu", {"schedule": {"block_m": 7}}),
    "pass configs": ("cpu", "cpu", {"pass_configs": {"tl.x": True}}),
    "compile flags": ("cpu", "cpu", {"compile_flags": ["-O3"]}),
    "backend": ("cpu", "cpu", {"execution_backend": "nvrtc"}),
}


@pytest.mark.parametrize("kind", SPECS)
def test_one_ingredient_of_the_spec_that_differs_is_the_cause(root, kind):
    asked, there, changes = SPECS[kind]
    instead(root, spec=spec_but(target=there, **changes))
    found = cause(root, spec_but(target=asked))
    assert [one.kind for one in found.differences] == [kind]
    assert found.kind == kind and found.loadable


def test_a_dict_with_another_spelling_of_the_same_gpu_is_a_target_spelling(root):
    fat = targets.parse({"kind": "cuda", "arch": "sm_90a", "code": "sm_90a"})
    instead(root, spec=spec_but(target=fat.name))
    found = cause(root, spec_but(target="sm_90a"))
    assert found.kind == "target spelling"


def test_a_changed_source_is_the_cause_where_only_its_digest_differs(root):
    instead(root, source_digest="0f" * 32)
    found = cause(root)
    assert [one.kind for one in found.differences] == ["source"]
    assert found.differences[0].there == "0f" * 6


def test_a_variable_that_is_in_the_key_is_the_cause_where_it_is_set_only_here(root, monkeypatch):
    monkeypatch.setenv("TILELANG_LAYOUT_COST_MODEL", "greedy")
    found = cause(root)
    assert [one.kind for one in found.differences] == ["variable"]
    assert found.differences[0].there == "TILELANG_LAYOUT_COST_MODEL not set"
    assert found.differences[0].here == "TILELANG_LAYOUT_COST_MODEL=greedy"


def test_a_variable_that_was_set_only_there_is_the_cause(root):
    instead(root, variables={"TILELANG_LAYOUT_COST_MODEL": "greedy"})
    found = cause(root)
    assert [one.kind for one in found.differences] == ["variable"]
    assert found.differences[0].here == "TILELANG_LAYOUT_COST_MODEL not set"


def test_a_record_in_the_root_of_another_version_key_is_found(root):
    base = root.parent / "base"
    here, there = (base / f"tl0.1.15-cu13.0-{digit * 8}" for digit in "ab")
    shutil.copytree(root, there)
    here.mkdir()
    found = cause(here)
    assert [one.kind for one in found.differences] == ["other root"]
    assert found.root == str(there) and found.loadable
    assert cause(base).kind == "other root"


# --- several ---


def test_all_that_differs_is_told_when_no_single_thing_would_have_made_a_hit(root):
    instead(
        root, versions={**fingerprint.versions(), "tilelang": "0.1.14"}, source_digest="0f" * 32
    )
    found = cause(root)
    assert [one.kind for one in found.differences] == ["tilelang", "source"]
    assert "0.1.14" in found.detail and "source has changed" in found.detail


def test_the_record_that_differs_in_less_is_the_nearest(root):
    one = filed(root)
    both = {**fingerprint.versions(), "tilelang": "0.1.13", "tvm_ffi": "0.1.11"}
    instead(root, versions=both)
    near = instead(root, one, versions={**fingerprint.versions(), "tvm_ffi": "0.1.11"})
    assert cause(root).nearest == near.action_key


def test_any_record_of_this_target_is_nearer_than_one_of_another(root):
    one = filed(root)
    instead(root, spec=spec_but(target="sm_80"))
    both = {**fingerprint.versions(), "tilelang": "0.1.13", "tvm_ffi": "0.1.11"}
    near = instead(root, one, versions=both, spec=spec_but(target="sm_90a", schedule={"a": 1}))
    assert cause(root, spec_but(target="sm_90a")).nearest == near.action_key


def test_it_is_told_where_the_nearest_would_not_have_been_a_hit_either(root):
    made = instead(root, source_digest="0f" * 32)
    shutil.rmtree(root / made.entry)
    found = cause(root)
    assert found.kind == "source" and found.loadable is False
    assert "not there, or not sound" in found.detail


# --- no record, evictions, damage ---


def test_a_workload_that_nobody_compiled_has_no_record_and_the_others_are_named(root):
    other = spec_but(workload={**SPEC.to_json()["workload"], "M": 2})
    found = cause(root, other)
    assert (found.kind, found.differences, found.nearest) == ("no record", (), None)
    assert "there are M=1 N=64" in found.detail


def test_the_nearest_workloads_are_named_and_the_kernel_for_any_number_of_rows(root):
    workload = SPEC.to_json()["workload"]
    one = filed(root)
    for number, changes in enumerate([{"M": 7, "N": 96}, {"M": 3, "N": 128, "eps": 0.5}]):
        key = f"{number}" * 64
        record.write(
            root,
            dataclasses.replace(
                one, action_key=key, spec=spec_but(workload={**workload, **changes})
            ),
        )
    detail = cause(root, spec_but(workload={**workload, "M": 2})).detail
    assert detail.index("M=1 N=64") < detail.index("M=7 N=96") < detail.index("M=3 N=128")
    assert "any M" not in detail
    dynamic = spec_but(workload={**workload, "M": "dynamic"})
    record.write(root, dataclasses.replace(one, action_key="d" * 64, spec=dynamic))
    detail = cause(root, spec_but(workload={**workload, "M": 2})).detail
    assert 'the one for any M serves it where an op has rows="auto"' in detail
    detail = cause(root, spec_but(workload={**workload, "M": 2, "N": 96})).detail
    assert "any M" not in detail


def test_an_empty_root_and_a_root_that_is_not_there_have_no_record(cache_root):
    assert "there is no cache root" in cause(cache_root).detail
    cache_root.mkdir()
    found = cause(cache_root)
    assert found.kind == "no record" and SPEC.kernel in found.detail


def deleted(one):
    return Eviction(
        Path(one.entry).name,
        one.entry,
        "kernel",
        "rms_norm",
        "cpu",
        one.action_key,
        9,
        "--max-size 1",
    )


def test_a_kernel_that_was_pruned_with_its_record_is_told_as_evicted(root):
    one = filed(root)
    Path(layout.record_path(root, one.action_key)).unlink()
    shutil.rmtree(root / one.entry)
    assert cause(root).kind == "no record"
    assert evictions.note(root, [deleted(one)])
    found = cause(root)
    assert found.kind == "evicted" and "--max-size 1" in found.detail


def test_an_entry_that_was_pruned_from_under_its_record_is_told_as_evicted(root):
    one = filed(root)
    shutil.rmtree(root / one.entry)
    assert cause(root).kind == "vanished"
    evictions.note(root, [dataclasses.replace(deleted(one), action_key=None)])
    assert cause(root).kind == "evicted"


def test_a_kernel_that_was_evicted_and_compiled_again_is_a_hit(root):
    evictions.note(root, [deleted(filed(root))])
    assert cause(root).kind == "hit"


@pytest.mark.parametrize("what", ["record", "library"])
def test_a_flipped_bit_is_told_as_damage_of_that_file(root, what, caplog):
    path = library(root) if what == "library" else next(layout.records(root))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = cause(root)
    assert found.kind == "damaged" and str(path) in found.detail


def test_a_library_of_another_size_is_told_with_both_sizes(root):
    path = library(root)
    size = path.stat().st_size
    with open(path, "ab") as file:
        file.write(b"\0")
    assert f"{size + 1:,} bytes instead of {size:,}" in cause(root).detail


def test_an_entry_without_its_library_is_damaged(root):
    library(root).unlink()
    assert cause(root).kind == "damaged"


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.binary(max_size=200), of_kernel=st.booleans(), at_key=st.booleans())
def test_whatever_lies_where_records_do_the_answer_is_a_cause(
    compiled, tmp_path, data, of_kernel, at_key
):
    root = tmp_path / "hostile"
    shutil.rmtree(root, ignore_errors=True)
    path = Path(layout.record_path(root, SPEC.action_key() if at_key else "ab" * 32))
    path.parent.mkdir(parents=True)
    path.write_bytes(f'"{SPEC.kernel}"'.encode() + data if of_kernel else data)
    assert cause(root).kind == ("damaged" if at_key else "no record")


def test_a_directory_in_a_records_place_is_damage(root):
    path = next(layout.records(root))
    path.unlink()
    path.mkdir()
    assert cause(root).kind == "damaged"


def test_every_kind_of_difference_has_its_sentence():
    alone = {"hit", "damaged", "evicted", "vanished", "no record"}
    of_calls = {"python", "default", "output indices", "unknown", "not restorable", "failed"}
    assert set(why._NAMED) == set(get_args(why.Kind)) - alone - of_calls
