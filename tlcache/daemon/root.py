"""What a watched root is at the moment: there or not, which directory, on which file system.

Invariant: looking never raises; a root that cannot be looked at is one that is not there, with the
reason.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from tlcache.store import mounts

__all__ = ["State", "differs", "look"]

_TABLE = "/proc/self/mountinfo"


class State(NamedTuple):
    """A root as it was found.

    Attributes:
        identity: Device and inode of its directory; None where it is not there.
        reason: Why it is not there, as the end of a sentence.
        mount: Where the file system is mounted that it is on.
        shared: That file system's type, where other hosts can be on it, too.
        read_only: Whether it cannot be written.
    """

    identity: tuple[int, int] | None
    reason: str | None = None
    mount: str | None = None
    shared: str | None = None
    read_only: bool = False


def look(path: str) -> State:
    """Look at a root."""
    try:
        status = os.stat(path)
        if not stat.S_ISDIR(status.st_mode):
            return State(None, "is no directory")
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except FileNotFoundError:
        return State(None, "is not there")
    except (OSError, ValueError) as error:
        said = (getattr(error, "strerror", None) or str(error)).lower()
        return State(None, f"cannot be read: {said}")
    mount = mounts.holding(path, mounts.read(_TABLE))
    return State(
        (status.st_dev, status.st_ino),
        None,
        mount.place if mount is not None else None,
        mount.kind if mount is not None and mount.is_shared else None,
        not os.access(path, os.W_OK),
    )


def differs(before: State, now: State) -> str | None:
    """What became of a root, as the end of a sentence; None where it is the directory that it
    was.
    """
    if before.identity == now.identity:
        return None
    if before.mount is not None and now.mount is not None and before.mount != now.mount:
        inner = now.mount.startswith(before.mount)
        return f"has {now.mount} mounted over it" if inner else f"was unmounted from {before.mount}"
    if now.identity is None:
        return now.reason
    return "is there" if before.identity is None else "was replaced by another directory"
