"""Keeping roots within their bounds, by prune's own planner.

How large a root is on disk is measured when it may matter: from then on, what is added counts at
the most that it can take. Above a bound, the least recently used go until a tenth of it is free
again, in a moment in which nothing changes, or after three seconds without one.

Invariant: what goes is what `prune` would delete, with its checks: nothing that a live process has
mapped, nothing that was used or changed since it was chosen. A root that cannot be bounded is told,
and left alone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from tlcache.daemon.broadcast import Broadcast
from tlcache.daemon.follow import Follower
from tlcache.daemon.history import History
from tlcache.daemon.index import Index
from tlcache.errors import TlcacheError
from tlcache.store import candidates, prune, removal
from tlcache.store.candidates import Candidate, Gathered
from tlcache.store.entry import Entry
from tlcache.store.prune import Ledger, Plan, Policy
from tlcache.store.removal import Removed
from tlcache.store.select import Filter

__all__ = ["Bound", "Bounds", "Limits"]

_log = logging.getLogger(__name__)

_STEP = 0.5
_IDLE = 1.0
_LONGEST = 3.0
_SOON = 2.0
_LATER = 30.0
_AGES = 60.0
_PUBLISHING = timedelta(seconds=4)
_DOWN_TO = 0.9


class Limits(NamedTuple):
    """What a root may be.

    Attributes:
        max_size: Bytes on disk, at most.
        max_age: Seconds that something may be unused.
        keep_free: Bytes of the file system that are to be free.
    """

    max_size: int | None = None
    max_age: float | None = None
    keep_free: int | None = None

    def __bool__(self) -> bool:
        return any(one is not None for one in self)


class Bound:
    """One root, and how it stands.

    Attributes:
        bytes: What it takes on disk, at most; None until it was measured.
        over: Why it is out of its bounds although they were enforced; None where it is not.
        refused: Why nothing is enforced; None where it is.
        unknown: How many processes could not be asked what they have mapped.
    """

    def __init__(self, follower: Follower, index: Index) -> None:
        self.follower = follower
        self.over: str | None = None
        self.refused: str | None = None
        self.unknown = 0
        self.known: dict[str, Candidate] = {}
        self.identity: tuple[int, int] | None = None
        self.since: float | None = None
        self.next = self.next_ages = 0.0
        self._index = index
        self._exact: int | None = None
        self._grown = 0

    @property
    def bytes(self) -> int | None:
        if self._exact is None:
            return None
        return self._exact + self._index.grown(self.follower.root) - self._grown

    def measured(self, exact: int | None, grown: int) -> None:
        """It took so much when so much had been added."""
        self._exact, self._grown = exact, grown


class _Stopped(Exception):
    """The daemon is to end."""


class _Busy(Exception):
    """Somebody else prunes this root."""


class Bounds:
    """A thread that holds roots to their limits.

    Args:
        index: What there is.
        events: Where to tell what was pruned.
        history: Where evictions are counted.
        limits: For each root; they may be set anew.
    """

    def __init__(self, index: Index, events: Broadcast, history: History, limits: Limits) -> None:
        self.limits = limits
        self.beat = time.monotonic()
        self._index, self._events, self._history = index, events, history
        self._bounds: dict[str, Bound] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bounds", daemon=True)

    @property
    def roots(self) -> list[Bound]:
        """How the roots stand."""
        return list(self._bounds.values())

    def watch(self, followers: Iterable[Follower]) -> None:
        """Hold these roots, and no other."""
        before = self._bounds
        self._bounds = {
            one.root: before.get(one.root) or Bound(one, self._index) for one in followers
        }

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end. Returns whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.wait(_STEP):
            self.beat = time.monotonic()
            for bound in self.roots:
                try:
                    self._consider(bound)
                except _Stopped:
                    return
                except _Busy:
                    bound.next = time.monotonic() + _SOON
                except Exception as error:
                    self._failed(bound, error)

    def _failed(self, bound: Bound, error: Exception) -> None:
        bound.next = time.monotonic() + _LATER
        known = isinstance(error, (OSError, TlcacheError))
        bound.over = str(error).partition("\n")[0]
        bound.measured(None, 0)
        _log.log(
            logging.WARNING if known else logging.ERROR,
            "%s could not be bounded: %s",
            bound.follower.root,
            bound.over,
            exc_info=not known,
        )
        self._events.tell("prune-failed", root=bound.follower.root, detail=bound.over)

    # --- when ---

    def _consider(self, bound: Bound) -> None:
        follower, now = bound.follower, time.monotonic()
        state = follower.state
        if state.identity != bound.identity:
            bound.identity, bound.known, bound.over = state.identity, {}, None
            bound.measured(None, 0)
        bound.refused = None
        if state.identity is None or not self.limits or not follower.ready.is_set():
            return
        if state.read_only:
            bound.refused = "it is read-only"
        elif state.shared is not None:
            bound.refused = (
                f"it is on a network file system ({state.shared}): other hosts may have kernels "
                "loaded from it"
            )
        if bound.refused is not None or now < bound.next:
            return
        if not self._may_be_out(bound, now):
            bound.since = bound.over = None
            return
        bound.since = bound.since or now
        idle = now - self._index.changed(follower.root) >= _IDLE
        if idle or now - bound.since >= _LONGEST:
            bound.since = None
            self._enforce(bound)

    def _may_be_out(self, bound: Bound, now: float) -> bool:
        limits = self.limits
        if bound.bytes is None:
            return True
        if limits.max_size is not None and bound.bytes > limits.max_size:
            return True
        if limits.keep_free is not None and _free(bound.follower.root) < limits.keep_free:
            return True
        if limits.max_age is not None and now >= bound.next_ages:
            bound.next_ages = now + _AGES
            oldest = datetime.now(timezone.utc) - timedelta(seconds=limits.max_age)
            return any(
                one.last_used is not None and one.last_used < oldest
                for one in self._index.entries(root=bound.follower.root)
            )
        return False

    # --- what ---

    def _enforce(self, bound: Bound) -> None:
        root = bound.follower.root
        grown = self._index.grown(root)
        entries = self._minded(self._index.entries(root=root))
        filings = dict(bound.follower.filings)
        gathered = candidates.among(root, entries, filings, bound.known)
        bound.known = {one.location: one for one in gathered.candidates}
        bound.unknown = sum(gathered.seen.unreadable.values())
        removal.apply(
            Plan((), (), 0), filings, "", roots=tuple(filings), waiting=_busy, done=self._mind
        )
        left = gathered.candidates
        size = Ledger(left).bytes
        stays: list[str] = []
        for reason, text, choose in self._policies(root):
            policy = choose(size)
            if policy is None:
                continue
            plan = prune.make(left, policy, publishing=_PUBLISHING)
            if plan.goes:
                done = removal.apply(
                    plan, filings, text, by="daemon", waiting=_busy, done=self._mind
                )
                gone = {one.candidate.location for one in done.gone}
                left = [one for one in left if one.location not in gone]
                size = Ledger(left).bytes
                self._told(bound, reason, text, gathered, done)
                stays += [one.why for one in done.stays]
            stays += [one.why for one in plan.stays]
        bound.measured(size, grown)
        bound.over = self._over(root, size, stays)
        if _USED in stays:
            bound.follower.rescan()  # the index did not know that
        passes = any(why in _PASSING for why in stays)
        wait = (_SOON if passes else _LATER) if bound.over else 0
        bound.next = time.monotonic() + wait

    def _policies(self, root: str) -> Iterator[tuple[str, str, Callable[[int], Policy | None]]]:
        limits = self.limits
        if limits.max_age is not None:
            unused = Filter(unused_for=timedelta(seconds=limits.max_age))
            yield "max-age", f"--max-age {limits.max_age:g}s", lambda _: Policy(unused)
        if limits.max_size is not None:
            most = limits.max_size
            yield (
                "max-size",
                f"--max-size {most}",
                lambda size: Policy(max_size=int(most * _DOWN_TO)) if size > most else None,
            )
        if limits.keep_free is not None:
            least = limits.keep_free

            def free(size: int) -> Policy | None:
                have = _free(root)
                wanted = int(least / _DOWN_TO) - have
                return Policy(max_size=max(0, size - wanted)) if have < least else None

            yield "keep-free", f"--keep-free {least}", free

    def _told(
        self, bound: Bound, reason: str, text: str, gathered: Gathered, done: Removed
    ) -> None:
        root = bound.follower.root
        for one in done.stays:
            bound.known.pop(one.candidate.location, None)
        kernels = sum(one.candidate.entry.place.kind == "kernel" for one in done.gone)
        self._history.count("evictions", {"root": root, "reason": reason}, kernels)
        self._history.count("evicted_bytes", {"root": root, "reason": reason}, done.bytes)
        if done.gone:
            _log.info("%s: %d kernels went, %d bytes, by %s", root, kernels, done.bytes, text)
        self._events.tell(
            "pruned",
            root=root,
            reason=reason,
            kernels=kernels,
            things=len(done.gone),
            bytes=done.bytes,
            stayed=len(done.stays),
        )

    def _over(self, root: str, size: int, stays: list[str]) -> str | None:
        """What is out of its bounds still, and why."""
        limits, why = self.limits, ""
        if stays:
            most = max(set(stays), key=stays.count)
            why = f": {len(stays):,} kept, such as {most}"
        if limits.max_size is not None and size > limits.max_size:
            return f"{size:,} bytes on disk, {limits.max_size:,} allowed{why}"
        if limits.keep_free is not None and (have := _free(root)) < limits.keep_free:
            return f"{have:,} bytes are free, {limits.keep_free:,} wanted{why}"
        return None

    def _minded(self, entries: list[Entry]) -> Iterator[Entry]:
        for one in entries:
            self._mind()
            yield one

    def _mind(self, _: int = 0) -> None:
        self.beat = time.monotonic()
        if self._stopping.is_set():
            raise _Stopped


_USED = "used since it was chosen"
_PASSING = (
    "written just now",
    _USED,
    "changed since it was chosen",
    "given a record since it was chosen",
    "being compiled",
    "replaced meanwhile",
    "gone already",
)


def _busy() -> None:
    raise _Busy


def _free(root: str) -> int:
    try:
        status = os.statvfs(root)
    except OSError:
        return 2**63
    return status.f_bavail * status.f_frsize
