"""All processes with agents in one table: what each had to do for its kernels, or what it had to do
after it was ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlcache.advice import advise
from tlcache.agents import Answer
from tlcache.cli import render
from tlcache.cli.view import View, advised
from tlcache.readings import Group, Rates, Reading, when
from tlcache.store import mapped

__all__ = ["overview", "ready", "since_ready", "up"]

_OVERVIEW = ["PID", "PROGRAM", "UP", "READY", "HITS", "RESTORED", "DISK", "COMPILED", "FAILED"]
_OVERVIEW += ["LATE", "SPENT", "SAVED", "NOTE"]
_SPEED = _OVERVIEW.index("HITS") + 1
_SPARE = ["FAILED", "SPENT", "DISK", "SAVED", "UP", "READY", "RESTORED"]


def overview(
    groups: Sequence[Group], silent: Sequence[Answer], rates: Mapping[int, Rates] | None = None
) -> View:
    """All processes, the ranks of a server below a line with their sums.

    Args:
        groups: The processes that answered.
        silent: The others.
        rates: Of each pid since the last view; None where this is the first and only one.
    """
    view = View(header=list(_OVERVIEW), spare=_SPARE)
    speeds: list[float | None] = []
    for group in groups:
        found = group.readings
        together = len(found) > 1
        each = [rates[pid].hits if rates and pid in rates else None for pid in _pids(group)]
        if together:
            view.rows.append(_sums(group))
            speeds.append(sum(speed or 0.0 for speed in each))
        view.rows += [_row(one, together) for one in found]
        speeds += each
    view.rows += [_silent(answer) for answer in silent]
    speeds += [None] * len(silent)
    if rates is not None:
        view.header.insert(_SPEED, "HITS/S")
        for row, speed in zip(view.rows, speeds, strict=True):
            row.insert(_SPEED, "–" if speed is None else f"{speed:,.0f}")
    view.right = [name for name in view.header if name not in ("PROGRAM", "READY", "NOTE")]
    count = sum(len(group.readings) for group in groups)
    servers = len(groups)
    several = f", {render.count(servers, 'server')}" if servers != count else ""
    view.foot.append(f"{render.count(count, 'agent')}{several}")
    view.hints = [
        line
        for group in groups
        for advice in advise(group.readings)
        for line in advised(advice, group.readings[0].process.name)
    ]
    return view


def _row(one: Reading, ranked: bool) -> list[str]:
    process = one.process
    name = process.name or "–"
    if ranked:
        name = f"  rank {process.rank}" if process.rank is not None else f"  {name}"
    elif process.rank is not None:
        name = f"{name} (rank {process.rank} of {process.world_size or '?'})"
    return [str(process.pid), name, up(one), ready(one), *_counts([one]), _note(one)]


def _sums(group: Group) -> list[str]:
    found = group.readings
    world = max(one.process.world_size or 0 for one in found)
    ranks = len({one.process.rank for one in found if one.process.rank is not None})
    name = f"{found[0].process.name} ({ranks} of {world or '?'} ranks)"
    those = sum(1 for one in found if one.process.ready)
    told = "all" if those == len(found) else f"{those} of {len(found)}"
    oldest = max(found, key=lambda one: one.process.uptime_seconds)
    return ["", name, up(oldest), told if those else "–", *_counts(found), ""]


def _counts(found: Sequence[Reading]) -> list[str]:
    def total(name: str) -> int:
        return sum(getattr(one.compile, name) for one in found)

    return [
        f"{sum(one.hits for one in found):,}",
        *(f"{total(name):,}" for name in ("restored", "disk", "compiled", "failed")),
        f"{total('after_ready'):,}",
        render.duration(sum(_spent(one) for one in found)),
        render.duration(sum(one.compile.saved_seconds for one in found)),
    ]


def _spent(one: Reading) -> float:
    return one.compile.restore_seconds + one.compile.compile_seconds


def _silent(answer: Answer) -> list[str]:
    command = mapped.command(answer.pid) or "–"
    blank = ["–"] * (len(_OVERVIEW) - 3)
    return [str(answer.pid), command, *blank, answer.trouble or ""]


def _pids(group: Group) -> list[int]:
    return [one.process.pid for one in group.readings]


def up(one: Reading) -> str:
    """How long a process has been there."""
    return render.duration(one.process.uptime_seconds) if one.process.started else "–"


def ready(one: Reading) -> str:
    """When it was ready."""
    process = one.process
    return f"after {render.duration(process.ready_after_seconds)}" if process.ready else "–"


def _note(one: Reading) -> str:
    thrashing = [row.factory for row in one.jit if row.thrashes]
    told = ["frozen"] if one.process.frozen else []
    told += [f"{thrashing[0]} thrashes"] if len(thrashing) == 1 else []
    told += [f"{len(thrashing)} factories thrash"] if len(thrashing) > 1 else []
    return ", ".join(told)


def since_ready(groups: Sequence[Group], silent: Sequence[Answer]) -> View:
    """What processes had to do after they were ready: a row for each kernel, the newest first."""
    view = View(header=["WHEN", "PID", "RANK", "WHAT", "TOOK", "THREAD", "KERNEL"])
    view.right, view.spare = ["TOOK"], ["THREAD", "RANK"]
    rows: list[tuple[str, list[str]]] = []
    marked = 0
    for one in [one for group in groups for one in group.readings]:
        marked += bool(one.process.ready)
        rank = "–" if one.process.rank is None else str(one.process.rank)
        for event in one.incidents:
            if event.after_ready:
                told = [render.ago(when(event.time)), str(one.process.pid), rank, event.kind]
                told += [render.duration(event.seconds), event.thread, event.title]
                rows.append((event.time, told))
    view.rows = [row for _, row in sorted(rows, key=lambda item: item[0], reverse=True)]
    count = sum(len(group.readings) for group in groups)
    late = sum(one.compile.after_ready for group in groups for one in group.readings)
    view.foot.append(
        f"{render.count(late, 'compile')} after ready; "
        f"{marked:,} of {render.count(count, 'agent')} said that they are ready"
    )
    for one in [one for group in groups for one in group.readings if one.unseen]:
        shown = len(one.incidents)
        view.foot.append(
            f"pid {one.process.pid}: the newest {shown:,} of {shown + one.unseen:,} are shown; "
            f"`/v1/events` of its agent has more"
        )
    view.foot += [f"pid {answer.pid} {answer.trouble}" for answer in silent]
    for group in groups:
        for advice in advise(group.readings):
            if advice.workloads:
                view.hints += advised(advice, group.readings[0].process.name, lines=True)
    return view
