"""Where the agents of this host listen: the runtime directory, who may have it, and the sockets in
it.

An agent's socket is `<pid>.sock`. Containers that share a directory may have processes of equal
pids: the second of two that live is `<pid>-<pid namespace>.sock`. Whether a socket is stale is
therefore never told by its pid alone: nobody listens on one that is.

Invariant: nothing is made, used or removed in a directory that is not the user's alone. A socket is
published under its name when it is listened on, so one that refuses a connection is dead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from tlcache.errors import AgentError

__all__ = [
    "daemon_directory",
    "DIRECTORY",
    "Address",
    "Peer",
    "clean",
    "connect",
    "directory",
    "listed",
    "listen",
]
__all__ += ["opened", "peer", "places", "withdraw"]

DIRECTORY = "TLCACHE_RUNTIME_DIR"
"""The environment variable that names the directory."""

BACKLOG = 1024
"""Connections that wait to be accepted, at most."""

_NAME = re.compile(r"(\d+)(?:-\d+)?\.sock")
_TEMPORARY = re.compile(r"\.\d+-[0-9a-f]{8}")
_PATIENCE = 1.0
_YOUNG = 60.0


class Address(NamedTuple):
    """Where an agent listens.

    Attributes:
        directory: The directory.
        name: The socket in it.
        pid: The process, as its own pid namespace counts.
    """

    directory: str
    name: str
    pid: int

    @property
    def path(self) -> str:
        """The socket's path; it may be longer than a socket's address can be."""
        return os.path.join(self.directory, self.name)


class Peer(NamedTuple):
    """Who is at the other end of a socket.

    Attributes:
        pid: The process, as this pid namespace counts; 0 where it is in another one.
        uid: Its effective user.
    """

    pid: int
    uid: int


# --- the directory ---
_SYSTEM = "/run/tlcache"
_AGENTS = "/run/tlcache/agents"


def directory() -> str:
    """Where an agent of this process listens: $TLCACHE_RUNTIME_DIR, else $XDG_RUNTIME_DIR/tlcache,
    else /run/tlcache/agents for root and for whom /run/tlcache belongs to, else /tmp/tlcache-<uid>.

    XDG_RUNTIME_DIR counts only while it belongs to this user, which it does not after `su`.
    """
    chosen = os.environ.get(DIRECTORY)
    if chosen:
        return os.path.abspath(chosen)
    uid = os.geteuid()
    theirs = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(theirs) and _owner(theirs) == uid:
        return os.path.join(theirs, "tlcache")
    if uid == 0 or _owner(_SYSTEM) == uid:
        return _AGENTS
    return f"/tmp/tlcache-{uid}"


def daemon_directory() -> str:
    """Where the daemon of this user listens: as for agents, but for root /run/tlcache itself, which
    is open to others so that a group may ask.
    """
    if os.geteuid() == 0 and not os.environ.get(DIRECTORY):
        return _SYSTEM
    return directory()


def places() -> dict[str, int]:
    """The directories that are there to look for agents in, and whose they should be: the one that
    is named, else all that this user's processes may use; for root, everybody's.
    """
    uid = os.geteuid()
    if os.environ.get(DIRECTORY):
        return {directory(): uid} if _may_be_there(directory()) else {}
    found = {directory(): uid, _AGENTS: uid}
    for pattern in ("/run/user/{}/tlcache", "/tmp/tlcache-{}"):
        if uid:
            found[pattern.format(uid)] = uid
            continue
        before, after = pattern.split("{}")
        for path in glob.glob(pattern.format("*")):
            whose = path[len(before) : len(path) - len(after)]
            if whose.isdecimal():
                found[path] = int(whose)
    return {path: whose for path, whose in found.items() if _owner(path) == whose}


def _may_be_there(path: str) -> bool:
    """Whether there is something, or nobody here can tell."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _owner(path: str) -> int | None:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return None


@contextlib.contextmanager
def opened(path: str, *, create: bool = False, owner: int | None = None) -> Iterator[int]:
    """A descriptor of a directory that was checked: what is done by it is done there, whatever the
    path leads to by then.

    Args:
        path: The directory.
        create: Make it, where it is not there.
        owner: Whose it should be; this user's by default.

    Raises:
        AgentError: It cannot be made or opened, is a link, belongs to somebody else, or others can
            get into it.
    """
    try:
        if create:
            _make(path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        link = error.errno in (errno.ELOOP, errno.ENOTDIR)
        reason = "is a link or no directory" if link else f"cannot be used: {error.strerror}"
        raise AgentError(
            f"the runtime directory {path} {reason}", hint=f"set {DIRECTORY} to one of your own"
        ) from error
    try:
        status = os.fstat(fd)
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != (os.geteuid() if owner is None else owner):
            raise AgentError(
                f"the runtime directory {path} belongs to uid {status.st_uid}",
                hint=f"set {DIRECTORY} to one of your own",
            )
        if mode & 0o077:
            raise AgentError(
                f"others can get into the runtime directory {path} (mode {mode:04o})",
                hint=f"`chmod 700 {path}`, if what is in it is yours",
            )
        yield fd
    finally:
        os.close(fd)


def _make(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass


# --- an agent's side ---


def listen(fd: int, pid: int) -> tuple[socket.socket, str]:
    """Listen in a directory, and clean it of what the dead left there.

    Args:
        fd: The directory, from `opened`.
        pid: This process.

    Returns:
        The socket, which does not block, and its name.

    Raises:
        OSError: No socket is to be had there.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    temporary = f".{pid}-{secrets.token_hex(4)}"
    try:
        os.fchmod(server.fileno(), 0o600)  # what is bound gets this mode, less the umask
        server.bind(_reached(fd, temporary))
        server.listen(BACKLOG)
        server.setblocking(False)
        with _locked(fd):
            clean(fd)
            name = f"{pid}.sock"
            if _answers(fd, name):
                name = f"{pid}-{_pid_namespace()}.sock"
            os.rename(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)
    except BaseException:
        server.close()
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=fd)
        raise
    return server, name


def withdraw(fd: int, name: str, inode: int) -> None:
    """Remove a socket, if it is still the one that was published under that name."""
    with contextlib.suppress(OSError):
        if os.stat(name, dir_fd=fd, follow_symlinks=False).st_ino == inode:
            os.unlink(name, dir_fd=fd)


def clean(fd: int) -> None:
    """Remove the sockets of processes that are gone, and that nobody in another pid namespace
    listens on.
    """
    for name in os.listdir(fd):
        match = _NAME.fullmatch(name)
        try:
            if match is not None:
                if not _lives(int(match[1])) and _socket(fd, name) and not _answers(fd, name):
                    os.unlink(name, dir_fd=fd)
            elif _TEMPORARY.fullmatch(name):
                age = time.time() - os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime
                if age > _YOUNG and not _answers(fd, name):
                    os.unlink(name, dir_fd=fd)
        except OSError:
            continue  # somebody else was quicker


@contextlib.contextmanager
def _locked(fd: int) -> Iterator[None]:
    """One process at a time; whoever holds it for longer than a second is not waited for, since
    the loss would be a stale socket.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _lives(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def _socket(fd: int, name: str) -> bool:
    return stat.S_ISSOCK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)


def _answers(fd: int, name: str) -> bool:
    """Whether somebody listens on a socket, or nobody can tell."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(_reached(fd, name))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
        return True


def _reached(fd: int, name: str) -> str:
    """A path of a few bytes: the address of a socket has room for 107."""
    return f"/proc/self/fd/{fd}/{name}"


def _pid_namespace() -> str:
    return re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))


# --- a reader's side ---


def listed(path: str, *, owner: int | None = None) -> list[Address]:
    """The sockets in a directory, by pid; some of them may be stale.

    Args:
        path: The directory.
        owner: Whose it should be; this user's by default.

    Raises:
        AgentError: See `opened`.
    """
    with opened(path, owner=owner) as fd:
        names = os.listdir(fd)
    found = [
        Address(path, name, int(match[1])) for name in names if (match := _NAME.fullmatch(name))
    ]
    return sorted(found, key=lambda address: (address.pid, address.name))


def connect(address: Address, timeout: float, *, owner: int | None = None) -> socket.socket:
    """A connection to an agent, however long its path is.

    Args:
        address: Where it listens.
        timeout: Seconds that this, and each use of the connection, may take.
        owner: Whose the directory and the agent should be; this user's by default.

    Raises:
        AgentError: See `opened`; or it is another user who listens there.
        OSError: Nobody listens there (ConnectionRefusedError, FileNotFoundError), or it took too
            long.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        client.settimeout(timeout)
        with opened(address.directory, owner=owner) as fd:
            client.connect(_reached(fd, address.name))
        if (uid := peer(client).uid) not in (0, os.geteuid() if owner is None else owner):
            raise AgentError(f"it is uid {uid} who listens at {address.path}")
    except BaseException:
        client.close()
        raise
    return client


def peer(connection: socket.socket) -> Peer:
    """Who is at the other end, by SO_PEERCRED."""
    layout = struct.Struct("iii")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    pid, uid, _ = layout.unpack(found)
    return Peer(pid, uid)
