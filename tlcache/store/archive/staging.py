"""Files written into staging, by some threads.

To create a file is to wait for the kernel, and on a network file system for a server, so other
files are checked meanwhile.

Invariant: what was added is on its way to the disk, whole, when the `with` block has ended without
an error; the bytes that wait for a thread are bounded.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

__all__ = ["Writing", "staged_path"]

_THREADS = 4
_MOST_WAITING = 32 * 1024 * 1024
_OWN = "tlcache/"


def staged_path(directory: str, path: str) -> str:
    """Where a file lies in the staging: TileLang's as in a root, tlcache's a directory a kind."""
    if not path.startswith(_OWN):
        return f"{directory}/{path}"
    _, folder, *_, name = path.split("/")
    return f"{directory}/{_OWN}{folder}/{name}"


class Writing:
    """Writes files into a directory.

    Args:
        directory: An empty one.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._made = {directory}
        self._pool = ThreadPoolExecutor(_THREADS)
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._bytes = 0

    def __enter__(self) -> Writing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=error is not None)
        if error is None:
            for done, _ in self._waiting:
                done.result()

    def add(self, files: Mapping[str, bytes]) -> None:
        """Write files, each new.

        Args:
            files: Their bytes by their paths below the root; they are in one directory.

        Raises:
            OSError: One that was added before could not be written.
        """
        paths = {staged_path(self._directory, path): data for path, data in files.items()}
        for path in paths:
            self._make(os.path.dirname(path))
        size = sum(map(len, files.values()))
        self._waiting.append((self._pool.submit(_write, paths), size))
        self._bytes += size
        while self._waiting and (self._bytes > _MOST_WAITING or self._waiting[0][0].done()):
            done, size = self._waiting.popleft()
            self._bytes -= size
            done.result()

    def _make(self, path: str) -> None:
        """Make a directory, each but once: `os.makedirs` looks every time."""
        if path not in self._made:
            self._make(os.path.dirname(path))
            os.mkdir(path)
            self._made.add(path)


def _write(files: Mapping[str, bytes]) -> None:
    for path, data in files.items():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            written = os.write(descriptor, data)
            while written < len(data):
                written += os.write(descriptor, data[written:])
        finally:
            os.close(descriptor)
