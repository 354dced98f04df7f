"""What the calls of a program's own `@tilelang.jit` functions were compiled into, on disk.

    <root>/tlcache/calls/<2 hex>/<key>.json     a call's kernel, or how a function is to be called
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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from tlcache.store import files, layout, record
from tlcache.store.record import Library
from tlcache.store.trust import Trust

__all__ = ["SCHEMA", "Answer", "Style", "all_of", "decode", "path_of", "read_answer", "read_style"]
__all__ += ["read_text", "sweep", "used", "uses", "write_answer", "write_style", "write_text"]

_log = logging.getLogger(__name__)

SCHEMA = 1
"""Version of these files; part of every key, so another one is a miss."""


class Style(NamedTuple):
    """How a function is called: what TileLang finds out by making its kernel once.

    Attributes:
        mode: `lazy` (it returns a kernel) or `eager` (it launches one).
        matcher: The constants of an eager function, in order: name, parameter, `shape` or `stride`,
            axis. None for a lazy one.
        buffers: Of an eager function, each parameter's dtype and its number of axes.
    """

    mode: str
    matcher: tuple[tuple[str, str, str, int], ...] | None
    buffers: Mapping[str, tuple[str, int]]


class Answer(NamedTuple):
    """The kernel that a call means.

    Attributes:
        kernel: The factory's import path, like `package.module:function`; for people.
        title: The kernel in short.
        entry: TileLang's entry directory, relative to the cache root; its name is TileLang's key.
        library: The library in it.
        backend: TileLang's execution backend.
        target: What it is compiled for, as TVM says it.
        inputs: How many arguments it is launched with.
        outputs: Which of its parameters it returns.
        callee: Whether it allocates them itself.
        signature: Its prim_func without a body, as TVM's JSON; empty where a launch needs none.
        pass_configs: What it was compiled with.
        compile_flags: What it was compiled with.
        compile_seconds: What its compile took, or its load from disk where that is all there was.
        versions: TileLang, tvm-ffi and platform.
        created: ISO 8601, UTC.
    """

    kernel: str
    title: str
    entry: str
    library: Library
    backend: str
    target: str
    inputs: int
    outputs: tuple[int, ...]
    callee: bool
    signature: str
    pass_configs: Mapping[str, Any]
    compile_flags: tuple[str, ...] | None
    compile_seconds: float
    versions: Mapping[str, str]
    created: str

    @property
    def key(self) -> str:
        """TileLang's key."""
        return os.path.basename(self.entry)


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


def decode(data: bytes) -> tuple[str, Style | Answer]:
    """The key and content of a file's bytes.

    Raises:
        ValueError: They are not a sound file.
    """
    try:
        values = record.contents(data)
        if values["schema"] != SCHEMA or values["schema"] is True:
            raise ValueError(f"schema {values['schema']!r}")
        key = _str(values["key"])
        return key, (_style if values["kind"] == "style" else _answer)(values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _style(values: Mapping[str, Any]) -> Style:
    matcher = values["matcher"]
    if matcher is not None:
        matcher = tuple(
            (_str(name), _str(param), _one_of(kind, "shape", "stride"), _count(axis))
            for name, param, kind, axis in matcher
        )
    buffers = {
        _str(param): (_str(dtype), _count(axes))
        for param, (dtype, axes) in values["buffers"].items()
    }
    if any(
        param not in buffers or axis >= buffers[param][1] for _, param, _, axis in matcher or ()
    ):
        raise ValueError("a constant is of no parameter")
    return Style(_one_of(values["mode"], "lazy", "eager"), matcher, buffers)


def _answer(values: Mapping[str, Any]) -> Answer:
    entry, library = _str(values["entry"]), values["library"]
    if os.path.isabs(entry) or not entry or ".." in entry.split("/"):
        raise ValueError(f"the entry {entry!r} is not below the root")
    name = _str(library["name"])
    if name != os.path.basename(name) or name in ("", ".", ".."):
        raise ValueError(f"the library's name {name!r} is a path")
    flags = values["compile_flags"]
    seconds = values["compile_seconds"]
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
        raise ValueError(f"{seconds!r} is no duration")
    if not isinstance(values["callee"], bool) or not isinstance(values["pass_configs"], dict):
        raise TypeError("its launch is not described")
    return Answer(
        kernel=_str(values["kernel"]),
        title=_str(values["title"]),
        entry=entry,
        library=Library(name, _count(library["size"]), _str(library["sha256"])),
        backend=_one_of(values["backend"], "tvm_ffi", "cython"),
        target=_str(values["target"]),
        inputs=_count(values["inputs"]),
        outputs=tuple(map(_count, values["outputs"])),
        callee=values["callee"],
        signature=_str(values["signature"]),
        pass_configs=values["pass_configs"],
        compile_flags=None if flags is None else tuple(map(_str, flags)),
        compile_seconds=float(seconds),
        versions={_str(k): _str(v) for k, v in values["versions"].items()},
        created=_str(values["created"]),
    )


def _str(value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(f"{value!r} is not a text")
    return value


def _one_of(value: object, *allowed: str) -> str:
    if value not in allowed:
        raise ValueError(f"{value!r} is none of {', '.join(allowed)}")
    return str(value)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a count")
    return value


def _read(
    root: str, key: str, trust: Trust, folder: str, made_of: Callable[[bytes], _T]
) -> _T | None:
    path = path_of(root, key, folder)
    try:
        data = files.read(path)
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
    """Take away the calls whose kernels are gone; returns how many. They are misses, and only take
    room. To be called while nobody files one.
    """
    gone = 0
    for _, path in all_of(root):
        try:
            _, found = decode(files.read(path, unseen=True))
            if isinstance(found, Answer) and not os.path.lexists(os.path.join(root, found.entry)):
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
