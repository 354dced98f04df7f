"""Kernels for CUDA: they compile for sm_90a anywhere, and run on such a GPU."""

import functools

import tilelang
import tilelang.language as T
import torch

from tests.corpus.constants import LOG2E, TABLE, Activation, Tile, activated

FP16, FP32 = T.float16, T.float32
NO_WS = {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True}


@tilelang.jit(out_idx=[-1])
def add(m, n, block_m=32, block_n=128, dtype=FP16):
    @T.prim_func
    def main(A: T.Tensor((m, n), dtype), B: T.Tensor((m, n), dtype), C: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=128) as (x, y):
            for i, j in T.Parallel(block_m, block_n):
                C[y * block_m + i, x * block_n + j] = (
                    A[y * block_m + i, x * block_n + j] + B[y * block_m + i, x * block_n + j]
                )

    return main


@tilelang.jit(out_idx=[1])
def activation(n, kind=Activation.RELU, block=TABLE["large"]):
    @T.prim_func
    def main(X: T.Tensor((n,), FP32), Y: T.Tensor((n,), FP32)):
        with T.Kernel(T.ceildiv(n, block), threads=block) as x:
            for i in T.Parallel(block):
                Y[x * block + i] = activated(X[x * block + i], kind, scale=3.0)

    return main


@tilelang.jit(out_idx=[2])
def silu_and_mul(m, n, block=256):
    @T.prim_func
    def main(G: T.Tensor((m, n), FP16), U: T.Tensor((m, n), FP16), Y: T.Tensor((m, n), FP16)):
        with T.Kernel(T.ceildiv(n, block), m, threads=128) as (x, row):
            g = T.alloc_fragment((block,), FP32)
            u = T.alloc_fragment((block,), FP32)
            for j in T.Parallel(block):
                g[j] = T.cast(G[row, x * block + j], FP32)
                u[j] = T.cast(U[row, x * block + j], FP32)
            for j in T.Parallel(block):
                g[j] = g[j] / (1.0 + T.exp2(-g[j] * LOG2E)) * u[j]
            for j in T.Parallel(block):
                Y[row, x * block + j] = T.cast(g[j], FP16)

    return main


@tilelang.jit(out_idx=[1])
def row_sum(m, n, block_m=4):
    @T.prim_func
    def main(X: T.Tensor((m, n), FP32), Y: T.Tensor((m,), FP32)):
        with T.Kernel(T.ceildiv(m, block_m), threads=128) as x:
            a = T.alloc_fragment((block_m, n), FP32)
            s = T.alloc_fragment((block_m,), FP32)
            T.copy(X[x * block_m, 0], a)
            T.reduce_sum(a, s, dim=1)
            T.copy(s, Y[x * block_m])

    return main


@tilelang.jit(out_idx=[1, 2])
def max_and_sum(m, n, block_m=2):
    """Two outputs."""

    @T.prim_func
    def main(X: T.Tensor((m, n), FP32), Y: T.Tensor((m,), FP32), Z: T.Tensor((m,), FP32)):
        with T.Kernel(T.ceildiv(m, block_m), threads=128) as x:
            a = T.alloc_fragment((block_m, n), FP32)
            most = T.alloc_fragment((block_m,), FP32)
            total = T.alloc_fragment((block_m,), FP32)
            T.copy(X[x * block_m, 0], a)
            T.reduce_max(a, most, dim=1)
            T.reduce_sum(a, total, dim=1)
            T.copy(most, Y[x * block_m])
            T.copy(total, Z[x * block_m])

    return main


@tilelang.jit(out_idx=[1])
def softmax(m, n, block_m=1):
    @T.prim_func
    def main(X: T.Tensor((m, n), FP16), Y: T.Tensor((m, n), FP16)):
        with T.Kernel(T.ceildiv(m, block_m), threads=128) as x:
            a = T.alloc_fragment((block_m, n), FP32)
            most = T.alloc_fragment((block_m,), FP32)
            total = T.alloc_fragment((block_m,), FP32)
            T.copy(X[x * block_m, 0], a)
            T.reduce_max(a, most, dim=1)
            for i, j in T.Parallel(block_m, n):
                a[i, j] = T.exp2((a[i, j] - most[i]) * LOG2E)
            T.reduce_sum(a, total, dim=1)
            for i, j in T.Parallel(block_m, n):
                a[i, j] = a[i, j] / total[i]
            T.copy(a, Y[x * block_m, 0])

    return main


@tilelang.jit(out_idx=[2])
def rms_norm(n, dtype=torch.bfloat16, eps=1e-6, block_m=2):
    """A symbolic number of rows, and torch's dtype."""
    m = T.dynamic("m")

    @T.prim_func
    def main(X: T.Tensor((m, n), dtype), W: T.Tensor((n,), dtype), Y: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(m, block_m), threads=128) as x:
            a = T.alloc_fragment((block_m, n), FP32)
            q = T.alloc_fragment((block_m, n), FP32)
            s = T.alloc_fragment((block_m,), FP32)
            T.copy(X[x * block_m, 0], a)
            for i, j in T.Parallel(block_m, n):
                q[i, j] = a[i, j] * a[i, j]
            T.reduce_sum(q, s, dim=1)
            for i in T.Parallel(block_m):
                s[i] = T.rsqrt(s[i] / n + eps)
            for i, j in T.Parallel(block_m, n):
                a[i, j] = a[i, j] * s[i] * T.cast(W[j], FP32)
            T.copy(a, Y[x * block_m, 0])

    return main


def _matmul(M, N, K, tile, swizzle=False, transposed=False, epilogue=None, accumulate=FP32):
    shape = (N, K) if transposed else (K, N)
    inner = (tile.n, tile.k) if transposed else (tile.k, tile.n)

    @T.prim_func
    def main(A: T.Tensor((M, K), FP16), B: T.Tensor(shape, FP16), C: T.Tensor((M, N), FP16)):
        with T.Kernel(T.ceildiv(N, tile.n), T.ceildiv(M, tile.m), threads=tile.threads) as (x, y):
            a = T.alloc_shared((tile.m, tile.k), FP16)
            b = T.alloc_shared(inner, FP16)
            c = T.alloc_fragment((tile.m, tile.n), accumulate)
            if swizzle:
                T.use_swizzle(panel_size=10)
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, tile.k), num_stages=tile.stages):
                T.copy(A[y * tile.m, k * tile.k], a)
                if transposed:
                    T.copy(B[x * tile.n, k * tile.k], b)
                else:
                    T.copy(B[k * tile.k, x * tile.n], b)
                T.gemm(a, b, c, transpose_B=transposed)
            if epilogue is not None:
                epilogue(c, tile)
            T.copy(c, C[y * tile.m, x * tile.n])

    return main


@T.macro
def relu_of(c, tile):
    for i, j in T.Parallel(tile.m, tile.n):
        c[i, j] = T.max(c[i, j], 0)


@tilelang.jit(out_idx=[-1])
def matmul(M, N, K, tile=Tile(), swizzle=False, transposed=False):  # noqa: B008
    return _matmul(M, N, K, tile, swizzle, transposed)


@tilelang.jit(out_idx=[-1], pass_configs=NO_WS, compile_flags=["--use_fast_math"])
def matmul_relu(M, N, K, bm=64):
    return _matmul(M, N, K, Tile(m=bm), epilogue=relu_of)


@tilelang.jit(out_idx=[2])
def dynamic_matmul(N, K):
    return _matmul(T.dynamic("M"), N, K, Tile())


@tilelang.jit
def split_k_matmul(M, N, K, split=4, block=64, block_k=32):
    """Accumulates in the caller's output."""
    part = K // split

    @T.prim_func
    def main(A: T.Tensor((M, K), FP16), B: T.Tensor((K, N), FP16), C: T.Tensor((M, N), FP32)):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), split, threads=128) as (x, y, z):
            a = T.alloc_shared((block, block_k), FP16)
            b = T.alloc_shared((block_k, block), FP16)
            c = T.alloc_fragment((block, block), FP32)
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(part, block_k), num_stages=0):
                T.copy(A[y * block, z * part + k * block_k], a)
                T.copy(B[z * part + k * block_k, x * block], b)
                T.gemm(a, b, c)
            for i, j in T.Parallel(block, block):
                T.atomic_add(C[y * block + i, x * block + j], c[i, j])

    return main


@tilelang.jit(out_idx=[2])
def batched_matmul(batch, M, N, K, block=64, block_k=32):
    @T.prim_func
    def main(
        A: T.Tensor((batch, M, K), FP16),
        B: T.Tensor((batch, K, N), FP16),
        C: T.Tensor((batch, M, N), FP16),
    ):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), batch, threads=128) as (x, y, z):
            a = T.alloc_shared((block, block_k), FP16)
            b = T.alloc_shared((block_k, block), FP16)
            c = T.alloc_fragment((block, block), FP32)
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, block_k), num_stages=2):
                T.copy(A[z, y * block, k * block_k], a)
                T.copy(B[z, k * block_k, x * block], b)
                T.gemm(a, b, c)
            T.copy(c, C[z, y * block, x * block])

    return main


@tilelang.jit(out_idx=[3])
def int8_weight_matmul(M, N, K, block=64, block_k=32):
    @T.prim_func
    def main(
        A: T.Tensor((M, K), FP16),
        B: T.Tensor((N, K), "int8"),
        S: T.Tensor((N,), FP16),
        C: T.Tensor((M, N), FP16),
    ):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (x, y):
            a = T.alloc_shared((block, block_k), FP16)
            b8 = T.alloc_shared((block, block_k), "int8")
            bl = T.alloc_fragment((block, block_k), FP16)
            b = T.alloc_shared((block, block_k), FP16)
            c = T.alloc_fragment((block, block), FP32)
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, block_k), num_stages=1):
                T.copy(A[y * block, k * block_k], a)
                T.copy(B[x * block, k * block_k], b8)
                for i, j in T.Parallel(block, block_k):
                    bl[i, j] = T.cast(b8[i, j], FP16)
                T.copy(bl, b)
                T.gemm(a, b, c, transpose_B=True)
            for i, j in T.Parallel(block, block):
                c[i, j] = c[i, j] * S[x * block + j]
            T.copy(c, C[y * block, x * block])

    return main


@tilelang.jit(out_idx=[1, 2])
def quantize_rows(m, n):
    """To int8 with a scale for each row."""

    @T.prim_func
    def main(X: T.Tensor((m, n), FP16), Q: T.Tensor((m, n), "int8"), S: T.Tensor((m,), FP32)):
        with T.Kernel(m, threads=128) as row:
            a = T.alloc_fragment((1, n), FP32)
            most = T.alloc_fragment((1,), FP32)
            q = T.alloc_fragment((1, n), "int8")
            T.copy(X[row, 0], a)
            T.reduce_absmax(a, most, dim=1)
            for i, j in T.Parallel(1, n):
                q[i, j] = T.cast(T.round(a[i, j] / T.max(most[i], 1e-4) * 127.0), "int8")
            T.copy(q, Q[row, 0])
            for i in T.Parallel(1):
                S[row + i] = most[i] / 127.0

    return main


@functools.lru_cache(maxsize=8)
def attention(batch, heads, length, width, causal=False):
    """A factory under lru_cache, with a jit closure: flash attention, forward."""
    shape = (batch, length, heads, width)
    scale = (1.0 / width) ** 0.5 * LOG2E

    @tilelang.jit(out_idx=[3])
    def forward(block_m=64, block_n=64):
        @T.macro
        def scores(q, k, s, x, n):
            if causal:
                for i, j in T.Parallel(block_m, block_n):
                    s[i, j] = T.if_then_else(
                        x * block_m + i >= n * block_n + j, 0, -T.infinity("float32")
                    )
            else:
                T.clear(s)
            T.gemm(q, k, s, transpose_B=True)

        @T.prim_func
        def main(
            Q: T.Tensor(shape, FP16),
            K: T.Tensor(shape, FP16),
            V: T.Tensor(shape, FP16),
            O: T.Tensor(shape, FP16),  # noqa: E741
        ):
            with T.Kernel(T.ceildiv(length, block_m), heads, batch, threads=128) as (x, y, z):
                q = T.alloc_shared((block_m, width), FP16)
                k = T.alloc_shared((block_n, width), FP16)
                v = T.alloc_shared((block_n, width), FP16)
                s = T.alloc_fragment((block_m, block_n), FP32)
                p = T.alloc_fragment((block_m, block_n), FP16)
                o = T.alloc_fragment((block_m, width), FP32)
                most = T.alloc_fragment((block_m,), FP32)
                before = T.alloc_fragment((block_m,), FP32)
                shrink = T.alloc_fragment((block_m,), FP32)
                part = T.alloc_fragment((block_m,), FP32)
                total = T.alloc_fragment((block_m,), FP32)
                T.copy(Q[z, x * block_m : (x + 1) * block_m, y, :], q)
                T.fill(o, 0)
                T.fill(total, 0)
                T.fill(most, -T.infinity("float32"))
                steps = (
                    T.ceildiv((x + 1) * block_m, block_n) if causal else T.ceildiv(length, block_n)
                )
                for n in T.Pipelined(steps, num_stages=1):
                    T.copy(K[z, n * block_n : (n + 1) * block_n, y, :], k)
                    scores(q, k, s, x, n)
                    T.copy(most, before)
                    T.reduce_max(s, most, dim=1, clear=False)
                    for i in T.Parallel(block_m):
                        shrink[i] = T.exp2(before[i] * scale - most[i] * scale)
                    for i, j in T.Parallel(block_m, block_n):
                        s[i, j] = T.exp2(s[i, j] * scale - most[i] * scale)
                    T.reduce_sum(s, part, dim=1)
                    for i in T.Parallel(block_m):
                        total[i] = total[i] * shrink[i] + part[i]
                    T.copy(s, p)
                    for i, j in T.Parallel(block_m, width):
                        o[i, j] *= shrink[i]
                    T.copy(V[z, n * block_n : (n + 1) * block_n, y, :], v)
                    T.gemm(p, v, o)
                for i, j in T.Parallel(block_m, width):
                    o[i, j] /= total[i]
                T.copy(o, O[z, x * block_m : (x + 1) * block_m, y, :])

        return main

    return forward


@tilelang.jit(out_idx=[-1])
def rope(m, heads, width):
    half = width // 2

    @T.prim_func
    def main(
        X: T.Tensor((m, heads, width), FP16),
        C: T.Tensor((m, half), FP32),
        S: T.Tensor((m, half), FP32),
        Y: T.Tensor((m, heads, width), FP16),
    ):
        with T.Kernel(m, threads=128) as row:
            for h, j in T.Parallel(heads, half):
                Y[row, h, j] = X[row, h, j] * C[row, j] - X[row, h, j + half] * S[row, j]
                Y[row, h, j + half] = X[row, h, j + half] * C[row, j] + X[row, h, j] * S[row, j]

    return main


@tilelang.jit(out_idx=[-1])
def gemv(N, K, block_n=4):
    @T.prim_func
    def main(A: T.Tensor((K,), FP16), B: T.Tensor((N, K), FP16), C: T.Tensor((N,), FP16)):
        with T.Kernel(T.ceildiv(N, block_n), threads=128) as x:
            b = T.alloc_fragment((block_n, K), FP32)
            c = T.alloc_fragment((block_n,), FP32)
            for i, k in T.Parallel(block_n, K):
                b[i, k] = T.cast(B[x * block_n + i, k], FP32) * T.cast(A[k], FP32)
            T.reduce_sum(b, c, dim=1)
            T.copy(c, C[x * block_n])

    return main


@tilelang.jit
def scaled_in_place(n, block=128):
    """A scalar argument, and no output index."""

    @T.prim_func
    def main(X: T.Tensor((n,), FP32), factor: T.float32):
        with T.Kernel(T.ceildiv(n, block), threads=block) as x:
            for i in T.Parallel(block):
                X[x * block + i] = X[x * block + i] * factor

    return main


@tilelang.jit
def eager_matmul(A, B, tile: Tile = Tile()):  # noqa: B008
    M, N, K = T.const("M, N, K")
    A: T.Tensor[[M, K], T.float16]
    B: T.Tensor[[K, N], T.float16]
    C = T.empty((M, N), T.float16)
    with T.Kernel(T.ceildiv(N, tile.n), T.ceildiv(M, tile.m), threads=tile.threads) as (x, y):
        a = T.alloc_shared((tile.m, tile.k), T.float16)
        b = T.alloc_shared((tile.k, tile.n), T.float16)
        c = T.alloc_fragment((tile.m, tile.n), T.float32)
        T.clear(c)
        for k in T.Pipelined(T.ceildiv(K, tile.k), num_stages=tile.stages):
            T.copy(A[y * tile.m, k * tile.k], a)
            T.copy(B[k * tile.k, x * tile.n], b)
            T.gemm(a, b, c)
        T.copy(c, C[y * tile.m, x * tile.n])
    return C


@tilelang.jit(pass_configs=NO_WS)
def eager_strided(X, Y, alpha: float = 2.0):
    """It takes strides of its tensors, too."""
    M, N, S = T.const("M, N, S")
    X: T.StridedTensor[[M, N], [S, 1], T.float32]
    Y: T.Tensor[[M, N], T.float32]
    with T.Kernel(M, threads=128) as row:
        for j in T.Parallel(N):
            Y[row, j] = X[row, j] * alpha


@tilelang.jit
def eager_dynamic(X, W):
    m = T.dynamic("m")
    N = T.const("N")
    X: T.Tensor[[m, N], T.float16]
    W: T.Tensor[[N], T.float16]
    Y = T.empty((m, N), T.float16)
    Z = T.empty((m, N), T.float32)
    with T.Kernel(m, threads=128) as row:
        for j in T.Parallel(N):
            Y[row, j] = X[row, j] * W[j]
            Z[row, j] = T.cast(X[row, j], T.float32) + 1.0
    return Y, Z


def cases(case):
    half, int8 = torch.float16, torch.int8

    def empty(*shape, dtype=half):
        return torch.empty(*shape, dtype=dtype)

    def pair(m, n, k):
        return lambda t: (t(m, k, dtype=half), t(k, n, dtype=half))

    def qkv(t):
        return tuple(t(1, 128, 2, 64, dtype=half) for _ in range(3))

    square = Activation.SQUARE
    return [
        case("add", lambda: add(64, 256),
             lambda t: (t(64, 256, dtype=half), t(64, 256, dtype=half))),
        case("relu", lambda: activation(1024), lambda t: (t(1024),)),
        case("square", lambda: activation(1024, square), lambda t: (t(1024),)),
        case("silu_and_mul", lambda: silu_and_mul(8, 512),
             lambda t: (t(8, 512, dtype=half), t(8, 512, dtype=half))),
        case("row_sum", lambda: row_sum(64, 256), lambda t: (t(64, 256),)),
        case("max_and_sum", lambda: max_and_sum(64, 256), lambda t: (t(64, 256),)),
        case("softmax", lambda: softmax(32, 512), lambda t: (t(32, 512, dtype=half),)),
        case("rms_norm", lambda: rms_norm(1024),
             lambda t: (t(6, 1024, dtype=torch.bfloat16), t(1024, dtype=torch.bfloat16))),
        case("rms_norm_fp16", lambda: rms_norm(512, torch.float16),
             lambda t: (t(7, 512, dtype=half), t(512, dtype=half))),
        case("matmul", lambda: matmul(256, 256, 128), pair(256, 256, 128)),
        case("swizzled_matmul", lambda: matmul(256, 256, 128, swizzle=True), pair(256, 256, 128)),
        case("transposed_matmul", lambda: matmul(128, 256, 128, Tile(m=128), transposed=True),
             lambda t: (t(128, 128, dtype=half), t(256, 128, dtype=half))),
        case("matmul_relu", lambda: matmul_relu(128, 128, 128), pair(128, 128, 128)),
        case("dynamic_matmul", lambda: dynamic_matmul(256, 128), pair(100, 256, 128)),
        case("split_k_matmul", lambda: split_k_matmul(64, 64, 256),
             lambda t: (t(64, 256, dtype=half), t(256, 64, dtype=half), t(64, 64) * 0)),
        case("batched_matmul", lambda: batched_matmul(2, 64, 128, 64),
             lambda t: (t(2, 64, 64, dtype=half), t(2, 64, 128, dtype=half))),
        case("int8_weight_matmul", lambda: int8_weight_matmul(64, 128, 128),
             lambda t: (t(64, 128, dtype=half), t(128, 128, dtype=int8), t(128, dtype=half))),
        case("quantize_rows", lambda: quantize_rows(16, 512), lambda t: (t(16, 512, dtype=half),)),
        case("attention", lambda: attention(1, 2, 128, 64)(), qkv),
        case("causal_attention", lambda: attention(1, 2, 128, 64, True)(block_n=32), qkv),
        case("rope", lambda: rope(16, 4, 64),
             lambda t: (t(16, 4, 64, dtype=half), t(16, 32), t(16, 32))),
        case("gemv", lambda: gemv(128, 256),
             lambda t: (t(256, dtype=half), t(128, 256, dtype=half))),
        case("scaled_in_place", lambda: scaled_in_place(512), lambda t: (t(512), 1.5)),
        case("eager_matmul", lambda: eager_matmul.compile(empty(128, 64), empty(64, 128)),
             pair(128, 128, 64)),
        case("eager_strided",
             lambda: eager_strided.compile(
                 torch.empty(8, 512)[:, :256], torch.empty(8, 256), alpha=0.5),
             lambda t: (t(8, 512)[:, :256], t(8, 256) * 0)),
        case("eager_dynamic", lambda: eager_dynamic.compile(empty(9, 256), empty(256)),
             lambda t: (t(9, 256, dtype=half), t(256, dtype=half))),
    ]  # fmt: skip
