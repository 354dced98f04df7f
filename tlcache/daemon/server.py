"""The daemon's application: HTTP/1.1 and JSON, for those who may ask.

Invariant: whatever is asked, the loop goes on: requests, bodies and time are bounded, and what
takes long is done in a thread or in a child. An answer that is no success is JSON that says why,
and what to do.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from os import geteuid

from aiohttp import web

from tlcache.daemon import openapi, peers
from tlcache.daemon.api import Asked, Refused, Route, read_body, read_query
from tlcache.daemon.changing import Changing
from tlcache.daemon.guard import Guard, failure
from tlcache.daemon.jobs import Jobs
from tlcache.daemon.peers import Caller, Rules
from tlcache.daemon.reading import Reading
from tlcache.daemon.routes import routes
from tlcache.daemon.served import Served
from tlcache.daemon.stream import Stream
from tlcache.errors import EnvironmentFault, TlcacheError, UsageError

__all__ = ["BODY", "IN_FLIGHT", "Server"]

_log = logging.getLogger(__name__)

BODY = 2**20
"""Bytes of a body, at most."""

IN_FLIGHT = 64
"""Requests that are answered at a time, at most, besides those that listen to events."""

_BODY_SECONDS = 5.0
_THREADS = 4
_CHILDREN_ENDING = 6.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """The applications of a daemon.

    Args:
        service: The daemon.
        open_to_all: Answer everybody everything, for tests over TCP, where nobody can be told.

    Attributes:
        jobs: What was asked to be done.
        app: All routes, for the unix socket.
        metrics_app: The metrics alone, for TCP.
        rules: Who may what.
    """

    def __init__(self, service: Served, *, open_to_all: bool = False) -> None:
        self.jobs = Jobs(service.events)
        self.rules = Rules(geteuid(), peers.group_id(service.settings.group))
        self._open_to_all = open_to_all
        self._in_flight = 0
        self._executor = ThreadPoolExecutor(_THREADS, "answers")
        self._stream = Stream(service.events)
        reading = Reading(service, self.jobs, self._executor)
        table = routes(reading, Changing(service, self.jobs), self._stream)
        self._document = json.dumps(openapi.document(table)).encode()
        self.app = web.Application(middlewares=[self._answered], client_max_size=BODY)
        for route in table:
            self.app.router.add_route(route.method, route.path, self._handler(route))
        self.app.router.add_route("GET", "/v1/openapi.json", self._described)
        self.metrics_app = web.Application(middlewares=[_public], client_max_size=1024)
        self.metrics_app.router.add_route("GET", "/metrics", self._measured)
        self._reading = reading

    def end(self) -> None:
        """End what is going on: jobs and streams."""
        self._stream.end()
        self.jobs.stop(_CHILDREN_ENDING)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _described(self, request: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type="application/json")

    async def _measured(self, request: web.Request) -> web.StreamResponse:
        return await self._reading.metrics(Asked(request, {}))

    # --- a request ---

    def _handler(self, route: Route) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            guard = _guard(request)
            if guard is None:
                return _left()
            caller = guard.caller
            if route.changes and caller is not None and not self.rules.may_change(caller):
                raise Refused(
                    403,
                    f"uid {caller.uid} may not {route.method} {request.path}",
                    f"only uid {self.rules.owner}, which the daemon runs as, and root may",
                )
            query = read_query(route, request)
            body, raw = None, b""
            if route.body is not None:
                raw = await _received(request)
                body = read_body(route, request, raw)
            asked = Asked(request, query, body, raw, caller)
            if route.seconds is None:
                return await route.handler(asked)
            return await asyncio.wait_for(route.handler(asked), route.seconds)

        handle.__name__ = route.name
        return handle

    def _caller(self, request: web.Request, guard: Guard) -> Caller | None:
        if guard.caller is None and not self._open_to_all:
            transport = request.transport
            if transport is None:
                raise ConnectionResetError
            guard.caller = peers.caller(transport.get_extra_info("socket"))
        return guard.caller

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        guard = _guard(request)
        if guard is None:
            return _left()
        guard.working(True)
        counted = request.path != "/v1/events"
        if counted:
            self._in_flight += 1
        try:
            caller = self._caller(request, guard)
            if caller is not None and not self.rules.may_read(caller):
                raise Refused(403, f"uid {caller.uid} may not ask this daemon", self._remedy())
            if self._in_flight > IN_FLIGHT:
                raise Refused(503, f"{IN_FLIGHT} requests are being answered", "ask again")
            return await _explained(request, handler)
        except Refused as refused:
            return _refusal(refused)
        except OSError:
            return _left()
        finally:
            if counted:
                self._in_flight -= 1
            guard.working(False)

    def _remedy(self) -> str:
        if self.rules.group is None:
            return f"only uid {self.rules.owner} and root may; `group` in tlcache.toml lets more"
        return f"members of group {self.rules.group} may: `usermod -aG`, and log in again"


@web.middleware
async def _public(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What answers everybody on this machine."""
    guard = _guard(request)
    if guard is None:
        return _left()
    guard.working(True)
    try:
        return await _explained(request, handler)
    finally:
        guard.working(False)


def _guard(request: web.Request) -> Guard | None:
    """Its connection; None where the client has left."""
    transport = request.transport
    guard = transport.get_protocol() if transport is not None else None
    return guard if isinstance(guard, Guard) else None


def _left() -> web.Response:
    """An answer that nobody gets."""
    told = failure(400, "the request broke off")
    told.force_close()
    return told


async def _received(request: web.Request) -> bytes:
    try:
        return await asyncio.wait_for(request.read(), _BODY_SECONDS)
    except asyncio.TimeoutError:
        raise Refused(408, f"the body did not come within {_BODY_SECONDS:g} s") from None


async def _explained(request: web.Request, handler: Handler) -> web.StreamResponse:
    """An answer, or in JSON why there is none."""
    try:
        return await handler(request)
    except Refused as refused:
        return _refusal(refused)
    except web.HTTPMethodNotAllowed as error:
        told = failure(405, f"{request.path} has no {request.method[:20]}", "see /v1/openapi.json")
        told.headers["Allow"] = error.headers["Allow"]
        return told
    except web.HTTPRequestEntityTooLarge:
        told = failure(413, f"the body is larger than {BODY >> 10} KiB", "ask for less at a time")
        told.force_close()
        return told
    except web.HTTPException as error:
        lost = error.status == 404
        what = f"there is no {request.path[:200]}" if lost else error.reason
        return failure(error.status, what, "/v1/openapi.json lists what there is")
    except UsageError as error:
        return failure(400, error.message, error.hint)
    except EnvironmentFault as error:
        return failure(503, error.message, error.hint)
    except TlcacheError as error:
        return failure(500, error.message, error.hint)
    except asyncio.TimeoutError:
        return failure(503, f"{request.path} took too long to answer", "ask for less, or later")
    except (ConnectionError, web.RequestPayloadError):
        return _left()
    except Exception:
        _log.exception("%s %s failed", request.method, request.path)
        return failure(500, "a fault of the daemon's", "its log says more")


def _refusal(refused: Refused) -> web.Response:
    told = failure(refused.status, refused.error, refused.hint)
    if refused.status == 503:
        told.headers["Retry-After"] = "1"
    if refused.status == 408:
        told.force_close()
    return told
