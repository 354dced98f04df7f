from __future__ import annotations

import grp
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.daemon.asking import connected
from tests.daemon.conftest import PATIENCE, publish, until

NOBODY = 65534


def _open(one) -> None:
    """Let everybody connect, as a socket unit with another mode would: who may ask is told by who
    they are."""
    for path in (one.socket, *one.socket.parents):
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o711)
    one.socket.chmod(0o666)


def _parts(told: bytes) -> tuple[int, dict]:
    head, _, body = told.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


# --- reading ---


def test_entries_are_listed_as_ls_lists_them(mixed, daemon, tlcache):
    one = daemon()
    known = tlcache("ls", "--all", "--json").json["entries"]
    told = one.json("/v1/entries?all=true&limit=500")
    assert told["schema"] == 1
    assert told["totals"] == {"entries": len(known), "bytes": sum(each["bytes"] for each in known)}
    by_path = {each["path"]: each for each in told["entries"]}
    assert by_path == {each["path"]: each for each in known}


def test_filters_select_what_they_select_in_ls(mixed, daemon, tlcache):
    one = daemon()
    filters = {
        "target=sm90": ["--target", "sm90"],
        "target=sm80&target=cpu": ["--target", "sm80", "--target", "cpu"],
        "tilelang=%3C0.1.14": ["--tilelang", "<0.1.14"],
        "kernel=sc*&larger_than=40KiB": ["--kernel", "sc*", "--larger-than", "40KiB"],
        "no_record=true&toolkit=13.0": ["--no-record", "--toolkit", "13.0"],
        "older_than=1000d": ["--older-than", "1000d"],
    }
    for query, options in filters.items():
        told = one.json(f"/v1/entries?limit=500&{query}")["entries"]
        known = tlcache("ls", "--json", *options).json["entries"]
        assert sorted(each["path"] for each in told) == sorted(each["path"] for each in known)


def test_one_entry_is_found_by_its_key_or_how_it_begins(mixed, daemon):
    one = daemon()
    entry = one.json("/v1/entries?target=sm_100a")["entries"][0]
    assert one.json(f"/v1/entries/{entry['key']}")["entry"] == entry
    assert one.json(f"/v1/entries/{entry['key'][:12]}")["entry"] == entry
    told = one.ask("/v1/entries/ffffffffffff")
    assert told.status == 404
    assert "ffffffffffff" in told.json["error"]


def test_an_entry_that_appears_is_there_without_being_asked_for(daemon, cache_root):
    one = daemon()
    assert one.json("/v1/entries")["entries"] == []
    place = publish(cache_root, 1)
    (entry,) = until(lambda: one.json("/v1/entries")["entries"])
    assert entry["path"] == str(place)
    until(lambda: one.json("/v1/stats")["totals"])


def test_the_version_key_is_that_of_the_command(daemon, tlcache):
    one = daemon()
    known = tlcache("key", "--target", "sm90", "--json").json
    assert one.json("/v1/key?target=sm90") == known
    assert one.json("/v1/key?target=sm90") == known


def test_processes_are_told_as_stats_tells_them(daemon, tmp_path):
    one = daemon("--interval=1s")
    assert one.json("/v1/processes")["processes"] == []
    agent = subprocess.Popen(
        [sys.executable, "-c", "import tlcache.agent as a, sys; a.start(); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        env={**os.environ, "TLCACHE_RUNTIME_DIR": str(one.place / "run")},
    )
    try:
        (told,) = until(lambda: one.json("/v1/processes")["processes"])
        assert (told["pid"], told["trouble"]) == (agent.pid, None)
        assert told["process"]["pid"] == agent.pid
        until(lambda: b"tlcache_agents 1.0" in one.ask("/metrics").body)
    finally:
        agent.communicate()


def test_health_is_told_and_a_root_that_is_gone_makes_it_a_503(daemon, cache_root):
    one = daemon()
    assert one.json("/healthz")["status"] == "ok"
    cache_root.rename(cache_root.with_name("elsewhere"))
    told = until(lambda: (found := one.ask("/healthz")).status == 503 and found)
    assert told.json["status"] == "failing"
    cache_root.with_name("elsewhere").rename(cache_root)
    until(lambda: one.ask("/healthz").status == 200)


# --- what cannot be understood ---


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/entries/a/b", 404),
        ("GET", "/v1/jobs/0123", 404),
        ("DELETE", "/v1/jobs/0123", 404),
        ("PUT", "/v1/stats", 405),
        ("TRACE", "/metrics", 405),
        ("GET", "/v1/warm", 405),
        ("GET", "/v1/entries?limit=0", 400),
        ("GET", "/v1/entries?limit=501", 400),
        ("GET", "/v1/entries?limit=many", 400),
        ("GET", "/v1/entries?limit=1&limit=2", 400),
        ("GET", "/v1/entries?sort=taste", 400),
        ("GET", "/v1/entries?target=sm_1", 400),
        ("GET", "/v1/entries?older_than=1", 400),
        ("GET", "/v1/entries?no_record=1", 400),
        ("GET", "/v1/entries?tilelang=%3C%3C", 400),
        ("GET", "/v1/entries?root=/elsewhere", 400),
        ("GET", "/v1/entries?cursor=abc", 400),
        ("GET", "/v1/stats?verbose=1", 400),
        ("GET", "/v1/key?target=x", 400),
    ],
)
def test_what_cannot_be_had_is_json_with_a_remedy(daemon_shared, method, path, status):
    told = daemon_shared.ask(path, method)
    assert told.status == status
    assert told.headers["Content-Type"].startswith("application/json")
    assert set(told.json) == {"error", "hint"}
    assert told.json["error"]
    if status == 405:
        assert told.headers["Allow"]


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v1/prune", b"", "is no JSON"),
        ("/v1/prune", b"{", "is no JSON"),
        ("/v1/prune", b"[" * 100_000, "is no JSON"),
        ("/v1/prune", b'{"max_size": NaN}', "NaN"),
        ("/v1/prune", b"\xff", "is no JSON"),
        ("/v1/prune", {}, "nothing says what to prune"),
        ("/v1/prune", {"all": True}, "all"),
        ("/v1/prune", {"unused_for": "1"}, "unused_for"),
        ("/v1/prune", {"orphans": 1}, "orphans"),
        ("/v1/prune", {"target": ["smurf"]}, "smurf"),
        ("/v1/prune", {"orphans": True, "root": "/"}, "no watched root"),
        ("/v1/verify", {"repair": "yes"}, "repair"),
        ("/v1/verify", [], "valid"),
        ("/v1/warm", {}, "version is missing"),
        ("/v1/warm", {"version": 1, "workloads": 3}, "workloads is 3"),
        ("/v1/warm?target=x", {"version": 1, "workloads": []}, "unknown target"),
        ("/v1/warm", {"version": 1, "workloads": [], "targets": ["x"]}, "targets[0]"),
    ],
)
def test_a_body_that_is_wrong_is_told_where_it_is(daemon_shared, path, body, error):
    told = daemon_shared.post(path, body)
    assert told.status == 400, told.body
    assert error in told.json["error"]
    assert daemon_shared.json("/v1/jobs")["jobs"] == []


def test_a_body_of_another_type_is_refused(daemon_shared):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    told = daemon_shared.ask("/v1/prune", "POST", b"{}", **headers)
    assert told.status == 415
    assert "curl --json" in told.json["hint"]


def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(daemon_shared):
    large = b" " * (2 << 20)
    assert daemon_shared.post("/v1/verify", large).status == 413
    with connected(daemon_shared.socket) as one:
        one.sendall(
            b"POST /v1/verify HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        try:
            for _ in range(64):
                one.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        except OSError:
            pass
        assert one.makefile("rb").readline().split()[1] == b"413"


def test_what_is_no_http_is_told_so_in_json(daemon_shared):
    with connected(daemon_shared.socket) as one:
        one.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n")
        status, told = _parts(one.makefile("rb").read())
    assert status == 400
    assert set(told) == {"error", "hint"}
    with connected(daemon_shared.socket) as one:
        one.sendall(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n")
        assert _parts(one.makefile("rb").read())[0] in (400, 414)


@pytest.fixture(scope="module")
def daemon_shared(tmp_path_factory):
    """One for the tests that change nothing."""
    from tests.daemon.asking import Daemon

    place = tmp_path_factory.mktemp("shared")
    (place / "root").mkdir()
    one = Daemon(place, [place / "root"], env={"TILELANG_CACHE_DIR": str(place / "root")})
    one.serves()
    yield one
    assert one.stop() == 0
    assert "Traceback" not in one.log.read_text()


# --- who may what ---


def test_other_users_may_neither_read_nor_change_anything(daemon):
    one = daemon()
    _open(one)
    for method, path in (("GET", "/v1/stats"), ("GET", "/metrics"), ("POST", "/v1/verify")):
        told = one.ask_as(NOBODY, [NOBODY], path, method)
        assert told.status == 403
        assert f"uid {NOBODY}" in told.json["error"]
        assert told.json["hint"]


def test_members_of_the_group_may_read_and_change_nothing(daemon):
    group = grp.getgrall()[-1]
    one = daemon(f"--group={group.gr_name}")
    assert one.socket.stat().st_gid == group.gr_gid
    assert one.socket.stat().st_mode & 0o777 == 0o660
    _open(one)
    member, other = [NOBODY, group.gr_gid], [NOBODY, group.gr_gid + 1]
    assert one.ask_as(NOBODY, member, "/v1/stats").status == 200
    assert one.ask_as(NOBODY, [group.gr_gid], "/healthz").status == 200
    assert one.ask_as(NOBODY, other, "/v1/stats").status == 403
    for method, path in (("POST", "/v1/verify"), ("POST", "/v1/prune"), ("DELETE", "/v1/jobs/1")):
        told = one.ask_as(NOBODY, member, path, method)
        assert told.status == 403
        assert "may not" in told.json["error"]
    assert one.json("/v1/jobs")["jobs"] == []


def test_the_socket_is_the_owners_alone_where_no_group_may_read(daemon):
    one = daemon()
    assert one.socket.stat().st_mode & 0o777 == 0o600


# --- limits ---


def test_a_client_that_never_ends_its_request_is_sent_away_and_holds_up_nobody(daemon_shared):
    slow = [connected(daemon_shared.socket) for _ in range(20)]
    for one in slow[:10]:
        one.sendall(b"GET /v1/stats HTTP/1.1\r\n")
    for one in slow[10:]:
        one.sendall(
            b"POST /v1/verify HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\n"
            b"Content-Length: 10\r\n\r\n{"
        )
    assert daemon_shared.ask("/v1/stats").status == 200
    for one in slow[:10]:
        assert one.recv(100) == b""
        one.close()
    for one in slow[10:]:
        assert one.recv(100).startswith(b"HTTP/1.1 408")
        one.close()


def test_a_client_that_reads_nothing_is_sent_away(mixed, daemon):
    one = daemon()
    with connected(one.socket) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asked = b"GET /v1/entries?all=true&limit=500 HTTP/1.1\r\nHost: d\r\n\r\n"
        deaf.settimeout(0.5)
        try:
            while True:
                deaf.sendall(asked)
        except OSError:
            pass  # neither side takes any more
        assert one.ask("/v1/stats").status == 200
        deaf.settimeout(PATIENCE)

        def ended() -> bool:
            try:
                deaf.send(b"G", socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return True
            return False

        until(ended)


def test_more_connections_than_there_may_be_push_out_the_idlest(daemon_shared):
    from tlcache.daemon.guard import CONNECTIONS

    idle = []
    for _ in range(CONNECTIONS + 20):
        one = connected(daemon_shared.socket)
        one.sendall(b"GET /healthz HTTP/1.1\r\nHost: d\r\n\r\n")
        assert one.recv(65536).startswith(b"HTTP/1.1 200")
        idle.append(one)
    assert daemon_shared.ask("/v1/stats").status == 200
    idle[0].settimeout(PATIENCE)
    with pytest.raises(ConnectionResetError):
        if idle[0].recv(1) == b"":
            raise ConnectionResetError
    for one in idle:
        one.close()


def test_where_all_connections_are_at_work_the_next_one_is_refused(daemon_shared):
    from tlcache.daemon.guard import CONNECTIONS

    begun = b"GET /v1/stats HTTP/1.1\r\n"
    busy = [connected(daemon_shared.socket) for _ in range(CONNECTIONS)]
    for one in busy:
        one.sendall(begun)
    refused = connected(daemon_shared.socket)
    told = refused.recv(65536)
    assert told.startswith(b"HTTP/1.1 503")
    assert b"Retry-After" in told
    for one in [*busy, refused]:
        one.close()
    until(lambda: daemon_shared.ask("/v1/stats").status == 200)


def test_a_client_that_leaves_in_the_middle_is_no_fault(daemon_shared):
    for sent in (b"", b"GET", b"GET /v1/entries HTTP/1.1\r\nHost: d\r\n\r\n"):
        for _ in range(20):
            with connected(daemon_shared.socket) as one:
                one.sendall(sent)
    assert daemon_shared.ask("/v1/stats").status == 200


# --- the port ---


def test_the_port_has_the_metrics_and_nothing_else(daemon):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    one = daemon(f"--metrics-port={port}")
    asked = {}
    for path in ("/metrics", "/v1/stats", "/healthz", "/v1/entries"):
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as each:
            each.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            asked[path] = each.makefile("rb").read()
    assert asked.pop("/metrics").startswith(b"HTTP/1.0 200")
    assert all(told.startswith(b"HTTP/1.0 404") for told in asked.values())
    assert one.ask("/metrics").body.startswith(b"# HELP tlcache_")


def test_a_port_that_is_taken_is_told_and_nothing_starts(cache_root, tmp_path, tlcache):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = tlcache(
            "daemon", "run", f"--socket={tmp_path / 'd.sock'}", f"--history={tmp_path / 'h'}",
            f"--metrics-port={port}",
        )  # fmt: skip
    assert done.code == 3
    assert f"the port {port} of 127.0.0.1 cannot be had" in done.err
    assert "hint:" in done.err
    assert not (tmp_path / "d.sock").exists()


# --- the end ---


def test_a_stop_ends_streams_and_jobs_and_takes_the_socket_away(daemon, shapes):
    one = daemon()
    document = {
        "version": 1,
        "targets": ["cpu"],
        "workloads": [{"op": "rms_norm", "M": {"from": 1, "to": 64}, "N": 64, "dtype": "float32"}],
    }
    assert one.post("/v1/warm", document).status == 202
    ended = []

    def listen() -> None:
        with one.events() as events:
            ended.extend(event["kind"] for event in events)

    listener = threading.Thread(target=listen)
    listener.start()
    until(lambda: one.json("/v1/jobs")["jobs"][0]["state"] == "running")
    assert one.stop(signal.SIGTERM) == 0
    listener.join(PATIENCE)
    assert not listener.is_alive()
    assert not one.socket.exists()
    assert "Traceback" not in one.log.read_text()
