"""Matrix product with a weight: its host side, the op and the function."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index

import torch
from torch import Tensor

from ops import boundary, inputs, op
from ops.kernels import gemm as kernels
from ops.op import DTYPE_NAMES, OnMiss, Op, OpState, Rows
from tlcache.spec import Value

__all__ = ["GemmFwdOp", "gemm"]


class _Gemm(OpState):
    operator = kernels.OPERATOR
    inputs = "Tensor x, Tensor weight"
    folds = (1, 0)

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.N: int = self.values["N"]  # type: ignore[assignment]
        self.K: int = self.values["K"]  # type: ignore[assignment]

    @classmethod
    def describe(cls, x: Tensor, weight: Tensor) -> dict[str, Value]:
        dtype = inputs.dtype_name(cls.name, "x", x)
        if dtype not in kernels.DTYPES:
            raise TypeError(f"x is {x.dtype}; {cls.name} takes {' or '.join(kernels.DTYPES)}")
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            has = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(f"weight has shape {has}; {cls.name} takes [N, K]")
        return {"N": index(weight.shape[0]), "K": index(weight.shape[1]), "dtype": dtype}

    def fault(self, x: Tensor, weight: Tensor) -> Exception | None:
        return inputs.fault(
            self.name, self.dtype, {"x": (x, ("…", self.K)), "weight": (weight, (self.N, self.K))}
        )

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        N, K, shape = self.N, self.K, x.shape
        if (
            x.dtype != self.dtype
            or weight.dtype != self.dtype
            or weight.shape != (N, K)
            or not shape
            or shape[-1] != K
            or x.device != weight.device
        ):
            raise self.fault(x, weight) or AssertionError
        rows = x.numel() // K
        if rows == 0:
            return x.new_empty((*shape[:-1], N))
        device = x.get_device()
        if (kernel := self.kernels.get((device, rows))) is None:
            kernel = self.kernel(device, rows)
        else:
            self.hits += 1
        if len(shape) == 2 and inputs.fits(x, weight):
            return kernel.launch(x, weight)
        flat = inputs.fit(x.reshape(rows, K))
        return kernel.launch(flat, inputs.fit(weight)).view(*shape[:-1], N)

    def fake(self, x: Tensor, weight: Tensor) -> Tensor:
        if fault := self.fault(x, weight):
            raise fault
        return x.new_empty((*x.shape[:-1], self.N))


class GemmFwdOp(Op):
    """y = x @ weight.T, accumulated in float32. For inference only.

    Called with x (…, K) and weight (N, K), as `torch.nn.functional.linear` is, it returns (…, N).

    Args:
        N: Rows of the weight; on CUDA a multiple of 8.
        K: Columns of x and the weight; on CUDA a multiple of 8.
        dtype: Of all: torch.bfloat16 or torch.float16.
        rows, on_miss, schedule: See `ops.RMSNormFwdOp`.
    """

    def __init__(
        self,
        N: int,
        K: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        rows: Rows = "auto",
        on_miss: OnMiss = "compile",
        schedule: Mapping[str, Value] | None = None,
    ) -> None:
        values = {"N": N, "K": K, "dtype": DTYPE_NAMES.get(dtype, str(dtype))}
        super().__init__(values, rows=rows, on_miss=on_miss, schedule=schedule)


def gemm(x: Tensor, weight: Tensor, *, rows: Rows = "auto") -> Tensor:
    """`GemmFwdOp` as a function.

    Args:
        x: (…, K).
        weight: (N, K).
        rows: `auto`, `exact` or `dynamic`.

    Returns:
        (…, N), contiguous, of x's dtype.
    """
    if torch.compiler.is_compiling():
        return GemmFwdOp.traced(x, weight, rows=rows)
    values = _Gemm.describe(x, weight)
    return op.shared(GemmFwdOp, rows, values["N"], values["K"], x.dtype).forward(x, weight)


boundary.register(_Gemm, GemmFwdOp)
