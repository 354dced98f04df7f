"""The daemon's socket: the one that the service manager hands over, else one at a path.

Invariant: a socket that somebody listens on is never taken away; one that nobody does is replaced,
by rename, so that whoever connects finds the old one or the new one.
"""

from __future__ import annotations

import contextlib
import grp
import os
import secrets
import socket
import stat

from tlcache.errors import DaemonError
from tlcache.store import sockets

__all__ = ["Listening", "listen"]

_LONGEST = 107
_HANDED = 3  # the first descriptor of sd_listen_fds(3)


class Listening:
    """A socket that is listened on.

    Attributes:
        socket: The socket, which does not block.
        path: Where it is, to be removed at the end; None where the service manager has it.
    """

    def __init__(self, found: socket.socket, path: str | None = None) -> None:
        self.socket, self.path = found, path
        self._inode = os.stat(path).st_ino if path is not None else 0

    def close(self) -> None:
        self.socket.close()
        if self.path is not None:
            with contextlib.suppress(OSError):
                if os.lstat(self.path).st_ino == self._inode:
                    os.unlink(self.path)


def listen(path: str, group: str | None = None) -> Listening:
    """Listen.

    Args:
        path: Where, unless the service manager hands over a socket.
        group: Whose members may connect, besides the owner.

    Raises:
        DaemonError: Somebody listens there already, it cannot be made, or there is no such group.
    """
    handed = _handed()
    if handed is not None:
        return Listening(handed)
    try:
        gid = grp.getgrnam(group).gr_gid if group is not None else None
    except KeyError:
        raise DaemonError(
            f"there is no group {group!r}", hint=f"`groupadd --system {group}` makes it"
        ) from None
    if len(os.fsencode(path)) > _LONGEST:
        raise DaemonError(
            f"{path} is longer than the {_LONGEST} bytes that a socket's path can have",
            hint="name a shorter one with `--socket PATH`",
        )
    _refuse_taken(path)
    directory = os.path.dirname(path)
    temporary = os.path.join(directory, f".{secrets.token_hex(4)}")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        _make(directory, gid)
        _check(directory)
        os.fchmod(server.fileno(), 0o600)  # what is bound gets this mode, less the umask
        server.bind(temporary)
        if gid is not None:
            os.chown(temporary, -1, gid)
            os.chmod(temporary, 0o660)
        server.listen(sockets.BACKLOG)
        server.setblocking(False)
        os.rename(temporary, path)
        return Listening(server, path)
    except (OSError, DaemonError) as error:
        server.close()
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, DaemonError):
            raise
        said = (error.strerror or str(error)).lower()
        raise DaemonError(
            f"no socket can be had at {path}: {said}", hint="name another one with `--socket PATH`"
        ) from error


def _handed() -> socket.socket | None:
    """The socket of the service manager. What says so is for this process alone, and only once."""
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal() or not int(count):
        return None
    os.set_inheritable(_HANDED, False)
    found = socket.socket(fileno=_HANDED)
    found.setblocking(False)
    return found


def _refuse_taken(path: str) -> None:
    """Make sure that what is at a path may be replaced."""
    try:
        status = os.lstat(path)
    except OSError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise DaemonError(
            f"{path} is there, and no socket", hint="name another one with `--socket PATH`"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError:
            pass  # it is busy, or not ours to ask
        try:
            pid = sockets.peer(probe).pid
        except OSError:
            pid = 0
    who = f", pid {pid}" if pid else ""
    raise DaemonError(
        f"a daemon listens at {path} already{who}",
        hint="stop that one first, or name another socket with `--socket PATH`",
    )


def _make(directory: str, gid: int | None) -> None:
    """The socket's directory, for the owner and the group."""
    if not os.path.isdir(directory):
        os.makedirs(os.path.dirname(directory) or "/", exist_ok=True)
        os.mkdir(directory, 0o700)
        if gid is not None:
            os.chown(directory, -1, gid)
            os.chmod(directory, 0o750)


def _check(directory: str) -> None:
    """Refuse a directory in which others can put their own socket in the place of this one."""
    status = os.stat(directory)
    open_to_others = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    if open_to_others or status.st_uid not in (0, os.geteuid()):
        raise DaemonError(
            f"others can write {directory}, and put their own socket in the daemon's place",
            hint=f"`chmod go-w {directory}`, or name another one with `--socket PATH`",
        )
