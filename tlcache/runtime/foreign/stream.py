"""Texts, one after another, that are digested in the end; and what ends it.

Invariant: what is put in has the same digest in every process in which it means the same, and
another one where it does not.
"""

from __future__ import annotations

import hashlib
import marshal
from types import CodeType
from typing import Any

from tlcache.runtime.foreign import outside

__all__ = ["MISSING", "Stream", "Unseen"]

MISSING: Any = object()
"""Stands for what is not there."""


class Unseen(Exception):
    """Something that decides about a kernel and cannot be seen into.

    Attributes:
        reason: What it is, as the end of a sentence; the same for all that are alike.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Stream:
    """What was said of values so far."""

    def __init__(self) -> None:
        self._said: list[str] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # what was numbered stays alive, so that its number stays its
        self._device = False

    def digest(self) -> str:
        """The sha256 of all that came so far, as hexadecimal text."""
        try:
            # Without references: equal texts give equal bytes, whichever of them are one object.
            said = marshal.dumps(self._said, 0)
        except ValueError:  # a text of a class of its own
            said = marshal.dumps(["".join((one,)) for one in self._said], 0)
        return hashlib.sha256(said).hexdigest()

    def say(self, *words: str) -> None:
        """Put texts into the stream, each by itself."""
        self._said += words

    def _first(self, value: Any) -> bool:
        """Whether something is met for the first time; what comes again is said by its number."""
        number = self._seen.get(id(value))
        if number is not None:
            self.say("again", str(number))
            return False
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return True

    def code(self, code: CodeType) -> None:
        """Digest bytecode, without where it stands."""
        raise NotImplementedError

    def value(self, value: Any) -> None:
        """Digest a value, whatever it is.

        Raises:
            Unseen: It cannot be seen into.
        """
        raise NotImplementedError

    def _of_device(self) -> None:
        if not self._device:
            self._device = True
            try:
                self.say("device", outside.device())
            except Exception as error:
                raise Unseen(f"the GPU cannot be asked: {type(error).__name__}") from error
