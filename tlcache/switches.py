"""Environment variables that switch something on or off, in the words that TileLang reads."""

from __future__ import annotations

import os

__all__ = ["meaning", "said"]

_ON = frozenset({"1", "true", "yes", "on"})
_OFF = frozenset({"0", "false", "no", "off"})


def said(name: str) -> bool | None:
    """What a variable says; None where it is not set, or says neither."""
    return meaning(os.environ.get(name, ""))


def meaning(value: str) -> bool | None:
    """What the value of a variable says; None where it says neither on nor off."""
    value = value.strip().lower()
    return True if value in _ON else False if value in _OFF else None
