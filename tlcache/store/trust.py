"""Who could have written what is about to be loaded. A library is code.

Invariant: nothing is loaded from below a path that somebody other than the current user or root can
write, unless TLCACHE_TRUST or tlcache.toml says so: `group` admits a group-writable root, as
Kubernetes' fsGroup makes them; `any` admits everything and is logged.
"""

from __future__ import annotations

import errno
import logging
import os
import stat

from tlcache.errors import UntrustedRootError
from tlcache.store import files

__all__ = ["Trust", "set_umask"]

_log = logging.getLogger(__name__)


class Trust:
    """Checks paths below one cache root, each directory once.

    Args:
        root: The cache root.
        level: Whom to trust, as TLCACHE_TRUST says it; by default what is set.
    """

    def __init__(self, root: str | os.PathLike[str], level: str | None = None) -> None:
        self.root = os.path.abspath(root)
        self._inside = (self.root + os.sep, os.path.realpath(root) + os.sep)
        self._level = _level() if level is None else level
        self._owners = {0, os.geteuid()}
        self._known: set[str] = set()
        if self._level == "any":
            _log.warning("trust is any: kernels are loaded from %s whoever can write it", root)

    def check(self, path: str) -> None:
        """Check a file, every directory above it, and whatever links on the way point at.

        Raises:
            UntrustedRootError: Somebody else can write it, or owns it.
            OSError: It does not exist.
        """
        if self._level == "any":
            return
        path = os.path.abspath(path)
        self._directory(os.path.dirname(path))
        self._one(path)

    def read(self, path: str, expected: int | None = None, *, unseen: bool = False) -> bytes:
        """The bytes of a file that passes `check`; see `files.read`.

        A file that is no link is checked by what was opened, so that its path is walked once.

        Raises:
            UntrustedRootError: Somebody else can write it, or owns it.
            OSError: It cannot be read.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        try:
            descriptor = os.open(path, flags | os.O_NOATIME if unseen else flags)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EPERM):
                raise
            data = files.read(path, expected, unseen=unseen)
            self.check(path)
            return data
        try:
            status = os.fstat(descriptor)
            data = files.content(descriptor, status.st_size if expected is None else expected)
        finally:
            os.close(descriptor)
        if self._level != "any":
            if os.path.dirname(path) not in self._known:
                path = os.path.abspath(path)
                self._directory(os.path.dirname(path))
            self._permissions(path, status)
        return data

    def check_root(self) -> None:
        """Check the root itself, before anything is compiled into it."""
        if self._level != "any":
            self._directory(self.root)

    def _directory(self, path: str) -> None:
        if path in self._known:
            return
        parent = os.path.dirname(path)
        if parent != path:
            self._directory(parent)
        self._one(path)
        self._known.add(path)

    def _one(self, path: str, links: int = 40) -> None:
        status = os.lstat(path)
        if not stat.S_ISLNK(status.st_mode):
            self._permissions(path, status)
            return
        if status.st_uid not in self._owners:
            raise self._refusal(path, f"is a link of uid {status.st_uid}")
        if links == 0:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        # Link by link: each may lead through a directory that others can write.
        place = os.path.realpath(os.path.dirname(path))
        following = os.path.normpath(os.path.join(place, os.readlink(path)))
        if os.path.dirname(following) != following:
            self._directory(os.path.dirname(following))
        self._one(following, links - 1)

    def _permissions(self, path: str, status: os.stat_result) -> None:
        reason = self.fault(path, status)
        if reason is not None:
            raise self._refusal(path, reason)

    def fault(self, path: str, status: os.stat_result) -> str | None:
        """Why a path by itself is not trusted, as the end of a sentence; None where it is.

        Args:
            path: The path, absolute.
            status: What `os.lstat` says of it.
        """
        mode = status.st_mode
        if self._level == "any":
            return None
        if status.st_uid not in self._owners:
            return f"belongs to uid {status.st_uid}"
        if stat.S_ISLNK(mode) or not mode & (stat.S_IWOTH | stat.S_IWGRP):
            return None
        inside = os.path.join(path, "").startswith(self._inside)
        if not inside and mode & stat.S_ISVTX:
            return None  # a sticky directory such as /tmp: others cannot replace what is ours in it
        if mode & stat.S_IWOTH:
            return f"can be written by everybody (mode {stat.S_IMODE(mode):04o})"
        if self._level != "group" and not _private(status.st_gid):
            return f"can be written by group {status.st_gid} (mode {stat.S_IMODE(mode):04o})"
        return None

    def _refusal(self, path: str, reason: str) -> UntrustedRootError:
        group = "can be written by group" in reason
        return UntrustedRootError(
            f"kernels are not loaded from {self.root}: {path} {reason}, "
            "and a kernel is code that runs",
            hint=f"`chmod -R {'g-w' if group else 'go-w'} {path}` if you know what it holds"
            + (", or set TLCACHE_TRUST=group to trust that group" if group else ""),
        )


def set_umask() -> None:
    """Have what this process makes pass the check by which it is loaded, whatever the umask was (0
    in containers).
    """
    os.umask(os.umask(0o022) | (0o002 if _level() == "group" else 0o022))


def _level() -> str:
    """What the environment says, else tlcache.toml."""
    named = os.environ.get("TLCACHE_TRUST", "").strip().lower()
    if named:
        return named
    from tlcache import config

    return config.value("trust") or "owner"


def _private(gid: int) -> bool:
    """Whether a group is the current user's own (`umask 002` with user-private groups)."""
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}
