"""The worker's side of a warm: one spec in, one outcome out. Importing this module imports
TileLang.

The fork server imports it once; workers are forked from there, before any of them has touched CUDA.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tilelang  # noqa: F401 -- imported once, for all workers
from tqdm import tqdm

from tlcache.errors import CompileError, EnvironmentFault, TlcacheError
from tlcache.spec import KernelSpec
from tlcache.store import locks, roots
from tlcache.warm import asking, compiling, plan, pretending, replaying, toolchain
from tlcache.warm.outcome import Outcome, Work
from tlcache.warm.plan import Item
from tlcache.warm.shapes import Wanted

__all__ = ["serve"]

# TileLang logs through tqdm, whose own lock is a semaphore that a killed worker would leave behind.
tqdm.set_lock(threading.RLock())
# Asked once, for all workers.
toolchain.provenance()
replaying.watch()


def serve(connection: Connection, root: str, scratch: str, quiet: bool) -> None:
    """Compile what comes down the pipe until it closes.

    Args:
        connection: Specs as JSON in, each with the key that TileLang is to have for it, or None,
            and what is to be done; `Outcome`s back.
        root: The cache root.
        scratch: A directory for what TileLang and the compilers leave behind; the parent removes
            it.
        quiet: Keep what TileLang and the compilers print to a file in `scratch`.
    """
    os.setsid()  # so that the compilers of a worker that hangs can be killed with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TILELANG_CACHE_DIR"] = root
    os.environ.pop(roots.VARIABLE, None)  # this root alone, whichever are in force
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    os.environ["TILELANG_PRINT_ON_COMPILATION"] = "0"
    os.environ.pop("TILELANG_DEFAULT_TARGET", None)  # each spec says its own
    log = None
    if quiet:
        path = os.path.join(scratch, f"{os.getpid()}.log")
        try:
            log = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except FileNotFoundError:
            return  # the parent was ended while this worker was being born
        os.dup2(log, 2)
    os.dup2(2, 1)
    while True:
        try:
            data: dict[str, Any]
            data, wanted, work = connection.recv()
        except (EOFError, OSError):
            return
        if log is not None:
            os.ftruncate(log, 0)
        spec = KernelSpec.from_json(data)
        if work == "compile":
            outcome = _outcome(spec, wanted, root, log)
        else:
            outcome = _looked(spec, wanted, root, work)
        try:
            connection.send(outcome)
        except OSError:
            return


def _looked(spec: KernelSpec, key: str | None, root: str, work: Work) -> Outcome:
    """What is found out without compiling."""
    try:
        with pretending.pretending(spec.target):
            if work == "ask":
                os.environ["TLCACHE_TRUST"] = "any"  # the root is a scratch, wherever that lies
                return Outcome("asked", asked=asking.asked(spec, key, root))
            assert key is not None
            replaying.compare(spec, key, targeted=True)
    except TlcacheError as error:
        return Outcome("failed", error=error.message, hint=error.hint)
    except Exception as error:
        return Outcome("failed", error=f"{type(error).__name__}: {error}".splitlines()[0])
    return Outcome("same")


def _outcome(spec: KernelSpec, wanted: str | None, root: str, log: int | None) -> Outcome:
    try:
        key = spec.action_key()
        with locks.compiling(root, key):
            item = Item(Wanted(spec, "", None, wanted), key)
            plan.look([item], [Path(root)])
            if item.outcome is not None:
                return item.outcome  # another process compiled it since this one was asked to
            with pretending.pretending(spec.target):
                built = compiling.build(spec, root, key=wanted, targeted=True)
    except TlcacheError as error:
        message = error.message
        if isinstance(error, CompileError) and log is not None:
            # A host compiler's words are in its output only, not in TileLang's error.
            said = compiling.compiler_says(os.pread(log, 1 << 20, 0).decode(errors="replace"))
            if said is not None and compiling.compiler_says(message) is None:
                message = f"{spec} does not compile: {said}"
        return Outcome(
            "failed",
            error=message,
            hint=error.hint,
            fault=isinstance(error, EnvironmentFault),
        )
    except Exception as error:
        return Outcome("failed", error=f"{type(error).__name__}: {error}".splitlines()[0])
    if built.fault is not None:
        return Outcome("failed", error=built.fault.message, hint=built.fault.hint, fault=True)
    entry = _entry(built.kernel, root)
    kept = built.record is not None or built.way == "call"
    return Outcome(
        "compiled" if kept else "unrecorded",
        seconds=built.seconds,
        saved_seconds=built.seconds if kept else 0.0,
        bytes=_bytes(os.path.join(root, entry)) if kept and entry is not None else 0,
        entry=None if built.record is not None else entry,
        way=built.way,
        reason=built.reason,
    )


def _entry(kernel: Any, root: str) -> str | None:
    """TileLang's entry of a kernel, relative to the root, if it is in there."""
    path = getattr(kernel, "_tilelang_cache_path", None)
    if path is None or not os.path.isdir(path):
        return None
    entry = os.path.relpath(path, root)
    return None if entry.startswith(os.pardir) else entry


def _bytes(entry: str) -> int:
    try:
        return sum(item.stat().st_size for item in os.scandir(entry))
    except OSError:
        return 0  # it was pruned meanwhile
