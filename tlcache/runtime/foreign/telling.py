"""What is said of a restored kernel: it is counted, noted and recorded like any that TileLang
gave.
"""

from __future__ import annotations

import functools
from typing import Any

from tlcache import targets
from tlcache.fingerprint import key_environment
from tlcache.runtime import hooks, recorder
from tlcache.runtime.origin import Origin
from tlcache.runtime.resolve import foreign, remembered
from tlcache.store.calls import Answer

__all__ = ["origin_of", "tell"]


def origin_of(call: Any) -> Origin:
    """Where a call's kernel comes from."""
    return hooks.origin_of(call.impl, call.args, call.kwargs)


def tell(call: Any, answer: Answer, kernel: Any, seconds: float, *, known: bool) -> None:
    """Count a restored kernel, note it, and record what would make it again.

    Args:
        call: The call.
        answer: What it was restored from.
        kernel: The kernel.
        seconds: What it took.
        known: Whether the process had it in memory.
    """
    try:
        _tell(call, answer, kernel, seconds, known)
    except Exception as error:
        hooks.trouble(error)


def _tell(call: Any, answer: Answer, kernel: Any, seconds: float, known: bool) -> None:
    came = origin_of(call)
    workload = came.workload
    if workload is not None:
        environment = key_environment(_target(call.where.target))
        workload = recorder.met(workload, came.place, answer.key, environment)
    else:
        recorder.met_unreplayable(came.kernel, [], answer.key, came.reason, came.remedy)
    if known:
        remembered(came.kernel)
        return
    foreign(
        came.kernel,
        "restored",
        answer.title,
        seconds,
        entry=answer.entry,
        workload=workload,
        saved=answer.compile_seconds,
    )


@functools.cache
def _target(said: str) -> str:
    import tvm

    return targets.of_tvm(tvm.target.Target(said).export()).name
