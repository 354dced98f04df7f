"""The OpenAPI document, made of the table of routes.

Invariant: nothing is written here that the server does not read from the same objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import tlcache
from tlcache.daemon.api import Answer, Parameter, Route
from tlcache.daemon.schemas import ERROR, SCHEMAS

__all__ = ["document"]

_ERRORS = {
    "400": "Something that was asked for cannot be understood.",
    "403": "Who asks may not do this.",
    "404": "There is no such thing.",
    "408": "The request took too long to come.",
    "413": "The body is too large.",
    "415": "The body is no application/json.",
    "500": "A fault of the daemon's; its log says more.",
    "503": "There is too much to do at the moment, or this machine cannot do it.",
}
_WITH_BODY = ("408", "413", "415")


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The OpenAPI document of some routes."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = dict(SCHEMAS)
    for route in routes:
        operations = paths.setdefault(re.sub(r":[^}]*", "", route.path), {})
        operations[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tlcache daemon",
            "version": tlcache.__version__,
            "description": (
                "HTTP/1.1 over a unix socket. Who asks is told by the socket: members of the "
                "configured group, the daemon's user and root may read; that user and root may "
                "change something."
            ),
        },
        "servers": [{"url": "http://localhost", "description": "over the unix socket"}],
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.what,
        "tags": ["change" if route.changes else "read"],
        "parameters": [
            *(_parameter(one, "path") for one in route.parts.values()),
            *(_parameter(one, "query") for one in route.takes),
        ],
        "responses": {
            **{str(status): _answer(one) for status, one in route.answers.items()},
            **{
                status: _answer(Answer(what, ERROR))
                for status, what in _ERRORS.items()
                if (status not in _WITH_BODY or route.body)
                and (status != "404" or route.parts)
                and int(status) not in route.answers
            },
        },
    }
    if route.body is not None:
        schema = route.body.model_json_schema(
            by_alias=True, ref_template="#/components/schemas/{model}"
        )
        schemas.update(schema.pop("$defs", {}))
        schemas[route.body.__name__] = schema
        reference = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        told["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        }
    return told


def _answer(one: Answer) -> dict[str, Any]:
    return {
        "description": one.what,
        "content": {one.media: {"schema": one.schema or {"type": "string"}}},
    }


def _parameter(one: Parameter, where: str) -> dict[str, Any]:
    schema: dict[str, Any] = dict(one.schema)
    if one.default is not None and not one.many:
        schema["default"] = one.default
    if one.many:
        schema = {"type": "array", "items": schema}
    told = {"name": one.name, "in": where, "description": one.what, "schema": schema}
    return {**told, "required": True} if where == "path" else told
