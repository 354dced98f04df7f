"""`tlcache ls --tree`: versions, targets, kernels, and the entries of each."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from tlcache.cli import ls, render
from tlcache.store import described, layout
from tlcache.store.entry import Entry

__all__ = ["lines", "write"]


def write(root: Path, found: Sequence[Entry]) -> None:
    """Write the tree; a terminal gets its lines cut to its width."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in lines(root, found):
        text = render.plain(line)
        cut = width is not None and len(text) > width
        click.echo(text[: (width or 1) - 1] + "…" if cut else text)


def lines(root: Path, found: Sequence[Entry]) -> list[str]:
    """The lines of the tree. What a level has in common is told once."""
    levels: list[Callable[[Entry], str]] = [_version, _target, _kernel]
    if len({one.place.platform for one in found} - {None}) > 1:
        levels.insert(1, lambda one: one.place.platform or "any platform")
    if len({layout.root_of(root, one.place) for one in found}) > 1:
        levels.insert(0, lambda one: os.path.relpath(layout.root_of(root, one.place), root))
    return [f"{render.home(root)}  {_sum(found)}", *_branches(found, levels, "")]


def _branches(
    found: Sequence[Entry], levels: Sequence[Callable[[Entry], str]], indent: str
) -> list[str]:
    groups: dict[str, list[Entry]] = {}
    for one in found:
        groups.setdefault(levels[0](one), []).append(one)
    names = sorted(groups, key=lambda name: ("unknown" in name, ls.natural(name)))
    told = []
    for name in names:
        group = groups[name]
        branch, below = ("└─", "   ") if name == names[-1] else ("├─", "│  ")
        alone = len(levels) == 1 and len(group) == 1
        told.append(f"{indent}{branch} {name}  {_leaf(group[0]) if alone else _sum(group)}")
        if len(levels) > 1:
            told += _branches(group, levels[1:], indent + below)
        elif not alone:
            told += [
                f"{indent}{below}{'└─' if one is group[-1] else '├─'} {_leaf(one)}" for one in group
            ]
    return told


def _version(one: Entry) -> str:
    return f"TileLang {one.place.tilelang or 'unknown'}"


def _target(one: Entry) -> str:
    return one.target or "target unknown"


def _kernel(one: Entry) -> str:
    kind = described.KINDS.get(one.place.kind, one.place.kind)
    name = one.kernel or "name unknown"
    return name if kind == "kernel" else f"{name} ({kind})"


def _leaf(one: Entry) -> str:
    key, _, shapes, schedule, *_, size, used = ls.row(one)
    told = [key, shapes, schedule, size, used]
    return "  ".join(text for text in told if text not in ("", "–"))


def _sum(found: Sequence[Entry]) -> str:
    return f"{ls.counted(found)}, {render.size(sum(one.bytes for one in found))}"
