"""The peers that `ops.py` measures ours against: how each is called, and whether it runs here.

A peer that cannot be imported, fails, hangs or is wrong is left out, and the report says why: each
is tried in a process of its own (`ops.py --probe NAME`) before it is let into the measuring one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ops_cells import (
    EPS,
    ROWS,
    Cell,
    Inputs,
    Variant,
    chosen_cells,
    explain,
    functional_variant,
    in_place_variant,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CACHES", "PEERS", "Peers", "probe", "torch_variants", "versions"]


# --- how each is called ---


def torch_variants(inputs: Inputs) -> dict[str, Variant]:
    """What is always there to be measured against: torch itself."""
    import torch

    x, w = inputs.x, inputs.weight
    if inputs.cell.op == "gemm":
        columns = w.T.contiguous()
        return {
            "torch": functional_variant(lambda: torch.matmul(x, w.T)),
            "torch, weight (K, N)": functional_variant(lambda: torch.matmul(x, columns)),
        }
    function = _torch_function(inputs.cell)
    arguments = (x, inputs.residual, w) if inputs.cell.op == "fused_add_rms_norm" else (x, w)
    return {"torch": functional_variant(lambda: function(*arguments))}


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
    return {"Inductor": functional_variant(lambda: compiled(*arguments))}


def _triton(inputs: Inputs) -> dict[str, Variant]:
    from ops.triton import rms_norm_autotuned, rms_norm_captured

    if inputs.cell.op != "rms_norm":
        return {}
    x, w = inputs.x, inputs.weight
    # It tunes at the first call for an N, whatever M: let that be the one where it matters most.
    rms_norm_autotuned(x.new_zeros(max(ROWS), inputs.cell.N), w, EPS)
    return {
        "Triton": functional_variant(lambda: rms_norm_captured(x, w, EPS)),
        "Triton, autotuned": functional_variant(lambda: rms_norm_autotuned(x, w, EPS)),
    }


def _liger(inputs: Inputs) -> dict[str, Variant]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    x, w = inputs.x, inputs.weight
    if inputs.cell.op == "rms_norm":
        apply = LigerRMSNormFunction.apply
        return {"Liger": functional_variant(lambda: apply(x, w, EPS, 0.0, "llama", False))}
    fused, residual = LigerFusedAddRMSNormFunction.apply, inputs.residual
    return {"Liger": functional_variant(lambda: fused(x, residual, w, EPS, 0.0, "llama", False))}


def _flashinfer(inputs: Inputs) -> dict[str, Variant]:
    """With programmatic dependent launch, its default on this GPU, and without: its durations may
    then include a wait for the kernel before.
    """
    from flashinfer import norm

    x, w = inputs.x, inputs.weight
    made: dict[str, Variant] = {}
    for name, pdl in (("FlashInfer", None), ("FlashInfer, no PDL", False)):
        if inputs.cell.op == "rms_norm":
            made[name] = functional_variant(partial(norm.rmsnorm, x, w, EPS, enable_pdl=pdl))
        else:
            call = partial(norm.fused_add_rmsnorm, weight=w, eps=EPS, enable_pdl=pdl)
            made[name] = in_place_variant(call, inputs)
    return made


def _quack(inputs: Inputs) -> dict[str, Variant]:
    from quack.rmsnorm import rmsnorm_fwd

    x, w = inputs.x, inputs.weight
    if inputs.cell.op == "rms_norm":
        return {"quack": functional_variant(lambda: rmsnorm_fwd(x, w, eps=EPS)[0])}
    residual = inputs.residual
    return {"quack": functional_variant(lambda: rmsnorm_fwd(x, w, residual=residual, eps=EPS)[:2])}


PEERS: dict[str, Callable[[Inputs], dict[str, Variant]]] = {
    "Inductor": _inductor,
    "Triton": _triton,
    "Liger": _liger,
    "FlashInfer": _flashinfer,
    "quack": _quack,
}
"""What stands beside `torch`; each takes a norm's cell and gives variants by name."""
_DISTRIBUTIONS = (
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


def versions() -> dict[str, str | None]:
    """The version of each peer that is installed; None of the others."""
    return {name: _version(name) for name in _DISTRIBUTIONS}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# --- trying the peers ---


class Peers:
    """The peers, each tried in a process of its own.

    Args:
        script: The benchmark's path: what is run with `--probe`.

    Attributes:
        usable: The operators that each has shown to run, by peer.
        failures: Why the others are left out, by peer and operator.
    """

    def __init__(self, script: str) -> None:
        self.usable: dict[str, set[str]] = {}
        self.failures: dict[str, str] = {}
        self._script = script
        self._running: dict[str, tuple[subprocess.Popen[bytes], Path, Path]] = {}
        self._started = 0.0

    def start(self, options: argparse.Namespace, place: Path) -> None:
        """Begin to try all of them, at once."""
        norms = [op for op in ("rms_norm", "fused_add_rms_norm") if op in options.ops]
        self._started = time.perf_counter()
        for name in options.peers if norms else ():
            command = [sys.executable, self._script, "--probe", name]
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


def probe(options: argparse.Namespace) -> None:
    """Run one peer on all cells, which also fills its caches; say for each whether it ran."""
    import torch

    cells = chosen_cells(options)
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
                error = explain(fault)
                broken.add(cell.op)
            print(f"PROBE {json.dumps({'op': cell.op, 'error': error})}", flush=True)
