"""`tlcache top`: `tlcache stats --watch`."""

from __future__ import annotations

import click

from tlcache.cli import stats

__all__ = ["command"]


@click.command("top")
@stats.common
@click.option(
    "--every",
    type=click.FloatRange(min=0.1, max=86400),
    default=stats.EVERY,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
def command(pid: int | None, late: bool, timeout: float, json_wanted: bool, every: float) -> int:
    """Watch what running processes do: the same as `tlcache stats --watch`."""
    return stats.run(pid, late, timeout, json_wanted, every)
