"""What may be deleted from a root: each thing with what it was made of when it was looked at, the
records that point at it, and who has it loaded.

Invariant: a thing's facts and its snapshot are of one state. A thing that changes while it is
looked at is no candidate, and neither is a link, nor anything that `layout` has no name for.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from tlcache.store import entry, mapped, record, scan
from tlcache.store.entry import Entry, Facts
from tlcache.store.filings import Filing, Filings
from tlcache.store.layout import EntryPlace
from tlcache.store.mapped import Process, Seen

__all__ = ["Candidate", "Filed", "Gathered", "Snapshot", "gather"]
__all__ += ["among", "holders", "snapshot"]

_KINDS = ("kernel", "cuda-binary", "autotuner", "frontend", "staging")
_DEPTH = 20
_BLOCK = 512
_BITS = 2**64 - 1  # a time may be negative
_INODE = struct.Struct("<4Q")  # device, number, bytes on disk, names
_PART = struct.Struct("<QQQQ")  # number, mode, time of change, size


class Snapshot(NamedTuple):
    """What something on disk was made of. There is one for each thing in a root, so it is small.

    Attributes:
        digest: Of it and all in it: paths, and what changes with their content.
        used: The newest access to a file of it, in nanoseconds since 1970.
        names: The paths of its files and directories below its own, "" first, between NULs.
        packed: The `inodes`.
        mode: Its own, as `os.lstat` has it.
        mtime: When it was last changed itself, in seconds since 1970.
        size: Its own.
    """

    digest: bytes
    used: int
    names: str
    packed: bytes
    mode: int
    mtime: float
    size: int

    @property
    def inodes(self) -> Iterator[tuple[int, int, int, int]]:
        """Of its files and directories: device, number, bytes on disk, and how many names that
        has.
        """
        return _INODE.iter_unpack(self.packed)

    @property
    def identity(self) -> tuple[int, int]:
        """Device and number of its own inode."""
        device, number, _, _ = _INODE.unpack_from(self.packed)
        return device, number

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
        names, found = [""], [top]
        places = [("", 0)] if stat.S_ISDIR(top.st_mode) else []
        while places:
            below, depth = places.pop()
            if depth > _DEPTH:
                return None
            for name in sorted(os.listdir(f"{path}/{below}")):
                status = os.lstat(f"{path}/{below}{name}")
                names.append(f"{below}{name}")
                found.append(status)
                if stat.S_ISDIR(status.st_mode):
                    places.append((f"{below}{name}/", depth + 1))
    except (OSError, ValueError):
        return None
    told = "\0".join(names)
    digest = hashlib.blake2b(os.fsencode(told), digest_size=16)
    for status in found:
        digest.update(_part(status))
    return Snapshot(
        digest.digest(),
        max((one.st_atime_ns for one in found if stat.S_ISREG(one.st_mode)), default=0),
        sys.intern(told),
        b"".join(map(_inode, found)),
        top.st_mode,
        top.st_mtime,
        top.st_size,
    )


def _part(status: os.stat_result) -> bytes:
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return _PART.pack(status.st_ino, status.st_mode, status.st_ctime_ns & _BITS, size)


def _inode(status: os.stat_result) -> bytes:
    names = 1 if stat.S_ISDIR(status.st_mode) else status.st_nlink
    return _INODE.pack(status.st_dev, status.st_ino, status.st_blocks * _BLOCK, names)


def gather(base: str | os.PathLike[str]) -> Gathered:
    """Everything at a root, and in the roots below it, that may be deleted. Reads only."""
    base = os.path.realpath(base)
    filings: dict[str, Filings] = {}
    return among(base, scan.scan(base, filings), filings)


def among(
    base: str,
    entries: Iterable[Entry],
    filings: dict[str, Filings],
    known: Mapping[str, Candidate] | None = None,
) -> Gathered:
    """The same of entries that somebody keeps.

    Args:
        base: The root that they are in, as their places begin.
        entries: The entries.
        filings: The records of it, and of each root below it.
        known: Candidates of earlier, by location. One is taken as it was while its entry is the
            same object, with the same records: what became of it since then `removal` will see.
    """
    known = known or {}
    found = []
    for one in entries:
        location = one.place.location
        root = next((r for r in filings if r != base and location.startswith(f"{r}/")), base)
        if root not in filings:
            continue
        made = known.get(location)
        if made is None or made.entry is not one or _refiled(made, filings[root]):
            made = _candidate(one, root, filings[root])
        if made is not None:
            found.append(made)
    for root, filed in filings.items():
        found += _dangling(root, filed)
    seen = mapped.look(inode[1] for one in found for inode in one.seen.inodes)
    return Gathered([_asked(one, holders(one, seen)) for one in found], filings, seen)


def _refiled(one: Candidate, filings: Filings) -> bool:
    return filings.at(one.location) != {filed.location for filed in one.records}


def _asked(one: Candidate, held: tuple[Process, ...]) -> Candidate:
    return one if one.held == held else replace(one, held=held)


def _candidate(one: Entry, root: str, filings: Filings) -> Candidate | None:
    if one.place.kind not in _KINDS:
        return None
    location = one.place.location
    seen = snapshot(location)
    if seen is None or stat.S_ISLNK(seen.mode):
        return None
    if one.created != entry.utc(seen.mtime):
        return None  # it has been replaced since its facts were read
    files = [(location, seen)]
    if one.place.kind == "cuda-binary" and stat.S_ISREG(seen.mode):
        checksum = snapshot(f"{location}.sha256")
        if checksum is not None and stat.S_ISREG(checksum.mode):
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
        used = entry.utc(seen.mtime)
        size = seen.size
        made = Entry(place, None, size, used, used, Facts(), None, Filing.of(filed))
        yield Candidate(made, root, seen, ((path, seen),))


def holders(one: Candidate, seen: Seen) -> tuple[Process, ...]:
    """The processes that have a file of a candidate mapped."""
    held: dict[Process, None] = {}
    for number, (device, inode, *_) in enumerate(one.seen.inodes):
        if inode in seen.files:
            name = one.seen.names.split("\0")[number]
            path = f"{one.location}/{name}" if name else one.location
            held |= dict.fromkeys(seen.holders(path, device, inode))
    return tuple(held)
