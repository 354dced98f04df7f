"""The daemon's parts put together: what follows the roots, bounds them, keeps figures, and asks the
agents; and what it says of all that.

Invariant: each root has one follower, and no thread of one part waits for another's: a root that
hangs, or an agent that is silent, takes nothing else along.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from datetime import datetime, timezone
from typing import Any

from tlcache import __version__, agents, readings
from tlcache.agents import Answer
from tlcache.daemon import history, root, tally
from tlcache.daemon.bounds import Bounds, Limits
from tlcache.daemon.broadcast import Broadcast
from tlcache.daemon.follow import Follower
from tlcache.daemon.history import History
from tlcache.daemon.index import Index
from tlcache.daemon.single import Claim
from tlcache.errors import DaemonError
from tlcache.settings import Settings

__all__ = ["Service"]

_log = logging.getLogger(__name__)

_STEP = 0.5
_SAMPLES = 10.0
_HUNG = 60.0


class Service:
    """The daemon without its socket.

    Args:
        settings: What to do.

    Attributes:
        index: What is at the roots.
        bounds: How they stand.
        history: The counters and samples.
        events: What happens.
        started: When it was started, in seconds since 1970.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.started = time.time()
        self.events = Broadcast()
        self.index = Index(self.events)
        self.history = History(os.fspath(settings.history))
        self.bounds = Bounds(self.index, self.events, self.history, _limits(settings))
        self._followers: dict[str, Follower] = {}
        self._answers: list[Answer] = []
        self._stopping = threading.Event()
        self._beat = time.monotonic()
        self._figures = threading.Thread(target=self._run, name="figures", daemon=True)

    # --- life ---

    @property
    def followers(self) -> list[Follower]:
        """What follows the roots."""
        return list(self._followers.values())

    def start(self) -> None:
        """Begin; it is there once `ready` says so.

        Raises:
            DaemonError: Another daemon watches one of the roots.
        """
        try:
            claims = _claimed(_paths(self.settings))
        except DaemonError:
            self.history.close()
            raise
        for path, claim in claims.items():
            self._follow(path, claim)
        self.bounds.watch(self.followers)
        self.bounds.start()
        self._figures.start()

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether the index has what there is, once it was waited for it so long."""
        deadline = time.monotonic() + timeout
        left = (max(0.0, deadline - time.monotonic()) for _ in self.followers)
        return all(
            one.ready.wait(seconds) for one, seconds in zip(self.followers, left, strict=True)
        )

    def reload(self, settings: Settings) -> None:
        """Do as other settings say from now on. The history's file stays.

        Raises:
            DaemonError: Another daemon watches one of the new roots; then nothing is changed.
        """
        paths = _paths(settings)
        claims = _claimed([path for path in paths if path not in self._followers])
        for path in [path for path in self._followers if path not in paths]:
            follower = self._followers.pop(path)
            follower.stop()
            follower.join(5.0)
            self.index.forget(path)
        for path, claim in claims.items():
            self._follow(path, claim)
        self.settings = settings
        self.bounds.limits = _limits(settings)
        self.bounds.watch(self.followers)

    def stop(self, timeout: float = 2.0) -> bool:
        """End; figures are written first.

        Args:
            timeout: Seconds after which it is not waited for what has not ended. That is nothing
                that may not be killed: reading, and deleting what is in the trash already.

        Returns:
            Whether everything has ended.
        """
        deadline = time.monotonic() + timeout
        parts: list[Follower | Bounds] = [self.bounds, *self.followers]
        self._stopping.set()
        for part in parts:
            part.stop()
        self.history.flush()
        ended = [part.join(max(0.0, deadline - time.monotonic())) for part in parts]
        self._figures.join(max(0.0, deadline - time.monotonic()))
        self.history.close()
        return all(ended) and not self._figures.is_alive()

    def _follow(self, path: str, claim: Claim) -> None:
        self._followers[path] = follower = Follower(path, self.index, self.events, claim)
        follower.start()

    # --- figures ---

    def _run(self) -> None:
        asked = written = sampled = float("-inf")
        while not self._stopping.wait(_STEP):
            self._beat = now = time.monotonic()
            try:
                if now - asked >= self.settings.interval:
                    asked = now
                    self._ask()
                if now - sampled >= _SAMPLES and self.ready():
                    sampled = now
                    self.history.sample(self._sample())
                if now - written >= history.EVERY:
                    written = now
                    self.history.flush()
            except Exception:
                _log.exception("figures could not be gathered")

    def _ask(self) -> None:
        """Ask the agents, and add what they have counted."""
        self._answers, troubles = agents.everywhere()
        for trouble in troubles:
            _log.debug("agents are not asked: %s", trouble.message)
        for answer in self._answers:
            if answer.document is not None:
                reading = readings.read(answer.document, answer.pid)
                self.history.tally(tally.source(reading), tally.counted(reading))

    def agents(self) -> list[Answer]:
        """What the agents of this host's processes answered lately, `/v1/stats` each."""
        return self._answers

    def _sample(self) -> dict[str, float]:
        figures: dict[str, float] = {"agents": len(self._answers), "entries": 0, "bytes": 0}
        for total in self.index.totals().values():
            figures["entries"] += total.entries
            figures["bytes"] += total.bytes
        for counter, value in self.history.counters().items():
            labels = dict(counter.labels)
            name = counter.name + (f"_{labels['outcome']}" if "outcome" in labels else "")
            if labels.get("layer", "1") == "1":
                figures[name] = figures.get(name, 0.0) + value
        return figures

    # --- what it says ---

    @property
    def alive(self) -> bool:
        """Whether its own threads go on; a root's may hang with its file system."""
        return time.monotonic() - self._beat < _HUNG

    def health(self) -> dict[str, Any]:
        """Whether all is as it should be: `{"status", "checks": [{"name", "status", "detail"}]}`,
        each `ok`, `degraded` or `failing`.
        """
        checks = [_root_check(one, bool(self.bounds.limits)) for one in self.followers]
        for bound in self.bounds.roots:
            told = bound.refused or bound.over
            if self.bounds.limits:
                detail = told or _size(bound.bytes)
                if not told and bound.unknown:
                    detail += f"; processes whose kernels cannot be seen: {bound.unknown}"
                name = f"bounds {bound.follower.root}"
                checks.append(_check(name, "degraded" if told else "ok", detail))
        trouble = self.history.trouble
        checks.append(_check("history", "degraded" if trouble else "ok", trouble or "is written"))
        silent = [one for one in self._answers if one.document is None]
        said = f"{len(self._answers)} asked" + (f", {len(silent)} silent" if silent else "")
        checks.append(_check("agents", "ok", said))
        if not self.alive:
            checks.append(_check("figures", "failing", "have not been gathered for a minute"))
        worst = max((one["status"] for one in checks), key=_SEVERITY.index)
        return {"status": worst, "checks": checks}

    def stats(self) -> dict[str, Any]:
        """Roots, totals and counters, as JSON can say them."""
        bounds = {one.follower.root: one for one in self.bounds.roots}
        totals = self.index.totals()
        return {
            "daemon": {
                "pid": os.getpid(),
                "version": __version__,
                "started": _iso(self.started),
                "uptime_seconds": round(time.time() - self.started, 3),
            },
            "generation": self.index.generation,
            "roots": [
                {
                    "root": one.root,
                    "up": one.state.identity is not None,
                    "reason": one.state.reason,
                    "watched": "polling" if one.polling else "inotify",
                    "read_only": one.state.read_only,
                    "entries": sum(t.entries for g, t in totals.items() if g.root == one.root),
                    "bytes": sum(t.bytes for g, t in totals.items() if g.root == one.root),
                    "bytes_on_disk": bounds[one.root].bytes if one.root in bounds else None,
                    "free": _free(one.root),
                    "watches": one.watches,
                    "scans": one.scans,
                    "scan_seconds": round(one.scan_seconds, 6),
                    "overflows": one.overflows,
                }
                for one in self.followers
            ],
            "limits": self.bounds.limits._asdict(),
            "totals": [{**g._asdict(), **t._asdict()} for g, t in sorted(totals.items())],
            "counters": [
                {"name": one.name, "labels": dict(one.labels), "value": value}
                for one, value in sorted(self.history.counters().items())
            ],
            "agents": len(self._answers),
        }


_SEVERITY = ("ok", "degraded", "failing")


def _check(name: str, status: str, detail: str) -> dict[str, str]:
    return {"name": name, "status": status, "detail": detail}


def _root_check(one: Follower, bounded: bool) -> dict[str, str]:
    name, state = f"root {one.root}", one.state
    if state.identity is None:
        return _check(name, "failing", state.reason or "is not there")
    if time.monotonic() - one.beat > _HUNG:
        return _check(name, "failing", "its file system has not answered for a minute")
    if one.trouble is not None:
        return _check(name, "degraded", one.trouble)
    if one.unreadable:
        some = min(one.unreadable, default="")
        count = f"{len(one.unreadable):,} things" if len(one.unreadable) > 1 else "1 thing"
        return _check(name, "degraded", f"{count} cannot be read, such as {some}")
    if state.read_only:
        return _check(name, "degraded" if bounded else "ok", "is read-only")
    if one.polling is not None:
        return _check(name, "ok", f"is scanned now and then: {one.polling}")
    return _check(name, "ok", f"is watched by inotify, {one.watches} directories")


def _size(bytes_: int | None) -> str:
    return "has not been measured yet" if bytes_ is None else f"{bytes_:,} bytes on disk at most"


def _limits(settings: Settings) -> Limits:
    return Limits(settings.max_size, settings.max_age, settings.keep_free)


def _paths(settings: Settings) -> list[str]:
    return list(dict.fromkeys(os.path.abspath(one) for one in settings.roots))


def _claimed(paths: list[str]) -> dict[str, Claim]:
    """The right to watch each of these roots that is there."""
    claims: dict[str, Claim] = {}
    try:
        for path in paths:
            claims[path] = Claim(path)
            state = root.look(path)
            if state.identity is not None:
                claims[path].take(state.identity)
    except DaemonError:
        for claim in claims.values():
            claim.release()
        raise
    return claims


def _free(path: str) -> int | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
