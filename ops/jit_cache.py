"""Layer 2: a bounded cache of JITImpls in front of a kernel's factory.

Invariant: a key is made once however many threads ask for it at once; the least recently used value
goes first, and every one that goes is counted. A launcher that was made from an evicted value stays
what it is: layer 3 holds it.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from tlcache import sources

__all__ = ["CacheInfo", "JitCache", "jit_cache", "jit_caches"]

MAXSIZE = 128
_all: weakref.WeakSet[JitCache] = weakref.WeakSet()


class CacheInfo(NamedTuple):
    """The counts of a cache: `functools`' four, and how many values had to go."""

    hits: int
    misses: int
    maxsize: int
    currsize: int
    evictions: int


class JitCache:
    """A factory with a bounded cache, least recently used first to go.

    Args:
        factory: Makes a JITImpl of hashable arguments.
        maxsize: The most values to keep, at least 1.
    """

    def __init__(self, factory: Callable[..., Any], maxsize: int = MAXSIZE) -> None:
        functools.update_wrapper(self, factory)
        self._factory = factory
        self._signature = inspect.signature(factory)
        self._made: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._flights: dict[tuple[Any, ...], threading.Lock] = {}
        self._lock = threading.RLock()
        self._hits = self._misses = self._evictions = 0
        self._maxsize = 0
        self.resize(maxsize)
        _all.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        key = (*bound.args, *bound.kwargs.items())
        while True:
            with self._lock:
                if key in self._made:
                    return self._hit(key)
                flight = self._flights.setdefault(key, threading.Lock())
            with flight:
                with self._lock:
                    if key in self._made:
                        return self._hit(key)
                    if self._flights.get(key) is not flight:
                        continue  # its flight failed, or went already; there may be another
                    self._misses += 1
                try:
                    value = self._factory(*bound.args, **bound.kwargs)
                    with self._lock:
                        self._made[key] = value
                        self._shrink()
                    return value
                finally:
                    with self._lock:
                        self._flights.pop(key, None)

    def _hit(self, key: tuple[Any, ...]) -> Any:
        self._hits += 1
        self._made.move_to_end(key)
        return self._made[key]

    def _shrink(self) -> None:
        while len(self._made) > self._maxsize:
            self._made.popitem(last=False)
            self._evictions += 1

    def resize(self, maxsize: int) -> None:
        """Keep at most `maxsize` values from now on.

        Raises:
            ValueError: It is less than 1.
        """
        if maxsize < 1:
            raise ValueError(f"maxsize is {maxsize}; the cache keeps at least 1 value")
        with self._lock:
            self._maxsize = maxsize
            self._shrink()

    def cache_info(self) -> CacheInfo:
        """Hits, misses, the most values, the values now, and evictions."""
        with self._lock:
            return self._info()

    def _info(self) -> CacheInfo:
        return CacheInfo(self._hits, self._misses, self._maxsize, len(self._made), self._evictions)

    def cache_clear(self) -> None:
        """Forget all values and counts."""
        with self._lock:
            self._made.clear()
            self._hits = self._misses = self._evictions = 0


def jit_cache(factory: Callable[..., Any]) -> JitCache:
    """Decorate a kernel's factory with a cache of 128 values; `resize` changes how many."""
    return JitCache(factory)


def jit_caches() -> list[JitCache]:
    """All layer-2 caches of this process, by the factory's import path."""
    return sorted(_all, key=lambda cache: (cache.__module__, cache.__name__))  # type: ignore[attr-defined]


def _told() -> list[dict[str, Any]]:
    return [
        {"factory": f"{cache.__module__}:{cache.__name__}", **cache._info()._asdict()}  # type: ignore[attr-defined]
        for cache in jit_caches()
    ]


sources.add("jit", _told)
sources.add("impl", lambda: [impl for cache in jit_caches() for impl in list(cache._made.values())])
