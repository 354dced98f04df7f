"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets

__all__ = ["write_atomically"]


def write_atomically(path: str, data: bytes) -> None:
    """Write a file: a temporary one beside it, fsync, rename. A kill leaves the old state or the
    new.

    Raises:
        OSError: It cannot be written, or the disk is full; then nothing is left behind.
    """
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
