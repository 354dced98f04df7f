"""`tlcache verify`: whether a cache is sound, and what is not put into quarantine."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tlcache.cli import options, render
from tlcache.errors import CacheRootError
from tlcache.store import layout, roots, trash, verify
from tlcache.store.opened import shown
from tlcache.store.verify import Finding

__all__ = ["command"]

_KEY = re.compile("[0-9a-f]{64}")
_SAME_NOTES = 3
_FAILS = ("error", "warning")
_SPOKEN = {
    "kernel": ("kernel", "kernels"),
    "cuda-binary": ("cuda-binary", "cuda-binaries"),
    "autotuner": ("tuner's result", "tuner's results"),
    "frontend": ("front-end index", "front-end indexes"),
}


@dataclass(frozen=True)
class _Outcome:
    """A finding, and what became of it: where it was moved to, or why it was not."""

    finding: Finding
    moved: str | None = None
    failure: str | None = None
    gone: bool = False
    owned: bool = True  # by the root that is written to

    @property
    def remains(self) -> bool:
        return self.finding.severity in _FAILS and self.moved is None and not self.gone


@click.command("verify")
@options.cache_dir
@click.option("--repair", is_flag=True, help="Put what is broken into <root>/tlcache/quarantine.")
@options.json_output
def command(cache_dir: str | None, repair: bool, json_wanted: bool) -> int:
    """Check every file of a cache, and who could have written it.

    All files are hashed and compared with manifests and records. Exits with 1 while there are
    errors or warnings; notes are only said. What --repair moves is restored by moving it back.
    """
    places = roots.chain(cache_dir)
    root = places[0]
    tally = verify.Tally()
    outcomes: list[_Outcome] = []
    for place in places:
        _listable(place)
        found = _found(place, tally)
        if repair and place == root:
            outcomes += _repaired(root, found)
        else:
            outcomes += [_Outcome(finding, owned=place == root) for finding in found]
    remaining = sum(outcome.remains for outcome in outcomes)
    if json_wanted:
        render.emit_json(
            {
                "root": str(root),
                "checked": {"things": dict(sorted(tally.things.items())), "bytes": tally.bytes},
                "findings": [_as_json(outcome) for outcome in outcomes],
                "remaining": remaining,
            }
        )
    else:
        _print(places, outcomes, tally, cache_dir)
    return 1 if remaining else 0


def _found(root: Path, tally: verify.Tally) -> list[Finding]:
    """The plan, with a line on a terminal that says how far it is."""
    if not sys.stderr.isatty():
        return list(verify.plan(root, tally=tally))

    def progress() -> None:
        things = render.count(sum(tally.things.values()), "thing")
        click.echo(f"\r{things} checked, {render.size(tally.bytes)} ", nl=False, err=True)

    try:
        return list(verify.plan(root, tally=tally, progress=progress))
    finally:
        click.echo(f"\r{' ' * 40}\r", nl=False, err=True)


def _listable(root: Path) -> None:
    try:
        os.scandir(root).close()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CacheRootError(
            f"the cache root {root} cannot be listed: {(error.strerror or str(error)).lower()}",
            hint="name the cache with `--cache-dir DIR`, or run this as the user that owns it",
        ) from error


def _repaired(root: Path, found: list[Finding]) -> list[_Outcome]:
    batch = trash.batch(trash.QUARANTINE)
    outcomes = []
    for finding in found:
        if not finding.repairable:
            outcomes.append(_Outcome(finding))
            continue
        try:
            moved = verify.repair(finding, batch)
        except OSError as error:
            if error.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
                raise layout.unwritable(root, error) from error
            reason = (error.strerror or str(error)).lower()
            outcomes.append(_Outcome(finding, failure=reason))
        else:
            outcomes.append(_Outcome(finding, moved, gone=moved is None))
    return outcomes


def _as_json(outcome: _Outcome) -> dict[str, Any]:
    finding = outcome.finding
    return {
        "kind": finding.kind,
        "severity": finding.severity,
        "path": finding.path,
        "what": finding.what,
        "remedy": finding.remedy,
        "repairable": finding.repairable,
        "quarantined": outcome.moved,
        "failure": outcome.failure,
        "remains": outcome.remains,
    }


def _print(
    places: Sequence[Path], outcomes: list[_Outcome], tally: verify.Tally, given: str | None
) -> None:
    root = places[0]
    shown_now = [outcome for outcome in outcomes if not outcome.gone]
    shown_now.sort(key=lambda outcome: ("error", "warning", "note").index(outcome.finding.severity))
    if shown_now and sys.stdout.isatty():
        _tell_all(root, shown_now)
    elif shown_now:
        rows = [_row(root, outcome) for outcome in shown_now]
        render.table(["SEVERITY", "KIND", "PATH", "WHAT"], rows)
    checked = [
        f"{tally.things[kind]:,} {spoken[tally.things[kind] != 1]}"
        for kind, spoken in _SPOKEN.items()
        if kind in tally.things
    ]
    counts = Counter(outcome.finding.severity for outcome in shown_now)
    told = [
        render.count(counts[name], name) for name in ("error", "warning", "note") if counts[name]
    ]
    what = ", ".join(checked) or "nothing"
    size = f" ({render.size(tally.bytes)})" if checked else ""
    where = ", ".join(render.home(place) for place in places)
    render.note(f"checked {what}{size} in {where}: {', '.join(told) or 'all sound'}")
    moved = Counter(_quarantine(outcome) for outcome in shown_now if outcome.moved is not None)
    for place, number in moved.items():
        things = render.count(number, "thing")
        render.note(f"{things} put into {render.home(place)}; moving them back restores them")
    for hint in _hints(shown_now, given):
        render.note(f"\nhint: {hint}")


def _quarantine(outcome: _Outcome) -> Path:
    """The directory that a thing was moved to, under which its path is what it was."""
    assert outcome.moved is not None
    below = Path(outcome.moved).relative_to(outcome.finding.root)
    return Path(outcome.finding.root, *below.parts[:3])


def _row(root: Path, outcome: _Outcome) -> list[str]:
    finding = outcome.finding
    path = _path(os.path.relpath(finding.path, root) if outcome.owned else finding.path)
    what = finding.what
    if outcome.moved is not None:
        what = f"put into quarantine: {what}"
    elif outcome.failure is not None:
        what = f"cannot be moved ({outcome.failure}): {what}"
    return [finding.severity, finding.kind, path, what]


def _tell_all(root: Path, outcomes: list[_Outcome]) -> None:
    """All findings for a person, but of the same note only the first few."""
    times: Counter[tuple[str, str]] = Counter()
    for outcome in outcomes:
        finding = outcome.finding
        if finding.severity == "note":
            times[finding.kind, finding.what] += 1
            if times[finding.kind, finding.what] > _SAME_NOTES:
                continue
        _tell(root, outcome)
    for (kind, what), number in times.items():
        if number > _SAME_NOTES:
            click.echo(f"note     {kind:<13}{number - _SAME_NOTES:,} more: {shown(what)}")


def _tell(root: Path, outcome: _Outcome) -> None:
    """A finding for a person: a line says where, the next ones what. Keys are shortened."""
    severity, kind, path, what = _row(root, outcome)
    path = _KEY.sub(lambda key: f"{key[0][:12]}…", path)
    name = severity if "NO_COLOR" in os.environ else click.style(severity, bold=True)
    click.echo(f"{name}{' ' * (9 - len(severity))}{kind:<13}{path}")
    indent = " " * 9
    width = max(40, shutil.get_terminal_size().columns)
    click.echo(textwrap.fill(what, width, initial_indent=indent, subsequent_indent=indent))


def _path(path: str) -> str:
    """A path below the root as one line."""
    return os.sep.join(shown(part) for part in path.split(os.sep))


def _hints(outcomes: list[_Outcome], given: str | None) -> list[str]:
    """What helps against what remains: `--repair` once, then each other remedy."""
    remaining = [outcome for outcome in outcomes if outcome.remains]
    hints = []
    offered = sum(one.finding.repairable and one.owned and one.failure is None for one in remaining)
    if offered:
        where = f" --cache-dir {shlex.quote(given)}" if given is not None else ""
        things = render.count(offered, "thing")
        hints.append(f"`tlcache verify --repair{where}` puts {things} into quarantine")
    others = [
        one.finding.remedy
        for one in remaining
        if one.finding.remedy is not None and not one.finding.repairable
    ]
    hints += list(dict.fromkeys(others))[:3]
    return hints
