"""`tlcache doctor`: one screen of checks, each with its remedy."""

from __future__ import annotations

import logging
import shutil
import sys
from collections import Counter

import click

from tlcache import doctor
from tlcache.cli import options, render
from tlcache.store import layout
from tlcache.store.checkup import Finding

__all__ = ["command"]


@click.command("doctor")
@options.cache_dir
@options.json_output
def command(cache_dir: str | None, json_wanted: bool) -> int:
    """Check the cache and this machine, and say what to do about each fault.

    The exit code is 1 if there is one.
    """
    logging.getLogger("tlcache").setLevel(logging.ERROR)  # what is damaged is counted here
    found = doctor.examine(cache_dir)
    counts = Counter(one.level for one in found)
    if json_wanted:
        render.emit_json(
            {
                "root": str(layout.cache_root(cache_dir)),
                "findings": [
                    {
                        "level": one.level,
                        "what": one.what,
                        "detail": one.detail,
                        "remedy": one.remedy,
                    }
                    for one in found
                ],
                "summary": {level: counts[level] for level in ("ok", "warn", "fail")},
            }
        )
    else:
        for one in found:
            _print(one)
        if not counts["warn"] and not counts["fail"]:
            render.note(f"{render.count(len(found), 'check')}, nothing to do")
    return 1 if counts["warn"] or counts["fail"] else 0


def _print(one: Finding) -> None:
    _line(f"{one.level:<6}{one.what:<14}", one.detail)
    if one.remedy is not None:
        _line(" " * _INDENT, f"hint: {one.remedy}")


_INDENT = 20


def _line(head: str, text: str) -> None:
    """A line; on a terminal its continuations are indented."""
    width = shutil.get_terminal_size().columns - _INDENT
    if sys.stdout.isatty() and width >= _INDENT:
        import textwrap

        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        text = f"\n{' ' * _INDENT}".join(lines)
    click.echo(head + text)
