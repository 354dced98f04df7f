"""What may be wrong with what lies in a cache root: damage, kernels that nothing asks for, several
toolkits' code, kernels that are there twice, other versions than the installed ones.

Invariant: a check reads and judges; it changes nothing, and raises for nothing that a root
contains. Each returns one finding, `ok` where it found nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tlcache.errors import UntrustedRootError
from tlcache.store import files, layout, record, scan, select
from tlcache.store.entry import Entry
from tlcache.store.trust import Trust
from tlcache.targets import Target, for_capability

__all__ = ["CHECKS", "Contents", "Finding", "Here", "contents"]
__all__ += ["damaged", "driver", "duplicates", "toolkits", "unreachable", "untrusted", "versions"]

_MOST = 4  # things that a sentence names
_OLD = "0.1.8 or earlier"


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        level: `ok`, `warn` (it costs time, or may serve other code) or `fail` (it does not work).
        what: The check's name, like `toolkits`.
        detail: A sentence with the actual values.
        remedy: What to do about it, usually a command in backticks; None where nothing is to do.
    """

    level: Literal["ok", "warn", "fail"]
    what: str
    detail: str
    remedy: str | None = None


@dataclass(frozen=True)
class Here:
    """What the checks know of this machine; None where there is none.

    Attributes:
        gpu: The target of the first visible GPU.
        versions: Of TileLang and tvm-ffi, and the platform, as records have them.
        nvcc: The build of nvcc.
        driver: Like `CUDA 13.0`.
    """

    gpu: Target | None = None
    versions: Mapping[str, str] | None = None
    nvcc: str | None = None
    driver: str | None = None

    @property
    def directory(self) -> str | None:
        """The directory in a root that TileLang keeps its things in."""
        if self.versions is None:
            return None
        return os.path.dirname(layout.namespace(self.versions["tilelang"], "any"))


@dataclass(frozen=True)
class Contents:
    """What lies in one root.

    Attributes:
        root: Its path.
        nested: It is below another root, for a deployment of its own.
        found: Everything in it.
        records: Its records as JSON by their paths; None for one that is damaged.
    """

    root: str
    nested: bool
    found: tuple[Entry, ...]
    records: Mapping[str, dict[str, Any] | None]

    @property
    def kernels(self) -> Iterator[Entry]:
        return (one for one in self.found if one.place.kind == "kernel")


def contents(base: str | os.PathLike[str]) -> list[Contents]:
    """Read the root at a path, and those one level below it."""
    base = os.fspath(base)
    roots = layout.roots(base)
    found: dict[str, list[Entry]] = {root: [] for root in roots}
    for one in scan.scan(base):
        inner = one.place.location[len(base) :].lstrip("/").partition("/")[0]
        place = os.path.join(base, inner)
        found[place if place in found else base].append(one)
    return [
        Contents(root, root != base, tuple(found[root]), dict(_records(root))) for root in roots
    ]


def _records(root: str) -> Iterator[tuple[str, dict[str, Any] | None]]:
    for path in layout.records(root):
        try:
            told = record.contents(files.read(os.fspath(path)))
        except OSError:
            continue
        except (ValueError, RecursionError):
            told = None
        yield os.fspath(path), told if isinstance(told, dict) else None


def _json(data: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(data)
        return document if isinstance(document, dict) else None
    except (ValueError, RecursionError):
        return None


# --- the checks ---


def damaged(at: Contents, here: Here) -> Finding:
    """Records and cuda-binaries that fail their own checksums, libraries that are not what their
    records say.
    """
    faults = []
    if broken := sum(data is None for data in at.records.values()):
        told = "record fails its own checksum", "records fail their own checksums"
        faults.append(_counted(broken, *told))
    if lost := sum(not _has_library(at.root, data) for data in at.records.values() if data):
        told = "record points", "records point"
        faults.append(f"{_counted(lost, *told)} at a library that is not there, or of another size")
    if cubins := [one for one in at.found if one.place.kind == "cuda-binary" and not _sound(one)]:
        told = "cubin in cuda-binaries fails its", "cubins in cuda-binaries fail their"
        faults.append(
            f"{_counted(len(cubins), *told)} checksum; TileLang recompiles at every start, and "
            "never replaces it"
        )
    if empty := [one for one in at.kernels if one.library is None or one.bytes == 0]:
        faults.append(f"{_counted(len(empty), 'kernel has', 'kernels have')} no library")
    if faults:
        return Finding("fail", "damaged", "; ".join(faults), "`tlcache verify --repair`")
    number = _counted(sum(1 for _ in at.kernels), "kernel", "kernels")
    filed = _counted(len(at.records), "record", "records")
    told_ok = f"nothing at a glance, of {number} and {filed}; `tlcache verify` reads every byte"
    return Finding("ok", "damaged", told_ok)


def untrusted(at: Contents, here: Here) -> Finding:
    """Libraries that tlcache refuses to load, since others can write them."""
    trust, refused, first = Trust(at.root), 0, None
    for path, data in at.records.items():
        if data is None or (library := _library(at.root, data)) is None:
            continue
        try:
            for one in (path, library):
                trust.check(one)
        except UntrustedRootError as error:
            refused += 1
            first = first or error
        except OSError:
            continue
    if first is None:
        told = "nobody else can write the root, its records or their libraries"
        return Finding("ok", "ownership", told)
    told = f"{_counted(refused, 'recorded kernel', 'recorded kernels')} cannot be restored"
    return Finding("fail", "ownership", f"{told}: {first.message}", first.hint)


def unreachable(at: Contents, here: Here) -> Finding:
    """Kernels that no `auto` lookup can hit: for targets that no GPU is detected as."""
    never: dict[str, list[Entry]] = {}
    others: dict[str, list[Entry]] = {}
    for one in at.kernels:
        if one.targets is None or "cpu" in one.targets:
            continue
        if len(one.targets) > 1 or not _is_detected(one.targets[0]):
            never.setdefault(one.target or "", []).append(one)
        elif here.gpu is not None and one.targets != (here.gpu.name,):
            others.setdefault(one.targets[0], []).append(one)
    if never:
        told = " and ".join(_unreachable(name, ones, here) for name, ones in sorted(never.items()))
        single = sorted(name for name in never if "," not in name)
        size = sum(one.bytes for name in single for one in never[name])
        remedies = []
        if single:
            options = " ".join(f"--target {name}" for name in single)
            remedies.append(f"`tlcache prune {options}` frees {_size(size)}")
        if wanted := sorted({_wanted(name) or "" for name in single} - {""}):
            remedies.append("warm with " + " or ".join(f"`--target {name}`" for name in wanted))
        if len(single) < len(never):
            remedies.append("compile for each GPU by itself, without `code` in the target")
        return Finding("warn", "unreachable", told, "; ".join(remedies))
    if others:
        told = " · ".join(f"{name} {len(ones):,}" for name, ones in sorted(others.items()))
        return Finding(
            "ok", "unreachable", f"none; kernels for other GPUs than this one ({here.gpu}): {told}"
        )
    return Finding("ok", "unreachable", "every kernel is for a target that `auto` detects")


def _unreachable(name: str, ones: list[Entry], here: Here) -> str:
    told = f"{_counted(len(ones), 'kernel', 'kernels')} for {name}: "
    if "," in name:
        return told + "`auto` never means several architectures"
    if here.gpu is not None:
        return told + f"this GPU asks for {here.gpu}"
    if name == "sm_50":
        return told + '`"cuda"` means that where no GPU is visible'
    return told + f"a GPU of this family asks for {_wanted(name)}"


def _is_detected(name: str) -> bool:
    return name != "sm_50" and _wanted(name) == name


def _wanted(name: str) -> str | None:
    """What `auto` asks for on a GPU of a target's family."""
    match = re.fullmatch(r"sm_(\d{1,2})(\d)[af]?", name)
    return for_capability(int(match[1]), int(match[2])).name if match and name != "sm_50" else None


def toolkits(at: Contents, here: Here) -> Finding:
    """Binaries of several builds of nvcc, or of host compilers: which one is served depends on who
    came first.
    """
    builds: dict[str, Counter[str]] = {}
    for one in at.found:
        if one.place.kind in ("kernel", "cuda-binary") and (build := _toolkit(one)) is not None:
            builds.setdefault(one.place.tilelang or _OLD, Counter())[build] += 1
    for version, counted in sorted(builds.items()):
        if len(counted) > 1:
            told = " · ".join(f"{name} {count:,}" for name, count in counted.most_common(_MOST))
            remedy = '`eval "$(tlcache env)"` gives each a root of its own'
            rarest = counted.most_common()[-1][0]
            if rarest[:1].isdigit():
                remedy += f"; `tlcache prune --toolkit {rarest}` deletes the fewest"
            return Finding(
                "warn",
                "toolkits",
                f"binaries of several compilers under one root (TileLang {version}): {told}; no "
                "key has the compiler in it, so what is served depends on who compiled first",
                remedy,
            )
    mine = [build for build in builds.get(here.directory or "", ()) if build[:1].isdigit()]
    if mine and here.nvcc is not None and not at.nested and mine[0] != here.nvcc:
        return Finding(
            "warn",
            "toolkits",
            f"the kernels are by nvcc {mine[0]}, and {here.nvcc} is installed: hits serve the code "
            "of the one, misses are compiled by the other",
            '`eval "$(tlcache env)"` gives this nvcc a root of its own',
        )
    names = sorted({build for counted in builds.values() for build in counted})
    if not names:
        return Finding("ok", "toolkits", "no kernel tells what compiled it")
    return Finding(
        "ok", "toolkits", f"all by {names[0]}" if len(names) == 1 else "one for each TileLang"
    )


def _toolkit(one: Entry) -> str | None:
    if one.record is not None and not one.record.is_cuda:
        return one.record.host_compiler
    return one.facts.toolkit


def duplicates(at: Contents, here: Here) -> Finding:
    """Kernels that are there twice under different keys."""
    groups = select.duplicates(at.found)
    if not groups:
        return Finding("ok", "duplicates", "no kernel is there twice")
    spare = [one for group in groups for one in group[1:]]
    names = sorted({one.kernel or "unnamed" for one in spare})
    shown = ", ".join(names[:_MOST]) + (" …" if len(names) > _MOST else "")
    return Finding(
        "warn",
        "duplicates",
        f"{_counted(len(spare), 'kernel is', 'kernels are')} there again by another key ({shown}; "
        f"{_size(sum(one.bytes for one in spare))}): after a hit TileLang rewrites a negative "
        "out_idx in place, and later shapes get other keys",
        "write `out_idx=[2]` for `[-1]` in `@tilelang.jit`: count from the front",
    )


def versions(at: Contents, here: Here) -> Finding:
    """What other versions than the installed ones wrote, and nothing reads any more."""
    if here.versions is None or at.nested:
        return Finding("ok", "versions", "not compared with the installed ones")
    installed = here.versions["tilelang"]
    old = Counter(one.place.tilelang or _OLD for one in at.kernels)
    old.pop(here.directory or "", None)
    size = sum(one.bytes for one in at.kernels if one.place.tilelang != here.directory)
    records: Counter[str] = Counter()
    for data in at.records.values():
        recorded = data.get("versions") if data is not None else None
        if isinstance(recorded, dict):
            for name, called in _CALLED.items():
                if recorded.get(name) != here.versions[name]:
                    records[f"{called} {recorded.get(name)}"] += 1
                    break
    faults = []
    if old:
        faults.append(
            f"{_counted(old.total(), 'kernel', 'kernels')} ({_size(size)}) of other TileLangs than "
            f"{installed}, which is installed: {_told(old)}"
        )
    if records:
        now = ", ".join(f"{called} {here.versions[name]}" for name, called in _CALLED.items())
        faults.append(
            f"{_counted(records.total(), 'record', 'records')} of another environment than this "
            f"({now}): {_told(records)}"
        )
    if not faults:
        return Finding("ok", "versions", f"all of TileLang {installed}")
    prune = f"`tlcache prune --tilelang '!={installed}'`"
    remedy = prune if old else "`tlcache warm` compiles and records them for this environment"
    return Finding("warn", "versions", "; ".join(faults) + "; nothing here reads them", remedy)


def _told(counted: Counter[str]) -> str:
    return " · ".join(f"{name} {count:,}" for name, count in sorted(counted.items()))


_CALLED = {"tilelang": "TileLang", "tvm_ffi": "tvm-ffi", "platform": "platform"}


def driver(at: Contents, here: Here) -> Finding:
    """Kernels of a newer CUDA than the driver knows."""
    if here.driver is None:
        return Finding("ok", "driver", "none here, so no CUDA kernel is loaded")
    known = int((re.search(r"\d+", here.driver) or ["0"])[0])
    newer = [one for one in at.kernels if _major(one.facts.toolkit) > known]
    if newer:
        builds = sorted({one.facts.toolkit or "" for one in newer})
        return Finding(
            "fail",
            "driver",
            f"{_counted(len(newer), 'kernel', 'kernels')} of nvcc {', '.join(builds)} cannot be "
            f"loaded: the driver knows {here.driver} at most",
            "update the driver, or compile with a toolkit of its major version",
        )
    return Finding("ok", "driver", f"{here.driver}, and no kernel needs a newer one")


def _major(build: str | None) -> int:
    match = re.match(r"\d{1,4}", build or "")
    return int(match[0]) if match else 0


CHECKS = (damaged, untrusted, unreachable, toolkits, duplicates, versions, driver)
"""All checks of a root, in the order in which they are shown."""


# --- what they share ---


def _library(root: str, data: Mapping[str, Any]) -> str | None:
    entry, library = data.get("entry"), data.get("library")
    name = library.get("name") if isinstance(library, dict) else None
    if not isinstance(entry, str) or not isinstance(name, str) or "\0" in entry + name:
        return None
    return os.path.join(root, entry, name)


def _has_library(root: str, data: Mapping[str, Any]) -> bool:
    path = _library(root, data)
    try:
        return path is not None and os.path.getsize(path) == data["library"].get("size")
    except OSError:
        return False


def _sound(one: Entry) -> bool:
    """Whether a cuda-binary is what its checksum says; one that has none is."""
    place = one.place.location
    sibling = f"{place}.sha256"
    try:
        if os.path.isdir(place):
            told = _json(files.read(os.path.join(place, "metadata.json"), unseen=True)) or {}
            return one.payload is not None and told.get("sha256") == one.payload
        if os.path.exists(sibling):
            return files.read(sibling, unseen=True)[:64].decode() == one.payload
    except (OSError, ValueError):
        return not os.path.exists(place)
    return one.bytes > 0


def _counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"
