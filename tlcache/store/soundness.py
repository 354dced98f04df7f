"""Whether a thing of TileLang's is what it should be: all its files, byte for byte, against its own
manifest, and each by its format.

TileLang itself hashes the library and the parameters, at load, and replaces an entry that fails. It
never looks at the sources, nor replaces a damaged cuda-binary, or parameters that are wrong under
a manifest that agrees with them.

Invariant: only files in the thing itself are opened, by their bare names; no link is followed, no
path that a file names is visited, and nothing is run or unpickled. What is written by a TileLang
newer than those known here is judged by its own checksums alone.
"""

from __future__ import annotations

import json
import pickletools
import re
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from tlcache.store import binary, device_code, params
from tlcache.store.elf import Elf, ElfError
from tlcache.store.layout import EntryPlace
from tlcache.store.opened import Content, Fault, Opened, Unsound, shown

__all__ = ["Verdict", "judge"]

_LIBRARIES = ("executable.so", "kernel_lib.so", "kernel.cubin", "kernel.py")
_PARAMS = ("params.json", "params.pkl")
_LOADED = (*_LIBRARIES, "launcher_lib.so", *_PARAMS)
_SOURCES = ("device_kernel.cu", "host_kernel.cu")
_TUNED = ("best_config.json", "latency.json", "function.pkl")
_MANIFEST, _METADATA = "manifest.json", "metadata.json"
_FORMAT = "tilelang.cuda-binary-cache.v1"
_KNOWN = {
    *_LOADED, *_SOURCES, *_TUNED, _MANIFEST, "kernel.cu", "wrapped_kernel.cu", "out_idx.json",
    "device_kernel.py", "host_kernel.py", "launcher.cpp", "prim_func.pkl",
}  # fmt: skip
_IGNORED = ("__pycache__",)
_NEWEST = (0, 1, 15)
_WITH_MANIFEST = (0, 1, 14)
_IN_DIRECTORIES = (0, 1, 15)  # cuda-binaries, one each
_MOST_JSON = 4 * 1024 * 1024
_MOST_FILES = 1000
_MACHINES = {62: "x86_64", 183: "aarch64"}
_ANY_DAMAGE = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)


class Verdict(NamedTuple):
    """What is wrong with a thing, and what its files are.

    Attributes:
        faults: What is wrong; of a thing in order, nothing.
        hashed: The size and sha256 of each of its files that was read.
    """

    faults: tuple[Fault, ...]
    hashed: dict[str, tuple[int, str]]


def judge(place: EntryPlace) -> Verdict:
    """Read all of a kernel, a cuda-binary, a tuner's result or a front end's index, and judge it.

    Raises:
        FileNotFoundError: It is gone.
        OSError: It cannot be opened.
    """
    with Opened(place.location) as opened:
        found = list(_judged(place, opened))
        found += [Fault("link", "error", name, "is a link") for name in opened.links]
        return Verdict(tuple(dict.fromkeys(found)), opened.hashed)


def _judged(place: EntryPlace, opened: Opened) -> Iterator[Fault]:
    if place.kind == "cuda-binary":
        yield from (_cuda_binary if opened.is_directory else _cuda_file)(place, opened)
    elif place.kind == "frontend":
        yield from _json(opened, opened.alone)
    elif place.kind == "autotuner":
        yield from _tuned(place, opened)
    else:
        yield from _kernel(place, opened)


# --- kernels and tuners' results ---


def _kernel(place: EntryPlace, opened: Opened) -> Iterator[Fault]:
    listed: dict[str, Any] | None = None
    if _since(place.tilelang, _WITH_MANIFEST) or _MANIFEST in opened.names:
        try:
            listed = _manifest(place, opened)
        except Unsound as unsound:
            yield unsound.fault
        else:
            yield from _against(listed, opened)
    library = next((name for name in _LIBRARIES if name in opened.names), None)
    if library is None:
        yield Fault("missing", "error", "", "has no library")
    if not _newer(place.tilelang):
        needed = _SOURCES if library not in ("kernel.py", None) and listed is not None else ()
        yield from _missing(needed, opened)
        if not any(name in _PARAMS for name in listed or ()):
            yield from _missing_params(opened)
    for name in opened.names:
        yield from _by_format(place, opened, name)
        if listed is not None and name not in listed and name in _LOADED:
            # The one that cutedsl's first launch leaves is nobody's to list.
            if not (name == "kernel.cubin" and library == "kernel.py"):
                what = f"is not in {_MANIFEST}"
                yield Fault("damaged", "error", name, what)
        elif name not in {*_KNOWN, *_IGNORED, *(listed or ())}:
            yield Fault("unknown", "note", name, "is nothing of TileLang's")


def _tuned(place: EntryPlace, opened: Opened) -> Iterator[Fault]:
    if not _newer(place.tilelang):
        yield from _missing(_TUNED, opened)
        yield from _missing_params(opened)
        if not any(name in opened.names for name in _LIBRARIES):
            yield Fault("missing", "error", "", "has no library")
    for name in opened.names:
        if name.endswith(".json") and name != "params.json":
            yield from _json(opened, name)
        else:
            yield from _by_format(place, opened, name)
        if name not in _KNOWN and name not in _IGNORED:
            yield Fault("unknown", "note", name, "is nothing of TileLang's")


def _missing(needed: tuple[str, ...], opened: Opened) -> Iterator[Fault]:
    for name in needed:
        if name not in opened.names:
            yield Fault("missing", "error", name, "is missing")


def _missing_params(opened: Opened) -> Iterator[Fault]:
    if not any(name in opened.names for name in _PARAMS):
        yield Fault("missing", "error", "", "has no parameters")


def _manifest(place: EntryPlace, opened: Opened) -> dict[str, Any]:
    """The files that a manifest lists.

    Raises:
        Unsound: It is no manifest.
    """
    document = _document(opened, _MANIFEST)
    listed = document.get("files")
    if not isinstance(listed, dict) or len(listed) > _MOST_FILES:
        raise Unsound(Fault("damaged", "error", _MANIFEST, "does not list the entry's files"))
    if document.get("version") != 1 and not _newer(place.tilelang):
        what = f"is of version {shown(repr(document.get('version')))}, not 1"
        raise Unsound(Fault("damaged", "error", _MANIFEST, what))
    return listed


def _against(listed: dict[str, Any], opened: Opened) -> Iterator[Fault]:
    """A manifest's files as it lists them. A name that is a path is not looked at."""
    for name, told in listed.items():
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            what = f"lists {shown(repr(name))}, which is no file of the entry"
            yield Fault("damaged", "error", _MANIFEST, what)
        elif not isinstance(told, dict):
            yield Fault("damaged", "error", _MANIFEST, f"does not tell what {shown(name)} is")
        else:
            yield from _checked(opened, name, told.get("size"), told.get("sha256"), _MANIFEST)


def _checked(opened: Opened, name: str, size: object, sha256: object, by: str) -> Iterator[Fault]:
    try:
        content = opened.read(name)
    except Unsound as unsound:
        yield unsound.fault
        return
    if isinstance(size, bool) or content.size != size:
        what = f"has {content.size:,} bytes, and {shown(repr(size))} by {by}"
        yield Fault("damaged", "error", name, what)
    elif content.sha256 != sha256:
        yield Fault("damaged", "error", name, f"fails its checksum in {by}")


# --- cuda-binaries ---


def _cuda_binary(place: EntryPlace, opened: Opened) -> Iterator[Fault]:
    """A directory with one binary and its metadata, which TileLang never replaces."""
    names = [name for name in opened.names if name.startswith("kernel.")]
    if len(names) != 1:
        what = "has no binary" if not names else f"has {len(names)} binaries, not 1"
        yield Fault("missing" if not names else "damaged", "error", "", what)
    try:
        told = _document(opened, _METADATA)
    except Unsound as unsound:
        yield unsound.fault
        told = None
    if told is not None and told.get("format") != _FORMAT and not _newer(place.tilelang):
        what = f"is of format {shown(repr(told.get('format')))}"
        yield Fault("damaged", "error", _METADATA, what)
    for name in names:
        if told is not None:
            yield from _checked(opened, name, told.get("size"), told.get("sha256"), _METADATA)
        yield from _by_format(place, opened, name)
    for name in opened.names:
        if name != _METADATA and name not in names:
            yield Fault("unknown", "note", name, "is nothing of TileLang's")


def _cuda_file(place: EntryPlace, opened: Opened) -> Iterator[Fault]:
    """A binary as 0.1.14 and earlier kept it; 0.1.14 with its checksum beside it."""
    name = opened.alone
    if _since(place.tilelang, _IN_DIRECTORIES):
        yield Fault("misplaced", "error", "", "is a file where TileLang looks for a directory")
        return
    yield from _by_format(place, opened, name)
    beside = f"{name}.sha256"
    try:
        checksum = opened.read(beside).data or b""
    except Unsound as unsound:
        if unsound.fault.kind != "missing":
            yield unsound.fault
        return
    try:
        if checksum.strip() != opened.read(name).sha256.encode():
            yield Fault("damaged", "error", "", f"fails its checksum in {beside[64:]}")
    except Unsound:
        pass  # said already


# --- by format ---


def _by_format(place: EntryPlace, opened: Opened, name: str) -> Iterator[Fault]:
    known = name in _KNOWN or name.startswith("kernel.") or name == opened.alone
    if name in opened.links or not (known or name.endswith(".pkl")):
        return
    if not known and name in opened.directories:
        return
    try:
        content = opened.read(name)
    except Unsound as unsound:
        if unsound.fault.kind != "missing":
            yield unsound.fault
        return
    if name.endswith((".so", ".cubin", ".fatbin")):
        what = _binary(name, content, place)
    elif name in _PARAMS:
        what = _params(name, content, place)
    elif name.endswith(".pkl"):
        what = _pickle(content)
        if what is None:
            runs = "is a pickle: to load it is to run what it says"
            yield Fault("code", "note", name, runs)
    else:
        what = "is empty" if not content.size and name in (*_LIBRARIES, *_SOURCES) else None
    if what is not None:
        yield Fault("damaged", "error", name, what)


def _binary(name: str, content: Content, place: EntryPlace) -> str | None:
    """What is wrong with a library or with device code."""
    data = content.data
    if not content.size:
        return "is empty"
    if data is None:
        return None  # so large that nothing of TileLang's is; its checksum holds
    try:
        if not name.endswith(".so"):
            if data[:4] == device_code.CUBIN and not _whole(Elf(data)):
                return "is cut off"
            return None if device_code.read(data) else "holds no device code"
        elf = Elf(data)
        if not _whole(elf):
            return "is cut off"
        machine = _MACHINES.get(elf.machine, str(elf.machine))
        wanted = (place.platform or machine).rpartition("-")[2].replace("arm64", "aarch64")
        if machine != wanted:
            return f"is for the machine {machine}, not {wanted}"
        if name in _LIBRARIES and binary.read(name, data).host is None:
            return "holds damaged device code"
    except (ElfError, struct.error, OverflowError) as error:
        return f"is damaged: {error}"
    return None


def _whole(elf: Elf) -> bool:
    """Whether all that an ELF file's headers name lies in it."""
    size = len(elf.data)
    (start,) = struct.unpack_from("<Q", elf.data, 32)
    width, count = struct.unpack_from("<HH", elf.data, 54)
    if count and start + width * count > size:
        return False
    sections = elf.sections()
    return all(each.kind in (0, 8) or each.offset + each.size <= size for each in sections)


def _params(name: str, content: Content, place: EntryPlace) -> str | None:
    data = content.data
    if not content.size:
        return "is empty"
    is_json = name == "params.json"
    if data is not None and (params.from_json if is_json else params.from_pickle)(data) is not None:
        return None
    if _newer(place.tilelang):
        return None
    if is_json:
        return "does not hold parameters, so TileLang misses this kernel at each start"
    return "does not hold parameters as TileLang writes them, and runs what it says when loaded"


def _pickle(content: Content) -> str | None:
    """What is wrong with a pickle; it is read, never loaded."""
    try:
        for _ in pickletools.genops(content.data or b""):
            pass
    except (*_ANY_DAMAGE, OverflowError, MemoryError) as error:
        return f"is cut off or damaged: {shown(str(error))}"
    return None


def _json(opened: Opened, name: str) -> Iterator[Fault]:
    try:
        _parsed(opened, name)
    except Unsound as unsound:
        yield unsound.fault


def _document(opened: Opened, name: str) -> dict[str, Any]:
    document = _parsed(opened, name)
    if not isinstance(document, dict):
        raise Unsound(Fault("damaged", "error", name, "is not a JSON object"))
    return document


def _parsed(opened: Opened, name: str) -> Any:
    content = opened.read(name)
    if content.data is None or content.size > _MOST_JSON:
        what = f"has {content.size:,} bytes, more than any of its kind"
        raise Unsound(Fault("damaged", "error", name, what))
    try:
        return json.loads(content.data)
    except (ValueError, RecursionError) as error:
        what = f"is not JSON: {shown(str(error))}" if content.size else "is empty"
        raise Unsound(Fault("damaged", "error", name, what)) from None


# --- versions ---


def _numbers(version: str | None) -> tuple[int, ...]:
    match = re.match(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", version or "")
    return tuple(int(part or 0) for part in match.groups()) if match else ()


def _since(version: str | None, first: tuple[int, ...]) -> bool:
    return _numbers(version) >= first


def _newer(version: str | None) -> bool:
    """Whether a version is newer than what is known here, so that its formats may be others."""
    return _numbers(version) > _NEWEST
