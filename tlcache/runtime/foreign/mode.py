"""What a thread is at: whether TileLang makes something of it, so that nothing in that is restored,
and whether what it makes is only filed.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Filed", "filed", "filing", "is_filing", "is_making", "made", "making"]


@dataclasses.dataclass
class Filed:
    """What came of the calls of a thread that files.

    Attributes:
        calls: The keys of the calls that are filed, by TileLang's key.
        refused: Why others are not.
    """

    calls: dict[str, str] = dataclasses.field(default_factory=dict)
    refused: list[str] = dataclasses.field(default_factory=list)


class _Thread(threading.local):
    making = False
    filed: Filed | None = None
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
def filing() -> Iterator[Filed]:
    """File what this thread makes meanwhile, though the resolver asked for it; restore nothing."""
    before, _thread.filed = _thread.filed, Filed()
    try:
        yield _thread.filed
    finally:
        _thread.filed = before


def filed() -> Filed | None:
    """What came of the calls so far, where what this thread makes is only filed."""
    return _thread.filed


def is_making() -> bool:
    """Whether TileLang makes something in this thread."""
    return _thread.making


def is_filing() -> bool:
    """Whether what this thread makes is only filed."""
    return _thread.filed is not None


def made() -> int:
    """How often TileLang was let make something in this thread."""
    return _thread.made
