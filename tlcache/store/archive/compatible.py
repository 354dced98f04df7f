"""What of an archive a host can load.

Invariant: nothing is left out for what is not known of it or of the host: without a GPU, and
without a target that is named, a kernel's architecture is not asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tlcache import fingerprint, targets
from tlcache.errors import ArchiveError, RuntimeLibraryError, TargetError
from tlcache.store import calls, entry, files, layout
from tlcache.store.answers import Warmed
from tlcache.store.archive.index import Index, Thing
from tlcache.store.archive.reading import Staged
from tlcache.store.elf import Elf, ElfError

__all__ = ["Host", "glibc_needed", "host", "leave", "same_platform"]

_NEEDED = re.compile(rb"\0GLIBC_(\d{1,3})\.(\d{1,3})(?:\.\d{1,3})?(?=\0)")
_LIBRARIES = ("executable.so", "kernel_lib.so", "launcher_lib.so")


@dataclass(frozen=True)
class Host:
    """What decides which kernels a host can load; None where it is not known.

    Attributes:
        platform: Like `linux-x86_64`.
        tilelang: The directory in a root that the installed TileLang uses.
        tvm_ffi: The installed version.
        glibc: Major and minor version.
        targets: The GPU that is here, or the targets that were named.
    """

    platform: str
    tilelang: str | None
    tvm_ffi: str | None
    glibc: tuple[int, int] | None
    targets: tuple[str, ...]


def host(spellings: Iterable[str] = ()) -> Host:
    """This host, as if its GPUs were the targets that are named.

    Raises:
        TargetError: A target's spelling is unknown.
    """
    named = tuple(spellings)
    for spelling in named:
        targets.parse(spelling)
    if not named:
        try:
            # By a GPU's family: what was compiled for plain sm_90 loads where sm_90a does.
            named = (targets.detect().name.replace("_", "").rstrip("af"),)
        except TargetError:
            pass
    try:
        version: str | None = fingerprint.tilelang_version()
        tilelang = os.path.dirname(layout.namespace(version, "any")) if version else None
    except RuntimeLibraryError:
        tilelang = None
    try:
        tvm_ffi: str | None = fingerprint.tvm_ffi_version()
    except RuntimeLibraryError:
        tvm_ffi = None
    match = re.search(r"(\d+)\.(\d+)", fingerprint.glibc_version() or "")
    glibc = (int(match[1]), int(match[2])) if match else None
    return Host(fingerprint.platform_name(), tilelang, tvm_ffi, glibc, named)


def same_platform(index: Index) -> None:
    """Refuse an archive that has something for another platform than this.

    Raises:
        ArchiveError: What, and for which.
    """
    here = fingerprint.platform_name()
    for location, thing in index.things.items():
        if thing.place.platform not in (None, here):
            raise ArchiveError(
                f"{location} is for {thing.place.platform}, and this host is {here}",
                hint="`--compatible` imports what this host can load, and says what it leaves",
            )


def leave(staged: Staged, here: Host) -> None:
    """Note of what was staged what the host cannot load: `Staged.left`."""
    target_of: dict[str, set[str]] = {}
    for recorded in staged.index.records.values():
        target_of.setdefault(recorded.entry, set()).add(recorded.target)
    for location, thing in staged.index.things.items():
        if location in staged.present:
            continue
        why = _elsewhere(thing, here) or _architecture(staged, thing, here, target_of.get(location))
        if why is None:
            why = _libraries(staged, thing, here)
        if why is not None:
            staged.left[location] = why
    filed: tuple[tuple[dict[str, Any], Callable[[str, str], str]], ...] = (
        (staged.records, layout.record_path),
        (staged.calls, calls.path_of),
    )
    for those, path_of in filed:
        for key, found in list(those.items()):
            if isinstance(found, Warmed):
                continue  # of a kernel, not of how it is launched
            version = found.versions.get("tvm_ffi")
            if here.tvm_ffi is not None and version != here.tvm_ffi:
                del those[key]
                staged.left[path_of("", key)] = f"for tvm-ffi {version}, not {here.tvm_ffi}"


def _elsewhere(thing: Thing, here: Host) -> str | None:
    platform, tilelang = thing.place.platform, thing.place.tilelang
    if platform not in (None, here.platform):
        return f"for {platform}, not {here.platform}"
    if here.tilelang is not None and tilelang != here.tilelang:
        return f"of TileLang {tilelang or '0.1.8 or earlier'}, not {here.tilelang}"
    return None


def _architecture(
    staged: Staged, thing: Thing, here: Host, recorded: set[str] | None
) -> str | None:
    """Whether a kernel is for none of the host's GPUs. One for the CPU is for every host."""
    if not here.targets:
        return None
    names = recorded or _read(staged, thing).targets
    if not names or "cpu" in names:
        return None
    if any(targets.matches(wanted, name) for wanted in here.targets for name in names):
        return None
    return f"for {', '.join(sorted(names))}, not {', '.join(here.targets)}"


def _read(staged: Staged, thing: Thing) -> entry.Facts:
    location = os.path.join(staged.directory, thing.place.location)
    return entry.read(thing.place._replace(location=location)).facts


def _libraries(staged: Staged, thing: Thing, here: Host) -> str | None:
    for path in thing.files:
        if os.path.basename(path) in _LIBRARIES:
            data = files.read(os.path.join(staged.directory, path))
            needed = glibc_needed(data)
            if needed is not None and here.glibc is not None and needed > here.glibc:
                told, have = (".".join(map(str, each)) for each in (needed, here.glibc))
                return f"for glibc {told}, not {have}"
            host = _read(staged, thing).host if thing.place.platform is None else None
            if host is not None and not here.platform.endswith(host):
                return f"for {host}, not {here.platform}"
    return None


def glibc_needed(library: bytes) -> tuple[int, int] | None:
    """The newest version of glibc that a library asks for; None where it asks for none.

    The names of versions stand among those of symbols, one of its own too if it defines some:
    TileLang's libraries do not.
    """
    try:
        elf = Elf(library)
        section = elf.section(b".dynstr")
        names = elf.bytes_of(section) if section is not None else b""
    except ElfError:
        return None
    found = [(int(match[1]), int(match[2])) for match in _NEEDED.finditer(names)]
    return max(found, default=None)
