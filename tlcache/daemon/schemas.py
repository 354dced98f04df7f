"""The JSON schemas of what the API answers."""

from __future__ import annotations

from typing import Any

__all__ = ["ENTRIES", "ENTRY", "ERROR", "HEALTH", "JOB", "JOBS", "KEY", "PROCESSES", "SCHEMAS"]
__all__ += ["STATS"]

_TEXT: dict[str, Any] = {"type": "string"}
_MAYBE: dict[str, Any] = {"type": ["string", "null"]}
_TIME: dict[str, Any] = {"type": ["string", "null"], "format": "date-time"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_ANY: dict[str, Any] = {"type": "object"}
_MAYBE_ANY: dict[str, Any] = {"type": ["object", "null"]}


def _exactly(**fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


def _list(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _named(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _document(**fields: Any) -> dict[str, Any]:
    return _exactly(schema={"const": 1}, **fields)


SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": {
        **_exactly(error=_TEXT, hint=_MAYBE),
        "description": "Why not, and what to do about it.",
    },
    "Entry": {
        **_exactly(
            key=_TEXT,
            kind=_TEXT,
            path=_TEXT,
            tilelang=_MAYBE,
            platform=_MAYBE,
            backend=_MAYBE,
            kernel=_MAYBE,
            target={"type": ["string", "array", "null"], "items": _TEXT},
            toolkit=_MAYBE,
            host=_MAYBE,
            machine=_MAYBE,
            payload=_MAYBE,
            params={"type": ["array", "null"], "items": _exactly(dtype=_MAYBE, shape=_list({}))},
            bytes=_COUNT,
            created=_TIME,
            last_used=_TIME,
            op=_MAYBE,
            workload=_MAYBE_ANY,
            schedule=_MAYBE_ANY,
            record=_MAYBE,
        ),
        "description": "A thing in a cache; the same as in `tlcache ls --json`.",
    },
    "Job": {
        **_exactly(
            id=_TEXT,
            kind={"enum": ["warm", "prune", "verify"]},
            state={"enum": ["queued", "running", "done", "failed", "cancelled"]},
            root=_TEXT,
            command=_TEXT,
            created=_TIME,
            started=_TIME,
            ended=_TIME,
            kernels={"type": "object", "additionalProperties": {"type": "integer"}},
            current=_list(_TEXT),
            exit_code={"type": ["integer", "null"]},
            error=_MAYBE,
            hint=_MAYBE,
            result=_MAYBE_ANY,
        ),
        "description": (
            "`command` does the same by hand, and `result` is what its --json says; lists in it "
            "have at most 500 items, and `cut` says how long the longer ones were."
        ),
    },
    "Check": _exactly(name=_TEXT, status={"enum": ["ok", "degraded", "failing"]}, detail=_MAYBE),
}

ERROR = _named("Error")
ENTRY = _document(entry=_named("Entry"))
ENTRIES = _document(
    entries=_list(_named("Entry")),
    next=_MAYBE,
    totals=_exactly(entries=_COUNT, bytes=_COUNT),
    generation=_COUNT,
)
JOB = _document(job=_named("Job"))
JOBS = _document(jobs=_list(_named("Job")))
HEALTH = _document(status={"enum": ["ok", "degraded", "failing"]}, checks=_list(_named("Check")))
KEY = _document(
    key=_TEXT,
    sha256=_TEXT,
    facts={"type": "object", "additionalProperties": _MAYBE},
    variables={"type": "object", "additionalProperties": _TEXT},
)
PROCESSES = _document(
    processes=_list(_ANY),
    groups=_list(_exactly(name=_TEXT, pids=_list({"type": "integer"}))),
    advice=_list(_ANY),
)
STATS = {
    "type": "object",
    "properties": {"schema": {"const": 1}, "jobs": _ANY},
    "required": ["schema", "jobs"],
}
