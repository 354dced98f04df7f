"""What may be deleted from a root: each thing with what it was made of when it was looked at, the
records that point at it, and who has it loaded.

Invariant: a thing's facts and its snapshot are of one state. A thing that changes while it is
looked at is no candidate, and neither is a link, nor anything that `layout` has no name for.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tlcache.store import entry, layout, mapped, record, scan
from tlcache.store.entry import Entry, Facts
from tlcache.store.layout import EntryPlace
from tlcache.store.mapped import Process, Seen

__all__ = ["Candidate", "Filed", "Filings", "Gathered", "Snapshot", "gather"]
__all__ += ["holders", "snapshot"]

_KINDS = ("kernel", "cuda-binary", "autotuner", "frontend", "staging")
_DEPTH = 20
_BLOCK = 512
_TICK = 0.05  # seconds: a directory that changed this lately may change again and keep its time


class Snapshot(NamedTuple):
    """What something on disk was made of.

    Attributes:
        parts: For it and all in it: the path below its own, and what changes with its content.
        used: The newest access to a file of it, in nanoseconds since 1970.
        inodes: Of its files and directories: device, number, bytes on disk, and how many names
            that has.
        status: Its own, as `os.lstat` gave it.
    """

    parts: tuple[tuple[str, int, int, int, int], ...]
    used: int
    inodes: tuple[tuple[int, int, int, int], ...]
    status: os.stat_result

    @property
    def physical(self) -> int:
        """Bytes on disk, everything counted once."""
        return sum({inode[:2]: inode[2] for inode in self.inodes}.values())


class Filed(NamedTuple):
    """A record's file.

    Attributes:
        action_key: The key that it is filed under.
        location: Its path.
        seen: What it was made of.
    """

    action_key: str
    location: str
    seen: Snapshot


@dataclass(frozen=True)
class Candidate:
    """A thing that may be deleted.

    Attributes:
        entry: What is known of it.
        root: The root that it is in.
        seen: What it was made of.
        files: The paths that make it up, in the order in which they go; the thing itself is last.
        records: Those that point at it, whoever compiled them; they go with it.
        held: The processes that have a file of it mapped.
    """

    entry: Entry
    root: str
    seen: Snapshot
    files: tuple[tuple[str, Snapshot], ...]
    records: tuple[Filed, ...] = ()
    held: tuple[Process, ...] = ()

    @property
    def location(self) -> str:
        return self.entry.place.location

    @property
    def snapshots(self) -> list[Snapshot]:
        """Of everything that goes with it."""
        return [seen for _, seen in self.files] + [filed.seen for filed in self.records]

    @property
    def physical(self) -> int:
        """Its bytes on disk, with its records."""
        return sum(seen.physical for seen in self.snapshots)


class Gathered(NamedTuple):
    """All candidates of a root, and whether everybody who may have one loaded could be asked."""

    candidates: list[Candidate]
    filings: dict[str, Filings]
    seen: Seen


def snapshot(path: str) -> Snapshot | None:
    """Look at something, and at all that is in it. No link is followed; nothing is read.

    Returns:
        None where there is nothing, or nothing that can be looked at.
    """
    try:
        top = os.lstat(path)
        parts = [_part("", top)]
        inodes, used = [_inode(top)], top.st_atime_ns if stat.S_ISREG(top.st_mode) else 0
        places = [("", 0)] if stat.S_ISDIR(top.st_mode) else []
        while places:
            below, depth = places.pop()
            if depth > _DEPTH:
                return None
            for name in sorted(os.listdir(f"{path}/{below}")):
                status = os.lstat(f"{path}/{below}{name}")
                parts.append(_part(f"{below}{name}", status))
                inodes.append(_inode(status))
                if stat.S_ISDIR(status.st_mode):
                    places.append((f"{below}{name}/", depth + 1))
                elif stat.S_ISREG(status.st_mode):
                    used = max(used, status.st_atime_ns)
    except (OSError, ValueError):
        return None
    return Snapshot(tuple(parts), used, tuple(inodes), top)


def _part(name: str, status: os.stat_result) -> tuple[str, int, int, int, int]:
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return (name, status.st_ino, status.st_mode, status.st_ctime_ns, size)


def _inode(status: os.stat_result) -> tuple[int, int, int, int]:
    names = 1 if stat.S_ISDIR(status.st_mode) else status.st_nlink
    return (status.st_dev, status.st_ino, status.st_blocks * _BLOCK, names)


class Filings:
    """The records of one root by the entry that they point at; read again where they changed."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._times: dict[str, int] = {}
        self._files: dict[str, dict[str, tuple[tuple[int, int, int], str | None]]] = {}
        self._at: dict[str, set[str]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look which directories of records have changed, and read what is new in them."""
        top = os.path.join(self._root, "tlcache", "records")
        for place in {path.path for path in _directories(top)} | set(self._times):
            try:
                changed = os.lstat(place).st_mtime_ns
            except OSError:
                changed = -1
            if self._times.get(place) != changed:
                self._read(place)
                settled = changed < time.time_ns() - int(_TICK * 1e9)
                self._times[place] = changed if settled else 0

    def at(self, location: str) -> frozenset[str]:
        """The paths of the records that point at a thing."""
        return frozenset(self._at.get(os.path.relpath(location, self._root), ()))

    def all(self) -> Iterator[tuple[str, str]]:
        """All sound records: the entry's path, relative to the root, and the record's path."""
        for name, paths in self._at.items():
            yield from ((name, path) for path in paths)

    def _read(self, place: str) -> None:
        before, now = self._files.get(place, {}), {}
        for item in _items(place):
            if not item.name.endswith(".json") or item.name.startswith("."):
                continue
            try:
                status = item.stat(follow_symlinks=False)
            except OSError:
                continue
            stamp = (status.st_ino, status.st_size, status.st_ctime_ns)
            if item.path in before and before[item.path][0] == stamp:
                now[item.path] = (stamp, before[item.path][1])
            elif stat.S_ISREG(status.st_mode):
                now[item.path] = (stamp, _entry_of(item.path))
        for path, (_, name) in before.items():
            if name is not None:
                self._at.get(name, set()).discard(path)
        for path, (_, name) in now.items():
            if name is not None:
                self._at.setdefault(name, set()).add(path)
        self._files[place] = now


def _entry_of(path: str) -> str | None:
    """The entry that a sound record points at."""
    from tlcache.store import files

    try:
        found = record.parse(files.read(path, unseen=True), path)
    except OSError:
        return None
    if found is None or f"{found.action_key}.json" != os.path.basename(path):
        return None
    return os.path.normpath(found.entry)


def _directories(place: str) -> list[os.DirEntry[str]]:
    return [item for item in _items(place) if item.is_dir(follow_symlinks=False)]


def _items(place: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(place) as found:
            return sorted(found, key=lambda item: item.name)
    except OSError:
        return []


def gather(base: str | os.PathLike[str]) -> Gathered:
    """Everything at a root, and in the roots below it, that may be deleted. Reads only."""
    base = os.path.realpath(base)
    roots = layout.roots(base)
    filings = {root: Filings(root) for root in roots}
    found = []
    for one in scan.scan(base):
        root = next((r for r in roots[1:] if one.place.location.startswith(f"{r}/")), base)
        made = _candidate(one, root, filings[root])
        if made is not None:
            found.append(made)
    for root, filed in filings.items():
        found += _dangling(root, filed)
    seen = mapped.look(inode[1] for one in found for inode in one.seen.inodes)
    asked = [replace(one, held=held) if (held := holders(one, seen)) else one for one in found]
    return Gathered(asked, filings, seen)


def _candidate(one: Entry, root: str, filings: Filings) -> Candidate | None:
    if one.place.kind not in _KINDS:
        return None
    location = one.place.location
    seen = snapshot(location)
    if seen is None or stat.S_ISLNK(seen.status.st_mode):
        return None
    if one.created != entry.utc(seen.status.st_mtime):
        return None  # it has been replaced since its facts were read
    files = [(location, seen)]
    if one.place.kind == "cuda-binary" and stat.S_ISREG(seen.status.st_mode):
        checksum = snapshot(f"{location}.sha256")
        if checksum is not None and stat.S_ISREG(checksum.status.st_mode):
            files.insert(0, (f"{location}.sha256", checksum))
    records = []
    for path in sorted(filings.at(location)):
        filed = snapshot(path)
        if filed is not None:
            records.append(Filed(_key(path), path, filed))
    return Candidate(one, root, seen, tuple(files), tuple(records))


def _key(path: str) -> str:
    return os.path.basename(path).removesuffix(".json")


def _dangling(root: str, filings: Filings) -> Iterator[Candidate]:
    """Records whose entries are gone: misses, which only take room."""
    for name, path in sorted(filings.all()):
        if os.path.lexists(os.path.join(root, name)):
            continue
        seen, filed = snapshot(path), record.read(root, _key(path))
        if seen is None or filed is None:
            continue
        version, platform = filed.versions.get("tilelang"), filed.versions.get("platform")
        place = EntryPlace(filed.action_key, path, version, platform, "record")
        used = entry.utc(seen.status.st_mtime)
        size = seen.status.st_size
        made = Entry(place, None, size, used, used, Facts(), None, filed)
        yield Candidate(made, root, seen, ((path, seen),))


def holders(one: Candidate, seen: Seen) -> tuple[Process, ...]:
    """The processes that have a file of a candidate mapped."""
    held: dict[Process, None] = {}
    for (name, *_), inode in zip(one.seen.parts, one.seen.inodes, strict=True):
        if inode[1] in seen.files:
            path = f"{one.location}/{name}" if name else one.location
            held |= dict.fromkeys(seen.holders(path, inode[0], inode[1]))
    return tuple(held)
