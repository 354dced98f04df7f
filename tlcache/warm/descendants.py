"""Processes that are started and that nobody who comes later has to wait for.

Invariant: when `Started` is left, neither the program nor anything that it started is running, and
none of them is a zombie of this process. Children that this process had before are left alone.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

__all__ = ["Started", "dies_with_parent"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MARK = "TLCACHE_STARTED_BY"
_PATIENCE = 5.0


def _prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def dies_with_parent() -> None:
    """Have SIGTERM come when the process that started this one ends, however it does."""
    if _MARK in os.environ:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.environ[_MARK].partition("-")[0] != str(os.getppid()):
            os.kill(os.getpid(), signal.SIGTERM)  # it ended before that


class Started:
    """A program whose standard output is read, and that is ended together with all it started.

    Args:
        command: Program and arguments.
        environment: Its environment.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._before = set(_children())
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of what it starts come here
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env={**environment, _MARK: self._mark},
            )
        except BaseException:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)
            raise

    def __enter__(self) -> Started:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._end()
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def answer(self, deadline: float | None, watched: int | None = None) -> tuple[bytes, int]:
        """What it wrote, and its exit code.

        Args:
            deadline: By `time.monotonic()`; then it is asked to end, and shortly later made to.
            watched: A descriptor; when it can be read, it is time to end, too.
        """
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        told: list[bytes] = []
        asked = False
        try:
            ended = os.pidfd_open(self._process.pid)
        except OSError:
            ended = -1  # there is no such thing in this sandbox: the pipe's end has to do
        os.set_blocking(pipe, False)
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        if ended >= 0:
            poll.register(ended, select.POLLIN)
        if watched is not None:
            poll.register(watched, select.POLLIN)
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = dict(poll.poll(None if left is None else left * 1000 + 1))
            if pipe in ready or ended in ready:
                # What it started may hold the pipe open for longer than it lives itself.
                more = _read(pipe)
                told += more
                if ended in ready or (ended < 0 and not more):
                    break
                if not more:
                    poll.unregister(pipe)
                continue
            if asked:
                self._process.kill()
                break
            asked = True
            self._process.terminate()
            deadline = time.monotonic() + _PATIENCE
            if watched is not None:
                poll.unregister(watched)
        if ended >= 0:
            os.close(ended)
        self._process.stdout.close()
        return b"".join(told), self._process.wait()

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        give_up = time.monotonic() + _PATIENCE
        grace = time.monotonic() + 0.5  # what has nothing to do any more ends by itself
        while (left := self._left()) and time.monotonic() < give_up:
            if time.monotonic() > grace:
                for pid in left:
                    _kill(pid)
            time.sleep(0.005)

    def _left(self) -> list[int]:
        """What it started and still runs; what has ended is waited for."""
        left = []
        for pid in set(_children()) - self._before:
            try:
                if os.waitpid(pid, os.WNOHANG)[0] == 0 and not _is_foreign(pid, self._mark):
                    left.append(pid)
            except ChildProcessError:
                pass
        return left


def _read(pipe: int) -> list[bytes]:
    """All that is in a pipe now."""
    found = []
    try:
        while data := os.read(pipe, 1 << 16):
            found.append(data)
    except BlockingIOError:
        pass
    return found


def _children() -> list[int]:
    """The children of this process: of its main thread, as it has no other."""
    pid = os.getpid()
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return list(map(int, file.read().split()))
    except OSError:
        import psutil

        return [child.pid for child in psutil.Process().children()]


def _is_foreign(pid: int, mark: str) -> bool:
    """Whether a process is known not to be of a start. One that is just ending tells nothing."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            said = file.read()
    except OSError:
        return False
    return bool(said) and f"{_MARK}={mark}".encode() not in said.split(b"\0")


def _kill(pid: int) -> None:
    """End a process, and its session where it leads one."""
    try:
        if os.getsid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
