"""How the caches of operator packages are read: layers 2 and 3 are theirs, and so are their counts.

Invariant: this module imports nothing but the standard library, so that a module of kernels can
make itself known wherever it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

__all__ = ["Layer", "add", "rows", "steady"]

Layer = Literal["workload", "jit", "impl"]
Read = Callable[[], Iterable[Any]]
_T = TypeVar("_T")

_sources: dict[Layer, list[Read]] = {"workload": [], "jit": [], "impl": []}
_ATTEMPTS = 10


def add(layer: Layer, read: Read) -> None:
    """Have a layer's rows read by a function, from now on.

    Args:
        layer: `workload`: rows of `op`, `key`, `instances`, `workloads`, `hits` and `misses`.
            `jit`: rows of `factory`, `hits`, `misses`, `maxsize`, `currsize` and `evictions`.
            `impl`: JITImpls that are in memory.
        read: Called in the agent's thread; it must not wait for a lock.
    """
    _sources[layer].append(read)


def rows(layer: Layer) -> list[Any]:
    """The rows of a layer, of all that were added."""
    found: list[Any] = []
    for read in list(_sources[layer]):
        found += steady(read)
    return found


def steady(read: Callable[[], Iterable[_T]]) -> list[_T]:
    """What can be iterated over while other threads change it: if they change its size under the
    iterator, it is read again.
    """
    for _ in range(_ATTEMPTS):
        try:
            return list(read())
        except RuntimeError:
            continue
    return list(read())
