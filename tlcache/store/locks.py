"""One compile of one kernel at a time, one prune of one root at a time, across processes.

    <root>/tlcache/locks/<action key>.lock    who compiles that kernel, or takes its record away
    <root>/tlcache/locks/prune.lock           who prunes
    <root>/tlcache/locks/records.lock         shared by who files a record; alone for who takes
                                              entries away: a record is never filed for an entry
                                              that has just gone
    <root>/tlcache/locks/<manifest's key>.lock    who warms the kernels of that document

Invariant: a lock belongs to a process, so a killed holder releases it; a lock file that is left is
empty and harmless. `records.lock` is held for milliseconds, never while something compiles.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tlcache.errors import CacheRootError
from tlcache.store import layout

__all__ = ["attempt", "compiling", "lead", "leading", "pruning", "recording", "removing"]


@contextmanager
def compiling(root: str | os.PathLike[str], action_key: str) -> Iterator[None]:
    """Hold the lock of one action key; wait while another process compiles it.

    Raises:
        CacheRootError: The lock file cannot be created.
    """
    from filelock import FileLock

    path = layout.lock_path(root, action_key)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        lock = FileLock(path, mode=0o600)
        lock.acquire()
    except OSError as error:
        raise layout.unwritable(root, error) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def attempt(root: str | os.PathLike[str], action_key: str) -> Iterator[bool]:
    """Hold the lock of one action key if nobody else does; yields whether it is held.

    Raises:
        CacheRootError: The lock file cannot be created.
    """
    from filelock import FileLock, Timeout

    path = layout.lock_path(root, action_key)
    lock = FileLock(path, mode=0o600)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    except OSError as error:
        raise layout.unwritable(root, error) from error
    try:
        yield True
    finally:
        lock.release()


@contextmanager
def pruning(
    root: str | os.PathLike[str], waiting: Callable[[], None] | None = None
) -> Iterator[None]:
    """Be the only one that prunes a root; `waiting` is called if another does.

    Raises:
        CacheRootError: The lock file cannot be created, or lies behind a link.
    """
    path = layout.lock_path(root, "prune")
    for place in (os.path.dirname(os.path.dirname(path)), os.path.dirname(path)):
        if os.path.islink(place):
            raise CacheRootError(
                f"{place} is a link, and pruning follows none",
                hint="put the directory that it leads to in its place",
            )
    with attempt(root, "prune") as held:
        if held:
            yield
            return
    if waiting is not None:
        waiting()
    with compiling(root, "prune"):
        yield


@contextmanager
def recording(root: str | os.PathLike[str]) -> Iterator[None]:
    """Look at an entry and file its record, while nobody takes entries away.

    Where it cannot be locked, as on a root that cannot be written, this locks nothing: filing will
    say what is wrong.
    """
    try:
        descriptor = _locked(root, fcntl.LOCK_SH)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def removing(root: str | os.PathLike[str]) -> Iterator[None]:
    """Take entries and their records away, while nobody files a record.

    Raises:
        CacheRootError: The lock file cannot be created, or the file system has no locks.
    """
    try:
        descriptor = _locked(root, fcntl.LOCK_EX)
    except OSError as error:
        raise layout.unwritable(root, error) from error
    try:
        yield
    finally:
        os.close(descriptor)


def lead(root: str | os.PathLike[str], name: str) -> int | None:
    """Become the one process that warms a document's kernels, so that others need not start
    compilers for them.

    Args:
        root: The cache root.
        name: The key of the document's manifest.

    Returns:
        A descriptor; who closes it leads no longer. None where another process leads.

    Raises:
        CacheRootError: The lock file cannot be created.
    """
    try:
        return _locked(root, fcntl.LOCK_EX | fcntl.LOCK_NB, name)
    except BlockingIOError:
        return None
    except OSError as error:
        raise layout.unwritable(root, error) from error


@contextmanager
def leading(
    root: str | os.PathLike[str], name: str, waiting: Callable[[], None] | None = None
) -> Iterator[bool]:
    """The same for who has nothing else to do meanwhile; yields whether it had to wait.

    Raises:
        CacheRootError: The lock file cannot be created.
    """
    descriptor = lead(root, name)
    waited = descriptor is None
    if descriptor is None:
        if waiting is not None:
            waiting()
        try:
            descriptor = _locked(root, fcntl.LOCK_EX, name)
        except OSError as error:
            raise layout.unwritable(root, error) from error
    try:
        yield waited
    finally:
        os.close(descriptor)


def _locked(root: str | os.PathLike[str], how: int, name: str = "records") -> int:
    path = layout.lock_path(root, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
