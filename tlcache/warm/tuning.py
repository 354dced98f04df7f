"""The search for the best schedule of a workload, on a GPU.

Candidates are compiled in parallel by the warm's own pool, into a scratch root, and measured one by
one in a process of their own. TileLang's autotuner compiles in threads (three times slower), says
of a candidate that failed only that it did, and keeps its results as pickles, which run when they
are read; its way of timing (`do_bench`) is what is used here.

Invariant: nothing is written outside the scratch root. A candidate that does not compile, spills,
crashes, hangs or computes something else is dropped with the reason, and the search goes on.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from tlcache.errors import EnvironmentFault
from tlcache.fingerprint import platform_name, tilelang_version, versions
from tlcache.operators import Operator
from tlcache.spec import KernelSpec
from tlcache.store import layout
from tlcache.store.schedules import Tuned
from tlcache.warm import pool
from tlcache.warm.outcome import Outcome

__all__ = ["DYNAMIC_ROWS", "Result", "Task", "Trial", "plan", "tune"]

DYNAMIC_ROWS = (1, 128, 4096)
"""What a kernel with a symbolic M is measured at; the geometric mean decides."""
GAIN = 0.99
"""A candidate replaces the default where it takes less than this of its time: the noise is 1 %."""
FINALISTS = 4


@dataclass
class Trial:
    """One candidate.

    Attributes:
        spec: The kernel.
        microseconds: GPU time of a launch for each of the task's rows; empty where it was dropped.
        reason: Why it was dropped, in one line.
    """

    spec: KernelSpec
    microseconds: tuple[float, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class Task:
    """One workload to tune.

    Attributes:
        operator: The operator.
        default: The kernel with the default schedule.
        candidates: The others.
        rows: Values of M to measure at.
    """

    operator: Operator
    default: KernelSpec
    candidates: tuple[KernelSpec, ...]
    rows: tuple[int, ...]


@dataclass
class Result:
    """What came of a workload.

    Attributes:
        task: The workload.
        tuned: The best schedule; the default where none is 1 % better.
        reason: Why there is none, in one line.
        trials: All candidates, the default first.
    """

    task: Task
    tuned: Tuned | None = None
    reason: str | None = None
    trials: list[Trial] = field(default_factory=list)


def plan(
    operator: Operator,
    spec: KernelSpec,
    rows: Sequence[int] = DYNAMIC_ROWS,
    limit: int | None = None,
) -> Task:
    """What is to be tried for a workload.

    Args:
        operator: The operator.
        spec: The kernel with the default schedule.
        rows: What a kernel with a symbolic M is measured at; one without an M is measured once.
        limit: Candidates at most, spread evenly over the schedule space.
    """
    workload = operator.workload(**spec.workload)
    space = operator.candidates(workload, spec.target) if operator.candidates else ()
    found = dict.fromkeys(operator.spec(spec.workload, spec.target, schedule) for schedule in space)
    found.pop(spec, None)
    candidates = tuple(found)
    if limit is not None and len(candidates) > limit:
        candidates = tuple(candidates[i * len(candidates) // limit] for i in range(limit))
    M = spec.workload.get("M", 1)
    counts = (M,) if isinstance(M, int) else tuple(rows)
    return Task(operator, spec, candidates, counts)


def tune(
    tasks: Sequence[Task],
    *,
    jobs: int,
    timeout: float = 120.0,
    reps: int = 30,
    on_compiled: Callable[[KernelSpec], None] = lambda spec: None,
    on_measured: Callable[[KernelSpec], None] = lambda spec: None,
) -> Iterator[Result]:
    """Find the best schedule of each workload; yields them as they are done.

    Args:
        tasks: The workloads.
        jobs: Compiles at a time.
        timeout: Seconds for one compile, and for one measurement.
        reps: Launches to time, of each candidate first and of the finalists again.
        on_compiled: Told of each candidate that was compiled or failed to.
        on_measured: Told of each candidate that was measured.

    Raises:
        EnvironmentFault: No compiler, or no GPU that can be measured on.
    """
    with tempfile.TemporaryDirectory(prefix="tlcache-tune-") as scratch:
        layout.make_skeleton(layout.cache_root(scratch), tilelang_version(), platform_name())
        wanted = list(
            dict.fromkeys(spec for task in tasks for spec in (task.default, *task.candidates))
        )
        failed: dict[KernelSpec, Outcome] = {}
        before = os.environ.get("TILELANG_CACHE_DIR")
        try:
            for index, outcome in pool.run(wanted, scratch, jobs=jobs, timeout=timeout):
                if outcome.status not in ("compiled", "present"):
                    failed[wanted[index]] = outcome
                on_compiled(wanted[index])
        finally:
            if before is None:
                os.environ.pop("TILELANG_CACHE_DIR", None)
            else:
                os.environ["TILELANG_CACHE_DIR"] = before
        with _Meter(scratch, timeout) as meter:
            for task in tasks:
                yield _searched(task, failed, meter, reps, on_measured)


def _searched(
    task: Task,
    failed: dict[KernelSpec, Outcome],
    meter: _Meter,
    reps: int,
    on_measured: Callable[[KernelSpec], None],
) -> Result:
    trials = [Trial(spec) for spec in (task.default, *task.candidates)]
    for trial in trials:
        if (outcome := failed.get(trial.spec)) is not None:
            trial.reason = outcome.error or f"it cannot be kept ({outcome.status})"
        elif trials[0].reason is None:
            meter.measure(task, trial, reps)
        on_measured(trial.spec)
    result = Result(task, trials=trials)
    if trials[0].reason is not None:
        result.reason = f"the default schedule does not run: {trials[0].reason}"
        return result
    _rank(trials, meter, task, reps)
    best = min(
        (trial for trial in trials if trial.microseconds), key=lambda t: _score(t, trials[0])
    )
    if _score(best, trials[0]) > GAIN:
        best = trials[0]
    result.tuned = Tuned(
        op=task.operator.name,
        spec=best.spec,
        microseconds=round(_mean(best.microseconds), 3),
        default=dict(task.default.schedule),
        default_microseconds=round(_mean(trials[0].microseconds), 3),
        device=meter.device,
        measured={
            "rows": list(task.rows),
            "candidates": len(trials),
            "dropped": sum(1 for trial in trials if trial.reason is not None),
            "versions": dict(versions()),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        },
    )
    return result


def _rank(trials: list[Trial], meter: _Meter, task: Task, reps: int) -> None:
    """Measure the finalists and the default again, in turn, and keep each one's middle time."""
    default = trials[0]
    running = sorted((t for t in trials if t.microseconds), key=lambda t: _score(t, default))
    finalists = list(dict.fromkeys(map(id, [*running[:FINALISTS], default])))
    chosen = [trial for trial in running if id(trial) in finalists]
    samples = {id(trial): [trial.microseconds] for trial in chosen}
    for _ in range(2):
        for trial in chosen:
            again = Trial(trial.spec)
            meter.measure(task, again, reps)
            if again.microseconds:
                samples[id(trial)].append(again.microseconds)
    for trial in chosen:
        columns = zip(*samples[id(trial)], strict=True)
        trial.microseconds = tuple(sorted(column)[len(column) // 2] for column in columns)


def _mean(values: Sequence[float]) -> float:
    """The geometric mean: each row count weighs the same, however long it takes."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _score(trial: Trial, default: Trial) -> float:
    return _mean(trial.microseconds) / _mean(default.microseconds)


class _Meter:
    """The measuring process, and another one after it where it was lost.

    Attributes:
        device: The GPU's name.
    """

    def __init__(self, root: str, timeout: float) -> None:
        self.device = ""
        self._root = root
        self._timeout = timeout
        self._process: Any = None
        self._pipe: Any = None

    def __enter__(self) -> _Meter:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._root), daemon=True)
        self._process.start()
        theirs.close()
        try:
            if not self._pipe.poll(120):
                raise EOFError
            self.device = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._stop()
            raise EnvironmentFault(
                "the measuring process could not start on the GPU",
                hint='`python -c "import torch; torch.zeros(1).cuda()"` shows why',
            ) from error

    def _stop(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()

    def measure(self, task: Task, trial: Trial, reps: int) -> None:
        """Fill in a trial's time, or why there is none."""
        request = (
            task.operator.name, trial.spec.to_json(), task.default.to_json(), task.rows, reps,
        )  # fmt: skip
        fatal = True
        try:
            self._pipe.send(request)
            if self._pipe.poll(self._timeout):
                trial.microseconds, trial.reason, fatal = self._pipe.recv()
            else:
                trial.reason = f"it did not end within {self._timeout:g} s"
        except (EOFError, OSError):
            self._process.join(1)
            trial.reason = f"it ended the measuring process ({self._process.exitcode})"
        if fatal:
            with contextlib.suppress(OSError):
                self._stop()
            self._start()


def _serve(pipe: Any, root: str) -> None:
    from tlcache.warm import measuring

    measuring.serve(pipe, root)
