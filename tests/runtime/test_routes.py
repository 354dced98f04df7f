"""Requests to responses: each route, each refusal, and anything else that bytes can be."""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlcache import __version__
from tlcache.runtime import events, routes


def parts(response):
    """Status, headers and JSON of a response."""
    head, _, body = response.partition(b"\r\n\r\n")
    status, *lines = head.decode("ascii").split("\r\n")
    version, code, _reason = status.split(" ", 2)
    headers = dict(line.split(": ", 1) for line in lines)
    assert version == "HTTP/1.1"
    assert headers["Content-Type"] == "application/json"
    assert headers["Connection"] == "close"
    assert int(headers["Content-Length"]) == len(body)
    return int(code), headers, json.loads(body)


def get(target):
    code, _, document = parts(routes.answer(f"GET {target} HTTP/1.1".encode()))
    return code, document


@pytest.mark.parametrize("path", ["/v1/stats", "/v1/kernels", "/v1/events", "/v1/health"])
def test_each_route_answers_with_its_schema(path):
    code, document = get(path)
    assert (code, document["schema"]) == (200, 1)
    assert get(path + "?unknown=1")[0] == 200
    head = routes.answer(f"HEAD {path} HTTP/1.0".encode())
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert head.endswith(b"\r\n\r\n")


def test_the_process_tells_who_it_is():
    told = get("/v1/stats")[1]["process"]
    assert told["tlcache"] == __version__
    started = datetime.fromisoformat(told["started"])
    assert 0 <= (datetime.now(timezone.utc) - started).total_seconds() < 24 * 3600
    assert get("/v1/health")[1] == {
        "schema": 1,
        "status": "ok",
        "pid": told["pid"],
        "ready": told["ready"] is not None,
    }


def test_what_is_not_there_is_404_with_what_is():
    for path in (
        "/",
        "/v1",
        "/v1/stats/",
        "/v2/stats",
        "//v1/stats",
        "/v1/../v1/stats",
        "/v1/%73tats",
    ):
        code, document = get(path)
        assert code == 404
        assert path in document["error"]
        assert "/v1/stats" in document["hint"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_are_405_and_say_which_are_allowed(method):
    code, headers, document = parts(routes.answer(f"{method} /v1/stats HTTP/1.1".encode()))
    assert code == 405
    assert headers["Allow"] == "GET, HEAD"
    assert method in document["error"]


@pytest.mark.parametrize(
    "first", [b"", b"GET", b"GET /v1/stats", b"get /v1/stats HTTP/1.1", b"GET /v1/stats HTTP/2"]
)
def test_what_is_no_http_is_400(first):
    assert parts(routes.answer(first))[0] == 400


@given(
    st.binary(max_size=300) | st.from_regex(rb"(GET|HEAD|PUT) /v1/[!-~]* HTTP/1\.1", fullmatch=True)
)
def test_any_bytes_get_an_answer_that_is_http_and_json(first):
    response = routes.answer(first)
    if not first.startswith(b"HEAD "):
        assert parts(response)[0] in (200, 400, 404, 405, 500)


def test_events_are_told_since_a_time(monkeypatch):
    log = events.Log()
    monkeypatch.setattr(events, "log", log)
    log.note("ready", "first")
    time.sleep(0.002)
    between = datetime.now(timezone.utc)
    time.sleep(0.002)
    log.note("ready", "second")

    def titles(query):
        code, document = get(f"/v1/events{query}")
        return [event["title"] for event in document["events"]] if code == 200 else code

    assert titles("") == titles("?since=") == titles("?since=2020-01-01") == ["first", "second"]
    for spelled in (
        between.isoformat(),
        between.isoformat().replace("+", "%2B"),
        between.isoformat().replace("+00:00", "Z"),
        between.isoformat().replace("+00:00", ""),
    ):
        assert titles(f"?since={spelled}") == ["second"]
    assert titles("?since=2999-01-01") == []
    assert titles("?since=yesterday") == 400
    assert titles("?since=0001-01-01T00:00:00%2B23:59") == ["first", "second"]
