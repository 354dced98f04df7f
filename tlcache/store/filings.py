"""The records of a root as listings need them: what each says of its kernel, and which entry it
points at.

To read a record takes 0.1 ms, so what it says is taken from the scan cache while its file is as it
was.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from tlcache.store import calls, files, record
from tlcache.store.record import Record

if TYPE_CHECKING:
    from tlcache.store.scan_cache import ScanCache

__all__ = ["Filing", "Filings"]

_log = logging.getLogger(__name__)
_TICK = 0.05  # seconds: a directory that changed this lately may change again and keep its time


class Filing(NamedTuple):
    """What a record says of its kernel.

    Attributes:
        action_key: The key that it is filed under.
        entry: The entry that it points at, relative to the root.
        created: ISO 8601, UTC.
        kernel: Import path of the factory.
        target: Like `sm_90a`.
        workload: As JSON.
        schedule: As JSON.
        workload_text: The workload for people.
        schedule_text: The schedule for people.
        params: Dtype and shape of every parameter, as JSON.
        nvcc: The build of nvcc that the builder had.
        host_compiler: The builder's.
    """

    action_key: str
    entry: str
    created: str
    kernel: str
    target: str
    workload: str
    schedule: str
    workload_text: str
    schedule_text: str
    params: str
    nvcc: str | None
    host_compiler: str | None

    @property
    def name(self) -> str:
        """The factory's own name, which is the operator's, like `rms_norm`."""
        return self.kernel.rpartition(":")[2]

    @property
    def is_cuda(self) -> bool:
        return self.target.startswith("sm_")

    @classmethod
    def of(cls, filed: Record) -> Filing:
        """What a record says."""
        spec = filed.spec.to_json()
        return cls(
            filed.action_key,
            os.path.normpath(filed.entry),
            filed.created,
            filed.spec.kernel,
            filed.spec.target.name,
            json.dumps(spec["workload"]),
            json.dumps(spec["schedule"]),
            filed.spec.workload_text,
            filed.spec.schedule_text,
            json.dumps([[param.dtype, param.shape] for param in filed.launch.params]),
            filed.toolkit.get("nvcc"),
            filed.toolkit.get("host_compiler"),
        ).shared()

    def shared(self) -> Filing:
        """The same with one copy of what many records say: a root may have 60,000 of them."""
        intern = sys.intern
        return self._replace(
            kernel=intern(self.kernel),
            target=intern(self.target),
            schedule=intern(self.schedule),
            schedule_text=intern(self.schedule_text),
            params=intern(self.params),
            nvcc=self.nvcc and intern(self.nvcc),
            host_compiler=self.host_compiler and intern(self.host_compiler),
        )


class _File(NamedTuple):
    """A record's file: what it was like, and what it says where that is sound."""

    stamp: bytes
    used: float
    filing: Filing | None


class Filings:
    """The records of one root by the entry that they point at; read again where they changed.

    Threads may share it.
    """

    def __init__(self, root: str, cache: ScanCache | None = None) -> None:
        self._root, self._start = root, os.path.join(root, "")
        self._top = os.path.join(root, "tlcache", "records")
        self._times: dict[str, int] = {}
        self._files: dict[str, dict[str, _File]] = {}
        self._at: dict[str, list[str]] = {}
        self._unsound = 0
        self._calls: dict[str, float] | None = None
        self._cache = cache
        self._lock = threading.RLock()
        there = os.path.isdir(self._top)
        self._known = cache.filings(root) if cache is not None and there else {}
        self.refresh()
        if self._unsound:
            told = "a record" if self._unsound == 1 else f"{self._unsound:,} records"
            _log.warning("%s in %s cannot be used; `tlcache verify` says why", told, root)
        if cache is not None:
            cache.forget_filings(root, self._known)
        self._cache, self._known = None, {}

    def refresh(self) -> None:
        """Look which directories of records have changed, and read what is new in them."""
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        now = {item.name for item in _items(self._top) if item.is_dir(follow_symlinks=False)}
        for name in now | set(self._times):
            try:
                changed = os.lstat(os.path.join(self._top, name)).st_mtime_ns
            except OSError:
                changed = -1
            if self._times.get(name) != changed:
                self._read(name)
                settled = changed < time.time_ns() - int(_TICK * 1e9)
                self._times[name] = changed if settled else 0

    def again(self, directory: str, name: str | None = None) -> set[str]:
        """Read a record again, or all of a directory, whatever that says of its last change.

        Args:
            directory: The two digits that it is filed under.
            name: The record's file; all where None.

        Returns:
            The locations of the things that they pointed at, and point at now, whether or not
            anything changed: another thread may have seen it before.
        """
        with self._lock:
            before = self._files.get(directory, {})
            if name is None:
                self._read(directory)
                keys = {*before, *self._files[directory]}
            else:
                self._again(directory, name)
                keys = {name.removesuffix(".json")}
            filed = (files.get(key) for key in keys for files in (before, self._files[directory]))
            names = {one.filing.entry for one in filed if one is not None and one.filing}
        return {os.path.join(self._root, name) for name in names}

    def directories(self) -> set[str]:
        """The directories of records that there were, each two digits."""
        with self._lock:
            return set(self._files)

    def at(self, location: str) -> frozenset[str]:
        """The paths of the records that point at a thing."""
        with self._lock:
            keys = tuple(self._at.get(self._name(location), ()))
        return frozenset(map(self._path, keys))

    def newest(self, location: str) -> tuple[Filing, float] | None:
        """What the newest of them says, and when one of them was last used, in seconds since
        1970.
        """
        with self._lock:
            keys = self._at.get(self._name(location))
            if not keys:
                return None
            found = [self._files[key[:2]][key] for key in keys]
        filed = (one.filing for one in found if one.filing)
        says = max(filed, key=lambda one: (one.created, one.action_key))
        return says, max(one.used for one in found)

    def called(self, location: str) -> float | None:
        """When a program's own call last restored a thing, in seconds since 1970."""
        if self._calls is None:
            self._calls = calls.uses(self._root)
        return self._calls.get(self._name(location))

    def all(self) -> Iterator[tuple[str, str]]:
        """All sound records: the entry's path, relative to the root, and the record's path."""
        with self._lock:
            filed = [(name, key) for name, keys in self._at.items() for key in keys]
        yield from ((name, self._path(key)) for name, key in filed)

    def _name(self, location: str) -> str:
        """A thing's path below the root. `os.path.relpath` takes 20 times as long."""
        inside = location.startswith(self._start)
        return location[len(self._start) :] if inside else os.path.relpath(location, self._root)

    def _path(self, key: str) -> str:
        return os.path.join(self._top, key[:2], f"{key}.json")

    def _read(self, directory: str) -> None:
        before, now = self._files.get(directory, {}), {}
        for item in _items(os.path.join(self._top, directory)):
            key = _key(directory, item.name)
            if key is None:
                continue
            try:
                status = item.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                now[key] = self._file(key, item.path, status, before.get(key))
        self._put(directory, before, now)

    def _again(self, directory: str, name: str) -> None:
        before, key = self._files.setdefault(directory, {}), _key(directory, name)
        if key is None:
            return
        now = {other: file for other, file in before.items() if other != key}
        path = self._path(key)
        try:
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                now[key] = self._file(key, path, status, before.get(key))
        except OSError:
            pass  # it has vanished
        self._put(directory, before, now)

    def _put(self, directory: str, before: dict[str, _File], now: dict[str, _File]) -> None:
        for key, gone in before.items():
            if gone.filing is not None and now.get(key) is not gone:
                keys = self._at[gone.filing.entry]
                keys.remove(key)
                if not keys:
                    del self._at[gone.filing.entry]
        for key, found in now.items():
            if found.filing is not None and before.get(key) is not found:
                self._at.setdefault(found.filing.entry, []).append(key)
        self._files[directory] = now

    def _file(self, key: str, path: str, status: os.stat_result, before: _File | None) -> _File:
        stamp = files.stamp(status)
        if before is not None and before.stamp == stamp:
            return before
        known = self._known.pop(key, None)
        if known is not None and known[0] == stamp:
            return _File(stamp, status.st_mtime, known[1])
        filing = self._parsed(key, path)
        if self._cache is not None and filing is not None:
            changed = max(status.st_mtime, status.st_ctime)
            self._cache.put_filing(self._root, stamp, filing, changed)
        return _File(stamp, status.st_mtime, filing)

    def _parsed(self, key: str, path: str) -> Filing | None:
        try:
            found = record.decode(files.read(path, unseen=True))
        except (OSError, ValueError) as error:
            _log.debug("the record %s is ignored: %s", path, error)
            self._unsound += not isinstance(error, FileNotFoundError)
            return None
        return Filing.of(found) if found.action_key == key else None


def _key(directory: str, name: str) -> str | None:
    """The action key that a file of records is named by; None where it is another file."""
    key = name.removesuffix(".json")
    return key if key and key != name and key[:2] == directory else None


def _items(place: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(place) as found:
            return sorted(found, key=lambda item: item.name)
    except OSError:
        return []
