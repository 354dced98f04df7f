"""Work that was asked for: what it is, how far it is, what came of it.

A job is a child process of the command that a person would type, at low priority: its memory and
its faults are its own, and its locks are the ones that everybody takes. There are two lanes, one
for compiling and one for the rest, so that a prune does not wait for an hour of compiles; in a lane
jobs take turns, so what an earlier one compiled is there for the later ones. Work that is asked for
again before it has ended is the same job.

Invariant: a job ends in one state, whatever becomes of its process. There is a bounded number of
jobs, and of what is kept of each.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from tlcache.daemon.broadcast import Broadcast
from tlcache.daemon.children import Child, Work

__all__ = ["Job", "Jobs", "QueueFull", "STATES"]

_log = logging.getLogger(__name__)

STATES = ("queued", "running", "done", "failed", "cancelled")
_QUEUED = 32
_KEPT = 50
_TELL_EVERY = 1.0
_LATELY = timedelta(hours=1)
_LANES = {"warm": "compiling"}


class QueueFull(Exception):
    """There are as many jobs waiting as there may be."""


@dataclass
class Job:
    """One job.

    Attributes:
        id: Its name.
        work: What it does.
        state: One of `STATES`.
        created, started, ended: When, UTC.
        kernels: How many kernels a warm has `total`, and how many of them were `present`, and are
            `compiled`, `failed` or of another status by now.
        current: The kernels that are being compiled.
        told: What the command wrote as JSON, with long lists cut, see `children`; as text, which
            takes a tenth of the memory.
        exit_code: The command's; None while it has none.
        error: Why it failed.
        hint: What to do about that.
        over: Finished when it has ended.
    """

    id: str
    work: Work
    state: str = "queued"
    created: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    started: datetime | None = None
    ended: datetime | None = None
    kernels: Counter[str] = field(default_factory=Counter)
    current: dict[str, str] = field(default_factory=dict)
    told: bytes | None = None
    exit_code: int | None = None
    error: str | None = None
    hint: str | None = None
    over: Future[None] = field(default_factory=Future)

    @property
    def left(self) -> int:
        """Kernels of a warm that have not come to anything yet."""
        done = sum(count for status, count in self.kernels.items() if status != "total")
        return self.kernels["total"] - done if not self.over.done() else 0

    @property
    def result(self) -> dict[str, Any] | None:
        """What the command wrote."""
        return json.loads(self.told) if self.told is not None else None

    def as_json(self, *, whole: bool = True) -> dict[str, Any]:
        """It as the API tells it; the result only where it is `whole`."""
        return {
            "id": self.id,
            "kind": self.work.kind,
            "state": self.state,
            "root": self.work.root,
            "command": self.work.shown,
            "created": self.created.isoformat(timespec="milliseconds"),
            "started": self.started and self.started.isoformat(timespec="milliseconds"),
            "ended": self.ended and self.ended.isoformat(timespec="milliseconds"),
            "kernels": {**dict(self.kernels), "left": self.left},
            "current": list(self.current.values()),
            "exit_code": self.exit_code,
            "error": self.error,
            "hint": self.hint,
            "result": self.result if whole else None,
        }


class Jobs:
    """All jobs of a daemon. Threads may share it.

    Args:
        events: Where to tell what becomes of them.
    """

    def __init__(self, events: Broadcast) -> None:
        self._events = events
        self._there = threading.Condition()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._waiting: dict[str, deque[Job]] = {"compiling": deque(), "other": deque()}
        self._running: dict[str, Child] = {}
        self._stopping = False
        self._threads: list[threading.Thread] = []

    def submit(self, work: Work) -> Job:
        """Have work done; where the same is waiting or being done already, its job.

        Raises:
            QueueFull: Too much is waiting.
        """
        with self._there:
            for job in self._jobs.values():
                if job.state in ("queued", "running") and job.work == work:
                    return job
            lane = self._waiting[_LANES.get(work.kind, "other")]
            if len(lane) >= _QUEUED or self._stopping:
                raise QueueFull
            job = Job(secrets.token_hex(8), work)
            self._jobs[job.id] = job
            lane.append(job)
            self._forget()
            if not self._threads:
                self._start()
            self._there.notify_all()
        self._tell("job-queued", job)
        return job

    def get(self, name: str) -> Job | None:
        """A job by its id; None where there is none, or it ended long ago."""
        with self._there:
            return self._jobs.get(name)

    def all(self) -> list[Job]:
        """The jobs that there are, and those that ended last; the newest first."""
        with self._there:
            return list(reversed(self._jobs.values()))

    def cancel(self, job: Job) -> None:
        """End a job, if it has not ended."""
        with self._there:
            if job.state == "queued":
                self._waiting[_LANES.get(job.work.kind, "other")].remove(job)
                self._over(job, "cancelled")
            child = self._running.get(job.id)
        if child is not None:
            child.end()

    def kernels(self) -> dict[str, int]:
        """How many kernels are left to do, and how many came to what, in the jobs that have not
        ended, or have within the last hour.
        """
        oldest = datetime.now(timezone.utc) - _LATELY
        found = dict.fromkeys(("left", "compiled", "present", "failed"), 0)
        with self._there:
            for job in self._jobs.values():
                if job.ended is None or job.ended > oldest:
                    found["left"] += job.left
                    for status in ("compiled", "present", "failed"):
                        found[status] += job.kernels[status]
        return found

    def stop(self, seconds: float) -> None:
        """End all jobs, and wait for it at most so long."""
        with self._there:
            self._stopping = True
            for lane in self._waiting.values():
                while lane:
                    self._over(lane.popleft(), "cancelled")
            children = list(self._running.values())
            self._there.notify_all()
        for child in children:
            child.end()
        for thread in self._threads:
            thread.join(seconds / len(self._threads))

    # --- the lanes ---

    def _start(self) -> None:
        for lane in self._waiting:
            thread = threading.Thread(target=self._serve, args=(lane,), name=f"jobs {lane}")
            thread.daemon = True
            thread.start()
            self._threads.append(thread)

    def _forget(self) -> None:
        """Forget the oldest that have ended."""
        ended = [job.id for job in self._jobs.values() if job.over.done()]
        for name in ended[: max(0, len(self._jobs) - _KEPT)]:
            del self._jobs[name]

    def _serve(self, lane: str) -> None:
        while True:
            with self._there:
                self._there.wait_for(lambda: self._waiting[lane] or self._stopping)
                if self._stopping:
                    return
                job = self._waiting[lane].popleft()
                job.state, job.started = "running", datetime.now(timezone.utc)
            self._tell("job-started", job)
            try:
                self._run(job)
            except Exception as error:
                _log.exception("the job %s of %s failed", job.id, job.work.shown)
                with self._there:
                    self._over(job, "failed", f"{type(error).__name__}: {error}")

    def _run(self, job: Job) -> None:
        with contextlib.ExitStack() as held:
            child = held.enter_context(Child(job.work))
            with self._there:
                self._running[job.id] = child
                if self._stopping:
                    child.end()
            try:
                self._follow(job, child.steps())
            finally:
                with self._there:
                    self._running.pop(job.id, None)
            job.exit_code = child.code
            if child.result is not None:
                job.told = json.dumps(child.result).encode()
            state, error, hint = child.outcome()
        with self._there:
            self._over(job, state, error, hint)

    def _follow(self, job: Job, steps: Iterable[dict[str, Any]]) -> None:
        told = 0.0
        for step in steps:
            with self._there:
                kind, key, status = (
                    step.get("step"),
                    str(step.get("action_key")),
                    step.get("status"),
                )
                if kind == "planned":
                    for name, count in step.get("counts", {}).items():
                        job.kernels[str(name)] += int(count)
                elif kind == "started":
                    job.current[key] = str(step.get("kernel"))
                elif kind == "ended":
                    job.current.pop(key, None)
                    job.kernels[str(status)] += 1
            now = time.monotonic()
            if kind == "planned" or (kind == "ended" and now - told >= _TELL_EVERY):
                self._tell("job-progress", job)
                told = now

    def _over(
        self, job: Job, state: str, error: str | None = None, hint: str | None = None
    ) -> None:
        job.state, job.error, job.hint = state, error, hint
        job.ended = datetime.now(timezone.utc)
        job.current.clear()
        job.over.set_result(None)
        self._tell("job-ended", job)

    def _tell(self, kind: str, job: Job) -> None:
        self._events.tell(
            kind,
            root=job.work.root,
            job=job.id,
            what=job.work.kind,
            state=job.state,
            kernels={**dict(job.kernels), "left": job.left},
        )
