from __future__ import annotations

import socket

from tests.daemon.asking import connected
from tests.daemon.conftest import publish, until
from tlcache.daemon.broadcast import KEPT
from tlcache.daemon.stream import LISTENERS


def test_what_happens_is_told_to_everybody_who_listens(daemon, cache_root):
    one = daemon()
    with one.events("?kind=entry-added") as first, one.events("?kind=entry-added") as second:
        place = publish(cache_root, 1)
        for events in (first, second):
            event = next(events)
            assert (event["event"], event["kind"]) == ("entry-added", "entry-added")
            assert event["key"] == place.name


def test_who_comes_back_goes_on_where_it_was(daemon, cache_root):
    one = daemon()
    with one.events("?since=0&kind=entry-added") as events:
        publish(cache_root, 1)
        last = next(events)
    place = publish(cache_root, 2)
    with one.events(f"?since={last['id']}&kind=entry-added") as events:
        assert next(events)["key"] == place.name
    with connected(one.socket) as again:
        again.sendall(
            b"GET /v1/events?kind=entry-added HTTP/1.1\r\nHost: d\r\n"
            b"Last-Event-ID: %d\r\n\r\n" % last["id"]
        )
        with again.makefile("rb") as lines:
            until(lambda: place.name.encode() in lines.readline())


def test_who_missed_events_is_told_how_many(daemon, cache_root):
    one = daemon()
    for number in range(KEPT + 50):
        publish(cache_root, number, size=1)
    until(lambda: one.json("/v1/entries")["totals"]["entries"] == KEPT + 50)
    with one.events("?since=0") as events:
        first = next(events)
    assert first["event"] == "lost"
    assert first["events"] >= 50


def test_a_listener_that_does_not_read_holds_up_nobody(daemon, cache_root):
    one = daemon()
    with connected(one.socket) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.sendall(b"GET /v1/events?since=0 HTTP/1.1\r\nHost: d\r\n\r\n")
        with one.events() as events:
            for number in range(600):
                publish(cache_root, number, size=1)
            for _ in range(600):
                next(events)
        assert one.json("/v1/stats")


def test_there_are_only_so_many_listeners(daemon):
    one = daemon()
    listening = [connected(one.socket) for _ in range(LISTENERS)]
    for each in listening:
        each.sendall(b"GET /v1/events HTTP/1.1\r\nHost: d\r\n\r\n")
        assert each.recv(100).startswith(b"HTTP/1.1 200")
    refused = one.ask("/v1/events")
    assert refused.status == 503
    assert refused.headers["Retry-After"]
    listening.pop().close()
    until(lambda: _listens(one))
    for each in listening:
        each.close()


def _listens(one) -> bool:
    with connected(one.socket) as each:
        each.sendall(b"GET /v1/events HTTP/1.1\r\nHost: d\r\n\r\n")
        return each.recv(100).startswith(b"HTTP/1.1 200")
