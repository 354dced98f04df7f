"""One compile of one kernel at a time, across processes.

Invariant: the lock belongs to a process, so a killed holder releases it; a lock file that is left
is empty and harmless.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tlcache.store import layout

__all__ = ["compiling"]


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
