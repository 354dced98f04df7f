"""The index is what a scan finds, whatever happens to the root."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.daemon.conftest import KERNELS, age, copied, key, publish, until
from tlcache.daemon import root as roots
from tlcache.store import scan


@pytest.fixture
def mixed(mixed):
    for number in range(5):
        publish(mixed, number, filed=True)
    return mixed


# --- entries ---


def test_a_root_of_many_releases_is_what_a_scan_finds(followed, mixed):
    one = followed()
    assert not one.differences()
    assert {"kernel", "cuda-binary"} <= {found.place.kind for found in one.index.entries()}
    assert one.follower.watches < 60


def test_entries_that_are_renamed_into_it_come_and_go(followed, mixed):
    one = followed()
    places = [publish(mixed, number) for number in range(100, 120)]
    one.is_a_scan()
    places[0].rename(places[0].parent / key(999))
    for place in places[1:]:
        shutil.rmtree(place)
    one.is_a_scan()
    assert one.kinds().count("entry-added") >= 21


def test_an_entry_that_is_copied_file_by_file_is_whole_in_the_end(followed, mixed, entries):
    one = followed()
    for number, entry in enumerate(entries):
        copied(entry, mixed, 200 + number)
    one.is_a_scan()


def test_a_file_that_is_added_late_to_a_young_entry_is_seen(followed, mixed):
    one = followed()
    place = mixed / KERNELS / key(300)
    place.mkdir()
    one.is_a_scan()
    (place / "kernel_lib.so").write_bytes(b"x" * 100)
    one.is_a_scan()
    (place / "params.json").write_text("[]")
    one.is_a_scan()


def test_what_changes_in_an_old_entry_is_seen_by_the_next_scan(followed, mixed):
    entry = mixed / KERNELS / key(1)
    age(entry, 1)
    one = followed()
    with open(entry / "kernel_lib.so", "r+b") as file:
        file.write(b"other")
    one.follower.rescan()
    one.is_a_scan(rescanned=True)


def test_the_checksum_of_a_cubin_counts_to_the_cubin(followed, mixed):
    one = followed()
    checksums = sorted(mixed.glob("*/cuda-binaries/*.sha256"))
    assert checksums
    checksums[0].unlink()
    one.is_a_scan()
    checksums[0].write_text("0" * 64)
    one.is_a_scan()


# --- directories ---


def test_versions_platforms_and_kinds_come_and_go(followed, mixed, mixed_root):
    one = followed()
    shutil.copytree(mixed_root / "0.1.15", mixed / "0.1.16")
    one.is_a_scan()
    (mixed / "0.1.16/linux-x86_64").rename(mixed / "0.1.16/linux-aarch64")
    one.is_a_scan()
    (mixed / "0.1.16/linux-aarch64/kernels").rename(mixed / "elsewhere")
    one.is_a_scan()
    (mixed / "elsewhere").rename(mixed / "0.1.16/linux-aarch64/kernels")
    one.is_a_scan()
    shutil.rmtree(mixed / "0.1.16")
    one.is_a_scan()
    (mixed / "0.1.16").write_text("a file")
    one.is_a_scan()


def test_a_directory_in_the_place_of_another_is_read_anew(followed, mixed):
    one = followed()
    kernels = mixed / KERNELS
    shutil.copytree(kernels, mixed / "copy")
    for library in (mixed / "copy").glob("*/kernel_lib.so"):
        library.write_bytes(b"others")
    kernels.rename(mixed / "0.1.15/linux-x86_64/before")
    (mixed / "copy").rename(kernels)
    one.is_a_scan()


def test_a_root_that_appears_below_a_base_is_one_and_one_that_is_emptied_is_not(
    followed, mixed, mixed_root
):
    one = followed()
    (mixed / "tl0.1.15").mkdir()
    one.is_a_scan()
    for number in range(3):
        publish(mixed / "tl0.1.15", number, filed=True)
    one.is_a_scan()
    filed = [found for found in one.index.entries() if "/tl0.1.15/" in found.place.location]
    assert [found.record is not None for found in filed if found.place.kind == "kernel"] == [
        True
    ] * 3
    (mixed / "tl0.1.15").rename(mixed / "other")
    one.is_a_scan()
    shutil.rmtree(mixed / "other/0.1.15")
    one.is_a_scan()
    shutil.copytree(mixed_root, mixed / "whole")
    one.is_a_scan()


# --- records ---


def test_records_come_are_used_and_go(followed, mixed):
    one = followed()
    place = publish(mixed, 400)
    one.is_a_scan()
    shutil.rmtree(place)
    place = publish(mixed, 400, filed=True)
    one.is_a_scan()
    path = mixed / "tlcache/records" / key(-401)[:2] / f"{key(-401)}.json"
    os.utime(path, (10**9, 2 * 10**9))
    one.is_a_scan()
    found = one.index.at(str(mixed), str(place))
    assert found.record is not None
    assert found.last_used.timestamp() == 2 * 10**9
    assert one.index.get(key(-401)) is found
    path.write_text("damaged")
    one.is_a_scan()
    path.unlink()
    one.is_a_scan()
    assert one.index.at(str(mixed), str(place)).record is None


def test_all_records_may_go_at_once_and_come_back(followed, mixed):
    one = followed()
    (mixed / "tlcache").rename(mixed / "aside")
    one.is_a_scan()
    assert all(found.record is None for found in one.index.entries())
    (mixed / "aside").rename(mixed / "tlcache")
    one.is_a_scan()
    assert any(found.record is not None for found in one.index.entries())
    shutil.rmtree(mixed / "tlcache/records")
    one.is_a_scan()


def test_of_two_records_of_one_entry_the_same_one_is_told_whoever_came_first(followed, cache_root):
    import dataclasses

    from tlcache.store import record

    one = followed
    place = publish(cache_root, 1, filed=True)
    (filed,) = (record.read(cache_root, key(-2)),)
    for number in range(20):
        record.write(cache_root, dataclasses.replace(filed, action_key=key(5000 + number)))
    followed_one = one()
    for number in range(20, 40):
        record.write(cache_root, dataclasses.replace(filed, action_key=key(5000 + number)))
    followed_one.is_a_scan()
    assert followed_one.index.at(str(cache_root), str(place)).record is not None


# --- anything, at any time ---

_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["publish", "file", "remove", "copy", "touch", "move", "version", "drop"]),
        st.integers(0, 7),
    ),
    min_size=1,
    max_size=25,
)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=_STEPS)
def test_any_sequence_of_changes_leaves_what_a_scan_finds(
    steps, followed, entries, tmp_path_factory
):
    root = tmp_path_factory.mktemp("root")
    one = followed(root)
    for number, (step, which) in enumerate(steps):
        _do(step, which, number, root, entries)
    one.is_a_scan()
    one.stop()


def _do(step: str, which: int, number: int, root: Path, entries: list[Path]) -> None:
    kernels = root / KERNELS
    there = sorted(kernels.glob("*"))
    if step in ("publish", "file"):
        publish(root, 1000 + number, filed=step == "file")
    elif step == "copy":
        copied(entries[which % len(entries)], root, 2000 + number)
    elif step == "version":
        shutil.copytree(entries[0].parent, root / f"0.2.{number}/linux-x86_64/kernels")
    elif step == "drop":
        for path in sorted(root.iterdir())[which : which + 1]:
            shutil.rmtree(path)
    elif there and step == "remove":
        shutil.rmtree(there[which % len(there)])
    elif there and step == "touch":
        os.utime(there[which % len(there)], (10**9, 10**9 + which))
    elif there and step == "move":
        there[which % len(there)].rename(root / f"moved{number}")


def test_many_entries_from_many_threads_leave_what_a_scan_finds(followed, cache_root):
    cache_root.mkdir()
    one = followed()

    def churn(start: int) -> None:
        random_ = random.Random(start)
        alive: list[Path] = []
        for number in range(start, start + 250):
            alive.append(publish(cache_root, number, filed=number % 3 == 0))
            if len(alive) > 20 or random_.random() < 0.3:
                shutil.rmtree(alive.pop(random_.randrange(len(alive))))

    threads = [threading.Thread(target=churn, args=(1000 * n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.is_a_scan()
    assert one.follower.overflows == 0


# --- what is lost ---


def test_a_lost_event_is_a_scan_and_no_drift(served, cache_root):
    cache_root.mkdir()
    publish(cache_root, 0)
    one = served()
    assert one.started is True
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    one.send(signal.SIGSTOP)
    kernels = cache_root / KERNELS
    for _ in range(most // 2 + 100):
        os.mkdir(kernels / "x")
        os.rmdir(kernels / "x")
    for number in range(1, 50):
        publish(cache_root, number)
    shutil.rmtree(kernels / key(0))
    one.send(signal.SIGCONT)

    def fresh():
        return {found.place.location: found.bytes for found in scan.scan(cache_root)}

    until(lambda: one.ask("index") == fresh())
    assert one.ask("stats")["roots"][0]["overflows"] == 1
    assert "overflow" in [told["kind"] for told in one.ask("events")]
    publish(cache_root, 100)
    until(lambda: one.ask("index") == fresh())


def test_a_fault_while_following_is_a_scan(followed, mixed, monkeypatch):
    one = followed()

    def broken(*_):
        monkeypatch.undo()
        raise RuntimeError("broken")

    monkeypatch.setattr(one.follower, "_item", broken)
    publish(mixed, 500)
    until(lambda: one.follower.scans > 1)
    one.is_a_scan(rescanned=True)


# --- the root ---


def test_a_root_that_is_not_there_is_told_and_followed_once_it_is(followed, cache_root):
    one = followed()
    assert one.follower.state.reason == "is not there"
    assert one.kinds() == ["root-lost"]
    publish(cache_root, 1)
    until(lambda: "root-back" in one.kinds())
    one.is_a_scan(rescanned=True)
    publish(cache_root, 2)
    one.is_a_scan(rescanned=True)


def test_a_root_that_is_deleted_and_made_again_is_followed_again(followed, mixed, mixed_root):
    one = followed()
    shutil.rmtree(mixed)
    until(lambda: "root-lost" in one.kinds())
    until(lambda: one.index.entries() == [])
    shutil.copytree(mixed_root, mixed)
    until(lambda: "root-back" in one.kinds())
    one.is_a_scan(rescanned=True)


def test_a_root_that_is_replaced_by_another_directory_is_told(followed, mixed, tmp_path):
    one = followed()
    other = tmp_path / "other"
    publish(other, 1)
    mixed.rename(tmp_path / "before")
    other.rename(mixed)
    lost = until(lambda: [told for told in one.events.recent() if told["kind"] == "root-lost"])
    assert lost[0]["detail"] in ("was replaced by another directory", "is not there")
    one.is_a_scan(rescanned=True)
    publish(tmp_path / "before", 77)
    publish(mixed, 2)
    one.is_a_scan(rescanned=True)


def test_a_root_whose_parent_is_renamed_is_lost(followed, tmp_path):
    root = tmp_path / "a/b/root"
    publish(root, 1)
    one = followed(root)
    (tmp_path / "a").rename(tmp_path / "c")
    until(lambda: one.follower.state.identity is None)
    assert one.index.entries() == []
    (tmp_path / "c").rename(tmp_path / "a")
    until(lambda: one.follower.state.identity is not None)
    one.is_a_scan(rescanned=True)


def test_a_root_can_be_unmounted_and_mounted_while_it_is_followed(mounted, followed):
    root = mounted("size=8m")
    publish(root, 1)
    one = followed(root)
    assert len(one.index.entries()) == 1
    subprocess.run(["umount", str(root)], check=True)
    try:
        until(lambda: "root-lost" in one.kinds())
        told = [told["detail"] for told in one.events.recent() if told["kind"] == "root-lost"]
        assert told == [f"was unmounted from {root}"]
        until(lambda: one.index.entries() == [])
    finally:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(root)], check=True)
    publish(root, 2)
    one.is_a_scan(rescanned=True)
    assert [found.place.key for found in one.index.entries()] == [key(2)]


def test_a_root_that_becomes_read_only_is_told_and_still_listed(mounted, followed):
    root = mounted("size=8m")
    publish(root, 1)
    one = followed(root)
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    until(lambda: "root-read-only" in one.kinds())
    assert one.follower.state.read_only
    assert not one.differences()
    subprocess.run(["mount", "-o", "remount,rw", str(root)], check=True)
    until(lambda: "root-writable" in one.kinds())
    publish(root, 2)
    one.is_a_scan()


def test_on_a_network_file_system_the_root_is_scanned_now_and_then(followed, mixed, monkeypatch):
    # No network file system can be mounted here: the table of mounts says that this is one.
    table = mixed.parent / "mountinfo"
    table.write_text(f"36 35 98:0 / {mixed.parent} rw - nfs4 server:/export rw\n")
    monkeypatch.setattr(roots, "_TABLE", str(table))
    monkeypatch.setattr("tlcache.daemon.follow._POLL", 0.2)
    one = followed()
    assert "network file system (nfs4)" in one.follower.polling
    assert one.follower.watches == 0
    publish(mixed, 600)
    one.is_a_scan(rescanned=True)


def test_where_no_more_can_be_watched_the_root_is_scanned_now_and_then(
    followed, mixed, monkeypatch
):
    # The limit is the whole machine's, so it is not lowered here.
    def full(*_):
        raise OSError(28, "fs.inotify.max_user_watches is reached")

    monkeypatch.setattr("tlcache.daemon.inotify.Inotify.add", full)
    monkeypatch.setattr("tlcache.daemon.follow._POLL", 0.2)
    one = followed()
    assert one.follower.polling == "fs.inotify.max_user_watches is reached"
    publish(mixed, 700)
    one.is_a_scan(rescanned=True)


def test_the_watches_do_not_grow_with_the_entries(followed, cache_root):
    for number in range(20):
        publish(cache_root, number)
    one = followed()
    before = one.follower.watches
    for number in range(20, 300):
        publish(cache_root, number)
    one.is_a_scan()
    assert one.follower.watches == before
