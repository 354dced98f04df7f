"""The daemon's socket, of its own or handed over."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys

import pytest

from tlcache.daemon import listening
from tlcache.errors import DaemonError


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run" / "daemon.sock")


def reached(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(path)


def test_it_is_the_owners_alone_and_gone_afterwards(path):
    one = listening.listen(path)
    reached(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    one.close()
    assert os.listdir(os.path.dirname(path)) == []


def test_a_group_may_connect_where_one_is_named(path):
    one = listening.listen(path, "daemon")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o750
    one.close()
    with pytest.raises(DaemonError, match="no group 'no-such-group'"):
        listening.listen(path, "no-such-group")


def test_a_socket_that_somebody_listens_on_is_left_to_him(path):
    one = listening.listen(path)
    with pytest.raises(DaemonError, match=f"listens at .* already, pid {os.getpid()}"):
        listening.listen(path)
    reached(path)
    one.close()


def test_a_stale_socket_is_replaced(path):
    script = (
        "import os, signal, sys\n"
        "from tlcache.daemon import listening\n"
        "listening.listen(sys.argv[1])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, path], check=False)
    assert os.path.exists(path)
    with pytest.raises(ConnectionRefusedError):
        reached(path)
    one = listening.listen(path)
    reached(path)
    one.close()


def test_what_is_no_socket_is_left_alone(path):
    os.makedirs(os.path.dirname(path))
    with open(path, "w") as file:
        file.write("mine")
    with pytest.raises(DaemonError, match="no socket"):
        listening.listen(path)
    with open(path) as file:
        assert file.read() == "mine"


def test_where_none_can_be_made_it_says_why(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DaemonError, match="no socket can be had") as raised:
        listening.listen(str(tmp_path / "file" / "daemon.sock"))
    assert "--socket" in raised.value.hint
    with pytest.raises(DaemonError, match="longer than the 107 bytes"):
        listening.listen(str(tmp_path / ("x" * 200)))


def test_one_that_the_service_manager_hands_over_is_taken(path):
    # As systemd does it: the socket is descriptor 3, and LISTEN_PID the process after exec.
    script = (
        "import os, sys\n"
        "os.dup2(int(sys.argv[1]), 3)\n"
        "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1', LISTEN_FDNAMES='x')\n"
        "from tlcache.daemon import listening\n"
        "one = listening.listen('/nowhere/at/all')\n"
        "assert one.path is None\n"
        "assert not {'LISTEN_PID', 'LISTEN_FDS', 'LISTEN_FDNAMES'} & set(os.environ)\n"
        "print(one.socket.getsockname())\n"
    )
    with socket.socket(socket.AF_UNIX) as server:
        os.makedirs(os.path.dirname(path))
        server.bind(path)
        server.listen()
        done = subprocess.run(
            [sys.executable, "-c", script, str(server.fileno())],
            pass_fds=[server.fileno()],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stdout.strip() == path, done.stderr


def test_one_that_was_handed_to_another_process_is_not(path, monkeypatch):
    monkeypatch.setenv("LISTEN_PID", "1")
    monkeypatch.setenv("LISTEN_FDS", "1")
    one = listening.listen(path)
    assert one.path == path
    one.close()


def test_a_directory_that_others_can_write_is_refused_unless_it_is_like_tmp(path):
    directory = os.path.dirname(path)
    os.mkdir(directory)
    for mode, fine in ((0o777, False), (0o770, False), (0o1777, True), (0o755, True)):
        os.chmod(directory, mode)
        if fine:
            listening.listen(path).close()
            continue
        with pytest.raises(DaemonError, match="others can write"):
            listening.listen(path)
        assert os.listdir(directory) == []
    os.chown(directory, 54321, 54321)
    with pytest.raises(DaemonError, match="others can write"):
        listening.listen(path)
