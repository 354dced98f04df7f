"""Which of a root's things go, by a policy; `removal` makes it so.

Invariant: planning is pure. What goes was selected by what is known of it, nobody has it loaded,
and nothing that stays needs it: a cuda-binary goes with the last kernel that was made from it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

from tlcache.store import select
from tlcache.store.candidates import Candidate
from tlcache.store.select import Filter

__all__ = ["Goes", "Ledger", "Plan", "Policy", "Stays", "make"]

_WRITING = timedelta(hours=1)
"""How long a compile may take: what it leaves on its way is nobody's only after that. TileLang
collects its own staging directories by the same rule."""
_PUBLISHING = timedelta(seconds=10)
"""How long after its entry is published a kernel may still get its record. It gets it at once,
unless the machine is very busy."""
_NEVER = datetime.min.replace(tzinfo=timezone.utc)


@dataclass(frozen=True)
class Policy:
    """What is to go. The filter says which things are meant at all; of those, whatever any of the
    choices names goes, and all of them where there is no choice. `keep_last` protects.

    Attributes:
        wanted: The filter.
        max_size: Bytes on disk to come down to: the least recently used go first.
        keep_last: So many stay of each kernel and target, the most recently used.
        duplicates: Kernels that are the same as another but for their key.
        orphans: Cuda-binaries that no kernel was made from, records without their entry, and what
            an ended compile left in staging.
        stale_versions: What other TileLang versions wrote than the installed one.
    """

    wanted: Filter = field(default_factory=Filter)
    max_size: int | None = None
    keep_last: int | None = None
    duplicates: bool = False
    orphans: bool = False
    stale_versions: bool = False

    def __bool__(self) -> bool:
        return bool(self.wanted) or self.keep_last is not None or self._chooses

    @property
    def _chooses(self) -> bool:
        limited = self.max_size is not None
        return limited or self.duplicates or self.orphans or self.stale_versions


@dataclass(frozen=True)
class Goes:
    """A thing that is to go.

    Attributes:
        candidate: The thing.
        why: In a word or two.
        after: For a cuda-binary: the locations of its kernels, which must have gone.
    """

    candidate: Candidate
    why: str
    after: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Stays:
    """A thing that was selected, and stays.

    Attributes:
        candidate: The thing.
        why: The reason, like `loaded by pid 51002 (python eval.py)`.
        fault: It should have gone, and could not be deleted.
    """

    candidate: Candidate
    why: str
    fault: bool = False


@dataclass(frozen=True)
class Plan:
    """What goes, and what stays although it was selected.

    Attributes:
        goes: In the order in which they are to go.
        stays: With the reasons.
        bytes: What the disk gains.
        over: By how much the rest is larger than `max_size`.
    """

    goes: tuple[Goes, ...]
    stays: tuple[Stays, ...]
    bytes: int
    over: int = 0


class Ledger:
    """Bytes on disk of things that may share files by hard links: a file's bytes are free when its
    last name is.
    """

    def __init__(self, candidates: Iterable[Candidate] = ()) -> None:
        self._names: Counter[tuple[int, int]] = Counter()
        self._held: dict[tuple[int, int], int] = {}
        self.bytes = 0
        for one in candidates:
            for device, number, size, _ in _inodes(one):
                self._names[device, number] += 1
                if self._names[device, number] == 1:
                    self.bytes += size

    def remove(self, one: Candidate) -> None:
        """Take the names of a thing away."""
        for device, number, size, _ in _inodes(one):
            self._names[device, number] -= 1
            if self._names[device, number] == 0:
                self.bytes -= size

    @staticmethod
    def freed(gone: Iterable[Candidate]) -> int:
        """What the disk gains when things go: a file that has a name elsewhere keeps its bytes."""
        names: Counter[tuple[int, int]] = Counter()
        total = 0
        for one in gone:
            for device, number, size, links in _inodes(one):
                names[device, number] += 1
                if names[device, number] == links:
                    total += size
        return total


def _inodes(one: Candidate) -> Iterable[tuple[int, int, int, int]]:
    return (inode for seen in one.snapshots for inode in seen.inodes)


def make(
    candidates: Sequence[Candidate],
    policy: Policy,
    *,
    installed: str | None = None,
    now: datetime | None = None,
    publishing: timedelta = _PUBLISHING,
) -> Plan:
    """Plan what goes.

    Args:
        candidates: Everything that there is, see `candidates.gather`.
        policy: What is to go.
        installed: The installed TileLang's version, for `stale_versions`; where None, the newest
            version in a root is taken for it.
        now: The present time.
        publishing: How long a kernel without a record is left to whoever may be filing it.
    """
    now = now or datetime.now(timezone.utc)
    return _Planning(candidates, policy, installed, now, publishing).plan()


class _Planning:
    """One plan in the making."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        policy: Policy,
        installed: str | None,
        now: datetime,
        publishing: timedelta,
    ) -> None:
        self.publishing = publishing
        self.all, self.policy, self.installed, self.now = candidates, policy, installed, now
        self.kernels = [one for one in candidates if one.entry.place.kind == "kernel"]
        self.meant = {one.location for one in candidates if policy.wanted.matches(one.entry, now)}
        self.users: dict[tuple[object, ...], list[Candidate]] = {}
        for one in self.kernels:
            if one.entry.payload is not None:
                self.users.setdefault(_content(one), []).append(one)
        self.goes: dict[str, Goes] = {}
        self.stays: dict[str, Stays] = {}
        self.protected = self._last() if policy.keep_last is not None else set()

    def plan(self) -> Plan:
        policy, over = self.policy, 0
        if policy.stale_versions:
            self._stale()
        if policy.duplicates:
            self._duplicates()
        if policy.orphans:
            self._orphans()
        if not policy._chooses:
            for one in self.kernels:
                self._choose(one, "selected")
        if policy.max_size is not None:
            over = self._shrink(policy.max_size)
        self._with_kernels()
        order = {"record": 0, "kernel": 1, "cuda-binary": 3}
        goes = sorted(self.goes.values(), key=lambda g: order.get(g.candidate.entry.place.kind, 2))
        freed = Ledger.freed(one.candidate for one in goes)
        return Plan(tuple(goes), tuple(self.stays.values()), freed, over)

    def _choose(self, one: Candidate, why: str) -> bool:
        """Let a thing go, if it is meant and nothing speaks for it. Returns whether it goes."""
        if one.location not in self.meant:
            return False
        if one.location in self.goes:
            return True
        if (reason := self._speaks_for(one)) is not None:
            self.stays[one.location] = Stays(one, reason)
            return False
        self.goes[one.location] = Goes(one, why)
        return True

    def _speaks_for(self, one: Candidate) -> str | None:
        if one.held:
            more = f" and {len(one.held) - 1} more" if len(one.held) > 1 else ""
            return f"loaded by {one.held[0]}{more}"
        if one.location in self.protected:
            return f"among the last {self.policy.keep_last} of its kernel"
        others = self.policy.wanted.other_targets(one.entry)
        if others:
            return f"also for {', '.join(others)}"
        unrecorded = one.entry.place.kind == "kernel" and not one.records
        if unrecorded and self._younger(one, self.publishing):
            return "written just now"
        return None

    def _younger(self, one: Candidate, span: timedelta) -> bool:
        created = one.entry.created
        return created is not None and self.now - created < span

    def _last(self) -> set[str]:
        """The most recently used of each kernel and target; and those whose kernel is not known."""
        groups: dict[object, list[Candidate]] = {}
        protected = set()
        for one in self.kernels:
            if one.entry.kernel is None:
                protected.add(one.location)
            else:
                groups.setdefault((one.root, one.entry.kernel, one.entry.targets), []).append(one)
        for group in groups.values():
            last = heapq.nlargest(self.policy.keep_last or 0, group, key=_recency)
            protected |= {one.location for one in last}
        return protected

    def _stale(self) -> None:
        versions = {root: self._current(root) for root in {one.root for one in self.all}}
        for one in self.all:
            if one.entry.place.kind not in ("kernel", "cuda-binary", "autotuner", "frontend"):
                continue
            current = versions[one.root]
            version = one.entry.place.tilelang
            if current is not None and version != current:
                told = f"TileLang {version}" if version else "TileLang 0.1.8 or earlier"
                self._choose(one, told)

    def _current(self, root: str) -> str | None:
        """The version that a root is for, spelled as its directory; None where nobody knows."""
        if self.installed is not None:
            return self.installed.replace("+", "_")
        from packaging.version import InvalidVersion, Version

        newest: tuple[Version, str] | None = None
        for one in self.all:
            version = one.entry.place.tilelang
            if one.root == root and version is not None and one.entry.place.kind != "record":
                try:
                    known = Version(version.replace("_", "+")), version
                except InvalidVersion:
                    return None
                newest = max(newest, known) if newest is not None else known
        return newest[1] if newest is not None else None

    def _duplicates(self) -> None:
        by_location = {one.location: one for one in self.kernels}
        for group in select.duplicates(one.entry for one in self.kernels):
            same = [by_location[one.place.location] for one in group]
            same.sort(key=lambda one: (one.entry.record is not None, _recency(one)), reverse=True)
            for one in same[1:]:
                self._choose(one, f"same as {same[0].entry.place.key[:12]}")

    def _orphans(self) -> None:
        for one in self.all:
            kind = one.entry.place.kind
            if kind == "record":
                self._choose(one, "no entry")
            elif self._younger(one, _WRITING):
                continue
            elif kind == "cuda-binary" and not self.users.get(_content(one)):
                self._choose(one, "no kernel's")
            elif kind == "staging":
                self._choose(one, "left by a compile")

    def _shrink(self, most: int) -> int:
        """Let the least recently used go until the rest fits. Returns by how much it does not."""
        scope = [one for one in self.all if not self.policy.wanted or one.location in self.meant]
        mine = {
            _content(one)
            for one in scope
            if one.entry.place.kind == "kernel" and one.entry.payload is not None
        }
        inside = {one.location for one in scope}
        scope += [
            one
            for one in self.all
            if one.location not in inside
            and one.entry.place.kind == "cuda-binary"
            and _content(one) in mine
        ]
        left = Ledger(scope)
        binaries: dict[tuple[object, ...], list[Candidate]] = {}
        for one in scope:
            if one.entry.place.kind == "cuda-binary":
                binaries.setdefault(_content(one), []).append(one)
        uses = {content: len(users) for content, users in self.users.items()}

        def forget(one: Candidate) -> None:
            left.remove(one)
            if one.entry.place.kind == "kernel" and one.entry.payload is not None:
                uses[_content(one)] -= 1
                if not uses[_content(one)]:
                    for binary in binaries.get(_content(one), ()):
                        if binary.location not in self.goes:
                            left.remove(binary)

        for gone in list(self.goes.values()):
            if gone.candidate.location in inside:
                forget(gone.candidate)
        evictable = [one for one in scope if one.location in self.meant and self._alone(one)]
        for one in sorted(evictable, key=_recency):
            if left.bytes <= most:
                break
            if one.location not in self.goes and self._choose(one, "least recently used"):
                forget(one)
        return max(0, left.bytes - most)

    def _alone(self, one: Candidate) -> bool:
        """Whether it can go by itself: a kernel, or a cuda-binary that is nobody's."""
        if one.entry.place.kind == "cuda-binary":
            return not self.users.get(_content(one)) and not self._younger(one, _WRITING)
        return one.entry.place.kind == "kernel"

    def _with_kernels(self) -> None:
        """Cuda-binaries go with the last of the kernels that were made from them."""
        for one in self.all:
            users = self.users.get(_content(one), [])
            if one.entry.place.kind != "cuda-binary" or not users:
                continue
            going = frozenset(user.location for user in users if user.location in self.goes)
            if len(going) == len(users):
                self.goes[one.location] = Goes(one, "with its kernel", going)
            elif self.goes.pop(one.location, None) is not None or going:
                self.stays[one.location] = Stays(one, "needed by a kernel that stays")


def _content(one: Candidate) -> tuple[object, ...]:
    """What kernels and the cuda-binaries that they were made from agree in."""
    return (one.root, one.entry.place.tilelang, one.entry.payload)


def _recency(one: Candidate) -> tuple[datetime, datetime, str]:
    created = one.entry.created or _NEVER
    return (one.entry.last_used or created, created, one.location)
