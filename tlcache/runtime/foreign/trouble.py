"""What is said where restoring goes wrong: each thing once, and the program goes on."""

from __future__ import annotations

import logging
from collections import Counter

from tlcache.runtime.foreign.stream import Unseen

__all__ = ["refuse", "refusals", "tell", "trouble"]

_log = logging.getLogger("tlcache.runtime.foreign")
_told: set[str] = set()
_refused: Counter[str] = Counter()


def tell(message: str) -> None:
    """Say a thing, unless it was said already, or very much was."""
    if message not in _told and len(_told) < 20:
        _told.add(message)
        _log.warning("%s", message)


def trouble(error: BaseException) -> None:
    """Say that a hook went wrong."""
    tell(f"a kernel cannot be restored; TileLang makes it: {type(error).__name__}: {error}")
    _log.debug("what went wrong", exc_info=error)


def refuse(unseen: Unseen) -> None:
    """Count a call that is left to TileLang."""
    _refused[unseen.reason] += 1


def refusals() -> dict[str, int]:
    """Why calls were left to TileLang, and how many."""
    return dict(_refused.most_common())
