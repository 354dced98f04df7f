"""What can be seen of a process from outside: which kernels of which cache it has mapped.

Invariant: nothing is asked of the process, and nothing is guessed. A file counts as the one that is
mapped only if it is the same inode; so a kernel that was deleted, or compiled again meanwhile, is
known by its path alone.
"""

from __future__ import annotations

import os
import pwd
import re
import time
from dataclasses import dataclass

from tlcache.errors import EnvironmentFault, TlcacheError, UsageError
from tlcache.store import entry, layout, mapped
from tlcache.store.entry import Entry
from tlcache.store.filings import Filings
from tlcache.store.mapped import File

__all__ = ["Loaded", "Outside", "look"]

_PROC = "/proc"
_TILELANG = "libtilelang.so"
_TEMPORARY = r".*/tmp[a-z0-9_]{8}\.so"


@dataclass(frozen=True)
class Loaded:
    """A kernel that a process has mapped.

    Attributes:
        root: The cache root that it came from, as the process sees it.
        path: Its directory, as the process sees it.
        entry: What is known of it.
        gone: It is not there any more as it was mapped: deleted, or compiled again.
    """

    root: str
    path: str
    entry: Entry
    gone: bool


@dataclass(frozen=True)
class Outside:
    """A process, from outside.

    Attributes:
        pid: Its number.
        command: Its command line, shortened.
        user: Whose it is.
        uptime: Seconds since its start.
        loaded: The kernels that it has mapped, in the order of their addresses.
        tilelang: It has TileLang's library loaded, so it can compile.
        compiled: Libraries that it compiled itself: TileLang loads these from temporary files, and
            not from the entries that it makes of them.
    """

    pid: int
    command: str
    user: str
    uptime: float
    loaded: tuple[Loaded, ...]
    tilelang: bool
    compiled: tuple[str, ...]


def look(pid: int) -> Outside:
    """Look at a process.

    Raises:
        UsageError: There is none, or it has ended.
        EnvironmentFault: It is somebody else's.
    """
    try:
        owner = _user(os.stat(f"{_PROC}/{pid}").st_uid)
    except OSError as error:
        raise _nobody(pid) from error
    try:
        state, uptime = _state(pid)
        files = mapped.files(pid)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise _nobody(pid) from error
    except OSError as error:
        raise _closed(pid, owner) from error
    if state in "ZX":
        raise _nobody(pid)
    paths = dict.fromkeys(file.path for file in files)
    tilelang = any(os.path.basename(path) == _TILELANG for path in paths)
    compiled = [path for path in paths if tilelang and re.fullmatch(_TEMPORARY, path)]
    loaded = _loaded(pid, files)
    return Outside(pid, mapped.command(pid), owner, uptime, loaded, tilelang, tuple(compiled))


def _closed(pid: int, owner: str) -> EnvironmentFault:
    if owner == _user(os.geteuid()) or os.geteuid() == 0:
        return EnvironmentFault(
            f"the memory of pid {pid} may not be looked into, though it belongs to {owner}",
            hint="it is protected, or the right to trace is missing here (CAP_SYS_PTRACE); an "
            "agent in it would say more: `TLCACHE_AGENT=1`",
        )
    return EnvironmentFault(
        f"pid {pid} belongs to {owner}, so its memory may not be looked into",
        hint=f"as {owner} or root: `tlcache stats --pid {pid}`",
    )


def _nobody(pid: int) -> TlcacheError:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return _closed(pid, "somebody else")  # /proc hides it
    except OSError:
        pass
    return UsageError(
        f"there is no process {pid}", hint="`tlcache stats` lists those that have an agent"
    )


def _loaded(pid: int, files: tuple[File, ...]) -> tuple[Loaded, ...]:
    found: dict[str, Loaded] = {}
    filed: dict[str, Filings] = {}
    for file in files:
        held = layout.holding(file.path)
        if held is None or held[1].location in found:
            continue
        root, place = held
        prefix = _where(pid, file)
        if prefix is None:
            nothing = entry.Listing(b"", None, (), 0)
            one = entry.made(place, nothing, entry.Facts(), None)
        else:
            if root not in filed:
                filed[root] = Filings(prefix + root)
            there = place._replace(location=prefix + place.location)
            one = entry.read(there, filed[root].newest(there.location))
        found[place.location] = Loaded(root, place.location, one, prefix is None)
    return tuple(found.values())


def _where(pid: int, file: File) -> str | None:
    """What to put before a path that a process sees, so that we see the same file: nothing, or its
    own root where it is in a container; None where the file is not there any more.
    """
    for prefix in ("", f"{_PROC}/{pid}/root"):
        try:
            if os.stat(prefix + file.path).st_ino == file.inode:
                return prefix
        except OSError:
            continue
    return None


def _state(pid: int) -> tuple[str, float]:
    """The state of a process, as a letter, and the seconds since its start."""
    with open(f"{_PROC}/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0].decode(), max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
