"""An import from end to end: fetched, verified, checked, published.

Invariant: all archives of an import are fetched, verified and checked before anything of one is
published. Where one is refused, the root is as it was.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from tlcache.errors import ArchiveError, CacheRootError, UsageError
from tlcache.store import layout
from tlcache.store.archive import (
    compatible,
    incoming,
    publishing,
    reading,
    remote,
    shard,
    signatures,
)
from tlcache.store.archive.compatible import Host
from tlcache.store.archive.index import Index
from tlcache.store.archive.publishing import Published
from tlcache.store.archive.reading import Staged
from tlcache.store.archive.shard import Lack
from tlcache.store.trust import Trust

__all__ = ["Imported", "Verification", "digest_of", "receive"]

_CHUNK = 1024 * 1024


@dataclass(frozen=True)
class Verification:
    """What an archive has to be.

    Attributes:
        sha256: Its digest, 64 hexadecimal digits; any where None.
        signers: An allowed-signers file; nobody has to have signed where None.
        revoked: Keys that count no more.
    """

    sha256: str | None = None
    signers: str | None = None
    revoked: str | None = None


@dataclass(frozen=True)
class Imported:
    """What came of an import."""

    archives: tuple[Staged, ...]
    published: Published

    @property
    def lacking(self) -> list[Lack]:
        """What the shards of warms that were gathered lack."""
        return shard.lacking(one.index for one in self.archives)


def digest_of(text: str) -> str:
    """The 64 hexadecimal digits of a digest like `sha256:9f86…`.

    Raises:
        UsageError: It is none.
    """
    match = re.fullmatch(r"(?:sha256:)?([0-9a-f]{64})", text.strip().lower())
    if match is None:
        raise UsageError(f"{text!r} is no digest", hint="like `sha256:` and 64 hexadecimal digits")
    return match[1]


def receive(
    root: str,
    sources: Sequence[str],
    verification: Verification | None = None,
    *,
    here: Host | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Imported:
    """Import archives into a cache root.

    Args:
        root: The cache root; it is made where it is not there.
        sources: Files and URLs, each one archive.
        verification: What they have to be.
        here: Leave out what this host cannot load; where None, an archive for another platform is
            refused.
        progress: Called with an archive's name and the number of bytes unpacked since the last
            call.

    Raises:
        ArchiveError: One of them is not what it should be.
        UntrustedRootError: Somebody else can write the root.
        CacheRootError: The root cannot be written, or its disk has no room.
        TransferError, UsageError: One cannot be fetched, or is not there.
    """
    root = os.path.abspath(root)
    verification = verification or Verification()
    if os.path.isdir(root):
        Trust(root).check_root()
    receiving = _Receiving(root, verification, here, progress)
    with incoming.batch(root) as directory:
        try:
            staged = [
                receiving.archive(source, os.path.join(directory, str(number)))
                for number, source in enumerate(sources)
            ]
        except OSError as error:
            raise layout.unwritable(root, error) from error
        if here is not None:
            for one in staged:
                compatible.leave(one, here)
        return Imported(tuple(staged), publishing.publish(root, staged))


class _Receiving:
    """Archives on their way into one root."""

    def __init__(
        self,
        root: str,
        verification: Verification,
        here: Host | None,
        progress: Callable[[str, int], None] | None,
    ) -> None:
        self._root = root
        self._wanted = verification
        self._here = here
        self._progress = progress or (lambda name, count: None)

    def archive(self, source: str, directory: str) -> Staged:
        """Fetch, verify, check and stage one."""
        name, path = remote.named(source), source
        os.mkdir(directory)
        if remote.is_url(source):
            path = f"{directory}.tar.zst"
            remote.fetch(source, path)
        else:
            path = name = source.removeprefix("file://")
        with _opened(path) as file:
            known, signer = self._verified(name, source, file, directory)
            file.seek(0)
            staged = reading.unpack(
                name,
                file,
                directory,
                self._root,
                vet=self._vet,
                progress=lambda count: self._progress(name, count),
            )
        if known is not None and staged.sha256 != known:
            raise ArchiveError(f"{name} is refused: it changed while it was read")
        if path != source and remote.is_url(source):
            os.unlink(path)
        staged.signer = signer
        return staged

    def _verified(
        self, name: str, source: str, file: IO[bytes], directory: str
    ) -> tuple[str | None, str | None]:
        """An archive's sha256, as far as it had to be known, and its signer."""
        if self._wanted.sha256 is None and self._wanted.signers is None:
            return None, None
        digest = hashlib.sha256()
        for data in iter(lambda: file.read(_CHUNK), b""):
            digest.update(data)
        found = digest.hexdigest()
        if self._wanted.sha256 not in (None, found):
            raise ArchiveError(
                f"{name} is refused: its digest is sha256:{found}, not "
                f"sha256:{self._wanted.sha256}",
                hint="it is another archive, or damaged: fetch it again",
            )
        if self._wanted.signers is None:
            return found, None
        signature = f"{directory}{signatures.SUFFIX}"
        with open(signature, "xb") as target:
            target.write(remote.small(source + signatures.SUFFIX))
        file.seek(0)
        try:
            signer = signatures.verify(file, signature, self._wanted.signers, self._wanted.revoked)
        except ArchiveError as error:
            raise ArchiveError(f"{name} is refused: {error.message}", hint=error.hint) from error
        return found, signer

    def _vet(self, index: Index) -> None:
        if self._here is None:
            compatible.same_platform(index)
        status = os.statvfs(self._root)
        free = status.f_bavail * status.f_frsize
        if index.unpacked > free:
            raise CacheRootError(
                f"the disk of the cache root {self._root} has {free:,} bytes free, and the archive "
                f"unpacks to {index.unpacked:,}",
                hint="free space, or name another root with `--cache-dir DIR`",
            )


def _opened(path: str) -> IO[bytes]:
    try:
        file = open(path, "rb")  # noqa: SIM115 - the caller closes it
        os.fstat(file.fileno())
        return file
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{path} cannot be read: {reason}") from error
