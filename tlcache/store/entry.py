"""One thing of TileLang's under a cache root: what its files tell, and its record's facts where it
has one.

Invariant: what cannot be known is None, never a guess. Nothing here raises for what an entry
contains, and nothing here counts as a use of it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, NamedTuple

from tlcache.store import files
from tlcache.store.filings import Filing
from tlcache.store.layout import EntryPlace
from tlcache.store.params import EntryParam

if TYPE_CHECKING:
    from tlcache.store.device_code import DeviceKernel  # its readers take 3 ms to import

__all__ = [
    "Entry",
    "EntryParam",
    "Facts",
    "File",
    "Listing",
    "cuda_binaries",
    "facts_of",
    "made",
    "read",
]
__all__ += ["listing", "utc"]

_BACKENDS = {
    "executable.so": "tvm_ffi",
    "kernel_lib.so": "cython",
    "kernel.cubin": "nvrtc",
    "kernel.py": "cutedsl",
}
_CUDA_BINARIES = ("kernel.cubin", "kernel.fatbin")
_SOURCES = ("device_kernel.cu", "kernel.cu", "device_kernel.py")
_PARAMS = ("params.json", "params.pkl")
_KERNEL_NAME = re.compile(
    rb"(?:__global__ void|int32_t)\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\("
)
_HEAD = 64 * 1024
_MOST = 64 * 1024 * 1024  # a library larger than that tells nothing; TileLang's have 1 MB at most
_DEPTH = 20
_DIRECTORY = struct.Struct("<3Q")
_BITS = 2**64 - 1


class Facts(NamedTuple):
    """What the files of an entry tell.

    Attributes:
        kernel: The kernel's name, without TileLang's `_kernel` suffix.
        params: From params.json or params.pkl.
        targets: The architectures of its device code, or `cpu`.
        toolkit: The build of the compiler that made the device code.
        host: The machine that its library is for, like `x86_64`.
        kernels: The kernels in its device code, of one architecture after the other.
    """

    kernel: str | None = None
    params: tuple[EntryParam, ...] | None = None
    targets: tuple[str, ...] | None = None
    toolkit: str | None = None
    host: str | None = None
    kernels: tuple[DeviceKernel, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One thing under a cache root.

    Attributes:
        place: Where it lies, and what kind of thing it is.
        library: The file name of its library, or of its device code.
        bytes: The sum of the sizes of its files.
        created: When its directory was written, UTC.
        last_used: The newest access or change of its library, or use by one of its records, UTC.
        facts: What its files tell.
        payload: The sha256 of its device code, by which kernels and cuda-binaries join.
        record: What the newest sound record that points at it says.
    """

    place: EntryPlace
    library: str | None
    bytes: int
    created: datetime | None
    last_used: datetime | None
    facts: Facts
    payload: str | None
    record: Filing | None

    @property
    def backend(self) -> str | None:
        """TileLang's execution backend, by the library's name."""
        if self.place.kind not in _WITH_LIBRARY:
            return None
        return _BACKENDS.get(self.library or "")

    @property
    def kernel(self) -> str | None:
        """The kernel's name; its record's is the operator's."""
        return self.record.name if self.record is not None else self.facts.kernel

    @property
    def params(self) -> tuple[EntryParam, ...] | None:
        """The parameters; a record knows the names of the dynamic dimensions for certain."""
        if self.record is None:
            return self.facts.params
        return _params(self.record.params)

    @property
    def targets(self) -> tuple[str, ...] | None:
        """What it was compiled for: several architectures for a fat binary."""
        return (self.record.target,) if self.record is not None else self.facts.targets

    @property
    def target(self) -> str | None:
        """The same as one text, like `sm_90a` or `sm_80,sm_90`."""
        return ",".join(self.targets) if self.targets else None


@functools.lru_cache(maxsize=4096)
def _params(text: str) -> tuple[EntryParam, ...]:
    return tuple(EntryParam(dtype, tuple(shape)) for dtype, shape in json.loads(text))


_WITH_LIBRARY = ("kernel", "autotuner")
_READABLE = (*_WITH_LIBRARY, "cuda-binary")


class File(NamedTuple):
    """A file of an entry, as it was when the entry was listed."""

    name: str
    status: os.stat_result

    def stamp(self) -> bytes:
        return self.name.encode() + files.stamp(self.status)


class Listing(NamedTuple):
    """What a stat of everything in an entry tells.

    Attributes:
        directory: What changes when a file is added to its directory, removed or renamed.
        created: When that was so last, in seconds since 1970; None where the entry has vanished.
        names: Its regular files; where the entry is a file, that one.
        size: The sum of their sizes.
        library: Its library, or its device code.
        params: Its parameters.
        source: The kernel's source.
    """

    directory: bytes
    created: float | None
    names: tuple[str, ...]
    size: int
    library: File | None = None
    params: File | None = None
    source: File | None = None

    def stamp(self) -> bytes:
        """What changes when one of the files does that facts are read from; empty where there is
        none.
        """
        return b"".join(file.stamp() for file in self[4:] if file is not None)

    def newest(self) -> float:
        """When the last change was to anything that facts depend on, in seconds since 1970."""
        times = [file.status.st_mtime for file in self[4:] if file is not None]
        times += [file.status.st_ctime for file in self[4:] if file is not None]
        return max(times, default=0.0)


def read(place: EntryPlace, filed: tuple[Filing, float] | None = None) -> Entry:
    """Read one entry. `filed` is what its record says, and when that was used last."""
    found = listing(place)
    facts, payload, _ = facts_of(place, found)
    return made(place, found, facts, payload, filed)


def made(
    place: EntryPlace,
    found: Listing,
    facts: Facts,
    payload: str | None,
    filed: tuple[Filing, float] | None = None,
    called: float | None = None,
) -> Entry:
    """The entry that its listing, its facts, its record with that one's last use, and the last use
    by a program's own call make.
    """
    known = [one for one in (filed[1] if filed is not None else None, called) if one is not None]
    used = max(known, default=None)
    if found.library is not None:
        status = found.library.status
        used = max(status.st_atime, status.st_mtime, used or 0.0)
    return Entry(
        place,
        found.library.name if found.library is not None else None,
        found.size,
        utc(found.created) if found.created is not None else None,
        utc(used) if used is not None else None,
        facts,
        payload,
        filed[0] if filed is not None else None,
    )


def cuda_binaries(found: Iterable[Entry]) -> dict[str, list[Entry]]:
    """The cuda-binaries among entries by their content: a kernel's `payload` finds those that its
    library was made from.
    """
    joined: dict[str, list[Entry]] = {}
    for one in found:
        if one.place.kind == "cuda-binary" and one.payload is not None:
            joined.setdefault(one.payload, []).append(one)
    return joined


def utc(seconds: float) -> datetime | None:
    """A time of the file system's; None where it is none."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None  # a date that no calendar has


def listing(
    place: EntryPlace, directory: bytes | None = None, names: tuple[str, ...] = ()
) -> Listing:
    """Look at everything in an entry, a stat a file; reads nothing.

    Args:
        place: Where it lies.
        directory: What an earlier listing's was. While it is the same, so are the names, and the
            directory need not be listed again.
        names: That listing's.
    """
    path = place.location
    try:
        top = os.lstat(path)
    except (OSError, ValueError):
        return Listing(b"", None, (), 0)
    if not stat.S_ISDIR(top.st_mode):
        return _file(place, top)
    if place.kind not in _READABLE:
        return Listing(b"", top.st_mtime, (), _size(path))
    now = _DIRECTORY.pack(top.st_ino & _BITS, top.st_mtime_ns & _BITS, top.st_ctime_ns & _BITS)
    found = _known(path, names) if now == directory else None
    if found is None:
        found = _listed(path)
    size = sum([status.st_size for status in found.values()])
    if place.kind == "cuda-binary":
        library = _first(_CUDA_BINARIES, found)
        return Listing(now, top.st_mtime, tuple(found), size, library)
    return Listing(
        now,
        top.st_mtime,
        tuple(found),
        size,
        _first(_BACKENDS, found),
        _first(_PARAMS, found),
        _first(_SOURCES, found),
    )


def _first(names: Iterable[str], found: dict[str, os.stat_result]) -> File | None:
    for name in names:
        if name in found:
            return File(name, found[name])
    return None


def _known(path: str, names: tuple[str, ...]) -> dict[str, os.stat_result] | None:
    try:
        return {name: os.lstat(f"{path}/{name}") for name in names}
    except OSError:
        return None


def _listed(path: str) -> dict[str, os.stat_result]:
    found: dict[str, os.stat_result] = {}
    try:
        with os.scandir(path) as items:
            for item in items:
                if item.is_file(follow_symlinks=False):
                    try:
                        found[item.name] = item.stat(follow_symlinks=False)
                    except OSError:
                        pass  # it has vanished
    except OSError:
        pass
    return found


def _size(path: str) -> int:
    """The sum of the sizes of the files in a directory and below; links are not followed."""
    total, places = 0, [(path, 0)]
    while places:
        directory, depth = places.pop()
        total += sum(status.st_size for status in _listed(directory).values())
        if depth < _DEPTH:
            try:
                with os.scandir(directory) as items:
                    places += [
                        (item.path, depth + 1)
                        for item in items
                        if item.is_dir(follow_symlinks=False)
                    ]
            except OSError:
                pass
    return total


def _file(place: EntryPlace, status: os.stat_result) -> Listing:
    """A thing that is one file: as cuda-binaries up to 0.1.14, each with its checksum beside it."""
    if not stat.S_ISREG(status.st_mode):
        return Listing(b"", status.st_mtime, (), 0)
    name, size = os.path.basename(place.location), status.st_size
    if place.kind != "cuda-binary":
        return Listing(b"", status.st_mtime, (name,), size)
    try:
        size += os.lstat(f"{place.location}.sha256").st_size
    except OSError:
        pass
    return Listing(b"", status.st_mtime, (name,), size, File(name, status))


def facts_of(place: EntryPlace, found: Listing) -> tuple[Facts, str | None, bool]:
    """Read what the files of an entry tell.

    Returns:
        The facts, the payload's sha256, and whether every file could be read, so that the same
        files would tell the same again.
    """
    binary_name = params = None
    targets, toolkit, host, payload = None, None, None, None
    kernels: tuple[DeviceKernel, ...] = ()
    reader = _Reader(place)
    if found.library is not None and (data := reader.read(found.library)) is not None:
        from tlcache.store import binary

        told = binary.read(found.library.name, data)
        binary_name, targets, toolkit, host = told.name, told.targets, told.toolkit, told.host
        kernels = tuple(kernel for part in told.code for kernel in part.kernels)
        payload = told.payload
    if found.params is not None and (data := reader.read(found.params)) is not None:
        from tlcache.store import params as reading

        is_json = found.params.name == "params.json"
        params = (reading.from_json if is_json else reading.from_pickle)(data)
    if binary_name is None and found.source is not None:
        data = reader.read(found.source, _HEAD)
        match = _KERNEL_NAME.search(data) if data is not None else None
        binary_name = match[1].decode().removesuffix("_kernel") if match else None
    facts = Facts(binary_name, params, targets, toolkit, host, kernels)
    return facts, payload, reader.sound


class _Reader:
    """Reads files of an entry without counting as a use, and minds whether one could not be."""

    def __init__(self, place: EntryPlace) -> None:
        self._place = place.location
        self.sound = True

    def read(self, file: File, most: int | None = None) -> bytes | None:
        """A file's bytes, or its first ones; None where it cannot be read."""
        size = file.status.st_size
        if most is not None:
            size = min(size, most)
        elif size > _MOST:
            return None
        alone = self._place.endswith(f"/{file.name}")
        try:
            path = self._place if alone else f"{self._place}/{file.name}"
            return files.read(path, size, unseen=True)[:size]
        except OSError:
            self.sound = False
            return None
