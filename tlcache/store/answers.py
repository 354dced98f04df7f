"""What the files of calls hold, and their reading back.

Invariant: what is read back is sound in form, and names only paths below its root.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tlcache.store import record
from tlcache.store.record import Library

__all__ = ["SCHEMA", "Answer", "Style", "Warmed", "decode", "told"]

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
        made_of: The JSON text of `ingredients`: who restores a kernel does not read it.
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
    made_of: str = "{}"

    @property
    def ingredients(self) -> dict[str, str]:
        """What its key was made of, as far as it is told apart; for `why`."""
        try:
            found = json.loads(self.made_of)
        except (ValueError, RecursionError):
            return {}
        sound = isinstance(found, dict) and all(type(one) is str for one in found.values())
        return found if sound else {}

    @property
    def key(self) -> str:
        """TileLang's key."""
        return os.path.basename(self.entry)


class Warmed(NamedTuple):
    """What a warm came to where it made a workload of a program's own function.

    Attributes:
        entry: TileLang's entry directory, relative to the cache root.
        library: The library in it.
        call: The key of the call by which it is restored; None where only TileLang can load it.
        reason: Why only TileLang can.
        compile_seconds: What its compile took.
    """

    entry: str
    library: Library
    call: str | None
    reason: str | None
    compile_seconds: float


def decode(data: bytes) -> tuple[str, Style | Answer | Warmed]:
    """The key and content of a file's bytes.

    Raises:
        ValueError: They are not a sound file.
    """
    key, values = _opened(data)
    try:
        return key, _KINDS.get(values["kind"], _answer)(values)
    except _DAMAGE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def told(folder: str, name: str, data: bytes) -> Style | Answer | Warmed | None:
    """What a file holds; None for one of `texts`, whose content only its readers understand.

    Args:
        folder: `calls` or `texts`.
        name: Its name, which has to be that of its key.
        data: Its bytes.

    Raises:
        ValueError: It is no sound file of that folder and name.
    """
    key, found = (_opened(data)[0], None) if folder == "texts" else decode(data)
    if name != f"{key}.json":
        raise ValueError("it is filed under another key than its own")
    return found


_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def _opened(data: bytes) -> tuple[str, Mapping[str, Any]]:
    try:
        values = record.contents(data)
        if values["schema"] != SCHEMA or values["schema"] is True:
            raise ValueError(f"schema {values['schema']!r}")
        return _str(values["key"]), values
    except _DAMAGE as error:
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


def _entry(values: Mapping[str, Any]) -> tuple[str, Library]:
    entry, library = _str(values["entry"]), values["library"]
    if os.path.isabs(entry) or not entry or ".." in entry.split("/"):
        raise ValueError(f"the entry {entry!r} is not below the root")
    name = _str(library["name"])
    if name != os.path.basename(name) or name in ("", ".", ".."):
        raise ValueError(f"the library's name {name!r} is a path")
    return entry, Library(name, _count(library["size"]), _str(library["sha256"]))


def _seconds(values: Mapping[str, Any]) -> float:
    seconds = values["compile_seconds"]
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
        raise ValueError(f"{seconds!r} is no duration")
    return float(seconds)


def _warmed(values: Mapping[str, Any]) -> Warmed:
    call, reason = values["call"], values["reason"]
    return Warmed(
        *_entry(values),
        call=None if call is None else _str(call),
        reason=None if reason is None else _str(reason),
        compile_seconds=_seconds(values),
    )


def _answer(values: Mapping[str, Any]) -> Answer:
    entry, library = _entry(values)
    flags = values["compile_flags"]
    if not isinstance(values["callee"], bool) or not isinstance(values["pass_configs"], dict):
        raise TypeError("its launch is not described")
    return Answer(
        kernel=_str(values["kernel"]),
        title=_str(values["title"]),
        entry=entry,
        library=library,
        backend=_one_of(values["backend"], "tvm_ffi", "cython"),
        target=_str(values["target"]),
        inputs=_count(values["inputs"]),
        outputs=tuple(map(_count, values["outputs"])),
        callee=values["callee"],
        signature=_str(values["signature"]),
        pass_configs=values["pass_configs"],
        compile_flags=None if flags is None else tuple(map(_str, flags)),
        compile_seconds=_seconds(values),
        versions={_str(k): _str(v) for k, v in values["versions"].items()},
        created=_str(values["created"]),
        made_of=_str(values.get("made_of", "{}")),
    )


_KINDS: Mapping[str, Callable[[Mapping[str, Any]], Style | Answer | Warmed]] = {
    "style": _style,
    "warmed": _warmed,
}


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
