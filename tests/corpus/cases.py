"""The corpus as a list: each case says how a program comes to the kernel, and what it is launched
with. `kernel()` of each is the first call that it means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Case", "cpu", "cuda", "launched"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel.

    Attributes:
        name: What it is called.
        kernel: Comes to the kernel as a program does.
        inputs: Makes what it is launched with, from a function that makes a tensor of a shape.
    """

    name: str
    kernel: Callable[[], Any]
    inputs: Callable[[Callable[..., torch.Tensor]], tuple[Any, ...]]

    def __str__(self) -> str:
        return self.name


def launched(case: Case, kernel: Any, device: str) -> list[torch.Tensor]:
    """The outputs of a launch, and the arguments after it, which it may have written."""
    generator = torch.Generator().manual_seed(len(case.name))

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if dtype.is_floating_point:
            return torch.randn(*shape, generator=generator).to(dtype).to(device)
        return (
            torch.randint(-8, 8, shape, generator=generator, dtype=torch.int32).to(dtype).to(device)
        )

    inputs = case.inputs(tensor)
    outputs = kernel(*inputs)
    found = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs or ())
    return [*found, *(one for one in inputs if isinstance(one, torch.Tensor))]


def cuda() -> list[Case]:
    """Those for CUDA."""
    from tests.corpus import cuda as kernels

    return list(kernels.cases(Case))


def cpu() -> list[Case]:
    """Those for the CPU."""
    from tests.corpus import cpu as kernels
    from tests.corpus.constants import Activation

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape)

    return [
        Case("add", lambda: kernels.add(256), lambda t: (t(256), t(256))),
        Case("axpy_in_place", lambda: kernels.axpy_in_place(128), lambda t: (t(128), t(128))),
        Case("relu", lambda: kernels.activation(64), lambda t: (t(64),)),
        Case("square", lambda: kernels.activation(64, Activation.SQUARE), lambda t: (t(64),)),
        Case("exp2_of_constant", lambda: kernels.exp2_of_constant(32), lambda t: (t(32),)),
        Case("row_sum", lambda: kernels.row_sum(8, 64), lambda t: (t(8, 64),)),
        Case("row_max", lambda: kernels.row_max(8, 64), lambda t: (t(8, 64),)),
        Case("softmax", lambda: kernels.softmax(8, 64), lambda t: (t(8, 64),)),
        Case("rms_norm", lambda: kernels.rms_norm(8, 64), lambda t: (t(8, 64), t(64))),
        Case("two_outputs", lambda: kernels.two_outputs(64), lambda t: (t(64), t(64))),
        Case("transpose", lambda: kernels.transpose(8, 16), lambda t: (t(8, 16),)),
        Case("matmul", lambda: kernels.matmul(16, 16, 32), lambda t: (t(16, 32), t(32, 16))),
        Case(
            "dequantized_matmul",
            lambda: kernels.dequantized_matmul(8, 16, 64),
            lambda t: (t(8, 64), t(16, 64, dtype=torch.int8), t(16, 2)),
        ),
        Case("any_rows", lambda: kernels.any_rows(32), lambda t: (t(5, 32),)),
        Case("two_dynamic", lambda: kernels.two_dynamic(), lambda t: (t(3, 7), t(7))),
        Case(
            "scalar_argument",
            lambda: kernels.scalar_argument(16),
            lambda t: (t(16), 1.5, zeros(16)),
        ),
        Case("by_macro", lambda: kernels.by_macro(32), lambda t: (t(32),)),
        Case("by_inner_macro", lambda: kernels.by_inner_macro(32), lambda t: (t(32),)),
        Case("factory", lambda: kernels.factory(16, 3.0)(), lambda t: (t(16),)),
        Case("operator", lambda: kernels.Operator(16, 0.5).kernel(), lambda t: (t(16),)),
        Case(
            "prim_func_from_elsewhere",
            lambda: kernels.prim_func_from_elsewhere(4, 16),
            lambda t: (t(4, 16),),
        ),
        Case("conditional", lambda: kernels.conditional(32), lambda t: (t(32), t(32))),
        Case(
            "eager_add",
            lambda: kernels.eager_add.compile(zeros(48), zeros(48)),
            lambda t: (t(48), t(48)),
        ),
        Case(
            "eager_scale",
            lambda: kernels.eager_scale.compile(zeros(4, 8), zeros(4, 8), scale=3.0),
            lambda t: (t(4, 8), zeros(4, 8)),
        ),
        Case(
            "eager_annotated",
            lambda: kernels.eager_annotated.compile(zeros(32), zeros(32)),
            lambda t: (t(32), zeros(32)),
        ),
        Case(
            "eager_outer",
            lambda: kernels.eager_outer.compile(zeros(4), zeros(8)),
            lambda t: (t(4), t(8)),
        ),
    ]
