"""An entry as JSON tells it, in every command and over the daemon's socket.

Invariant: what is not known is null. A field keeps its name and its meaning.
"""

from __future__ import annotations

import json
from typing import Any

from tlcache.store import select
from tlcache.store.entry import Entry

__all__ = ["KINDS", "as_json"]

KINDS = {"cuda-binary": "binary", "autotuner": "autotune"}
"""How kinds of things are called where a person or a program reads them, if not by `layout`."""


def as_json(one: Entry) -> dict[str, Any]:
    """The fields of an entry."""
    filed = one.record
    targets = one.targets or (None,)
    return {
        "key": one.place.key,
        "kind": KINDS.get(one.place.kind, one.place.kind),
        "path": one.place.location,
        "tilelang": one.place.tilelang,
        "platform": one.place.platform,
        "backend": one.backend,
        "kernel": one.kernel,
        "target": targets[0] if len(targets) == 1 else list(targets),
        "toolkit": select.toolkit_of(one),
        "host": filed.host_compiler if filed else None,
        "machine": one.facts.host,
        "payload": one.payload,
        "params": None
        if one.params is None
        else [{"dtype": param.dtype, "shape": list(param.shape)} for param in one.params],
        "bytes": one.bytes,
        "created": one.created.isoformat() if one.created else None,
        "last_used": one.last_used.isoformat() if one.last_used else None,
        "op": filed.name if filed else None,
        "workload": json.loads(filed.workload) if filed else None,
        "schedule": json.loads(filed.schedule) if filed else None,
        "record": filed.action_key if filed else None,
    }
