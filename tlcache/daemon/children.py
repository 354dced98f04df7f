"""A command of tlcache as a child process: what it is given, what it says on its way, what comes of
it.

Invariant: when a child is left, its process and those that it started have ended. What is read of
it is bounded, and nothing that it writes is believed but as JSON.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

__all__ = ["LISTED", "Child", "Work"]

LISTED = 500
"""Items that are kept of each list in a result; `cut` says of how many."""

_LONGEST = 6 * 3600.0
_GRACE = 5.0
_MOST = 256 * 2**20
_NICE = 5  # more than the daemon's: on a host whose cores are all busy, a third of what others get
_LINE = 64 * 1024
_SERVICE = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "TLCACHE_AGENT")


@dataclass(frozen=True)
class Work:
    """What is to be done; work that is equal is the same.

    Attributes:
        kind: The command: `warm`, `prune` or `verify`.
        root: The cache root.
        options: The command's options, without the root.
        document: The shapes document of a warm, as text.
    """

    kind: str
    root: str
    options: tuple[str, ...] = ()
    document: str | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        """The command that does the same, as a shell takes it."""
        shapes = ["--shapes=shapes.json"] if self.document is not None else []
        return shlex.join(
            ["tlcache", self.kind, *shapes, *self.options, f"--cache-dir={self.root}"]
        )


class Child:
    """A process that does some work.

    Args:
        work: It.

    Attributes:
        code: Its exit code; None while it has none.
        result: What it wrote to stdout, with long lists cut.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._place = tempfile.TemporaryDirectory(prefix="tlcache-job-")
        self._shapes = Path(self._place.name, "shapes.json")
        self._said: deque[str] = deque(maxlen=40)
        self._ended = ""
        self.code: int | None = None
        self.result: dict[str, Any] | None = None

    def __enter__(self) -> Child:
        try:
            self._out = Path(self._place.name, "out").open("w+b")
            self._process = self._started()
        except BaseException:
            self._place.cleanup()
            raise
        self._timer = threading.Timer(_LONGEST, self.end, ("it took too long",))
        self._timer.daemon = True
        self._timer.start()
        return self

    def _started(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", "from tlcache.cli import main; main()", self._work.kind]
        if self._work.document is not None:
            self._shapes.write_text(self._work.document, encoding="utf-8")
            words += [f"--shapes={self._shapes}", "--steps"]
        process = subprocess.Popen(
            [*words, *self._work.options, f"--cache-dir={self._work.root}", "--json"],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.PIPE,
            cwd="/",
            env={name: value for name, value in os.environ.items() if name not in _SERVICE},
            start_new_session=True,
        )
        try:
            lowered = psutil.Process(process.pid)
            lowered.nice(min(19, lowered.nice() + _NICE))
            lowered.ionice(psutil.IOPRIO_CLASS_BE, 7)
        except (psutil.Error, OSError):
            pass  # it has ended, or this system has no such thing
        return process

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self._process.poll() is None:
            self._kill()
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._out.close()
        self._place.cleanup()

    def end(self, why: str = "it was cancelled") -> None:
        """End it, from any thread: kindly, and after some seconds for good."""
        self._ended = self._ended or why
        if self._process.poll() is None:
            self._process.terminate()
            timer = threading.Timer(_GRACE, self._kill)
            timer.daemon = True
            timer.start()

    def _kill(self) -> None:
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()

    def steps(self) -> Iterator[dict[str, Any]]:
        """What it says on its way, until it has ended."""
        assert self._process.stderr is not None
        while line := self._process.stderr.readline(_LINE):
            text = line.decode(errors="replace").rstrip()
            step = _object(text) if text.startswith("{") else None
            if step is not None:
                yield step
            else:
                self._said.append(text)
        self.code = self._process.wait()
        self._out.seek(0)
        self.result = _cut(_object(self._out.read(_MOST)))

    def outcome(self) -> tuple[str, str | None, str | None]:
        """Its job's state, and why it failed, and a hint."""
        if self._ended:
            return "cancelled", self._ended, None
        fine = (0,) if self._work.kind == "warm" else (0, 1)
        if self.code in fine and self.result is not None:
            return "done", None, None
        text = "\n".join(self._said).replace(str(self._shapes), "the document")
        error, _, hint = text.partition("\n\nhint: ")
        error = error.rpartition("error: ")[2].strip()
        if self.code is not None and self.code < 0:
            error = f"it was killed by {signal.Signals(-self.code).name}"
        elif self._work.kind == "warm" and self.result is not None:
            summary = self.result.get("summary", {})
            count = summary.get("failed", 0) + summary.get("missing", 0)
            error = f"{count} of {summary.get('total')} kernels could not be compiled"
        return "failed", error or f"it ended with {self.code}", hint.strip() or None


def _object(text: str | bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _cut(result: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A result, with lists no longer than they may be, and how long they were."""
    if result is None:
        return None
    lists = {k: len(v) for k, v in result.items() if isinstance(v, list) and len(v) > LISTED}
    kept = {k: v[:LISTED] if k in lists else v for k, v in result.items() if k != "schema"}
    return {**kept, "cut": lists}
