"""`tlcache daemon`: the daemon, and the units that have systemd run it."""

from __future__ import annotations

import click

from tlcache.cli import daemon_run, daemon_status, daemon_units

__all__ = ["command"]


@click.group("daemon")
def command() -> None:
    """Watch, bound and serve caches, continuously."""


for _subcommand in (*daemon_run.COMMANDS, *daemon_units.COMMANDS, *daemon_status.COMMANDS):
    command.add_command(_subcommand)
