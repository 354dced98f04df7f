"""Filters select by what is known and by nothing else; a key names one entry; duplicates are the
same but for their keys."""

from __future__ import annotations

import dataclasses
import os
import shutil
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tlcache.errors import TlcacheError, UsageError
from tlcache.spec import KernelSpec
from tlcache.store import layout, scan, select
from tlcache.store.entry import Entry, EntryParam, Facts
from tlcache.store.filings import Filing
from tlcache.store.layout import EntryPlace
from tlcache.store.select import Filter
from tlcache.targets import Target

NOW = datetime(2026, 6, 1, tzinfo=timezone.utc)
KEY = "ab" * 32


def kernel(key=KEY, tilelang="0.1.15", kind="kernel", filed=None, **changes):
    """An entry of which everything is known, but for its record."""
    place = EntryPlace(
        key, f"/root/{tilelang}/linux-x86_64/kernels/{key}", tilelang, "linux-x86_64", kind
    )
    facts = Facts("rms", (EntryParam("float16", (1, 2)),), ("sm_90a",), "13.0.88", "x86_64")
    created, used = NOW - timedelta(days=20), NOW - timedelta(days=10)
    one = Entry(
        place, "executable.so", 1000, created, used, facts, None, filed and Filing.of(filed)
    )
    known = {name: changes.pop(name) for name in list(changes) if name in Facts._fields}
    return dataclasses.replace(one, facts=facts._replace(**known), **changes)


@pytest.fixture
def recorded(filed):
    """An entry with a record: of rms_norm, for the CPU."""
    return kernel(filed=filed.record)


@pytest.fixture
def found(mixed_root, cache_root):
    return list(scan.scan(mixed_root))


def keys(wanted, found):
    return sorted(one.place.key[:4] for one in wanted.select(found) if one.place.kind == "kernel")


# --- how spans, sizes and versions are written ---


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30d", 2592000),
        ("12h", 43200),
        ("90min", 5400),
        ("2w", 1209600),
        ("1.5 h", 5400),
        ("0s", 0),
    ],
)
def test_a_span_has_a_unit(text, seconds):
    assert select.age(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1m", "1 y", "1e9d", "nand", "٣d", "1d 2h"])
def test_what_is_no_span_is_a_usage_error_that_names_it(text):
    with pytest.raises(UsageError, match="is no time span") as caught:
        select.age(text)
    assert repr(text) in str(caught.value) and "hint: like `30d`" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("4096", 4096), ("0", 0), ("1K", 1024), ("1kb", 1024), ("2 MiB", 2**21)),
        *(("5GiB", 5 * 2**30), ("0.5g", 2**29), ("1T", 2**40), ("7B", 7)),
    ],
)
def test_a_size_is_bytes_or_has_a_unit_of_1024(text, size):
    assert select.bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 PiB", "0x10", "1,5M", "inf", "nan"])
def test_what_is_no_size_is_a_usage_error_that_names_it(text):
    with pytest.raises(UsageError, match="is no size") as caught:
        select.bytes_of(text)
    assert repr(text) in str(caught.value)


@given(st.text() | st.from_regex(r"\d{1,400}(\.\d+)?\s*[A-Za-z]{0,3}"))
def test_any_text_is_a_span_a_size_a_version_or_a_usage_error(text):
    for read in (select.age, select.bytes_of, select.versions):
        try:
            read(text)
        except UsageError as error:
            assert error.exit_code == 2 and error.hint


@given(st.text(max_size=20))
def test_any_text_is_a_target_or_a_usage_error(text):
    try:
        Filter(targets=(text,))
    except UsageError as error:
        assert error.exit_code == 2


@pytest.mark.parametrize("spelling", ["sm_foo", "h1000", "", "{}", '{"kind": 1}'])
def test_a_target_that_does_not_exist_is_refused_before_anything_is_read(spelling):
    with pytest.raises(TlcacheError):
        Filter(targets=(spelling,))


def test_an_empty_key_is_refused_and_does_not_select_everything():
    with pytest.raises(UsageError):
        Filter(keys=("",))


# --- what is selected ---


def test_a_filter_without_fields_selects_everything_and_is_false():
    assert not Filter()
    assert Filter().matches(kernel(tilelang=None, kernel=None, params=None, targets=None))


@pytest.mark.parametrize(
    "fields",
    [
        {"older_than": timedelta(0)},
        {"unused_for": timedelta(0)},
        {"larger_than": 0},
        {"no_record": True},
        {"tilelang": "<9"},
    ],
)
def test_a_filter_that_asks_for_something_is_true_even_where_everything_is_so(fields):
    """Or `prune --older-than 0d` would say that no filter was given."""
    assert Filter(**fields)


@pytest.mark.parametrize(
    ("spelling", "selects"),
    [
        ("sm90", {"sm_90", "sm_90a"}),
        ("h100", {"sm_90", "sm_90a"}),
        ("9.0", {"sm_90", "sm_90a"}),
        ("sm_90", {"sm_90"}),
        ("sm_90a", {"sm_90a"}),
        ("sm80", {"sm_80"}),
        ("cpu", {"cpu"}),
        ("sm89", set()),
    ],
)
def test_a_target_selects_its_family_or_only_itself(spelling, selects):
    names = ("sm_80", "sm_90", "sm_90a", "sm_100a", "cpu")
    wanted = Filter(targets=(spelling,))
    assert {name for name in names if wanted.matches(kernel(targets=(name,)))} == selects


def test_a_fat_binary_is_selected_by_each_of_its_targets_and_by_no_other():
    fat = kernel(targets=("sm_80", "sm_90"))
    assert Filter(targets=("sm80",)).matches(fat)
    assert Filter(targets=("sm_90",)).matches(fat)
    assert not Filter(targets=("sm_90a", "cpu")).matches(fat)


def test_of_several_values_any_will_do_and_all_fields_must_hold():
    wanted = Filter(targets=("cpu", "sm90"), kernels=("x", "r*"))
    assert wanted.matches(kernel())
    assert not wanted.matches(kernel(targets=("sm_80",)))
    assert not wanted.matches(kernel(kernel="y"))


def test_a_kernels_pattern_is_matched_as_a_whole_and_by_case():
    for pattern, matches in (("r?s", 1), ("*", 1), ("RMS", 0), ("rm", 0), ("[!a]*", 1), ("[", 0)):
        assert Filter(kernels=(pattern,)).matches(kernel()) == matches


def test_an_op_is_known_from_the_record_alone(recorded):
    assert Filter(ops=("rms_norm",)).matches(recorded)
    assert not Filter(ops=("gemm",)).matches(recorded)
    assert not Filter(ops=("rms_norm",)).matches(kernel(kernel="rms_norm"))


def test_only_kernels_lack_a_record(recorded):
    """Or `prune --no-record` would take every cuda-binary along."""
    wanted = Filter(no_record=True)
    assert wanted.matches(kernel()) and not wanted.matches(recorded)
    for kind in ("cuda-binary", "autotuner", "staging", "unknown", "frontend"):
        assert not wanted.matches(kernel(kind=kind))


@pytest.mark.parametrize(
    ("asked", "matches"),
    [("13.0.88", 1), ("13.0", 1), ("13", 1), ("13.0.8", 0), ("1", 0), ("12", 0), ("13.0.88.1", 0)],
)
def test_a_toolkit_is_named_by_its_build_or_by_whole_numbers_of_it(asked, matches):
    assert Filter(toolkit=asked).matches(kernel()) == matches


def test_a_records_toolkit_wins_and_a_kernel_for_the_cpu_has_none(filed):
    spec = filed.record.spec
    cuda = KernelSpec(spec.kernel, spec.workload, spec.schedule, Target("sm_90a"))
    told = filed.but(spec=cuda, toolkit={"nvcc": "12.9.41"})
    assert Filter(toolkit="12.9").matches(kernel(filed=told))
    assert not Filter(toolkit="13").matches(kernel(filed=told))
    assert not Filter(toolkit="13").matches(kernel(filed=filed.record, toolkit=None))


@pytest.mark.parametrize(
    ("asked", "selected"),
    [
        ("<0.1.14", ["0.1.11", "0.1.9", None]),
        ("<=0.1.8", [None]),
        ("<0.1.8", []),
        ("!=0.1.5", ["0.1.11", "0.1.14", "0.1.15", "0.1.15_local", "0.1.16.dev3", "0.1.9"]),
        (">=0.1.14", ["0.1.14", "0.1.15", "0.1.15_local", "0.1.16.dev3"]),
        ("0.1.15", ["0.1.15", "0.1.15_local"]),
        (">=0.1.9,<0.1.14", ["0.1.11", "0.1.9"]),
        ("==9", []),
    ],
)
def test_versions_are_ranges_and_the_flat_layout_is_of_some_version_up_to_0_1_8(asked, selected):
    versions = ["0.1.11", "0.1.14", "0.1.15", "0.1.15_local", "0.1.16.dev3", "0.1.9", "0.1.x", None]
    wanted = Filter(tilelang=asked)
    assert [v for v in versions if wanted.matches(kernel(tilelang=v))] == selected


def test_what_is_unknown_and_has_no_version_was_not_written_by_an_old_one():
    assert not Filter(tilelang="<0.1.14").matches(kernel(tilelang=None, kind="unknown"))


def test_ages_count_from_the_writing_and_from_the_last_use():
    one = kernel()
    for field, days in (("older_than", 20), ("unused_for", 10)):
        for asked, matches in ((days - 1, True), (days, True), (days + 1, False)):
            assert Filter(**{field: timedelta(days=asked)}).matches(one, NOW) == matches


def test_an_entry_that_was_never_used_is_unused_since_it_was_written():
    one = kernel(last_used=None)
    assert Filter(unused_for=timedelta(days=20)).matches(one, NOW)
    assert not Filter(unused_for=timedelta(days=21)).matches(one, NOW)


def test_a_size_is_reached_by_its_own_number_of_bytes():
    assert Filter(larger_than=1000).matches(kernel())
    assert not Filter(larger_than=1001).matches(kernel())


NOTHING = {
    "targets": None,
    "kernel": None,
    "toolkit": None,
    "created": None,
    "last_used": None,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"targets": ("sm90",)},
        {"kernels": ("*",)},
        {"tilelang": ">0"},
        {"toolkit": "13"},
        {"ops": ("rms",)},
        {"older_than": timedelta(0)},
        {"unused_for": timedelta(0)},
    ],
)
def test_no_filter_selects_by_what_is_not_known(fields):
    assert not Filter(**fields).matches(kernel(tilelang="?", **NOTHING), NOW)


ENTRIES = st.builds(
    kernel,
    tilelang=st.sampled_from(["0.1.15", "0.1.9", "0.1.14_local", "x", None]),
    kind=st.sampled_from(["kernel", "cuda-binary", "unknown"]),
    kernel=st.none() | st.text(max_size=4),
    targets=st.none() | st.sampled_from([("cpu",), ("sm_90a",), ("sm_80", "sm_90")]),
    toolkit=st.none() | st.sampled_from(["13.0.88", "12.9.41", "?"]),
    created=st.none() | st.datetimes(timezones=st.just(timezone.utc)),
    last_used=st.none() | st.datetimes(timezones=st.just(timezone.utc)),
    bytes=st.integers(0, 2**50),
)
SPANS = st.none() | st.timedeltas(timedelta(0))
FIELDS = st.fixed_dictionaries(
    {
        "targets": st.sampled_from([(), ("sm90",), ("cpu", "sm_80")]),
        "kernels": st.tuples() | st.tuples(st.text(max_size=3)),
        "tilelang": st.sampled_from([None, "<0.1.14", "0.1.15"]),
        "toolkit": st.none() | st.sampled_from(["13", "", "12.9.41"]),
        "older_than": SPANS,
        "unused_for": SPANS,
        "larger_than": st.none() | st.integers(0, 2**50),
        "no_record": st.booleans(),
        "keys": st.tuples() | st.tuples(st.sampled_from(["ab", "AB", "ac", KEY])),
    }
)


@given(ENTRIES, FIELDS)
def test_an_entry_is_selected_where_each_field_alone_selects_it(one, fields):
    alone = [Filter(**{name: value}).matches(one, NOW) for name, value in fields.items()]
    assert Filter(**fields).matches(one, NOW) == all(alone)


@given(st.lists(ENTRIES, max_size=5), FIELDS)
def test_asking_for_more_never_selects_more(found, fields):
    wanted = Filter(**fields)
    kept = list(wanted.select(found))
    assert [one for one in found if any(one is other for other in kept)] == kept
    for name in fields:
        looser = Filter(**{**fields, name: Filter.__dataclass_fields__[name].default})
        assert len(list(looser.select(found))) >= len(kept)


def test_the_entries_of_every_release_are_selected_by_their_facts(found):
    assert keys(Filter(targets=("sm_100a",)), found) == ["f21e"]
    assert keys(Filter(targets=("sm80",)), found) == ["cb47", "d7de", "e9ec", "f758", "fb5d"]
    assert keys(Filter(tilelang="<0.1.11"), found) == ["1f2e", "b0f7", "cd84", "e9ec"]
    assert keys(Filter(kernels=("scale_d*",)), found) == ["75e7", "f008"]
    assert keys(Filter(toolkit="13.0", tilelang="0.1.13"), found) == ["cb47"]
    assert keys(Filter(larger_than=500_000), found) == ["1f2e", "9d21"]
    assert keys(Filter(keys=("F2", "f0")), found) == ["f008", "f21e"]
    assert len(keys(Filter(no_record=True), found)) == 22


# --- one entry by its key ---


def test_a_prefix_names_the_entry_of_any_kind_that_has_it(found, mixed_root):
    for prefix, kind in (("76068", "kernel"), ("8A5F", "cuda-binary")):
        one = select.called(found, prefix, mixed_root)
        assert one.place.kind == kind and one.place.key.startswith(prefix.lower())


def test_a_record_names_its_kernel(recorded):
    for name in (recorded.record.action_key, recorded.record.action_key[:5]):
        assert select.called([recorded], name, "/root") is recorded


def test_the_same_key_in_several_versions_is_told_apart_by_its_directory(
    found, mixed_root, monkeypatch
):
    with pytest.raises(UsageError) as caught:
        select.called(found, "abab", mixed_root)
    shown = str(caught.value).partition("begin with 'abab': ")[2].partition("\n")[0].split(", ")
    assert len(shown) == 3 and shown[2] == "autotuner/abababababab"
    named = {select.called(found, name, mixed_root).place.location for name in shown}
    assert len(named) == 3
    monkeypatch.chdir(mixed_root.parent)
    for name in (f"root/{shown[0]}", f"{mixed_root}/{shown[0]}/", f"./root/{shown[0]}"):
        assert select.called(found, name, mixed_root).place.location in named


@pytest.mark.parametrize(
    "name", ["", " ", "/", "zz", "nowhere/7606", "0" * 64, "\0", "..", "7606/x"]
)
def test_a_name_that_nothing_has_is_a_usage_error(found, mixed_root, name):
    with pytest.raises(UsageError, match=r"no entry in .* has a key that begins with"):
        select.called(found, name, mixed_root)


HEX = "0123456789abcdef"


@given(
    st.text(HEX, min_size=1, max_size=63),
    st.sets(st.text(HEX, min_size=64, max_size=64), min_size=2, max_size=4),
)
def test_what_is_shown_of_several_keys_is_enough_to_ask_again(prefix, rest):
    several = {(prefix + more)[:64] for more in rest}
    assume(len(several) > 1)
    with pytest.raises(UsageError) as caught:
        select.called([kernel(key) for key in several], prefix, "/root")
    shown = caught.value.message.rpartition(": ")[2].split(", ")
    found = [kernel(key) for key in several]
    assert {select.called(found, key, "/root").place.key for key in shown} == several


def test_what_is_unknown_or_half_written_has_no_key():
    for kind in ("staging", "unknown"):
        with pytest.raises(UsageError):
            select.called([kernel(kind=kind)], KEY, "/root")


def test_each_thing_belongs_to_one_of_the_roots(mixed_root, tmp_path, cache_root):
    base = tmp_path / "base"
    for name in ("one", "two"):
        shutil.copytree(mixed_root, base / name)
    (base / "lost+found").mkdir()
    (base / "0.1.15").mkdir()
    for start in (base, f"{base}/", os.path.relpath(base)):
        for place in layout.places(start):
            inner = layout.root_of(start, place)
            assert inner in layout.roots(start)
            known = place.kind != "unknown"
            assert (os.path.basename(inner.rstrip("/")) in ("one", "two")) == known


# --- duplicates ---

SCALE = "0.1.13/linux-x86_64/kernels"


@pytest.fixture
def twins(mixed_root, cache_root):
    """A root with one kernel, and what copies it under another key."""
    (source,) = mixed_root.glob(f"{SCALE}/cb47*")
    place = cache_root / SCALE
    shutil.copytree(source, place / source.name)

    def twin(digit, within=place):
        shutil.copytree(source, within / (digit * 64))
        return within / (digit * 64)

    return twin


def groups(root):
    return [[one.place.key[:4] for one in group] for group in select.duplicates(scan.scan(root))]


def test_a_kernel_alone_has_no_duplicate(twins, cache_root):
    assert groups(cache_root) == []


def test_a_second_compile_is_a_duplicate_although_its_bytes_differ(twins, cache_root, mixed_root):
    """The library is 0.1.14's, of the same kernel: other paths in its debug sections."""
    (other,) = mixed_root.glob("0.1.14/linux-x86_64/kernels/fb5d*/executable.so")
    again = twins("e") / "executable.so"
    assert again.read_bytes() != other.read_bytes()
    shutil.copy(other, again)
    payloads = {one.payload for one in scan.scan(cache_root)}
    assert len(payloads) == 2
    assert [sorted(group) for group in groups(cache_root)] == [["cb47", "eeee"]]


def test_the_newest_comes_first(twins, cache_root):
    for number, digit in enumerate("213"):
        os.utime(twins(digit), (1_000 * (3 - number),) * 2)
    os.utime(next(cache_root.glob(f"{SCALE}/cb47*")), (1, 1))
    assert groups(cache_root) == [["2222", "1111", "3333", "cb47"]]


def test_another_instruction_makes_another_kernel(twins, cache_root):
    again = twins("e") / "executable.so"
    data = bytearray(again.read_bytes())
    place = data.index(b".text.scale_kernel")  # the name, in the table of sections
    data[place + 6] ^= 1
    again.write_bytes(data)
    assert groups(cache_root) == []


@pytest.mark.parametrize("name", ["params.pkl", "host_kernel.cu"])
def test_other_parameters_or_another_launch_make_another_kernel(twins, cache_root, name):
    path = twins("e") / name
    path.write_bytes(path.read_bytes().replace(b"128", b"129").replace(b"K\x80", b"K\x81"))
    assert groups(cache_root) == []


@pytest.mark.parametrize("name", ["params.pkl", "executable.so"])
def test_what_is_damaged_has_no_duplicate(twins, cache_root, name):
    for digit in "ef":
        (twins(digit) / name).write_bytes(b"\x80\x04")
    assert groups(cache_root) == []


def test_the_same_kernel_of_another_version_or_root_is_no_duplicate(twins, cache_root):
    twins("e", cache_root / "0.1.14/linux-x86_64/kernels")
    twins("d", cache_root / "other" / SCALE)
    assert groups(cache_root) == []
    twins("c")
    assert [sorted(group) for group in groups(cache_root)] == [["cb47", "cccc"]]


def test_a_library_that_vanished_or_is_a_pipe_since_has_no_duplicate(twins, cache_root):
    first, second = twins("e"), twins("f")
    found = list(scan.scan(cache_root))
    shutil.rmtree(first)
    (second / "executable.so").unlink()
    os.mkfifo(second / "executable.so")
    assert select.duplicates(found) == []


def test_kernels_for_the_cpu_have_duplicates_too(mixed_root, cache_root):
    (source,) = mixed_root.glob("0.1.15/linux-x86_64/kernels/fbd1*")
    place = cache_root / "0.1.15/linux-x86_64/kernels"
    for key in (source.name, "e" * 64):
        shutil.copytree(source, place / key)
    assert [sorted(group) for group in groups(cache_root)] == [["eeee", "fbd1"]]
