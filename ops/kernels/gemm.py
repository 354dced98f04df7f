"""Matrix product with a weight: y = x @ w.T, accumulated in float32.

On sm_90a TileLang copies tiles by TMA and multiplies them by wgmma, a warp group that loads beside
those that multiply; on sm_80 and sm_89 by cp.async and mma.

In reading order: workload, schedule, factory (layer 2), bodies for CUDA and for the CPU, operator.
"""

# No `from __future__ import annotations` here: TileLang evaluates the annotations of a prim_func,
# and as text they would not see the variables around it.
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ops.jit_cache import jit_cache
from ops.kernels import cpu, fields
from tlcache.operators import Operator, WorkloadError
from tlcache.spec import Value
from tlcache.targets import Target

__all__ = [
    "OPERATOR",
    "GemmWorkload",
    "candidates",
    "check_schedule",
    "default_schedule",
    "example",
    "gemm",
]

MAX = 2**20
DTYPES = ("bfloat16", "float16")


# --- workload ---


@dataclass(frozen=True)
class GemmWorkload:
    """What is computed.

    Attributes:
        M: Rows of x, at least 1, or "dynamic" for one kernel that takes any number of them.
        N: Rows of w, and columns of y; on CUDA a multiple of 8.
        K: Columns of x and w; on CUDA a multiple of 8.
        dtype: Of x, w and y: bfloat16 or float16.
    """

    M: int | str
    N: int
    K: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        fields.rows(self)
        fields.size(self, "N", MAX, ("w has", "rows"))
        fields.size(self, "K", MAX, ("a row has", "elements"))
        fields.dtype(self, DTYPES)


# --- schedule ---

CPU_SCHEDULE: dict[str, Value] = {
    "block_m": 1,
    "block_n": 1,
    "block_k": 1,
    "stages": 1,
    "threads": 1,
    "panel": 0,
}
SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_120a": 99}
"""KiB of shared memory a block may have, by target (CUDA C++ Programming Guide, compute
capabilities).
"""


# block_m, block_n, block_k, stages, threads, panel; from many rows to few.
HOPPER = (
    (128, 256, 64, 3, 256, 8),
    (128, 128, 128, 3, 256, 8),
    (64, 128, 64, 4, 128, 0),
    (64, 64, 128, 4, 128, 0),
)
OTHERS = ((128, 128, 32, 3, 128, 8), (64, 128, 32, 3, 128, 0), (64, 64, 32, 3, 128, 0))
SMS = 128


def default_schedule(workload: GemmWorkload, target: Target) -> dict[str, Value]:
    """The schedule for a workload: the largest tile of a ladder that leaves every SM one; for a
    symbolic M, 128 x 128.

    On an H200, 128 x 256 x 64 in three stages with two multiplying warp groups is the best of 70
    schedules at 4096³ and at 8192³ (0.96 and 1.01 of `torch.matmul`), and 128 x 128 x 128 the best
    of its size. The ladder for other targets was not measured.
    """
    if not target.is_cuda:
        return dict(CPU_SCHEDULE)
    _aligned(workload)
    ladder = HOPPER if target.name == "sm_90a" else OTHERS
    shape = ladder[1 if target.name == "sm_90a" else 0]
    if workload.M != "dynamic":
        for shape in ladder:
            if -(-int(workload.M) // shape[0]) * -(-workload.N // shape[1]) >= SMS:
                break
    return dict(zip(CPU_SCHEDULE, shape, strict=True))


def candidates(workload: GemmWorkload, target: Target) -> Iterator[dict[str, Value]]:
    """The schedule space: tiles of 64 to 256, two to four stages, one or two warp groups, with and
    without the panel order that keeps tiles of w in L2.
    """
    if not target.is_cuda:
        return
    hopper = target.name == "sm_90a"
    for block_m, block_n in ((64, 64), (64, 128), (128, 128), (128, 256), (256, 128)):
        for block_k in (64, 128) if hopper else (32, 64):
            for stages in (2, 3, 4):
                for threads in (128, 256):
                    for panel in (0, 8):
                        shape = (block_m, block_n, block_k, stages, threads, panel)
                        schedule = dict(zip(CPU_SCHEDULE, shape, strict=True))
                        if block_m * block_n // threads > 128 or (
                            block_m * block_n <= 64 * 64 and threads == 256
                        ):
                            continue
                        try:
                            check_schedule(workload, schedule, target)
                        except WorkloadError:
                            continue
                        yield schedule


def check_schedule(workload: GemmWorkload, schedule: Mapping[str, Value], target: Target) -> None:
    """Raise WorkloadError for a schedule that cannot work."""
    fields.schedule_fields(schedule, tuple(CPU_SCHEDULE))
    if not target.is_cuda:
        fields.only(schedule, CPU_SCHEDULE)
        return
    _aligned(workload)
    fields.choice(schedule, "block_m", (64, 128, 256))
    fields.choice(schedule, "block_n", (64, 128, 256))
    fields.choice(schedule, "block_k", (32, 64, 128))
    fields.choice(schedule, "stages", (1, 2, 3, 4, 5))
    fields.choice(schedule, "threads", (128, 256, 384))
    fields.choice(schedule, "panel", (0, 4, 8, 16))
    m, n, k, stages = (int(schedule[name]) for name in ("block_m", "block_n", "block_k", "stages"))  # type: ignore[arg-type]
    kib = ((m + n) * k * stages + m * n) * 2 / 1024
    most = SHARED.get(target.name, 99)
    if kib > most:
        raise WorkloadError(
            "schedule",
            f"the schedule takes {kib:.0f} KiB of shared memory; {target} has {most}",
        )


def _aligned(workload: GemmWorkload) -> None:
    for name in ("N", "K"):
        if getattr(workload, name) % 8:
            raise WorkloadError(
                name,
                f"{name} is {getattr(workload, name)}; on CUDA it is a multiple of 8, "
                "the 16 bytes of a load",
            )


# --- factory (layer 2) ---


@jit_cache
def gemm(M: int | str, N: int, K: int, dtype: str, target: str) -> Any:
    """The JITImpl for a workload; called with a schedule it gives the compiled kernel.

    Args:
        M: Rows of x, or "dynamic".
        N: Rows of w.
        K: Columns of both.
        dtype: Of x (M, K), w (N, K) and y (M, N). On the CPU bfloat16 travels as uint16.
        target: Canonical target name, like `sm_90a` or `cpu`, or a target dict in JSON.
    """
    if target == "cpu":
        return _cpu(M, N, K, dtype)
    return _cuda(M, N, K, dtype, Target(target).config)


def _cuda(M: int | str, N: int, K: int, dtype: str, config: Mapping[str, object]) -> Any:
    """A tile of y a block, its products pipelined over K; y leaves through shared memory."""
    import tilelang
    import tilelang.language as T

    @tilelang.jit(out_idx=[2], target=dict(config))
    def gemm(block_m: int, block_n: int, block_k: int, stages: int, threads: int, panel: int):
        count = T.dynamic("rows") if M == "dynamic" else M

        @T.prim_func
        def gemm(
            x: T.Tensor((count, K), dtype),
            w: T.Tensor((N, K), dtype),
            y: T.Tensor((count, N), dtype),
        ):
            with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(count, block_m), threads=threads) as (
                column,
                row,
            ):
                left = T.alloc_shared((block_m, block_k), dtype)
                right = T.alloc_shared((block_n, block_k), dtype)
                out = T.alloc_shared((block_m, block_n), dtype)
                sums = T.alloc_fragment((block_m, block_n), "float32")
                if panel:
                    T.use_swizzle(panel_size=panel)
                T.clear(sums)
                for k in T.Pipelined(T.ceildiv(K, block_k), num_stages=stages):
                    T.copy(x[row * block_m, k * block_k], left)
                    T.copy(w[column * block_n, k * block_k], right)
                    T.gemm(left, right, sums, transpose_B=True)
                T.copy(sums, out)
                T.copy(out, y[row * block_m, column * block_n])

        return gemm

    return gemm


def _cpu(M: int | str, N: int, K: int, dtype: str) -> Any:
    """Target `c`: eight partial sums an element of y. A reference to test against, not a BLAS."""
    import tilelang
    import tilelang.language as T

    storage, lanes = cpu.storage(dtype), cpu.LANES

    def widen(value):
        return cpu.widen(value, dtype)

    @tilelang.jit(out_idx=[2], target=cpu.TARGET, compile_flags=cpu.FLAGS)
    def gemm(block_m: int, block_n: int, block_k: int, stages: int, threads: int, panel: int):
        count = T.dynamic("rows") if M == "dynamic" else M

        @T.prim_func
        def gemm(
            x: T.Tensor((count, K), storage),
            w: T.Tensor((N, K), storage),
            y: T.Tensor((count, N), storage),
        ):
            with T.Kernel(1):
                partial = T.alloc_local((lanes,), "float32")
                total = T.alloc_local((1,), "float32")
                for i in T.serial(count):
                    for j in T.serial(N):
                        for k in T.serial(lanes):
                            partial[k] = 0.0
                        for at in T.serial(K // lanes):
                            for k in T.serial(lanes):
                                partial[k] += widen(x[i, at * lanes + k]) * widen(
                                    w[j, at * lanes + k]
                                )
                        for k in T.serial(K % lanes):
                            partial[k] += widen(x[i, K // lanes * lanes + k]) * widen(
                                w[j, K // lanes * lanes + k]
                            )
                        total[0] = 0.0
                        for k in T.serial(lanes):
                            total[0] += partial[k]
                        y[i, j] = cpu.narrow(total[0], dtype)

        return gemm

    return gemm


# --- operator ---


def example(workload: GemmWorkload, count: int, device: str) -> tuple[Any, ...]:
    """Random x (count, K) and w (N, K)."""
    import torch

    dtype = getattr(torch, workload.dtype)
    return (
        torch.randn(count, workload.K, device=device).to(dtype),
        torch.randn(workload.N, workload.K, device=device).to(dtype),
    )


OPERATOR = Operator(
    name="gemm",
    kernel="ops.kernels.gemm:gemm",
    workload=GemmWorkload,
    schedule=default_schedule,
    check_schedule=check_schedule,
    candidates=candidates,
    example=example,
)
