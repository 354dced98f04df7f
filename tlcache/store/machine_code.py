"""Machine code by itself: what two compiles of one kernel agree in.

Two compiles differ in bytes, since their debug sections hold temporary paths, and agree in what
runs: instructions, constants, and what a launch must know of them. For kernels of the CPU that is
the library's own code.

Invariant: equal digests mean the same code. A library of which a part is damaged, packed or not
machine code has no digest.
"""

from __future__ import annotations

import hashlib
import struct

from tlcache.store import binary, device_code
from tlcache.store.elf import Elf, ElfError

__all__ = ["cubins", "digest"]

_TEXT = b".text."
_RUNS = (_TEXT, b".nv.constant", b".nv.global", b".nv.info.", b".nv.shared.")
_HOST = (b".text", b".rodata", b".data.rel.ro")
_LENGTH = struct.Struct("<QQ")


def cubins(name: str, data: bytes) -> tuple[bytes, ...]:
    """The device code in a library, one cubin for each architecture.

    Args:
        name: The library's file name.
        data: Its bytes.

    Returns:
        Those that have kernels; none where it has no device code, or is damaged.
    """
    try:
        return tuple(piece for piece in _pieces(name, data) if _is_cubin(piece) and _runs(piece))
    except (ElfError, struct.error, OverflowError):
        return ()


def digest(name: str, data: bytes) -> str | None:
    """The sha256 of the code in a library, or None where it cannot be told.

    Args:
        name: The library's file name.
        data: Its bytes.
    """
    if name == "kernel.py":
        return None
    try:
        found = _pieces(name, data)
        if any(not _is_cubin(piece) for piece in found):
            return None
        parts = [part for piece in found if (part := _runs(piece))]
        if not found:
            parts = [_sections(Elf(data), _HOST, exact=True)]
    except (ElfError, struct.error, OverflowError):
        return None
    if not any(parts):
        return None
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()


def _pieces(name: str, data: bytes) -> list[bytes]:
    found = binary.payloads(name, data)
    return [piece for payload in found for piece in device_code.pieces(payload)]


def _is_cubin(piece: bytes) -> bool:
    return piece[:4] == device_code.CUBIN


def _runs(cubin: bytes) -> bytes:
    """What of a cubin runs; nothing for the stub without a kernel that nvcc links in."""
    elf = Elf(cubin)
    if next(elf.sections(_TEXT), None) is None:
        return b""
    return _sections(elf, _RUNS) + _LENGTH.pack(elf.flags, elf.abi)


def _sections(elf: Elf, names: tuple[bytes, ...], exact: bool = False) -> bytes:
    """The names, sizes and bytes of some sections, in the order of the file."""
    told = []
    for section in elf.sections():
        if section.name in names if exact else section.name.startswith(names):
            told.append(_LENGTH.pack(len(section.name), section.size))
            told.append(section.name)
            told.append(elf.bytes_of(section))
    return b"".join(told)
