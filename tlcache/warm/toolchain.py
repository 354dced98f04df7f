"""The compilers that TileLang would use, found by its own rules, without importing it."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

from tlcache.errors import ToolchainError
from tlcache.targets import Target

__all__ = ["host_compiler", "missing", "nvcc", "provenance"]


@functools.cache
def nvcc() -> str | None:
    """The nvcc that TileLang finds: of CUDA_HOME, of PATH, of the pip package, of
    /usr/local/cuda.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is not None:
        candidates = [Path(home)]
    elif found := shutil.which("nvcc"):
        return found
    else:
        candidates = [*_pip_toolkits(), Path("/usr/local/cuda")]
    for candidate in candidates:
        program = candidate / "bin" / "nvcc"
        if os.access(program, os.X_OK):
            return str(program)
    return None


def _pip_toolkits() -> list[Path]:
    from importlib import metadata

    try:
        files = metadata.files("nvidia-cuda-nvcc") or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())).parent.parent for file in files if file.name == "nvcc"]


def host_compiler() -> str | None:
    """The C++ compiler that TileLang finds: CXX, CC, else g++, clang++ or c++ of PATH."""
    named = os.environ.get("CXX") or os.environ.get("CC")
    if named:
        return shutil.which(named)
    return next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def missing(target: Target) -> ToolchainError | None:
    """The error to raise for a target that cannot be compiled for here, or None where it can."""
    if host_compiler() is None:
        named = os.environ.get("CXX") or os.environ.get("CC")
        return ToolchainError(
            f"no C++ compiler for target {target}: "
            + (
                f"{named!r} (of CXX or CC) is not a program"
                if named
                else "g++, clang++, c++ are not on PATH"
            ),
            hint="`apt-get install g++`, or name one in CXX",
        )
    if target.is_cuda and nvcc() is None:
        return ToolchainError(
            f"no nvcc for target {target}: not in CUDA_HOME, on PATH, or in /usr/local/cuda",
            hint="`pip install 'tlcache[cuda]'` brings one, or set CUDA_HOME",
        )
    return None


@functools.cache
def provenance() -> dict[str, str | None]:
    """What a record says of the toolkit: nvcc's build, the host compiler, the driver."""
    return {"nvcc": _nvcc_build(), "host_compiler": _host_version(), "driver": _driver()}


def _nvcc_build() -> str | None:
    program = nvcc()
    text = _output([program, "--version"]) if program else ""
    match = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    return match[1] if match else None


def _host_version() -> str | None:
    program = host_compiler()
    text = _output([program, "--version"]) if program else ""
    return text.splitlines()[0].strip() if text else None


def _driver() -> str | None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
