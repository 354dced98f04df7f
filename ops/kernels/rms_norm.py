"""RMSNorm: y = x / sqrt(mean(x², last axis) + eps) · w, accumulated in float32.

Source of the formula: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. Like
`torch.nn.functional.rms_norm`, the product with w is taken in float32 and rounded once.

In reading order: workload, schedule, factory (layer 2), bodies for CUDA and for the CPU, operator.
"""

# No `from __future__ import annotations` here: TileLang evaluates the annotations of a prim_func,
# and as text they would not see the variables around it.
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ops.jit_cache import jit_cache
from ops.kernels import cpu, fields, rows
from tlcache.operators import Operator
from tlcache.spec import Value
from tlcache.targets import Target

__all__ = [
    "OPERATOR",
    "RMSNormWorkload",
    "candidates",
    "check_schedule",
    "default_schedule",
    "example",
    "rms_norm",
]

MAX_N = 65536


# --- workload ---


@dataclass(frozen=True)
class RMSNormWorkload:
    """What is computed.

    Attributes:
        M: Rows, at least 1, or "dynamic" for one kernel that takes any number of them.
        N: Elements a row, from 1 to 65536.
        eps: Added to the mean of squares; positive or zero.
        dtype: Of x, w and y: bfloat16, float16 or float32.
    """

    M: int | str
    N: int
    eps: float = 1e-6
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        fields.rows(self)
        fields.size(self, "N", MAX_N, ("a row has", "elements"))
        fields.not_negative(self, "eps")
        fields.dtype(self)


# --- schedule ---


def default_schedule(workload: RMSNormWorkload, target: Target) -> dict[str, Value]:
    """The schedule for a workload, from N and M.

    On CUDA, measured on an H200 in bfloat16 at N = 1024 to 16384 and M = 1 to 32768. Few rows (M up
    to 32) wait for latencies: 8 elements a thread, in 128 to 512 threads, and the weight is loaded
    early. More rows wait for memory: 256 threads a row; rows of up to 4096 elements go by twos or,
    from M = 8192 on, by fours, those of up to 8192 by twos there. Rows of up to 1024 share a block
    where there are many. A symbolic M gets one row a group, so that it serves both; the weight is
    loaded early where registers allow. On the CPU there is one schedule.
    """
    if not target.is_cuda:
        return dict(rows.CPU_SCHEDULE)
    return rows.default_schedule(workload.M, workload.N, workload.dtype)


def candidates(workload: RMSNormWorkload, target: Target) -> Iterator[dict[str, Value]]:
    """The schedule space; see `ops.kernels.rows.schedules`."""
    return rows.schedules(workload.N, workload.dtype) if target.is_cuda else iter(())


def check_schedule(
    workload: RMSNormWorkload, schedule: Mapping[str, Value], target: Target
) -> None:
    """Raise WorkloadError for a schedule that cannot work."""
    rows.check_schedule(schedule, target)


# --- factory (layer 2) ---


@jit_cache
def rms_norm(M: int | str, N: int, eps: float, dtype: str, target: str) -> Any:
    """The JITImpl for a workload; called with a schedule it gives the compiled kernel.

    Args:
        M: Rows, or "dynamic".
        N: Elements a row.
        eps: Added to the mean of squares.
        dtype: Of x (M, N), w (N,) and y (M, N). On the CPU bfloat16 travels as uint16.
        target: Canonical target name, like `sm_90a` or `cpu`, or a target dict in JSON.
    """
    if target == "cpu":
        return _cpu(M, N, eps, dtype)
    return _cuda(M, N, eps, dtype, Target(target).config)


def _cuda(M: int | str, N: int, eps: float, dtype: str, config: Mapping[str, object]) -> Any:
    """A row is held in registers between the sum and the product; of a row of several tiles, the
    last tile is, and the others are read again (from L2).
    """
    import tilelang
    import tilelang.language as T

    @tilelang.jit(out_idx=[2], target=dict(config))
    def rms_norm(block_m: int, threads: int, each: int, prefetch: bool):
        count = T.dynamic("rows") if M == "dynamic" else M
        plan = rows.plan(N, dtype, block_m, threads, each)
        load, vector, store, sums, _ = rows.macros(plan)
        lanes, held, tiles, group = plan.lanes, plan.held, plan.tiles, plan.each
        early = prefetch and tiles == 1

        @T.macro
        def square(values, base, squares, e):
            for i in T.unroll(held):
                squares[e] += T.cast(values[base + i], "float32") * T.cast(
                    values[base + i], "float32"
                )

        @T.macro
        def scale(values, base, weight, factor):
            for i in T.unroll(held):
                values[base + i] = T.cast(
                    T.cast(values[base + i], "float32") * factor * T.cast(weight[i], "float32"),
                    dtype,
                )

        @T.prim_func
        def rms_norm(
            x: T.Tensor((count, N), dtype), w: T.Tensor((N,), dtype), y: T.Tensor((count, N), dtype)
        ):
            with T.Kernel(T.ceildiv(count, plan.rows), threads=threads) as block:
                thread = T.get_thread_binding()
                lane, slot = thread % lanes, thread // lanes
                first = block * plan.rows + slot
                values = T.alloc_local((group * held,), dtype)
                weight = T.alloc_local((held,), dtype)
                squares = T.alloc_local((group,), "float32")
                partial = T.alloc_shared((group, block_m, plan.warps), "float32")
                for e in T.unroll(group):
                    squares[e] = 0.0
                for tile in T.serial(tiles):
                    for e in T.unroll(group):
                        row = plan.clamped(first + e * block_m, count)
                        load(values, e * held, x, row, lane, tile, T.cast(0, dtype))
                    if early:
                        vector(weight, w, lane, 0)
                    for e in T.unroll(group):
                        square(values, e * held, squares, e)
                sums(squares, partial, slot, lane)
                for back in T.serial(tiles):
                    tile = tiles - 1 - back
                    if not early:
                        vector(weight, w, lane, tile)
                    for e in T.unroll(group):
                        row = plan.clamped(first + e * block_m, count)
                        if back > 0:
                            load(values, e * held, x, row, lane, tile, T.cast(0, dtype))
                        scale(values, e * held, weight, T.rsqrt(squares[e] / N + eps))
                        store(
                            y,
                            values,
                            e * held,
                            row,
                            lane,
                            tile,
                            plan.within(first + e * block_m, count),
                        )

        return rms_norm

    return rms_norm


def _cpu(M: int | str, N: int, eps: float, dtype: str) -> Any:
    """Target `c`: eight partial sums a row."""
    import tilelang
    import tilelang.language as T

    storage, lanes = cpu.storage(dtype), cpu.LANES

    def widen(value):
        return cpu.widen(value, dtype)

    @tilelang.jit(out_idx=[2], target=cpu.TARGET, compile_flags=cpu.FLAGS)
    def rms_norm(block_m: int, threads: int, each: int, prefetch: bool):
        count = T.dynamic("rows") if M == "dynamic" else M

        @T.prim_func
        def rms_norm(
            x: T.Tensor((count, N), storage),
            w: T.Tensor((N,), storage),
            y: T.Tensor((count, N), storage),
        ):
            with T.Kernel(1):
                partial = T.alloc_local((lanes,), "float32")
                scale = T.alloc_local((1,), "float32")
                for i in T.serial(count):
                    for k in T.serial(lanes):
                        partial[k] = 0.0
                    for j in T.serial(N // lanes):
                        for k in T.serial(lanes):
                            partial[k] += widen(x[i, j * lanes + k]) * widen(x[i, j * lanes + k])
                    for k in T.serial(N % lanes):
                        partial[k] += widen(x[i, N // lanes * lanes + k]) * widen(
                            x[i, N // lanes * lanes + k]
                        )
                    scale[0] = 0.0
                    for k in T.serial(lanes):
                        scale[0] += partial[k]
                    scale[0] = T.float32(1.0) / T.sqrt(scale[0] / N + eps)
                    for j in T.serial(N):
                        y[i, j] = cpu.narrow(widen(x[i, j]) * scale[0] * widen(w[j]), dtype)

        return rms_norm

    return rms_norm


# --- operator ---


def example(workload: RMSNormWorkload, count: int, device: str) -> tuple[Any, ...]:
    """Random x (count, N) and w (N,)."""
    import torch

    dtype = getattr(torch, workload.dtype)
    return (
        torch.randn(count, workload.N, device=device).to(dtype),
        torch.randn(workload.N, device=device).to(dtype),
    )


OPERATOR = Operator(
    name="rms_norm",
    kernel="ops.kernels.rms_norm:rms_norm",
    workload=RMSNormWorkload,
    schedule=default_schedule,
    check_schedule=check_schedule,
    candidates=candidates,
    example=example,
)
