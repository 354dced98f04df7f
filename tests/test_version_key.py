"""The version key: what is in it, what is not, and what each difference does."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlcache import fingerprint, targets, version_key
from tlcache.errors import UsageError
from tlcache.store.digests import Digests
from tlcache.version_key import FIELDS, UNHASHED, VARIABLES, Environment

FACTS = {
    "tilelang": "0.1.15",
    "tilelang_library": "a" * 64,
    "tilelang_python": "b" * 64,
    "tvm_ffi": "0.1.12",
    "torch": "2.13.0",
    "nvcc": "13.0.88",
    "host_compiler": "g++ (Debian 12.2.0-14) 12.2.0",
    "templates": "c" * 64,
    "cutlass": "d" * 64,
    "glibc": "glibc 2.36",
    "platform": "linux-x86_64",
    "gpu": "sm_90a",
    "driver": "CUDA 13.0",
}
BASE = Environment(FACTS, {})


def but(variables=None, **facts):
    return Environment({**FACTS, **facts}, variables or {})


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user" / "tlcache" / "digests.json"


# --- the key ---


def test_the_key_names_version_toolkit_and_gpu_before_its_hash():
    assert re.fullmatch(r"tl0\.1\.15-cu13\.0-sm_90a-[0-9a-f]{8}", BASE.key)
    assert but(gpu=None).key.startswith("tl0.1.15-cu13.0-")
    assert but(gpu=None, nvcc=None).key.count("-") == 1


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: f"{field}_")
def test_every_fact_is_in_the_key_but_those_that_no_kernel_depends_on(field):
    assert (but(**{field: "other"}).key == BASE.key) == (field in UNHASHED)


@pytest.mark.parametrize("name", VARIABLES)
def test_every_variable_that_changes_code_is_in_the_key(name):
    assert but({name: "1"}).key != BASE.key
    assert but({name: "1"}).key != but({name: "2"}).key


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), st.none() | st.text()))
def test_a_key_is_a_directory_name_that_is_known_as_a_key_whatever_the_facts(facts):
    assert re.fullmatch(version_key.KEY, but(**facts).key)
    assert "/" not in but(**facts).key


def test_a_host_without_a_gpu_comes_to_the_key_of_the_one_that_it_compiles_for(monkeypatch, memory):
    built = version_key.describe(targets.parse("sm90"))
    monkeypatch.setattr(targets, "_driver_capability", lambda: (9, 0))
    assert version_key.describe().key == built.key
    assert built.facts["gpu"] == "sm_90a"


# --- this environment ---


def test_this_environment_has_every_fact_and_the_digests_are_remembered(memory):
    first = version_key.describe()
    assert set(first.facts) == set(FIELDS)
    assert first.facts["tilelang"] == fingerprint.tilelang_version()
    for name in ("tilelang_library", "tilelang_python", "templates", "cutlass"):
        assert re.fullmatch("[0-9a-f]{64}", first.facts[name])
    assert len(json.loads(memory.read_text())["digests"]) == 4
    assert version_key.describe() == first


def test_the_key_is_the_same_whether_digests_are_remembered_or_not(memory, tmp_path):
    first = version_key.describe()
    unwritable = Digests("/proc/nowhere/digests.json")
    assert version_key.describe(digests=unwritable) == first


def test_other_headers_are_another_key(memory, monkeypatch, tmp_path):
    first = version_key.describe()
    headers = tmp_path / "headers"
    headers.mkdir()
    (headers / "gemm.h").write_text("// mine\n")
    for name, field in (("TL_TEMPLATE_PATH", "templates"), ("TL_CUTLASS_PATH", "cutlass")):
        monkeypatch.setenv(name, str(headers))
        second = version_key.describe()
        assert second.facts[field] != first.facts[field] and second.key != first.key
        monkeypatch.delenv(name)


def test_the_key_is_the_same_in_a_child_of_a_process_that_has_imported_tilelang(python, memory):
    """TileLang sets variables of its own, which its child processes see."""
    ask = "from tlcache import version_key; print(version_key.describe().key)"
    plain = python(ask)
    assert plain.code == 0, plain.err
    child = python(
        "import subprocess, sys, tilelang; "
        "print(subprocess.check_output([sys.executable, '-c', sys.argv[1]], text=True))",
        ask,
    )
    assert child.out.split() == plain.out.split()


def test_a_fingerprint_imports_neither_torch_nor_tilelang(python, memory):
    ran = python(
        "import sys; from tlcache import version_key; version_key.describe(); "
        "print(*{'torch', 'tilelang', 'tvm', 'tvm_ffi', 'pydantic', 'rich'} & set(sys.modules))"
    )
    assert ran.code == 0 and ran.out.split() == []


def test_a_keyed_root_lies_in_its_base_and_is_not_nested_again(tmp_path):
    assert version_key.keyed_base(tmp_path / BASE.key) == tmp_path
    assert version_key.keyed_base(tmp_path) == tmp_path


# --- what a difference does ---

EFFECTS = [
    ("tilelang", "0.1.14", "0.1.15", "miss"),
    ("tilelang_library", "0" * 64, "a" * 64, "stale hit"),
    ("tilelang_python", "0" * 64, "b" * 64, "stale hit"),
    ("tvm_ffi", "0.1.11", "0.1.12", "miss"),
    ("torch", "2.8.0", "2.13.0", "nothing"),
    ("nvcc", "13.2.1", "13.0.88", "stale hit"),
    ("nvcc", "13.0.88", None, "nothing"),
    ("nvcc", None, "13.0.88", "nothing"),
    ("host_compiler", "clang 17", "g++ 12", "stale hit"),
    ("templates", "0" * 64, "c" * 64, "stale hit"),
    ("cutlass", "0" * 64, "d" * 64, "stale hit"),
    ("glibc", "glibc 2.39", "glibc 2.36", "cannot load"),
    ("glibc", "glibc 2.9", "glibc 2.36", "nothing"),
    ("glibc", "glibc 2.36", None, "cannot load"),
    ("platform", "linux-aarch64", "linux-x86_64", "miss"),
    ("gpu", "sm_80", "sm_90a", "miss"),
    ("gpu", None, "sm_90a", "nothing"),
    ("gpu", "sm_90a", None, "cannot load"),
    ("driver", "CUDA 13.0", "CUDA 13.1", "nothing"),
    ("driver", "CUDA 13.1", "CUDA 12.8", "cannot load"),
    ("driver", None, "CUDA 12.8", "cannot load"),
    ("driver", "CUDA 13.1", None, "nothing"),
]


@pytest.mark.parametrize(("field", "there", "here", "effect"), EFFECTS)
def test_each_difference_has_its_effect(field, there, here, effect):
    (found,) = version_key.compare(but(**{field: there}), but(**{field: here}))
    assert (found.field, found.there, found.here, found.effect) == (field, there, here, effect)


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_is_a_miss_where_it_is_in_the_keys_and_a_stale_hit_where_not(name):
    (found,) = version_key.compare(BASE, but({name: "1"}))
    assert (found.field, found.there, found.here) == (name, None, "1")
    assert found.effect == VARIABLES[name]


def test_an_environment_differs_in_nothing_from_itself():
    assert version_key.compare(BASE, BASE) == []


def test_a_driver_that_is_too_old_for_what_was_compiled_is_told_though_it_is_the_same():
    old = but(driver="CUDA 12.8")
    (found,) = version_key.compare(old, old)
    assert found.effect == "cannot load"


def test_nothing_is_served_stale_where_no_kernel_is_found():
    found = version_key.compare(but(tilelang="0.1.14", nvcc="12.8.93"), BASE)
    assert {one.field: one.effect for one in found} == {"tilelang": "miss", "nvcc": "nothing"}


def test_with_the_libraries_in_the_keys_another_build_is_a_miss():
    stamp = {"TILELANG_KERNEL_CACHE_USE_LIB_STAMP": "1"}
    (found,) = version_key.compare(but(stamp), but(stamp, tilelang_library="0" * 64))
    assert found.effect == "miss"


def test_a_fact_that_an_older_release_did_not_write_is_not_compared():
    facts = {name: value for name, value in FACTS.items() if name != "cutlass"}
    assert version_key.compare(Environment(facts, {}), BASE) == []


# --- reading ---


def test_what_is_written_is_read_back():
    one = but({"NVCC_APPEND_FLAGS": "-G"})
    assert version_key.read(json.dumps(one.to_json()), "f") == one


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["facts", "variables", *FIELDS]), inner)
    ),
)


@given(JSON.map(json.dumps) | st.text())
def test_whatever_is_no_fingerprint_is_one_usage_error(text):
    try:
        found = version_key.read(text, "other.json")
    except UsageError as error:
        assert error.message.startswith("other.json is no fingerprint: ") and error.hint
    else:
        assert version_key.compare(found, BASE) is not None and found.key


def test_control_characters_of_a_file_do_not_reach_the_terminal():
    with pytest.raises(UsageError):
        version_key.read(json.dumps({"facts": {"torch": "\x1b[2J"}, "variables": {}}), "f")


def test_an_environment_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.facts = {}
