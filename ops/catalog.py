"""The operators of this package, as `tlcache` finds them through the entry point `tlcache.ops`."""

from __future__ import annotations

from ops.kernels import rms_norm

__all__ = ["OPERATORS"]

OPERATORS = {rms_norm.OPERATOR.name: rms_norm.OPERATOR}
