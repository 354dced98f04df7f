"""Records: what a kernel spec was compiled into, and how to call it.

Invariant: a record that is read back is sound in form, and names only paths below its root; a
record that is truncated, is not JSON, or is of another schema is a miss, never an error. A library
is handed out only after its size and sha256 were compared with the record's.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tlcache.errors import SpecError
from tlcache.spec import RECORD_SCHEMA, KernelSpec
from tlcache.store import files, layout
from tlcache.store.trust import Trust

# The small ones are NamedTuples: to define a frozen dataclass costs a starting process seven times
# as much.

__all__ = ["Dynamic", "Launch", "Library", "Param", "Record", "read", "sound_library", "write"]

_log = logging.getLogger(__name__)


class Param(NamedTuple):
    """One parameter of a kernel, in call order. A dimension is a number, or a dynamic one's
    name.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class Dynamic(NamedTuple):
    """A dimension that is known at the call: read from `shape[axis]` of parameter `param`."""

    name: str
    dtype: str
    param: int
    axis: int


class Launch(NamedTuple):
    """How a library is called.

    Attributes:
        abi: `tvm_ffi` (inputs and an anchor tensor in, outputs allocated by the callee) or `c`
            (pointers in parameter order, then dynamic dimensions).
        symbol: The function to call.
        params: All parameters in call order, outputs included.
        outputs: Which of them are outputs.
        dynamic: The dynamic dimensions in call order.
    """

    abi: str
    symbol: str
    params: tuple[Param, ...]
    outputs: tuple[int, ...]
    dynamic: tuple[Dynamic, ...]


class Library(NamedTuple):
    """The shared library of an entry."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """The answer for one spec.

    Attributes:
        action_key: The key that the record is filed under.
        spec: The spec that was compiled.
        entry: TileLang's entry directory, relative to the cache root.
        library: The library in it.
        launch: How to call it.
        versions: TileLang, tvm-ffi and platform of the builder.
        toolkit: nvcc, host compiler and driver of the builder, None where there was none.
        source_digest: The digest of the factory's source closure.
        compile_seconds: What the compile took, and so what a restore saves.
        created: ISO 8601, UTC.
    """

    action_key: str
    spec: KernelSpec
    entry: str
    library: Library
    launch: Launch
    versions: Mapping[str, str]
    toolkit: Mapping[str, str | None]
    source_digest: str
    compile_seconds: float
    created: str
    schema: int = field(default=RECORD_SCHEMA)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": self.schema,
            "action_key": self.action_key,
            "spec": self.spec.to_json(),
            "entry": self.entry,
            "library": self.library._asdict(),
            "launch": {
                **self.launch._asdict(),
                "params": [param._asdict() for param in self.launch.params],
                "dynamic": [dim._asdict() for dim in self.launch.dynamic],
            },
            "versions": dict(self.versions),
            "toolkit": dict(self.toolkit),
            "source_digest": self.source_digest,
            "compile_seconds": self.compile_seconds,
            "created": self.created,
        }

    @classmethod
    def from_json(cls, data: Any) -> Record:
        """Read what `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError, SpecError: The data is not a sound record.
        """
        if data["schema"] != RECORD_SCHEMA:
            raise ValueError(f"schema {data['schema']!r}")
        entry, library, launch = data["entry"], data["library"], data["launch"]
        if os.path.isabs(entry) or ".." in entry.split("/") or "\0" in entry:
            raise ValueError(f"the entry {entry!r} is not below the root")
        if library["name"] != os.path.basename(library["name"]) or "\0" in library["name"]:
            raise ValueError(f"the library's name {library['name']!r} is a path")
        params = tuple(
            Param(_str(p["name"]), _str(p["dtype"]), tuple(_dimension(d) for d in p["shape"]))
            for p in launch["params"]
        )
        outputs = tuple(_index(i, len(params)) for i in launch["outputs"])
        dynamic = tuple(
            Dynamic(
                _str(d["name"]), _str(d["dtype"]), _index(d["param"], len(params)), int(d["axis"])
            )
            for d in launch["dynamic"]
        )
        for dim in dynamic:
            if not 0 <= dim.axis < len(params[dim.param].shape):
                raise ValueError(f"the dynamic dimension {dim.name!r} has no axis {dim.axis}")
        return cls(
            action_key=_str(data["action_key"]),
            spec=KernelSpec.from_json(data["spec"]),
            entry=_str(entry),
            library=Library(_str(library["name"]), int(library["size"]), _str(library["sha256"])),
            launch=Launch(_str(launch["abi"]), _str(launch["symbol"]), params, outputs, dynamic),
            versions=dict(data["versions"]),
            toolkit=dict(data["toolkit"]),
            source_digest=_str(data["source_digest"]),
            compile_seconds=float(data["compile_seconds"]),
            created=_str(data["created"]),
        )


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _dimension(value: object) -> int | str:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{value!r} is not a dimension")
    return value


def _index(value: object, length: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < length:
        raise ValueError(f"{value!r} is not the index of a parameter")
    return value


def read(
    root: str | os.PathLike[str], action_key: str, trust: Trust | None = None
) -> Record | None:
    """Read one record, or None where there is none that is sound.

    Raises:
        UntrustedRootError: `trust` is given, and the record's path fails it.
    """
    path = layout.record_path(root, action_key)
    try:
        with open(path, "rb") as file:
            text = file.read()
        if trust is not None:
            trust.check(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            _log.warning("the record %s cannot be read: %s", path, error)
        return None
    record = parse(text, path)
    if record is not None and record.action_key != action_key:
        _log.warning("the record %s is filed under another key than its own; ignored", path)
        return None
    return record


def parse(text: bytes, path: str | os.PathLike[str]) -> Record | None:
    """The record in a file's bytes, or None (and a warning) where they are not a sound record."""
    try:
        return Record.from_json(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, SpecError, RecursionError) as error:
        _log.warning(
            "the record %s is damaged (%s: %s); ignored", path, type(error).__name__, error
        )
        return None


def sound_library(
    root: str | os.PathLike[str], record: Record, trust: Trust | None = None
) -> str | None:
    """The path of a record's library if it is what the record says, byte for byte, else None.

    Raises:
        UntrustedRootError: `trust` is given, and the library's path fails it.
    """
    path = os.path.join(root, record.entry, record.library.name)
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != record.library.size:
                _log.warning("the library %s has another size than its record says; ignored", path)
                return None
            digest = hashlib.sha256(file.read()).hexdigest()
        if digest != record.library.sha256:
            _log.warning("the library %s fails its record's checksum; it is not loaded", path)
            return None
        if trust is not None:
            trust.check(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            _log.warning("the library %s cannot be read: %s", path, error)
        return None
    return path


def write(root: str | os.PathLike[str], record: Record) -> Path:
    """File a record: a temporary file, fsync, rename. A kill at any point leaves the old state or
    the new.

    Raises:
        CacheRootError: The root cannot be written, or its disk is full.
    """
    path = layout.record_path(root, record.action_key)
    try:
        files.write_atomically(path, json.dumps(record.to_json(), indent=1) + "\n")
    except OSError as error:
        raise layout.unwritable(root, error) from error
    return Path(path)
