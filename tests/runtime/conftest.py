"""What the tests of the runtime share: a process with an agent, and its answers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tlcache.store import sockets
from tlcache.store.sockets import Address


class Asked:
    """An agent, by the path of its socket."""

    def __init__(self, path: str) -> None:
        directory, name = os.path.split(path)
        pid = int(name.removesuffix(".sock").partition("-")[0])
        self.address = Address(directory, name, pid)

    def connect(self) -> socket.socket:
        return sockets.connect(self.address, 60)

    def ask(self, request: bytes) -> bytes:
        """Send bytes, and return all that comes back."""
        with self.connect() as client:
            client.sendall(request)
            answer = b""
            while data := client.recv(1 << 20):
                answer += data
            return answer

    def get(self, path: str) -> Any:
        """The answer to a GET."""
        request = f"GET {path} HTTP/1.1\r\nHost: agent\r\n\r\n"
        head, _, body = self.ask(request.encode()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n"), (head, body)
        assert f"Content-Length: {len(body)}".encode() in head
        return json.loads(body)


class Served:
    """A process that a test talks to: it says a line when it is asked to go on."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid
        self.said = self.line()

    def line(self) -> Any:
        """The next thing that it says, as JSON."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.wait()
        return json.loads(line)

    def go(self) -> Any:
        """Let it take its next step, and return what it says then."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.line()

    def end(self) -> int:
        """Let it run to its end; its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)

    @property
    def agent(self) -> Asked:
        """Its agent, if that is what it said last."""
        return Asked(self.said)


STEPS = """
import json, os, sys
def step(said=None):
    print(json.dumps(said), flush=True)
    return sys.stdin.readline()
"""


@pytest.fixture
def runtime_dir(cache_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory of the test's own, which is not there yet."""
    path = tmp_path / "run"
    monkeypatch.setenv(sockets.DIRECTORY, str(path))
    return path


@pytest.fixture
def at() -> type[Asked]:
    """An agent by the path of its socket."""
    return Asked


@pytest.fixture
def serve(runtime_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Start Python source, after STEPS, in a process that lives until the test ends."""
    processes = []

    def serve(source: str, *args: str, **kwargs: Any) -> Served:
        command = [sys.executable, "-c", STEPS + source, *args]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TILELANG_PRINT_ON_COMPILATION": "0", **kwargs.pop("env", {})},
            cwd=tmp_path,
            **kwargs,
        )
        processes.append(process)
        return Served(process)

    yield serve
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
