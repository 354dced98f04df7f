"""What the tests of the daemon share: roots of real entries, a follower to hold to a scan, and
services in processes of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.store.conftest import RECORD, mounted  # noqa: F401
from tlcache.daemon.broadcast import Broadcast
from tlcache.daemon.follow import Follower
from tlcache.daemon.index import Index
from tlcache.daemon.single import Claim
from tlcache.store import record, scan

PATIENCE = 60.0
KERNELS = "0.1.15/linux-x86_64/kernels"


def until(true: Callable[[], Any], told: Callable[[], object] = str) -> Any:
    """Wait until something holds, and say what instead if it never does."""
    deadline = time.monotonic() + PATIENCE
    while not (value := true()):
        assert time.monotonic() < deadline, told()
        time.sleep(0.02)
    return value


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def publish(root: Path, number: int, *, size: int = 1000, filed: bool = False) -> Path:
    """A kernel as TileLang makes one, written aside and renamed; with a record where `filed`."""
    kernels = root / KERNELS
    staging = root / "0.1.15/linux-x86_64/.staging" / f"{number}"
    kernels.mkdir(parents=True, exist_ok=True)
    staging.mkdir(parents=True)
    library = f"library {number} ".encode().ljust(size, b".")
    (staging / "kernel_lib.so").write_bytes(library)
    (staging / "params.json").write_text("[]")
    staging.rename(kernels / key(number))
    if filed:
        one = replace(
            RECORD,
            entry=f"{KERNELS}/{key(number)}",
            action_key=key(-1 - number),
            library=RECORD.library._replace(size=size, sha256=hashlib.sha256(library).hexdigest()),
        )
        record.write(root, one)
    return kernels / key(number)


def age(path: Path, days: float) -> None:
    """Let something be so many days old, and unused for as long."""
    when = time.time() - 86400 * days
    for one in [*path.glob("**/*"), path]:
        os.utime(one, (when, when))


def on_disk(root: Path) -> int:
    """The bytes of a root's things on disk, with their records, as `du` counts them."""
    found = 0
    for place in (root / KERNELS, root / "tlcache/records"):
        for directory, names, files in os.walk(place):
            inside = names if directory == str(place) and place.name == "kernels" else []
            for name in [*inside, *files]:
                try:
                    found += os.lstat(os.path.join(directory, name)).st_blocks * 512
                except FileNotFoundError:
                    pass  # it is just going
    return found


class Followed:
    """A root that is followed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events = Broadcast()
        self.index = Index(self.events)
        self.follower = Follower(str(root), self.index, self.events, Claim(str(root)))

    def start(self) -> Followed:
        self.follower.start()
        assert self.follower.ready.wait(PATIENCE)
        return self

    def stop(self) -> None:
        self.follower.stop()
        assert self.follower.join(PATIENCE)

    def kinds(self) -> list[str]:
        return [one["kind"] for one in self.events.recent()]

    def differences(self) -> list[str]:
        """Where the index differs from a scan now."""
        fresh = {one.place.location: one for one in scan.scan(self.root)}
        known = {one.place.location: one for one in self.index.entries()}
        return [
            f"{path}:\n  scan  {fresh.get(path)}\n  index {known.get(path)}"
            for path in sorted(fresh.keys() | known.keys())
            if fresh.get(path) != known.get(path)
        ]

    def is_a_scan(self, *, rescanned: bool = False) -> None:
        """Wait until the index is what a scan finds; without a scan of its own, by default."""
        scans = self.follower.scans
        until(lambda: not self.differences(), lambda: "\n".join(self.differences()[:5]))
        assert rescanned or self.follower.scans == scans
        assert self.follower.trouble is None
        counted = self.index.totals().values()
        assert sum(one.entries for one in counted) == len(self.index.entries())
        assert sum(one.bytes for one in counted) == sum(one.bytes for one in self.index.entries())


@pytest.fixture
def followed(cache_root: Path) -> Iterator[Callable[..., Followed]]:
    """Follow a root, by default the one in force, until the test ends."""
    started: list[Followed] = []

    def follow(root: Path = cache_root) -> Followed:
        started.append(Followed(root).start())
        return started[-1]

    yield follow
    for one in started:
        one.stop()


class Served:
    """A service in a process of its own."""

    def __init__(self, settings: dict[str, Any]) -> None:
        script = str(Path(__file__).parent / "served.py")
        self.process = subprocess.Popen(
            [sys.executable, script, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started = self._line()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def ask(self, question: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{question}\n")
        self.process.stdin.flush()
        return self._line()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it, as nothing can be prepared for."""
        self.process.kill()
        self.end()

    def end(self) -> str:
        """End it, and return what it logged."""
        _, errors = self.process.communicate(timeout=PATIENCE)
        return errors

    def check(self, name: str) -> dict[str, str]:
        """One of its health's checks, by how its name begins."""
        (found,) = [one for one in self.ask("health")["checks"] if one["name"].startswith(name)]
        return found


@pytest.fixture
def served(cache_root: Path, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Start a service of its own on a root, by default the one in force."""
    running: list[Served] = []

    def serve(*roots: Path, **settings: Any) -> Served:
        settings.setdefault("history", str(tmp_path / "history"))
        settings["roots"] = [str(one) for one in roots or (cache_root,)]
        running.append(Served(settings))
        return running[-1]

    yield serve
    for one in running:
        if one.process.poll() is None:
            one.send(signal.SIGCONT)
            one.end()


@pytest.fixture
def entries(mixed_root: Path) -> list[Path]:
    """Real kernel entries of TileLang 0.1.12 and later, to copy."""
    return sorted(mixed_root.glob("0.1.*/linux-x86_64/kernels/*"))


def copied(entry: Path, root: Path, number: int) -> Path:
    """Copy an entry as `cp -r` does, file by file, where it will be."""
    place = root / KERNELS / key(number)
    shutil.copytree(entry, place)
    return place


@pytest.fixture
def daemon(cache_root: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start `tlcache daemon run` on roots, by default the one in force; wait until it serves."""
    from tests.daemon.asking import Daemon

    started: list[Any] = []

    def start(*options: str, roots: list[Path] | None = None, **more: Any) -> Any:
        cache_root.mkdir(exist_ok=True)
        place = tmp_path / f"daemon{len(started)}"
        place.mkdir()
        started.append(Daemon(place, roots or [cache_root], *options, **more))
        return started[-1].serves()

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()
            one.process.wait(PATIENCE)
