"""The scan cache: what was read from entries and records, in a SQLite file of the user's.

It can be deleted at any time. Invariant: no fault of it is a fault of a scan: where it is missing,
damaged, locked, of another version or not writable, files are read anew; and what they said is
handed out only for files with the inode, times and size that it was read from.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tlcache.store.entry import EntryParam, Facts

if TYPE_CHECKING:
    import sqlite3

    from tlcache.store.device_code import DeviceKernel
    from tlcache.store.filings import Filing

__all__ = ["Kept", "ScanCache", "path"]

_log = logging.getLogger(__name__)

_VERSION = 2  # of the tables, and of what the readers of entries and records tell
_SCHEMA = {
    "facts": (
        "CREATE TABLE facts (place TEXT, key TEXT, directory BLOB, names TEXT, stamp BLOB,"
        " facts TEXT, payload TEXT, PRIMARY KEY (place, key)) WITHOUT ROWID"
    ),
    "filings": (
        "CREATE TABLE filings (place TEXT, key TEXT, stamp BLOB, entry TEXT, created TEXT,"
        " kernel TEXT, target TEXT, workload TEXT, schedule TEXT, workload_text TEXT,"
        " schedule_text TEXT, params TEXT, nvcc TEXT, host_compiler TEXT,"
        " PRIMARY KEY (place, key)) WITHOUT ROWID"
    ),
}
_FORGET = "DELETE FROM facts WHERE place = ? AND key = ?"
_PUT = "INSERT OR REPLACE INTO facts VALUES (?, ?, ?, ?, ?, ?, ?)"
_FORGET_FILING = "DELETE FROM filings WHERE place = ? AND key = ?"
_PUT_FILING = f"INSERT OR REPLACE INTO filings VALUES ({', '.join('?' * 14)})"
_BATCH = 2000
_SETTLED = 2.0  # seconds: a file that is younger may change again and keep its time
_PATIENCE = 0.2  # seconds, for another process that writes
_MOST = 512 * 1024 * 1024


class Kept(NamedTuple):
    """What is known of one entry.

    Attributes:
        directory: Of its listing, as `entry.Listing` has it.
        names: Of that listing.
        stamp: Of that listing.
        text: The facts.
        payload: The sha256 of its device code.
    """

    directory: bytes
    names: tuple[str, ...]
    stamp: bytes
    text: str
    payload: str | None


def path() -> str:
    """The file's path: $TLCACHE_SCAN_CACHE, else `scan_cache` of tlcache.toml, else in the user's
    cache directory.
    """
    named = os.environ.get("TLCACHE_SCAN_CACHE")
    if named:
        return named
    from tlcache import config

    if (chosen := config.value("scan_cache")) is not None:
        return str(chosen)
    import platformdirs

    return os.path.join(platformdirs.user_cache_dir("tlcache", appauthor=False), "scan.sqlite")


_Row = tuple[bytes, str, bytes, str, "str | None"]


class ScanCache:
    """The facts of the entries at one root. Read a directory of entries at a time, written in
    batches.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(root)
        self._database: sqlite3.Connection | None = None
        self._tried = False
        self._place: str | None = None
        self._parent, self._absolute = "/", "/"
        self._known: dict[str, _Row] = {}
        self._splits: dict[str, tuple[str, ...]] = {}
        self._seen: set[str] = set()
        self._changes: dict[str, list[tuple[object, ...]]] = {}
        self._counted = 0
        self._read: dict[str, Facts] = {}

    @classmethod
    @contextmanager
    def opened(cls, root: str | os.PathLike[str]) -> Iterator[ScanCache]:
        """The cache for one scan. It is opened at the first question, and closed at the end; only
        a scan that came to its end may forget what it did not see.
        """
        cache = cls(root)
        try:
            yield cache
            cache._leave()
            cache._forget()
        finally:
            cache._write()
            if cache._database is not None:
                cache._database.close()

    def get(self, location: str) -> Kept | None:
        """What is known of an entry. It is for the caller to compare the stamps."""
        place, key = self._split(location)
        if place != self._place:
            self._enter(place)
        row = self._known.pop(key, None)
        if row is None or tuple(map(type, row[:4])) != (bytes, str, bytes, str):
            return None
        directory, names, stamp, text, payload = row
        return Kept(directory, self._names(names), stamp, text, payload)

    def facts(self, kept: Kept) -> Facts | None:
        """The facts that were kept; entries with the same share them."""
        found = self._read.get(kept.text)
        if found is None:
            found = _decoded(kept.text)
            if found is not None:
                self._read[kept.text] = found
        return found

    def put(
        self,
        location: str,
        directory: bytes,
        names: tuple[str, ...],
        stamp: bytes,
        facts: Facts,
        payload: str | None,
        changed: float,
    ) -> None:
        """Keep what is known of an entry, unless a file of it changed so lately (`changed`, in
        seconds since 1970) that it may do so again without a trace.
        """
        if changed >= time.time() - _SETTLED:
            return
        place, key = self._split(location)
        text = "/".join(names)
        try:
            f"{location}{text}".encode()
        except UnicodeEncodeError:
            return  # a name that is no text cannot be kept
        self._change(_PUT, (place, key, directory, text, stamp, json.dumps(facts), payload))

    def filings(self, root: str) -> dict[str, tuple[bytes, Filing]]:
        """What the records of a root say, by their action keys, with the stamps of their files. It
        is for the caller to compare those.
        """
        from tlcache.store.filings import Filing

        place = os.path.abspath(root)
        self._seen.add(place)
        rows = self._do(
            "SELECT stamp, key, entry, created, kernel, target, workload, schedule, workload_text,"
            " schedule_text, params, nvcc, host_compiler FROM filings WHERE place = ?",
            (place,),
            (),
        )
        found = {}
        for stamp, *fields in rows:
            sure, rest = set(map(type, fields[:-2])), set(map(type, fields[-2:]))
            if type(stamp) is bytes and sure == {str} and rest <= {str, type(None)}:
                found[fields[0]] = (stamp, Filing(*fields).shared())
        return found

    def put_filing(self, root: str, stamp: bytes, filing: Filing, changed: float) -> None:
        """Keep what a record says, unless its file changed lately, as with `put`."""
        if changed >= time.time() - _SETTLED:
            return
        self._change(_PUT_FILING, (os.path.abspath(root), filing[0], stamp, *filing[1:]))

    def forget_filings(self, root: str, keys: Iterable[str]) -> None:
        """Records that are not there any more, or say something else."""
        place = os.path.abspath(root)
        for key in keys:
            self._change(_FORGET_FILING, (place, key))

    def _change(self, statement: str, values: tuple[object, ...]) -> None:
        self._changes.setdefault(statement, []).append(values)
        self._counted += 1
        if self._counted >= _BATCH:
            self._write()

    def _split(self, location: str) -> tuple[str, str]:
        parent, _, key = location.rpartition("/")
        if parent != self._parent:
            self._parent, self._absolute = parent, os.path.abspath(parent or "/")
        return self._absolute, key

    def _names(self, text: str) -> tuple[str, ...]:
        names = self._splits.get(text)
        if names is None:
            names = self._splits[text] = tuple(text.split("/")) if text else ()
        return names

    def _enter(self, place: str) -> None:
        self._leave()
        self._place = place
        self._seen.add(place)
        self._known = {}
        rows = self._do(
            "SELECT key, directory, names, stamp, facts, payload FROM facts WHERE place = ?",
            (place,),
            (),
        )
        self._known = {row[0]: row[1:] for row in rows}

    def _leave(self) -> None:
        """What a directory had, and has not any more, is forgotten."""
        if self._place is not None:
            for key in self._known:
                self._change(_FORGET, (self._place, key))
            self._known = {}

    def _forget(self) -> None:
        """Directories of this root that were not there any more."""
        if self._database is None:
            return
        prefix = self._root.rstrip("/") + "/"
        for table in _SCHEMA:
            rows = self._do(
                f"SELECT DISTINCT place FROM {table} WHERE place >= ? AND place < ?",
                (prefix, prefix[:-1] + "0"),  # "0" follows "/"
                (),
            )
            for (place,) in rows:
                if place not in self._seen:
                    self._do(f"DELETE FROM {table} WHERE place = ?", (place,), ())

    def _write(self) -> None:
        changes, self._changes, self._counted = self._changes, {}, 0
        database = self._connection() if changes else None
        if database is None:
            return
        import sqlite3

        try:
            database.execute("BEGIN IMMEDIATE")
            for statement in (_FORGET, _PUT, _FORGET_FILING, _PUT_FILING):
                database.executemany(statement, changes.get(statement, ()))
            database.execute("COMMIT")
        except (sqlite3.Error, ValueError) as error:
            self._fault(error)

    def _do(self, statement: str, values: tuple[str, ...], otherwise: Any) -> Any:
        database = self._connection()
        if database is None:
            return otherwise
        import sqlite3

        try:
            return database.execute(statement, values).fetchall()
        except (sqlite3.Error, ValueError) as error:
            self._fault(error)
            return otherwise

    def _connection(self) -> sqlite3.Connection | None:
        if not self._tried:
            self._tried = True
            import sqlite3

            try:
                self._database = _open(path())
            except (sqlite3.Error, OSError, ValueError) as error:
                self._fault(error)
        return self._database

    def _fault(self, error: Exception) -> None:
        """Go on without. What is damaged is deleted, so that the next scan begins it anew."""
        import sqlite3

        _log.debug("the scan cache %s is not used: %s", path(), error)
        if self._database is not None:
            self._database.close()
            self._database = None
        damaged = isinstance(error, sqlite3.DatabaseError)
        if damaged and (type(error) is not sqlite3.OperationalError or "decode" in str(error)):
            try:
                os.unlink(path())
            except OSError:
                pass


def _open(file: str) -> sqlite3.Connection:
    import sqlite3

    os.makedirs(os.path.dirname(file) or ".", mode=0o700, exist_ok=True)
    if os.path.exists(file) and os.path.getsize(file) > _MOST:
        os.unlink(file)
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    database = sqlite3.connect(file, timeout=_PATIENCE, isolation_level=None)
    try:
        database.execute("PRAGMA synchronous = OFF")
        if database.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
            database.execute("BEGIN IMMEDIATE")
            for table, schema in _SCHEMA.items():
                database.execute(f"DROP TABLE IF EXISTS {table}")
                database.execute(schema)
            database.execute(f"PRAGMA user_version = {_VERSION}")
            database.execute("COMMIT")
    except BaseException:
        database.close()
        raise
    return database


def _decoded(text: str) -> Facts | None:
    """Facts as they were written, or None where the text is not of that form."""
    try:
        kernel, params, targets, toolkit, host, kernels = json.loads(text)
        return Facts(
            _text(kernel),
            None if params is None else tuple(_param(*param) for param in params),
            None if targets is None else tuple(map(_some_text, targets)),
            _text(toolkit),
            _text(host),
            tuple(_kernel(*kernel) for kernel in kernels),
        )
    except (ValueError, TypeError, RecursionError):
        return None


def _some_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _text(value: object) -> str | None:
    return None if value is None else _some_text(value)


def _param(dtype: object, shape: list[Any]) -> EntryParam:
    if not all(dim is None or type(dim) in (int, str) for dim in shape):
        raise TypeError(f"{shape!r} is not a shape")
    return EntryParam(_some_text(dtype), tuple(shape))


def _kernel(name: object, registers: object, shared: object) -> DeviceKernel:
    from tlcache.store.device_code import DeviceKernel

    if type(shared) is not int or (registers is not None and type(registers) is not int):
        raise TypeError("a kernel's registers and memory are numbers")
    return DeviceKernel(_some_text(name), registers, shared)
