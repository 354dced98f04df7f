"""TileLang kernels for the CPU, in the forms that programs write them in. Nothing of tlcache is in
here.
"""

import dataclasses
import enum
import functools

import tilelang
import tilelang.language as T
import torch


@tilelang.jit(out_idx=[-1])
def add(N, dtype="float32"):
    """Lazy, with a negative output index."""

    @T.prim_func
    def main(A: T.Tensor((N,), dtype), B: T.Tensor((N,), dtype), C: T.Tensor((N,), dtype)):
        with T.Kernel(1):
            for i in T.serial(N):
                C[i] = A[i] + B[i]

    return main


class Mode(enum.Enum):
    PLAIN = 0
    TWICE = 2


@dataclasses.dataclass(frozen=True)
class Config:
    mode: Mode
    offset: float = 0.0


@functools.lru_cache(maxsize=4)
def scaled(N, config, dtype=torch.float32):
    """A factory under lru_cache, with two outputs; its argument is an object."""
    factor = float(config.mode.value or 1)
    name = str(dtype).removeprefix("torch.")

    @tilelang.jit(out_idx=[-2, -1])
    def kernel(unroll):
        @T.prim_func
        def main(A: T.Tensor((N,), name), B: T.Tensor((N,), name), C: T.Tensor((N,), name)):
            with T.Kernel(1):
                for i in T.serial(N):
                    B[i] = A[i] * factor
                    C[i] = A[i] + config.offset + unroll

        return main

    return kernel


@tilelang.jit
def negated(A, step: int = 1):
    """Eager: compiled and launched where it is called."""
    N = T.const("N")
    A: T.Tensor[[N], T.float32]
    B = T.empty((N,), T.float32)
    with T.Kernel(1):
        for i in T.serial(N):
            B[i] = -A[i] * step
    return B


@tilelang.jit(out_idx=[1])
def any_rows(width):
    """Lazy, for any number of rows."""
    rows = T.dynamic("rows")

    @T.prim_func
    def main(A: T.Tensor((rows, width), "float32"), B: T.Tensor((rows, width), "float32")):
        with T.Kernel(rows) as row:
            for i in T.serial(width):
                B[row, i] = A[row, i] + 1.0

    return main


@functools.cache
def compiled(N, *, factor):
    """`tilelang.compile` in a cached function."""

    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(1):
            for i in T.serial(N):
                B[i] = A[i] * factor

    return tilelang.compile(main, out_idx=[-1])
