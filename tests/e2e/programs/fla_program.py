"""Has the TileLang kernels of fla-core compiled that its host functions ask for."""

import importlib
import warnings

import torch
import without_gpu

warnings.filterwarnings("ignore")


def module(name):
    return importlib.import_module(f"fla.ops.{name}")


attempt = without_gpu.attempt
bf16, fp32 = torch.bfloat16, torch.float32


def empty(*shape, dtype=bf16):
    return torch.empty(shape, dtype=dtype)


def main():
    attn = module("attn.backends.tilelang.parallel")
    for width in (64, 128):
        q, kv = empty(1, 256, 4, width), empty(1, 256, 2, width)
        lse = empty(1, 256, 4, dtype=fp32)
        attempt(attn.parallel_attn_fwd_tilelang, q, kv, kv, None, None, width**-0.5)
        attempt(attn.parallel_attn_bwd_tilelang, q, kv, kv, q, None, lse, q)
    x = empty(1, 256, 2, 64)
    state, g = empty(1, 4, 2, 64, 64), empty(1, 256, 2, dtype=fp32)
    common = module("common.backends.tilelang.chunk_bwd")
    attempt(common.chunk_bwd_dqkwg_tilelang, x, x, x, x, state, state)
    attempt(common.chunk_bwd_dqkwg_tilelang, x, x, x, x, state, state, w=x, g=g, dv=x)
    kda = module("kda.backends.tilelang.chunk_bwd_dqkg")
    square, wide = empty(1, 256, 2, 64), empty(1, 256, 2, 64, dtype=fp32)
    attempt(
        kda.chunk_kda_bwd_wy_dqkg_fused_tilelang,
        *(x, x, x, x, wide, g, square, state, x, state, x),
    )
    rwkv = module("rwkv6.backends.tilelang.chunk_fwd_intra")
    attempt(rwkv.chunk_rwkv6_fwd_intra_tilelang, x, x, wide, wide, empty(2, 64), 0.125)
    sinkhorn = module("utils.sinkhorn.tilelang")
    for dtype in (fp32, bf16):
        logits = empty(4, 64, 4, 4, dtype=dtype)
        attempt(sinkhorn.sinkhorn_fwd_tilelang, logits, 20)
        attempt(sinkhorn.sinkhorn_bwd_tilelang, logits, logits.float(), 20)
    dplr = "generalized_delta_rule.dplr.backends.tilelang"
    cumsum, wy = module(f"{dplr}.cumsum"), module(f"{dplr}.wy_fast_fwd")
    attempt(cumsum._chunk_local_cumsum_rect_kernel_tl, 2, 64, 16, 32, "float16", 1.0, True)
    attempt(wy._prepare_wy_repr_fwd_kernel, 2, 16, "float16")
    attempt(wy._prepare_wy_repr_fwd_kernel_bt64, 2, in_dtype="float16")


if __name__ == "__main__":
    main()
    print("done")
