"""A thing under a cache root opened for a close look: its files by their bare names.

Invariant: no link is followed, no special file blocks or is read, and a reader gets a file's bytes
and their hash, or a fault that says why not. To look is no use: times of access stay as they are.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from types import TracebackType
from typing import NamedTuple

__all__ = ["Content", "Fault", "Opened", "Unsound", "read_file", "shown"]

_MOST = 64 * 1024 * 1024
_CHUNK = 1024 * 1024
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LONGEST = 80


class Fault(NamedTuple):
    """Something that is wrong with a thing.

    Attributes:
        kind: One of `verify.KINDS`.
        severity: `error`, `warning` or `note`.
        name: The file in it; empty where it is the whole.
        what: The end of a sentence that begins with the name.
    """

    kind: str
    severity: str
    name: str
    what: str


class Unsound(Exception):
    """A file that cannot be had.

    Args:
        fault: Why not.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.what)
        self.fault = fault


class Content(NamedTuple):
    """A file's size and sha256, and its bytes, or None where those are too many to hold."""

    size: int
    sha256: str
    data: bytes | None


def shown(text: str, longest: int = _LONGEST) -> str:
    """A text from a file as one short line that a terminal can be given."""
    safe = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
    return safe if len(safe) <= longest else f"{safe[: longest - 1]}…"


class Opened:
    """A directory of files, or one file that is a thing by itself.

    Attributes:
        is_directory: Which of the two.
        alone: The file's name, where it is one; its neighbours can be read.
        names: What is in the directory, in order.
        links: Those that are links.
        directories: Those that are directories.
        hashed: The size and sha256 of what was read.

    Raises:
        OSError: It cannot be opened, is a link, or is gone.
    """

    def __init__(self, path: str) -> None:
        status = os.lstat(path)
        self.is_directory = stat.S_ISDIR(status.st_mode)
        self.alone = "" if self.is_directory else os.path.basename(path)
        place = path if self.is_directory else os.path.dirname(path)
        self.names: list[str] = []
        self.links: set[str] = set()
        self.directories: set[str] = set()
        self.hashed: dict[str, tuple[int, str]] = {}
        self._kept: dict[str, Content] = {}
        self._descriptor = os.open(place, _FLAGS | os.O_DIRECTORY)
        if self.is_directory:
            try:
                self._list()
            except BaseException:
                os.close(self._descriptor)
                raise

    def _list(self) -> None:
        with os.scandir(self._descriptor) as items:
            for item in items:
                self.names.append(item.name)
                if item.is_symlink():
                    self.links.add(item.name)
                elif item.is_dir(follow_symlinks=False):
                    self.directories.add(item.name)
        self.names.sort()

    def __enter__(self) -> Opened:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def read(self, name: str) -> Content:
        """A file's content, read once.

        Raises:
            Unsound: It is missing, no file, or cannot be read.
        """
        if name not in self._kept:
            self._kept[name] = content = read_file(name, self._descriptor)
            self.hashed[name] = (content.size, content.sha256)
        return self._kept[name]


def read_file(name: str, directory: int | None = None) -> Content:
    """Read and hash one file.

    Args:
        name: Its path, or its name in a directory.
        directory: That directory's descriptor.

    Raises:
        Unsound: It is missing, a link, no file, or cannot be read.
    """
    base = os.path.basename(name)
    try:
        descriptor = _open(name, directory)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Unsound(Fault("misplaced", "error", base, f"is {_kind(status.st_mode)}"))
            return _read(descriptor)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise Unsound(_why(base, error)) from None


def _open(name: str, directory: int | None) -> int:
    try:
        return os.open(name, _FLAGS | os.O_NOATIME, dir_fd=directory)
    except PermissionError:
        return os.open(name, _FLAGS, dir_fd=directory)


def _read(descriptor: int) -> Content:
    digest, size, parts = hashlib.sha256(), 0, []
    while chunk := os.read(descriptor, _CHUNK):
        digest.update(chunk)
        size += len(chunk)
        if size <= _MOST:
            parts.append(chunk)
    return Content(size, digest.hexdigest(), b"".join(parts) if size <= _MOST else None)


def _why(name: str, error: Exception) -> Fault:
    code = error.errno if isinstance(error, OSError) else errno.ENAMETOOLONG
    if code in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
        return Fault("missing", "error", name, "is missing")
    if code == errno.ELOOP:
        return Fault("link", "error", name, "is a link")
    if code in (errno.ENXIO, errno.ENODEV):
        return Fault("misplaced", "error", name, "is no file")
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return Fault("unreadable", "error", name, f"cannot be read: {reason}")


def _kind(mode: int) -> str:
    return "a directory" if stat.S_ISDIR(mode) else "no file"
