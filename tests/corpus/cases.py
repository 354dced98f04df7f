"""The corpus as a list: each case says how a program comes to the kernel, and what it is launched
with. `kernel()` of each is the first call that it means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CPU", "CUDA", "Case", "launched"]


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
        return torch.randint(-8, 8, shape, generator=generator, dtype=torch.int32).to(dtype).to(device)

    inputs = case.inputs(tensor)
    outputs = kernel(*inputs)
    found = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs or ())
    return [*found, *(one for one in inputs if isinstance(one, torch.Tensor))]


def _cpu() -> list[Case]:
    from tests.corpus import cpu
    from tests.corpus.constants import Activation

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape)

    return [
        Case("add", lambda: cpu.add(256), lambda t: (t(256), t(256))),
        Case("axpy_in_place", lambda: cpu.axpy_in_place(128), lambda t: (t(128), t(128))),
        Case("relu", lambda: cpu.activation(64), lambda t: (t(64),)),
        Case("square", lambda: cpu.activation(64, Activation.SQUARE), lambda t: (t(64),)),
        Case("exp2_of_constant", lambda: cpu.exp2_of_constant(32), lambda t: (t(32),)),
        Case("row_sum", lambda: cpu.row_sum(8, 64), lambda t: (t(8, 64),)),
        Case("row_max", lambda: cpu.row_max(8, 64), lambda t: (t(8, 64),)),
        Case("softmax", lambda: cpu.softmax(8, 64), lambda t: (t(8, 64),)),
        Case("rms_norm", lambda: cpu.rms_norm(8, 64), lambda t: (t(8, 64), t(64))),
        Case("two_outputs", lambda: cpu.two_outputs(64), lambda t: (t(64), t(64))),
        Case("transpose", lambda: cpu.transpose(8, 16), lambda t: (t(8, 16),)),
        Case("matmul", lambda: cpu.matmul(16, 16, 32), lambda t: (t(16, 32), t(32, 16))),
        Case(
            "dequantized_matmul",
            lambda: cpu.dequantized_matmul(8, 16, 64),
            lambda t: (t(8, 64), t(16, 64, dtype=torch.int8), t(16, 2)),
        ),
        Case("any_rows", lambda: cpu.any_rows(32), lambda t: (t(5, 32),)),
        Case("two_dynamic", lambda: cpu.two_dynamic(), lambda t: (t(3, 7), t(7))),
        Case("scalar_argument", lambda: cpu.scalar_argument(16), lambda t: (t(16), 1.5, zeros(16))),
        Case("by_macro", lambda: cpu.by_macro(32), lambda t: (t(32),)),
        Case("by_inner_macro", lambda: cpu.by_inner_macro(32), lambda t: (t(32),)),
        Case("factory", lambda: cpu.factory(16, 3.0)(), lambda t: (t(16),)),
        Case("operator", lambda: cpu.Operator(16, 0.5).kernel(), lambda t: (t(16),)),
        Case(
            "prim_func_from_elsewhere",
            lambda: cpu.prim_func_from_elsewhere(4, 16),
            lambda t: (t(4, 16),),
        ),
        Case("conditional", lambda: cpu.conditional(32), lambda t: (t(32), t(32))),
        Case(
            "eager_add",
            lambda: cpu.eager_add.compile(zeros(48), zeros(48)),
            lambda t: (t(48), t(48)),
        ),
        Case(
            "eager_scale",
            lambda: cpu.eager_scale.compile(zeros(4, 8), zeros(4, 8), scale=3.0),
            lambda t: (t(4, 8), zeros(4, 8)),
        ),
        Case(
            "eager_outer",
            lambda: cpu.eager_outer.compile(zeros(4), zeros(8)),
            lambda t: (t(4), t(8)),
        ),
    ]


def _cuda() -> list[Case]:
    from tests.corpus import cuda

    return cuda.cases(Case)


CPU: list[Case] = _cpu()
CUDA: list[Case] = []
