"""What the agent answers: the bytes of a request to the bytes of a response. HTTP/1.1, one request
a connection.

Invariant: every request gets an answer, whatever is in it; the answer depends on the first line
alone.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any
from urllib.parse import parse_qs

from tlcache.runtime import snapshot

__all__ = ["END", "LONGEST", "answer", "failure", "line"]

LONGEST = 8192
"""Bytes of a request, at most."""

END = b"\r\n\r\n"
"""What a request ends with: it has no body."""

_log = logging.getLogger(__name__)
_LINE = re.compile(r"([A-Z]+) ([!-~]+) HTTP/1\.[01]")
_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}


class _Refusal(Exception):
    """A request that cannot be answered; its arguments are those of `failure`."""


def line(request: bytes) -> bytes:
    """The first line of a request: two that have the same one get the same answer."""
    return request.partition(b"\r\n")[0]


def answer(first: bytes) -> bytes:
    """The whole response to a request.

    Args:
        first: Its first line.
    """
    match = _LINE.fullmatch(first.decode("latin-1"))
    if match is None:
        return failure(400, "this is not an HTTP request", "`GET /v1/stats HTTP/1.1`")
    method, target = match[1], match[2]
    try:
        response = _response(200, _document(method, target))
    except _Refusal as refusal:
        response = failure(*refusal.args)
    except Exception as error:
        _log.warning("%s %s could not be answered", method, target, exc_info=True)
        response = failure(500, f"{type(error).__name__}: {error}", "the process's log has more")
    if method == "HEAD":
        return response.partition(END)[0] + END
    return response


def failure(status: int, error: str, hint: str) -> bytes:
    """A response that says what is wrong, and what would not be."""
    return _response(status, {"error": error, "hint": hint})


def _response(status: int, document: Mapping[str, Any]) -> bytes:
    body = json.dumps(document, separators=(",", ":"), default=str).encode() + b"\n"
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
        + ("Allow: GET, HEAD\r\n" if status == 405 else "")
        + "Cache-Control: no-store\r\n"
        "Connection: close\r\n"
        "\r\n"
    )
    return head.encode() + body


def _document(method: str, target: str) -> dict[str, Any]:
    path, _, query = target.partition("?")
    route = _ROUTES.get(path)
    if route is None:
        raise _Refusal(404, f"there is no {path}", f"there are {', '.join(_ROUTES)}")
    if method not in ("GET", "HEAD"):
        raise _Refusal(405, f"{method} is not allowed", "an agent is only read, by GET or HEAD")
    return route(query)


def _events(query: str) -> dict[str, Any]:
    since = parse_qs(query).get("since", [""])[-1]
    if not since:
        return snapshot.events()
    try:
        # In a query "+" is a blank, and Python 3.10 knows no "Z".
        when = datetime.fromisoformat(since.replace(" ", "+").replace("Z", "+00:00"))
    except ValueError as error:
        raise _Refusal(
            400, f"since is {since!r}, which is no time", "`/v1/events?since=2026-01-31T12:00:00Z`"
        ) from error
    return snapshot.events((when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp())


_ROUTES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/stats": lambda query: snapshot.stats(),
    "/v1/kernels": lambda query: snapshot.kernels(),
    "/v1/workloads": lambda query: snapshot.workloads(),
    "/v1/events": _events,
    "/v1/health": lambda query: snapshot.health(),
}
