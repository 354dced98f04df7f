"""TileLang kernels for a GPU, in the forms that programs write them in. Nothing of tlcache is in
here.
"""

import functools

import tilelang
import tilelang.language as T
import torch


@tilelang.jit(out_idx=[-1])
def matmul(M, N, K, block_M=64, block_N=64, block_K=32, dtype=T.float16):
    """Lazy, at the module's top level, with a negative output index."""

    @T.prim_func
    def main(A: T.Tensor((M, K), dtype), B: T.Tensor((K, N), dtype), C: T.Tensor((M, N), dtype)):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            a = T.alloc_shared((block_M, block_K), dtype)
            b = T.alloc_shared((block_K, block_N), dtype)
            c = T.alloc_fragment((block_M, block_N), T.float32)
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[by * block_M, k * block_K], a)
                T.copy(B[k * block_K, bx * block_N], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * block_M, bx * block_N])

    return main


@functools.lru_cache(maxsize=8)
def attention(batch, heads, length, width, causal=False, dtype=torch.float16):
    """A factory under lru_cache, with a jit closure and two outputs: a forward flash attention."""
    name = str(dtype).removeprefix("torch.")
    shape = (batch, length, heads, width)
    scale = (1.0 / width) ** 0.5 * 1.44269504

    @tilelang.jit(out_idx=[3, 4], pass_configs={"tl.disable_warp_specialized": True})
    def forward(block_M, block_N, threads=128):
        @T.prim_func
        def main(
            Q: T.Tensor(shape, name),
            K: T.Tensor(shape, name),
            V: T.Tensor(shape, name),
            O: T.Tensor(shape, name),  # noqa: E741
            L: T.Tensor((batch, heads, length), "float32"),
        ):
            with T.Kernel(T.ceildiv(length, block_M), heads, batch, threads=threads) as (x, y, z):
                q = T.alloc_shared((block_M, width), name)
                k = T.alloc_shared((block_N, width), name)
                v = T.alloc_shared((block_N, width), name)
                s = T.alloc_fragment((block_M, block_N), "float32")
                p = T.alloc_fragment((block_M, block_N), name)
                o = T.alloc_fragment((block_M, width), "float32")
                most = T.alloc_fragment((block_M,), "float32")
                before = T.alloc_fragment((block_M,), "float32")
                shrink = T.alloc_fragment((block_M,), "float32")
                part = T.alloc_fragment((block_M,), "float32")
                total = T.alloc_fragment((block_M,), "float32")
                T.copy(Q[z, x * block_M : (x + 1) * block_M, y, :], q)
                T.fill(o, 0)
                T.fill(total, 0)
                T.fill(most, -T.infinity("float32"))
                steps = (
                    T.ceildiv((x + 1) * block_M, block_N) if causal else T.ceildiv(length, block_N)
                )
                for n in T.Pipelined(steps, num_stages=1):
                    T.copy(K[z, n * block_N : (n + 1) * block_N, y, :], k)
                    if causal:
                        for i, j in T.Parallel(block_M, block_N):
                            s[i, j] = T.if_then_else(
                                x * block_M + i >= n * block_N + j, 0, -T.infinity("float32")
                            )
                    else:
                        T.clear(s)
                    T.gemm(q, k, s, transpose_B=True)
                    T.copy(most, before)
                    T.reduce_max(s, most, dim=1, clear=False)
                    for i in T.Parallel(block_M):
                        shrink[i] = T.exp2(before[i] * scale - most[i] * scale)
                    for i, j in T.Parallel(block_M, block_N):
                        s[i, j] = T.exp2(s[i, j] * scale - most[i] * scale)
                    T.reduce_sum(s, part, dim=1)
                    for i in T.Parallel(block_M):
                        total[i] = total[i] * shrink[i] + part[i]
                    T.copy(s, p)
                    for i, j in T.Parallel(block_M, width):
                        o[i, j] *= shrink[i]
                    T.copy(V[z, n * block_N : (n + 1) * block_N, y, :], v)
                    T.gemm(p, v, o)
                for i, j in T.Parallel(block_M, width):
                    o[i, j] /= total[i]
                T.copy(o, O[z, x * block_M : (x + 1) * block_M, y, :])
                for i in T.Parallel(block_M):
                    total[i] = T.log2(total[i]) + most[i] * scale
                T.copy(total, L[z, y, x * block_M : (x + 1) * block_M])

        return main

    return forward


@tilelang.jit
def eager_matmul(A, B, block_M: int = 64, block_N: int = 64, block_K: int = 32):
    """Eager: the shapes are those of the tensors that it is called with."""
    M, N, K = T.const("M, N, K")
    A: T.Tensor[[M, K], T.float16]
    B: T.Tensor[[K, N], T.float16]
    C = T.empty((M, N), T.float16)
    with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
        a = T.alloc_shared((block_M, block_K), T.float16)
        b = T.alloc_shared((block_K, block_N), T.float16)
        c = T.alloc_fragment((block_M, block_N), T.float32)
        T.clear(c)
        for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
            T.copy(A[by * block_M, k * block_K], a)
            T.copy(B[k * block_K, bx * block_N], b)
            T.gemm(a, b, c)
        T.copy(c, C[by * block_M, bx * block_N])
    return C


def _scaling(rows, width, scale):
    @T.prim_func
    def scaled(X: T.Tensor((rows, width), "float16"), Y: T.Tensor((rows, width), "float16")):
        with T.Kernel(rows, threads=128) as row:
            for i in T.Parallel(width):
                Y[row, i] = X[row, i] * scale

    return scaled


@tilelang.jit(out_idx=-1)
def any_rows(width, scale=2.0):
    """Lazy, with a symbolic number of rows, and the prim_func from elsewhere."""
    return _scaling(T.dynamic("rows"), width, scale)


@functools.cache
def cached_compile(width, scales=(1.0, 3.0)):
    """`tilelang.compile` in a cached function that returns something around the kernel."""
    return {"kernel": tilelang.compile(_scaling(4, width, sum(scales)), out_idx=[-1])}


@tilelang.autotune(configs=[{"threads": 64}, {"threads": 128}])
@tilelang.jit(out_idx=[-1])
def tunable(rows, width, threads=None):
    """Under TileLang's autotuner, which does not tune where the threads are given."""

    @T.prim_func
    def main(X: T.Tensor((rows, width), "float32"), Y: T.Tensor((rows, width), "float32")):
        with T.Kernel(rows, threads=threads) as row:
            for i in T.Parallel(width):
                Y[row, i] = X[row, i] + 1

    return main
