"""The daemon as a service manager runs it: the line of the unit, with the sockets that it hands
over, made here.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TLCACHE
from tests.daemon.asking import Daemon
from tests.daemon.conftest import PATIENCE, publish, until

# What systemd does before ExecStart: the socket becomes descriptor 3, and the variables name us.
HAND_OVER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="tlcached.socket")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class _Manager(Daemon):
    """A service manager: it has the socket, and is told how the service is."""

    def __init__(self, place: Path, root: Path, *options: str) -> None:
        self.place, self.log = place, place / "log"
        self.socket = place / "daemon.sock"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self.socket))
        self._listening.listen(64)
        self.told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.told.bind(str(place / "notify"))
        self.told.settimeout(PATIENCE)
        descriptor = self._listening.fileno()
        run = [*TLCACHE, "daemon", "run", f"--root={root}", f"--history={place / 'history'}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", HAND_OVER, str(descriptor), *run, *options],
                stdout=log,
                stderr=log,
                pass_fds=[descriptor],
                env={
                    **os.environ,
                    "NOTIFY_SOCKET": str(place / "notify"),
                    "WATCHDOG_USEC": "600000",
                    "TLCACHE_RUNTIME_DIR": str(place / "run"),
                },
            )

    def wait_for(self, line: str) -> str:
        """Wait until the service says something; all that it said in that message."""
        while True:
            message = self.told.recv(65536).decode()
            if line in message.splitlines():
                return message

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.told.close()
        self._listening.close()


@pytest.fixture
def manager(cache_root, tmp_path):
    cache_root.mkdir()
    publish(cache_root, 1)
    one = _Manager(tmp_path, cache_root)
    yield one
    one.close()


def test_it_reaches_ready_serves_reloads_and_stops_as_a_service(manager, cache_root):
    told = manager.wait_for("READY=1")
    assert "STATUS=watching 1 of 1 roots: 1 entries" in told
    assert len(manager.json("/v1/entries")["entries"]) == 1
    manager.wait_for("WATCHDOG=1")
    manager.process.send_signal(signal.SIGHUP)
    reloading = manager.wait_for("RELOADING=1")
    assert any(line.startswith("MONOTONIC_USEC=") for line in reloading.splitlines())
    manager.wait_for("READY=1")
    publish(cache_root, 2)
    until(lambda: len(manager.json("/v1/entries")["entries"]) == 2)
    manager.process.send_signal(signal.SIGTERM)
    manager.wait_for("STOPPING=1")
    assert manager.process.wait(20) == 0
    assert manager.socket.exists()  # it is the manager's
    assert "Traceback" not in manager.log.read_text()


def test_who_asks_before_it_is_ready_is_answered_once_it_is(manager):
    assert manager.json("/healthz")["status"] in ("ok", "failing")
    manager.wait_for("READY=1")


def test_a_child_of_the_daemon_does_not_take_the_managers_sockets(manager):
    manager.wait_for("READY=1")
    job = manager.job(manager.post("/v1/verify", {}))
    assert job["state"] == "done"
    environment = Path(f"/proc/{manager.process.pid}/fd/3")
    assert os.readlink(environment).startswith("socket:")


def test_a_socket_that_was_handed_over_is_served_again_after_a_kill(manager, cache_root):
    manager.wait_for("READY=1")
    manager.process.kill()
    manager.process.wait()
    command = [*TLCACHE, "daemon", "run", f"--root={cache_root}", "--history=/dev/null/no"]
    descriptor = manager._listening.fileno()
    with manager.log.open("ab") as log:
        manager.process = subprocess.Popen(
            [sys.executable, "-c", HAND_OVER, str(descriptor), *command],
            stdout=log, stderr=log, pass_fds=[descriptor],
        )  # fmt: skip
    health = manager.json("/healthz")
    assert {one["name"] for one in health["checks"] if one["status"] != "ok"} <= {
        "history", f"root {cache_root}",
    }  # fmt: skip


def test_the_line_of_the_unit_is_the_one_that_is_run_here():
    unit = Path(__file__).parents[2] / "systemd/system/tlcached.service"
    if unit.exists():
        (line,) = [one for one in unit.read_text().splitlines() if one.startswith("ExecStart=")]
        assert line.startswith("ExecStart=@tlcache@ daemon run")
