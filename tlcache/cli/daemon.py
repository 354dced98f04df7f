"""`tlcache daemon`: the daemon itself."""

from __future__ import annotations

import click

from tlcache.cli import daemon_run

__all__ = ["command"]


@click.group("daemon")
def command() -> None:
    """Watch, bound and serve caches, continuously."""


for _subcommand in daemon_run.COMMANDS:
    command.add_command(_subcommand)
