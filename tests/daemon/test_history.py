"""Counters and samples that outlive the daemon."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys

import pytest

from tlcache.daemon import history
from tlcache.daemon.history import LABELS, WINDOWS, Counter, History

NOW = 1_900_000_000.0
A, B = Counter("a"), Counter("b", (("op", "x"),))


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "state" / "history")


def test_counters_go_on_where_they_were(path):
    first = History(path)
    first.count("a", by=2)
    first.count("b", {"op": "x"})
    first.close()
    second = History(path)
    second.count("a")
    assert second.counters() == {A: 3.0, B: 1.0}
    second.close()


def test_a_kill_loses_nothing_that_was_written(path):
    script = (
        "import sys, os, signal\n"
        "from tlcache.daemon.history import History, Counter\n"
        "one = History(sys.argv[1])\n"
        "for number in range(100):\n"
        "    one.count('a')\n"
        "    one.tally('p', {Counter('b'): 100})\n"
        "    one.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for round_ in range(1, 4):
        subprocess.run([sys.executable, "-c", script, path], check=False)
        again = History(path)
        assert again.counters() == {A: 100.0 * round_, Counter("b"): 100.0}
        again.close()


def test_what_a_process_counted_is_added_once_whoever_restarts(path):
    first = History(path)
    first.tally("pid 1", {A: 10, B: 1})
    first.tally("pid 1", {A: 15, B: 1})
    first.close()
    second = History(path)
    second.tally("pid 1", {A: 20, B: 1})
    second.tally("pid 2", {A: 3})
    second.tally("pid 2", {A: 1})  # it says less than before: that takes nothing away
    assert second.counters() == {A: 23.0, B: 1.0}
    second.close()


def test_labels_are_bounded():
    one = History()
    for number in range(LABELS + 50):
        one.count("a", {"op": f"op {number}"})
    values = {dict(counter.labels)["op"] for counter in one.counters()}
    assert len(values) == LABELS + 1
    assert one.counters()[Counter("a", (("op", "other"),))] == 50


def test_samples_are_kept_for_an_hour_a_day_and_a_week(path):
    one = History(path)
    for step in range(0, 8 * 86400, 60):
        one.sample({"entries": step}, NOW + step)
    end = NOW + 8 * 86400 - 60
    for name, window in WINDOWS.items():
        series = one.series(name)
        assert len(series) <= window.span / window.step + 1
        assert series[-1].time >= end - window.step
        assert series[0].time >= end - window.span - window.step
        assert len(series) > 0.4 * window.span / max(window.step, 60)
    one.close()


def test_the_file_is_bounded(path, monkeypatch):
    monkeypatch.setattr(history.time, "time", lambda: NOW)
    one = History(path)
    for step in range(0, 30 * 86400, 600):
        monkeypatch.setattr(history.time, "time", lambda step=step: NOW + step)
        one.sample({"entries": 1.0}, NOW + step)
        one.flush()
    one.close()
    rows = sqlite3.connect(path).execute("SELECT COUNT(*) FROM samples").fetchone()[0]
    assert rows <= sum(window.span / window.step + 2 for window in WINDOWS.values())


def test_a_clock_that_is_set_back_stops_no_samples():
    one = History()
    one.sample({"x": 1}, NOW)
    one.sample({"x": 2}, NOW - 1000)
    assert [sample.figures["x"] for sample in one.series("hour")][-1] == 2


@pytest.mark.parametrize("damage", [b"no database at all" * 100, b""])
def test_a_damaged_file_is_put_aside_and_a_new_one_begun(path, damage):
    one = History(path)
    one.count("a")
    one.close()
    with open(path, "wb") as file:
        file.write(damage)
    two = History(path)
    two.flush()
    two.count("a")
    assert two.flush()
    two.close()
    assert History(path).counters() == {A: 1.0}


def test_rows_that_make_no_sense_are_damage(path):
    one = History(path)
    one.count("a")
    one.close()
    database = sqlite3.connect(path)
    database.execute("UPDATE counters SET labels = 'x'")
    database.commit()
    database.close()
    two = History(path)
    two.count("a")
    assert two.flush()
    two.close()
    three = History(path)
    assert three.counters() == {A: 1.0}
    three.close()


def test_on_a_full_disk_it_goes_on_in_memory_and_writes_later(mounted):
    place = mounted("size=256k")
    one = History(str(place / "history"))
    assert one.trouble is None
    filler = place / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(b"x" * 2**20)
    for number in range(90):
        one.count("a", {"op": f"{number} " * 40})
    assert not one.flush()
    assert "full" in one.trouble or "I/O" in one.trouble
    one.count("a")
    filler.unlink()
    assert one.flush()
    assert one.trouble is None
    one.close()
    two = History(str(place / "history"))
    assert sum(two.counters().values()) == 91
    two.close()


def test_where_it_cannot_be_made_it_is_in_memory_and_says_why(tmp_path):
    (tmp_path / "file").write_text("x")
    one = History(str(tmp_path / "file" / "history"))
    one.count("a")
    assert not one.flush()
    assert "cannot be used" in one.trouble
    assert one.counters() == {A: 1.0}
    (tmp_path / "file").unlink()
    assert one.flush()
    one.close()


def test_a_second_daemon_does_not_overwrite_the_first_ones(path):
    one = History(path)
    one.count("a", by=5)
    assert one.flush()
    two = History(path)
    two.count("a")
    assert not two.flush()
    assert "locked" in two.trouble
    one.close()
    assert two.flush()
    assert two.counters() == {A: 6.0}
    two.close()


def test_counters_can_be_written_as_json():
    one = History()
    one.count("a", {"root": "/x"}, 2.5)
    (found,) = one.counters()
    assert json.dumps([found.name, dict(found.labels)]) == '["a", {"root": "/x"}]'
