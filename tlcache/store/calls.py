"""What the calls of a program's own `@tilelang.jit` functions were compiled into, on disk.

    <root>/tlcache/calls/<2 hex>/<key>.json     a call's kernel; or how a function is to be called;
                                                or, by an action key, what a warm came to
    <root>/tlcache/texts/<2 hex>/<key>.json     the analysis of one function's lines

Each is one small file with a checksum, like a record (`record.py`), but named by a key that only a
process with the program in it can compute (`tlcache.runtime.foreign`).

Invariant: a file that is read back is sound in form and names only paths below its root; a damaged
one is a miss, never an error. Kernels are code and what leads to one is trusted as such.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tlcache.store import files, layout, record
from tlcache.store.answers import SCHEMA, Answer, Style, Warmed, decode
from tlcache.store.trust import Trust

__all__ = ["SCHEMA", "Answer", "Style", "Warmed", "all_of", "decode", "is_sound"]
__all__ += ["path_of", "read_answer"]
__all__ += ["read_style", "read_text", "read_warmed", "sweep", "used", "uses", "write_answer"]
__all__ += ["write_style", "write_text", "write_warmed"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


def path_of(root: str | os.PathLike[str], key: str, folder: str = "calls") -> str:
    """The path of a file, whether it is there or not."""
    return os.path.join(root, "tlcache", folder, key[:2], f"{key}.json")


def all_of(root: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """The keys and paths of all calls under a root, sound or not."""
    top = os.path.join(root, "tlcache", "calls")
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
        data = files.read(path)
        if trust is not None:
            trust.check(path)
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


def read_text(root: str, key: str, trust: Trust) -> Any:
    """The JSON values of a text's analysis, or None.

    Raises:
        UntrustedRootError: Somebody else can write the file.
    """
    values = _read(root, key, trust, "texts", record.contents)
    return values.get("text") if isinstance(values, dict) and values.get("key") == key else None


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


def write_text(root: str, key: str, text: Any) -> None:
    """File the analysis of a text.

    Raises:
        CacheRootError: The root cannot be written.
    """
    _write(root, key, "texts", text=text)


def _write(root: str, key: str, folder: str, **values: Any) -> None:
    data = record.encode({"schema": SCHEMA, "key": key, **values})
    try:
        files.write_atomically(path_of(root, key, folder), data)
    except OSError as error:
        raise layout.unwritable(root, error) from error


def sweep(root: str | os.PathLike[str]) -> int:
    """Take away the files whose kernels are gone; returns how many. They are misses, and only take
    room. To be called while nobody files one.
    """
    gone = 0
    for _, path in all_of(root):
        try:
            _, found = decode(files.read(path, unseen=True))
            if isinstance(found, Style):
                continue
            if not os.path.lexists(os.path.join(root, found.entry)):
                os.unlink(path)
                gone += 1
        except (OSError, ValueError):
            pass  # `verify` tells of it
    return gone


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


def used(root: str, key: str) -> None:
    """Note that a call's kernel was loaded, by the modification time of its file."""
    try:
        os.utime(path_of(root, key))
    except OSError:
        pass
