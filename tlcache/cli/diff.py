"""`tlcache diff`: what differs between two entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from tlcache.cli import options, render
from tlcache.store import described, layout, scan, select, sources
from tlcache.store.entry import Entry

__all__ = ["command"]

_MOST_LINES = 20_000  # a source longer than that is compared as a whole


@click.command("diff")
@click.argument("first", metavar="KEY")
@click.argument("second", metavar="KEY")
@options.cache_dir
@options.json_output
def command(first: str, second: str, cache_dir: str | None, json_wanted: bool) -> int:
    """Show what differs between two kernels.

    Each KEY is one as `tlcache inspect` takes it. What is the same is not shown.
    """
    root = layout.cache_root(cache_dir)
    known = list(scan.scan(root))
    pair = select.called(known, first, root), select.called(known, second, root)
    fields = _fields(*pair)
    codes = [select.code_of(one) for one in pair]
    same = codes[0] == codes[1] if None not in codes else None
    changed = {side: list(_changed(side, *pair)) for side in sources.SIDES}
    if json_wanted:
        render.emit_json(
            {
                "root": str(root),
                "entries": [one.place.location for one in pair],
                "fields": {name: list(values) for name, values in fields.items()},
                "same_code": same,
                "sources": changed,
            }
        )
        return 0
    rows = ([name, *map(_text, values)] for name, values in fields.items())
    if fields:
        render.table(["WHAT", *(one.place.key[:12] for one in pair)], rows)
    for lines in changed.values():
        for line in lines:
            _write_line(line)
    render.note(_summary(pair, same, bool(fields), any(changed.values())))
    return 0


def _fields(one: Entry, other: Entry) -> dict[str, tuple[Any, Any]]:
    """The facts that differ, by their names."""
    left, right = _told(one), _told(other)
    names = list(dict.fromkeys([*left, *right]))
    return {
        name: (left.get(name), right.get(name))
        for name in names
        if left.get(name) != right.get(name)
    }


def _told(one: Entry) -> dict[str, Any]:
    told = described.as_json(one)
    for name in ("key", "path", "created", "last_used", "payload", "params", "record"):
        told.pop(name)
    for name in ("workload", "schedule"):
        value = told.pop(name)
        told |= {f"{name} {field}": part for field, part in (value or {}).items()}
    if (filed := scan.record_of(one)) is not None:
        told["factory"] = filed.spec.kernel
        told |= {f"pass {name}": value for name, value in filed.spec.pass_configs.items()}
        told["flags"] = " ".join(filed.spec.compile_flags)
        told["source digest"] = filed.source_digest
        told |= {f"version {name}": value for name, value in filed.versions.items()}
        told |= {f"with {name}": value for name, value in filed.toolkit.items()}
        told["outputs"] = list(filed.launch.outputs)
    for number, param in enumerate(one.params or ()):
        shape = ",".join("?" if size is None else str(size) for size in param.shape)
        told[f"param {number}"] = f"{param.dtype} [{shape}]"
    for number, kernel in enumerate(one.facts.kernels):
        told[f"kernel {number}"] = kernel.name
        told[f"kernel {number} registers"] = kernel.registers
        told[f"kernel {number} shared"] = kernel.shared
    return told


def _changed(side: str, one: Entry, other: Entry) -> Iterator[str]:
    """The lines of a unified diff of two sources; none where they are the same."""
    pair = [sources.read(each, side) for each in (one, other)]
    if (pair[0] and pair[0].data) == (pair[1] and pair[1].data):
        return
    left, right = (told.text.splitlines() if told else [] for told in pair)
    names = [
        f"{each.place.key[:12]}/{told.name}" if told else "/dev/null"
        for each, told in zip((one, other), pair, strict=True)
    ]
    if max(len(left), len(right)) > _MOST_LINES:
        yield f"{names[0]} and {names[1]} differ"
        return
    import difflib

    yield from difflib.unified_diff(left, right, names[0], names[1], lineterm="")


def _write_line(line: str) -> None:
    text = render.plain(line.expandtabs(4))
    color = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
    click.echo(click.style(text, fg=color) if color and render.styled() else text)


def _text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return "–" if value is None or value == "" else str(value)


def _summary(pair: tuple[Entry, Entry], same: bool | None, fields: bool, changed: bool) -> str:
    if pair[0].place.location == pair[1].place.location:
        return "both keys name the same entry"
    told = {
        True: "the machine code is the same",
        False: "the machine code differs",
        None: "the machine code of one is not known",
    }[same]
    if same and not fields and not changed:
        told += ": the keys differ by what no entry keeps, such as out_idx, pass configs or flags"
    return told
