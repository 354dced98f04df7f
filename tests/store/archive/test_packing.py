"""Groups of things packed by workers: the same bytes on any number of cores, and whatever happens
to a worker.
"""

from __future__ import annotations

import os
import threading

import pytest

from tlcache.store.archive import choosing, packing
from tlcache.store.archive.packing import Packing

# In a process of its own, since one with threads is not forked. Its arguments: the root, how many
# cores there are, and what happens meanwhile.
PACK = """
import hashlib, os, signal, sys
from tlcache.store.archive import choosing, packing

root, cores, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.sched_getaffinity = lambda pid: set(range(cores))
packing._GROUP = 4
choice = choosing.everything(root)
digest = hashlib.sha256()
try:
    with packing.Packing(root, choice.places) as packed:
        workers = [pid for pid, _ in packed._workers]
        if what == "kill":
            os.kill(workers[0], signal.SIGKILL)
        for group in packed:
            digest.update(repr(group).encode())
            if what == "stop":
                raise KeyboardInterrupt
except KeyboardInterrupt:
    pass
try:
    os.waitpid(-1, os.WNOHANG)
    left = "left"
except ChildProcessError:
    left = "none"
print(len(workers), left, digest.hexdigest())
"""


@pytest.fixture
def packed(python, source):
    """How many workers there were, whether one is left, and a digest of all groups."""

    def packed(cores: int, what: str = "nothing") -> tuple[int, str, str]:
        done = python(PACK, str(source), str(cores), what)
        assert done.code == 0, done.err
        count, left, digest = done.out.split()
        return int(count), left, digest

    return packed


def test_any_number_of_cores_packs_the_same(packed):
    count, left, digest = packed(1)
    assert (count, left) == (0, "none")
    assert packed(2) == (2, "none", digest)
    assert packed(5) == (5, "none", digest)


def test_what_a_killed_worker_did_not_do_is_done(packed):
    assert packed(2, "kill") == (2, "none", packed(1)[2])


def test_who_stops_early_leaves_no_worker(packed):
    assert packed(2, "stop")[:2] == (2, "none")


def test_a_process_with_threads_is_not_forked(source, monkeypatch):
    monkeypatch.setattr(packing, "_GROUP", 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    choice = choosing.everything(str(source))
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with Packing(choice.root, choice.places) as packed:
            assert packed._workers == []
            assert sum(group.things for group in packed) == len(choice.places)
    finally:
        done.set()
        thread.join()


def test_a_large_file_is_read_whole_and_a_link_is_not(tmp_path):
    data = os.urandom(3 * 1024 * 1024 + 7)
    for size in (0, 1, packing._FIRST - 1, packing._FIRST, packing._FIRST + 1, len(data)):
        (tmp_path / "file").write_bytes(data[:size])
        assert packing.read(str(tmp_path / "file")) == data[:size]
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic links"):
        packing.read(str(tmp_path / "link"))
