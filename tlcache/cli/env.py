"""`tlcache env`: the exports that put a process on a cache root of its own version key."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import click

from tlcache import version_key
from tlcache.cli import options, render
from tlcache.cli.key import described
from tlcache.errors import UsageError
from tlcache.store import layout

__all__ = ["command"]


@click.command("env")
@click.option(
    "--base",
    metavar="DIR",
    help="Where the keyed roots lie; by default the cache root in force, or what it is keyed in.",
)
@click.option(
    "--target", metavar="TARGET", help="What it compiles for; by default the GPU that is here."
)
@click.option("--key", "named", metavar="KEY", help="A root by name, of a host that compiles.")
@options.json_output
def command(base: str | None, target: str | None, named: str | None, json_wanted: bool) -> int:
    """Print the exports that put a process on a cache root of its own version key.

    For an entrypoint: `exports=$(tlcache env --base /var/cache/tilelang) && eval "$exports"`.
    """
    if base is not None and not base.strip():
        raise UsageError("--base is empty", hint="`tlcache env --base /var/cache/tilelang`")
    if named is not None and not re.fullmatch(version_key.KEY, named):
        raise UsageError(f"{named!r} is not a version key", hint="`tlcache key --short` prints one")
    place = Path(os.path.abspath(base)) if base is not None else _base()
    key = named or described(target).key
    exports = {"TILELANG_CACHE_DIR": str(place / key)}
    if json_wanted:
        render.emit_json({"base": str(place), "key": key, "exports": exports})
    else:
        for name, value in exports.items():
            click.echo(f"export {name}={shlex.quote(value)}")
    if named is None:
        _note_others(place, key)
    return 0


def _base() -> Path:
    return version_key.keyed_base(layout.default_root())


def _note_others(base: Path, key: str) -> None:
    """Say it where this key's root is not there, and others are: their kernels are not found."""
    if (base / key).exists():
        return
    others = [
        os.path.basename(root)
        for root in layout.roots(base)
        if re.fullmatch(version_key.KEY, os.path.basename(root))
    ]
    if others:
        shown = ", ".join(sorted(others)[:3]) + (" …" if len(others) > 3 else "")
        render.note(
            f"note: {base} has no root {key} yet; it has {shown}\n"
            "hint: `tlcache key --compare FILE` tells the difference; `--key` names one of them"
        )
