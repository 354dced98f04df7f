"""Which entries a command means: filters, one entry by its key, and duplicates.

Invariant: an entry is selected only by what is known of it. Where a filter asks for a fact that an
entry does not tell, the entry is not selected.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from tlcache import targets
from tlcache.errors import UsageError
from tlcache.store import files
from tlcache.store.entry import Entry

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

__all__ = ["Filter", "age", "bytes_of", "called", "code_of", "duplicates", "toolkit_of"]
__all__ += ["versions"]

# As text: a listing without filters need not compile them.
_AGE = r"(?a)(\d+(?:\.\d+)?)\s*(s|min|h|d|w)"
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_SIZE = r"(?ai)(\d+(?:\.\d+)?)\s*(|B|K|M|G|T|KiB|MiB|GiB|TiB|KB|MB|GB|TB)"
_FACTORS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
# The releases whose layout does not tell the version; see `layout`.
_FLAT = [f"0.1.{patch}" for patch in (*range(6), 7, 8)]
_FLAT += ["0.1.2.post1", "0.1.6.post1", "0.1.6.post2", "0.1.7.post1", "0.1.7.post2", "0.1.7.post3"]
_MOST = 64 * 1024 * 1024


def age(text: str) -> timedelta:
    """A time span like `30d`, `12h` or `90min`.

    Raises:
        UsageError: It is none.
    """
    match = re.fullmatch(_AGE, text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no time span", hint="like `30d`, `12h`, `90min` or `2w`")
    try:
        return timedelta(seconds=float(match[1]) * _SECONDS[match[2]])
    except OverflowError as error:
        raise UsageError(f"{text!r} is longer than there are years", hint="like `30d`") from error


def bytes_of(text: str) -> int:
    """A size like `5GiB`, `200M` or `4096`; units are powers of 1024.

    Raises:
        UsageError: It is none.
    """
    match = re.fullmatch(_SIZE, text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no size", hint="like `5GiB`, `200MiB` or `4096`")
    try:
        return int(float(match[1]) * _FACTORS[match[2][:1].lower()])
    except OverflowError as error:
        raise UsageError(f"{text[:40]!r} is larger than any disk", hint="like `5GiB`") from error


@functools.lru_cache(maxsize=64)
def versions(text: str) -> SpecifierSet:
    """TileLang versions like `<0.1.14` or `==0.1.15`; a bare version means that one.

    Raises:
        UsageError: It is no version specifier.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    spelled = f"=={text}" if text[:1].isdigit() else text
    try:
        return SpecifierSet(spelled, prereleases=True)
    except InvalidSpecifier as error:
        raise UsageError(
            f"{text!r} is no version or range of versions", hint="like `0.1.15` or `<0.1.14`"
        ) from error


@dataclass(frozen=True)
class Filter:
    """What an entry must be. A field that is empty asks for nothing; of the values in one field any
    will do, and all fields must hold.

    Attributes:
        targets: Spellings as `tlcache.targets.matches` has them.
        ops: Operators' names; only an entry with a record has one.
        kernels: Patterns like `rms_*`.
        tilelang: Versions, see `versions`. An entry whose layout tells no version was written by
            0.1.8 or earlier, and is selected where that is enough to know.
        toolkit: Builds of nvcc, or how they begin, like `13.0`.
        older_than: Written at least so long ago.
        unused_for: Neither read nor written for so long.
        larger_than: Bytes at least.
        no_record: Only kernels without a record.
        keys: Keys, or how they begin.
    """

    targets: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    tilelang: str | None = None
    toolkit: str | None = None
    older_than: timedelta | None = None
    unused_for: timedelta | None = None
    larger_than: int | None = None
    no_record: bool = False
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Reject spellings that mean nothing, before anything is read.

        Raises:
            TargetError, UsageError: Which one, and what is known.
        """
        for spelling in self.targets:
            targets.parse(spelling)
        if self.tilelang is not None:
            versions(self.tilelang)
        if "" in self.keys:
            raise UsageError("an empty key names no kernel", hint="`tlcache ls` lists the keys")

    def __bool__(self) -> bool:
        """Whether it asks for anything at all."""
        return any(getattr(self, field.name) != field.default for field in fields(self))

    def other_targets(self, one: Entry) -> list[str]:
        """The targets of a fat binary that the filter does not ask for, where it asks for some."""
        return [
            name for name in one.targets or () if not _any(self.targets, (name,), targets.matches)
        ]

    def matches(self, one: Entry, now: datetime | None = None) -> bool:
        """Whether an entry is selected."""
        now = now or datetime.now(timezone.utc)
        toolkit = toolkit_of(one) if self.toolkit is not None else None
        return (
            _any(self.targets, one.targets or (), targets.matches)
            and (not self.ops or (one.record is not None and one.record.name in self.ops))
            and _any(self.kernels, (one.kernel,) if one.kernel else (), _like)
            and (self.tilelang is None or _version_in(self.tilelang, one))
            and (
                self.toolkit is None
                or (toolkit is not None and f"{toolkit}.".startswith(f"{self.toolkit}."))
            )
            and _since(self.older_than, one.created, now)
            and _since(self.unused_for, _touched(one), now)
            and (self.larger_than is None or one.bytes >= self.larger_than)
            and not (self.no_record and (one.record is not None or one.place.kind != "kernel"))
            and _any(self.keys, (one.place.key,), _begins)
        )

    def select(self, found: Iterable[Entry]) -> Iterator[Entry]:
        """The entries that are selected."""
        now = datetime.now(timezone.utc)
        return (one for one in found if self.matches(one, now))


def _touched(one: Entry) -> datetime | None:
    """When an entry was last used, or came: what was imported is as old as its compile, and new."""
    return max(filter(None, (one.last_used, one.created)), default=None)


def _any(wanted: tuple[str, ...], have: Iterable[str], fits: Callable[[str, str], bool]) -> bool:
    return not wanted or any(fits(pattern, value) for pattern in wanted for value in have)


def _like(pattern: str, name: str) -> bool:
    import fnmatch

    return fnmatch.fnmatchcase(name, pattern)


def _begins(start: str, key: str) -> bool:
    return key.startswith(start.lower())


def _version_in(wanted: str, one: Entry) -> bool:
    from packaging.version import InvalidVersion

    if one.place.tilelang is None:
        flat = one.place.kind in ("kernel", "autotuner")
        return flat and all(map(versions(wanted).contains, _FLAT))
    try:
        return versions(wanted).contains(one.place.tilelang.replace("_", "+", 1))
    except InvalidVersion:
        return False


def _since(span: timedelta | None, when: datetime | None, now: datetime) -> bool:
    return span is None or (when is not None and now - when >= span)


def toolkit_of(one: Entry) -> str | None:
    """The build of nvcc that made an entry's device code; a record knows it where the code does
    not tell.
    """
    if one.record is not None and one.record.is_cuda:
        return one.record.nvcc or one.facts.toolkit
    return one.facts.toolkit


def called(found: Iterable[Entry], name: str, root: str | os.PathLike[str]) -> Entry:
    """The one entry that a person means.

    Args:
        found: What there is.
        name: Its key, its record's action key, or a prefix that only it has; or its path, from the
            root or from here.
        root: What was scanned.

    Raises:
        UsageError: There is none, or more than one.
    """
    named = [one for one in found if one.place.kind in _NAMED]
    place, _, start = name.strip().rstrip(os.sep).rpartition(os.sep)
    fitting = [one for one in named if start and _is_called(one, start.lower())]
    if place:
        places = {os.path.abspath(place), os.path.abspath(os.path.join(root, place))}
        fitting = [
            one for one in fitting if os.path.abspath(os.path.dirname(one.place.location)) in places
        ]
    if not fitting:
        within = f" in {place}" if place else ""
        raise UsageError(
            f"no entry in {root} has a key that begins with {start!r}{within}",
            hint="`tlcache ls --all` lists the keys",
        )
    if len(fitting) == 1:
        return fitting[0]
    keys = {one.place.key for one in fitting}
    told = f"{len(fitting)} entries have keys that begin with {name!r}"
    if len(keys) < len(fitting):
        where = ", ".join(_short(one, root) for one in fitting[:5])
        raise UsageError(f"{told}: {where}", hint="give its directory, too, as it stands here")
    length = next(n for n in range(16, 65) if len({key[:n] for key in keys}) == len(keys))
    shown = ", ".join(one.place.key[:length] for one in fitting[:5])
    raise UsageError(f"{told}: {shown}", hint="give more of the key")


_NAMED = ("kernel", "cuda-binary", "autotuner", "frontend")


def _short(one: Entry, root: str | os.PathLike[str]) -> str:
    directory = os.path.dirname(os.path.relpath(one.place.location, root))
    return os.path.join(directory, one.place.key[:12])


def _is_called(one: Entry, start: str) -> bool:
    if one.place.key.startswith(start):
        return True
    return one.record is not None and one.record.action_key.startswith(start)


def code_of(one: Entry) -> str | None:
    """The sha256 of an entry's machine code, see `machine_code`; its library is read for it."""
    from tlcache.store import machine_code

    if one.library is None:
        return None
    alone = one.place.location.endswith(f"/{one.library}")
    path = one.place.location if alone else f"{one.place.location}/{one.library}"
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _MOST:
            return None
        return machine_code.digest(one.library, files.read(path, unseen=True))
    except (OSError, ValueError):
        return None


def duplicates(found: Iterable[Entry]) -> list[list[Entry]]:
    """Groups of two or more kernels that are the same but for their keys: in one directory, and so
    of one root, TileLang and platform; for one target, with one name, the same parameters and the
    same machine code on both sides.

    The code is read only of kernels that have all the rest in common with another. A kernel of
    which one of these facts is not known has no duplicates. Newest first in a group.
    """
    alike: dict[object, list[Entry]] = {}
    for one in found:
        facts = one.facts
        if one.place.kind == "kernel" and facts.params is not None and facts.targets is not None:
            directory = os.path.dirname(one.place.location)
            # The files' facts, not the record's: one of the two may have none.
            known = (directory, one.library, facts.kernel, *facts[1:4], facts.kernels)
            alike.setdefault(known, []).append(one)
    groups: dict[object, list[Entry]] = {}
    for shared, some in alike.items():
        for one in some if len(some) > 1 else ():
            if (code := code_of(one)) is not None:
                groups.setdefault((shared, code, _host_source(one)), []).append(one)
    return [
        sorted(group, key=lambda one: -(one.created.timestamp() if one.created else 0))
        for group in groups.values()
        if len(group) > 1
    ]


def _host_source(one: Entry) -> bytes | None:
    """What launches the kernel: the same device code with another grid is another kernel."""
    from tlcache.store import sources

    told = sources.read(one, "host")
    return told.data if told is not None else None
