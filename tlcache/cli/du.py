"""`tlcache du`: which versions, targets and operators take how much of the disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from tlcache.cli import options, render
from tlcache.store import described, disk_usage, layout, select
from tlcache.store.disk_usage import Usage

__all__ = ["command"]


@click.command("du")
@options.cache_dir
@options.filters
@options.json_output
def command(cache_dir: str | None, wanted: select.Filter, json_wanted: bool) -> int:
    """Show what takes how much of the disk, by version, target and operator.

    Bytes are those that the disk really gives, and a file with several names counts once. Without a
    filter the sum is what `du` says.
    """
    root = layout.cache_root(cache_dir)
    told = disk_usage.measure(root, wanted)
    total = told["kind"].total()
    if json_wanted:
        document: dict[str, Any] = {"root": str(root), "bytes": total.bytes}
        document |= {"apparent": total.apparent}
        for by, usage in told.items():
            document[_NAMES[by]] = {
                _kind(by, name): part._asdict() for name, part in _ordered(usage.parts)
            }
        render.emit_json(document)
        return 0
    rows = []
    for by, usage in told.items():
        for name, part in _ordered(usage.parts):
            share = 100 * part.bytes / total.bytes if total.bytes else 0
            things = f"{part.things:,}" if part.things else "–"
            rows.append([by, _kind(by, name), render.size(part.bytes), f"{share:.0f} %", things])
    if rows:
        render.table(
            ["BY", "WHAT", "SIZE", "SHARE", "THINGS"], rows, right=["SIZE", "SHARE", "THINGS"]
        )
    place = render.plain(render.home(root))
    saved = f", {render.size(total.apparent)} apparent" if total.apparent != total.bytes else ""
    render.note(f"{render.size(total.bytes)} in {place}{saved}")
    return 0


_NAMES = {"version": "tilelang", "target": "targets", "op": "ops", "kind": "kinds"}


def _kind(by: str, name: str) -> str:
    return described.KINDS.get(name, name) if by == "kind" else name


def _ordered(parts: Mapping[str, Usage]) -> list[tuple[str, Usage]]:
    return sorted(parts.items(), key=lambda item: (-item[1].bytes, item[0]))
