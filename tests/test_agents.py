"""Asking agents: what hostile and broken ones cost, and that they take no others along. The sockets
are real throughout, and so are the sound agents.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from tlcache import agents
from tlcache.agents import Found
from tlcache.store.sockets import Address

AGENT = """
import sys
from tlcache import agent
print(agent.start(), flush=True)
sys.stdin.read()
"""
# An agent's process that forks as many others as it is told.
MANY = """
import json, os, signal, sys
from tlcache import agent
agent.start()
pids = [os.getpid()]
ready, there = os.pipe()
for _ in range(int(sys.argv[1])):
    child = os.fork()
    if not child:
        os.write(there, b"x")
        signal.pause()
    os.read(ready, 1)
    pids.append(child)
print(json.dumps(pids), flush=True)
sys.stdin.read()
for child in pids[1:]:
    os.kill(child, 9)
"""
SOUND = json.dumps({"schema": 1, "process": {"name": "fake"}}).encode()


def response(body=SOUND, status="200 OK", length=None):
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode() + body


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """An empty runtime directory, in force."""
    place = tmp_path / "runtime"
    place.mkdir(mode=0o700)
    monkeypatch.setenv("TLCACHE_RUNTIME_DIR", str(place))
    return place


@pytest.fixture
def agent(runtime):
    """Start processes with real agents."""
    running = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", AGENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout.readline() == f"{runtime}/{process.pid}.sock\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def fake(runtime):
    """Listen in an agent's place; each connection is handled by a function of its own thread."""
    ended = threading.Event()
    servers = []
    directory = os.open(runtime, os.O_RDONLY)

    def listen(handle, number=4_000_000, backlog=16):
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"/proc/self/fd/{directory}/{number}.sock")
        server.listen(backlog)
        servers.append(server)

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    try:
                        handle(connection, ended)
                    except OSError:
                        pass  # the client has left

        if handle is not None:
            threading.Thread(target=serve, daemon=True).start()
        return Found(Address(str(runtime), f"{number}.sock", number), os.geteuid())

    yield listen
    ended.set()
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
    os.close(directory)


def says(data):
    def handle(connection, ended):
        connection.recv(65536)
        connection.sendall(data)

    return handle


def silent(connection, ended):
    ended.wait()


def never_reads(connection, ended):
    connection.sendall(response())
    ended.wait()


def drips(connection, ended):
    connection.recv(65536)
    for byte in response(b" " * 10_000):
        connection.sendall(bytes([byte]))
        if ended.wait(0.02):
            return


def pours(connection, ended):
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while not ended.is_set():
        connection.sendall(b"[" * 65536)


def pours_headers(connection, ended):
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while not ended.is_set():
        connection.sendall(b"X: " + b"y" * 60_000 + b"\r\n")


def continues(connection, ended):
    connection.recv(65536)
    while not ended.is_set():
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


HALF = "breaks off in the middle of its answer"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
HOSTILE = {
    "says nothing": (silent, "does not answer within 0.3 s"),
    "drips": (drips, "does not answer within 0.3 s"),
    "stops halfway": (says(response(length=10_000)), HALF),
    "pours": (pours, "answers more than 8 MiB"),
    "pours headers": (pours_headers, "answers something that is not HTTP"),
    "continues": (continues, ("answers more than 8 MiB", "does not answer within 0.3 s")),
    "closes": (says(b""), "answers something that is not HTTP"),
    "talks SSH": (says(b"SSH-2.0-OpenSSH_9.2\r\n"), "answers something that is not HTTP"),
    "bytes": (says(bytes(range(256)) * 10), "answers something that is not HTTP"),
    "one line": (says(b"x" * 1_000_000), "answers something that is not HTTP"),
    "promises a terabyte": (says(response(length=10**12)), HALF),
    "a chunk of a terabyte": (says(CHUNKED + b"ffffffffff\r\nx"), "answers something"),
    "a bad chunk": (says(CHUNKED + b"zz\r\nx"), "answers something that is not HTTP"),
    "a bad length": (says(response(length="many")), "process"),
    "no JSON": (says(response(b"<html>")), "answers something that is not JSON"),
    "no text": (says(response(b"\xff\xfe\xfd")), "answers something that is not JSON"),
    "deep JSON": (says(response(b"[" * 1_000_000)), "answers something that is not JSON"),
    "a long number": (says(response(b"9" * 10_000)), "answers something that is not JSON"),
    "a list": (says(response(b"[1]")), "answers something that is not a JSON object"),
    "another schema": (
        says(response(b'{"schema": 2}')), "speaks another version than this tlcache"
    ),
    "no schema": (says(response(b"{}")), "speaks another version than this tlcache"),
    "an error": (
        says(response(b'{"error": "no such path"}', "404 Not Found")), "answers 404: no such path"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_an_agent_that_misbehaves_is_told_with_its_reason(fake, name):
    handle, said = HOSTILE[name]
    answer = agents.ask(fake(handle), "/v1/stats", seconds=0.3)
    if said == "process":  # a client may overlook it
        assert answer.document == json.loads(SOUND)
        return
    assert answer.document is None
    assert answer.trouble.startswith(said)
    assert answer.pid == os.getpid()  # as the kernel says, whatever the socket is called


def test_an_answer_is_taken_from_who_answers_without_reading_the_request(fake):
    answer = agents.ask(fake(never_reads), "/v1/stats", seconds=5)
    assert answer.document == json.loads(SOUND)


def test_an_agent_whose_queue_is_full_is_told(fake):
    found = fake(None, backlog=0)
    waiting = []
    for _ in range(3):
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        waiting.append(client)
        try:
            client.connect(found.address.path)
        except BlockingIOError:
            break
    answer = agents.ask(found, "/v1/stats", seconds=0.3)
    for client in waiting:
        client.close()
    assert answer.trouble == "does not answer: its queue is full"


def test_broken_agents_take_no_other_answer_along(fake, agent):
    sound = [agent() for _ in range(3)]
    for number, (handle, _) in enumerate(HOSTILE.values()):
        fake(handle, 4_000_000 + number)
    answers, troubles = agents.everywhere(seconds=2)
    assert troubles == []
    answered = {one.pid: one.document for one in answers if one.trouble is None}
    for process in sound:
        assert answered[process.pid]["process"]["pid"] == process.pid
    assert len(answers) == len(HOSTILE) + 3


def test_every_path_of_a_real_agent_can_be_asked_for(agent):
    agent()
    for path in ("/v1/stats", "/v1/events", "/v1/kernels", "/v1/health"):
        (answer,) = agents.everywhere(path)[0]
        assert answer.document["schema"] == 1
    (answer,) = agents.everywhere("/v1/nothing")[0]
    assert answer.trouble == "answers 404: there is no /v1/nothing"


def test_what_a_killed_process_leaves_is_nothing(agent, runtime):
    killed, lives = agent(), agent()
    killed.kill()
    killed.wait()
    assert (runtime / f"{killed.pid}.sock").exists()
    answers, troubles = agents.everywhere()
    assert [one.pid for one in answers] == [lives.pid]
    assert troubles == []


def test_of_many_agents_all_answer_and_after_a_massacre_the_rest(runtime):
    with subprocess.Popen(
        [sys.executable, "-c", MANY, "63"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        pids = json.loads(process.stdout.readline())
        for killed in (0, 20):
            for pid in pids[1 : 1 + killed]:
                os.kill(pid, signal.SIGKILL)
            lives = sorted([pids[0], *pids[1 + killed :]])
            answers, _ = agents.everywhere(seconds=60)
            assert [one.pid for one in answers if one.pid in lives] == lives
            assert {one.trouble for one in answers if one.pid in lives} == {None}
        process.stdin.close()


def test_a_process_that_is_stopped_does_not_answer_and_does_when_it_goes_on(agent):
    process = agent()
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    (answer,) = agents.everywhere(seconds=0.3)[0]
    assert (answer.pid, answer.document) == (process.pid, None)
    assert answer.trouble == "does not answer within 0.3 s"
    process.send_signal(signal.SIGCONT)
    (answer,) = agents.everywhere(seconds=30)[0]
    assert answer.trouble is None


def test_files_that_are_no_sockets_are_nothing(runtime, agent):
    (runtime / "123.sock").write_text("")
    (runtime / "124.sock").mkdir()
    (runtime / "125.sock").symlink_to("/nowhere")
    os.mkfifo(runtime / "126.sock")
    (runtime / "notes.txt").write_text("")
    process = agent()
    answers, _ = agents.everywhere()
    assert [one.pid for one in answers] == [process.pid]


def test_where_no_agent_has_ever_been_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("TLCACHE_RUNTIME_DIR", str(tmp_path / "nowhere"))
    assert agents.everywhere() == ([], [])


def test_a_directory_that_others_can_get_into_is_told_and_not_used(runtime, fake):
    fake(says(response()))
    runtime.chmod(0o755)
    answers, (trouble,) = agents.everywhere()
    assert answers == []
    assert "others can get into the runtime directory" in trouble.message
