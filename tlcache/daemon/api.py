"""What a route of the API is: its method and path, what it takes, and what it answers.

Invariant: what is checked is what is published. A parameter's or a body's schema is the one that a
request is held to, and the OpenAPI document is made of the same objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError

from tlcache.daemon.peers import Caller

__all__ = ["Answer", "Asked", "Handler", "Parameter", "Refused", "Route", "Schema", "read_body"]
__all__ += ["read_query"]

Schema = Mapping[str, Any]
Handler = Callable[["Asked"], Awaitable[web.StreamResponse]]


class Refused(Exception):
    """A request is not answered as it hoped.

    Args:
        status: The HTTP status.
        error: Why, in one sentence.
        hint: What to do about it.
    """

    def __init__(self, status: int, error: str, hint: str | None = None) -> None:
        super().__init__(error)
        self.status, self.error, self.hint = status, error, hint


@dataclass(frozen=True)
class Parameter:
    """A parameter of a route's query.

    Attributes:
        name: Its name.
        schema: The JSON schema of one value: a string, an integer, a number or a boolean.
        what: What it is for.
        many: Whether it may be repeated.
        default: Its value where it is not given.
    """

    name: str
    schema: Schema
    what: str
    many: bool = False
    default: Any = None

    def read(self, given: Sequence[str]) -> Any:
        """What was given for it.

        Raises:
            Refused: It is not what the schema says.
        """
        if not given:
            return () if self.many else self.default
        if len(given) > 1 and not self.many:
            raise Refused(400, f"{self.name} is given {len(given)} times", "give it once")
        values = tuple(self._value(text) for text in given)
        return values if self.many else values[0]

    def _value(self, text: str) -> Any:
        kind = self.schema["type"]
        value: Any = None
        if kind == "string" and re.fullmatch(self.schema.get("pattern", "(?s).*"), text):
            value = text
        elif kind == "boolean":
            value = {"true": True, "false": False}.get(text)
        elif kind == "integer" and re.fullmatch(r"(?a)-?\d{1,18}", text):
            value = int(text)
        elif kind == "number" and re.fullmatch(r"(?a)-?\d{1,9}(\.\d{1,9})?", text):
            value = float(text)
        too_long = kind == "string" and len(text) > self.schema.get("maxLength", len(text))
        too_short = kind == "string" and len(text) < self.schema.get("minLength", 0)
        unknown = "enum" in self.schema and value not in self.schema["enum"]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            unknown |= not self.schema.get("minimum", value) <= value
            unknown |= not value <= self.schema.get("maximum", value)
        if value is None or unknown or too_long or too_short:
            raise Refused(400, f"{self.name} is {text[:60]!r}, and {self._expected()}", self.what)
        return value

    def _expected(self) -> str:
        if "enum" in self.schema:
            return f"is to be one of {', '.join(self.schema['enum'])}"
        limits = [
            f"{word} {self.schema[name]}"
            for name, word in (("minimum", "at least"), ("maximum", "at most"))
            if name in self.schema
        ]
        article = "an" if self.schema["type"] == "integer" else "a"
        example = [f"like {self.schema['examples'][0]}"] if "examples" in self.schema else []
        return ", ".join([f"is to be {article} {self.schema['type']}", *limits, *example])


@dataclass(frozen=True)
class Answer:
    """What a route may answer.

    Attributes:
        what: When it does.
        schema: The body's JSON schema; None where it is no JSON.
        media: The body's media type.
    """

    what: str
    schema: Schema | None = None
    media: str = "application/json"


@dataclass(frozen=True)
class Asked:
    """A request that was checked.

    Attributes:
        request: It, as aiohttp has it.
        query: The values of the route's parameters, by name.
        body: What the body's model makes of the body.
        raw: The body as it was sent.
        caller: Who asks; None where everybody may.
    """

    request: web.Request
    query: Mapping[str, Any]
    body: Any = None
    raw: bytes = b""
    caller: Caller | None = None


@dataclass(frozen=True)
class Route:
    """One thing that can be asked for.

    Attributes:
        method: `GET`, `POST` or `DELETE`.
        path: Its path, with aiohttp's `{name}` or `{name:pattern}`.
        name: The name of the operation.
        what: What it does, in one line.
        handler: Does it.
        answers: What it answers, by status, besides the errors that all routes have.
        takes: Its query's parameters.
        parts: What the names in the path mean, by name.
        body: The model of its body; None where it has none.
        check: Makes the body of JSON, where that is not the model's own way.
        changes: Whether it is only for who may change something.
        seconds: How long it may take; None where it sees to that itself.
    """

    method: str
    path: str
    name: str
    what: str
    handler: Handler
    answers: Mapping[int, Answer]
    takes: tuple[Parameter, ...] = ()
    parts: Mapping[str, Parameter] = field(default_factory=dict)
    body: type[BaseModel] | None = None
    check: Callable[[Any], Any] | None = None
    changes: bool = False
    seconds: float | None = 30.0


def read_query(route: Route, request: web.Request) -> dict[str, Any]:
    """The values of a route's parameters.

    Raises:
        Refused: One is not known, or is not what it should be.
    """
    known = {one.name: one for one in route.takes}
    for name in request.query:
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, known, 1)
            told = ", ".join(known) or "no parameters"
            raise Refused(
                400,
                f"{request.path} has no parameter {name[:60]!r}",
                f"did you mean `{near[0]}`?" if near else f"there are {told}",
            )
    return {name: one.read(request.query.getall(name, [])) for name, one in known.items()}


def read_body(route: Route, request: web.Request, raw: bytes) -> Any:
    """What a route's model makes of a body.

    Raises:
        Refused: It is no JSON, or is not what the model says.
    """
    assert route.body is not None
    if request.content_type != "application/json":
        raise Refused(
            415,
            f"the body's type is {request.content_type[:60]}, and is to be application/json",
            "`curl --json @FILE`, or `-H 'Content-Type: application/json'`",
        )
    try:
        document = json.loads(raw.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {str(error)[:200]}") from error
    if route.check is not None:
        return route.check(document)
    try:
        return route.body.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"][:4]) or "the body"
        said = first["msg"].removeprefix("Value error, ")
        raise Refused(
            400, f"{place}: {said[:1].lower()}{said[1:200]}", "/v1/openapi.json has the schema"
        ) from error


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")
