"""Softmax over the last axis: y = exp(x - max) / sum(exp(x - max)), in float32.

NaN, infinities and rows of nothing but -inf come out as torch has them: NaN.

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
    "SoftmaxWorkload",
    "candidates",
    "check_schedule",
    "default_schedule",
    "example",
    "softmax",
]

MAX_N = 65536


# --- workload ---


@dataclass(frozen=True)
class SoftmaxWorkload:
    """What is computed.

    Attributes:
        M: Rows, at least 1, or "dynamic" for one kernel that takes any number of them.
        N: Elements a row, from 1 to 65536.
        dtype: Of x and y: bfloat16, float16 or float32.
    """

    M: int | str
    N: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        fields.rows(self)
        fields.size(self, "N", MAX_N, ("a row has", "elements"))
        fields.dtype(self)


# --- schedule ---


def default_schedule(workload: SoftmaxWorkload, target: Target) -> dict[str, Value]:
    """The schedule for a workload: `rms_norm`'s, which moves the same bytes; not measured for
    itself. There is no weight to load early. On the CPU there is one schedule.
    """
    if not target.is_cuda:
        return dict(rows.CPU_SCHEDULE)
    schedule = rows.default_schedule(workload.M, workload.N, workload.dtype)
    return {**schedule, "prefetch": False}


def candidates(workload: SoftmaxWorkload, target: Target) -> Iterator[dict[str, Value]]:
    """The schedule space; see `ops.kernels.rows.schedules`."""
    if target.is_cuda:
        for schedule in rows.schedules(workload.N, workload.dtype):
            if not schedule["prefetch"]:
                yield schedule


def check_schedule(
    workload: SoftmaxWorkload, schedule: Mapping[str, Value], target: Target
) -> None:
    """Raise WorkloadError for a schedule that cannot work."""
    rows.check_schedule(schedule, target)
    fields.choice(schedule, "prefetch", (False,))


# --- factory (layer 2) ---


@jit_cache
def softmax(M: int | str, N: int, dtype: str, target: str) -> Any:
    """The JITImpl for a workload; called with a schedule it gives the compiled kernel.

    Args:
        M: Rows, or "dynamic".
        N: Elements a row.
        dtype: Of x and y (M, N). On the CPU bfloat16 travels as uint16.
        target: Canonical target name, like `sm_90a` or `cpu`, or a target dict in JSON.
    """
    if target == "cpu":
        return _cpu(M, N, dtype)
    return _cuda(M, N, dtype, Target(target).config)


def _cuda(M: int | str, N: int, dtype: str, config: Mapping[str, object]) -> Any:
    """A row is held in registers; a row of several tiles is read three times, twice from L2."""
    import tilelang
    import tilelang.language as T

    @tilelang.jit(out_idx=[1], target=dict(config))
    def softmax(block_m: int, threads: int, each: int, prefetch: bool):
        count = T.dynamic("rows") if M == "dynamic" else M
        plan = rows.plan(N, dtype, block_m, threads, each)
        load, _, store, sums, greatest = rows.macros(plan)
        lanes, held, tiles, group = plan.lanes, plan.held, plan.tiles, plan.each

        @T.macro
        def raise_to(values, base, tops, e):
            for i in T.unroll(held):
                tops[e] = T.max(tops[e], T.cast(values[base + i], "float32"))

        @T.macro
        def add(values, base, top, totals, e):
            for i in T.unroll(held):
                totals[e] += T.exp(T.cast(values[base + i], "float32") - top)

        @T.macro
        def scale(values, base, top, factor):
            for i in T.unroll(held):
                values[base + i] = T.cast(
                    T.exp(T.cast(values[base + i], "float32") - top) * factor, dtype
                )

        @T.prim_func
        def softmax(x: T.Tensor((count, N), dtype), y: T.Tensor((count, N), dtype)):
            with T.Kernel(T.ceildiv(count, plan.rows), threads=threads) as block:
                thread = T.get_thread_binding()
                lane, slot = thread % lanes, thread // lanes
                first = block * plan.rows + slot
                values = T.alloc_local((group * held,), dtype)
                tops = T.alloc_local((group,), "float32")
                totals = T.alloc_local((group,), "float32")
                partial = T.alloc_shared((group, block_m, plan.warps), "float32")
                second = T.alloc_shared((group, block_m, plan.warps), "float32")
                for e in T.unroll(group):
                    tops[e] = -T.infinity("float32")
                    totals[e] = 0.0
                for tile in T.serial(tiles):
                    for e in T.unroll(group):
                        row = plan.clamped(first + e * block_m, count)
                        load(values, e * held, x, row, lane, tile, -T.infinity(dtype))
                    for e in T.unroll(group):
                        raise_to(values, e * held, tops, e)
                greatest(tops, partial, slot, lane)
                for back in T.serial(tiles):
                    for e in T.unroll(group):
                        if back > 0:
                            row = plan.clamped(first + e * block_m, count)
                            load(
                                values, e * held, x, row, lane, tiles - 1 - back,
                                -T.infinity(dtype),
                            )  # fmt: skip
                        add(values, e * held, tops[e], totals, e)
                sums(totals, second, slot, lane)
                for tile in T.serial(tiles):
                    for e in T.unroll(group):
                        row = plan.clamped(first + e * block_m, count)
                        if tile > 0:
                            load(values, e * held, x, row, lane, tile, -T.infinity(dtype))
                        scale(values, e * held, tops[e], T.float32(1.0) / totals[e])
                        store(
                            y,
                            values,
                            e * held,
                            row,
                            lane,
                            tile,
                            plan.within(first + e * block_m, count),
                        )

        return softmax

    return softmax


def _cpu(M: int | str, N: int, dtype: str) -> Any:
    """Target `c`: one row after another, in three passes."""
    import tilelang
    import tilelang.language as T

    storage = cpu.storage(dtype)

    def widen(value):
        return cpu.widen(value, dtype)

    @tilelang.jit(out_idx=[1], target=cpu.TARGET, compile_flags=cpu.FLAGS)
    def softmax(block_m: int, threads: int, each: int, prefetch: bool):
        count = T.dynamic("rows") if M == "dynamic" else M

        @T.prim_func
        def softmax(x: T.Tensor((count, N), storage), y: T.Tensor((count, N), storage)):
            with T.Kernel(1):
                top = T.alloc_local((1,), "float32")
                total = T.alloc_local((1,), "float32")
                for i in T.serial(count):
                    top[0] = widen(x[i, 0])
                    for j in T.serial(N - 1):
                        top[0] = T.max(top[0], widen(x[i, j + 1]))
                    total[0] = 0.0
                    for j in T.serial(N):
                        total[0] += T.exp(widen(x[i, j]) - top[0])
                    for j in T.serial(N):
                        y[i, j] = cpu.narrow(T.exp(widen(x[i, j]) - top[0]) / total[0], dtype)

        return softmax

    return softmax


# --- operator ---


def example(workload: SoftmaxWorkload, count: int, device: str) -> tuple[Any, ...]:
    """Random x (count, N)."""
    import torch

    return (torch.randn(count, workload.N, device=device).to(getattr(torch, workload.dtype)),)


OPERATOR = Operator(
    name="softmax",
    kernel="ops.kernels.softmax:softmax",
    workload=SoftmaxWorkload,
    schedule=default_schedule,
    check_schedule=check_schedule,
    candidates=candidates,
    example=example,
)
