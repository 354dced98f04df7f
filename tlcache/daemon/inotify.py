"""What changed in some directories, by inotify.

Of watchdog, this uses the bindings. Its observers take a thread for each directory, of which a root
has 300, and before version 7, which Python 3.10 cannot have, they lose an overflow.

Invariant: a change in a watched directory is named by `take`, or `take` says that some were lost.
What is kept of changes that nobody has taken yet is bounded.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
from collections.abc import Container
from typing import TYPE_CHECKING

from watchdog.observers.inotify_c import (
    InotifyConstants,
    inotify_add_watch,
    inotify_init,
    inotify_rm_watch,
)

if TYPE_CHECKING:
    from watchdog.observers.inotify_c import WatchDescriptor

__all__ = ["Changes", "Inotify"]

_MASK = (
    InotifyConstants.IN_CREATE
    | InotifyConstants.IN_DELETE
    | InotifyConstants.IN_MOVE
    | InotifyConstants.IN_MODIFY
    | InotifyConstants.IN_ATTRIB
    | InotifyConstants.IN_DELETE_SELF
    | InotifyConstants.IN_MOVE_SELF
    | InotifyConstants.IN_ONLYDIR
)
_HEADER = struct.Struct("iIII")
_CHUNK = 256 * 1024
_MOST = 50_000


class Changes:
    """What changed.

    Attributes:
        names: Directory and name of each item.
        ended: Directories that are not watched any more: deleted, or unmounted.
        unmounted: Whether one of those was unmounted.
        lost: Whether changes were lost, so that anything may have changed.
    """

    def __init__(self) -> None:
        self.names: set[tuple[str, str]] = set()
        self.ended: set[str] = set()
        self.unmounted = False
        self.lost = False

    def __bool__(self) -> bool:
        return bool(self.names or self.ended or self.lost)


class Inotify:
    """Watches on directories, not on what is below them. For one thread, but for `wake`.

    Raises:
        OSError: There are too many inotify instances already.
    """

    def __init__(self) -> None:
        self._descriptor = inotify_init()
        if self._descriptor == -1:
            raise _error("no inotify instance is to be had")
        os.set_blocking(self._descriptor, False)
        os.set_inheritable(self._descriptor, False)
        self._awake, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._poll.register(self._awake, select.POLLIN)
        self._paths: dict[WatchDescriptor, set[str]] = {}
        self._watches: dict[str, WatchDescriptor] = {}
        self._changes = Changes()

    def __len__(self) -> int:
        return len(self._paths)

    def add(self, path: str) -> bool:
        """Watch a directory, unless that is done already.

        Returns:
            Whether it is another directory than the one that had this path, or a new one.

        Raises:
            OSError: It cannot be watched, is none, or there are too many watches.
        """
        watch = inotify_add_watch(self._descriptor, os.fsencode(path), _MASK)
        if watch == -1:
            raise _error(path)
        before = self._watches.get(path)
        if before == watch:
            return False
        if before is not None:
            self._leave(path, before)
        self._watches[path] = watch
        self._paths.setdefault(watch, set()).add(path)
        return True

    def drop(self, top: str) -> None:
        """Watch a directory and those below it no longer."""
        start = os.path.join(top, "")
        for path in [path for path in self._watches if path == top or path.startswith(start)]:
            self._leave(path, self._watches.pop(path))

    def keep(self, wanted: Container[str]) -> None:
        """Watch only these directories any longer."""
        for path in [path for path in self._watches if path not in wanted]:
            self._leave(path, self._watches.pop(path))

    def _leave(self, path: str, watch: WatchDescriptor) -> None:
        paths = self._paths.get(watch)
        if paths is None:
            return
        paths.discard(path)
        if not paths:
            del self._paths[watch]
            inotify_rm_watch(self._descriptor, watch)

    def wait(self, seconds: float) -> None:
        """Wait until something changes, `wake` is called, or the time is over."""
        for descriptor, _ in self._poll.poll(max(0.0, seconds) * 1000):
            if descriptor == self._awake:
                os.read(self._awake, 4096)

    def wake(self) -> None:
        """End the wait, from any thread."""
        try:
            os.write(self._wake, b"!")
        except BlockingIOError:
            pass  # it will wake up

    def drain(self) -> None:
        """Take what the kernel has to tell, before its queue overflows."""
        while True:
            try:
                data = os.read(self._descriptor, _CHUNK)
            except BlockingIOError:
                return
            self._parse(data)

    def take(self) -> Changes:
        """What changed since this was called last."""
        self.drain()
        changes, self._changes = self._changes, Changes()
        return changes

    def _parse(self, data: bytes) -> None:
        changes, offset = self._changes, 0
        while offset < len(data):
            watch, mask, _, length = _HEADER.unpack_from(data, offset)
            offset += _HEADER.size + length
            if mask & InotifyConstants.IN_Q_OVERFLOW:
                changes.lost = True
                continue
            paths = self._paths.get(watch)
            if paths is None:
                continue
            if mask & InotifyConstants.IN_IGNORED:
                changes.ended |= paths
                del self._paths[watch]
                for path in paths:
                    if self._watches.get(path) == watch:
                        del self._watches[path]
            elif mask & InotifyConstants.IN_UNMOUNT:
                changes.unmounted = True
            elif length:
                name = os.fsdecode(data[offset - length : offset].rstrip(b"\0"))
                changes.names.update((path, name) for path in paths)
        if len(changes.names) > _MOST:
            changes.names.clear()
            changes.lost = True

    def close(self) -> None:
        for descriptor in (self._descriptor, self._awake, self._wake):
            os.close(descriptor)


def _error(what: str) -> OSError:
    code = ctypes.get_errno()
    if code == errno.ENOSPC:
        return OSError(code, "fs.inotify.max_user_watches is reached", what)
    if code == errno.EMFILE:
        return OSError(code, "fs.inotify.max_user_instances is reached", what)
    return OSError(code, os.strerror(code), what)
