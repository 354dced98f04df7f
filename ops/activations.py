"""Activations: silu_and_mul and softmax; for each its host side, the op and the function."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

import torch
from torch import Tensor

from ops import boundary, inputs, op
from ops.kernels import silu_and_mul as silu_kernels
from ops.kernels import softmax as softmax_kernels
from ops.op import DTYPE_NAMES, OnMiss, Op, OpState, Rows
from tlcache.spec import Value

__all__ = ["SiluAndMulFwdOp", "SoftmaxFwdOp", "silu_and_mul", "softmax"]


class _Rowwise(OpState):
    """An operator of one tensor, of whose last axis the kernel makes rows of `width` elements from
    rows of `taken`.
    """

    inputs = "Tensor x"
    folds = (1,)
    taken: int
    width: int

    def fault(self, x: Tensor) -> Exception | None:
        return inputs.fault(self.name, self.dtype, {"x": (x, ("…", self.taken))})

    def run(self, x: Tensor) -> Tensor:
        taken, width, shape = self.taken, self.width, x.shape
        if x.dtype != self.dtype or not shape or shape[-1] != taken:
            raise self.fault(x) or AssertionError
        rows = x.numel() // taken
        if rows == 0:
            return x.new_empty((*shape[:-1], width))
        device = x.get_device()
        if (kernel := self.kernels.get((device, rows))) is None:
            kernel = self.kernel(device, rows)
        else:
            self.hits += 1
        if len(shape) == 2 and inputs.fits(x):
            return kernel.launch(x)
        return kernel.launch(inputs.fit(x.reshape(rows, taken))).view(*shape[:-1], width)

    def fake(self, x: Tensor) -> Tensor:
        if fault := self.fault(x):
            raise fault
        return x.new_empty((*x.shape[:-1], self.width))


# --- silu_and_mul ---


class _SiluAndMul(_Rowwise):
    operator = silu_kernels.OPERATOR

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.width: int = self.values["N"]  # type: ignore[assignment]
        self.taken = 2 * self.width

    @classmethod
    def describe(cls, x: Tensor) -> dict[str, Value]:
        dtype = inputs.dtype_name(cls.name, "x", x)
        if not x.dim() or x.shape[-1] % 2:
            raise ValueError(
                f"x has shape {list(x.shape)}; {cls.name} takes […, 2N], gate and up side by side"
            )
        return {"N": index(x.shape[-1]) // 2, "dtype": dtype}

    @staticmethod
    def setup_context(ctx: Any, state: OpState, tensors: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
        """The gradient in torch, in float32: a reference, not a kernel."""
        (x,) = ctx.saved_tensors
        gate, up = x.float().chunk(2, -1)
        g = grad.float()
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        g_gate = g * up * (sigmoid + silu * (1 - sigmoid))
        return (torch.cat((g_gate, g * silu), -1).to(x.dtype),)


class SiluAndMulFwdOp(Op):
    """y = silu(gate) · up, where x (…, 2N) is gate and up side by side; in float32, rounded once.

    Its gradient is a reference in torch, not a kernel.

    Args:
        N: Elements a row of y, from 1 to 262144.
        dtype: Of x and y.
        rows, on_miss, schedule: See `ops.RMSNormFwdOp`.

    Source of the formula: Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(
        self,
        N: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        rows: Rows = "auto",
        on_miss: OnMiss = "compile",
        schedule: Mapping[str, Value] | None = None,
    ) -> None:
        values = {"N": N, "dtype": DTYPE_NAMES.get(dtype, str(dtype))}
        super().__init__(values, rows=rows, on_miss=on_miss, schedule=schedule)


def silu_and_mul(x: Tensor, *, rows: Rows = "auto") -> Tensor:
    """`SiluAndMulFwdOp` as a function.

    Args:
        x: (…, 2N): gate and up side by side.
        rows: `auto`, `exact` or `dynamic`.

    Returns:
        (…, N), contiguous, of x's dtype.
    """
    if torch.compiler.is_compiling():
        return SiluAndMulFwdOp.traced(x, rows=rows)
    N = _SiluAndMul.describe(x)["N"]
    return op.shared(SiluAndMulFwdOp, rows, N, x.dtype).forward(x)


# --- softmax ---


class _Softmax(_Rowwise):
    operator = softmax_kernels.OPERATOR

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.taken = self.width = self.values["N"]  # type: ignore[assignment]

    @classmethod
    def describe(cls, x: Tensor) -> dict[str, Value]:
        dtype = inputs.dtype_name(cls.name, "x", x)
        return {"N": index(x.shape[-1]) if x.dim() else 1, "dtype": dtype}


class SoftmaxFwdOp(Op):
    """y = softmax of x over the last axis, in float32, rounded once. For inference only.

    Args:
        N: Elements a row, from 1 to 65536.
        dtype: Of x and y.
        rows, on_miss, schedule: See `ops.RMSNormFwdOp`.
    """

    def __init__(
        self,
        N: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        rows: Rows = "auto",
        on_miss: OnMiss = "compile",
        schedule: Mapping[str, Value] | None = None,
    ) -> None:
        values = {"N": N, "dtype": DTYPE_NAMES.get(dtype, str(dtype))}
        super().__init__(values, rows=rows, on_miss=on_miss, schedule=schedule)


def softmax(x: Tensor, *, rows: Rows = "auto") -> Tensor:
    """`SoftmaxFwdOp` as a function, over the last axis.

    Args:
        x: (…, N).
        rows: `auto`, `exact` or `dynamic`.

    Returns:
        A contiguous tensor of x's shape and dtype.
    """
    if torch.compiler.is_compiling():
        return SoftmaxFwdOp.traced(x, rows=rows)
    return op.shared(SoftmaxFwdOp, rows, _Softmax.describe(x)["N"], x.dtype).forward(x)


boundary.register(_SiluAndMul, SiluAndMulFwdOp)
boundary.register(_Softmax, SoftmaxFwdOp)
