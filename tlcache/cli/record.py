"""`tlcache record`: the workloads that running processes met, as a shapes.json."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tlcache import agents, recorded
from tlcache.cli import options, render
from tlcache.errors import CacheRootError, TlcacheError, UsageError
from tlcache.recorded import Document

__all__ = ["command"]

_PATIENCE = 5.0
"""Seconds that an agent has: of many kernels it has to write much."""


@click.command("record")
@click.option(
    "--pid",
    "pids",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="PID",
    help="Ask this process (repeatable); by default every one that has an agent.",
)
@click.option(
    "-o",
    "--output",
    default="-",
    metavar="FILE",
    help="The shapes.json to write, or to merge into; - is standard output (the default).",
)
@click.option(
    "--check",
    metavar="FILE",
    help="Replay the kernels of this recording up to TileLang's keys, compile nothing, and list as "
    "such those whose key is another one now.",
)
@options.json_output
def command(pids: tuple[int, ...], output: str, check: str | None, json_wanted: bool) -> int:
    """Write the workloads that running processes met as a shapes.json.

    `tlcache warm` takes the file as it is. A file that is there keeps what it has.
    """
    if check is not None:
        if pids or output != "-":
            raise UsageError(
                "--check is about a file that is there, and --pid and -o about processes",
                hint=f"`tlcache record --check {shlex.quote(check)}`",
            )
        return _checked(check, json_wanted)
    if json_wanted and output == "-":
        raise UsageError(
            "--json describes what was written, and without -o that is on standard output already",
            hint="`tlcache record` without `--json` writes the document",
        )
    told = _asked(pids)
    found = recorded.empty()
    for document in told.values():
        found = recorded.merged(found, document)
    if output == "-":
        click.echo(json.dumps(found, indent=1))
        _tell_unreplayable(found)
        return 0
    path = Path(os.path.abspath(output))
    before = recorded.read(path) or recorded.empty()
    after = _kept(path, lambda: recorded.update(path, found))
    added = len(after["workloads"]) - len(before["workloads"])
    if json_wanted:
        render.emit_json(
            {
                "file": str(path),
                "pids": sorted(told),
                "workloads": len(after["workloads"]),
                "added": added,
                "unreplayable": after.get("unreplayable", []),
            }
        )
        return 0
    click.echo(
        f"{render.count(len(found['workloads']), 'workload')} of "
        f"{len(told)} {'process' if len(told) == 1 else 'processes'}  {added} new in {output}"
    )
    _tell_unreplayable(found)
    return 0


def _checked(file: str, json_wanted: bool) -> int:
    """Compare a recording's kernels with their replays. 1 where one cannot be made again."""
    from tlcache.warm import comparing, shapes

    shapes.have_found(shapes.load(file))
    path = Path(os.path.abspath(file))
    document = recorded.read(path) or recorded.empty()
    known = comparing.checkable(document)
    verdicts = comparing.verdicts(known, path)
    after = _kept(path, lambda: recorded.sort_out(path, verdicts))
    lost = sum(1 for verdict in verdicts.values() if verdict)
    if json_wanted:
        render.emit_json(
            {
                "file": str(path),
                "checked": len(verdicts),
                "same": len(verdicts) - lost,
                "unreplayable": after.get("unreplayable", []),
            }
        )
    else:
        _tell_unreplayable(after)
        click.echo(
            f"{render.count(len(verdicts), 'recorded kernel')}  {len(verdicts) - lost} with the "
            f"same key  {lost} not to be replayed"
        )
    return 1 if lost else 0


def _asked(pids: tuple[int, ...]) -> dict[int, Document]:
    """The documents of the processes that were asked for, by pid.

    Raises:
        TlcacheError: One has no agent, or does not answer.
    """
    found, troubles = agents.find()
    for trouble in troubles:
        render.note(f"note: {trouble.message}")
    if pids:
        found = [one for one in found if one.address.pid in pids]
        found += [one for pid in pids for one in agents.named(pid) if one not in found]
    answers = agents.gather(found, "/v1/workloads", seconds=_PATIENCE)
    by_pid = {answer.pid: answer for answer in answers if not pids or answer.pid in pids}
    hint = "start it by `tlcache run`, or set TLCACHE_AGENT=1 where it imports tlcache"
    for pid in pids:
        if pid not in by_pid:
            what = "has no agent" if os.path.exists(f"/proc/{pid}") else "is not running"
            raise TlcacheError(f"the process {pid} {what}", hint=hint)
    if not by_pid:
        raise TlcacheError("no process here has an agent", hint=hint)
    told: dict[int, Document] = {}
    for pid, answer in by_pid.items():
        shapes: Any = (answer.document or {}).get("shapes")
        if recorded.is_document(shapes):
            told[pid] = shapes
        elif pids:
            raise TlcacheError(f"the process {pid} {answer.trouble or 'tells no workloads'}")
        else:
            render.note(f"note: the process {pid} {answer.trouble or 'tells no workloads'}")
    return told


def _kept(path: Path, keep: Callable[[], Document]) -> Document:
    try:
        return keep()
    except OSError as error:
        raise CacheRootError(
            f"{path} cannot be written: {(error.strerror or str(error)).lower()}",
            hint="it takes a file in a directory that you can write",
        ) from error


def _tell_unreplayable(document: Document) -> None:
    for one in document.get("unreplayable", ()):
        params = f" ({', '.join(one['params'])})" if one.get("params") else ""
        remedy = f"; {one['remedy']}" if one.get("remedy") else ""
        render.note(f"not to be warmed: {one['kernel']}{params}: {one.get('reason')}{remedy}")
