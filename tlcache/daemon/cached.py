"""A document that many ask for: made now and then, however many ask.

Invariant: it is made by one thread at a time. Nobody gets one that is older than a second, unless
making one takes longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor

__all__ = ["Cached"]

_FRESH = 0.1
_STALE = 1.0
_LONGEST = 10.0


class Cached:
    """A document, for coroutines of one loop.

    Args:
        make: Makes it, in a thread.
        executor: Whose threads.
    """

    def __init__(self, make: Callable[[], bytes], executor: Executor) -> None:
        self._make, self._executor = make, executor
        self._made: bytes | None = None
        self._when = 0.0
        self._making: asyncio.Future[bytes] | None = None

    async def get(self) -> bytes:
        """It. While a new one is made, the last one does, if it is not too old.

        Raises:
            asyncio.TimeoutError: It takes too long to make, as on a file system that hangs.
        """
        age = time.monotonic() - self._when
        if self._made is not None and age < _FRESH:
            return self._made
        if self._making is None:
            loop = asyncio.get_running_loop()
            self._making = loop.run_in_executor(self._executor, self._make)
            self._making.add_done_callback(self._took)
        if self._made is not None and age < _STALE:
            return self._made
        return await asyncio.wait_for(asyncio.shield(self._making), _LONGEST)

    def _took(self, making: asyncio.Future[bytes]) -> None:
        self._making = None
        if not making.cancelled() and making.exception() is None:
            self._made, self._when = making.result(), time.monotonic()
