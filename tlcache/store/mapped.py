"""Who has which files mapped: the libraries that live processes have loaded, by `/proc/*/maps`.

A library is told by its inode and device. Where the devices differ, as they do for overlays and
btrfs, by its inode and the last two parts of its path; so a process in a container, which has the
root mounted elsewhere, is seen, too. Not seen are kernels that TileLang copies into the driver
(nvrtc, cutedsl), and processes on other hosts or above this pid namespace.

Invariant: what cannot be read is said, never taken for nothing.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tlcache.store import mounts

__all__ = ["File", "Process", "Seen", "command", "files", "look", "network"]

_PROC = "/proc"
_LONGEST = 60
# addresses, permissions, offset, device, inode, path
_LINE = re.compile(rb"\S+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+) +(.*)")


class Process(NamedTuple):
    """A live process.

    Attributes:
        pid: Its number in this pid namespace.
        command: Its command line, shortened.
    """

    pid: int
    command: str

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command})" if self.command else f"pid {self.pid}"


@dataclass(frozen=True)
class Seen:
    """What is mapped, and by whom.

    Attributes:
        files: By inode: the device, the path and the process of each mapping.
        unreadable: How many processes could not be read, by their owner's uid.
        hidden: `/proc` hides the processes of other users, so nobody knows how many there are.
    """

    files: Mapping[int, tuple[tuple[int, str, Process], ...]] = field(default_factory=dict)
    unreadable: Mapping[int, int] = field(default_factory=dict)
    hidden: bool = False

    def holders(self, path: str, device: int, inode: int) -> tuple[Process, ...]:
        """The processes that have a file mapped, under whatever name."""
        tail = _tail(path)
        return tuple(
            dict.fromkeys(
                process
                for theirs, mapped, process in self.files.get(inode, ())
                if theirs == device or _tail(mapped) == tail
            )
        )


class File(NamedTuple):
    """A file that a process has mapped.

    Attributes:
        path: Its path, as the process sees it; without what the kernel adds where it is deleted.
        device: The device that it is on, as `/proc` says.
        inode: Its inode there.
    """

    path: str
    device: int
    inode: int


def files(pid: int) -> tuple[File, ...]:
    """The files that a process has mapped, in the order of their addresses.

    Raises:
        OSError: There is no such process, or it may not be looked into.
    """
    return tuple(dict.fromkeys(_lines(f"{_PROC}/{pid}/maps", None)))


def look(inodes: Iterable[int]) -> Seen:
    """Find who has any of these inodes mapped.

    Args:
        inodes: Of the files that matter; mappings of others are not kept.
    """
    wanted = frozenset(inodes)
    held: dict[int, list[tuple[int, str, Process]]] = {}
    unreadable: Counter[int] = Counter()
    for name in os.listdir(_PROC):
        if not name.isdigit():
            continue
        try:
            found = set(_lines(f"{_PROC}/{name}/maps", wanted))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except OSError:
            if (owner := _owner(name)) is not None:
                unreadable[owner] += 1
            continue
        if found:
            process = Process(int(name), command(int(name)))
            for path, device, inode in found:
                held.setdefault(inode, []).append((device, path, process))
    return Seen(
        {inode: tuple(mappings) for inode, mappings in held.items()}, dict(unreadable), _hides()
    )


def _lines(maps: str, wanted: frozenset[int] | None) -> Iterator[File]:
    """The files of a `maps`; only those of the wanted inodes, where there are such."""
    with open(maps, "rb") as file:
        for line in file.read().splitlines():
            match = _LINE.match(line)
            if match is None or (
                int(match[3]) not in wanted if wanted is not None else not match[4]
            ):
                continue
            device = os.makedev(int(match[1], 16), int(match[2], 16))
            path = match[4].removesuffix(b" (deleted)").replace(rb"\012", b"\n")
            yield File(os.fsdecode(path), device, int(match[3]))


def _tail(path: str) -> list[str]:
    return path.split("/")[-2:]


def _owner(pid: str) -> int | None:
    """The owner of a process that has memory of its own: neither the kernel's nor a dead one."""
    try:
        owner = os.stat(f"{_PROC}/{pid}").st_uid
        with open(f"{_PROC}/{pid}/cmdline", "rb") as file:
            return owner if file.read(1) else None
    except FileNotFoundError:
        return None
    except ProcessLookupError:
        return None
    except OSError:
        return owner


def command(pid: int) -> str:
    """The command line of a process, shortened; empty where there is none."""
    try:
        with open(f"{_PROC}/{pid}/cmdline", "rb") as file:
            words = file.read(4096).split(b"\0")
    except OSError:
        return ""
    words[0] = os.path.basename(words[0])
    text = " ".join(os.fsdecode(word) for word in words if word)
    # It ends up on terminals, and its owner chose it.
    text = "".join(sign if sign.isprintable() else " " for sign in text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _hides() -> bool:
    """Whether `/proc` is mounted so that others' processes cannot be seen."""
    if os.geteuid() == 0:
        return False
    options = next((mount.whole for mount in _mounts() if mount.place == _PROC), "")
    return re.search(r"hidepid=(2|4|invisible|ptraceable)", options) is not None


def _mounts() -> list[mounts.Mount]:
    return mounts.read(f"{_PROC}/self/mountinfo")


def network(path: str | os.PathLike[str]) -> str | None:
    """The type of the file system that a path is on, if other hosts can be on it, too; else None.

    On such a one nobody can tell who has a library loaded, and deleting one can break readers.
    """
    mount = mounts.holding(path, _mounts())
    return mount.kind if mount is not None and mount.is_shared else None
