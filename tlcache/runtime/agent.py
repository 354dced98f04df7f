"""The agent: one daemon thread that answers questions about its process over a unix socket.

It reads what the rest of `tlcache.runtime` counts; nothing here is on a launch's way. Each step of
it gives the GIL away and gets it back when the other threads let go, up to 5 ms later, so steps are
few: a request is read and answered without waiting for a second event, requests that came together
share one answer, and a wave of them gets at most a fifth of a core.

Invariant: whatever clients do, there is one thread, and a bounded number of connections, of bytes
that were read, and of bytes that wait to be sent. The thread holds no lock while it runs, and keeps
no process from exiting. A child of `fork` has a socket of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterable

from tlcache.errors import AgentError
from tlcache.runtime import routes
from tlcache.store import sockets

__all__ = ["Agent", "running", "start", "stop"]

_log = logging.getLogger(__name__)

CONNECTIONS = 128
"""Open ones at most; where there would be more, the oldest goes."""

UNSENT = 8 * 2**20
"""Bytes of responses that wait for their clients to read them, at most."""

DEADLINE = 3.0
"""Seconds that a client may take to send its request, and again to read the response."""

_WAVE = 64
_REST = 4.0
_LONGEST_REST = 0.02
_STUMBLES = 3


class _Connection:
    __slots__ = ("deadline", "received", "socket", "unsent")

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.received = b""
        self.unsent: memoryview | None = None
        self.deadline = time.monotonic() + DEADLINE


class Agent:
    """A thread that listens in a directory.

    Args:
        directory: The runtime directory; it is made where it is not there.

    Attributes:
        directory: That directory.
        name: The socket's name in it.

    Raises:
        AgentError: The directory is not this user's alone, or no socket or thread is to be had.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._connections: dict[int, _Connection] = {}
        self._paused = 0.0
        try:
            with contextlib.ExitStack() as undo:
                self._listen(undo)
                undo.pop_all()
        except (OSError, RuntimeError) as error:  # the latter where no thread is to be had
            reason = getattr(error, "strerror", None) or error
            raise AgentError(f"no agent can listen in {directory}: {reason}") from error

    def _listen(self, undo: contextlib.ExitStack) -> None:
        self._selector = selectors.DefaultSelector()
        undo.callback(self._selector.close)
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        undo.callback(os.close, self._woken)
        undo.callback(os.close, self._wake)
        with sockets.opened(self.directory, create=True) as fd:
            self._server, self.name = sockets.listen(fd, os.getpid())
            undo.callback(self._server.close)
            self._inode = os.stat(self.name, dir_fd=fd, follow_symlinks=False).st_ino
            undo.callback(self.withdraw)
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="tlcache-agent", daemon=True)
        self._thread.start()

    @property
    def path(self) -> str:
        """Its socket."""
        return os.path.join(self.directory, self.name)

    def stop(self) -> None:
        """Take the socket away, and end the thread."""
        self.withdraw()
        os.write(self._wake, b"\0")
        self._thread.join()
        self.abandon()

    def withdraw(self) -> None:
        """Take the socket's name away; connections that there are go on."""
        with contextlib.suppress(AgentError), sockets.opened(self.directory) as fd:
            sockets.withdraw(fd, self.name, self._inode)

    def abandon(self) -> None:
        """Close all descriptors, and nothing else: the process that this was forked from has them,
        too.
        """
        self._selector.close()
        self._server.close()
        for connection in list(self._connections.values()):
            connection.socket.close()
        self._connections.clear()
        for fd in (self._woken, self._wake):
            with contextlib.suppress(OSError):
                os.close(fd)

    # --- the thread ---

    def _serve(self) -> None:
        # The process's signals are for its own threads.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        stumbles = 0
        while stumbles < _STUMBLES:
            try:
                if not self._turn():
                    return
                stumbles = 0
            except Exception:
                stumbles += 1
                last = "; it ends" if stumbles == _STUMBLES else ""
                _log.warning("the agent of tlcache stumbled%s", last, exc_info=True)
                time.sleep(0.1)

    def _turn(self) -> bool:
        """Wait for something to do, and do it. False when there is nothing more to come."""
        ready = self._selector.select(self._patience())
        begun = time.thread_time()
        complete: list[_Connection] = []
        for key, _ in ready:
            if key.fd == self._woken:
                return False
            if key.fileobj is self._server:
                complete += self._accepted()
            elif (connection := self._connections.get(key.fd)) is None:
                continue
            elif connection.unsent is not None:
                self._send(connection)
            elif self._received(connection):
                complete.append(connection)
        self._answer(complete)
        self._bound()
        if complete:
            time.sleep(min(_LONGEST_REST, _REST * (time.thread_time() - begun)))
        return True

    def _patience(self) -> float | None:
        """Seconds until a deadline; None where there is none."""
        times = [connection.deadline for connection in self._connections.values()]
        if self._paused:
            times.append(self._paused)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _accepted(self) -> Iterable[_Connection]:
        """Accept who is waiting; those whose request is there already."""
        complete = []
        for _ in range(_WAVE):
            try:
                accepted, _address = self._server.accept()
            except BlockingIOError:
                break
            except OSError as error:
                # No descriptors left, say. The listener would be ready again at once.
                _log.debug("the agent of tlcache cannot accept: %s", error)
                self._selector.unregister(self._server)
                self._paused = time.monotonic() + 0.1
                break
            if socket.getdefaulttimeout() is not None:
                accepted.setblocking(False)  # else each use would wait, in spite of MSG_DONTWAIT
            connection = _Connection(accepted)
            self._connections[accepted.fileno()] = connection
            uid = sockets.peer(accepted).uid
            if uid not in (0, os.geteuid()):
                self._respond(
                    connection,
                    routes.failure(403, f"uid {uid} may not ask", "ask as the process's own user"),
                )
            elif self._received(connection):
                complete.append(connection)
        return complete

    def _received(self, connection: _Connection) -> bool:
        """Read what there is; whether the request is complete."""
        try:
            room = routes.LONGEST + 1 - len(connection.received)
            data = connection.socket.recv(room, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._watch(connection, selectors.EVENT_READ)
            return False
        except OSError:
            self._close(connection)
            return False
        connection.received += data
        if routes.END in connection.received:
            return True
        if len(connection.received) > routes.LONGEST:
            self._respond(
                connection,
                routes.failure(
                    431, "the request is too long", f"it may have {routes.LONGEST} bytes"
                ),
            )
        elif not data and connection.received:
            self._respond(connection, routes.answer(b""))
        elif not data:
            self._close(connection)
        else:
            self._watch(connection, selectors.EVENT_READ)
        return False

    def _answer(self, complete: Iterable[_Connection]) -> None:
        """Answer requests; those that ask for the same get the same answer, made after all came."""
        answers: dict[bytes, bytes] = {}
        for connection in complete:
            first = routes.line(connection.received)
            if first not in answers:
                answers[first] = routes.answer(first)
            self._respond(connection, answers[first])

    def _respond(self, connection: _Connection, response: bytes) -> None:
        connection.received = b""
        connection.unsent = memoryview(response)
        connection.deadline = time.monotonic() + DEADLINE
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        assert connection.unsent is not None
        try:
            sent = connection.socket.send(
                connection.unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            )
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(connection)
            return
        connection.unsent = connection.unsent[sent:]
        if connection.unsent:
            self._watch(connection, selectors.EVENT_WRITE)
        else:
            self._close(connection)

    def _watch(self, connection: _Connection, events: int) -> None:
        try:
            self._selector.modify(connection.socket, events)
        except KeyError:
            self._selector.register(connection.socket, events)

    def _close(self, connection: _Connection) -> None:
        fd = connection.socket.fileno()
        if self._connections.pop(fd, None) is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)
            connection.socket.close()

    def _bound(self) -> None:
        """Close what is late, and the oldest of what is too much."""
        now = time.monotonic()
        if self._paused and now >= self._paused:
            self._paused = 0.0
            self._selector.register(self._server, selectors.EVENT_READ)
        for connection in list(self._connections.values()):
            if now < connection.deadline:
                continue
            if connection.unsent is None:
                self._respond(connection, routes.failure(408, "no request came", "send it at once"))
            self._close(connection)
        unsent = sum(len(one.unsent or b"") for one in self._connections.values())
        for connection in list(self._connections.values()):
            if len(self._connections) <= CONNECTIONS and unsent <= UNSENT:
                break
            unsent -= len(connection.unsent or b"")
            self._close(connection)


# --- of this process ---

_agent: Agent | None = None
_lock = threading.Lock()
_registered = False


def running() -> Agent | None:
    """The agent of this process, if it has one."""
    return _agent


def start() -> Agent:
    """Have an agent in this process; the one that there is, if there is one.

    Raises:
        AgentError: The directory is not this user's alone, or no socket is to be had there.
    """
    global _agent, _registered
    with _lock:
        if _agent is None:
            _agent = Agent(sockets.directory())
        if not _registered:
            _registered = True
            os.register_at_fork(after_in_child=_forked)
            atexit.register(_exiting)
        return _agent


def stop() -> None:
    """End the agent of this process, if it has one."""
    global _agent
    with _lock:
        if _agent is not None:
            _agent.stop()
            _agent = None


def _forked() -> None:
    global _agent, _lock
    _lock = threading.Lock()
    if _agent is not None:
        directory = _agent.directory
        _agent.abandon()
        _agent = None
        try:
            _agent = Agent(directory)
        except (AgentError, OSError) as error:
            _log.warning("the child of a fork has no agent: %s", error)


def _exiting() -> None:
    if _agent is not None:
        _agent.withdraw()
