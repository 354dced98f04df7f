"""`tlcache prune`: delete what a policy names, after showing it."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from tlcache.cli import options, render
from tlcache.errors import EnvironmentFault, RuntimeLibraryError, UsageError
from tlcache.fingerprint import tilelang_version
from tlcache.store import candidates, layout, mapped, prune, removal, select
from tlcache.store.candidates import Candidate
from tlcache.store.mapped import Seen
from tlcache.store.prune import Goes, Plan, Stays
from tlcache.store.removal import Removed
from tlcache.store.select import Filter

__all__ = ["command"]

_NOT_POLICY = {"cache_dir", "dry_run", "yes", "offline", "json_wanted"}


@click.command("prune")
@options.filters
@click.option(
    "--max-size",
    metavar="SIZE",
    help="Come down to so many bytes on disk, like 5GiB: the least recently used go first.",
)
@click.option(
    "--keep-last",
    type=click.IntRange(0),
    metavar="N",
    help="Keep the N most recently used of each kernel and target.",
)
@click.option("--duplicates", is_flag=True, help="Kernels that differ from another by key only.")
@click.option(
    "--orphans",
    is_flag=True,
    help="Cuda-binaries without a kernel, records without an entry, stale staging.",
)
@click.option(
    "--stale-versions", is_flag=True, help="What other TileLang versions wrote than the installed."
)
@click.option("--dry-run", is_flag=True, help="Show what would go, and delete nothing.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask; needed where there is no terminal.")
@click.option(
    "--offline", is_flag=True, help="No other host uses this root; for network file systems."
)
@options.cache_dir
@options.json_output
@click.pass_context
def command(
    ctx: click.Context,
    wanted: Filter,
    max_size: str | None,
    keep_last: int | None,
    duplicates: bool,
    orphans: bool,
    stale_versions: bool,
    dry_run: bool,
    yes: bool,
    offline: bool,
    cache_dir: str | None,
    json_wanted: bool,
) -> int:
    """Delete kernels with their records, and the cuda-binaries that only they need.

    The filters say which kernels are meant. --max-size, --duplicates, --orphans and
    --stale-versions choose among those; without one of them all go. What a process has loaded
    stays.
    """
    policy = prune.Policy(
        wanted,
        select.bytes_of(max_size) if max_size is not None else None,
        keep_last,
        duplicates,
        orphans,
        stale_versions,
    )
    if not policy:
        raise UsageError(
            "nothing says what to prune",
            hint="`tlcache prune --unused-for 30d --dry-run` shows what that would delete; "
            "`tlcache prune --help` has the other choices",
        )
    root = layout.cache_root(cache_dir)
    if not dry_run:
        _check(root, yes, offline)
    gathered = candidates.gather(root)
    plan = prune.make(gathered.candidates, policy, installed=_installed())
    if dry_run:
        return _report(root, plan, None, gathered.seen, json_wanted)
    if plan.goes and not yes:
        _show(plan, gathered.seen)
        if not click.confirm(f"Delete {_things(plan.goes)}?", default=False, err=True):
            render.note("nothing was deleted")
            return 1
    with _progress(len(plan.goes)) as dealt:
        done = removal.apply(
            plan,
            gathered.filings,
            _policy_text(ctx),
            roots=tuple(gathered.filings),
            waiting=lambda: render.note("waiting for another prune of this root to end"),
            done=dealt,
        )
    return _report(root, plan, done, done.seen if plan.goes else gathered.seen, json_wanted)


def _check(root: Path, yes: bool, offline: bool) -> None:
    """Refuse what must not be tried, before anything is read."""
    if not yes and not sys.stdin.isatty():
        raise UsageError(
            "prune asks before it deletes, and there is no terminal to ask on",
            hint="add `--yes` to delete, or `--dry-run` to see what would go",
        )
    kind = mapped.network(root)
    if kind is not None and not offline:
        raise EnvironmentFault(
            f"{root} is on a network file system ({kind}): other hosts may have kernels loaded "
            "from it, and deleting one there can break them",
            hint="add `--offline` once nothing on any host uses it, or `--dry-run` to look",
        )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on a terminal, where it takes longer than to read what it says."""
    if total < 500 or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("pruning", total=total)
        yield lambda count: bar.advance(task, count)


def _installed() -> str | None:
    try:
        return tilelang_version()
    except RuntimeLibraryError:
        return None


def _policy_text(ctx: click.Context) -> str:
    """The options that chose, as they were given."""
    words = []
    for option in ctx.command.params:
        value = ctx.params.get(option.name or "")
        if option.name in _NOT_POLICY or value is None or value is False or value == ():
            continue
        for one in value if isinstance(value, tuple) else (value,):
            words.append(option.opts[0] if one is True else f"{option.opts[0]} {one}")
    return " ".join(words)


_KINDS = {
    "kernel": "kernel",
    "cuda-binary": "cubin",
    "record": "stray record",
    "staging": "staging leftover",
    "autotuner": "autotuner result",
    "frontend": "index file",
}


def _things(goes: Iterable[Goes]) -> str:
    """How many there are of each kind, like `371 kernels and 8 cubins`."""
    counts = Counter(one.candidate.entry.place.kind for one in goes)
    told = [render.count(counts[kind], what) for kind, what in _KINDS.items() if counts[kind]]
    return " and ".join([", ".join(told[:-1]), told[-1]] if len(told) > 1 else told)


def _with_records(goes: Iterable[Goes]) -> str:
    goes = list(goes)
    records = sum(len(one.candidate.records) for one in goes)
    return f"{_things(goes)}, with {render.count(records, 'record')}" if records else _things(goes)


def _show(plan: Plan, seen: Seen) -> None:
    """The plan in short, before it is asked for."""
    render.note(f"{_with_records(plan.goes)}: {render.size(plan.bytes)}")
    _note_kept(plan.stays, seen)


def _note_kept(stays: Iterable[Stays], seen: Seen) -> None:
    for (why, _), count in Counter((one.why, one.fault) for one in stays).items():
        render.note(f"{count:,} kept: {why}")
    unknown = sum(seen.unreadable.values())
    if unknown or seen.hidden:
        whose = ", ".join(f"uid {uid}" for uid in sorted(seen.unreadable))
        told = f"{unknown:,} processes" if unknown > 1 else "1 process"
        render.note(
            "note: /proc hides the processes of other users; what they have loaded is not known"
            if seen.hidden
            else f"note: {told} of {whose} could not be read; what they have loaded is not known"
        )


def _report(root: Path, plan: Plan, done: Removed | None, seen: Seen, json_wanted: bool) -> int:
    stays = plan.stays + (done.stays if done is not None else ())
    code = 1 if any(one.fault for one in stays) else 0
    if json_wanted:
        render.emit_json(_document(root, plan, done, stays, seen))
        return code
    if done is None and plan.goes:
        render.table(
            ["KEY", "KIND", "KERNEL", "TARGET", "TILELANG", "SIZE", "USED", "WHY"],
            map(_row, plan.goes),
            right=["SIZE"],
            spare=["TILELANG"],
        )
    if done is None:
        what = f"{_with_records(plan.goes)} would go: {render.size(plan.bytes)}"
    else:
        what = f"deleted {_with_records(done.gone)}: {render.size(done.bytes)} freed"
    if not (plan.goes if done is None else done.gone):
        what = f"nothing {'was deleted' if plan.goes else 'to delete'} in {render.home(root)}"
    click.echo(what)
    _note_kept(stays, seen)
    if done is not None and done.leftovers[0]:
        count, size = done.leftovers
        render.note(
            f"besides {render.count(count, 'file')}, {render.size(size)}, that an interrupted "
            "prune had left in the trash"
        )
    if plan.over:
        render.note(f"what stays is {render.size(plan.over)} larger than was asked for")
    return code


def _row(one: Goes) -> list[str]:
    found = one.candidate.entry
    return [
        found.place.key[:12],
        found.place.kind,
        found.kernel or "–",
        found.target or "–",
        found.place.tilelang or "–",
        render.size(one.candidate.physical),
        render.ago(found.last_used or found.created),
        one.why,
    ]


def _document(
    root: Path, plan: Plan, done: Removed | None, stays: tuple[Stays, ...], seen: Seen
) -> dict[str, Any]:
    gone = done.gone if done is not None else plan.goes
    return {
        "root": os.fspath(root),
        "dry_run": done is None,
        "deleted" if done is not None else "would_delete": [
            {**_thing(one.candidate), "why": one.why} for one in gone
        ],
        "kept": [{**_thing(one.candidate), "why": one.why, "fault": one.fault} for one in stays],
        "bytes": done.bytes if done is not None else plan.bytes,
        "over": plan.over,
        "leftovers": {"files": done.leftovers[0], "bytes": done.leftovers[1]} if done else None,
        "unreadable_processes": {
            "count": sum(seen.unreadable.values()),
            "uids": sorted(seen.unreadable),
            "hidden": seen.hidden,
        },
    }


def _thing(one: Candidate) -> dict[str, Any]:
    found = one.entry
    used = found.last_used or found.created
    return {
        "key": found.place.key,
        "kind": found.place.kind,
        "path": one.location,
        "kernel": found.kernel,
        "target": found.target,
        "tilelang": found.place.tilelang,
        "bytes": one.physical,
        "last_used": used.isoformat() if used is not None else None,
        "records": [filed.action_key for filed in one.records],
        "pids": [process.pid for process in one.held],
    }
