"""How the command line writes sizes, durations, times and lists. Data goes to stdout, the rest to
stderr.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

__all__ = ["ago", "count", "duration", "emit_json", "fitted", "home", "note", "plain", "size"]
__all__ += ["styled", "table"]


def size(count: int) -> str:
    """A size like `74 KiB`."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"


def count(number: int, what: str) -> str:
    """A number of things like `1 kernel` or `1,204 kernels`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A duration like `1 min 32 s`, `3.4 s` or `42 ms`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def ago(when: datetime | None) -> str:
    """A time like `2 min ago`."""
    if when is None:
        return "unknown"
    seconds = max(0.0, (datetime.now(timezone.utc) - when).total_seconds())
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds // unit)} {name} ago"
    days = int(seconds // 86400)
    return f"{days} day{'s' if days != 1 else ''} ago"


def home(path: Path) -> str:
    """A path with the home directory as `~`."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)


def plain(text: str) -> str:
    """A text that others wrote, such as a file's name, without what would move a terminal's cursor
    or cannot be written.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def styled() -> bool:
    """Whether stdout is a person's terminal that may be colored."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def note(text: str) -> None:
    """A line for the person, on stderr."""
    click.echo(text, err=True)


def emit_json(document: dict[str, Any]) -> None:
    """The whole of stdout for `--json`. What an iterator yields is written as it comes, as a
    list.
    """
    click.echo("{")
    fields = {"schema": 1, **document}
    for name, value in fields.items():
        end = "" if name == next(reversed(fields)) else ","
        if isinstance(value, Iterator):
            click.echo(f"  {json.dumps(name)}: [")
            _emit_items(value)
            click.echo(f"  ]{end}")
        else:
            text = json.dumps(value, indent=2).replace("\n", "\n  ")
            click.echo(f"  {json.dumps(name)}: {text}{end}")
    click.echo("}")


def _emit_items(items: Iterator[Any]) -> None:
    lines = (f"    {json.dumps(item)}" for item in items)
    ahead = list(itertools.islice(lines, _AT_ONCE))
    while ahead:
        some, ahead = ahead, list(itertools.islice(lines, _AT_ONCE))
        click.echo(",\n".join(some) + ("," if ahead else ""))


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """Rows under a header: a fitted table on a terminal, lines with tabs in a pipe.

    Args:
        header: The columns' names.
        rows: As many cells each.
        right: Columns that are set to the right.
        spare: Columns that a narrow terminal does without, the first to go first.

    Cells are written by `plain`. Drawn here and not by rich, which takes as long to draw a hundred
    rows as all the rest of `ls`.
    """
    rows = ([*map(plain, row)] for row in rows)
    if not sys.stdout.isatty():
        lines = itertools.chain((header,), rows)
        while some := list(itertools.islice(lines, _AT_ONCE)):
            click.echo("\n".join(map("\t".join, some)))
        return
    width = shutil.get_terminal_size().columns
    for index, line in enumerate(fitted(header, rows, right, spare, width)):
        click.echo(click.style(line, bold=True) if index == 0 and styled() else line)


def fitted(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[str],
    spare: Sequence[str],
    width: int,
) -> list[str]:
    """The lines of such a table on a terminal of some width, the header first."""
    columns = [list(column) for column in zip(header, *rows, strict=True)]
    for name in spare:
        if sum(max(map(len, column)) + _GAP for column in columns) - _GAP > width:
            columns = [column for column in columns if column[0] != name]
    widths = [max(map(len, column)) for column in columns]
    room = width - _GAP * (len(widths) - 1)
    while sum(widths) > room and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    names = [column[0] for column in columns]
    return [
        (" " * _GAP)
        .join(
            _fitted(cell, size, name in right)
            for cell, size, name in zip(row, widths, names, strict=True)
        )
        .rstrip()
        for row in zip(*columns, strict=True)
    ]


_GAP = 2
_AT_ONCE = 1000  # a call of click's for each of 60,000 lines takes a second
_NARROWEST = 8


def _fitted(cell: str, width: int, right: bool) -> str:
    if len(cell) > width:
        cell = cell[: width - 1] + "…"
    return cell.rjust(width) if right else cell.ljust(width)
