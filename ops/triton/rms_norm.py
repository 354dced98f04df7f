"""RMSNorm in Triton: y = x / sqrt(mean(x², last axis) + eps) · w, accumulated in float32.

One kernel, four functions that differ only in how torch sees the launch. Like `ops.rms_norm`, the
product with w is taken in float32 and rounded once. Inference only: none of them has a gradient,
and each says so where one would be needed.

In reading order: schedule, kernel, launch and checks, the integrations.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op, triton_op

try:
    import triton
    import triton.language as tl
except ImportError as missing:
    raise ImportError(
        "ops.triton needs Triton, which is not installed here\n\n"
        "hint: `pip install 'tlcache[triton]'`",
        name=missing.name,
    ) from missing
if not hasattr(triton, "knobs"):  # 3.4 brought it, and `cache_results`
    raise ImportError(
        f"ops.triton needs Triton 3.4 or later; {triton.__version__} is installed here\n\n"
        "hint: `pip install 'tlcache[triton]'`",
        name="triton",
    )

__all__ = [
    "NAMESPACE",
    "default_schedule",
    "rms_norm_autotuned",
    "rms_norm_captured",
    "rms_norm_opaque",
    "rms_norm_wrapped",
]

NAMESPACE = "tilelang_ops_triton"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SCHEMA = "(Tensor x, Tensor weight, float eps) -> Tensor"
_MAX_ROWS = 2**31 - 1  # the first axis of a CUDA grid
_INTERPRETED = bool(triton.knobs.runtime.interpret)
# Older versions of torch refuse a kernel that the interpreter runs.
wrap_triton = (lambda kernel: kernel) if _INTERPRETED else torch.library.wrap_triton


# --- schedule ---

HELD_BYTES = 65536  # the longest row that is held in registers, as Liger has it
TILE = 8192  # elements of a longer one that are held at a time


def default_schedule(N: int, itemsize: int) -> tuple[int, int]:
    """The width of a block and its warps, from N alone.

    A row to a program. A block is as wide as the row, rounded up to a power of two, where that fits
    in 64 KiB (32768 elements of bfloat16), else 8192 wide, and the program loops. Warps by width,
    as `calculate_settings` of Liger Kernel has them: 4, from 2048 on 8, from 8192 on 16, from 32768
    on 32.

    Args:
        N: Elements a row, at least 1.
        itemsize: Bytes an element.

    Returns:
        BLOCK_N and num_warps.
    """
    width = 1 << (N - 1).bit_length()
    if width * itemsize > HELD_BYTES:
        width = TILE
    if width >= 32768:
        return width, 32
    if width >= 8192:
        return width, 16
    return width, 8 if width >= 2048 else 4


# --- kernel ---


@triton.jit
def _kernel(x, w, y, stride, eps, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program a row. N is a constant: a model has few, and the guards fold where they can."""
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    y += row * N
    columns = tl.arange(0, BLOCK_N)
    if BLOCK_N >= N:
        inside = columns < N
        held = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(held * held, axis=0) / N + eps)
        weight = tl.load(w + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + columns, (held * scale * weight).to(y.dtype.element_ty), mask=inside)
    else:
        squares = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for start in range(0, N, BLOCK_N):
            inside = start + columns < N
            held = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
            squares += held * held
        scale = tl.rsqrt(tl.sum(squares, axis=0) / N + eps)
        for start in range(0, N, BLOCK_N):
            inside = start + columns < N
            held = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(w + start + columns, mask=inside, other=0.0).to(tl.float32)
            value = (held * scale * weight).to(y.dtype.element_ty)
            tl.store(y + start + columns, value, mask=inside)


# Tuned are the warps; the row's length settles the rest. M is no part of the key: the first number
# of rows that comes decides for all. The interpreter has no GPU to take the time on, and no disk
# cache: it gets one configuration, which is never timed.
_tuned_kernel = triton.autotune(
    configs=[
        triton.Config({}, num_warps=warps) for warps in ((4,) if _INTERPRETED else (4, 8, 16, 32))
    ],
    key=["N"],
    cache_results=not _INTERPRETED,
)(_kernel)


# --- launch and checks ---


def _check(x: Tensor, weight: Tensor) -> None:
    """Raise for inputs that the kernel would misread."""
    if x.dtype not in _DTYPES:
        raise TypeError(f"x is {x.dtype}; this rms_norm takes bfloat16, float16 or float32")
    if weight.dtype != x.dtype:
        raise TypeError(f"weight is {weight.dtype}; this rms_norm takes {x.dtype}, as x is")
    if weight.dim() != 1 or weight.shape[0] < 1:
        raise ValueError(f"weight has shape {list(weight.shape)}; this rms_norm takes [N], N >= 1")
    N = weight.shape[0]
    if x.dim() < 1 or x.shape[-1] != N:
        raise ValueError(f"x has shape {list(x.shape)}; this rms_norm takes […, {N}]")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device} and weight on {weight.device}; they must be together")
    if not (x.is_cuda or _INTERPRETED):
        raise ValueError(
            f"x is on {x.device}; Triton takes CUDA tensors, or any with TRITON_INTERPRET=1"
        )
    if x.numel() // N > _MAX_ROWS:
        raise ValueError(f"x has {x.numel() // N} rows; this rms_norm takes at most {_MAX_ROWS}")


def _check_no_gradient(name: str, x: Tensor, weight: Tensor) -> None:
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        which = "x" if x.requires_grad else "weight"
        raise NotImplementedError(
            f"{which} requires a gradient, and {name} has none\n\n"
            "hint: call it under `torch.no_grad()`, or use `ops.rms_norm`, which has one"
        )


def _rows(x: Tensor, N: int) -> Tensor:
    """x as (M, N) with adjacent elements in a row: a view where there is one, else a copy."""
    x = x.reshape(-1, N)
    return x if N == 1 or x.stride(1) == 1 else x.contiguous()


def _launch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _check(x, weight)
    y = x.new_empty(x.shape)
    if x.numel() == 0:
        return y
    N = weight.shape[0]
    rows = _rows(x, N)
    block, warps = default_schedule(N, x.element_size())
    _kernel[(rows.shape[0],)](
        rows, weight.contiguous(), y, rows.stride(0), eps, N=N, BLOCK_N=block, num_warps=warps
    )
    return y


# --- the integrations ---


def rms_norm_captured(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The bare launch: torch.compile traces into it and sees the kernel itself.

    Args:
        x: (…, N), bfloat16, float16 or float32, on a CUDA device. Rows may lie apart; elements of
            a row that do are copied together first.
        weight: (N,), of the same dtype and device.
        eps: Added to the mean of squares.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        ValueError: A shape or device does not fit.
        TypeError: A dtype does not fit.
        NotImplementedError: A gradient would be needed.
    """
    _check_no_gradient("rms_norm_captured", x, weight)
    return _launch(x, weight, eps)


def rms_norm_autotuned(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """`rms_norm_captured` with its warps tuned at the first call for each N and dtype.

    Triton keeps the timings in its cache directory: a second process reads them. Under
    torch.compile Inductor tunes in Triton's place, and keeps the result in its own.

    Args, returns and raises: see `rms_norm_captured`.
    """
    _check_no_gradient("rms_norm_autotuned", x, weight)
    _check(x, weight)
    y = x.new_empty(x.shape)
    if x.numel() == 0:
        return y
    N = weight.shape[0]
    rows = _rows(x, N)
    block, _ = default_schedule(N, x.element_size())
    _tuned_kernel[(rows.shape[0],)](
        rows, weight.contiguous(), y, rows.stride(0), eps, N=N, BLOCK_N=block
    )
    return y


@triton_op(f"{NAMESPACE}::rms_norm_wrapped", mutates_args=(), schema=_SCHEMA)
def _wrapped(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _check(x, weight)
    y = x.new_empty(x.shape)
    if x.numel() == 0:
        return y
    N = weight.shape[0]
    rows = _rows(x, N)
    block, warps = default_schedule(N, x.element_size())
    # By this name and in this place: torch reads this source for the kernels in its cache keys.
    wrap_triton(_kernel)[(rows.shape[0],)](
        rows, weight.contiguous(), y, rows.stride(0), eps, N=N, BLOCK_N=block, num_warps=warps
    )
    return y


def rms_norm_wrapped(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """A dispatcher op that torch.compile takes apart: `triton_op` + `wrap_triton`.

    Eager code, `torch.export` and tensor subclasses see `tilelang_ops_triton::rms_norm_wrapped`;
    Inductor sees the kernel.

    Args, returns and raises: see `rms_norm_captured`.
    """
    _check_no_gradient("rms_norm_wrapped", x, weight)
    return _wrapped(x, weight, eps)


@custom_op(f"{NAMESPACE}::rms_norm_opaque", mutates_args=(), schema=_SCHEMA)
def _opaque(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, weight, eps)


@_opaque.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    _check(x, weight)
    return x.new_empty(x.shape)


def rms_norm_opaque(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """A dispatcher op that torch.compile does not look into: `custom_op`.

    The graph holds one node, `tilelang_ops_triton::rms_norm_opaque`, and Triton launches the kernel
    as in eager code.

    Args, returns and raises: see `rms_norm_captured`.
    """
    _check_no_gradient("rms_norm_opaque", x, weight)
    return _opaque(x, weight, eps)
