"""What files of tlcache's own have to be in an archive: sound, and of what else it holds.

Invariant: a record or a call that is admitted is of a kernel of the same archive, and tells of the
very library that is there.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import TYPE_CHECKING

from tlcache.errors import ArchiveError
from tlcache.store import calls, closures, record, schedules
from tlcache.store.archive.index import Member
from tlcache.store.archive.tar import LONGEST
from tlcache.store.calls import Answer, Style
from tlcache.store.opened import shown

if TYPE_CHECKING:
    from tlcache.store.archive.reading import Staged

__all__ = ["admit", "join"]


def admit(staged: Staged, path: str, data: bytes) -> None:
    """Check one file, and note it in what is staged.

    Args:
        staged: The archive; its index was checked.
        path: The file's, below the root.
        data: Its bytes.

    Raises:
        ArchiveError: What is wrong with it.
    """
    _, folder, *_, name = path.split("/")
    if folder == "records":
        _record(staged, path, data)
    elif folder in ("calls", "texts"):
        _call(staged, path, data)
    elif folder == "closures" and closures.told(name, data) is None:
        raise ArchiveError(f"{path} is no source closure of that name")
    elif folder == "schedules" and schedules.spec_of(name, data) is None:
        raise ArchiveError(f"{path} is no tuned schedule of that name")
    else:
        staged.others[path] = folder.removesuffix("s")


def _record(staged: Staged, path: str, data: bytes) -> None:
    try:
        found = record.decode(data)
        datetime.fromisoformat(found.created)
    except ValueError as error:
        raise ArchiveError(f"{path} is no sound record: {shown(str(error))}") from None
    if os.path.basename(path) != f"{found.action_key}.json":
        raise ArchiveError(f"{path} is filed under another key than its own")
    staged.records[found.action_key] = found


def _call(staged: Staged, path: str, data: bytes) -> None:
    _, folder, _, name = path.split("/")
    try:
        found = calls.told(folder, name, data)
        if isinstance(found, Answer):
            datetime.fromisoformat(found.created)
    except ValueError as error:
        what = "call" if folder == "calls" else "analysis of a text"
        raise ArchiveError(f"{path} is no sound {what}: {shown(str(error))}") from None
    if found is None or isinstance(found, Style):
        staged.others[path] = "text" if found is None else "style"
        return
    index, entry = staged.index, os.path.normpath(found.entry)
    thing = index.things.get(entry)
    if thing is None or thing.place.kind != "kernel":
        where = shown(found.entry, LONGEST)
        raise ArchiveError(f"{path} points at {where}, a kernel that it does not hold")
    told = Member(found.library.size, found.library.sha256)
    if index.files.get(f"{entry}/{found.library.name}") != told:
        raise ArchiveError(f"{path} tells of another library than it holds")
    staged.calls[name.removesuffix(".json")] = found


def join(staged: Staged) -> None:
    """Check that each record is of a library that is here, and what the index says it is.

    Raises:
        ArchiveError: One is not.
    """
    index = staged.index
    for key, found in staged.records.items():
        told = index.records[key]
        entry, target = os.path.normpath(found.entry), found.spec.target.name
        if (told.entry, told.target, told.created) != (entry, target, found.created):
            raise ArchiveError(f"the record {key[:12]} is not what its index says")
        library = index.files.get(f"{entry}/{found.library.name}")
        if library != Member(found.library.size, found.library.sha256):
            raise ArchiveError(f"the record {key[:12]} tells of another library than it holds")
