"""`tlcache warm`: shapes.json in, records out."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import click

from tlcache import targets as target_names
from tlcache.cli import options, render
from tlcache.cli import share as sharing
from tlcache.cli.share import Published, Share
from tlcache.cli.signals import Terminated, terminable
from tlcache.errors import CacheRootError, TargetError, TlcacheError, UsageError
from tlcache.fingerprint import platform_name, tilelang_version
from tlcache.store import coverage, layout, locks, roots, schedules
from tlcache.store.trust import Trust, set_umask
from tlcache.targets import CPU, Target
from tlcache.warm import descendants, plan, pool, shapes
from tlcache.warm import document as document_file
from tlcache.warm.covering import Covering
from tlcache.warm.outcome import Outcome, Status
from tlcache.warm.plan import Item

__all__ = ["command"]


def _print_schema(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(json.dumps(shapes.json_schema(), indent=2))
        ctx.exit()


@click.command("warm")
@click.option("--shapes", "path", required=True, metavar="FILE", help="The workloads to have warm.")
@click.option(
    "--target",
    "spellings",
    multiple=True,
    metavar="TARGET",
    help="Compile for sm80, sm90, h100, cpu, auto … (repeatable); wins over the file's targets.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    help="Compiles at a time; by default $TLCACHE_JOBS, else what cores and memory allow.",
)
@click.option(
    "--schedules",
    "schedules_path",
    metavar="FILE",
    help="Tuned schedules, as `tlcache tune -o` writes them; the cache root gets them, too.",
)
@options.cache_dir
@options.overlay
@sharing.options
@click.option("--dry-run", is_flag=True, help="Show what would be compiled, and compile nothing.")
@click.option("--check", is_flag=True, help="Exit with 1 if anything is missing; compile nothing.")
@click.option(
    "--keep-going/--fail-fast", default=True, help="After a failure, go on (the default) or stop."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Kill a kernel's compile after this long.",
)
@click.option("--verbose", "-v", is_flag=True, help="Show what TileLang and the compilers print.")
@options.json_output
@click.option("--steps", is_flag=True, help="Write each step to stderr, as a line of JSON.")
@click.option("--led", is_flag=True, hidden=True, help="Who started this leads already.")
@click.option(
    "--schema",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_schema,
    help="Print the JSON Schema of a shapes document.",
)
def command(
    path: str,
    spellings: tuple[str, ...],
    jobs: int | None,
    schedules_path: str | None,
    cache_dir: str | None,
    overlay: str | None,
    share: Share,
    dry_run: bool,
    check: bool,
    keep_going: bool,
    timeout: float | None,
    verbose: bool,
    json_wanted: bool,
    steps: bool,
    led: bool,
) -> int:
    """Compile the kernels of a shapes.json before a process needs them.

    Kernels that have a valid record are skipped. Targets need no GPU, only nvcc (and cpu only a C++
    compiler).
    """
    if layout.caching_disabled():
        raise CacheRootError(
            "TILELANG_DISABLE_CACHE is set, so TileLang would keep nothing of what is compiled",
            hint="`unset TILELANG_DISABLE_CACHE`",
        )
    if led:
        descendants.dies_with_parent()
    set_umask()
    data = document_file.read(path)
    document = shapes.parsed(path, data)
    tuned = schedules.load(schedules_path) if schedules_path is not None else []
    shapes.have_found(document)
    chosen = _targets(document, path, spellings)
    places = roots.chain(cache_dir)
    if overlay is not None:
        places = [Path(overlay), *(place for place in places if place != Path(overlay))]
    root = places[0]
    for there in places:
        if there.exists():
            Trust(there).check_root()
    chooser = schedules.Chooser(root, tuned, places[1:])
    share.ready(root)
    if share.place is not None and len(places) > 1:
        raise UsageError(
            "`--publish` sends what one root has, and here are several in force",
            hint="name one by `--cache-dir`, without `--overlay`",
        )
    wanted = shapes.expand(document, path, chosen, chooser)
    for unfit in chooser.unfit:
        render.note(
            f"note: the tuned schedule of {unfit.spec.title} ({unfit.spec.schedule_text}) does not "
            "fit the kernel any more; it is left out"
        )
    wanted, share = share.taken(wanted)
    again = _command(path, spellings, schedules_path, cache_dir, overlay, share)
    items = plan.make(wanted, places)
    if check:
        for item in items:
            if chooser.missing(item.wanted.spec):
                item.outcome = None  # a process that starts now would ask for another schedule
    todo = [item for item in items if item.outcome is None]
    if check or dry_run:
        for item in todo:
            item.outcome = Outcome("missing" if check else "planned")
        return _report(items, document, root, chosen, json_wanted, again, share)
    name = coverage.key(data, [target.name for target in chosen])
    covering = None if share.is_partial else Covering(name, document, chosen, places)
    progress: _Quiet | None = _Steps(items) if steps else None
    interrupted = 0
    if todo or root.exists() or len(places) == 1:
        layout.make_skeleton(root, tilelang_version(), platform_name())
    with terminable():
        try:
            with ExitStack() as stack:
                if todo and not led:
                    with suppress(CacheRootError):  # of which each kernel will tell
                        stack.enter_context(locks.leading(root, name, _tell_waiting))
                plan.look(todo, places)
                plan.without_toolchain(todo)
                todo = [item for item in todo if item.outcome is None]
                if todo and covering is not None:
                    covering.write(items)
                _compile(todo, root, jobs, timeout, keep_going, verbose, progress)
                chooser.install(
                    item.wanted.spec
                    for item in items
                    if item.outcome is not None and item.outcome.status in ("compiled", "present")
                )
        except KeyboardInterrupt:
            interrupted = signal.SIGINT
        except Terminated:
            interrupted = signal.SIGTERM
    if covering is not None and (todo or not covering.known(items)):
        covering.write(items)
    published, fault = None, None
    if not interrupted:
        try:
            with terminable():
                published = share.published(root, items)
        except KeyboardInterrupt:
            interrupted = signal.SIGINT
        except Terminated:
            interrupted = signal.SIGTERM
        except TlcacheError as error:
            fault = error  # after what was compiled is told
    code = _report(items, document, root, chosen, json_wanted, again, share, published)
    if fault is not None:
        raise fault
    return 128 + interrupted if interrupted else code


def _targets(document: shapes.Shapes, path: str, spellings: tuple[str, ...]) -> list[Target]:
    """The targets of the command line, else of the file, else of this machine's GPU, else the
    CPU.
    """
    if spellings:
        chosen: dict[Target, None] = {}
        for spelling in spellings:
            target = target_names.parse(spelling)
            chosen[target] = None
            if explained := target_names.note(spelling, target):
                render.note(explained)
        return list(chosen)
    if found := shapes.targets(document, path):
        return found
    try:
        return [target_names.detect()]
    except TargetError:
        render.note("No GPU here, and no target in the file or by `--target`: warming for cpu.")
        return [CPU]


def _command(
    path: str,
    spellings: tuple[str, ...],
    schedules_path: str | None,
    cache_dir: str | None,
    overlay: str | None,
    share: Share,
) -> str:
    """The command that compiles what is missing, as a shell takes it."""
    words = ["tlcache", "warm", "--shapes", path]
    for spelling in spellings:
        words += ["--target", spelling]
    if schedules_path is not None:
        words += ["--schedules", schedules_path]
    for option, given in (("--cache-dir", cache_dir), ("--overlay", overlay)):
        words += [option, given] if given is not None else []
    return shlex.join([*words, *share.words()])


def _tell_waiting() -> None:
    render.note("waiting for another process that warms the same kernels")


def _compile(
    todo: list[Item],
    root: Path,
    jobs: int | None,
    timeout: float | None,
    keep_going: bool,
    verbose: bool,
    told: _Quiet | None,
) -> None:
    """Compile what is left."""
    if not todo:
        return
    with nullcontext(told) if told else _progress(len(todo)) as progress:
        for index, outcome in pool.run(
            [item.wanted.spec for item in todo],
            os.fspath(root.absolute()),
            jobs=jobs or pool.default_jobs(),
            keys=[item.wanted.key for item in todo],
            timeout=timeout,
            fail_fast=not keep_going,
            quiet=not verbose,
            on_start=lambda index: progress.started(todo[index]),
        ):
            todo[index].outcome = outcome
            progress.ended(todo[index])


class _Quiet:
    """Progress where stderr is no terminal: failures as they happen, nothing else."""

    def started(self, item: Item) -> None:
        pass

    def ended(self, item: Item) -> None:
        pass


class _Bar(_Quiet):
    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.progress = Progress(
            TextColumn("warming"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
        self.task = self.progress.add_task("starting TileLang", total=total)

    def started(self, item: Item) -> None:
        self.progress.update(self.task, description=str(item.wanted.spec))

    def ended(self, item: Item) -> None:
        self.progress.advance(self.task)


class _Steps(_Quiet):
    """Progress for a program: what is planned, and each kernel as it is begun and as it ends."""

    def __init__(self, items: list[Item]) -> None:
        counts = Counter(item.outcome.status for item in items if item.outcome is not None)
        self._write({"step": "planned", "counts": {"total": len(items), **counts}})

    def started(self, item: Item) -> None:
        told = {"action_key": item.action_key, "kernel": item.wanted.spec.title}
        self._write({"step": "started", **told})

    def ended(self, item: Item) -> None:
        assert item.outcome is not None
        told = {"action_key": item.action_key, "status": item.outcome.status}
        self._write({"step": "ended", **told, "seconds": round(item.outcome.seconds, 3)})

    def _write(self, step: dict[str, Any]) -> None:
        click.echo(json.dumps(step), err=True)


@contextmanager
def _progress(total: int) -> Iterator[_Quiet]:
    if not sys.stderr.isatty():
        yield _Quiet()
        return
    bar = _Bar(total)
    with bar.progress:
        yield bar


def _report(
    items: list[Item],
    document: shapes.Shapes,
    root: Path,
    chosen: list[Target],
    json_wanted: bool,
    again: str,
    share: Share,
    published: Published | None = None,
) -> int:
    outcomes = [item.outcome or Outcome("missing") for item in items]
    counts = Counter(outcome.status for outcome in outcomes)
    saved = sum(outcome.saved_seconds for outcome in outcomes)
    written = sum(outcome.bytes for outcome in outcomes)
    if json_wanted:
        render.emit_json(
            {
                "root": str(root),
                "targets": [target.name for target in chosen],
                "shard": share.as_json(),
                "published": published.as_json() if published is not None else None,
                "kernels": [_kernel(item) for item in items],
                "unreplayable": [one.model_dump() for one in document.unreplayable],
                "summary": {
                    "total": len(items),
                    **{status: counts[status] for status in _STATUSES},
                    "saved_seconds": round(saved, 3),
                    "bytes": written,
                },
            }
        )
    else:
        _print_unreplayable(document)
        _print_report(items, counts, saved, written, again)
        if published is not None:
            published.show()
    if any(outcome.fault for outcome in outcomes):
        return 3
    return 1 if counts["failed"] or counts["missing"] else 0


_STATUSES: tuple[Status, ...] = (
    "compiled",
    "present",
    "unrecorded",
    "failed",
    "missing",
    "planned",
)


def _kernel(item: Item) -> dict[str, Any]:
    spec, outcome = item.wanted.spec, item.outcome or Outcome("missing")
    said = spec.to_json()
    return {
        "action_key": item.action_key,
        "where": item.wanted.where,
        "op": item.wanted.op,
        "kernel": spec.kernel,
        "title": spec.title,
        "workload": said["workload"],
        "schedule": said["schedule"],
        "target": spec.target.name,
        "status": outcome.status,
        "seconds": round(outcome.seconds, 3),
        "bytes": outcome.bytes,
        "error": outcome.error,
        "hint": outcome.hint,
    }


def _print_report(
    items: list[Item],
    counts: Counter[Status],
    saved: float,
    written: int,
    again: str,
) -> None:
    for item in items:
        if item.outcome is not None and item.outcome.status == "failed":
            named, told = str(item.wanted.spec), _line(item.outcome.error)
            render.note(f"failed: {named}: {told.removeprefix(named).strip()}")
    hints = {item.outcome.hint: None for item in items if item.outcome and item.outcome.hint}
    for hint in hints:
        render.note(f"\nhint: {hint}")
    if counts["planned"]:
        for item in items:
            if item.outcome is not None and item.outcome.status == "planned":
                click.echo(f"would compile  {item.wanted.spec}")
        click.echo(
            f"{render.count(len(items), 'kernel')}  {counts['planned']} to compile"
            f"  {counts['present']} already there"
        )
        return
    missing = [item for item in items if item.outcome is None or item.outcome.status == "missing"]
    if missing and not counts["compiled"] and not counts["failed"]:
        names = [item.wanted.spec.title for item in missing]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        click.echo(
            f"{len(names)} of {render.count(len(items), 'kernel')} "
            f"{'is' if len(names) == 1 else 'are'} missing: {', '.join(names[:5])}{more}"
        )
        render.note(f"\nhint: `{again}` compiles them")
        return
    parts = [
        render.count(len(items), "kernel"),
        f"{counts['compiled']} compiled",
        f"{counts['present']} already there",
        f"{counts['failed']} failed",
    ]
    if counts["unrecorded"]:
        parts.append(
            f"{counts['unrecorded']} without a record (only TileLang itself can load them)"
        )
    if missing:
        parts.append(f"{len(missing)} not reached")
    click.echo("  ".join(parts) + (f"      {render.size(written)} written" if written else ""))
    if saved:
        click.echo(
            f"The next start saves about {render.duration(saved)} of compiling on each process."
        )
    if missing:
        render.note(f"\nhint: `{again}` compiles what is missing, and only that")


def _print_unreplayable(document: shapes.Shapes) -> None:
    for one in document.unreplayable:
        params = f" ({', '.join(one.params)})" if one.params else ""
        remedy = f"; {one.remedy}" if one.remedy else ""
        render.note(f"not to be warmed: {one.kernel}{params}: {one.reason}{remedy}")


def _line(error: str | None) -> str:
    return (error or "unknown").splitlines()[0]
