"""The facts of an environment that decide which compiled kernels it can use.

Invariant: `key_facts` needs neither TileLang nor a GPU nor a compiler, so the host that builds a
cache and the host that serves from it come to the same text.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from tlcache.errors import RuntimeLibraryError

__all__ = [
    "facts_text",
    "glibc_version",
    "key_environment",
    "key_facts",
    "key_variables",
    "platform_name",
    "tilelang_path",
    "tilelang_version",
    "torch_version",
    "tvm_ffi_version",
    "versions",
]

# TileLang folds this variable into the pass configs, and so into its own cache key.
_KEY_VARIABLES = ("TILELANG_LAYOUT_COST_MODEL",)


def key_facts() -> str:
    """What an action key says of the environment, as canonical JSON."""
    return _key_facts(*key_variables().values())


@functools.cache
def _key_facts(*variables: str) -> str:
    return facts_text(versions(), dict(zip(_KEY_VARIABLES, variables, strict=True)))


def facts_text(versions: Mapping[str, str], variables: Mapping[str, str]) -> str:
    """The text of `key_facts` in an environment of these versions and variables."""
    facts = {**versions, **{name: value for name, value in variables.items() if value}}
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def key_variables() -> dict[str, str]:
    """The variables that `key_facts` counts, empty where they are not set."""
    return {name: os.environ.get(name, "").strip() for name in _KEY_VARIABLES}


@functools.cache
def versions() -> dict[str, str]:
    """Versions of TileLang and tvm-ffi, and the platform; of the installed packages, without
    importing.
    """
    return {
        "tilelang": tilelang_version(),
        "tvm_ffi": tvm_ffi_version(),
        "platform": platform_name(),
    }


def key_environment(target: str) -> str:
    """What one of TileLang's keys holds for besides its kernel, like `0.1.15 x86_64 sm_90a`."""
    return f"{tilelang_version()} {platform.machine()} {target}"


def platform_name() -> str:
    """TileLang's name of this platform, like `linux-x86_64`."""
    return f"{sys.platform}-{platform.machine()}"


@functools.cache
def tilelang_path() -> Path:
    """The directory of the installed TileLang package.

    Raises:
        RuntimeLibraryError: TileLang is not installed.
    """
    spec = importlib.util.find_spec("tilelang")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeLibraryError(
            "TileLang is not installed, and its version names the cache's entries",
            hint="`pip install tilelang`",
        )
    return Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def tilelang_version() -> str:
    """The version that TileLang says of itself, without importing it.

    A source checkout says more than its metadata; it is asked itself if it is imported already.
    """
    if (module := sys.modules.get("tilelang")) is not None:
        return str(module.__version__)
    version_file = tilelang_path().parent / "VERSION"
    if version_file.is_file():
        return version_file.read_text(encoding="utf-8").strip()
    return _distribution_version("tilelang", tilelang_path())


@functools.cache
def tvm_ffi_version() -> str:
    """The version of the installed apache-tvm-ffi."""
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeLibraryError(
            "apache-tvm-ffi is not installed, and it runs the compiled kernels",
            hint="`pip install apache-tvm-ffi`",
        )
    return _distribution_version(
        "apache_tvm_ffi", Path(next(iter(spec.submodule_search_locations)))
    )


@functools.cache
def torch_version() -> str | None:
    """The version of the installed torch, None where there is none. It is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        return _distribution_version("torch", Path(next(iter(spec.submodule_search_locations))))
    except RuntimeLibraryError:
        return None


def glibc_version() -> str | None:
    """The C library of this process, like `glibc 2.36`; None where it is another one."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or None
    except (AttributeError, ValueError, OSError):
        return None


@functools.cache
def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _distribution_version(name: str, package: Path) -> str:
    # Reading one directory's names costs a tenth of importlib.metadata's search over sys.path.
    for found in _names(package.parent):
        if found.startswith(f"{name}-") and found.endswith(".dist-info"):
            return found[len(name) + 1 : -len(".dist-info")]
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError as error:
        raise RuntimeLibraryError(
            f"{name} is at {package}, but its version cannot be found: it has no metadata",
            hint=f"`pip install {name.replace('_', '-')}`",
        ) from error
