"""The cache roots that are in force: one, or one to write to over others that are only read.

    TLCACHE_ROOTS=/var/overlay:/opt/kernels      the first is written to; what it lacks is looked
                                                 for in the next ones, in their order

Invariant: nothing but the first root is ever written to. TileLang itself knows one root only, and
that is the first: what it compiles goes there.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path

__all__ = ["VARIABLE", "adopt", "chain", "named", "overlaid"]

VARIABLE = "TLCACHE_ROOTS"
"""Roots between colons; it wins over TILELANG_CACHE_DIR, which names one."""


def named() -> list[str]:
    """The roots that the variable names, each once; none where it is not set."""
    return list(dict.fromkeys(filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))))


def chain(override: str | os.PathLike[str] | None = None) -> list[Path]:
    """The roots in force, the one that is written to first; at least that one.

    Args:
        override: A root named on the command line: that one alone.
    """
    from tlcache.store import layout

    if override is not None:
        return [Path(override)]
    return list(map(Path, named())) or [layout.cache_root()]


def overlaid(overlay: str | os.PathLike[str], below: Sequence[str | os.PathLike[str]]) -> str:
    """The variable's value for a root over others, all of them as absolute paths."""
    places = [os.path.abspath(place) for place in (overlay, *below)]
    return os.pathsep.join(dict.fromkeys(places))


def adopt(environment: MutableMapping[str, str] | None = None) -> None:
    """Have TileLang use the first root, where the variable names some.

    Args:
        environment: Of a process that is to be started; this process's where None.
    """
    place: MutableMapping[str, str] = os.environ if environment is None else environment
    first = next(filter(None, place.get(VARIABLE, "").split(os.pathsep)), None)
    if first is not None:
        place["TILELANG_CACHE_DIR"] = first
