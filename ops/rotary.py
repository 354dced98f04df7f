"""Rotary position embedding: its host side, the op and the function."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index

import torch
from torch import Tensor

from ops import boundary, inputs, op
from ops.kernels import rope as kernels
from ops.op import DTYPE_NAMES, OnMiss, Op, OpState, Rows
from tlcache.spec import Value

__all__ = ["RopeFwdOp", "rope"]


class _Rope(OpState):
    operator = kernels.OPERATOR
    inputs = "Tensor x, Tensor cos, Tensor sin"
    scalars = "bool interleaved"
    folds = (2, 1, 1)

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.H: int = self.values["H"]  # type: ignore[assignment]
        self.D: int = self.values["D"]  # type: ignore[assignment]

    @classmethod
    def describe(cls, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> dict[str, Value]:
        dtype = inputs.dtype_name(cls.name, "x", x)
        if x.dim() < 2:
            raise ValueError(f"x has shape {list(x.shape)}; {cls.name} takes […, H, D]")
        values = {"H": index(x.shape[-2]), "D": index(x.shape[-1]), "dtype": dtype}
        return {**values, "interleaved": bool(interleaved)}

    def fault(self, x: Tensor, cos: Tensor, sin: Tensor) -> Exception | None:
        wide, half = torch.float32, ("…", self.D // 2)
        found = inputs.fault(
            self.name,
            self.dtype,
            {"x": (x, ("…", self.H, self.D)), "cos": (cos, half), "sin": (sin, half)},
            {"cos": wide, "sin": wide},
        )
        if found is not None:
            return found
        lead = tuple(x.shape[:-2])
        for name, table in (("cos", cos), ("sin", sin)):
            have = tuple(table.shape[:-1])
            short = len(lead) - len(have)
            if short < 0 or any(
                size not in (1, wanted) for size, wanted in zip(have, lead[short:], strict=True)
            ):
                return ValueError(
                    f"{name} has shape {list(table.shape)}; this {self.name} takes "
                    f"{[*lead, self.D // 2]}, or what broadcasts to it"
                )
        return None

    def run(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape, half = x.shape, self.D // 2
        wanted = (*shape[:-2], half)
        if (
            cos.shape != wanted
            or sin.shape != wanted
            or x.dtype != self.dtype
            or shape[-2:] != (self.H, self.D)
            or cos.dtype != torch.float32
            or sin.dtype != torch.float32
            or x.device != cos.device
            or x.device != sin.device
        ):
            if fault := self.fault(x, cos, sin):
                raise fault
            cos, sin = cos.expand(wanted), sin.expand(wanted)
        rows = x.numel() // (self.H * self.D)
        if rows == 0:
            return x.new_empty(shape)
        device = x.get_device()
        if (kernel := self.kernels.get((device, rows))) is None:
            kernel = self.kernel(device, rows)
        else:
            self.hits += 1
        if len(shape) == 3 and inputs.fits(x, cos, sin):
            return kernel.launch(x, cos, sin)
        flat = inputs.fit(x.reshape(rows, self.H, self.D))
        angles = [inputs.fit(table.reshape(rows, half)) for table in (cos, sin)]
        return kernel.launch(flat, *angles).view(shape)

    def fake(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if fault := self.fault(x, cos, sin):
            raise fault
        return x.new_empty(x.shape)


class RopeFwdOp(Op):
    """Rotate each pair of a head's elements by its token's angle. For inference only.

    Called with x (…, H, D), and cos and sin (…, D/2) in float32 that broadcast over x's leading
    axes, it returns a contiguous tensor of x's shape.

    Args:
        H: Heads, from 1 to 1024.
        D: Elements a head, even, from 2 to 1024.
        dtype: Of x and y.
        interleaved: Whether the pairs are (2i, 2i + 1), as in GPT-J, instead of (i, i + D/2), as in
            GPT-NeoX and Llama.
        rows, on_miss, schedule: See `ops.RMSNormFwdOp`; a row is a token.

    Source of the formula: Su et al., "RoFormer", 2021.
    """

    def __init__(
        self,
        H: int,
        D: int,
        dtype: torch.dtype = torch.bfloat16,
        interleaved: bool = False,
        *,
        rows: Rows = "auto",
        on_miss: OnMiss = "compile",
        schedule: Mapping[str, Value] | None = None,
    ) -> None:
        values = {"H": H, "D": D, "dtype": DTYPE_NAMES.get(dtype, str(dtype))}
        super().__init__(
            {**values, "interleaved": interleaved}, rows=rows, on_miss=on_miss, schedule=schedule
        )


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, *, rows: Rows = "auto"
) -> Tensor:
    """`RopeFwdOp` as a function.

    Args:
        x: (…, H, D).
        cos, sin: (…, D/2) in float32; they broadcast over x's leading axes.
        interleaved: Whether the pairs are (2i, 2i + 1).
        rows: `auto`, `exact` or `dynamic`.

    Returns:
        A contiguous tensor of x's shape and dtype.
    """
    if torch.compiler.is_compiling():
        return RopeFwdOp.traced(x, cos, sin, interleaved, rows=rows)
    values = _Rope.describe(x, cos, sin, interleaved)
    facade = op.shared(RopeFwdOp, rows, values["H"], values["D"], x.dtype, bool(interleaved))
    return facade.forward(x, cos, sin)


boundary.register(_Rope, RopeFwdOp)
