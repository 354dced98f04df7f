"""One daemon a root: who watches it holds a name that only one process can have.

The name is that of an abstract socket, made of the root's device and inode. So nothing is written:
a root that is read-only has one daemon, too, and one on a mount can be unmounted under it. It is
free the moment that its holder dies. Daemons in other network namespaces, or on other hosts, are
not seen; they do no harm, since who deletes holds the root's prune lock.
"""

from __future__ import annotations

import os
import socket
import struct
from types import TracebackType

from tlcache.errors import DaemonError

__all__ = ["Claim"]

_PATIENCE = 0.2
_CREDENTIALS = struct.Struct("3i")


class Claim:
    """The right to watch a root.

    Args:
        root: The root, for messages.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._identity: tuple[int, int] | None = None
        self._socket: socket.socket | None = None

    def take(self, identity: tuple[int, int]) -> None:
        """Hold a directory, and no other from now on.

        Args:
            identity: Its device and inode.

        Raises:
            DaemonError: Another daemon does.
        """
        if self._identity == identity:
            return
        self.release()
        held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"\0tlcache-daemon-{identity[0]:x}-{identity[1]:x}"
        try:
            held.bind(name)
        except OSError:
            held.close()
            raise DaemonError(
                f"a daemon watches {self._root} already: {_holder(name)}",
                hint="stop that one first, or let it watch several roots: `--root A --root B`",
            ) from None
        held.listen(16)
        held.setblocking(False)
        self._socket, self._identity = held, identity

    def answer(self) -> None:
        """Let those go who asked who holds it; to be called now and then."""
        while self._socket is not None:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return

    def release(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = self._identity = None

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def _holder(name: str) -> str:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            asked.settimeout(_PATIENCE)
            asked.connect(name)
            told = asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return "its pid is not known"
    pid, uid, _ = _CREDENTIALS.unpack(told)
    if not pid:
        return "it runs in another container"
    return f"pid {pid}" if uid == os.geteuid() else f"pid {pid} of uid {uid}"
