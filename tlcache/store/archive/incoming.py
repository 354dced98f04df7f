"""Where an archive is unpacked before any of it is published.

    <root>/tlcache/incoming/<date>-<id>/         what one import has staged
    <root>/tlcache/incoming/<date>-<id>.lock     held by that import while it lives

Invariant: a batch whose lock is free is of an import that was killed; nothing in it is used, and
the next import deletes it. What an import made and did not need is gone when it ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone

from tlcache.errors import CacheRootError
from tlcache.store import layout

__all__ = ["NAME", "batch", "left_behind"]

NAME = "incoming"
_BATCH = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")
_STALE = 3600.0
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def batch(root: str) -> Iterator[str]:
    """A directory for one import. It is deleted when that ends, and so is what killed ones left.

    Raises:
        CacheRootError: It cannot be made.
    """
    top = os.path.join(root, "tlcache", NAME)
    name = f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
    path, made, lock = os.path.join(top, name), [], -1
    try:
        try:
            made = _made(top)
            _clean(root)
            lock = os.open(f"{path}.lock", _OPEN | os.O_EXCL, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.mkdir(path, 0o700)
        except OSError as error:
            raise layout.unwritable(root, error) from error
        yield path
    finally:
        if lock >= 0:
            shutil.rmtree(path, ignore_errors=True)
            _unlink(f"{path}.lock")
            os.close(lock)
        for directory in dict.fromkeys([top, *made]):
            try:
                os.rmdir(directory)
            except OSError:
                break  # something is in it, or it is gone


def left_behind(root: str) -> Iterator[str]:
    """The batches of imports that were killed."""
    top = os.path.join(root, "tlcache", NAME)
    try:
        names = sorted(os.listdir(top))
    except OSError:
        return
    for name in names:
        if _BATCH.fullmatch(name) and _is_free(f"{os.path.join(top, name)}.lock"):
            yield os.path.join(top, name)


def _is_free(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _clean(root: str) -> None:
    for path in left_behind(root):
        shutil.rmtree(path, ignore_errors=True)
        _unlink(f"{path}.lock")
    top = os.path.join(root, "tlcache", NAME)
    for name in os.listdir(top):
        lock = os.path.join(top, name)
        alone = name.endswith(".lock") and not os.path.lexists(lock.removesuffix(".lock"))
        if alone and time.time() - os.lstat(lock).st_mtime > _STALE:
            _unlink(lock)  # of an import that was killed between its two first steps


def _made(top: str) -> list[str]:
    """Make a directory and those above it. Returns those that were made, the innermost first.

    Raises:
        CacheRootError: One of tlcache's is a link.
    """
    missing = []
    path = top
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for place in (os.path.dirname(top), top):
        if os.path.islink(place):
            raise CacheRootError(
                f"{place} is a link, and an import follows none",
                hint="put the directory that it leads to in its place",
            )
    for path in reversed(missing):
        try:
            os.mkdir(path)
        except FileExistsError:
            pass
    return missing


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
