"""How fast the operators are on this GPU, against the libraries that people use for the same.

RMSNorm and fused add + RMSNorm in bfloat16 over rows and widths; GEMM; the host time of one call.
Times are kernel durations, L2 flushed before each call, the variants in turn (`gpu_time.py`). Each
variant's result is compared with a float64 reference before it is timed.

A peer that cannot be imported, fails, hangs or is wrong is left out, and the report says why: each
is tried in a process of its own before it is let into the measuring one. Our kernels, all candidate
schedules included, are compiled by `tlcache warm` meanwhile, into a cache root of their own; the
measuring process compiles none.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_time
import method
from method import Failure, Goal

from tlcache.spec import KernelSpec
from tlcache.targets import Target
from tlcache.warm import toolchain

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Cell", "Variant", "goals", "main", "measure", "plot", "report"]

METHOD = (
    "GPU times are kernel durations from torch.profiler, L2 flushed before each call, variants in "
    "turn, medians; every result checked against a float64 reference first (GEMM: float32); copies "
    "measured in the same rounds. 'ops tuned' is the fastest of the default and the three best "
    "candidates of a first pass, all in the same rounds. Host times are loops of calls without "
    "synchronization, in turn, medians of the rounds."
)

EPS = 1e-5
TOLERANCE = 1.6e-2
"""Of bfloat16, relative; as in the tests."""
FLOORS = {"rms_norm": 1e-3, "fused_add_rms_norm": 1e-3, "gemm": 1.0}
"""Where a value is smaller than this, the tolerance is taken of this."""

OPS = ("rms_norm", "fused_add_rms_norm", "gemm", "host")
ROWS = (1, 128, 2048, 32768)
WIDTHS = (1024, 4096, 8192, 16384)
SIZES = (4096, 8192)
HOST_N = 4096
COPY = "copy"
EXACT, DYNAMIC, TUNED, IN_PLACE = "ops exact", "ops dynamic", "ops tuned", "ops in place"
OURS = (EXACT, DYNAMIC, TUNED, IN_PLACE)

FIRST_REPS = 10
FINALISTS = 3
GEMM_REPS = 20
SHORT_ROWS = 128
SHORT_FACTOR = 5
"""Calls of few microseconds cost nothing to repeat: five times the repetitions up to 128 rows."""


# --- what is measured ---


@dataclass(frozen=True)
class Cell:
    """One workload.

    Attributes:
        op: The operator.
        M: Rows.
        N: Elements a row; of GEMM, columns of the result.
        K: Of GEMM: what is summed over.
    """

    op: str
    M: int
    N: int
    K: int = 0

    @property
    def moved(self) -> int:
        """Bytes that have to be read and written, without the weight of a norm."""
        if self.op == "gemm":
            return 2 * (self.M * self.K + self.N * self.K + self.M * self.N)
        return 2 * self.M * self.N * (4 if self.op == "fused_add_rms_norm" else 2)

    def reps(self, reps: int) -> int:
        if self.op == "gemm":
            return min(reps, GEMM_REPS)
        return reps * SHORT_FACTOR if self.M <= SHORT_ROWS else reps

    def __str__(self) -> str:
        shape = f"M={self.M} N={self.N}"
        return f"{self.op} {shape} K={self.K}" if self.op == "gemm" else f"{self.op} {shape}"


def _cells(options: argparse.Namespace) -> list[Cell]:
    norms = [op for op in ("rms_norm", "fused_add_rms_norm") if op in options.ops]
    cells = [Cell(op, M, N) for op in norms for N in options.widths for M in options.rows]
    if "gemm" in options.ops:
        cells += [Cell("gemm", size, size, size) for size in options.sizes]
    return cells


@dataclass(frozen=True)
class Variant:
    """One way to compute a cell.

    Attributes:
        call: Is timed.
        outputs: Calls it on fresh inputs, and returns what is to be compared.
    """

    call: Callable[[], object]
    outputs: Callable[[], Sequence[Tensor]]


def _functional(call: Callable[[], Any]) -> Variant:
    def outputs() -> Sequence[Tensor]:
        made = call()
        return made if isinstance(made, (tuple, list)) else (made,)

    return Variant(call, outputs)


def _in_place(call: Callable[[Tensor, Tensor], object], inputs: Inputs) -> Variant:
    """A variant that writes x and the residual; values drift from call to call, and stay finite."""
    x, residual = inputs.x.clone(), inputs.residual.clone()

    def outputs() -> Sequence[Tensor]:
        x.copy_(inputs.x)
        residual.copy_(inputs.residual)
        call(x, residual)
        return x, residual

    return Variant(lambda: call(x, residual), outputs)


class Inputs:
    """The tensors of a cell, on the GPU: the same in every process."""

    def __init__(self, cell: Cell) -> None:
        import torch

        torch.manual_seed(cell.M + cell.N)
        normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        self.cell = cell
        self.x = normal(cell.M, cell.K or cell.N)
        self.weight = normal(cell.N, cell.K) if cell.op == "gemm" else normal(cell.N)
        if cell.op == "fused_add_rms_norm":
            self.residual = normal(cell.M, cell.N)

    def reference(self) -> list[Tensor]:
        """The results, in float32; a norm's are computed in float64, a few rows at a time."""
        import torch

        if self.cell.op == "gemm":
            return [self.x.float() @ self.weight.float().T]
        fused = self.cell.op == "fused_add_rms_norm"
        parts: list[list[Tensor]] = [[], []]
        for start in range(0, self.cell.M, 2048):
            wide = self.x[start : start + 2048].double()
            if fused:
                wide += self.residual[start : start + 2048].double()
                parts[1].append(wide.float())
                wide = wide.bfloat16().double()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
            parts[0].append((wide * scale * self.weight.double()).float())
        return [torch.cat(part) for part in parts if part]


def _check(variant: Variant, want: Sequence[Tensor], floor: float) -> None:
    """Raise Failure where a variant's results are wrong."""
    got = variant.outputs()
    if len(got) != len(want):
        raise Failure(f"wrong: {len(got)} results, not {len(want)}")
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        if one.shape != other.shape:
            raise Failure(f"wrong: result {index} has shape {list(one.shape)}")
        off = ((one.float() - other).abs() / other.abs().clamp(min=floor)).max().item()
        if not off <= TOLERANCE:
            raise Failure(f"wrong: result {index} is off by {off:.3g}, relative")


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
        return _functional(lambda: op.forward(inputs.x, inputs.weight))
    if in_place:
        return _in_place(lambda x, residual: op.forward(x, residual, inputs.weight), inputs)
    return _functional(lambda: op.forward(inputs.x, inputs.residual, inputs.weight))


def _text(schedule: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in schedule.items())


# --- peers ---


def _torch(inputs: Inputs) -> dict[str, Variant]:
    import torch

    x, w = inputs.x, inputs.weight
    if inputs.cell.op == "gemm":
        columns = w.T.contiguous()
        return {
            "torch": _functional(lambda: torch.matmul(x, w.T)),
            "torch, weight (K, N)": _functional(lambda: torch.matmul(x, columns)),
        }
    function = _torch_function(inputs.cell)
    arguments = (x, inputs.residual, w) if inputs.cell.op == "fused_add_rms_norm" else (x, w)
    return {"torch": _functional(lambda: function(*arguments))}


def _torch_function(cell: Cell) -> Callable[..., Any]:
    from torch.nn import functional

    shape = (cell.N,)

    def rms_norm(x: Tensor, w: Tensor) -> Tensor:
        return functional.rms_norm(x, shape, w, EPS)

    def fused_add_rms_norm(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return functional.rms_norm(total, shape, w, EPS), total

    return rms_norm if cell.op == "rms_norm" else fused_add_rms_norm


def _inductor(inputs: Inputs) -> dict[str, Variant]:
    import torch

    torch._dynamo.reset()  # a function may be compiled for eight shapes; each cell starts anew
    compiled = torch.compile(_torch_function(inputs.cell), dynamic=False, fullgraph=True)
    x, w = inputs.x, inputs.weight
    arguments = (x, inputs.residual, w) if inputs.cell.op == "fused_add_rms_norm" else (x, w)
    return {"Inductor": _functional(lambda: compiled(*arguments))}


def _triton(inputs: Inputs) -> dict[str, Variant]:
    from ops.triton import rms_norm_autotuned, rms_norm_captured

    if inputs.cell.op != "rms_norm":
        return {}
    x, w = inputs.x, inputs.weight
    # It tunes at the first call for an N, whatever M: let that be the one where it matters most.
    rms_norm_autotuned(x.new_zeros(max(ROWS), inputs.cell.N), w, EPS)
    return {
        "Triton": _functional(lambda: rms_norm_captured(x, w, EPS)),
        "Triton, autotuned": _functional(lambda: rms_norm_autotuned(x, w, EPS)),
    }


def _liger(inputs: Inputs) -> dict[str, Variant]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    x, w = inputs.x, inputs.weight
    if inputs.cell.op == "rms_norm":
        apply = LigerRMSNormFunction.apply
        return {"Liger": _functional(lambda: apply(x, w, EPS, 0.0, "llama", False))}
    fused, residual = LigerFusedAddRMSNormFunction.apply, inputs.residual
    return {"Liger": _functional(lambda: fused(x, residual, w, EPS, 0.0, "llama", False))}


def _flashinfer(inputs: Inputs) -> dict[str, Variant]:
    """With programmatic dependent launch, its default on this GPU, and without: its durations may
    then include a wait for the kernel before.
    """
    from flashinfer import norm

    x, w = inputs.x, inputs.weight
    made: dict[str, Variant] = {}
    for name, pdl in (("FlashInfer", None), ("FlashInfer, no PDL", False)):
        if inputs.cell.op == "rms_norm":
            made[name] = _functional(partial(norm.rmsnorm, x, w, EPS, enable_pdl=pdl))
        else:
            call = partial(norm.fused_add_rmsnorm, weight=w, eps=EPS, enable_pdl=pdl)
            made[name] = _in_place(call, inputs)
    return made


def _quack(inputs: Inputs) -> dict[str, Variant]:
    from quack.rmsnorm import rmsnorm_fwd

    x, w = inputs.x, inputs.weight
    if inputs.cell.op == "rms_norm":
        return {"quack": _functional(lambda: rmsnorm_fwd(x, w, eps=EPS)[0])}
    residual = inputs.residual
    return {"quack": _functional(lambda: rmsnorm_fwd(x, w, residual=residual, eps=EPS)[:2])}


PEERS: dict[str, Callable[[Inputs], dict[str, Variant]]] = {
    "Inductor": _inductor,
    "Triton": _triton,
    "Liger": _liger,
    "FlashInfer": _flashinfer,
    "quack": _quack,
}
"""What stands beside `torch`; each takes a norm's cell and gives variants by name."""
DISTRIBUTIONS = (
    "triton",
    "liger_kernel",
    "flashinfer-python",
    "quack-kernels",
    "nvidia-cutlass-dsl",
)
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "QUACK_CACHE_DIR": "quack",
}
"""Where the peers keep what they compile: in the run's directory, unless it is set already."""


# --- trying the peers ---


class Peers:
    """The peers, each tried in a process of its own.

    Attributes:
        usable: The operators that each has shown to run, by peer.
        failures: Why the others are left out, by peer and operator.
    """

    def __init__(self) -> None:
        self.usable: dict[str, set[str]] = {}
        self.failures: dict[str, str] = {}
        self._running: dict[str, tuple[subprocess.Popen[bytes], Path, Path]] = {}
        self._started = 0.0

    def start(self, options: argparse.Namespace, place: Path) -> None:
        """Begin to try all of them, at once."""
        norms = [op for op in ("rms_norm", "fused_add_rms_norm") if op in options.ops]
        self._started = time.perf_counter()
        for name in options.peers if norms else ():
            command = [sys.executable, os.path.abspath(__file__), "--probe", name]
            command += ["--ops", ",".join(norms)]
            command += ["--rows", ",".join(map(str, options.rows))]
            command += ["--widths", ",".join(map(str, options.widths))]
            out, err = place / f"{name}.out", place / f"{name}.err"
            with out.open("wb") as stdout, err.open("wb") as stderr:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                )
            self._running[name] = (process, out, err)

    def finish(self, limit: float) -> None:
        """Wait for them, for so many seconds from their start, and end those that still run."""
        for name, (process, out, err) in list(self._running.items()):
            try:
                code = process.wait(max(0.0, self._started + limit - time.perf_counter()))
                ending = f"its process ended with {code}"
            except subprocess.TimeoutExpired:
                _end(process)
                code, ending = 0, f"not done after {limit:g} s"
            del self._running[name]
            self._judge(name, out, err, ending, crashed=code != 0)

    def end(self) -> None:
        """End what still runs."""
        while self._running:
            _end(self._running.popitem()[1][0])

    def _judge(self, name: str, out: Path, err: Path, ending: str, *, crashed: bool) -> None:
        # A process that was ended after it had shown an operator to run is good enough: what it has
        # not compiled yet, the measuring process does. One that crashed would take that one along.
        usable = self.usable.setdefault(name, set())
        told: set[str] = set()
        for line in out.read_text(errors="replace").splitlines():
            if not line.startswith("PROBE "):
                continue
            found = json.loads(line[len("PROBE ") :])
            told.add(found["op"])
            if found["error"] is None:
                usable.add(found["op"])
            else:
                usable.discard(found["op"])
                self.failures.setdefault(f"{name} {found['op']}", found["error"])
        if crashed:
            usable.clear()
        if crashed or not told:
            last = err.read_text(errors="replace").strip().splitlines()[-1:]
            self.failures[name] = "; ".join([ending, *last])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _probe(options: argparse.Namespace) -> None:
    """Run one peer on all cells, which also fills its caches; say for each whether it ran."""
    import torch

    cells = _cells(options)
    first = [next(cell for cell in cells if cell.op == op) for op in options.ops]
    broken: set[str] = set()
    with torch.no_grad():
        for cell in [*first, *cells]:
            if cell.op in broken:
                continue
            error = None
            try:
                for variant in PEERS[options.probe](Inputs(cell)).values():
                    variant.call()
                torch.cuda.synchronize()
            except Exception as fault:
                error = _reason(fault)
                broken.add(cell.op)
            print(f"PROBE {json.dumps({'op': cell.op, 'error': error})}", flush=True)


def _reason(fault: BaseException) -> str:
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    text = " … ".join([lines[0], lines[-1]] if len(lines) > 1 else lines)
    return (text if isinstance(fault, Failure) else f"{type(fault).__name__}: {text}")[:400]


# --- compiling ours ---


def _wanted(options: argparse.Namespace, target: Target) -> list[KernelSpec]:
    """Each kernel that a run needs, once."""
    found: dict[KernelSpec, None] = {}
    for cell in _cells(options):
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
    peers = Peers()
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
        "peers": {name: _version(name) for name in DISTRIBUTIONS},
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
        for cell in _cells(options):
            if time.perf_counter() - _START > options.limit:
                document["unmeasured"].append(f"{cell}: not begun within {options.limit:g} s")
                continue
            try:
                document["cells"].append(_measure_cell(cell, peers, errors, options, target))
            except Exception as fault:
                document["unmeasured"].append(f"{cell}: {_reason(fault)}")
                _say(document["unmeasured"][-1])
    return document


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


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
            _check(variant, want, FLOORS[cell.op])
            return variant
        except Exception as fault:
            failures[name] = _reason(fault)
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
    made = _torch(inputs)
    for name, factory in PEERS.items() if cell.op != "gemm" else ():
        if cell.op in peers.usable.get(name, ()):
            try:
                made.update(factory(inputs))
            except Exception as fault:
                failures[name] = _reason(fault)
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


# --- what it amounts to ---


def _peers_of(cell: Mapping[str, Any]) -> list[str]:
    return [name for name in cell["us"] if name not in OURS and name != COPY]


def _fastest(cell: Mapping[str, Any], figure: str = "us") -> tuple[str, float] | None:
    """The fastest peer of a cell, and its time."""
    found = [(cell["us"][name][figure], name) for name in _peers_of(cell)]
    return (min(found)[1], min(found)[0]) if found else None


def _to_peer(cell: Mapping[str, Any], figure: str = "us") -> float | None:
    """The time of our default kernel over that of the fastest peer."""
    peer = _fastest(cell, figure)
    return cell["us"][EXACT][figure] / peer[1] if peer and EXACT in cell["us"] else None


def _to_tuned(cell: Mapping[str, Any], figure: str = "us") -> float | None:
    if EXACT not in cell["us"] or TUNED not in cell["us"]:
        return None
    return cell["us"][EXACT][figure] / cell["us"][TUNED][figure]


def _bandwidth(cell: Mapping[str, Any], name: str) -> float | None:
    """TB/s, read and written."""
    if name not in cell["us"]:
        return None
    moved = 4 * cell["M"] * cell["N"] if name == COPY else cell["bytes"]
    return moved / cell["us"][name]["us"] / 1e6


def _of_copy(cell: Mapping[str, Any], best: float | None) -> float | None:
    """Our bandwidth over a copy's: of the same tensor for RMSNorm, which moves the same bytes; else
    over the best that a copy reached in the run.
    """
    ours = _bandwidth(cell, EXACT)
    copy = _bandwidth(cell, COPY) if cell["op"] == "rms_norm" else best
    return ours / copy if ours and copy else None


def _best_copy(document: Mapping[str, Any]) -> float | None:
    """The best copy bandwidth among the cells with the most rows: shorter copies end in L2."""
    norms = [cell for cell in document["cells"] if cell["op"] != "gemm"]
    rows = max((cell["M"] for cell in norms), default=0)
    found = [_bandwidth(cell, COPY) or 0.0 for cell in norms if cell["M"] == rows]
    return max(found, default=0.0) or None


def _of(cells: Iterable[Mapping[str, Any]], op: str) -> list[Mapping[str, Any]]:
    return [cell for cell in cells if cell["op"] == op]


def _worst(
    cells: Sequence[Mapping[str, Any]],
    value: Callable[[Mapping[str, Any]], float | None],
    choose: Callable[..., Any],
    bound: float,
) -> tuple[float | None, str]:
    """The worst value, and where, and in how many cells the bound is missed."""
    found = [(value(cell), f"M={cell['M']} N={cell['N']}") for cell in cells]
    known = [(one, where) for one, where in found if one is not None]
    if not known:
        return None, "no cell"
    worst, where = choose(known)
    beyond = sum(choose(one, bound) != bound for one, _ in known)
    missing = len(found) - len(known)
    counted = f"worst of {len(known)}" + (f", {missing} not known" if missing else "")
    return worst, f"{where}, {counted}, {beyond} missed"


def goals(document: Mapping[str, Any]) -> list[Goal]:
    """The goals of what was measured."""
    found: list[Goal] = []
    best = _best_copy(document)
    for op in ("rms_norm", "fused_add_rms_norm"):
        cells = _of(document["cells"], op)
        if not cells:
            continue
        for what, ratio, bound in (
            ("slower than the fastest peer", _to_peer, 1),
            ("default slower than tuned", _to_tuned, 3),
        ):
            for figure, how in (("us", "medians"), ("middle_mean", "means of the middle half")):
                worst, where = _worst(cells, partial(ratio, figure=figure), max, 1 + bound / 100)
                value = None if worst is None else 100 * (worst - 1)
                found.append(
                    Goal(f"{op}, {what} by ({how}; {where})", value, bound, least=False, unit=" %")
                )
        long = [cell for cell in cells if cell["M"] == 32768 and cell["N"] >= 4096]
        if long:
            worst, where = _worst(long, partial(_of_copy, best=best), min, 0.98)
            value = None if worst is None else 100 * worst
            found.append(
                Goal(f"{op}, bandwidth to a copy's ({where})", value, 98, least=True, unit=" %")
            )
    for cell in _of(document["cells"], "gemm"):
        ratio = _to_peer(cell)
        found.append(
            Goal(
                f"gemm {cell['M']}^3, speed to torch.matmul's",
                None if ratio is None else 100 / ratio,
                90 if cell["M"] >= 8192 else 80,
                least=True,
                unit=" %",
            )
        )
    if host := document.get("host_time"):
        ratios = _host_ratios(host)
        found.append(Goal("host time, ops.rms_norm to F.rms_norm", ratios[0], 1, least=False))
        found.append(Goal("host time, ops.RMSNorm to nn.RMSNorm", ratios[1], 1, least=False))
    return found


def _host_ratios(host: Mapping[str, Any]) -> list[float]:
    pairs = (("ops.rms_norm", "F.rms_norm"), ("ops.RMSNorm", "torch.nn.RMSNorm"))
    return [
        statistics.median(method.ratios(host["us"][ours]["samples"], host["us"][theirs]["samples"]))
        for ours, theirs in pairs
    ]


def _percent(value: float | None, *, over: bool = False) -> str:
    if value is None:
        return "–"
    return f"{100 * (value - 1):+.1f} %" if over else f"{100 * value:.1f} %"


def _columns(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """All variants of some cells: the copy, ours, the peers."""
    names = list(dict.fromkeys(name for cell in cells for name in cell["us"]))
    ours = [name for name in OURS if name in names]
    peers = [name for name in names if name not in ours and name != COPY]
    return [*([COPY] if COPY in names else []), *ours, *peers]


def report(document: Mapping[str, Any]) -> None:
    """Print tables, goals, and what was left out."""
    best = _best_copy(document)
    for op in ("rms_norm", "fused_add_rms_norm"):
        cells = _of(document["cells"], op)
        if not cells:
            continue
        columns = _columns(cells)
        rows = []
        for cell in cells:
            times = [
                f"{cell['us'][name]['us']:.2f}" if name in cell["us"] else "–" for name in columns
            ]
            bandwidths = [_bandwidth(cell, name) for name in (EXACT, COPY)]
            rows.append(
                [
                    str(cell["N"]),
                    str(cell["M"]),
                    *times,
                    _percent(_to_peer(cell), over=True),
                    _percent(_to_tuned(cell), over=True),
                    *(f"{one:.2f}" if one else "–" for one in bandwidths),
                    _percent(_of_copy(cell, best)),
                ]
            )
        print(f"{op}, bf16, GPU time in µs; TB/s read and written")
        print()
        tail = ["to peer", "to tuned", "TB/s", "copy TB/s", "of copy"]
        print(method.table(["N", "M", *columns, *tail], rows))
        print()
        print(method.table(["N", "M", "default", "fastest candidate"], _schedules(cells)))
        print()
    if cells := _of(document["cells"], "gemm"):
        columns = _columns(cells)
        rows = []
        for cell in cells:
            flops = 2 * cell["M"] * cell["N"] * cell["K"]
            speeds = [
                f"{flops / cell['us'][name]['us'] / 1e6:.1f}" if name in cell["us"] else "–"
                for name in columns
            ]
            ratio = _to_peer(cell)
            rows.append(
                [
                    f"{cell['M']}^3",
                    *speeds,
                    _percent(1 / ratio if ratio else None),
                    _percent(_to_tuned(cell), over=True),
                ]
            )
        print("gemm, bf16, TFLOP/s")
        print()
        print(method.table(["M=N=K", *columns, "to torch", "to tuned"], rows))
        print()
        print(method.table(["N", "M", "default", "fastest candidate"], _schedules(cells)))
        print()
    if host := document.get("host_time"):
        print(f"host time of one eager call, M=1 N={host['N']} bf16, in µs")
        print()
        shown = [
            [name, *(f"{found[figure]:.2f}" for figure in ("median", "min", "max"))]
            for name, found in host["us"].items()
        ]
        print(method.table(["call", "median", "min", "max"], shown))
        print()
    for name, reason in document["failures"].items():
        print(f"left out: {name}: {reason}")
    for cell in document["cells"]:
        for name, reason in cell["failures"].items():
            print(f"left out: {cell['op']} M={cell['M']} N={cell['N']}: {name}: {reason}")
    for text in document["unmeasured"]:
        print(f"not measured: {text}")
    for goal in goals(document):
        print(goal)


def _schedules(cells: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [
        [str(cell["N"]), str(cell["M"]), cell["default"], cell["tuned"] or "–"] for cell in cells
    ]


# --- plot ---

_LOOKS = {
    EXACT: ("#c1121f", "D", 46),
    TUNED: ("#ff8fa3", "D", 26),
    DYNAMIC: ("#7a0910", "P", 34),
    IN_PLACE: ("#e07b00", "D", 34),
    "torch": ("#555555", "s", 22),
    "Inductor": ("#1f77b4", "o", 26),
    "Triton": ("#2ca02c", "^", 28),
    "Triton, autotuned": ("#98c98a", "^", 22),
    "Liger": ("#17a2b8", "v", 28),
    "FlashInfer": ("#76b900", "<", 26),
    "FlashInfer, no PDL": ("#b5c99a", "<", 20),
    "quack": ("#8e5bd0", ">", 28),
}
_CEILING, _BASE = 1.6, 0.88


def plot(document: Mapping[str, Any], path: str) -> None:
    """Draw the norms: a panel an operator and M, time relative to the fastest peer over N.

    Args:
        document: What `measure` returns, or a file of `--json`.
        path: Where to; the suffix says the format.

    Raises:
        Failure: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as missing:
        raise Failure(
            f"--plot needs matplotlib, which is not installed ({missing}); `pip install matplotlib`"
        ) from missing
    norms = [cell for cell in document["cells"] if cell["op"] != "gemm" and _fastest(cell)]
    if not norms:
        raise Failure("there is nothing to draw: no norm was measured together with a peer")
    kinds = list(dict.fromkeys(cell["op"] for cell in norms))
    counts = sorted({cell["M"] for cell in norms})
    widths = sorted({cell["N"] for cell in norms})
    names = [name for name in _LOOKS if any(name in cell["us"] for cell in norms)]
    figure, axes = pyplot.subplots(
        len(kinds),
        len(counts),
        figsize=(1.2 + 3.3 * len(counts), 1.1 + 3.0 * len(kinds)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    handles: dict[str, Any] = {}
    for row, kind in enumerate(kinds):
        for column, count in enumerate(counts):
            panel = axes[row][column]
            panel.axhline(1, color="#333333", linewidth=0.9, zorder=1)
            panel.grid(axis="y", color="#e6e6e6", linewidth=0.6, zorder=0)
            for edge in range(len(widths) - 1):
                panel.axvline(edge + 0.5, color="#e6e6e6", linewidth=0.6, zorder=0)
            for cell in norms:
                if (cell["op"], cell["M"]) == (kind, count):
                    _draw(panel, cell, widths.index(cell["N"]), names, handles)
            panel.set_title(f"{kind}, M = {count}", fontsize=9.5)
            panel.set_xticks(range(len(widths)), [str(width) for width in widths], fontsize=8.5)
            panel.set_xlim(-0.5, len(widths) - 0.5)
            panel.set_ylim(_BASE, _CEILING + 0.1)
            panel.tick_params(axis="y", labelsize=8.5)
            panel.tick_params(axis="x", length=0)
            for side in ("top", "right"):
                panel.spines[side].set_visible(False)
            if row == len(kinds) - 1:
                panel.set_xlabel("N", fontsize=9)
            if column == 0:
                panel.set_ylabel("time / fastest peer's", fontsize=9)
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=min(len(names), 6 if len(counts) > 2 else 3),
        fontsize=8.5,
        frameon=False,
    )
    device = (document.get("host") or {}).get("gpu") or document["target"]
    figure.suptitle(
        f"GPU time on {device}, bf16: below 1 is faster than every peer; "
        f"numbers at the top are beyond the scale",
        fontsize=10,
    )
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _draw(
    panel: Any, cell: Mapping[str, Any], place: int, names: Sequence[str], handles: dict[str, Any]
) -> None:
    """One cell: a mark a variant, side by side, ours first."""
    peer = _fastest(cell)
    assert peer is not None
    step = 0.76 / max(1, len(names) - 1)
    beyond = 0
    for index, name in enumerate(names):
        color, marker, size = _LOOKS[name]
        drawn = handles.get(name)
        if name in cell["us"]:
            value = cell["us"][name]["us"] / peer[1]
            x = place - 0.38 + index * step
            clipped = min(max(value, _BASE + 0.01), _CEILING)
            ours = name in OURS
            drawn = panel.scatter(
                [x],
                [clipped],
                s=size,
                c=color,
                marker=marker,
                linewidths=0.6 if ours else 0,
                edgecolors="black" if ours else "none",
                zorder=4 if ours else 3,
                clip_on=False,
            )
            if value > _CEILING:
                panel.annotate(
                    f"{value:.1f}",
                    (x, _CEILING),
                    xytext=(0, 5 + 8 * (beyond % 2)),
                    textcoords="offset points",
                    ha="center",
                    fontsize=6.5,
                    color=color,
                )
                beyond += 1
        if drawn is not None:
            handles[name] = drawn


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
        _probe(options)
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
