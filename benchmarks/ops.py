"""How fast the operators are on this GPU, against the libraries that people use for the same.

RMSNorm and fused add + RMSNorm in bfloat16 over rows and widths; GEMM; the host time of one call.
Times are kernel durations, L2 flushed before each call, the variants in turn (`gpu_time.py`). Each
variant's result is compared with a float64 reference before it is timed.

Our kernels, all candidate schedules included, are compiled by `tlcache warm` while the peers are
tried, into a cache root of their own; the measuring process compiles none.

Here are our own variants, compiling them, measuring, and the command. What is measured is in
`ops_cells.py`, what ours is measured against in `ops_peers.py`, and what it amounts to in
`ops_report.py`. None of them imports this script: `ops` is the package, once `method` is imported.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_time
import method
from method import Failure
from ops_cells import (
    COPY,
    DYNAMIC,
    EPS,
    EXACT,
    HOST_N,
    IN_PLACE,
    OPS,
    ROWS,
    SIZES,
    TUNED,
    WIDTHS,
    Cell,
    Inputs,
    Variant,
    check,
    chosen_cells,
    explain,
    functional_variant,
    in_place_variant,
)
from ops_peers import CACHES, PEERS, Peers, probe, torch_variants, versions
from ops_report import goals, plot, report

from tlcache.spec import KernelSpec
from tlcache.targets import Target
from tlcache.warm import toolchain

__all__ = ["main", "measure"]

METHOD = (
    "GPU times are kernel durations from torch.profiler, L2 flushed before each call, variants in "
    "turn, medians; every result checked against a float64 reference first (GEMM: float32); copies "
    "measured in the same rounds. 'ops tuned' is the fastest of the default and the three best "
    "candidates of a first pass, all in the same rounds. Host times are loops of calls without "
    "synchronization, in turn, medians of the rounds."
)

FIRST_REPS = 10
FINALISTS = 3


# --- ours ---


def _op(
    cell: Cell,
    rows: str,
    schedule: Mapping[str, Any] | None = None,
    *,
    in_place: bool = False,
) -> Any:
    import torch

    import ops

    more: dict[str, Any] = {"rows": rows, "on_miss": "error", "schedule": schedule}
    if cell.op == "gemm":
        return ops.GemmFwdOp(cell.N, cell.K, torch.bfloat16, **more)
    kind = ops.RMSNormFwdOp
    if cell.op == "fused_add_rms_norm":
        kind = ops.FusedAddRMSNormInplaceFwdOp if in_place else ops.FusedAddRMSNormFwdOp
    return kind(cell.N, EPS, torch.bfloat16, **more)


def _our_ops(cell: Cell) -> dict[str, Any]:
    """The op of each of our variants but the tuned one."""
    found = {EXACT: _op(cell, "exact"), DYNAMIC: _op(cell, "dynamic")}
    if cell.op == "fused_add_rms_norm":
        found[IN_PLACE] = _op(cell, "exact", in_place=True)
    return found


def _spec(cell: Cell, op: Any, target: Target) -> KernelSpec:
    return op.state.spec("dynamic" if op.state.rows == "dynamic" else cell.M, target)


def _candidates(cell: Cell, target: Target) -> list[dict[str, Any]]:
    """The schedules of a cell but for the default one."""
    state = _op(cell, "exact").state
    operator = state.operator
    if getattr(operator, "candidates", None) is None:
        return []
    workload = operator.workload(M=cell.M, **state.values)
    default = dict(state.spec(cell.M, target).schedule)
    return [one for one in map(dict, operator.candidates(workload, target)) if one != default]


def _bound(op: Any, inputs: Inputs, *, in_place: bool = False) -> Variant:
    if inputs.cell.op != "fused_add_rms_norm":
        return functional_variant(lambda: op.forward(inputs.x, inputs.weight))
    if in_place:
        return in_place_variant(lambda x, residual: op.forward(x, residual, inputs.weight), inputs)
    return functional_variant(lambda: op.forward(inputs.x, inputs.residual, inputs.weight))


def _text(schedule: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in schedule.items())


# --- compiling ours ---


def _wanted(options: argparse.Namespace, target: Target) -> list[KernelSpec]:
    """Each kernel that a run needs, once."""
    found: dict[KernelSpec, None] = {}
    for cell in chosen_cells(options):
        for op in _our_ops(cell).values():
            found[_spec(cell, op, target)] = None
        for schedule in _candidates(cell, target) if options.tune else ():
            found[_spec(cell, _op(cell, "exact", schedule), target)] = None
    if "host" in options.ops:
        cell = Cell("rms_norm", 1, HOST_N)
        for rows in ("exact", "dynamic"):
            found[_spec(cell, _op(cell, rows), target)] = None
    return list(found)


def _identity(kernel: str, workload: Mapping[str, Any], schedule: Mapping[str, Any]) -> str:
    return json.dumps([kernel, dict(workload), dict(schedule)], sort_keys=True)


def _warm(kernels: Sequence[KernelSpec], target: Target, root: Path, place: Path) -> dict[str, str]:
    """Compile kernels into a root. A candidate may fail: the errors, by kernel."""
    shapes = place / "shapes.json"
    method.write_shapes(shapes, kernels)
    command = [*method.TLCACHE, "warm", "--shapes", str(shapes), "--target", target.name]
    command += ["--cache-dir", str(root), "--timeout", "120", "--json"]
    ran = method.run(command, method.environment(root), codes=(0, 1))
    if not ran.out.startswith("{"):
        raise Failure(f"`tlcache warm` ended with {ran.code}: {ran.err}")
    document = json.loads(ran.out)
    summary = document["summary"]
    _say(f"tlcache warm: {ran.seconds:.1f} s, {json.dumps(summary)}")
    return {
        _identity(one["kernel"], one["workload"], one["schedule"]): one["error"]
        for one in document["kernels"]
        if one["error"]
    }


# --- measuring ---

_START = time.perf_counter()


def _say(text: str) -> None:
    """Progress, on stderr."""
    print(f"[{time.perf_counter() - _START:6.1f} s] {text}", file=sys.stderr, flush=True)


@contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Compile, try the peers, and measure all cells.

    Args:
        options: The command line's.
        place: A private directory.

    Returns:
        The document that `report` shows and `--json` writes.

    Raises:
        Failure: There is no GPU, or nothing could be compiled.
    """
    import torch

    target = method.target(options.target)
    if not target.is_cuda or target != method.visible_gpu() or not torch.cuda.is_available():
        raise Failure(f"this measures on a GPU, and there is none here for the target {target}")
    for name, folder in CACHES.items():
        os.environ.setdefault(name, str(place / folder))
    if nvcc := toolchain.nvcc():
        os.environ.setdefault("CUDA_HOME", str(Path(nvcc).parent.parent))  # for FlashInfer
    root = Path(options.cache_dir).absolute() if options.cache_dir else place / "root"
    peers = Peers(os.path.abspath(__file__))
    kernels = _wanted(options, target)
    _say(f"compiling {len(kernels)} kernels for {target}, and trying {', '.join(options.peers)}")
    try:
        peers.start(options, place)
        errors = _warm(kernels, target, root, place)
        peers.finish(options.peer_timeout)
    finally:
        peers.end()
    for name, reason in peers.failures.items():
        _say(f"left out: {name}: {reason}")
    document: dict[str, Any] = {
        "benchmark": "ops",
        "method": METHOD,
        "target": target.name,
        "peers": versions(),
        "failures": peers.failures,
        "cells": [],
        "unmeasured": [],
        "host_time": None,
    }
    with _set("TILELANG_CACHE_DIR", str(root)), torch.no_grad():
        # The host's times first: the GPU is cool, and no peer has been imported yet.
        if "host" in options.ops:
            document["host_time"] = _host_time(options)
            _say("host times: done")
        for cell in chosen_cells(options):
            if time.perf_counter() - _START > options.limit:
                document["unmeasured"].append(f"{cell}: not begun within {options.limit:g} s")
                continue
            try:
                document["cells"].append(_measure_cell(cell, peers, errors, options, target))
            except Exception as fault:
                document["unmeasured"].append(f"{cell}: {explain(fault)}")
                _say(document["unmeasured"][-1])
    return document


def _measure_cell(
    cell: Cell,
    peers: Peers,
    errors: Mapping[str, str],
    options: argparse.Namespace,
    target: Target,
) -> dict[str, Any]:
    inputs = Inputs(cell)
    want = inputs.reference()
    failures: dict[str, str] = {}

    def sound(name: str, make: Callable[[], Variant]) -> Variant | None:
        try:
            variant = make()
            check(variant, cell.op, want)
            return variant
        except Exception as fault:
            failures[name] = explain(fault)
            return None

    def ours(name: str, op: Any) -> Variant | None:
        def make() -> Variant:
            spec = _spec(cell, op, target)
            error = errors.get(_identity(spec.kernel, spec.workload, spec.schedule))
            if error is not None:
                raise Failure(f"not compiled: {error}")
            return _bound(op, inputs, in_place=name == IN_PLACE)

        return sound(name, make)

    variants: dict[str, Variant | None] = {}
    our_ops = _our_ops(cell)
    for name, op in our_ops.items():
        variants[name] = ours(name, op)
    made = torch_variants(inputs)
    for name, factory in PEERS.items() if cell.op != "gemm" else ():
        if cell.op in peers.usable.get(name, ()):
            try:
                made.update(factory(inputs))
            except Exception as fault:
                failures[name] = explain(fault)
    for name, variant in made.items():
        variants[name] = sound(name, lambda variant=variant: variant)
    schedules = _candidates(cell, target) if options.tune else []
    candidates: dict[str, Variant | None] = {
        _text(one): ours(_text(one), _op(cell, "exact", one)) for one in schedules
    }
    want.clear()
    first: dict[str, float] = {}
    if candidates := {name: one for name, one in candidates.items() if one is not None}:
        tried = gpu_time.times({name: one.call for name, one in candidates.items()}, FIRST_REPS)
        first = {name: statistics.median(samples) for name, samples in tried.items()}
    finalists = sorted(first, key=first.__getitem__)[:FINALISTS]
    calls = {name: one.call for name, one in variants.items() if one is not None}
    calls |= {name: candidates[name].call for name in finalists}
    if cell.op != "gemm":
        y = inputs.x.new_empty(inputs.x.shape)
        calls[COPY] = lambda: y.copy_(inputs.x)
    for variant in (*variants.values(), *candidates.values()):
        if variant is not None:
            variant.outputs()  # in-place variants start from fresh values
    measured = {
        name: gpu_time.summary(samples)
        for name, samples in gpu_time.times(calls, cell.reps(options.reps)).items()
    }
    default = _text(_spec(cell, our_ops[EXACT], target).schedule)
    in_race = {default: measured[EXACT]} if EXACT in measured else {}
    in_race |= {name: measured.pop(name) for name in finalists}
    document: dict[str, Any] = {
        "op": cell.op,
        "M": cell.M,
        "N": cell.N,
        "K": cell.K,
        "bytes": cell.moved,
        "us": measured,
        "default": default,
        "tuned": None,
        "candidates": {default: in_race[default]["us"], **first} if default in in_race else first,
        "failures": failures,
    }
    if finalists:
        best = min(in_race, key=lambda name: in_race[name]["us"])
        measured[TUNED] = in_race[best]
        document["tuned"] = best
    shown = ", ".join(f"{name} {one['us']:.2f}" for name, one in measured.items())
    _say(f"{cell}: {shown}; {len(first)} candidates")
    for name, reason in failures.items():
        _say(f"  left out: {name}: {reason}")
    return document


def _host_time(options: argparse.Namespace) -> dict[str, Any]:
    """Host time of one eager call at M = 1, in loops whose kernels end sooner than their calls."""
    import torch
    from torch import nn
    from torch.nn import functional

    import ops

    x = torch.randn(1, HOST_N, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(HOST_N, device="cuda", dtype=torch.bfloat16)
    op = ops.RMSNormFwdOp(HOST_N, EPS, torch.bfloat16)
    dispatched = torch.ops.tilelang_ops.rms_norm
    known = {
        "ops": ops,
        "F": functional,
        "x": x,
        "w": w,
        "shape": (HOST_N,),
        "ours": ops.RMSNorm(HOST_N, EPS, dtype=torch.bfloat16, device="cuda"),
        "theirs": nn.RMSNorm(HOST_N, EPS, dtype=torch.bfloat16, device="cuda"),
        "op": op,
        "dispatched": dispatched,
        "key": op.instance_key,
    }
    statements = {
        "F.rms_norm": f"F.rms_norm(x, shape, w, {EPS})",
        "ops.rms_norm": f"ops.rms_norm(x, w, {EPS})",
        "torch.nn.RMSNorm": "theirs(x)",
        "ops.RMSNorm": "ours(x)",
        "ops.RMSNormFwdOp.forward": "op.forward(x, w)",
        "torch.ops.tilelang_ops.rms_norm": "dispatched(x, w, key)",
    }
    if hasattr(dispatched, "scalars"):
        known["stateless"] = dispatched.scalars
        statements["torch.ops.tilelang_ops.rms_norm.scalars"] = f"stateless(x, w, {EPS})"
    timers = {name: timeit.Timer(text, globals=known) for name, text in statements.items()}
    for timer in timers.values():
        timer.timeit(options.host_calls)
    samples: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    gc.collect()
    for number in range(options.host_rounds):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            torch.cuda.synchronize()
            seconds = timers[name].timeit(options.host_calls)  # which pauses the collector
            samples[name].append(seconds / options.host_calls * 1e6)
    torch.cuda.synchronize()
    return {
        "N": HOST_N,
        "calls": options.host_calls,
        "us": {name: {**method.spread(found), "samples": found} for name, found in samples.items()},
    }


# --- the command ---


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return chosen

    return parse


def _numbers(text: str) -> list[int]:
    return [method.positive(part) for part in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="GPU time of the operators against their peers, and the host time of a call."
    )
    add = parser.add_argument
    add("--ops", type=_names(OPS), default=list(OPS), help=f"some of {','.join(OPS)}")
    add("--rows", type=_numbers, default=list(ROWS), metavar="M,…", help="M of the norms")
    add("--widths", type=_numbers, default=list(WIDTHS), metavar="N,…", help="N of the norms")
    add("--sizes", type=_numbers, default=list(SIZES), metavar="S,…", help="M = N = K of GEMM")
    add("--peers", type=_names(PEERS), default=list(PEERS), help=f"some of {','.join(PEERS)}")
    add(
        "--reps",
        type=method.positive,
        default=40,
        help="calls of each variant (40; five times as many up to 128 rows; GEMM at most 20)",
    )
    add("--no-tune", dest="tune", action="store_false", help="leave candidate schedules out")
    add("--host-calls", type=method.positive, default=2000, help="calls a loop (2000)")
    add("--host-rounds", type=method.positive, default=15, help="loops of each call (15)")
    add("--target", default="auto", help="the GPU here; another one only with --shapes")
    add("--cache-dir", metavar="DIR", help="keep our compiled kernels here, or reuse them")
    add("--peer-timeout", type=float, default=150, help="seconds to try the peers in (150)")
    add("--limit", type=float, default=450, help="begin no cell after so many seconds (450)")
    add("--json", metavar="FILE", help="write all samples here")
    add("--plot", metavar="FILE", help="draw the norms, as .png or .svg; needs matplotlib")
    add("--from", dest="source", metavar="JSON", help="report and draw a file of --json again")
    add("--shapes", metavar="FILE", help="only write the kernels of a run as a shapes.json")
    add("--probe", choices=list(PEERS), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = _arguments()
    if options.probe:
        probe(options)
        return
    if options.shapes:
        kernels = _wanted(options, method.target(options.target))
        method.write_shapes(Path(options.shapes), kernels)
        print(f"{len(kernels)} kernels")
        return
    if options.source:
        document = json.loads(Path(options.source).read_text(encoding="utf-8"))
        if document.get("benchmark") != "ops":
            raise Failure(f"{options.source} is no result of this benchmark")
    else:
        with method.scratch() as place:
            document = measure(options, place)
        document["goals"] = [goal.to_json() for goal in goals(document)]
        # Before anything else can go wrong: a run takes minutes.
        method.write_result(options.json, document)
        document["host"] = method.host()
    report(document)
    if options.plot:
        plot(document, options.plot)


if __name__ == "__main__":
    method.main(main)
