"""Who asks, and what they may: readers by group, changes by the daemon's own user and root.

Invariant: who asks is what the kernel says of the other end of the socket, as it was when they
connected. Nothing in a request says so.
"""

from __future__ import annotations

import array
import grp
import os
import pwd
import socket
import struct
from typing import NamedTuple

from tlcache.errors import DaemonError

__all__ = ["Caller", "Rules", "caller", "group_id"]

_CREDENTIALS = struct.Struct("3i")
_SO_PEERGROUPS = 59
_MOST = 1024  # what Python lets getsockopt return, 256 groups


class Caller(NamedTuple):
    """Who is at the other end of a connection.

    Attributes:
        pid: The process; 0 where it is in another pid namespace.
        uid: Its effective user.
        groups: Its effective group, and its supplementary ones.
    """

    pid: int
    uid: int
    groups: frozenset[int]


class Rules(NamedTuple):
    """Who may what.

    Attributes:
        owner: The daemon's user.
        group: The group whose members may read; None for no such group.
    """

    owner: int
    group: int | None

    def may_change(self, one: Caller) -> bool:
        return one.uid in (0, self.owner)

    def may_read(self, one: Caller) -> bool:
        return self.may_change(one) or (self.group is not None and self.group in one.groups)


def caller(connection: socket.socket) -> Caller:
    """Who is at the other end of a unix socket.

    Raises:
        OSError: The connection has ended.
    """
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(told)
    return Caller(pid, uid, frozenset((gid, *_supplementary(connection, uid, gid))))


def _supplementary(connection: socket.socket, uid: int, gid: int) -> list[int]:
    try:
        told = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST)
        return list(array.array("I", told))
    except OSError:  # a kernel before 4.13, or more groups than that
        try:
            return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
        except (KeyError, OSError):
            return []


def group_id(name: str | None) -> int | None:
    """The number of a group.

    Raises:
        DaemonError: There is no such group.
    """
    if name is None:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise DaemonError(
            f"there is no group {name!r} to let read",
            hint=f"`groupadd --system {name}`, or set `group` to one that there is",
        ) from None
