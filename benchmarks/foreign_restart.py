"""What a restart costs a program that calls TileLang itself: the first call of each of its kernels,
found on disk by TileLang, and restored by tlcache.

Measured is the time from a kernel's first call to the kernel in hand, for each kernel of the corpus
(`tests/corpus`), in fresh processes that come to all of them one after another:

    disk        the program by itself; TileLang traces each kernel and finds it on disk
    restored    under `tlcache run`

What a process pays once, TileLang's import above all, is not in it. The kernels for CUDA are
compiled for sm_90a, and loaded, where there is no GPU as well.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import method
from method import Goal

METHOD = (
    "Fresh processes, interleaved round by round; per kernel the median of the rounds, and the "
    "ratio of these medians; the goal is the median of the kernels' ratios."
)
GOAL = 20.0
ROOT = Path(__file__).resolve().parents[1]
TARGETS = {"cpu": "c", "cuda": '{"kind": "cuda", "arch": "sm_90a"}'}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="First calls after a restart, kernel by kernel.")
    parser.add_argument("--rounds", type=method.positive, default=7, help="rounds (7)")
    parser.add_argument("--json", metavar="FILE", help="write all samples here")
    parser.add_argument(
        "--part", choices=["cpu", "cuda"], action="append", help="only this part of the corpus"
    )
    return parser.parse_args()


def measure(part: str, variant: str, *, root: Path) -> dict[str, Any]:
    """The milliseconds of each kernel's first call in a fresh process: wall, and of the CPU."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = method.environment(root, PYTHONPATH=path, TLCACHE_RUNTIME_DIR=str(root / "run"))
    if part == "cpu" or method.visible_gpu() is None:
        env["TILELANG_DEFAULT_TARGET"] = TARGETS[part]
    program = [sys.executable, "-m", "tests.corpus.program", part]
    hooks = [sys.executable, "-c", "from tlcache.cli import main; main()", "run", "--"]
    ran = method.run(program if variant == "disk" else [*hooks, *program], env, cwd=ROOT)
    told = json.loads(ran.out.splitlines()[-1])
    if variant == "restored":
        others = [n for n, k in told["kernels"].items() if k["class"] != "RestoredKernel"]
        if others:
            raise method.Failure(f"not restored: {', '.join(others)}: {told['refused']}")
    return {name: (kernel["ms"], kernel["cpu_ms"]) for name, kernel in told["kernels"].items()}


def main() -> None:
    arguments = _arguments()
    result: dict[str, Any] = {"method": METHOD, "samples": {}, "goals": []}
    goals = []
    with method.scratch() as place:
        for part in arguments.part or ["cpu", "cuda"]:
            root = place / part
            method.note(f"{part}: compiling")
            measure(part, "filed", root=root)
            measured = functools.partial(measure, part, root=root)
            # TileLang's negative output indices drift to other keys, and are compiled once more.
            samples = method.interleaved(
                ["disk", "restored"], arguments.rounds, measured, discarded=3
            )
            result["samples"][part] = samples
            goals.append(report(part, samples))
    print(*goals, sep="\n")
    method.write_result(arguments.json, result | {"goals": [goal.to_json() for goal in goals]})


def report(part: str, samples: dict[str, list[dict[str, Any]]]) -> Goal:
    """Print what came of one part of the corpus."""
    rows, ratios, sums = [], [], [0.0, 0.0, 0.0, 0.0]
    for name in samples["disk"][0]:
        disk, restored, disk_cpu, restored_cpu = found = [
            statistics.median(sample[name][kind] for sample in samples[variant])
            for kind in (0, 1)
            for variant in ("disk", "restored")
        ]
        sums = [one + other for one, other in zip(sums, found, strict=True)]
        ratios.append((disk / restored, disk_cpu / restored_cpu))
        rows.append([name, *(f"{one:.2f}" for one in found), *(f"{r:.1f}" for r in ratios[-1])])
    rows.append(["sum", *(f"{one:.0f}" for one in sums)])
    rows[-1] += [f"{sums[0] / sums[1]:.1f}", f"{sums[2] / sums[3]:.1f}"]
    middle = [statistics.median(one[kind] for one in ratios) for kind in (0, 1)]
    rows.append(["median", "", "", "", "", *(f"{one:.1f}" for one in middle)])
    header = [part, "DISK MS", "RESTORED MS", "DISK CPU", "RESTORED CPU", "RATIO", "CPU RATIO"]
    print(method.table(header, rows), end="\n\n")
    return Goal(f"{part}: disk hit to restore, median", middle[0], GOAL, least=True)


if __name__ == "__main__":
    method.main(main)
