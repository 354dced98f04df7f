"""`tlcache config`: the settings in force, and who set them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from tlcache import config
from tlcache.cli import options, render
from tlcache.settings import FIELDS, Origin, written

__all__ = ["command"]


@click.group("config")
def command() -> None:
    """Show the settings in force, and where each value came from."""


@command.command("show")
@options.json_output
def show(json_wanted: bool) -> int:
    """Show every setting with its value, and the file, variable or default that it comes from.

    The exit code is 2 where a file or a variable sets what there is not, or wrongly.
    """
    found = config.load()
    if json_wanted:
        render.emit_json(
            {
                "files": [
                    {
                        "layer": layer,
                        "path": path,
                        "present": table is not None,
                    }
                    for layer, path, table in config.sources()
                ],
                "settings": {
                    name: {
                        "value": _plain(getattr(found, name)),
                        "origin": found.origins[name]._asdict(),
                        "over": [origin._asdict() for origin in found.shadowed[name]],
                    }
                    for name in FIELDS
                },
                "misspelled": config.misspelled(),
            }
        )
        return 0
    render.table(
        ["KEY", "VALUE", "FROM", "OVER"],
        (
            [
                name,
                _readable(name, getattr(found, name)),
                _named(found.origins[name]),
                ", ".join(map(_named, found.shadowed[name])),
            ]
            for name in FIELDS
        ),
        spare=["OVER"],
    )
    for _, path, table in config.sources():
        told = "" if table is not None else " (not there)"
        render.note(f"read: {render.home(Path(path))}{told}")
    for name, meant in config.misspelled().items():
        render.note(f"note: {name} is set, and nothing reads it; did you mean {meant}?")
    return 0


def _plain(value: Any) -> Any:
    """A value as JSON has it: bytes and seconds as numbers, paths as texts."""
    if isinstance(value, tuple):
        return [os.fspath(one) for one in value]
    return os.fspath(value) if isinstance(value, Path) else value


def _readable(name: str, value: Any) -> str:
    if value is not None and name in ("max_size", "keep_free"):
        return render.size(value)
    if value is not None and name in ("max_age", "interval"):
        return render.duration(value) if value < 86400 else f"{value / 86400:g} d"
    return written(value)


def _named(origin: Origin) -> str:
    return render.home(Path(origin.where)) if origin.where else str(origin)
