"""Following one root: the index is what a scan would find, kept so by what inotify tells.

Watched are the directories that things are published into by rename, and those above them: 300 or
so for any number of entries, where watches on 60,000 entries would be more than most systems allow.
What that does not show is looked for: a thing that was made or changed lately is looked at again
after 1, 3 and 8 seconds, since somebody may be copying files into it; and a whole scan, at most a
fiftieth of the time, finds what changed in an old entry without its directory, as when it was used.

Invariant: every watch is set before what it watches is read, and what an event names is read after
it; so whatever comes last is seen last. An overflow, a doubt, or a fault in here is a scan.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from tlcache.daemon import root as roots
from tlcache.daemon.broadcast import Broadcast
from tlcache.daemon.index import Index
from tlcache.daemon.inotify import Changes, Inotify
from tlcache.daemon.root import State
from tlcache.daemon.single import Claim
from tlcache.errors import DaemonError
from tlcache.store import layout, scan
from tlcache.store.entry import Entry
from tlcache.store.filings import Filings
from tlcache.store.layout import EntryPlace, Shelf

__all__ = ["Follower"]

_log = logging.getLogger(__name__)

_LOOK = 1.0  # seconds between looks at the root itself
_AGAIN = (1.0, 3.0, 8.0)
_YOUNG = 10.0
_MOST_YOUNG = 50_000
_SWEEP = 60.0
_POLL = 10.0
_SHARE = 50  # a scan takes at most this fraction of the time
_PROBES = 256
_DRAIN = 256  # entries of a scan after which the kernel's queue is emptied


class _Probe(NamedTuple):
    """A directory that decides whether something in a base is itself a root."""

    name: str


class _Own(NamedTuple):
    """`<inner root>/tlcache`."""

    inner: str


class _Records(NamedTuple):
    """`<inner root>/tlcache/records`, or one directory in it."""

    inner: str
    digits: str | None = None


class _Stopped(Exception):
    """The follower is to end."""


class Follower:
    """A thread that keeps a root's part of the index.

    Args:
        root: The root, an absolute path.
        index: Where its entries go.
        events: Where to tell what becomes of the root.
        claim: Held while it is watched.

    Attributes:
        state: What the root is.
        filings: The records of each root in it, as of now.
        unreadable: The locations of what could not be read.
        polling: Why inotify is not used; None where it is.
        trouble: What went wrong lately.
        scan_seconds: How long the last scan took.
        scans: How many there have been.
        overflows: How often inotify lost events.
        ready: Set once the index has what there is.
        beat: When the thread was seen alive last, by `time.monotonic`.
    """

    def __init__(self, root: str, index: Index, events: Broadcast, claim: Claim) -> None:
        self.root = root
        self.state = State(None, "has not been looked at")
        self.filings: dict[str, Filings] = {}
        self.unreadable: set[str] = set()
        self.polling: str | None = None
        self.trouble: str | None = None
        self.scan_seconds = 0.0
        self.scans = 0
        self.overflows = 0
        self.ready = threading.Event()
        self.beat = time.monotonic()
        self._index, self._events, self._claim = index, events, claim
        self._inotify: Inotify | None = None
        self._wake = threading.Event()
        self._stopping = False
        self._wanted = True
        self._next_look = self._next_sweep = 0.0
        self._meaning: dict[str, Shelf | _Probe | _Own | _Records] = {}
        self._due: list[tuple[float, str]] = []
        self._young: dict[str, tuple[float, int, EntryPlace]] = {}
        self._thread = threading.Thread(target=self._run, name=f"follow {root}", daemon=True)

    @property
    def watches(self) -> int:
        """How many directories inotify watches."""
        return len(self._inotify) if self._inotify is not None else 0

    def start(self) -> None:
        self._thread.start()

    def rescan(self) -> None:
        """Have the root scanned soon."""
        self._wanted = True
        self._rouse()

    def stop(self) -> None:
        """Have the thread end soon; see `join`."""
        self._stopping = True
        self._rouse()

    def join(self, timeout: float) -> bool:
        """Wait for its end. Returns whether it has ended."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        if self._inotify is not None:  # not before: `stop` may be writing to it
            inotify, self._inotify = self._inotify, None
            inotify.close()
        return True

    def _rouse(self) -> None:
        self._wake.set()
        if self._inotify is not None:
            self._inotify.wake()

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._inotify = Inotify()
        except OSError as error:
            self._poll(error.strerror or str(error))
        while not self._stopping:
            try:
                seconds = self._step()
                self.trouble = None
                self._pause(seconds)
            except _Stopped:
                break
            except Exception as error:
                self.trouble = f"{type(error).__name__}: {error}"
                _log.exception("following %s went wrong; it is scanned again", self.root)
                self._wanted = True
                self._wake.wait(_LOOK)
        self._claim.release()

    def _step(self) -> float:
        """What is to be done now. Returns the seconds until there is more, if nothing changes."""
        self.beat = now = time.monotonic()
        if now >= self._next_look:
            self._look_at_root()
        if self.state.identity is None:
            self.ready.set()
        elif self._wanted or now >= self._next_sweep:
            self._scan()
            self.ready.set()
        else:
            if self._inotify is not None and self.polling is None:
                self._apply(self._inotify.take())
            self._look_again()
        if self._wanted and self.state.identity is not None:
            return 0.0
        due = [self._next_look]
        if self.state.identity is not None:
            due += [self._next_sweep, *(one[0] for one in self._due[:1])]
        return min(due) - time.monotonic()

    def _pause(self, seconds: float) -> None:
        if self._stopping or seconds <= 0:
            return
        if self._inotify is not None and self.polling is None:
            self._inotify.wait(seconds)
        else:
            self._wake.wait(seconds)
        self._wake.clear()

    def _poll(self, why: str) -> None:
        if self.polling != why:
            _log.warning("%s is scanned now and then, not watched: %s", self.root, why)
        self.polling = why

    # --- the root itself ---

    def _look_at_root(self) -> None:
        self._next_look = time.monotonic() + _LOOK
        self._claim.answer()
        before, now = self.state, roots.look(self.root)
        if now.identity is not None and now.identity != before.identity:
            try:
                self._claim.take(now.identity)
            except DaemonError as error:
                now = State(None, error.message)
        self.state = now
        if before.identity != now.identity or before.reason != now.reason:
            self._changed(before, now)
        if now.identity is not None and before.read_only != now.read_only:
            _log.info("%s is %s", self.root, "read-only" if now.read_only else "writable")
            kind = "root-read-only" if now.read_only else "root-writable"
            self._events.tell(kind, root=self.root)

    def _changed(self, before: State, now: State) -> None:
        """Another directory, or none, is where the root was."""
        what = roots.differs(before, now) or now.reason or "is another"
        if before.identity is not None:
            self._leave(self.root)
            self._index.renew(self.root, ())
            self.filings, self.unreadable = {}, set()
        if before.identity is not None or now.identity is None:
            _log.warning("the root %s %s", self.root, what)
            self._events.tell("root-lost", root=self.root, detail=what)
        if now.identity is None:
            self._claim.release()
            return
        if self.ready.is_set():
            _log.info("the root %s is there", self.root)
            self._events.tell("root-back", root=self.root)
        if now.shared is not None:
            self._poll(f"it is on a network file system ({now.shared}), where others change it")
        elif self._inotify is not None:
            self.polling = None
        self._wanted = True

    # --- the whole ---

    def _scan(self) -> None:
        self._wanted = False
        start = time.perf_counter()
        if self._inotify is not None and self.polling is None:
            self._inotify.take()  # whatever that was, it is read now
            self._watch_all()
        filings: dict[str, Filings] = {}
        unreadable: set[str] = set()
        found = list(self._scanned(filings, unreadable))
        self.filings, self.unreadable = filings, unreadable
        self._index.renew(self.root, found, quiet=not self.ready.is_set())
        young = time.time() - _YOUNG
        self._young, self._due = {}, []
        for one in found:
            if one.created is not None and one.created.timestamp() > young:
                self._soon(one.place, 0)
        self.scans += 1
        self.scan_seconds = time.perf_counter() - start
        least = _SWEEP if self.polling is None else _POLL
        self._next_sweep = time.monotonic() + max(least, _SHARE * self.scan_seconds)

    def _scanned(self, filings: dict[str, Filings], unreadable: set[str]) -> Iterator[Entry]:
        for number, one in enumerate(scan.scan(self.root, filings, unreadable)):
            if number % _DRAIN == 0:
                self._breathe()
            yield one

    def _breathe(self) -> None:
        """In the middle of long work: show to be alive, empty the kernel's queue, mind the end.

        Raises:
            _Stopped: It has come.
        """
        self.beat = time.monotonic()
        if self._inotify is not None:
            self._inotify.drain()
        if self._stopping:
            raise _Stopped

    def _watch_all(self) -> None:
        """Watch every directory of the root that matters, before any is read."""
        assert self._inotify is not None
        self._meaning = {}
        try:
            self._watch_below(Shelf(self.root, "root"))
        except OSError as error:
            self._poll(error.strerror or str(error))
        self._inotify.keep(self._meaning)

    def _watch_below(self, shelf: Shelf) -> None:
        self._watch(shelf.path, shelf)
        self._watch_own(shelf)
        for name, _, is_directory in _inside(shelf):
            item = shelf.item(name, is_directory)
            if isinstance(item, Shelf):
                self._watch_below(item)
            elif item is not None and is_directory:
                self._probe(shelf, item)

    def _watch(self, path: str, meaning: Shelf | _Probe | _Own | _Records) -> bool:
        """Watch a directory. Returns whether it is another one than before.

        Raises:
            OSError: No more can be watched.
        """
        if self._inotify is None or self.polling is not None:
            return True
        try:
            new = self._inotify.add(path)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            return True  # it is gone, or closed: its place in the directory above tells
        new = new or self._meaning.get(path) != meaning
        self._meaning[path] = meaning
        return new

    def _watch_own(self, shelf: Shelf) -> None:
        """Watch the records of a root."""
        if shelf.level in ("root", "nested"):
            own = os.path.join(shelf.path, "tlcache")
            self._watch(own, _Own(shelf.path))
            records = os.path.join(own, "records")
            self._watch(records, _Records(shelf.path))
            for digits, path, is_directory in layout.listed(records) or ():
                if is_directory:
                    self._watch(path, _Records(shelf.path, digits))

    def _probe(self, shelf: Shelf, place: EntryPlace) -> None:
        """Watch what may become a root below this one."""
        if shelf.level == "root" and place.kind == "unknown":
            probes = sum(isinstance(one, _Probe) for one in self._meaning.values())
            for path in layout.undecided(place.location)[: max(0, _PROBES - probes)]:
                self._watch(path, _Probe(os.path.basename(place.location)))

    def _leave(self, path: str) -> None:
        """A directory is gone, with all below it."""
        if self._inotify is not None:
            self._inotify.drop(path)
        start = os.path.join(path, "")
        for one in [one for one in self._meaning if one == path or one.startswith(start)]:
            del self._meaning[one]
        for inner in [one for one in self.filings if one == path or one.startswith(start)]:
            if inner != self.root:
                del self.filings[inner]

    # --- one change after the other ---

    def _apply(self, changes: Changes) -> None:
        if changes.lost:
            self.overflows += 1
            _log.info("inotify lost events of %s; it is scanned", self.root)
            self._events.tell("overflow", root=self.root)
            self._wanted = True
            return
        if self.root in changes.ended or changes.unmounted:
            self._next_look = 0.0
        todo = {(os.path.dirname(path), os.path.basename(path)) for path in changes.ended}
        items: set[tuple[str, str]] = set()
        for directory, name in changes.names | todo:
            meaning = self._meaning.get(directory)
            if isinstance(meaning, _Records):
                self._record(meaning, name)
            elif isinstance(meaning, _Own) and name == "records":
                self._records(meaning.inner)
            elif isinstance(meaning, _Probe):
                items.add((self.root, meaning.name))
            elif isinstance(meaning, Shelf):
                items.update((directory, one) for one in meaning.touched(name))
        for number, (directory, name) in enumerate(sorted(items)):
            if number % _DRAIN == 0:
                self._breathe()
            meaning = self._meaning.get(directory)
            if isinstance(meaning, Shelf):
                self._item(meaning, name)

    def _item(self, shelf: Shelf, name: str) -> None:
        """Something on a shelf came, went or changed."""
        path = os.path.join(shelf.path, name)
        try:
            is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
        except OSError:
            self._gone(shelf, path)
            return
        item = shelf.item(name, is_directory)
        if isinstance(item, Shelf):
            self._enter(item)
        elif item is not None:
            if isinstance(self._meaning.get(path), Shelf):
                self._leave(path)
                self._index.drop(self.root, path)
            if is_directory:
                self._probe(shelf, item)
            self._thing(item)
        else:
            self._index.drop(self.root, path)
            if is_directory:
                self._records(shelf.path)

    def _gone(self, shelf: Shelf, path: str) -> None:
        if path in self._meaning:
            self._leave(path)
        self._index.drop(self.root, path)
        self._young.pop(path, None)
        self.unreadable.discard(path)
        if shelf.level in ("root", "nested") and os.path.basename(path) == "tlcache":
            self._records(shelf.path)
        inner = self._inner(path)
        if inner != self.root and shelf.level not in ("root", "keyed"):
            base, name = Shelf(self.root, "root"), os.path.basename(inner)
            if not isinstance(base.item(name, True), Shelf):
                self._item(base, name)  # with this, it was a root

    def _enter(self, shelf: Shelf) -> None:
        """A shelf came, or something about it changed: what lies on it."""
        new = self._watch(shelf.path, shelf)
        if shelf.level == "nested":
            self._watch_own(shelf)
            if new or shelf.path not in self.filings:
                self.filings[shelf.path] = Filings(shelf.path)
        items = layout.listed(shelf.path)
        if items is None:
            self._leave(shelf.path)
            self._index.drop(self.root, shelf.path)
            if (closed := shelf.closed()) is not None:
                self._thing(closed)
            return
        if new or self._index.at(self.root, shelf.path) is not None:
            self._index.drop(self.root, shelf.path)
        known = set(self._index.names(self.root, shelf.path))
        for number, (name, _, is_directory) in enumerate(items):
            if number % _DRAIN == 0:
                self._breathe()
            if name not in known or isinstance(shelf.item(name, is_directory), Shelf):
                self._item(shelf, name)
        for name in known - {name for name, _, _ in items}:
            self._gone(shelf, os.path.join(shelf.path, name))

    def _thing(self, place: EntryPlace, known: Entry | None = None, step: int = 0) -> None:
        """Read a thing, and come back to it while it is young."""
        found = scan.look(place, self._filings(place.location), known, self.unreadable)
        if found is None:
            self._index.drop(self.root, place.location)
            return
        before = self._index.at(self.root, place.location)
        self._index.put(self.root, found)
        if step and before == found:
            self._soon(place, step)
        elif found.created is not None and found.created.timestamp() > time.time() - _YOUNG:
            self._soon(place, 0)

    def _soon(self, place: EntryPlace, step: int) -> None:
        if step < len(_AGAIN) and not self._wanted:
            due = time.monotonic() + _AGAIN[step]
            self._young[place.location] = (due, step, place)
            heapq.heappush(self._due, (due, place.location))
            self._wanted = self._wanted or len(self._due) > _MOST_YOUNG

    def _look_again(self) -> None:
        """At what was young when it was looked at last."""
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            due, location = heapq.heappop(self._due)
            young = self._young.get(location)
            if young is None or young[0] != due:
                continue
            del self._young[location]
            _, step, place = young
            known = self._index.at(self.root, location)
            if known is not None:
                # What was copied into it within one tick of the clock may look the same.
                self._thing(place, known if step else None, step + 1)

    # --- records ---

    def _inner(self, location: str) -> str:
        """The root that a thing belongs to: this one, or one below it."""
        return next(
            (
                one
                for one in self.filings
                if one != self.root and f"{location}/".startswith(f"{one}/")
            ),
            self.root,
        )

    def _filings(self, location: str) -> Filings:
        inner = self._inner(location)
        if inner not in self.filings:
            self.filings[inner] = Filings(inner)
        return self.filings[inner]

    def _records(self, inner: str) -> None:
        """A root's directory of records came or went."""
        if inner != self.root and inner not in self.filings:
            return
        level = "root" if inner == self.root else "nested"
        self._watch_own(Shelf(inner, level))
        filings = self._filings(inner)
        records = os.path.join(inner, "tlcache", "records")
        names = {name for name, _, _ in layout.listed(records) or ()}
        for digits in names | filings.directories():
            self._refile(filings.again(digits))

    def _record(self, where: _Records, name: str) -> None:
        filings = self.filings.get(where.inner)
        if filings is None:
            return
        if where.digits is not None:
            self._refile(filings.again(where.digits, name))
            return
        path = os.path.join(where.inner, "tlcache", "records", name)
        if self._watch(path, _Records(where.inner, name)):
            self._refile(filings.again(name))

    def _refile(self, locations: set[str]) -> None:
        """Records of some things came, went or were used."""
        for location in locations:
            known = self._index.at(self.root, location)
            if known is not None:
                self._thing(known.place, known, len(_AGAIN))


def _inside(shelf: Shelf) -> list[tuple[str, str, bool]]:
    """What is in a directory that may have shelves in it."""
    return (layout.listed(shelf.path) or []) if shelf.level != "keyed" else []
