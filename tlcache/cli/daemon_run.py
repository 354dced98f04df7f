"""`tlcache daemon run`: the daemon, in the foreground."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys

import click

from tlcache import config
from tlcache.errors import DaemonError
from tlcache.settings import Settings

__all__ = ["COMMANDS"]


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
@click.option("--interval", metavar="SPAN", help="How often the processes' agents are asked.")
@click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
def run(
    roots: tuple[str, ...],
    max_size: str | None,
    max_age: str | None,
    keep_free: str | None,
    path: str | None,
    group: str | None,
    metrics_port: int | None,
    history: str | None,
    interval: str | None,
    log_level: str | None,
) -> int:
    """Watch cache roots, keep them within bounds, and keep figures, until SIGTERM.

    What is not said here is taken from tlcache.toml. A bound is enforced in idle moments, by what
    `prune` would do: nothing goes that a process has loaded. Without one nothing is deleted.
    """
    try:
        from tlcache.daemon import life, listening
        from tlcache.daemon.service import Service
        from tlcache.daemon.serving import serving
    except ModuleNotFoundError as error:
        raise DaemonError(
            f"the daemon needs {error.name}, which is not installed",
            hint="`pip install 'tlcache[daemon]'`",
        ) from error

    given = {
        "roots": [os.path.abspath(one) for one in roots] or None,
        "max_size": max_size,
        "max_age": max_age,
        "keep_free": keep_free,
        "socket": path,
        "group": group,
        "metrics_port": metrics_port,
        "history": history,
        "interval": interval,
        "log_level": log_level,
    }

    def load() -> Settings:
        return config.load(given)

    settings = load()
    logging.basicConfig(
        level=settings.log_level.upper(),
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
                load,
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
