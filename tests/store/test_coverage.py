"""Coverage manifests: believed only while they hold, and only of what is there."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tlcache import closure, operators, targets
from tlcache.fingerprint import versions
from tlcache.store import coverage, layout, record, schedules
from tlcache.store.coverage import Coverage
from tlcache.store.record import Launch, Library, Param, Record
from tlcache.store.schedules import Tuned

RMS_NORM = operators.get("rms_norm")
DOCUMENT = b'{"version": 1}'
CODE = b"\x7fELF of a kernel"
NAME = "c" * 64


def spec(rows: int = 1):
    return RMS_NORM.spec({"M": rows, "N": 64, "dtype": "float32"}, targets.CPU)


def file(root: Path, one) -> Record:
    """A record, and the entry that it points at."""
    entry = f"0.1.15/linux-x86_64/kernels/{hashlib.sha256(str(one).encode()).hexdigest()}"
    (root / entry).mkdir(parents=True)
    (root / entry / "kernel_lib.so").write_bytes(CODE)
    filed = Record(
        one.action_key(),
        one,
        entry,
        Library("kernel_lib.so", len(CODE), hashlib.sha256(CODE).hexdigest()),
        Launch("c", "call", (Param("x", "float32", (4,)), Param("y", "float32", (4,))), (1,), ()),
        versions(),
        {"nvcc": None},
        closure.factory_digest(one.kernel),
        1.5,
        "2026-01-01T00:00:00+00:00",
    )
    record.write(root, filed)
    return filed


def made(*places: Path, rows=(1, 2)) -> Coverage:
    """A manifest of two kernels, as far as the roots have them."""
    kernels = [
        coverage.of_kernel(places, one, one.action_key(), tunable=True) for one in map(spec, rows)
    ]
    closures = [closure.closure(RMS_NORM.kernel)]
    return Coverage(["cpu"], [], closures, kernels, versions())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "root"
    for rows in (1, 2):
        file(place, spec(rows))
    return place


def test_what_is_written_is_read_and_is_not_written_twice(root):
    one = made(root)
    coverage.write(root, NAME, one)
    path = Path(coverage.path(root, NAME))
    before = path.stat()
    coverage.write(root, NAME, one)
    assert coverage.read(root, NAME) == one
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert coverage.hold(one, [root]) and coverage.missing(one, [root]) == []
    assert [kernel.status for kernel in one.kernels] == ["ready", "ready"]


@pytest.mark.parametrize("what", ["library", "record", "entry"])
def test_a_kernel_is_there_only_while_its_bytes_are(root, what):
    one = made(root)
    library = root / one.kernels[0].entry / "kernel_lib.so"
    filed = Path(layout.record_path(root, one.kernels[0].action_key))
    if what == "library":
        library.write_bytes(CODE[:-1] + b"L")
    elif what == "record":
        filed.write_bytes(filed.read_bytes().replace(b"1.5", b"2.5"))
    else:
        library.unlink()
    assert coverage.missing(one, [root]) == [one.kernels[0]]


def test_a_kernel_is_there_if_any_of_the_roots_has_it(root, tmp_path):
    one, overlay = made(root), tmp_path / "overlay"
    assert coverage.missing(one, [overlay]) == one.kernels
    assert coverage.missing(one, [overlay, root]) == []


def test_what_was_left_is_there_once_it_was_made(root):
    one = made(root, rows=(1, 3))
    assert [kernel.status for kernel in one.kernels] == ["ready", "left"]
    assert coverage.missing(one, [root]) == [one.kernels[1]]
    file(root, spec(3))
    assert coverage.missing(one, [root]) == []


def test_a_schedule_that_was_tuned_since_is_another_plan(root):
    one = made(root)
    tuned = Tuned("rms_norm", spec(1), 1.0, dict(spec(1).schedule), 2.0, "a GPU")
    schedules.write(root, tuned)
    assert not coverage.hold(one, [root])
    assert coverage.hold(made(root), [root])


def test_another_source_is_another_plan(root):
    one = made(root)
    first = one.closures[0]
    other = {**first.sources, RMS_NORM.kernel.partition(":")[0]: "0" * 64}
    changed = Coverage(
        one.targets, [], [first._replace(sources=other)], one.kernels, one.fingerprint
    )
    assert not coverage.hold(changed, [root])


def test_the_key_is_of_the_documents_bytes_and_the_targets(monkeypatch):
    first = coverage.key(DOCUMENT, ["cpu"])
    assert coverage.key(DOCUMENT, ["cpu"]) == first
    others = {coverage.key(DOCUMENT + b" ", ["cpu"]), coverage.key(DOCUMENT, ["sm_90a"])}
    monkeypatch.setenv("TILELANG_LAYOUT_COST_MODEL", "1")
    others.add(coverage.key(DOCUMENT, ["cpu"]))
    assert len(others | {first}) == 4


def test_a_root_keeps_the_newest_manifests_only(root, monkeypatch):
    monkeypatch.setattr(coverage, "MOST", 3)
    one = made(root)
    for number in range(5):
        coverage.write(root, f"{number:064}", one)
        os.utime(coverage.path(root, f"{number:064}"), (number, number))
    kept = sorted(path.stem for path in (root / "tlcache/coverage").iterdir())
    assert kept == [f"{number:064}" for number in (2, 3, 4)]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_manifest_of_any_content_is_none_or_is_judged(root, data):
    document = json.loads(json.dumps(made(root).to_json()))
    place = document
    while isinstance(place, (dict, list)) and place:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        name = data.draw(st.sampled_from(list(keys)))
        if not isinstance(place[name], (dict, list)) or data.draw(st.booleans()):
            place[name] = data.draw(_JSON)
            break
        place = place[name]
    path = Path(coverage.path(root, NAME))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(record.encode(document))
    found = coverage.read(root, NAME)
    if found is not None:
        coverage.hold(found, [root])
        coverage.missing(found, [root])


@pytest.mark.parametrize("at", [0, 40, -3])
def test_a_manifest_that_was_cut_or_flipped_is_none(root, at):
    coverage.write(root, NAME, made(root))
    path = Path(coverage.path(root, NAME))
    whole = path.read_bytes()
    path.write_bytes(whole[:at])
    assert coverage.read(root, NAME) is None
    flipped = bytearray(whole)
    flipped[at] ^= 1
    path.write_bytes(flipped)
    assert coverage.read(root, NAME) is None
