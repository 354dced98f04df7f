"""Why a kernel is not in the cache: which one thing, had it been different, would have made a hit.

An action key is a digest and tells nothing. But each record holds what its key was made of, so a
missing kernel is compared with the records that there are, one ingredient after the other.

Invariant: a cause is told only if it is so. Everything that the nearest record differs in is told,
and whether its library is there and sound, so that it would have been a hit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from tlcache import fingerprint, version_key
from tlcache.closure import factory_digest
from tlcache.spec import RECORD_SCHEMA, KernelSpec
from tlcache.store import evictions, files, layout, record
from tlcache.store.evictions import Eviction
from tlcache.store.record import Located, Record

__all__ = ["Cause", "Difference", "Kind", "Reader", "action_key", "family"]

Kind = Literal[
    "hit",
    "damaged",
    "evicted",
    "vanished",
    "tilelang",
    "tvm-ffi",
    "platform",
    "variable",
    "source",
    "target spelling",
    "schedule",
    "pass configs",
    "compile flags",
    "backend",
    "other root",
    "other target",
    "no record",
    "python",
    "default",
    "output indices",
    "unknown",
    "not restorable",
    "failed",
]


@dataclass(frozen=True)
class Difference:
    """One ingredient of a key that is another one in a record.

    Attributes:
        kind: Which one.
        there: Its value in the record.
        here: Its value in what is looked for.
    """

    kind: Kind
    there: str
    here: str


@dataclass(frozen=True)
class Cause:
    """Why one kernel is there or not.

    Attributes:
        spec: The kernel.
        action_key: Its record's key.
        kind: The one word: of several differences the first.
        detail: A sentence with the actual values.
        differences: Between the kernel and the nearest record; one, where one thing decides.
        nearest: The key of that record.
        root: Where that record is.
        loadable: Whether its library is there and sound, so that it would have been a hit.
        hint: What to do about it, where that is known.
    """

    spec: KernelSpec
    action_key: str
    kind: Kind
    detail: str
    differences: tuple[Difference, ...] = ()
    nearest: str | None = None
    root: str | None = None
    loadable: bool | None = None
    hint: str | None = None


def action_key(
    spec: KernelSpec, versions: Mapping[str, str], variables: Mapping[str, str], digest: str
) -> str:
    """The action key of a spec in another environment; `KernelSpec.action_key` is this one's."""
    facts = f"{RECORD_SCHEMA}\n{fingerprint.facts_text(versions, variables)}\n{digest}\n"
    return hashlib.sha256((facts + spec.canonical()).encode()).hexdigest()


class Reader:
    """Finds the causes at one root; its records are read once for each factory.

    Args:
        root: The cache root. Those that lie below it, and beside it where it is a keyed root, are
            looked at where it has nothing.
        below: Roots that are in force, too, where that one lacks a kernel.
    """

    def __init__(
        self, root: str | os.PathLike[str], below: Iterable[str | os.PathLike[str]] = ()
    ) -> None:
        self.root = os.path.abspath(root)
        self._roots = [self.root, *map(os.path.abspath, below)]
        self._filed: dict[tuple[str, str], list[Record]] = {}
        self._evicted: dict[str, Eviction] | None = None
        self._others: list[str] | None = None

    def cause(self, spec: KernelSpec) -> Cause:
        """Why a spec is there or not.

        Raises:
            FactoryError: Its factory cannot be found.
        """
        key = spec.action_key()
        first: Cause | None = None
        for root in self._roots:
            told = self._at(root, spec, key)
            if told is not None and told.kind == "hit":
                return told
            first = first or told
        return first or self._missing(spec, key)

    def _at(self, root: str, spec: KernelSpec, key: str) -> Cause | None:
        """What became of it in one root; None where that has no record of it."""
        path = layout.record_path(root, key)
        try:
            data = files.read(path)
        except OSError as error:
            if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                reason = (error.strerror or str(error)).lower()
                return Cause(spec, key, "damaged", f"its record {path} cannot be read: {reason}")
            return None
        found = record.parse(data, path, spec)
        if found is None or found.action_key != key:
            return Cause(spec, key, "damaged", f"its record {path} fails its checksum")
        if record.sound_library(root, found) is not None:
            return Cause(spec, key, "hit", "it is there", root=None if root == self.root else root)
        return self.without_library(root, spec, found)

    def without_library(
        self, root: str, spec: KernelSpec, found: Located, what: str = "its record"
    ) -> Cause:
        """It has a record, or a call, and its library is not the one that this is of."""
        key = spec.action_key()
        path = os.path.join(root, found.entry, found.library.name)
        if os.path.lexists(path):
            told = f"its library {path} is not what {what} says: "
            try:
                size = os.path.getsize(path)
                told += (
                    f"it has {size:,} bytes instead of {found.library.size:,}"
                    if size != found.library.size
                    else "it has other bytes"
                )
            except OSError as error:
                told += (error.strerror or str(error)).lower()
            return Cause(spec, key, "damaged", told)
        gone = self.eviction(key, found.entry)
        if gone is not None:
            return Cause(spec, key, "evicted", gone)
        if os.path.isdir(os.path.join(root, found.entry)):
            return Cause(spec, key, "damaged", f"its entry lacks its library {path}")
        return Cause(
            spec,
            key,
            "vanished",
            f"{what} is there, and its entry {found.entry} is not: somebody deleted it, or "
            "TileLang did, which removes an entry that it cannot load",
        )

    def _missing(self, spec: KernelSpec, key: str) -> Cause:
        """It has no record."""
        gone = self.eviction(key, None)
        if gone is not None:
            return Cause(spec, key, "evicted", gone)
        nearest: Cause | None = None
        for several in (self._roots, self._other_roots()):
            if nearest is not None and nearest.kind != "other target":
                break
            for root in several:
                there = self._nearest(spec, key, root)
                if there is not None and (nearest is None or _rank(there) < _rank(nearest)):
                    nearest = there
        if nearest is not None:
            return nearest
        return Cause(spec, key, "no record", self._none(spec))

    def _none(self, spec: KernelSpec) -> str:
        if not any(map(os.path.isdir, self._roots)):
            return f"there is no cache root {', '.join(self._roots)}"
        filed = [one for root in self._roots for one in self._records(root, spec.kernel)]
        if not filed:
            return f"no record of {spec.kernel} in {', '.join(self._roots)}"
        apart = {one.spec.workload_text: _apart(one.spec, spec) for one in filed}
        nearest = sorted(apart, key=lambda text: (len(apart[text]), text))
        shown = ", ".join(nearest[:3]) + (" …" if len(nearest) > 3 else "")
        told = f"no record of this workload; there are {shown}"
        for one in filed:
            dynamic = one.spec.workload.get("M") == "dynamic" and one.spec.target == spec.target
            if dynamic and _apart(one.spec, spec) == {"M"}:
                return told + '; the one for any M serves it where an op has rows="auto"'
        return told

    # --- the nearest record ---

    def _nearest(self, spec: KernelSpec, key: str, root: str) -> Cause | None:
        """The record of the same kernel and workload that differs in the least."""
        best: Cause | None = None
        for one in self._records(root, spec.kernel):
            if _text(one.spec, "workload") != _text(spec, "workload"):
                continue
            there = tuple(self._differences(one, spec, root))
            if not there:
                continue
            loadable = record.sound_library(root, one) is not None
            cause = Cause(spec, key, there[0].kind, "", there, one.action_key, root, loadable)
            if best is None or _rank(cause) < _rank(best):
                best = cause
        return None if best is None else _told(best)

    def _differences(self, one: Record, spec: KernelSpec, root: str) -> list[Difference]:
        """In which ingredients of its key a record differs, the weightiest first."""
        here, digest = fingerprint.versions(), factory_digest(spec.kernel)
        found = [
            Difference(kind, one.versions.get(name, "unknown"), here[name])
            for kind, name in _VERSIONS
            if one.versions.get(name) != here[name]
        ]
        if one.source_digest != digest:
            found.append(Difference("source", one.source_digest[:12], digest[:12]))
        if one.spec.target != spec.target:
            same = family(one.spec.target.name) == family(spec.target.name)
            kind: Kind = "target spelling" if same else "other target"
            found.append(Difference(kind, one.spec.target.name, spec.target.name))
        for kind, field in _FIELDS:
            there, wanted = _text(one.spec, field), _text(spec, field)
            if there != wanted:
                found.append(Difference(kind, there, wanted))
        found += self._variables(one, alone=not found and root in self._roots)
        if root not in self._roots:
            found.append(Difference("other root", root, self.root))
        return found

    def _variables(self, one: Record, *, alone: bool) -> Iterator[Difference]:
        """The variables in a key are not in its record: whether the key can be made again without
        them, or with those that are set here, tells whether they were. If neither, they had another
        value, which is told where nothing else differs.
        """
        variables = fingerprint.key_variables()

        def made_with(them: Mapping[str, str]) -> bool:
            made = action_key(one.spec, one.versions, them, one.source_digest)
            return made == one.action_key

        if made_with(variables):
            return
        unset = made_with({})
        for name, value in variables.items():
            if unset and value:
                yield Difference("variable", f"{name} not set", f"{name}={value}")
            elif alone:
                yield Difference(
                    "variable", f"another {name}", f"{name}={value}" if value else f"{name} not set"
                )

    def _records(self, root: str, kernel: str) -> list[Record]:
        """The sound records of one factory."""
        known = self._filed.get((root, kernel))
        if known is None:
            known = self._filed[root, kernel] = list(_read(root, kernel))
        return known

    def _other_roots(self) -> list[str]:
        if self._others is None:
            base = self.root
            if re.fullmatch(version_key.KEY, os.path.basename(base)):
                base = os.path.dirname(base)
            found = {
                os.path.abspath(root) for root in (*layout.roots(self.root), *layout.roots(base))
            }
            self._others = sorted(found - set(self._roots))
        return self._others

    def eviction(self, key: str, entry: str | None) -> str | None:
        """When and why a kernel was deleted, by its record's key or by its entry's path or name;
        None where it was not.
        """
        if self._evicted is None:
            self._evicted = {}
            for root in reversed(self._roots):
                for one in reversed(evictions.recent(root)):
                    if one.kind == "kernel":
                        self._evicted[one.path] = self._evicted[one.key] = one
                    if one.action_key is not None:
                        self._evicted[one.action_key] = one
        gone = self._evicted.get(key) or (self._evicted.get(entry) if entry else None)
        return None if gone is None else _evicted(gone)


def _read(root: str, kernel: str) -> Iterable[Record]:
    needle = json.dumps(kernel).encode()
    for path in layout.records(root):
        try:
            data = files.read(os.fspath(path))
        except OSError:
            continue
        if needle in data:  # to parse 60,000 records takes half a minute
            found = record.parse(data, path)
            if found is not None and found.spec.kernel == kernel and found.action_key == path.stem:
                yield found


_VERSIONS: tuple[tuple[Kind, str], ...] = (
    ("tilelang", "tilelang"),
    ("tvm-ffi", "tvm_ffi"),
    ("platform", "platform"),
)
_FIELDS: tuple[tuple[Kind, str], ...] = (
    ("schedule", "schedule"),
    ("pass configs", "pass_configs"),
    ("compile flags", "compile_flags"),
    ("backend", "execution_backend"),
)


def _text(spec: KernelSpec, field: str) -> str:
    return json.dumps(spec.to_json()[field], sort_keys=True, separators=(",", ":"))


def _apart(one: KernelSpec, other: KernelSpec) -> set[str]:
    """The fields in which two workloads differ."""
    missing = object()
    names = {*one.workload, *other.workload}
    return {
        name
        for name in names
        if one.workload.get(name, missing) != other.workload.get(name, missing)
    }


def family(target: str) -> str:
    """What targets have in common that mean one GPU: `sm_90`, `sm_90a`, and a dict with it."""
    match = re.search(r"sm_\d+", target)
    return match[0] if match else target


def _rank(cause: Cause) -> tuple[int, bool, int, str]:
    """Which record is nearer: with fewer differences, another target counting for more than all
    others; then one that could be loaded.
    """
    far = any(one.kind == "other target" for one in cause.differences)
    weight = len(cause.differences) + (not cause.loadable) + (_FAR if far else 0)
    return weight, not cause.loadable, _ORDER[cause.kind], cause.nearest or ""


_FAR = 100
_ORDER: dict[str, int] = {kind: index for index, kind in enumerate(get_args(Kind))}


def _told(cause: Cause) -> Cause:
    """The cause with its sentence."""
    named = [_NAMED[one.kind].format(one.there, one.here) for one in cause.differences]
    told = " and ".join(named)
    if not cause.loadable:
        told += "; the library of that record is not there, or not sound"
    return Cause(
        cause.spec,
        cause.action_key,
        cause.kind,
        told,
        cause.differences,
        cause.nearest,
        cause.root,
        cause.loadable,
    )


_NAMED: dict[Kind, str] = {
    "tilelang": "it was compiled by TileLang {0}, and {1} is installed",
    "tvm-ffi": "it was compiled with tvm-ffi {0}, and {1} is installed",
    "platform": "it was compiled on {0}, and this is {1}",
    "variable": "it was compiled with {0}, and here it is {1}",
    "source": "the factory's source has changed: {0} there, {1} here",
    "target spelling": "it was compiled for {0}, and {1} is asked for",
    "other target": "it was compiled only for {0}, and {1} is asked for",
    "schedule": "it was compiled with the schedule {0}, and {1} is asked for",
    "pass configs": "it was compiled with the pass configs {0}, and {1} is asked for",
    "compile flags": "it was compiled with the flags {0}, and {1} is asked for",
    "backend": "it was compiled for the backend {0}, and {1} is asked for",
    "other root": "it is in the root {0}, and {1} is in force",
}


def _evicted(gone: Eviction) -> str:
    return f"`tlcache {gone.by}` deleted it at {gone.when} ({gone.why})"
