"""Normalizations: the op, the module and the function for each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ops import boundary, op
from ops.kernels import rms_norm as kernels
from ops.op import Definition, Op, OpState, Rows
from tlcache.spec import Value

__all__ = ["RMSNorm", "RMSNormFwdOp", "rms_norm"]

op.define(Definition(kernels.OPERATOR, kernels.RMSNormKernel.bind))

_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class RMSNormFwdOp(Op):
    """y = x / sqrt(mean(x², last axis) + eps) · weight, accumulated in float32.

    Args:
        N: Elements a row, from 1 to 65536.
        eps: Added to the mean of squares.
        dtype: Of x, weight and y: torch.bfloat16, torch.float16 or torch.float32.
        rows: `auto`, `exact` or `dynamic`; see `ops.op.OpState`.
        on_miss: `compile`, or `error` for a process that must never compile.
        schedule: A schedule of one's own: block_m and threads.

    Raises:
        SpecError: A value is impossible.

    Constructing one compiles nothing and touches no device. Source of the formula: Zhang and
    Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    def __init__(
        self,
        N: int,
        eps: float = 1e-6,
        dtype: torch.dtype = torch.bfloat16,
        *,
        rows: Rows = "auto",
        on_miss: op.OnMiss = "compile",
        schedule: Mapping[str, Value] | None = None,
    ) -> None:
        values: dict[str, Value] = {
            "N": N,
            "eps": float(eps),
            "dtype": _NAMES.get(dtype, str(dtype)),
        }
        super().__init__(
            kernels.OPERATOR.name, values, rows=rows, on_miss=on_miss, schedule=schedule
        )
        self.N = N
        self.eps = float(eps)
        self.dtype = dtype

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalize x.

        Args:
            x: (…, N), on the CPU or a CUDA device.
            weight: (N,), of the same dtype and device.

        Returns:
            A contiguous tensor of x's shape and dtype.

        Raises:
            ValueError: A shape or device does not fit.
            TypeError: A dtype does not fit.
            KernelError, EnvironmentFault: The kernel is not to be had; see `tlcache.errors`.
        """
        if torch.compiler.is_compiling() or (
            torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        ):
            return torch.ops.tilelang_ops.rms_norm(x, weight, self.instance_key)
        return _run(self.state, x, weight, self.N, self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        state = self.state
        return (_rebuild, (self.N, self.eps, self.dtype, state.rows, state.on_miss, state.schedule))


def _rebuild(
    N: int, eps: float, dtype: torch.dtype, rows: Rows, on_miss: op.OnMiss, schedule: Any
) -> RMSNormFwdOp:
    return RMSNormFwdOp(N, eps, dtype, rows=rows, on_miss=on_miss, schedule=schedule)


class RMSNorm(nn.Module):
    """RMSNorm with a learned weight, a drop-in for `torch.nn.RMSNorm` over the last axis.

    Args:
        N: Elements a row.
        eps: Added to the mean of squares.
        dtype: Of the weight, and so of x; torch's default dtype where None. `module.to(dtype)`
            changes it.
        device: Of the weight.
        rows: `auto`, `exact` or `dynamic`; see `ops.op.OpState`.
        on_miss: `compile` or `error`.
    """

    def __init__(
        self,
        N: int,
        eps: float = 1e-6,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        rows: Rows = "auto",
        on_miss: op.OnMiss = "compile",
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(N, dtype=dtype, device=device))
        self.op = RMSNormFwdOp(N, eps, self.weight.dtype, rows=rows, on_miss=on_miss)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, N) to y (…, N); see `RMSNormFwdOp.forward`."""
        return self.op.forward(x, self.weight)

    def _apply(self, fn: Any, recurse: bool = True) -> RMSNorm:
        super()._apply(fn, recurse)
        if self.weight.dtype != self.op.dtype:
            state = self.op.state
            self.op = RMSNormFwdOp(
                self.op.N, self.op.eps, self.weight.dtype, rows=state.rows, on_miss=state.on_miss
            )
        return self

    def extra_repr(self) -> str:
        return self.op.instance_key


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, rows: Rows = "auto") -> Tensor:
    """`RMSNormFwdOp` as a function.

    Args:
        x: (…, N).
        weight: (N,).
        eps: Added to the mean of squares.
        rows: `auto`, `exact` or `dynamic`.

    Returns:
        A contiguous tensor of x's shape and dtype.
    """
    N = weight.shape[0] if weight.dim() == 1 else x.shape[-1]
    if torch.compiler.is_compiling():
        suffix = "" if rows == "auto" else f",rows={rows}"
        key = f"rms_norm(N={N},eps={eps},dtype={_NAMES[x.dtype]}{suffix})"
        return torch.ops.tilelang_ops.rms_norm(x, weight, key)
    return _functional(N, eps, x.dtype, rows).forward(x, weight)


@functools.lru_cache(maxsize=1024)
def _functional(N: int, eps: float, dtype: torch.dtype, rows: Rows) -> RMSNormFwdOp:
    return RMSNormFwdOp(N, eps, dtype, rows=rows)


# --- launch ---


def _run(state: OpState, x: Tensor, weight: Tensor, N: int, dtype: torch.dtype) -> Tensor:
    shape = x.shape
    if (
        x.dtype != dtype
        or weight.dtype != dtype
        or weight.shape != (N,)
        or not shape
        or shape[-1] != N
        or x.device != weight.device
    ):
        raise _rejection(x, weight, N, dtype)
    rows = x.numel() // N
    if rows == 0:
        return x.new_empty(shape)
    device = x.get_device()
    kernel = state.kernels.get((device, rows)) or state.kernel(device, rows)
    if len(shape) == 2 and x.is_contiguous():
        return kernel.launch(x, weight.contiguous())
    return kernel.launch(x.reshape(rows, N).contiguous(), weight.contiguous()).view(shape)


def _rejection(x: Tensor, weight: Tensor, N: int, dtype: torch.dtype) -> Exception:
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype != dtype:
            return TypeError(f"{name} is {tensor.dtype}; this rms_norm takes {dtype}")
    if weight.shape != (N,):
        return ValueError(f"weight has shape {list(weight.shape)}; this rms_norm takes [{N}]")
    if not x.shape or x.shape[-1] != N:
        return ValueError(f"x has shape {list(x.shape)}; this rms_norm takes […, {N}]")
    return ValueError(f"x is on {x.device} and weight on {weight.device}; they must be together")


def _impl(x: Tensor, weight: Tensor, instance_key: str) -> Tensor:
    state = op.state(instance_key, keep=True)
    values = state.values
    return _run(state, x, weight, int(values["N"]), _DTYPES[str(values["dtype"])])  # type: ignore[arg-type]


def _fake(x: Tensor, weight: Tensor, instance_key: str) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    x, weight, instance_key = inputs
    ctx.save_for_backward(x, weight)
    ctx.eps = float(op.state(instance_key).values["eps"])  # type: ignore[arg-type]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    """The gradient in torch, in float32: a reference, not a kernel."""
    x, weight = ctx.saved_tensors
    wide, g = x.float(), grad.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
    normal = wide * scale
    g_normal = g * weight.float()
    g_x = scale * (g_normal - normal * (g_normal * normal).mean(-1, keepdim=True))
    g_weight = (g * normal).reshape(-1, x.shape[-1]).sum(0)
    return g_x.to(x.dtype), g_weight.to(weight.dtype), None


boundary.register(
    "rms_norm(Tensor x, Tensor weight, str instance_key) -> Tensor",
    _impl,
    _fake,
    _setup_context,
    _backward,
)
