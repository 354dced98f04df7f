"""GPU time of calls: kernel durations from the profiler, L2 flushed before each call, in turn.

Before each call a fill of 256 MB goes through L2, so that the call reads its inputs from memory,
as it would between the other layers of a model. The fill's kernel also tells the calls apart in
the profiler's record: what runs between two fills is one call, and its time is the sum of its
kernels' durations. Launch latency and gaps between kernels are no part of it.

Calls take turns, and each round begins with another one, so that a change of the GPU's clocks falls
on all of them. The hardware's clock ticks every 32 ns, so single durations, and medians with them,
are multiples of that; `middle_mean` resolves less.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from method import Failure

__all__ = ["middle_mean", "split", "summary", "times"]

FLUSH_BYTES = 256 * 2**20
"""Five times the L2 of an H200."""
FLUSH_KERNEL = "FillFunctor<short>"
"""In the name of torch's kernel for `fill_` of int16, which nothing measured here uses."""
ATTEMPTS = 3
"""The profiler drops records now and then; a run that lacks some is done again."""


def times(calls: Mapping[str, Callable[[], object]], reps: int = 40) -> dict[str, list[float]]:
    """Measure calls in turn.

    Args:
        calls: By name. Each launches the same kernels every time, and none is CUDA-graph captured.
        reps: How often each is measured, after two calls that do not count.

    Returns:
        Microseconds by name, in the order of the rounds.

    Raises:
        Failure: The profiler's record could not be divided into the calls.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    names = list(calls)
    flush = torch.empty(FLUSH_BYTES // 2, dtype=torch.int16, device="cuda")
    for call in calls.values():
        call()
        call()
    flush.fill_(1)
    order = [
        names[(place + rep) % len(names)] for rep in range(reps) for place in range(len(names))
    ]
    fault = ""
    for _ in range(ATTEMPTS):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for name in order:
                flush.fill_(1)
                calls[name]()
            torch.cuda.synchronize()
        events = [
            (event.start_ns(), event.duration_ns(), event.name())
            for event in profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
            if event.device_type() == torch.autograd.DeviceType.CUDA
            and not event.is_user_annotation()
        ]
        try:
            return split(order, events)
        except ValueError as error:
            fault = str(error)
    raise Failure(f"the profiler's record is of no use after {ATTEMPTS} attempts: {fault}")


def split(order: Sequence[str], events: Iterable[tuple[int, int, str]]) -> dict[str, list[float]]:
    """Divide a record into calls.

    Args:
        order: The name of each call, in the order of the calls.
        events: Start in ns, duration in ns and name of what ran on the GPU, in any order.

    Returns:
        Microseconds by name.

    Raises:
        ValueError: Records are missing: fewer calls than were made, a call without a kernel, or one
            with more or fewer than another call of that name.
    """
    found: list[list[int]] = []
    for _, duration, name in sorted(events):
        if FLUSH_KERNEL in name:
            found.append([])
        elif found:
            found[-1].append(duration)
    if len(found) != len(order):
        raise ValueError(f"{len(order)} calls were made, and {len(found)} are recorded")
    kernels: dict[str, int] = {}
    measured: dict[str, list[float]] = {}
    for name, durations in zip(order, found, strict=True):
        if not durations:
            raise ValueError(f"a call of {name!r} has no kernel")
        if kernels.setdefault(name, len(durations)) != len(durations):
            raise ValueError(f"{name!r} ran {kernels[name]} kernels once, {len(durations)} later")
        measured.setdefault(name, []).append(sum(durations) / 1000)
    return measured


def middle_mean(samples: Sequence[float]) -> float:
    """The mean of the middle half: as deaf to outliers as a median needs to be, and finer."""
    ordered = sorted(samples)
    aside = len(ordered) // 4
    return statistics.fmean(ordered[aside : len(ordered) - aside])


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median, least, greatest, mean of the middle half, and all samples, as a line of ns."""
    return {
        "us": round(statistics.median(samples), 4),
        "min": min(samples),
        "max": max(samples),
        "middle_mean": round(middle_mean(samples), 4),
        "samples_ns": " ".join(str(round(one * 1000)) for one in samples),
    }
