"""Which directories of a root are watched, and what a change in each of them means.

Watched are the directories that things are published into by rename, and those above them: 300 or
so for any number of entries, where watches on 60,000 entries would be more than most systems allow.

Invariant: where `off` is None, every directory that matters is watched, or the directory above it
tells that it could not be. Where other hosts write, or no more can be watched, nothing is, and
`off` says why.
"""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from tlcache.daemon.inotify import Inotify
from tlcache.store import layout
from tlcache.store.layout import EntryPlace, Shelf

__all__ = ["Named", "Records", "Watch"]

_PROBES = 256


class Records(NamedTuple):
    """`<inner root>/tlcache/records`, or one directory in it, or what holds it.

    Attributes:
        inner: The root whose they are.
        digits: The directory's name; None for all of them.
    """

    inner: str
    digits: str | None = None


class _Own(NamedTuple):
    """`<inner root>/tlcache`."""

    inner: str


class _Probe(NamedTuple):
    """A directory that decides whether something in a base is itself a root."""

    name: str


_Meaning = Shelf | Records | _Own | _Probe


@dataclass
class Named:
    """What inotify named.

    Attributes:
        items: Things and directories of shelves: the shelf's path, and a name.
        records: Files or directories of records.
        lost: Whether changes were lost.
        root: Whether the root itself is not what it was.
    """

    items: set[tuple[str, str]] = field(default_factory=set)
    records: set[tuple[Records, str]] = field(default_factory=set)
    lost: bool = False
    root: bool = False


class Watch:
    """The watches of one root. For one thread, but for `wake`.

    Attributes:
        off: Why inotify is not used; None where it is.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._awake = threading.Event()
        self._meanings: dict[str, _Meaning] = {}
        self._inotify: Inotify | None = None
        self._unfit: str | None = None
        self.off: str | None = None
        try:
            self._inotify = Inotify()
        except OSError as error:
            self.off = self._unfit = error.strerror or str(error)

    def __len__(self) -> int:
        return len(self._inotify) if self._inotify is not None else 0

    # --- what is watched ---

    def begin(self, shared: str | None) -> None:
        """Another root is at this path.

        Args:
            shared: Its file system's type, where other hosts can be on it, too.
        """
        self.off = self._unfit
        if shared is not None:
            self.off = f"it is on a network file system ({shared}), where others change it"

    def everything(self) -> None:
        """Watch every directory of the root that matters, and no other; what changed so far need
        not be told any more.
        """
        if self._inotify is None or self.off is not None:
            return
        self._inotify.take()
        self._meanings = {}
        try:
            self._below(Shelf(self._root, "root"))
        except OSError as error:
            self.off = error.strerror or str(error)
        self._inotify.keep(self._meanings if self.off is None else ())

    def _below(self, shelf: Shelf) -> None:
        self.shelf(shelf)
        for name, _, is_directory in _inside(shelf):
            item = shelf.item(name, is_directory)
            if isinstance(item, Shelf):
                self._below(item)
            elif item is not None and is_directory:
                self.probe(shelf, item)

    def shelf(self, shelf: Shelf) -> bool:
        """Watch a shelf, and the records where it is a root. Returns whether it is another one than
        before.

        Raises:
            OSError: No more can be watched.
        """
        new = self._add(shelf.path, shelf)
        if shelf.level in ("root", "nested"):
            self.records(shelf.path)
        return new

    def records(self, inner: str, digits: str | None = None) -> bool:
        """The same for the records of a root, or one directory of them."""
        own = os.path.join(inner, "tlcache")
        top = os.path.join(own, "records")
        if digits is not None:
            return self._add(os.path.join(top, digits), Records(inner, digits))
        self._add(own, _Own(inner))
        new = self._add(top, Records(inner))
        for name, path, is_directory in layout.listed(top) or ():
            if is_directory:
                self._add(path, Records(inner, name))
        return new

    def probe(self, shelf: Shelf, place: EntryPlace) -> None:
        """Watch what may become a root below this one."""
        if shelf.level == "root" and place.kind == "unknown":
            probes = sum(isinstance(one, _Probe) for one in self._meanings.values())
            for path in layout.undecided(place.location)[: max(0, _PROBES - probes)]:
                self._add(path, _Probe(os.path.basename(place.location)))

    def _add(self, path: str, meaning: _Meaning) -> bool:
        if self._inotify is None or self.off is not None:
            return True
        try:
            new = self._inotify.add(path)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            return True  # it is gone, or closed: its place in the directory above tells
        new = new or self._meanings.get(path) != meaning
        self._meanings[path] = meaning
        return new

    def leave(self, top: str) -> None:
        """A directory is gone, with all below it."""
        if self._inotify is not None:
            self._inotify.drop(top)
        start = os.path.join(top, "")
        for one in [one for one in self._meanings if one == top or one.startswith(start)]:
            del self._meanings[one]

    def shelf_at(self, path: str) -> Shelf | None:
        """The shelf that a directory is watched as."""
        meaning = self._meanings.get(path)
        return meaning if isinstance(meaning, Shelf) else None

    def knows(self, path: str) -> bool:
        """Whether a directory is watched, as whatever."""
        return path in self._meanings

    # --- what is told ---

    def take(self) -> Named:
        """What changed since this was called last."""
        named = Named()
        if self._inotify is None or self.off is not None:
            return named
        changes = self._inotify.take()
        named.lost = changes.lost
        named.root = changes.unmounted or self._root in changes.ended
        ended = {(os.path.dirname(path), os.path.basename(path)) for path in changes.ended}
        for directory, name in changes.names | ended:
            meaning = self._meanings.get(directory)
            if isinstance(meaning, Records):
                named.records.add((meaning, name))
            elif isinstance(meaning, _Own) and name == "records":
                named.items.add((meaning.inner, "tlcache"))
            elif isinstance(meaning, _Probe):
                named.items.add((self._root, meaning.name))
            elif isinstance(meaning, Shelf):
                named.items.update((directory, one) for one in meaning.touched(name))
        return named

    def drain(self) -> None:
        """Empty the kernel's queue, in the middle of long work."""
        if self._inotify is not None:
            self._inotify.drain()

    def wait(self, seconds: float) -> None:
        """Wait until something changes, `wake` is called, or the time is over."""
        if self._inotify is not None and self.off is None:
            self._inotify.wait(seconds)
        else:
            self._awake.wait(seconds)
        self._awake.clear()

    def wake(self) -> None:
        """End the wait, from any thread."""
        self._awake.set()
        if self._inotify is not None:
            self._inotify.wake()

    def close(self) -> None:
        """End all watches; nobody may `wake` it any more."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None


def _inside(shelf: Shelf) -> list[tuple[str, str, bool]]:
    """What is in a directory that may have shelves in it."""
    return (layout.listed(shelf.path) or []) if shelf.level != "keyed" else []
