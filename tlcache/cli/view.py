"""A screen, built once and shown in any of three ways: printed on a terminal, cut into a pipe's
lines, or drawn again and again in place.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import click

from tlcache.advice import Advice
from tlcache.cli import render

__all__ = ["View", "advised", "write"]


@dataclass
class View:
    """What a screen has, from top to bottom.

    Attributes:
        head: Lines above the table.
        header: The table's columns.
        rows: Its rows.
        right: Its columns that are set to the right.
        spare: Its columns that a narrow terminal does without.
        foot: Lines below it.
        hints: What to do, for the person.
    """

    head: list[str] = field(default_factory=list)
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    right: Sequence[str] = ()
    spare: Sequence[str] = ()
    foot: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def lines(self, width: int) -> list[str]:
        """All of it as lines of a terminal of some width."""
        table = self.rows and render.fitted(
            self.header,
            [[render.plain(cell) for cell in row] for row in self.rows],
            self.right,
            self.spare,
            width,
        )
        hints = ["", *self.hints] if self.hints else []
        return [*map(render.plain, self.head), *table, *map(render.plain, [*self.foot, *hints])]


def write(view: View) -> None:
    """Print a view: hints go to stderr."""
    for line in view.head:
        click.echo(render.plain(line))
    if view.rows:
        render.table(view.header, view.rows, view.right, view.spare)
    for line in view.foot:
        click.echo(render.plain(line))
    sys.stdout.flush()
    if view.hints:
        render.note("")
    for line in view.hints:
        render.note(render.plain(line))


def advised(advice: Advice, server: str | None = None, *, lines: bool = False) -> list[str]:
    """An advice as hints.

    Args:
        advice: The advice.
        server: The program whose ranks it is about, where they are several.
        lines: Also the lines for a shapes.json.
    """
    pids = advice.pids
    who = f"{len(pids)} ranks of {server}" if len(pids) > 1 and server else f"pid {pids[0]}"
    told = [f"{who}: {advice.what}", f"hint: {advice.remedy}"]
    return told + [f"  {json.dumps(line)}" for line in advice.workloads if lines]
