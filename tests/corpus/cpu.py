"""Kernels for the CPU target: they run anywhere."""

import functools
import math

import tilelang
import tilelang.language as T
import torch

from tests.corpus import constants
from tests.corpus.constants import LOG2E, Activation, activated, scaled_sum

CHUNK = 4


@tilelang.jit(out_idx=[-1], target="c")
def add(n):
    @T.prim_func
    def main(
        A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32"), C: T.Tensor((n,), "float32")
    ):
        with T.Kernel(1) as _:
            for i in T.serial(n):
                C[i] = A[i] + B[i]

    return main


@tilelang.jit(target="c")
def axpy_in_place(n, alpha=2.5):
    """No output index: the caller allocates."""

    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(n):
                Y[i] = Y[i] + X[i] * alpha

    return main


@tilelang.jit(out_idx=[1], target="c")
def activation(n, kind=Activation.RELU):
    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(n):
                Y[i] = activated(X[i], kind)

    return main


@tilelang.jit(out_idx=[1], target="c")
def exp2_of_constant(n):
    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(n):
                Y[i] = X[i] * LOG2E + constants.LOG2E

    return main


@tilelang.jit(out_idx=[1], target="c")
def row_sum(m, n):
    @T.prim_func
    def main(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m,), "float32")):
        with T.Kernel(m) as row:
            total = T.alloc_local((1,), "float32")
            total[0] = 0.0
            for j in T.serial(n):
                total[0] = total[0] + X[row, j]
            Y[row] = total[0]

    return main


@tilelang.jit(out_idx=[1], target="c")
def row_max(m, n):
    @T.prim_func
    def main(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m,), "float32")):
        with T.Kernel(m) as row:
            most = T.alloc_local((1,), "float32")
            most[0] = X[row, 0]
            for j in T.serial(n):
                most[0] = T.max(most[0], X[row, j])
            Y[row] = most[0]

    return main


@tilelang.jit(out_idx=[1], target="c")
def softmax(m, n):
    @T.prim_func
    def main(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m, n), "float32")):
        with T.Kernel(m) as row:
            most = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            most[0] = X[row, 0]
            total[0] = 0.0
            for j in T.serial(n):
                most[0] = T.max(most[0], X[row, j])
            for j in T.serial(n):
                Y[row, j] = T.exp(X[row, j] - most[0])
                total[0] = total[0] + Y[row, j]
            for j in T.serial(n):
                Y[row, j] = Y[row, j] / total[0]

    return main


@tilelang.jit(out_idx=[2], target="c", compile_flags=["-O2"])
def rms_norm(m, n, eps=1e-6):
    @T.prim_func
    def main(
        X: T.Tensor((m, n), "float32"), W: T.Tensor((n,), "float32"), Y: T.Tensor((m, n), "float32")
    ):
        with T.Kernel(m) as row:
            total = T.alloc_local((1,), "float32")
            total[0] = 0.0
            for j in T.serial(n):
                total[0] = total[0] + X[row, j] * X[row, j]
            for j in T.serial(n):
                Y[row, j] = X[row, j] * T.rsqrt(total[0] / n + eps) * W[j]

    return main


@tilelang.jit(out_idx=[2, 3], target="c")
def two_outputs(n):
    @T.prim_func
    def main(
        A: T.Tensor((n,), "float32"),
        B: T.Tensor((n,), "float32"),
        C: T.Tensor((n,), "float32"),
        D: T.Tensor((n,), "float32"),
    ):
        with T.Kernel(1) as _:
            for i in T.serial(n):
                C[i] = A[i] + B[i]
                D[i] = A[i] - B[i]

    return main


@tilelang.jit(out_idx=-1, target="c")
def transpose(m, n):
    @T.prim_func
    def main(X: T.Tensor((m, n), "float32"), Y: T.Tensor((n, m), "float32")):
        with T.Kernel(m) as row:
            for j in T.serial(n):
                Y[j, row] = X[row, j]

    return main


@tilelang.jit(out_idx=[2], target="c")
def matmul(M, N, K):
    @T.prim_func
    def main(
        A: T.Tensor((M, K), "float32"),
        B: T.Tensor((K, N), "float32"),
        C: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(N, M) as (x, y):
            total = T.alloc_local((1,), "float32")
            total[0] = 0.0
            for k in T.serial(K):
                total[0] = total[0] + A[y, k] * B[k, x]
            C[y, x] = total[0]

    return main


@tilelang.jit(out_idx=[2], target="c")
def dequantized_matmul(M, N, K, group=32):
    @T.prim_func
    def main(
        A: T.Tensor((M, K), "float32"),
        B: T.Tensor((N, K), "int8"),
        C: T.Tensor((M, N), "float32"),
        S: T.Tensor((N, K // group), "float32"),
    ):
        with T.Kernel(N, M) as (x, y):
            total = T.alloc_local((1,), "float32")
            total[0] = 0.0
            for k in T.serial(K):
                total[0] = total[0] + A[y, k] * T.cast(B[x, k], "float32") * S[x, k // group]
            C[y, x] = total[0]

    return main


@tilelang.jit(out_idx=[1], target="c")
def any_rows(n):
    """A symbolic number of rows."""
    m = T.dynamic("m")

    @T.prim_func
    def main(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m, n), "float32")):
        with T.Kernel(m) as row:
            for j in T.serial(n):
                Y[row, j] = X[row, j] + 1.0

    return main


@tilelang.jit(out_idx=[2], target="c")
def two_dynamic():
    m, n = T.dynamic("m"), T.dynamic("n")

    @T.prim_func
    def main(
        X: T.Tensor((m, n), "float32"), W: T.Tensor((n,), "float32"), Y: T.Tensor((m, n), "float32")
    ):
        with T.Kernel(m) as row:
            for j in T.serial(n):
                Y[row, j] = X[row, j] * W[j]

    return main


@tilelang.jit(target="c")
def scalar_argument(n):
    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), factor: T.float32, Y: T.Tensor((n,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(n):
                Y[i] = X[i] * factor

    return main


@tilelang.jit(out_idx=[1], target="c")
def by_macro(n, scale=0.5):
    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((1,), "float32")):
        with T.Kernel(1) as _:
            total = T.alloc_local((1,), "float32")
            total[0] = 0.0
            scaled_sum(X, total, n, scale)
            Y[0] = total[0]

    return main


@tilelang.jit(out_idx=[1], target="c")
def by_inner_macro(n):
    offset = math.sqrt(n)

    @T.macro
    def shifted(X, Y, i):
        Y[i] = X[i] + offset

    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(n):
                shifted(X, Y, i)

    return main


@functools.lru_cache
def factory(n, scale):
    """A factory under lru_cache, with a jit closure."""

    @tilelang.jit(out_idx=[1], target="c")
    def scaled(unroll=False):
        @T.prim_func
        def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
            with T.Kernel(1) as _:
                for i in T.unroll(n) if unroll else T.serial(n):
                    Y[i] = X[i] * scale

        return main

    return scaled


class Operator:
    """An operator whose kernel reads its attributes."""

    def __init__(self, n, shift):
        self.n = n
        self.shift = shift
        self.buffers = torch.zeros(3)  # nothing that the kernel has to do with

    def kernel(self):
        @tilelang.jit(out_idx=[1], target="c")
        def shifted():
            @T.prim_func
            def main(X: T.Tensor((self.n,), "float32"), Y: T.Tensor((self.n,), "float32")):
                with T.Kernel(1) as _:
                    for i in T.serial(self.n):
                        Y[i] = X[i] + self.shift

            return main

        return shifted()


def _chunked(rows, width, step):
    @T.prim_func
    def main(X: T.Tensor((rows, width), "float32"), Y: T.Tensor((rows, width), "float32")):
        with T.Kernel(rows) as row:
            for i in T.serial(width // step):
                for j in T.vectorized(step):
                    Y[row, i * step + j] = X[row, i * step + j] * 3.0

    return main


@tilelang.jit(out_idx=[-1], target="c")
def prim_func_from_elsewhere(rows, width):
    return _chunked(rows, width, CHUNK)


@tilelang.jit(out_idx=[2], target="c")
def conditional(n, limit=0.0):
    @T.prim_func
    def main(
        A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32"), C: T.Tensor((n,), "float32")
    ):
        with T.Kernel(1) as _:
            for i in T.serial(n):
                if A[i] > limit:
                    C[i] = A[i]
                else:
                    C[i] = T.if_then_else(B[i] > limit, B[i], limit)

    return main


@tilelang.jit(target="c")
def eager_add(A, B):
    N = T.const("N")
    A: T.Tensor[[N], T.float32]
    B: T.Tensor[[N], T.float32]
    C = T.empty((N,), T.float32)
    with T.Kernel(1) as _:
        for i in T.serial(N):
            C[i] = A[i] + B[i]
    return C


@tilelang.jit(target="c")
def eager_scale(X, Y, scale: float = 2.0):
    M, N = T.const("M, N")
    X: T.Tensor[[M, N], T.float32]
    Y: T.Tensor[[M, N], T.float32]
    with T.Kernel(M) as row:
        for j in T.serial(N):
            Y[row, j] = X[row, j] * scale


@tilelang.jit(target="c")
def eager_outer(A, B, repeat: int = 1):
    M, N = T.const("M N")
    A: T.Tensor[[M], T.float32]
    B: T.Tensor[[N], T.float32]
    C = T.empty((M, N), T.float32)
    D = T.empty((M,), T.float32)
    with T.Kernel(M) as row:
        D[row] = A[row] * repeat
        for j in T.serial(N):
            C[row, j] = A[row] * B[j]
    return C, D


@tilelang.jit(target="c")
def eager_annotated(
    X: T.Tensor((32,), T.float32), Y: T.Tensor((32,), T.float32), factor: float = 2.0
):
    """With shapes in its signature."""
    with T.Kernel(1) as _:
        for i in T.serial(32):
            Y[i] = X[i] * factor
