"""Roots are kept within their bounds, and nothing goes that `prune` would keep."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.daemon.conftest import KERNELS, age, key, on_disk, publish, until
from tlcache.daemon.bounds import Bounds, Limits
from tlcache.daemon.history import Counter, History
from tlcache.store import candidates, evictions, locks, trash

MIB = 2**20


class Bounded:
    def __init__(self, followed, root, **limits):
        self.one = followed(root)
        self.history = History()
        self.bounds = Bounds(self.one.index, self.one.events, self.history, Limits(**limits))
        self.bounds.watch([self.one.follower])
        self.bounds.start()

    @property
    def bound(self):
        return self.bounds.roots[0]

    def pruned(self):
        return [told for told in self.one.events.recent() if told["kind"] == "pruned"]

    def stop(self):
        self.bounds.stop()
        assert self.bounds.join(60)


@pytest.fixture
def bounded(followed, cache_root):
    started = []

    def start(root=cache_root, **limits):
        started.append(Bounded(followed, root, **limits))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def fill(root: Path, numbers, *, size=50_000, days=10.0, filed=True):
    """Kernels, of which the first was used the longest ago."""
    for number in numbers:
        place = publish(root, number, size=size, filed=filed)
        age(place, days - number / 1000)
        for path in root.glob(f"tlcache/records/*/{key(-1 - number)}.json"):
            os.utime(path, (time.time() - 86400 * (days - number / 1000),) * 2)


def there(root: Path) -> set[str]:
    return {path.name for path in (root / KERNELS).iterdir()}


def whole(root: Path) -> None:
    """Every kernel has its files, and every record its kernel."""
    for path in (root / KERNELS).iterdir():
        assert sorted(file.name for file in path.iterdir()) == ["kernel_lib.so", "params.json"]
    dangling = [
        one.location
        for one in candidates.gather(root).candidates
        if one.entry.place.kind == "record"
    ]
    assert dangling == []


# --- size ---


def test_above_its_size_the_least_recently_used_go_until_a_tenth_is_free(bounded, cache_root):
    fill(cache_root, range(60))
    one = bounded(max_size=2 * MIB)
    until(lambda: on_disk(cache_root) <= 2 * MIB)
    until(one.pruned)
    left = there(cache_root)
    assert left == {key(number) for number in range(60 - len(left), 60)}
    assert 1.7 * MIB < on_disk(cache_root) <= 1.8 * MIB
    whole(cache_root)
    counters = one.history.counters()
    labels = (("reason", "max-size"), ("root", str(cache_root)))
    assert counters[Counter("evictions", labels)] == 60 - len(left)
    assert counters[Counter("evicted_bytes", labels)] > 0
    told = evictions.recent(cache_root)
    assert {evicted.by for evicted in told} == {"daemon"}
    assert {evicted.why for evicted in told} == {f"--max-size {2 * MIB}"}
    one.one.is_a_scan(rescanned=True)


def test_below_its_size_nothing_is_deleted(bounded, cache_root):
    fill(cache_root, range(20))
    before = there(cache_root)
    one = bounded(max_size=2 * MIB)
    until(lambda: one.bound.bytes)
    assert one.bound.bytes == on_disk(cache_root)
    fill(cache_root, range(20, 25))
    until(lambda: one.bound.bytes > on_disk(cache_root))
    assert there(cache_root) >= before
    assert one.pruned() == []


def test_a_root_that_writers_fill_is_within_its_size_again(bounded, cache_root):
    one = bounded(max_size=2 * MIB)
    for number in range(200):
        publish(cache_root, number, size=50_000, filed=number % 2 == 0)
    until(lambda: on_disk(cache_root) <= 2 * MIB)
    whole(cache_root)
    until(lambda: one.bound.over is None)


def test_what_a_process_has_mapped_stays_and_is_told(bounded, cache_root):
    fill(cache_root, range(60))
    maps = []
    for number in range(50):
        with open(cache_root / KERNELS / key(number) / "kernel_lib.so", "rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    one = bounded(max_size=2 * MIB)
    until(lambda: one.bound.over)
    assert "loaded by pid" in one.bound.over
    assert {key(number) for number in range(50)} <= there(cache_root)
    assert not {key(number) for number in range(50, 60)} & there(cache_root)
    for one_map in maps:
        one_map.close()
    one.bound.next = 0.0
    until(lambda: on_disk(cache_root) <= 2 * MIB)


def test_who_loads_kernels_while_they_go_finds_them_whole_or_not_at_all(bounded, cache_root):
    one = bounded(max_size=2 * MIB)
    reader = subprocess.Popen(
        [sys.executable, "-c", _READER, str(cache_root / KERNELS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    for number in range(250):
        publish(cache_root, number, size=50_000, filed=True)
    until(lambda: on_disk(cache_root) <= 2 * MIB)
    out, _ = reader.communicate("stop\n", timeout=60)
    assert out.startswith("held ")
    lost = out.partition("lost ")[2].strip()
    assert lost == "0"
    until(one.pruned)


# Maps every tenth kernel that it sees, and says at the end which of those are gone.
_READER = """
import mmap, os, select, sys
top, held = sys.argv[1], {}
while not select.select([sys.stdin], [], [], 0.01)[0]:
    for name in os.listdir(top) if os.path.isdir(top) else ():
        if name not in held and int(name, 16) % 10 == 0:
            try:
                with open(f"{top}/{name}/kernel_lib.so", "rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                    if os.path.exists(f"{top}/{name}"):
                        held[name] = mapped
            except FileNotFoundError:
                pass
lost = [name for name in held if not os.path.exists(f"{top}/{name}/kernel_lib.so")]
print("held", len(held), "lost", len(lost))
"""


# --- age, and room ---


def test_what_was_not_used_for_too_long_goes(bounded, cache_root):
    fill(cache_root, range(10), days=40)
    fill(cache_root, range(10, 20), days=5)
    one = bounded(max_age=30 * 86400.0)
    until(lambda: there(cache_root) == {key(number) for number in range(10, 20)})
    assert until(one.pruned)[0]["reason"] == "max-age"


def test_room_is_made_on_the_file_system(mounted, bounded):
    root = mounted("size=4m")
    fill(root, range(60))
    status = os.statvfs(root)
    assert status.f_bavail * status.f_frsize < MIB
    one = bounded(root, keep_free=MIB)

    def free():
        now = os.statvfs(root)
        return now.f_bavail * now.f_frsize

    until(lambda: free() >= MIB)
    until(one.pruned)
    assert one.pruned()[0]["reason"] == "keep-free"
    whole(root)


def test_a_full_disk_is_brought_back_under_its_bound(mounted, bounded):
    root = mounted("size=2m")
    fill(root, range(20))
    with pytest.raises(OSError, match="No space"):
        (root / "filler").write_bytes(b"x" * 4 * MIB)
    one = bounded(root, max_size=MIB // 2)
    until(lambda: on_disk(root) <= MIB // 2)
    until(lambda: one.bound.over is None)


# --- what is left alone ---


def test_a_read_only_root_is_left_alone_until_it_can_be_written(mounted, bounded):
    root = mounted("size=8m")
    fill(root, range(60))
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    one = bounded(root, max_size=2 * MIB)
    until(lambda: one.bound.refused)
    assert one.bound.refused == "it is read-only"
    assert len(there(root)) == 60
    subprocess.run(["mount", "-o", "remount,rw", str(root)], check=True)
    until(lambda: on_disk(root) <= 2 * MIB)


def test_nothing_is_deleted_from_a_network_file_system(bounded, cache_root, monkeypatch):
    # None can be mounted here: the table of mounts says that this is one.
    fill(cache_root, range(60))
    table = cache_root.parent / "mountinfo"
    table.write_text(f"36 35 98:0 / {cache_root.parent} rw - nfs4 server:/export rw\n")
    monkeypatch.setattr("tlcache.daemon.root._TABLE", str(table))
    one = bounded(max_size=2 * MIB)
    until(lambda: one.bound.refused)
    assert "network file system (nfs4)" in one.bound.refused
    assert len(there(cache_root)) == 60


def test_while_somebody_else_prunes_it_waits_its_turn(bounded, cache_root):
    fill(cache_root, range(60))
    with locks.pruning(cache_root):
        one = bounded(max_size=2 * MIB)
        until(lambda: one.bound.next > 0)
        assert len(there(cache_root)) == 60
    until(lambda: on_disk(cache_root) <= 2 * MIB)


def test_without_a_bound_nothing_is_deleted_not_even_trash(bounded, cache_root):
    fill(cache_root, range(3), days=4000)
    trash.move(cache_root, cache_root / KERNELS / key(0), trash.TRASH)
    one = bounded()
    publish(cache_root, 10)
    one.one.is_a_scan()
    assert len(there(cache_root)) == 3
    assert list((cache_root / "tlcache/trash").iterdir())


# --- killed ---


def test_killed_at_any_point_it_leaves_a_root_that_is_whole(served, cache_root):
    random_ = random.Random(0)
    number = 0
    for _ in range(6):
        for _ in range(60):
            publish(cache_root, number, size=50_000, filed=number % 3 > 0)
            number += 1
        one = served(max_size=2 * MIB)
        assert one.started is True
        time.sleep(random_.uniform(0.3, 2.5))
        one.kill()
        whole(cache_root)
    one = served(max_size=2 * MIB)
    until(lambda: on_disk(cache_root) <= 2 * MIB)
    until(lambda: not list((cache_root / "tlcache").glob("trash/*/*")))
    whole(cache_root)
