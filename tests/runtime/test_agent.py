"""The agent in real processes: when there is one, who may ask, and what clients cannot do to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile

import pytest

from tlcache.errors import AgentError
from tlcache.store import sockets

STARTED = """
import tlcache.agent
step(tlcache.agent.start())
"""
STATS = b"GET /v1/stats HTTP/1.1\r\n\r\n"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")


def rest(client):
    """All that still comes."""
    answer = b""
    while data := client.recv(1 << 20):
        answer += data
    return answer


def names(directory):
    return sorted(os.listdir(directory)) if directory.exists() else []


def status(pid):
    with open(f"/proc/{pid}/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file)


# --- when there is one ---


def test_a_started_agent_answers_under_its_pid_until_it_is_stopped(serve, runtime_dir):
    served = serve(
        """
import threading, tlcache.agent
step(tlcache.agent.start())
again = tlcache.agent.start()
tlcache.agent.stop()
tlcache.agent.stop()
step([again, threading.active_count()])
step(tlcache.agent.start())
"""
    )
    assert served.said == str(runtime_dir / f"{served.pid}.sock")
    assert served.agent.get("/v1/health")["pid"] == served.pid
    assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(os.stat(served.said).st_mode) == 0o600
    assert served.go() == [served.said, 1]
    assert names(runtime_dir) == []
    assert served.go() == served.said
    assert served.agent.get("/v1/stats")["process"]["pid"] == served.pid
    assert served.end() == 0
    assert names(runtime_dir) == []


@pytest.mark.parametrize("value", ["1", "true", " ON "])
def test_the_environment_starts_one_with_the_runtime(serve, runtime_dir, value):
    served = serve("import tlcache.runtime\nstep()", env={"TLCACHE_AGENT": value})
    assert names(runtime_dir) == [f"{served.pid}.sock"]


@pytest.mark.parametrize("value", ["0", "false", "", "maybe"])
def test_without_being_asked_for_there_is_none(serve, runtime_dir, value):
    serve("import tlcache.runtime\nstep()", env={"TLCACHE_AGENT": value})
    assert names(runtime_dir) == []


def test_the_environment_rules_one_out(serve, runtime_dir):
    assert serve(STARTED, env={"TLCACHE_AGENT": "0"}).said is None
    assert names(runtime_dir) == []


def test_a_directory_that_is_not_ones_own_is_an_error_to_who_asks_and_a_warning_to_who_does_not(
    python, runtime_dir
):
    runtime_dir.mkdir(mode=0o755)
    asked = python("import tlcache.agent\ntlcache.agent.start()")
    assert asked.code == 1
    assert "AgentError: others can get into the runtime directory" in asked.err
    not_asked = python("import tlcache.runtime\nprint('serving')", env={"TLCACHE_AGENT": "1"})
    assert (not_asked.code, not_asked.out) == (0, "serving\n")
    assert not_asked.err.count("no agent in this process: others can get into") == 1
    assert f"chmod 700 {runtime_dir}" in not_asked.err
    assert names(runtime_dir) == []


def test_it_brings_nothing_that_the_process_would_not_have(python, runtime_dir):
    ran = python(
        """
import sys, tlcache.runtime
before = set(sys.modules)
import tlcache.agent
tlcache.agent.start()
from tlcache.runtime import routes
routes.answer(b"GET /v1/stats HTTP/1.1")
brought = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(brought - set(sys.stdlib_module_names) - {"tlcache"}))
print(*{"pydantic", "rich", "click", "torch", "tilelang", "wrapt"} & set(sys.modules))
"""
    )
    assert (ran.out, ran.err) == ("\n\n", "")


# --- who may ask ---


def test_curl_and_http_client_may(serve):
    served = serve(STARTED)

    class Connection(http.client.HTTPConnection):
        def connect(self):
            self.sock = served.agent.connect()

    connection = Connection("agent")
    for path in ("/v1/health", "/v1/stats"):  # it closes after each answer, and is asked again
        connection.request("GET", path)
        assert json.loads(connection.getresponse().read())["schema"] == 1
    connection.close()
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    said = subprocess.run(
        ["curl", "-sSf", "--unix-socket", served.said, "http://agent/v1/health"],
        capture_output=True,
        check=True,
    )
    assert json.loads(said.stdout)["status"] == "ok"


ANOTHER_USER = """
import os, socket, sys
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
os.setgroups([])
os.setgid(int(sys.argv[3]))
os.setuid(int(sys.argv[3]))
for path in sys.argv[2], f"/proc/self/fd/{fd}/{os.path.basename(sys.argv[2])}":
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(path)
        try:
            client.sendall(b"GET /v1/stats HTTP/1.1\\r\\n\\r\\n")
        except BrokenPipeError:
            pass  # it has answered already
        print(client.recv(1 << 20).split(b"\\r\\n")[0].decode())
    except OSError as error:
        print(type(error).__name__)
"""


@needs_root
def test_another_user_is_refused_even_past_the_files_permissions(serve, run, runtime_dir):
    served = serve(STARTED)
    command = [sys.executable, "-c", ANOTHER_USER, str(runtime_dir), served.said, "12345"]
    assert run(command).out.split() == ["PermissionError", "PermissionError"]
    os.chmod(served.said, 0o666)
    os.chmod(runtime_dir, 0o711)
    assert run(command).out.split("\n")[1] == "HTTP/1.1 403 Forbidden"


OWN_USER = """
import tlcache.agent, tlcache.runtime.agent
os.setgid(12345)
os.setuid(12345)
step(tlcache.agent.start())
"""


@needs_root
def test_root_may_ask_another_users_process(serve, at):
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chown(place, 12345, 12345)
        served = serve(OWN_USER, env={sockets.DIRECTORY: f"{place}/run"})
        assert os.stat(served.said).st_uid == 12345
        (found,) = sockets.listed(f"{place}/run", owner=12345)
        with pytest.raises(AgentError, match="belongs to uid 12345"):
            sockets.connect(found, 10)
        with sockets.connect(found, 10, owner=12345) as client:
            client.sendall(STATS)
            assert rest(client).startswith(b"HTTP/1.1 200 OK\r\n")


# --- what keeps what going ---


def test_it_keeps_no_process_from_exiting(serve, runtime_dir):
    served = serve(STARTED)
    with served.agent.connect() as silent, served.agent.connect() as slow:
        slow.sendall(b"GET /v1")
        assert served.end() == 0
        del silent
    assert names(runtime_dir) == []
    served = serve(STARTED + "raise SystemExit(7)")
    assert served.end() == 7
    served = serve(STARTED + "import time; time.sleep(60)")
    served.process.stdin.write("\n")
    served.process.stdin.flush()
    served.process.terminate()
    assert served.process.wait(30) == -signal.SIGTERM


def test_signals_go_to_the_program(serve):
    served = serve(
        """
import signal, threading, tlcache.agent
caught = []
signal.signal(signal.SIGUSR1, lambda *_: caught.append(threading.current_thread().name))
path = tlcache.agent.start()
step(path)
while not caught:
    signal.pause()
step(caught)
"""
    )
    served.process.stdin.write("\n")
    served.process.stdin.flush()
    blocked = [
        int(status(f"{served.pid}/task/{task}")["SigBlk"], 16)
        for task in os.listdir(f"/proc/{served.pid}/task")
        if int(task) != served.pid
    ]
    assert len(blocked) == 1
    assert blocked[0] >> (signal.SIGUSR1 - 1) & 1
    while "S" not in status(served.pid)["State"]:
        pass
    served.process.send_signal(signal.SIGUSR1)
    assert served.line() == ["MainThread"]


def test_what_a_killed_process_left_is_seen_as_dead_and_cleaned_by_the_next(serve, runtime_dir):
    killed = serve(STARTED)
    killed.process.kill()
    killed.process.wait()
    (left,) = sockets.listed(str(runtime_dir))
    assert left.pid == killed.pid
    with pytest.raises(ConnectionRefusedError):
        sockets.connect(left, 10)
    served = serve(STARTED)
    assert [one.pid for one in sockets.listed(str(runtime_dir))] == [served.pid]
    assert served.agent.get("/v1/health")["status"] == "ok"


# --- forks ---


def test_a_child_of_a_fork_has_a_socket_of_its_own_and_leaves_its_parents_alone(
    serve, runtime_dir, at
):
    served = serve(
        """
import tlcache.agent
from tlcache.runtime import agent
tlcache.agent.start()
there, back = os.pipe(), os.pipe()
child = os.fork()
if not child:
    os.write(there[1], agent.running().path.encode())
    os.read(back[0], 1)
    sys.exit(0)
path = os.read(there[0], 4096).decode()
step([tlcache.agent.start(), path, child])
os.write(back[1], b"1")
step(os.waitpid(child, 0)[1])
"""
    )
    parent, child, pid = at(served.said[0]), at(served.said[1]), served.said[2]
    assert parent.get("/v1/health")["pid"] == served.pid
    assert child.get("/v1/health")["pid"] == pid
    assert names(runtime_dir) == sorted([f"{served.pid}.sock", f"{pid}.sock"])
    assert served.go() == 0
    assert names(runtime_dir) == [f"{served.pid}.sock"]
    assert parent.get("/v1/health")["pid"] == served.pid


def test_a_parent_that_dies_takes_its_socket_along_though_its_children_live(serve, runtime_dir, at):
    served = serve(
        """
import tlcache.agent
from tlcache.runtime import agent
tlcache.agent.start()
there = os.pipe()
if not os.fork():
    os.write(there[1], agent.running().path.encode())
    sys.stdin.read()
    os._exit(0)
step([tlcache.agent.start(), os.read(there[0], 4096).decode()])
"""
    )
    parent, child = map(at, served.said)
    parent.connect().close()
    served.process.send_signal(signal.SIGKILL)
    served.process.wait()
    with pytest.raises(ConnectionRefusedError):
        parent.connect()
    assert child.get("/v1/health")["pid"] == child.address.pid


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_multiprocessing_answer_each_for_itself(serve, tmp_path, method, at):
    (tmp_path / "workers.py").write_text(
        """
import multiprocessing, sys
def work(pipe):
    import tlcache.runtime
    from tlcache.runtime import agent
    pipe.send(agent.running().path)
    pipe.recv()
def main(method):
    import tlcache.runtime
    context = multiprocessing.get_context(method)
    workers = []
    for _ in range(3):
        here, there = context.Pipe()
        worker = context.Process(target=work, args=(there,))
        worker.start()
        workers.append((here, worker))
    return workers, [here.recv() for here, _ in workers]
"""
    )
    served = serve(
        """
if __name__ == "__main__":
    sys.path.insert(0, ".")
    import workers
    started, paths = workers.main(sys.argv[1])
    step(paths)
    for pipe, worker in started:
        pipe.send(0)
        worker.join()
    step([worker.exitcode for _, worker in started])
""",
        method,
        env={"TLCACHE_AGENT": "1", "PYTHONPATH": str(tmp_path)},
    )
    pids = [at(path).get("/v1/health")["pid"] for path in served.said]
    assert len({*pids, served.pid}) == 4
    assert [at(path).address.pid for path in served.said] == pids
    assert served.go() == [0, 0, 0]


def test_a_program_that_replaces_the_process_takes_over_its_name(serve, runtime_dir):
    served = serve(
        """
import tlcache.agent
step(tlcache.agent.start())
source = "import tlcache.agent, time\\nprint('1', flush=True)\\ninput()\\n"
source += "print('\\"' + tlcache.agent.start() + '\\"', flush=True)\\ntime.sleep(60)"
os.execv(sys.executable, [sys.executable, "-c", source])
"""
    )
    assert served.go() == 1
    with pytest.raises(ConnectionRefusedError):
        served.agent.connect()
    assert served.go() == served.said
    assert served.agent.get("/v1/health")["pid"] == served.pid
    assert names(runtime_dir) == [f"{served.pid}.sock"]


# --- what clients do ---


def test_bad_requests_are_answered_as_such_and_the_next_ones_as_ever(serve):
    served = serve(STARTED)
    for request, code in (
        (b"\r\n\r\n", 400),
        (b"\x00\xff\x16\x03\x01\r\n\r\n", 400),
        (b"GET /v1/stats HTTP/1.1\r\n" + b"x" * 8200, 431),
        (b"GET /v1/" + b"x" * 8200, 431),
        (b"x" * 100_000, 431),
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"POST /v1/stats HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n", 405),
        (b"GET /v1/health HTTP/1.1\r\n\r\nGET /v1/stats HTTP/1.1\r\n\r\n", 200),
    ):
        with served.agent.connect() as client:
            try:
                client.sendall(request)
            except BrokenPipeError:
                pass  # it answered before all of it was sent
            assert client.recv(12) == f"HTTP/1.1 {code}".encode()
        assert served.agent.get("/v1/health")["status"] == "ok"
    with served.agent.connect() as client:
        client.sendall(b"GET /v1/stats HTTP/1.1\n\n")
        client.shutdown(socket.SHUT_WR)
        assert rest(client).startswith(b"HTTP/1.1 400 ")


def test_a_request_may_come_byte_by_byte(serve):
    served = serve(STARTED)
    with served.agent.connect() as client:
        for byte in STATS:
            client.sendall(bytes([byte]))
            assert served.agent.get("/v1/health")["status"] == "ok"
        assert rest(client).startswith(b"HTTP/1.1 200 OK\r\n")


def test_silent_and_slow_clients_keep_nobody_waiting_and_are_sent_away(serve):
    served = serve(STARTED)
    silent = [served.agent.connect() for _ in range(50)]
    slow = [served.agent.connect() for _ in range(50)]
    for client in slow:
        client.sendall(b"GET /v1/st")
    assert served.agent.get("/v1/stats")["schema"] == 1
    for client in silent + slow:
        with client:
            assert rest(client).startswith(b"HTTP/1.1 408 ")
    assert served.agent.get("/v1/stats")["schema"] == 1


@pytest.fixture
def clients():
    """A list of connections that are closed with the test."""
    made = []
    yield made
    for client in made:
        client.close()


def test_a_thousand_clients_that_never_end_cost_neither_threads_nor_memory_nor_descriptors(
    serve, clients
):
    served = serve(STARTED)
    before = status(served.pid)
    for number in range(1000):
        clients.append(served.agent.connect())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # gone, to make room
            clients[-1].sendall(b"GET /v1/stats HTTP/1.1\r\n" + b"x" * (number * 8))
    assert served.agent.get("/v1/health")["status"] == "ok"
    after = status(served.pid)
    assert after["Threads"] == before["Threads"] == "2"
    grown = int(after["VmRSS"].split()[0]) - int(before["VmRSS"].split()[0])
    assert grown < 16 * 1024, f"{grown} KiB"
    assert len(os.listdir(f"/proc/{served.pid}/fd")) < 256
    while clients:
        clients.pop().close()
    assert served.agent.get("/v1/health")["status"] == "ok"


BIG = """
import tlcache.agent
from tlcache.runtime.resolve import foreign
for number in range(5000):
    foreign(f"package.module:kernel{number}", "compiled", "x" * 300, 0.001)
step(tlcache.agent.start())
"""


def test_clients_that_do_not_read_their_answers_are_bounded_in_what_they_hold(serve, clients):
    served = serve(BIG)
    answer = served.agent.get("/v1/kernels")
    assert len(answer["kernels"]) == 5000
    before = status(served.pid)
    for number in range(32):
        clients.append(served.agent.connect())
        clients[-1].sendall(f"GET /v1/kernels?{number} HTTP/1.1\r\n\r\n".encode())
        assert served.agent.get("/v1/health")["status"] == "ok"
    grown = int(status(served.pid)["VmRSS"].split()[0]) - int(before["VmRSS"].split()[0])
    assert grown < 32 * 1024, f"{grown} KiB"
    assert served.agent.get("/v1/kernels") == answer


def test_no_descriptors_left_is_no_end(serve):
    served = serve(
        """
import resource, tlcache.agent
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
path = tlcache.agent.start()
step(path)
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    step("full")
del held[:]
os.closerange(20, 64)
step("free")
"""
    )
    assert served.go() == "full"
    with served.agent.connect() as client:
        client.sendall(STATS)
        assert served.go() == "free"
        assert rest(client).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_process_without_descriptors_to_spare_has_no_agent_and_loses_nothing(python, runtime_dir):
    ran = python(
        """
import os, resource, tlcache.agent, tlcache.runtime.agent
from tlcache.errors import AgentError
tlcache.agent.start(), tlcache.agent.stop()
count = lambda: len(os.listdir("/proc/self/fd"))
before, said = count(), []
for spare in range(12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + spare - 1, 64))
    try:
        tlcache.agent.start()
        said.append("started")
        tlcache.agent.stop()
    except AgentError as error:
        assert "Too many open files" in error.message, error
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    assert count() == before, (spare, count())
print(*said)
"""
    )
    assert ran.code == 0, ran.err
    assert 3 < len(ran.out.split()) < 10
    assert names(runtime_dir) == []


# --- load ---


def test_sixty_four_processes_answer_each_for_itself(serve, runtime_dir, at):
    served = serve(
        """
import tlcache.agent
from tlcache.runtime import agent
tlcache.agent.start()
there, back = os.pipe(), os.pipe()
pids = []
for _ in range(63):
    pids.append(os.fork())
    if not pids[-1]:
        os.close(back[1])
        os.write(there[1], b"." if agent.running() else b"!")
        os.read(back[0], 1)  # until the parent is gone
        os._exit(0)
told = b"".join(os.read(there[0], 1) for _ in pids)
step([told.decode(), [os.getpid(), *pids]])
"""
    )
    told, pids = served.said
    assert told == "." * 63
    found = sockets.listed(str(runtime_dir))
    assert [one.pid for one in found] == sorted(pids)
    for one in found:
        assert at(one.path).get("/v1/stats")["process"]["pid"] == one.pid


def test_two_hundred_parallel_requests_are_all_answered_while_kernels_are_launched(serve):
    served = serve(
        """
import threading, torch, ops, tlcache.agent
x, w = torch.randn(4, 64), torch.randn(64)
op = ops.RMSNormFwdOp(64, 1e-6, torch.float32)
op(x, w)
step(tlcache.agent.start())
done, calls = threading.Event(), 0
threading.Thread(target=lambda: (sys.stdin.readline(), done.set()), daemon=True).start()
print(json.dumps("launching"), flush=True)
while not done.is_set():
    op(x, w)
    calls += 1
step(calls)
"""
    )
    assert served.go() == "launching"
    selector = selectors.DefaultSelector()
    answers = {}
    for _ in range(200):
        client = served.agent.connect()
        client.sendall(STATS)
        selector.register(client, selectors.EVENT_READ)
        answers[client] = b""
    hits = []
    while selector.get_map():
        for key, _ in selector.select(60):
            data = key.fileobj.recv(1 << 20)
            answers[key.fileobj] += data
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
    for answer in answers.values():
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        (row,) = json.loads(answer.partition(b"\r\n\r\n")[2])["layers"]["workload"]
        assert row["misses"] == 1
        hits.append(row["hits"])
    served.process.stdin.write("\n")
    served.process.stdin.flush()
    calls = served.line()
    assert max(hits) <= calls
    (row,) = served.agent.get("/v1/stats")["layers"]["workload"]
    assert row["hits"] == calls


def test_it_answers_while_the_main_thread_compiles(serve):
    served = serve(
        """
import torch, ops, tlcache.agent, tilelang
step(tlcache.agent.start())
print(json.dumps("compiling"), flush=True)
ops.RMSNormFwdOp(64, 1e-6, torch.float32)(torch.randn(4, 64), torch.randn(64))
step("compiled")
"""
    )
    assert served.go() == "compiling"
    during = 0
    while not (compiled := served.agent.get("/v1/stats")["layers"]["compile"]["compiled"]):
        during += 1
    assert compiled == 1
    assert during > 3
    assert served.line() == "compiled"
