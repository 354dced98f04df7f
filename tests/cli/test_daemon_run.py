"""`tlcache daemon run` as a service manager runs it: ready, reload, stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TLCACHE
from tests.daemon.conftest import PATIENCE, publish


class Manager:
    """The service manager's end of NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(PATIENCE)

    def hears(self, start: str) -> str:
        """Wait for a message that begins so."""
        while not (told := self.socket.recv(4096).decode()).startswith(start):
            assert told.startswith(("WATCHDOG", "STATUS")), told
        return told


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path / "notify")
    yield made
    made.socket.close()


@pytest.fixture
def daemon(cache_root: Path, tmp_path: Path) -> Iterator[Any]:
    """Start a daemon on the root in force."""
    running: list[subprocess.Popen[str]] = []

    def start(*options: str, **env: str) -> subprocess.Popen[str]:
        command = [*TLCACHE, "daemon", "run", "--history", str(tmp_path / "history"), *options]
        command += ["--socket", str(tmp_path / f"{len(running)}.sock")]
        running.append(
            subprocess.Popen(
                command,
                env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), **env},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return running[-1]

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_it_is_ready_reloads_and_stops_as_a_service_manager_wants_it(daemon, manager, cache_root):
    publish(cache_root, 1)
    process = daemon()
    assert "1 of 1 roots: 1 entries" in manager.hears("READY=1")
    process.send_signal(signal.SIGHUP)
    assert "MONOTONIC_USEC=" in manager.hears("RELOADING=1")
    manager.hears("READY=1")
    process.send_signal(signal.SIGTERM)
    manager.hears("STOPPING=1")
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "stopping" in errors
    assert "Traceback" not in errors


def test_it_tells_the_watchdog_that_it_is_alive(daemon, manager, cache_root):
    publish(cache_root, 1)
    daemon(WATCHDOG_USEC="300000")
    manager.hears("READY=1")
    for _ in range(3):
        manager.hears("WATCHDOG=1")


def test_a_second_one_refuses_and_says_who_is_there(daemon, manager, cache_root, tmp_path):
    publish(cache_root, 1)
    first = daemon()
    manager.hears("READY=1")
    second = daemon("--history", str(tmp_path / "other"))
    _, errors = second.communicate(timeout=PATIENCE)
    assert second.returncode == 3
    assert f"a daemon watches {cache_root} already: pid {first.pid}" in errors
    assert "hint:" in errors
    first.kill()
    first.communicate()
    daemon()
    manager.hears("READY=1")


def test_it_ends_at_once_in_the_middle_of_its_work(daemon, manager, cache_root):
    for number in range(300):
        publish(cache_root, number, size=20_000, filed=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        process = daemon("--max-size", "1MiB")
        manager.hears("READY=1")
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        while manager.socket.recv(4096) != b"STOPPING=1":
            pass


def test_a_bound_that_is_no_size_is_refused(tlcache):
    done = tlcache("daemon", "run", "--max-size", "many")
    assert done.code == 2
    assert 'max_size of the command line is "many": expected a size' in done.err


def test_help_names_what_it_does(tlcache):
    assert "Watch, bound and serve" in tlcache("daemon", "--help").out
    assert "--keep-free" in tlcache("daemon", "run", "--help").out


def test_without_its_extra_it_says_what_to_install(python):
    done = python(
        "import sys\n"
        "sys.modules['aiohttp'] = None\n"
        "from tlcache.cli import main\n"
        "main(['daemon', 'run'])\n"
    )
    assert done.code == 3
    assert "the daemon needs aiohttp" in done.err
    assert "pip install 'tlcache[daemon]'" in done.err
