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
from typing import Any, NamedTuple, Protocol

from tlcache.errors import SpecError
from tlcache.spec import RECORD_SCHEMA, KernelSpec
from tlcache.store import files, layout
from tlcache.store.trust import Trust

# The small ones are NamedTuples: to define a frozen dataclass costs a starting process seven times
# as much.

__all__ = ["Dynamic", "Launch", "Library", "Located", "Param", "Record", "contents", "decode"]
__all__ += ["encode", "library_at", "parse", "present", "read", "sound_library", "used", "write"]

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
    def from_json(cls, data: Any, spec: KernelSpec | None = None) -> Record:
        """Read what `to_json` wrote.

        Args:
            data: JSON values.
            spec: The spec that it should be of; saves reading it anew.

        Raises:
            ValueError, KeyError, TypeError, SpecError: The data is not a sound record.
        """
        data = _object(data)
        if data["schema"] != RECORD_SCHEMA or data["schema"] is True:
            raise ValueError(f"schema {data['schema']!r}")
        entry = _str(data["entry"])
        library, launch = _object(data["library"]), _object(data["launch"])
        if os.path.isabs(entry) or not entry or ".." in entry.split("/"):
            raise ValueError(f"the entry {entry!r} is not below the root")
        name = _str(library["name"])
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise ValueError(f"the library's name {name!r} is a path")
        params = tuple(
            Param(_str(p["name"]), _str(p["dtype"]), tuple(map(_dimension, _list(p["shape"]))))
            for p in map(_object, _list(launch["params"]))
        )
        dynamic = tuple(
            Dynamic(
                _str(d["name"]), _str(d["dtype"]), _index(d["param"], params), _count(d["axis"])
            )
            for d in map(_object, _list(launch["dynamic"]))
        )
        for dim in dynamic:
            shape = params[dim.param].shape
            if dim.axis >= len(shape) or shape[dim.axis] != dim.name:
                raise ValueError(f"the dynamic dimension {dim.name!r} is not where it should be")
        named = {dim for param in params for dim in param.shape if isinstance(dim, str)}
        if named != {dim.name for dim in dynamic}:
            raise ValueError("a dynamic dimension is described nowhere, or nobody's")
        outputs = tuple(_index(i, params) for i in _list(launch["outputs"]))
        return cls(
            action_key=_str(data["action_key"]),
            spec=KernelSpec.from_json(data["spec"]) if spec is None else _same(spec, data["spec"]),
            entry=entry,
            library=Library(name, _count(library["size"]), _str(library["sha256"])),
            launch=Launch(_str(launch["abi"]), _str(launch["symbol"]), params, outputs, dynamic),
            versions={key: _str(value) for key, value in _object(data["versions"]).items()},
            toolkit={
                key: None if value is None else _str(value)
                for key, value in _object(data["toolkit"]).items()
            },
            source_digest=_str(data["source_digest"]),
            compile_seconds=_seconds(data["compile_seconds"]),
            created=_str(data["created"]),
        )


def _same(spec: KernelSpec, data: object) -> KernelSpec:
    if json.dumps(data, sort_keys=True, separators=(",", ":")) != spec.canonical():
        raise ValueError(f"it is of another spec than {spec}")
    return spec


def _str(value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(f"{value!r} is not a text")
    value.encode()  # a lone surrogate is no text either
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return value


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not an object")
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a count")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise ValueError(f"{value!r} is not a duration")
    return float(value)


def _dimension(value: object) -> int | str:
    return _str(value) if isinstance(value, str) else _count(value)


def _index(value: object, params: tuple[Param, ...]) -> int:
    if _count(value) >= len(params):
        raise ValueError(f"{value!r} is not the index of a parameter")
    return _count(value)


def read(
    root: str | os.PathLike[str],
    action_key: str,
    trust: Trust | None = None,
    spec: KernelSpec | None = None,
) -> Record | None:
    """Read one record, or None where there is none that is sound.

    Args:
        root: The cache root.
        action_key: The key that it is filed under.
        trust: Who may have written it; nobody is asked where None.
        spec: The spec that it has to be of; any where None.

    Raises:
        UntrustedRootError: `trust` is given, and the record's path fails it.
    """
    path = layout.record_path(root, action_key)
    try:
        text = files.read(path)
        if trust is not None:
            trust.check(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            _log.warning("the record %s cannot be read: %s", path, error)
        return None
    record = parse(text, path, spec)
    if record is not None and record.action_key != action_key:
        _log.warning("the record %s is filed under another key than its own; ignored", path)
        return None
    return record


_MARK = b',\n "checksum": "'


def encode(data: Mapping[str, Any]) -> bytes:
    """The bytes of a record's file: JSON whose last field is the sha256 of what stands before it.

    Without it a flipped bit in a shape would go unseen, and a kernel would write past its output.
    """
    text = json.dumps(dict(data), indent=1).encode()
    body = text.removesuffix(b"\n}")
    return body + _MARK + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def contents(data: bytes) -> Any:
    """The JSON values in a record's file, of whatever schema, if its checksum holds.

    Raises:
        ValueError, RecursionError: It does not, or they are no JSON.
    """
    body, mark, end = data.rpartition(_MARK)
    if not mark or end != hashlib.sha256(body).hexdigest().encode() + b'"\n}\n':
        raise ValueError("it fails its own checksum")
    return json.loads((body + b"\n}").decode())


def parse(
    data: bytes, path: str | os.PathLike[str], spec: KernelSpec | None = None
) -> Record | None:
    """The record in a file's bytes, or None (and a warning) where they are not a sound record."""
    try:
        return decode(data, spec)
    except ValueError as error:
        _log.warning("the record %s is damaged (%s); ignored", path, error)
        return None


def decode(data: bytes, spec: KernelSpec | None = None) -> Record:
    """The record in a file's bytes.

    Raises:
        ValueError: They are not a sound record.
    """
    try:
        return Record.from_json(contents(data), spec)
    except (ValueError, KeyError, TypeError, SpecError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def present(root: str | os.PathLike[str], record: Record, key: str | None = None) -> bool:
    """Whether what a record points at is there and sound.

    Args:
        root: The cache root.
        record: The record.
        key: TileLang's key that the kernel has to have, where that is known.
    """
    if key is not None and os.path.basename(record.entry) != key:
        return False
    return sound_library(root, record) is not None


def library_at(path: str, name: str) -> Library:
    """The library of an entry as it is now.

    Raises:
        OSError: It cannot be read.
    """
    data = files.read(os.path.join(path, name))
    return Library(name, len(data), hashlib.sha256(data).hexdigest())


class Located(Protocol):
    """What says where a library is."""

    @property
    def entry(self) -> str: ...
    @property
    def library(self) -> Library: ...


def sound_library(
    root: str | os.PathLike[str],
    record: Located,
    trust: Trust | None = None,
    *,
    use: bool = False,
) -> str | None:
    """The path of a record's library if it is what the record says, byte for byte, else None.

    Args:
        root: The cache root.
        record: The record.
        trust: Who may have written it; nobody is asked where None.
        use: The library is about to be loaded, so that reading it may count as its last use.

    Raises:
        UntrustedRootError: `trust` is given, and the library's path fails it.
    """
    path = os.path.join(root, record.entry, record.library.name)
    try:
        reader = files.read if trust is None else trust.read
        data = reader(path, record.library.size, unseen=not use)
        if len(data) != record.library.size:
            _log.warning("the library %s has another size than its record says; ignored", path)
            return None
        if hashlib.sha256(data).hexdigest() != record.library.sha256:
            _log.warning("the library %s fails its record's checksum; it is not loaded", path)
            return None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            _log.warning("the library %s cannot be read: %s", path, error)
        return None
    return path


def used(root: str | os.PathLike[str], action_key: str) -> None:
    """Note that a record's kernel was loaded: the modification time of its file, which is known
    also where the file system notes no accesses. It costs 2 µs; a root that cannot be written notes
    nothing.
    """
    try:
        os.utime(layout.record_path(root, action_key))
    except OSError:
        pass


def write(root: str | os.PathLike[str], record: Record) -> Path:
    """File a record: a temporary file, fsync, rename. A kill at any point leaves the old state or
    the new.

    Raises:
        CacheRootError: The root cannot be written, or its disk is full.
    """
    path = layout.record_path(root, record.action_key)
    try:
        files.write_atomically(path, encode(record.to_json()))
    except OSError as error:
        raise layout.unwritable(root, error) from error
    return Path(path)
