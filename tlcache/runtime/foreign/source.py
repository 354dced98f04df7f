"""What a function was made of, as TileLang would read it now: its lines, and its closure.

Invariant: lines are told only while they are those that the process was loaded from.
"""

from __future__ import annotations

import linecache
import os
import time
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from tlcache.runtime.foreign.stream import Unseen

__all__ = ["Lines", "cells", "lines"]


class Lines(NamedTuple):
    """The lines of one definition.

    Attributes:
        text: The lines.
        file: All lines of its file; the same list as long as the file is what it was.
    """

    text: str
    file: list[str]


def lines(function: FunctionType) -> Lines | None:
    """The lines of a function as TileLang would read them now; None where there are none.

    Raises:
        Unseen: The file was changed since this process read it, or began.
    """
    code = function.__code__
    name = code.co_filename
    known: Any = linecache.cache.get(name)
    try:
        status = os.stat(name)
    except OSError:
        status = None
    if status is not None:
        stale = isinstance(known, tuple) and len(known) > 1 and known[1] is not None
        if stale and (known[0], known[1]) != (status.st_size, status.st_mtime):
            raise Unseen("its source file was changed while the process runs")
        if status.st_mtime > _STARTED + 0.02:
            raise Unseen("its source file was changed while the process runs")
    held = linecache.getlines(name, function.__globals__)
    kept = _lines.get(id(code))
    if kept is not None and kept[0] is code and kept[1] is held:
        return kept[2]
    block = _block(code, held)
    found = None if block is None else Lines(block, held)
    _lines[id(code)] = (code, held, found)
    return found


def _block(code: CodeType, lines: list[str]) -> str | None:
    """The lines of one definition: those of its bytecode, and what follows and is indented."""
    first = code.co_firstlineno - 1
    if not lines or not 0 <= first < len(lines):
        return None
    last = _last_line(code)
    indent = _indent(lines[first])
    while last < len(lines) and (not lines[last].strip() or _indent(lines[last]) > indent):
        last += 1
    return "".join(lines[first:last])


def _last_line(code: CodeType) -> int:
    last = max((line for _, _, line in code.co_lines() if line is not None), default=0)
    inner = [_last_line(part) for part in code.co_consts if isinstance(part, CodeType)]
    return max(last, code.co_firstlineno, *inner, 0)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def cells(function: FunctionType) -> dict[str, Any]:
    """What the closure of a function holds, by name."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            pass  # it is empty yet
    return found


def _started() -> float:
    """When this process started, in seconds since the epoch, to a hundredth; where the system does
    not tell, when this module was imported.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()


_STARTED = _started()
# As long as linecache has them.
_lines: dict[int, tuple[CodeType, Any, Lines | None]] = {}
