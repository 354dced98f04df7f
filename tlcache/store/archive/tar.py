"""The tar format, as little of it as an archive has: plain files, whose headers say nothing but
their names and sizes.

Invariant: any tar program unpacks what is written here, and nothing is read here but plain files
with plain headers: no link, device, directory, extension header or sparse file.

Written here although `tarfile` is at hand: that takes 0.1 ms a member, as much as all the rest of
an import, and reads formats that only a hostile archive would have.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from tlcache.errors import ArchiveError
from tlcache.store.opened import shown

__all__ = ["BLOCK", "END", "LONGEST", "Header", "header", "padding", "parse"]

BLOCK = 512
LONGEST = 256
"""Characters that no name has, so that messages show all of one."""
END = bytes(2 * BLOCK)
_NOBODY, _EPOCH = b"0000000\0", b"00000000000\0"
_PLAIN = b"0000644\0" + _NOBODY * 2
_MAGIC = b"ustar\x0000"
_NAME, _PREFIX = 100, 155
_MIDDLE = b"0" + bytes(_NAME) + _MAGIC + bytes(64) + _NOBODY * 2
_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"5": "a directory",
    b"6": "a pipe",
}


class Header(NamedTuple):
    """A member: its name, and how many bytes follow."""

    name: str
    size: int


def header(name: str, size: int) -> bytes:
    """The block that goes before a member's bytes.

    Raises:
        ValueError: The name or the size does not fit.
    """
    prefix, short = _split(name)
    if size >= 8**11:
        raise ValueError(f"{name} is too large for a tar")
    front = b"%b%b%011o\0%b" % (short.ljust(_NAME, b"\0"), _PLAIN, size, _EPOCH)
    after, known = _rest(prefix)
    return b"%b%06o\0 %b" % (front, sum(front) + known, after)


@functools.lru_cache(maxsize=1024)
def _rest(prefix: bytes) -> tuple[bytes, int]:
    """What follows the checksum, and what all but the front adds to that."""
    after = _MIDDLE + prefix.ljust(BLOCK - 345, b"\0")
    return after, sum(after) + 8 * ord(" ")


def _split(name: str) -> tuple[bytes, bytes]:
    """A name in the two fields that a header has for it."""
    data = name.encode("ascii")
    if len(data) <= _NAME:
        return b"", data
    slash = data.find(b"/", len(data) - _NAME - 1)
    if not 0 < slash <= _PREFIX:
        raise ValueError(f"{name} is too long for a tar")
    return data[:slash], data[slash + 1 :]


def padding(size: int) -> bytes:
    """The zeros that follow a member of a size."""
    return bytes(-size % BLOCK)


def parse(block: bytes) -> Header:
    """Read a header.

    Raises:
        ArchiveError: It is none, or not one of a plain file.
    """
    name = _text(block[:_NAME])
    if prefix := _text(block[345 : 345 + _PREFIX]):
        name = f"{prefix}/{name}"
    checksum = sum(block) - sum(block[148:156]) + 8 * 32
    if _number(block[148:156]) != checksum:
        raise ArchiveError("a member's header is damaged", hint=_AGAIN)
    kind = block[156:157]
    if kind != b"0":
        what = _KINDS.get(kind, f"of type {ascii(kind)[1:]}")
        link = _text(block[157:257])
        target = f" to {shown(link, LONGEST)}" if link else ""
        raise ArchiveError(
            f"{shown(name, LONGEST)} is {what}{target}; an archive holds plain files only"
        )
    if block[257:265] != _MAGIC:
        raise ArchiveError(f"{shown(name, LONGEST)} is not stored as `tlcache export` stores files")
    return Header(name, _number(block[124:136]))


_AGAIN = "fetch it again, or write it anew with `tlcache export`"


@functools.lru_cache(maxsize=64)
def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def _number(field: bytes) -> int:
    digits = field.rstrip(b"\0 ")
    if not digits.isdigit() or digits.strip(b"01234567"):
        raise ArchiveError("a member's header is damaged", hint=_AGAIN)
    return int(digits, 8)
