"""A screen that is drawn again and again, until Ctrl-C."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import click

from tlcache.cli import view
from tlcache.cli.view import View

__all__ = ["stream", "watch"]


def watch(seconds: float, look: Callable[[], View]) -> None:
    """Draw views in place on a terminal; in a pipe, write one below the other.

    Args:
        seconds: From one to the next.
        look: Makes a view of now.
    """
    gc.enable()  # this may go on for days
    try:
        if sys.stdout.isatty():
            _in_place(seconds, look)
        else:
            while True:
                view.write(look())
                click.echo()
                time.sleep(seconds)
    except KeyboardInterrupt:
        pass


def stream(seconds: float, look: Callable[[], dict[str, Any]]) -> None:
    """Write JSON documents, one a line."""
    gc.enable()  # this may go on for days
    try:
        while True:
            click.echo(json.dumps({"schema": 1, **look()}))
            sys.stdout.flush()
            time.sleep(seconds)
    except KeyboardInterrupt:
        pass


def _in_place(seconds: float, look: Callable[[], View]) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)

    def draw() -> Text:
        size = shutil.get_terminal_size()
        now = f"{datetime.now():%H:%M:%S}  every {seconds:g} s, Ctrl-C ends"
        shown = look()
        lines = [now, "", *shown.lines(size.columns)]
        names = 2 + len(shown.head) if shown.rows else None
        if len(lines) > size.lines:
            lines[size.lines - 1 :] = [f"… {len(lines) - size.lines + 1} more lines"]
        cut = [
            line if len(line) <= size.columns else line[: size.columns - 1] + "…" for line in lines
        ]
        text = Text("\n", no_wrap=True)
        return text.join(
            Text(line, "bold" if number == names else "") for number, line in enumerate(cut)
        )

    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(draw(), refresh=True)
            time.sleep(seconds)
