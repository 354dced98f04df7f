"""Asking the agents of this host: one GET to each of their sockets, all at once.

Invariant: an agent that is silent, slow, talks nonsense or never stops costs the deadline and a
bounded amount of memory, and its reason is told; it takes no other agent's answer along.
"""

from __future__ import annotations

import io
import json
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple, cast

from tlcache.errors import AgentError
from tlcache.store import sockets
from tlcache.store.sockets import Address

__all__ = ["DEADLINE", "Answer", "Found", "Silence", "ask", "everywhere", "find", "gather"]
__all__ += ["named"]

DEADLINE = 0.5
"""Seconds that an agent has for its whole answer. It takes milliseconds; more than that is for a
machine whose cores are all busy.
"""
_MOST = 8 * 1024 * 1024
_AT_ONCE = 64
_CHUNK = 64 * 1024


class Silence(Exception):
    """An agent gave no answer; the text says why, as the end of a sentence about it."""


class Found(NamedTuple):
    """An agent's socket, and whose it should be."""

    address: Address
    owner: int


@dataclass(frozen=True)
class Answer:
    """What became of asking one agent.

    Attributes:
        pid: Its process, as this pid namespace counts; as its own does where that cannot be told.
        socket: The path of its socket.
        document: What it answered; None where it did not.
        trouble: Why it did not.
    """

    pid: int
    socket: str
    document: Mapping[str, Any] | None
    trouble: str | None = None


def find() -> tuple[list[Found], list[AgentError]]:
    """The sockets of all agents that this user may ask; and which directories are not trusted."""
    found: list[Found] = []
    troubles: list[AgentError] = []
    for place, owner in sockets.places().items():
        try:
            found += [Found(address, owner) for address in sockets.listed(place, owner=owner)]
        except AgentError as error:
            troubles.append(error)
    return found, troubles


def named(pid: int) -> list[Found]:
    """The sockets of a process in the runtime directory that its own environment names, which may
    be another one than ours; none where that cannot be read.
    """
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = dict(part.partition(b"=")[::2] for part in file.read().split(b"\0"))
        place = os.fsdecode(variables[sockets.DIRECTORY.encode()])
        listed = sockets.listed(place, owner=owner)
    except (OSError, KeyError, AgentError):
        return []
    return [Found(address, owner) for address in listed if address.pid == pid]


def everywhere(
    path: str = "/v1/stats", *, seconds: float = DEADLINE
) -> tuple[list[Answer], list[AgentError]]:
    """Ask all agents; see `find` and `gather`."""
    found, troubles = find()
    return gather(found, path, seconds=seconds), troubles


def gather(
    found: list[Found], path: str = "/v1/stats", *, seconds: float = DEADLINE
) -> list[Answer]:
    """Ask many agents at once.

    Args:
        found: Their sockets.
        path: What to ask for.
        seconds: How long each has.

    Returns:
        An answer for each, by pid. Sockets that nobody listens on are left out: their processes
        were killed.
    """
    if not found:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(found)), "ask") as pool:
        answers = pool.map(lambda one: ask(one, path, seconds=seconds), found)
        return sorted(filter(None, answers), key=lambda answer: (answer.pid, answer.socket))


def ask(found: Found, path: str, *, seconds: float = DEADLINE) -> Answer | None:
    """Ask one agent.

    Args:
        found: Its socket.
        path: What to ask for, like `/v1/events`.
        seconds: How long it has, from connecting to the last byte.

    Returns:
        What it answered; None where nobody listens.
    """
    address, pid = found.address, found.address.pid
    deadline = time.monotonic() + seconds
    try:
        with sockets.connect(address, seconds, owner=found.owner) as connection:
            pid = sockets.peer(connection).pid or pid
            return Answer(pid, address.path, _asked(connection, path, deadline))
    except (ConnectionRefusedError, FileNotFoundError):
        return None
    except TimeoutError:
        return Answer(pid, address.path, None, f"does not answer within {seconds:g} s")
    except BlockingIOError:
        return Answer(pid, address.path, None, "does not answer: its queue is full")
    except Silence as silence:
        return Answer(pid, address.path, None, str(silence))
    except AgentError as error:
        return Answer(pid, address.path, None, f"is not asked: {error.message}")
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        return Answer(pid, address.path, None, f"cannot be asked: {said}")


def _asked(connection: socket.socket, path: str, deadline: float) -> Mapping[str, Any]:
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    connection.sendall(request.encode())
    try:
        response = HTTPResponse(cast(socket.socket, _Timed(connection, deadline)))
        response.begin()
        body = bytearray()
        while some := response.read(_CHUNK):  # all at once, it would believe any Content-Length
            body += some
        if response.length:
            raise Silence("breaks off in the middle of its answer")
    except (HTTPException, ValueError) as error:
        raise Silence("answers something that is not HTTP") from error
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Silence("answers something that is not JSON") from error
    if not isinstance(document, dict):
        raise Silence("answers something that is not a JSON object")
    if response.status != 200:
        raise Silence(f"answers {response.status}: {str(document.get('error'))[:200]}")
    if document.get("schema") != 1:
        raise Silence("speaks another version than this tlcache (its schema is not 1)")
    return document


class _Timed(io.RawIOBase):
    """A connection that is read until a deadline, and not beyond a bound."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline, self._left = connection, deadline, _MOST

    def makefile(self, mode: str) -> io.BufferedReader:
        """What `HTTPResponse` asks a socket for."""
        return io.BufferedReader(self, _CHUNK)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        if self._left <= 0:
            raise Silence(f"answers more than {_MOST >> 20} MiB")
        self._connection.settimeout(remaining)
        count = self._connection.recv_into(buffer)
        self._left -= count
        return count
