"""What the tests of the daemon share: roots of real entries, and a follower to hold to a scan."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.store.conftest import mounted  # noqa: F401
from tlcache.daemon.broadcast import Broadcast
from tlcache.daemon.follow import Follower
from tlcache.daemon.index import Index
from tlcache.daemon.single import Claim
from tlcache.store import scan

PATIENCE = 30.0


def until(true: Callable[[], Any], what: object = "it", seconds: float = PATIENCE) -> Any:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what() if callable(what) else what}"
        time.sleep(0.02)
    return value


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

    def is_a_scan(self) -> None:
        """Wait until the index is what a scan finds, without a scan of its own."""
        scans = self.follower.scans
        until(lambda: not self.differences(), lambda: "\n".join(self.differences()[:5]))
        assert self.follower.scans == scans
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


@pytest.fixture
def models(mixed_root: Path) -> list[Path]:
    """Real kernel entries of TileLang 0.1.12 and later, to copy."""
    return sorted(mixed_root.glob("0.1.*/linux-x86_64/kernels/*"))
