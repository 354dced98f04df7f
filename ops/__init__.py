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
    from ops.norms import RMSNorm, RMSNormFwdOp, rms_norm
    from tlcache.runtime import freeze

__all__ = ["RMSNorm", "RMSNormFwdOp", "freeze", "rms_norm"]

_HOMES = {
    "RMSNorm": "ops.norms",
    "RMSNormFwdOp": "ops.norms",
    "rms_norm": "ops.norms",
    "freeze": "tlcache.runtime",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ops' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register(_: object = None) -> None:
    importlib.import_module("ops.norms")


if "torch" in sys.modules:
    _register()
else:
    import wrapt

    wrapt.register_post_import_hook(_register, "torch")
