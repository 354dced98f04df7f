"""Putting things aside: what `prune` deletes and what `verify --repair` takes out of the cache.

    <root>/tlcache/trash/<date>-<id>/<path below the root>          by prune, until it is emptied
    <root>/tlcache/quarantine/<date>-<id>/<path below the root>     by verify, to be looked at

Invariant: a thing is put aside by one rename within its root, so it is in the cache or it is not,
and moving it back restores it. No link on the way is followed: a link is moved as itself.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone

__all__ = ["QUARANTINE", "TRASH", "batch", "delete", "empty", "move"]

TRASH = "trash"
QUARANTINE = "quarantine"
_OWN = "tlcache"
_DATE = "%Y%m%d-%H%M%S"
_BATCH = re.compile(r"(\d{8}-\d{6})-[0-9a-f]{8}")
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def batch(where: str) -> str:
    """A new place for what one command puts aside: `<where>/<date>-<id>`.

    Args:
        where: `TRASH` or `QUARANTINE`.
    """
    now = datetime.now(timezone.utc).strftime(_DATE)
    return f"{where}/{now}-{secrets.token_hex(4)}"


def move(
    root: str | os.PathLike[str],
    path: str | os.PathLike[str],
    where: str,
    *,
    seen: tuple[int, int] | None = None,
) -> str:
    """Put a file, directory or link aside by one rename.

    Args:
        root: The cache root; with roots below a base, the one that the thing is in.
        path: The thing, below `root`.
        where: `TRASH` or `QUARANTINE`, for a place of its own, or what `batch` gave.
        seen: Its device and inode when it was chosen: a thing that took its name since then is
            left alone. Where None, whatever has the name is moved.

    Returns:
        Its new path.

    Raises:
        FileNotFoundError: It is not there any more, or something else is.
        OSError: It cannot be moved; it is where it was.
        ValueError: It is not below `root`, or is what tlcache keeps there.
    """
    root = os.fspath(root)
    parts = _below(root, path)
    place = where if "/" in where else batch(where)
    *above, name = parts
    with _directory(root, above) as source:
        if _identity(name, source) != seen and seen is not None:
            raise FileNotFoundError(errno.ENOENT, "something else took its place", os.fspath(path))
        kept = [_OWN, *place.split("/"), *above]
        with _directory(root, kept, make=True) as target:
            free = _free(name, target)
            os.rename(name, free, src_dir_fd=source, dst_dir_fd=target)
            if seen is not None and _identity(free, target) != seen:
                # It was replaced between the two calls: what a writer has published goes back.
                _back(free, target, name, source)
                raise FileNotFoundError(errno.ENOENT, "it was replaced", os.fspath(path))
    return os.path.join(root, *kept, free)


def delete(
    root: str | os.PathLike[str], path: str | os.PathLike[str], seen: tuple[int, int]
) -> None:
    """Delete a file or directory where it is: for a disk so full that there is no room to put it
    aside. Arguments and faults are those of `move`; who reads it meanwhile finds it incomplete.
    """
    root = os.fspath(root)
    *above, name = _below(root, path)
    with _directory(root, above) as source:
        status = os.lstat(name, dir_fd=source)
        if (status.st_dev, status.st_ino) != seen:
            raise FileNotFoundError(errno.ENOENT, "something else took its place", os.fspath(path))
        if stat.S_ISDIR(status.st_mode):
            _delete(name, source)
        else:
            os.unlink(name, dir_fd=source)


def empty(
    root: str | os.PathLike[str],
    where: str = TRASH,
    *,
    older_than: timedelta | None = None,
) -> tuple[int, int]:
    """Delete what was put aside, for good. What cannot be deleted stays.

    Args:
        root: The cache root.
        where: `TRASH`, `QUARANTINE`, or one batch.
        older_than: Only batches that are at least so old; all where None.

    Returns:
        How many files there were, and their bytes.
    """
    root = os.fspath(root)
    kind, _, wanted = where.partition("/")
    count = size = 0
    try:
        with _directory(root, [_OWN, kind]) as top:
            for name in sorted(os.listdir(top)):
                made = _made(name)
                if made is None or (wanted and name != wanted):
                    continue
                if older_than is None or datetime.now(timezone.utc) - made >= older_than:
                    files, freed = _delete(name, top)
                    count, size = count + files, size + freed
    except (FileNotFoundError, NotADirectoryError):
        pass
    return count, size


def _made(name: str) -> datetime | None:
    """When a batch was begun, by its name; None for what is no batch and is nobody's to delete."""
    match = _BATCH.fullmatch(name)
    try:
        return match and datetime.strptime(match[1], _DATE).replace(tzinfo=timezone.utc)
    except ValueError:
        return None


def _below(root: str, path: str | os.PathLike[str]) -> list[str]:
    """The names that lead from the root to a thing."""
    parts = os.path.relpath(path, root).split(os.sep)
    if parts[0] in (os.pardir, os.curdir):
        raise ValueError(f"{os.fspath(path)} is not below {root}")
    if parts[0] == _OWN and (len(parts) < 3 or parts[1] in (TRASH, QUARANTINE)):
        raise ValueError(f"{os.fspath(path)} is not to be put aside")
    return parts


@contextmanager
def _directory(root: str, names: list[str], *, make: bool = False) -> Iterator[int]:
    """A descriptor of a directory below a root, reached name by name; a link on the way fails."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            if make:
                try:
                    os.mkdir(name, dir_fd=descriptor)
                except FileExistsError:
                    pass
            inner = os.open(name, _OPEN, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _identity(name: str, place: int) -> tuple[int, int]:
    status = os.lstat(name, dir_fd=place)
    return status.st_dev, status.st_ino


def _free(name: str, target: int) -> str:
    """A name that nothing in a directory has; a rename would replace a file without a word."""
    for number in range(1, 1000):
        free = name if number == 1 else f"{name[:200]}.{number}"
        try:
            os.lstat(free, dir_fd=target)
        except FileNotFoundError:
            return free
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)


def _back(free: str, target: int, name: str, source: int) -> None:
    try:
        os.lstat(name, dir_fd=source)
    except FileNotFoundError:
        os.rename(free, name, src_dir_fd=target, dst_dir_fd=source)


def _delete(name: str, parent: int) -> tuple[int, int]:
    """Delete a directory and all in it; links are unlinked, not followed."""
    count = size = 0
    for _, directories, files, descriptor in os.fwalk(name, topdown=False, dir_fd=parent):
        for each in files:
            try:
                status = os.lstat(each, dir_fd=descriptor)
                os.unlink(each, dir_fd=descriptor)
            except OSError:
                continue
            count, size = count + 1, size + status.st_size
        for each in directories:
            try:
                status = os.lstat(each, dir_fd=descriptor)
                if stat.S_ISLNK(status.st_mode):
                    os.unlink(each, dir_fd=descriptor)
                    count, size = count + 1, size + status.st_size
                else:
                    os.rmdir(each, dir_fd=descriptor)
            except OSError:
                continue
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError:
        pass
    return count, size
