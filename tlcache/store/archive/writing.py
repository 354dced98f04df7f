"""A choice written as an archive: the index, the frames of TileLang's things, and a frame of what
tlcache has filed of them.

Invariant: what is written is whole by its own checksums, and the bytes depend on nothing but the
files and the version of zstandard: members in order, no times, no owners. What is not whole, or
changes meanwhile, is left out and said.
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
from tlcache.store.archive import packing, tar
from tlcache.store.archive.choosing import Choice
from tlcache.store.archive.filed import Belonging, Filed
from tlcache.store.archive.index import NAME, Index, Member

__all__ = ["Written", "write"]

_COPIED = 1024 * 1024


@dataclass(frozen=True)
class Written:
    """What came of an export.

    Attributes:
        index: What the archive holds.
        kernels: How many of its things are kernels.
        calls: How many calls of programs' own functions mean one of them.
        size: Its bytes.
        sha256: Of the whole.
        left: What was chosen and is not in it, relative to the root, and why.
    """

    index: Index
    kernels: int
    calls: int
    size: int
    sha256: str
    left: tuple[tuple[str, str], ...]


def write(
    choice: Choice, file: IO[bytes], *, progress: Callable[[int], None] = lambda count: None
) -> Written:
    """Write an archive.

    Args:
        choice: What to write.
        file: Where to.
        progress: Called with the number of things that were packed since the last call.

    Raises:
        OSError: It cannot be written, or there is no room for a copy beside it.
    """
    files: dict[str, Member] = {}
    left: list[tuple[str, str]] = []
    directory = os.path.dirname(os.fspath(file.name)) or None
    with tempfile.TemporaryFile(dir=directory) as body:
        with packing.Packing(choice.root, choice.places) as packed:
            filed = Filed(choice.root, choice.keys)  # while the workers work
            for group in packed:
                body.write(group.frame)
                files.update((path, Member(*told)) for path, told in group.files.items())
                left += group.left
                progress(group.things)
        belonging = filed.of(files)
        parts = []
        for path, data in belonging.files.items():
            told = files[path] = packing.member(data)
            parts += [tar.header(path, told.size), data, tar.padding(told.size)]
        body.write(packing.compressed([*parts, tar.END]))
        body.seek(0)
        versions = Counter(_versions(choice, left))
        index = Index(files, belonging.records, _builder(), _coverage(choice, versions, belonging))
        data = index.encode()
        front = [tar.header(NAME, len(data)), data, tar.padding(len(data))]
        digest, size, chunk = hashlib.sha256(), 0, packing.compressed(front)
        while chunk:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            chunk = body.read(_COPIED)
    file.flush()
    left += belonging.left
    kernels, sha256 = versions.total(), digest.hexdigest()
    return Written(index, kernels, belonging.calls, size, sha256, tuple(left))


def _versions(choice: Choice, left: list[tuple[str, str]]) -> Iterator[str]:
    """The TileLang of each kernel that was packed."""
    without = {os.path.join(choice.root, location) for location, _ in left}
    for place in choice.places:
        if place.kind == "kernel" and place.location not in without:
            yield place.tilelang or "0.1.8 or earlier"


def _coverage(choice: Choice, versions: Counter[str], belonging: Belonging) -> dict[str, Any]:
    targets = Counter(each.target for each in belonging.records.values())
    told: dict[str, Any] = {
        "kernels": versions.total(),
        "records": len(belonging.records),
        "tilelang": dict(sorted(versions.items())),
        "targets": dict(sorted(targets.items())),
        "factories": dict(sorted(Counter(belonging.factories).items())),
    }
    if choice.asked is not None:
        told["asked"] = choice.asked
    if choice.part is not None:
        told["shard"] = choice.part._asdict()
    return told


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
