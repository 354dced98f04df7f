"""`tlcache daemon status` and `logs`: what systemd and the daemon itself say of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tlcache import config
from tlcache.cli import options, render
from tlcache.errors import EnvironmentFault
from tlcache.units import files, manager
from tlcache.units.files import Place
from tlcache.units.rendering import CATALOG, DAEMON, Scope

__all__ = ["COMMANDS", "scope_of", "scoped"]


def scoped(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options `--user` and `--system`; the command gets its argument `scope`."""
    command = click.option(
        "--user",
        "scope",
        flag_value="user",
        help="The service manager of your user; the default unless you are root.",
    )(command)
    return click.option(
        "--system",
        "scope",
        flag_value="system",
        help="The service manager of the machine; the default for root.",
    )(command)


def scope_of(scope: str | None) -> Scope:
    """Whose service manager is meant: without an option, the machine's for root."""
    if scope is None:
        return "user" if os.geteuid() else "system"
    return "user" if scope == "user" else "system"


@click.command("status")
@scoped
@options.json_output
def status(scope: str | None, json_wanted: bool) -> int:
    """Say whether the units are installed, running, and what the daemon says of its health.

    The exit code is 1 unless a daemon answers that it is well.
    """
    place = Place(scope_of(scope))
    settings = config.load()
    rows = [_unit_row(place, name) for name in CATALOG[place.scope]]
    health = _health(settings.socket)
    missing = manager.absence(place.scope)
    if json_wanted:
        render.emit_json(
            {
                "scope": place.scope,
                "manager": missing is None,
                "units": rows,
                "socket": os.fspath(settings.socket),
                "health": health,
            }
        )
    else:
        render.table(
            ["UNIT", "FILE", "VERSION", "STATE", "AT BOOT"],
            (
                [
                    row["unit"],
                    row["file"],
                    row["version"] or "–",
                    row["state"] or "–",
                    row["enabled"] or "–",
                ]
                for row in rows
            ),
        )
        if missing is not None:
            render.note(f"note: {missing}")
        _tell_health(settings.socket, health)
    return 0 if health is not None and health.get("status") == "ok" else 1


def _unit_row(place: Place, name: str) -> dict[str, Any]:
    found = files.read(place.path(name))
    told: dict[str, str] = {}
    if not name.endswith(".conf") and "@" not in name and manager.absence(place.scope) is None:
        told = manager.state(place.scope, name)
    state = told.get("ActiveState")
    return {
        "unit": name,
        "path": os.fspath(place.path(name)),
        "file": {"ours": "installed", "link": "masked or a link"}.get(
            found.standing, found.standing
        ),
        "version": found.version,
        "state": f"{state} ({told.get('SubState')})" if state else None,
        "enabled": told.get("UnitFileState") or None,
    }


def _health(path: Path) -> dict[str, Any] | None:
    """What the daemon at a socket says of itself; None where none answers."""
    import json
    import socket
    from http.client import HTTPConnection, HTTPException

    class Local(HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(3)
            self.sock.connect(os.fspath(path))

    connection = Local("localhost", timeout=3)
    try:
        connection.request("GET", "/healthz")
        answer = json.loads(connection.getresponse().read(1 << 20))
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return answer if isinstance(answer, dict) else None


def _tell_health(path: Path, health: dict[str, Any] | None) -> None:
    if health is None:
        click.echo(f"no daemon answers at {path}")
        return
    click.echo(f"the daemon at {path} is {render.plain(str(health.get('status')))}")
    checks = health.get("checks")
    for check in checks if isinstance(checks, list) else []:
        if isinstance(check, dict) and check.get("status") != "ok":
            told = f"{check.get('name')}: {check.get('detail')}"
            click.echo(f"{check.get('status', '?')!s:<10}{render.plain(told)}")


@click.command("logs")
@scoped
@click.option("--follow", "-f", is_flag=True, help="Go on showing what comes.")
@click.option(
    "--lines",
    "-n",
    type=click.IntRange(0),
    default=100,
    show_default=True,
    help="The last so many.",
)
def logs(scope: str | None, follow: bool, lines: int) -> int:
    """Show what the daemon and the timer's prunes have said, from the journal."""
    chosen = scope_of(scope)
    missing = manager.absence(chosen)
    if missing is not None:
        raise EnvironmentFault(
            f"{missing}, so there is no journal of the daemon",
            hint="`tlcache daemon run` in a terminal says everything there",
        )
    command = manager.journal(chosen, [DAEMON[1], "tlcache-prune.service"], lines, follow)
    sys.stdout.flush()
    os.execvp(command[0], command)


COMMANDS: tuple[click.Command, ...] = (status, logs)
"""The subcommands, for the group."""
