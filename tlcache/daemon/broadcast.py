"""What happens, told to whoever listens: threads tell, coroutines and threads listen.

Invariant: to tell never waits, and a listener that is slow loses the oldest, never memory; it can
see from the numbers that it did.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

__all__ = ["KEPT", "Broadcast", "Subscription"]

KEPT = 1024
"""Events that are kept for who asks later, and for each listener that is slow."""

Event = dict[str, Any]


class Subscription:
    """One listener. Its events come in order; close it with `with`."""

    def __init__(self, leave: Callable[[Subscription], None], waiting: deque[Event]) -> None:
        self._leave = leave
        self._waiting = waiting
        self._there = threading.Condition()
        self._futures: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._closed = False

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it; who waits gets None."""
        self._leave(self)
        with self._there:
            self._closed = True
            self._notify()

    def put(self, event: Event) -> None:
        with self._there:
            self._waiting.append(event)
            self._notify()

    def _notify(self) -> None:
        self._there.notify_all()
        futures, self._futures = self._futures, []
        for loop, future in futures:
            try:
                loop.call_soon_threadsafe(_finish, future)
            except RuntimeError:
                pass  # its loop has ended

    def get(self, timeout: float | None = None) -> Event | None:
        """The next event, in a thread; None after `timeout` seconds, or when it is closed."""
        with self._there:
            self._there.wait_for(lambda: self._waiting or self._closed, timeout)
            return self._waiting.popleft() if self._waiting else None

    async def next(self) -> Event | None:
        """The next event, in a coroutine; None when it is closed."""
        loop = asyncio.get_running_loop()
        while True:
            with self._there:
                if self._waiting:
                    return self._waiting.popleft()
                if self._closed:
                    return None
                future = loop.create_future()
                self._futures.append((loop, future))
            await future


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Broadcast:
    """The events of a daemon: `{"id", "time", "kind", …}`, numbered from 1."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[Event] = deque(maxlen=KEPT)
        self._listeners: tuple[Subscription, ...] = ()
        self._last = 0

    def tell(self, kind: str, **fields: Any) -> None:
        """Tell everybody. Fields are what JSON can say."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        with self._lock:
            self._last += 1
            event = {"id": self._last, "time": now, "kind": kind, **fields}
            self._recent.append(event)
            for listener in self._listeners:
                listener.put(event)

    def recent(self, after: int = 0) -> list[Event]:
        """The events that are kept, oldest first, from the one after a number."""
        with self._lock:
            return [event for event in self._recent if event["id"] > after]

    def listen(self, after: int | None = None) -> Subscription:
        """Listen from now on, or from the event after a number as far as they are kept."""
        with self._lock:
            kept = [] if after is None else [one for one in self._recent if one["id"] > after]
            listener = Subscription(self._leave, deque(kept, maxlen=KEPT))
            self._listeners = (*self._listeners, listener)
        return listener

    def _leave(self, listener: Subscription) -> None:
        with self._lock:
            self._listeners = tuple(one for one in self._listeners if one is not listener)
