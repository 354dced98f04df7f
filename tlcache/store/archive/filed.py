"""What tlcache has filed in a root of the kernels that an archive takes: their records, and the
schedules and closures that these are by.

Invariant: a record goes along only with the library that it tells of. What is damaged does not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from tlcache.spec import RECORD_SCHEMA, workload_text
from tlcache.store import closures, record, schedules
from tlcache.store.archive.index import Member, Recorded
from tlcache.store.archive.packing import read

__all__ = ["Belonging", "Filed"]

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
    """

    files: dict[str, bytes]
    records: dict[str, Recorded]
    factories: list[str]


class Filed:
    """The records of a root, read; which of them belong is known only when the kernels are.

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
        return Belonging(
            {path[self._start :]: data for path, data in sorted(found)},
            {one.key: one.short for one in sorted(ours, key=lambda one: one.key)},
            [one.spec["kernel"] for one in ours],
        )

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


def _below(top: str) -> list[str]:
    """The JSON files in a directory of tlcache's, and one level deeper, in order."""
    found = []
    for place, directories, names in os.walk(top):
        if place != top:
            directories.clear()
        found += [os.path.join(place, name) for name in names if name.endswith(".json")]
    return sorted(found)
