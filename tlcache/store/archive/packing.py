"""TileLang's things read, checked and compressed: in groups, each a zstd frame of its own, on as
many cores as there are.

Invariant: what a group is depends on nothing but the order of the things, and a frame on nothing
but its group, so the bytes are the same on any number of cores. What is not whole is left out.
"""

from __future__ import annotations

import fcntl
import hashlib
import marshal
import os
import signal
import struct
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

from tlcache.store import layout
from tlcache.store.archive import tar, whole
from tlcache.store.archive.index import MOST_FILE, MOST_THING, Member
from tlcache.store.layout import EntryPlace

__all__ = ["Packed", "Packing", "compressed", "member", "read"]

_LEVEL = 3
_GROUP = 128
_MOST_WORKERS = 8
_PIPE = 1024 * 1024
_LENGTH = struct.Struct("<Q")
_FIRST = 96 * 1024
_CHUNK = 1024 * 1024


class Packed(NamedTuple):
    """A group of things.

    Attributes:
        frame: Its members, compressed.
        files: Sizes and sha256 of these by their paths below the root, in order.
        left: Locations of things that were left out, below the root, and why.
        things: How many things there were.
    """

    frame: bytes
    files: dict[str, tuple[int, str]]
    left: list[tuple[str, str]]
    things: int


class Packing:
    """Packs things, while the caller does something else. To be used as a context manager.

    Forked workers pack one group after the other, and wait when what they packed is not taken; the
    work is reading thousands of files, so threads would wait for each other. Where a process has
    threads, it cannot be forked safely, and packs by itself. So it does what a worker that died
    did not do.

    Args:
        root: The cache root.
        places: The things, by absolute location, in order.
    """

    def __init__(self, root: str, places: Sequence[EntryPlace]) -> None:
        self._root = root
        start = len(os.path.join(root, ""))
        below = [place._replace(location=place.location[start:]) for place in places]
        self._groups = [below[at : at + _GROUP] for at in range(0, len(below), _GROUP)]
        self._workers: list[tuple[int, IO[bytes]]] = []

    def __enter__(self) -> Packing:
        import zstandard  # noqa: F401 - once, and not in each worker

        count = min(len(os.sched_getaffinity(0)), len(self._groups), _MOST_WORKERS)
        if count > 1 and len(os.listdir("/proc/self/task")) == 1:
            for number in range(count):
                self._workers.append(self._started(number, count))
        return self

    def __exit__(self, *_: object) -> None:
        for pid, results in self._workers:
            results.close()
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            os.waitpid(pid, 0)

    def __iter__(self) -> Iterator[Packed]:
        """The groups, in order."""
        for number, group in enumerate(self._groups):
            packed = None
            if self._workers:
                packed = _received(self._workers[number % len(self._workers)][1])
            yield packed or _packed(self._root, group)

    def _started(self, number: int, count: int) -> tuple[int, IO[bytes]]:
        """A worker for each so-many-th group, and the end of a pipe that it writes to."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writing)
            return pid, open(reading, "rb", buffering=_PIPE)
        code = 1
        try:
            os.close(reading)
            _widen(writing)
            for group in self._groups[number::count]:
                _sent(writing, _packed(self._root, group))
            code = 0
        finally:
            os._exit(code)


def _widen(pipe: int) -> None:
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE)
    except OSError:
        pass  # then it is narrower, and works


def _sent(pipe: int, packed: Packed) -> None:
    data = marshal.dumps(tuple(packed))
    rest = memoryview(_LENGTH.pack(len(data)) + data)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _received(pipe: IO[bytes]) -> Packed | None:
    """A group that a worker packed; None where it died before."""
    length = pipe.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(length)
    data = pipe.read(size)
    return Packed(*marshal.loads(data)) if len(data) == size else None


def compressed(parts: Sequence[bytes]) -> bytes:
    """A frame: a pinned level, one thread, so that the bytes are the same everywhere."""
    import zstandard

    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, threads=0)
    return bytes(compressor.compress(b"".join(parts)))


def _packed(root: str, group: Sequence[EntryPlace]) -> Packed:
    parts: list[bytes] = []
    files: dict[str, tuple[int, str]] = {}
    left = []
    for place in group:
        found = _thing(root, place)
        if isinstance(found, str):
            left.append((place.location, found))
            continue
        for path, (content, told) in found.items():
            files[path] = (told.size, told.sha256)
            parts += (tar.header(path, told.size), content, tar.padding(told.size))
    return Packed(compressed(parts) if parts else b"", files, left, len(group))


def _thing(root: str, place: EntryPlace) -> dict[str, tuple[bytes, Member]] | str:
    """The files of a thing by their paths below the root; or why it is left out."""
    data: dict[str, bytes] = {}
    above = place.location
    try:
        try:
            with os.scandir(f"{root}/{above}") as items:
                names = sorted(item.name for item in items if item.is_file(follow_symlinks=False))
        except NotADirectoryError:
            above, _, name = above.rpartition("/")
            beside = f"{name}.sha256"
            names = [name, beside] if os.path.isfile(f"{root}/{above}/{beside}") else [name]
        for name in filter(layout.is_file_name, names):
            data[name] = read(f"{root}/{above}/{name}")
            if len(data[name]) > MOST_FILE or sum(map(len, data.values())) > MOST_THING:
                return "has a file that is larger than any of TileLang's"
    except OSError as error:
        return f"cannot be read: {(error.strerror or str(error)).lower()}"
    members = {name: member(content) for name, content in data.items()}
    if (fault := whole.fault(place, members, data)) is not None:
        return fault
    return {f"{above}/{name}": (data[name], members[name]) for name in data}


def member(content: bytes) -> Member:
    """What an index says of a file."""
    return Member(len(content), hashlib.sha256(content).hexdigest())


def read(path: str) -> bytes:
    """A file's bytes: `files.read` in three calls for a small one, as there are thousands.

    Raises:
        OSError: It cannot be read, or is a link.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_NOATIME)
    except PermissionError:
        descriptor = os.open(path, flags)
    try:
        data = os.read(descriptor, _FIRST)
        if len(data) < _FIRST:
            return data
        parts, size = [data], len(data)
        while size <= MOST_FILE and (data := os.read(descriptor, _CHUNK)):
            parts.append(data)
            size += len(data)
        return b"".join(parts)
    finally:
        os.close(descriptor)
