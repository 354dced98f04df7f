"""LayerNorm: y = (x - mean) / sqrt(variance + eps) · w + b over the last axis, in float32.

Source of the formula: Ba, Kiros and Hinton, "Layer Normalization", 2016. The variance is that of
the differences from the mean, not a difference of sums: no cancellation where the mean is large.

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
    "LayerNormWorkload",
    "candidates",
    "check_schedule",
    "default_schedule",
    "example",
    "layer_norm",
]

MAX_N = 65536


# --- workload ---


@dataclass(frozen=True)
class LayerNormWorkload:
    """What is computed.

    Attributes:
        M: Rows, at least 1, or "dynamic" for one kernel that takes any number of them.
        N: Elements a row, from 1 to 65536.
        eps: Added to the variance; positive or zero.
        dtype: Of x, w, b and y: bfloat16, float16 or float32.
        bias: Whether there is a b.
    """

    M: int | str
    N: int
    eps: float = 1e-5
    dtype: str = "bfloat16"
    bias: bool = True

    def __post_init__(self) -> None:
        fields.rows(self)
        fields.size(self, "N", MAX_N, ("a row has", "elements"))
        fields.not_negative(self, "eps")
        fields.dtype(self)
        fields.flag(self, "bias")


# --- schedule ---


def default_schedule(workload: LayerNormWorkload, target: Target) -> dict[str, Value]:
    """The schedule for a workload: `rms_norm`'s, which moves the same bytes; not measured for
    itself. On the CPU there is one schedule.
    """
    if not target.is_cuda:
        return dict(rows.CPU_SCHEDULE)
    return rows.default_schedule(workload.M, workload.N, workload.dtype)


def candidates(workload: LayerNormWorkload, target: Target) -> Iterator[dict[str, Value]]:
    """The schedule space; see `ops.kernels.rows.schedules`."""
    return rows.schedules(workload.N, workload.dtype) if target.is_cuda else iter(())


def check_schedule(
    workload: LayerNormWorkload, schedule: Mapping[str, Value], target: Target
) -> None:
    """Raise WorkloadError for a schedule that cannot work."""
    rows.check_schedule(schedule, target)


# --- factory (layer 2) ---


@jit_cache
def layer_norm(M: int | str, N: int, eps: float, dtype: str, bias: bool, target: str) -> Any:
    """The JITImpl for a workload; called with a schedule it gives the compiled kernel.

    Args:
        M: Rows, or "dynamic".
        N: Elements a row.
        eps: Added to the variance.
        dtype: Of x (M, N), w (N,), b (N,) and y (M, N). On the CPU bfloat16 travels as uint16.
        bias: Whether there is a b.
        target: Canonical target name, like `sm_90a` or `cpu`, or a target dict in JSON.
    """
    if target == "cpu":
        return _cpu(M, N, eps, dtype, bias)
    return _cuda(M, N, eps, dtype, bias, Target(target).config)


def _cuda(
    M: int | str, N: int, eps: float, dtype: str, bias: bool, config: Mapping[str, object]
) -> Any:
    """A row is held in registers from the first sum to the product; a row of several tiles is read
    again (from L2) for the variance and for the product.
    """
    import tilelang
    import tilelang.language as T

    @tilelang.jit(out_idx=[3] if bias else [2], target=dict(config))
    def layer_norm(block_m: int, threads: int, each: int, prefetch: bool):
        count = T.dynamic("rows") if M == "dynamic" else M
        plan = rows.plan(N, dtype, block_m, threads, each)
        load, vector, store, sums, _ = rows.macros(plan)
        lanes, held, tiles, group = plan.lanes, plan.held, plan.tiles, plan.each
        vec, vectors = plan.vec, plan.vectors
        early = prefetch and tiles == 1

        @T.macro
        def add(values, base, means, e):
            for i in T.unroll(held):
                means[e] += T.cast(values[base + i], "float32")

        @T.macro
        def square(values, base, mean, squares, e, lane, tile):
            for v in T.unroll(vectors):
                at = ((tile * vectors + v) * lanes + lane) * vec
                if plan.whole or at < N:
                    for j in T.unroll(vec):
                        difference = T.cast(values[base + v * vec + j], "float32") - mean
                        squares[e] += difference * difference

        @T.macro
        def scale(values, base, weight, shift, mean, factor):
            for i in T.unroll(held):
                values[base + i] = T.cast(
                    (T.cast(values[base + i], "float32") - mean)
                    * factor
                    * T.cast(weight[i], "float32")
                    + (T.cast(shift[i], "float32") if bias else T.float32(0)),
                    dtype,
                )

        @T.macro
        def body(x, w, b, y, block):
            thread = T.get_thread_binding()
            lane, slot = thread % lanes, thread // lanes
            first = block * plan.rows + slot
            values = T.alloc_local((group * held,), dtype)
            weight = T.alloc_local((held,), dtype)
            shift = T.alloc_local((held,), dtype)
            means = T.alloc_local((group,), "float32")
            squares = T.alloc_local((group,), "float32")
            partial = T.alloc_shared((group, block_m, plan.warps), "float32")
            second = T.alloc_shared((group, block_m, plan.warps), "float32")
            for e in T.unroll(group):
                means[e] = 0.0
                squares[e] = 0.0
            for tile in T.serial(tiles):
                for e in T.unroll(group):
                    row = plan.clamped(first + e * block_m, count)
                    load(values, e * held, x, row, lane, tile, T.cast(0, dtype))
                if early:
                    vector(weight, w, lane, 0)
                    if bias:
                        vector(shift, b, lane, 0)
                for e in T.unroll(group):
                    add(values, e * held, means, e)
            sums(means, partial, slot, lane)
            for e in T.unroll(group):
                means[e] = means[e] / N
            for back in T.serial(tiles):
                tile = tiles - 1 - back
                for e in T.unroll(group):
                    if back > 0:
                        row = plan.clamped(first + e * block_m, count)
                        load(values, e * held, x, row, lane, tile, T.cast(0, dtype))
                    square(values, e * held, means[e], squares, e, lane, tile)
            sums(squares, second, slot, lane)
            for tile in T.serial(tiles):
                if not early:
                    vector(weight, w, lane, tile)
                    if bias:
                        vector(shift, b, lane, tile)
                for e in T.unroll(group):
                    row = plan.clamped(first + e * block_m, count)
                    if tile > 0:
                        load(values, e * held, x, row, lane, tile, T.cast(0, dtype))
                    scale(values, e * held, weight, shift, means[e], T.rsqrt(squares[e] / N + eps))
                    store(
                        y,
                        values,
                        e * held,
                        row,
                        lane,
                        tile,
                        plan.within(first + e * block_m, count),
                    )

        if bias:

            @T.prim_func
            def layer_norm(
                x: T.Tensor((count, N), dtype),
                w: T.Tensor((N,), dtype),
                b: T.Tensor((N,), dtype),
                y: T.Tensor((count, N), dtype),
            ):
                with T.Kernel(T.ceildiv(count, plan.rows), threads=threads) as block:
                    body(x, w, b, y, block)
        else:

            @T.prim_func
            def layer_norm(
                x: T.Tensor((count, N), dtype),
                w: T.Tensor((N,), dtype),
                y: T.Tensor((count, N), dtype),
            ):
                with T.Kernel(T.ceildiv(count, plan.rows), threads=threads) as block:
                    body(x, w, w, y, block)

        return layer_norm

    return layer_norm


def _cpu(M: int | str, N: int, eps: float, dtype: str, bias: bool) -> Any:
    """Target `c`: mean and variance by eight partial sums a row."""
    import tilelang
    import tilelang.language as T

    storage, lanes = cpu.storage(dtype), cpu.LANES

    def widen(value):
        return cpu.widen(value, dtype)

    @tilelang.jit(out_idx=[3] if bias else [2], target=cpu.TARGET, compile_flags=cpu.FLAGS)
    def layer_norm(block_m: int, threads: int, each: int, prefetch: bool):
        count = T.dynamic("rows") if M == "dynamic" else M

        @T.macro
        def body(x, w, b, y):
            partial = T.alloc_local((lanes,), "float32")
            mean = T.alloc_local((1,), "float32")
            scale = T.alloc_local((1,), "float32")
            for i in T.serial(count):
                for k in T.serial(lanes):
                    partial[k] = 0.0
                for j in T.serial(N // lanes):
                    for k in T.serial(lanes):
                        partial[k] += widen(x[i, j * lanes + k])
                for k in T.serial(N % lanes):
                    partial[k] += widen(x[i, N // lanes * lanes + k])
                mean[0] = 0.0
                for k in T.serial(lanes):
                    mean[0] += partial[k]
                mean[0] = mean[0] / N
                for k in T.serial(lanes):
                    partial[k] = 0.0
                for j in T.serial(N // lanes):
                    for k in T.serial(lanes):
                        partial[k] += (widen(x[i, j * lanes + k]) - mean[0]) * (
                            widen(x[i, j * lanes + k]) - mean[0]
                        )
                for k in T.serial(N % lanes):
                    partial[k] += (widen(x[i, N // lanes * lanes + k]) - mean[0]) * (
                        widen(x[i, N // lanes * lanes + k]) - mean[0]
                    )
                scale[0] = 0.0
                for k in T.serial(lanes):
                    scale[0] += partial[k]
                scale[0] = T.float32(1.0) / T.sqrt(scale[0] / N + eps)
                for j in T.serial(N):
                    if bias:
                        y[i, j] = cpu.narrow(
                            (widen(x[i, j]) - mean[0]) * scale[0] * widen(w[j]) + widen(b[j]),
                            dtype,
                        )
                    else:
                        y[i, j] = cpu.narrow(
                            (widen(x[i, j]) - mean[0]) * scale[0] * widen(w[j]), dtype
                        )

        if bias:

            @T.prim_func
            def layer_norm(
                x: T.Tensor((count, N), storage),
                w: T.Tensor((N,), storage),
                b: T.Tensor((N,), storage),
                y: T.Tensor((count, N), storage),
            ):
                with T.Kernel(1):
                    body(x, w, b, y)
        else:

            @T.prim_func
            def layer_norm(
                x: T.Tensor((count, N), storage),
                w: T.Tensor((N,), storage),
                y: T.Tensor((count, N), storage),
            ):
                with T.Kernel(1):
                    body(x, w, w, y)

        return layer_norm

    return layer_norm


# --- operator ---


def example(workload: LayerNormWorkload, count: int, device: str) -> tuple[Any, ...]:
    """Random x (count, N), w (N,) and, where there is one, b (N,)."""
    import torch

    dtype, N = getattr(torch, workload.dtype), workload.N
    shapes = ((count, N), (N,), (N,)) if workload.bias else ((count, N), (N,))
    return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)


OPERATOR = Operator(
    name="layer_norm",
    kernel="ops.kernels.layer_norm:layer_norm",
    workload=LayerNormWorkload,
    schedule=default_schedule,
    check_schedule=check_schedule,
    candidates=candidates,
    example=example,
)
