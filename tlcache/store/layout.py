"""Where things lie under a cache root, for every layout that TileLang has had.

    <root>/<version>/<platform>/kernels/<key>/     TileLang 0.1.12 and later
    <root>/<version>-<machine>/kernels/<key>/      0.1.9 to 0.1.11
    <root>/<key>/                                  0.1.8 and earlier
    <root>/tlcache/records/<2 hex>/<action key>.json
    <root>/tlcache/locks/<action key>.lock

Invariant: tlcache writes below `<root>/tlcache` only, and creates TileLang's own empty directories;
it never writes into an entry.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tlcache.errors import CacheRootError

__all__ = [
    "EntryPlace",
    "cache_root",
    "default_root",
    "entries",
    "lock_path",
    "make_skeleton",
    "namespace",
]
__all__ += ["caching_disabled", "record_path", "records", "unwritable"]

# As text: compiling them costs a start that lists nothing 0.3 ms; `re` keeps what it compiled.
_KEY = r"[0-9a-f]{64}"
_OLD_NAMESPACE = r"(?P<version>\d[\w.]*)-(?P<machine>x86_64|aarch64|arm64)"
_OWN = "tlcache"


def cache_root(override: str | os.PathLike[str] | None = None) -> Path:
    """The cache root in force, as TileLang sees it.

    Args:
        override: A directory named on the command line; it wins over the environment.

    Returns:
        `override`, else $TILELANG_CACHE_DIR, else `~/.tilelang/cache`. As in TileLang, a `~` in the
        variable is not expanded.
    """
    if override is not None:
        return Path(override)
    return Path(default_root())


def default_root() -> str:
    """The root of the environment. A string: a process asks for it with each kernel that it
    resolves.
    """
    return os.environ.get("TILELANG_CACHE_DIR") or os.path.expanduser("~/.tilelang/cache")


def caching_disabled() -> bool:
    """Whether TileLang's cache is switched off by the environment, as TileLang reads it."""
    return os.environ.get("TILELANG_DISABLE_CACHE", "0").lower() in ("1", "true", "yes", "on")


def namespace(version: str, platform: str) -> str:
    """The directory of one TileLang version and platform, relative to the root."""
    public, _, local = version.partition("+")
    return os.path.join(f"{public}_{local}" if local else public, platform)


def record_path(root: str | os.PathLike[str], action_key: str) -> str:
    """The record's path. A string: it is computed for each kernel that a process loads."""
    return os.path.join(root, _OWN, "records", action_key[:2], f"{action_key}.json")


def lock_path(root: str | os.PathLike[str], action_key: str) -> str:
    return os.path.join(root, _OWN, "locks", f"{action_key}.lock")


def records(root: Path) -> Iterator[Path]:
    """The paths of all records under a root, sound or not."""
    yield from sorted((root / _OWN / "records").glob("[0-9a-f][0-9a-f]/*.json"))


class EntryPlace(NamedTuple):
    """Where one kernel entry lies, and what its path alone tells.

    Attributes:
        key: TileLang's kernel key, 64 hexadecimal digits.
        path: The entry's directory.
        tilelang: The version that wrote it, or None where the layout does not say.
        platform: Like `linux-x86_64`, or None.
    """

    key: str
    path: Path
    tilelang: str | None
    platform: str | None


def entries(root: Path) -> Iterator[EntryPlace]:
    """All kernel entries under a root, of any TileLang version, in the order of their paths."""
    for top in _directories(root):
        if re.fullmatch(_KEY, top.name):
            yield EntryPlace(top.name, top, None, None)
        elif match := re.fullmatch(_OLD_NAMESPACE, top.name):
            yield from _kernels(top, match["version"], f"linux-{match['machine']}")
        elif top.name != _OWN and not top.name.startswith("."):
            for platform in _directories(top):
                yield from _kernels(platform, top.name, platform.name)


def _kernels(place: Path, version: str, platform: str) -> Iterator[EntryPlace]:
    for directory in _directories(place / "kernels"):
        if re.fullmatch(_KEY, directory.name):
            yield EntryPlace(directory.name, directory, version, platform)


def _directories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as found:
            return sorted(Path(item.path) for item in found if item.is_dir(follow_symlinks=False))
    except OSError:
        return []


def make_skeleton(root: Path, version: str, platform: str) -> None:
    """Create the directories that TileLang and tlcache expect, so that the root can be read-only
    later.

    Without them `import tilelang` itself fails on a read-only root.

    Raises:
        CacheRootError: The root cannot be created or written.
    """
    place = root / namespace(version, platform)
    own = root / _OWN
    try:
        for path in (place / "kernels", place / ".staging", own / "records", own / "locks"):
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(root, error) from error


def unwritable(root: str | os.PathLike[str], error: OSError) -> CacheRootError:
    """The error for a write below a cache root that failed."""
    reason = (error.strerror or str(error)).lower()
    if error.errno is not None and error.errno in _FULL:
        return CacheRootError(
            f"the disk of the cache root {root} is full: {reason}",
            hint=f"free space (`df -h {root}`), or name another root with `--cache-dir DIR`",
        )
    return CacheRootError(
        f"the cache root {root} cannot be written: {reason}",
        hint="name a writable directory with `--cache-dir DIR` or TILELANG_CACHE_DIR",
    )


_FULL = (28, 122)  # ENOSPC and EDQUOT
