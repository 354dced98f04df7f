"""What the calls of a program's own `@tilelang.jit` functions were compiled into, on disk.

    <root>/tlcache/calls/<2 hex>/<key>.json     a call's kernel; or how a function is to be called;
                                                or, by an action key, what a warm came to
    <root>/tlcache/texts/<2 hex>/<key>.json     the analyses of the functions of one source file

Each is one small file with a checksum, like a record (`record.py`), but named by a key that only a
process with the program in it can compute (`tlcache.runtime.foreign`).

Invariant: a file that is read back is sound in form and names only paths below its root; a damaged
one is a miss, never an error. Kernels are code and what leads to one is trusted as such.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from tlcache.store import files, layout, record
from tlcache.store.answers import SCHEMA, Answer, Style, Warmed, decode, told
from tlcache.store.trust import Trust

__all__ = ["SCHEMA", "UNUSED", "Answer", "Style", "Warmed", "all_of", "decode", "is_sound"]
__all__ += ["path_of", "read_answer", "read_style", "read_texts", "read_warmed", "sweep", "told"]
__all__ += ["used", "uses", "write_answer", "write_style", "write_texts", "write_warmed"]

_log = logging.getLogger(__name__)

UNUSED = 30 * 86_400
"""Seconds after which what belongs to no kernel, and can be made again in less than one, goes."""

_T = TypeVar("_T")


def path_of(root: str | os.PathLike[str], key: str, folder: str = "calls") -> str:
    """The path of a file, whether it is there or not."""
    return os.path.join(root, f"tlcache/{folder}/{key[:2]}/{key}.json")


def all_of(root: str | os.PathLike[str], folder: str = "calls") -> Iterator[tuple[str, str]]:
    """The keys and paths of all calls, or texts, under a root, sound or not."""
    top = os.path.join(root, "tlcache", folder)
    for place in _listed(top):
        for name in _listed(os.path.join(top, place)):
            key, dot, _ = name.rpartition(".json")
            if dot and not name.startswith("."):
                yield key, os.path.join(top, place, name)


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


# --- reading ---


def _read(
    root: str, key: str, trust: Trust | None, folder: str, made_of: Callable[[bytes], _T]
) -> _T | None:
    path = path_of(root, key, folder)
    try:
        data = files.read(path) if trust is None else trust.read(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            _log.warning("%s cannot be read: %s", path, error)
        return None
    try:
        return made_of(data)
    except ValueError as error:
        _log.warning("%s is damaged (%s); ignored", path, error)
        return None


def read_style(root: str, key: str, trust: Trust) -> Style | None:
    """How a function is called, or None where that is not known.

    Raises:
        UntrustedRootError: Somebody else can write the file.
    """
    found = _read(root, key, trust, "calls", decode)
    return found[1] if found and found[0] == key and isinstance(found[1], Style) else None


def read_answer(root: str, key: str, trust: Trust) -> Answer | None:
    """The kernel that a call means, or None where that is not known.

    Raises:
        UntrustedRootError: Somebody else can write the file.
    """
    found = _read(root, key, trust, "calls", decode)
    return found[1] if found and found[0] == key and isinstance(found[1], Answer) else None


def read_warmed(root: str, action_key: str) -> Warmed | None:
    """What a warm came to, or None where none has; of a file that anybody may have written, so that
    nothing may be loaded for it.
    """
    found = _read(root, action_key, None, "calls", decode)
    return found[1] if found and found[0] == action_key and isinstance(found[1], Warmed) else None


def is_sound(root: str | os.PathLike[str], key: str) -> bool:
    """Whether the file of a call is there and sound; what it says need not be trusted."""
    found = _read(os.fspath(root), key, None, "calls", decode)
    return found is not None and found[0] == key and isinstance(found[1], Answer)


def read_texts(root: str, key: str, trust: Trust) -> dict[str, Any]:
    """The analyses of a source file's functions, as JSON values by their texts' keys; empty where
    there are none.

    Raises:
        UntrustedRootError: Somebody else can write the file.
    """
    values = _read(root, key, trust, "texts", record.contents)
    found = values.get("texts") if isinstance(values, dict) and values.get("key") == key else None
    return found if isinstance(found, dict) else {}


# --- writing ---


def write_style(root: str, key: str, style: Style) -> None:
    """File how a function is called.

    Raises:
        CacheRootError: The root cannot be written.
    """
    matcher = None if style.matcher is None else [list(one) for one in style.matcher]
    buffers = {name: list(one) for name, one in style.buffers.items()}
    _write(root, key, "calls", kind="style", mode=style.mode, matcher=matcher, buffers=buffers)


def write_answer(root: str, key: str, answer: Answer) -> None:
    """File the kernel that a call means.

    Raises:
        CacheRootError: The root cannot be written.
    """
    values = {**answer._asdict(), "library": answer.library._asdict()}
    _write(root, key, "calls", kind="kernel", **values)


def write_warmed(root: str, action_key: str, warmed: Warmed) -> None:
    """File what a warm came to.

    Raises:
        CacheRootError: The root cannot be written.
    """
    values = {**warmed._asdict(), "library": warmed.library._asdict()}
    _write(root, action_key, "calls", kind="warmed", **values)


def write_texts(root: str, key: str, texts: Mapping[str, Any]) -> None:
    """File the analyses of a source file's functions.

    Raises:
        CacheRootError: The root cannot be written.
    """
    _write(root, key, "texts", texts=texts)


def _write(root: str, key: str, folder: str, **values: Any) -> None:
    data = record.encode({"schema": SCHEMA, "key": key, **values})
    try:
        files.write_atomically(path_of(root, key, folder), data)
    except OSError as error:
        raise layout.unwritable(root, error) from error


def sweep(root: str | os.PathLike[str]) -> int:
    """Take away the files whose kernels are gone, which are misses and only take room, and what was
    not used for `UNUSED` seconds of what belongs to no kernel; returns how many went. To be called
    while nobody files one.
    """
    gone = 0
    for path in _dead(root, time.time() - UNUSED):
        try:
            os.unlink(path)
            gone += 1
        except OSError:
            pass  # `verify` tells of it
    return gone


def _dead(root: str | os.PathLike[str], oldest: float) -> Iterator[str]:
    """The files that `sweep` takes away; those that are damaged are `verify`'s to tell of."""
    for folder in ("calls", "texts"):
        for _, path in all_of(root, folder):
            try:
                found = decode(files.read(path, unseen=True))[1] if folder == "calls" else None
                if found is None or isinstance(found, Style):
                    dead = os.stat(path).st_mtime < oldest
                else:
                    dead = not os.path.lexists(os.path.join(root, found.entry))
            except (OSError, ValueError):
                continue
            if dead:
                yield path


def uses(root: str | os.PathLike[str]) -> dict[str, float]:
    """When each entry was last restored by a call, in seconds since 1970; by the entries' paths
    relative to the root.
    """
    newest: dict[str, float] = {}
    for _, path in all_of(root):
        try:
            _, found = decode(files.read(path, unseen=True))
            if isinstance(found, Answer):
                entry = os.path.normpath(found.entry)
                newest[entry] = max(newest.get(entry, 0.0), os.stat(path).st_mtime)
        except (OSError, ValueError):
            pass  # `verify` tells of it
    return newest


def used(root: str, key: str, folder: str = "calls") -> None:
    """Note that a file was of use, by its modification time."""
    try:
        os.utime(path_of(root, key, folder))
    except OSError:
        pass
