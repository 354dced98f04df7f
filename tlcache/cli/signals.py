"""SIGTERM as an exception, so that what a command started is ended before it is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Terminated", "terminable"]


class Terminated(BaseException):
    """SIGTERM came."""


@contextmanager
def terminable() -> Iterator[None]:
    """Have SIGTERM raise `Terminated` meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
