"""What listing and planning cost on a large cache root.

    python benchmarks/large_root.py                       # 60,000 entries; makes about 3.7 GB
    python benchmarks/large_root.py --entries 5000

Whole processes of `ls` without and with a scan cache and of `prune --dry-run`, as ratios to
`find ROOT -type f -printf '%s\\n'`, in turn, with a warm page cache. The root is made of the real
entries in `tests/store/fixtures/mixed_root.tar.xz`: each a copy of one of them under a key of its
own, its library's content made distinct. With `--records`, that share of them has a record, as
`tlcache warm` files them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import method
from method import Failure, Goal

__all__ = ["main", "make", "measure"]

FIXTURE = Path(__file__).parents[1] / "tests" / "store" / "fixtures" / "mixed_root.tar.xz"
LIBRARIES = ("executable.so", "kernel_lib.so")
VARIANTS = {
    "find": "find -type f -printf '%s\\n'",
    "first": "ls, no scan cache yet",
    "second": "ls, again",
    "prune": "prune --tilelang '<0.1.15' --dry-run",
}
METHOD = (
    "Whole processes with their output to a file, in turn, one round discarded; 'first' begins "
    "without a scan cache, the others have it. Peak memory is the process's own, from wait4."
)


def make(root: Path, count: int, place: Path, records: float = 0.0) -> None:
    """Fill a root with `count` kernel entries of three TileLang releases, a share of them recorded.

    Raises:
        Failure: The fixture is not there, or holds no kernels.
    """
    if not FIXTURE.exists():
        raise Failure(f"{FIXTURE} is not there; run this from a checkout")
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(place, filter="data")
    models = []
    for library in sorted(place.rglob("kernels/*/*.so")):
        if library.name in LIBRARIES and library.stat().st_size < 200_000:
            entry = library.parent
            files = {file.name: file.read_bytes() for file in entry.iterdir() if file.is_file()}
            models.append((entry.relative_to(place).parent, files))
    if not models:
        raise Failure(f"{FIXTURE} holds no kernels")
    for number in range(count):
        where, files = models[number % len(models)]
        key = hashlib.sha256(str(number).encode()).hexdigest()
        entry = root / where / key
        entry.mkdir(parents=True)
        for name, data in files.items():
            entry.joinpath(name).write_bytes(
                data + key[:16].encode() if name in LIBRARIES else data
            )
        if number % 100 < 100 * records:
            _record(root, where / key, number)


def _record(root: Path, entry: Path, number: int) -> None:
    """File a record of rms_norm for an entry, one workload after the other."""
    from tlcache import targets
    from tlcache.spec import KernelSpec
    from tlcache.store import record
    from tlcache.store.record import Launch, Library, Param, Record

    rows, size = number % 1024 + 1, 1024 * (number % 7 + 1)
    target = targets.for_capability(9, 0)
    spec = KernelSpec(
        "ops.kernels.rms_norm:rms_norm",
        {"M": rows, "N": size, "eps": 1e-5 + number * 1e-9, "dtype": "bfloat16"},
        {"block_m": 1, "threads": 256},
        target,
    )
    (library,) = (root / entry).glob("*.so")
    data, key = library.read_bytes(), hashlib.sha256(f"record {number}".encode()).hexdigest()
    params = (
        Param("x", "bfloat16", (rows, size)),
        Param("w", "bfloat16", (size,)),
        Param("y", "bfloat16", (rows, size)),
    )
    made = Record(
        action_key=key,
        spec=spec,
        entry=str(entry),
        library=Library(library.name, len(data), hashlib.sha256(data).hexdigest()),
        launch=Launch("tvm_ffi", "main", params, (2,), ()),
        versions={"tilelang": "0.1.15", "tvm_ffi": "0.1.12", "platform": "linux-x86_64"},
        toolkit={"nvcc": "13.0.88", "host_compiler": "g++ 12.2.0", "driver": None},
        source_digest=hashlib.sha256(b"source").hexdigest(),
        compile_seconds=2.0,
        created="2026-01-31T12:00:00+00:00",
    )
    path = Path(record.layout.record_path(root, key))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(record.encode(made.to_json()))


def _run(command: list[str], env: dict[str, str], out: Path) -> dict[str, float]:
    """Seconds and peak memory of a process, in MiB."""
    peak = 0.0

    def watch(process: subprocess.Popen[Any]) -> None:
        nonlocal peak
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        peak = usage.ru_maxrss / 1024

    ran = method.run(command, env, watch=watch)
    out.write_text(ran.out, encoding="utf-8", errors="replace")
    return {"seconds": ran.seconds, "peak_mib": round(peak, 1)}


def measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Make the root, and run all rounds."""
    root = Path(options.root) if options.root else place / "root"
    if not root.exists():
        method.note(f"making {options.entries} entries")
        root.mkdir(mode=0o700)
        make(root, options.entries, place / "fixture", options.records / 100)
    cache = place / "scan"
    env = method.environment(root, TLCACHE_SCAN_CACHE=str(cache / "scan.sqlite"))
    commands = {
        "find": ["find", str(root), "-type", "f", "-printf", "%s\\n"],
        "first": [*method.TLCACHE, "ls"],
        "second": [*method.TLCACHE, "ls"],
        "prune": [*method.TLCACHE, "prune", "--tilelang", "<0.1.15", "--dry-run"],
    }
    place.joinpath("out").mkdir()

    def one(variant: str) -> dict[str, Any]:
        if variant == "first":
            shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir(exist_ok=True)
        return _run(commands[variant], env, place / "out" / variant)

    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for number in range(-1, options.rounds):
        for name in VARIANTS:  # not rotated: `first` fills the cache of those after it
            method.note(f"round {number + 1} of {options.rounds}: {name}")
            sample = one(name)
            if number >= 0:
                samples[name].append(sample)
    method.note("")
    listed = (place / "out" / "second").read_text(encoding="utf-8").count("\n") - 1
    return {"entries": listed, "records_percent": options.records, "samples": samples}


def _report(options: argparse.Namespace, measured: dict[str, Any]) -> None:
    samples = measured["samples"]
    seconds = {name: [one["seconds"] for one in taken] for name, taken in samples.items()}
    against = {
        name: method.spread(method.ratios(taken, seconds["find"]))["median"]
        for name, taken in seconds.items()
    }
    peaks = {name: max(one["peak_mib"] for one in taken) for name, taken in samples.items()}
    rows = [
        [
            label,
            method.duration(method.spread(seconds[name])["median"]),
            f"{against[name]:.1f}x",
            f"{peaks[name]:.0f} MiB",
        ]
        for name, label in VARIANTS.items()
    ]
    print(f"{measured['entries']:,} entries; medians of {options.rounds} rounds")
    print()
    print(method.table(["command", "time", "to find", "peak"], rows))
    goals = [
        Goal("first ls to find", against["first"], 20, least=False),
        Goal("second ls to find", against["second"], 3, least=False),
        Goal("peak memory", max(peaks.values()), 300, least=False, unit=" MiB"),
    ]
    print()
    for goal in goals:
        print(goal)
    method.write_result(
        options.json,
        {
            "benchmark": "large_root",
            "method": METHOD,
            **measured,
            "goals": [goal.to_json() for goal in goals],
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Listing and planning on a large cache root.")
    parser.add_argument("--entries", type=method.positive, default=60_000)
    parser.add_argument("--records", type=int, default=0, help="percent of them with a record")
    parser.add_argument("--rounds", type=method.positive, default=3)
    parser.add_argument("--root", metavar="DIR", help="use this root instead of making one")
    parser.add_argument("--json", metavar="FILE", help="write all samples here")
    options = parser.parse_args()
    with method.scratch() as place:
        _report(options, measure(options, place))


if __name__ == "__main__":
    method.main(main)
