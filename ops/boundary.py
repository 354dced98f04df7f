"""The torch.compile boundary: one dispatcher op an operator, registered once, in
`torch.ops.tilelang_ops`.

Invariant: torch sees one opaque node whose only state is a self-describing key, so equal ops share
graphs and Inductor's cache, and a graph runs in a process that has never seen the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["NAMESPACE", "register"]

NAMESPACE = "tilelang_ops"

_library = torch.library.Library(NAMESPACE, "DEF")


def register(
    schema: str,
    impl: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> Any:
    """Register one dispatcher op for the CPU and CUDA, with its fake and its gradient.

    Args:
        schema: Like `rms_norm(Tensor x, Tensor weight, str instance_key) -> Tensor`.
        impl: Runs the kernel.
        fake: Says the output's shape and strides. Made with `new_empty`: an `empty_like` fake is
            wrong for a strided input.
        setup_context: Saves what the gradient needs, as `torch.library.register_autograd` has it.
        backward: The gradient.

    Returns:
        The op's default overload.
    """
    name = schema.partition("(")[0]
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    _library.define(schema, tags=tags)
    for key in ("CPU", "CUDA"):
        _library.impl(name, impl, key)
    # As the Meta kernel: `register_fake` looks up its caller's source among all modules (2 ms).
    _library.impl(name, fake, "Meta")
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library
    )
    return getattr(getattr(torch.ops, NAMESPACE), name).default
