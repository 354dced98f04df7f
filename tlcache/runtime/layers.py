"""The counts of each layer of caches in this process, as rows.

Layers 3 and 2 belong to operator packages, which say how to read theirs (`tlcache.sources`); layer
1 is the ledgers of `resolve`; below it are the in-process caches of TileLang, which count nothing,
so that only their sizes can be told.

Invariant: to read takes no lock that a compile or a launch holds, and imports nothing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tlcache import sources
from tlcache.runtime.counters import Counters, percentiles
from tlcache.runtime.resolve import ledgers

__all__ = ["compiles", "factories", "thrashes", "tilelang", "workloads"]


def workloads() -> list[dict[str, Any]]:
    """Layer 3, a row for each key."""
    return sorted(sources.rows("workload"), key=lambda row: str(row["key"]))


# --- layer 2 ---


def thrashes(hits: int, misses: int, maxsize: int | None, evictions: int) -> bool:
    """Whether a cache is too small for what it is used for: more than its whole size was evicted,
    and more calls missed than hit, over its life (or since it was cleared).

    A single pass over more than twice as many keys as it has room for looks the same.
    """
    return maxsize is not None and evictions > maxsize and misses > hits


def factories() -> list[dict[str, Any]]:
    """Layer 2, a row for each cache in front of a factory of JITImpls: those that operator packages
    keep, and the `lru_cache`s that the hooks found.
    """
    rows = {row["factory"]: row for row in [*_foreign_factories(), *sources.rows("jit")]}
    for row in rows.values():
        row["thrashes"] = thrashes(row["hits"], row["misses"], row["maxsize"], row["evictions"])
    return [rows[factory] for factory in sorted(rows)]


def _foreign_factories() -> Iterable[dict[str, Any]]:
    """The counts of `functools.lru_cache`. It does not count evictions: of a full cache they are
    the misses that are not in it any more, and calls that raised among them.
    """
    hooks: Any = sys.modules.get("tlcache.runtime.hooks")
    if hooks is None:
        return
    for module, qualname in sources.steady(hooks.factories):
        found: Any = sys.modules.get(module)
        for name in qualname.split("."):
            found = getattr(found, name, None)
        if not callable(getattr(found, "cache_info", None)):
            continue
        info = found.cache_info()
        full = info.maxsize is not None and info.currsize >= info.maxsize
        yield {
            "factory": f"{module}:{qualname}",
            "hits": info.hits,
            "misses": info.misses,
            "maxsize": info.maxsize,
            "currsize": info.currsize,
            "evictions": max(0, info.misses - info.currsize) if full else 0,
        }


# --- layer 1 ---


def compiles() -> dict[str, Any]:
    """Layer 1: the counts of all cache roots that were in force, in sum and by kernel. Percentiles
    are of the latest 1024 durations of a root.
    """
    books = ledgers()
    kernels: dict[str, list[Counters]] = {}
    for book in books:
        for kernel, counters in list(book.kernels.items()):
            kernels.setdefault(kernel, []).append(counters)
    shown = (
        "memory", "restored", "disk", "compiled", "failed", "after_ready", "compile_seconds"
    )  # fmt: skip
    return {
        **_summed([book.total for book in books]),
        "restore_latency": percentiles(
            sources.steady(lambda: [s for b in books for s in b.restores])
        ),
        "compile_latency": percentiles(
            sources.steady(lambda: [s for b in books for s in b.compiles])
        ),
        "kernels": [
            {"kernel": kernel, **{name: sums[name] for name in shown}}
            for kernel in sorted(kernels)
            for sums in [_summed(kernels[kernel])]
        ],
        "not_restored": _not_restored(),
    }


def _not_restored() -> list[dict[str, Any]]:
    """Why calls of a program's own functions are left to TileLang, and how many, most first."""
    hooks: Any = sys.modules.get("tlcache.runtime.foreign.accelerate")
    # It may be on its way in: then it has refused nothing yet.
    found = hooks.refusals() if hasattr(hooks, "refusals") else {}
    return [{"reason": reason, "count": count} for reason, count in found.items()]


def _summed(parts: list[Counters]) -> dict[str, Any]:
    sums: dict[str, Any] = dict(vars(Counters()))
    for counters in parts:
        for name in sums:
            sums[name] += getattr(counters, name)
    return {
        name: round(value, 6) if isinstance(value, float) else value for name, value in sums.items()
    }


# --- below ---

_OF_IMPLS = ("_kernel_cache", "_call_form_cache", "_tuner_cache")


def tilelang() -> list[dict[str, Any]]:
    """The in-process caches of TileLang that hold something, by cache and owner: a backend, or the
    function that a JITImpl was made of. TileLang's own are known where it is imported; JITImpls,
    where an operator package or the hooks keep track of them.
    """
    sizes: Counter[tuple[str, str]] = Counter()
    if "tilelang" not in sys.modules:
        return []
    cache: Any = sys.modules.get("tilelang.cache")
    for maps in ("_dispatch_map", "_ascend_dispatch_map"):
        singletons = getattr(cache, maps, None)
        for backend, singleton in list(singletons.items()) if isinstance(singletons, dict) else ():
            owner = backend if maps == "_dispatch_map" else f"ascend {backend}"
            sizes["KernelCache._memory_cache", owner] += _size(singleton, "_memory_cache")
    tuner: Any = getattr(sys.modules.get("tilelang.autotuner.tuner"), "AutoTuner", None)
    sizes["AutoTuner._memory_cache", "tilelang"] += _size(tuner, "_memory_cache")
    for impl in _impls():
        function = getattr(impl, "func", None)
        function = getattr(function, "orig_func", function)
        module, name = (getattr(function, key, "?") for key in ("__module__", "__qualname__"))
        for attribute in _OF_IMPLS:
            sizes[f"JITImpl.{attribute}", f"{module}:{name}"] += _size(impl, attribute)
    return [
        {"cache": cache_name, "owner": owner, "size": size}
        for (cache_name, owner), size in sorted(sizes.items())
        if size
    ]


def _impls() -> list[Any]:
    found = sources.rows("impl")
    hooks: Any = sys.modules.get("tlcache.runtime.hooks")
    if hooks is not None:
        found += sources.steady(hooks.jits)
    return list({id(impl): impl for impl in found}.values())


def _size(owner: Any, attribute: str) -> int:
    found: Any = getattr(owner, attribute, None)
    return len(found) if hasattr(found, "__len__") else 0
