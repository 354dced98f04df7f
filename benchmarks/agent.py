"""What an agent costs the process that it lives in, and how soon it answers.

    python benchmarks/agent.py                          # the GPU that is here, else the CPU
    python benchmarks/agent.py --before DIR             # and against a checkout without counters
    python benchmarks/agent.py --answers --beside DIR   # answers alone, and of another agent's

Launch latency is the host time of one call of `RMSNormFwdOp` and of `ops.rms_norm`, M = 1, N = 64
in float32: each call is timed. In one process, in turn: without an agent, with one that nobody
asks, and while 200 clients ask at once, from the first connection to the last answer. What counting
costs is measured with a kernel that does nothing, so that a tenth of a microsecond shows.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import method
from method import Failure, Goal

__all__ = ["main", "measure"]

CLIENTS = 200
METHOD = (
    "Fresh processes, in turn, one round discarded. Within one, blocks of calls: without an agent, "
    "with an idle one, and during a wave of 200 parallel GET /v1/stats. Each call is timed. "
    "`before` is another checkout, without agent and counters; `host` is the least of 25 repeats "
    "of 20,000 calls with a kernel that only returns a tensor. Answers are timed from connect to "
    "the last byte, by a process of their own, one every 20 ms."
)
PHASES = ("none", "idle", "asked")

_CLIENT = """
import selectors, socket, sys, time
request = b"GET /v1/stats HTTP/1.1\\r\\nHost: agent\\r\\n\\r\\n"

def wave(path, count):
    selector, answers, start = selectors.DefaultSelector(), {}, time.perf_counter()
    for _ in range(count):
        client = socket.socket(socket.AF_UNIX)
        client.connect(path)
        client.sendall(request)
        client.setblocking(False)
        selector.register(client, selectors.EVENT_READ)
        answers[client] = b""
    good = 0
    while answers:
        for key, _ in selector.select(30):
            data = key.fileobj.recv(1 << 20)
            answers[key.fileobj] += data
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                good += answers.pop(key.fileobj).startswith(b"HTTP/1.1 200 ")
    return good, time.perf_counter() - start

for line in sys.stdin:
    path, count = line.split()
    print(*wave(path, int(count)), flush=True)
"""

_LAUNCHES = """
import json, os, subprocess, sys, time
job = json.loads(sys.argv[1])
import torch, ops
now = time.perf_counter_ns
device = job["device"]
x, w = torch.randn(1, 64, device=device), torch.randn(64, device=device)
op = ops.RMSNormFwdOp(64, 1e-6, torch.float32)
calls = {"op": lambda: op(x, w), "function": lambda: ops.rms_norm(x, w)}
samples = {name: {phase: [] for phase in job["phases"]} for name in calls}
waves, good = [], 0
client = None
if "asked" in job["phases"]:
    client = subprocess.Popen([sys.executable, "-c", job["client"]], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    os.set_blocking(client.stdout.fileno(), False)
for call in calls.values():
    for _ in range(2000):
        call()
torch.inference_mode(True).__enter__()
for _ in range(job["blocks"]):
    for phase in job["phases"]:
        path = None
        if phase != "none":
            from tlcache import agent
            path = agent.start()
        for name, call in calls.items():
            times = samples[name][phase]
            if phase == "asked":
                client.stdin.write(f"{path} {job['clients']}\\n")
                client.stdin.flush()
            told = ""
            while not told:
                for _ in range(job["calls"]):
                    start = now()
                    call()
                    times.append(now() - start)
                if device == "cuda":
                    torch.cuda.synchronize()
                told = "-" if phase != "asked" else client.stdout.readline()
            if phase == "asked":
                answered, seconds = told.split()
                good += int(answered)
                waves.append(float(seconds))
        if phase != "none":
            agent.stop()
import timeit, ops.norms
y = torch.empty_like(x)
for key, kernel in op.state.kernels.items():
    op.state.kernels[key] = kernel._replace(launch=lambda a, b: y)
for key, served in ops.norms._served.items():
    nothing = lambda a, b: y
    ops.norms._served[key] = (nothing, *served[1:]) if isinstance(served, tuple) else nothing
host = {name: min(timeit.repeat(call, number=20_000, repeat=25)) / 20_000 * 1e6
        for name, call in calls.items()}
def summary(times):
    times.sort()
    at = lambda share: times[min(len(times) - 1, int(share * len(times)))] / 1e3
    return {"calls": len(times), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "p999": at(0.999),
            "mean": sum(times) / len(times) / 1e3}
print("ANSWER " + json.dumps({
    "us": {name: {phase: summary(times) for phase, times in of.items()}
           for name, of in samples.items()},
    "host": host, "waves": waves, "answered": good}))
"""

_BUSY = """
import json, os, subprocess, sys, threading, time
job = json.loads(sys.argv[1])
import torch, ops
from tlcache import agent, operators, runtime, targets
path = agent.start()
asking = subprocess.Popen([sys.executable, "-c", job["asker"], path, str(job["seconds"])],
                          text=True, stdout=subprocess.PIPE)
end, done = time.monotonic() + job["seconds"], 0
while time.monotonic() < end:
    if job["busy"] == "python":
        sum(i * i for i in range(10_000))
    elif job["busy"] == "idle":
        time.sleep(0.01)
    else:
        values = {"M": done + 1, "N": 4096, "dtype": "float32"}
        name = ("rms_norm", "softmax")[done % 2]
        runtime.resolve(operators.get(name).spec(values, targets.parse(job["busy"])))
    done += 1
print("ANSWER " + json.dumps({"done": done, "seconds": json.loads(asking.communicate()[0])}))
"""

_ASKER = """
import json, socket, sys, time
path, end, taken = sys.argv[1], time.monotonic() + float(sys.argv[2]), []
while time.monotonic() < end:
    start = time.perf_counter()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(b"GET /v1/stats HTTP/1.1\\r\\nHost: agent\\r\\n\\r\\n")
        answer = b""
        while data := client.recv(1 << 20):
            answer += data
    taken.append(time.perf_counter() - start)
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    time.sleep(0.02)
print(json.dumps(taken))
"""


_START = """
import json, sys, time
job = json.loads(sys.argv[1])
for name in job["imported"]:
    __import__(name)
start = time.perf_counter()
import tlcache.agent
tlcache.agent.start()
print("ANSWER " + json.dumps({"ms": (time.perf_counter() - start) * 1e3}))
"""
STARTS = {"bare": [], "torch": ["torch"], "ops": ["torch", "ops.norms"]}


def _starts(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """What it takes to have an agent, imports included, by what is imported already."""
    env = method.environment(place / "root", TLCACHE_RUNTIME_DIR=str(place / "run"))
    return dict(
        method.interleaved(
            list(STARTS),
            options.rounds,
            lambda name: method.answer(_START, {"imported": STARTS[name]}, env)[0],
        )
    )


def _launches(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Rounds of launches, here and in the other checkout."""
    device = "cuda" if options.target.is_cuda else "cpu"
    variants = ["now", *(["before"] if options.before else [])]

    def one(variant: str) -> dict[str, Any]:
        env = method.environment(place / "root", TLCACHE_RUNTIME_DIR=str(place / "run"))
        if variant == "before":
            paths = [str(Path(options.before).resolve()), env.get("PYTHONPATH", "")]
            env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        job = {
            "device": device,
            "phases": PHASES if variant == "now" else PHASES[:1],
            "blocks": options.blocks,
            "calls": 2000,
            "clients": CLIENTS,
            "client": _CLIENT,
        }
        answered, _ = method.answer(_LAUNCHES, job, env)
        asked = 2 * options.blocks * CLIENTS
        if variant == "now" and answered["answered"] != asked:
            raise Failure(f"of {asked} requests {answered['answered']} were answered")
        return answered

    return dict(method.interleaved(variants, options.rounds, one))


def _answers(options: argparse.Namespace, place: Path) -> dict[str, list[float]]:
    """Seconds that answers took, by what the main thread was doing; of this checkout and another,
    in turn.
    """
    found: dict[str, list[float]] = {}
    others = {", beside": options.beside} if options.beside else {}
    for number in range(options.answer_rounds):
        for busy in ("idle", "python", *options.compile.split(",")):
            for label, checkout in {"": None, **others}.items():
                name = f"{busy}{label}"
                method.note(f"answers while {name}")
                root = place / f"{number}{name}"
                env = method.environment(root, TLCACHE_RUNTIME_DIR=str(place / "run"))
                if checkout is not None:
                    paths = [str(Path(checkout).resolve()), env.get("PYTHONPATH", "")]
                    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
                job = {"busy": busy, "seconds": options.seconds, "asker": _ASKER}
                seconds = method.answer(_BUSY, job, env)[0]["seconds"]
                found.setdefault(name, []).extend(round(one, 5) for one in seconds)
    method.note("")
    return found


def measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Everything, in turn."""
    if options.answers:
        return {"answers": _answers(options, place)}
    return {
        "starts": _starts(options, place),
        "launches": _launches(options, place),
        "answers": _answers(options, place),
    }


def _over(rounds: Sequence[dict[str, Any]], call: str, phase: str, what: str) -> list[float]:
    return [one["us"][call][phase][what] for one in rounds]


def _at(seconds: Sequence[float], share: float) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _milliseconds(
    seconds: Sequence[float], shares: Sequence[float] = (0.5, 0.9, 0.99, 1.0)
) -> list[str]:
    return [f"{_at(seconds, share) * 1e3:.1f}" for share in shares]


def _tell_launches(options: argparse.Namespace, measured: dict[str, Any]) -> list[Goal]:
    launches = measured["launches"]
    now, rows, goals = launches["now"], [], []
    shown = ("p50", "p90", "p99", "p999", "mean")
    for call in ("op", "function"):
        for phase, label in (("none", "no agent"), ("idle", "idle"), ("asked", "200 requests")):
            values = [statistics.median(_over(now, call, phase, what)) for what in shown]
            rows.append([f"{call}, {label}", *(f"{value:.2f}" for value in values)])
        if "before" in launches:
            values = [
                statistics.median(_over(launches["before"], call, "none", what)) for what in shown
            ]
            rows.append([f"{call}, before", *(f"{value:.2f}" for value in values)])
            differences = [
                one["host"][call] - other["host"][call]
                for one, other in zip(now, launches["before"], strict=True)
            ]
            cost = statistics.median(differences)
            goals.append(Goal(f"counting, {call}", cost, 0.1, False, " µs a launch"))
        for phase in ("idle", "asked"):
            ratio = method.ratios(_over(now, call, phase, "p50"), _over(now, call, "none", "p50"))
            goals.append(
                Goal(f"{call}, {phase}: p50 to no agent", statistics.median(ratio), 1.05, False)
            )
    print(f"one call in µs, on {options.target}; medians of {options.rounds} rounds")
    print()
    print(method.table(["call", *shown], rows))
    rows = [
        [", ".join(imported) or "nothing", *_milliseconds([one["ms"] / 1e3 for one in taken])]
        for imported, taken in zip(STARTS.values(), measured["starts"].values(), strict=True)
    ]
    print("\nto have an agent, by what is imported already\n")
    print(method.table(["imported", "p50 ms", "p90", "p99", "max"], rows))
    waves = sorted(seconds for one in now for seconds in one["waves"])
    print(
        f"\n{len(waves)} waves of {CLIENTS}: all answered, "
        f"median {waves[len(waves) // 2] * 1e3:.0f} ms, longest {waves[-1] * 1e3:.0f} ms\n"
    )
    return goals


def _tell_answers(measured: dict[str, Any]) -> list[Goal]:
    rows, goals = [], []
    for busy, taken in measured["answers"].items():
        within = sum(one <= 0.05 for one in taken) / len(taken)
        told = _milliseconds(taken, (0.5, 0.99, 0.999, 1.0))
        rows.append([busy, str(len(taken)), f"{within:.2%}", *told])
        goals.append(Goal(f"{busy}: 99 % of answers", _at(taken, 0.99) * 1e3, 50, False, " ms"))
    header = ["main thread", "answers", "within 50 ms", "p50 ms", "p99", "p99.9", "max"]
    print(method.table(header, rows))
    return goals


def _report(options: argparse.Namespace, measured: dict[str, Any]) -> None:
    goals = [] if options.answers else _tell_launches(options, measured)
    goals += _tell_answers(measured)
    print()
    for goal in goals:
        print(goal)
    method.write_result(
        options.json,
        {
            "benchmark": "agent",
            "method": METHOD,
            "target": options.target.name,
            **measured,
            "goals": [goal.to_json() for goal in goals],
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What an agent costs, and how soon it answers.")
    parser.add_argument("--target", type=method.target, default="auto")
    parser.add_argument("--before", metavar="DIR", help="a checkout without counters")
    parser.add_argument("--rounds", type=method.positive, default=7)
    parser.add_argument("--blocks", type=method.positive, default=10)
    parser.add_argument("--answers", action="store_true", help="only how soon it answers")
    parser.add_argument("--beside", metavar="DIR", help="a checkout whose agent answers, too")
    parser.add_argument("--answer-rounds", type=method.positive, default=1)
    parser.add_argument("--seconds", type=method.positive, default=10)
    parser.add_argument("--compile", default="cpu,sm90", help="targets to compile while asked")
    parser.add_argument("--json", metavar="FILE", help="write all samples here")
    options = parser.parse_args()
    with method.scratch() as place:
        _report(options, measure(options, place))


if __name__ == "__main__":
    method.main(main)
