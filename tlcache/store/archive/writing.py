"""A choice written as an archive.

Invariant: what is written is whole by its own checksums, and the bytes depend on nothing but the
files and the version of zstandard: members in order, no times, no owners, a pinned level, one
thread. What is not whole, or changes meanwhile, is left out and said.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from tlcache import __version__, fingerprint
from tlcache.errors import RuntimeLibraryError
from tlcache.store import closures, files, layout, record, schedules
from tlcache.store.archive import tar, whole
from tlcache.store.archive.choosing import Choice
from tlcache.store.archive.index import MOST_FILE, NAME, Index, Member, Recorded
from tlcache.store.layout import EntryPlace
from tlcache.store.record import Record

__all__ = ["LEVEL", "Written", "write"]

LEVEL = 3
_COPIED = 1024 * 1024


@dataclass(frozen=True)
class Written:
    """What came of an export.

    Attributes:
        index: What the archive holds.
        kernels: How many of its things are kernels.
        size: Its bytes.
        sha256: Of the whole.
        left: What was chosen and is not in it, relative to the root, and why.
    """

    index: Index
    kernels: int
    size: int
    sha256: str
    left: tuple[tuple[str, str], ...]


def write(
    choice: Choice, file: IO[bytes], *, progress: Callable[[int], None] | None = None
) -> Written:
    """Write an archive.

    Args:
        choice: What to write.
        file: Where to.
        progress: Called with the number of things that were read since the last call.

    Raises:
        OSError: It cannot be written, or there is no room for a copy beside it.
    """
    directory = (
        os.path.dirname(name) if isinstance(name := getattr(file, "name", None), str) else None
    )
    with tempfile.TemporaryFile(dir=directory or None) as body:
        writing = _Writing(choice, body)
        writing.things(progress or (lambda _: None))
        writing.own()
        index = writing.index()
        writing.close()
        body.seek(0)
        digest, size = hashlib.sha256(), 0
        data = index.encode()
        front = tar.header(NAME, len(data)) + data + bytes(tar.padding(len(data)))
        chunk = _compressor().compress(front)
        while chunk:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            chunk = body.read(_COPIED)
    file.flush()
    return Written(index, writing.kernels, size, digest.hexdigest(), tuple(writing.left))


def _compressor() -> Any:
    import zstandard

    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, threads=0)


class _Writing:
    """The members after the index, as they are read; the index is of them."""

    def __init__(self, choice: Choice, body: IO[bytes]) -> None:
        self.left: list[tuple[str, str]] = []
        self.kernels = 0
        self._choice = choice
        self._root = choice.root
        self._files: dict[str, Member] = {}
        self._records: dict[str, Record] = {}
        self._versions: Counter[str] = Counter()
        self._out = _compressor().stream_writer(body, closefd=False)

    def things(self, progress: Callable[[int], None]) -> None:
        start = len(os.path.join(self._root, ""))
        for place in self._choice.places:
            below = place._replace(location=place.location[start:])
            why = self._thing(below)
            if why is not None:
                self.left.append((below.location, why))
            elif place.kind == "kernel":
                self.kernels += 1
                self._versions[place.tilelang or "0.1.8 or earlier"] += 1
            progress(1)

    def _thing(self, place: EntryPlace) -> str | None:
        """Add a thing; or say why not."""
        try:
            paths = list(self._paths(place))
            data = {}
            for path in paths:
                content = files.read(os.path.join(self._root, path), unseen=True)
                if len(content) > MOST_FILE:
                    return "has a file that is larger than any of TileLang's"
                data[path] = content
        except OSError as error:
            return f"cannot be read: {(error.strerror or str(error)).lower()}"
        members = {path: _member(content) for path, content in data.items()}
        fault = whole.fault(
            place,
            {os.path.basename(path): member for path, member in members.items()},
            {os.path.basename(path): content for path, content in data.items()},
        )
        if fault is None:
            for path, content in data.items():
                self._add(path, content, members[path])
        return fault

    def _paths(self, place: EntryPlace) -> Iterator[str]:
        """The paths of a thing's files, below the root. Links and what lies deeper do not count."""
        path = os.path.join(self._root, place.location)
        if os.path.isdir(path):
            with os.scandir(path) as items:
                names = sorted(i.name for i in items if i.is_file(follow_symlinks=False))
            found = [f"{place.location}/{name}" for name in names]
        else:
            found = [place.location, f"{place.location}.sha256"]
            found = [each for each in found if os.path.isfile(os.path.join(self._root, each))]
        return (each for each in found if layout.file_of(each) is not None)

    def _add(self, path: str, content: bytes, member: Member) -> None:
        header = tar.header(path, member.size)
        self._out.write(b"".join((header, content, bytes(tar.padding(member.size)))))
        self._files[path] = member

    # --- what is tlcache's own ---

    def own(self) -> None:
        """Add the records of what was added, and the schedules and closures that they are by."""
        filed: list[tuple[str, bytes]] = []
        for path in layout.records(self._root):
            if self._choice.keys is None or path.stem in self._choice.keys:
                filed += self._record(os.fspath(path))
        specs = {each.spec for each in self._records.values()}
        digests = {(each.spec.kernel, each.source_digest) for each in self._records.values()}
        filed += self._belonging("closures", lambda *file: closures.told(*file) in digests)
        filed += self._belonging("schedules", lambda *file: schedules.spec_of(*file) in specs)
        for below, data in sorted(filed):
            self._add(below, data, _member(data))

    def _record(self, path: str) -> Iterator[tuple[str, bytes]]:
        try:
            data = files.read(path, unseen=True)
            found = record.decode(data)
        except (OSError, ValueError):
            return  # `verify` says what is wrong with it
        library = self._files.get(os.path.normpath(f"{found.entry}/{found.library.name}"))
        told = Member(found.library.size, found.library.sha256)
        if library == told and os.path.basename(path) == f"{found.action_key}.json":
            self._records[found.action_key] = found
            yield os.path.relpath(path, self._root), data

    def _belonging(
        self, folder: str, belongs: Callable[[str, bytes], bool]
    ) -> Iterator[tuple[str, bytes]]:
        for path in _below(os.path.join(self._root, "tlcache", folder)):
            try:
                data = files.read(path, unseen=True)
            except OSError:
                continue
            if belongs(os.path.basename(path), data):
                yield os.path.relpath(path, self._root), data

    def index(self) -> Index:
        records = {
            key: Recorded(
                found.spec.title,
                found.spec.target.name,
                os.path.normpath(found.entry),
                found.created,
                found.compile_seconds,
            )
            for key, found in sorted(self._records.items())
        }
        return Index(self._files, records, _builder(), self._coverage())

    def _coverage(self) -> dict[str, Any]:
        targets = Counter(found.spec.target.name for found in self._records.values())
        kernels = Counter(found.spec.kernel for found in self._records.values())
        told: dict[str, Any] = {
            "kernels": self.kernels,
            "records": len(self._records),
            "tilelang": dict(sorted(self._versions.items())),
            "targets": dict(sorted(targets.items())),
            "factories": dict(sorted(kernels.items())),
        }
        return told if self._choice.asked is None else {**told, "asked": self._choice.asked}

    def close(self) -> None:
        self._out.write(tar.END)
        self._out.close()


def _member(content: bytes) -> Member:
    return Member(len(content), hashlib.sha256(content).hexdigest())


def _below(top: str) -> list[str]:
    """The JSON files in a directory of tlcache's, and one level deeper, in order."""
    found = []
    for place, directories, names in os.walk(top):
        if place != top:
            directories.clear()
        found += [os.path.join(place, name) for name in names if name.endswith(".json")]
    return sorted(found)


def _builder() -> dict[str, Any]:
    """The versions of who writes it; None where something is not installed."""
    told: dict[str, Any] = {"tlcache": __version__, "platform": fingerprint.platform_name()}
    for name, ask in (
        ("tilelang", fingerprint.tilelang_version),
        ("tvm_ffi", fingerprint.tvm_ffi_version),
    ):
        try:
            told[name] = ask()
        except RuntimeLibraryError:
            told[name] = None
    return {**told, "glibc": fingerprint.glibc_version()}
