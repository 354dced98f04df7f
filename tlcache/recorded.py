"""Files of recorded workloads: shapes documents that grow.

Invariant: what stands in a file is never lost. A merge reads the file and replaces it under a lock,
by rename; a file that is not a shapes document is an error, and is left as it is.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tlcache.errors import ShapesError

__all__ = ["KEYS", "Document", "asked", "empty", "identity", "is_document", "merged", "read"]
__all__ += ["sort_out", "update"]

Document = dict[str, Any]
"""A shapes document as JSON values."""

KEYS = "tilelang_keys"
"""The field of a workload that says which of TileLang's keys it had; no part of what it asks
for.
"""

_LISTS = ("workloads", "unreplayable")
_WHY = ("reason", "remedy")


def empty() -> Document:
    """A document that asks for nothing."""
    return {"version": 1, "workloads": []}


def identity(workload: Mapping[str, Any]) -> str:
    """What makes two workloads the same, as text: all but their keys."""
    kept = {name: value for name, value in workload.items() if name != KEYS}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"))


def merged(into: Document, new: Document) -> Document:
    """A document with the workloads of both: those of `into` first, in their order, each once."""
    result = dict(into)
    for name in _LISTS:
        found: dict[str, dict[str, Any]] = {}
        for workload in [*into.get(name, ()), *new.get(name, ())]:
            same = found.setdefault(identity(workload), dict(workload))
            if keys := {**same.get(KEYS, {}), **workload.get(KEYS, {})}:
                same[KEYS] = keys
        if found or name in result:
            result[name] = list(found.values())
    places = dict.fromkeys([*into.get("paths", ()), *new.get("paths", ())])
    if places:
        result["paths"] = list(places)
    return result


def read(path: Path) -> Document | None:
    """The document in a file; None where there is no file, or an empty one.

    Raises:
        ShapesError: It cannot be read, or is no shapes document.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ShapesError(
            f"{path} cannot be read: {(error.strerror or str(error)).lower()}",
            hint="record into another file",
        ) from error
    if not data.strip():
        return None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _foreign(path, f"is not JSON: {error}") from error
    if not is_document(document):
        raise _foreign(path, "is JSON, and not a shapes document of version 1")
    assert isinstance(document, dict)
    return document


def is_document(value: object) -> bool:
    """Whether a JSON value is a shapes document, as far as a merge has to know."""
    return (
        isinstance(value, dict)
        and value.get("version") == 1
        and _are_objects(value.get("workloads"))
        and _are_objects(value.get("unreplayable", []))
        and isinstance(value.get("paths", []), list)
    )


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _foreign(path: Path, what: str) -> ShapesError:
    return ShapesError(
        f"{path} {what}; nothing was recorded into it",
        hint=f"`mv {shlex.quote(str(path))} {shlex.quote(str(path) + '.old')}`, "
        "or record into another file",
    )


def update(path: Path, new: Document) -> Document:
    """Merge a document into a file, and return what the file then holds.

    Raises:
        ShapesError: The file is there and is no shapes document; it is left as it is.
        OSError: It cannot be written.
    """
    from tlcache.store.files import write_atomically

    path = Path(os.path.realpath(path))
    with _locked(path):
        before = read(path)
        after = merged(before if before is not None else empty(), new)
        if after != before:
            write_atomically(str(path), (json.dumps(after, indent=1) + "\n").encode())
    return after


def sort_out(path: Path, verdicts: Mapping[str, Mapping[str, Any]]) -> Document:
    """Put the workloads of a file where they belong, by what came of their replays; and return what
    it then holds.

    Args:
        path: The file.
        verdicts: By the identity of a workload, `reason` and `remedy` where it cannot be replayed,
            and nothing where it can.

    Raises:
        ShapesError: The file is no shapes document.
        OSError: It cannot be written.
    """
    from tlcache.store.files import write_atomically

    path = Path(os.path.realpath(path))
    with _locked(path):
        before = read(path) or empty()
        lists: dict[str, list[dict[str, Any]]] = {name: [] for name in _LISTS}
        for name in _LISTS:
            for entry in before.get(name, ()):
                workload = asked(entry) if KEYS in entry else entry
                verdict = verdicts.get(identity(workload))
                if verdict is None:
                    lists[name].append(entry)
                elif verdict:
                    lists["unreplayable"].append({**workload, **verdict})
                else:
                    lists["workloads"].append(workload)
        after = merged({**before, **dict.fromkeys(_LISTS, ())}, lists)
        after = {name: value for name, value in after.items() if value or name != "unreplayable"}
        if after != before:
            write_atomically(str(path), (json.dumps(after, indent=1) + "\n").encode())
    return after


def asked(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The workload that an entry asks for, or would if it could be replayed."""
    return {name: value for name, value in entry.items() if name not in _WHY}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Be the only one that merges into a file. The lock is a file beside it: the file itself is
    replaced.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path.with_name(f".{path.name}.lock"), flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
