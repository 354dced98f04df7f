"""A sibling of the command that `tlcache run` becomes: it works on while the command runs already.

Invariant: the command never has to wait for it. It is nobody's child but init's; it ends when the
command does, and where the command is init itself, not before: there nobody would wait for it.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

__all__ = ["start"]

_NICE = 10
_IDLE = "import signal\nwhile True: signal.pause()"


def start(work: Callable[[int | None], None]) -> None:
    """Have a process of its own do some work, and return at once.

    Args:
        work: Called there with a descriptor that can be read once this process, whatever it has
            become by then, has ended; None where the kernel has no such descriptors.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    command = os.getpid()
    try:
        ended: int | None = os.pidfd_open(command)
    except (OSError, AttributeError):
        ended = None
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        if ended is not None:
            os.close(ended)
        return
    try:
        os.setsid()
        if not os.fork():
            _settle(ended)
            work(ended)
            if command == 1:
                _stay()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _settle(ended: int | None) -> None:
    """Give way to the command, and hold nothing open that it was handed but standard error."""
    os.nice(_NICE)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    most = os.sysconf("SC_OPEN_MAX")
    if ended is None:
        os.closerange(3, most)
    else:
        os.closerange(3, ended)
        os.closerange(ended + 1, most)


def _stay() -> None:
    """Do nothing, in little memory, until the pid namespace ends: what ended now would be a zombie
    of init, which knows nothing of it.
    """
    os.dup2(0, 2)
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", _IDLE])
