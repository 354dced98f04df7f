"""The analyses of functions' lines (`text.py`): from memory, else from the roots, where those of
one source file are one file, else made, and filed.

Invariant: an analysis is that of the very lines that it is asked for, by this version.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from tlcache.runtime.foreign import text
from tlcache.runtime.foreign.place import Roots, filed
from tlcache.runtime.foreign.source import Lines
from tlcache.runtime.foreign.text import Text, Use
from tlcache.store import calls

__all__ = ["reading"]


class _File(NamedTuple):
    """The analyses of a source file's functions that a root has.

    Attributes:
        lines: The file's lines.
        key: What they are filed under.
        found: JSON values by the keys of the functions' lines.
    """

    lines: list[str]
    key: str
    found: dict[str, Any]


_analyzed: dict[str, Text | None] = {}
_files: dict[tuple[str, int], _File] = {}


def reading(roots: Roots | None) -> Callable[[Lines], Text | None]:
    """How the analysis of a function's lines is had, with these roots."""

    def read(lines: Lines) -> Text | None:
        if lines.text in _analyzed:
            return _analyzed[lines.text]
        found = _analyzed[lines.text] = (
            text.read(lines.text) if roots is None else _of(roots, lines)
        )
        return found

    return read


def _of(roots: Roots, lines: Lines) -> Text | None:
    file, key = _file(roots, lines.file), _digest(lines.text)
    found = _decoded(file.found.get(key))
    if found is None:
        found = text.read(lines.text)
        if found is not None:
            # Other processes may have filed others meanwhile.
            file.found.update({**roots.texts(file.key), key: found})
            filed(lambda: calls.write_texts(roots.path, file.key, dict(file.found)))
    return found


def _file(roots: Roots, lines: list[str]) -> _File:
    place = (roots.path, id(lines))
    known = _files.get(place)
    if known is None or known.lines is not lines:
        said = f"{text.VERSION}\n{sys.implementation.cache_tag}\n{''.join(lines)}"
        key = _digest(said)
        known = _files[place] = _File(lines, key, roots.texts(key))
    return known


def _digest(said: str) -> str:
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()


def _decoded(values: Any) -> Text | None:
    try:
        name, digest, uses = values
        return Text(name, digest, tuple(Use(h, tuple(a), k, c) for h, a, k, c in uses))
    except (TypeError, ValueError):
        return None
