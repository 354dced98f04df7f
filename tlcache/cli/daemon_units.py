"""`tlcache daemon install`, `uninstall`, `status` and `logs`: the daemon as a service of
systemd.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tlcache import config
from tlcache.cli import options, render
from tlcache.cli.daemon_status import scope_of, scoped
from tlcache.errors import EnvironmentFault, UsageError
from tlcache.units import files, manager
from tlcache.units.files import Place, Step
from tlcache.units.rendering import DAEMON, Wanted
from tlcache.units.rendering import render as rendered

__all__ = ["COMMANDS"]

_VERBS = {
    "write": "write",
    "replace": "replace",
    "keep": "keep",
    "remove": "remove",
    "refuse": "leave",
}


_prefix = click.option(
    "--prefix", metavar="DIR", help="The root of an image, whose files they are; nothing is asked."
)


def _place(scope: str | None, prefix: str | None) -> Place:
    if prefix is not None and not os.path.isdir(prefix):
        raise UsageError(f"{prefix!r} is no directory", hint="`--prefix` is the root of an image")
    return Place(scope_of(scope), Path(os.path.abspath(prefix)) if prefix is not None else None)


@click.command("install")
@scoped
@click.option(
    "--root",
    "roots",
    multiple=True,
    metavar="DIR",
    help="A cache root to watch (repeatable); by default what tlcache.toml says, else "
    "/var/cache/tilelang, of a user's service ~/.tilelang/cache.",
)
@click.option(
    "--run-as",
    "user",
    metavar="USER",
    help="Who runs it, of a system's service: root, or who owns the roots and runs the servers.",
)
@click.option(
    "--executable", metavar="FILE", help="The tlcache that they run; by default this one."
)
@_prefix
@click.option("--enable", is_flag=True, help="Have the daemon start with the machine, or session.")
@click.option("--now", is_flag=True, help="Enable it, and start it now.")
@click.option("--force", is_flag=True, help="Overwrite files that were changed by hand.")
@click.option("--dry-run", is_flag=True, help="Show the files whole, and write nothing.")
@options.json_output
def install(
    scope: str | None,
    roots: tuple[str, ...],
    user: str | None,
    executable: str | None,
    prefix: str | None,
    enable: bool,
    now: bool,
    force: bool,
    dry_run: bool,
    json_wanted: bool,
) -> int:
    """Write the units that run the daemon, filled in with the settings.

    Do it again after a change of the roots or the bounds in tlcache.toml. A file that was changed
    by hand is left as it is; drop-ins (`systemctl edit tlcached`) are never touched.
    """
    place = _place(scope, prefix)
    if now and prefix is not None:
        raise UsageError("nothing can be started in an image", hint="`--enable` has it start there")
    wanted = _wanted(place, roots, user, executable, force)
    steps = files.install(place, rendered(wanted), force=force)
    if dry_run:
        _show(steps, json_wanted)
        return 0
    refused = [step for step in steps if step.action == "refuse"]
    if refused:
        raise UsageError(
            "; ".join(f"{step.path} is left alone: {step.why}" for step in refused)
            + "; nothing was written",
            hint="`--dry-run` shows what would be written, `--force` overwrites",
        )
    files.apply(place, steps)
    _tell(steps, json_wanted, place, _roots(wanted))
    _activate(place, enable or now, now, any(step.action != "keep" for step in steps))
    return 0


def _wanted(
    place: Place,
    roots: Sequence[str],
    user: str | None,
    executable: str | None,
    force: bool,
) -> Wanted:
    if user is not None and place.scope == "user":
        raise UsageError(
            "a user's service runs as that user, so `--run-as` says nothing",
            hint="`--system --run-as USER`",
        )
    program = _executable(place, executable)
    user = user or "root"
    if place.scope == "system" and place.prefix is None and user == "root" and not force:
        _check_executable(program)
    named = os.environ.get(config.NAMED)
    return Wanted(
        place.scope,
        program,
        config.load(prefix=place.prefix),
        tuple(Path(os.path.abspath(root)) for root in roots),
        user,
        os.path.abspath(named) if named and place.prefix is None else None,
    )


def _executable(place: Place, named: str | None) -> Path:
    """The `tlcache` that units run: the one that is named, else the one that runs now."""
    beside = os.path.join(os.path.dirname(sys.executable), "tlcache")
    found = named or (beside if os.path.exists(beside) else shutil.which("tlcache"))
    if found is None:
        raise UsageError(
            "there is no `tlcache` beside this Python, nor on PATH",
            hint="`--executable /opt/venv/bin/tlcache`",
        )
    path = Path(os.path.abspath(found))
    seen = path if place.prefix is None else place.prefix / str(path).lstrip("/")
    if not os.access(seen, os.X_OK):
        raise UsageError(
            f"{seen} is not there, or cannot be run",
            hint="`--executable` names the `tlcache` of the image, like `/opt/venv/bin/tlcache`"
            if place.prefix is not None
            else "`--executable` names a `tlcache`",
        )
    return path


def _check_executable(program: Path) -> None:
    """What root runs must not be somebody else's to change."""
    from tlcache.store.trust import Trust

    for path in (program, Path(sys.executable)):
        for one in (path, *Path(os.path.realpath(path)).parents, Path(os.path.realpath(path))):
            reason = Trust("/", level="owner").fault(str(one), os.lstat(one))
            if reason is not None:
                raise EnvironmentFault(
                    f"root would run {program}, and {one} {reason}",
                    hint="install tlcache where only root can write, or have a user run it by "
                    "`--run-as USER`; `--force` installs it all the same",
                )


def _roots(wanted: Wanted) -> str:
    paths = ", ".join(map(str, wanted.chosen_roots))
    return f"watching {paths}" + (
        "" if wanted.passed_roots or wanted.own_default else " (of tlcache.toml)"
    )


def _activate(place: Place, enable: bool, now: bool, changed: bool) -> None:
    """Have the service manager know of what was written."""
    if place.prefix is not None:
        if enable:
            manager.run(place, "enable", *DAEMON)
            render.note("enabled in the image")
        return
    option = "--user " if place.scope == "user" else ""
    missing = manager.absence(place.scope)
    if missing is not None:
        render.note(
            f"note: {missing}, so the units were written and nothing was started\n"
            "hint: `tlcache daemon run` runs the daemon without it"
        )
        return
    if place.scope == "system":
        for command in ("systemd-sysusers", "systemd-tmpfiles --create"):
            name = "tlcache.sysusers.conf" if "sysusers" in command else "tlcache.tmpfiles.conf"
            if manager.ask([*command.split(), str(place.path(name))]) is None:
                render.note(f"note: `{command} {place.path(name)}` failed")
    stale = changed and manager.state(place.scope, DAEMON[1]).get("ActiveState") == "active"
    manager.run(place, "daemon-reload")
    if enable:
        manager.run(place, "enable", *DAEMON)
    if now:
        manager.run(place, "restart" if stale else "start", *DAEMON)
        render.note("enabled and restarted" if stale else "enabled and started")
    elif stale:
        render.note(f"hint: `systemctl {option}restart tlcached` has it run with what was written")
    elif enable:
        render.note("enabled: it starts with the " + ("session" if option else "machine"))
    else:
        render.note(f"hint: `systemctl {option}enable --now {' '.join(DAEMON)}` starts it")


def _show(steps: Sequence[Step], json_wanted: bool) -> None:
    """What would be done, each file under its path, as `systemctl cat` shows them."""
    if json_wanted:
        render.emit_json({"dry_run": True, "files": [_document(step) for step in steps]})
        return
    for step in steps:
        why = f" ({step.why})" if step.why else ""
        click.echo(f"# {step.path}: would {_VERBS[step.action]}{why}")
        if step.action in ("write", "replace", "refuse") and step.text is not None:
            click.echo(step.text)


def _tell(steps: Sequence[Step], json_wanted: bool, place: Place, watched: str | None) -> None:
    if json_wanted:
        render.emit_json({"dry_run": False, "files": [_document(step) for step in steps]})
        return
    done = {"write": "wrote", "replace": "replaced", "keep": "kept", "remove": "removed"}
    for step in steps:
        why = f" ({step.why})" if step.why else ""
        click.echo(f"{done.get(step.action, 'left'):<9}{step.path}{why}")
    if watched is not None:
        render.note(watched)
        if not any(step.name == "tlcache-prune.timer" for step in steps):
            render.note("no max_size or max_age is set, so there is no tlcache-prune.timer")


def _document(step: Step) -> dict[str, Any]:
    return {
        "path": os.fspath(step.path),
        "action": step.action,
        "why": step.why or None,
        "text": step.text,
    }


@click.command("uninstall")
@scoped
@_prefix
@click.option("--force", is_flag=True, help="Remove units that were changed by hand, too.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@options.json_output
def uninstall(
    scope: str | None, prefix: str | None, force: bool, dry_run: bool, json_wanted: bool
) -> int:
    """Stop the daemon, and remove the units that `install` wrote.

    Caches, tlcache.toml, the history and drop-ins stay. The exit code is 1 if a unit stays because
    it was changed by hand.
    """
    place = _place(scope, prefix)
    steps = files.uninstall(place, force=force)
    goes = [step for step in steps if step.action == "remove"]
    code = 1 if any(step.action == "refuse" for step in steps) else 0
    if dry_run:
        _show(steps, json_wanted)
        return code
    asked = (
        manager.absence(place.scope) is None if prefix is None else bool(shutil.which("systemctl"))
    )
    units = [step.name for step in goes if step.name.endswith((".service", ".socket", ".timer"))]
    if asked and units:
        if place.prefix is None:
            manager.run(place, "stop", *(name.replace("@.", "@*.") for name in units))
        manager.run(place, "disable", *units)
    files.apply(place, steps)
    if asked and place.prefix is None and units:
        manager.run(place, "daemon-reload")
    _tell(steps, json_wanted, place, None)
    if not steps and not json_wanted:
        render.note(f"nothing of tlcache's is installed in {place.path(DAEMON[1]).parent}")
    return code


COMMANDS: tuple[click.Command, ...] = (install, uninstall)
"""The subcommands, for the group."""
