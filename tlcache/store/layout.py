"""Where things lie under a cache root, for every layout that TileLang has had.

    <root>/<version>/<platform>/kernels/<key>/   0.1.12 and later; also autotuner/<key>/
    <root>/<version>/cuda-binaries/<key>/        0.1.15; up to 0.1.14 <key>.cubin and its .sha256
    <root>/<version>[/<platform>]/.staging/      what is being written
    <root>/<version>-<machine>/kernels/<key>/    0.1.9 to 0.1.11; also autotuner/, frontend/
    <root>/<key>/                                0.1.8 and earlier; also autotuner/<key>/, tmp/
    <base>/<anything>/<any of these>             a base directory, a root for each deployment
    <root>/tlcache/records/<2 hex>/<action key>.json
    <root>/tlcache/locks/<action key>.lock

Invariant: tlcache writes below `<root>/tlcache` only, and creates TileLang's own empty directories;
it never writes into an entry.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tlcache import switches
from tlcache.errors import CacheRootError
from tlcache.store import roots as roots_in_force

__all__ = [
    "EntryPlace",
    "Shelf",
    "cache_root",
    "configured_root",
    "default_root",
    "entries",
    "holding",
    "listed",
    "lock_path",
    "make_skeleton",
    "namespace",
    "places",
    "places_in",
]
__all__ += ["caching_disabled", "file_of", "is_file_name", "record_path", "records", "root_of"]
__all__ += ["roots", "undecided", "unwritable"]

# As text: compiling them costs a start that lists nothing 0.3 ms; `re` keeps what it compiled.
_KEY = r"[0-9a-f]{64}"
_OLD_NAMESPACE = r"(?P<version>\d[\w.]*)-(?P<machine>x86_64|aarch64|arm64)"
_VERSION = r"\d+\.\d[\w.]*"
_PLATFORM = r"[a-z][a-z0-9]*-\w+"
_OWN = "tlcache"
_DIGITS = 64
# What 0.1.8 and earlier keep beside their kernels; `tmp` is where versions up to 0.1.13 write
# first.
_FLAT = {"autotuner": "autotuner", "tmp": "staging"}
_KINDS = {
    "kernels": "kernel",
    "autotuner": "autotuner",
    "cuda-binaries": "cuda-binary",
    "frontend": "frontend",
}
# The things that are files in some version: with their keys in the first group.
_FILES = {
    "cuda-binary": r"([0-9a-f]{64})(?:\.(?:cubin|fatbin)(?:\.sha256)?)?",
    "frontend": r"([0-9a-f]{64})\.json",
}


def cache_root(override: str | os.PathLike[str] | None = None) -> Path:
    """The cache root in force, as TileLang sees it.

    Args:
        override: A directory named on the command line; it wins over the environment.

    Returns:
        `override`, else the first of $TLCACHE_ROOTS, else $TILELANG_CACHE_DIR, else `cache_dir` of
        tlcache.toml, else `~/.tilelang/cache`. As in TileLang, a `~` in the variable is not
        expanded.

    Raises:
        ConfigError: A tlcache.toml is not understood, whatever key it is.
    """
    if override is not None:
        return Path(override)
    from tlcache import config

    configured = any(table for _, _, table in config.sources())
    settings = config.load() if configured else None  # which checks all keys of the files
    if settings is None or roots_in_force.named():
        return Path(default_root())
    return settings.cache_dir


def default_root() -> str:
    """The root of the environment. A string: a process asks for it with each kernel that it
    resolves.
    """
    if os.environ.get(roots_in_force.VARIABLE) and (several := roots_in_force.named()):
        return several[0]
    named = os.environ.get("TILELANG_CACHE_DIR")
    if named:
        return named
    return configured_root() or os.path.expanduser("~/.tilelang/cache")


def configured_root() -> str | None:
    """The root that tlcache.toml names; it counts where TILELANG_CACHE_DIR is not set, and TileLang
    itself does not know of it.
    """
    from tlcache import config

    found = config.value("cache_dir")
    return os.fspath(found) if found is not None else None


def caching_disabled() -> bool:
    """Whether TileLang's cache is switched off by the environment, as TileLang reads it."""
    return switches.said("TILELANG_DISABLE_CACHE") is True


def namespace(version: str, platform: str) -> str:
    """The directory of one TileLang version and platform, relative to the root."""
    public, _, local = version.partition("+")
    return os.path.join(f"{public}_{local}" if local else public, platform)


def record_path(root: str | os.PathLike[str], action_key: str) -> str:
    """The record's path. A string: it is computed for each kernel that a process loads."""
    return os.path.join(root, _OWN, "records", action_key[:2], f"{action_key}.json")


def lock_path(root: str | os.PathLike[str], action_key: str) -> str:
    return os.path.join(root, _OWN, "locks", f"{action_key}.lock")


def records(root: str | os.PathLike[str]) -> Iterator[Path]:
    """The paths of all records under a root, sound or not."""
    yield from sorted((Path(root) / _OWN / "records").glob("[0-9a-f][0-9a-f]/*.json"))


class EntryPlace(NamedTuple):
    """One thing under a cache root, and what its path alone tells.

    Attributes:
        key: TileLang's key, 64 hexadecimal digits; the name of a thing that has none.
        location: Its directory, or its file.
        tilelang: The version that wrote it, or None where the layout does not say.
        platform: Like `linux-x86_64`, or None.
        kind: `kernel`, `cuda-binary`, `autotuner` (a result of TileLang's own tuner), `frontend`
            (0.1.11's index of kernels), `staging` (what a writer left behind, or is writing now)
            or `unknown`, which nothing but a listing may touch.
    """

    key: str
    location: str
    tilelang: str | None
    platform: str | None
    kind: str = "kernel"

    @property
    def path(self) -> Path:
        """The location as a path; made when asked for, since a listing has thousands."""
        return Path(self.location)


def entries(root: str | os.PathLike[str]) -> Iterator[EntryPlace]:
    """All kernel entries under a root, of any TileLang version, in the order of their paths."""
    return (place for place in places(root) if place.kind == "kernel")


def roots(base: str | os.PathLike[str]) -> list[str]:
    """The cache roots at a path: itself, and those one level below it, where a deployment keeps one
    for each version of its software.
    """
    base = os.fspath(base)
    return [base, *(path for name, path in _directories(base) if _is_nested(name, path))]


def root_of(base: str | os.PathLike[str], place: EntryPlace) -> str:
    """Which of the `roots` at a path a thing under it belongs to."""
    base = os.fspath(base)
    name, slash, _ = place.location[len(base) :].lstrip("/").partition("/")
    return os.path.join(base, name) if slash and not _is_tilelangs(name) else base


@functools.lru_cache(maxsize=1024)  # asked for each entry; all entries of a root are in a few
def _is_tilelangs(name: str) -> bool:
    """Whether a directory of a root is of TileLang's, and not a root itself."""
    return name in _FLAT or any(
        re.fullmatch(known, name) for known in (_KEY, _OLD_NAMESPACE, _VERSION)
    )


def places(base: str | os.PathLike[str]) -> Iterator[EntryPlace]:
    """Everything under a root and the roots below it, but for what is tlcache's own.

    In the order of their paths within one root. Links are never followed; they, and directories
    that cannot be listed, are unknown things.
    """
    for root in roots(base):
        yield from places_in(root, nested=root != os.fspath(base))


def places_in(root: str, *, nested: bool = False) -> Iterator[EntryPlace]:
    """The same for one of the `roots`; `nested` says that it is one below another."""
    return _places(Shelf(root, "nested" if nested else "root"))


def _places(shelf: Shelf) -> Iterator[EntryPlace]:
    found = listed(shelf.path)
    if found is None:
        if (closed := shelf.closed()) is not None:
            yield closed
        return
    for name, _, is_directory in found:
        item = shelf.item(name, is_directory)
        if isinstance(item, EntryPlace):
            yield item
        elif item is not None and item.level != "nested":
            yield from _places(item)


class Shelf(NamedTuple):
    """A directory that things lie in.

    Attributes:
        path: The directory.
        level: `root`; `nested`, a root below another; `version`; `namespace`, one version and
            platform; `staging`; or `keyed`, whose things have keys for names.
        tilelang: The version whose it is, or None where the layout does not say.
        platform: Like `linux-x86_64`, or None.
        kind: Of what lies on a keyed one, as in `EntryPlace`.
    """

    path: str
    level: str
    tilelang: str | None = None
    platform: str | None = None
    kind: str = "unknown"

    def item(self, name: str, is_directory: bool) -> EntryPlace | Shelf | None:
        """What something in the directory is: a thing, another shelf, or None where it is neither,
        as tlcache's own directory.
        """
        return _ITEMS[self.level](self, name, is_directory)

    def touched(self, name: str) -> tuple[str, ...]:
        """The names of what is another when a file in the directory is: a checksum is also a part
        of the cubin beside it.
        """
        if self.kind == "cuda-binary" and name.endswith(".sha256"):
            return name, name.removesuffix(".sha256")
        return (name,)

    def closed(self) -> EntryPlace | None:
        """What it is itself where it cannot be listed; None for a root."""
        if self.level in ("root", "nested"):
            return None
        name = os.path.basename(self.path)
        return EntryPlace(name, self.path, self.tilelang, self.platform, "unknown")

    def _at(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}"  # half of what `os.path.join` takes

    def _thing(self, name: str, kind: str, key: str | None = None) -> EntryPlace:
        return EntryPlace(key or name, self._at(name), self.tilelang, self.platform, kind)

    def _in_root(self, name: str, is_directory: bool) -> EntryPlace | Shelf | None:
        if name == _OWN and is_directory:
            return None
        if not is_directory:
            return self._thing(name, "unknown")
        if re.fullmatch(_KEY, name):
            return self._thing(name, "kernel")
        if name in _FLAT:
            return Shelf(self._at(name), "keyed", kind=_FLAT[name])
        if match := re.fullmatch(_OLD_NAMESPACE, name):
            machine = f"linux-{match['machine']}"
            return Shelf(self._at(name), "namespace", match["version"], machine)
        if re.fullmatch(_VERSION, name):
            return Shelf(self._at(name), "version", name)
        if self.level == "root" and _is_nested(name, self._at(name)):
            return Shelf(self._at(name), "nested")
        return self._thing(name, "unknown")

    def _in_version(self, name: str, is_directory: bool) -> EntryPlace | Shelf | None:
        """`<root>/<version>`: what all platforms share, and a namespace for each platform."""
        if is_directory and name == "cuda-binaries":
            return self._replace(path=self._at(name), level="keyed", kind="cuda-binary")
        if is_directory and name == ".staging":
            return self._replace(path=self._at(name), level="staging")
        if is_directory and re.fullmatch(_PLATFORM, name):
            return self._replace(path=self._at(name), level="namespace", platform=name)
        return self._thing(name, "unknown")

    def _in_namespace(self, name: str, is_directory: bool) -> EntryPlace | Shelf | None:
        """One version and platform: a directory for each kind of thing."""
        if is_directory and name in _KINDS:
            return self._replace(path=self._at(name), level="keyed", kind=_KINDS[name])
        if is_directory and name == ".staging":
            return self._replace(path=self._at(name), level="staging")
        return self._thing(name, "unknown")

    def _in_staging(self, name: str, is_directory: bool) -> EntryPlace | Shelf | None:
        if is_directory and name == "cuda-binaries":
            return self._replace(path=self._at(name), level="keyed", kind="staging")
        return self._thing(name, "staging")

    def _in_keyed(self, name: str, is_directory: bool) -> EntryPlace | Shelf | None:
        """Things that have keys for names, but for staging, where anything goes."""
        kind = self.kind
        if kind == "staging":
            return self._thing(name, kind)
        match = _matcher(kind)(name)
        if is_directory:
            sound = kind != "frontend" and len(name) == _DIGITS and match
            return self._thing(name, kind if sound else "unknown")
        if match is not None and kind in _FILES and len(name) > _DIGITS:
            return None if name.endswith(".sha256") else self._thing(name, kind, match[1])
        return self._thing(name, "unknown")


_ITEMS = {
    "root": Shelf._in_root,
    "nested": Shelf._in_root,
    "version": Shelf._in_version,
    "namespace": Shelf._in_namespace,
    "staging": Shelf._in_staging,
    "keyed": Shelf._in_keyed,
}


@functools.cache
def _matcher(kind: str) -> Callable[[str], re.Match[str] | None]:
    return re.compile(_FILES.get(kind, _KEY)).fullmatch


def holding(path: str) -> tuple[str, EntryPlace] | None:
    """Which thing of a cache a file is in, and the root of that cache, by its path alone.

    Args:
        path: Of a file directly in a kernel's directory, or in that of a result of TileLang's
            tuner, in any layout.

    Returns:
        The root and the thing; None where it is in neither.
    """
    above, _, _ = path.rpartition("/")
    place, _, key = above.rpartition("/")
    if not re.fullmatch(_KEY, key):
        return None
    parts = place.split("/")
    kind = _KINDS.get(parts[-1])
    if kind not in ("kernel", "autotuner"):
        return place, EntryPlace(key, above, None, None)
    if len(parts) > 3 and re.fullmatch(_PLATFORM, parts[-2]) and re.fullmatch(_VERSION, parts[-3]):
        return "/".join(parts[:-3]), EntryPlace(key, above, parts[-3], parts[-2], kind)
    if len(parts) > 2 and (match := re.fullmatch(_OLD_NAMESPACE, parts[-2])):
        platform = f"linux-{match['machine']}"
        return "/".join(parts[:-2]), EntryPlace(key, above, match["version"], platform, kind)
    return "/".join(parts[:-1]), EntryPlace(key, above, None, None, kind)


_FILE = r"(?a)[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}"
_THINGS = tuple(
    rf"(?a){above}(?P<key>{_KEY})"
    for above in (
        rf"(?P<version>{_VERSION})/(?P<platform>{_PLATFORM})/(?P<kind>kernels|autotuner)/",
        rf"(?P<version>{_VERSION})/(?P<kind>cuda-binaries)/",
        rf"{_OLD_NAMESPACE}/(?P<kind>kernels|autotuner)/",
        r"(?:(?P<kind>autotuner)/)?",
    )
)
_BINARY = rf"(?a)(?P<version>{_VERSION})/cuda-binaries/(?P<key>{_KEY})\.(?:cubin|fatbin)"


def file_of(path: str) -> tuple[EntryPlace, str] | None:
    """What a file in a root would belong to: a kernel, a tuner's result or a cuda-binary.

    Args:
        path: Of the file, below the root.

    Returns:
        The thing, its location below the root, and the file's name; None for whatever else.
    """
    above, _, name = path.rpartition("/")
    if (place := _thing(above)) is not None:
        return (place, name) if is_file_name(name) else None
    if match := re.fullmatch(_BINARY, location := path.removesuffix(".sha256")):
        return EntryPlace(match["key"], location, match["version"], None, "cuda-binary"), name
    return None


@functools.lru_cache(maxsize=1024)  # there are a few, again and again
def is_file_name(name: str) -> bool:
    """Whether a file of a thing may have a name; whatever TileLang writes has such a one."""
    return re.fullmatch(_FILE, name) is not None


@functools.lru_cache(maxsize=1024)  # the files of a thing are asked for one after the other
def _thing(location: str) -> EntryPlace | None:
    for pattern in _THINGS:
        if match := re.fullmatch(pattern, location):
            found = match.groupdict()
            machine = found.get("machine")
            platform = f"linux-{machine}" if machine else found.get("platform")
            kind = _KINDS[found["kind"] or "kernels"]
            return EntryPlace(found["key"], location, found.get("version"), platform, kind)
    return None


def undecided(path: str) -> list[str]:
    """The directories whose content decides whether a directory in a base is itself a root."""
    return [
        path,
        *(
            inside
            for name, inside in _directories(path)
            if re.fullmatch(_OLD_NAMESPACE, name) or re.fullmatch(_VERSION, name)
        ),
    ]


def _is_nested(name: str, path: str) -> bool:
    """Whether a directory in a root is itself a root: it has what only a root has."""
    if name == _OWN or name in _FLAT or name.startswith("."):
        return False
    if any(re.fullmatch(known, name) for known in (_KEY, _OLD_NAMESPACE, _VERSION)):
        return False
    for inner, inside in _directories(path):
        if re.fullmatch(_KEY, inner):
            return True
        if re.fullmatch(_OLD_NAMESPACE, inner) or re.fullmatch(_VERSION, inner):
            below = [name for name, _ in _directories(inside)]
            if any(name in _KINDS or re.fullmatch(_PLATFORM, name) for name in below):
                return True
    return False


def listed(path: str) -> list[tuple[str, str, bool]] | None:
    """What is in a directory: names, paths, and whether each is a directory itself; None where it
    cannot be listed.
    """
    try:
        with os.scandir(path) as found:
            items = [(item.name, item.path, item.is_dir(follow_symlinks=False)) for item in found]
    except FileNotFoundError:
        return []  # it has vanished
    except OSError:
        return None
    items.sort()
    return items


def _directories(path: str) -> list[tuple[str, str]]:
    found = listed(path) or ()
    return [(name, inside) for name, inside, is_directory in found if is_directory]


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
