"""A daemon in a process of its own, as `tlcache daemon run` starts it, and how tests ask it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import TLCACHE
from tests.daemon.conftest import PATIENCE, until

# Asks once, as another user: its uid, its groups, the socket, the request as it is sent.
STRANGER = """
import os, socket, sys
uid, groups, path, request = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
groups = [int(one) for one in groups.split(",")]
os.setgroups(groups[1:]); os.setgid(groups[0]); os.setuid(uid)
with socket.socket(socket.AF_UNIX) as one:
    one.connect(path)
    one.sendall(request.encode())
    sys.stdout.buffer.write(one.makefile("rb").read())
"""


@dataclass(frozen=True)
class Told:
    """An answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("daemon", timeout=PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = connected(self._path)


def connected(path: str | Path) -> socket.socket:
    """A connection to a daemon."""
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(PATIENCE)
    one.connect(str(path))
    return one


class Daemon:
    """A daemon that was started.

    Args:
        place: Where its socket and history are.
        roots: What it watches.
        options: Of `tlcache daemon run`.
        more: Of `subprocess.Popen`.
    """

    def __init__(self, place: Path, roots: list[Path], *options: str, **more: Any) -> None:
        self.place = place
        self.socket = place / "daemon.sock"
        self.log = place / "log"
        command = [*TLCACHE, "daemon", "run", *(f"--root={root}" for root in roots)]
        command += [f"--socket={self.socket}", f"--history={place / 'history'}", *options]
        env = {**os.environ, "TLCACHE_RUNTIME_DIR": str(place / "run"), **more.pop("env", {})}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, **more)

    def serves(self) -> Daemon:
        """Wait until it does."""

        def there() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return self.socket.exists() and bool(self.json("/v1/stats")["roots"][0]["scans"])

        until(there, self.log.read_text)
        return self

    def ask(self, path: str, method: str = "GET", body: Any = None, **headers: str) -> Told:
        """One request, and its answer."""
        connection = _Connection(str(self.socket))
        sent = None
        if body is not None:
            sent = body if isinstance(body, (bytes, str)) else json.dumps(body)
            headers.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, path, sent, headers)
            response = connection.getresponse()
            return Told(response.status, dict(response.headers), response.read())
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        """What a GET says, which has to be a success."""
        told = self.ask(path)
        assert told.status == 200, told.body
        return told.json

    def post(self, path: str, body: Any) -> Told:
        return self.ask(path, "POST", body)

    def job(self, told: Told) -> dict[str, Any]:
        """A job that was asked for, once it has ended."""
        assert told.status in (200, 202), told.body
        name = told.json["job"]["id"]
        return until(
            lambda: (one := self.json(f"/v1/jobs/{name}")["job"])["ended"] and one,
            lambda: self.ask(f"/v1/jobs/{name}").body,
        )

    def ask_as(self, uid: int, groups: list[int], path: str, method: str = "GET") -> Told:
        """A request of another user; its first group is its own."""
        request = f"{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\n"
        request += "Content-Length: 2\r\n\r\n{}" if method == "POST" else "\r\n"
        told = subprocess.run(
            [sys.executable, "-c", STRANGER, str(uid), ",".join(map(str, groups)),
             str(self.socket), request],
            capture_output=True, check=False, timeout=PATIENCE,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr.decode()
        head, _, body = told.stdout.partition(b"\r\n\r\n")
        return Told(int(head.split()[1]), {}, body)

    @contextmanager
    def events(self, query: str = "") -> Iterator[Iterator[dict[str, Any]]]:
        """The events that come, each with its `event` and `id`."""
        with connected(self.socket) as one:
            one.sendall(f"GET /v1/events{query} HTTP/1.0\r\n\r\n".encode())
            with one.makefile("rb") as lines:
                while lines.readline().strip():
                    pass
                yield _events(lines)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop it; its exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


def _events(lines: Any) -> Iterator[dict[str, Any]]:
    event: dict[str, Any] = {}
    for line in lines:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name in ("id", "event"):
            event[name] = value
        elif name == "data":
            event.update(json.loads(value))
        elif not name and event:
            yield event
            event = {}
