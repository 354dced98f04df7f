"""One daemon from its start to its end: ready, reload, stop, as a service manager wants them."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from tlcache.daemon import notify
from tlcache.daemon.service import Service
from tlcache.errors import TlcacheError
from tlcache.settings import Settings

__all__ = ["Serving", "live"]

_log = logging.getLogger(__name__)

_FIRST = 60.0  # seconds after which a first scan is not waited for
_STEP = 5.0

Serving = Callable[[Service], AbstractAsyncContextManager[None]]
"""What answers on a socket while its context lasts."""


@asynccontextmanager
async def _silent(_: Service) -> AsyncIterator[None]:
    yield


async def live(service: Service, load: Callable[[], Settings], serving: Serving = _silent) -> bool:
    """Run a service until SIGTERM or SIGINT.

    Args:
        service: It is started, and stopped at the end.
        load: Reads the settings anew, on SIGHUP.
        serving: What answers meanwhile.

    Returns:
        Whether everything has ended; what has not may be left to die with the process.

    Raises:
        DaemonError: Another daemon watches one of the roots.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    reload = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    service.start()
    try:
        async with serving(service):
            await _first(service, stop)
            notify.ready(_status(service))
            _log.info("%s", _status(service))
            while not stop.is_set():
                await _either(stop, reload)
                if reload.is_set():
                    reload.clear()
                    await asyncio.to_thread(_reload, service, load)
                if service.alive:
                    notify.watchdog()
            notify.stopping()
            _log.info("stopping")
    finally:
        ended = await asyncio.to_thread(service.stop)
    return ended


async def _first(service: Service, stop: asyncio.Event) -> None:
    """Wait until the index has what there is, but not for ever."""
    end = asyncio.get_running_loop().time() + _FIRST
    while not stop.is_set() and asyncio.get_running_loop().time() < end:
        if service.ready():
            return
        notify.watchdog()
        await asyncio.sleep(0.05)


async def _either(stop: asyncio.Event, reload: asyncio.Event) -> None:
    """Until something is asked for, or the service manager wants to hear."""
    seconds = notify.watchdog_seconds()
    waiting = [asyncio.ensure_future(one.wait()) for one in (stop, reload)]
    step = min(_STEP, seconds / 3) if seconds else _STEP
    await asyncio.wait(waiting, timeout=step, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


def _reload(service: Service, load: Callable[[], Settings]) -> None:
    notify.reloading()
    try:
        service.reload(load())
        _log.info("reloaded: %s", _status(service))
    except TlcacheError as error:
        _log.error("not reloaded: %s", error.message)
    notify.ready(_status(service))


def _status(service: Service) -> str:
    totals = service.index.totals().values()
    entries, size = sum(one.entries for one in totals), sum(one.bytes for one in totals)
    there = [one for one in service.followers if one.state.identity is not None]
    polled = [one for one in there if one.polling is not None]
    told = f"{len(there)} of {len(service.followers)} roots"
    if polled:
        told += f" ({len(polled)} by scans)"
    return f"watching {told}: {entries:,} entries, {size / 2**20:,.1f} MiB"
