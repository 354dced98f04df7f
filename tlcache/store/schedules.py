"""Schedule records: which schedule a tuner found best for a workload on a target.

    <root>/tlcache/schedules/<2 hex>/<sha256 of kernel, workload and target>.json

They say what to compile and to ask for, never how to load it. Their document, `schedules.json`, is
the same things in a list, to be carried from the GPU host that tuned to hosts without one.

Invariant: one file is one workload, written by temporary file and rename; a damaged one is none. A
schedule is taken only after its operator has checked it, so an edited kernel falls back to its
default.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tlcache.errors import ShapesError, SpecError
from tlcache.operators import Operator
from tlcache.spec import KernelSpec
from tlcache.store import files, layout
from tlcache.store.trust import Trust

__all__ = ["VERSION", "Chooser", "Tuned", "dump", "find", "key", "load", "place", "spec_of"]
__all__ += ["write"]

_log = logging.getLogger(__name__)
VERSION = 1
MOST = 1e12
"""Microseconds below which a time is believed; NaN and infinity are none."""
_HINT = "`tlcache tune --shapes shapes.json -o schedules.json` on a GPU host writes such a file"


@dataclass(frozen=True)
class Tuned:
    """The outcome of one workload's tuning.

    Attributes:
        op: The operator's name.
        spec: The kernel with the best schedule.
        microseconds: GPU time of one launch, the median.
        default: The default schedule.
        default_microseconds: GPU time of one launch with it; None where it did not run.
        device: The GPU, like `NVIDIA H200`.
        measured: What else is known of the measurement: rows, candidates, versions, when.
    """

    op: str
    spec: KernelSpec
    microseconds: float
    default: Mapping[str, Any]
    default_microseconds: float | None
    device: str
    measured: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As it stands in a file; `from_json` reads it back."""
        return {
            "op": self.op,
            "spec": self.spec.to_json(),
            "microseconds": self.microseconds,
            "default": dict(self.default),
            "default_microseconds": self.default_microseconds,
            "device": self.device,
            "measured": dict(self.measured),
        }

    @classmethod
    def from_json(cls, data: object) -> Tuned:
        """Read what `to_json` wrote.

        Raises:
            SpecError: A field is missing or of the wrong type, or a time is impossible.
        """
        if not isinstance(data, Mapping):
            raise SpecError(f"a tuned schedule is a JSON object, not {type(data).__name__}")
        kinds: dict[str, tuple[type, ...]] = {
            "op": (str,),
            "microseconds": (int, float),
            "default": (Mapping,),
            "default_microseconds": (int, float, type(None)),
            "device": (str,),
            "measured": (Mapping,),
        }
        for name, kind in kinds.items():
            if name not in data:
                raise SpecError(f"a tuned schedule lacks {name}")
            value = data[name]
            sound = isinstance(value, kind) and not isinstance(value, bool)
            if not sound or (isinstance(value, (int, float)) and not 0 < value < MOST):
                raise SpecError(f"a tuned schedule's {name} is {value!r}")
        if unknown := sorted(set(data) - {*kinds, "spec"}):
            raise SpecError(f"a tuned schedule has no field {unknown[0]!r}")
        fields = {name: data[name] for name in kinds}
        return cls(spec=KernelSpec.from_json(data.get("spec")), **fields)


def key(spec: KernelSpec) -> str:
    """What a tuned schedule is filed under: the spec but for its schedule, as 64 hexadecimal
    digits.
    """
    named = {**spec.to_json(), "schedule": {}}
    text = json.dumps(named, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def spec_of(name: str, data: bytes) -> KernelSpec | None:
    """The kernel that a file of such a name says is the fastest; None where it is damaged, or
    misplaced.
    """
    try:
        spec = Tuned.from_json(json.loads(data)).spec
    except (ValueError, RecursionError, SpecError):
        return None
    return spec if name == f"{key(spec)}.json" else None


def place(root: str | os.PathLike[str], name: str) -> str:
    """Where the schedule record of a `key` lies."""
    return os.path.join(root, "tlcache", "schedules", name[:2], f"{name}.json")


def find(
    root: str | os.PathLike[str], spec: KernelSpec, trust: Trust | None = None
) -> Tuned | None:
    """The tuned schedule for a workload, if the root has one.

    Args:
        root: The cache root.
        spec: The workload, with any schedule.
        trust: Checks the file; None leaves that out, for listings.

    Raises:
        UntrustedRootError: Somebody else can write it.
    """
    path = place(root, key(spec))
    try:
        data = files.read(path)
    except OSError:
        return None
    try:
        if trust is not None:
            trust.check(path)
        found = Tuned.from_json(json.loads(data))
    except (ValueError, RecursionError, SpecError, OSError) as error:
        _log.warning("the schedule record %s is damaged (%s); ignored", path, error)
        return None
    return found if key(found.spec) == key(spec) else None


def write(root: str | os.PathLike[str], tuned: Tuned) -> None:
    """File a tuned schedule; it replaces an earlier one.

    Raises:
        CacheRootError: The root cannot be written.
    """
    data = json.dumps(tuned.to_json(), indent=1).encode() + b"\n"
    try:
        files.write_atomically(place(root, key(tuned.spec)), data)
    except OSError as error:
        raise layout.unwritable(root, error) from error


def load(path: str | Path) -> list[Tuned]:
    """Read a schedules.json.

    Raises:
        ShapesError: It is missing, not JSON, or not such a document.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ShapesError(
            f"{path} cannot be read: {(error.strerror or str(error)).lower()}", hint=_HINT
        ) from error
    except (ValueError, RecursionError) as error:
        raise ShapesError(f"{path} is not JSON: {error}", hint=_HINT) from error
    version = document.get("version") if isinstance(document, dict) else None
    if type(version) is not int or version != VERSION:
        raise ShapesError(
            f'{path} is not a schedules document: it has no "version": {VERSION}', hint=_HINT
        )
    entries = document.get("schedules")
    if not isinstance(entries, list):
        raise ShapesError(f"{path}: schedules is not a list", hint=_HINT)
    found = []
    for index, entry in enumerate(entries):
        try:
            found.append(Tuned.from_json(entry))
        except SpecError as error:
            raise ShapesError(f"{path}: schedules[{index}]: {error.message}", hint=_HINT) from error
    return found


def dump(path: str | Path, tuned: Iterable[Tuned]) -> None:
    """Write a schedules.json, whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    document = {"version": VERSION, "schedules": [one.to_json() for one in tuned]}
    files.write_atomically(os.path.abspath(path), json.dumps(document, indent=1).encode() + b"\n")


class Chooser:
    """Which schedule a workload is compiled with: one that was carried here, else one that the root
    has, else its default.

    Args:
        root: The cache root.
        carried: Tuned schedules from a file; they win.
        below: Roots that are looked into where that one has none.

    Attributes:
        carried: Those of them that were asked for, by the kernel.
        unfit: Tuned schedules that their operator does not take any more, each once.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        carried: Iterable[Tuned] = (),
        below: Iterable[str | os.PathLike[str]] = (),
    ) -> None:
        self.carried: dict[KernelSpec, Tuned] = {}
        self.unfit: list[Tuned] = []
        self._root = root
        self._roots = (root, *below)
        self._offered = {key(tuned.spec): tuned for tuned in carried}

    def __call__(self, operator: Operator, spec: KernelSpec) -> KernelSpec:
        """The spec with the schedule that it is to have."""
        offered = self._offered.get(key(spec))
        if offered is not None and self._fits(operator, offered):
            self.carried[offered.spec] = offered
            return offered.spec
        for root in self._roots:
            filed = find(root, spec)
            if filed is not None:
                return filed.spec if self._fits(operator, filed) else spec
        return spec

    def _fits(self, operator: Operator, tuned: Tuned) -> bool:
        fits = operator.accepts(tuned.spec)
        if not fits and tuned not in self.unfit:
            self.unfit.append(tuned)
        return fits

    def missing(self, spec: KernelSpec) -> bool:
        """Whether a kernel's schedule was carried here, and the root does not have it yet."""
        tuned = self.carried.get(spec)
        if tuned is None:
            return False
        filed = next(filter(None, (find(root, spec) for root in self._roots)), None)
        return filed is None or filed.spec != spec

    def install(self, specs: Iterable[KernelSpec]) -> int:
        """File the carried schedules of kernels that are there now. Returns how many were new.

        Raises:
            CacheRootError: The root cannot be written.
        """
        count = 0
        for spec in specs:
            if self.missing(spec):
                write(self._root, self.carried[spec])
                count += 1
        return count
