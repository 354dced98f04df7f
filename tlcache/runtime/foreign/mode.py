"""What a thread is at: whether TileLang makes something of it, so that nothing in that is restored,
and whether what it makes is only filed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["filing", "is_filing", "is_making", "made", "making"]


class _Thread(threading.local):
    making = False
    filing = False
    made = 0


_thread = _Thread()


@contextmanager
def making() -> Iterator[None]:
    """TileLang makes what it is asked for, and runs the program's functions for that."""
    before, _thread.making = _thread.making, True
    _thread.made += 1
    try:
        yield
    finally:
        _thread.making = before


@contextmanager
def filing() -> Iterator[None]:
    """File what this thread makes meanwhile, though the resolver asked for it; restore nothing."""
    before, _thread.filing = _thread.filing, True
    try:
        yield
    finally:
        _thread.filing = before


def is_making() -> bool:
    """Whether TileLang makes something in this thread."""
    return _thread.making


def is_filing() -> bool:
    """Whether what this thread makes is only filed."""
    return _thread.filing


def made() -> int:
    """How often TileLang was let make something in this thread."""
    return _thread.made
