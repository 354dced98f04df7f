"""`tlcache stats`: what the agents of this host say of their processes, or one process of
itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

from tlcache import agents, readings
from tlcache.advice import advise
from tlcache.agents import Answer, Found
from tlcache.cli import options, render, view
from tlcache.cli.overview import overview, since_ready
from tlcache.cli.single import single
from tlcache.cli.view import View
from tlcache.readings import Incident, Rates, Reading

__all__ = ["EVERY", "command", "common", "run"]

EVERY = 2.0
"""Seconds from one look to the next, where nobody says."""


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that `stats` and `top` have in common."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS = (
    click.option(
        "--pid",
        type=click.IntRange(1, 2**31 - 1),
        metavar="PID",
        help="One process, layer by layer; without an agent, what is seen of it from outside.",
    ),
    click.option(
        "--since-ready",
        "late",
        is_flag=True,
        help="Only what processes had to do after they were ready.",
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0, max=60, min_open=True),
        default=agents.DEADLINE,
        show_default=True,
        metavar="SECONDS",
        help="How long an agent has to answer.",
    ),
    options.json_output,
)


@click.command("stats")
@common
@click.option(
    "--watch",
    "every",
    type=click.FloatRange(min=0.1, max=86400),
    metavar="[SECONDS]",
    is_flag=False,
    flag_value=EVERY,
    help=f"Look again every so often ({EVERY:g} s), and show rates; with --json, a line each time.",
)
def command(
    pid: int | None, late: bool, timeout: float, json_wanted: bool, every: float | None
) -> int:
    """Show what running processes do with their kernels.

    Each process with an agent says so itself: TLCACHE_AGENT=1 or `tlcache run` gives it one.
    """
    return run(pid, late, timeout, json_wanted, every)


def run(pid: int | None, late: bool, timeout: float, json_wanted: bool, every: float | None) -> int:
    """Look once, or again and again where `every` says how often; the exit code."""
    look = _Look(pid, late, timeout)
    if every is not None:
        from tlcache.cli import live

        if json_wanted:
            live.stream(every, look.document)
        else:
            live.watch(every, lambda: look.view(live=True))
    elif json_wanted:
        render.emit_json(look.document())
    else:
        view.write(look.view())
    return 0


class _Look:
    """One look at the processes after the other; it remembers the last one, for rates."""

    def __init__(self, pid: int | None, late: bool, timeout: float) -> None:
        self._pid, self._late, self._timeout = pid, late, timeout
        self._before: dict[int, Reading] = {}
        self._when = 0.0

    def view(self, live: bool = False) -> View:
        """What there is to be seen now."""
        answers, told = self._asked()
        found = [readings.read(one.document, one.pid) for one in answers if one.document]
        silent = [one for one in answers if one.document is None]
        rates = self._rates(found)
        if self._pid is not None and not found:
            from tlcache.cli import outside

            return outside.view(self._pid, silent)
        groups = readings.grouped(found)
        if not answers:
            shown = View(foot=["no process here has an agent"], hints=[_START])
        elif self._late:
            shown = since_ready(groups, silent)
        elif self._pid is not None:
            shown = single(found[0], self._failures(), rates.get(self._pid), live)
        else:
            shown = overview(groups, silent, rates if live else None)
        shown.hints += told
        return shown

    def document(self) -> dict[str, Any]:
        """The same as a JSON document."""
        answers, told = self._asked()
        found = [readings.read(one.document, one.pid) for one in answers if one.document]
        if self._pid is not None and not found:
            from tlcache.cli import outside

            return outside.document(self._pid, answers)
        groups = readings.grouped(found)
        return {
            "processes": [self._told(one) for one in answers],
            "groups": [
                {"name": group.name, "pids": [one.process.pid for one in group.readings]}
                for group in groups
                if group.name
            ],
            "advice": [
                dataclasses.asdict(advice) for group in groups for advice in advise(group.readings)
            ],
            "notes": told,
        }

    def _told(self, answer: Answer) -> dict[str, Any]:
        told = {"pid": answer.pid, "socket": answer.socket, "trouble": answer.trouble}
        stats = dict(answer.document or {})
        stats.pop("schema", None)
        if self._late and answer.document:
            late = readings.read(answer.document, answer.pid)
            stats.pop("layers", None)
            stats["after_ready"] = late.compile.after_ready
        return {**told, **stats}

    def _asked(self) -> tuple[list[Answer], list[str]]:
        found, troubles = agents.find()
        path = "/v1/stats"
        told = [f"note: {error}" for error in troubles]
        if self._pid is None:
            answers = agents.gather(found, path, seconds=self._timeout)
            if not answers and troubles:
                raise troubles[0]
            return answers, told
        return self._mine(found, path), []

    def _mine(self, found: list[Found], path: str) -> list[Answer]:
        """The answer of the one process. Its directory may be another one, and in a container its
        socket has another number.
        """
        assert self._pid is not None
        likely = [one for one in found if one.address.pid == self._pid]
        for some in (likely, agents.named(self._pid), found):
            answers = agents.gather(some, path, seconds=self._timeout)
            if mine := [one for one in answers if one.pid == self._pid]:
                return mine[:1]
        return []

    def _failures(self) -> list[Incident]:
        """The kernels that the one process could not have, before it was ready, too."""
        answers = self._mine(agents.find()[0], "/v1/events")
        events = [one.document.get("events") for one in answers if one.document]
        return [one for some in events for one in readings.incidents(some) if one.kind == "failed"]

    def _rates(self, found: Sequence[Reading]) -> dict[int, Rates]:
        now = time.monotonic()
        rates = {
            one.process.pid: rate
            for one in found
            if (rate := readings.rates(self._before.get(one.process.pid), one, now - self._when))
        }
        self._before, self._when = {one.process.pid: one for one in found}, now
        return rates


_START = (
    "hint: `TLCACHE_AGENT=1` in a process's environment gives it one, and so does "
    "`tlcache run -- python serve.py`; `tlcache stats --pid PID` looks at one without"
)
