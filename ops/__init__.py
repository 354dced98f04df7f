"""TileLang operators written as production wants them, with torch.compile boundaries.

    y = ops.rms_norm(x, weight)                      # a function
    norm = ops.RMSNorm(4096, dtype=torch.bfloat16)   # a module
    op = ops.RMSNormFwdOp(4096, dtype=torch.bfloat16, on_miss="error")

Importing this package compiles nothing and touches no device. Where torch is not imported yet it
does not import it either (the command line reads `ops.catalog` without torch); the dispatcher ops
of `torch.ops.tilelang_ops` are registered as soon as both are there, in either order.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ops.activations import SiluAndMulFwdOp, SoftmaxFwdOp, silu_and_mul, softmax
    from ops.jit_cache import jit_caches
    from ops.linear import GemmFwdOp, gemm
    from ops.norms import (
        FusedAddRMSNormFwdOp,
        FusedAddRMSNormInplaceFwdOp,
        LayerNorm,
        LayerNormFwdOp,
        RMSNorm,
        RMSNormFwdOp,
        fused_add_rms_norm,
        fused_add_rms_norm_,
        layer_norm,
        rms_norm,
    )
    from ops.rotary import RopeFwdOp, rope
    from tlcache.runtime import freeze, mark_ready

__all__ = [
    "FusedAddRMSNormFwdOp",
    "FusedAddRMSNormInplaceFwdOp",
    "GemmFwdOp",
    "LayerNorm",
    "LayerNormFwdOp",
    "RMSNorm",
    "RMSNormFwdOp",
    "RopeFwdOp",
    "SiluAndMulFwdOp",
    "SoftmaxFwdOp",
    "freeze",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "gemm",
    "jit_caches",
    "layer_norm",
    "mark_ready",
    "rms_norm",
    "rope",
    "silu_and_mul",
    "softmax",
]

_OPERATORS = ("ops.norms", "ops.activations", "ops.rotary", "ops.linear")
_HOMES = {
    **dict.fromkeys(
        (
            "FusedAddRMSNormFwdOp",
            "FusedAddRMSNormInplaceFwdOp",
            "LayerNorm",
            "LayerNormFwdOp",
            "RMSNorm",
            "RMSNormFwdOp",
            "fused_add_rms_norm",
            "fused_add_rms_norm_",
            "layer_norm",
            "rms_norm",
        ),
        "ops.norms",
    ),
    **dict.fromkeys(
        ("SiluAndMulFwdOp", "SoftmaxFwdOp", "silu_and_mul", "softmax"), "ops.activations"
    ),
    **dict.fromkeys(("RopeFwdOp", "rope"), "ops.rotary"),
    **dict.fromkeys(("GemmFwdOp", "gemm"), "ops.linear"),
    **dict.fromkeys(("freeze", "mark_ready"), "tlcache.runtime"),
    "jit_caches": "ops.jit_cache",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ops' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_CORE = ("ops.op", "ops.inputs", "ops.boundary")
_registering = False


def _register(_: object = None) -> None:
    """Import the operators, once torch and what they stand on are there: one of `_CORE` may be the
    module that just imported torch.
    """
    global _registering
    if _registering or "torch" not in sys.modules or not all(map(_complete, _CORE)):
        return
    _registering = True
    try:
        for module in _OPERATORS:
            importlib.import_module(module)
    finally:
        _registering = False


def _complete(name: str) -> bool:
    """Whether a module is imported to its end, or not at all."""
    module = sys.modules.get(name)
    return module is None or all(hasattr(module, one) for one in getattr(module, "__all__", "?"))


if "torch" in sys.modules:
    _register()
else:
    import wrapt

    for _name in ("torch", *_CORE):
        wrapt.register_post_import_hook(_register, _name)
