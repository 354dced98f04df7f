"""The files of calls: what is read back is what was written, or nothing."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tlcache.store import calls, own_files, record, scan
from tlcache.store.calls import Answer, Style, Warmed
from tlcache.store.record import Library
from tlcache.store.trust import Trust

KEY, OTHER = "a" * 64, "b" * 64
ENTRY = "0.1.15/linux-x86_64/kernels/" + "c" * 64
STYLE = Style(
    "eager",
    (("M", "A", "shape", 0), ("S", "A", "stride", 0)),
    {"A": ("float16", 2), "B": ("int8", 1)},
)
ANSWER = Answer(
    kernel="pkg.mod:kernel",
    title="kernel M=1",
    entry=ENTRY,
    library=Library("kernel_lib.so", 3, "0" * 64),
    backend="cython",
    target='{"kind":"c"}',
    inputs=2,
    outputs=(2,),
    callee=False,
    signature="{}",
    pass_configs={"tl.x": True},
    compile_flags=("-O2",),
    compile_seconds=1.5,
    versions={"tilelang": "0.1.15"},
    created="2026-01-01T00:00:00+00:00",
    made_of='{"argument M": "1", "value pkg.mod.BY": "2.0"}',
)
WARMED = Warmed(ENTRY, ANSWER.library, call=KEY, reason=None, compile_seconds=1.5)


@pytest.fixture
def root(tmp_path):
    return str(tmp_path)


def test_what_was_written_is_read_back(root):
    trust = Trust(root)
    calls.write_style(root, KEY, STYLE)
    calls.write_answer(root, OTHER, ANSWER)
    assert calls.read_style(root, KEY, trust) == STYLE
    assert calls.read_answer(root, OTHER, trust) == ANSWER
    calls.write_warmed(root, "c" * 64, WARMED)
    assert calls.read_warmed(root, "c" * 64) == WARMED
    assert calls.read_warmed(root, OTHER) is None and calls.is_sound(root, OTHER)
    assert not calls.is_sound(root, KEY) and not calls.is_sound(root, "c" * 64)
    os.unlink(calls.path_of(root, "c" * 64))
    assert ANSWER.key == "c" * 64
    # One is not the other, and a file under another name is nobody's.
    assert calls.read_answer(root, KEY, trust) is None
    assert calls.read_style(root, OTHER, trust) is None
    path = calls.path_of(root, KEY)
    moved = calls.path_of(root, "a" * 63 + "b")
    os.rename(path, moved)
    assert calls.read_style(root, "a" * 63 + "b", trust) is None
    assert sorted(calls.all_of(root)) == [
        ("a" * 63 + "b", moved),
        (OTHER, calls.path_of(root, OTHER)),
    ]


def test_a_flipped_bit_anywhere_makes_it_a_miss(root):
    trust = Trust(root)
    calls.write_answer(root, KEY, ANSWER)
    path = calls.path_of(root, KEY)
    with open(path, "rb") as file:
        sound = file.read()
    for place in range(0, len(sound), 7):
        data = bytearray(sound)
        data[place] ^= 4
        with open(path, "wb") as file:
            file.write(data)
        assert calls.read_answer(root, KEY, trust) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = [*Answer._fields, "schema", "key", "kind", "mode", "matcher", "buffers", "call", "reason"]


@given(st.sampled_from(["style", "kernel", "warmed"]), st.sampled_from(FIELDS), json_values)
@example("style", "buffers", {"X": []})
@example("style", "buffers", {"X": ["X", 1, 2]})
@example("style", "matcher", [[]])
def test_fields_of_other_kinds_are_refused_and_nothing_else_happens(kind, field, value):
    one = {**ANSWER._asdict(), "library": ANSWER.library._asdict(), "schema": 1, "key": KEY}
    style = {"mode": STYLE.mode, "matcher": STYLE.matcher, "buffers": dict(STYLE.buffers)}
    told = {"call": KEY, "reason": None}
    data = json.loads(json.dumps({**one, **style, **told, "kind": kind, field: value}))
    try:
        _, found = calls.decode(record.encode(data))
    except ValueError:
        return
    if isinstance(found, Style):
        assert found.mode in ("lazy", "eager")
        return
    assert not os.path.isabs(found.entry) and ".." not in found.entry.split("/")
    assert os.path.basename(found.library.name) == found.library.name
    if isinstance(found, Answer):
        assert all(index >= 0 for index in found.outputs)
        assert all(isinstance(value, str) for value in found.ingredients.values())


def test_the_calls_of_kernels_that_are_gone_are_swept_away(root):
    calls.write_style(root, OTHER, STYLE)
    calls.write_answer(root, KEY, ANSWER)
    calls.write_warmed(root, "d" * 64, WARMED)
    os.makedirs(os.path.join(root, ENTRY))
    assert calls.sweep(root) == 0
    os.rmdir(os.path.join(root, ENTRY))
    assert calls.sweep(root) == 2
    assert [key for key, _ in calls.all_of(root)] == [OTHER]


def test_what_belongs_to_no_kernel_is_swept_away_when_it_was_not_used_for_long(root):
    for key in (KEY, OTHER):
        calls.write_style(root, key, STYLE)
        calls.write_texts(root, key, {KEY: ["f", "0", []]})
    assert calls.sweep(root) == 0
    for folder in ("calls", "texts"):
        for key in (KEY, OTHER):
            path = calls.path_of(root, key, folder)
            old = os.stat(path).st_mtime - calls.UNUSED - 60
            os.utime(path, (old, old))
        calls.used(root, OTHER, folder)
    assert calls.sweep(root) == 2
    left = [key for folder in ("calls", "texts") for key, _ in calls.all_of(root, folder)]
    assert left == [OTHER, OTHER]


def test_a_restore_by_a_call_is_a_use_of_its_kernel(root):
    calls.write_answer(root, KEY, ANSWER)
    os.makedirs(os.path.join(root, ENTRY))
    with open(os.path.join(root, ENTRY, "kernel_lib.so"), "wb") as file:
        file.write(b"abc")
    os.utime(os.path.join(root, ENTRY, "kernel_lib.so"), (1000, 1000))
    os.utime(calls.path_of(root, KEY), (5000, 5000))
    (found,) = scan.scan(root)
    assert found.last_used is not None
    assert found.last_used.timestamp() == 5000
    calls.used(root, KEY)
    assert calls.uses(root)[ENTRY] > 5000


def faults(root):
    return [
        (os.path.basename(one.path)[:1], one.fault.kind) for one in own_files.judge(root, {}, ())
    ]


def test_verify_tells_of_what_is_damaged_or_points_at_nothing(root):
    calls.write_style(root, OTHER, STYLE)
    calls.write_texts(root, OTHER, {KEY: ["f", "0", []]})
    calls.write_answer(root, KEY, ANSWER)
    assert faults(root) == [("a", "orphan")]
    os.makedirs(os.path.join(root, ENTRY))
    library = os.path.join(root, ENTRY, "kernel_lib.so")
    with open(library, "wb") as file:
        file.write(b"abc")
    assert faults(root) == [("a", "orphan")]  # it is another library
    found = record.library_at(os.path.dirname(library), "kernel_lib.so")
    calls.write_answer(root, KEY, ANSWER._replace(library=found))
    assert faults(root) == []
    for folder in ("calls", "texts"):
        with open(calls.path_of(root, OTHER, folder), "r+b") as file:
            file.write(b"x")
    assert faults(root) == [("b", "damaged"), ("b", "damaged")]
