"""`tlcache ls`: every kernel under a cache root, whoever wrote it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import click

from tlcache.cli import options, render
from tlcache.store import entry, layout
from tlcache.store.entry import Entry

__all__ = ["as_json", "command", "workload"]

_SORTS = {
    "key": lambda one: one.place.key,
    "kernel": lambda one: (one.kernel or "", one.target or "", _natural(workload(one))),
    "size": lambda one: -one.bytes,
    "used": lambda one: -(one.last_used.timestamp() if one.last_used else 0),
    "created": lambda one: -(one.created.timestamp() if one.created else 0),
}


@click.command("ls")
@options.cache_dir
@click.option("--sort", type=click.Choice(list(_SORTS)), default="kernel", show_default=True)
@options.json_output
def command(cache_dir: str | None, sort: str, json_wanted: bool) -> int:
    """List the kernels under a cache root.

    Facts come from a kernel's record; without one, from what its files tell. What is not known is
    `–`.
    """
    root = layout.cache_root(cache_dir)
    found = sorted(entry.scan(root), key=_SORTS[sort])
    if json_wanted:
        render.emit_json(
            {
                "root": str(root),
                "entries": [as_json(one) for one in found],
                "totals": _totals(found),
            }
        )
        return 0
    if found:
        render.table(
            [
                "KEY",
                "KERNEL",
                "WORKLOAD",
                "SCHEDULE",
                "TARGET",
                "TOOLKIT",
                "TILELANG",
                "SIZE",
                "USED",
            ],
            [_row(one) for one in found],
            right=["SIZE"],
            spare=["TILELANG", "TOOLKIT", "SCHEDULE"],
        )
    _print_totals(found, root)
    return 0


def workload(one: Entry) -> str:
    """A kernel's workload, or its parameters' shapes where it has no record."""
    if one.record is not None:
        return one.record.spec.workload_text
    if one.params is None:
        return "–"
    return " ".join(
        f"[{','.join('?' if d is None else str(d) for d in param.shape)}]" for param in one.params
    )


def _natural(text: str) -> list[tuple[int, str]]:
    """A sort key by which M=128 comes before M=1024."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def _row(one: Entry) -> list[str]:
    filed = one.record
    return [
        one.place.key[:12],
        one.kernel or "–",
        workload(one),
        filed.spec.schedule_text if filed else "–",
        one.target or "–",
        _toolkit(one) or "–",
        one.place.tilelang or "–",
        render.size(one.bytes),
        render.ago(one.last_used),
    ]


def _toolkit(one: Entry) -> str | None:
    """The build of the compiler that made the device code; on the CPU that is the host
    compiler's.
    """
    if one.record is None:
        return None
    if one.record.spec.target.is_cuda:
        return one.record.toolkit.get("nvcc")
    words = (one.record.toolkit.get("host_compiler") or "").split()
    return f"{words[0]} {words[-1]}" if words else None


def as_json(one: Entry) -> dict[str, Any]:
    """An entry as `ls --json` and `inspect --json` write it; null where it is not known."""
    filed = one.record
    return {
        "key": one.place.key,
        "kind": "kernel",
        "path": str(one.place.path),
        "tilelang": one.place.tilelang,
        "platform": one.place.platform,
        "backend": one.backend,
        "kernel": one.kernel,
        "target": one.target,
        "toolkit": filed.toolkit.get("nvcc") if filed and filed.spec.target.is_cuda else None,
        "host": filed.toolkit.get("host_compiler") if filed else None,
        "params": None
        if one.params is None
        else [{"dtype": param.dtype, "shape": list(param.shape)} for param in one.params],
        "bytes": one.bytes,
        "created": one.created.isoformat() if one.created else None,
        "last_used": one.last_used.isoformat() if one.last_used else None,
        "op": filed.spec.name if filed else None,
        "workload": dict(filed.spec.workload) if filed else None,
        "schedule": dict(filed.spec.schedule) if filed else None,
        "record": filed.action_key if filed else None,
    }


def _totals(found: list[Entry]) -> dict[str, Any]:
    return {
        "entries": len(found),
        "bytes": sum(one.bytes for one in found),
        "targets": dict(Counter(one.target or "unknown" for one in found)),
        "tilelang": dict(Counter(one.place.tilelang or "unknown" for one in found)),
    }


def _print_totals(found: list[Entry], root: Path) -> None:
    if not found:
        click.echo(f"no kernels in {render.home(root)}")
        render.note(
            "\nhint: `tlcache warm --shapes FILE` compiles some; `--cache-dir` names another root"
        )
        return
    totals = _totals(found)
    by_target = " · ".join(f"{name} {count:,}" for name, count in sorted(totals["targets"].items()))
    total = render.size(totals["bytes"])
    render.note(
        f"{render.count(len(found), 'kernel')}, {total} in {render.home(root)}      {by_target}"
    )
