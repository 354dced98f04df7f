"""Whether what tlcache itself keeps in a root is sound: records, schedules, closures, calls, texts;
and what an import that was killed left in staging.

Invariant: judged are only the folders that are known here, and in all but the last only files; what
else lies below `<root>/tlcache` belongs to other modules.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Container, Generator, Iterator, Mapping
from typing import NamedTuple

from tlcache import closure, modules
from tlcache.errors import FactoryError, SpecError
from tlcache.spec import RECORD_SCHEMA, KernelSpec
from tlcache.store import calls, record, schedules
from tlcache.store.archive import incoming
from tlcache.store.opened import Fault, Unsound, read_file, shown
from tlcache.store.record import Record

__all__ = ["STALE", "Located", "judge"]

STALE = 3600.0
"""Seconds after which TileLang, too, takes what lies in staging for left behind."""

_OWN = "tlcache"
_TEMPORARY = re.compile(r"\..+\.\d+\.[0-9a-f]{8}\.tmp")
_FACTORY = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_NAMES = {
    "records": re.compile(r"[0-9a-f]{64}\.json"),
    "schedules": re.compile(r"[0-9a-f]{64}\.json"),
    "closures": re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.json"),
    "calls": re.compile(r"[0-9a-f]{64}\.json"),
    "texts": re.compile(r"[0-9a-f]{64}\.json"),
}
_DAMAGE = (
    *(ValueError, KeyError, TypeError, AttributeError, RecursionError),
    *(SpecError, OverflowError),
)


_Item = tuple[str, str, os.stat_result]


class Located(NamedTuple):
    """A fault of one of the files: its path, and what `os.lstat` said of it."""

    path: str
    status: os.stat_result | None
    fault: Fault


def judge(
    root: str,
    hashed: Mapping[str, Mapping[str, tuple[int, str]]],
    broken: Container[str],
    now: float | None = None,
) -> Iterator[Located]:
    """Read all of tlcache's own files in a root, and yield what is wrong.

    A batch in staging counts by its lock, and so whatever its age.

    Args:
        root: The cache root.
        hashed: The sizes and sha256 of the files in TileLang's entries, by the entries' paths
            relative to the root, as far as they were read.
        broken: Entries that are to be put aside; their records go along.
        now: Seconds since 1970.
    """
    judging = _Judging(root, hashed, broken, time.time() if now is None else now)
    for folder in _NAMES:
        yield from judging.folder(folder)
    for path in incoming.left_behind(root):
        what = "was left behind by an import that was killed; the next import deletes it"
        try:
            yield Located(path, os.lstat(path), Fault("stale", "warning", "", what))
        except OSError:
            pass  # that import is at work


class _Judging:
    def __init__(
        self,
        root: str,
        hashed: Mapping[str, Mapping[str, tuple[int, str]]],
        broken: Container[str],
        now: float,
    ) -> None:
        self._root = root
        self._hashed = hashed
        self._broken = broken
        self._now = now
        self._specs: set[KernelSpec] = set()

    def folder(self, folder: str) -> Iterator[Located]:
        top = os.path.join(self._root, _OWN, folder)
        places = [top]
        if folder != "closures":
            places = []
            items = yield from self._listed(top)
            for name, path, status in items:
                if stat.S_ISDIR(status.st_mode) and re.fullmatch("[0-9a-f]{2}", name):
                    places.append(path)
                else:
                    yield from self._stranger(name, path, status)
        for place in places:
            items = yield from self._listed(place)
            for name, path, status in items:
                if stat.S_ISREG(status.st_mode) and _NAMES[folder].fullmatch(name):
                    yield from self._file(folder, name, path, status)
                else:
                    yield from self._stranger(name, path, status)

    def _listed(self, path: str) -> Generator[Located, None, list[_Item]]:
        """What is in a directory, as the generator's value."""
        found: list[_Item] = []
        try:
            status = os.lstat(path)
            if not stat.S_ISDIR(status.st_mode):
                yield from self._stranger(os.path.basename(path), path, status)
                return []
            with os.scandir(path) as items:
                for item in items:
                    try:
                        found.append((item.name, item.path, item.stat(follow_symlinks=False)))
                    except OSError:
                        pass  # it has vanished
        except FileNotFoundError:
            pass
        except OSError as error:
            what = f"cannot be listed: {(error.strerror or str(error)).lower()}"
            yield Located(path, None, Fault("unreadable", "error", "", what))
        return sorted(found, key=lambda item: item[0])

    def _stranger(self, name: str, path: str, status: os.stat_result) -> Iterator[Located]:
        if stat.S_ISLNK(status.st_mode):
            yield Located(path, status, Fault("link", "error", "", "is a link"))
        elif _TEMPORARY.fullmatch(name):
            if self._now - status.st_mtime > STALE:
                what = "was left behind by a writer that was killed"
                yield Located(path, status, Fault("stale", "warning", "", what))
        elif name.endswith(".json"):
            what = "is not named as tlcache names its files, so nothing reads it"
            yield Located(path, status, Fault("misplaced", "error", "", what))
        else:
            yield Located(path, None, Fault("unknown", "note", "", "is nothing of tlcache's"))

    def _file(self, folder: str, name: str, path: str, status: os.stat_result) -> Iterator[Located]:
        for sure in (False, True):
            fault = self._judged(folder, name, path)
            if fault is None:
                return
            try:
                status = os.lstat(path)
            except OSError:
                return  # it has vanished
            if sure:
                yield Located(path, status if fault.kind != "unreadable" else None, fault)

    def _judged(self, folder: str, name: str, path: str) -> Fault | None:
        try:
            data = read_file(path).data
            if data is None:
                return Fault("damaged", "error", "", "is larger than any of its kind")
            if folder == "records":
                return self._record(name, data)
            if folder in ("calls", "texts"):
                return self._call(folder, name, data)
            return (self._schedule if folder == "schedules" else _closure)(name, data)
        except Unsound as unsound:
            return unsound.fault._replace(name="")
        except _DAMAGE as error:
            what = f"is damaged: {shown(str(error))}" if data else "is empty"
            return Fault("damaged", "error", "", what)

    def _record(self, name: str, data: bytes) -> Fault | None:
        values = record.contents(data)
        schema = values.get("schema") if isinstance(values, dict) else None
        if type(schema) is int and schema != RECORD_SCHEMA:
            return Fault("unknown", "note", "", f"is of schema {schema}, which is not read here")
        found = Record.from_json(values)
        if f"{found.action_key}.json" != name:
            return Fault("misplaced", "error", "", "is filed under another key than its own")
        fault = self._entry(found)
        if fault is None:
            self._specs.add(found.spec)
        return fault

    def _call(self, folder: str, name: str, data: bytes) -> Fault | None:
        values = record.contents(data)
        schema = values.get("schema") if isinstance(values, dict) else None
        if type(schema) is int and schema != calls.SCHEMA:
            return Fault("unknown", "note", "", f"is of schema {schema}, which is not read here")
        if f"{values['key']}.json" != name:
            return Fault("misplaced", "error", "", "is filed under another key than its own")
        if folder == "texts":
            return None
        _, found = calls.decode(data)
        return None if isinstance(found, calls.Style) else self._entry(found)

    def _entry(self, found: record.Located) -> Fault | None:
        """Whether a record's entry is there, and its library what the record says."""
        if found.entry in self._broken:
            return Fault("orphan", "warning", "", f"points at {found.entry}, which is damaged")
        told = (found.library.size, found.library.sha256)
        if self._hashed.get(found.entry, {}).get(found.library.name) == told:
            return None
        path = os.path.join(self._root, found.entry)
        if not os.path.lexists(path):
            return Fault("orphan", "warning", "", f"points at {shown(found.entry)}, which is gone")
        try:
            content = read_file(os.path.join(path, found.library.name))
        except Unsound as unsound:
            if unsound.fault.kind == "unreadable":
                return None  # that is said of the entry
            what = f"points at {found.entry}/{shown(found.library.name)}"
            return Fault("orphan", "warning", "", f"{what}, which {unsound.fault.what}")
        if (content.size, content.sha256) != told:
            what = f"tells of another library than {found.entry} has, so it is not loaded"
            return Fault("orphan", "warning", "", what)
        return None

    def _schedule(self, name: str, data: bytes) -> Fault | None:
        tuned = schedules.Tuned.from_json(json.loads(data))
        if f"{schedules.key(tuned.spec)}.json" != name:
            return Fault("misplaced", "error", "", "is filed under another key than its own")
        if tuned.spec not in self._specs:
            what = f"is for {shown(str(tuned.spec))}, which has no record here"
            return Fault("orphan", "note", "", what)
        return None


def _closure(name: str, data: bytes) -> Fault | None:
    values = json.loads(data)
    kernel, algorithm = values["kernel"], values["algorithm"]
    if algorithm != closure.ALGORITHM:
        return Fault("unknown", "note", "", "was computed by another version of tlcache")
    fields = {"algorithm", *closure.Closure._fields}
    if set(values) != fields:
        raise ValueError(f"it has the fields {sorted(values)}")
    hexadecimal = re.compile("[0-9a-f]{64}")
    sound = (
        _FACTORY.fullmatch(kernel)
        and hexadecimal.fullmatch(values["digest"])
        and all(hexadecimal.fullmatch(value) for value in values["sources"].values())
        and all(isinstance(value, str) for value in values["absent"])
        and all(isinstance(value, str) for value in values["externals"].values())
    )
    if not sound:
        raise ValueError("it is no source closure")
    first, _, second = name.removesuffix(".json").partition("-")
    if hashlib.sha256(kernel.encode()).hexdigest()[:16] != first:
        return Fault("misplaced", "error", "", "is filed under another name than its own")
    source = modules.sha256(kernel.partition(":")[0])
    other = Fault("orphan", "note", "", f"is for another {shown(kernel)} than is installed here")
    if source is None or source[:16] != second:
        return other
    try:
        computed = closure.closure(kernel)
    except FactoryError:
        return other
    if computed.sources != values["sources"] or computed.externals != values["externals"]:
        return other
    if computed.digest != values["digest"]:
        raise ValueError("it has another digest than the sources that it names")
    return None
