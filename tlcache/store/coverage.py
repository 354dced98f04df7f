"""Coverage manifests: which kernels a shapes document came to in one environment, and what became
of each.

    <root>/tlcache/coverage/<key>.json     the key: sha256 of the document's bytes, the targets, and
                                           what action keys say of the environment

With it, whether all is there takes hashing files, and neither expanding the document nor parsing
the kernels' sources. It says nothing that a plan would not come to: it is taken only while the
sources, versions and tuned schedules that the plan depended on are as they were, and a kernel is
there only while its record and its library are the same bytes.

Invariant: written by temporary file and rename, with a checksum; one that is damaged or does not
hold is none, and never an error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tlcache import __version__, closure, fingerprint
from tlcache.closure import Closure
from tlcache.errors import FactoryError, RuntimeLibraryError
from tlcache.spec import RECORD_SCHEMA, KernelSpec
from tlcache.store import files, layout, record, schedules

__all__ = ["MOST", "Coverage", "Kernel", "hold", "key", "missing", "of_kernel", "path", "read"]
__all__ += ["write"]

_log = logging.getLogger(__name__)
_SCHEMA = 1
MOST = 64
"""Manifests that a root keeps; the oldest go."""

Root = str | os.PathLike[str]


class Kernel(NamedTuple):
    """One kernel of a manifest.

    Attributes:
        spec: The spec as JSON values.
        title: The spec for people.
        action_key: Its record's key.
        status: `ready`; `failed`, with the reason in `error`; or `left`.
        record: The sha256 of its record's file; None where it has none.
        entry: TileLang's entry, relative to the root; None where it is not ready.
        library: Name, size and sha256 of what has to be in the entry: the library, or the entry's
            manifest where there is no record.
        schedule: What its tuned schedule would be filed under, and the sha256 of that file, None
            where there was none; None where no tuned schedule was asked for.
        saved: The seconds that its compile took.
        error: Why it failed.
    """

    spec: dict[str, Any]
    title: str
    action_key: str
    status: str
    record: str | None
    entry: str | None
    library: tuple[str, int, str] | None
    schedule: tuple[str, str | None] | None
    saved: float
    error: str | None


@dataclass(frozen=True)
class Coverage:
    """What a document came to.

    Attributes:
        targets: Names of the targets.
        paths: Directories that its kernels are imported from, besides Python's own.
        closures: The source closures that the plan depended on: of the factories, and of what made
            specs of the document's workloads.
        kernels: The kernels, in the document's order.
        fingerprint: Versions and platform.
    """

    targets: list[str]
    paths: list[str]
    closures: list[Closure]
    kernels: list[Kernel]
    fingerprint: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """As it stands in a file; `from_json` reads it back."""
        return {
            "schema": _SCHEMA,
            "fingerprint": self.fingerprint,
            "targets": self.targets,
            "paths": self.paths,
            "closures": [one._asdict() for one in self.closures],
            "kernels": [one._asdict() for one in self.kernels],
        }

    @classmethod
    def from_json(cls, data: Any) -> Coverage:
        """Read what `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError: It is not such a document.
        """
        if data["schema"] != _SCHEMA:
            raise ValueError(f"schema {data['schema']!r}")
        return cls(
            targets=_texts(data["targets"]),
            paths=_texts(data["paths"]),
            closures=[_closure(one) for one in data["closures"]],
            kernels=[_kernel(one) for one in data["kernels"]],
            fingerprint=dict(data["fingerprint"]),
        )


def _kernel(data: Any) -> Kernel:
    one = Kernel(**data)
    keys = [one.action_key, *([one.record] if one.record is not None else [])]
    texts: list[Any] = [one.title, one.status, one.entry or "", one.error or ""]
    if one.library is not None:
        name, size, digest = one.library
        one = one._replace(library=(name, size, digest))
        texts.append(name)
        keys.append(digest)
        if type(size) is not int or not 0 <= size < 2**40 or "/" in name or name in ("", ".."):
            raise ValueError(f"a library {name!r} of {size!r} bytes")
    if one.schedule is not None:
        named, filed = one.schedule
        one = one._replace(schedule=(named, filed))
        keys += [named, *([filed] if filed is not None else [])]
    if not all(re.fullmatch("[0-9a-f]{64}", key) for key in keys):
        raise ValueError(f"keys and digests {keys!r}")
    if not all(isinstance(text, str) and "\0" not in text for text in texts):
        raise TypeError(f"texts {texts!r}")
    if one.entry is not None and (one.entry.startswith("/") or ".." in one.entry.split("/")):
        raise ValueError(f"the entry {one.entry!r} is not below the root")
    ready = one.entry is not None and one.library is not None
    if one.status not in ("ready", "failed", "left") or (one.status == "ready") != ready:
        raise ValueError(f"a kernel that is {one.status!r}, with the entry {one.entry!r}")
    if type(one.saved) not in (int, float) or not isinstance(one.spec, dict):
        raise TypeError(f"a kernel {one.spec!r} that took {one.saved!r}")
    return one


def _closure(data: Any) -> Closure:
    one = Closure(**data)
    texts = [one.kernel, one.digest, *one.absent]
    for table in (one.sources, one.externals):
        texts += [text for item in table.items() for text in item]
    if not all(isinstance(text, str) and "\0" not in text for text in texts):
        raise TypeError(f"texts {texts!r}")
    return one


def _texts(data: Any) -> list[str]:
    if not isinstance(data, list) or not all(isinstance(text, str) for text in data):
        raise TypeError(f"{data!r} is no list of texts")
    return data


def key(document: bytes, targets: Iterable[str]) -> str:
    """What the manifest of a document for some targets is filed under, in this environment.

    Raises:
        RuntimeLibraryError: TileLang or tvm-ffi is not installed.
    """
    said = [_SCHEMA, RECORD_SCHEMA, closure.ALGORITHM, __version__]
    digest = hashlib.sha256(document).hexdigest()
    text = json.dumps([*said, digest, list(targets), fingerprint.key_facts()])
    return hashlib.sha256(text.encode()).hexdigest()


def path(root: Root, name: str) -> str:
    """Where the manifest of a `key` lies."""
    return os.path.join(root, "tlcache", "coverage", f"{name}.json")


def read(root: Root, name: str) -> Coverage | None:
    """The manifest of a `key` in a root, or None where there is none that is sound."""
    place = path(root, name)
    try:
        return Coverage.from_json(record.contents(files.read(place)))
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _log.warning("the manifest %s is damaged (%s); ignored", place, error)
        return None


def hold(coverage: Coverage, roots: Sequence[Root]) -> bool:
    """Whether a plan made now would come to the same kernels.

    It would if the sources that it depended on are the same bytes, and so are the tuned schedules.
    """
    try:
        if not closure.adopt_all(coverage.closures):
            return False
    except (FactoryError, RuntimeLibraryError, TypeError, AttributeError):
        return False
    asked = {one.schedule for one in coverage.kernels if one.schedule is not None}
    if not any(os.path.isdir(os.path.join(root, "tlcache", "schedules")) for root in roots):
        return all(filed is None for _, filed in asked)
    return all(_filed(roots, named) == filed for named, filed in asked)


def _filed(roots: Iterable[Root], named: str) -> str | None:
    """The sha256 of the schedule record that is in force."""
    for root in roots:
        try:
            return hashlib.sha256(files.read(schedules.place(root, named))).hexdigest()
        except OSError:
            continue
    return None


def missing(coverage: Coverage, roots: Sequence[Root]) -> list[Kernel]:
    """The kernels of a manifest that are not there, byte for byte, in any of the roots. What had
    not been made when it was written may have been made since.
    """
    return [one for one in coverage.kernels if not any(_there(root, one) for root in roots)]


def _there(root: Root, one: Kernel) -> bool:
    if one.entry is None or one.library is None:
        found = record.read(root, one.action_key)
        return found is not None and record.present(root, found)
    name, size, digest = one.library
    try:
        if one.record is not None:
            data = files.read(layout.record_path(root, one.action_key))
            if hashlib.sha256(data).hexdigest() != one.record:
                return False
        data = files.read(os.path.join(root, one.entry, name), size, unseen=True)
    except OSError:
        return False
    return len(data) == size and hashlib.sha256(data).hexdigest() == digest


def of_kernel(
    roots: Iterable[Root],
    spec: KernelSpec,
    action_key: str,
    *,
    tunable: bool,
    entry: str | None = None,
    error: str | None = None,
) -> Kernel:
    """A kernel as it is now.

    Args:
        roots: The roots that it may be in.
        spec: The kernel.
        action_key: Its record's key.
        tunable: Whether a tuned schedule was asked for.
        entry: Its entry, where it has no record and is there all the same.
        error: Why it failed, if it did.
    """
    said: dict[str, Any] = {"record": None, "entry": None, "library": None, "saved": 0.0}
    roots = list(roots)
    for root in roots:
        if (found := _seen(root, action_key, entry)) is not None:
            said.update(found)
            break
    status = "ready" if said["entry"] is not None else "failed" if error is not None else "left"
    named = schedules.key(spec) if tunable else None
    return Kernel(
        spec=spec.to_json(),
        title=spec.title,
        action_key=action_key,
        status=status,
        schedule=None if named is None else (named, _filed(roots, named)),
        error=error if status == "failed" else None,
        **said,
    )


def _seen(root: Root, action_key: str, entry: str | None) -> dict[str, Any] | None:
    """What a manifest says of a kernel that is in a root; None where it is not."""
    try:
        if entry is not None:
            data = files.read(os.path.join(root, entry, _MANIFEST), unseen=True)
            library = (_MANIFEST, len(data), hashlib.sha256(data).hexdigest())
            return {"entry": entry, "library": library}
        place = layout.record_path(root, action_key)
        data = files.read(place)
    except OSError:
        return None
    found = record.parse(data, place)
    if found is None or found.action_key != action_key:
        return None
    return {
        "record": hashlib.sha256(data).hexdigest(),
        "entry": found.entry,
        "library": (found.library.name, found.library.size, found.library.sha256),
        "saved": found.compile_seconds,
    }


_MANIFEST = "manifest.json"


def write(root: Root, name: str, coverage: Coverage) -> None:
    """File a manifest; the same one is not written again.

    Raises:
        CacheRootError: The root cannot be written.
    """
    place = path(root, name)
    data = record.encode(coverage.to_json())
    try:
        if files.read(place) == data:
            return
    except OSError:
        pass
    try:
        files.write_atomically(place, data)
    except OSError as error:
        raise layout.unwritable(root, error) from error
    _keep_few(os.path.dirname(place))


def _keep_few(directory: str) -> None:
    """Remove the oldest manifests beyond MOST."""
    try:
        with os.scandir(directory) as items:
            found = [
                (item.stat(follow_symlinks=False).st_mtime, item.path)
                for item in items
                if item.name.endswith(".json") and item.is_file(follow_symlinks=False)
            ]
        for _, place in sorted(found, reverse=True)[MOST:]:
            os.unlink(place)
    except OSError:
        pass  # another process removes them at the same time
