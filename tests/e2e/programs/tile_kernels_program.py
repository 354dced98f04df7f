"""Has the kernels of tile-kernels compiled that its host functions ask for."""

import without_gpu  # noqa: I001
import torch
from tile_kernels.engram.engram_fused_weight_kernel import fused_weight
from tile_kernels.engram.engram_gate_fwd_kernel import engram_gate_fwd
from tile_kernels.engram.engram_sinkhorn_kernel import engram_sinkhorn_momentum_update
from tile_kernels.mhc.expand_kernel import expand_to_mhc_fwd
from tile_kernels.mhc.pre_apply_mix_kernel import mhc_pre_apply_mix_bwd, mhc_pre_apply_mix_fwd
from tile_kernels.mhc.norm_fn_kernel import mhc_fn_normw_merge_fwd
from tile_kernels.mhc.post_kernel import mhc_post_fwd
from tile_kernels.mhc.sinkhorn_kernel import mhc_sinkhorn_bwd, mhc_sinkhorn_fwd
from tile_kernels.moe.normalize_weight_kernel import normalize_weight
from tile_kernels.moe.topk_gate_kernel import topk_gate
from tile_kernels.quant.cast_kernel import cast
from tile_kernels.quant.norm_forward_kernel import norm_forward_and_per_token_cast
from tile_kernels.quant.per_block_cast_kernel import per_block_cast
from tile_kernels.quant.per_token_cast_kernel import per_token_cast
from tile_kernels.quant.swiglu_forward_kernel import swiglu_forward
from tile_kernels.transform.rope_kernel import apply_rotary

attempt = without_gpu.attempt
bf16, fp32 = torch.bfloat16, torch.float32


def empty(*shape, dtype=bf16):
    return torch.empty(shape, dtype=dtype)


def main():
    attempt(topk_gate, empty(64, 256, dtype=fp32), 8)
    attempt(topk_gate, empty(64, 128, dtype=fp32), 6)
    attempt(normalize_weight, empty(64, 8, dtype=fp32))
    attempt(cast, empty(64, 1024, dtype=fp32), bf16)
    attempt(per_token_cast, empty(64, 2048), "e4m3", 128)
    attempt(per_token_cast, empty(64, 2048), "e4m3", 32, round_sf=True)
    attempt(per_block_cast, empty(256, 2048), "e4m3", (128, 128))
    attempt(swiglu_forward, empty(64, 4096), "bf16")
    attempt(norm_forward_and_per_token_cast, empty(64, 2048), empty(2048), 1e-6, "e4m3", 32)
    attempt(apply_rotary, empty(64, 8, 64), empty(1024, 64, dtype=fp32))
    attempt(fused_weight, empty(4, 2048), empty(4, 2048))
    attempt(
        engram_gate_fwd,
        empty(64, 4, 4096),
        empty(64, 5, 4096),
        empty(4, 4096, dtype=fp32),
        1e-6,
        8.0,
    )
    attempt(engram_sinkhorn_momentum_update, empty(2560, dtype=fp32), empty(2560), 0.9)
    attempt(expand_to_mhc_fwd, empty(64, 4096), empty(64, 4, 4096))
    attempt(mhc_pre_apply_mix_fwd, empty(64, 4, 4096), empty(64, 4, dtype=fp32), empty(64, 4096))
    attempt(
        mhc_pre_apply_mix_bwd,
        empty(64, 4096),
        empty(64, 4, 4096),
        empty(64, 4, dtype=fp32),
        empty(64, 4, 4096),
    )
    attempt(
        mhc_fn_normw_merge_fwd,
        empty(24, 16384, dtype=fp32),
        empty(16384, dtype=fp32),
        empty(24, 16384, dtype=fp32),
    )
    mix, comb = empty(1, 64, 4, 1, dtype=fp32), empty(1, 64, 4, 4, dtype=fp32)
    attempt(mhc_post_fwd, empty(1, 64, 4096), empty(1, 64, 4, 4096), mix, comb)
    comb = empty(64, 4, 4, dtype=fp32)
    attempt(mhc_sinkhorn_fwd, comb, comb, 20, 1e-6)
    attempt(mhc_sinkhorn_bwd, comb, comb, comb, 20, 1e-6)


if __name__ == "__main__":
    main()
    print("done")
