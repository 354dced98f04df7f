"""What each way to bring a Triton kernel into torch.compile costs, beside `ops.rms_norm`.

The same RMSNorm (`ops/triton/rms_norm.py`), bfloat16, rows of 4096, as

    captured  a bare launch that torch.compile traces
    wrapped   `torch.library.triton_op` + `wrap_triton`
    opaque    `torch.library.custom_op`
    tilelang  `ops.rms_norm`: one opaque dispatcher op, TileLang's kernel
    torch     `torch.nn.functional.rms_norm`: Inductor writes the kernel itself

Measured, each in fresh processes with private Triton, Inductor and TileLang caches:

    start     the first eager call and the first call of a compiled function, imports included:
              on empty caches, and in a later process that finds them full
    hot       host time of an eager and of a compiled call of one row, and GPU time of the compiled
              `rms_norm(x) * 2 + residual`, of one row and of 4096
    layers    how many graphs 12 equal layers compile to, each compiled for itself
    autotune  the first call of `rms_norm_autotuned`: on empty caches; with the compiled kernels on
              disk and `cache_results` off; with both

It needs a GPU and `pip install 'tlcache[triton]'`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import method
from method import Failure

METHOD = (
    "Fresh processes, variants interleaved round by round, page cache warm, private caches; "
    "start: from after `import torch` and the CUDA context to the synchronized end of the first "
    "call, imports on the way included; host time: a loop of calls, best of 5 loops, not "
    "synchronized inside; GPU time: replays of a CUDA graph of 20 calls, by events, best of 5."
)

PRIME = """
import json, sys
import torch, torch._dynamo, torch._inductor.compile_fx, tilelang, triton
import ops
from ops.triton import rms_norm_captured
torch.zeros(1, device="cuda")
print("ANSWER " + json.dumps({"triton": triton.__version__}))
"""

START = """
import json, sys, time
import torch
job = json.loads(sys.argv[1])
rows, N, eps = 1, job["N"], job["eps"]
like = {"device": "cuda", "dtype": torch.bfloat16}
x, residual = torch.randn(2, rows, N, **like)
weight = torch.ones(N, **like)
torch.cuda.synchronize()
torch.set_grad_enabled(False)
if job["variant"] != "tilelang":
    import ops  # what this package imports for itself is no cost of Triton's

begin = time.perf_counter()
if job["variant"] == "tilelang":
    from ops import rms_norm as norm
elif job["variant"] == "torch":
    def norm(x, weight, eps):
        return torch.nn.functional.rms_norm(x, (N,), weight, eps)
else:
    import ops.triton
    norm = getattr(ops.triton, "rms_norm_" + job["variant"])
y = norm(x, weight, eps)
torch.cuda.synchronize()
answer = {"eager": time.perf_counter() - begin}

def layer(x, residual):
    return norm(x, weight, eps) * 2 + residual

begin = time.perf_counter()
compiled = torch.compile(layer, fullgraph=True)
z = compiled(x, residual)
torch.cuda.synchronize()
answer["compiled"] = time.perf_counter() - begin

want = torch.nn.functional.rms_norm(x.float(), (N,), weight.float(), eps)
torch.testing.assert_close(y.float(), want, rtol=1.6e-2, atol=1e-2)
torch.testing.assert_close(z.float(), want * 2 + residual.float(), rtol=1.6e-2, atol=4e-2)
"""

LAYERS = """
from torch._dynamo.utils import counters
torch._dynamo.reset()
counters.clear()

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(N, **like), requires_grad=False)

    def forward(self, x):
        return norm(x, self.weight, eps) * 2 + x

layers = [Layer() for _ in range(job["layers"])]
begin = time.perf_counter()
for one in layers:
    one.compile(fullgraph=True)
    x = one(x)
torch.cuda.synchronize()
answer["layers"] = time.perf_counter() - begin
answer["graphs"] = counters["stats"]["unique_graphs"]
"""

HOT = """
def host(call, *args, calls=2000, loops=5):
    found = []
    for _ in range(loops):
        for _ in range(50):
            call(*args)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call(*args)
        found.append((time.perf_counter() - begin) / calls)
        torch.cuda.synchronize()
    return min(found)

def gpu(call, *args, calls=20, loops=5):
    for _ in range(3):
        call(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call(*args)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    found = []
    for _ in range(loops):
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1000 / calls / 10)
    return min(found)

def kernels(call, *args):
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            call(*args)
            torch.cuda.synchronize()
    except RuntimeError:
        return None
    return [e.name for e in profiled.events() if e.device_type == DeviceType.CUDA] or None

answer["eager_host"] = host(norm, x, weight, eps)
answer["compiled_host"] = host(compiled, x, residual)
answer["gpu_1"] = gpu(compiled, x, residual)
many = torch.randn(job["rows"], N, **like), torch.randn(job["rows"], N, **like)
torch._dynamo.reset()
compiled = torch.compile(layer, fullgraph=True)
answer["gpu_many"] = gpu(compiled, *many)
answer["kernels"] = kernels(compiled, *many)
"""

ANSWER = """
print("ANSWER " + json.dumps(answer))
"""

COLD = f"{START}{LAYERS}{ANSWER}"
WARM = f"{START}{HOT}{ANSWER}"

TUNE = """
import json, sys, time
import torch
job = json.loads(sys.argv[1])
x = torch.randn(1, job["N"], device="cuda", dtype=torch.bfloat16)
weight = torch.ones(job["N"], device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
torch.set_grad_enabled(False)
import ops

begin = time.perf_counter()
from ops.triton import rms_norm as module
from triton.runtime.autotuner import Autotuner
timed, bench = [], Autotuner._bench
Autotuner._bench = lambda self, *args, **kwargs: timed.append(1) or bench(self, *args, **kwargs)
module._tuned_kernel.cache_results = job["cache_results"]
module.rms_norm_autotuned(x, weight, job["eps"])
torch.cuda.synchronize()
seconds = time.perf_counter() - begin
best = module._tuned_kernel.best_config.num_warps
print("ANSWER " + json.dumps({"seconds": seconds, "timed": len(timed), "num_warps": best}))
"""

N, ROWS, EPS, LAYERS_OF_ONE_KIND = 4096, 4096, 1e-6, 12
VARIANTS = {
    "captured": "captured by torch.compile",
    "wrapped": "triton_op + wrap_triton",
    "opaque": "custom_op",
    "tilelang": "ops.rms_norm (TileLang)",
    "torch": "F.rms_norm (Inductor)",
}
TUNED = {
    "empty": "empty caches",
    "kernels": "kernels on disk, no cache_results",
    "results": "kernels and results on disk",
}
# What would change where a process looks, or what it does there. Paths to tools stay.
_DROPPED = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TORCH_LOGS")
_DROPPED_ALSO = {
    "TRITON_ALWAYS_COMPILE",
    "TRITON_CACHE_AUTOTUNING",
    "TRITON_INTERPRET",
    "TRITON_PRINT_AUTOTUNING",
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The same RMSNorm brought into torch.compile in several ways."
    )
    parser.add_argument("--rounds", type=method.positive, default=5, help="on full caches (5)")
    parser.add_argument(
        "--cold-rounds", type=method.positive, default=1, help="on empty caches (1)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all samples here")
    return parser.parse_args()


def _environment(place: Path) -> dict[str, str]:
    """The environment of a process whose caches lie in this directory."""
    caches = {name: place / name for name in ("tilelang", "triton", "inductor")}
    for path in caches.values():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    env = method.environment(
        caches["tilelang"],
        TRITON_CACHE_DIR=str(caches["triton"]),
    )
    kept = {
        name: value
        for name, value in env.items()
        if not name.startswith(_DROPPED) and name not in _DROPPED_ALSO
    }
    return {**kept, "TORCHINDUCTOR_CACHE_DIR": str(caches["inductor"])}


def _starts(place: Path, options: argparse.Namespace) -> dict[str, dict[str, list[Any]]]:
    """Samples by variant: on empty caches, then on those that the first of these filled."""
    job = {"N": N, "eps": EPS, "rows": ROWS, "layers": LAYERS_OF_ONE_KIND}
    taken = dict.fromkeys(VARIANTS, 0)

    def cold(variant: str) -> dict[str, Any]:
        taken[variant] += 1
        env = _environment(place / f"{variant}-{taken[variant]}")
        return _told(method.answer(COLD, {**job, "variant": variant}, env)[0])

    def warm(variant: str) -> dict[str, Any]:
        env = _environment(place / f"{variant}-1")
        return _told(method.answer(WARM, {**job, "variant": variant}, env)[0])

    method.note("starting on empty caches")
    empty = method.interleaved(list(VARIANTS), options.cold_rounds, cold, discarded=0)
    method.note("starting on full caches")
    # The first round is thrown away: it compiles what only it needs, for many rows.
    full = method.interleaved(list(VARIANTS), options.rounds, warm)
    return {"empty": empty, "full": full}


def _told(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample, once it stands in the log: a run takes minutes."""
    if not sys.stderr.isatty():
        method.note(json.dumps(sample))
    return sample


def _tunings(place: Path, options: argparse.Namespace) -> dict[str, list[Any]]:
    """Samples of the first tuned call."""
    job = {"N": N, "eps": EPS}
    taken = 0

    def tune(state: str) -> dict[str, Any]:
        nonlocal taken
        if state == "empty":
            taken += 1
        env = _environment(place / f"tuned-{taken if state == 'empty' else 1}")
        sample = method.answer(TUNE, {**job, "cache_results": state != "kernels"}, env)[0]
        _told(sample)
        if (state == "results") == bool(sample["timed"]):
            raise Failure(f"on {TUNED[state]}, {sample['timed']} configurations were timed")
        return sample

    method.note("tuning")
    empty = method.interleaved(["empty"], options.cold_rounds, tune, discarded=0)
    full = method.interleaved(["kernels", "results"], options.rounds, tune, discarded=0)
    return {**empty, **full}


def measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Run all rounds, and return the samples.

    Raises:
        Failure: There is no GPU or no Triton here, or a process failed.
    """
    if method.visible_gpu() is None:
        raise Failure("this benchmark needs a GPU, and none is visible here")
    if importlib.util.find_spec("triton") is None:
        raise Failure("Triton is not installed here\n\nhint: `pip install 'tlcache[triton]'`")
    method.note("reading what is imported")
    versions = method.answer(PRIME, {}, _environment(place / "prime"))[0]
    samples = {**_starts(place, options), "tuned": _tunings(place, options)}
    method.note("")
    return {**versions, "samples": samples}


def _median(samples: Sequence[dict[str, Any]], field: str) -> float:
    return method.spread([one[field] for one in samples])["median"]


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} µs"


def _report(options: argparse.Namespace, measured: dict[str, Any]) -> None:
    samples = measured["samples"]
    empty, full, tuned = samples["empty"], samples["full"], samples["tuned"]
    print(f"RMSNorm, bfloat16, N = {N}; medians of {options.rounds} rounds")
    print()
    hot, starts = [], []
    for name, label in VARIANTS.items():
        launched = full[name][0]["kernels"]
        fields = ("eager_host", "compiled_host", "gpu_1", "gpu_many")
        times = [_microseconds(_median(full[name], field)) for field in fields]
        graphs = str(empty[name][0]["graphs"])
        hot.append([label, *times, str(len(launched)) if launched else "?", graphs])
        pairs = [(empty, "eager"), (empty, "compiled"), (full, "eager"), (full, "compiled")]
        starts.append([label, *(method.duration(_median(of[name], what)) for of, what in pairs)])
    print(f"a call: host time of one row; GPU time of `* 2 + residual` of 1 row and {ROWS}")
    header = ["variant", "eager", "compiled", "GPU, 1", f"GPU, {ROWS}", "kernels"]
    print(method.table([*header, f"graphs of {LAYERS_OF_ONE_KIND}"], hot))
    print()
    print("the first call in a process, after `import torch`")
    header = ["variant", "empty: eager", "then compiled", "full: eager", "then compiled"]
    print(method.table(header, starts))
    print()
    print("the first call of `rms_norm_autotuned`")
    rows = [
        [label, method.duration(_median(tuned[name], "seconds")), str(tuned[name][0]["timed"])]
        for name, label in TUNED.items()
    ]
    print(method.table(["caches", "seconds", "timed"], rows))
    method.write_result(
        options.json,
        {
            "benchmark": "triton_integrations",
            "method": METHOD,
            "workload": {"N": N, "rows": ROWS, "eps": EPS, "dtype": "bfloat16"},
            "triton": measured["triton"],
            "variants": VARIANTS,
            "tunings": TUNED,
            "seconds": _spreads(samples),
            "samples": samples,
        },
    )


def _spreads(samples: dict[str, Any]) -> dict[str, Any]:
    """The spread of every timed field, by state of the caches and variant."""
    return {
        state: {
            name: {
                field: method.spread([one[field] for one in taken])
                for field, value in taken[0].items()
                if isinstance(value, float)
            }
            for name, taken in by_name.items()
        }
        for state, by_name in samples.items()
    }


def main() -> None:
    options = _arguments()
    with method.scratch() as place:
        _report(options, measure(options, place))


if __name__ == "__main__":
    method.main(main)
