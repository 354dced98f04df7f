"""Whether a thing of TileLang's is whole, by its own checksums and the hashes of its files.

Invariant: what passes here, `verify` finds nothing wrong with that TileLang would trip over: it
has its library, for the machine that its directory says, and is what its manifest lists.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from tlcache.store.archive.index import Member
from tlcache.store.layout import EntryPlace
from tlcache.store.opened import shown

__all__ = ["fault"]

_LIBRARIES = ("executable.so", "kernel_lib.so", "kernel.cubin", "kernel.py")
_LOADED = (*_LIBRARIES, "launcher_lib.so", "params.json", "params.pkl")
_MACHINES = {62: "x86_64", 183: "aarch64"}
_HEAD = struct.Struct("<6s12xH")


def fault(place: EntryPlace, files: Mapping[str, Member], data: Mapping[str, bytes]) -> str | None:
    """What is wrong with a thing, as the end of a sentence; None where it is whole.

    Args:
        place: The thing.
        files: Its files by name.
        data: Their bytes.
    """
    return next(_faults(place, files, data), None)


def _faults(
    place: EntryPlace, files: Mapping[str, Member], data: Mapping[str, bytes]
) -> Iterator[str]:
    if place.kind == "cuda-binary":
        yield from _cuda_binary(place, files, data)
        return
    library = next((name for name in _LIBRARIES if name in files), None)
    if library is None or not files[library].size:
        yield "has no library"
    if "params.json" not in files and "params.pkl" not in files:
        yield "has no parameters"
    for name in files:
        if name.endswith(".so") and (told := _machine(data.get(name, b""), place)):
            yield f"holds {shown(name)}, which {told}"
    if "manifest.json" in files:
        listed = _object(data, "manifest.json").get("files")
        if not isinstance(listed, dict):
            yield "has a damaged manifest.json"
            return
        for name, told in listed.items():
            if files.get(name) != _told(told):
                yield f"has another {shown(name)} than its manifest.json lists"
        for name in files:
            # The cubin that cutedsl's first launch leaves is nobody's to list.
            beside = name == "kernel.cubin" and library == "kernel.py"
            if name in _LOADED and name not in listed and not beside:
                yield f"has {shown(name)}, which its manifest.json does not list"
    elif place.kind == "kernel" and _version(place) >= (0, 1, 14):
        yield "has no manifest.json"


def _cuda_binary(
    place: EntryPlace, files: Mapping[str, Member], data: Mapping[str, bytes]
) -> Iterator[str]:
    checksum = next((name for name in files if name.endswith(".sha256")), None)
    binaries = [name for name in files if name.endswith((".cubin", ".fatbin"))]
    if len(binaries) != 1:
        yield f"has {len(binaries)} binaries, not 1"
        return
    member = files[binaries[0]]
    if place.location.endswith(binaries[0]):
        if _version(place) >= (0, 1, 15):
            yield "is a file where TileLang looks for a directory"
        told = data.get(checksum or "", b"").strip()
        if checksum is not None and told != member.sha256.encode():
            yield "fails its own checksum"
    elif _told(_object(data, "metadata.json")) != member:
        yield f"has another {shown(binaries[0])} than its metadata.json tells"


def _told(values: Any) -> Member | None:
    if not isinstance(values, dict):
        return None
    size, sha256 = values.get("size"), values.get("sha256")
    return Member(size, sha256) if type(size) is int and isinstance(sha256, str) else None


def _object(data: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        values = json.loads(data.get(name, b""))
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _machine(head: bytes, place: EntryPlace) -> str | None:
    if len(head) < _HEAD.size:
        return "is no library"
    ident, machine = _HEAD.unpack_from(head)
    if ident[:4] != b"\x7fELF":
        return "is no library"
    name = _MACHINES.get(machine, str(machine))
    wanted = (place.platform or name).rpartition("-")[2].replace("arm64", "aarch64")
    return f"is for the machine {name}, not {wanted}" if name != wanted else None


def _version(place: EntryPlace) -> tuple[int, ...]:
    """The numbers of a version; none where the layout does not tell it."""
    parts = (place.tilelang or "").split(".")[:3]
    return tuple(int(part) if part.isdigit() else 0 for part in parts) if parts[0] else ()
