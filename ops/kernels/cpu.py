"""How the CPU bodies read and write elements: TileLang's `c` target has no bfloat16, so its bits
travel as uint16 and are widened and rounded (to nearest even, NaN kept quiet) by shifts.
"""

from __future__ import annotations

from typing import Any

__all__ = ["FLAGS", "LANES", "TARGET", "narrow", "storage", "widen"]

TARGET = {"kind": "c"}
FLAGS = ["-O3"]
LANES = 8  # partial results a row, which the C compiler turns into vector code


def storage(dtype: str) -> str:
    """The dtype of a parameter."""
    return "uint16" if dtype == "bfloat16" else dtype


def widen(value: Any, dtype: str) -> Any:
    """An element as float32."""
    import tilelang.language as T

    if dtype == "bfloat16":
        return T.reinterpret(T.shift_left(T.cast(value, "uint32"), T.uint32(16)), "float32")
    return T.cast(value, "float32")


def narrow(value: Any, dtype: str) -> Any:
    """A float32 as an element."""
    import tilelang.language as T

    if dtype != "bfloat16":
        return T.cast(value, dtype)
    bits = T.reinterpret(value, "uint32")
    high = T.shift_right(bits, T.uint32(16))
    even = T.shift_right(bits + T.uint32(0x7FFF) + T.bitwise_and(high, T.uint32(1)), T.uint32(16))
    return T.cast(
        T.if_then_else(value != value, T.bitwise_or(high, T.uint32(0x40)), even), "uint16"
    )
