"""What the kernels take from another module: constants, a helper, a macro, settings as objects."""

import dataclasses
import enum

import tilelang.language as T

LOG2E = 1.4426950408889634
TABLE = {"small": 32, "large": 128}


class Activation(enum.Enum):
    RELU = "relu"
    SQUARE = "square"
    SCALE = "scale"


@dataclasses.dataclass(frozen=True)
class Tile:
    m: int = 64
    n: int = 64
    k: int = 32
    stages: int = 2

    @property
    def threads(self):
        return 128 if self.m <= 64 else 256


def activated(value, activation, scale=2.0):
    """A plain helper that a kernel calls while it is traced."""
    if activation is Activation.RELU:
        return T.max(value, 0.0)
    if activation is Activation.SQUARE:
        return value * value
    return value * scale


@T.macro
def scaled_sum(A, total, n, scale):
    """A macro."""
    for i in T.serial(n):
        total[0] = total[0] + A[i] * scale
