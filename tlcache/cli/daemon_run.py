"""`tlcache daemon run`: the daemon, in the foreground."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from tlcache.errors import DaemonError
from tlcache.store import layout, select, sockets

__all__ = ["COMMANDS"]


@dataclass(frozen=True)
class _Settings:
    """What the command line says."""

    roots: tuple[Path, ...]
    max_size: int | None
    max_age: float | None
    keep_free: int | None
    interval: float
    history: Path
    socket: Path
    group: str | None
    metrics_port: int | None


@click.command("run")
@click.option(
    "--root",
    "roots",
    multiple=True,
    metavar="DIR",
    help="A cache root to watch (repeatable); by default the one in force.",
)
@click.option("--max-size", metavar="SIZE", help="What each root may take on disk, like 50GiB.")
@click.option("--max-age", metavar="SPAN", help="How long a kernel may be unused, like 90d.")
@click.option(
    "--keep-free", metavar="SIZE", help="What is to stay free on each root's file system."
)
@click.option("--socket", "path", metavar="PATH", help="Where to listen.")
@click.option("--group", metavar="NAME", help="The group whose members may ask, too.")
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Have the metrics on 127.0.0.1:PORT, too, for everybody on this machine.",
)
@click.option("--history", metavar="FILE", help="Where counters and samples are kept.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.5),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How often the processes' agents are asked.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
def run(
    roots: tuple[str, ...],
    max_size: str | None,
    max_age: str | None,
    keep_free: str | None,
    path: str | None,
    group: str | None,
    metrics_port: int | None,
    history: str | None,
    interval: float,
    log_level: str,
) -> int:
    """Watch cache roots, keep them within bounds, and keep figures, until SIGTERM.

    A bound is enforced in idle moments, by what `prune` would do: nothing goes that a process has
    loaded. Without one nothing is deleted.
    """
    import platformdirs

    try:
        from tlcache.daemon import life, listening
        from tlcache.daemon.service import Service
        from tlcache.daemon.serving import serving
    except ModuleNotFoundError as error:
        raise DaemonError(
            f"the daemon needs {error.name}, which is not installed",
            hint="`pip install 'tlcache[daemon]'`",
        ) from error

    settings = _Settings(
        tuple(map(Path, roots)) or (layout.cache_root(),),
        select.bytes_of(max_size) if max_size is not None else None,
        select.age(max_age).total_seconds() if max_age is not None else None,
        select.bytes_of(keep_free) if keep_free is not None else None,
        interval,
        Path(history or os.path.join(platformdirs.user_state_dir("tlcache", False), "history")),
        Path(path or os.path.join(sockets.directory(), "daemon.sock")),
        group,
        metrics_port,
    )
    logging.basicConfig(
        level=log_level.upper(),
        stream=sys.stderr,
        # The journal has times of its own.
        format="%(message)s" if "JOURNAL_STREAM" in os.environ else "%(asctime)s %(message)s",
    )
    gc.enable()  # this may go on for months
    held = listening.listen(os.fspath(settings.socket), settings.group)
    try:
        ended = asyncio.run(
            life.live(
                Service(settings),
                lambda: settings,
                lambda service: serving(service, held.socket),
            )
        )
    finally:
        held.close()
    logging.shutdown()
    if not ended:
        os._exit(0)  # a thread hangs in a file system, or empties the trash
    return 0


COMMANDS = (run,)
