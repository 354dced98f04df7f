"""Whose compile it is.

Invariant: a compile that tlcache's resolver started itself is the resolver's to allow and to count;
the hooks leave it alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["is_own", "own"]


class _Thread(threading.local):
    depth = 0


_thread = _Thread()


@contextmanager
def own() -> Iterator[None]:
    """Say that what this thread compiles meanwhile is the resolver's."""
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1


def is_own() -> bool:
    """Whether this thread compiles for the resolver."""
    return _thread.depth > 0
