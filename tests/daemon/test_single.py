"""One daemon a root."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.daemon.conftest import until
from tlcache.daemon.single import Claim
from tlcache.errors import DaemonError

_HOLD = """
import os, sys, time
from tlcache.daemon.single import Claim
status = os.stat(sys.argv[1])
claim = Claim(sys.argv[1])
claim.take((status.st_dev, status.st_ino))
print("held", flush=True)
time.sleep(600)
"""


def identity(path):
    status = os.stat(path)
    return status.st_dev, status.st_ino


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_is_refused_with_the_pid_of_the_first(holder, tmp_path):
    for _ in range(3):
        with pytest.raises(DaemonError, match=f"already: pid {holder.pid}\\n") as raised:
            Claim(str(tmp_path)).take(identity(tmp_path))
    assert "--root" in raised.value.hint


def test_who_is_killed_holds_nothing(holder, tmp_path):
    holder.kill()
    holder.wait()
    with Claim(str(tmp_path)) as claim:
        claim.take(identity(tmp_path))


def test_a_root_under_two_names_is_one(holder, tmp_path):
    link = tmp_path.parent / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(DaemonError, match=str(holder.pid)):
        Claim(str(link)).take(identity(link))


def test_nothing_is_written_to_the_root(holder, tmp_path):
    assert list(tmp_path.iterdir()) == []


def test_who_moves_to_another_directory_lets_the_first_go(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with Claim("first") as first, Claim("second") as second:
        first.take(identity(tmp_path / "a"))
        first.take(identity(tmp_path / "a"))
        first.take(identity(tmp_path / "b"))
        second.take(identity(tmp_path / "a"))
        with pytest.raises(DaemonError):
            second.take(identity(tmp_path / "b"))


def test_more_may_ask_than_fit_the_queue_as_long_as_they_are_answered(tmp_path):
    with Claim("root") as claim:
        claim.take(identity(tmp_path))
        for _ in range(60):
            with pytest.raises(DaemonError, match=str(os.getpid())):
                Claim("root").take(identity(tmp_path))
            claim.answer()


def test_one_that_does_not_answer_still_refuses(tmp_path):
    with Claim("root") as claim:
        claim.take(identity(tmp_path))

        def refused():
            with pytest.raises(DaemonError) as raised:
                Claim("root").take(identity(tmp_path))
            return "not known" in raised.value.message

        until(refused)
