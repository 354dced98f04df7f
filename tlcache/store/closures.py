"""Remembered source closures, so that a start need not parse the kernels' sources to know their
digest.

    <root>/tlcache/closures/<16 hex of the factory>-<16 hex of its module's file>.json

Invariant: a remembered closure is taken only where computing it again would give the same; a
damaged file is none. Like a record, it is written by temporary file and rename, and read only where
others cannot write.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os

from tlcache import closure, modules
from tlcache.closure import Closure
from tlcache.store import files, layout
from tlcache.store.trust import Trust

__all__ = ["recall", "remember", "told"]

_log = logging.getLogger(__name__)


def recall(root: str, kernel: str, trust: Trust) -> None:
    """Take the closure of a factory from the root, if it is there and holds.

    Raises:
        UntrustedRootError: Somebody else can write it.
    """
    path = _path(root, kernel)
    if path is None:
        return
    try:
        data = json.loads(files.read(path))
        trust.check(path)
        if data.pop("algorithm") == closure.ALGORITHM and data["kernel"] == kernel:
            closure.adopt(Closure(**data))
    except OSError:
        return
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("the closure %s is damaged (%s); ignored", path, error)


def remember(root: str, kernel: str) -> None:
    """Write down the closure of a factory, for the processes that follow.

    Raises:
        CacheRootError: The root cannot be written.
    """
    path = _path(root, kernel)
    if path is None or os.path.exists(path):
        return
    data = {"algorithm": closure.ALGORITHM, **closure.closure(kernel)._asdict()}
    try:
        files.write_atomically(path, json.dumps(data, indent=1).encode() + b"\n")
    except OSError as error:
        raise layout.unwritable(root, error) from error


def told(name: str, data: bytes) -> tuple[str, str] | None:
    """The factory and the digest that a closure's file tells; None where it is no sound file of
    that name, or of another algorithm. Whether it holds here is not asked.
    """
    try:
        values = json.loads(data)
        algorithm, found = values.pop("algorithm"), Closure(**values)
        sources, externals = dict(found.sources), dict(found.externals)
        texts = [found.kernel, found.digest, *sources.values(), *externals.values(), *found.absent]
        first = hashlib.sha256(found.kernel.encode()).hexdigest()[:16]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    sound = algorithm == closure.ALGORITHM and all(isinstance(text, str) for text in texts)
    return (found.kernel, found.digest) if sound and name.startswith(f"{first}-") else None


def _path(root: str, kernel: str) -> str | None:
    source = modules.sha256(kernel.partition(":")[0])
    if source is None:
        return None
    name = f"{hashlib.sha256(kernel.encode()).hexdigest()[:16]}-{source[:16]}.json"
    return os.path.join(root, "tlcache", "closures", name)
