"""What the tests of the store share: a record with its library on disk, and small file systems."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tlcache.spec import KernelSpec
from tlcache.store.record import Dynamic, Launch, Library, Param, Record
from tlcache.targets import CPU

ENTRY = "0.1.15/linux-x86_64/kernels/" + "7b" * 32
BYTES = b"\x7fELF" + bytes(range(256)) * 8
RECORD = Record(
    action_key="c5" * 32,
    spec=KernelSpec(
        "ops.kernels.rms_norm:rms_norm",
        {"M": "dynamic", "N": 64, "eps": 1e-6, "dtype": "float32"},
        {"block_m": 1, "threads": 1},
        CPU,
    ),
    entry=ENTRY,
    library=Library("kernel_lib.so", len(BYTES), hashlib.sha256(BYTES).hexdigest()),
    launch=Launch(
        "c",
        "call",
        (
            Param("x", "float32", ("rows", 64)),
            Param("w", "float32", (64,)),
            Param("y", "float32", ("rows", 64)),
        ),
        (2,),
        (Dynamic("rows", "int32", 0, 0),),
    ),
    versions={"tilelang": "0.1.15", "tvm_ffi": "0.1.12", "platform": "linux-x86_64"},
    toolkit={"nvcc": None, "host_compiler": "g++ (Debian 12.2.0) 12.2.0", "driver": None},
    source_digest="0f" * 32,
    compile_seconds=1.953,
    created="2026-01-31T12:00:00+00:00",
)


@dataclass(frozen=True)
class Filed:
    """A record, and where the library lies that it names."""

    root: Path
    record: Record
    library: Path

    def but(self, **changes: Any) -> Record:
        return replace(self.record, **changes)


@pytest.fixture
def filed(tmp_path: Path) -> Filed:
    """A root with the library of one entry, and the record for it, which is not written yet."""
    root = tmp_path / "root"
    library = root / RECORD.entry / RECORD.library.name
    library.parent.mkdir(parents=True)
    library.write_bytes(BYTES)
    return Filed(root, RECORD, library)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount an empty file system in memory with options such as `size=64k`."""
    places: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"mounted{len(places)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no `mount` here")
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", str(place)], check=True)
