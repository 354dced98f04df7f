"""Events as they happen, as server-sent events.

Invariant: a listener that does not read is left, and one that reads slowly loses the oldest events,
and is told so. There is a bounded number of listeners.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from tlcache.daemon.api import Asked, Refused
from tlcache.daemon.broadcast import Broadcast, Subscription

__all__ = ["LISTENERS", "Stream"]

LISTENERS = 32
_HEARTBEAT = 15.0
_SLOWEST = 10.0


class Stream:
    """The handler of the events.

    Args:
        events: Whose events.
    """

    def __init__(self, events: Broadcast) -> None:
        self._events = events
        self._open: set[Subscription] = set()

    async def follow(self, asked: Asked) -> web.StreamResponse:
        if len(self._open) >= LISTENERS:
            raise Refused(503, f"{LISTENERS} listen already", "ask again when one has left")
        after = asked.query["since"]
        last = asked.request.headers.get("Last-Event-ID", "")
        if after is None and last.isascii() and last.isdigit() and len(last) < 19:
            after = int(last)
        kinds = frozenset(asked.query["kind"])
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        with self._events.listen(after) as listener:
            self._open.add(listener)
            try:
                await response.prepare(asked.request)
                await self._write(response, b": tlcache\n\n")
                await self._pass_on(response, listener, kinds, after)
            except ConnectionError:
                pass  # it has left
            finally:
                self._open.discard(listener)
        return response

    def end(self) -> None:
        """End all streams."""
        for listener in list(self._open):
            listener.close()

    async def _pass_on(
        self,
        response: web.StreamResponse,
        listener: Subscription,
        kinds: frozenset[str],
        after: int | None,
    ) -> None:
        expected = None if after is None else after + 1
        coming: asyncio.Future[dict[str, Any] | None] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(listener.next())
                await asyncio.wait({coming}, timeout=_HEARTBEAT)
                if not coming.done():
                    await self._write(response, b": still here\n\n")
                    continue
                event, coming = coming.result(), None
                if event is None:
                    return
                text = b""
                if expected is not None and event["id"] > expected:
                    text = _sent(None, "lost", {"events": event["id"] - expected})
                expected = event["id"] + 1
                if not kinds or event["kind"] in kinds:
                    text += _sent(event["id"], event["kind"], event)
                if text:
                    await self._write(response, text)
        finally:
            if coming is not None:
                coming.cancel()

    @staticmethod
    async def _write(response: web.StreamResponse, data: bytes) -> None:
        try:
            await asyncio.wait_for(response.write(data), _SLOWEST)
        except asyncio.TimeoutError:
            raise ConnectionResetError("the listener does not read") from None


def _sent(number: int | None, kind: str, data: dict[str, Any]) -> bytes:
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
