"""A pool of compiling processes: forked from a server that has TileLang imported, killable one by
one.

Invariant: every task ends in exactly one outcome, whatever happens to its worker. When the pool is
left, no worker and no compiler of a worker is running.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from tlcache.spec import KernelSpec
from tlcache.store import roots
from tlcache.warm.outcome import Outcome, Work

__all__ = ["default_jobs", "run"]

WORKER_BYTES = 768 * 2**20
"""Memory that one compile may take at its peak, nvcc included; the forked TileLang is shared."""


_LONGEST_TEMPORARY = 75
"""Bytes of a temporary directory in which the fork server's socket, /pymp-…/listener-…, fits."""


@dataclass
class _Worker:
    process: ForkServerProcess
    pipe: connection.Connection
    task: int | None = None
    started: float = field(default=0.0)


def default_jobs() -> int:
    """As many workers as is set, else as this process's cores, and the memory that is free,
    allow.
    """
    import psutil

    from tlcache import config

    if (chosen := config.value("jobs")) is not None:
        assert isinstance(chosen, int)
        return chosen
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup("cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    free = psutil.virtual_memory().available
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit.isdigit() and used.isdigit():
        free = min(free, int(limit) - int(used))
    return max(1, min(cores, int(free // WORKER_BYTES)))


def _cgroup(name: str) -> str:
    try:
        with open("/proc/self/cgroup", encoding="ascii") as file:
            place = next(line[3:].strip() for line in file if line.startswith("0::"))
        with open(f"/sys/fs/cgroup{place}/{name}", encoding="ascii") as file:
            return file.read().strip()
    except (OSError, StopIteration):
        return ""


def run(
    specs: Sequence[KernelSpec],
    root: str,
    *,
    jobs: int,
    keys: Sequence[str | None] | None = None,
    timeout: float | None = None,
    fail_fast: bool = False,
    quiet: bool = True,
    work: Work = "compile",
    on_start: Callable[[int], None] = lambda index: None,
) -> Iterator[tuple[int, Outcome]]:
    """Compile specs, or ask something else of them; yield each one's index and outcome as it ends.

    Args:
        specs: What to compile.
        root: The cache root; its skeleton exists.
        jobs: Workers at a time.
        keys: For each spec, the key that TileLang is to have for it, where a recording tells it.
        timeout: Seconds for one kernel; then its worker and its compilers are killed.
        fail_fast: Stop at the first failure; the rest has no outcome.
        quiet: Throw away what TileLang and the compilers print.
        work: What the workers do.
        on_start: Told the index of each spec as it is handed to a worker.
    """
    # The fork server imports TileLang, which looks at it; of layers, too, it is this root alone.
    os.environ["TILELANG_CACHE_DIR"] = root
    os.environ.pop(roots.VARIABLE, None)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tlcache.warm.preloaded"])
    waiting = deque(range(len(specs)))
    with tempfile.TemporaryDirectory(prefix="tlcache-warm-") as scratch, _workers() as workers:
        _start_server()
        for _ in range(min(jobs, len(specs))):
            workers.append(_start(context, root, scratch, quiet))
        while waiting or any(worker.task is not None for worker in workers):
            for worker in workers:
                if worker.task is None and waiting:
                    worker.task, worker.started = waiting.popleft(), time.monotonic()
                    on_start(worker.task)
                    key = keys[worker.task] if keys is not None else None
                    _send(worker, specs[worker.task], key, work)
            for worker in _ready(workers, timeout):
                index, outcome = worker.task, _received(worker, timeout)
                worker.task = None
                if not worker.process.is_alive() or worker.pipe.closed:
                    _kill(worker)
                    workers.remove(worker)
                    if waiting:
                        workers.append(_start(context, root, scratch, quiet))
                if index is not None:
                    yield index, outcome
                    if fail_fast and outcome.status == "failed":
                        return


@contextmanager
def _workers() -> Iterator[list[_Worker]]:
    workers: list[_Worker] = []
    try:
        yield workers
    finally:
        for worker in workers:
            _kill(worker)


def _start_server() -> None:
    """Start the fork server deaf to Ctrl-C, which would show as a traceback from TileLang's
    import.
    """
    resource_tracker.ensure_running()  # starting it would lift the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    place = tempfile.tempdir
    try:
        tempfile.tempdir = _for_sockets()
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = place
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _for_sockets() -> str:
    """The temporary directory, or another one where a socket in it would have too long a path."""
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) <= _LONGEST_TEMPORARY:
        return place
    others = ("/tmp", "/var/tmp", "/dev/shm")
    return next((one for one in others if os.access(one, os.W_OK | os.X_OK)), place)


def _start(context: ForkServerContext, root: str, scratch: str, quiet: bool) -> _Worker:
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, root, scratch, quiet), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _serve(pipe: Any, root: str, scratch: str, quiet: bool) -> None:
    from tlcache.warm import worker

    worker.serve(pipe, root, scratch, quiet)


def _send(worker: _Worker, spec: KernelSpec, key: str | None, work: Work) -> None:
    try:
        worker.pipe.send((spec.to_json(), key, work))
    except OSError:
        pass  # it died; its sentinel says so at the next wait


def _ready(workers: list[_Worker], timeout: float | None) -> list[_Worker]:
    """The workers that have answered, died, or run out of time."""
    busy = [worker for worker in workers if worker.task is not None]
    wait = None
    if timeout is not None:
        wait = max(0.0, min(worker.started for worker in busy) + timeout - time.monotonic())
    events: list[Any] = [worker.pipe for worker in busy]
    events += [worker.process.sentinel for worker in busy]
    done = connection.wait(events, wait)
    now = time.monotonic()
    return [
        worker
        for worker in busy
        if worker.pipe in done
        or worker.process.sentinel in done
        or (timeout is not None and now - worker.started >= timeout)
    ]


def _received(worker: _Worker, timeout: float | None) -> Outcome:
    try:
        if worker.pipe.poll():
            outcome = worker.pipe.recv()
            assert isinstance(outcome, Outcome)
            return outcome
    except (EOFError, OSError):
        pass
    seconds = time.monotonic() - worker.started
    worker.process.join(0.1)
    code = worker.process.exitcode
    worker.pipe.close()
    if code is None and timeout is not None and seconds >= timeout:
        return Outcome(
            "failed",
            seconds=seconds,
            error=f"its compile was killed after {timeout:g} s",
            hint="`--timeout` gives it longer",
        )
    how = (
        f"by signal {-code} ({signal.Signals(-code).name})" if code and code < 0 else f"with {code}"
    )
    return Outcome("failed", seconds=seconds, error=f"its compiling process ended {how}")


def _kill(worker: _Worker) -> None:
    """End a worker and whatever it runs; it leads its own session."""
    if not worker.pipe.closed:
        worker.pipe.close()
    pid = worker.process.pid
    if pid is None:
        return
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        worker.process.kill()  # it has not become a session leader yet
    worker.process.join()
