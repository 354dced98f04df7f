"""Whether the daemon follows a root that changes, and keeps it within its bounds.

    python benchmarks/daemon_follow.py                          # two minutes and a half
    python benchmarks/daemon_follow.py --standing 20000         # besides 20,000 entries that stay
    python benchmarks/daemon_follow.py --entries 1000 --seconds 6

Two phases, each with a service in a process of its own, on roots of the real entries that
`large_root.py` makes:

follow    Writers publish entries by rename, half of them recorded, and delete them again, spread
          over a minute. Once the index has not changed for 12 s it is compared with a fresh scan,
          place by place and byte by byte; measured is when it was so first.
bounds    Writers publish for as long, fifty entries a second, above the root's `max_size`; this
          process maps some of the libraries that it sees. Measured is the time from the last write
          until the bytes on disk are within the bound, and whether a mapped library is gone.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import large_root
import method
from method import Failure, Goal

__all__ = ["main", "measure"]

SERVED = Path(__file__).parents[1] / "tests" / "daemon" / "served.py"
METHOD = (
    "A service in a process of its own, asked over a pipe; writers are threads of this process. "
    "Memory and CPU time are the service's, from /proc. The bytes on disk are the blocks of all "
    "files and directories of entries and records."
)
_WRITERS = 4
_ALIVE = 200
_PATIENCE = 120.0
_SETTLED = 12.0


class Service:
    """A service, and what it takes."""

    def __init__(self, root: Path, place: Path, **settings: Any) -> None:
        given = {"roots": [str(root)], "history": str(place / "history"), **settings}
        self.process = subprocess.Popen(
            [sys.executable, str(SERVED), json.dumps(given)],
            env=method.environment(TLCACHE_SCAN_CACHE=str(place / "scan.sqlite")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(place / "service.log", "wb"),  # noqa: SIM115
            text=True,
        )
        start = time.perf_counter()
        if self._line() is not True:
            raise Failure(f"the service did not start; see {place / 'service.log'}")
        self.seconds = time.perf_counter() - start
        self._resident: list[float] = []

    def ask(self, question: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{question}\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Failure("the service has ended")
        return json.loads(line)

    def resident(self) -> float:
        """MiB of memory now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024

    def cpu(self) -> float:
        """Seconds of CPU time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.communicate(timeout=_PATIENCE)


class Writers:
    """Threads that publish copies of real entries by rename."""

    def __init__(self, models: Path, root: Path) -> None:
        self._root = root
        self._models: list[tuple[Path, Path | None]] = []
        for entry in sorted(models.glob("*/linux-x86_64/kernels/*")):
            records = [
                path
                for path in models.glob("tlcache/records/*/*.json")
                if entry.name in path.read_text(encoding="utf-8")
            ]
            self._models.append((entry, records[0] if records else None))
        self.published = 0

    def publish(self, number: int) -> tuple[Path, Path | None]:
        """One entry, and its record."""
        from tlcache.store import record

        model, filed = self._models[number % len(self._models)]
        key = f"{number:064x}"
        place = self._root / "0.1.15" / "linux-x86_64"
        staging = place / ".staging" / key
        shutil.copytree(model, staging)
        (place / "kernels").mkdir(exist_ok=True)
        staging.rename(place / "kernels" / key)
        path = None
        if filed is not None and number % 2:
            values = json.loads(filed.read_bytes())
            values.pop("checksum", None)
            values["entry"] = f"0.1.15/linux-x86_64/kernels/{key}"
            values["action_key"] = key[::-1]
            path = Path(record.layout.record_path(self._root, key[::-1]))
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_bytes(record.encode(values))
            temporary.rename(path)
        self.published += 1
        return place / "kernels" / key, path

    def run(self, count: int, seconds: float, *, deleting: bool) -> None:
        """Publish so many within so long, from several threads."""
        start = time.monotonic()

        def write(first: int) -> None:
            alive: deque[tuple[Path, Path | None]] = deque()
            for number in range(first, count, _WRITERS):
                due = start + seconds * number / count
                time.sleep(max(0.0, due - time.monotonic()))
                alive.append(self.publish(10**9 + number))
                if deleting and len(alive) > _ALIVE // _WRITERS:
                    entry, filed = alive.popleft()
                    if filed is not None:
                        filed.unlink()
                    shutil.rmtree(entry)
            while deleting and alive:
                entry, filed = alive.popleft()
                if filed is not None:
                    filed.unlink()
                shutil.rmtree(entry)

        threads = [threading.Thread(target=write, args=(n,)) for n in range(_WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def follow(options: argparse.Namespace, models: Path, place: Path) -> dict[str, Any]:
    """Entries appear and disappear; the index is compared with a fresh scan."""
    from tlcache.store import scan

    root = place / "root"
    root.mkdir(parents=True)
    if options.standing:
        method.note(f"follow: making {options.standing} entries that stay")
        large_root.make(root, options.standing, place / "fixture", 0.5)
    service = Service(root, place)
    resident, cpu = [service.resident()], service.cpu()
    method.note(f"follow: {options.entries} entries within {options.seconds:g} s")
    writers = Writers(models, root)
    writing = threading.Thread(
        target=writers.run, args=(options.entries, options.seconds), kwargs={"deleting": True}
    )
    start = time.perf_counter()
    writing.start()
    while writing.is_alive():
        writing.join(1.0)
        resident.append(service.resident())
    written = time.perf_counter() - start
    ended = time.perf_counter()

    seen: list[tuple[float, dict[str, int]]] = []
    while not seen or time.perf_counter() - seen[-1][0] < _SETTLED:
        index = service.ask("index")
        if not seen or seen[-1][1] != index:
            seen.append((time.perf_counter(), index))
        time.sleep(0.05)
    os.environ["TLCACHE_SCAN_CACHE"] = str(place / "own.sqlite")
    expected = {one.place.location: one.bytes for one in scan.scan(root)}
    if (index := service.ask("index")) != expected:
        differing = set(index.items()) ^ set(expected.items())
        raise Failure(f"the index does not agree with a scan: {sorted(differing)[:5]}")
    agreed = seen[-1][0] - ended
    stats = service.ask("stats")["roots"][0]
    cpu = service.cpu() - cpu
    service.end()
    return {
        "entries": writers.published,
        "standing": options.standing,
        "seconds": round(written, 1),
        "ready_seconds": round(service.seconds, 2),
        "agreed_seconds": round(agreed, 2),
        "differences": 0,
        "left": len(expected),
        "scans": stats["scans"],
        "overflows": stats["overflows"],
        "watches": stats["watches"],
        "cpu_seconds": round(cpu, 2),
        "resident_mib": {"first": round(resident[0], 1), "most": round(max(resident), 1)},
    }


def bounds(options: argparse.Namespace, models: Path, place: Path) -> dict[str, Any]:
    """Writers keep a root above its bound; it is waited for until it is within again."""
    root = place / "root"
    root.mkdir(parents=True)
    if options.standing:
        method.note(f"bounds: making {options.standing} entries that are there before")
        large_root.make(root, options.standing, place / "fixture", 0.5)
    most = max(20 * 2**20, int(_on_disk(root) * 0.98))
    service = Service(root, place, max_size=most)
    method.note(f"bounds: writing above {most / 2**20:.0f} MiB for {options.seconds:g} s")
    stop, held = threading.Event(), {}

    def hold() -> None:
        kernels = root / "0.1.15" / "linux-x86_64" / "kernels"
        while not stop.wait(0.05):
            for name in os.listdir(kernels) if kernels.exists() else ():
                if name not in held and int(name, 16) % 97 == 0 and len(held) < 40:
                    held[name] = _mapped(kernels / name)

    holding = threading.Thread(target=hold)
    holding.start()
    writers = Writers(models, root)
    writing = threading.Thread(
        target=writers.run, args=(options.written, options.seconds), kwargs={"deleting": False}
    )
    resident, sizes = [], []
    writing.start()
    while writing.is_alive():
        writing.join(2.0)
        sizes.append(_on_disk(root))
        resident.append(service.resident())
    ended = time.perf_counter()
    while (size := _on_disk(root)) > most:
        if time.perf_counter() - ended > _PATIENCE:
            raise Failure(f"{size} bytes on disk, {most} allowed: {service.ask('health')}")
        time.sleep(0.05)
    within = time.perf_counter() - ended
    stop.set()
    holding.join()
    kernels = root / "0.1.15" / "linux-x86_64" / "kernels"
    mapped = [name for name, one in held.items() if one is not None]
    lost = [name for name in mapped if not (kernels / name).exists()]
    evicted, since = 0.0, time.perf_counter()
    while not evicted and time.perf_counter() - since < _PATIENCE:  # it counts when it is done
        counters = service.ask("stats")["counters"]
        evicted = sum(one["value"] for one in counters if one["name"] == "evictions")
    service.end()
    return {
        "entries": writers.published,
        "standing": options.standing,
        "max_size": most,
        "above_share": round(sum(one > most for one in sizes) / len(sizes), 2),
        "largest": max(sizes),
        "within_seconds": round(within, 2),
        "left": size,
        "mapped": len(mapped),
        "mapped_gone": len(lost),
        "evicted": int(evicted),
        "resident_mib": {"most": round(max(resident), 1)},
    }


def _mapped(entry: Path) -> mmap.mmap | None:
    """A library of an entry, mapped while the entry was there."""
    try:
        library = next(path for path in entry.iterdir() if path.suffix == ".so")
        with library.open("rb") as file:
            found = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return found if library.exists() else None
    except (OSError, StopIteration, ValueError):
        return None


def _on_disk(root: Path) -> int:
    total = 0
    for top in (*root.glob("0.*/linux-x86_64/kernels"), root / "tlcache" / "records"):
        for directory, names, files in os.walk(top):
            inside = names if directory == str(top) and top.name == "kernels" else []
            for name in (*inside, *files):
                try:
                    total += os.lstat(os.path.join(directory, name)).st_blocks * 512
                except FileNotFoundError:
                    pass  # it is just going
    return total


def measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Both phases."""
    models = place / "models"
    models.mkdir()
    large_root.make(models, 12, place / "fixture", 1.0)
    return {
        "follow": follow(options, models, place / "follow"),
        "bounds": bounds(options, models, place / "bounds"),
        "load_average": os.getloadavg(),
    }


def _report(options: argparse.Namespace, measured: dict[str, Any]) -> None:
    one, other = measured["follow"], measured["bounds"]
    print(
        f"follow: {one['entries']:,} entries came and went within {one['seconds']:.0f} s, besides "
        f"{one['standing']:,} that stayed; {one['watches']} directories watched, "
        f"{one['overflows']} overflows, {one['cpu_seconds']:.1f} s of CPU time"
    )
    print(
        f"bounds: {other['entries']:,} entries written, above the bound in "
        f"{other['above_share']:.0%} of the looks; {other['evicted']:,} evicted, "
        f"{other['mapped']} libraries mapped"
    )
    goals = [
        Goal("differences from a fresh scan", one["differences"], 0, least=False, unit=""),
        Goal("until they agree", one["agreed_seconds"], 10, least=False, unit=" s"),
        Goal(
            "memory grown while following",
            one["resident_mib"]["most"] - one["resident_mib"]["first"],
            100,
            least=False,
            unit=" MiB",
        ),
        Goal("within the bound again", other["within_seconds"], 10, least=False, unit=" s"),
        Goal("mapped libraries gone", other["mapped_gone"], 0, least=False, unit=""),
    ]
    print()
    for goal in goals:
        print(goal)
    method.write_result(
        options.json,
        {
            "benchmark": "daemon_follow",
            "method": METHOD,
            **measured,
            "goals": [goal.to_json() for goal in goals],
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Following and bounding a root that changes.")
    parser.add_argument("--entries", type=method.positive, default=10_000)
    parser.add_argument("--written", type=method.positive, default=3000, help="in the second phase")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--standing", type=int, default=0, help="entries that are there before")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    with method.scratch() as place:
        _report(options, measure(options, place))


if __name__ == "__main__":
    method.main(main)
