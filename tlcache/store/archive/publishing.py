"""Staged archives published: into the root, each thing by one rename, and its records and calls
after it.

The order is one in which a kill at any point leaves a root that is whole: cuda-binaries, which
nothing points at; then kernels, and the records and calls of each few of them; what belongs to no
kernel last.

Invariant: what is there already stays, unless it is a record or a call that does not hold any more.
Entries and their records and calls are published while nobody takes entries away
(`locks.recording`), so none is ever filed for an entry that has just gone. A lock of an action key
is not taken: nothing is compiled here, and who publishes an entry first is decided by the rename.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from tlcache.store import calls, files, layout, locks, record, soundness
from tlcache.store.archive.index import Thing
from tlcache.store.archive.reading import Staged
from tlcache.store.archive.staging import staged_path
from tlcache.store.calls import Answer, Warmed
from tlcache.store.record import Library, Located, Record

__all__ = ["Published", "publish"]

_AT_ONCE = 32  # as `removal` does: some milliseconds in one hold of the lock
_ORDER = {"cuda-binary": 0, "autotuner": 1, "kernel": 2}
_THERE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)


@dataclass
class Published:
    """What became of the things of an import.

    Attributes:
        new: How many of each kind were published; what tlcache has filed, too.
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


class _Filed(NamedTuple):
    """A record, a call, or what a warm came to, which is published with its kernel.

    Attributes:
        kind: Which of the three.
        path: Below the root.
        found: What it says.
        there: Reads what a root has in its place; None where that is nothing sound.
        write: Files it in a root as one of another library.
    """

    kind: str
    path: str
    found: Record | Answer | Warmed
    there: Callable[[str], Located | None]
    write: Callable[[str, Library], None]

    @property
    def entry(self) -> str:
        return os.path.normpath(self.found.entry)

    @property
    def library(self) -> Library:
        return self.found.library


def _of_record(found: Record) -> _Filed:
    key = found.action_key

    def write(root: str, library: Library) -> None:
        record.write(root, replace(found, library=library))

    path = layout.record_path("", key)
    return _Filed("record", path, found, lambda root: record.read(root, key), write)


def _of_call(key: str, found: Answer | Warmed) -> _Filed:
    path = calls.path_of("", key)

    def there(root: str) -> Answer | Warmed | None:
        try:
            data = files.read(os.path.join(root, path))
            filed = calls.told("calls", os.path.basename(path), data)
        except (OSError, ValueError):
            return None
        return filed if isinstance(filed, (Answer, Warmed)) else None

    def write(root: str, library: Library) -> None:
        if isinstance(found, Answer):
            calls.write_answer(root, key, found._replace(library=library))
        else:
            calls.write_warmed(root, key, found._replace(library=library))

    return _Filed("call" if isinstance(found, Answer) else "warmed", path, found, there, write)


class _Publishing:
    """One archive."""

    def __init__(self, root: str, staged: Staged, published: Published) -> None:
        self._root = root
        self._staged = staged
        self._published = published
        self._directories: set[str] = set()
        self._new: set[str] = set()
        self._filed: dict[str, list[_Filed]] = {}
        those = [*map(_of_record, staged.records.values())]
        those += itertools.starmap(_of_call, staged.calls.items())
        for one in those:
            self._filed.setdefault(one.entry, []).append(one)

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
                    for one in self._filed.get(thing.place.location, ()):
                        self._file(one)
        for path, kind in self._staged.others.items():
            self._other(path, kind)

    def _skeleton(self, version: str, platform: str) -> None:
        """What TileLang needs in a root that will be read-only."""
        if os.path.isdir(os.path.join(self._staged.directory, version, platform)):
            layout.make_skeleton(Path(self._root), version, platform)

    def _age(self) -> None:
        """Give libraries, records and calls the time of the compile, as that of their last use.

        They have never been used here: who evicts what was not used for longest takes them before
        what was. The directories keep the time of the import, as that of their writing.
        """
        times: dict[str, float] = {}
        for one in itertools.chain.from_iterable(self._filed.values()):
            if isinstance(one.found, Warmed):
                continue
            when = datetime.fromisoformat(one.found.created)
            when = when if when.tzinfo is not None else when.replace(tzinfo=timezone.utc)
            seconds = min(max(when.timestamp(), 0.0), 2.0**33)
            for path in (f"{one.entry}/{one.library.name}", one.path):
                times[path] = min(seconds, times.get(path, seconds))
        for path, seconds in times.items():
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

    def _file(self, one: _Filed) -> None:
        """A record or a call, if the root has none that holds."""
        if os.path.lexists(os.path.join(self._root, one.path)):
            there = one.there(self._root)
            if there is not None and record.sound_library(self._root, there) is not None:
                self._published.note(one.kind, new=False)
                return
        if one.entry not in self._new and record.sound_library(self._root, one.found) is None:
            library = self._library_there(one)
            if library is None:
                self._published.left[one.path] = f"{one.entry} is another there, and is not sound"
                return
            one.write(self._root, library)
        elif not self._replace(one.path):
            one.write(self._root, one.library)
        self._published.note(one.kind, new=True)

    def _replace(self, path: str) -> bool:
        """Publish a file of tlcache's that was staged; False where the root had one then."""
        target = os.path.join(self._root, path)
        self._directory(os.path.dirname(target))
        try:
            os.replace(staged_path(self._staged.directory, path), target)
        except FileNotFoundError:
            return False
        return True

    def _library_there(self, one: _Filed) -> Library | None:
        """The library that is there under the same key of TileLang's, compiled by somebody else:
        the same kernel, called in the same way, of other bytes.
        """
        place = self._staged.index.things[one.entry].place
        path = os.path.join(self._root, one.entry)
        try:
            told = soundness.judge(place._replace(location=path))
        except OSError:
            return None
        there = told.hashed.get(one.library.name)
        if there is None or any(fault.severity == "error" for fault in told.faults):
            return None
        return Library(one.library.name, *there)

    def _other(self, path: str, kind: str) -> None:
        """What belongs to no kernel, if the root has none."""
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
