"""`tlcache run`: any program, its kernels warm before it starts, and with tlcache's hooks on
TileLang in it and in the processes that it starts.

Invariant: the command becomes this process. Nothing of tlcache stands between it and its signals,
its standard streams or its exit code, and it inherits no child that it would have to wait for.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tlcache import bootstrap
from tlcache.cli import options, render
from tlcache.cli.signals import Terminated, terminable
from tlcache.errors import EnvironmentFault, TlcacheError, UsageError
from tlcache.store import roots

if TYPE_CHECKING:
    from tlcache.warm.ahead import State

__all__ = ["command"]


@dataclass(frozen=True)
class _Ahead:
    """What is asked for before the command starts, or beside it."""

    shapes: str
    targets: tuple[str, ...]
    budget: float | None
    timeout: float
    background: bool
    require: str
    ready_file: str | None


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
    words: tuple[str, ...],
) -> int:
    """Run a program, its kernels warm, with hooks on TileLang in it and in what it starts.

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
    ahead = _asked(shapes, targets, budget, background, require, ready_file, timeout)
    places = _places(overlay)
    environment = _environment(record, on_compile, since, hooks=not no_hooks)
    if overlay is not None:
        environment[roots.VARIABLE] = os.pathsep.join(places)
    if overlay is not None or not no_hooks:
        roots.adopt(environment)
    if ahead is not None and (code := _before(ahead, places, words)) is not None:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)  # Python ignores them, and that would be inherited
    try:
        os.execvpe(words[0], list(words), environment)
    except OSError as error:
        return _not_started(words, error)


# --- kernels ahead ---


def _asked(
    shapes: str | None,
    targets: tuple[str, ...],
    budget: str | None,
    background: bool,
    require: str | None,
    ready_file: str | None,
    timeout: float | None,
) -> _Ahead | None:
    """What is to be there, or None where nothing was asked for.

    Raises:
        UsageError: The options contradict each other, or a span is none.
    """
    if shapes is None:
        given = {
            "--target": targets,
            "--budget": budget,
            "--background": background,
            "--require": require,
            "--ready-file": ready_file,
            "--timeout": timeout,
        }
        for option, value in given.items():
            if value:
                raise UsageError(
                    f"{option} is about kernels, and nothing says which",
                    hint=f"`tlcache run --shapes shapes.json {option} …` says it",
                )
        return None
    if background and require == "all":
        raise UsageError(
            "--require all waits for the kernels, and --background does not",
            hint="leave one of them out; `--ready-file` says when the kernels are there",
        )
    if ready_file is not None:
        _remove(ready_file)
    seconds = _span(budget) if budget is not None else None
    return _Ahead(
        shapes, targets, seconds, timeout or 600.0, background, require or "none", ready_file
    )


def _span(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|min|m|h)?", text.strip())
    if match is None:
        raise UsageError(f"--budget {text!r} is no time span", hint="like `60s`, `500ms` or `5min`")
    unit = {"ms": 1e-3, None: 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}[match[2]]
    return float(match[1]) * unit


def _remove(ready_file: str) -> None:
    """Remove what an earlier start left, before anybody takes it for this one's."""
    try:
        os.unlink(ready_file)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(
            f"{ready_file} cannot be written: {(error.strerror or str(error)).lower()}",
            hint="`--ready-file` takes a file in a directory that can be written",
        ) from error


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


def _before(ahead: _Ahead, places: list[str], words: tuple[str, ...]) -> int | None:
    """What comes before the command. Returns an exit code where it is not to start."""
    from tlcache.warm.ahead import State, Wish, ensure

    wish = Wish(ahead.shapes, ahead.targets, tuple(places), ahead.budget, ahead.timeout)

    def waiting() -> None:
        _say("another process compiles these kernels; waiting for it")

    def beside(ended: int | None) -> None:
        try:
            state = ensure(wish, ended, waiting)
        except TlcacheError as error:
            _say(f"{error}")
            state = State(error=error.message)
        else:
            _tell(state, ahead, "")
        _write(ahead.ready_file, state)

    if ahead.background:
        from tlcache.warm import document, sibling

        document.read(ahead.shapes)  # a wrong name is told before anything starts
        sibling.start(beside)
        return None
    starting = f"starting `{shlex.join(words)}`"
    try:
        with terminable():
            state = ensure(wish, waiting=waiting)
    except Terminated:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except EnvironmentFault as error:
        if ahead.require == "all":
            raise
        _say(f"{error}\n")
        _say(starting)
        _write(ahead.ready_file, State(error=error.message))
        return None
    if state.code == UsageError.exit_code:
        return state.code
    if ahead.require == "all" and not state.complete:
        _tell(state, ahead, "not started, as --require all says")
        return EnvironmentFault.exit_code
    _tell(state, ahead, starting)
    _write(ahead.ready_file, state)
    return None


def _tell(state: State, ahead: _Ahead, then: str) -> None:
    """Say what is there, and what is left, on standard error."""
    for title, error in state.failed[:_FEW]:
        named = error.splitlines()[0].removeprefix(title).strip() if error else "unknown"
        render.note(f"failed: {title}: {named}")
    if len(state.failed) > _FEW:
        render.note(f"failed: {len(state.failed) - _FEW} more")
    took = f"in {render.duration(state.seconds)}"
    if state.total is None:
        said = f"what of {ahead.shapes} is there did not become known {took}"
    else:
        said = f"{state.ready:,} of {render.count(state.total, 'kernel')} ready {took}"
        if state.targets:
            said += f" ({', '.join(state.targets)})"
    if state.spent and not state.complete and ahead.budget is not None:
        said += f"; the budget of {render.duration(ahead.budget)} is spent"
    if state.left:
        names = ", ".join(state.left[:_FEW]) + (" …" if len(state.left) > _FEW else "")
        said += f"; left: {names}"
    _say(f"{said}, {then}" if then else said)
    if not state.complete and not state.code:
        targets = "".join(f" --target {shlex.quote(one)}" for one in ahead.targets)
        render.note(
            f"hint: `tlcache warm --shapes {shlex.quote(ahead.shapes)}{targets}` compiles what is "
            "missing, and only that"
        )


_FEW = 3


def _say(text: str) -> None:
    render.note(f"tlcache: {text}")


def _write(ready_file: str | None, state: State) -> None:
    from tlcache.store import files

    if ready_file is None:
        return
    data = json.dumps({"schema": 1, **state.to_json()}, indent=1).encode() + b"\n"
    try:
        files.write_atomically(os.path.abspath(ready_file), data)
    except OSError as error:
        _say(f"{ready_file} cannot be written: {(error.strerror or str(error)).lower()}")


# --- the command ---


def _environment(
    record: str | None, on_compile: str | None, since: str | None, *, hooks: bool
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
