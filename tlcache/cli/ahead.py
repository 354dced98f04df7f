"""What `tlcache run` does about kernels before its command starts, or beside it: its options, and
what it says.

Invariant: nothing is said on standard output, which is the command's.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tlcache.cli import render
from tlcache.cli.signals import Terminated, terminable
from tlcache.errors import EnvironmentFault, TlcacheError, UsageError

if TYPE_CHECKING:
    from tlcache.warm.ahead import State

__all__ = ["Ahead", "asked", "before"]


@dataclass(frozen=True)
class Ahead:
    """What is asked for before the command starts, or beside it."""

    shapes: str
    targets: tuple[str, ...]
    budget: float | None
    timeout: float
    background: bool
    require: str
    ready_file: str | None


def asked(
    shapes: str | None,
    targets: tuple[str, ...],
    budget: str | None,
    background: bool,
    require: str | None,
    ready_file: str | None,
    timeout: float | None,
) -> Ahead | None:
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
    return Ahead(
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


def before(wanted: Ahead, places: list[str], words: tuple[str, ...]) -> int | None:
    """What comes before the command. Returns an exit code where it is not to start."""
    from tlcache.warm.ahead import State, Wish, ensure

    wish = Wish(wanted.shapes, wanted.targets, tuple(places), wanted.budget, wanted.timeout)

    def waiting() -> None:
        _say("another process compiles these kernels; waiting for it")

    def beside(ended: int | None) -> None:
        try:
            state = ensure(wish, ended, waiting)
        except TlcacheError as error:
            _say(f"{error}")
            state = State(error=error.message)
        else:
            _tell(state, wanted, "")
        _write(wanted.ready_file, state)

    if wanted.background:
        from tlcache.warm import document, sibling

        document.read(wanted.shapes)  # a wrong name is told before anything starts
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
        if wanted.require == "all":
            raise
        _say(f"{error}\n")
        _say(starting)
        _write(wanted.ready_file, State(error=error.message))
        return None
    if state.code == UsageError.exit_code:
        return state.code
    if wanted.require == "all" and not state.complete:
        _tell(state, wanted, "not started, as --require all says")
        return EnvironmentFault.exit_code
    _tell(state, wanted, starting)
    _write(wanted.ready_file, state)
    return None


def _tell(state: State, wanted: Ahead, then: str) -> None:
    """Say what is there, and what is left, on standard error."""
    for title, error in state.failed[:_FEW]:
        named = error.splitlines()[0].removeprefix(title).strip() if error else "unknown"
        render.note(f"failed: {title}: {named}")
    if len(state.failed) > _FEW:
        render.note(f"failed: {len(state.failed) - _FEW} more")
    took = f"in {render.duration(state.seconds)}"
    if state.total is None:
        said = f"what of {wanted.shapes} is there did not become known {took}"
    else:
        said = f"{state.ready:,} of {render.count(state.total, 'kernel')} ready {took}"
        if state.targets:
            said += f" ({', '.join(state.targets)})"
    if state.spent and not state.complete and wanted.budget is not None:
        said += f"; the budget of {render.duration(wanted.budget)} is spent"
    if state.left:
        names = ", ".join(state.left[:_FEW]) + (" …" if len(state.left) > _FEW else "")
        said += f"; left: {names}"
    _say(f"{said}, {then}" if then else said)
    if not state.complete and not state.code:
        targets = "".join(f" --target {shlex.quote(one)}" for one in wanted.targets)
        render.note(
            f"hint: `tlcache warm --shapes {shlex.quote(wanted.shapes)}{targets}` compiles what is "
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
