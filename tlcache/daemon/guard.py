"""The connections of a server: how many there may be, and how long each may take.

aiohttp bounds a request's size, not its time: a client that never ends its first line, or never
reads its answer, has a connection for ever. Here each has a deadline while it is waited for.

Invariant: a connection that no request of is being answered ends by a deadline. There is a bounded
number of them: where there would be more, the one that was idle longest goes, and where none is
idle, the new one.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from tlcache.daemon.peers import Caller

__all__ = ["CONNECTIONS", "Guard", "Guards", "failure"]

CONNECTIONS = 128
"""Open ones at most."""

REQUEST = 5.0
"""Seconds that a client may take for the lines of a request."""

IDLE = 60.0
"""Seconds that a connection may lie idle between requests."""

RESPONSE = 10.0
"""Seconds that a client may take to read an answer."""

_LOOK = 0.5
_LINGER = 2.0  # seconds for which the rest of a body that is refused is thrown away


def failure(status: int, error: str, hint: str | None = None) -> web.Response:
    """An answer that says what is wrong."""
    body = json.dumps({"error": error, "hint": hint})
    return web.Response(status=status, text=body, content_type="application/json")


class _Handler(RequestHandler):
    """aiohttp's side of a connection, which tells of a malformed request in JSON, and no log."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return super().handle_error(request, status, exc, message)
        told = failure(status, "this is no HTTP/1.1 request that can be understood")
        told.force_close()
        return told


class Guard(asyncio.Protocol):
    """One connection: it hands everything on to aiohttp, and minds since when what is waited for.

    Attributes:
        busy: Whether a request of it is being answered.
        caller: Who is at the other end, once somebody has asked.
    """

    def __init__(self, handler: _Handler, guards: Guards) -> None:
        self.busy = False
        self.caller: Caller | None = None
        self._handler, self._guards = handler, guards
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._begun = True  # the first request is not idled before
        self._transport: asyncio.Transport | None = None

    def working(self, busy: bool) -> None:
        """A request is being answered from now on, or is not any more."""
        self.busy, self._begun, self._since = busy, False, self._loop.time()

    @property
    def idle(self) -> float:
        """Seconds for which nothing was to be done; negative while something is."""
        return -1.0 if self.busy or self._begun else self._loop.time() - self._since

    def late(self) -> bool:
        """Whether what is waited for should have come by now."""
        if self.busy or self._transport is None:
            return False
        if self._transport.get_write_buffer_size():
            allowed = RESPONSE
        else:
            allowed = REQUEST if self._begun else IDLE
        return self._loop.time() - self._since > allowed

    def end(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- what asyncio calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._guards.open.add(self)
        self._handler.connection_made(transport)
        if not self._guards.admit(self):
            self._transport.write(_FULL)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guards.open.discard(self)
        self._transport = None
        self._handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.busy and not self._begun:
            self._begun, self._since = True, self._loop.time()
        self._handler.data_received(data)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()


_FULL_BODY = json.dumps({"error": "there are too many connections", "hint": "ask again"}).encode()
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_FULL_BODY), _FULL_BODY)
)


class Guards:
    """All connections of a server; a factory of protocols for asyncio.

    Args:
        server: aiohttp's.
        most: So many connections at most.
    """

    def __init__(self, server: web.Server, most: int = CONNECTIONS) -> None:
        self.open: set[Guard] = set()
        self._server, self._most = server, most

    def __call__(self) -> Guard:
        handler = _Handler(
            self._server,
            loop=asyncio.get_running_loop(),
            access_log=cast(Any, None),
            keepalive_timeout=2 * IDLE,
            lingering_time=_LINGER,
            auto_decompress=False,
        )
        return Guard(handler, self)

    def admit(self, newest: Guard) -> bool:
        """Make room for a connection. False where there is none to be had."""
        if len(self.open) <= self._most:
            return True
        idlest = max(self.open - {newest}, key=lambda one: one.idle)
        if idlest.idle < 0:
            return False
        idlest.end()
        return True

    async def watch(self) -> None:
        """End what is late, for ever."""
        while True:
            await asyncio.sleep(_LOOK)
            for one in [one for one in self.open if one.late()]:
                one.end()
