"""`tlcache stats --pid` of a process that does not answer: what is seen of it from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tlcache.agents import Answer
from tlcache.cli import ls, render
from tlcache.cli.view import View
from tlcache.store import described, outside
from tlcache.store.outside import Loaded

__all__ = ["document", "view"]

_UNSEEN = "kernels that TileLang copied into the driver (nvrtc, cutedsl) cannot be seen"


def view(pid: int, silent: Sequence[Answer]) -> View:
    """The kernels that a process has mapped.

    Raises:
        UsageError: There is no such process.
        EnvironmentFault: It is somebody else's.
    """
    seen = outside.look(pid)
    told = [seen.command or "–", f"pid {pid}", f"user {seen.user}"]
    told += [f"up {render.duration(seen.uptime)}"]
    told += ["TileLang is loaded"] if seen.tilelang else ["TileLang is not loaded"]
    why = f"its agent {silent[0].trouble}" if silent else "it has no agent"
    shown = View(["  ".join(told), f"{why}; seen from outside:"])
    shown.header, shown.right = [*ls.COLUMNS[:-1], "ROOT"], ["SIZE"]
    shown.spare = ["TOOLKIT", "TILELANG", "SCHEDULE"]
    shown.rows = [_row(one) for one in seen.loaded]
    count, size = len(seen.loaded), sum(one.entry.bytes for one in seen.loaded)
    roots = sorted({one.root for one in seen.loaded})
    where = f" from {', '.join(roots)}" if roots else ""
    shown.foot.append(f"{render.count(count, 'kernel')} mapped, {render.size(size)}{where}")
    if gone := sum(one.gone for one in seen.loaded):
        shown.foot.append(f"{gone:,} of them deleted or compiled again since")
    if seen.compiled:
        shown.foot.append(
            f"{len(seen.compiled):,} more that it compiled itself; which they are cannot be seen"
        )
    if seen.tilelang:
        shown.foot.append(_UNSEEN)
    if not silent:
        shown.hints.append(
            "hint: with an agent it says more: `TLCACHE_AGENT=1` in its environment, or "
            "`tlcache run -- COMMAND`"
        )
    return shown


def _row(one: Loaded) -> list[str]:
    cells = ls.row(one.entry)[:-1]
    return [*cells, f"{one.root} (gone)" if one.gone else one.root]


def document(pid: int, silent: Sequence[Answer]) -> dict[str, Any]:
    """The same as a JSON document.

    Raises:
        UsageError: There is no such process.
        EnvironmentFault: It is somebody else's.
    """
    seen = outside.look(pid)
    return {
        "processes": [
            {"pid": one.pid, "socket": one.socket, "trouble": one.trouble} for one in silent
        ],
        "outside": {
            "pid": pid,
            "command": seen.command,
            "user": seen.user,
            "uptime_seconds": round(seen.uptime, 3),
            "tilelang_loaded": seen.tilelang,
            "compiled": list(seen.compiled),
            "kernels": [
                {
                    **described.as_json(one.entry),
                    "path": one.path,
                    "root": one.root,
                    "gone": one.gone,
                }
                for one in seen.loaded
            ],
        },
    }
