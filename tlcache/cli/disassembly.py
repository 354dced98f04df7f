"""The device code of an entry as SASS, by a disassembler of NVIDIA's where there is one.

Invariant: what an entry holds is only ever the disassembler's input, in a directory of its own, and
it gets a minute.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tlcache.errors import KernelError, ToolchainError
from tlcache.store import files, machine_code
from tlcache.store.entry import Entry

__all__ = ["disassembler", "sass"]

_PROGRAMS = ("nvdisasm", "cuobjdump")
_SECONDS = 60


def disassembler() -> str | None:
    """The path of nvdisasm or cuobjdump: of PATH, of the CUDA toolkit, or of Triton's package."""
    for place in (None, *_places()):
        for name in _PROGRAMS:
            found = shutil.which(name, path=place)
            if found is not None:
                return found
    return None


def _places() -> list[str]:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = [os.path.join(home, "bin") for home in homes if home]
    # Beside this Python's packages, without importing any of them.
    inside = ("triton/backends/nvidia/bin", "nvidia/cu13/bin", "nvidia/cuda_nvcc/bin")
    packages = [place for place in sys.path if place.endswith("-packages")]
    return found + [os.path.join(place, below) for place in packages for below in inside]


def sass(one: Entry) -> str:
    """The SASS of an entry, one architecture after the other.

    Raises:
        KernelError: It has no device code, or such that the disassembler does not understand.
        ToolchainError: There is no disassembler here.
    """
    name = one.library or ""
    alone = one.place.location.endswith(f"/{name}")
    path = one.place.location if alone else os.path.join(one.place.location, name)
    try:
        cubins = machine_code.cubins(name, files.read(path, unseen=True)) if name else ()
    except OSError as error:
        raise KernelError(f"{path} cannot be read: {error.strerror}") from error
    if not cubins:
        raise KernelError(
            f"{one.place.key[:12]} has no device code for an NVIDIA GPU: it is for "
            f"{one.target or 'an unknown target'}",
            hint=f"`tlcache inspect {one.place.key[:12]} --source device` shows its source",
        )
    program = disassembler()
    if program is None:
        raise ToolchainError(
            "neither nvdisasm nor cuobjdump is on PATH or in a CUDA toolkit",
            hint="install the CUDA toolkit's binary utilities, or set CUDA_HOME",
        )
    return "\n".join(_disassembled(program, cubin, one) for cubin in cubins)


def _disassembled(program: str, cubin: bytes, one: Entry) -> str:
    option = "-c" if os.path.basename(program) == "nvdisasm" else "-sass"
    with tempfile.TemporaryDirectory(prefix="tlcache-") as place:
        file = Path(place) / "kernel.cubin"
        file.write_bytes(cubin)
        try:
            done = subprocess.run(
                [program, option, str(file)],
                capture_output=True,
                timeout=_SECONDS,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise KernelError(f"{program} takes longer than {_SECONDS} s") from error
        except OSError as error:
            raise ToolchainError(f"{program} does not run: {error.strerror}") from error
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip().replace(str(file), "it")
        raise KernelError(
            f"{os.path.basename(program)} does not understand the device code of "
            f"{one.place.key[:12]}: {told[-200:] or f'exit code {done.returncode}'}",
            hint="a disassembler of a newer CUDA toolkit may",
        )
    return done.stdout.decode(errors="replace").strip("\n") + "\n"
