"""One process with an agent, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tlcache.advice import advise, came_late
from tlcache.cli import render
from tlcache.cli.overview import ready, up
from tlcache.cli.view import View, advised
from tlcache.readings import Incident, Latency, Rates, Reading, when

__all__ = ["single"]

_COLUMNS = ["LAYER", "WHAT", "HITS", "MISSES", "SIZE", "EVICTED", "NOTE"]
_SPEED = _COLUMNS.index("HITS") + 1
_SHOWN = 5


def single(one: Reading, failures: Sequence[Incident], rates: Rates | None, live: bool) -> View:
    """One process, layer by layer.

    Args:
        one: The process.
        failures: The kernels that it could not have, the newest last.
        rates: Since the last view.
        live: Whether there is a column for rates.
    """
    view = View(
        [_headline(one)], list(_COLUMNS), right=["HITS", "CALLS/S", "MISSES", "SIZE", "EVICTED"]
    )
    for speed, cells in _layers(one, rates):
        if live:
            cells.insert(_SPEED, "–" if speed is None else f"{speed:,.0f}")
        view.rows.append(cells)
    if live:
        view.header.insert(_SPEED, "CALLS/S")
    view.foot = _summary(one)
    view.foot += [
        f"not restored: {render.count(refusal.count, 'call')}: {refusal.reason}"
        for refusal in one.refusals[:_SHOWN]
    ]
    view.foot += [f"failed: {event.title}: {event.reason or '?'}" for event in failures[-_SHOWN:]]
    if late := came_late(one.incidents):
        view.foot.append(_late_line(one, late))
    for advice in advise([one]):
        view.hints += advised(advice, lines=True)
    return view


def _layers(one: Reading, rates: Rates | None) -> Iterator[tuple[float | None, list[str]]]:
    """The rows of the table, each with its calls a second."""
    for work in one.workload:
        what = f"{work.key} ({render.count(work.instances, 'op')})"
        speed = rates.workload.get(work.key) if rates else None
        yield (
            speed,
            ["3 workload", what, *_numbers(work.hits, work.misses, work.workloads), "–", ""],
        )
    for jit in one.jit:
        if not jit.hits + jit.misses:
            continue  # of an operator that nobody used
        size = f"{jit.currsize:,}/{'∞' if jit.maxsize is None else jit.maxsize}"
        note = f"thrashes: room for {jit.maxsize}" if jit.thrashes else ""
        speed = rates.jit.get(jit.factory) if rates else None
        numbers = [*_numbers(jit.hits, jit.misses), size, f"{jit.evictions:,}"]
        yield speed, ["2 jit", jit.factory, *numbers, note]
    for kernel in one.kernels:
        came = {name: getattr(kernel, name) for name in ("restored", "disk", "compiled", "failed")}
        note = " · ".join(f"{name} {count:,}" for name, count in came.items() if count)
        numbers = _numbers(kernel.memory, sum(came.values()))
        yield None, ["1 compile", kernel.kernel, *numbers, "–", "–", note]
    for cache in one.tilelang:
        what = f"{cache.cache} of {cache.owner}"
        yield None, ["0 tilelang", what, "–", "–", f"{cache.size:,}", "–", ""]


def _numbers(*counts: int) -> list[str]:
    return [f"{count:,}" for count in counts]


def _headline(one: Reading) -> str:
    process = one.process
    told = [process.name or "–", f"pid {process.pid}"]
    if process.rank is not None:
        told.append(f"rank {process.rank} of {process.world_size or '?'}")
    told.append(f"up {up(one)}")
    told.append(f"ready {ready(one)}" if process.ready else "not marked ready")
    told += ["frozen"] if process.frozen else []
    told += [f"TileLang {process.tilelang}"] if process.tilelang else []
    told += ["hooks"] if process.hooks else []
    told += [f"recording {process.recording}"] if process.recording else []
    return "  ".join([*told, f"cache {process.root or 'unknown'}"])


def _summary(one: Reading) -> list[str]:
    total = one.compile
    spent = f" ({render.duration(total.compile_seconds)})" if total.compile_seconds else ""
    saved = f"      saved about {render.duration(total.saved_seconds)}"
    counts = f"restored {total.restored:,} · disk {total.disk:,} · compiled {total.compiled:,}"
    lines = [f"{counts}{spent} · failed {total.failed:,}{saved if total.saved_seconds else ''}"]
    latencies = [("a restore", one.restores), ("a compile or disk hit", one.compiles)]
    told = [f"{what} {_latency(latency)}" for what, latency in latencies if latency.count]
    return [*lines, *(["      ".join(told)] if told else [])]


def _latency(latency: Latency) -> str:
    names = {"p50": "median", "p90": "p90", "p99": "p99", "max": "at most"}
    return ", ".join(
        f"{name} {render.duration(getattr(latency, field))}" for field, name in names.items()
    )


def _late_line(one: Reading, late: Sequence[Incident]) -> str:
    told = [
        f"{event.title} ({render.ago(when(event.time))}, {render.duration(event.seconds)})"
        for event in late[:_SHOWN]
    ]
    more = one.compile.after_ready - len(told)
    return f"{render.count(one.compile.after_ready, 'compile')} after ready: {', '.join(told)}" + (
        f" and {more:,} more" if more > 0 else ""
    )
