"""Counters that outlive the daemon, and samples of the last hour, day and week, in one SQLite file.

Counters only grow. What another process counts, such as a server that restarts, is added by how
much it grew since it was seen last, and that is kept in the same transaction: nothing is lost, and
nothing counted twice, whichever of the two is killed.

Invariant: what was counted more than `EVERY` seconds before a kill is in the file, or the fault is
told. The file is bounded: samples by their number, counters by their labels. One that is damaged is
put aside, and a new one begun.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

__all__ = ["EVERY", "LABELS", "WINDOWS", "Counter", "History", "Sample", "Window"]

_log = logging.getLogger(__name__)

EVERY = 2.0
"""Seconds between writes."""
LABELS = 100
"""Values that a label can have; those that come after are counted as `other`."""
_SOURCES = 4096
_UNWRITTEN = 4096
_FORGET = 7 * 86400.0
_SEEN = 3600.0  # seconds after which it is noted that a process is there still
_VERSION = 1
_SCHEMA = """
CREATE TABLE counters (name TEXT, labels TEXT, value REAL, PRIMARY KEY (name, labels))
    WITHOUT ROWID;
CREATE TABLE sources (source TEXT PRIMARY KEY, seen REAL, counted TEXT) WITHOUT ROWID;
CREATE TABLE samples (window TEXT, time REAL, figures TEXT, PRIMARY KEY (window, time))
    WITHOUT ROWID;
"""


class Window(NamedTuple):
    """A span of time, and how far apart its samples are, in seconds."""

    span: float
    step: float


WINDOWS = {
    "hour": Window(3600.0, 10.0),
    "day": Window(86400.0, 300.0),
    "week": Window(7 * 86400.0, 1800.0),
}


class Counter(NamedTuple):
    """A counter's name, and its labels in the order of their names."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


class Sample(NamedTuple):
    """Figures at a time, in seconds since 1970."""

    time: float
    figures: dict[str, float]


class _New(NamedTuple):
    """What is to be written."""

    counters: dict[Counter, float]
    sources: dict[str, tuple[float, dict[Counter, float]] | None]
    samples: list[tuple[str, Sample]]


class History:
    """The history of a daemon. Threads may share it.

    Args:
        path: The file; in memory only where None.

    Attributes:
        trouble: Why it is not written at the moment; None where it is.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self.trouble: str | None = None
        self._lock = threading.RLock()  # of what is in memory
        self._writing = threading.Lock()  # of the file; nobody who counts waits for that
        self._counters: dict[Counter, float] = {}
        self._values: dict[tuple[str, str], set[str]] = {}
        self._sources: dict[str, tuple[float, dict[Counter, float]]] = {}
        self._samples: dict[str, list[Sample]] = {name: [] for name in WINDOWS}
        self._dirty: set[Counter] = set()
        self._dirty_sources: set[str] = set()
        self._new: list[tuple[str, Sample]] = []
        self._database: sqlite3.Connection | None = None
        self._loaded = False
        self.flush()

    # --- counting ---

    def count(self, name: str, labels: Mapping[str, str] | None = None, by: float = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._add(Counter(name, tuple(sorted((labels or {}).items()))), by)

    def tally(self, source: str, counted: Mapping[Counter, float]) -> None:
        """Add what a process has counted since it was seen last.

        Args:
            source: A name that only this process has, ever: its pid, and when it started.
            counted: All that it has counted since its start.
        """
        with self._lock:
            now = time.time()
            seen, before = self._sources.get(source, (0.0, {}))
            if before == counted and now - seen < _SEEN:
                return
            for counter, value in counted.items():
                self._add(counter, max(0.0, value - before.get(counter, 0.0)))
            self._sources[source] = (now, dict(counted))
            self._dirty_sources.add(source)
            if len(self._sources) > _SOURCES:
                oldest = min(self._sources, key=lambda one: self._sources[one][0])
                del self._sources[oldest]
                self._dirty_sources.add(oldest)

    def _add(self, counter: Counter, by: float) -> None:
        counter = Counter(
            counter.name,
            tuple(
                (label, self._bounded(counter.name, label, value))
                for label, value in counter.labels
            ),
        )
        if by > 0 or counter not in self._counters:
            self._counters[counter] = self._counters.get(counter, 0.0) + max(0.0, by)
            self._dirty.add(counter)

    def _bounded(self, name: str, label: str, value: str) -> str:
        values = self._values.setdefault((name, label), set())
        if value not in values:
            if len(values) >= LABELS:
                return "other"
            values.add(value)
        return value

    def sample(self, figures: Mapping[str, float], now: float | None = None) -> None:
        """Note figures, for each window that is due one."""
        now = time.time() if now is None else now
        with self._lock:
            for name, window in WINDOWS.items():
                samples = self._samples[name]
                if samples and 0 <= now - samples[-1].time < window.step * 0.95:
                    continue
                samples.append(Sample(now, dict(figures)))
                self._new.append((name, samples[-1]))
                self._trim(name, now)

    def _trim(self, name: str, now: float) -> None:
        window, samples = WINDOWS[name], self._samples[name]
        most = int(window.span / window.step) + 1
        kept = [one for one in samples[-most:] if now - window.span <= one.time <= now]
        self._samples[name] = kept

    # --- telling ---

    def counters(self) -> dict[Counter, float]:
        """All counters."""
        with self._lock:
            return dict(self._counters)

    def series(self, window: str) -> list[Sample]:
        """The samples of the last `hour`, `day` or `week`, oldest first."""
        with self._lock:
            return list(self._samples[window])

    # --- the file ---

    def flush(self) -> bool:
        """Write what is new. Returns whether all is written; a fault is told by `trouble`."""
        if self.path is None:
            return True
        with self._writing:
            new = self._take()
            try:
                if self._database is None:
                    self._open()
                if not self._loaded:
                    self._read()
                self._write(new)
            except (sqlite3.Error, OSError, ValueError, TypeError) as error:
                self._put_back(new)
                self._fault(error)
                return False
            self.trouble = None
            return True

    def close(self) -> None:
        """Write what is new, and close the file."""
        self.flush()
        with self._writing:
            if self._database is not None:
                self._database.close()
                self._database = None

    def _take(self) -> _New:
        with self._lock:
            new = _New(
                {one: self._counters[one] for one in self._dirty},
                {one: self._sources.get(one) for one in self._dirty_sources},
                self._new,
            )
            self._dirty, self._dirty_sources, self._new = set(), set(), []
            return new

    def _put_back(self, new: _New) -> None:
        with self._lock:
            self._dirty |= set(new.counters)
            self._dirty_sources |= set(new.sources)
            self._new = (new.samples + self._new)[-_UNWRITTEN:]

    def _write(self, new: _New) -> None:
        if not any(new):
            return
        assert self._database is not None
        database, now = self._database, time.time()
        with _transaction(database):
            database.executemany(
                "INSERT OR REPLACE INTO counters VALUES (?, ?, ?)",
                [(one.name, json.dumps(one.labels), at) for one, at in new.counters.items()],
            )
            for source, known in new.sources.items():
                if known is None:
                    database.execute("DELETE FROM sources WHERE source = ?", (source,))
                    continue
                told = json.dumps([[*one, value] for one, value in known[1].items()])
                database.execute(
                    "INSERT OR REPLACE INTO sources VALUES (?, ?, ?)", (source, known[0], told)
                )
            database.executemany(
                "INSERT OR REPLACE INTO samples VALUES (?, ?, ?)",
                [(name, one.time, json.dumps(one.figures)) for name, one in new.samples],
            )
            for name, window in WINDOWS.items() if new.samples else ():
                database.execute(
                    "DELETE FROM samples WHERE window = ? AND (time < ? OR time > ?)",
                    (name, now - window.span, now + window.step),
                )

    def _fault(self, error: Exception) -> None:
        told = f"{self.path} cannot be used: {error}"
        if self.trouble != told:
            _log.warning("%s; figures are kept in memory meanwhile", told)
        self.trouble = told
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            self._database = None
        if _is_damaged(error):
            self._put_aside()

    def _put_aside(self) -> None:
        """Begin anew, with everything that is in memory."""
        assert self.path is not None
        for end in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                os.replace(self.path + end, f"{self.path}.damaged{end}")
        with self._lock:
            self._loaded = True  # there is nothing to load
            self._dirty = set(self._counters)
            self._dirty_sources = set(self._sources)
            self._new = [(name, one) for name, kept in self._samples.items() for one in kept]

    def _open(self) -> None:
        assert self.path is not None
        os.makedirs(os.path.dirname(self.path) or ".", mode=0o700, exist_ok=True)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        database = sqlite3.connect(
            self.path, timeout=0.1, isolation_level=None, check_same_thread=False
        )
        try:
            # One daemon at a time: what another one writes meanwhile would be overwritten.
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute("PRAGMA journal_size_limit = 1048576")
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise sqlite3.DatabaseError(f"it is of version {version}, not {_VERSION}")
            if version == 0:
                with _transaction(database):
                    for statement in _SCHEMA.split(";")[:-1]:
                        database.execute(statement)
                    database.execute(f"PRAGMA user_version = {_VERSION}")
        except BaseException:
            database.close()
            raise
        self._database = database

    def _read(self) -> None:
        """Take what the file has, besides what was counted before it could be opened."""
        assert self._database is not None
        database, now = self._database, time.time()
        counters = [
            (_counter(name, json.loads(labels)), float(value))
            for name, labels, value in database.execute("SELECT * FROM counters")
        ]
        sources = {
            source: (
                float(seen),
                {_counter(*one[:2]): float(one[2]) for one in json.loads(counted)},
            )
            for source, seen, counted in database.execute("SELECT * FROM sources")
        }
        samples = {
            name: [
                Sample(float(at), dict(json.loads(told)))
                for at, told in database.execute(
                    "SELECT time, figures FROM samples WHERE window = ? ORDER BY time", (name,)
                )
            ]
            for name in WINDOWS
        }
        with self._lock:
            for counter, value in counters:
                self._add(counter, value)
            self._dirty_sources |= {one for one in sources if now - sources[one][0] >= _FORGET}
            known = {one: told for one, told in sources.items() if one not in self._dirty_sources}
            self._sources = {**known, **self._sources}
            for name, kept in samples.items():
                self._samples[name] = kept + self._samples[name]
                self._trim(name, now)
        self._loaded = True


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise


def _is_damaged(error: Exception) -> bool:
    return type(error) in (sqlite3.DatabaseError, ValueError, TypeError, json.JSONDecodeError)


def _counter(name: str, labels: list[list[str]]) -> Counter:
    return Counter(str(name), tuple((str(label), str(value)) for label, value in labels))
