"""Whether the kernels of a recording can be made again: each is replayed up to the key that
TileLang asks its cache for, and that is compared with the recorded one.

Invariant: nothing is compiled, and no cache root is touched.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tlcache import recorded, targets
from tlcache.errors import ShapesError, TargetError
from tlcache.fingerprint import key_environment, platform_name, tilelang_version
from tlcache.recorded import Document
from tlcache.store import layout
from tlcache.warm import pool, shapes
from tlcache.warm.shapes import Shapes, Wanted

__all__ = ["Verdicts", "checkable", "verdicts"]

Verdicts = dict[str, dict[str, Any]]
"""By the identity of a workload: why it cannot be replayed, and what to do; or nothing."""


def checkable(document: Document) -> list[dict[str, Any]]:
    """The workloads of a recording that have keys of this release and machine, those that an
    earlier comparison found wanting included.
    """
    entries = [*document["workloads"], *document.get("unreplayable", ())]
    found = [recorded.asked(entry) for entry in entries if entry.get(recorded.KEYS)]
    each = {recorded.identity(workload): workload for workload in found if _keys(workload)}
    return list(each.values())


def _keys(workload: Mapping[str, Any]) -> dict[str, str]:
    """The keys of a workload that hold here, by target."""
    keys: Mapping[str, str] = workload[recorded.KEYS]
    here = key_environment("")
    return {
        environment.removeprefix(here): key
        for environment, key in keys.items()
        if environment.startswith(here)
    }


def verdicts(
    workloads: Iterable[Mapping[str, Any]], path: Path, *, jobs: int | None = None
) -> Verdicts:
    """Replay workloads, and compare their keys.

    Args:
        workloads: As `checkable` gives them.
        path: Their file, for messages.
        jobs: Replays at a time; by default what cores and memory allow.
    """
    found: Verdicts = {}
    todo: list[tuple[str, Wanted]] = []
    for workload in workloads:
        name = recorded.identity(workload)
        found[name] = {}
        try:
            asking = Shapes.model_validate({"version": 1, "workloads": [workload]})
            for target in _keys(workload):
                wanted = shapes.expand(asking, path, [targets.parse(target)])
                todo += [(name, one) for one in wanted]
        except (ShapesError, TargetError, ValueError) as error:
            message = getattr(error, "message", None) or str(error).splitlines()[0]
            found[name] = _verdict(message.rpartition(f"{path}: workloads[0]")[2], None)
    if not todo:
        return found
    with tempfile.TemporaryDirectory(prefix="tlcache-check-") as root:
        layout.make_skeleton(Path(root), tilelang_version(), platform_name())
        for index, outcome in pool.run(
            [one.spec for _, one in todo],
            root,
            jobs=min(jobs or pool.default_jobs(), len(todo)),
            keys=[one.key for _, one in todo],
            work="compare",
        ):
            if outcome.status != "same":
                found[todo[index][0]] = _verdict(outcome.error or "unknown", outcome.hint)
    return found


def _verdict(reason: str, remedy: str | None) -> dict[str, Any]:
    return {"reason": reason, **({"remedy": remedy} if remedy is not None else {})}
