"""`tlcache run`: any program, with tlcache's hooks on TileLang in it and in the processes that it
starts.

Invariant: the command becomes this process. Nothing of tlcache stands between it and its signals,
its standard streams or its exit code.
"""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
from pathlib import Path

import click

from tlcache import bootstrap
from tlcache.errors import UsageError

__all__ = ["command"]


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "--record",
    metavar="FILE",
    help="Write the workloads that the program meets to this shapes.json, or merge them into it.",
)
@click.option(
    "--on-compile",
    type=click.Choice(["allow", "warn", "error"]),
    help="What a compile means: nothing (the default), a warning, or an error in the program.",
)
@click.option(
    "--from",
    "since",
    type=click.Choice(["ready", "start"]),
    help="Since when: `tlcache.runtime.mark_ready()` (the default), or the start.",
)
@click.option(
    "--restore/--no-restore",
    default=None,
    help="Load kernels whose calls were seen before without tracing them (the default), or do not.",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND …")
def command(
    record: str | None,
    on_compile: str | None,
    since: str | None,
    restore: bool | None,
    words: tuple[str, ...],
) -> int:
    """Run a program with hooks on TileLang, in it and in what it starts.

    The program needs no change: what it compiles is counted, recorded, and allowed or not. Each
    process has an agent that `tlcache stats` asks.
    """
    if not words:
        raise UsageError(
            "there is no command to run", hint="`tlcache run -- python serve.py` starts one"
        )
    if record is not None:
        _check_writable(record)
    environment = _environment(record, on_compile, since, restore)
    sys.stdout.flush()
    sys.stderr.flush()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)  # Python ignores them, and that would be inherited
    try:
        os.execvpe(words[0], list(words), environment)
    except OSError as error:
        return _not_started(words, error)


def _environment(
    record: str | None, on_compile: str | None, since: str | None, restore: bool | None
) -> dict[str, str]:
    """What the program inherits; options that are not given leave what is set already."""
    changed = dict(os.environ)
    place = os.path.dirname(os.path.abspath(bootstrap.__file__))
    before = [part for part in changed.get("PYTHONPATH", "").split(os.pathsep) if part]
    changed["PYTHONPATH"] = os.pathsep.join([place, *(part for part in before if part != place)])
    changed.setdefault("TLCACHE_AGENT", "1")
    wanted = {
        "TLCACHE_RECORD": os.path.abspath(record) if record is not None else None,
        "TLCACHE_ON_COMPILE": on_compile,
        "TLCACHE_ON_COMPILE_FROM": since,
        "TLCACHE_RESTORE": None if restore is None else str(int(restore)),
    }
    changed.update({name: value for name, value in wanted.items() if value is not None})
    return changed


def _check_writable(record: str) -> None:
    """A recording that cannot be kept, or would spoil what is there, is told before the program
    runs.

    Raises:
        ShapesError: The file is there and no shapes document.
        UsageError: Its directory cannot be written.
    """
    from tlcache import recorded

    path = Path(os.path.abspath(record))
    recorded.read(path)
    if not os.access(path.parent, os.W_OK):
        raise UsageError(
            f"{path} cannot be written: {path.parent} is "
            + ("not writable" if path.parent.exists() else "not there"),
            hint="`--record` takes a file in a directory that the program can write",
        )


def _not_started(words: tuple[str, ...], error: OSError) -> int:
    """Say why a command did not start; the exit code is the shell's."""
    missing = isinstance(error, FileNotFoundError)
    reason = "not found" if missing else (os.strerror(error.errno or errno.EACCES)).lower()
    click.echo(f"error: {words[0]}: {reason}", err=True)
    if missing:
        click.echo(
            f"\nhint: `tlcache run -- {shlex.join(words)}` runs a program, "
            "found as a shell finds it",
            err=True,
        )
    return 127 if missing else 126
