"""What is answered to who may change something: a job that does it.

Invariant: what reaches a command line was checked by the same parsers that the command has, and
each value is part of its option's word, so that none is taken for an option.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from tlcache import targets
from tlcache.daemon.api import Asked, Refused
from tlcache.daemon.children import Work
from tlcache.daemon.jobs import Jobs, QueueFull
from tlcache.daemon.reading import answer, the_job
from tlcache.daemon.served import Served
from tlcache.store import select
from tlcache.store.prune import Policy
from tlcache.warm import shapes

__all__ = ["Changing", "Prune", "Verify", "checked_shapes"]

_COMPILE_SECONDS = 900


Text = Annotated[StrictStr, Field(max_length=500)]
Span = Annotated[Text, Field(pattern=r"^\d+(\.\d+)?\s*(s|min|h|d|w)$", examples=["30d", "12h"])]
Size = Annotated[
    Text,
    Field(
        pattern=r"^\d+(\.\d+)?\s*(|[BKMGTbkmgt]|[KMGTkmgt][Ii]?[Bb])$", examples=["5GiB", "200M"]
    ),
]
Several = Annotated[list[Text], Field(max_length=100)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    root: Text | None = Field(None, description="The root; needed where several are watched.")


class Prune(_Request):
    """What `tlcache prune` takes. Nothing is deleted unless `dry_run` is false."""

    target: Several = Field(default_factory=list, description="Kernels for these targets.")
    op: Several = Field(default_factory=list, description="Kernels of these operators.")
    kernel: Several = Field(default_factory=list, description="Kernels named so, like rms_*.")
    tilelang: Text | None = Field(None, description="Written by these, like <0.1.14.")
    toolkit: Text | None = Field(None, description="Compiled by this nvcc, like 13.0.")
    older_than: Span | None = Field(None, description="Written so long ago.")
    unused_for: Span | None = Field(None, description="Not used for so long.")
    larger_than: Size | None = Field(None, description="At least so large.")
    no_record: StrictBool = Field(False, description="Kernels that have no record.")
    max_size: Size | None = Field(None, description="Come down to so many bytes on disk.")
    keep_last: Annotated[StrictInt, Field(ge=0, le=10**9)] | None = Field(
        None, description="Keep so many of each kernel and target."
    )
    duplicates: StrictBool = Field(False, description="Kernels that differ by their key only.")
    orphans: StrictBool = Field(False, description="What belongs to no kernel.")
    stale_versions: StrictBool = Field(False, description="What other TileLang versions wrote.")
    offline: StrictBool = Field(False, description="No other host uses the root.")
    dry_run: StrictBool = Field(True, description="Say what would go, and delete nothing.")


class Verify(_Request):
    """What `tlcache verify` takes."""

    repair: StrictBool = Field(False, description="Put what is broken into quarantine.")


def checked_shapes(document: Any) -> shapes.Shapes:
    """A shapes document.

    Raises:
        ShapesError: It is none.
    """
    return shapes.checked(document, "the document")


class Changing:
    """The handlers of what changes something.

    Args:
        service: Whose roots.
        jobs: Who does it.
    """

    def __init__(self, service: Served, jobs: Jobs) -> None:
        self._service, self._jobs = service, jobs

    async def warm(self, asked: Asked) -> web.Response:
        spelled = dict.fromkeys(asked.query["target"])
        for one in spelled:
            targets.parse(one)
        shapes.targets(asked.body, "the document")
        options = [f"--target={one}" for one in spelled]
        options.append(f"--timeout={_COMPILE_SECONDS}")
        # Spelled in one way, so that who writes the same otherwise has the same job.
        text = json.dumps(json.loads(asked.raw), sort_keys=True)
        return await self._done("warm", asked, asked.query["root"], options, text)

    async def prune(self, asked: Asked) -> web.Response:
        body: Prune = asked.body
        options = list(_options(body))
        if not _policy(body):
            raise Refused(
                400,
                "nothing says what to prune",
                'like {"unused_for": "30d"}, which shows what that would delete',
            )
        options.append("--dry-run" if body.dry_run else "--yes")
        return await self._done("prune", asked, body.root, options)

    async def verify(self, asked: Asked) -> web.Response:
        body: Verify = asked.body
        return await self._done("verify", asked, body.root, ["--repair"] if body.repair else [])

    async def cancel(self, asked: Asked) -> web.Response:
        job = the_job(self._jobs, asked.request.match_info["id"])
        self._jobs.cancel(job)
        return answer({"job": job.as_json()}, 200 if job.over.done() else 202)

    async def _done(
        self,
        kind: str,
        asked: Asked,
        root: str | None,
        options: Iterable[str],
        document: str | None = None,
    ) -> web.Response:
        work = Work(kind, self._root(root), tuple(options), document)
        try:
            job = self._jobs.submit(work)
        except QueueFull:
            raise Refused(503, "there are too many jobs already", "ask again later") from None
        if asked.query["wait"]:
            over = asyncio.wrap_future(job.over)
            await asyncio.wait({over}, timeout=asked.query["wait"])
        told = answer({"job": job.as_json()}, 200 if job.over.done() else 202)
        told.headers["Location"] = f"/v1/jobs/{job.id}"
        return told

    def _root(self, given: str | None) -> str:
        roots = [one.root for one in self._service.followers]
        if given is None and len(roots) == 1:
            return roots[0]
        if given not in roots:
            told = "no root is named" if given is None else f"{given[:200]!r} is no watched root"
            raise Refused(400, told, f"`root` is one of {', '.join(roots)}")
        return given


_LISTS = ("target", "op", "kernel")
_VALUES = ("tilelang", "toolkit", "older_than", "unused_for", "larger_than", "max_size")
_FLAGS = ("no_record", "duplicates", "orphans", "stale_versions", "offline")


def _options(body: Prune) -> Iterator[str]:
    for name in _LISTS:
        yield from (f"--{name}={value}" for value in getattr(body, name))
    for name in (*_VALUES, "keep_last"):
        if (value := getattr(body, name)) is not None:
            yield f"--{name.replace('_', '-')}={value}"
    yield from (f"--{name.replace('_', '-')}" for name in _FLAGS if getattr(body, name))


def _policy(body: Prune) -> Policy:
    """What the command will make of it.

    Raises:
        UsageError: Something in it means nothing.
    """
    wanted = select.Filter(
        targets=tuple(body.target),
        ops=tuple(body.op),
        kernels=tuple(body.kernel),
        tilelang=body.tilelang,
        toolkit=body.toolkit,
        older_than=select.age(body.older_than) if body.older_than is not None else None,
        unused_for=select.age(body.unused_for) if body.unused_for is not None else None,
        larger_than=select.bytes_of(body.larger_than) if body.larger_than is not None else None,
        no_record=body.no_record,
    )
    largest = select.bytes_of(body.max_size) if body.max_size is not None else None
    return Policy(
        wanted, largest, body.keep_last, body.duplicates, body.orphans, body.stale_versions
    )
