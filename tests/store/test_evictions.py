"""The log of evictions: bounded, appended whole, and never the reason why anything fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tlcache.store import evictions
from tlcache.store.evictions import Eviction

ONE = Eviction(
    key="7b" * 32,
    path="0.1.15/linux-x86_64/kernels/" + "7b" * 32,
    kind="kernel",
    kernel="rms_norm",
    target="sm_90a",
    action_key="c5" * 32,
    bytes=75_776,
    why="--max-size 5GiB",
    when="2026-01-31T12:00:00+00:00",
)


def numbered(number, **fields):
    return Eviction(**{**vars(ONE), "key": f"{number:064x}", **fields})


def keys(root):
    return [int(one.key, 16) for one in evictions.recent(root)]


def test_what_is_noted_is_read_back_newest_first(tmp_path):
    assert evictions.recent(tmp_path) == []
    assert evictions.note(tmp_path, [ONE])
    assert evictions.note(tmp_path, [numbered(1, kernel=None, target=None, action_key=None)])
    assert evictions.recent(tmp_path) == [
        numbered(1, kernel=None, target=None, action_key=None),
        ONE,
    ]


def test_an_eviction_without_a_time_gets_the_present_one(tmp_path):
    evictions.note(tmp_path, [numbered(1, when="")])
    assert evictions.recent(tmp_path)[0].when.endswith("+00:00")


def test_no_evictions_make_no_file(tmp_path):
    assert evictions.note(tmp_path, [])
    assert list(tmp_path.iterdir()) == []


def test_the_log_is_bounded_and_keeps_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr(evictions, "MOST", 50)
    for start in range(0, 1000, 10):
        evictions.note(tmp_path, map(numbered, range(start, start + 10)))
        assert len(keys(tmp_path)) <= 110
    assert keys(tmp_path)[:50] == list(range(999, 949, -1))


def test_the_log_is_bounded_in_bytes_too(tmp_path, monkeypatch):
    monkeypatch.setattr(evictions, "MOST_BYTES", 300_000)
    for start in range(0, 3000, 300):
        evictions.note(tmp_path, [numbered(n, why="x" * 2000) for n in range(start, start + 300)])
    assert os.path.getsize(evictions.path(tmp_path)) <= 300_000
    assert keys(tmp_path)[0] == 2999


def test_a_line_too_long_is_shortened_and_one_that_cannot_be_is_left_out(tmp_path):
    evictions.note(tmp_path, [numbered(1, why="w" * 9000), numbered(2, target="t" * 9000)])
    (kept,) = evictions.recent(tmp_path)
    assert kept.why == "w" * 200


def test_a_line_that_a_kill_cut_off_takes_no_other_along(tmp_path):
    evictions.note(tmp_path, map(numbered, range(3)))
    path = Path(evictions.path(tmp_path))
    path.write_bytes(path.read_bytes()[:-20])
    evictions.note(tmp_path, [numbered(3)])
    assert keys(tmp_path) == [3, 1, 0]


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.binary(max_size=300)
    | st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(list(vars(ONE))), inner),
    ).map(lambda data: json.dumps(data).encode())
)
def test_damage_is_passed_over(tmp_path, damage):
    path = Path(evictions.path(tmp_path))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(damage)
    assert evictions.recent(tmp_path) == []
    assert evictions.note(tmp_path, [ONE])
    assert evictions.recent(tmp_path) == [ONE]


def test_a_flipped_field_is_no_eviction(tmp_path):
    for name in vars(ONE):
        wrong = json.dumps({**vars(ONE), name: [1]}) + "\n"
        missing = json.dumps({key: v for key, v in vars(ONE).items() if key != name}) + "\n"
        Path(tmp_path, "tlcache").mkdir(exist_ok=True)
        Path(evictions.path(tmp_path)).write_text(wrong + missing)
        assert evictions.recent(tmp_path) == []


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_what_is_no_file_is_neither_read_nor_written(tmp_path, kind):
    path = Path(evictions.path(tmp_path))
    path.parent.mkdir()
    (tmp_path / "elsewhere").write_text(json.dumps(vars(ONE)) + "\n")
    make = {
        "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
        "fifo": lambda: os.mkfifo(path),
        "directory": path.mkdir,
    }
    make[kind]()
    assert evictions.recent(tmp_path) == []
    assert not evictions.note(tmp_path, [numbered(1)])
    assert (tmp_path / "elsewhere").read_text() == json.dumps(vars(ONE)) + "\n"


def test_a_root_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "tlcache").write_text("a file, not a directory")
    assert not evictions.note(tmp_path, [ONE])
    assert evictions.recent(tmp_path) == []


def test_processes_that_note_at_once_lose_nothing(tmp_path):
    source = (
        "import sys\n"
        "from tlcache.store import evictions\n"
        "from tlcache.store.evictions import Eviction\n"
        "evictions.MOST = 300\n"
        "first = int(sys.argv[2])\n"
        "for number in range(first, first + 60):\n"
        "    assert evictions.note(sys.argv[1], [Eviction(f'{number:064x}', 'p', 'kernel', 'k',"
        " 'cpu', None, 1, 'w' * 150)])\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", source, str(tmp_path), str(first)])
        for first in (0, 100, 200, 300)
    ]
    assert [process.wait() for process in running] == [0] * 4
    found = keys(tmp_path)
    assert sorted(found) == [first + n for first in (0, 100, 200, 300) for n in range(60)]
    for first in (0, 100, 200, 300):
        mine = [n for n in found if first <= n < first + 60]
        assert mine == sorted(mine, reverse=True)
