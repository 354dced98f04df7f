"""`tlcache key`: the version key of this environment, what it is made of, and how it differs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tlcache import targets, version_key
from tlcache.cli import options, render
from tlcache.errors import UsageError
from tlcache.version_key import Difference, Environment

__all__ = ["command", "described"]


@click.command("key")
@click.option(
    "--target", metavar="TARGET", help="What it compiles for; by default the GPU that is here."
)
@click.option(
    "--compare", "other", metavar="FILE", help="What differs from there (- reads standard input)."
)
@click.option("--short", is_flag=True, help="Only the key.")
@options.json_output
def command(target: str | None, other: str | None, short: bool, json_wanted: bool) -> int:
    """Print the version key of this environment, and what it is made of.

    With --compare, say what a process here finds in a cache that was made where FILE was written by
    `tlcache key --json`; the exit code is 1 if any difference does anything.
    """
    if short and (json_wanted or other is not None):
        raise UsageError(
            "--short goes with neither --json nor --compare", hint="`tlcache key --short`"
        )
    here = described(target)
    if other is not None:
        return _compare(other, here, json_wanted)
    if json_wanted:
        render.emit_json(here.to_json())
    elif short:
        click.echo(here.key)
    else:
        for name, value in _lines(here):
            click.echo(f"{name:<20}{value}")
    return 0


def described(target: str | None) -> Environment:
    """This environment, for a target as people write it."""
    return version_key.describe(targets.parse(target) if target is not None else None)


def _lines(here: Environment) -> list[tuple[str, str]]:
    lines = [("key", here.key)]
    for field, called in version_key.FIELDS.items():
        lines.append((called, _shown(field, here.facts.get(field)) or "none"))
    lines += sorted(here.variables.items())
    return [*lines, ("sha256", here.sha256)]


def _shown(field: str, value: str | None) -> str | None:
    digest = field in ("tilelang_library", "tilelang_python", "templates", "cutlass")
    return value[:12] if digest and value else value


def _compare(other: str, here: Environment, json_wanted: bool) -> int:
    there = version_key.read(_text(other), other)
    found = version_key.compare(there, here)
    matters = any(one.effect != "nothing" for one in found)
    if json_wanted:
        render.emit_json(
            {
                "here": here.key,
                "there": there.key,
                "differences": [_as_json(one) for one in found],
            }
        )
        return 1 if matters else 0
    if not found:
        click.echo(f"no difference: both are {here.key}")
        return 0
    for one in found:
        there_is, here_is = (_shown(one.field, value) or "none" for value in (one.there, one.here))
        called = version_key.FIELDS.get(one.field, one.field)
        click.echo(f"{one.effect:<13}{called}: {there_is} there, {here_is} here")
        click.echo(f"{'':<13}{one.meaning}")
    if matters:
        render.note(f"\nthere {there.key}, here {here.key}")
        render.note('hint: `eval "$(tlcache env)"` gives a process a root of its own key')
    return 1 if matters else 0


def _as_json(one: Difference) -> dict[str, Any]:
    return {
        "field": one.field,
        "there": one.there,
        "here": one.here,
        "effect": one.effect,
        "meaning": one.meaning,
    }


def _text(path: str) -> str:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise UsageError(
            f"{path} cannot be read: {(reason or str(error)).lower()}",
            hint="`tlcache key --json` there writes such a file",
        ) from error
