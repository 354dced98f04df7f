"""What can be set: the keys of tlcache.toml, how their values are written, and the record of all of
them.

Invariant: a key is spelled in one way in each layer: `max_size` in a file, `TLCACHE_MAX_SIZE` in
the environment and `--max-size` on a command line; `cache_dir` alone has the environment variable
that TileLang reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["FIELDS", "Field", "Origin", "Settings", "Unfit", "written"]


class Unfit(ValueError):
    """A value is not of its key's form; the key's field says what would be."""


class Origin(NamedTuple):
    """Where a value came from.

    Attributes:
        layer: `default`, `system`, `user`, `file` (that TLCACHE_CONFIG names), `environment` or
            `command line`.
        where: The file's path, the variable's or the option's name; None for a default.
    """

    layer: str
    where: str | None = None

    def __str__(self) -> str:
        return self.layer if self.where is None else self.where


@dataclass(frozen=True)
class Settings:
    """Every setting, with where it came from.

    Attributes:
        cache_dir: The cache root of the commands that take `--cache-dir`, and of a process that
            asks `tlcache.runtime` for kernels.
        trust: Who may write a root that kernels are loaded from besides its owner and root: nobody
            (`owner`), its `group`, or `any`body.
        jobs: Compiles at a time; None is what cores and memory allow.
        scan_cache: The file that remembers what entries say; None is one in the user's cache
            directory.
        roots: What the daemon and the units watch and bound.
        max_size: Bytes on disk that a root comes down to; None for no bound.
        max_age: Seconds that a kernel may go unused; None for no bound.
        keep_free: Bytes that stay free on a root's file system; None for no bound.
        socket: Where the daemon listens.
        group: The group that may ask the daemon, besides its owner and root.
        metrics_port: The port on 127.0.0.1 that has /metrics, too; None for none.
        interval: Seconds between two looks at the processes' agents.
        history: The file of the daemon's counters and samples.
        log_level: Of the daemon: `debug`, `info`, `warning` or `error`.
        prune_schedule: When tlcache-prune.timer is due, as systemd writes it.
        origins: Where each value came from, by key.
        shadowed: By key, the layers below that also set it, the nearest first.
    """

    cache_dir: Path
    trust: str
    jobs: int | None
    scan_cache: Path | None
    roots: tuple[Path, ...]
    max_size: int | None
    max_age: float | None
    keep_free: int | None
    socket: Path
    group: str | None
    metrics_port: int | None
    interval: float
    history: Path
    log_level: str
    prune_schedule: str
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False)
    shadowed: Mapping[str, tuple[Origin, ...]] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Field:
    """A key.

    Attributes:
        name: The key.
        parse: From what a file says, or from a text, to the value; it raises Unfit.
        form: What is expected, as the end of a sentence that starts with `expected`.
        example: A value as tlcache.toml has it.
        default: What holds where nobody says otherwise, in words.
        variable: The environment variable.
        optional: Whether `none` unsets it.
    """

    name: str
    parse: Callable[[object], Any]
    form: str
    example: str
    default: str
    variable: str
    optional: bool = False


def written(value: Any) -> str:
    """A setting's value as a person reads it, without its unit being lost."""
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


# --- the forms ---


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Unfit
    if any(ord(letter) < 32 or 0xD800 <= ord(letter) < 0xE000 for letter in value):
        raise Unfit
    return value.strip()


def _path(value: object) -> Path:
    text = _text(value)
    if text.startswith("~"):
        text = os.path.expanduser(text)
    if not os.path.isabs(text):
        raise Unfit
    return Path(os.path.normpath(text))


def _paths(value: object) -> tuple[Path, ...]:
    if isinstance(value, str):
        value = value.split(os.pathsep)
    if not isinstance(value, list | tuple) or not value:
        raise Unfit
    return tuple(dict.fromkeys(map(_path, value)))


def _size(value: object) -> int:
    from tlcache.errors import UsageError
    from tlcache.store import select

    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Unfit
    try:
        size = select.bytes_of(value) if isinstance(value, str) else value
    except UsageError as error:
        raise Unfit from error
    if not 0 < size < 2**63:
        raise Unfit
    return size


def _span(value: object) -> float:
    from tlcache.errors import UsageError
    from tlcache.store import select

    try:
        seconds = select.age(_text(value)).total_seconds()
    except UsageError as error:
        raise Unfit from error
    if seconds <= 0:
        raise Unfit
    return seconds


def _whole(least: int, most: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"(?a)\d{1,9}", value.strip()):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise Unfit
        return value

    return parse


def _choice(*names: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        text = _text(value).lower()
        if text not in names:
            raise Unfit
        return text

    return parse


def _name(value: object) -> str:
    text = _text(value)
    if not re.fullmatch(r"(?a)[a-z_][a-z0-9_.-]{0,31}", text, re.IGNORECASE):
        raise Unfit
    return text


_A_PATH = "an absolute path, or one that starts with `~/`"
_A_SIZE = 'a size like "5GiB" or "200MiB", or a number of bytes, more than 0'
_A_SPAN = 'a time span like "30d", "12h" or "90s", longer than 0'
_NO_BOUND = "no bound"


def _field(
    name: str,
    parse: Callable[[object], Any],
    form: str,
    example: str,
    default: str,
    **more: Any,
) -> Field:
    more.setdefault("variable", f"TLCACHE_{name.upper()}")
    return Field(name, parse, form, example, default, **more)


FIELDS: Mapping[str, Field] = {
    one.name: one
    for one in (
        _field(
            "cache_dir",
            _path,
            _A_PATH,
            '"/var/cache/tilelang"',
            "~/.tilelang/cache",
            variable="TILELANG_CACHE_DIR",
        ),
        _field(
            "trust",
            _choice("owner", "group", "any"),
            '"owner", "group" or "any"',
            '"group"',
            "owner",
        ),
        _field(
            "jobs",
            _whole(1, 4096),
            "a number of processes from 1 to 4096",
            "8",
            "what cores and memory allow",
            optional=True,
        ),
        _field(
            "scan_cache",
            _path,
            _A_PATH,
            '"/var/tmp/tlcache.sqlite"',
            "in the user's cache directory",
            optional=True,
        ),
        _field(
            "roots",
            _paths,
            "a list of absolute paths (in the environment, with colons between them)",
            '["/var/cache/tilelang"]',
            "cache_dir",
        ),
        _field("max_size", _size, _A_SIZE, '"50GiB"', _NO_BOUND, optional=True),
        _field("max_age", _span, _A_SPAN, '"90d"', _NO_BOUND, optional=True),
        _field("keep_free", _size, _A_SIZE, '"10GiB"', _NO_BOUND, optional=True),
        _field(
            "socket",
            _path,
            _A_PATH,
            '"/run/tlcache/daemon.sock"',
            "/run/tlcache/daemon.sock for root, else $XDG_RUNTIME_DIR/tlcache/daemon.sock",
        ),
        _field("group", _name, "the name of a group", '"tlcache"', "none", optional=True),
        _field(
            "metrics_port",
            _whole(1, 65535),
            "a port from 1 to 65535",
            "9464",
            "none",
            optional=True,
        ),
        _field("interval", _span, _A_SPAN, '"10s"', "5s"),
        _field(
            "history",
            _path,
            _A_PATH,
            '"/var/lib/tlcache/history"',
            "/var/lib/tlcache/history for root, else ~/.local/state/tlcache/history",
        ),
        _field(
            "log_level",
            _choice("debug", "info", "warning", "error"),
            '"debug", "info", "warning" or "error"',
            '"info"',
            "info",
        ),
        _field(
            "prune_schedule",
            _text,
            "a time as `systemd-analyze calendar` reads it, on one line",
            '"Sun 03:00"',
            "daily",
        ),
    )
}
"""The keys, in the order in which they are shown."""
