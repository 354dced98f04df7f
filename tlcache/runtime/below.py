"""TileLang's own entries in roots that are only read: TileLang looks into the first root, so what
it asks for is copied there.

Invariant: only what nobody else could have written is copied, and it appears whole or not at all.
The lower roots are never written to: TileLang deletes an entry that it cannot load.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil

from tlcache.errors import UntrustedRootError
from tlcache.store import roots
from tlcache.store.trust import Trust

__all__ = ["fetch"]

_log = logging.getLogger(__name__)


def fetch(path: str) -> bool:
    """Bring an entry into the first root, if that lacks it and a lower one has it.

    Args:
        path: Where TileLang is going to look for it.

    Returns:
        Whether it was brought.
    """
    named = [os.path.abspath(root) for root in roots.named()]
    if len(named) < 2 or os.path.isdir(path):
        return False
    entry = os.path.relpath(path, named[0])
    if entry.startswith(os.pardir):
        return False
    for root in named[1:]:
        there = os.path.join(root, entry)
        if os.path.isdir(there):
            try:
                _copy(root, there, path)
                return True
            except FileExistsError:
                return True  # another process was quicker
            except (OSError, UntrustedRootError) as error:
                _log.warning("the kernel %s is not taken from %s: %s", entry, root, error)
    return False


def _copy(root: str, there: str, path: str) -> None:
    trust = Trust(root)
    staging = os.path.join(os.path.dirname(os.path.dirname(path)), ".staging")
    key = os.path.basename(path)
    place = os.path.join(staging, f"{key}_{os.getpid()}_{secrets.token_hex(4)}")
    os.makedirs(place)
    try:
        for name in os.listdir(there):
            source = os.path.join(there, name)
            trust.check(source)
            shutil.copyfile(source, os.path.join(place, name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.rename(place, path)
    except OSError:
        if os.path.isdir(path):
            raise FileExistsError from None
        raise
    finally:
        shutil.rmtree(place, ignore_errors=True)
