"""`tlcache ls`: every kernel under a cache root, whoever wrote it."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from tlcache.cli import options, render
from tlcache.store import layout, scan, select
from tlcache.store.described import KINDS, as_json
from tlcache.store.entry import Entry

__all__ = ["COLUMNS", "command", "counted", "natural", "row", "workload"]


def natural(text: str) -> str:
    """A sort key by which M=128 comes before M=1024."""
    return _NUMBER.sub(lambda match: match[0].zfill(20), text)


_NUMBER = re.compile(r"\d+")


_SORTS: dict[str, Callable[[Entry], Any]] = {
    "key": lambda one: one.place.key,
    "kernel": lambda one: (one.kernel or "", one.target or "", natural(workload(one))),
    "target": lambda one: (one.target or "", one.kernel or "", natural(workload(one))),
    "tilelang": lambda one: (natural(one.place.tilelang or ""), one.kernel or ""),
    "size": lambda one: -one.bytes,
    "used": lambda one: -(one.last_used.timestamp() if one.last_used else 0),
    "created": lambda one: -(one.created.timestamp() if one.created else 0),
}


@click.command("ls")
@options.cache_dir
@options.filters
@click.option("--duplicates", is_flag=True, help="Kernels that differ by nothing but their keys.")
@click.option("--all", "everything", is_flag=True, help="Also what is no kernel.")
@click.option("--sort", type=click.Choice(list(_SORTS)), default="kernel", show_default=True)
@click.option("--tree", "as_tree", is_flag=True, help="By version, target and kernel.")
@options.json_output
def command(
    cache_dir: str | None,
    wanted: select.Filter,
    duplicates: bool,
    everything: bool,
    sort: str,
    as_tree: bool,
    json_wanted: bool,
) -> int:
    """List the kernels under a cache root.

    Facts come from a kernel's record; without one, from what its files tell. What is not known is
    `–`, and no filter selects by it.
    """
    root = layout.cache_root(cache_dir)
    known: Iterable[Entry] = scan.scan(root)
    twins: dict[str, Entry] | None = None
    if duplicates:
        groups = select.duplicates(known := list(known))
        twins = {one.place.location: group[0] for group in groups for one in group}
        known = [one for one in known if one.place.location in twins]
    if wanted:
        known = wanted.select(known)
    found, others = _parted(known, everything)
    found.sort(key=_SORTS[sort])
    if twins is not None:
        _put_together(found, twins)
    if json_wanted:
        totals = {**_totals(found), "others": others}
        entries = ({**as_json(one), **_duplicate_of(one, twins)} for one in found)
        render.emit_json({"root": str(root), "entries": entries, "totals": totals})
        return 0
    if as_tree and found:
        from tlcache.cli import tree

        tree.write(root, found)
    elif found:
        _write_table(root, found, everything, twins)
    _write_totals(found, root, wanted=bool(wanted) or duplicates)
    if others:
        told = (
            f"{kind} {one['count']:,}, {render.size(one['bytes'])}" for kind, one in others.items()
        )
        render.note(f"besides: {' · '.join(told)}")
    return 0


def _put_together(found: list[Entry], twins: dict[str, Entry]) -> None:
    """Bring duplicates together, in the order of the first of each group, the newest first."""
    first: dict[str, int] = {}
    for number, one in enumerate(found):
        first.setdefault(twins[one.place.location].place.location, number)

    def place(one: Entry) -> tuple[int, bool]:
        newest = twins[one.place.location]
        return first[newest.place.location], one.place.location != newest.place.location

    found.sort(key=place)


def _duplicate_of(one: Entry, twins: dict[str, Entry] | None) -> dict[str, str | None]:
    """The key of which an entry is a duplicate: of the newest that is the same."""
    if twins is None:
        return {}
    newest = twins[one.place.location].place
    return {"duplicate_of": newest.key if newest.location != one.place.location else None}


def _parted(
    known: Iterable[Entry], everything: bool
) -> tuple[list[Entry], dict[str, dict[str, int]]]:
    """What is to be listed, and how many there are of every other kind of thing, with their
    bytes.
    """
    found: list[Entry] = []
    others: dict[str, dict[str, int]] = {}
    for one in known:
        if everything or one.place.kind == "kernel":
            found.append(one)
        else:
            kind = KINDS.get(one.place.kind, one.place.kind)
            of_kind = others.setdefault(kind, {"count": 0, "bytes": 0})
            of_kind["count"] += 1
            of_kind["bytes"] += one.bytes
    return found, dict(sorted(others.items()))


def workload(one: Entry) -> str:
    """A kernel's workload, or its parameters' shapes where it has no record."""
    if one.record is not None:
        return one.record.workload_text
    if one.params is None:
        return "–"
    return _shapes(tuple(param.shape for param in one.params))


@functools.lru_cache(maxsize=4096)
def _shapes(shapes: tuple[tuple[int | str | None, ...], ...]) -> str:
    return " ".join(
        f"[{','.join('?' if d is None else str(d) for d in shape)}]" for shape in shapes
    )


COLUMNS = ["KEY", "KERNEL", "WORKLOAD", "SCHEDULE", "TARGET", "TOOLKIT", "TILELANG", "SIZE"]
COLUMNS += ["USED"]


def _write_table(
    root: Path, found: list[Entry], everything: bool, twins: dict[str, Entry] | None
) -> None:
    header, rows = COLUMNS, (row(one) for one in found)
    extra: list[tuple[str, Callable[[Entry], str]]] = []
    if everything:
        extra.append(("KIND", lambda one: KINDS.get(one.place.kind, one.place.kind)))
    if twins is not None:
        extra.append(
            ("SAME AS", lambda one: (_duplicate_of(one, twins)["duplicate_of"] or "–")[:12])
        )
    if len({layout.root_of(root, one.place) for one in found}) > 1:
        extra.append(("ROOT", lambda one: _below(root, one)))
    if extra:
        header = [*COLUMNS, *(name for name, _ in extra)]
        rows = ([*row(one), *(tell(one) for _, tell in extra)] for one in found)
    render.table(header, rows, right=["SIZE"], spare=["TILELANG", "TOOLKIT", "SCHEDULE", "USED"])


def _below(root: Path, one: Entry) -> str:
    return _relative(layout.root_of(root, one.place), root)


_relative = functools.lru_cache(maxsize=1024)(os.path.relpath)


def row(one: Entry) -> list[str]:
    """An entry as a row of the table."""
    filed = one.record
    return [
        one.place.key[:12],
        one.kernel or "–",
        workload(one),
        filed.schedule_text if filed else "–",
        one.target or "–",
        _toolkit(one) or "–",
        one.place.tilelang or "–",
        render.size(one.bytes),
        render.ago(one.last_used),
    ]


def _toolkit(one: Entry) -> str | None:
    """The build of the compiler that made the device code; on the CPU that is the host
    compiler's, which only a record knows.
    """
    if one.record is None or one.record.is_cuda:
        return select.toolkit_of(one)
    words = (one.record.host_compiler or "").split()
    return f"{words[0]} {words[-1]}" if words else None


def _totals(found: list[Entry]) -> dict[str, Any]:
    return {
        "entries": len(found),
        "bytes": sum(one.bytes for one in found),
        "targets": dict(Counter(one.target or "unknown" for one in found)),
        "tilelang": dict(Counter(one.place.tilelang or "unknown" for one in found)),
    }


def _write_totals(found: list[Entry], root: Path, *, wanted: bool) -> None:
    place = render.plain(render.home(root))
    if not found:
        click.echo(f"no kernels {'like that ' if wanted else ''}in {place}")
        render.note(
            "\nhint: `tlcache ls` without filters lists all there are"
            if wanted
            else "\nhint: `tlcache warm --shapes FILE` compiles some; "
            "`--cache-dir` names another root"
        )
        return
    totals = _totals(found)
    size, by_target = render.size(totals["bytes"]), _counts(totals["targets"])
    render.note(f"{counted(found)}, {size} in {place}      {by_target}")
    if len(totals["tilelang"]) > 1:
        render.note(f"by TileLang: {_counts(totals['tilelang'])}")


def counted(found: Sequence[Entry]) -> str:
    """How many they are, as kernels where all are."""
    kernels = all(one.place.kind == "kernel" for one in found)
    return render.count(len(found), "kernel" if kernels else "thing")


def _counts(counts: dict[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: natural(item[0]))
    return " · ".join(f"{name} {count:,}" for name, count in ordered)
