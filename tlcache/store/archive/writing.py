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
from tlcache.spec import RECORD_SCHEMA, workload_text
from tlcache.store import closures, layout, record, schedules
from tlcache.store.archive import tar, whole
from tlcache.store.archive.choosing import Choice
from tlcache.store.archive.index import MOST_FILE, MOST_THING, NAME, Index, Member, Recorded
from tlcache.store.layout import EntryPlace

__all__ = ["LEVEL", "Written", "write"]

LEVEL = 3
_COPIED = 1024 * 1024
_CHUNK = 96 * 1024
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


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
        front = tar.header(NAME, len(data)) + data + tar.padding(len(data))
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
        self._start = len(os.path.join(choice.root, ""))
        self._files: dict[str, Member] = {}
        self._records: dict[str, Recorded] = {}
        self._specs: list[Any] = []
        self._digests: list[tuple[str, str]] = []
        self._versions: Counter[str] = Counter()
        self._out = _compressor().stream_writer(body, closefd=False)

    def things(self, progress: Callable[[int], None]) -> None:
        for place in self._choice.places:
            below = place._replace(location=place.location[self._start :])
            why = self._thing(below)
            if why is not None:
                self.left.append((below.location, why))
            elif place.kind == "kernel":
                self.kernels += 1
                self._versions[place.tilelang or "0.1.8 or earlier"] += 1
            progress(1)

    def _thing(self, place: EntryPlace) -> str | None:
        """Add a thing; or say why not."""
        data = {}
        try:
            for name, path in self._files_of(place):
                data[name] = _read(path)
                if len(data[name]) > MOST_FILE or sum(map(len, data.values())) > MOST_THING:
                    return "has a file that is larger than any of TileLang's"
        except OSError as error:
            return f"cannot be read: {(error.strerror or str(error)).lower()}"
        members = {name: _member(content) for name, content in data.items()}
        if (fault := whole.fault(place, members, data)) is not None:
            return fault
        above = place.location
        if above.endswith((".cubin", ".fatbin")):
            above = os.path.dirname(above)
        for name, content in data.items():
            self._add(f"{above}/{name}", content, members[name])
        return None

    def _files_of(self, place: EntryPlace) -> Iterator[tuple[str, str]]:
        """The names and paths of a thing's files. Links and what lies deeper do not count."""
        path = f"{self._root}/{place.location}"
        try:
            with os.scandir(path) as items:
                names = sorted(i.name for i in items if i.is_file(follow_symlinks=False))
            above = path
        except NotADirectoryError:
            above, _, first = path.rpartition("/")
            names = [first]
            if os.path.isfile(f"{path}.sha256"):
                names.append(f"{first}.sha256")
        return ((name, f"{above}/{name}") for name in names if layout.is_file_name(name))

    def _add(self, path: str, content: bytes, member: Member) -> None:
        self._out.write(tar.header(path, member.size) + content + tar.padding(member.size))
        self._files[path] = member

    # --- what is tlcache's own ---

    def own(self) -> None:
        """Add the records of what was added, and the schedules and closures that they are by."""
        filed: list[tuple[str, bytes]] = []
        for path in _below(os.path.join(self._root, "tlcache", "records")):
            key = os.path.basename(path).removesuffix(".json")
            if self._choice.keys is None or key in self._choice.keys:
                filed += self._record(path)
        digests = set(self._digests)
        filed += self._belonging("closures", lambda *file: closures.told(*file) in digests)
        filed += self._belonging("schedules", self._is_recorded)
        for below, data in sorted(filed):
            self._add(below, data, _member(data))

    def _record(self, path: str) -> Iterator[tuple[str, bytes]]:
        """A record's file, if it is of a kernel that was added, with the library that it tells of.

        Its checksum says that it is as tlcache wrote it, so its values are not read more closely:
        that would take a third of an export's time.
        """
        try:
            data = _read(path)
            values = record.contents(data)
            spec, library, entry = (
                values["spec"],
                values["library"],
                os.path.normpath(values["entry"]),
            )
            key, target = values["action_key"], spec["target"]
            told = Member(library["size"], library["sha256"])
            title = (spec["kernel"].rpartition(":")[2], workload_text(spec["workload"]), target)
            made = Recorded(
                " ".join(filter(None, title)),
                *(target, entry, values["created"], values["compile_seconds"]),
            )
            digest, kernel = values["source_digest"], spec["kernel"]
            current = values["schema"] == RECORD_SCHEMA
        except (OSError, *_DAMAGE):
            return  # `verify` says what is wrong with it
        same = self._files.get(f"{entry}/{library['name']}") == told
        if current and same and os.path.basename(path) == f"{key}.json":
            self._records[key] = made
            self._specs.append(spec)
            self._digests.append((kernel, digest))
            yield path[self._start :], data

    def _is_recorded(self, name: str, data: bytes) -> bool:
        """Whether a schedule is of a kernel whose record was added."""
        spec = schedules.spec_of(name, data)
        return spec is not None and spec.to_json() in self._specs

    def _belonging(
        self, folder: str, belongs: Callable[[str, bytes], bool]
    ) -> Iterator[tuple[str, bytes]]:
        for path in _below(os.path.join(self._root, "tlcache", folder)):
            try:
                data = _read(path)
            except OSError:
                continue
            if belongs(os.path.basename(path), data):
                yield path[self._start :], data

    def index(self) -> Index:
        return Index(self._files, dict(sorted(self._records.items())), _builder(), self._coverage())

    def _coverage(self) -> dict[str, Any]:
        targets = Counter(each.target for each in self._records.values())
        factories = Counter(kernel for kernel, _ in self._digests)
        told: dict[str, Any] = {
            "kernels": self.kernels,
            "records": len(self._records),
            "tilelang": dict(sorted(self._versions.items())),
            "targets": dict(sorted(targets.items())),
            "factories": dict(sorted(factories.items())),
        }
        return told if self._choice.asked is None else {**told, "asked": self._choice.asked}

    def close(self) -> None:
        self._out.write(tar.END)
        self._out.close()


def _read(path: str) -> bytes:
    """A file's bytes: `files.read`, in three calls for a small file, as there are thousands.

    Raises:
        OSError: It cannot be read, or is a link.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_NOATIME)
    except PermissionError:
        descriptor = os.open(path, flags)
    try:
        data = os.read(descriptor, _CHUNK)
        if len(data) < _CHUNK:
            return data
        parts, size = [data], len(data)
        while size <= MOST_FILE and (data := os.read(descriptor, _COPIED)):
            parts.append(data)
            size += len(data)
        return b"".join(parts)
    finally:
        os.close(descriptor)


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
