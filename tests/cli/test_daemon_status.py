"""`tlcache daemon status` and `logs`, with a daemon that answers, one that does not, and none."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler

import pytest


@pytest.fixture
def listening(tmp_path):
    """Answer every request at a socket with bytes; the socket's path."""
    servers = []

    def listening(body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200 if self.path == "/healthz" else 404)
                self.end_headers()
                self.wfile.write(body)

            def address_string(self):
                return "local"

            def log_message(self, *_):
                pass

        path = os.path.relpath(tmp_path / "daemon.sock")
        server = socketserver.ThreadingUnixStreamServer(path, Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return str(tmp_path / "daemon.sock")

    yield listening
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_daemon_that_is_well_is_told_with_exit_code_0(tlcache, listening):
    path = listening(json.dumps({"status": "ok", "checks": []}).encode())
    ran = tlcache("daemon", "status", env={"TLCACHE_SOCKET": path})
    assert ran.code == 0, ran.err
    assert f"the daemon at {path} is ok" in ran.out
    found = tlcache("daemon", "status", "--json", env={"TLCACHE_SOCKET": path}).json
    assert found["schema"] == 1 and found["health"]["status"] == "ok"


def test_what_a_daemon_complains_of_is_told(tlcache, listening):
    checks = [
        {"name": "root /c", "status": "failing", "detail": "gone\x1b[2J"},
        {"name": "history", "status": "ok", "detail": "fine"},
    ]
    path = listening(json.dumps({"status": "failing", "checks": checks}).encode())
    ran = tlcache("daemon", "status", env={"TLCACHE_SOCKET": path})
    assert ran.code == 1
    assert "root /c: gone\\x1b[2J" in ran.out and "history" not in ran.out


@pytest.mark.parametrize("body", [b"", b"[]", b"no JSON", b'{"status": 3, "checks": 3}'])
def test_an_answer_that_is_none_is_no_crash(tlcache, listening, body):
    ran = tlcache("daemon", "status", env={"TLCACHE_SOCKET": listening(body)})
    assert ran.code == 1 and "Traceback" not in ran.err


def test_a_stale_socket_and_a_missing_one_are_no_daemon(tlcache, tmp_path):
    path = tmp_path / "daemon.sock"
    ran = tlcache("daemon", "status", env={"TLCACHE_SOCKET": str(path)})
    assert ran.code == 1 and f"no daemon answers at {path}" in ran.out
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(os.path.relpath(path))
    ran = tlcache("daemon", "status", env={"TLCACHE_SOCKET": str(path)})
    assert ran.code == 1 and f"no daemon answers at {path}" in ran.out


def test_each_unit_is_told_with_its_file_and_version(tlcache, tmp_path):
    program = tmp_path / "tlcache"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert tlcache("daemon", "install", "--user", "--executable", program).code == 0
    edited = tmp_path / "config/systemd/user/tlcached.socket"
    edited.write_text(edited.read_text() + "# mine\n")
    found = tlcache("daemon", "status", "--user", "--json").json["units"]
    files = {one["unit"]: one["file"] for one in found}
    assert files["tlcached.service"] == "installed" and files["tlcached.socket"] == "edited"
    assert files["tlcache-prune.timer"] == "absent"


@pytest.mark.skipif(os.path.isdir("/run/systemd/system"), reason="systemd runs here")
def test_without_systemd_there_are_no_logs_and_that_is_said(tlcache):
    ran = tlcache("daemon", "logs")
    assert ran.code == 3 and "systemd does not run this machine" in ran.err
    assert "hint: `tlcache daemon run`" in ran.err
