"""An entry's library: where its device code lies in it, and what host it is for.

    tvm_ffi   `executable.so`: the object `__tvm_ffi__library_bin` holds a serialized module, and
              that the exact bytes of a file in `cuda-binaries`
    cython    `kernel_lib.so`: the section `.nv_fatbin`; on the CPU no device code at all
    nvrtc     `kernel.cubin` itself
    cutedsl   `kernel.py`, which names the architecture; its launcher's own code means nothing

Invariant: what a library does not tell is None, and a damaged one tells nothing.
"""

from __future__ import annotations

import hashlib
import re
import struct
from typing import NamedTuple

from tlcache.store import device_code
from tlcache.store.device_code import CUBIN, FATBIN, DeviceCode
from tlcache.store.elf import Elf, ElfError

__all__ = ["Binary", "payloads", "read"]

_MACHINES = {62: "x86_64", 183: "aarch64"}
_BLOBS = (b"__tvm_ffi__library_bin", b"__tvm_ffi_library_bin")  # since 0.1.7; 0.1.6
_EXPORT, _MAIN = b"__tvm_ffi_", b"__tvm_ffi_main"
_GPU_RUNTIMES = (b"cu", b"hip", b"__cuda", b"__hip")
_GPU_ARCH = rb"--gpu-arch[= ](sm_\d{2,3}[af]?)(?![0-9A-Za-z_])"
_CPU = "cpu"
_OBJECT, _FUNCTION = 1, 2


class Binary(NamedTuple):
    """What a library tells.

    Attributes:
        targets: The architectures of its device code, or `cpu`; None where it does not tell, or
            not all of them.
        host: The machine that it runs on, like `x86_64`; None for a bare cubin.
        name: The function that it exports, without its prefix or suffix.
        code: Its device code.
        payload: The sha256 of its device code as `cuda-binaries` has it; None where it has not.
    """

    targets: tuple[str, ...] | None
    host: str | None
    name: str | None
    code: tuple[DeviceCode, ...]
    payload: str | None

    @property
    def toolkit(self) -> str | None:
        """The compiler's build, where all parts were made by one."""
        builds = {part.toolkit for part in self.code if part.kernels}
        return builds.pop() if len(builds) == 1 else None


_NOTHING = Binary(None, None, None, (), None)


def read(name: str, data: bytes) -> Binary:
    """Read a library.

    Args:
        name: Its file name, which tells the execution backend.
        data: Its bytes.
    """
    if name == "kernel.py":
        found = {match.decode() for match in re.findall(_GPU_ARCH, data)}
        return _NOTHING._replace(targets=tuple(found) if len(found) == 1 else None)
    try:
        if data[:4] == FATBIN or name.endswith(".cubin"):
            return _device(device_code.read(data), None, None, data)
        elf = Elf(data)
        host = _MACHINES.get(elf.machine)
        if name == "executable.so":
            return _tvm_ffi(elf, host)
        if name == "kernel_lib.so":
            return _cython(elf, host)
    except (ElfError, struct.error, OverflowError):
        pass
    return _NOTHING


def _device(
    code: tuple[DeviceCode, ...], host: str | None, name: str | None, payload: bytes | None
) -> Binary:
    parts = [part for part in code if not _is_stub(part)] if host else []
    parts = parts or list(code)
    names = list(dict.fromkeys(part.target for part in parts))
    targets = tuple(text for text in names if text is not None)
    if name is None:
        name = _common({kernel.name for part in code for kernel in part.kernels})
    return Binary(
        targets if targets and len(targets) == len(names) else None,
        host,
        name,
        tuple(parts),
        hashlib.sha256(payload).hexdigest() if payload is not None else None,
    )


def _is_stub(part: DeviceCode) -> bool:
    """Whether it is what nvcc links into a library of its own accord, without a kernel."""
    return not part.kernels and part.target is not None and part.target.startswith("sm_")


def _common(kernels: set[str]) -> str | None:
    """The name of a module's one kernel, or of several that are `x_kernel`, `x_kernel_1`, and so
    on.
    """
    shortest = min(kernels, key=len, default=None)
    if shortest is None:
        return None
    pattern = re.escape(shortest) + r"(?:_\d+)?"
    same = all(re.fullmatch(pattern, name) for name in kernels)
    return shortest.removesuffix("_kernel") if same else None


def _tvm_ffi(elf: Elf, host: str | None) -> Binary:
    exports, blob = [], b""
    for symbol in elf.symbols(_FUNCTION, _OBJECT, dynamic=True):
        if symbol.name in _BLOBS:
            blob = elf.bytes_at(symbol)
        elif symbol.kind == _FUNCTION and symbol.section and symbol.name.startswith(_EXPORT):
            exports.append(symbol.name)
    names = [name[len(_EXPORT) :] for name in exports if name != _MAIN]
    name = names[0].decode("utf-8", "replace") if len(names) == 1 else None
    code: tuple[DeviceCode, ...] = ()
    payloads = list(_payloads(blob))
    for payload in payloads:
        code += device_code.read(payload)
    return _device(code, host, name, payloads[0] if len(payloads) == 1 else None)


def payloads(name: str, data: bytes) -> list[bytes]:
    """The device code in a library as it lies there: cubins and fatbins.

    Args:
        name: Its file name.
        data: Its bytes.

    Raises:
        ElfError: It is damaged.
    """
    if data[:4] == FATBIN or name.endswith(".cubin"):
        return [data]
    elf = Elf(data)
    if name == "executable.so":
        blobs = (s for s in elf.symbols(_OBJECT, dynamic=True) if s.name in _BLOBS)
        return [found for symbol in blobs for found in _payloads(elf.bytes_at(symbol))]
    section = elf.section(b".nv_fatbin")
    return [elf.bytes_of(section)] if section is not None else []


def _payloads(blob: bytes) -> list[bytes]:
    """The cubins and fatbins in a serialized module: each with its length before it."""
    found = []
    place = 8
    while (start := _next_payload(blob, place)) >= 0:
        size = int.from_bytes(blob[start - 8 : start], "little")
        if 16 <= size <= len(blob) - start:
            place = start + size
            found.append(blob[start:place])
        else:
            place = start + 1
    return found


def _next_payload(blob: bytes, place: int) -> int:
    # Two searches for fixed bytes take a fiftieth of one for either.
    cubin, fatbin = blob.find(CUBIN, place), blob.find(FATBIN, place)
    return max(cubin, fatbin) if min(cubin, fatbin) < 0 else min(cubin, fatbin)


def _cython(elf: Elf, host: str | None) -> Binary:
    section = elf.section(b".nv_fatbin")
    if section is not None:
        return _device(device_code.read(elf.bytes_of(section)), host, None, None)
    called = False
    for symbol in elf.symbols(dynamic=True):
        if not symbol.section and symbol.name.startswith(_GPU_RUNTIMES):
            return _NOTHING._replace(host=host)
        called = called or (symbol.name == b"call" and bool(symbol.section))
    device = elf.section(b".hip_fatbin") is not None
    return Binary((_CPU,) if called and not device else None, host, None, (), None)
