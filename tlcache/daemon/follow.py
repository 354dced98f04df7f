"""Following one root: the index is what a scan would find, kept so by what inotify tells.

What inotify does not show (see `watch`) is looked for: a thing that was made or changed lately is
looked at again after 1, 3 and 8 seconds, since somebody may be copying files into it; and a whole
scan, at most a fiftieth of the time, finds what changed in an old entry without its directory, as
when it was used.

Invariant: every watch is set before what it watches is read, and what an event names is read after
it; so whatever comes last is seen last. An overflow, a doubt, or a fault in here is a scan.
"""

from __future__ import annotations

import heapq
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator

from tlcache.daemon import root as roots
from tlcache.daemon.broadcast import Broadcast
from tlcache.daemon.index import Index
from tlcache.daemon.root import State
from tlcache.daemon.single import Claim
from tlcache.daemon.watch import Named, Records, Watch
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
_DRAIN = 256  # entries of a scan after which the kernel's queue is emptied


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
        self.trouble: str | None = None
        self.scan_seconds = 0.0
        self.scans = 0
        self.overflows = 0
        self.ready = threading.Event()
        self.beat = time.monotonic()
        self._index, self._events, self._claim = index, events, claim
        self._watch = Watch(root)
        self._stopping = False
        self._wanted = True
        self._said: str | None = None
        self._next_look = self._next_sweep = 0.0
        self._due: list[tuple[float, str]] = []
        self._young: dict[str, tuple[float, int, EntryPlace]] = {}
        self._thread = threading.Thread(target=self._run, name=f"follow {root}", daemon=True)

    @property
    def watches(self) -> int:
        """How many directories inotify watches."""
        return len(self._watch)

    @property
    def polling(self) -> str | None:
        """Why inotify is not used; None where it is."""
        return self._watch.off

    def start(self) -> None:
        self._thread.start()

    def rescan(self) -> None:
        """Have the root scanned soon."""
        self._wanted = True
        self._watch.wake()

    def stop(self) -> None:
        """Have the thread end soon; see `join`."""
        self._stopping = True
        self._watch.wake()

    def join(self, timeout: float) -> bool:
        """Wait for its end. Returns whether it has ended."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._watch.close()  # not before: `stop` wakes it
        return True

    # --- the thread ---

    def _run(self) -> None:
        while not self._stopping:
            try:
                seconds = self._step()
                self.trouble = None
                if seconds > 0 and not self._stopping:
                    self._watch.wait(seconds)
            except _Stopped:
                break
            except Exception as error:
                self.trouble = f"{type(error).__name__}: {error}"
                _log.exception("following %s went wrong; it is scanned again", self.root)
                self._wanted = True
                time.sleep(_LOOK)
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
            self._apply(self._watch.take())
            self._look_again()
        if self._wanted and self.state.identity is not None:
            return 0.0
        due = [self._next_look]
        if self.state.identity is not None:
            due += [self._next_sweep, *(one[0] for one in self._due[:1])]
        return min(due) - time.monotonic()

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
        self._watch.begin(now.shared)
        self._wanted = True

    # --- the whole ---

    def _scan(self) -> None:
        self._wanted = False
        start = time.perf_counter()
        self._watch.everything()
        if self.polling != self._said:
            self._said = self.polling
            if self._said is not None:
                _log.warning("%s is scanned now and then, not watched: %s", self.root, self._said)
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
        self._watch.drain()
        if self._stopping:
            raise _Stopped

    def _leave(self, path: str) -> None:
        """A directory is gone, with all below it."""
        self._watch.leave(path)
        start = os.path.join(path, "")
        for inner in [one for one in self.filings if one == path or one.startswith(start)]:
            if inner != self.root:
                del self.filings[inner]

    # --- one change after the other ---

    def _apply(self, named: Named) -> None:
        if named.root:
            self._next_look = 0.0
        if named.lost:
            self.overflows += 1
            _log.info("inotify lost events of %s; it is scanned", self.root)
            self._events.tell("overflow", root=self.root)
            self._wanted = True
            return
        for where, name in named.records:
            self._record(where, name)
        for number, (directory, name) in enumerate(sorted(named.items)):
            if number % _DRAIN == 0:
                self._breathe()
            shelf = self._watch.shelf_at(directory)
            if shelf is not None:
                self._item(shelf, name)

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
            if self._watch.shelf_at(path) is not None:
                self._leave(path)
                self._index.drop(self.root, path)
            if is_directory:
                self._watch.probe(shelf, item)
            self._thing(item)
        else:
            self._index.drop(self.root, path)
            if is_directory:
                self._records(shelf.path)

    def _gone(self, shelf: Shelf, path: str) -> None:
        if self._watch.knows(path):
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
        new = self._watch.shelf(shelf)
        if shelf.level == "nested" and (new or shelf.path not in self.filings):
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
        self._watch.records(inner)
        filings = self._filings(inner)
        records = os.path.join(inner, "tlcache", "records")
        names = {name for name, _, _ in layout.listed(records) or ()}
        for digits in names | filings.directories():
            self._refile(filings.again(digits))

    def _record(self, where: Records, name: str) -> None:
        filings = self.filings.get(where.inner)
        if filings is None:
            return
        if where.digits is not None:
            self._refile(filings.again(where.digits, name))
            return
        if self._watch.records(where.inner, name):
            self._refile(filings.again(name))

    def _refile(self, locations: set[str]) -> None:
        """Records of some things came, went or were used."""
        for location in locations:
            known = self._index.at(self.root, location)
            if known is not None:
                self._thing(known.place, known, len(_AGAIN))
