"""The daemon's parts together: what it says of itself, and that nothing brings it down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.daemon.conftest import KERNELS, age, key, publish, until

NOBODY = 65534


def test_it_says_what_there_is_and_that_all_is_well(served, cache_root):
    publish(cache_root, 1, filed=True)
    one = served()
    stats = one.ask("stats")
    assert stats["roots"][0]["root"] == str(cache_root)
    assert stats["roots"][0]["up"] is True
    assert stats["roots"][0]["watched"] == "inotify"
    assert stats["roots"][0]["entries"] == 1
    assert stats["totals"] == [
        {
            "root": str(cache_root),
            "version": "0.1.15",
            "target": "cpu",
            "kind": "kernel",
            "entries": 1,
            "bytes": 1002,
        }
    ]
    health = one.ask("health")
    assert health["status"] == "ok", health
    assert {check["status"] for check in health["checks"]} == {"ok"}


def test_each_root_is_told_apart(served, tmp_path):
    publish(tmp_path / "a", 1)
    publish(tmp_path / "b", 1)
    publish(tmp_path / "b", 2)
    one = served(tmp_path / "a", tmp_path / "b", tmp_path / "nothing")
    entries = {row["root"]: row["entries"] for row in one.ask("stats")["roots"]}
    assert list(entries.values()) == [1, 2, 0]
    assert one.ask("health")["status"] == "failing"
    assert one.check(f"root {tmp_path / 'a'}")["status"] == "ok"
    assert one.check(f"root {tmp_path / 'nothing'}") == {
        "name": f"root {tmp_path / 'nothing'}",
        "status": "failing",
        "detail": "is not there",
    }


def test_a_second_one_on_the_same_root_refuses_with_the_pid_of_the_first(
    served, cache_root, tmp_path
):
    publish(cache_root, 1)
    first = served()
    second = served(history=str(tmp_path / "other"))
    assert second.started is None
    assert f"already: pid {first.process.pid}" in second.end()
    assert first.ask("stats")["roots"][0]["entries"] == 1
    first.kill()
    third = served()
    assert third.started is True


def test_killed_and_started_again_it_has_its_counters(served, cache_root):
    publish(cache_root, 1)
    for round_ in range(1, 4):
        one = served()
        assert one.ask("count restarts")
        time.sleep(5)  # what was counted longer ago than that must not be lost
        one.kill()
        again = served()
        (counter,) = [one for one in again.ask("stats")["counters"] if one["name"] == "restarts"]
        assert counter["value"] == round_
        again.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="to be somebody else takes root")
def test_what_cannot_be_read_is_told_and_brings_nothing_down(served, tmp_path, monkeypatch):
    root = tmp_path / "shared" / "root"
    for path in (tmp_path, tmp_path / "shared"):
        path.mkdir(exist_ok=True)
    top = tmp_path
    while top != Path("/tmp") and top != Path("/"):
        top.chmod(0o755)
        top = top.parent
    publish(root, 1)
    publish(root, 2)
    os.chmod(root / KERNELS / key(1) / "kernel_lib.so", 0o000)
    (root / "0.1.14/linux-x86_64/kernels").mkdir(parents=True)
    os.chmod(root / "0.1.14/linux-x86_64/kernels", 0o000)
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, NOBODY, NOBODY)
    monkeypatch.setenv("TLCACHE_SCAN_CACHE", str(state / "scan"))
    one = served(root, uid=NOBODY, history=str(state / "history"), max_size=100)
    assert one.started is True, one.end()
    check = until(lambda: (found := one.check("root"))["status"] == "degraded" and found)
    assert "cannot be read" in check["detail"] and key(1) in check["detail"]
    until(lambda: one.check("bounds")["status"] == "degraded")
    os.chmod(root / KERNELS / key(1) / "kernel_lib.so", 0o644)
    os.chmod(root / "0.1.14/linux-x86_64/kernels", 0o755)
    os.utime(root / KERNELS / key(1))
    until(lambda: "cannot be read" not in one.check("root")["detail"])
    assert one.process.poll() is None


def test_a_full_disk_is_told_and_brings_nothing_down(mounted, served):
    place = mounted("size=3m")
    for number in range(20):
        age(publish(place / "root", number, size=20_000), 10)
    one = served(place / "root", history=str(place / "state/history"), max_size=200_000)
    assert one.started is True
    until(lambda: "at most" in one.check("bounds")["detail"])
    with pytest.raises(OSError, match="No space"):
        (place / "filler").write_bytes(b"x" * 2**22)
    for number in range(150):
        one.ask(f"count counter-with-a-long-name-{number:0>300}")
    until(lambda: one.check("history")["status"] == "degraded")
    assert one.ask("health")["status"] == "degraded"
    (place / "filler").unlink()
    until(lambda: one.ask("health")["status"] == "ok")
    assert one.end() is not None


def test_a_root_that_goes_and_comes_is_told_in_its_health(served, cache_root):
    publish(cache_root, 1)
    one = served()
    shutil.rmtree(cache_root)
    until(lambda: one.check("root")["status"] == "failing")
    publish(cache_root, 2)
    until(lambda: one.ask("health")["status"] == "ok")
    kinds = [told["kind"] for told in one.ask("events")]
    assert kinds.index("root-lost") < kinds.index("root-back")


def test_processes_with_agents_are_counted_once_and_for_good(
    served, cache_root, tmp_path, monkeypatch
):
    publish(cache_root, 1)
    monkeypatch.setenv("TLCACHE_RUNTIME_DIR", str(tmp_path / "run"))
    script = (
        "import sys, tlcache.agent\n"
        "from tlcache.runtime import resolve\n"
        "tlcache.agent.start()\n"
        "print('up', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "up\n"
    one = served()
    until(lambda: one.ask("stats")["agents"] == 1)
    assert one.check("agents")["detail"] == "1 asked"
    process.communicate("")
    until(lambda: one.ask("stats")["agents"] == 0)
