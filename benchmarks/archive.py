"""What exporting and importing a cache costs, against tar and zstd.

    python benchmarks/archive.py                    # 1,000 kernels
    python benchmarks/archive.py --kernels 10000

Whole processes of `tlcache export` and `tlcache import` into an empty root, as ratios to
`tar --zstd` packing and unpacking the same tree, in turn, with a warm page cache. The root is as a
warm for a GPU leaves it: each kernel with its cuda-binary and its record. They are copies of the
real ones of TileLang 0.1.15 in `tests/store/fixtures/mixed_root.tar.xz` under keys of their own,
with 4 KiB of bytes of their own behind each library, which is what a kernel of a real root adds to
an archive.

`tar` neither hashes nor flushes. What `import` adds by flushing the disk once, as it must before a
record may point at an entry, is told by `tar --zstd` followed by `sync -f`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import tarfile
from pathlib import Path
from typing import Any

import large_root
import method
from method import Failure, Goal

__all__ = ["main", "make", "measure"]

VARIANTS = {
    "tar_pack": "tar --zstd -cf",
    "export": "tlcache export",
    "tar_unpack": "tar --zstd -xf",
    "tar_sync": "tar --zstd -xf; sync -f",
    "import": "tlcache import, empty root",
    "again": "tlcache import, all there",
}
METHOD = (
    "Whole processes in turn, one round discarded. Each unpacks into a directory that is not "
    "there; directories are deleted, and the file system flushed, before the clock starts."
)
_OWN = 4096
_KERNELS, _BINARIES = "0.1.15/linux-x86_64/kernels", "0.1.15/cuda-binaries"
_CODE = ("executable.so", "kernel.cubin")


def make(root: Path, count: int, place: Path) -> None:
    """Fill a root with `count` kernels that are whole by their manifests, each with its
    cuda-binary and a record.

    Raises:
        Failure: The fixture is not there, or holds no kernels.
    """
    if not large_root.FIXTURE.exists():
        raise Failure(f"{large_root.FIXTURE} is not there; run this from a checkout")
    with tarfile.open(large_root.FIXTURE) as archive:
        archive.extractall(place, filter="data")
    models = {
        where: sorted(code.parent for code in place.glob(f"{where}/*/{name}"))
        for where, name in zip((_KERNELS, _BINARIES), _CODE, strict=True)
    }
    if not all(models.values()):
        raise Failure(f"{large_root.FIXTURE} holds no kernels of 0.1.15")
    noise = random.Random(0)
    for number in range(count):
        key = hashlib.sha256(str(number).encode()).hexdigest()
        for where, some in models.items():
            own = noise.randbytes(_OWN) if where == _KERNELS else key.encode()
            _copy(some[number % len(some)], root / where / key, own)
        large_root._record(root, Path(_KERNELS, key), number)


def _copy(model: Path, entry: Path, own: bytes) -> None:
    """Copy an entry, with some bytes behind its code, and mend what tells of that."""
    entry.mkdir(parents=True)
    for file in model.iterdir():
        data = file.read_bytes()
        entry.joinpath(file.name).write_bytes(data + own if file.name in _CODE else data)
    for name, code in (("manifest.json", _CODE[0]), ("metadata.json", _CODE[1])):
        if (manifest := entry / name).exists():
            document = json.loads(manifest.read_text())
            data = entry.joinpath(code).read_bytes()
            told = document.get("files", {}).get(code, document)
            told.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
            manifest.write_text(json.dumps(document))


def measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Make the root, and run all rounds."""
    root = place / "root"
    root.mkdir(mode=0o700)
    method.note(f"making {options.kernels} kernels")
    make(root, options.kernels, place / "fixture")
    env = method.environment(root, TLCACHE_SCAN_CACHE=str(place / "scan.sqlite"))
    plain, packed, out = place / "plain.tar.zst", place / "packed.tar.zst", place / "out"
    unpack = f"mkdir {out} && tar --zstd -xf {plain} -C {out}"
    commands = {
        "tar_pack": ["tar", "--zstd", "-cf", str(plain), "-C", str(root), "."],
        "export": [*method.TLCACHE, "export", "-o", str(packed)],
        "tar_unpack": ["sh", "-c", unpack],
        "tar_sync": ["sh", "-c", f"{unpack} && sync -f {out}"],
        "import": [*method.TLCACHE, "import", str(packed), "--cache-dir", str(out)],
        "again": [*method.TLCACHE, "import", str(packed), "--cache-dir", str(out)],
    }
    samples: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(-1, options.rounds):
        for name in VARIANTS:
            method.note(f"round {number + 1} of {options.rounds}: {name}")
            if name != "again":
                shutil.rmtree(out, ignore_errors=True)
            os.sync()
            seconds = method.run(commands[name], env).seconds
            if number >= 0:
                samples[name].append(seconds)
    method.note("")
    return {
        "kernels": options.kernels,
        "bytes": sum(path.stat().st_size for path in root.rglob("*") if path.is_file()),
        "packed_bytes": {"tar": plain.stat().st_size, "export": packed.stat().st_size},
        "samples": samples,
    }


def _report(options: argparse.Namespace, measured: dict[str, Any]) -> None:
    samples = measured["samples"]
    base = {"export": "tar_pack", "import": "tar_unpack", "again": "tar_unpack"}
    base |= {"tar_sync": "tar_unpack", "tar_pack": "tar_pack", "tar_unpack": "tar_unpack"}
    against = {
        name: method.spread(method.ratios(samples[name], samples[base[name]]))["median"]
        for name in VARIANTS
    }
    synced = method.spread(method.ratios(samples["import"], samples["tar_sync"]))["median"]
    rows = [
        [label, method.duration(method.spread(samples[name])["median"]), f"{against[name]:.2f}x"]
        for name, label in VARIANTS.items()
    ]
    print(
        f"{measured['kernels']:,} kernels, {measured['bytes'] / 2**20:.0f} MiB; "
        f"medians of {options.rounds} rounds"
    )
    print()
    print(method.table(["command", "time", "to tar"], rows))
    goals = [
        Goal("export to tar --zstd", against["export"], 2, least=False),
        Goal("import to tar --zstd", against["import"], 2, least=False),
        Goal("import to tar --zstd and sync -f", synced, 2, least=False),
    ]
    print()
    for goal in goals:
        print(goal)
    method.write_result(
        options.json,
        {
            "benchmark": "archive",
            "method": METHOD,
            **measured,
            "goals": [goal.to_json() for goal in goals],
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Exporting and importing, against tar and zstd.")
    parser.add_argument("--kernels", type=method.positive, default=1000)
    parser.add_argument("--rounds", type=method.positive, default=5)
    parser.add_argument("--json", metavar="FILE", help="write all samples here")
    options = parser.parse_args()
    with method.scratch() as place:
        _report(options, measure(options, place))


if __name__ == "__main__":
    method.main(main)
