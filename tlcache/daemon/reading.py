"""What is answered to who only reads: entries, figures, processes, the version key, jobs.

Invariant: nothing here changes anything. What is asked for often is made once for all; what takes
longer is made in a thread, and by few at a time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from aiohttp import web

from tlcache import readings, version_key
from tlcache.advice import advise
from tlcache.daemon import listing
from tlcache.daemon.api import Asked, Refused
from tlcache.daemon.cached import Cached
from tlcache.daemon.jobs import Job, Jobs
from tlcache.daemon.metrics import CONTENT_TYPE, Metrics
from tlcache.daemon.served import Served
from tlcache.errors import UsageError
from tlcache.store import described

__all__ = ["Reading", "answer", "the_job"]

_T = TypeVar("_T")
_KEYS = 16
_KEY_LASTS = 60.0


def answer(document: dict[str, Any], status: int = 200) -> web.Response:
    """A document as an answer."""
    return web.Response(status=status, body=_bytes(document), content_type="application/json")


def _bytes(document: dict[str, Any]) -> bytes:
    return json.dumps({"schema": 1, **document}, separators=(",", ":")).encode()


def the_job(jobs: Jobs, name: str) -> Job:
    """A job by its id.

    Raises:
        Refused: There is none.
    """
    job = jobs.get(name)
    if job is None:
        raise Refused(404, f"there is no job {name[:40]!r}", "GET /v1/jobs lists them")
    return job


class Reading:
    """The handlers of what can be read.

    Args:
        service: Whose figures.
        jobs: Whose jobs.
        executor: Where what takes longer is made.
    """

    def __init__(self, service: Served, jobs: Jobs, executor: Executor) -> None:
        self._service, self._jobs, self._executor = service, jobs, executor
        self._metrics = Cached(Metrics(service, jobs).text, executor)
        self._stats = Cached(self._made_stats, executor)
        self._health = Cached(lambda: json.dumps(service.health()).encode(), executor)
        self._processes = Cached(self._made_processes, executor)
        self._keys: dict[str | None, tuple[float, dict[str, Any]]] = {}

    async def _aside(self, make: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, make)

    # --- entries ---

    async def entries(self, asked: Asked) -> web.Response:
        query = asked.query
        wanted = listing.filtered(query)
        kinds = query["kind"] or (() if query["all"] else ("kernel",))
        if query["root"] is not None and query["root"] not in self._roots():
            raise Refused(400, f"{query['root'][:200]!r} is no watched root", self._these_roots())

        def make() -> bytes:
            generation = self._service.index.generation
            found = self._service.index.entries(wanted, query["root"])
            page = listing.page(found, query["sort"], query["limit"], query["cursor"], kinds)
            return _bytes(
                {
                    "entries": [described.as_json(one) for one in page.entries],
                    "next": page.next,
                    "totals": {"entries": page.total, "bytes": page.bytes},
                    "generation": generation,
                }
            )

        return web.Response(body=await self._aside(make), content_type="application/json")

    async def entry(self, asked: Asked) -> web.Response:
        key = asked.request.match_info["key"]
        try:
            found = await self._aside(lambda: self._service.index.get(key))
        except UsageError as error:
            raise Refused(404, error.message, "GET /v1/entries lists the keys") from error
        return answer({"entry": described.as_json(found)})

    def _roots(self) -> list[str]:
        return [one.root for one in self._service.followers]

    def _these_roots(self) -> str:
        return f"there are {', '.join(self._roots())}"

    # --- figures ---

    async def stats(self, asked: Asked) -> web.Response:
        return web.Response(body=await self._stats.get(), content_type="application/json")

    def _made_stats(self) -> bytes:
        return _bytes({**self._service.stats(), "jobs": {"kernels": self._jobs.kernels()}})

    async def metrics(self, asked: Asked) -> web.Response:
        return web.Response(body=await self._metrics.get(), headers={"Content-Type": CONTENT_TYPE})

    async def health(self, asked: Asked) -> web.Response:
        health = json.loads(await self._health.get())
        return answer(health, 503 if health["status"] == "failing" else 200)

    async def processes(self, asked: Asked) -> web.Response:
        return web.Response(body=await self._processes.get(), content_type="application/json")

    def _made_processes(self) -> bytes:
        """What `tlcache stats --json` says."""
        answers = self._service.agents()
        found = [readings.read(one.document, one.pid) for one in answers if one.document]
        groups = readings.grouped(found)
        told = []
        for one in answers:
            stats = dict(one.document or {})
            stats.pop("schema", None)
            told.append({"pid": one.pid, "socket": one.socket, "trouble": one.trouble, **stats})
        return _bytes(
            {
                "processes": told,
                "groups": [
                    {"name": group.name, "pids": [one.process.pid for one in group.readings]}
                    for group in groups
                    if group.name
                ],
                "advice": [
                    dataclasses.asdict(one) for group in groups for one in advise(group.readings)
                ],
            }
        )

    # --- the version key ---

    async def key(self, asked: Asked) -> web.Response:
        target = asked.query["target"]
        when, known = self._keys.get(target, (0.0, {}))
        if not known or time.monotonic() - when > _KEY_LASTS:
            known = await self._aside(lambda: _described(target))
            if len(self._keys) >= _KEYS:
                self._keys.clear()
            self._keys[target] = (time.monotonic(), known)
        return answer(known)

    # --- jobs ---

    async def jobs(self, asked: Asked) -> web.Response:
        return answer({"jobs": [one.as_json(whole=False) for one in self._jobs.all()]})

    async def job(self, asked: Asked) -> web.Response:
        return answer({"job": the_job(self._jobs, asked.request.match_info["id"]).as_json()})


def _described(target: str | None) -> dict[str, Any]:
    from tlcache import targets

    parsed = targets.parse(target) if target is not None else None
    return version_key.describe(parsed).to_json()
