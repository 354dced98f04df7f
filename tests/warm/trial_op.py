"""A third-party operator, y = 2 x, whose schedules go wrong in every way in which one can.

The fixture `trial_op` installs a copy of it, with an entry point in the group `tlcache.ops`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tlcache.operators import Operator, WorkloadError

KINDS = ("slow", "fast", "broken", "spills", "wrong", "crashes", "hangs")


@dataclass(frozen=True)
class TrialWorkload:
    """What is computed; `start` is the kind of the default schedule."""

    M: int | str
    N: int = 256
    dtype: str = "float32"
    start: str = "slow"

    def __post_init__(self) -> None:
        if self.start not in KINDS:
            raise WorkloadError("start", f"start is {self.start!r}; it is one of {KINDS}")


def default_schedule(workload: TrialWorkload, target: Any) -> dict[str, Any]:
    return {"kind": workload.start}


def candidates(workload: TrialWorkload, target: Any) -> Iterator[dict[str, Any]]:
    return ({"kind": kind} for kind in (KINDS if target.is_cuda else ()))


def check_schedule(workload: TrialWorkload, schedule: Mapping[str, Any], target: Any) -> None:
    if set(schedule) != {"kind"} or schedule["kind"] not in KINDS:
        raise WorkloadError("schedule.kind", f"kind is one of {KINDS}")


def example(workload: TrialWorkload, count: int, device: str) -> tuple[Any, ...]:
    import torch

    return (torch.randn(count, workload.N, device=device),)


def double(M: int | str, N: int, dtype: str, start: str, target: str) -> Any:
    """The JITImpl. Its kernels take N threads a block, but for `slow`, which takes one warp."""
    import tilelang
    import tilelang.language as T

    @tilelang.jit(out_idx=[1], target={"kind": "cuda", "arch": target})
    def double(kind: str):
        count = T.dynamic("rows") if M == "dynamic" else M

        if kind == "slow":

            @T.prim_func
            def slow(x: T.Tensor((count, N), dtype), y: T.Tensor((count, N), dtype)):
                with T.Kernel(1, threads=32):
                    thread = T.get_thread_binding()
                    for row in T.serial(count):
                        for i in T.serial(N // 32):
                            y[row, i * 32 + thread] = x[row, i * 32 + thread] * 2.0

            return slow

        if kind == "spills":

            @T.prim_func
            def spills(x: T.Tensor((count, N), dtype), y: T.Tensor((count, N), dtype)):
                with T.Kernel(count, threads=N) as row:
                    thread = T.get_thread_binding()
                    held = T.alloc_local((512,), dtype)
                    for i in T.serial(512):
                        held[i] = x[row, (thread + i) % N]
                    y[row, thread] = held[(row * 37) % 512] + held[(row * 41 + thread) % 512]

            return spills

        # A call's name is printed into the CUDA source as it is.
        calls = {
            "broken": "no_such_function",
            "crashes": "*(volatile float*)8ull = float",
            "hangs": "while (true) __nanosleep",
        }

        if kind in calls:
            said = calls[kind]

            @T.prim_func
            def unlucky(x: T.Tensor((count, N), dtype), y: T.Tensor((count, N), dtype)):
                with T.Kernel(count, threads=N) as row:
                    thread = T.get_thread_binding()
                    T.call_extern("handle", said, 100)
                    y[row, thread] = x[row, thread] * 2.0

            return unlucky

        by = 3.0 if kind == "wrong" else 2.0

        @T.prim_func
        def scaled(x: T.Tensor((count, N), dtype), y: T.Tensor((count, N), dtype)):
            with T.Kernel(count, threads=N) as row:
                thread = T.get_thread_binding()
                y[row, thread] = x[row, thread] * by

        return scaled

    return double


OPERATORS = {
    "trial": Operator(
        name="trial",
        kernel="trial_op:double",
        workload=TrialWorkload,
        schedule=default_schedule,
        check_schedule=check_schedule,
        candidates=candidates,
        example=example,
    )
}
