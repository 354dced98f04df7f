"""What was deleted from a root lately, so that `tlcache why` can tell an eviction from a kernel
that never was.

    <root>/tlcache/evictions.jsonl        one line an eviction, the newest last
    <root>/tlcache/evictions.lock         held by who writes it

Invariant: the file never holds more than MOST lines for long, nor more than MOST_BYTES; a line is
appended in one write, and the file is cut by temporary file and rename, so a reader sees whole
lines but for a last one that a kill cut off, and who is killed loses at most its own. A damaged
line is none. The log is a comfort: that it cannot be written stops no eviction.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from tlcache.store import files

__all__ = ["MOST", "MOST_BYTES", "Eviction", "note", "path", "recent"]

_log = logging.getLogger(__name__)

MOST = 4096
"""Evictions that are remembered at least; the file is cut when it has twice as many."""
MOST_BYTES = 4 * 1024 * 1024
_LINE = 4096  # a longer line is none of ours


@dataclass(frozen=True)
class Eviction:
    """One thing that was deleted.

    Attributes:
        key: TileLang's key, or the file's name where it has none.
        path: Where it lay, relative to the root.
        kind: As in `layout.EntryPlace`, like `kernel`.
        kernel: The kernel's name, None where it was not known.
        target: Like `sm_90a`, None where it was not known.
        action_key: The key of its record, None where it had none.
        bytes: The size of its files.
        when: ISO 8601, UTC.
        why: The policy that chose it, like `--max-size 5GiB`.
        by: The command that deleted it, like `prune`.
    """

    key: str
    path: str
    kind: str
    kernel: str | None
    target: str | None
    action_key: str | None
    bytes: int
    why: str
    by: str = "prune"
    when: str = ""


def path(root: str | os.PathLike[str]) -> str:
    """The log of a root."""
    return os.path.join(root, "tlcache", "evictions.jsonl")


def note(root: str | os.PathLike[str], evicted: Iterable[Eviction]) -> bool:
    """Append evictions to a root's log. One without a time gets the present one.

    Returns:
        Whether they are written; a fault is logged, never raised.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    data = b"".join(_encoded(one, now) for one in evicted)
    if not data:
        return True
    place = path(root)
    try:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with _writing(place):
            _append(place, data)
            _cut(place)
    except OSError as error:
        _log.warning("the evictions cannot be noted in %s: %s", place, error)
        return False
    return True


def recent(root: str | os.PathLike[str]) -> list[Eviction]:
    """What was deleted from a root lately, newest first."""
    data = _read(path(root))
    found = [one for line in data.splitlines() if (one := _decoded(line)) is not None]
    return found[::-1]


def _encoded(one: Eviction, now: str) -> bytes:
    fields = asdict(one)
    fields["when"] = one.when or now
    line = json.dumps(fields, separators=(",", ":")).encode()
    if len(line) >= _LINE:
        fields["why"], fields["kernel"] = fields["why"][:200], (fields["kernel"] or "")[:200]
        fields["path"] = fields["path"][-1000:]
        line = json.dumps(fields, separators=(",", ":")).encode()
    return line + b"\n" if len(line) < _LINE else b""


def _decoded(line: bytes) -> Eviction | None:
    if len(line) >= _LINE:
        return None
    try:
        fields = json.loads(line)
        for name in ("key", "path", "kind", "why", "by", "when"):
            if not isinstance(fields[name], str):
                return None
        for name in ("kernel", "target", "action_key"):
            if not isinstance(fields[name], (str, type(None))):
                return None
        if type(fields["bytes"]) is not int:
            return None
        datetime.fromisoformat(fields["when"])
        return Eviction(**{name: fields[name] for name in Eviction.__dataclass_fields__})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


@contextlib.contextmanager
def _writing(place: str) -> Iterator[None]:
    from filelock import FileLock

    lock = FileLock(f"{place.removesuffix('.jsonl')}.lock", mode=0o600)
    with lock:
        yield


def _append(place: str, data: bytes) -> None:
    """A whole write at the end; after a line that a kill cut off, on a line of its own."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(place, flags, 0o644)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{place} is no file")
        if status.st_size and os.pread(descriptor, 1, status.st_size - 1) != b"\n":
            data = b"\n" + data
        view: Any = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


def _cut(place: str) -> None:
    """Keep the newest lines once there are too many."""
    size = os.path.getsize(place)
    if size <= MOST * 64:  # a line is longer than that
        return
    lines = _read(place).splitlines(keepends=True)
    if len(lines) <= 2 * MOST and size <= MOST_BYTES:
        return
    kept, length = [], 0
    for line in reversed(lines[-MOST:]):
        length += len(line)
        if length > MOST_BYTES // 2:
            break
        kept.append(line)
    files.write_atomically(place, b"".join(reversed(kept)))


def _read(place: str) -> bytes:
    """The end of the file; whatever is not a regular file is empty."""
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(place, flags)
    except (OSError, ValueError):
        return b""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return b""
        most = 2 * MOST_BYTES
        offset = max(0, status.st_size - most)
        data = os.pread(descriptor, most, offset)
        return data[data.find(b"\n") + 1 :] if offset else data
    except OSError:
        return b""
    finally:
        os.close(descriptor)
