"""`tlcache doctor`: everything that is checked of the cache, the machine and the environment.

Each check is one small function that returns one finding, with its remedy. What a root contains is
judged by `tlcache.store.checkup`.

Invariant: nothing is changed, neither torch nor TileLang is imported, and whatever is wrong is a
finding, never an exception.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from tlcache import fingerprint, switches, targets
from tlcache.errors import RuntimeLibraryError, TargetError, UntrustedRootError
from tlcache.store import checkup, layout, mounts
from tlcache.store.checkup import Contents, Finding, Here
from tlcache.store.mounts import Mount
from tlcache.store.trust import Trust
from tlcache.warm import toolchain

__all__ = ["MOUNTS", "examine", "here", "mount_of"]
__all__ += [
    "access",
    "caching",
    "compilers",
    "file_system",
    "gpu",
    "installed",
    "of_contents",
    "set_root",
]

MOUNTS = "/proc/self/mountinfo"
_UNTUNED = "TILELANG_AUTO_TUNING_DISABLE_CACHE"
_SCARCE, _FULL = 2**30, 32 * 2**20
_LIBRARIES = ("libtvm_runtime.so", "libtilelang.so")


def examine(override: str | None = None, machine: Here | None = None) -> list[Finding]:
    """Check everything, in the order in which it is shown.

    Args:
        override: The cache root of the command line.
        machine: What is known of this machine; found out where None.
    """
    machine = machine if machine is not None else here()
    root = layout.cache_root(override)
    at = checkup.contents(os.path.abspath(root))
    return [
        set_root(override),
        caching(),
        file_system(root),
        access(root),
        gpu(machine),
        installed(machine),
        compilers(machine, at[0]),
        *of_contents(at, machine),
    ]


def here() -> Here:
    """This machine."""
    tools = toolchain.provenance()
    try:
        gpu = targets.detect()
    except TargetError:
        gpu = None
    try:
        versions = fingerprint.versions()
    except RuntimeLibraryError:
        versions = None
    return Here(gpu, versions, tools["nvcc"], tools["driver"])


def of_contents(at: list[Contents], machine: Here) -> Iterator[Finding]:
    """The checks of the root, and of the roots below it what they find fault with."""
    for check in checkup.CHECKS:
        for one in at:
            found = check(one, machine)
            if not one.nested:
                yield found
            elif found.level != "ok":
                named = f"{found.detail} (in {os.path.basename(one.root)})"
                yield Finding(found.level, found.what, named, found.remedy)


# --- the root ---


def set_root(override: str | None) -> Finding:
    """Which root is in force, and who says so."""
    named = os.environ.get("TILELANG_CACHE_DIR")
    root = layout.cache_root(override)
    if override is not None:
        told = f"{root} (of --cache-dir"
        if named != override:
            told += f"; TileLang itself uses {named or layout.default_root()}"
        return Finding("ok", "cache root", told + ")")
    if named is None and layout.configured_root() is not None:
        return Finding(
            "warn",
            "cache root",
            f"{root} (of tlcache.toml); a program that uses TileLang without tlcache compiles into "
            "~/.tilelang/cache, since TILELANG_CACHE_DIR is not set",
            f"`export TILELANG_CACHE_DIR={shlex.quote(str(root))}` for such a program",
        )
    if named is None:
        return Finding("ok", "cache root", f"{root} (default; TILELANG_CACHE_DIR is not set)")
    if not named:
        return Finding(
            "fail",
            "cache root",
            "TILELANG_CACHE_DIR is set and empty: TileLang cannot make such a directory",
            "`unset TILELANG_CACHE_DIR`, or name one",
        )
    if named.startswith("~"):
        return Finding(
            "warn",
            "cache root",
            f"TILELANG_CACHE_DIR is {named}: TileLang does not expand the ~, so this is a "
            f"directory of that name in {os.getcwd()}",
            f"`export TILELANG_CACHE_DIR={os.path.expanduser(named)}`",
        )
    if not os.path.isabs(named):
        return Finding(
            "warn",
            "cache root",
            f"TILELANG_CACHE_DIR is {named}: another directory for each working directory",
            f"`export TILELANG_CACHE_DIR={shlex.quote(os.path.abspath(named))}`",
        )
    return Finding("ok", "cache root", f"{root} (of TILELANG_CACHE_DIR)")


def caching() -> Finding:
    """Whether anything is kept at all."""
    if layout.caching_disabled():
        value = os.environ["TILELANG_DISABLE_CACHE"]
        return Finding(
            "fail",
            "caching",
            f"TILELANG_DISABLE_CACHE is {value}: every process compiles, and keeps nothing",
            "`unset TILELANG_DISABLE_CACHE`",
        )
    if switches.said(_UNTUNED):
        return Finding(
            "warn",
            "caching",
            f"{_UNTUNED} is {os.environ[_UNTUNED]}: TileLang tunes at every start",
            f"`unset {_UNTUNED}`",
        )
    return Finding("ok", "caching", "on")


def mount_of(place: str) -> Mount | None:
    """The file system that a directory is on; None where the kernel does not tell."""
    return mounts.holding(place, mounts.read(MOUNTS))


def file_system(root: Path) -> Finding:
    """What kind of file system the root is on, and the room on it."""
    place = _existing(root)
    mounted = mount_of(place)
    kind = mounted.kind if mounted is not None else "unknown"
    networked = mounted is not None and mounted.is_shared
    told = f"{'network' if networked else 'local'} {kind}"
    if kind == "tmpfs":
        told += " (in memory: it is lost at a restart)"
    elif kind == "overlay":
        told += " (what is written goes with the container)"
    try:
        room = os.statvfs(place)
    except OSError as error:
        return Finding("fail", "file system", f"{place}: {(error.strerror or '').lower()}", None)
    free = room.f_bavail * room.f_frsize
    told += f", {free / 2**30:,.1f} GiB free"
    prune = (
        "`tlcache prune --unused-for 30d` frees some, or name another root in TILELANG_CACHE_DIR"
    )
    if free < _FULL or (room.f_files and not room.f_favail):
        return Finding(
            "fail", "file system", f"{told}, {room.f_favail:,} inodes: it is full", prune
        )
    if free < _SCARCE:
        return Finding("warn", "file system", f"{told}: that is little", prune)
    if networked:
        return Finding(
            "warn",
            "file system",
            f"{told}: a kernel that is deleted while another host uses it can break that host",
            "a root on a local disk: `tlcache env --base /var/cache/tilelang`",
        )
    return Finding("ok", "file system", told)


def access(root: Path) -> Finding:
    """Whether the root is there, may be written, and by nobody else."""
    if not root.exists():
        place = _existing(root)
        if not os.access(place, os.W_OK | os.X_OK):
            return Finding(
                "fail",
                "access",
                f"{root} is not there, and cannot be made in {place}: `import tilelang` fails",
                "name a writable directory in TILELANG_CACHE_DIR",
            )
        return Finding("ok", "access", f"{root} is not there yet; TileLang makes it")
    if not root.is_dir():
        return Finding(
            "fail", "access", f"{root} is not a directory", "name another in TILELANG_CACHE_DIR"
        )
    mounted = mount_of(os.fspath(root))
    if not os.access(root, os.W_OK | os.X_OK) or (mounted is not None and mounted.read_only):
        return _read_only(root)
    try:
        Trust(root).check_root()
    except UntrustedRootError as error:
        return Finding("fail", "access", error.message, error.hint)
    except OSError as error:
        return Finding("fail", "access", f"{root}: {(error.strerror or '').lower()}", None)
    owner = root.stat().st_uid
    told = "" if owner == os.geteuid() else f", owned by uid {owner}"
    return Finding("ok", "access", f"writable{told}, and not by others")


def _read_only(root: Path) -> Finding:
    try:
        place = root / layout.namespace(fingerprint.tilelang_version(), fingerprint.platform_name())
        whole = all((place / name).is_dir() for name in ("kernels", ".staging"))
    except RuntimeLibraryError:
        whole = False
    if whole:
        return Finding(
            "warn",
            "access",
            f"{root} is read-only: what is in it is found, and a CUDA kernel that is not cannot be "
            "compiled",
            "warm all kernels before it becomes read-only: `tlcache warm --shapes FILE --check`",
        )
    return Finding(
        "fail",
        "access",
        f"{root} is read-only, and lacks this TileLang's directories: `import tilelang` fails",
        "`tlcache warm` makes them while it is writable; or name another TILELANG_CACHE_DIR",
    )


def _existing(place: Path) -> str:
    """The directory itself, or the nearest one above it that is there."""
    place = place.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return os.fspath(place)


# --- the machine ---


def gpu(machine: Here) -> Finding:
    """What `auto` means here, and whether the driver can load what nvcc makes."""
    named = os.environ.get("TILELANG_DEFAULT_TARGET", "").strip()
    if machine.gpu is None:
        if named == "cuda":
            return Finding(
                "warn",
                "GPU",
                "none is visible, and TILELANG_DEFAULT_TARGET is cuda: that means sm_50 here",
                """`export TILELANG_DEFAULT_TARGET='{"kind": "cuda", "arch": "sm_90a"}'`""",
            )
        return Finding("ok", "GPU", 'none is visible: name targets, since "cuda" means sm_50 here')
    told = f"`auto` means {machine.gpu}"
    if named and named not in ("auto", "cuda"):
        told += f"; TILELANG_DEFAULT_TARGET is {named}"
    if machine.driver and machine.nvcc and _major(machine.driver) < _major(machine.nvcc):
        return Finding(
            "fail",
            "GPU",
            f"{told}; the driver knows {machine.driver} at most, and nvcc is {machine.nvcc}: what "
            "it compiles cannot be loaded",
            "update the driver, or install a toolkit of its major version and set CUDA_HOME",
        )
    return Finding("ok", "GPU", told)


def _major(text: str) -> int:
    match = re.search(r"\d{1,4}", text)
    return int(match[0]) if match else 0


def installed(machine: Here) -> Finding:
    """Whether TileLang and tvm-ffi are there, with the libraries that a restored kernel needs."""
    if machine.versions is None:
        try:
            fingerprint.tilelang_path()
            fingerprint.versions()
        except RuntimeLibraryError as error:
            return Finding("fail", "TileLang", error.message, error.hint)
    try:
        place = fingerprint.tilelang_path() / "lib"
    except RuntimeLibraryError as error:
        return Finding("fail", "TileLang", error.message, error.hint)
    lacking = [name for name in _LIBRARIES if not (place / name).is_file()]
    if lacking:
        return Finding(
            "fail",
            "TileLang",
            f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not in {place}",
            "`pip install --force-reinstall tilelang`",
        )
    versions = machine.versions or {}
    return Finding(
        "ok", "TileLang", f"{versions.get('tilelang')}, tvm-ffi {versions.get('tvm_ffi')}"
    )


def compilers(machine: Here, at: Contents) -> Finding:
    """nvcc and the host compiler; a host without them serves what it finds, and nothing else."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    named = os.environ.get("CXX") or os.environ.get("CC")
    nvcc, host = toolchain.nvcc(), toolchain.host_compiler()
    if nvcc is None and home is not None:
        return Finding(
            "fail",
            "compiler",
            f"CUDA_HOME is {home}, which has no bin/nvcc, and TileLang looks nowhere else",
            "`unset CUDA_HOME`, or name a toolkit's directory",
        )
    if host is None and named:
        return Finding(
            "fail",
            "compiler",
            f"{named!r} (of CXX or CC) is not a program, and TileLang looks for no other",
            "`unset CXX CC`, or name a C++ compiler",
        )
    if nvcc is not None and host is not None:
        build = machine.nvcc or "of unknown version"
        told = f"nvcc {build}, {toolchain.provenance()['host_compiler'] or host}"
        if machine.nvcc is None:
            return Finding("fail", "compiler", f"{nvcc} does not run", "`nvcc --version` says why")
        return Finding("ok", "compiler", told)
    lacking = " and ".join(
        name for name, there in (("nvcc", nvcc), ("C++ compiler", host)) if there is None
    )
    wanted = machine.gpu.name if machine.gpu is not None else None
    ready = sum(one.record is not None and wanted in (one.targets or ()) for one in at.kernels)
    if wanted is not None and ready:
        return Finding(
            "ok",
            "compiler",
            f"no {lacking}: a runtime-only host. {ready:,} kernel{'s' * (ready != 1)} for {wanted} "
            "can be restored; a miss is an error",
        )
    remedy = "`pip install 'tlcache[cuda]'` brings nvcc" if nvcc is None else ""
    remedy += ", " if remedy and host is None else ""
    remedy += "`apt-get install g++`" if host is None else ""
    return Finding(
        "warn",
        "compiler",
        f"no {lacking}: a runtime-only host, and no kernel for "
        f"{wanted or 'a GPU'} in {at.root} that it could restore",
        remedy + "; or bring a cache that was warmed elsewhere",
    )
