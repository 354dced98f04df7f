"""What `tlcache run --shapes` costs before its command starts, and eight that start together.

First, on a root that has every kernel of the document, the whole process of

    exec        `true`, by itself
    run         `tlcache run -- true`
    shapes      `tlcache run --shapes FILE -- true`
    no hooks    the same with `--no-hooks`

in turn, round by round; what `--shapes` adds is the difference to `run` within each round. The
kernels are two that were really compiled for the CPU, copied with their records under other row
counts.

Then, each into an empty root, `tlcache run --shapes FILE --require all -- true` alone, and eight of
them started together; the time is until the last one has ended. How often each kernel was compiled
is counted by a script in front of the C++ compiler.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import method
from method import Goal

from tlcache.store import layout, record
from tlcache.targets import CPU

METHOD = (
    "Whole processes, timed by their parent and interleaved round by round; page cache and "
    "bytecode warm. Differences and ratios within each round, medians of the rounds."
)
ADDS = 0.3
TOGETHER = 1.1
RANKS = 8


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What `tlcache run --shapes` costs.")
    parser.add_argument("--rounds", type=method.positive, default=25, help="rounds (25)")
    parser.add_argument("--kernels", type=method.positive, default=1000, help="that are there")
    parser.add_argument("--compiled", type=method.positive, default=32, help="by eight at once")
    parser.add_argument("--cold-rounds", type=int, default=3, help="rounds of those (3)")
    parser.add_argument("--json", metavar="FILE", help="write all samples here")
    return parser.parse_args()


def _document(path: Path, kernels: int) -> None:
    rows = {"from": 1, "to": kernels}
    workload = {"op": "rms_norm", "M": rows, "N": 256, "dtype": "float32"}
    path.write_text(json.dumps({"version": 1, "targets": ["cpu"], "workloads": [workload]}))


def prepare(place: Path, kernels: int) -> tuple[Path, Path]:
    """A root that has so many kernels, with its manifest, and the document that asks for them."""
    from ops.catalog import OPERATORS

    root, shapes = place / "root", place / "shapes.json"
    _document(shapes, 2)
    method.warm(shapes, CPU, root)
    originals = [record.parse(path.read_bytes(), path) for path in layout.records(root)]
    for rows in range(3, kernels + 1):
        original = originals[rows % len(originals)]
        assert original is not None
        spec = OPERATORS["rms_norm"].spec({"M": rows, "N": 256, "dtype": "float32"}, CPU)
        name = hashlib.sha256(f"entry {rows}".encode()).hexdigest()
        entry = str(Path(original.entry).with_name(name))
        shutil.copytree(root / original.entry, root / entry)
        record.write(root, replace(original, spec=spec, action_key=spec.action_key(), entry=entry))
    _document(shapes, kernels)
    method.warm(shapes, CPU, root)
    return root, shapes


def _alone(command: list[str], env: dict[str, str], place: Path) -> dict[str, Any]:
    start = time.perf_counter()
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, check=True, env=env, cwd=place, stdin=subprocess.DEVNULL, **quiet)
    return {"seconds": time.perf_counter() - start}


def _together(count: int, shapes: Path, place: Path) -> dict[str, Any]:
    """So many that start at once on an empty root."""
    root, log, script = place / "empty", place / "compiled", place / "cxx"
    shutil.rmtree(root, ignore_errors=True)
    log.unlink(missing_ok=True)
    compiler = shutil.which("g++") or "g++"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *-shared*) echo x >> {log} ;; esac\nexec {compiler} "$@"\n'
    )
    script.chmod(0o755)
    command = [*method.TLCACHE, "run", "--shapes", str(shapes), "--require", "all", "--", "true"]
    env = method.environment(root, CXX=str(script))
    start = time.perf_counter()
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    ranks = [subprocess.Popen(command, env=env, cwd=place, **quiet) for _ in range(count)]
    codes = [rank.wait() for rank in ranks]
    seconds = time.perf_counter() - start
    if any(codes):
        raise method.Failure(f"of {count} that started together, one ended with {max(codes)}")
    return {"seconds": seconds, "compiles": len(log.read_text().splitlines())}


def main() -> None:
    options = _arguments()
    with method.scratch() as place:
        method.note("preparing the kernels")
        root, shapes = prepare(place, options.kernels)
        env = method.environment(root)
        ask = ["--shapes", str(shapes)]
        commands = {
            "exec": ["true"],
            "run": [*method.TLCACHE, "run", "--", "true"],
            "shapes": [*method.TLCACHE, "run", *ask, "--", "true"],
            "no hooks": [*method.TLCACHE, "run", *ask, "--no-hooks", "--", "true"],
        }
        samples = method.interleaved(
            list(commands), options.rounds, lambda name: _alone(commands[name], env, place)
        )
        few = place / "few.json"
        _document(few, options.compiled)
        cold = method.interleaved(
            ["alone", "eight"],
            options.cold_rounds,
            lambda name: _together(1 if name == "alone" else RANKS, few, place),
        )
    _report(options, samples, cold)


def _report(
    options: argparse.Namespace,
    samples: dict[str, list[dict[str, Any]]],
    cold: dict[str, list[dict[str, Any]]],
) -> None:
    seconds = {name: [one["seconds"] for one in found] for name, found in samples.items()}
    together = {name: [one["seconds"] for one in found] for name, found in cold.items()}
    pairs = zip(seconds["shapes"], seconds["run"], strict=True)
    added = [one - other for one, other in pairs]
    ratios = method.ratios(together["eight"], together["alone"])
    goals = [
        Goal("--shapes adds", method.spread(added)["median"], ADDS, least=False, unit=" s"),
        Goal("eight against one", method.spread(ratios)["median"], TOGETHER, least=False),
    ]
    rows = []
    for name, values in {**seconds, **together}.items():
        found = method.spread(values)
        rows.append([name, *(method.duration(found[key]) for key in ("median", "min", "max"))])
    print(f"{options.kernels} kernels there; {options.compiled} compiled into an empty root")
    print()
    print(method.table(["process", "median", "min", "max"], rows))
    print()
    for goal in goals:
        print(goal)
    compiles = {one["compiles"] for found in cold.values() for one in found}
    print(f"compiles into an empty root: {', '.join(map(str, sorted(compiles)))}")
    method.write_result(
        options.json,
        {
            "benchmark": "entrypoint",
            "method": METHOD,
            "kernels": options.kernels,
            "compiled": options.compiled,
            "seconds": {n: method.spread(v) for n, v in {**seconds, **together}.items()},
            "added": added,
            "ratios": ratios,
            "goals": [goal.to_json() for goal in goals],
            "samples": {**samples, **cold},
        },
    )
    if compiles != {options.compiled}:
        raise method.Failure(f"{options.compiled} kernels were compiled {compiles} times")


if __name__ == "__main__":
    method.main(main)
