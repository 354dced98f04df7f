"""Everything that the daemon can be asked for, in one table: the server and the OpenAPI document
are both made of it.
"""

from __future__ import annotations

from tlcache.daemon import schemas
from tlcache.daemon.api import Answer, Handler, Parameter, Route, Schema
from tlcache.daemon.changing import Changing, Prune, Verify, checked_shapes
from tlcache.daemon.listing import SORTS
from tlcache.daemon.reading import Reading
from tlcache.daemon.stream import Stream
from tlcache.warm.shapes import Shapes

__all__ = ["routes"]

_TEXT = {"type": "string", "minLength": 1, "maxLength": 500}
_SPAN = {"type": "string", "pattern": r"^\d+(\.\d+)?(s|min|h|d|w)$", "examples": ["30d"]}
_SIZE = {
    "type": "string",
    "pattern": r"^\d+(\.\d+)?(|[BKMGTbkmgt]|[KMGTkmgt][Ii]?[Bb])$",
    "examples": ["1MiB"],
}
_TARGET = {**_TEXT, "examples": ["sm90", "sm_90a", "cpu"]}
_FLAG = {"type": "boolean"}
_FILTERS = (
    Parameter("target", _TARGET, "Only for this target; sm90 is sm_90 and sm_90a, too.", True),
    Parameter("op", _TEXT, "Only kernels of this operator.", True),
    Parameter("kernel", _TEXT, "Only kernels named so, like rms_*.", True),
    Parameter("tilelang", {**_TEXT, "examples": ["<0.1.14"]}, "Only written by these versions."),
    Parameter("toolkit", {**_TEXT, "examples": ["13.0"]}, "Only compiled by this nvcc."),
    Parameter("older_than", _SPAN, "Only written so long ago, like 30d."),
    Parameter("unused_for", _SPAN, "Only not used for so long, like 14d."),
    Parameter("larger_than", _SIZE, "Only at least so large, like 1MiB."),
    Parameter("no_record", _FLAG, "Only kernels that have no record.", default=False),
)
_LISTING = (
    *_FILTERS,
    Parameter("root", _TEXT, "Only of this root."),
    Parameter("kind", _TEXT, "Only things of this kind; by default, kernels.", True),
    Parameter("all", _FLAG, "Also what is no kernel.", default=False),
    Parameter("sort", {"type": "string", "enum": list(SORTS)}, "The order.", default="key"),
    Parameter(
        "limit",
        {"type": "integer", "minimum": 1, "maximum": 500},
        "So many entries at most.",
        default=100,
    ),
    Parameter("cursor", {"type": "string", "maxLength": 8000}, "`next` of the page before."),
)
_WAIT_SCHEMA = {"type": "number", "minimum": 0, "maximum": 25}
_WAIT = Parameter("wait", _WAIT_SCHEMA, "Seconds to wait for the job's end.", default=10.0)
_NO_WAIT = Parameter("wait", _WAIT_SCHEMA, "Seconds to wait for the job's end.", default=0.0)
_KEY = Parameter("key", _TEXT, "A key, a record's action key, or how one of them begins.")
_JOB = Parameter("id", _TEXT, "A job's id.")
_DONE = {
    200: Answer("The job has ended; `state` says how.", schemas.JOB),
    202: Answer("The job is waiting or running: ask for it by its id.", schemas.JOB),
}


def routes(reading: Reading, changing: Changing, stream: Stream) -> tuple[Route, ...]:
    """The table, with who answers."""

    def read(path: str, name: str, what: str, handler: Handler, schema: Schema) -> Route:
        return Route("GET", path, name, what, handler, {200: Answer("It.", schema)}, seconds=None)

    return (
        Route(
            "GET",
            "/v1/entries",
            "entries",
            "A page of the entries, filtered as `tlcache ls` does.",
            reading.entries,
            {200: Answer("A page; `next` is the cursor of the one after it.", schemas.ENTRIES)},
            _LISTING,
        ),
        Route(
            "GET",
            "/v1/entries/{key}",
            "entry",
            "One entry.",
            reading.entry,
            {200: Answer("The entry.", schemas.ENTRY)},
            parts={"key": _KEY},
        ),
        read("/v1/stats", "stats", "Roots, totals and counters.", reading.stats, schemas.STATS),
        read(
            "/v1/processes",
            "processes",
            "What the agents of this host's processes said last, as `tlcache stats` has it.",
            reading.processes,
            schemas.PROCESSES,
        ),
        Route(
            "GET",
            "/v1/key",
            "key",
            "The version key of the daemon's environment, and what it is made of.",
            reading.key,
            {200: Answer("The key.", schemas.KEY)},
            (Parameter("target", _TARGET, "What it compiles for; by default the GPU here."),),
        ),
        Route(
            "GET",
            "/v1/events",
            "events",
            "What happens, as server-sent events, until the client leaves.",
            stream.follow,
            {200: Answer("Events without end.", None, "text/event-stream")},
            (
                Parameter(
                    "since",
                    {"type": "integer", "minimum": 0, "maximum": 2**53},
                    "Also those kept after this id; as the header Last-Event-ID.",
                ),
                Parameter("kind", _TEXT, "Only events of this kind.", True),
            ),
            seconds=None,
        ),
        read("/v1/jobs", "jobs", "The jobs, the newest first.", reading.jobs, schemas.JOBS),
        Route(
            "GET",
            "/v1/jobs/{id}",
            "job",
            "A job: how far it is, and what came of it.",
            reading.job,
            {200: Answer("The job.", schemas.JOB)},
            parts={"id": _JOB},
        ),
        Route(
            "GET",
            "/metrics",
            "metrics",
            "The metrics, as Prometheus reads them.",
            reading.metrics,
            {200: Answer("The metrics.", None, "text/plain")},
            seconds=None,
        ),
        Route(
            "GET",
            "/healthz",
            "health",
            "Whether all is as it should be.",
            reading.health,
            {
                200: Answer("It is, or nearly.", schemas.HEALTH),
                503: Answer("It is not.", {"anyOf": [schemas.HEALTH, schemas.ERROR]}),
            },
            seconds=None,
        ),
        Route(
            "POST",
            "/v1/warm",
            "warm",
            "Have the kernels of a shapes document compiled.",
            changing.warm,
            _DONE,
            (
                Parameter(
                    "target", _TARGET, "What to compile for; wins over the document's.", True
                ),
                Parameter("root", _TEXT, "The root; needed where several are watched."),
                _NO_WAIT,
            ),
            body=Shapes,
            check=checked_shapes,
            changes=True,
        ),
        Route(
            "POST",
            "/v1/prune",
            "prune",
            "Delete what a policy names, or by default say what that would be.",
            changing.prune,
            _DONE,
            (_WAIT,),
            body=Prune,
            changes=True,
        ),
        Route(
            "POST",
            "/v1/verify",
            "verify",
            "Check every file of a root.",
            changing.verify,
            _DONE,
            (_WAIT,),
            body=Verify,
            changes=True,
        ),
        Route(
            "DELETE",
            "/v1/jobs/{id}",
            "cancel",
            "End a job.",
            changing.cancel,
            {
                200: Answer("It has ended.", schemas.JOB),
                202: Answer("It is being ended.", schemas.JOB),
            },
            parts={"id": _JOB},
            changes=True,
        ),
    )
