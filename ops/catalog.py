"""The operators of this package, as `tlcache` finds them through the entry point `tlcache.ops`."""

from __future__ import annotations

from ops.kernels import (
    fused_add_rms_norm,
    gemm,
    layer_norm,
    rms_norm,
    rope,
    silu_and_mul,
    softmax,
)

__all__ = ["OPERATORS"]

OPERATORS = {
    module.OPERATOR.name: module.OPERATOR
    for module in (rms_norm, fused_add_rms_norm, layer_norm, silu_and_mul, rope, softmax, gemm)
}
