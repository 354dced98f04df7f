"""The gated activation of Llama's feed-forward layer: y = silu(gate) · up, where x is gate and up
side by side; silu(v) = v / (1 + exp(-v)), in float32, rounded once.

Source of the formula: Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU).

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
    "SiluAndMulWorkload",
    "candidates",
    "check_schedule",
    "default_schedule",
    "example",
    "silu_and_mul",
    "vector",
]

MAX_N = 262144


# --- workload ---


@dataclass(frozen=True)
class SiluAndMulWorkload:
    """What is computed.

    Attributes:
        M: Rows, at least 1, or "dynamic" for one kernel that takes any number of them.
        N: Elements a row of y, from 1 to 262144; a row of x has twice as many.
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

CPU_SCHEDULE: dict[str, Value] = {"threads": 1, "vectors": 1}


def default_schedule(workload: SiluAndMulWorkload, target: Target) -> dict[str, Value]:
    """The schedule for a workload: 256 threads with one load of 16 bytes each of gate and up, which
    fills an SM's memory pipeline; fewer threads for shorter rows. On the CPU there is one schedule.
    """
    if not target.is_cuda:
        return dict(CPU_SCHEDULE)
    vec = vector(workload.N, workload.dtype)
    threads = 32
    while threads < 256 and threads * vec < workload.N:
        threads *= 2
    return {"threads": threads, "vectors": 1}


def candidates(workload: SiluAndMulWorkload, target: Target) -> Iterator[dict[str, Value]]:
    """The schedule space: 64 to 1024 threads with one to four loads each."""
    if not target.is_cuda:
        return
    vec = vector(workload.N, workload.dtype)
    for threads in (64, 128, 256, 512, 1024):
        for vectors in (1, 2, 4):
            if (threads == 64 and vectors == 1) or threads * vectors * vec < 2 * workload.N:
                yield {"threads": threads, "vectors": vectors}


def check_schedule(
    workload: SiluAndMulWorkload, schedule: Mapping[str, Value], target: Target
) -> None:
    """Raise WorkloadError for a schedule that cannot work."""
    fields.schedule_fields(schedule, tuple(CPU_SCHEDULE))
    if not target.is_cuda:
        fields.only(schedule, CPU_SCHEDULE)
        return
    fields.choice(schedule, "threads", (32, 64, 128, 256, 512, 1024))
    fields.choice(schedule, "vectors", (1, 2, 4, 8))


def vector(N: int, dtype: str) -> int:
    """Elements a load: as many as 16 bytes hold and N is a multiple of."""
    vec = 4 if dtype == "float32" else 8
    while N % vec:
        vec //= 2
    return vec


# --- factory (layer 2) ---


@jit_cache
def silu_and_mul(M: int | str, N: int, dtype: str, target: str) -> Any:
    """The JITImpl for a workload; called with a schedule it gives the compiled kernel.

    Args:
        M: Rows, or "dynamic".
        N: Elements a row of y.
        dtype: Of x (M, 2N) and y (M, N). On the CPU bfloat16 travels as uint16.
        target: Canonical target name, like `sm_90a` or `cpu`, or a target dict in JSON.
    """
    if target == "cpu":
        return _cpu(M, N, dtype)
    return _cuda(M, N, dtype, Target(target).config)


def _cuda(M: int | str, N: int, dtype: str, config: Mapping[str, object]) -> Any:
    """Blocks go over the rows, and over chunks of a row."""
    import tilelang
    import tilelang.language as T

    @tilelang.jit(out_idx=[1], target=dict(config))
    def silu_and_mul(threads: int, vectors: int):
        count = T.dynamic("rows") if M == "dynamic" else M
        vec = vector(N, dtype)
        chunks = -(-N // (threads * vectors * vec))

        @T.prim_func
        def silu_and_mul(x: T.Tensor((count, 2 * N), dtype), y: T.Tensor((count, N), dtype)):
            with T.Kernel(count * chunks, threads=threads) as block:
                thread = T.get_thread_binding()
                row, chunk = block // chunks, block % chunks
                gate = T.alloc_local((vectors * vec,), dtype)
                up = T.alloc_local((vectors * vec,), dtype)
                for v in T.unroll(vectors):
                    at = ((chunk * vectors + v) * threads + thread) * vec
                    if at < N:
                        for j in T.vectorized(vec):
                            gate[v * vec + j] = x[row, at + j]
                        for j in T.vectorized(vec):
                            up[v * vec + j] = x[row, N + at + j]
                for v in T.unroll(vectors):
                    at = ((chunk * vectors + v) * threads + thread) * vec
                    if at < N:
                        for j in T.unroll(vec):
                            wide = T.cast(gate[v * vec + j], "float32")
                            gate[v * vec + j] = T.cast(
                                wide
                                / (T.float32(1.0) + T.exp(-wide))
                                * T.cast(up[v * vec + j], "float32"),
                                dtype,
                            )
                        for j in T.vectorized(vec):
                            y[row, at + j] = gate[v * vec + j]

        return silu_and_mul

    return silu_and_mul


def _cpu(M: int | str, N: int, dtype: str) -> Any:
    """Target `c`: one element after another."""
    import tilelang
    import tilelang.language as T

    storage = cpu.storage(dtype)

    @tilelang.jit(out_idx=[1], target=cpu.TARGET, compile_flags=cpu.FLAGS)
    def silu_and_mul(threads: int, vectors: int):
        count = T.dynamic("rows") if M == "dynamic" else M

        @T.prim_func
        def silu_and_mul(x: T.Tensor((count, 2 * N), storage), y: T.Tensor((count, N), storage)):
            with T.Kernel(1):
                gate = T.alloc_local((1,), "float32")
                for i in T.serial(count):
                    for j in T.serial(N):
                        gate[0] = cpu.widen(x[i, j], dtype)
                        y[i, j] = cpu.narrow(
                            gate[0]
                            / (T.float32(1.0) + T.exp(-gate[0]))
                            * cpu.widen(x[i, N + j], dtype),
                            dtype,
                        )

        return silu_and_mul

    return silu_and_mul


# --- operator ---


def example(workload: SiluAndMulWorkload, count: int, device: str) -> tuple[Any, ...]:
    """Random x (count, 2N)."""
    import torch

    dtype = getattr(torch, workload.dtype)
    return (torch.randn(count, 2 * workload.N, device=device).to(dtype),)


OPERATOR = Operator(
    name="silu_and_mul",
    kernel="ops.kernels.silu_and_mul:silu_and_mul",
    workload=SiluAndMulWorkload,
    schedule=default_schedule,
    check_schedule=check_schedule,
    candidates=candidates,
    example=example,
)
