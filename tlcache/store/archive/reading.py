"""An archive read: every byte checked, and unpacked into staging.

Invariant: a file is written only below the staging directory, by a path that the index names and
`layout` knows, and no byte more than the index says. What an archive says of itself is bounded
before it is believed: the index, each file, all of them, the memory for unpacking, and how much
more it is than the archive.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from tlcache.errors import ArchiveError
from tlcache.store.archive import admitting, tar, whole
from tlcache.store.archive.index import MOST_INDEX, NAME, Index, Member, Thing
from tlcache.store.archive.staging import Writing
from tlcache.store.archive.tar import LONGEST
from tlcache.store.calls import Answer, Warmed
from tlcache.store.opened import shown
from tlcache.store.record import Record

__all__ = ["FREE", "RATIO", "Staged", "read_index", "unpack"]

FREE = 1024**3
RATIO = 200
"""Unpacked, an archive may have FREE bytes, or RATIO times its own size, whichever is more."""
_WINDOW = 8 * 1024 * 1024
_CHUNK = 1024 * 1024


@dataclass
class Staged:
    """An archive that has been checked.

    Attributes:
        url: Where it came from.
        directory: Under which its files lie by the paths that they are to have in the root.
        index: What it holds.
        present: Locations of things that were in the root already, and are not staged.
        records: Its records by action keys.
        calls: The calls that mean one of its kernels, by their keys.
        others: What else there is of tlcache's files, by path: `schedule`, `closure`, `style` (how
            a function is called) or `text` (its analysis).
        sha256: Of the archive.
        size: Its bytes.
        signer: Who signed it; None where nobody was asked for.
        left: What is not to be published, and why.
    """

    url: str
    directory: str
    index: Index
    sha256: str
    size: int
    present: set[str] = field(default_factory=set)
    records: dict[str, Record] = field(default_factory=dict)
    calls: dict[str, Answer | Warmed] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    signer: str | None = None
    left: dict[str, str] = field(default_factory=dict)


def unpack(
    url: str,
    file: IO[bytes],
    directory: str,
    root: str,
    *,
    vet: Callable[[Index], None] = lambda index: None,
    progress: Callable[[int], None] = lambda count: None,
) -> Staged:
    """Check an archive whole, and stage what the root does not have.

    Args:
        url: What it is called in errors.
        file: The archive.
        directory: An empty directory for its files.
        root: The cache root; only looked at.
        vet: Raises for an index that is not to be taken.
        progress: Called with the number of bytes that were unpacked since the last call.

    Raises:
        ArchiveError: What is wrong with it.
        OSError: It cannot be read, or the staging not be written.
    """
    reading = _Reading(file)
    try:
        index = reading.index()
        vet(index)
        staged = Staged(url, directory, index, "", 0)
        lies = functools.lru_cache(maxsize=None)(os.path.isdir)
        for location in index.things:
            path = os.path.join(root, location)
            if lies(os.path.dirname(path)) and os.path.lexists(path):
                staged.present.add(location)
        with Writing(directory) as writing:
            _Unpacking(staged, root, reading, writing, progress).run()
        reading.end()
    except ArchiveError as error:
        raise ArchiveError(f"{url} is refused: {error.message}", hint=error.hint) from error
    staged.sha256, staged.size = reading.digest.hexdigest(), reading.size
    return staged


def read_index(url: str, file: IO[bytes]) -> Index:
    """The index alone, of an archive of which nothing else is read.

    Raises:
        ArchiveError: What is wrong with it.
    """
    try:
        return _Reading(file).index()
    except ArchiveError as error:
        raise ArchiveError(f"{url} is refused: {error.message}", hint=error.hint) from error


class _Hashed(io.RawIOBase):
    """A file whose bytes are counted and hashed as they are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        self.size += len(data)
        return data


class _Reading:
    """The tar in an archive, member by member."""

    def __init__(self, file: IO[bytes]) -> None:
        import zstandard

        self._fault: type[Exception] = zstandard.ZstdError
        self._packed = _Hashed(file)
        self._most = max(FREE, RATIO * os.fstat(file.fileno()).st_size)
        unpacking = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        packed: Any = self._packed  # it takes whatever has `read`
        stream: Any = unpacking.stream_reader(
            packed, read_size=_CHUNK, read_across_frames=True, closefd=False
        )
        self._stream = io.BufferedReader(stream, _CHUNK)

    @property
    def digest(self) -> Any:
        return self._packed.digest

    @property
    def size(self) -> int:
        return self._packed.size

    def index(self) -> Index:
        name, size = tar.parse(self.read(tar.BLOCK))
        if name != NAME:
            raise ArchiveError(f"it begins with {shown(name, LONGEST)}, not with its index")
        if size > MOST_INDEX:
            raise ArchiveError(f"its index is said to have {size:,} bytes")
        index = Index.decode(self.content(size))
        if index.unpacked > self._most:
            raise ArchiveError(
                f"it would unpack to {index.unpacked:,} bytes, more than {RATIO} times its size",
                hint="nothing that tlcache packs is so much smaller packed",
            )
        return index

    def content(self, size: int) -> bytes:
        """The bytes of a member, after its header."""
        return self.read(size + len(tar.padding(size)))[:size]

    def end(self) -> None:
        """Check that nothing follows; what is not read is not hashed either."""
        block = self.read(tar.BLOCK)
        if block.strip(b"\0"):
            raise ArchiveError(
                f"it holds {shown(tar.parse(block).name, LONGEST)}, which its index does not name"
            )
        if self.read(tar.BLOCK).strip(b"\0") or self._some(1):
            raise ArchiveError("something follows after its end")

    def read(self, size: int) -> bytes:
        data = self._some(size) if size else b""
        if len(data) != size:
            raise ArchiveError("it ends in the middle", hint="fetch it again: it is cut off")
        return data

    def _some(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except self._fault as error:
            reason = str(error).removeprefix("zstd decompress error: ").lower()
            raise ArchiveError(f"it is no zstd data, or damaged: {reason}") from None


class _Unpacking:
    """The members after the index, held against it one by one."""

    def __init__(
        self,
        staged: Staged,
        root: str,
        reading: _Reading,
        writing: Writing,
        progress: Callable[[int], None],
    ) -> None:
        self._staged = staged
        self._root = root
        self._reading = reading
        self._writing = writing
        self._progress = progress
        self._seen: set[str] = set()

    def run(self) -> None:
        files = self._staged.index.files
        for thing in self._staged.index.things.values():
            data = {path: self._member(path, files[path]) for path in thing.files}
            self._whole(thing, data)
            if thing.place.location not in self._staged.present:
                self._writing.add(data)
        for path in self._staged.index.own:
            content = self._member(path, files[path])
            admitting.admit(self._staged, path, content)
            if not os.path.lexists(os.path.join(self._root, path)):
                self._writing.add({path: content})
        admitting.join(self._staged)

    def _member(self, path: str, member: Member) -> bytes:
        block = self._reading.read(tar.BLOCK)
        if block != tar.header(path, member.size):
            raise ArchiveError(self._stranger(block, path, member))
        data = self._reading.content(member.size)
        if hashlib.sha256(data).hexdigest() != member.sha256:
            raise ArchiveError(
                f"{path} has another sha256 than its index tells",
                hint="fetch it again; if it stays so, do not trust where it is from",
            )
        self._seen.add(path)
        self._progress(member.size)
        return data

    def _stranger(self, block: bytes, expected: str, member: Member) -> str:
        """What is wrong with a header that is not the one that should be there."""
        if not block.strip(b"\0"):
            return f"its index names {expected}, which it does not hold"
        name, size = tar.parse(block)
        if name in self._seen:
            return f"it holds {shown(name, LONGEST)} twice"
        if name not in self._staged.index.files:
            return f"it holds {shown(name, LONGEST)}, which its index does not name"
        if name != expected:
            return f"it holds {shown(name, LONGEST)} where its index names {expected}"
        if size != member.size:
            return f"{name} is said to have {size:,} bytes, and {member.size:,} by its index"
        return f"{name} is not stored as `tlcache export` stores files"

    def _whole(self, thing: Thing, data: dict[str, bytes]) -> None:
        files = self._staged.index.files
        members = {os.path.basename(path): files[path] for path in thing.files}
        read = {os.path.basename(path): content for path, content in data.items()}
        if (fault := whole.fault(thing.place, members, read)) is not None:
            raise ArchiveError(f"{thing.place.location} {fault}")
