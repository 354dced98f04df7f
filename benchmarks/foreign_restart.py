"""What a restart costs a program that calls TileLang itself: the first call of each of its kernels,
found on disk by TileLang, and restored by tlcache.

Measured is the time from a kernel's first call to the kernel in hand, launched or not, for each
kernel of the corpus (`tests/corpus`), in fresh processes that come to all of them one after another:

    disk        the program by itself; TileLang traces each kernel and finds it on disk
    restored    under `tlcache run`

What a process pays once, TileLang's import above all, is not in it. The kernels for CUDA are
compiled for sm_90a, and loaded, where there is no GPU as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import method
from method import Goal

METHOD = (
    "Fresh processes, interleaved round by round; per kernel the median of the rounds, and the ratio "
    "of these medians; the goal is the median of the kernels' ratios."
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


def measure(part: str, variant: str, root: Path) -> dict[str, Any]:
    """The milliseconds of each kernel's first call in a fresh process."""
    env = method.environment(root, PYTHONPATH=str(ROOT), TLCACHE_RUNTIME_DIR=str(root / "run"))
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
    return {name: kernel["ms"] for name, kernel in told["kernels"].items()}


def main() -> None:
    arguments = _arguments()
    rows, ratios = [], []
    result: dict[str, Any] = {"method": METHOD, "parts": {}}
    sums = {"disk": 0.0, "restored": 0.0}
    with method.scratch() as place:
        for part in arguments.part or ["cpu", "cuda"]:
            root = place / part
            method.note(f"{part}: compiling")
            measure(part, "filed", root)
            samples = method.interleaved(
                ["disk", "restored"],
                arguments.rounds,
                lambda variant, part=part, root=root: measure(part, variant, root),  # type: ignore[misc]
                discarded=2,  # TileLang's negative output indices drift to other keys once
            )
            result["parts"][part] = samples
            for name in samples["disk"][0]:
                disk, restored = (
                    statistics.median(sample[name] for sample in samples[variant])
                    for variant in ("disk", "restored")
                )
                sums["disk"] += disk
                sums["restored"] += restored
                ratios.append(disk / restored)
                rows.append([f"{part} {name}", f"{disk:.2f}", f"{restored:.2f}", f"{ratios[-1]:.1f}"])
    print(method.table(["KERNEL", "DISK MS", "RESTORED MS", "RATIO"], rows))
    print(
        f"\nsum of {len(rows)} kernels: disk {sums['disk']:.0f} ms, "
        f"restored {sums['restored']:.0f} ms: {sums['disk'] / sums['restored']:.1f}x"
    )
    goal = Goal("disk hit to restore, median", statistics.median(ratios), GOAL, least=True)
    print(goal)
    result |= {"sums_ms": sums, "goals": [goal.to_json()]}
    method.write_result(arguments.json, result)


if __name__ == "__main__":
    method.main(main)
