"""A program that has kernels compiled, and cannot launch them: there is no GPU."""

import gpu_kernels as kernels
import tilelang
import tilelang.language as T
import torch


@tilelang.jit(out_idx=[-1])
def in_the_script(width):
    @T.prim_func
    def main(X: T.Tensor((width,), "float32"), Y: T.Tensor((width,), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(width):
                Y[i] = X[i] - 1

    return main


def main():
    for rows in (128, 256):
        kernels.matmul(rows, 128, 128)
    kernels.matmul(128, 128, 128, dtype=T.bfloat16)
    kernels.attention(1, 2, 128, 64, causal=True)(64, 64)
    kernels.attention(1, 2, 128, 64, dtype=torch.bfloat16)(block_M=64, block_N=64)
    tensors = [torch.empty(shape, dtype=torch.float16) for shape in ((128, 64), (64, 192))]
    kernels.eager_matmul.compile(*tensors, block_N=64)
    kernels.any_rows(256)
    kernels.cached_compile(512)
    kernels.tunable(8, 128, threads=128)
    tilelang.compile(kernels._scaling(2, 64, 5.0), out_idx=[1])
    in_the_script(64)


if __name__ == "__main__":
    main()
    print("done")
