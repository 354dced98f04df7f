"""`tlcache why`: for each kernel that is not in the cache, what would have to be otherwise."""

from __future__ import annotations

import json
import logging
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tlcache import operators
from tlcache import targets as target_names
from tlcache.cli import options, render
from tlcache.errors import TargetError, UsageError
from tlcache.store import roots, schedules
from tlcache.store.trust import Trust
from tlcache.targets import CPU, Target
from tlcache.unrestored import Calls
from tlcache.warm import plan, questions, shapes
from tlcache.warm.shapes import Shapes, Wanted
from tlcache.why import Cause, Reader

__all__ = ["command"]

_LINE = "the command line"


@click.command("why")
@click.argument("workload", nargs=-1, metavar="[OP FIELD=VALUE ...]")
@click.option("--shapes", "path", metavar="FILE", help="The workloads to ask about.")
@click.option(
    "--schedule", "schedule", multiple=True, metavar="FIELD=VALUE", help="Not the default schedule."
)
@click.option(
    "--target",
    "spellings",
    multiple=True,
    metavar="TARGET",
    help="Asked for sm80, sm90, h100, cpu … (repeatable); wins over the file's targets.",
)
@options.cache_dir
@options.json_output
def command(
    workload: tuple[str, ...],
    path: str | None,
    schedule: tuple[str, ...],
    spellings: tuple[str, ...],
    cache_dir: str | None,
    json_wanted: bool,
) -> int:
    """Say for each workload that is not in the cache what would have to be otherwise.

    Of a shapes.json, or of one kernel like `rms_norm M=1 N=4096 dtype=bfloat16`. The exit code is
    1 if any is missing.
    """
    if (path is None) == (not workload):
        raise UsageError(
            "`tlcache why` takes either --shapes or one workload",
            hint="like `tlcache why rms_norm M=1 N=4096 dtype=bfloat16 --target sm90`",
        )
    if path is not None and schedule:
        raise UsageError(
            "--schedule goes with one workload, not with --shapes",
            hint="a document has its schedules in its workloads",
        )
    document = shapes.load(path) if path is not None else _document(workload, schedule)
    shapes.have_found(document)  # as for `warm`: factories of the project at hand
    source = path or _LINE
    places = roots.chain(cache_dir)
    root = places[0]
    for place in places:
        if place.exists():
            Trust(place).check_root()
    chosen = _targets(document, source, spellings)
    wanted = shapes.expand(document, source, chosen, schedules.Chooser(root, (), places[1:]))
    logging.getLogger("tlcache").setLevel(logging.ERROR)  # what is damaged is told below
    reader = Reader(root, places[1:])
    told = questions.answers(wanted)
    own = Calls(places, reader)
    causes = [
        (
            one,
            own.cause(one.spec, told[one.spec], one.key)
            if one.spec in told
            else reader.cause(one.spec),
        )
        for one in wanted
    ]
    counts = Counter(cause.kind for _, cause in causes)
    if json_wanted:
        render.emit_json(
            {
                "root": str(root),
                "kernels": [_as_json(one, cause) for one, cause in causes],
                "summary": {"total": len(causes), "hits": counts["hit"], "causes": dict(counts)},
            }
        )
    else:
        _print(causes, path, spellings, cache_dir, _not_planned(causes, places))
    return 1 if any(map(_is_missing, (cause for _, cause in causes))) else 0


def _is_missing(cause: Cause) -> bool:
    """Whether a start has to compile it, or to trace what could have been restored."""
    return cause.kind != "hit" and not (cause.kind == "not restorable" and cause.loadable)


def _not_planned(causes: list[tuple[Wanted, Cause]], places: Sequence[Path]) -> int:
    """How many of those that are missing a warm would take for present."""
    missing = [
        one for one, cause in causes if _is_missing(cause) and not operators.owns(one.spec.kernel)
    ]
    return sum(item.outcome is not None for item in plan.make(missing, places))


def _document(workload: tuple[str, ...], schedule: tuple[str, ...]) -> Shapes:
    """One workload of the command line as a shapes document."""
    from pydantic import ValidationError

    name, values = workload[0], _values(workload[1:])
    one: dict[str, Any] = (
        {"kernel": name, "args": values} if ":" in name else {**values, "op": name}
    )
    if schedule:
        one["schedule"] = _values(schedule)
    try:
        return Shapes.model_validate({"version": 1, "workloads": [one]})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise UsageError(
            f"{shlex.join(workload)!r} is no workload: {first['msg'][0].lower()}{first['msg'][1:]}",
            hint="like `tlcache why rms_norm M=1 N=4096 dtype=bfloat16`",
        ) from error


def _values(words: tuple[str, ...]) -> dict[str, Any]:
    """FIELD=VALUE, the value as JSON or else as the text that it is."""
    found: dict[str, Any] = {}
    for word in words:
        field, given, text = word.partition("=")
        if not given or not field:
            raise UsageError(
                f"{word!r} is not of the form FIELD=VALUE", hint="like `M=1 dtype=bfloat16`"
            )
        if field in found:
            raise UsageError(
                f"{field} is given twice", hint=f"several values are a list: `{field}='[1, 2]'`"
            )
        try:
            found[field] = json.loads(text)
        except (ValueError, RecursionError):
            found[field] = text
    return found


def _targets(document: Shapes, source: str, spellings: tuple[str, ...]) -> list[Target]:
    """As `warm` chooses them."""
    if spellings:
        return list(dict.fromkeys(target_names.parse(spelling) for spelling in spellings))
    if found := shapes.targets(document, source):
        return found
    try:
        return [target_names.detect()]
    except TargetError:
        render.note("No GPU here, and no target in the file or by `--target`: asking for cpu.")
        return [CPU]


def _as_json(one: Wanted, cause: Cause) -> dict[str, Any]:
    spec = one.spec
    return {
        "action_key": cause.action_key,
        "where": one.where,
        "op": one.op,
        "kernel": spec.kernel,
        "workload": spec.to_json()["workload"],
        "schedule": spec.to_json()["schedule"],
        "target": spec.target.name,
        "cause": cause.kind,
        "detail": cause.detail,
        "differences": [
            {"what": each.kind, "there": each.there, "here": each.here}
            for each in cause.differences
        ],
        "nearest": cause.nearest,
        "root": cause.root,
        "loadable": cause.loadable,
        "hint": cause.hint,
    }


def _print(
    causes: list[tuple[Wanted, Cause]],
    path: str | None,
    spellings: tuple[str, ...],
    cache_dir: str | None,
    not_planned: int,
) -> None:
    """Say the causes, and what to do about them; no warm would make `not_planned` of them."""
    told = [cause for _, cause in causes if cause.kind != "hit"]
    missing = [cause for cause in told if _is_missing(cause)]
    for cause in told:
        click.echo(f"{cause.kind:<17}{cause.spec}")
        click.echo(f"{'':<17}{cause.detail}")
    traced = len(told) - len(missing)
    if not missing:
        note = f", of which TileLang traces {traced:,} at each start" if traced else ""
        render.note(f"{render.count(len(causes), 'kernel')}, all there{note}")
        return
    counts = Counter(cause.kind for cause in missing)
    named = " · ".join(f"{kind} {count:,}" for kind, count in counts.items())
    are = "is" if len(missing) == 1 else "are"
    note = f"; TileLang traces {traced:,} more at each start" if traced else ""
    render.note(
        f"\n{len(missing):,} of {render.count(len(causes), 'kernel')} {are} missing: {named}{note}"
    )
    for hint in dict.fromkeys(cause.hint for cause in missing if cause.hint is not None):
        render.note(f"\nhint: {hint}")
    warmable = sum(cause.hint is None and cause.kind != "failed" for cause in missing)
    warmable -= not_planned
    if path is not None and warmable > 0:
        words = ["tlcache", "warm", "--shapes", path]
        for spelling in spellings:
            words += ["--target", spelling]
        words += ["--cache-dir", cache_dir] if cache_dir is not None else []
        render.note(f"\nhint: `{shlex.join(words)}` compiles what is missing, and only that")
    if not_planned:
        render.note(
            "hint: a start of the program by `tlcache run` files the calls of kernels that were "
            "compiled already"
        )
    if counts["damaged"]:
        render.note("hint: `tlcache verify --repair` takes what is damaged out of the way")
