"""What is wrong with an operator's inputs, in one sentence; and inputs made fit for a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ops.op import DTYPE_NAMES

__all__ = ["dtype_name", "fault", "fit", "fits"]


def dtype_name(op: str, name: str, tensor: Any) -> str:
    """The name of an input's dtype.

    Raises:
        TypeError: It is no tensor, or of a dtype that no operator takes.
    """
    found = DTYPE_NAMES.get(tensor.dtype) if isinstance(tensor, Tensor) else None
    if found is None:
        has = tensor.dtype if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise TypeError(
            f"{name} is {has}; {op} takes a tensor of {', '.join(DTYPE_NAMES.values())}"
        )
    return found


def fault(
    op: str,
    dtype: torch.dtype,
    expected: Mapping[str, tuple[Any, tuple[int | str, ...]]],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Exception | None:
    """The first thing that is wrong with an operator's inputs, or None.

    Args:
        op: The operator's name.
        dtype: Of every input.
        expected: Each input by name, and its shape; a leading "…" stands for any leading axes.
        dtypes: Of inputs that have another one.
    """
    for name, (tensor, _) in expected.items():
        wanted = (dtypes or {}).get(name, dtype)
        if not isinstance(tensor, Tensor):
            return TypeError(f"{name} is a {type(tensor).__name__}; this {op} takes a tensor")
        if tensor.dtype != wanted:
            return TypeError(f"{name} is {tensor.dtype}; this {op} takes {wanted}")
        if tensor.layout is not torch.strided:
            return TypeError(f"{name} is {tensor.layout}; this {op} takes torch.strided")
    for name, (tensor, shape) in expected.items():
        if not _shaped(tensor, shape):
            wanted_shape = ", ".join(map(str, shape))
            return ValueError(
                f"{name} has shape {list(tensor.shape)}; this {op} takes [{wanted_shape}]"
            )
    first_name, (first, _) = next(iter(expected.items()))
    for name, (tensor, _) in expected.items():
        if tensor.device != first.device:
            return ValueError(
                f"{first_name} is on {first.device} and {name} on {tensor.device}; "
                "they must be together"
            )
        if tensor.device.type not in ("cpu", "cuda", "meta"):
            return ValueError(f"{name} is on {tensor.device}; this {op} takes cpu or cuda tensors")
    return None


def _shaped(tensor: Tensor, shape: tuple[int | str, ...]) -> bool:
    have = tensor.shape
    if shape and shape[0] == "…":
        wanted = shape[1:]
        if len(have) < len(wanted):
            return False
        have = have[len(have) - len(wanted) :]
    else:
        wanted = shape
    return len(have) == len(wanted) and all(
        isinstance(want, str) or size == want for size, want in zip(have, wanted, strict=True)
    )


def fits(*tensors: Tensor) -> bool:
    """Whether a kernel takes tensors as they are: contiguous, and at 16-byte addresses."""
    for tensor in tensors:  # noqa: SIM110  (a generator costs half a microsecond a call)
        if not tensor.is_contiguous() or tensor.data_ptr() & 15:
            return False
    return True


def fit(tensor: Tensor) -> Tensor:
    """A tensor that a kernel takes: itself, or a copy."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() & 15 else tensor
