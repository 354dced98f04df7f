"""Where settings come from: the system's tlcache.toml, the user's, the environment, the command
line; each wins over the ones before it.

Invariant: what is not understood is an error that names the file, the key, the value and what was
expected. A serving process asks for single values with `value`, and minds nothing but those: it
must start though a key is there that only a later tlcache knows.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlcache.errors import ConfigError

if TYPE_CHECKING:
    from tlcache.settings import Field, Origin, Settings

__all__ = ["NAMED", "SYSTEM", "Source", "load", "misspelled", "sources", "value"]

NAMED = "TLCACHE_CONFIG"
"""The environment variable that names the one file to read, in place of the two."""

SYSTEM = "/etc/tlcache/tlcache.toml"

Source = tuple[str, str, "Mapping[str, object] | None"]
"""A file that may set something: its layer (`system`, `user`, or `file`), its path, and what it
says, or None where it is not there.
"""

_LONGEST = 1 << 20
_ELSEWHERE = {"on_compile", "on_compile_from", "runtime_dir", "config"}


def load(given: Mapping[str, object] | None = None, prefix: Path | None = None) -> Settings:
    """Every setting, read anew.

    Args:
        given: What the command line says, by key; what is None or empty says nothing.
        prefix: The root of an image, whose system file is read in place of this machine's files.

    Raises:
        ConfigError: A file cannot be read, is no TOML or belongs to somebody else; a key is not
            known; or a value is not of its key's form.
    """
    from tlcache.settings import FIELDS, Origin, Settings

    _files.cache_clear()
    layers = sources(prefix)
    for layer in layers:
        for key in layer[2] or ():
            if key not in FIELDS:
                raise _unknown(key, layer)
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    shadowed: dict[str, tuple[Origin, ...]] = {}
    for name, field in FIELDS.items():
        found = [
            (_parsed(field, raw, origin), origin) for raw, origin in _said(field, layers, given)
        ]
        if found:
            values[name], origins[name] = found[0]
        else:
            values[name], origins[name] = _default(name, values), Origin("default")
        shadowed[name] = tuple(origin for _, origin in found[1:])
    return Settings(**values, origins=origins, shadowed=shadowed)


def value(name: str) -> Any:
    """One setting, of the environment or the files; None where neither has it. The files are read
    once a process.

    Raises:
        ConfigError: As for `load`, but for this key alone.
    """
    layers = sources()
    if not any(layer[2] for layer in layers) and f"TLCACHE_{name.upper()}" not in os.environ:
        return None  # the usual case, which a starting process has no time for
    from tlcache.settings import FIELDS

    for raw, origin in _said(FIELDS[name], layers, None):
        return _parsed(FIELDS[name], raw, origin)
    return None


def sources(prefix: Path | None = None) -> tuple[Source, ...]:
    """The files, the lowest first.

    Args:
        prefix: The root of an image, which has a system file and no user's.

    Raises:
        ConfigError: One cannot be read, is no TOML, or others can write it.
    """
    if prefix is not None:
        path = os.path.join(prefix, SYSTEM.lstrip("/"))
        return (("system", path, _read(path)),)
    environ = os.environ
    return _files(environ.get(NAMED), environ.get("XDG_CONFIG_HOME"), environ.get("HOME"))


@functools.lru_cache(maxsize=8)
def _files(named: str | None, config_home: str | None, home: str | None) -> tuple[Source, ...]:
    if named:
        path = os.path.abspath(named)
        table = _read(path)
        if table is None:
            raise ConfigError(
                f"{NAMED} is {named}, and there is no such file",
                hint=f"`unset {NAMED}` to read {SYSTEM} and the user's file",
            )
        return (("file", path, table),)
    paths = [("system", SYSTEM)]
    if not config_home or not os.path.isabs(config_home):
        config_home = os.path.join(home or os.path.expanduser("~"), ".config")
    if os.path.isabs(config_home):
        paths.append(("user", os.path.join(config_home, "tlcache", "tlcache.toml")))
    return tuple((layer, path, _read(path)) for layer, path in paths)


def misspelled() -> dict[str, str]:
    """Environment variables that nothing reads, though their names are nearly those of settings:
    each with the name that was meant. They are no error, since others set variables, too.
    """
    import difflib

    from tlcache.settings import FIELDS

    known = {field.variable for field in FIELDS.values()}
    known |= {f"TLCACHE_{name.upper()}" for name in _ELSEWHERE}
    near = {"TLCACHE_CACHE_DIR": "TILELANG_CACHE_DIR"}
    for name in os.environ:
        if name.startswith("TLCACHE_") and name not in known and name not in near:
            for match in difflib.get_close_matches(name, known, 1, 0.85):
                near[name] = match
    return {name: meant for name, meant in near.items() if name in os.environ}


# --- the layers ---


def _said(
    field: Field, layers: tuple[Source, ...], given: Mapping[str, object] | None
) -> Iterator[tuple[object, Origin]]:
    """What is said of a key, the highest layer first."""
    from tlcache.settings import Origin

    raw = (given or {}).get(field.name)
    if raw is not None and raw != ():
        yield raw, Origin("command line", f"--{field.name.replace('_', '-')}")
    text = os.environ.get(field.variable, "")
    # Kubernetes sets TLCACHE_METRICS_PORT=tcp://… where a Service is called tlcache-metrics.
    if text.strip() and not (field.name == "metrics_port" and text.startswith("tcp://")):
        yield text, Origin("environment", field.variable)
    for layer, path, table in reversed(layers):
        if table is not None and field.name in table:
            yield table[field.name], Origin(layer, path)


def _parsed(field: Field, raw: object, origin: Origin) -> Any:
    from tlcache.settings import Unfit

    if origin.where == "TILELANG_CACHE_DIR":
        return Path(str(raw))  # as TileLang takes it: relative, and with a ~ that is no home
    if field.optional and isinstance(raw, str) and raw.strip().lower() == "none":
        return None
    try:
        return field.parse(raw)
    except Unfit:
        raise ConfigError(
            f"{field.name} {_place(origin)} is {_shown(raw)}: expected {field.form}",
            hint=_remedy(field, origin),
        ) from None


def _place(origin: Origin) -> str:
    if origin.layer == "command line":
        return "of the command line"
    return f"of {origin.where}" if origin.layer == "environment" else f"in {origin.where}"


def _remedy(field: Field, origin: Origin) -> str:
    none = ', or "none"' if field.optional else ""
    if origin.layer == "command line":
        return f"like `{origin.where} {field.example.strip('[]').strip(chr(34))}`{none}"
    if origin.layer == "environment":
        return f"like `{origin.where}={field.example.strip('[]').strip(chr(34))}`{none}"
    return f"like `{field.name} = {field.example}`{none}"


def _shown(raw: object) -> str:
    """A value of any kind, so that it fits a sentence."""
    text = ascii(raw) if not isinstance(raw, str) else f'"{ascii(raw)[1:-1]}"'
    return text if len(text) <= 80 else f"{text[:77]}..."


def _unknown(key: str, source: Source) -> ConfigError:
    import difflib

    from tlcache.settings import FIELDS

    _, path, table = source
    held = (table or {})[key]
    meant = key.lower().replace("-", "_")
    near = difflib.get_close_matches(meant, FIELDS, 1)
    if near:
        hint = f"did you mean `{near[0]}`?"
    elif isinstance(held, dict) and set(held) & set(FIELDS):
        hint = f"the keys stand at the top of the file, without a `[{_shown(key)[1:-1]}]`"
    else:
        hint = f"there are {', '.join(FIELDS)}"
    return ConfigError(f"{path} sets {_shown(key)}, which is no setting", hint=hint)


def _default(name: str, values: Mapping[str, Any]) -> Any:
    """The default of a key; those of the keys before it are in `values`."""
    if name == "cache_dir":
        return Path(os.path.expanduser("~/.tilelang/cache"))
    if name == "roots":
        return (Path(os.path.abspath(values["cache_dir"])),)
    if name == "socket":
        from tlcache.store import sockets

        return Path(sockets.daemon_directory()) / "daemon.sock"
    if name == "history":
        return Path(_state_directory()) / "history"
    return {"trust": "owner", "interval": 5.0, "log_level": "info", "prune_schedule": "daily"}.get(
        name
    )


def _state_directory() -> str:
    """The service manager's choice, which a sandbox lets the daemon write; else the usual place."""
    chosen = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if os.path.isabs(chosen):
        return chosen
    if os.geteuid() == 0:
        return "/var/lib/tlcache"
    home = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(home):
        home = os.path.expanduser("~/.local/state")
    return os.path.join(home, "tlcache")


# --- the files ---


def _read(path: str) -> Mapping[str, object] | None:
    """What a file says; None where there is none."""
    try:
        # Without blocking: what stands there may be a pipe.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _unreadable(path, "it is no file")
        _check_writers(path, status)
        with open(fd, "rb", closefd=False) as file:
            content = file.read(_LONGEST + 1)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    finally:
        os.close(fd)
    if len(content) > _LONGEST:
        raise _unreadable(path, "it is larger than 1 MiB")
    return _table(path, content)


def _table(path: str, content: bytes) -> Mapping[str, object]:
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table: Mapping[str, object] = tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _no_toml(path, f"line {line} is not UTF-8") from error
    except RecursionError as error:
        raise _no_toml(path, "it nests too deep") from error
    except ValueError as error:  # TOMLDecodeError, and numbers of more digits than Python reads
        raise _no_toml(path, str(error)) from error
    return table


def _check_writers(path: str, status: os.stat_result) -> None:
    """A file that others can write could name a root of theirs, and a kernel is code."""
    from tlcache.store.trust import Trust

    reason = Trust(os.path.dirname(path), level="owner").fault(path, status)
    if reason is not None:
        raise ConfigError(
            f"{path} is not read: it {reason}, and it decides which kernels are loaded",
            hint=f"`chmod go-w {path}` and `chown $(id -u) {path}`, if you know what it says",
        )


def _unreadable(path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read: {reason}", hint=f"{NAMED} names another file to read instead"
    )


def _no_toml(path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} is no TOML: {reason}", hint='like `max_size = "50GiB"`, one key on a line'
    )
