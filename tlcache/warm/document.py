"""A shapes document's bytes, and as much of it as a start has to know.

Invariant: pydantic is not imported, which takes longer than to look after a thousand kernels. What
is not understood here is left to `shapes`, which says what is wrong with it.
"""

from __future__ import annotations

import json
from pathlib import Path

from tlcache import targets as target_names
from tlcache.errors import ShapesError, TargetError
from tlcache.targets import CPU, Target

__all__ = ["read", "targets"]


def read(path: str | Path) -> bytes:
    """The bytes of a shapes document.

    Raises:
        ShapesError: It cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ShapesError(
            f"{path} cannot be read: {(error.strerror or str(error)).lower()}",
            hint="`--shapes` takes a file like examples/shapes.json",
        ) from error


def targets(data: bytes, spellings: tuple[str, ...]) -> list[Target] | None:
    """What `tlcache warm` would compile a document for; None where only `shapes` can tell.

    Args:
        data: The document.
        spellings: The targets of the command line, which win.

    Raises:
        TargetError: One of the command line's is unknown.
    """
    if spellings:
        return list(dict.fromkeys(map(target_names.parse, spellings)))
    try:
        said = json.loads(data)
        if own := said.get("targets"):
            return list(dict.fromkeys(map(target_names.parse, own)))
    except (ValueError, AttributeError, TypeError, RecursionError, TargetError):
        return None
    try:
        return [target_names.detect()]
    except TargetError:
        return [CPU]
