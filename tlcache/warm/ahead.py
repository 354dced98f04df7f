"""Having the kernels of a document there before a program starts: looked after, waited for, or
compiled, within a budget.

Invariant: where all is there, nothing is started and neither torch, TileLang nor pydantic is
imported. Of several processes on one root, one compiles; the others start no compiler. What is
started has ended, and has been waited for, when this returns.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tlcache.errors import CacheRootError, RuntimeLibraryError
from tlcache.store import coverage, layout, locks
from tlcache.store import roots as root_names
from tlcache.store.trust import Trust
from tlcache.warm import document

__all__ = ["State", "Wish", "ensure"]

_TICK = 0.05


@dataclass(frozen=True)
class Wish:
    """What is to be there.

    Attributes:
        shapes: The document's file.
        spellings: Targets of the command line, or none.
        roots: The roots in force, absolute, the one that is written to first.
        budget: Seconds for all of it; None for as long as it takes.
        timeout: Seconds for one kernel.
    """

    shapes: str
    spellings: tuple[str, ...]
    roots: tuple[str, ...]
    budget: float | None
    timeout: float


@dataclass
class State:
    """What is there.

    Attributes:
        total: How many kernels the document asks for; None where that did not become known.
        ready: How many of them are there.
        failed: Those that do not compile, and why.
        left: Those that were not come to.
        targets: Names of the targets.
        seconds: How long it took.
        spent: Whether the budget was.
        code: Exit code of the warm, where one ran and could not do its work.
        error: Why nothing was done.
    """

    total: int | None = None
    ready: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    seconds: float = 0.0
    spent: bool = False
    code: int = 0
    error: str | None = None

    @property
    def complete(self) -> bool:
        return self.total is not None and self.ready == self.total

    def to_json(self) -> dict[str, Any]:
        """As a ready-file has it."""
        word = "ready" if self.complete else "partial" if self.ready else "cold"
        return {
            "state": word,
            "total": self.total,
            "ready": self.ready,
            "failed": [{"kernel": title, "error": error} for title, error in self.failed],
            "left": self.left,
            "targets": self.targets,
            "seconds": round(self.seconds, 3),
            "budget_spent": self.spent,
            "error": self.error,
        }


def ensure(
    wish: Wish, ended: int | None = None, waiting: Callable[[], None] = lambda: None
) -> State:
    """Have all of a document's kernels there, as far as the budget goes.

    Args:
        wish: What is to be there.
        ended: A descriptor that can be read when nobody needs the kernels any more.
        waiting: Called if another process compiles them.

    Raises:
        ShapesError: The document cannot be read.
        TargetError: A target of the command line is unknown.
        UntrustedRootError: Somebody else can write a root.
        CacheRootError: The environment switches the cache off.
    """
    if layout.caching_disabled():
        raise CacheRootError(
            "TILELANG_DISABLE_CACHE is set, so no kernel is taken from the cache",
            hint="`unset TILELANG_DISABLE_CACHE`",
        )
    start = time.monotonic()
    state = _Ensuring(wish, start, ended, waiting).state()
    state.seconds = time.monotonic() - start
    return state


class _Ensuring:
    def __init__(
        self, wish: Wish, start: float, ended: int | None, waiting: Callable[[], None]
    ) -> None:
        self._wish = wish
        self._deadline = None if wish.budget is None else start + wish.budget
        self._ended = ended
        self._waiting = waiting
        self._name: str | None = None
        for root in wish.roots:
            if os.path.isdir(root):
                Trust(root).check_root()

    def state(self) -> State:
        data = document.read(self._wish.shapes)
        targets = document.targets(data, self._wish.spellings)
        try:
            if targets is not None:
                self._name = coverage.key(data, [target.name for target in targets])
        except RuntimeLibraryError:
            pass  # the warm says it
        if self._name is None:
            return self._warmed()
        before = self._bytes()
        found = self._covered()
        if found is not None and found.complete:
            return found
        return self._led(self._name, before)

    def _led(self, name: str, before: bytes) -> State:
        """Compile what is missing, or have the process that leads do it."""
        root, told = self._wish.roots[0], False
        while True:
            try:
                leader = locks.lead(root, name)
            except CacheRootError:
                return self._warmed()  # there may be nothing to write: a plan knows
            now = self._bytes()
            if now != before:
                before, found = now, self._covered()
                if found is not None and not found.left:
                    if leader is not None:
                        os.close(leader)
                    return found  # what failed there is not tried again by each that waited
            if leader is not None:
                try:
                    return self._warmed()
                finally:
                    os.close(leader)
            if not told:
                told = True
                self._waiting()
            if self._time_is_up(_TICK):
                state = self._covered() or State()
                state.spent = True
                return state

    def _bytes(self) -> bytes:
        assert self._name is not None
        try:
            with open(coverage.path(self._wish.roots[0], self._name), "rb") as file:
                return file.read()
        except OSError:
            return b""

    def _time_is_up(self, seconds: float) -> bool:
        """Wait a moment; whether there is no time for more."""
        if self._deadline is not None:
            seconds = min(seconds, max(0.0, self._deadline - time.monotonic()))
        watched = [] if self._ended is None else [self._ended]
        if select.select(watched, [], [], seconds)[0]:
            return True
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _covered(self) -> State | None:
        """What a manifest tells, where one holds."""
        assert self._name is not None
        for root in self._wish.roots:
            found = coverage.read(root, self._name)
            if found is None:
                continue
            for place in (os.getcwd(), *found.paths):
                if place not in sys.path and os.path.isdir(place):
                    sys.path.append(place)  # as `warm` does
            if not coverage.hold(found, self._wish.roots):
                continue
            missing = coverage.missing(found, self._wish.roots)
            return State(
                total=len(found.kernels),
                ready=len(found.kernels) - len(missing),
                failed=[(one.title, one.error or "") for one in missing if one.status == "failed"],
                left=[one.title for one in missing if one.status != "failed"],
                targets=found.targets,
            )
        return None

    def _warmed(self) -> State:
        """What `tlcache warm` makes of it."""
        from tlcache.warm.descendants import Started

        code = f"import sys; sys.path[:] = {sys.path!r}; from tlcache.cli import main; main()"
        command = [sys.executable, "-c", code, "warm", "--shapes", self._wish.shapes]
        for spelling in self._wish.spellings:
            command += ["--target", spelling]
        command += ["--timeout", f"{self._wish.timeout:g}", "--json", "--led"]
        environment = dict(os.environ)
        environment[root_names.VARIABLE] = os.pathsep.join(self._wish.roots)
        root_names.adopt(environment)
        with Started(command, environment) as warm:
            told, exit_code = warm.answer(self._deadline, self._ended)
        state = _told(told)
        if state is None:
            state = (self._covered() if self._name is not None else None) or State()
            state.code = exit_code if exit_code > 0 else 0
        state.spent = self._deadline is not None and time.monotonic() >= self._deadline
        if exit_code == _FAULT and not state.complete:
            state.code = exit_code
        return state


_FAULT = 3
_READY = ("present", "compiled", "unrecorded")


def _told(data: bytes) -> State | None:
    """What a warm says with `--json`; None where it did not come to that."""
    try:
        said = json.loads(data)
        kernels, targets = said["kernels"], said["targets"]
    except (ValueError, KeyError, TypeError):
        return None
    state = State(total=len(kernels), targets=targets)
    for one in kernels:
        if one["status"] in _READY:
            state.ready += 1
        elif one["status"] == "failed":
            state.failed.append((one["title"], one["error"] or ""))
        else:
            state.left.append(one["title"])
    return state
