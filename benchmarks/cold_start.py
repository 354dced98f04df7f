"""What a restart costs: 64 RMSNorm kernels in hand, in four ways, each in fresh processes.

Measured is the time from the first call after `import torch` to all kernels in hand, one after
another, every import on the way included:

    a  an empty cache: `tlcache.runtime.resolve` compiles each kernel
    b  TileLang's own disk hits: the factory and its JITImpl are called; nothing is compiled
    c  tlcache: `tlcache.runtime.resolve` restores each kernel; TileLang is not imported
    d  the floor: the same libraries by bare `tvm_ffi.load_module` (CUDA) or `ctypes.CDLL` (CPU)

On the GPU that the kernels are for, the first launch of each and one synchronization at the end
are part of the time, in all four; inputs and CUDA context are made before the clock starts.
Elsewhere the kernels are only loaded; with `--launch` the CPU's are launched too.

What each variant does is the program of its name below, in whole. (b) is spared what is not
TileLang's: `ops` and its factory are imported before its clock starts. (d) gets a list of files,
and checks nothing. The page cache is warm: an earlier process has read every file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import method
from method import Failure, Goal

from tlcache.fingerprint import tilelang_path
from tlcache.spec import KernelSpec
from tlcache.store import record

METHOD = (
    "Fresh processes, variants interleaved round by round, one round discarded, page cache warm; "
    "time from the first call after `import torch` to all kernels in hand, imports included."
)

BEFORE = """
import json, sys, time
import torch
job = json.load(open(sys.argv[1]))
workloads, launched = job["workloads"], job["launch"]
device = "cuda" if job["cuda"] and launched else "cpu"
inputs = []
if launched:
    dtype = getattr(torch, workloads[0]["dtype"])
    flat = torch.randn(max(w["M"] * w["N"] for w in workloads), device=device).to(dtype)
    weight = torch.ones(max(w["N"] for w in workloads), device=device, dtype=dtype)
    for w in workloads:
        M, N = w["M"], w["N"]
        inputs.append((flat[: M * N].view(M, N), weight[:N]))
    if device == "cuda":
        torch.cuda.synchronize()
kernels = []
"""

AFTER = """
if device == "cuda":
    torch.cuda.synchronize()
seconds = time.perf_counter() - start
assert len(kernels) == len(workloads)
"""

RESOLVE = """
start = time.perf_counter()
from ops.catalog import OPERATORS
from tlcache import runtime
from tlcache.targets import Target
imported = time.perf_counter() - start
operator, target = OPERATORS["rms_norm"], Target(job["target"])
for index, workload in enumerate(workloads):
    kernels.append(runtime.resolve(operator.spec(workload, target)))
    if launched:
        kernels[-1](*inputs[index])
"""

ANSWER = """
print("ANSWER " + json.dumps({"seconds": seconds, "imports": imported}))
"""

EMPTY = f"""{BEFORE}{RESOLVE}{AFTER}
counters = runtime.counters()
assert counters.compiled == len(workloads) and counters.restored == 0, counters
{ANSWER}"""

TILELANG = f"""
from ops.kernels.rms_norm import rms_norm
{BEFORE}
start = time.perf_counter()
import tilelang
imported = time.perf_counter() - start
for index, (workload, schedule) in enumerate(zip(workloads, job["schedules"])):
    kernels.append(rms_norm(**workload, target=job["target"])(**schedule))
    if launched:
        kernels[-1](*inputs[index])
{AFTER}
compiled = sum(kernel.artifact is not None for kernel in kernels)
assert compiled == 0, f"{{compiled}} kernels were compiled"
{ANSWER}"""

TLCACHE = f"""{BEFORE}{RESOLVE}{AFTER}
counters = runtime.counters()
assert counters.restored == len(workloads) and counters.compiled == 0, counters
assert "tilelang" not in sys.modules and "tvm" not in sys.modules
{ANSWER}"""

FLOOR_CUDA = f"""{BEFORE}
start = time.perf_counter()
import ctypes
import tvm_ffi
ctypes.CDLL(job["runtime"], ctypes.RTLD_GLOBAL)
imported = time.perf_counter() - start
for index, path in enumerate(job["libraries"]):
    kernels.append(tvm_ffi.load_module(path)["main"])
    if launched:
        x, w = inputs[index]
        kernels[-1](x, w, w)
{AFTER}{ANSWER}"""

FLOOR_CPU = f"""{BEFORE}
start = time.perf_counter()
import ctypes
imported = time.perf_counter() - start
pointer = ctypes.c_void_p
for index, path in enumerate(job["libraries"]):
    library = ctypes.CDLL(path)
    assert library.init() == 0
    kernels.append(library["call"])
    if launched:
        x, w = inputs[index]
        y = torch.empty_like(x)
        status = kernels[-1](pointer(x.data_ptr()), pointer(w.data_ptr()), pointer(y.data_ptr()))
        assert status == 0
{AFTER}{ANSWER}"""

NAMES = {
    "a": "(a) empty cache",
    "b": "(b) TileLang's disk hits",
    "c": "(c) tlcache",
    "d": "(d) floor",
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time to 64 kernels in hand after a restart, with and without tlcache."
    )
    parser.add_argument(
        "--target", default="auto", help="cpu, sm90, …; auto: the GPU here, else cpu"
    )
    parser.add_argument("--kernels", type=method.positive, default=64, help="how many (64)")
    parser.add_argument("--rounds", type=method.positive, default=7, help="rounds of b, c, d (7)")
    parser.add_argument("--cold-rounds", type=int, default=1, help="rounds of a; 0: leave it out")
    parser.add_argument("--launch", action="store_true", help="launch the CPU's kernels too")
    parser.add_argument("--cache-dir", metavar="DIR", help="keep the warm root here, or reuse it")
    parser.add_argument("--json", metavar="FILE", help="write all samples here")
    return parser.parse_args()


def _libraries(root: Path, kernels: list[KernelSpec]) -> list[str]:
    """The libraries of warm kernels, for the floor: found here, so that it searches for nothing."""
    found = []
    for spec in kernels:
        filed = record.read(root, spec.action_key())
        path = record.sound_library(root, filed) if filed is not None else None
        if path is None:
            raise Failure(f"`tlcache warm` left no record of {spec} in {root}")
        found.append(path)
    return found


def measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Prepare a warm root, run all rounds, and return the samples by variant."""
    target = method.target(options.target)
    on_gpu = target.is_cuda and target == method.visible_gpu()
    launched = on_gpu or (options.launch and not target.is_cuda)
    wanted = method.workloads(options.kernels, target)
    kernels = method.specs(wanted, target)
    root = Path(options.cache_dir).absolute() if options.cache_dir else place / "warm"
    shapes = place / "shapes.json"
    method.write_shapes(shapes, kernels)
    method.note(f"warming {len(kernels)} kernels for {target}")
    method.warm(shapes, target, root)
    job = place / "job.json"
    method.write_json(
        job,
        {
            "workloads": wanted,
            "schedules": [dict(spec.schedule) for spec in kernels],
            "target": target.name,
            "cuda": target.is_cuda,
            "launch": launched,
            "libraries": _libraries(root, kernels),
            "runtime": str(tilelang_path() / "lib" / "libtvm_runtime.so"),
        },
    )
    programs = {
        "b": TILELANG,
        "c": TLCACHE,
        "d": FLOOR_CUDA if target.is_cuda else FLOOR_CPU,
    }
    samples = method.interleaved(
        list(programs),
        options.rounds,
        lambda name: method.answer(programs[name], job, method.environment(root))[0],
    )
    samples["a"] = []
    for number in range(options.cold_rounds):
        method.note(f"compiling {len(kernels)} kernels one after another, round {number + 1}")
        empty = place / f"empty-{number}"
        empty.mkdir(mode=0o700)
        samples["a"].append(method.answer(EMPTY, job, method.environment(empty))[0])
    method.note("")
    return {"target": target, "launched": launched, "samples": samples}


def _report(options: argparse.Namespace, measured: dict[str, Any]) -> None:
    target, launched, samples = measured["target"], measured["launched"], measured["samples"]
    seconds = {name: [one["seconds"] for one in samples[name]] for name in NAMES if samples[name]}
    rows = []
    for name, values in seconds.items():
        found = method.spread(values)
        imports = method.spread([one["imports"] for one in samples[name]])["median"]
        each = (found["median"] - imports) / options.kernels
        shown = [found["median"], found["min"], found["max"], imports, each]
        rows.append([NAMES[name], *map(method.duration, shown), str(len(values))])
    by_round = {
        "b/c": method.ratios(seconds["b"], seconds["c"]),
        "c/d": method.ratios(seconds["c"], seconds["d"]),
    }
    goals = [
        Goal("b/c, TileLang's disk hits to tlcache", _median(by_round["b/c"]), 30, least=True),
        Goal("c/d, tlcache to the floor", _median(by_round["c/d"]), 2, least=False),
    ]
    what = "loaded and launched once" if launched else "loaded, not launched"
    print(f"{options.kernels} RMSNorm kernels for {target}, {what}; page cache warm")
    print()
    header = ["variant", "median", "min", "max", "imports", "a kernel", "rounds"]
    print(method.table(header, rows))
    print()
    for goal in goals:
        print(goal)
    method.write_result(
        options.json,
        {
            "benchmark": "cold_start",
            "method": METHOD,
            "target": target.name,
            "kernels": options.kernels,
            "launched": launched,
            "variants": NAMES,
            "seconds": {name: method.spread(values) for name, values in seconds.items()},
            "ratios": by_round,
            "goals": [goal.to_json() for goal in goals],
            "samples": samples,
        },
    )


def _median(values: list[float]) -> float:
    return method.spread(values)["median"]


def main() -> None:
    options = _arguments()
    with method.scratch() as place:
        _report(options, measure(options, place))


if __name__ == "__main__":
    method.main(main)
