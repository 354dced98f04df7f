"""RMSNorm written in Triton, integrated into torch.compile in three ways, to compare side by side.

    from ops.triton import rms_norm_captured     # torch.compile traces the launch
    from ops.triton import rms_norm_wrapped      # `triton_op` + `wrap_triton`
    from ops.triton import rms_norm_opaque       # `custom_op`
    from ops.triton import rms_norm_autotuned    # captured, and tuned by `triton.autotune`

An optional extra: `pip install 'tlcache[triton]'`. Importing this package imports neither torch nor
Triton, and nothing else in `ops` imports it; the names above do when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ops.triton.rms_norm import (
        rms_norm_autotuned,
        rms_norm_captured,
        rms_norm_opaque,
        rms_norm_wrapped,
    )

__all__ = ["rms_norm_autotuned", "rms_norm_captured", "rms_norm_opaque", "rms_norm_wrapped"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ops.triton' has no attribute {name!r}")
    value = getattr(importlib.import_module("ops.triton.rms_norm"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
