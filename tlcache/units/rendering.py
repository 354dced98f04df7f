"""The units as texts: the templates of `systemd/`, filled in with the settings.

A template's line with `@name@` is left out where there is no such value, and written once for each
where there are several.

Invariant: a value is quoted for the place where it stands. None of a path's characters ends a
word, starts a specifier or a variable, or begins another line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tlcache.errors import ConfigError, UsageError
from tlcache.settings import Settings

if TYPE_CHECKING:
    from importlib.abc import Traversable

__all__ = ["CATALOG", "DAEMON", "Scope", "Unit", "Wanted", "render", "templates"]

Scope = Literal["system", "user"]

DAEMON = ("tlcached.socket", "tlcached.service")
"""What is enabled to have the daemon."""

_UNITS = (*DAEMON, "tlcache-prune.service", "tlcache-prune.timer", "tlcache-warm@.service")
CATALOG: Mapping[Scope, tuple[str, ...]] = {
    "system": (*_UNITS, "tlcache.tmpfiles.conf", "tlcache.sysusers.conf"),
    "user": _UNITS,
}
"""The names of all templates."""

_PRUNING = ("tlcache-prune.service", "tlcache-prune.timer")
# What root needs to delete in directories of others, and to see what others have loaded.
_DAEMON_CAPABILITIES = "CAP_DAC_OVERRIDE CAP_FOWNER CAP_SYS_PTRACE"
_PLACEHOLDER = re.compile(r"@([a-z_]+)@")
_SYSTEM_ROOT = Path("/var/cache/tilelang")
_SYSTEM_GROUP = "tlcache"
_FROM_FILES = ("system", "user", "file")


@dataclass(frozen=True)
class Unit:
    """A file of systemd's.

    Attributes:
        name: Its template's name.
        text: What it says.
    """

    name: str
    text: str


@dataclass(frozen=True)
class Wanted:
    """What to render.

    Attributes:
        scope: `system` or `user`.
        executable: The `tlcache` that they run, by its path on the machine that they are for.
        settings: The settings.
        roots: The roots of the command line; empty for those of the settings.
        user: Who runs them, of system units.
        config: The file that TLCACHE_CONFIG names, for them as well.
    """

    scope: Scope
    executable: Path
    settings: Settings
    roots: tuple[Path, ...] = ()
    user: str = "root"
    config: str | None = None

    @property
    def chosen_roots(self) -> tuple[Path, ...]:
        """The roots that the daemon watches."""
        if self.roots:
            return self.roots
        return (_SYSTEM_ROOT,) if self.scope == "system" and self._unset else self.settings.roots

    @property
    def passed_roots(self) -> tuple[Path, ...]:
        """Those of them that the daemon does not find by itself: not those of tlcache.toml, nor a
        user's own default.
        """
        if self.roots:
            return self.roots
        return () if self._layer in _FROM_FILES or self.own_default else self.chosen_roots

    @property
    def own_default(self) -> bool:
        """Whether the root is the one that a user's commands have without being told."""
        return self.scope == "user" and not self.roots and self._unset

    @property
    def warm_root(self) -> Path:
        """The root that is warmed: the one in which processes look."""
        origin = self.settings.origins["cache_dir"]
        if not self.roots and origin.layer in _FROM_FILES:
            return self.settings.cache_dir
        return self.chosen_roots[0]

    @property
    def _layer(self) -> str:
        origins = self.settings.origins
        return origins["roots" if origins["roots"].layer != "default" else "cache_dir"].layer

    @property
    def _unset(self) -> bool:
        return self._layer == "default"


def templates(scope: Scope) -> Iterator[tuple[str, str]]:
    """The templates of a scope by name: of the installed package, else of the repository."""
    place: Traversable = resources.files("tlcache.units") / scope
    if not place.is_dir():
        place = Path(__file__).parents[2] / "systemd" / scope
    for name in CATALOG[scope]:
        yield name, (place / name).read_text(encoding="utf-8")


def render(wanted: Wanted) -> list[Unit]:
    """The units. Those that prune are left out where no bound is set that they could keep.

    Raises:
        ConfigError: A path cannot be written into a unit.
        UsageError: The user's or the group's name is none.
    """
    values = _values(wanted)
    return [
        Unit(name, "".join(_filled(line, values) for line in text.splitlines(keepends=True)))
        for name, text in templates(wanted.scope)
        if values["prune"] or name not in _PRUNING
    ]


def _filled(line: str, values: Mapping[str, Sequence[str]]) -> str:
    names = set(_PLACEHOLDER.findall(line)) & set(values)
    count = max((len(values[name]) for name in names), default=1)
    if any(len(values[name]) not in (1, count) for name in names):
        return ""

    def value(name: str, index: int) -> str:
        given = values.get(name)
        return f"@{name}@" if given is None else given[index if len(given) > 1 else 0]

    return "".join(
        _PLACEHOLDER.sub(lambda match, index=index: value(match[1], index), line)  # type: ignore[misc]
        for index in range(count)
    )


def _values(wanted: Wanted) -> dict[str, Sequence[str]]:
    settings, roots = wanted.settings, wanted.chosen_roots
    if not re.fullmatch(r"(?a)[A-Za-z_][A-Za-z0-9_.-]{0,30}", wanted.user):
        raise UsageError(f"{wanted.user!r} is no user's name", hint="like `--run-as vllm`")
    root = wanted.user == "root"
    socket_set = settings.origins["socket"].layer != "default"
    socket = _word(settings.socket) if socket_set else "%t/tlcache/daemon.sock"
    warm_elsewhere = wanted.passed_roots or wanted.warm_root not in roots
    capabilities = _DAEMON_CAPABILITIES if root else ""
    return {
        "tlcache": [_argument(wanted.executable)],
        "roots": [" ".join(map(_word, roots))],
        "root": list(map(_word, roots)),
        "root_options": ["".join(f" --root {_argument(one)}" for one in wanted.passed_roots)],
        "writable": [_word(one, before="-") for one in roots],
        "warm_root": [_word(wanted.warm_root)],
        "warm_writable": [_word(wanted.warm_root, before="-")],
        "warm_options": [
            f" --cache-dir {_argument(wanted.warm_root)}" if warm_elsewhere else "",
        ],
        "prune": list(_prunes(settings, [None] if wanted.own_default else roots)),
        "schedule": [_line(settings.prune_schedule)],
        "user": [wanted.user],
        "group": [settings.group or _SYSTEM_GROUP],
        "capabilities": [capabilities],
        "warm_capabilities": [""],
        "socket": [socket],
        "socket_directory": [
            _word(settings.socket.parent) if socket_set else "/run/tlcache",
        ],
        "config": [_word(f"TLCACHE_CONFIG={wanted.config}")] if wanted.config else [],
        "root_mode": ["-" if root else "0755"],
        "root_owner": ["-" if root else wanted.user],
    }


def _prunes(settings: Settings, roots: Iterable[Path | None]) -> Iterator[str]:
    """The arguments of each `tlcache prune`. A bound of its own each: given together, they would
    delete only what is beyond both.
    """
    bounds = []
    if settings.max_age is not None:
        bounds.append(f"--unused-for {max(1, round(settings.max_age))}s")
    if settings.max_size is not None:
        bounds.append(f"--max-size {settings.max_size}")
    for root in roots:
        for bound in bounds:
            yield f"--cache-dir {_argument(root)} {bound} --yes" if root else f"{bound} --yes"


# --- quoting ---


def _line(text: str) -> str:
    """A value that takes the rest of a line."""
    if not text.isprintable():
        raise ConfigError(f"{text!r} cannot be written into a unit: it is more than a line")
    return text.replace("%", "%%")


def _word(value: str | os.PathLike[str], before: str = "") -> str:
    """A value that is one of several on a line, with what stands before it inside its quotes."""
    text = before + os.fspath(value)
    if not text.isprintable():
        raise ConfigError(
            f"{text!r} cannot be written into a unit: not all of it can be printed",
            hint="name another path",
        )
    text = text.replace("%", "%%")
    if re.fullmatch(r"(?a)[\w/.:=%+,@-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _argument(value: str | os.PathLike[str]) -> str:
    """A word of a command line, where `$` starts a variable."""
    return _word(value).replace("$", "$$")
