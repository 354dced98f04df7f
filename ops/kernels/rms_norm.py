"""RMSNorm: y = x / sqrt(mean(x², last axis) + eps) · w, accumulated in float32.

Source of the formula: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. Like
`torch.nn.functional.rms_norm`, the product with w is taken in float32 and rounded once.

In reading order: workload, schedule, factory (layer 2), bodies for CUDA and for the CPU, bound
kernel.
"""

# No `from __future__ import annotations` here: TileLang evaluates the annotations of a prim_func,
# and as text they would not see the variables around it.
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tlcache.operators import Operator, WorkloadError
from tlcache.spec import KernelSpec, Value
from tlcache.targets import Target

if TYPE_CHECKING:
    import torch

__all__ = ["OPERATOR", "RMSNormKernel", "RMSNormWorkload", "default_schedule", "rms_norm"]

MAX_N = 65536
DTYPES = ("bfloat16", "float16", "float32")
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


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
        if self.M != "dynamic" and not (_is_int(self.M) and 1 <= int(self.M) < 2**31):
            raise WorkloadError("M", f"M is {self.M!r}; rows are a positive integer, or 'dynamic'")
        if not (_is_int(self.N) and 1 <= self.N <= MAX_N):
            raise WorkloadError("N", f"N is {self.N!r}; a row has from 1 to {MAX_N} elements")
        if (
            isinstance(self.eps, bool)
            or not isinstance(self.eps, (int, float))
            or not 0 <= self.eps < 1e30
        ):
            raise WorkloadError(
                "eps", f"eps is {self.eps!r}; it is a finite number that is not negative"
            )
        object.__setattr__(self, "eps", float(self.eps))
        dtype = _ALIASES.get(str(self.dtype), self.dtype)
        if dtype not in DTYPES:
            raise WorkloadError(
                "dtype", f"dtype is {self.dtype!r}; it is one of {', '.join(DTYPES)}"
            )
        object.__setattr__(self, "dtype", dtype)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- schedule ---


def default_schedule(workload: RMSNormWorkload, target: Target) -> dict[str, Value]:
    """The schedule for a workload, from N alone, so that exact and dynamic rows run the same code.

    On CUDA: a row to a block of 128 threads up to N = 1024 and of 256 above; short rows share a
    block until it has 512 elements. Measured on an H200: (1, 256) is the best or within 4 % of it
    at N = 4096, 8192 and 16384, and (1, 512) is 12 % slower at N = 4096. On the CPU there is one
    schedule.
    """
    if not target.is_cuda:
        return {"block_m": 1, "threads": 1}
    width = _padded(workload.N)
    return {"block_m": max(1, 512 // width), "threads": 128 if width <= 1024 else 256}


def _check_schedule(
    workload: RMSNormWorkload, schedule: Mapping[str, Value], target: Target
) -> None:
    """Raise WorkloadError for a schedule that cannot work."""
    if set(schedule) != {"block_m", "threads"}:
        raise WorkloadError(
            "schedule",
            f"the schedule has {', '.join(sorted(schedule))}; it takes block_m and threads",
        )
    block_m, threads = schedule["block_m"], schedule["threads"]
    if not target.is_cuda:
        if not (_is_int(block_m) and _is_int(threads) and (block_m, threads) == (1, 1)):
            raise WorkloadError(
                "schedule",
                f"block_m={block_m} threads={threads}; the CPU kernel takes 1 and 1 only",
            )
        return
    if not (isinstance(block_m, int) and _is_int(block_m) and 1 <= block_m <= 512):
        raise WorkloadError("schedule.block_m", f"block_m is {block_m!r}; it is from 1 to 512")
    if not _is_int(threads) or threads not in (32, 64, 128, 256, 512, 1024):
        raise WorkloadError(
            "schedule.threads", f"threads is {threads!r}; a power of two, 32 to 1024"
        )


def _padded(n: int) -> int:
    """The row's width in registers: the next power of two. The guard is in the kernel, not a
    copy.
    """
    return 1 << (n - 1).bit_length()


# --- factory (layer 2) ---

TILE = 8192  # 32 elements a thread of 256: 56 registers; 128 elements a thread take all 255
ONE_PASS = 16384


@functools.lru_cache(maxsize=128)
def rms_norm(M: int | str, N: int, eps: float, dtype: str, target: str) -> Any:
    """The JITImpl for a workload; called with `(block_m, threads)` it gives the compiled kernel.

    Args:
        M: Rows, or "dynamic".
        N: Elements a row.
        eps: Added to the mean of squares.
        dtype: Of x (M, N), w (N,) and y (M, N). On the CPU bfloat16 travels as uint16.
        target: Canonical target name, like `sm_90a` or `cpu`, or a target dict in JSON.
    """
    if target == "cpu":
        return _cpu(M, N, eps, dtype)
    config = json.loads(target) if target.startswith("{") else {"kind": "cuda", "arch": target}
    body = _one_pass if _padded(N) <= ONE_PASS else _tiled
    return body(M, N, eps, dtype, config)


def _one_pass(M: int | str, N: int, eps: float, dtype: str, target: Mapping[str, object]) -> Any:
    """A block of rows is held in registers between the sum and the product: x is read once."""
    import tilelang
    import tilelang.language as T

    @tilelang.jit(out_idx=[2], target=dict(target))
    def rms_norm(block_m: int, threads: int):
        rows = T.dynamic("rows") if M == "dynamic" else M
        width = _padded(N)

        @T.prim_func
        def rms_norm(
            x: T.Tensor((rows, N), dtype), w: T.Tensor((N,), dtype), y: T.Tensor((rows, N), dtype)
        ):
            with T.Kernel(T.ceildiv(rows, block_m), threads=threads) as block:
                held = T.alloc_fragment((block_m, width), dtype)
                squares = T.alloc_fragment((block_m, width), "float32")
                scale = T.alloc_fragment((block_m,), "float32")
                for i, j in T.Parallel(block_m, width):
                    held[i, j] = T.if_then_else(
                        (block * block_m + i < rows) and (j < N),
                        x[block * block_m + i, j],
                        T.cast(0, dtype),
                    )
                for i, j in T.Parallel(block_m, width):
                    squares[i, j] = T.cast(held[i, j], "float32") * T.cast(held[i, j], "float32")
                T.reduce_sum(squares, scale, dim=1)
                for i in T.Parallel(block_m):
                    scale[i] = T.rsqrt(scale[i] / N + eps)
                for i, j in T.Parallel(block_m, width):
                    if (block * block_m + i < rows) and (j < N):
                        y[block * block_m + i, j] = T.cast(
                            T.cast(held[i, j], "float32") * scale[i] * T.cast(w[j], "float32"),
                            dtype,
                        )

        return rms_norm

    return rms_norm


def _tiled(M: int | str, N: int, eps: float, dtype: str, target: Mapping[str, object]) -> Any:
    """Rows too long for registers: summed tile by tile, then read again (from L2) for the
    product.
    """
    import tilelang
    import tilelang.language as T

    @tilelang.jit(out_idx=[2], target=dict(target))
    def rms_norm(block_m: int, threads: int):
        rows = T.dynamic("rows") if M == "dynamic" else M
        tiles = (N + TILE - 1) // TILE

        @T.prim_func
        def rms_norm(
            x: T.Tensor((rows, N), dtype), w: T.Tensor((N,), dtype), y: T.Tensor((rows, N), dtype)
        ):
            with T.Kernel(T.ceildiv(rows, block_m), threads=threads) as block:
                held = T.alloc_fragment((block_m, TILE), dtype)
                squares = T.alloc_fragment((block_m, TILE), "float32")
                scale = T.alloc_fragment((block_m,), "float32")
                T.clear(squares)
                for tile in T.serial(tiles):
                    for i, j in T.Parallel(block_m, TILE):
                        held[i, j] = T.if_then_else(
                            (block * block_m + i < rows) and (tile * TILE + j < N),
                            x[block * block_m + i, tile * TILE + j],
                            T.cast(0, dtype),
                        )
                    for i, j in T.Parallel(block_m, TILE):
                        squares[i, j] += T.cast(held[i, j], "float32") * T.cast(
                            held[i, j], "float32"
                        )
                T.reduce_sum(squares, scale, dim=1)
                for i in T.Parallel(block_m):
                    scale[i] = T.rsqrt(scale[i] / N + eps)
                for tile in T.serial(tiles):
                    for i, j in T.Parallel(block_m, TILE):
                        if (block * block_m + i < rows) and (tile * TILE + j < N):
                            y[block * block_m + i, tile * TILE + j] = T.cast(
                                T.cast(x[block * block_m + i, tile * TILE + j], "float32")
                                * scale[i]
                                * T.cast(w[tile * TILE + j], "float32"),
                                dtype,
                            )

        return rms_norm

    return rms_norm


def _cpu(M: int | str, N: int, eps: float, dtype: str) -> Any:
    """Target `c`: eight partial sums a row, which the C compiler turns into vector code.

    TileLang's `c` target has no bfloat16, so its bits travel as uint16 and are widened and rounded
    (to nearest even, NaN kept quiet) by shifts.
    """
    import tilelang
    import tilelang.language as T

    storage = "uint16" if dtype == "bfloat16" else dtype
    lanes = 8

    def widen(value):
        if dtype == "bfloat16":
            return T.reinterpret(T.shift_left(T.cast(value, "uint32"), T.uint32(16)), "float32")
        return T.cast(value, "float32")

    def narrow(value):
        if dtype != "bfloat16":
            return T.cast(value, dtype)
        bits = T.reinterpret(value, "uint32")
        high = T.shift_right(bits, T.uint32(16))
        even = T.shift_right(
            bits + T.uint32(0x7FFF) + T.bitwise_and(high, T.uint32(1)), T.uint32(16)
        )
        return T.cast(
            T.if_then_else(value != value, T.bitwise_or(high, T.uint32(0x40)), even), "uint16"
        )

    @tilelang.jit(out_idx=[2], target={"kind": "c"}, compile_flags=["-O3"])
    def rms_norm(block_m: int, threads: int):
        rows = T.dynamic("rows") if M == "dynamic" else M

        @T.prim_func
        def rms_norm(
            x: T.Tensor((rows, N), storage),
            w: T.Tensor((N,), storage),
            y: T.Tensor((rows, N), storage),
        ):
            with T.Kernel(1):
                partial = T.alloc_local((lanes,), "float32")
                scale = T.alloc_local((1,), "float32")
                for i in T.serial(rows):
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
                        y[i, j] = narrow(widen(x[i, j]) * scale[0] * widen(w[j]))

        return rms_norm

    return rms_norm


# --- bound kernel (layer 3's value) ---


class RMSNormKernel(NamedTuple):
    """A kernel that is ready to launch.

    Attributes:
        workload: What it computes.
        schedule: The schedule that was chosen for it.
        launch: Takes x (M, N) and w (N,), both contiguous, and returns y (M, N).
    """

    workload: RMSNormWorkload
    schedule: Mapping[str, Value]
    launch: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"

    @classmethod
    def bind(cls, spec: KernelSpec, launcher: Callable[..., Any]) -> "RMSNormKernel":
        """Bind a launcher; on the CPU, bfloat16 tensors are passed as views of their bits."""
        workload = RMSNormWorkload(**spec.workload)
        launch = launcher
        if not spec.target.is_cuda and workload.dtype == "bfloat16":
            import torch

            bits, real = torch.uint16, torch.bfloat16

            def launch(x: "torch.Tensor", w: "torch.Tensor") -> "torch.Tensor":
                return launcher(x.view(bits), w.view(bits)).view(real)

        return cls(workload, spec.schedule, launch)


OPERATOR = Operator(
    name="rms_norm",
    kernel="ops.kernels.rms_norm:rms_norm",
    workload=RMSNormWorkload,
    schedule=default_schedule,
    check_schedule=_check_schedule,
)
