"""Device code: what a cubin, a fatbin or PTX tells of its architecture, its compiler and its
kernels.

Invariant: an architecture is named only where the code says it in full, the `a` or `f` suffix
included: `sm_90a` code runs on nothing but an H100's kind, so half a name would be a wrong one.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from tlcache.store.elf import Elf, ElfError

__all__ = ["CUBIN", "DeviceCode", "DeviceKernel", "FATBIN", "pieces", "read"]

CUBIN, FATBIN = b"\x7fELF", b"\x50\xed\x55\xba"  # how the two begin
_CUDA = 190  # e_machine
_FATBIN_HEADER = struct.Struct("<IHHQ")
_FATBIN_ENTRY = struct.Struct("<HHIQ")
_PTX_ENTRY, _ELF_ENTRY = 1, 2
_FUNCTION, _LOCAL, _ENTRY_POINT = 2, 0, 0x10
_REGCOUNT = 0x2F  # EIATTR_REGCOUNT
_SUFFIXED = 90  # the first architecture that has variants

_ARCH = rb"-arch[ =](sm_(\d{2,3})[af]?)(?![0-9A-Za-z_])"
_TOOLKIT = rb", V(\d+\.\d+\.\d+)"
_PTX_TARGET = rb"(?m)^\s*\.target\s+sm_(\d{2,3}[af]?)\b"
_MOST = 256  # parts of a fatbin, kernels of a cubin


class DeviceKernel(NamedTuple):
    """A kernel in a cubin.

    Attributes:
        name: Its symbol.
        registers: A thread's.
        shared: Bytes of static shared memory; what a launch adds is not told.
    """

    name: str
    registers: int | None
    shared: int


class DeviceCode(NamedTuple):
    """Code for one architecture.

    Attributes:
        target: Like `sm_90a`; `compute_90a` for PTX, which the driver compiles; None where the
            code does not tell.
        toolkit: The build of the compiler that made it, like `13.0.88`.
        kernels: In the order of their symbols.
    """

    target: str | None
    toolkit: str | None
    kernels: tuple[DeviceKernel, ...]


def read(data: bytes) -> tuple[DeviceCode, ...]:
    """The code in a cubin or a fatbin, a part for each architecture.

    Raises:
        ElfError: It is neither, or is damaged.
    """
    if data[:4] == FATBIN:
        return tuple(_part(kind, piece) for kind, piece in _parts(data))
    return (_cubin(data),)


def pieces(data: bytes) -> tuple[bytes, ...]:
    """The same code as it lies there: cubins, and whatever else a fatbin holds.

    Raises:
        ElfError: A fatbin is damaged.
    """
    if data[:4] == FATBIN:
        return tuple(piece for _, piece in _parts(data))
    return (data,)


def _parts(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The parts of a fatbin, or of several in a row, as `.nv_fatbin` has them: kind and bytes."""
    place, count = 0, 0
    while place + _FATBIN_HEADER.size <= len(data):
        magic, _, header, size = _FATBIN_HEADER.unpack_from(data, place)
        if magic != int.from_bytes(FATBIN, "little"):
            if data[place : place + 8].strip(b"\0"):
                raise ElfError("there is something else in a fatbin's place")
            place += 8
            continue
        place += header
        end = place + size
        if header < _FATBIN_HEADER.size or end > len(data):
            raise ElfError("a fatbin is cut off")
        while place + _FATBIN_ENTRY.size <= end:
            kind, _, header, size = _FATBIN_ENTRY.unpack_from(data, place)
            count += 1
            if header < 64 or place + header + size > end or count > _MOST:
                raise ElfError("a part of a fatbin is cut off")
            yield kind, data[place + header : place + header + size]
            place += header + size
        place = end


def _part(kind: int, data: bytes) -> DeviceCode:
    if kind == _ELF_ENTRY and data[:4] == CUBIN:
        return _cubin(data)
    found = re.search(_PTX_TARGET, data) if kind == _PTX_ENTRY else None
    # Else it is compressed: its header has the number of the architecture, and not the suffix.
    return DeviceCode(f"compute_{found[1].decode()}" if found else None, None, ())


def _cubin(data: bytes) -> DeviceCode:
    elf = Elf(data)
    if elf.machine != _CUDA:
        raise ElfError(f"it is code for machine {elf.machine}, not for CUDA")
    note = elf.section(b".note.nv.tkinfo")
    told = elf.bytes_of(note) if note else b""
    toolkit = re.search(_TOOLKIT, told)
    return DeviceCode(_target(elf, told), toolkit[1].decode() if toolkit else None, _kernels(elf))


def _target(elf: Elf, told: bytes) -> str | None:
    """The architecture, by the compiler's note and the header's flags, which must agree."""
    arch = re.search(_ARCH, told)
    if elf.abi == 7:
        number, suffix = elf.flags & 0xFF, "a" if elf.flags & 0x800 else ""
        name = f"sm_{number}{suffix}"
        return name if number and (arch is None or arch[1].decode() == name) else None
    if elf.abi != 8:
        return None
    number = elf.flags >> 8 & 0xFF
    if arch is not None:
        return arch[1].decode() if int(arch[2]) == number else None
    return f"sm_{number}" if 0 < number < _SUFFIXED else None


def _kernels(elf: Elf) -> tuple[DeviceKernel, ...]:
    registers = _registers(elf)
    shared = {section.name: section.size for section in elf.sections(b".nv.shared.")}
    found = []
    for symbol in elf.symbols(_FUNCTION):
        if symbol.binding != _LOCAL and symbol.other & _ENTRY_POINT:
            try:
                name = symbol.name.decode()
            except UnicodeDecodeError:
                raise ElfError("a kernel's name is not a text") from None
            memory = shared.get(b".nv.shared." + symbol.name, 0)
            found.append(DeviceKernel(name, registers.get(symbol.number), memory))
            if len(found) > _MOST:
                raise ElfError("it has more kernels than any entry has")
    return tuple(found)


def _registers(elf: Elf) -> dict[int, int]:
    """The registers of kernels, by the numbers of their symbols: the attributes in `.nv.info`."""
    section = elf.section(b".nv.info")
    data = elf.bytes_of(section) if section else b""
    found: dict[int, int] = {}
    place = 0
    while place + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, place)
        place += 4
        if form != 4:
            continue  # the value stands in the attribute itself
        if attribute == _REGCOUNT and value == 8 and place + 8 <= len(data):
            symbol, count = struct.unpack_from("<II", data, place)
            found[symbol] = count
        place += value
    return found
