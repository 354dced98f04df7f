"""Rotary position embedding: each pair of a head's elements is rotated by its token's angle.

    y1 = x1 · cos - x2 · sin,  y2 = x2 · cos + x1 · sin

The pairs are (i, i + D/2), as in GPT-NeoX and Llama, or (2i, 2i + 1), interleaved, as in GPT-J.
Source of the formula: Su et al., "RoFormer", 2021. In float32, rounded once.

In reading order: workload, schedule, factory (layer 2), bodies for CUDA and for the CPU, operator.
"""

# No `from __future__ import annotations` here: TileLang evaluates the annotations of a prim_func,
# and as text they would not see the variables around it.
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ops.jit_cache import jit_cache
from ops.kernels import cpu, fields
from tlcache.operators import Operator
from tlcache.spec import Value
from tlcache.targets import Target

__all__ = [
    "OPERATOR",
    "RopeWorkload",
    "candidates",
    "check_schedule",
    "default_schedule",
    "example",
    "items",
    "rope",
    "vector",
]

MAX_H = 1024
MAX_D = 1024


# --- workload ---


@dataclass(frozen=True)
class RopeWorkload:
    """What is computed.

    Attributes:
        M: Tokens, at least 1, or "dynamic" for one kernel that takes any number of them.
        H: Heads, from 1 to 1024.
        D: Elements a head, even, from 2 to 1024; all of them are rotated.
        dtype: Of x and y: bfloat16, float16 or float32. The cosines and sines are float32.
        interleaved: Whether the pairs are (2i, 2i + 1).
    """

    M: int | str
    H: int
    D: int
    dtype: str = "bfloat16"
    interleaved: bool = False

    def __post_init__(self) -> None:
        fields.rows(self)
        fields.size(self, "H", MAX_H, ("there are", "heads"))
        fields.size(self, "D", MAX_D, ("a head has", "elements"), multiple=2)
        fields.dtype(self)
        fields.flag(self, "interleaved")


# --- schedule ---

CPU_SCHEDULE: dict[str, Value] = {"threads": 1}


def default_schedule(workload: RopeWorkload, target: Target) -> dict[str, Value]:
    """The schedule for a workload: up to 256 threads, each with 16 bytes of a head (of either half
    where the pairs are halves). On the CPU there is one schedule.
    """
    if not target.is_cuda:
        return dict(CPU_SCHEDULE)
    threads = 32
    while threads < 256 and threads < items(workload.H, workload.D, workload.dtype,
                                             workload.interleaved):  # fmt: skip
        threads *= 2
    return {"threads": threads}


def candidates(workload: RopeWorkload, target: Target) -> Iterator[dict[str, Value]]:
    """The schedule space: 32 to 512 threads."""
    if target.is_cuda:
        for threads in (32, 64, 128, 256, 512):
            yield {"threads": threads}


def check_schedule(workload: RopeWorkload, schedule: Mapping[str, Value], target: Target) -> None:
    """Raise WorkloadError for a schedule that cannot work."""
    fields.schedule_fields(schedule, tuple(CPU_SCHEDULE))
    if not target.is_cuda:
        fields.only(schedule, CPU_SCHEDULE)
        return
    fields.choice(schedule, "threads", (32, 64, 128, 256, 512, 1024))


def vector(D: int, dtype: str, interleaved: bool) -> int:
    """Elements a load: as many as 16 bytes hold, and half a head (or a head) is a multiple of."""
    vec = 4 if dtype == "float32" else 8
    while (D if interleaved else D // 2) % vec:
        vec //= 2
    return vec


def items(H: int, D: int, dtype: str, interleaved: bool) -> int:
    """What a token is shared out in: a load of whole pairs, or one of each half."""
    vec = vector(D, dtype, interleaved)
    return H * (D if interleaved else D // 2) // vec


# --- factory (layer 2) ---


@jit_cache
def rope(M: int | str, H: int, D: int, dtype: str, interleaved: bool, target: str) -> Any:
    """The JITImpl for a workload; called with a schedule it gives the compiled kernel.

    Args:
        M: Tokens, or "dynamic".
        H: Heads.
        D: Elements a head.
        dtype: Of x and y (M, H, D); cos and sin (M, D/2) are float32. On the CPU bfloat16 travels
            as uint16.
        interleaved: Whether the pairs are (2i, 2i + 1).
        target: Canonical target name, like `sm_90a` or `cpu`, or a target dict in JSON.
    """
    if target == "cpu":
        return _cpu(M, H, D, dtype, interleaved)
    return _cuda(M, H, D, dtype, interleaved, Target(target).config)


def _cuda(
    M: int | str, H: int, D: int, dtype: str, interleaved: bool, config: Mapping[str, object]
) -> Any:
    """Blocks go over the tokens, and over chunks of a token's heads."""
    import tilelang
    import tilelang.language as T

    half = D // 2

    @tilelang.jit(out_idx=[3], target=dict(config))
    def rope(threads: int):
        count = T.dynamic("rows") if M == "dynamic" else M
        vec = vector(D, dtype, interleaved)
        total = items(H, D, dtype, interleaved)
        a_head = total // H
        chunks = -(-total // threads)
        angles = vec // 2 if interleaved else vec

        @T.macro
        def halves(x, cos, sin, y, row, item, first, second, c, s):
            head, at = item // a_head, item % a_head * vec
            for j in T.vectorized(vec):
                first[j] = x[row, head, at + j]
            for j in T.vectorized(vec):
                second[j] = x[row, head, half + at + j]
            for j in T.unroll(vec):
                c[j] = cos[row, at + j]
                s[j] = sin[row, at + j]
            for j in T.unroll(vec):
                left, right = T.cast(first[j], "float32"), T.cast(second[j], "float32")
                first[j] = T.cast(left * c[j] - right * s[j], dtype)
                second[j] = T.cast(right * c[j] + left * s[j], dtype)
            for j in T.vectorized(vec):
                y[row, head, at + j] = first[j]
            for j in T.vectorized(vec):
                y[row, head, half + at + j] = second[j]

        @T.macro
        def pairs(x, cos, sin, y, row, item, first, second, c, s):
            head, at = item // a_head, item % a_head * vec
            for j in T.vectorized(vec):
                first[j] = x[row, head, at + j]
            for j in T.unroll(angles):
                c[j] = cos[row, at // 2 + j]
                s[j] = sin[row, at // 2 + j]
            for j in T.unroll(angles):
                left = T.cast(first[2 * j], "float32")
                right = T.cast(first[2 * j + 1], "float32")
                second[2 * j] = T.cast(left * c[j] - right * s[j], dtype)
                second[2 * j + 1] = T.cast(right * c[j] + left * s[j], dtype)
            for j in T.vectorized(vec):
                y[row, head, at + j] = second[j]

        @T.prim_func
        def rope(
            x: T.Tensor((count, H, D), dtype),
            cos: T.Tensor((count, half), "float32"),
            sin: T.Tensor((count, half), "float32"),
            y: T.Tensor((count, H, D), dtype),
        ):
            with T.Kernel(count * chunks, threads=threads) as block:
                item = block % chunks * threads + T.get_thread_binding()
                first = T.alloc_local((vec,), dtype)
                second = T.alloc_local((vec,), dtype)
                c = T.alloc_local((angles,), "float32")
                s = T.alloc_local((angles,), "float32")
                if item < total:
                    if interleaved:
                        pairs(x, cos, sin, y, block // chunks, item, first, second, c, s)
                    else:
                        halves(x, cos, sin, y, block // chunks, item, first, second, c, s)

        return rope

    return rope


def _cpu(M: int | str, H: int, D: int, dtype: str, interleaved: bool) -> Any:
    """Target `c`: one pair after another."""
    import tilelang
    import tilelang.language as T

    storage, half = cpu.storage(dtype), D // 2
    step, gap = (2, 1) if interleaved else (1, half)

    @tilelang.jit(out_idx=[3], target=cpu.TARGET, compile_flags=cpu.FLAGS)
    def rope(threads: int):
        count = T.dynamic("rows") if M == "dynamic" else M

        @T.prim_func
        def rope(
            x: T.Tensor((count, H, D), storage),
            cos: T.Tensor((count, half), "float32"),
            sin: T.Tensor((count, half), "float32"),
            y: T.Tensor((count, H, D), storage),
        ):
            with T.Kernel(1):
                left = T.alloc_local((1,), "float32")
                right = T.alloc_local((1,), "float32")
                for i in T.serial(count):
                    for h in T.serial(H):
                        for j in T.serial(half):
                            left[0] = cpu.widen(x[i, h, j * step], dtype)
                            right[0] = cpu.widen(x[i, h, j * step + gap], dtype)
                            y[i, h, j * step] = cpu.narrow(
                                left[0] * cos[i, j] - right[0] * sin[i, j], dtype
                            )
                            y[i, h, j * step + gap] = cpu.narrow(
                                right[0] * cos[i, j] + left[0] * sin[i, j], dtype
                            )

        return rope

    return rope


# --- operator ---


def example(workload: RopeWorkload, count: int, device: str) -> tuple[Any, ...]:
    """Random x (count, H, D), and the cosines and sines (count, D/2) of random angles."""
    import torch

    x = torch.randn(count, workload.H, workload.D, device=device)
    angles = torch.randn(count, workload.D // 2, device=device)
    return x.to(getattr(torch, workload.dtype)), angles.cos(), angles.sin()


OPERATOR = Operator(
    name="rope",
    kernel="ops.kernels.rope:rope",
    workload=RopeWorkload,
    schedule=default_schedule,
    check_schedule=check_schedule,
    candidates=candidates,
    example=example,
)
