"""The service manager: whether one runs, and the commands that ask it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from tlcache.errors import EnvironmentFault
from tlcache.units.files import Place
from tlcache.units.rendering import Scope

__all__ = ["absence", "ask", "journal", "run", "state"]

_PATIENCE = 60.0


def absence(scope: Scope) -> str | None:
    """Why no service manager of a scope can be asked; None where one can."""
    if not os.path.isdir("/run/systemd/system"):
        return "systemd does not run this machine"
    if shutil.which("systemctl") is None:
        return "systemctl is not on PATH"
    if scope == "user":
        place = os.environ.get("XDG_RUNTIME_DIR", "")
        if not os.path.exists(os.path.join(place, "systemd/private")) or not place:
            return "this session has no service manager of its user"
    return None


def run(place: Place, *arguments: str) -> None:
    """Have systemctl do something, here or on the files of an image.

    Raises:
        EnvironmentFault: It is not here, or says no.
    """
    command = [*_systemctl(place), *arguments]
    done = _ran(command)
    if done.returncode:
        told = done.stderr.strip().splitlines()
        raise EnvironmentFault(
            f"`{' '.join(command)}` failed{': ' + told[-1] if told else ''}",
            hint=None if place.prefix else "`tlcache daemon logs` shows what the service said",
        )


def ask(command: Sequence[str]) -> str | None:
    """What a command says; None where it is not here or fails."""
    try:
        done = _ran(command)
    except EnvironmentFault:
        return None
    return None if done.returncode else done.stdout


def state(scope: Scope, unit: str) -> dict[str, str]:
    """What the manager says of a unit: its LoadState, ActiveState, SubState, UnitFileState and
    MainPID.
    """
    fields = "LoadState,ActiveState,SubState,UnitFileState,MainPID,NeedDaemonReload"
    told = ask([*_systemctl(Place(scope)), "show", "--property", fields, unit]) or ""
    return dict(line.split("=", 1) for line in told.splitlines() if "=" in line)


def journal(scope: Scope, units: Sequence[str], lines: int, follow: bool) -> list[str]:
    """The command that shows what units have said.

    Raises:
        EnvironmentFault: There is no journal here.
    """
    if shutil.which("journalctl") is None:
        raise EnvironmentFault(
            "journalctl is not on PATH, so what the daemon says is wherever its output goes",
            hint="`tlcache daemon run` in a terminal says it there",
        )
    option = "--unit" if scope == "system" else "--user-unit"
    command = ["journalctl", *(f"{option}={unit}" for unit in units), f"--lines={lines}"]
    return [*command, "--follow"] if follow else [*command, "--no-pager"]


def _systemctl(place: Place) -> list[str]:
    words = ["systemctl", "--no-pager", "--quiet"]
    if place.prefix is not None:
        words.append(f"--root={place.prefix}")
        return [*words, "--global"] if place.scope == "user" else words
    return [*words, "--user"] if place.scope == "user" else words


def _ran(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except FileNotFoundError as error:
        raise EnvironmentFault(f"{command[0]} is not on PATH") from error
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(
            f"`{' '.join(command)}` took more than {_PATIENCE:.0f} s",
            hint="`systemctl list-jobs` shows what it waits for",
        ) from error
