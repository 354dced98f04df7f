"""`tlcache run`: any program, its kernels warm before it starts, and with tlcache's hooks on
TileLang in it and in the processes that it starts.

Invariant: the command becomes this process. Nothing of tlcache stands between it and its signals,
its standard streams or its exit code, and it inherits no child that it would have to wait for.
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
from tlcache.cli import ahead, options
from tlcache.errors import UsageError
from tlcache.store import roots

__all__ = ["command"]


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--shapes", metavar="FILE", help="Have the kernels of this shapes.json there first.")
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="TARGET",
    help="For these; by default the file's targets, else this machine's.",
)
@click.option("--budget", metavar="SPAN", help="Go on after so long, like 60s, whatever is left.")
@click.option(
    "--background", is_flag=True, help="Start the command at once, and warm beside it, niced."
)
@click.option(
    "--require",
    type=click.Choice(["all", "none"]),
    help="Exit with 3 unless all kernels are there, or start in any case (the default).",
)
@click.option(
    "--ready-file", metavar="FILE", help="Write what is there to FILE, once that is done."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Kill one kernel's compile after this long; by default 600.",
)
@options.overlay
@click.option("--no-hooks", is_flag=True, help="Put nothing into the command's Python.")
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
    shapes: str | None,
    targets: tuple[str, ...],
    budget: str | None,
    background: bool,
    require: str | None,
    ready_file: str | None,
    timeout: float | None,
    overlay: str | None,
    no_hooks: bool,
    record: str | None,
    on_compile: str | None,
    since: str | None,
    restore: bool | None,
    words: tuple[str, ...],
) -> int:
    """Run a program, its kernels warm, with hooks on TileLang.

    The program needs no change. With --shapes its kernels are looked after, waited for or compiled
    first. What it compiles itself is counted, recorded, and allowed or not. Each process has an
    agent that `tlcache stats` asks.
    """
    if not words:
        raise UsageError(
            "there is no command to run", hint="`tlcache run -- python serve.py` starts one"
        )
    if record is not None:
        _check_writable(record)
    wanted = ahead.asked(shapes, targets, budget, background, require, ready_file, timeout)
    places = _places(overlay)
    environment = _environment(record, on_compile, since, restore, hooks=not no_hooks)
    if overlay is not None:
        environment[roots.VARIABLE] = os.pathsep.join(places)
    if overlay is not None or not no_hooks:
        roots.adopt(environment)
    if wanted is not None and (code := ahead.before(wanted, places, words)) is not None:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)  # Python ignores them, and that would be inherited
    try:
        os.execvpe(words[0], list(words), environment)
    except OSError as error:
        return _not_started(words, error)


def _places(overlay: str | None) -> list[str]:
    """The roots in force, absolute; the overlay is made."""
    if overlay is None:
        return [os.path.abspath(place) for place in roots.chain()]
    from tlcache.fingerprint import platform_name, tilelang_version
    from tlcache.store import layout
    from tlcache.store.trust import set_umask

    before = os.umask(0o022)
    try:
        os.umask(before)
        set_umask()
        layout.make_skeleton(Path(overlay), tilelang_version(), platform_name())
    finally:
        os.umask(before)
    return roots.overlaid(overlay, roots.chain()).split(os.pathsep)


def _environment(
    record: str | None,
    on_compile: str | None,
    since: str | None,
    restore: bool | None,
    *,
    hooks: bool,
) -> dict[str, str]:
    """What the program inherits; options that are not given leave what is set already."""
    changed = dict(os.environ)
    if hooks:
        place = os.path.dirname(os.path.abspath(bootstrap.__file__))
        before = [part for part in changed.get("PYTHONPATH", "").split(os.pathsep) if part]
        paths = [place, *(part for part in before if part != place)]
        changed["PYTHONPATH"] = os.pathsep.join(paths)
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
