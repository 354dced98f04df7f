"""What was said about this process as a whole: that it serves, that it may not compile; and which
of the ranks of a server it is.

Invariant: this is the one place that knows. Everything here is cheap enough for a miss, and nothing
of it is asked on a hit.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any, Literal, NamedTuple, cast, get_args

__all__ = ["ON_COMPILE", "ON_COMPILE_FROM", "Place", "Policy", "Process"]
__all__ += ["freeze", "mark_ready", "place", "process"]

_log = logging.getLogger(__name__)

ON_COMPILE = "TLCACHE_ON_COMPILE"
"""What a compile means: `allow`, `warn` or `error`."""

ON_COMPILE_FROM = "TLCACHE_ON_COMPILE_FROM"
"""From when on that holds: `ready`, the default, or `start`."""

Policy = Literal["allow", "warn", "error"]


class Process:
    """What was said about this process.

    Attributes:
        frozen: Nothing compiles any more; see `freeze`.
        ready_since: When it was marked ready, in seconds since the epoch, or None.
    """

    def __init__(self) -> None:
        self.frozen = False
        self.ready_since: float | None = None
        self._misunderstood: str | None = None

    @property
    def ready(self) -> bool:
        """Whether it was marked ready."""
        return self.ready_since is not None

    def on_compile(self) -> Policy:
        """What a compile means now, by the environment; `allow` before the policy holds."""
        chosen = os.environ.get(ON_COMPILE, "").strip().lower() or "allow"
        since = os.environ.get(ON_COMPILE_FROM, "").strip().lower() or "ready"
        if chosen not in get_args(Policy) or since not in ("ready", "start"):
            self._complain(chosen, since)
            return "allow"
        return cast(Policy, chosen) if self.ready or since == "start" else "allow"

    def forbids(self) -> str | None:
        """Why nothing may be compiled now, as the end of a sentence; None where it may."""
        if self.frozen:
            return "resolving is frozen"
        if self.on_compile() == "error":
            return f"{ON_COMPILE} is error"
        return None

    def _complain(self, chosen: str, since: str) -> None:
        said = (
            f"{ON_COMPILE} is {chosen!r} and {ON_COMPILE_FROM} is {since!r}; they are "
            f"{', '.join(get_args(Policy))}, and ready or start"
        )
        if said != self._misunderstood:
            self._misunderstood = said
            _log.warning("%s; compiles are allowed", said)


process = Process()


def freeze(frozen: bool = True) -> None:
    """From here on a miss anywhere is an error: nothing compiles in this process any more.

    Args:
        frozen: False lets it compile again.
    """
    process.frozen = frozen


def mark_ready(ready: bool = True) -> None:
    """Say that this process serves from here on: a compile is now an incident, which is logged as a
    warning and counted in `counters().after_ready`.

    Args:
        ready: False takes it back.
    """
    from tlcache.runtime import events

    if ready and not process.ready:
        process.ready_since = time.time()
        events.log.note("ready", "marked ready")
    elif not ready:
        process.ready_since = None


class Place(NamedTuple):
    """Which of the processes of one server this is.

    Attributes:
        rank: Its rank; None where it has none.
        world_size: How many ranks there are.
        group: What its ranks have in common and other servers do not.
    """

    rank: int | None
    world_size: int | None
    group: str | None


def place() -> Place:
    """As torch.distributed says, where it is initialized, else by the environment that launchers
    set.
    """
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    distributed: Any = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank, world = distributed.get_rank(), distributed.get_world_size()
    except (AttributeError, RuntimeError, ValueError):
        pass  # half imported, or being torn down
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if run and address and port:
        return Place(rank, world, f"{run} {address}:{port}")
    return Place(rank, world, f"pid:{os.getppid()}" if rank is not None else None)


def _number(name: str) -> int | None:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None
