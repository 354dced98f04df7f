"""What tlcache has filed in a root of the kernels that an archive takes: their records, the
schedules and closures that these are by, and the calls of programs' own functions that mean them.

Invariant: a record or a call goes along only with the library that it tells of. How functions are
called and the analyses of their texts are no kernel's: where a call goes, all of them do, up to
MOST_BESIDE bytes in the order of their paths. What is damaged does not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from tlcache.spec import RECORD_SCHEMA, workload_text
from tlcache.store import calls, closures, layout, record, schedules
from tlcache.store.archive.index import Member, Recorded
from tlcache.store.archive.packing import read
from tlcache.store.calls import Answer, Style

__all__ = ["MOST_BESIDE", "Belonging", "Filed"]

MOST_BESIDE = 32 * 1024 * 1024

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class _Record(NamedTuple):
    """A record's file, and what it says."""

    path: str
    data: bytes
    key: str
    library: str
    told: Member
    spec: Mapping[str, Any]
    source_digest: str
    short: Recorded


class Belonging(NamedTuple):
    """What goes along.

    Attributes:
        files: Bytes by path below the root.
        records: The records in short, by action key.
        factories: The factory of each record.
        calls: How many calls of programs' own functions mean one of the kernels.
        left: What was left out, below the root, and why.
    """

    files: dict[str, bytes]
    records: dict[str, Recorded]
    factories: list[str]
    calls: int
    left: list[tuple[str, str]]


class _Call(NamedTuple):
    """The file of a call, of what a warm came to, or of how a function is called: then it has no
    library.
    """

    path: str
    data: bytes
    means: bool
    library: str | None
    told: Member | None


class Filed:
    """The records and calls of a root, read; which of them belong is known only when the kernels
    are.

    Args:
        root: The cache root.
        keys: The action keys of those that may go along; None for all.
    """

    def __init__(self, root: str, keys: Collection[str] | None) -> None:
        self._top = os.path.join(root, "tlcache")
        self._start = len(os.path.join(root, ""))
        self._records = [
            found
            for path in _below(os.path.join(self._top, "records"))
            if (found := _record(path)) is not None and (keys is None or found.key in keys)
        ]
        self._calls = [
            call
            for path in _below(os.path.join(self._top, "calls"))
            if (call := _call(path)) is not None
        ]

    def of(self, files: Mapping[str, Member]) -> Belonging:
        """What belongs to the kernels of an archive, whose files these are."""
        ours = [one for one in self._records if files.get(one.library) == one.told]
        digests = {(one.spec["kernel"], one.source_digest) for one in ours}
        specs: set[str] = set()

        def has_record(name: str, data: bytes) -> bool:
            if not specs:
                specs.update(_canonical(one.spec) for one in ours)
            spec = schedules.spec_of(name, data)
            return spec is not None and spec.canonical() in specs

        found = [(one.path, one.data) for one in ours]
        found += self._those("closures", lambda *file: closures.told(*file) in digests)
        found += self._those("schedules", has_record)
        answers = [one for one in self._calls if one.library and files.get(one.library) == one.told]
        found += [(one.path, one.data) for one in answers]
        left: list[tuple[str, str]] = []
        if answers:
            found += self._beside(left)
        return Belonging(
            {path[self._start :]: data for path, data in sorted(found)},
            {one.key: one.short for one in sorted(ours, key=lambda one: one.key)},
            [one.spec["kernel"] for one in ours],
            sum(one.means for one in answers),
            left,
        )

    def _beside(self, left: list[tuple[str, str]]) -> Iterator[tuple[str, bytes]]:
        """What calls need besides, as far as it may go."""
        size = 0
        for folder, those in (
            ("calls", [(one.path, one.data) for one in self._calls if one.library is None]),
            ("texts", self._those("texts", _is_text)),
        ):
            more = 0
            for path, data in those:
                if size + len(data) <= MOST_BESIDE:
                    size += len(data)
                    yield path, data
                else:
                    more += 1
            if more:
                what = f"has {more:,} more files than the {MOST_BESIDE:,} bytes that go along"
                left.append((f"tlcache/{folder}", what))

    def _those(
        self, folder: str, belongs: Callable[[str, bytes], bool]
    ) -> Iterator[tuple[str, bytes]]:
        for path in _below(os.path.join(self._top, folder)):
            try:
                data = read(path)
            except OSError:
                continue
            if belongs(os.path.basename(path), data):
                yield path, data


def _canonical(spec: Mapping[str, Any]) -> str:
    return json.dumps(spec, sort_keys=True, separators=(",", ":"))


def _record(path: str) -> _Record | None:
    """A record; None where it is none that is sound, or of another schema.

    Its checksum says that it is as tlcache wrote it, so its values are not read more closely: that
    would take a third of an export's time.
    """
    try:
        data = read(path)
        values = record.contents(data)
        spec, library, entry = values["spec"], values["library"], values["entry"]
        entry, target = os.path.normpath(entry), spec["target"]
        title = (spec["kernel"].rpartition(":")[2], workload_text(spec["workload"]), target)
        short = Recorded(
            " ".join(filter(None, title)),
            *(target, entry, values["created"], values["compile_seconds"]),
        )
        found = _Record(
            *(path, data, values["action_key"], f"{entry}/{library['name']}"),
            Member(library["size"], library["sha256"]),
            *(spec, values["source_digest"], short),
        )
        named = os.path.basename(path) == f"{found.key}.json"
        return found if values["schema"] == RECORD_SCHEMA and named else None
    except (OSError, *_DAMAGE):
        return None  # `verify` says what is wrong with it


def _call(path: str) -> _Call | None:
    """A call, or how a function is called; None where it is damaged, or of another schema."""
    try:
        data = read(path)
        found = calls.told("calls", os.path.basename(path), data)
    except (OSError, ValueError):
        return None  # `verify` says what is wrong with it
    if found is None or isinstance(found, Style):
        return _Call(path, data, False, None, None)
    library = f"{os.path.normpath(found.entry)}/{found.library.name}"
    belongs = layout.file_of(library)
    if belongs is None or belongs[0].kind != "kernel":
        return None
    told = Member(found.library.size, found.library.sha256)
    return _Call(path, data, isinstance(found, Answer), library, told)


def _is_text(name: str, data: bytes) -> bool:
    try:
        calls.told("texts", name, data)
    except ValueError:
        return False
    return True


def _below(top: str) -> list[str]:
    """The JSON files in a directory of tlcache's, and one level deeper, in order."""
    found = []
    for place, directories, names in os.walk(top):
        if place != top:
            directories.clear()
        found += [os.path.join(place, name) for name in names if name.endswith(".json")]
    return sorted(found)
