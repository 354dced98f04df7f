"""A plan made so: what it names is put into the trash, and the trash is emptied.

A thing goes by renames, in an order in which a kill at any point leaves a root that is whole:

1. The records of a kernel. Without its record it is one of many that only TileLang knows: TileLang
   goes on to hit it, and tlcache's next resolve is a miss that TileLang answers from its entry. The
   other way round a record would point at nothing until somebody repaired it.
2. The kernel, by one rename: whoever looks finds all of it or nothing.
3. The calls of programs that meant it (`calls.py`); a call that points at nothing is a miss, and
   the next prune takes it away.
4. The cuda-binaries that were its alone. Until then they are orphans, which `--orphans` finds; no
   kernel needs one to be loaded. Of two files the checksum goes first, since a cuda-binary without
   one is still listed.

What is in the trash is out of the cache; the next prune empties what a killed one left there.

Invariant: only what the plan names is deleted, and only while it is what was planned: byte for byte
by its inodes and times, not used since, not loaded by anybody, and with the same records. The
check, and the renames, happen while nobody files a record (`locks.removing`). A thing that took the
place of another is put back.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from tlcache.errors import CacheRootError
from tlcache.store import calls, candidates, evictions, locks, mapped, trash
from tlcache.store.candidates import Snapshot
from tlcache.store.evictions import Eviction
from tlcache.store.filings import Filings
from tlcache.store.mapped import Seen
from tlcache.store.prune import Goes, Ledger, Plan, Stays

__all__ = ["Removed", "apply"]

_AT_ONCE = 32  # entries in one hold of the lock that who files a record waits for: some 5 ms
_FRESH = 1.0  # seconds for which it is believed who has what loaded


@dataclass(frozen=True)
class Removed:
    """What came of a plan.

    Attributes:
        gone: What was deleted.
        stays: What was not, with the reasons.
        bytes: What the disk gained.
        leftovers: Files that an earlier prune had been killed over, and their bytes.
        seen: The processes that could be asked who has what loaded, and those that could not.
    """

    gone: tuple[Goes, ...]
    stays: tuple[Stays, ...]
    bytes: int
    leftovers: tuple[int, int]
    seen: Seen


def apply(
    plan: Plan,
    filings: Mapping[str, Filings],
    why: str,
    *,
    by: str = "prune",
    roots: tuple[str, ...] = (),
    waiting: Callable[[], None] | None = None,
    done: Callable[[int], None] | None = None,
) -> Removed:
    """Delete what a plan names.

    Args:
        plan: The plan.
        filings: The records of each root, as they were gathered for it.
        why: The policy, for the log of evictions.
        by: The command, for the same.
        roots: Where else to empty what an earlier prune left in the trash.
        waiting: Called where another prune has to end first.
        done: Called with how many things are dealt with.

    Raises:
        CacheRootError: The root cannot be written.
    """
    removing = _Removing(filings, why, by, done)
    by_root: dict[str, list[Goes]] = {root: [] for root in roots}
    for one in plan.goes:
        by_root.setdefault(one.candidate.root, []).append(one)
    for root, goes in by_root.items():
        if goes or os.path.isdir(os.path.join(root, "tlcache", trash.TRASH)):
            removing.with_room(root, goes, waiting)
    freed = Ledger.freed(one.candidate for one in removing.gone)
    return Removed(
        tuple(removing.gone), tuple(removing.stays), freed, removing.leftovers, removing.seen
    )


class _Removing:
    def __init__(
        self,
        filings: Mapping[str, Filings],
        why: str,
        by: str,
        done: Callable[[int], None] | None,
    ) -> None:
        self.gone: list[Goes] = []
        self.stays: list[Stays] = []
        self.leftovers = (0, 0)
        self.seen = Seen()
        self._filings, self._why, self._by, self._done = filings, why, by, done
        self._looked = float("-inf")
        self._left: set[str] = set()

    def with_room(self, root: str, goes: list[Goes], waiting: Callable[[], None] | None) -> None:
        """Delete what goes of one root. On a disk that has no room for a lock's file, let alone for
        the trash, things are deleted where they are until it has.

        Where the file cannot be made there is none, so nobody else holds that lock.
        """
        left = list(goes)
        while True:
            try:
                with locks.pruning(root, waiting):
                    return self.root(root, left)
            except CacheRootError as error:
                dealt = {gone.candidate.location for gone in self.gone}
                dealt |= {kept.candidate.location for kept in self.stays}
                left = [one for one in left if one.candidate.location not in dealt]
                if not left or not _is_full(error.__cause__):
                    raise
                one = left.pop(0)
                self._look([one, *left])
                self._filings[root].refresh()
                reason = self._against(root, one)
                if reason is None and self._in_place(root, one):
                    self._left.add(one.candidate.location)
                    self.gone.append(one)
                    evictions.note(root, self._evicted(root, [one]))
                elif reason is not None:
                    self.stays.append(Stays(one.candidate, reason))

    def root(self, root: str, goes: list[Goes]) -> None:
        """Delete what goes of one root; nobody else prunes it meanwhile."""
        # No prune is running but this one, so whatever is there was left by one that is dead.
        count, size = trash.empty(root, trash.TRASH)
        self.leftovers = (self.leftovers[0] + count, self.leftovers[1] + size)
        if not goes:
            return
        batch = trash.batch(trash.TRASH)
        moved: list[tuple[Goes, str]] = []
        try:
            for start in range(0, len(goes), _AT_ONCE):
                some = goes[start : start + _AT_ONCE]
                self._look(goes[start:])
                before = len(moved)
                with ExitStack() as held:
                    busy = self._lock(root, some, held)
                    self._filings[root].refresh()
                    for one in some:
                        where = self._one(root, one, batch, one in busy)
                        if where is not None:
                            moved.append((one, where))
                            self._left.add(one.candidate.location)
                evictions.note(root, self._evicted(root, [one for one, _ in moved[before:]]))
                if self._done is not None:
                    self._done(len(some))
            with locks.removing(root):
                calls.sweep(root)
        finally:
            trash.empty(root, batch)
            for one, where in moved:
                if os.path.lexists(where):
                    self.stays.append(Stays(one.candidate, f"left in the trash, {where}", True))
                else:
                    self.gone.append(one)

    def _look(self, goes: list[Goes]) -> None:
        if time.monotonic() - self._looked > _FRESH:
            inodes = (i[1] for one in goes for i in one.candidate.seen.inodes)
            self.seen = mapped.look(inodes)
            self._looked = time.monotonic()

    def _lock(self, root: str, goes: list[Goes], held: ExitStack) -> list[Goes]:
        """Lock the kernels of some things, and then the filing of records. In this order compiles
        take them, too. Returns those that are being compiled.
        """
        busy = []
        for one in goes:
            for filed in one.candidate.records:
                if not held.enter_context(locks.attempt(root, filed.action_key)):
                    busy.append(one)
                    break
        held.enter_context(locks.removing(root))
        return busy

    def _one(self, root: str, one: Goes, batch: str, busy: bool) -> str | None:
        """Put one thing into the trash. Returns where it is, empty where it is nowhere any more,
        None where it stays.
        """
        reason = "being compiled" if busy else self._against(root, one)
        if reason is not None:
            self.stays.append(Stays(one.candidate, reason))
            return None
        parts = [(filed.location, filed.seen) for filed in one.candidate.records]
        parts += one.candidate.files
        moved: list[tuple[str, str]] = []
        try:
            for path, seen in parts:
                moved.append((path, trash.move(root, path, batch, seen=seen.identity)))
        except FileNotFoundError:
            _put_back(moved)
            self.stays.append(Stays(one.candidate, "replaced meanwhile"))
            return None
        except (OSError, ValueError) as error:
            _put_back(moved)
            if _is_full(error):
                return "" if self._in_place(root, one) else None
            reason = (getattr(error, "strerror", None) or str(error)).lower()
            self.stays.append(Stays(one.candidate, f"cannot be deleted: {reason}", True))
            return None
        return moved[-1][1]

    def _in_place(self, root: str, one: Goes) -> bool:
        """Delete one thing where it is. Returns whether it is gone."""
        parts = [(filed.location, filed.seen) for filed in one.candidate.records]
        try:
            for path, seen in [*parts, *one.candidate.files]:
                trash.delete(root, path, seen.identity)
        except (OSError, ValueError) as error:
            reason = (getattr(error, "strerror", None) or str(error)).lower()
            self.stays.append(Stays(one.candidate, f"cannot be deleted: {reason}", True))
            return False
        return True

    def _against(self, root: str, one: Goes) -> str | None:
        """Why a thing is to stay after all."""
        candidate = one.candidate
        if not one.after <= self._left:
            return "its kernel stays"
        held = candidates.holders(candidate, self.seen)
        if held:
            return f"loaded by {held[0]}"
        use_counts = candidate.entry.place.kind != "record"
        if (reason := _changed(candidate.files, use_counts)) is not None:
            return reason
        if self._filings[root].at(candidate.location) != {f.location for f in candidate.records}:
            return "given a record since it was chosen"
        records = [(filed.location, filed.seen) for filed in candidate.records]
        if _changed(records, False) is not None:
            return "used since it was chosen"
        return None

    def _evicted(self, root: str, gone: list[Goes]) -> Iterator[Eviction]:
        for one in gone:
            found = one.candidate.entry
            if found.place.kind == "kernel":
                keys: list[str | None] = [filed.action_key for filed in one.candidate.records]
                for key in keys or [None]:
                    yield Eviction(
                        key=found.place.key,
                        path=os.path.relpath(found.place.location, root),
                        kind=found.place.kind,
                        kernel=found.kernel,
                        target=found.target,
                        action_key=key,
                        bytes=found.bytes,
                        why=self._why,
                        by=self._by,
                    )


def _changed(files: Iterable[tuple[str, Snapshot]], use_counts: bool) -> str | None:
    """Why files are not what was planned. That a record is read means nothing; it is a use when its
    time of change is set.
    """
    for path, seen in files:
        now = candidates.snapshot(path)
        if now is None:
            return "gone already"
        if now.digest != seen.digest:
            return "changed since it was chosen"
        if use_counts and now.used > seen.used:
            return "used since it was chosen"
    return None


def _is_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _put_back(moved: list[tuple[str, str]]) -> None:
    """A thing goes as a whole, or not at all."""
    for path, where in reversed(moved):
        try:
            if not os.path.lexists(path):
                os.rename(where, path)
        except OSError:
            pass  # it was a record, or a checksum: a miss
