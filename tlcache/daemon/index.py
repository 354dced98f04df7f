"""Everything at the watched roots, as it was seen last, in memory.

Invariant: what is counted is what is listed. An entry that did not change is the same object as
before, so who keeps something by it can tell.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from tlcache.daemon.broadcast import Broadcast
from tlcache.errors import UsageError
from tlcache.store import select
from tlcache.store.entry import Entry
from tlcache.store.select import Filter

__all__ = ["Group", "Index", "Total"]

_BOUNDED = ("kernel", "cuda-binary", "autotuner", "frontend")
_SLACK = 48 * 1024  # an entry's files and record, each up to the end of its last block on disk


class Group(NamedTuple):
    """What is counted together; empty where something has no version or target."""

    root: str
    version: str
    target: str
    kind: str


class Total(NamedTuple):
    """How many there are, and the bytes of their files."""

    entries: int
    bytes: int


class Index:
    """The entries of some roots. Threads may share it.

    Args:
        events: Where to tell what comes and goes.
    """

    def __init__(self, events: Broadcast) -> None:
        self._events = events
        self._lock = threading.RLock()
        self._shelves: dict[str, dict[str, dict[str, Entry]]] = {}
        self._keys: dict[str, list[Entry]] = {}
        self._counts: Counter[Group] = Counter()
        self._bytes: Counter[Group] = Counter()
        self._grown: Counter[str] = Counter()
        self._changed: dict[str, float] = {}
        self._generation = 0

    # --- reading ---

    @property
    def generation(self) -> int:
        """Grows with each change."""
        return self._generation

    def entries(self, wanted: Filter | None = None, root: str | None = None) -> list[Entry]:
        """All entries, or those that a filter selects, or those of one root."""
        with self._lock:
            roots = list(self._shelves.values()) if root is None else [self._shelves.get(root, {})]
            found = [
                one for shelves in roots for shelf in shelves.values() for one in shelf.values()
            ]
        return list(wanted.select(found)) if wanted else found

    def get(self, key: str) -> Entry:
        """One entry by its key, its record's action key, a prefix that only it has, or its path.

        Raises:
            UsageError: There is none, or more than one.
        """
        with self._lock:
            known = self._keys.get(key, ())
            if len(known) == 1:
                return known[0]
            roots = list(self._shelves)
        if not roots:
            raise UsageError("no root is watched", hint="`tlcache daemon run --root DIR`")
        found = list(known) or self.entries()
        return select.called(found, key, roots[0])

    def at(self, root: str, location: str) -> Entry | None:
        """What lies at a path of a root."""
        directory, name = os.path.split(location)
        with self._lock:
            return self._shelves.get(root, {}).get(directory, {}).get(name)

    def totals(self) -> dict[Group, Total]:
        """What there is, counted by root, TileLang's version, target and kind."""
        with self._lock:
            return {group: Total(n, self._bytes[group]) for group, n in self._counts.items()}

    def grown(self, root: str) -> int:
        """At most so many bytes on disk have been added to a root since the start."""
        return self._grown[root]

    def changed(self, root: str) -> float:
        """When a root changed last, by `time.monotonic`."""
        return self._changed.get(root, float("-inf"))

    # --- writing: for who follows a root ---

    def put(self, root: str, one: Entry) -> None:
        """What lies at its place from now on."""
        directory, name = os.path.split(one.place.location)
        with self._lock:
            shelf = self._shelves.setdefault(root, {}).setdefault(directory, {})
            before = shelf.get(name)
            if before is one or before == one:
                return
            shelf[name] = one
            self._touch(root)
            self._swap(root, before, one)
        if before is None:
            self._tell("entry-added", root, one)
        elif replace(before, last_used=one.last_used) != one:
            self._tell("entry-changed", root, one)

    def drop(self, root: str, location: str) -> None:
        """Nothing lies at a place any more, nor below it."""
        directory, name = os.path.split(location)
        start = os.path.join(location, "")
        with self._lock:
            shelves = self._shelves.get(root, {})
            gone = []
            if (one := shelves.get(directory, {}).pop(name, None)) is not None:
                gone.append(one)
            for path in [path for path in shelves if path == location or path.startswith(start)]:
                gone += shelves.pop(path).values()
            if not gone:
                return
            self._touch(root)
            for one in gone:
                self._swap(root, one, None)
        for one in gone:
            self._tell("entry-removed", root, one)

    def names(self, root: str, directory: str) -> list[str]:
        """The names of what lies in a directory."""
        with self._lock:
            return list(self._shelves.get(root, {}).get(directory, ()))

    def renew(self, root: str, found: Iterable[Entry], quiet: bool = False) -> None:
        """A root as a scan found it.

        Args:
            root: The root.
            found: All of it.
            quiet: Tell nobody what came and went.
        """
        shelves: dict[str, dict[str, Entry]] = {}
        before = self._shelves.get(root, {})
        told: list[tuple[str, Entry]] = []
        changed = False
        for one in found:
            directory, name = os.path.split(one.place.location)
            known = before.get(directory, {}).get(name)
            shelves.setdefault(directory, {})[name] = (
                one if known is None or known != one else known
            )
        with self._lock:
            self._shelves[root] = shelves
            for directory, shelf in before.items():
                now = shelves.get(directory, {})
                for name, one in shelf.items():
                    if name not in now:
                        self._swap(root, one, None)
                        told.append(("entry-removed", one))
            for directory, shelf in shelves.items():
                was = before.get(directory, {})
                for name, one in shelf.items():
                    known = was.get(name)
                    if known is one:
                        continue
                    self._swap(root, known, one)
                    if known is None:
                        told.append(("entry-added", one))
                    elif replace(known, last_used=one.last_used) != one:
                        told.append(("entry-changed", one))
                    changed = True
            if changed or told:
                self._touch(root)
        for kind, one in told if not quiet else ():
            self._tell(kind, root, one)

    def forget(self, root: str) -> None:
        """A root that is not watched any more."""
        self.renew(root, (), quiet=True)
        with self._lock:
            self._shelves.pop(root, None)

    def _touch(self, root: str) -> None:
        self._generation += 1
        self._changed[root] = time.monotonic()

    def _swap(self, root: str, before: Entry | None, now: Entry | None) -> None:
        for one, sign in ((before, -1), (now, 1)):
            if one is None:
                continue
            group = Group(root, one.place.tilelang or "", one.target or "", one.place.kind)
            self._counts[group] += sign
            self._bytes[group] += sign * one.bytes
            if not self._counts[group]:
                del self._counts[group], self._bytes[group]
            for key in _keys(one):
                known = self._keys.setdefault(key, [])
                if sign > 0:
                    known.append(one)
                else:
                    known[:] = [other for other in known if other is not one]
                    if not known:
                        del self._keys[key]
        if now is not None and now.place.kind in _BOUNDED:
            more = now.bytes - (before.bytes if before is not None else -_SLACK)
            self._grown[root] += max(0, more)

    def _tell(self, kind: str, root: str, one: Entry) -> None:
        if one.place.kind != "staging":
            self._events.tell(
                kind,
                root=root,
                key=one.place.key,
                path=os.path.relpath(one.place.location, root),
                what=one.place.kind,
                kernel=one.kernel,
                target=one.target,
                bytes=one.bytes,
            )


def _keys(one: Entry) -> Iterator[str]:
    yield one.place.key
    if one.record is not None:
        yield one.record.action_key
