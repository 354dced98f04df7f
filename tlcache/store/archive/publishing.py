"""Staged archives published: into the root, each thing by one rename, and its records after it.

The order is one in which a kill at any point leaves a root that is whole: cuda-binaries, which
nothing points at; then kernels, and the records of each few of them; schedules and closures last.

Invariant: what is there already stays, unless it is a record that does not hold any more. Entries
and their records are published while nobody takes entries away (`locks.recording`), so a record is
never filed for an entry that has just gone. A lock of an action key is not taken: nothing is
compiled here, and who publishes an entry first is decided by the rename.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from tlcache.store import layout, locks, record, soundness
from tlcache.store.archive.index import Thing
from tlcache.store.archive.reading import Staged
from tlcache.store.archive.staging import staged_path
from tlcache.store.record import Library, Record

__all__ = ["Published", "publish"]

_AT_ONCE = 32  # as `removal` does: some milliseconds in one hold of the lock
_ORDER = {"cuda-binary": 0, "autotuner": 1, "kernel": 2}
_THERE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)


@dataclass
class Published:
    """What became of the things of an import.

    Attributes:
        new: How many of each kind were published; records, schedules and closures, too.
        there: How many of each kind were in the root already.
        bytes: Of what was published.
        left: What was not published, below the root, and why.
    """

    new: dict[str, int] = field(default_factory=dict)
    there: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    left: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, *, new: bool) -> None:
        counts = self.new if new else self.there
        counts[kind] = counts.get(kind, 0) + 1


def publish(root: str, staged: Iterable[Staged]) -> Published:
    """Publish what was staged, one archive after the other.

    Args:
        root: The cache root.
        staged: Archives that were checked.

    Raises:
        CacheRootError: The root cannot be written. What was published until then is whole.
    """
    published = Published()
    try:
        for one in staged:
            _Publishing(root, one, published).run()
    except OSError as error:
        raise layout.unwritable(root, error) from error
    return published


class _Publishing:
    """One archive."""

    def __init__(self, root: str, staged: Staged, published: Published) -> None:
        self._root = root
        self._staged = staged
        self._published = published
        self._directories: set[str] = set()
        self._new: set[str] = set()
        self._records: dict[str, list[Record]] = {}
        for found in staged.records.values():
            self._records.setdefault(os.path.normpath(found.entry), []).append(found)

    def run(self) -> None:
        self._published.left.update(self._staged.left)
        _sync(self._staged.directory)
        things = [
            thing
            for name, thing in self._staged.index.things.items()
            if name not in self._staged.left
        ]
        for place in {thing.place._replace(key="", location="", kind="") for thing in things}:
            if place.tilelang is not None and place.platform is not None:
                self._skeleton(place.tilelang, place.platform)
        self._age()
        things.sort(key=lambda thing: (_ORDER[thing.place.kind], thing.place.location))
        for some in _batches(things):
            with locks.recording(self._root):
                for thing in some:
                    self._thing(thing)
                for thing in some:
                    for found in self._records.get(thing.place.location, ()):
                        self._record(found)
        for path in self._staged.index.own:
            if not path.startswith("tlcache/records/"):
                self._own(path)

    def _skeleton(self, version: str, platform: str) -> None:
        """What TileLang needs in a root that will be read-only."""
        if os.path.isdir(os.path.join(self._staged.directory, version, platform)):
            layout.make_skeleton(Path(self._root), version, platform)

    def _age(self) -> None:
        """Give libraries and records the time of the compile, as the time of their last use.

        They have never been used here: who evicts what was not used for longest takes them before
        what was. The directories keep the time of the import, as that of their writing.
        """
        for found in self._staged.records.values():
            when = datetime.fromisoformat(found.created)
            when = when if when.tzinfo is not None else when.replace(tzinfo=timezone.utc)
            seconds = min(max(when.timestamp(), 0.0), 2.0**33)
            key, entry = found.action_key, os.path.normpath(found.entry)
            for path in (f"{entry}/{found.library.name}", layout.record_path("", key)):
                try:
                    os.utime(staged_path(self._staged.directory, path), (seconds, seconds))
                except FileNotFoundError:
                    pass  # it was in the root already

    def _thing(self, thing: Thing) -> None:
        location = thing.place.location
        new = location not in self._staged.present
        if new and thing.is_directory:
            new = self._rename(location)
        elif new:
            # The checksum first: who finds the binary looks for it.
            for path in reversed(thing.files):
                new = self._rename(path)
        if new:
            self._new.add(location)
            self._published.bytes += sum(self._staged.index.files[p].size for p in thing.files)
        self._published.note(thing.place.kind, new=new)

    def _record(self, found: Record) -> None:
        key = found.action_key
        path = layout.record_path("", key)
        target = os.path.join(self._root, path)
        if os.path.lexists(target):
            filed = record.read(self._root, key)
            if filed is not None and record.sound_library(self._root, filed) is not None:
                self._published.note("record", new=False)
                return
        entry = os.path.normpath(found.entry)
        if entry not in self._new and record.sound_library(self._root, found) is None:
            adapted = self._adapted(found)
            if adapted is None:
                self._published.left[path] = f"{entry} is another there, and is not sound"
                return
            record.write(self._root, adapted)
        elif not self._replace(path):
            record.write(self._root, found)
        self._published.note("record", new=True)

    def _replace(self, path: str) -> bool:
        """Publish a file of tlcache's that was staged; False where the root had one then."""
        target = os.path.join(self._root, path)
        self._directory(os.path.dirname(target))
        try:
            os.replace(staged_path(self._staged.directory, path), target)
        except FileNotFoundError:
            return False
        return True

    def _adapted(self, found: Record) -> Record | None:
        """A record for the library that is there under the same key of TileLang's, compiled by
        somebody else: the same kernel, called in the same way, of other bytes.
        """
        entry = os.path.normpath(found.entry)
        place = self._staged.index.things[entry].place
        path = os.path.join(self._root, entry)
        try:
            told = soundness.judge(place._replace(location=path))
        except OSError:
            return None
        there = told.hashed.get(found.library.name)
        if there is None or any(fault.severity == "error" for fault in told.faults):
            return None
        return replace(found, library=Library(found.library.name, *there))

    def _own(self, path: str) -> None:
        """A schedule or a closure, if the root has none."""
        kind = path.split("/")[1].removesuffix("s")
        target = os.path.join(self._root, path)
        new = not os.path.lexists(target) and self._replace(path)
        self._published.note(kind, new=new)

    def _rename(self, path: str) -> bool:
        """Publish a file or directory; False where somebody did before."""
        target = os.path.join(self._root, path)
        self._directory(os.path.dirname(target))
        source = os.path.join(self._staged.directory, path)
        if not os.path.isdir(source) and os.path.lexists(target):
            return False
        try:
            os.rename(source, target)
        except OSError as error:
            if error.errno in _THERE:
                return False
            raise
        return True

    def _directory(self, path: str) -> None:
        if path not in self._directories:
            os.makedirs(path, exist_ok=True)
            self._directories.add(path)


def _batches(things: list[Thing]) -> Iterator[list[Thing]]:
    rest = iter(things)
    while some := list(itertools.islice(rest, _AT_ONCE)):
        yield some


def _sync(path: str) -> None:
    """Have all that was staged on disk before any of it has a name that counts: one call for a
    whole archive, where an fsync a file would take most of an import's time.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ctypes.CDLL(None).syncfs(descriptor)
    finally:
        os.close(descriptor)
