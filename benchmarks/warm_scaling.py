"""How fast `tlcache warm` compiles with 1, 2, 4 … all cores, against TileLang's own ways.

Measured are kernels a second, each run in fresh processes on an empty cache root of its own:

    warm N       `tlcache warm --jobs N`
    par_compile  `tilelang.par_compile` over the same kernels in one process, a thread a core
    one by one   their JITImpls called in turn in one process; fewer kernels, and the others taken
                 to cost as much as these

Two times of each: the whole process from interpreter start to exit, which is what a person waits
for, and the compile phase in it, without start-up. Of a warm, the phase goes from the start of the
first kernel to the last record: the record's time of writing, and the seconds in `--json`, say
both. Of the others, it goes from the end of `import tilelang` to the last kernel.

TileLang keeps device binaries by their source, and kernels that differ in M alone often have the
same. So a kernel costs much where its device code is new, and less where it is not; the costs of
one by one are reckoned for the two apart, by how many device binaries a whole warm leaves.

Parallel efficiency of N jobs is (rate at N / N) / (rate at 1).

Memory is sampled in one more run at the most jobs, which is not timed: reading it costs time.
Counted is the proportional set size (PSS) of a worker and of its compilers: a page that n processes
share counts as 1/n in each, so that the sum over all processes is what the machine has to hold.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import method
import psutil
from method import Goal

from tlcache.spec import KernelSpec
from tlcache.store import layout
from tlcache.targets import Target

METHOD = (
    "Fresh processes on empty cache roots, interleaved; kernels a second by the whole process from "
    "interpreter start to exit, and by its compile phase alone; page cache warm."
)

BEFORE = """
import json, sys, time
job = json.load(open(sys.argv[1]))
import tilelang
from ops.kernels.rms_norm import rms_norm
start = time.perf_counter()
"""

AFTER = """
seconds = time.perf_counter() - start
assert len(kernels) == len(job["workloads"])
assert all(kernel.artifact is not None for kernel in kernels), "some were not compiled"
print("ANSWER " + json.dumps({"phase": seconds}))
"""

PAR_COMPILE = f"""{BEFORE}
functions = []
for workload, schedule in zip(job["workloads"], job["schedules"]):
    impl = rms_norm(**workload, target=job["target"])
    functions.append(impl.get_tir(**schedule))
kernels = tilelang.par_compile(
    functions,
    out_idx=impl.out_idx,
    execution_backend=impl.execution_backend,
    target=impl.target,
    target_host=impl.target_host,
    pass_configs=impl.pass_configs,
    compile_flags=impl.compile_flags,
    num_workers=job["workers"],
)
{AFTER}"""

ONE_BY_ONE = f"""{BEFORE}
import glob
kernels, costs, made = [], [], 0
for workload, schedule in zip(job["workloads"], job["schedules"]):
    begin = time.perf_counter()
    kernels.append(rms_norm(**workload, target=job["target"])(**schedule))
    took = time.perf_counter() - begin
    before, made = made, len(glob.glob(job["binaries"]))
    costs.append([took, made > before])
{AFTER.replace('"phase": seconds', '"phase": seconds, "costs": costs')}"""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Kernels a second of `tlcache warm`, par_compile, and one by one."
    )
    parser.add_argument(
        "--target", default="auto", help="cpu, sm90, …; auto: the GPU here, else cpu"
    )
    parser.add_argument("--kernels", type=method.positive, default=96, help="how many (96)")
    parser.add_argument(
        "--serial-kernels", type=method.positive, default=12, help="how many one by one (12)"
    )
    parser.add_argument(
        "--jobs", type=_numbers, help="like 1,2,4; by default powers of two, and all cores"
    )
    parser.add_argument("--rounds", type=method.positive, default=1, help="rounds (1)")
    parser.add_argument("--json", metavar="FILE", help="write all samples here")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return sorted({1, *map(method.positive, text.split(","))})


def _powers(most: int) -> list[int]:
    """1, 2, 4 … and `most` itself."""
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


# --- runs ---

BINARIES = "*/cuda-binaries/*"
"""TileLang's device binaries, below a cache root."""


def _warm(
    place: Path,
    kernels: Sequence[KernelSpec],
    target: Target,
    jobs: int,
    watch: Callable[[subprocess.Popen[Any]], None] | None = None,
) -> dict[str, Any]:
    """One `tlcache warm` into an empty root; its whole time and its compile phase, in seconds."""
    root = _empty(place)
    document, ran = method.warm(place / "shapes.json", target, root, jobs=jobs, watch=watch)
    counts = document["summary"]
    if counts["compiled"] != len(kernels):
        raise method.Failure(f"{counts['compiled']} of {len(kernels)} kernels were compiled")
    ends, starts = [], []
    for kernel in document["kernels"]:
        end = Path(layout.record_path(root, kernel["action_key"])).stat().st_mtime
        ends.append(end)
        starts.append(end - kernel["seconds"])
    return {
        "kernels": len(kernels),
        "whole": ran.seconds,
        "phase": max(ends) - min(starts),
        "binaries": len(list(root.glob(BINARIES))),
        "compile_seconds": [kernel["seconds"] for kernel in document["kernels"]],
    }


def _tilelang(
    place: Path, kernels: Sequence[KernelSpec], target: Target, program: str, workers: int
) -> dict[str, Any]:
    """One of TileLang's own ways, in a process of its own."""
    job, root = place / "job.json", _empty(place)
    method.write_json(
        job,
        {
            "workloads": [dict(spec.workload) for spec in kernels],
            "schedules": [dict(spec.schedule) for spec in kernels],
            "target": target.name,
            "workers": workers,
            "binaries": str(root / BINARIES),
        },
    )
    found, ran = method.answer(program, job, method.environment(root))
    return {"kernels": len(kernels), "whole": ran.seconds, **found}


def _fewer(kernels: Sequence[KernelSpec], count: int) -> list[KernelSpec]:
    """Some of the kernels: up to four row counts for each of some row lengths, spread evenly."""
    by_width: dict[Any, list[KernelSpec]] = {}
    for spec in kernels:
        by_width.setdefault(spec.workload["N"], []).append(spec)
    widths = list(by_width.values())
    rows = min(4, max(map(len, widths)))
    wanted = min(len(widths), -(-count // rows))
    picked = [widths[index * len(widths) // wanted] for index in range(wanted)]
    ranked = itertools.chain.from_iterable(itertools.zip_longest(*picked))
    return [spec for spec in ranked if spec is not None][:count]


def _extrapolated(sample: dict[str, Any], kernels: int, binaries: int) -> float:
    """The compile phase of one by one for all kernels, in seconds.

    The first kernel counts as it is, since it pays what is paid once; the others by the mean of
    those whose device code was new, or was not.
    """
    first, *rest = sample["costs"]
    if not rest:
        return float(first[0]) * kernels
    means = {}
    for new in (True, False):
        costs = [cost for cost, was_new in rest if was_new == new]
        means[new] = statistics.mean(costs or [cost for cost, _ in rest])
    new = max(0, binaries - 1) if first[1] else binaries
    return float(first[0] + means[True] * new + means[False] * (kernels - 1 - new))


def _empty(place: Path) -> Path:
    root = place / f"root-{time.monotonic_ns()}"
    root.mkdir(mode=0o700)
    return root


# --- memory ---


@dataclass
class Memory:
    """Peaks of one warm, in bytes, by proportional set size.

    Attributes:
        worker: The most that one worker and its compilers took at one time.
        python: The most that one worker took without its compilers.
        workers: The most that all workers and their compilers took at one time.
        total: The most that the whole command took, its fork server included.
        samples: How often it was looked at.
    """

    worker: int = 0
    python: int = 0
    workers: int = 0
    total: int = 0
    samples: int = 0

    def watch(self, process: subprocess.Popen[Any]) -> None:
        """Look at a command and all that it starts, until it ends."""
        while process.poll() is None:
            self._look(process.pid)
            time.sleep(PERIOD)

    def _look(self, command: int) -> None:
        sizes, parents = {command: _proportional(command)}, {}
        for pid, parent in _descendants(command):
            sizes[pid], parents[pid] = _proportional(pid), parent
        # The command's children are the fork server and multiprocessing's tracker; workers are
        # theirs, and whatever a worker starts is its own.
        groups = {pid: 0 for pid, parent in parents.items() if parents.get(parent) == command}
        for pid in parents:
            worker = pid
            while worker not in groups and worker in parents:
                worker = parents[worker]
            if worker in groups:
                groups[worker] += sizes[pid]
        self.samples += 1
        self.worker = max([self.worker, *groups.values()])
        self.python = max([self.python, *(sizes[worker] for worker in groups)])
        self.workers = max(self.workers, sum(groups.values()))
        self.total = max(self.total, sum(sizes.values()))


PERIOD = 0.1
"""Seconds between two looks at the memory."""


def _descendants(command: int) -> list[tuple[int, int]]:
    """All processes below one, each with its parent."""
    found = []
    try:
        for process in psutil.Process(command).children(recursive=True):
            with suppress(psutil.Error):
                found.append((process.pid, process.ppid()))
    except psutil.Error:
        pass
    return found


def _proportional(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.Error:
        return 0  # it has ended since it was found


# --- report ---


def measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Run everything, and return the samples by variant and the memory."""
    target = method.target(options.target)
    most = method.cores()
    jobs = options.jobs or _powers(most)
    wanted = method.workloads(options.kernels, target)
    kernels = method.specs(wanted, target)
    method.write_shapes(place / "shapes.json", kernels)
    fewer = _fewer(kernels, options.serial_kernels)
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        f"warm {number}": functools.partial(_warm, place, kernels, target, number)
        for number in jobs
    }
    runs["par_compile"] = lambda: _tilelang(place, kernels, target, PAR_COMPILE, max(jobs))
    runs["one by one"] = lambda: _tilelang(place, fewer, target, ONE_BY_ONE, 1)
    method.note("first: a few kernels, not counted")
    few = kernels[:2]
    method.write_shapes(place / "few.json", few)
    method.warm(place / "few.json", target, _empty(place), jobs=2)
    _tilelang(place, few, target, PAR_COMPILE, 2)
    samples = method.interleaved(list(runs), options.rounds, lambda name: runs[name](), discarded=0)
    method.note(f"memory: warm {max(jobs)}")
    memory = Memory()
    _warm(place, kernels, target, max(jobs), memory.watch)
    method.note("")
    return {"target": target, "jobs": jobs, "samples": samples, "memory": memory}


def _report(options: argparse.Namespace, measured: dict[str, Any]) -> None:
    target, jobs, samples = measured["target"], measured["jobs"], measured["samples"]
    memory: Memory = measured["memory"]
    for sample in samples["one by one"]:
        binaries = samples["warm 1"][0]["binaries"]
        measured_phase = sample["phase"]
        sample["phase"] = _extrapolated(sample, options.kernels, binaries)
        sample["measured"] = {"whole": sample["whole"], "phase": measured_phase}
        sample["whole"] += sample["phase"] - measured_phase
    times = {
        kind: {name: [one[kind] for one in found] for name, found in samples.items()}
        for kind in ("whole", "phase")
    }
    efficiency = {
        kind: {
            number: method.spread(
                [
                    one / (number * many)
                    for one, many in zip(found["warm 1"], found[f"warm {number}"], strict=True)
                ]
            )["median"]
            for number in jobs
        }
        for kind, found in times.items()
    }
    best = f"warm {max(jobs)}"
    faster = {
        kind: {
            other: method.spread(method.ratios(found[other], found[best]))["median"]
            for other in ("par_compile", "one by one")
        }
        for kind, found in times.items()
    }
    rows = []
    for name, found in samples.items():
        whole, phase = (method.spread(times[kind][name])["median"] for kind in ("whole", "phase"))
        number = int(name.removeprefix("warm ")) if name.startswith("warm ") else None
        rows.append(
            [
                name,
                str(found[0]["kernels"]),
                method.duration(whole),
                f"{options.kernels / whole:.2f}",
                method.duration(phase),
                f"{options.kernels / phase:.2f}",
                *(
                    f"{efficiency[kind][number]:.0%}" if number else ""
                    for kind in ("whole", "phase")
                ),
            ]
        )
    goals = [
        Goal(
            f"{best} to par_compile, whole process", faster["whole"]["par_compile"], 2, least=True
        ),
        Goal(
            f"parallel efficiency at {max(jobs)} jobs, compile phase",
            100 * efficiency["phase"][max(jobs)],
            80,
            least=True,
            unit=" %",
        ),
    ]
    shared = samples["warm 1"][0]["binaries"]
    binaries = f", {shared} device binaries" if shared else ""
    print(f"{options.kernels} RMSNorm kernels for {target}{binaries}, on {method.cores()} cores")
    print()
    header = ["variant", "kernels", "whole", "a second", "compile phase", "a second"]
    print(method.table([*header, "eff. whole", "eff. phase"], rows))
    print()
    print(
        f"par_compile has {max(jobs)} threads; one by one is reckoned from "
        f"{samples['one by one'][0]['kernels']} kernels"
    )
    for kind, what in (("whole", "whole process"), ("phase", "compile phase")):
        against = faster[kind]
        print(
            f"{best}, {what}: {against['par_compile']:.2f}x par_compile, "
            f"{against['one by one']:.2f}x one by one"
        )
    print(
        f"memory at {max(jobs)} jobs (PSS): at most {_mib(memory.worker)} a worker with its "
        f"compilers, {_mib(memory.python)} without; {_mib(memory.workers)} all workers, "
        f"{_mib(memory.total)} the whole command"
    )
    print()
    for goal in goals:
        print(goal)
    method.write_result(
        options.json,
        {
            "benchmark": "warm_scaling",
            "method": METHOD,
            "target": target.name,
            "kernels": options.kernels,
            "jobs": jobs,
            "par_compile_workers": max(jobs),
            "seconds": times,
            "parallel_efficiency": efficiency,
            "times_as_fast": faster,
            "memory_bytes": asdict(memory),
            "goals": [goal.to_json() for goal in goals],
            "samples": samples,
        },
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def main() -> None:
    options = _arguments()
    with method.scratch() as place:
        _report(options, measure(options, place))


if __name__ == "__main__":
    method.main(main)
