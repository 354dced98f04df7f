"""What is said where restoring goes wrong: each thing once, and the program goes on."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter

from tlcache.runtime.foreign import mode
from tlcache.runtime.foreign.stream import Unseen

__all__ = ["refuse", "refusals", "tell", "trouble"]

_log = logging.getLogger("tlcache.runtime.foreign")
_told: set[str] = set()
_refused: Counter[str] = Counter()
_lock = threading.Lock()


def tell(message: str) -> None:
    """Say a thing, unless it was said already, or very much was."""
    if message not in _told and len(_told) < 20:
        _told.add(message)
        _log.warning("%s", message)


def trouble(error: BaseException) -> None:
    """Say that a hook went wrong."""
    said = f"{type(error).__name__}: {error}"
    if (filed := mode.filed()) is not None:
        filed.refused.append(said)
    tell(f"a kernel cannot be restored; TileLang makes it: {said}")
    _log.debug("what went wrong", exc_info=error)


def refuse(unseen: Unseen) -> None:
    """Count a call that is left to TileLang."""
    if (filed := mode.filed()) is not None:
        filed.refused.append(unseen.reason)
    with _lock:
        _refused[unseen.reason] += 1


def refusals() -> dict[str, int]:
    """Why calls were left to TileLang, and how many."""
    return dict(_refused.most_common())


def _forked() -> None:
    """A lock that another thread of the parent held is held for ever in a fork."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)
