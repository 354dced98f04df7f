"""Verifying a cache: everything under a root is what its own checksums, its record and its format
say, nobody else could have written it, and nothing is left over.

Invariant: planning only reads, and takes nothing for broken that it has not looked at twice, since
programs write and delete while it looks. Repairing moves one thing to `<root>/tlcache/quarantine`,
and only if it is still the one that was found broken. What tlcache does not know is never moved.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from tlcache.store import layout, own_files, soundness, trash
from tlcache.store.exposure import HOLDERS, Exposure
from tlcache.store.layout import EntryPlace
from tlcache.store.opened import Fault, shown

__all__ = ["KINDS", "Finding", "Tally", "plan", "repair"]

KINDS = {
    "damaged": "its bytes are not what they should be",
    "missing": "a file that belongs to it is not there",
    "misplaced": "there is a file where a directory should be, or the other way round",
    "link": "there is a link, which is not followed",
    "orphan": "what it belongs to is gone or is another",
    "stale": "a writer that was killed left it behind",
    "unreadable": "it could not be looked at",
    "permissions": "somebody else could have written it",
    "code": "it is code that runs when it is loaded",
    "unknown": "it is not known what it is, so it is left alone",
}

_JUDGED = ("kernel", "autotuner", "cuda-binary", "frontend")
_KEY = re.compile("[0-9a-f]{64}")
_AT_ONCE = 256
_MOST_LOOKS = 10
_MOST_THREADS = 8
_MOST_SAID = 3
_AGAIN = {
    "kernel": "it is compiled again when it is next asked for",
    "cuda-binary": "TileLang compiles it again and files it; it never replaces one that is there",
    "autotuner": "TileLang tunes again when it is next asked for; until then it raises",
}


@dataclass(frozen=True)
class Finding:
    """Something that is wrong under a cache root, or is worth knowing.

    Attributes:
        kind: One of `KINDS`.
        severity: `error` (it is broken, or dangerous), `warning` (it is of no use, or others could
            change it), or `note` (nothing is wrong).
        root: The cache root that it is in.
        path: Where.
        what: A sentence's end about the path, or a sentence.
        remedy: What helps; None where nothing needs to.
        seen: Its device and inode, by which `repair` knows it again; None where it cannot be
            repaired.
    """

    kind: str
    severity: str
    root: str
    path: str
    what: str
    remedy: str | None
    seen: tuple[int, int] | None = field(default=None, repr=False)

    @property
    def repairable(self) -> bool:
        return self.seen is not None


@dataclass
class Tally:
    """How much was looked at."""

    things: dict[str, int] = field(default_factory=dict)
    bytes: int = 0


def plan(
    base: str | os.PathLike[str],
    *,
    tally: Tally | None = None,
    now: float | None = None,
    threads: int | None = None,
    progress: Callable[[], None] | None = None,
) -> Iterator[Finding]:
    """Look at everything at a root and in the roots below it, and yield what is found.

    Args:
        base: The cache root.
        tally: Counts what was looked at.
        now: Seconds since 1970, by which what is in staging has an age.
        threads: How many read at once; where None one, and 8 where that one mostly waits.
        progress: Called now and then, when `tally` has grown.
    """
    now = time.time() if now is None else now
    tally = Tally() if tally is None else tally
    base = os.fspath(base)
    with ThreadPoolExecutor(threads or _MOST_THREADS) as pool:
        for root in layout.roots(base):
            looking = _Root(root, nested=root != base, now=now, tally=tally, threads=threads)
            yield from looking.plan(pool, progress)


def repair(finding: Finding, batch: str) -> str | None:
    """Put what a finding is about into quarantine.

    Args:
        finding: One that is repairable.
        batch: A place in `trash.QUARANTINE`, by `trash.batch`.

    Returns:
        Its new path, or None where it is gone already, or something else took its place.

    Raises:
        OSError: It cannot be moved.
    """
    if finding.seen is None:
        raise ValueError(f"{finding.path} cannot be repaired")
    try:
        return trash.move(finding.root, finding.path, batch, seen=finding.seen)
    except (FileNotFoundError, NotADirectoryError):
        return None


@dataclass
class _Looked:
    """What a look at one thing told."""

    place: EntryPlace
    status: os.stat_result | None = None
    faults: tuple[Fault, ...] = ()
    hashed: dict[str, tuple[int, str]] = field(default_factory=dict)
    size: int = 0
    exposed: list[tuple[str, str]] = field(default_factory=list)


class _Root:
    """One cache root."""

    def __init__(
        self, root: str, *, nested: bool, now: float, tally: Tally, threads: int | None
    ) -> None:
        self._root = root
        self._threads = threads
        self._nested = nested
        self._now = now
        self._tally = tally
        self._exposure = Exposure(root)
        self._hashed: dict[str, dict[str, tuple[int, str]]] = {}
        self._broken: set[str] = set()

    def plan(
        self, pool: ThreadPoolExecutor, progress: Callable[[], None] | None
    ) -> Iterator[Finding]:
        for path, fault in self._exposure.structure():
            yield self._finding(path, fault, fault.what, None, "")
        places = layout.places_in(self._root, nested=self._nested)
        waits = self._threads is not None
        while some := list(islice(places, _AT_ONCE)):
            began, busy = time.perf_counter(), time.process_time()
            # What is read from memory takes half as long again in threads, what comes over a
            # network an eighth: so the first ones tell.
            for looked in list((pool.map if waits else map)(self._look, some)):
                yield from self._told(looked)
            if progress is not None:
                progress()
            waits = waits or time.perf_counter() - began > 2 * (time.process_time() - busy)
        for path, status, fault in own_files.judge(
            self._root, self._hashed, self._broken, self._now
        ):
            again = "" if fault.kind == "link" else "; it is made again when it is needed"
            yield self._finding(path, fault, fault.what, status, again)
        for exposed in self._exposure.found():
            yield Finding("permissions", root=self._root, **exposed._asdict())

    # --- one thing ---

    def _look(self, place: EntryPlace) -> _Looked:
        """Look at one thing; where something is wrong, until it was the same twice in a row and
        nobody changed it meanwhile.
        """
        still = False
        for _ in range(_MOST_LOOKS):
            try:
                before = os.lstat(place.location)
                looked = self._judged(place, before)
                after = os.lstat(place.location)
            except FileNotFoundError:
                break
            except OSError as error:
                fault = Fault("unreadable", "error", "", f"cannot be read: {_reason(error)}")
                return _Looked(place, None, (fault,))
            unchanged = _stamp(before) == _stamp(after)
            if all(fault.severity == "note" for fault in looked.faults) or (still and unchanged):
                return looked
            still = unchanged
        return _Looked(place)  # it has vanished, or somebody is at work on it

    def _judged(self, place: EntryPlace, status: os.stat_result) -> _Looked:
        looked = _Looked(place, status)
        if place.kind in _JUDGED:
            looked.faults, looked.hashed = soundness.judge(place)
            looked.size = sum(size for size, _ in looked.hashed.values())
        elif place.kind == "staging":
            age = self._now - max(_times(place.location, status))
            if age > own_files.STALE:
                what = f"was left behind {age / 3600:,.0f} h ago by a writer that was killed"
                looked.faults = (Fault("stale", "warning", "", what),)
        else:
            looked.faults = tuple(self._unknown(place, status))
        looked.exposed = list(self._exposure.of(place.location, status))
        return looked

    def _unknown(self, place: EntryPlace, status: os.stat_result) -> Iterator[Fault]:
        name, holder = place.key, os.path.basename(os.path.dirname(place.location))
        is_key = _KEY.fullmatch(name) is not None
        if stat.S_ISLNK(status.st_mode):
            if is_key:
                yield Fault("link", "error", "", "is a link, as TileLang makes none")
            elif HOLDERS.fullmatch(name):
                yield Fault("link", "warning", "", "is a link: what is behind it is not verified")
            else:
                yield Fault("unknown", "note", "", "is a link of somebody else's")
        elif is_key and not stat.S_ISDIR(status.st_mode) and holder != "frontend":
            what = "is a file where TileLang looks for a directory, so it misses it at each start"
            yield Fault("misplaced", "error", "", what)
        else:
            yield Fault("unknown", "note", "", "is nothing that TileLang or tlcache writes")

    def _told(self, looked: _Looked) -> Iterator[Finding]:
        """The findings of one thing: one for each severity, with all that is wrong."""
        place = looked.place
        if looked.status is not None:
            kinds = self._tally.things
            kinds[place.kind] = kinds.get(place.kind, 0) + 1
            self._tally.bytes += looked.size
        relative = os.path.relpath(place.location, self._root)
        if place.kind == "kernel":
            libraries = {n: told for n, told in looked.hashed.items() if n.endswith(".so")}
            self._hashed[relative] = libraries
        groups: dict[tuple[str, str], list[Fault]] = {}
        for fault in looked.faults:
            apart = fault.kind if fault.severity == "note" or fault.kind == "unreadable" else ""
            groups.setdefault((fault.severity, apart), []).append(fault)
        for faults in groups.values():
            said = [f"{shown(f.name)} {f.what}" if f.name else f.what for f in faults[:_MOST_SAID]]
            if len(faults) > _MOST_SAID:
                said.append(f"and {len(faults) - _MOST_SAID} more")
            worst = next((fault for fault in faults if fault.kind == "damaged"), faults[0])
            again = f"; {_AGAIN[place.kind]}" if place.kind in _AGAIN else ""
            made = self._finding(place.location, worst, ", ".join(said), looked.status, again)
            if made.repairable:
                self._broken.add(relative)
            yield made
        for path, reason in looked.exposed:
            self._exposure.add(os.path.dirname(place.location), path, reason)

    def _finding(
        self, path: str, fault: Fault, what: str, status: os.stat_result | None, again: str
    ) -> Finding:
        remedy = seen = None
        if fault.kind == "unreadable":
            remedy = "run this as the user that owns the cache"
        elif fault.kind == "code":
            remedy = "load it only from a root that nobody else can write"
        elif fault.severity != "note" and (fault.kind, fault.severity) != ("link", "warning"):
            remedy = f"`tlcache verify --repair` puts it into quarantine{again}"
            seen = (status.st_dev, status.st_ino) if status is not None else None
        return Finding(fault.kind, fault.severity, self._root, path, what, remedy, seen)


def _times(path: str, status: os.stat_result) -> Iterable[float]:
    """When something in staging was written last: itself, or a file in it."""
    yield status.st_mtime
    if stat.S_ISDIR(status.st_mode):
        with os.scandir(path) as items:
            for item in items:
                yield item.stat(follow_symlinks=False).st_mtime


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    """What changes when a thing is replaced, or a file in it is created, renamed or removed."""
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
