"""A program that launches its kernels on a GPU and checks what they compute; with `--wait` it then
waits for its end.
"""

import sys

import gpu_kernels as kernels
import torch


def close(got, want, off):
    torch.testing.assert_close(got.float(), want.float(), rtol=off, atol=off)


def main():
    torch.manual_seed(0)
    for rows, dtype in ((128, torch.float16), (256, torch.float16), (128, torch.bfloat16)):
        a, b = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((rows, 128), (128, 128)))
        name = "bfloat16" if dtype is torch.bfloat16 else "float16"
        close(kernels.matmul(rows, 128, 128, dtype=name)(a, b), a @ b, 0.2)
    q, k, v = (torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    out, _ = kernels.attention(1, 2, 128, 64, causal=True)(64, 64)(q, k, v)
    heads = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    close(out, want.transpose(1, 2), 0.02)
    a, b = (torch.randn(*s, device="cuda", dtype=torch.float16) for s in ((128, 64), (64, 192)))
    close(kernels.eager_matmul(a, b, block_N=64), a @ b, 0.1)
    x = torch.randn(37, 256, device="cuda", dtype=torch.float16)
    close(kernels.any_rows(256)(x), x * 2, 0.01)
    close(kernels.any_rows(256)(x[:5].contiguous()), x[:5] * 2, 0.01)
    y = torch.randn(8, 128, device="cuda")
    close(kernels.tunable(8, 128, threads=128)(y), y + 1, 1e-6)


if __name__ == "__main__":
    main()
    print("done", flush=True)
    if "--wait" in sys.argv:
        sys.stdin.read()
