"""`tlcache tune`: shapes.json in, the best schedules of this GPU out."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from tlcache import operators, targets
from tlcache.cli import options, render
from tlcache.cli.signals import Terminated, terminable
from tlcache.errors import CacheRootError, TargetError, ToolchainError, UsageError
from tlcache.fingerprint import platform_name, tilelang_version
from tlcache.spec import KernelSpec
from tlcache.store import layout, schedules
from tlcache.store.trust import Trust, set_umask
from tlcache.targets import Target
from tlcache.warm import pool, shapes, toolchain, tuning

__all__ = ["command"]


@click.command("tune")
@click.option("--shapes", "path", required=True, metavar="FILE", help="The workloads to tune.")
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    help="Write the schedules here, for `tlcache warm --schedules`; what is there stays.",
)
@click.option(
    "--rows",
    metavar="M,M,…",
    help="Rows to measure a kernel with a symbolic M at.",
    default=",".join(map(str, tuning.DYNAMIC_ROWS)),
    show_default=True,
)
@click.option(
    "--limit", type=click.IntRange(1), help="Candidates of a workload at most; by default all."
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    help="Compiles at a time; by default what cores and memory allow.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Drop a candidate whose compile or measurement takes longer.",
)
@options.cache_dir
@click.option("--dry-run", is_flag=True, help="Show what would be tried; compile nothing.")
@click.option("--verbose", "-v", is_flag=True, help="Show why candidates were dropped.")
@options.json_output
def command(
    path: str,
    output: str | None,
    rows: str,
    limit: int | None,
    jobs: int | None,
    timeout: float,
    cache_dir: str | None,
    dry_run: bool,
    verbose: bool,
    json_wanted: bool,
) -> int:
    """Find the fastest schedules of a shapes.json's workloads on this GPU.

    Every candidate of an operator's schedule space is compiled and measured. The best ones are
    filed in the cache root, compiled, where processes that start from now on take them.
    """
    counts = _rows(rows)
    document = shapes.load(path)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    target = _gpu(dry_run)
    tasks = _tasks(document, path, target, counts, limit)
    kept = schedules.load(output) if output is not None and os.path.exists(output) else []
    if output is not None and not os.access(os.path.dirname(os.path.abspath(output)), os.W_OK):
        raise CacheRootError(
            f"{output} cannot be written: its directory is not there, or read-only"
        )
    if dry_run:
        return _show_plan(tasks, json_wanted)
    if (fault := toolchain.missing(target)) is not None:
        raise fault
    if layout.caching_disabled():
        raise CacheRootError(
            "TILELANG_DISABLE_CACHE is set, so the tuned kernels could not be kept",
            hint="`unset TILELANG_DISABLE_CACHE`",
        )
    set_umask()
    root = layout.cache_root(cache_dir)
    if root.exists():
        Trust(root).check_root()
    layout.make_skeleton(root, tilelang_version(), platform_name())
    workers = jobs or pool.default_jobs()
    results: list[tuning.Result] = []
    total = sum(1 + len(task.candidates) for task in tasks)
    try:
        with _progress(total) as progress, terminable():
            for result in tuning.tune(
                tasks,
                jobs=workers,
                timeout=timeout,
                on_compiled=progress.compiled,
                on_measured=progress.measured,
            ):
                results.append(result)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Terminated:
        return 128 + signal.SIGTERM
    best = [result.tuned for result in results if result.tuned is not None]
    failed = _keep(best, root, workers, timeout)
    if output is not None:
        found = {schedules.key(tuned.spec): tuned for tuned in kept}
        found.update({schedules.key(tuned.spec): tuned for tuned in best})
        try:
            schedules.dump(output, found.values())
        except OSError as error:
            raise CacheRootError(
                f"{output} cannot be written: {error.strerror or error}",
                hint="the schedules are filed in the cache root all the same",
            ) from error
    _report(results, failed, output, path, json_wanted, verbose)
    return 1 if failed or any(result.tuned is None for result in results) else 0


def _rows(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise UsageError(
            f"--rows is {text!r}; it is positive numbers with commas between them",
            hint="`--rows 1,128,4096`",
        )
    return counts


def _gpu(dry_run: bool) -> Target:
    try:
        return targets.detect()
    except TargetError as error:
        if dry_run:
            render.note("No GPU here: showing what would be tried for sm_90a.")
            return targets.parse("sm90")
        raise ToolchainError(
            "tuning measures kernels on a GPU, and there is none here",
            hint="run `tlcache tune` on a GPU host, and give its file to "
            "`tlcache warm --schedules` here",
        ) from error


def _tasks(
    document: shapes.Shapes,
    path: str,
    target: Target,
    counts: tuple[int, ...],
    limit: int | None,
) -> list[tuning.Task]:
    tasks = []
    for wanted in shapes.expand(document, path, [target]):
        operator = operators.get(wanted.op) if wanted.op is not None else None
        if operator is None or operator.candidates is None or operator.example is None:
            render.note(f"note: {wanted.spec.title} has no schedule space; left as it is")
            continue
        default = operator.spec(wanted.spec.workload, target)
        if wanted.spec != default:
            render.note(f"note: {wanted.where} has a schedule of its own; left as it is")
            continue
        tasks.append(tuning.plan(operator, default, counts, limit))
    return tasks


def _show_plan(tasks: list[tuning.Task], json_wanted: bool) -> int:
    total = sum(1 + len(task.candidates) for task in tasks)
    if json_wanted:
        render.emit_json(
            {
                "tasks": [
                    {
                        "op": task.operator.name,
                        "workload": dict(task.default.workload),
                        "target": task.default.target.name,
                        "rows": list(task.rows),
                        "candidates": [
                            dict(spec.schedule) for spec in (task.default, *task.candidates)
                        ],
                    }
                    for task in tasks
                ],
                "candidates": total,
            }
        )
        return 0
    for task in tasks:
        number = render.count(1 + len(task.candidates), "candidate")
        click.echo(f"would try  {number} of {task.default.title}")
    click.echo(f"{render.count(len(tasks), 'workload')}  {render.count(total, 'candidate')}")
    return 0


def _keep(
    best: list[schedules.Tuned], root: Any, jobs: int, timeout: float
) -> dict[KernelSpec, str]:
    """Compile the best into the root, and file their schedules once they are there."""
    failed: dict[KernelSpec, str] = {}
    if not best:
        return failed
    specs = [tuned.spec for tuned in best]
    where = os.fspath(root.absolute())
    for index, outcome in pool.run(specs, where, jobs=jobs, timeout=timeout):
        if outcome.status in ("compiled", "present"):
            schedules.write(root, best[index])
        else:
            failed[specs[index]] = outcome.error or outcome.status
    return failed


class _Quiet:
    def compiled(self, spec: Any) -> None:
        pass

    def measured(self, spec: Any) -> None:
        pass


class _Bars(_Quiet):
    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.progress = Progress(
            TextColumn("{task.fields[phase]:9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
        self.compiling = self.progress.add_task("starting TileLang", total=total, phase="compiling")
        self.measuring = self.progress.add_task("", total=total, phase="measuring")

    def compiled(self, spec: Any) -> None:
        self.progress.update(self.compiling, advance=1, description=spec.title)

    def measured(self, spec: Any) -> None:
        self.progress.update(self.measuring, advance=1, description=str(spec))


@contextmanager
def _progress(total: int) -> Iterator[_Quiet]:
    if not sys.stderr.isatty():
        yield _Quiet()
        return
    bars = _Bars(total)
    with bars.progress:
        yield bars


def _report(
    results: list[tuning.Result],
    failed: dict[KernelSpec, str],
    output: str | None,
    path: str,
    json_wanted: bool,
    verbose: bool,
) -> None:
    if json_wanted:
        render.emit_json({"output": output, "tasks": [_result(one, failed) for one in results]})
        return
    lines = []
    for result in results:
        tuned = result.tuned
        if tuned is None or tuned.default_microseconds is None:
            continue
        gain = 1 - tuned.microseconds / tuned.default_microseconds
        same = dict(tuned.spec.schedule) == dict(tuned.default)
        lines.append(
            (
                result.task.operator.name,
                tuned.spec.workload_text,
                f"{tuned.default_microseconds:.2f} µs",
                f"{tuned.microseconds:.2f} µs",
                "–" if same else f"{gain:.1%}",
                "the default" if same else tuned.spec.schedule_text,
            )
        )
    if lines:
        header = ("OP", "WORKLOAD", "DEFAULT", "TUNED", "GAIN", "SCHEDULE")
        render.table(header, lines)
    for result in results:
        dropped = [trial for trial in result.trials if trial.reason is not None]
        if result.tuned is None:
            render.note(f"failed: {result.task.default.title}: {result.reason}")
        if verbose:
            for trial in dropped:
                render.note(f"dropped: {trial.spec}: {trial.reason}")
    for spec, reason in failed.items():
        render.note(f"failed: {spec}: {reason}")
    count = sum(1 for result in results for trial in result.trials if trial.reason is not None)
    tried = sum(len(result.trials) for result in results)
    note = f"{render.count(len(results), 'workload')}  {tried} candidates  {count} dropped"
    click.echo(note + ("" if verbose or not count else " (`--verbose` says why)"))
    if output is not None:
        render.note(
            f"\nhint: `tlcache warm --shapes {path} --schedules {output}` uses them on hosts "
            "without a GPU"
        )


def _result(result: tuning.Result, failed: dict[KernelSpec, str]) -> dict[str, Any]:
    return {
        "op": result.task.operator.name,
        "workload": dict(result.task.default.workload),
        "target": result.task.default.target.name,
        "rows": list(result.task.rows),
        "tuned": result.tuned.to_json() if result.tuned is not None else None,
        "error": result.reason or (failed.get(result.tuned.spec) if result.tuned else None),
        "trials": [
            {
                "schedule": dict(trial.spec.schedule),
                "microseconds": [round(value, 3) for value in trial.microseconds],
                "dropped": trial.reason,
            }
            for trial in result.trials
        ],
    }
