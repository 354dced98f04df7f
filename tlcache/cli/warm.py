"""`tlcache warm`: shapes.json in, records out."""

from __future__ import annotations

import json
import os
import shlex
import signal
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

import click

from tlcache import targets as target_names
from tlcache.cli import options, render
from tlcache.cli import share as sharing
from tlcache.cli.share import Share
from tlcache.cli.signals import Terminated, terminable
from tlcache.cli.warmed import report
from tlcache.cli.warming import Quiet, Steps, progress
from tlcache.errors import CacheRootError, TargetError, TlcacheError, UsageError
from tlcache.fingerprint import platform_name, tilelang_version
from tlcache.store import coverage, layout, locks, roots, schedules
from tlcache.store.trust import Trust, set_umask
from tlcache.targets import CPU, Target
from tlcache.warm import descendants, plan, pool, shapes
from tlcache.warm import document as document_file
from tlcache.warm.covering import Covering
from tlcache.warm.outcome import Outcome
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
        return report(items, document, root, chosen, json_wanted, again, share)
    name = coverage.key(data, [target.name for target in chosen])
    covering = None if share.is_partial else Covering(name, document, chosen, places)
    told: Quiet | None = Steps(items) if steps else None
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
                _compile(todo, root, jobs, timeout, keep_going, verbose, told)
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
    code = report(items, document, root, chosen, json_wanted, again, share, published)
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
    told: Quiet | None,
) -> None:
    """Compile what is left."""
    if not todo:
        return
    with nullcontext(told) if told else progress(len(todo)) as shown:
        for index, outcome in pool.run(
            [item.wanted.spec for item in todo],
            os.fspath(root.absolute()),
            jobs=jobs or pool.default_jobs(),
            keys=[item.wanted.key for item in todo],
            timeout=timeout,
            fail_fast=not keep_going,
            quiet=not verbose,
            on_start=lambda index: shown.started(todo[index]),
        ):
            todo[index].outcome = outcome
            shown.ended(todo[index])
