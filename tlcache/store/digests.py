"""Digests of files and of directory trees, remembered in a file of the user's.

A digest is of names and contents alone, so two hosts with the same package agree on it wherever it
is installed. To compute it of TileLang takes half a second; a process that starts asks for it each
time, so it is remembered by path, and taken again while every file has the size and the time of
change that it had. Not the inode: what an image's build remembers holds in its containers.

Invariant: a fault of the memory is never a fault of a digest: where it is missing, damaged or not
writable, everything is read anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Iterable

from tlcache.store import files

__all__ = ["Digests", "path"]

_log = logging.getLogger(__name__)
_VERSION = 1
_MOST = 64  # places that are remembered; TileLang is four of them
_MOST_BYTES = 1024 * 1024
_SETTLED = 2.0  # seconds: a file that is younger may change again and keep its time
_SKIPPED = frozenset({"__pycache__"})


def path() -> str:
    """The memory's path: in the user's cache directory."""
    # As platformdirs has it on Linux; importing that takes longer than all that is done here.
    home = os.environ.get("XDG_CACHE_HOME", "").strip() or os.path.expanduser("~/.cache")
    return os.path.join(home, "tlcache", "digests.json")


class Digests:
    """Digests for one command.

    Args:
        memory: The file to remember in; the user's where None.
    """

    def __init__(self, memory: str | None = None) -> None:
        self._memory = path() if memory is None else memory
        self._known = _load(self._memory)
        self._changed = False

    def tree(
        self,
        place: str | os.PathLike[str],
        *,
        suffixes: tuple[str, ...] = (),
        leaving_out: Iterable[str] = (),
        names: Iterable[str] | None = None,
    ) -> str | None:
        """The digest of a directory: of the names below it and the bytes of its files.

        Args:
            place: The directory. Links in it are followed to files, not to directories.
            suffixes: How the names of files end that count; all where empty.
            leaving_out: Directories below it, relative to it, that do not count.
            names: Files in it that count alone, if they are there.

        Returns:
            The sha256 as hexadecimal text; None where there are no such files.
        """
        place = os.path.abspath(place)
        if names is not None:
            listed = _those(place, sorted(names))
        else:
            listed = sorted(_below(place, suffixes, frozenset(leaving_out)))
        if not listed:
            return None
        stamp = _stamp(listed)
        chosen = [list(suffixes), sorted(leaving_out), None if names is None else sorted(names)]
        key = json.dumps([place, *chosen])
        known = self._known.get(key)
        if known is not None and known[0] == stamp:
            return known[1]
        digest = _digest(place, [name for name, _ in listed])
        newest = max(status.st_mtime for _, status in listed)
        if digest is not None and newest < time.time() - _SETTLED:
            self._known.pop(key, None)
            self._known[key] = (stamp, digest)
            self._changed = True
        return digest

    def save(self) -> None:
        """Remember what was computed. A fault is logged, and that is all."""
        if not self._changed:
            return
        # Another process may have remembered something meanwhile.
        kept = {**_load(self._memory), **self._known}
        document = {"version": _VERSION, "digests": dict(list(kept.items())[-_MOST:])}
        try:
            files.write_atomically(self._memory, json.dumps(document, indent=1).encode() + b"\n")
            self._changed = False
        except OSError as error:
            _log.debug("digests are not remembered in %s: %s", self._memory, error)


_Listed = list[tuple[str, os.stat_result]]


def _below(place: str, suffixes: tuple[str, ...], leaving_out: frozenset[str]) -> _Listed:
    found: _Listed = []
    places = [""]
    while places:
        inner = places.pop()
        try:
            with os.scandir(os.path.join(place, inner)) as items:
                for item in items:
                    name = f"{inner}/{item.name}" if inner else item.name
                    if item.is_dir(follow_symlinks=False):
                        if item.name not in _SKIPPED and name not in leaving_out:
                            places.append(name)
                    elif not suffixes or item.name.endswith(suffixes):
                        status = item.stat()
                        if stat.S_ISREG(status.st_mode):
                            found.append((name, status))
        except OSError:
            continue  # it has vanished, or is not ours to read
    return found


def _those(place: str, names: list[str]) -> _Listed:
    found: _Listed = []
    for name in names:
        try:
            status = os.stat(os.path.join(place, name))
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            found.append((name, status))
    return found


def _stamp(listed: _Listed) -> str:
    told = hashlib.sha256()
    for name, status in listed:
        told.update(
            f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape")
        )
    return told.hexdigest()


def _digest(place: str, names: list[str]) -> str | None:
    whole = hashlib.sha256()
    for name in names:
        one = hashlib.sha256()
        try:
            with open(os.path.join(place, name), "rb") as file:
                while block := file.read(1 << 20):
                    one.update(block)
        except OSError as error:
            _log.warning("%s in %s cannot be read, so neither has a digest: %s", name, place, error)
            return None
        whole.update(name.encode(errors="surrogateescape") + b"\0" + one.digest())
    return whole.hexdigest()


def _load(memory: str) -> dict[str, tuple[str, str]]:
    try:
        if os.path.getsize(memory) > _MOST_BYTES:
            return {}
        document = json.loads(files.read(memory))
        if document["version"] != _VERSION:
            return {}
        return {
            str(key): (str(stamp), str(digest))
            for key, (stamp, digest) in document["digests"].items()
            if len(digest) == len(stamp) == 64
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
