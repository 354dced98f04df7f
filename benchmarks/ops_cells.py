"""What `ops.py` measures: the cells, their inputs, and when a variant's result is right.

A cell is one operator at one shape; its inputs are the same in every process. A variant is one way
to compute a cell, ours or a peer's; its result is checked against a reference before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from method import Failure

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "COPY",
    "DYNAMIC",
    "EPS",
    "EXACT",
    "HOST_N",
    "IN_PLACE",
    "OPS",
    "OURS",
    "ROWS",
    "SIZES",
    "TUNED",
    "WIDTHS",
    "Cell",
    "Inputs",
    "Variant",
    "check",
    "chosen_cells",
    "explain",
    "functional_variant",
    "in_place_variant",
]

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

GEMM_REPS = 20
SHORT_ROWS = 128
SHORT_FACTOR = 5
"""Calls of few microseconds cost nothing to repeat: five times the repetitions up to 128 rows."""


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


def chosen_cells(options: argparse.Namespace) -> list[Cell]:
    """The cells that a command line asks for."""
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


def functional_variant(call: Callable[[], Any]) -> Variant:
    """A variant that leaves its inputs as they are, and returns its results."""

    def outputs() -> Sequence[Tensor]:
        made = call()
        return made if isinstance(made, (tuple, list)) else (made,)

    return Variant(call, outputs)


def in_place_variant(call: Callable[[Tensor, Tensor], object], inputs: Inputs) -> Variant:
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


def check(variant: Variant, op: str, want: Sequence[Tensor]) -> None:
    """Raise Failure where a variant's results are wrong."""
    got = variant.outputs()
    if len(got) != len(want):
        raise Failure(f"wrong: {len(got)} results, not {len(want)}")
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        if one.shape != other.shape:
            raise Failure(f"wrong: result {index} has shape {list(one.shape)}")
        scale = other.abs().clamp(min=FLOORS[op])
        off = ((one.float() - other).abs() / scale).max().item()
        if not off <= TOLERANCE:
            raise Failure(f"wrong: result {index} is off by {off:.3g}, relative")


def explain(fault: BaseException) -> str:
    """Why a variant, or a whole cell, is left out: one line."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    text = " … ".join([lines[0], lines[-1]] if len(lines) > 1 else lines)
    return (text if isinstance(fault, Failure) else f"{type(fault).__name__}: {text}")[:400]
