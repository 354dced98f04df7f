"""The cache roots in force, as calls are looked up in them: the first, which TileLang uses and
which is written to, and those below it.

Invariant: nothing is read from a root that others can write, and nothing but the first is written
to.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from tlcache.errors import CacheRootError, UntrustedRootError
from tlcache.runtime.foreign.trouble import tell, trouble
from tlcache.store import calls, layout, roots
from tlcache.store.calls import Answer, Style
from tlcache.store.trust import Trust

__all__ = ["Place", "Roots", "filed", "in_force"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Place(NamedTuple):
    """A cache root that is read from, and who may have written what is in it."""

    path: str
    trust: Trust


class Roots(NamedTuple):
    """The roots in force.

    Attributes:
        path: The root that is written to.
        places: The roots that are read from, in their order.
    """

    path: str
    places: tuple[Place, ...]

    def style(self, key: str) -> Style | None:
        """How a function is called, if that is known."""
        for place, found in self._of(calls.read_style, key):
            self.used(place, key)
            return found
        return None

    def answers(self, key: str) -> Iterator[tuple[Place, Answer]]:
        """What is known of a call, in each root that knows anything of it."""
        return self._of(calls.read_answer, key)

    def texts(self, key: str) -> dict[str, Any]:
        """The analyses of a source file's functions."""
        for place, found in self._of(calls.read_texts, key):
            if found:
                self.used(place, key, "texts")
                return found
        return {}

    def used(self, place: Place, key: str, folder: str = "calls") -> None:
        """Note that a file was of use, where it is in the root that is written to."""
        if place.path == self.path:
            calls.used(place.path, key, folder)

    def _of(
        self, read: Callable[[str, str, Trust], _T | None], key: str
    ) -> Iterator[tuple[Place, _T]]:
        for place in self.places:
            try:
                found = read(place.path, key, place.trust)
            except UntrustedRootError as error:
                trouble(error)
                continue
            if found is not None:
                yield place, found


_trusts: dict[str, Trust | None] = {}
"""None for roots that others can write."""

_known: dict[tuple[str, str | None], Roots | None] = {}
"""The roots by what names them, once all of them are there."""


def in_force() -> Roots | None:
    """The roots in force; None where TileLang would not use its own either, or where others can
    write that.
    """
    from tilelang import env

    if layout.caching_disabled() or not env.is_cache_enabled():
        return None
    said = (env.TILELANG_CACHE_DIR, os.environ.get(roots.VARIABLE))
    if said in _known:
        return _known[said]
    path = os.path.abspath(said[0])
    below: list[str] = []
    if said[1]:
        first, *below = map(os.path.abspath, roots.named())
        below = below if first == path else []
    named = [path, *below]
    trusts = [(place, _trust(place)) for place in named if _there(place)]
    places = tuple(Place(place, trust) for place, trust in trusts if trust is not None)
    found = None if trusts and trusts[0] == (path, None) else Roots(path, places)
    if len(trusts) == len(named) and all(map(os.path.isabs, (said[0], *roots.named()))):
        _known[said] = found
    return found


def _there(path: str) -> bool:
    return path in _trusts or os.path.isdir(path)


def _trust(path: str) -> Trust | None:
    if path not in _trusts:
        trust: Trust | None = Trust(path)
        try:
            assert trust is not None
            trust.check_root()
        except UntrustedRootError as error:
            _log.warning("%s", error)
            trust = None
        _trusts[path] = trust
    return _trusts[path]


def filed(write: Callable[[], None]) -> None:
    """Write a file, if the root can be written; that it cannot is told once."""
    try:
        write()
    except CacheRootError as error:
        tell(f"what is made now is traced again at the next start: {error.message}")
