"""The coverage manifest of a warm: what it planned, and what became of it.

Invariant: a manifest is written only of a plan that a later process would make, too; where that
cannot be told from sources, none is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tlcache import closure, operators
from tlcache.errors import CacheRootError, FactoryError
from tlcache.fingerprint import versions
from tlcache.store import coverage
from tlcache.store.coverage import Coverage
from tlcache.targets import Target
from tlcache.warm.plan import Item
from tlcache.warm.shapes import Shapes

__all__ = ["Covering"]


class Covering:
    """Keeps the manifest of one document for some targets.

    Args:
        name: The manifest's key.
        document: The document.
        targets: What it is warmed for.
        places: The roots in force; it is written to the first.
    """

    def __init__(
        self, name: str, document: Shapes, targets: Sequence[Target], places: Sequence[Path]
    ) -> None:
        self._name = name
        self._document = document
        self._targets = [target.name for target in targets]
        self._places = places
        self._closures: list[closure.Closure] | None = None

    def known(self, items: Sequence[Item]) -> bool:
        """Whether one of the roots has a manifest that holds, by which all of a plan is there."""
        keys = [item.action_key for item in items]
        for place in self._places:
            found = coverage.read(place, self._name)
            if (
                found is not None
                and [one.action_key for one in found.kernels] == keys
                and coverage.hold(found, self._places)
                and not coverage.missing(found, self._places)
            ):
                return True
        return False

    def write(self, items: Sequence[Item]) -> None:
        """File what is known now. A root that cannot be written has none."""
        try:
            if self._closures is None:
                self._closures = self._depends(items)
            kernels = [
                coverage.of_kernel(
                    self._places,
                    item.wanted.spec,
                    item.action_key,
                    tunable=item.wanted.tunable,
                    entry=item.outcome.entry if item.outcome is not None else None,
                    error=item.outcome.error if item.outcome is not None else None,
                )
                for item in items
            ]
            found = Coverage(
                self._targets, list(self._document.paths), self._closures, kernels, versions()
            )
            coverage.write(self._places[0], self._name, found)
        except (CacheRootError, FactoryError):
            pass  # the next check plans anew

    def _depends(self, items: Sequence[Item]) -> list[closure.Closure]:
        """The source closures by which the plan came about."""
        ops = {item.wanted.op for item in items if item.wanted.op is not None}
        paths = {item.wanted.spec.kernel for item in items}
        paths |= set(operators.origins(ops)) if ops else set()
        return [closure.closure(path) for path in sorted(paths)]
