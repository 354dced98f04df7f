"""What inotify tells of some directories, and what it loses."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.daemon.conftest import until
from tlcache.daemon.inotify import Inotify


@pytest.fixture
def inotify():
    made = Inotify()
    yield made
    made.close()


def test_what_comes_goes_and_changes_is_named(inotify, tmp_path):
    inotify.add(str(tmp_path))
    (tmp_path / "made").mkdir()
    (tmp_path / "written").write_text("x")
    (tmp_path / "made").rename(tmp_path / "renamed")
    names = {name for _, name in inotify.take().names}
    assert names == {"made", "written", "renamed"}
    os.utime(tmp_path / "written")
    (tmp_path / "renamed").rmdir()
    assert inotify.take().names == {(str(tmp_path), "written"), (str(tmp_path), "renamed")}
    assert not inotify.take()


def test_nothing_is_told_of_what_lies_deeper(inotify, tmp_path):
    (tmp_path / "entry").mkdir()
    inotify.add(str(tmp_path))
    (tmp_path / "entry/file").write_text("x")
    assert not inotify.take()


def test_a_directory_that_is_deleted_is_ended_and_can_be_watched_again(inotify, tmp_path):
    place = tmp_path / "kernels"
    place.mkdir()
    assert inotify.add(str(place))
    assert not inotify.add(str(place))
    place.rmdir()
    place.mkdir()  # it may have the same inode
    assert inotify.add(str(place))
    assert not inotify.take().ended
    (place / "x").mkdir()
    assert inotify.take().names == {(str(place), "x")}
    (place / "x").rmdir()
    place.rmdir()
    assert inotify.take().ended == {str(place)}


def test_another_directory_at_the_same_path_is_a_new_one(inotify, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    inotify.add(str(tmp_path / "a"))
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "b").rename(tmp_path / "a")
    assert inotify.add(str(tmp_path / "a"))
    assert len(inotify) == 1
    (tmp_path / "c/x").mkdir()
    assert not inotify.take().names


def test_what_is_dropped_is_watched_no_longer(inotify, tmp_path):
    for name in ("a", "a/b", "ab"):
        (tmp_path / name).mkdir()
        inotify.add(str(tmp_path / name))
    inotify.drop(str(tmp_path / "a"))
    (tmp_path / "a/b/x").mkdir()
    (tmp_path / "ab/x").mkdir()
    assert inotify.take().names == {(str(tmp_path / "ab"), "x")}
    inotify.keep(())
    assert len(inotify) == 0


def test_an_overflow_of_the_kernels_queue_is_told(inotify, tmp_path):
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if most > 200_000:
        pytest.skip("the queue is too long to be filled")
    inotify.add(str(tmp_path))
    for number in range(most // 2 + 100):  # two events each
        os.mkdir(tmp_path / str(number))
        os.rmdir(tmp_path / str(number))
    assert inotify.take().lost
    assert not inotify.take().lost


def test_more_changes_than_are_kept_are_lost_and_told(inotify, tmp_path, monkeypatch):
    monkeypatch.setattr("tlcache.daemon.inotify._MOST", 100)
    inotify.add(str(tmp_path))
    for number in range(1000):
        os.mkdir(tmp_path / str(number))
        inotify.drain()
    changes = inotify.take()
    assert changes.lost
    assert len(changes.names) <= 100


def test_the_wait_ends_when_something_changes_or_somebody_wakes_it(inotify, tmp_path):
    inotify.add(str(tmp_path))
    ended = threading.Event()

    def wait():
        inotify.wait(600)
        ended.set()

    for wake in (inotify.wake, lambda: (tmp_path / "x").mkdir()):
        thread = threading.Thread(target=wait)
        thread.start()
        wake()
        thread.join(60)
        assert until(ended.is_set)
        ended.clear()


def test_what_cannot_be_watched_is_an_error_that_says_why(inotify, tmp_path):
    with pytest.raises(FileNotFoundError):
        inotify.add(str(tmp_path / "nothing"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        inotify.add(str(tmp_path / "file"))
