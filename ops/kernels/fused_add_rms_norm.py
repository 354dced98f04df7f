"""Residual addition and RMSNorm in one pass: total = x + residual; y = rms_norm(total) · w.

The sum is rounded to the dtype before it is normalized, as `x + residual` in torch is, so the
kernel's y is `rms_norm` of its total. In place, x becomes y and residual becomes total.

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
    "FusedAddRMSNormWorkload",
    "candidates",
    "check_schedule",
    "default_schedule",
    "example",
    "fused_add_rms_norm",
]

MAX_N = 65536


# --- workload ---


@dataclass(frozen=True)
class FusedAddRMSNormWorkload:
    """What is computed.

    Attributes:
        M: Rows, at least 1, or "dynamic" for one kernel that takes any number of them.
        N: Elements a row, from 1 to 65536.
        eps: Added to the mean of squares; positive or zero.
        dtype: Of all tensors: bfloat16, float16 or float32.
        inplace: Write y over x and the total over the residual.
    """

    M: int | str
    N: int
    eps: float = 1e-6
    dtype: str = "bfloat16"
    inplace: bool = False

    def __post_init__(self) -> None:
        fields.rows(self)
        fields.size(self, "N", MAX_N, ("a row has", "elements"))
        fields.not_negative(self, "eps")
        fields.dtype(self)
        fields.flag(self, "inplace")


# --- schedule ---


def default_schedule(workload: FusedAddRMSNormWorkload, target: Target) -> dict[str, Value]:
    """The schedule for a workload, from N and, for short rows, M.

    On CUDA, measured on an H200 in bfloat16 at N = 1024 to 16384 and M = 1 to 32768: from N = 4096
    on 512 threads a row with the weight loaded early are the best or within 1 % of it, whatever M
    is. Rows of up to 1024 share a block of 128 or 256 threads. On the CPU
    there is one schedule.
    """
    if not target.is_cuda:
        return dict(rows.CPU_SCHEDULE)
    return rows.default_schedule(workload.M, workload.N, workload.dtype, inputs=2)


def candidates(workload: FusedAddRMSNormWorkload, target: Target) -> Iterator[dict[str, Value]]:
    """The schedule space; see `ops.kernels.rows.schedules`."""
    if not target.is_cuda:
        return iter(())
    return rows.schedules(workload.N, workload.dtype, inputs=2)


def check_schedule(
    workload: FusedAddRMSNormWorkload, schedule: Mapping[str, Value], target: Target
) -> None:
    """Raise WorkloadError for a schedule that cannot work."""
    rows.check_schedule(schedule, target)


# --- factory (layer 2) ---


@jit_cache
def fused_add_rms_norm(
    M: int | str, N: int, eps: float, dtype: str, inplace: bool, target: str
) -> Any:
    """The JITImpl for a workload; called with a schedule it gives the compiled kernel.

    Args:
        M: Rows, or "dynamic".
        N: Elements a row.
        eps: Added to the mean of squares.
        dtype: Of x, residual, y, total (M, N) and w (N,). On the CPU bfloat16 travels as uint16.
        inplace: Whether y is x, and total is residual.
        target: Canonical target name, like `sm_90a` or `cpu`, or a target dict in JSON.
    """
    if target == "cpu":
        return _cpu(M, N, eps, dtype, inplace)
    return _cuda(M, N, eps, dtype, inplace, Target(target).config)


def _cuda(
    M: int | str, N: int, eps: float, dtype: str, inplace: bool, config: Mapping[str, object]
) -> Any:
    """The total of a row is held in registers between the sum and the product; of a row of several
    tiles it is read again (from L2).
    """
    import tilelang
    import tilelang.language as T

    @tilelang.jit(out_idx=None if inplace else [3, 4], target=dict(config))
    def fused_add_rms_norm(block_m: int, threads: int, each: int, prefetch: bool):
        count = T.dynamic("rows") if M == "dynamic" else M
        plan = rows.plan(N, dtype, block_m, threads, each)
        load, vector, store, sums, _ = rows.macros(plan)
        lanes, held, tiles, group = plan.lanes, plan.held, plan.tiles, plan.each
        early = prefetch and tiles == 1

        @T.macro
        def add(values, extra, base, squares, e):
            for i in T.unroll(held):
                values[base + i] = T.cast(
                    T.cast(values[base + i], "float32") + T.cast(extra[base + i], "float32"), dtype
                )
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

        @T.macro
        def body(x, residual, w, y, total, block):
            thread = T.get_thread_binding()
            lane, slot = thread % lanes, thread // lanes
            first = block * plan.rows + slot
            values = T.alloc_local((group * held,), dtype)
            extra = T.alloc_local((group * held,), dtype)
            weight = T.alloc_local((held,), dtype)
            squares = T.alloc_local((group,), "float32")
            partial = T.alloc_shared((group, block_m, plan.warps), "float32")
            for e in T.unroll(group):
                squares[e] = 0.0
            for tile in T.serial(tiles):
                for e in T.unroll(group):
                    row = plan.clamped(first + e * block_m, count)
                    load(values, e * held, x, row, lane, tile, T.cast(0, dtype))
                    load(extra, e * held, residual, row, lane, tile, T.cast(0, dtype))
                if early:
                    vector(weight, w, lane, 0)
                for e in T.unroll(group):
                    add(values, extra, e * held, squares, e)
                    row = plan.clamped(first + e * block_m, count)
                    store(
                        total,
                        values,
                        e * held,
                        row,
                        lane,
                        tile,
                        plan.within(first + e * block_m, count),
                    )
            sums(squares, partial, slot, lane)
            for back in T.serial(tiles):
                tile = tiles - 1 - back
                if not early:
                    vector(weight, w, lane, tile)
                for e in T.unroll(group):
                    row = plan.clamped(first + e * block_m, count)
                    if back > 0:
                        load(values, e * held, total, row, lane, tile, T.cast(0, dtype))
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

        if inplace:

            @T.prim_func
            def fused_add_rms_norm(
                x: T.Tensor((count, N), dtype),
                residual: T.Tensor((count, N), dtype),
                w: T.Tensor((N,), dtype),
            ):
                with T.Kernel(T.ceildiv(count, plan.rows), threads=threads) as block:
                    body(x, residual, w, x, residual, block)
        else:

            @T.prim_func
            def fused_add_rms_norm(
                x: T.Tensor((count, N), dtype),
                residual: T.Tensor((count, N), dtype),
                w: T.Tensor((N,), dtype),
                y: T.Tensor((count, N), dtype),
                total: T.Tensor((count, N), dtype),
            ):
                with T.Kernel(T.ceildiv(count, plan.rows), threads=threads) as block:
                    body(x, residual, w, y, total, block)

        return fused_add_rms_norm

    return fused_add_rms_norm


def _cpu(M: int | str, N: int, eps: float, dtype: str, inplace: bool) -> Any:
    """Target `c`: the total first, then its norm by eight partial sums a row."""
    import tilelang
    import tilelang.language as T

    storage, lanes = cpu.storage(dtype), cpu.LANES

    def widen(value):
        return cpu.widen(value, dtype)

    def narrow(value):
        return cpu.narrow(value, dtype)

    @tilelang.jit(out_idx=None if inplace else [3, 4], target=cpu.TARGET, compile_flags=cpu.FLAGS)
    def fused_add_rms_norm(block_m: int, threads: int, each: int, prefetch: bool):
        count = T.dynamic("rows") if M == "dynamic" else M

        @T.macro
        def body(x, residual, w, y, total):
            partial = T.alloc_local((lanes,), "float32")
            scale = T.alloc_local((1,), "float32")
            for i in T.serial(count):
                for k in T.serial(lanes):
                    partial[k] = 0.0
                for j in T.serial(N):
                    total[i, j] = narrow(widen(x[i, j]) + widen(residual[i, j]))
                for j in T.serial(N // lanes):
                    for k in T.serial(lanes):
                        partial[k] += widen(total[i, j * lanes + k]) * widen(
                            total[i, j * lanes + k]
                        )
                for k in T.serial(N % lanes):
                    partial[k] += widen(total[i, N // lanes * lanes + k]) * widen(
                        total[i, N // lanes * lanes + k]
                    )
                scale[0] = 0.0
                for k in T.serial(lanes):
                    scale[0] += partial[k]
                scale[0] = T.float32(1.0) / T.sqrt(scale[0] / N + eps)
                for j in T.serial(N):
                    y[i, j] = narrow(widen(total[i, j]) * scale[0] * widen(w[j]))

        if inplace:

            @T.prim_func
            def fused_add_rms_norm(
                x: T.Tensor((count, N), storage),
                residual: T.Tensor((count, N), storage),
                w: T.Tensor((N,), storage),
            ):
                with T.Kernel(1):
                    body(x, residual, w, x, residual)
        else:

            @T.prim_func
            def fused_add_rms_norm(
                x: T.Tensor((count, N), storage),
                residual: T.Tensor((count, N), storage),
                w: T.Tensor((N,), storage),
                y: T.Tensor((count, N), storage),
                total: T.Tensor((count, N), storage),
            ):
                with T.Kernel(1):
                    body(x, residual, w, y, total)

        return fused_add_rms_norm

    return fused_add_rms_norm


# --- operator ---


def example(workload: FusedAddRMSNormWorkload, count: int, device: str) -> tuple[Any, ...]:
    """Random x and residual (count, N) and w (N,)."""
    import torch

    dtype, N = getattr(torch, workload.dtype), workload.N
    shapes = ((count, N), (count, N), (N,))
    return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)


OPERATOR = Operator(
    name="fused_add_rms_norm",
    kernel="ops.kernels.fused_add_rms_norm:fused_add_rms_norm",
    workload=FusedAddRMSNormWorkload,
    schedule=default_schedule,
    check_schedule=check_schedule,
    candidates=candidates,
    example=example,
)
