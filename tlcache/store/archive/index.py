"""The index of an archive: every file with its size and sha256, the records, who built it, and what
it covers.

Invariant: an index that was read names only files that `layout` knows, below the root, each of a
bounded size; all of a record's entry is among them. So what follows in the archive needs only be
compared with it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tlcache.errors import ArchiveError
from tlcache.store import layout
from tlcache.store.archive.tar import LONGEST
from tlcache.store.layout import EntryPlace
from tlcache.store.opened import shown

__all__ = [
    "MOST_FILE",
    "MOST_INDEX",
    "MOST_THING",
    "NAME",
    "SCHEMA",
    "Index",
    "Member",
    "Recorded",
    "Thing",
]

NAME = "index.json"
SCHEMA = 2
"""Of an index that names calls. Others are of schema 1, which older tlcache reads, too."""
MOST_INDEX = 256 * 1024 * 1024
MOST_FILE = 64 * 1024 * 1024
_KIND = "tlcache.archive"
_MOST_FILES = 2_000_000
MOST_THING = 2 * MOST_FILE
_SHA256 = re.compile("[0-9a-f]{64}")
_RECORD = re.compile(r"tlcache/records/([0-9a-f]{2})/((?:\1)[0-9a-f]{62})\.json")
_FILED = (
    _RECORD,
    re.compile(r"tlcache/schedules/([0-9a-f]{2})/(?:\1)[0-9a-f]{62}\.json"),
    re.compile(r"tlcache/closures/[0-9a-f]{16}-[0-9a-f]{16}\.json"),
)
_CALL = re.compile(r"tlcache/(?:calls|texts)/([0-9a-f]{2})/(?:\1)[0-9a-f]{62}\.json")
_OWN = {1: _FILED, SCHEMA: (*_FILED, _CALL)}
_NEWER = "update tlcache, or export with this version"


class Member(NamedTuple):
    """A file of an archive."""

    size: int
    sha256: str


class Recorded(NamedTuple):
    """A record of an archive, in short.

    Attributes:
        title: The spec in short.
        target: Like `sm_90a`.
        entry: The kernel that it points at, below the root.
        created: When the kernel was compiled: ISO 8601, UTC.
        compile_seconds: What that took.
    """

    title: str
    target: str
    entry: str
    created: str
    compile_seconds: float


@dataclass(frozen=True)
class Thing:
    """What is published as one: a directory of files, or a cuda-binary that is a file or two.

    Attributes:
        place: What it is; its location is below the root.
        files: Its files by their paths below the root.
    """

    place: EntryPlace
    files: tuple[str, ...]

    @property
    def is_directory(self) -> bool:
        return self.place.location not in self.files


@dataclass(frozen=True)
class Index:
    """What an archive says of itself.

    Attributes:
        files: By their paths below the root, in the order in which they follow.
        records: By their action keys.
        builder: The versions of who wrote it.
        coverage: Counts by target, operator and TileLang, and what a shapes file asked for.
    """

    files: Mapping[str, Member]
    records: Mapping[str, Recorded]
    builder: Mapping[str, Any]
    coverage: Mapping[str, Any]

    @property
    def unpacked(self) -> int:
        """The bytes of all files."""
        return sum(member.size for member in self.files.values())

    @functools.cached_property
    def things(self) -> Mapping[str, Thing]:
        """What there is of TileLang's, by location."""
        found: dict[str, tuple[EntryPlace, list[str]]] = {}
        for path in self.files:
            if belongs := layout.file_of(path):
                found.setdefault(belongs[0].location, (belongs[0], []))[1].append(path)
        return {name: Thing(place, tuple(files)) for name, (place, files) in found.items()}

    @functools.cached_property
    def own(self) -> tuple[str, ...]:
        """The paths of tlcache's files: records, schedules, closures, calls and texts."""
        return tuple(path for path in self.files if path.startswith("tlcache/"))

    def encode(self) -> bytes:
        """As it stands in the archive; `decode` reads it back."""
        document = {
            "schema": SCHEMA if any(map(_CALL.fullmatch, self.own)) else 1,
            "kind": _KIND,
            "builder": self.builder,
            "coverage": self.coverage,
            "records": {key: recorded._asdict() for key, recorded in self.records.items()},
            "files": {
                path: {"size": size, "sha256": sha256}
                for path, (size, sha256) in self.files.items()
            },
        }
        return json.dumps(document, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Index:
        """Read an index.

        Raises:
            ArchiveError: It is none, is of another schema, or names what no archive may hold.
        """
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ArchiveError(f"its index is not JSON: {shown(str(error))}") from None
        if not isinstance(document, dict) or document.get("kind") != _KIND:
            raise ArchiveError("its index is not one of an archive of tlcache")
        if type(schema := document.get("schema")) is not int or schema not in _OWN:
            told, known = shown(repr(schema)), " or ".join(map(str, _OWN))
            raise ArchiveError(f"its index is of schema {told}, not {known}", hint=_NEWER)
        for name in ("builder", "coverage", "records", "files"):
            if not isinstance(document.get(name), dict):
                raise ArchiveError(f"its index does not tell its {name}")
        if len(document["files"]) > _MOST_FILES:
            raise ArchiveError(f"its index names {len(document['files']):,} files")
        own = _OWN[schema]
        members = {path: _member(path, told, own) for path, told in document["files"].items()}
        records = {key: _recorded(key, told) for key, told in document["records"].items()}
        index = cls(members, records, document["builder"], document["coverage"])
        index._joined()
        index._ordered()
        return index

    def _joined(self) -> None:
        """Check that records, their entries and their files are all there."""
        filed = {match[2] for path in self.files if (match := _RECORD.fullmatch(path))}
        if different := filed ^ set(self.records):
            raise ArchiveError(
                f"its index lists the record {shown(min(different))} in one place only"
            )
        things = self.things
        for key, recorded in self.records.items():
            thing = things.get(recorded.entry)
            if thing is None or thing.place.kind != "kernel":
                entry = shown(recorded.entry, LONGEST)
                raise ArchiveError(
                    f"its record {key[:12]} points at {entry}, which it does not hold"
                )

    def _ordered(self) -> None:
        """Check that the files of a thing come together, and before tlcache's: so one thing at a
        time has to be held in memory.
        """
        together = [path for thing in self.things.values() for path in thing.files]
        for path, expected in zip(self.files, [*together, *self.own], strict=True):
            if path != expected:
                raise ArchiveError(f"its index names {path} before {expected}, which belongs there")
        for location, thing in self.things.items():
            if sum(self.files[path].size for path in thing.files) > MOST_THING:
                raise ArchiveError(f"{location} is larger than anything of TileLang's")


def _member(path: str, told: Any, own: Iterable[re.Pattern[str]]) -> Member:
    if layout.file_of(path) is None and not any(each.fullmatch(path) for each in own):
        raise ArchiveError(f"its index names {shown(path, LONGEST)}, which is {_stranger(path)}")
    size, sha256 = (
        (told.get("size"), told.get("sha256")) if isinstance(told, dict) else (None, None)
    )
    if type(size) is not int or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ArchiveError(f"its index does not tell the size and sha256 of {shown(path, LONGEST)}")
    if not 0 <= size <= MOST_FILE:
        raise ArchiveError(f"its index says that {shown(path, LONGEST)} has {size:,} bytes")
    return Member(size, sha256)


def _stranger(path: str) -> str:
    """Why a path is no member of an archive."""
    if path.startswith("/"):
        return "an absolute path"
    if ".." in path.split("/"):
        return "not below the root"
    return "no file of a cache root that an archive may hold"


def _recorded(key: str, told: Any) -> Recorded:
    try:
        made = Recorded(**told)
    except TypeError:
        raise ArchiveError(f"its index does not describe the record {shown(key)}") from None
    seconds = made.compile_seconds
    texts = all(isinstance(value, str) for value in made[:4])
    if not texts or type(seconds) not in (int, float) or not 0 <= seconds < 1e9:
        raise ArchiveError(f"its index does not describe the record {shown(key)}")
    return made
