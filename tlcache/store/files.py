"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import struct

__all__ = ["content", "read", "stamp", "write_atomically"]

_STAMP = struct.Struct("<4Q")
_BITS = 2**64 - 1  # times may be negative, and beyond what 64 bits hold


def stamp(status: os.stat_result) -> bytes:
    """What changes when a file does: inode, times of change, size."""
    return _STAMP.pack(
        status.st_ino & _BITS,
        status.st_mtime_ns & _BITS,
        status.st_ctime_ns & _BITS,
        status.st_size & _BITS,
    )


def read(path: str, expected: int | None = None, *, unseen: bool = False) -> bytes:
    """The bytes of a file, in half the time of `open`: a process pays it for each kernel.

    Args:
        path: The file.
        expected: Its size, if that is known; of a larger file, only one byte more is read.
        unseen: Leave it be when it was last read, where its owner asks.

    Raises:
        OSError: It cannot be read.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in a file's place would wait
    try:
        descriptor = os.open(path, flags | os.O_NOATIME if unseen else flags)
    except PermissionError:
        descriptor = os.open(path, flags)
    try:
        return content(descriptor, os.fstat(descriptor).st_size if expected is None else expected)
    finally:
        os.close(descriptor)


def content(descriptor: int, expected: int) -> bytes:
    """The bytes of an open file that is expected to be of a size; of a larger one, one more.

    Raises:
        OSError: It cannot be read.
    """
    data = os.read(descriptor, expected + 1)
    while len(data) < expected and (more := os.read(descriptor, expected + 1 - len(data))):
        data += more
    return data


def write_atomically(path: str, data: bytes) -> None:
    """Write a file: a temporary one beside it, fsync, rename. A kill leaves the old state or the
    new.

    Raises:
        OSError: It cannot be written, or the disk is full; then nothing is left behind.
    """
    import secrets

    directory, name = os.path.split(path)
    os.makedirs(directory, exist_ok=True)
    temporary = os.path.join(directory, f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some file systems cannot; the rename itself is done
    finally:
        os.close(descriptor)
