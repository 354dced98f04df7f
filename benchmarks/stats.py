"""What `tlcache stats` takes on a host with many agents.

    python benchmarks/stats.py                   # 64 processes; about a minute and 3 GB
    python benchmarks/stats.py --agents 8

Measured is the whole process of `tlcache stats`, as its parent sees it, with

    none       no agent at all: what the command itself takes
    idle       64 processes that wait
    serving    the same 64, while each launches a kernel every 50 ms
    one stuck  64 that wait, one of them stopped, so that it cannot answer

The processes are eight servers of eight ranks each, forked from one that has restored its kernels;
each child has an agent and a socket of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import method
from method import Failure, Goal

from tlcache.targets import CPU

VARIANTS = ("none", "idle", "serving", "one stuck")
METHOD = (
    "Whole processes with their output to a file, in turn, one round discarded. The processes with "
    "agents are forked from one, and stay the same throughout."
)
BOUND = 1.0
KERNELS = 8

# Restores the kernels of the specs that it is given, then forks so many children with agents; each
# launches kernels while there is the file that it is told of. Ends with its input.
SERVER = """
import json, os, sys, time
job = json.loads(sys.argv[1])
import torch
import tlcache.agent
from tlcache import runtime
from tlcache.spec import KernelSpec
specs = [KernelSpec.from_json(one) for one in job["specs"]]
kernels = [(one, runtime.resolve(one)) for one in specs]
runtime.mark_ready()
torch.set_num_threads(1)
tlcache.agent.start()
children = []
ready, there = os.pipe()
for number in range(job["agents"]):
    child = os.fork()
    if not child:
        os.environ.update(
            RANK=str(number % 8), WORLD_SIZE="8", TORCHELASTIC_RUN_ID=f"server-{number // 8}",
            MASTER_ADDR="localhost", MASTER_PORT="29500",
        )
        spec, kernel = min(kernels, key=lambda one: one[0].workload["M"] * one[0].workload["N"])
        x = torch.ones(spec.workload["M"], spec.workload["N"])
        w = torch.ones(spec.workload["N"])
        parent = os.getppid()
        os.write(there, b"x")
        while os.getppid() == parent:
            if os.path.exists(job["busy"]):
                kernel(x, w)
            time.sleep(0.05)
        os._exit(0)
    os.read(ready, 1)
    children.append(child)
tlcache.agent.stop()
print(json.dumps(children), flush=True)
sys.stdin.read()
for child in children:
    os.kill(child, 9)
"""


def _start(
    place: Path, agents: int, env: dict[str, str]
) -> tuple[subprocess.Popen[str], list[int]]:
    """Start the processes; the one that ends them when its input ends, and their pids."""
    kernels = method.specs(method.workloads(KERNELS, CPU), CPU)
    method.write_shapes(place / "shapes.json", kernels)
    method.warm(place / "shapes.json", CPU, place / "root")
    job = {
        "specs": [one.to_json() for one in kernels],
        "agents": agents,
        "busy": str(place / "busy"),
    }
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, json.dumps(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        cwd=place,
    )
    out: IO[str] | None = server.stdout
    told = out.readline() if out is not None else ""
    if not told:
        raise Failure("the processes with agents did not start")
    return server, json.loads(told)


def measure(options: argparse.Namespace, place: Path) -> dict[str, list[dict[str, Any]]]:
    """Start the processes, and run all rounds."""
    method.note(f"starting {options.agents} processes")
    runtime = place / "runtime"
    env = method.environment(place / "root", TLCACHE_RUNTIME_DIR=str(runtime))
    nobody = method.environment(place / "root", TLCACHE_RUNTIME_DIR=str(place / "nobody"))
    server, pids = _start(place, options.agents, env)
    busy = place / "busy"

    def one(variant: str) -> dict[str, Any]:
        if variant == "serving":
            busy.touch()
        if variant == "one stuck":
            os.kill(pids[0], signal.SIGSTOP)
        try:
            command = [*method.TLCACHE, "stats", "--json"]
            ran = method.run(command, nobody if variant == "none" else env)
        finally:
            busy.unlink(missing_ok=True)
            os.kill(pids[0], signal.SIGCONT)
        told = json.loads(ran.out)["processes"]
        answered = sum(process["trouble"] is None for process in told)
        wanted = {"none": 0, "one stuck": options.agents - 1}.get(variant, options.agents)
        if answered != wanted:
            raise Failure(f"{variant}: {answered} agents answered, not {wanted}")
        return {"seconds": ran.seconds, "answered": answered}

    try:
        return method.interleaved(VARIANTS, options.rounds, one)
    finally:
        server.communicate()


def _report(options: argparse.Namespace, samples: dict[str, list[dict[str, Any]]]) -> None:
    seconds = {name: [one["seconds"] for one in found] for name, found in samples.items()}
    rows = []
    for name, values in seconds.items():
        found = method.spread(values)
        rows.append([name, *(method.duration(found[key]) for key in ("median", "min", "max"))])
    print(f"{options.agents} agents, {options.rounds} rounds, {method.cores()} cores")
    print()
    print(method.table(["tlcache stats", "median", "min", "max"], rows))
    print()
    goals = [
        Goal(f"stats, {name}", max(seconds[name]), BOUND, least=False, unit=" s")
        for name in ("idle", "serving", "one stuck")
    ]
    for goal in goals:
        print(goal)
    method.write_result(
        options.json,
        {
            "benchmark": "stats",
            "method": METHOD,
            "agents": options.agents,
            "seconds": {name: method.spread(values) for name, values in seconds.items()},
            "goals": [goal.to_json() for goal in goals],
            "samples": samples,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="`tlcache stats` on a host with many agents.")
    parser.add_argument("--agents", type=method.positive, default=64)
    parser.add_argument("--rounds", type=method.positive, default=15)
    parser.add_argument("--json", metavar="FILE", help="write all samples here")
    options = parser.parse_args()
    with method.scratch() as place:
        _report(options, measure(options, place))


if __name__ == "__main__":
    method.main(main)
