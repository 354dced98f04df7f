"""Normalizations: for each its host side, the op, the module and the function."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from ops import boundary, inputs, op
from ops.kernels import fused_add_rms_norm as fused_kernels
from ops.kernels import layer_norm as layer_kernels
from ops.kernels import rms_norm as rms_kernels
from ops.op import DTYPE_NAMES, OnMiss, Op, OpState, Rows
from tlcache.spec import Value

__all__ = ["FusedAddRMSNormFwdOp", "FusedAddRMSNormInplaceFwdOp", "LayerNorm", "LayerNormFwdOp"]
__all__ += ["RMSNorm", "RMSNormFwdOp"]
__all__ += ["fused_add_rms_norm", "fused_add_rms_norm_", "layer_norm", "rms_norm"]


def _row(x: Tensor, weight: Any) -> int:
    """Elements a row, as the weight says it, else x."""
    return index(weight.shape[0] if weight.dim() == 1 else x.shape[-1] if x.dim() else 1)


# --- rms_norm ---


class _RMSNorm(OpState):
    operator = rms_kernels.OPERATOR
    inputs = "Tensor x, Tensor weight"
    scalars = "float eps"
    folds = (1, 0)

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.N: int = self.values["N"]  # type: ignore[assignment]

    @classmethod
    def describe(cls, x: Tensor, weight: Tensor, eps: float) -> dict[str, Value]:
        dtype = inputs.dtype_name(cls.name, "x", x)
        return {"N": _row(x, weight), "eps": float(eps), "dtype": dtype}

    def fault(self, x: Tensor, weight: Tensor) -> Exception | None:
        return inputs.fault(
            self.name, self.dtype, {"x": (x, ("…", self.N)), "weight": (weight, (self.N,))}
        )

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        N, dtype, shape = self.N, self.dtype, x.shape
        if (
            x.dtype != dtype
            or weight.dtype != dtype
            or weight.shape != (N,)
            or not shape
            or shape[-1] != N
            or x.device != weight.device
        ):
            raise self.fault(x, weight) or AssertionError
        rows = x.numel() // N
        if rows == 0:
            return x.new_empty(shape)
        device = x.get_device()
        if (kernel := self.kernels.get((device, rows))) is None:
            kernel = self.kernel(device, rows)
        else:
            self.hits += 1
        if len(shape) == 2 and inputs.fits(x, weight):
            return kernel.launch(x, weight)
        return kernel.launch(inputs.fit(x.reshape(rows, N)), inputs.fit(weight)).view(shape)

    def fake(self, x: Tensor, weight: Tensor) -> Tensor:
        if fault := self.fault(x, weight):
            raise fault
        return x.new_empty(x.shape)

    def forget(self) -> None:
        super().forget()
        _served.clear()

    @staticmethod
    def setup_context(
        ctx: Any, state: OpState, tensors: tuple[Tensor, Tensor], output: Tensor
    ) -> None:
        ctx.save_for_backward(*tensors)
        ctx.eps = float(state.values["eps"])  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient in torch, in float32: a reference, not a kernel."""
        x, weight = ctx.saved_tensors
        wide, g = x.float(), grad.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
        normal = wide * scale
        g_normal = g * weight.float()
        g_x = scale * (g_normal - normal * (g_normal * normal).mean(-1, keepdim=True))
        g_weight = (g * normal).reshape(-1, x.shape[-1]).sum(0)
        return g_x.to(x.dtype), g_weight.to(weight.dtype)


class RMSNormFwdOp(Op):
    """y = x / sqrt(mean(x², last axis) + eps) · weight, accumulated in float32.

    Called with x (…, N) and weight (N,), of one dtype and device, it returns a contiguous tensor of
    x's shape. Its gradient is a reference in torch, not a kernel.

    Args:
        N: Elements a row, from 1 to 65536.
        eps: Added to the mean of squares.
        dtype: Of x, weight and y: torch.bfloat16, torch.float16 or torch.float32.
        rows: `auto`, `exact` or `dynamic`; see `ops.op.OpState`.
        on_miss: `compile`, or `error` for a process that must never compile.
        schedule: A schedule of one's own; by default the tuned one, else the rule's.

    Raises:
        SpecError: A value is impossible. A call raises ValueError for a shape or device, TypeError
            for a dtype, and KernelError or EnvironmentFault where the kernel is not to be had.

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
        on_miss: OnMiss = "compile",
        schedule: Mapping[str, Value] | None = None,
    ) -> None:
        values = {"N": N, "eps": float(eps), "dtype": DTYPE_NAMES.get(dtype, str(dtype))}
        super().__init__(values, rows=rows, on_miss=on_miss, schedule=schedule)


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
    if is_compiling():
        return RMSNormFwdOp.traced(x, weight, eps, rows=rows)
    if not (
        type(x) is not Tensor
        or (is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        or forward_ad._current_level >= 0
        or _are_functorch_transforms_active()
        or _len_torch_dispatch_stack()
    ):  # what `op.direct` asks, in place: the calls would cost as much as the questions
        served = _served.get((x.shape, x.dtype, x.get_device(), eps, rows))
        if served is not None and x.is_contiguous() and not (x.data_ptr() | weight.data_ptr()) & 15:
            launch, state = served
            try:
                y = launch(x, weight)
            except Exception:  # a weight that the kernel refuses, which is settled below
                pass
            else:
                state.hits += 1
                return y
    facade = op.shared(RMSNormFwdOp, rows, _row(x, weight), eps, x.dtype)
    y = facade.forward(x, weight)
    if x.dim() == 2 and op.direct(x, weight):
        kernel = facade.state.kernels.get((x.get_device(), x.shape[0]))
        if kernel is not None:
            served = (kernel.launch, facade.state)
            _served[x.shape, x.dtype, x.get_device(), eps, rows] = served
    return y


# Layer 3 as the function sees it: by the shape of x that was checked once. The kernel itself checks
# the weight's shape, strides, dtype and device. The state is there to be counted in.
_served: dict[tuple[Any, ...], tuple[Any, OpState]] = {}


class _Norm(nn.Module):
    """What the norm modules share: their op follows the weight's dtype."""

    weight: nn.Parameter
    op: Op

    def _apply(self, fn: Any, recurse: bool = True) -> _Norm:
        super()._apply(fn, recurse)
        if self.weight.dtype != self.op.dtype:
            values = {**self.op.state.values, "dtype": str(self.weight.dtype).rpartition(".")[2]}
            state = self.op.state
            kept = {"rows": state.rows, "on_miss": state.on_miss}
            self.op = op.of_key(type(self.op), op.instance_key(state.name, {**values, **kept}))
        return self

    def extra_repr(self) -> str:
        return self.op.instance_key


class RMSNorm(_Norm):
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
        on_miss: OnMiss = "compile",
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(N, dtype=dtype, device=device))
        self.op = RMSNormFwdOp(N, eps, self.weight.dtype, rows=rows, on_miss=on_miss)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, N) to y (…, N); see `RMSNormFwdOp`."""
        return self.op.forward(x, self.weight)


# --- fused_add_rms_norm ---


class _FusedAddRMSNorm(OpState):
    operator = fused_kernels.OPERATOR
    fixed = MappingProxyType({"inplace": False})
    inputs = "Tensor x, Tensor residual, Tensor weight"
    scalars = "float eps"
    outputs = "(Tensor, Tensor)"
    folds = (1, 1, 0)

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.N: int = self.values["N"]  # type: ignore[assignment]

    @classmethod
    def describe(cls, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> dict[str, Value]:
        dtype = inputs.dtype_name(cls.name, "x", x)
        return {"N": _row(x, weight), "eps": float(eps), "dtype": dtype}

    def fault(self, x: Tensor, residual: Tensor, weight: Tensor) -> Exception | None:
        shape = tuple(x.shape) if isinstance(x, Tensor) else ()
        expected = {
            "x": (x, ("…", self.N)),
            "residual": (residual, shape),
            "weight": (weight, (self.N,)),
        }
        return inputs.fault(self.name, self.dtype, expected)

    def _kernel(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Any, int]:
        """The bound kernel for inputs and their rows; (None, 0) where there are none."""
        N, dtype, shape = self.N, self.dtype, x.shape
        if (
            x.dtype != dtype
            or residual.dtype != dtype
            or weight.dtype != dtype
            or weight.shape != (N,)
            or not shape
            or shape[-1] != N
            or residual.shape != shape
            or x.device != weight.device
            or x.device != residual.device
        ):
            raise self.fault(x, residual, weight) or AssertionError
        rows = x.numel() // N
        if rows == 0:
            return None, 0
        device = x.get_device()
        if (kernel := self.kernels.get((device, rows))) is None:
            kernel = self.kernel(device, rows)
        else:
            self.hits += 1
        return kernel, rows

    def run(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        kernel, rows = self._kernel(x, residual, weight)
        shape = x.shape
        if kernel is None:
            return x.new_empty(shape), x.new_empty(shape)
        if len(shape) == 2 and inputs.fits(x, residual, weight):
            y, total = kernel.launch(x, residual, weight)
            return y, total
        flat = [inputs.fit(one.reshape(rows, self.N)) for one in (x, residual)]
        y, total = kernel.launch(*flat, inputs.fit(weight))
        return y.view(shape), total.view(shape)

    def fake(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if fault := self.fault(x, residual, weight):
            raise fault
        return x.new_empty(x.shape), x.new_empty(x.shape)


def _overlap(x: Tensor, residual: Tensor) -> bool:
    """Whether two tensors of one shape share memory; as torch's own in-place operators do, only the
    dense ones are looked at closely.
    """
    apart = abs(x.data_ptr() - residual.data_ptr())
    return not apart or (apart < x.nbytes and x.is_contiguous() and residual.is_contiguous())


class _FusedAddRMSNormInPlace(_FusedAddRMSNorm):
    name = "fused_add_rms_norm_"
    fixed = MappingProxyType({"inplace": True})
    inputs = "Tensor(a!) x, Tensor(b!) residual, Tensor weight"
    outputs = "()"

    def fault(self, x: Tensor, residual: Tensor, weight: Tensor) -> Exception | None:
        found = super().fault(x, residual, weight)
        if found is None and x.device.type != "meta" and _overlap(x, residual):
            return ValueError("x and residual share memory, and both are written")
        return found

    def run(self, x: Tensor, residual: Tensor, weight: Tensor) -> None:
        kernel, rows = self._kernel(x, residual, weight)
        if kernel is None:
            return
        if _overlap(x, residual):
            raise self.fault(x, residual, weight) or AssertionError
        # Past autograd nobody else tells those who saved x or residual for a gradient.
        increment_version((x, residual))
        if inputs.fits(x, residual, weight):
            flat = [one if one.dim() == 2 else one.view(rows, self.N) for one in (x, residual)]
            kernel.launch(*flat, weight)
        else:
            flat = [one.reshape(rows, self.N) for one in (x, residual)]
            copies = [one.clone(memory_format=torch.contiguous_format) for one in flat]
            kernel.launch(*copies, inputs.fit(weight))
            x.copy_(copies[0].view(x.shape))
            residual.copy_(copies[1].view(x.shape))

    def fake(self, x: Tensor, residual: Tensor, weight: Tensor) -> None:
        if fault := _FusedAddRMSNorm.fault(self, x, residual, weight):
            raise fault


class FusedAddRMSNormFwdOp(Op):
    """total = x + residual; y = RMSNorm(total) · weight. Returns (y, total).

    Called with x and residual (…, N) and weight (N,). The sum is rounded to the dtype first, as
    `x + residual` in torch is. For inference only.

    Args:
        N: Elements a row, from 1 to 65536.
        eps: Added to the mean of squares.
        dtype: Of the inputs and outputs.
        rows, on_miss, schedule: See `RMSNormFwdOp`.
    """

    def __init__(
        self,
        N: int,
        eps: float = 1e-6,
        dtype: torch.dtype = torch.bfloat16,
        *,
        rows: Rows = "auto",
        on_miss: OnMiss = "compile",
        schedule: Mapping[str, Value] | None = None,
    ) -> None:
        values = {"N": N, "eps": float(eps), "dtype": DTYPE_NAMES.get(dtype, str(dtype))}
        super().__init__(values, rows=rows, on_miss=on_miss, schedule=schedule)


class FusedAddRMSNormInplaceFwdOp(FusedAddRMSNormFwdOp):
    """The same in place: residual becomes x + residual, and x its norm. Returns nothing.

    x and residual may be strided, at the cost of copies; they must not be the same memory.
    """


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, rows: Rows = "auto"
) -> tuple[Tensor, Tensor]:
    """`FusedAddRMSNormFwdOp` as a function.

    Args:
        x: (…, N).
        residual: Of x's shape.
        weight: (N,).
        eps: Added to the mean of squares.
        rows: `auto`, `exact` or `dynamic`.

    Returns:
        The norm of x + residual, and x + residual; both contiguous, of x's shape and dtype.
    """
    if torch.compiler.is_compiling():
        return FusedAddRMSNormFwdOp.traced(x, residual, weight, eps, rows=rows)
    facade = op.shared(FusedAddRMSNormFwdOp, rows, _row(x, weight), eps, x.dtype)
    return facade.forward(x, residual, weight)


def fused_add_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, rows: Rows = "auto"
) -> None:
    """`FusedAddRMSNormInplaceFwdOp` as a function: x and residual are overwritten.

    Args:
        x: (…, N); becomes the norm of x + residual.
        residual: Of x's shape; becomes x + residual.
        weight: (N,).
        eps: Added to the mean of squares.
        rows: `auto`, `exact` or `dynamic`.
    """
    if torch.compiler.is_compiling():
        FusedAddRMSNormInplaceFwdOp.traced(x, residual, weight, eps, rows=rows)
        return
    facade = op.shared(FusedAddRMSNormInplaceFwdOp, rows, _row(x, weight), eps, x.dtype)
    facade.forward(x, residual, weight)


# --- layer_norm ---


class _LayerNorm(OpState):
    operator = layer_kernels.OPERATOR
    inputs = "Tensor x, Tensor weight, Tensor? bias"
    scalars = "float eps"
    folds = (1, 0, 0)

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.N: int = self.values["N"]  # type: ignore[assignment]
        self.bias = self.values.get("bias") is not False

    @classmethod
    def describe(
        cls, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> dict[str, Value]:
        dtype = inputs.dtype_name(cls.name, "x", x)
        values = {"N": _row(x, weight), "eps": float(eps), "dtype": dtype}
        return {**values, "bias": bias is not None}

    def fault(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Exception | None:
        if (bias is not None) != self.bias:
            want, have = ("a bias", "none") if self.bias else ("no bias", "one")
            return TypeError(f"this {self.name} takes {want}, and was given {have}")
        expected = {"x": (x, ("…", self.N)), "weight": (weight, (self.N,))}
        if bias is not None:
            expected["bias"] = (bias, (self.N,))
        return inputs.fault(self.name, self.dtype, expected)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        N, dtype, shape = self.N, self.dtype, x.shape
        if (
            (bias is not None) != self.bias
            or x.dtype != dtype
            or weight.dtype != dtype
            or weight.shape != (N,)
            or not shape
            or shape[-1] != N
            or x.device != weight.device
            or (
                bias is not None
                and (bias.dtype != dtype or bias.shape != (N,) or bias.device != x.device)
            )
        ):
            raise self.fault(x, weight, bias) or AssertionError
        rows = x.numel() // N
        if rows == 0:
            return x.new_empty(shape)
        device = x.get_device()
        if (kernel := self.kernels.get((device, rows))) is None:
            kernel = self.kernel(device, rows)
        else:
            self.hits += 1
        shift = () if bias is None else (bias,)
        if len(shape) == 2 and inputs.fits(x, weight, *shift):
            return kernel.launch(x, weight, *shift)
        flat = inputs.fit(x.reshape(rows, N))
        return kernel.launch(flat, *map(inputs.fit, (weight, *shift))).view(shape)

    def fake(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if fault := self.fault(x, weight, bias):
            raise fault
        return x.new_empty(x.shape)


class LayerNormFwdOp(Op):
    """y = (x - mean) / sqrt(variance + eps) · weight + bias over the last axis, in float32.

    Called with x (…, N), weight (N,) and, where it has one, bias (N,). For inference only.

    Args:
        N: Elements a row, from 1 to 65536.
        eps: Added to the variance.
        dtype: Of the inputs and outputs.
        bias: Whether it has a bias.
        rows, on_miss, schedule: See `RMSNormFwdOp`.

    Source of the formula: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """

    def __init__(
        self,
        N: int,
        eps: float = 1e-5,
        dtype: torch.dtype = torch.bfloat16,
        bias: bool = True,
        *,
        rows: Rows = "auto",
        on_miss: OnMiss = "compile",
        schedule: Mapping[str, Value] | None = None,
    ) -> None:
        values = {"N": N, "eps": float(eps), "dtype": DTYPE_NAMES.get(dtype, str(dtype))}
        super().__init__({**values, "bias": bias}, rows=rows, on_miss=on_miss, schedule=schedule)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (…, N), weight (N,) and bias (N,) to y (…, N)."""
        return super().forward(x, weight, bias)


class LayerNorm(_Norm):
    """LayerNorm with a learned weight and bias, a drop-in for `torch.nn.LayerNorm` over the last
    axis. For inference only.

    Args:
        N: Elements a row.
        eps: Added to the variance.
        bias: Whether it has a bias.
        dtype, device, rows, on_miss: See `RMSNorm`.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        N: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        rows: Rows = "auto",
        on_miss: OnMiss = "compile",
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(N, dtype=dtype, device=device))
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(N, dtype=dtype, device=device)) if bias else None
        )
        self.op = LayerNormFwdOp(N, eps, self.weight.dtype, bias, rows=rows, on_miss=on_miss)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, N) to y (…, N); see `LayerNormFwdOp`."""
        return self.op.forward(x, self.weight, self.bias)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    rows: Rows = "auto",
) -> Tensor:
    """`LayerNormFwdOp` as a function.

    Args:
        x: (…, N).
        weight: (N,).
        bias: (N,), or None.
        eps: Added to the variance.
        rows: `auto`, `exact` or `dynamic`.

    Returns:
        A contiguous tensor of x's shape and dtype.
    """
    if torch.compiler.is_compiling():
        return LayerNormFwdOp.traced(x, weight, bias, eps, rows=rows)
    facade = op.shared(LayerNormFwdOp, rows, _row(x, weight), eps, x.dtype, bias is not None)
    return facade.forward(x, weight, bias)


boundary.register(_RMSNorm, RMSNormFwdOp)
boundary.register(_FusedAddRMSNorm, FusedAddRMSNormFwdOp)
boundary.register(_FusedAddRMSNormInPlace, FusedAddRMSNormInplaceFwdOp)
boundary.register(_LayerNorm, LayerNormFwdOp)
