"""Schedule records and schedules.json: what was tuned is read back; what is damaged is none."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlcache import operators, targets
from tlcache.errors import CacheRootError, ShapesError, SpecError, UntrustedRootError
from tlcache.spec import KernelSpec
from tlcache.store import schedules
from tlcache.store.schedules import Chooser, Tuned
from tlcache.store.trust import Trust
from tlcache.warm import tuning

SM90 = targets.parse("sm90")
RMS_NORM = operators.get("rms_norm")


def default(M: int | str = 4, N: int = 256, target: targets.Target = SM90) -> KernelSpec:
    return RMS_NORM.spec({"M": M, "N": N}, target)


def tuned(M: int | str = 4, N: int = 256, which: int = 0, **changes: object) -> Tuned:
    """A workload's tuned schedule: one of its candidates, so never the default."""
    spec = default(M, N)
    best = tuning.plan(RMS_NORM, spec).candidates[which]
    made = Tuned(
        op="rms_norm",
        spec=best,
        microseconds=1.5,
        default=dict(spec.schedule),
        default_microseconds=2,
        device="NVIDIA H200",
        measured={"rows": [4], "versions": {"tilelang": "0.1.15"}},
    )
    return replace(made, **changes)


def unfit(M: int | str = 4) -> Tuned:
    """A schedule with a field that the kernel does not take any more."""
    good = tuned(M)
    spec = KernelSpec(good.spec.kernel, good.spec.workload, {"stages": 2}, good.spec.target)
    return replace(good, spec=spec)


def filed_at(root: Path, one: Tuned) -> Path:
    name = schedules.key(one.spec)
    return root / "tlcache" / "schedules" / name[:2] / f"{name}.json"


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


# --- round trips ---


def test_a_tuned_schedule_is_found_by_its_workload_whatever_schedule_is_asked_with(tmp_path):
    schedules.write(tmp_path, tuned())
    assert schedules.find(tmp_path, default()) == tuned()
    assert schedules.find(tmp_path, tuned(which=1).spec, Trust(tmp_path)) == tuned()
    assert list(tree(tmp_path)) == [str(filed_at(tmp_path, tuned()).relative_to(tmp_path))]


def test_a_workload_that_was_not_tuned_has_none(tmp_path):
    assert schedules.find(tmp_path / "nowhere", default()) is None
    schedules.write(tmp_path, tuned())
    assert schedules.find(tmp_path, default(5)) is None
    assert schedules.find(tmp_path, default(target=targets.parse("sm80"))) is None


def test_writing_again_replaces_the_schedule(tmp_path):
    schedules.write(tmp_path, tuned())
    schedules.write(tmp_path, tuned(which=1, microseconds=1.25))
    assert schedules.find(tmp_path, default()) == tuned(which=1, microseconds=1.25)
    assert len(tree(tmp_path)) == 1


def test_a_document_holds_its_schedules_in_order(tmp_path):
    several = [tuned(4), tuned("dynamic", default_microseconds=None), tuned(4, 512, device="")]
    schedules.dump(tmp_path / "schedules.json", several)
    assert schedules.load(tmp_path / "schedules.json") == several
    document = json.loads((tmp_path / "schedules.json").read_text())
    assert document == {"version": 1, "schedules": [one.to_json() for one in several]}


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1e-3, 1e9),
    st.none() | st.floats(1e-3, 1e9) | st.integers(1, 10**9),
    st.text(),
    st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.booleans())),
)
def test_whatever_was_measured_comes_back_through_a_record_and_a_document(
    microseconds, before, device, measured
):
    one = tuned(
        microseconds=microseconds, default_microseconds=before, device=device, measured=measured
    )
    with tempfile.TemporaryDirectory() as root:
        schedules.write(root, one)
        schedules.dump(f"{root}/schedules.json", [one])
        assert schedules.find(root, one.spec) == one
        assert schedules.load(f"{root}/schedules.json") == [one]


# --- the key ---


def test_the_key_leaves_out_the_schedule_and_nothing_else():
    spec = default()
    data = spec.to_json()
    assert len(schedules.key(spec)) == 64
    again = KernelSpec.from_json({**data, "schedule": {"anything": [1, {"at": "all"}]}})
    assert schedules.key(again) == schedules.key(spec)
    others = [
        {**data, "kernel": "ops.kernels.rms_norm:other"},
        {**data, "workload": {**data["workload"], "M": "dynamic"}},
        {**data, "workload": {**data["workload"], "eps": 1e-5}},
        {**data, "target": "sm_80"},
        {**data, "pass_configs": {"tl.disable_tma_lower": True}},
        {**data, "compile_flags": ["-O1"]},
        {**data, "execution_backend": "cython"},
    ]
    assert {name for other in others for name in other if other[name] != data[name]} == (
        set(data) - {"schedule"}
    )
    keys = [schedules.key(KernelSpec.from_json(other)) for other in others]
    assert len({*keys, schedules.key(spec)}) == len(others) + 1


# --- damage ---


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**310)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["cpu", "sm_90a", "auto", "sm90", '{"kind":"cuda"}', "{", "\ud800", "\0"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


def places(value: object, path: tuple = ()) -> list[tuple]:
    """The paths of all values in a JSON value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(found for name, item in items for found in places(item, (*path, name)))]


def damaged(data, draw):
    """A JSON value with one to three values in it replaced, removed or added to."""
    for _ in range(draw(st.integers(1, 3))):
        data = copy.deepcopy(data)
        path = draw(st.sampled_from(places(data)))
        if not path:
            return draw(JSON)
        place, last = data, path[-1]
        for name in path[:-1]:
            place = place[name]
        how = draw(st.sampled_from(["replace", "remove", "add"]))
        if how == "remove":
            del place[last]
        elif how == "add" and isinstance(place[last], dict):
            place[last][draw(st.text(max_size=4))] = draw(JSON)
        else:
            place[last] = draw(JSON)
    return data


def hurt(data, draw) -> bytes:
    """The bytes of a JSON document that was damaged as a document, or as bytes."""
    if draw(st.booleans()):
        return json.dumps(damaged(data, draw)).encode()
    text = json.dumps(data).encode()
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, min(len(text), start + 20)))
    return text[:start] + draw(st.binary(max_size=5)) + text[end:]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_damaged_document_is_a_shapes_error_or_says_something_sound(data):
    document = {"version": 1, "schedules": [tuned(4).to_json(), tuned("dynamic").to_json()]}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "schedules.json"
        path.write_bytes(hurt(document, data.draw))
        try:
            found = schedules.load(path)
        except ShapesError as error:
            assert str(path) in error.message and "tlcache tune" in error.hint
            return
        chooser = Chooser(place, found)
        for spec in (default(4), default("dynamic")):
            chosen = chooser(RMS_NORM, spec)
            assert RMS_NORM.accepts(chosen) and schedules.key(chosen) == schedules.key(spec)
            chooser.install([chosen])
            assert chooser(RMS_NORM, spec) == chosen
        schedules.dump(path, found)
        before, after = (
            json.dumps([one.to_json() for one in each]) for each in (found, schedules.load(path))
        )  # as text: a NaN in what was measured equals no other
        assert before == after


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_damaged_record_is_ignored_or_says_something_sound(data):
    with tempfile.TemporaryDirectory() as root:
        path = filed_at(Path(root), tuned())
        path.parent.mkdir(parents=True)
        path.write_bytes(hurt(tuned().to_json(), data.draw))
        found = schedules.find(root, default(), Trust(root))
        assert found is None or schedules.key(found.spec) == schedules.key(default())
        assert RMS_NORM.accepts(Chooser(root)(RMS_NORM, default()))
        schedules.write(root, tuned())
        assert schedules.find(root, default()) == tuned()


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "not text": lambda path: path.write_bytes(b"\xff\xfe" * 99),
    "nested too deeply": lambda path: path.write_text("[" * 200_000),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nothing")),
    "a list": lambda path: path.write_text("[1, 2]"),
    "unreadably long a number": lambda path: path.write_text("9" * 5000),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_record_that_is_no_record_is_none(tmp_path, damage):
    schedules.write(tmp_path, tuned())
    DAMAGE[damage](filed_at(tmp_path, tuned()))
    assert schedules.find(tmp_path, default()) is None
    assert schedules.find(tmp_path, default(), Trust(tmp_path)) is None
    assert Chooser(tmp_path)(RMS_NORM, default()) == default()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_document_that_is_no_document_is_a_shapes_error_with_a_hint(tmp_path, damage):
    path = tmp_path / "schedules.json"
    schedules.dump(path, [tuned()])
    DAMAGE[damage](path)
    with pytest.raises(ShapesError) as caught:
        schedules.load(path)
    assert str(path) in caught.value.message
    assert caught.value.hint.startswith("`tlcache tune --shapes shapes.json -o schedules.json`")
    assert caught.value.exit_code == 2


def test_a_damaged_record_is_logged_with_its_path(tmp_path, caplog):
    schedules.write(tmp_path, tuned())
    path = filed_at(tmp_path, tuned())
    path.write_text("{}")
    schedules.find(tmp_path, default())
    assert f"the schedule record {path} is damaged" in caplog.text


def test_a_record_that_lies_under_another_workloads_key_is_none(tmp_path):
    schedules.write(tmp_path, tuned(4))
    path = filed_at(tmp_path, tuned(5))
    path.parent.mkdir(parents=True, exist_ok=True)
    filed_at(tmp_path, tuned(4)).rename(path)
    assert schedules.find(tmp_path, default(5)) is None
    assert schedules.find(tmp_path, default(4)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, 'it has no "version": 1'),
        ({"version": "1"}, 'it has no "version": 1'),
        ({"version": True}, 'it has no "version": 1'),
        ({"version": None}, 'it has no "version": 1'),
        ({"schedules": {}}, "schedules is not a list"),
        ({"schedules": None}, "schedules is not a list"),
        ({"schedules": [tuned().to_json(), 7]}, r"schedules\[1\]: .* not int"),
    ],
)
def test_what_is_wrong_with_a_document_is_named(tmp_path, changes, message):
    path = tmp_path / "schedules.json"
    path.write_text(json.dumps({"version": 1, "schedules": [], **changes}))
    with pytest.raises(ShapesError, match=message):
        schedules.load(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, None) for name in ("op", "spec", "microseconds", "default", "device", "measured")),
        *(("microseconds", value) for value in ("1", True, float("nan"), float("inf"), 0, -1.5)),
        *(("default_microseconds", value) for value in ("", False, float("nan"), -1)),
        ("extra", 1),
        ("default", []),
        ("measured", "yes"),
    ],
)
def test_a_field_that_cannot_be_so_is_named(tmp_path, field, value):
    data = {**tuned().to_json(), field: value}
    with pytest.raises(SpecError, match=field):
        Tuned.from_json(data)
    path = tmp_path / "schedules.json"
    path.write_text(json.dumps({"version": 1, "schedules": [data]}))
    with pytest.raises(ShapesError, match=rf"schedules\[0\]: .*{field}"):
        schedules.load(path)
    place = filed_at(tmp_path, tuned())
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(data))
    assert schedules.find(tmp_path, default()) is None


def test_a_missing_field_is_named():
    for name in tuned().to_json():
        data = tuned().to_json()
        del data[name]
        with pytest.raises(SpecError, match=name):
            Tuned.from_json(data)


# --- writing ---


def test_a_document_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("schedules.json").write_text("a longer text than what comes now" * 1000)
    schedules.dump("schedules.json", [])
    assert schedules.load("schedules.json") == []
    schedules.dump("deep/er/schedules.json", [tuned()])
    assert schedules.load("deep/er/schedules.json") == [tuned()]
    assert set(tree(tmp_path)) == {"schedules.json", "deep/er/schedules.json"}


def test_a_document_that_cannot_be_written_leaves_everything_as_it_was(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "directory").mkdir()
    for name in ("file/schedules.json", "directory"):
        with pytest.raises(OSError):
            schedules.dump(tmp_path / name, [tuned()])
    assert tree(tmp_path) == {"file": b""}


def test_a_root_that_cannot_be_written_is_said_with_a_hint(tmp_path):
    (tmp_path / "root").write_text("")
    with pytest.raises(CacheRootError, match="cannot be written") as caught:
        schedules.write(tmp_path / "root", tuned())
    assert "--cache-dir" in caught.value.hint


# --- trust ---


@pytest.mark.parametrize("where", ["record", "directory", "schedules", "root"])
def test_a_record_that_others_could_have_written_is_refused(tmp_path, monkeypatch, where):
    monkeypatch.delenv("TLCACHE_TRUST", raising=False)
    root = tmp_path / "root"
    schedules.write(root, tuned())
    path = filed_at(root, tuned())
    place = {
        "record": path,
        "directory": path.parent,
        "schedules": path.parent.parent,
        "root": root,
    }[where]
    place.chmod(0o777)
    with pytest.raises(UntrustedRootError, match="can be written by everybody"):
        schedules.find(root, default(), Trust(root))
    monkeypatch.setenv("TLCACHE_TRUST", "any")
    assert schedules.find(root, default(), Trust(root)) == tuned()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_damaged_record_of_somebody_elses_is_refused_and_not_ignored(tmp_path, monkeypatch):
    monkeypatch.delenv("TLCACHE_TRUST", raising=False)
    schedules.write(tmp_path, tuned())
    path = filed_at(tmp_path, tuned())
    path.write_text("{}")
    os.chown(path, 54321, -1)
    with pytest.raises(UntrustedRootError, match="belongs to uid 54321"):
        schedules.find(tmp_path, default(), Trust(tmp_path))


# --- choosing ---


def test_without_a_tuned_schedule_the_default_is_chosen(tmp_path):
    chooser = Chooser(tmp_path, [tuned(5)])
    assert chooser(RMS_NORM, default()) == default()
    assert (chooser.carried, chooser.unfit, chooser.missing(default())) == ({}, [], False)


def test_a_filed_schedule_wins_over_the_default(tmp_path):
    schedules.write(tmp_path, tuned())
    chooser = Chooser(tmp_path)
    assert chooser(RMS_NORM, default()) == tuned().spec
    assert chooser.carried == {}
    assert not chooser.missing(tuned().spec)
    assert chooser.install([tuned().spec]) == 0


def test_a_carried_schedule_wins_over_a_filed_one_and_replaces_it_once_installed(tmp_path):
    schedules.write(tmp_path, tuned(which=1))
    chooser = Chooser(tmp_path, [tuned(which=0)])
    assert chooser(RMS_NORM, default()) == tuned(which=0).spec
    assert chooser.missing(tuned(which=0).spec)
    assert schedules.find(tmp_path, default()) == tuned(which=1)
    assert chooser.install([tuned(which=0).spec]) == 1
    assert schedules.find(tmp_path, default()) == tuned(which=0)
    assert not chooser.missing(tuned(which=0).spec)
    assert chooser.install([tuned(which=0).spec]) == 0


def test_of_two_carried_schedules_for_a_workload_the_later_one_is_taken(tmp_path):
    chooser = Chooser(tmp_path, [tuned(which=0), tuned(which=1)])
    assert chooser(RMS_NORM, default()) == tuned(which=1).spec


def test_a_carried_default_is_installed_too_so_that_it_replaces_a_filed_schedule(tmp_path):
    schedules.write(tmp_path, tuned())
    chooser = Chooser(tmp_path, [tuned(spec=default())])
    assert chooser(RMS_NORM, default()) == default()
    assert chooser.install([default()]) == 1
    assert Chooser(tmp_path)(RMS_NORM, default()) == default()


def test_only_what_was_asked_for_and_is_there_is_installed(tmp_path):
    chooser = Chooser(tmp_path, [tuned(4), tuned(5), tuned(6)])
    chooser(RMS_NORM, default(4))
    chooser(RMS_NORM, default(5))
    assert set(chooser.carried) == {tuned(4).spec, tuned(5).spec}
    assert chooser.install([tuned(5).spec, default(4), tuned(6).spec]) == 1
    assert schedules.find(tmp_path, default(5)) == tuned(5)
    assert len(tree(tmp_path)) == 1


def test_an_unfit_schedule_falls_back_to_the_default_and_is_named(tmp_path):
    chooser = Chooser(tmp_path, [unfit()])
    assert chooser(RMS_NORM, default()) == default()
    assert chooser.unfit == [unfit()]
    assert chooser.carried == {}
    assert chooser.install([default(), unfit().spec]) == 0
    schedules.write(tmp_path, unfit())
    filed = Chooser(tmp_path)
    assert filed(RMS_NORM, default()) == default()
    assert filed.unfit == [unfit()]


def test_where_the_carried_schedule_is_unfit_the_filed_one_is_chosen(tmp_path):
    # It is what a process on this root takes.
    schedules.write(tmp_path, tuned())
    chooser = Chooser(tmp_path, [unfit()])
    assert chooser(RMS_NORM, default()) == tuned().spec
    assert chooser.unfit == [unfit()]
    assert schedules.find(tmp_path, default()) == tuned()
