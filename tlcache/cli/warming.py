"""How far a warm is: what is shown of it while it compiles."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from tlcache.warm.plan import Item

__all__ = ["Quiet", "Steps", "progress"]


class Quiet:
    """Progress where stderr is no terminal: failures as they happen, nothing else."""

    def started(self, item: Item) -> None:
        pass

    def ended(self, item: Item) -> None:
        pass


class _Bar(Quiet):
    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.progress = Progress(
            TextColumn("warming"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
        self.task = self.progress.add_task("starting TileLang", total=total)

    def started(self, item: Item) -> None:
        self.progress.update(self.task, description=str(item.wanted.spec))

    def ended(self, item: Item) -> None:
        self.progress.advance(self.task)


class Steps(Quiet):
    """Progress for a program: what is planned, and each kernel as it is begun and as it ends."""

    def __init__(self, items: list[Item]) -> None:
        counts = Counter(item.outcome.status for item in items if item.outcome is not None)
        self._write({"step": "planned", "counts": {"total": len(items), **counts}})

    def started(self, item: Item) -> None:
        told = {"action_key": item.action_key, "kernel": item.wanted.spec.title}
        self._write({"step": "started", **told})

    def ended(self, item: Item) -> None:
        assert item.outcome is not None
        told = {"action_key": item.action_key, "status": item.outcome.status}
        self._write({"step": "ended", **told, "seconds": round(item.outcome.seconds, 3)})

    def _write(self, step: dict[str, Any]) -> None:
        click.echo(json.dumps(step), err=True)


@contextmanager
def progress(total: int) -> Iterator[Quiet]:
    if not sys.stderr.isatty():
        yield Quiet()
        return
    bar = _Bar(total)
    with bar.progress:
        yield bar
