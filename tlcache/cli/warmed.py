"""What is said of a warm when it is over: its kernels, by what processes get them, and what to do
next.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from tlcache.cli import render
from tlcache.cli.share import Published, Share
from tlcache.targets import Target
from tlcache.warm import shapes
from tlcache.warm.outcome import Outcome, Status
from tlcache.warm.plan import Item

__all__ = ["report"]


def report(
    items: list[Item],
    document: shapes.Shapes,
    root: Path,
    chosen: list[Target],
    json_wanted: bool,
    again: str,
    share: Share,
    published: Published | None = None,
) -> int:
    """Say what became of a warm's kernels, and return the exit code.

    Args:
        items: The kernels.
        document: What asked for them.
        root: The root that they are in.
        chosen: What they were compiled for.
        json_wanted: Whether to say it as JSON.
        again: The command that compiles what is missing.
        share: Which part of the document this is.
        published: What was published of it.
    """
    outcomes = [item.outcome or Outcome("missing") for item in items]
    counts = Counter(outcome.status for outcome in outcomes)
    saved = sum(outcome.saved_seconds for outcome in outcomes)
    written = sum(outcome.bytes for outcome in outcomes)
    if json_wanted:
        render.emit_json(
            {
                "root": str(root),
                "targets": [target.name for target in chosen],
                "shard": share.as_json(),
                "published": published.as_json() if published is not None else None,
                "kernels": [_kernel(item) for item in items],
                "unreplayable": [one.model_dump() for one in document.unreplayable],
                "summary": {
                    "total": len(items),
                    **{status: counts[status] for status in _STATUSES},
                    "saved_seconds": round(saved, 3),
                    "bytes": written,
                },
            }
        )
    else:
        _print_unreplayable(document)
        _print_report(items, counts, saved, written, again)
        if published is not None:
            published.show()
    if any(outcome.fault for outcome in outcomes):
        return 3
    return 1 if counts["failed"] or counts["missing"] else 0


_STATUSES: tuple[Status, ...] = (
    "compiled",
    "present",
    "unrecorded",
    "failed",
    "missing",
    "planned",
)


def _kernel(item: Item) -> dict[str, Any]:
    spec, outcome = item.wanted.spec, item.outcome or Outcome("missing")
    said = spec.to_json()
    return {
        "action_key": item.action_key,
        "where": item.wanted.where,
        "op": item.wanted.op,
        "kernel": spec.kernel,
        "title": spec.title,
        "workload": said["workload"],
        "schedule": said["schedule"],
        "target": spec.target.name,
        "status": outcome.status,
        "seconds": round(outcome.seconds, 3),
        "bytes": outcome.bytes,
        "error": outcome.error,
        "hint": outcome.hint,
        "way": outcome.way,
        "reason": outcome.reason,
    }


def _print_report(
    items: list[Item],
    counts: Counter[Status],
    saved: float,
    written: int,
    again: str,
) -> None:
    for item in items:
        if item.outcome is not None and item.outcome.status == "failed":
            named, told = str(item.wanted.spec), _line(item.outcome.error)
            render.note(f"failed: {named}: {told.removeprefix(named).strip()}")
    hints = {item.outcome.hint: None for item in items if item.outcome and item.outcome.hint}
    for hint in hints:
        render.note(f"\nhint: {hint}")
    if counts["planned"]:
        for item in items:
            if item.outcome is not None and item.outcome.status == "planned":
                click.echo(f"would compile  {item.wanted.spec}")
        click.echo(
            f"{render.count(len(items), 'kernel')}  {counts['planned']} to compile"
            f"  {counts['present']} already there"
        )
        return
    missing = [item for item in items if item.outcome is None or item.outcome.status == "missing"]
    if missing and not counts["compiled"] and not counts["failed"]:
        names = [item.wanted.spec.title for item in missing]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        click.echo(
            f"{len(names)} of {render.count(len(items), 'kernel')} "
            f"{'is' if len(names) == 1 else 'are'} missing: {', '.join(names[:5])}{more}"
        )
        render.note(f"\nhint: `{again}` compiles them")
        return
    parts = [
        render.count(len(items), "kernel"),
        f"{counts['compiled'] + counts['unrecorded']} compiled",
        f"{counts['present']} already there",
        f"{counts['failed']} failed",
    ]
    if missing:
        parts.append(f"{len(missing)} not reached")
    click.echo("  ".join(parts) + (f"      {render.size(written)} written" if written else ""))
    _print_ways(items)
    if saved:
        click.echo(
            f"The next start saves about {render.duration(saved)} of compiling on each process."
        )
    if missing:
        render.note(f"\nhint: `{again}` compiles what is missing, and only that")


def _print_ways(items: list[Item]) -> None:
    """By what a process will get the kernels that are there, where it is not all by records."""
    there = [item.outcome for item in items if item.outcome is not None and item.outcome.way]
    ways = Counter(outcome.way for outcome in there)
    if not ways.keys() - {"record"}:
        return
    told = []
    if ways["record"]:
        told.append(f"{ways['record']} by record")
    if ways["call"]:
        told.append(f"{ways['call']} by call")
    told = [f"Restored without tracing: {', '.join(told) or 'none'}."]
    if ways["tilelang"]:
        told.append(f"Traced at each start: {ways['tilelang']}, which only TileLang can load.")
    click.echo("  ".join(told))
    reasons = Counter(outcome.reason for outcome in there if outcome.way == "tilelang")
    for reason, count in reasons.most_common(5):
        render.note(f"traced: {count}, since {reason}" if reason else f"traced: {count}")


def _print_unreplayable(document: shapes.Shapes) -> None:
    for one in document.unreplayable:
        params = f" ({', '.join(one.params)})" if one.params else ""
        remedy = f"; {one.remedy}" if one.remedy else ""
        render.note(f"not to be warmed: {one.kernel}{params}: {one.reason}{remedy}")


def _line(error: str | None) -> str:
    return (error or "unknown").splitlines()[0]
