"""What the calls of a program's own functions are asked for by, found out by the workers of a warm.

Invariant: nothing is compiled, and no cache root but a throw-away one is touched. TileLang is
imported by the workers alone, and only if there is a kernel to ask about.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from tlcache import operators
from tlcache.fingerprint import platform_name, tilelang_version
from tlcache.spec import KernelSpec
from tlcache.store import layout
from tlcache.warm import pool
from tlcache.warm.outcome import Outcome
from tlcache.warm.shapes import Wanted

__all__ = ["answers"]


def answers(wanted: Sequence[Wanted]) -> dict[KernelSpec, Outcome]:
    """For each kernel that is a program's own, its call (`Outcome.asked`), or why it has none."""
    own = [one for one in wanted if not operators.owns(one.spec.kernel)]
    if not own:
        return {}
    found: dict[KernelSpec, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="tlcache-why-") as root:
        layout.make_skeleton(Path(root), tilelang_version(), platform_name())
        for index, outcome in pool.run(
            [one.spec for one in own],
            root,
            jobs=pool.default_jobs(),
            keys=[one.key for one in own],
            work="ask",
        ):
            found[own[index].spec] = outcome
    return found
