"""One kernel entry of TileLang's: what its files tell without a record, and its record's facts with
one.

Invariant: what cannot be known is None, never a guess. Nothing here raises for what an entry
contains.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tlcache.store import layout, record
from tlcache.store.layout import EntryPlace
from tlcache.store.record import Record

__all__ = ["Entry", "EntryParam", "read", "scan"]

_LIBRARIES = {
    "executable.so": "tvm_ffi",
    "kernel_lib.so": "cython",
    "kernel.cubin": "nvrtc",
    "kernel.py": "cutedsl",
}
_SOURCES = ("device_kernel.cu", "kernel.cu", "device_kernel.py")
_KERNEL_NAME = re.compile(
    rb"(?:__global__ void|int32_t)\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\("
)
_HEAD = 64 * 1024


@dataclass(frozen=True)
class EntryParam:
    """A parameter as params.json has it; a dynamic dimension is its name, or None where it has
    none.
    """

    dtype: str
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True)
class Entry:
    """One kernel under a cache root.

    Attributes:
        place: Where it lies.
        backend: TileLang's execution backend, by the library's name.
        library: The library's file name.
        kernel: The kernel's name, without TileLang's `_kernel` suffix.
        params: From params.json; None where it cannot be read.
        bytes: The sum of the sizes of its files.
        created: When its directory was written, UTC.
        last_used: The newest access or change of its library, UTC.
        record: The newest sound record that points at it.
    """

    place: EntryPlace
    backend: str | None
    library: str | None
    kernel: str | None
    params: tuple[EntryParam, ...] | None
    bytes: int
    created: datetime | None
    last_used: datetime | None
    record: Record | None

    @property
    def target(self) -> str | None:
        return self.record.spec.target.name if self.record else None


def scan(root: Path) -> Iterator[Entry]:
    """All kernel entries under a root, each with its record where it has one."""
    filed: dict[str, Record] = {}
    for path in layout.records(root):
        try:
            found = record.parse(path.read_bytes(), path)
        except OSError:
            continue
        if found is not None and found.action_key == path.stem:
            older = filed.get(found.entry)
            if older is None or older.created < found.created:
                filed[found.entry] = found
    for place in layout.entries(root):
        yield read(place, filed.get(os.path.relpath(place.path, root)))


def read(place: EntryPlace, filed: Record | None) -> Entry:
    """Read one entry. `filed` is its record; with one, the slower reads of sources are left out."""
    files: dict[str, os.stat_result] = {}
    created = None
    try:
        created = _utc(place.path.stat().st_mtime)
        with os.scandir(place.path) as found:
            files = {
                item.name: item.stat() for item in found if item.is_file(follow_symlinks=False)
            }
    except OSError:
        pass
    library = next((name for name in _LIBRARIES if name in files), None)
    kernel, params = None, None
    if filed is not None:
        kernel = filed.spec.name
        params = tuple(EntryParam(p.dtype, p.shape) for p in filed.launch.params)
    else:
        kernel = _kernel_name(place.path, files)
        params = _params(place.path) if "params.json" in files else None
    used = files.get(library or "")
    return Entry(
        place=place,
        backend=_LIBRARIES[library] if library else None,
        library=library,
        kernel=kernel,
        params=params,
        bytes=sum(status.st_size for status in files.values()),
        created=created,
        last_used=_utc(max(used.st_atime, used.st_mtime)) if used else None,
        record=filed,
    )


def _utc(seconds: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None  # a date that no calendar has


def _kernel_name(path: Path, files: dict[str, os.stat_result]) -> str | None:
    for name in _SOURCES:
        if name not in files:
            continue
        try:
            with open(path / name, "rb") as file:
                match = _KERNEL_NAME.search(file.read(_HEAD))
        except OSError:
            return None
        return match[1].decode().removesuffix("_kernel") if match else None
    return None


def _params(path: Path) -> tuple[EntryParam, ...] | None:
    """The parameters in TileLang's params.json: a graph of nodes that point at each other by
    index.
    """
    try:
        graph = json.loads((path / "params.json").read_bytes())
        return _Graph(graph["nodes"]).params(graph["root_index"])
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None


class _Graph:
    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        self._nodes = nodes

    def _node(self, index: object) -> dict[str, Any]:
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ValueError(f"{index!r} is not the index of a node")
        return self._nodes[index]

    def _text(self, index: object) -> str:
        text = self._node(index)["data"]
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not a text")
        return text

    def params(self, root: object) -> tuple[EntryParam, ...]:
        return tuple(map(self._param, self._node(root)["data"]))

    def _param(self, index: object) -> EntryParam:
        pairs = self._node(index)["data"]
        fields = {
            self._text(key): value for key, value in zip(pairs[::2], pairs[1::2], strict=True)
        }
        shape = tuple(map(self._dimension, self._node(fields["shape"])["data"]))
        return EntryParam(self._text(fields["dtype"]), shape)

    def _dimension(self, index: object) -> int | str | None:
        node = self._node(index)
        data = node.get("data")
        if node["type"] == "int":
            if isinstance(data, bool) or not isinstance(data, int) or data < 0:
                raise ValueError(f"{data!r} is not a dimension")
            return data
        if isinstance(data, dict) and "name" in data:
            return self._text(data["name"])
        return None
