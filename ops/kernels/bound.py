"""A kernel that is ready to launch: layer 3's value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tlcache.spec import KernelSpec, Value

__all__ = ["BoundKernel"]


class BoundKernel(NamedTuple):
    """A kernel that is ready to launch.

    Attributes:
        spec: What was compiled.
        launch: Takes the inputs in the kernel's order, contiguous, and returns its outputs.
    """

    spec: KernelSpec
    launch: Callable[..., Any]

    @property
    def workload(self) -> Mapping[str, Value]:
        """What it computes."""
        return self.spec.workload

    @property
    def schedule(self) -> Mapping[str, Value]:
        """The schedule that was chosen for it."""
        return self.spec.schedule

    @classmethod
    def bind(cls, spec: KernelSpec, launcher: Callable[..., Any]) -> BoundKernel:
        """Bind a launcher; on the CPU, bfloat16 tensors are passed as views of their bits."""
        if not spec.target.is_cuda and spec.workload.get("dtype") == "bfloat16":
            return cls(spec, _by_bits(launcher))
        return cls(spec, launcher)


def _by_bits(launcher: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    bits, real = torch.uint16, torch.bfloat16

    def launch(*inputs: Any) -> Any:
        made = launcher(*[t.view(bits) if t.dtype == real else t for t in inputs])
        if isinstance(made, list):
            return [t.view(real) if t.dtype == bits else t for t in made]
        return made.view(real) if made is not None and made.dtype == bits else made

    return launch
