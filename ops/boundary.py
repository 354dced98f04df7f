"""The torch.compile boundary: one dispatcher op an operator, registered once, in
`torch.ops.tilelang_ops`.

Invariant: torch sees one opaque node whose only state is a self-describing key, so equal ops share
graphs and Inductor's cache, and a graph runs in a process that has never seen the op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from ops import op
from ops.op import Op, OpState
from tlcache.errors import GradientError

__all__ = ["NAMESPACE", "register"]

NAMESPACE = "tilelang_ops"

_library = torch.library.Library(NAMESPACE, "DEF")


def register(kind: type[OpState], *facades: type[Op]) -> None:
    """Register an operator's dispatcher op for the CPU and CUDA, with its fake, gradient and
    batching rule.

    Two overloads: `NAME(inputs…, str instance_key)`, and `NAME.scalars(inputs…, scalars…)` without
    a key, which describes its workload anew at each call.

    Args:
        kind: The operator's host side.
        facades: The op classes that stand in front of it; they get the dispatcher op.
    """
    op.define(kind)
    name, tensors = kind.name, len(kind.folds)

    def keyed(*arguments: Any) -> OpState:
        return op.state(arguments[-1], keep=True)

    def described(*arguments: Any) -> OpState:
        return _described(kind, tuple(kind.describe(*arguments).items()))

    scalars = f", {kind.scalars}" if kind.scalars else ""
    for overload, rest, find in (
        ("", ", str instance_key", keyed),
        (".scalars", scalars, described),
    ):
        full = f"{name}{overload}"
        _library.define(
            f"{full}({kind.inputs}{rest}) -> {kind.outputs}",
            tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
        )
        run, fake = _runner(find, tensors), _faker(find, tensors)
        for key in ("CPU", "CUDA"):
            _library.impl(full, run, key)
        # As the Meta kernel: `register_fake` looks up its caller's source among all modules (2 ms).
        _library.impl(full, fake, "Meta")
        call = getattr(getattr(torch.ops, NAMESPACE), name)
        call = getattr(call, overload[1:] or "default")
        autograd = _mutating if kind.outputs == "()" else _differentiable
        _library.impl(full, autograd(kind, find, call, tensors), "Autograd")
        torch.library.register_vmap(
            f"{NAMESPACE}::{full}", _folding(kind, call, tensors), lib=_library
        )
    for facade in facades:
        facade.kind = kind
        facade.dispatch = getattr(getattr(torch.ops, NAMESPACE), name).default


@functools.lru_cache(maxsize=1024)
def _described(kind: type[OpState], values: tuple[tuple[str, Any], ...]) -> OpState:
    return op.state(op.instance_key(kind.name, dict(values)))


def _runner(find: Callable[..., OpState], tensors: int) -> Callable[..., Any]:
    return lambda *arguments: find(*arguments).run(*arguments[:tensors])


def _faker(find: Callable[..., OpState], tensors: int) -> Callable[..., Any]:
    return lambda *arguments: find(*arguments).fake(*arguments[:tensors])


# --- gradients ---


def _wanted(inputs: Sequence[Any]) -> bool:
    """Whether a gradient may be asked for through these inputs, in either mode."""
    tensors = [tensor for tensor in inputs if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )


def _differentiable(
    kind: type[OpState], find: Callable[..., OpState], call: Any, tensors: int
) -> Callable[..., Any]:
    """What autograd sees of an op. `torch.library.register_autograd` would do for the reverse mode,
    and drops the tangents of the forward mode without a word.
    """

    def forward(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return call(*arguments)

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return forward(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.arguments = len(inputs)
            if kind.setup_context is not None:
                kind.setup_context(ctx, find(*inputs), inputs[:tensors], output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            if kind.backward is None:
                raise _gradient_error(kind)
            return (*kind.backward(ctx, *grads), *[None] * (ctx.arguments - tensors))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise _gradient_error(kind, "forward-mode ")

    # Not `Gradient.apply`, which under a transform of `torch.func` asks for a rule of its own: the
    # dispatcher has gone through the transforms already when it comes here.
    apply = super(torch.autograd.Function, Gradient).apply

    def autograd(*arguments: Any) -> Any:
        if _wanted(arguments[:tensors]):
            with enable_single_level_autograd_function():
                return apply(*arguments)
        return forward(*arguments)

    return autograd


def _gradient_error(kind: type[OpState], mode: str = "") -> GradientError:
    if kind.backward is not None:
        return GradientError(
            f"{kind.name} has no {mode}gradient, and one through it was asked for",
            hint="it has one in the reverse mode, `torch.autograd.grad` or `torch.func.grad`",
        )
    return GradientError(
        f"{kind.name} is for inference only, and a gradient through it was asked for",
        hint="call it under `torch.no_grad()`, or on tensors that need no gradient; "
        "`rms_norm` and `silu_and_mul` have gradients",
    )


def _mutating(
    kind: type[OpState], find: Callable[..., OpState], call: Any, tensors: int
) -> Callable[..., None]:
    """What autograd sees of an op that writes its inputs: no gradient goes through it."""

    def autograd(*arguments: Any) -> None:
        if _wanted(arguments[:tensors]):
            raise _gradient_error(kind)
        with torch._C._AutoDispatchBelowAutograd():
            call(*arguments)

    return autograd


# --- vmap ---


def _folding(kind: type[OpState], call: Any, tensors: int) -> Callable[..., Any]:
    """The batching rule: a batch of rows is more rows. A batch of anything else is taken one by
    one.
    """

    def batched(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        inputs, rest = arguments[:tensors], arguments[tensors:]
        foldable = all(
            dim is None or folds for dim, folds in zip(in_dims, kind.folds, strict=False)
        )
        moved = [
            tensor if tensor is None or dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(inputs, in_dims, strict=False)
        ]
        if kind.outputs == "()" and (
            not foldable
            or any(dim is None and folds for dim, folds in zip(in_dims, kind.folds, strict=False))
        ):
            raise ValueError(
                f"{kind.name} writes its inputs, and under vmap only some of them have a batch"
            )
        if foldable:
            spread = [
                tensor.expand(info.batch_size, *tensor.shape)
                if tensor is not None and dim is None and folds
                else tensor
                for tensor, dim, folds in zip(moved, in_dims, kind.folds, strict=False)
            ]
            out = call(*_aligned(spread, kind.folds), *rest)
        else:
            each = [
                call(
                    *[
                        tensor if tensor is None or dim is None else tensor[index]
                        for tensor, dim in zip(moved, in_dims, strict=False)
                    ],
                    *rest,
                )
                for index in range(info.batch_size)
            ]
            if isinstance(each[0], tuple):
                out = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
            else:
                out = None if each[0] is None else torch.stack(each)
        return out, (0,) * len(out) if isinstance(out, tuple) else None if out is None else 0

    return batched


def _aligned(tensors: Sequence[Any], folds: Sequence[int]) -> list[Any]:
    """Tensors with a leading batch, in which those that broadcast over the first one's leading axes
    have as many of them, so that batches meet.
    """
    lead = tensors[0].dim() - folds[0]
    return [
        tensor
        if tensor is None or not row or tensor.dim() - row >= lead
        else tensor[(slice(None), *[None] * (lead - tensor.dim() + row))]
        for tensor, row in zip(tensors, folds, strict=True)
    ]
