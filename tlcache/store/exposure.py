"""Who could have written what is under a root, told once for as much of it as possible.

Invariant: the rule is `Trust`'s, by which kernels are loaded. What lies in a directory of which the
same is said already is not told again: one `chmod -R` mends both.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator
from typing import NamedTuple

from tlcache.errors import UntrustedRootError
from tlcache.store import layout
from tlcache.store.opened import Fault, shown
from tlcache.store.trust import Trust

__all__ = ["HOLDERS", "Exposed", "Exposure"]

HOLDERS = re.compile(
    r"\d+\.\d[\w.]*|\d[\w.]*-(?:x86_64|aarch64|arm64)|[a-z][a-z0-9]*-\w+"
    r"|kernels|autotuner|cuda-binaries|frontend|\.staging|tmp"
)
"""The names of directories that things lie in, of any TileLang version."""

_DEEPEST = 4  # of them between a root and a thing


class Exposed(NamedTuple):
    """What somebody else could have written: where, and a finding's other fields."""

    severity: str
    path: str
    what: str
    remedy: str | None


class Exposure:
    """Collects what others can write under one root."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._trust = Trust(root)
        self._whole: UntrustedRootError | None = None
        self._covered: dict[str, set[str]] = {}  # directories that are exposed, and to whom
        self._groups: dict[tuple[str, str], list[tuple[str, str]]] = {}

    def structure(self) -> Iterator[tuple[str, Fault]]:
        """Look at the directories that things lie in, and yield those that cannot be listed."""
        try:
            self._trust.check_root()
        except UntrustedRootError as error:
            self._whole = error
            self._cover(self._root, self._root)
        except OSError:
            return
        others = set(layout.roots(self._root)[1:])
        places = [(self._root, 0)]
        while places:
            path, depth = places.pop()
            try:
                with os.scandir(path) as found:
                    items = [item for item in found if item.is_dir(follow_symlinks=False)]
            except FileNotFoundError:
                continue
            except OSError as error:
                what = f"cannot be listed: {(error.strerror or str(error)).lower()}"
                yield path, Fault("unreadable", "error", "", what)
                continue
            for item in items:
                holder = HOLDERS.fullmatch(item.name) and item.path not in others
                if holder and depth < _DEEPEST:
                    self._cover(item.path, path)
                    places.append((item.path, depth + 1))

    def _cover(self, path: str, above: str) -> None:
        """Note who can write a directory, unless that is said of one above it."""
        try:
            reason = self._trust.fault(os.path.abspath(path), os.lstat(path))
        except OSError:
            return
        if reason is not None and path != self._root:
            self.add(above, path, reason)
        known = self._covered.get(above, set())
        self._covered[path] = known | ({_who(reason)} if reason is not None else set())

    def of(self, path: str, status: os.stat_result, depth: int = 0) -> Iterator[tuple[str, str]]:
        """A thing and what is in it: the paths that others can write, and why that is so."""
        reason = self._trust.fault(os.path.abspath(path), status)
        if reason is not None:
            yield path, reason
        if stat.S_ISDIR(status.st_mode) and depth < 2:
            try:
                with os.scandir(path) as items:
                    inner = [(item.path, item.stat(follow_symlinks=False)) for item in items]
            except OSError:
                return
            for below, told in inner:
                yield from self.of(below, told, depth + 1)

    def add(self, holder: str, path: str, reason: str) -> None:
        """Note a path that others can write, in the directory `holder`."""
        if _who(reason) not in self._covered.get(holder, ()):
            self._groups.setdefault((holder, _who(reason)), []).append((path, reason))

    def found(self) -> Iterator[Exposed]:
        """One for each directory and who could write in it, however much of it."""
        self._own()
        if self._whole is not None:
            error = self._whole
            severity = "warning" if _who(error.message) == "group" else "error"
            yield Exposed(severity, self._root, error.message, error.hint)
        for (holder, who), paths in self._groups.items():
            path, what = paths[0]
            if len(paths) > 1:
                what = f"{shown(os.path.basename(path))} and {len(paths) - 1:,} more: {what}"
                path = holder
            command = {"owner": "chown -R $(id -u)", "group": "chmod -R g-w"}
            remedy = f"`{command.get(who, 'chmod -R go-w')} {shlex.quote(path)}`"
            severity = "warning" if who == "group" else "error"
            yield Exposed(severity, path, what, f"{remedy} if you know what it holds")

    def _own(self) -> None:
        """The same of what tlcache keeps."""
        top = os.path.join(self._root, "tlcache")
        self._cover(top, self._root)
        for folder in ("records", "schedules", "closures"):
            path = os.path.join(top, folder)
            try:
                status = os.lstat(path)
            except OSError:
                continue
            for below, reason in self.of(path, status):
                self.add(top, below, reason)


def _who(reason: str) -> str:
    """Of a reason that `Trust` gives: whether it is the owner, a group or everybody."""
    if "belongs to uid" in reason or "is a link of uid" in reason:
        return "owner"
    return "group" if "can be written by group" in reason else "everybody"
