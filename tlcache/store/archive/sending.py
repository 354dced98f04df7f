"""An export from end to end: written, signed, and put where it belongs.

Invariant: an archive appears at its path whole, after its signature, or not at all.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tlcache.errors import UsageError
from tlcache.store.archive import remote, signatures, writing
from tlcache.store.archive.choosing import Choice
from tlcache.store.archive.writing import Written

__all__ = ["send"]


def send(
    choice: Choice,
    output: str,
    *,
    key: str | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Written:
    """Write an archive to a file or URL, and its signature beside it.

    Args:
        choice: What goes into it.
        output: A path, which is replaced, or a URL.
        key: Sign with this SSH key.
        progress: Called with the number of things that were read since the last call.

    Raises:
        UsageError: The file cannot be written, or the key cannot be used.
        TransferError: The URL cannot be written.
    """
    output = output if remote.is_url(output) else output.removeprefix("file://")
    with _beside(output) as path:
        try:
            with open(path, "xb") as file:
                written = writing.write(choice, file, progress=progress)
            os.chmod(path, 0o666 & ~_umask())
            if key is not None:
                with open(path, "rb") as file, open(f"{path}.sig", "xb") as signature:
                    signature.write(signatures.sign(file, key))
                # The signature first: the archive is never there without it.
                remote.send(f"{path}.sig", output + signatures.SUFFIX)
            remote.send(path, output)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UsageError(f"{remote.named(output)} cannot be written: {reason}") from error
    return written


@contextmanager
def _beside(output: str) -> Iterator[str]:
    """A name for a temporary file: beside a path, else where temporary files are."""
    directory, name = (
        (tempfile.gettempdir(), "archive") if remote.is_url(output) else (os.path.split(output))
    )
    path = os.path.join(directory, f".{name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        yield path
    finally:
        for each in (path, f"{path}.sig"):
            if os.path.lexists(each):
                os.unlink(each)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
