"""Answering while the daemon lives: on its unix socket, and where the settings say so, with the
metrics alone on a port of 127.0.0.1.

Invariant: what was begun here has ended when the context is left: connections, jobs, and threads,
but for one that hangs in a file system. The settings are followed as they are reloaded.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web

from tlcache.daemon import peers
from tlcache.daemon.guard import Guards
from tlcache.daemon.served import Served
from tlcache.daemon.server import Server
from tlcache.errors import DaemonError

__all__ = ["serving"]

_log = logging.getLogger(__name__)

_SWITCH = 0.0005
_LOOK = 0.5
_ENDING = 2.0


@asynccontextmanager
async def serving(service: Served, listening: socket.socket) -> AsyncIterator[None]:
    """Answer on a unix socket while the context lasts, and where the settings say so, with the
    metrics alone on a port of 127.0.0.1.

    Args:
        service: The daemon. When its settings are others, that of them which is about the socket
            is taken over within a second.
        listening: The socket, listened on.

    Raises:
        DaemonError: The settings' group is not there, or the port cannot be had.
    """
    before = sys.getswitchinterval()
    # A request gives the interpreter away at each system call, and gets it back that much later
    # when another thread is at work.
    sys.setswitchinterval(_SWITCH)
    server = Server(service)
    async with AsyncExitStack() as held:
        held.callback(sys.setswitchinterval, before)
        await held.enter_async_context(_site(server.app, listening))
        follower = await held.enter_async_context(_Settings(server, service).following())
        try:
            yield
        finally:
            follower.cancel()
            await asyncio.to_thread(server.end)


@asynccontextmanager
async def _site(app: web.Application, listening: socket.socket) -> AsyncIterator[None]:
    """An application on a socket that is listened on."""
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(app, handle_signals=False)
    await runner.setup()
    assert runner.server is not None
    guards = Guards(runner.server)
    if listening.family == socket.AF_UNIX:
        accepting = await loop.create_unix_server(guards, sock=listening, backlog=512)
    else:
        accepting = await loop.create_server(guards, sock=listening)
    watching = asyncio.ensure_future(guards.watch())
    try:
        yield
    finally:
        watching.cancel()
        accepting.close()
        await runner.server.shutdown(_ENDING)
        await runner.cleanup()
        for one in list(guards.open):
            one.end()


class _Settings:
    """Keeps to the settings, as they are reloaded."""

    def __init__(self, server: Server, service: Served) -> None:
        self._server, self._service = server, service
        self._port: int | None = None
        self._held = AsyncExitStack()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[asyncio.Future[None]]:
        seen = self._service.settings
        await self._measure(seen.metrics_port)
        try:
            yield asyncio.ensure_future(self._follow())
        finally:
            await self._held.aclose()

    async def _follow(self) -> None:
        seen = self._service.settings
        while True:
            await asyncio.sleep(_LOOK)
            if self._service.settings is seen:
                continue
            seen = self._service.settings
            try:
                group = peers.group_id(seen.group)
                self._server.rules = self._server.rules._replace(group=group)
                await self._measure(seen.metrics_port)
            except DaemonError as error:
                _log.error("not all was reloaded: %s", error.message)

    async def _measure(self, port: int | None) -> None:
        """Have the metrics on this port, and on no other."""
        if port == self._port:
            return
        await self._held.aclose()
        self._port = None
        if port is not None:
            await self._held.enter_async_context(
                _site(self._server.metrics_app, _on_loopback(port))
            )
            self._port = port


def _on_loopback(port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(64)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise DaemonError(
            f"the port {port} of 127.0.0.1 cannot be had: {(error.strerror or str(error)).lower()}",
            hint="set `metrics_port` to a free one, or to none",
        ) from error
    return listening
