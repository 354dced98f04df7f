"""What the daemon bears: reads of its figures while entries come and go, and its memory over time.

    python benchmarks/daemon_load.py                     # 5,000 entries; about two minutes
    python benchmarks/daemon_load.py --soak 600          # and ten minutes at a lower rate
    python benchmarks/daemon_load.py --rate 2000 --seconds 10

A daemon watches a root of real entries (those of `large_root.py`), of which a process publishes and
removes 10,000 a minute, as TileLang and a prune would. Clients in processes of their own ask over
its unix socket, on connections that they keep: `/v1/stats`, `/metrics`, then both at once, each
at the given rate; and before these a server that does nothing but answer, for what the clients and
the machine take. A request is due at a time of its own, and its latency is counted from then,
also where the one before it was late.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import large_root
import method
from method import Failure, Goal

METHOD = (
    "Requests at fixed times over kept connections; latency from when a request was due to its "
    "last byte. Entries are published by rename from another directory of the file system, and "
    "removed the same way, in pairs that leave the root as it was."
)
VARIANTS = {
    "floor": ("/",),
    "stats": ("/v1/stats",),
    "metrics": ("/metrics",),
    "both": ("/v1/stats", "/metrics"),
}
CHURN = 10_000 / 60
BOUND = 0.050

# Publishes and removes entries of a root, so many of each a second, until its input ends.
CHURNING = """
import json, os, shutil, sys, threading, time
job = json.loads(sys.argv[1])
models = job["models"]
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
begun, number, lying = time.monotonic(), 0, []
while not over.is_set():
    due = begun + number / job["rate"]
    time.sleep(max(0.0, due - time.monotonic()))
    model = models[number % len(models)]
    temporary = os.path.join(job["aside"], str(number))
    shutil.copytree(model, temporary)
    place = os.path.join(os.path.dirname(model), f"{number:064x}")
    os.rename(temporary, place)
    lying.append(place)
    if len(lying) > 200:
        gone = lying.pop(0)
        os.rename(gone, temporary)
        shutil.rmtree(temporary)
    number += 1
for place in lying:
    shutil.rmtree(place)
print(number)
"""


class _Connection:
    """A connection that is kept: one request at a time, and what has come of its answer."""

    def __init__(self, path: str) -> None:
        self.socket = _connected(path)
        self.due = 0.0
        self.received = b""

    def ask(self, path: str, due: float) -> None:
        self.due, self.received = due, b""
        self.socket.sendall(f"GET {path} HTTP/1.1\r\nHost: daemon\r\n\r\n".encode())

    def receive(self) -> tuple[int, int] | None:
        """Status and size of the answer, once it is whole."""
        some = self.socket.recv(2**18)
        if not some:
            raise ConnectionResetError
        self.received += some
        head, found, body = self.received.partition(b"\r\n\r\n")
        if not found:
            return None
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        return (int(head[9:12]), length) if len(body) >= length else None


def _connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect(path)
    return connection


# Answers every request with the same bytes, from the same kind of loop: what the clients and the
# machine take, whatever is asked.
FLOOR = """
import asyncio, sys
BODY = b"x" * 8192
ANSWER = b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n%b" % (len(BODY), BODY)
class Floor(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        self.transport.write(ANSWER)
async def main():
    server = await asyncio.get_running_loop().create_unix_server(Floor, sys.argv[1])
    await server.serve_forever()
asyncio.run(main())
"""


def client(job: dict[str, Any]) -> dict[str, Any]:
    """Ask at fixed times, on whichever connection is free; the latencies, and what went wrong."""
    latencies: list[float] = []
    failures = size = number = 0
    step, total = 1 / job["rate"], int(job["seconds"] * job["rate"])
    selector = selectors.DefaultSelector()
    free = deque(_Connection(job["socket"]) for _ in range(job["connections"]))
    for one in free:
        selector.register(one.socket, selectors.EVENT_READ, one)
    time.sleep(max(0.0, job["begin"] - time.time()))
    begun = time.perf_counter() + step * job["offset"]
    while len(latencies) < total:
        while free and number < total and time.perf_counter() >= begun + number * step:
            free.popleft().ask(job["paths"][number % len(job["paths"])], begun + number * step)
            number += 1
        wait = begun + number * step - time.perf_counter() if free and number < total else 1.0
        for key, _ in selector.select(max(0.0, wait)):
            answer = key.data.receive()
            if answer is not None:
                latencies.append(time.perf_counter() - key.data.due)
                failures += answer[0] != 200
                size += answer[1]
                free.append(key.data)
    took = time.perf_counter() - begun
    return {"latencies": latencies, "failures": failures, "bytes": size, "seconds": took}


class Daemon:
    """A daemon, and the process that changes what it watches."""

    def __init__(self, place: Path, entries: int) -> None:
        self.place, self.root = place, place / "root"
        self.socket = place / "run" / "daemon.sock"
        method.note(f"making {entries:,} entries")
        models = place / "models"
        models.mkdir()
        large_root.make(self.root, entries, models)
        self._env = method.environment(
            self.root,
            TLCACHE_RUNTIME_DIR=str(place / "run"),
            TLCACHE_SCAN_CACHE=str(place / "scan.sqlite"),
        )

    def __enter__(self) -> Daemon:
        command = [*method.TLCACHE, "daemon", "run", "--root", str(self.root)]
        command += ["--socket", str(self.socket), "--history", str(self.place / "history")]
        with (self.place / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self._env)
        deadline = time.monotonic() + 60
        while b'"status":"ok"' not in self._health():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise Failure(f"the daemon did not start: {(self.place / 'log').read_text()}")
            time.sleep(0.1)
        self._floor = subprocess.Popen(
            [sys.executable, "-c", FLOOR, str(self.place / "floor.sock")]
        )
        aside = self.place / "aside"
        aside.mkdir(exist_ok=True)
        kernels = sorted(str(path) for path in self.root.glob("*/linux-x86_64/kernels/*"))[:50]
        job = {"models": kernels, "aside": str(aside), "rate": CHURN}
        self._churn = subprocess.Popen(
            [sys.executable, "-c", CHURNING, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def _health(self) -> bytes:
        try:
            with _connected(str(self.socket)) as connection:
                connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
                return connection.makefile("rb").read().replace(b": ", b":")
        except OSError:
            return b""

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_churn"):
            self.churned = int(self._churn.communicate()[0])
            self._floor.kill()
            self._floor.wait()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise Failure("the daemon did not stop within 20 s") from None

    def memory(self) -> int:
        """Its resident bytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def waited(self) -> float:
        """Seconds for which one of its threads could run, and had no core."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(one.read_text(encoding="ascii").split()[1]) for one in tasks) / 1e9

    def cpu(self) -> float:
        """Its CPU seconds so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii")
        user, system = fields.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def load(
        self, paths: tuple[str, ...], options: argparse.Namespace, seconds: float, rate: float
    ) -> dict[str, Any]:
        """Ask for each path at a rate for so long."""
        rate = rate * len(paths) / options.clients
        begin = time.time() + 1.0
        before, cpu, waited = time.perf_counter(), self.cpu(), self.waited()
        asked = self.socket if paths != VARIANTS["floor"] else self.place / "floor.sock"
        clients = []
        for number in range(options.clients):
            job = {
                "socket": str(asked),
                "paths": paths,
                "rate": rate,
                "seconds": seconds,
                "connections": options.connections,
                "begin": begin,
                "offset": number / options.clients,
            }
            clients.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--client", json.dumps(job)], stdout=subprocess.PIPE
                )
            )
        answers = [json.loads(one.communicate()[0]) for one in clients]
        latencies = sorted(value for one in answers for value in one["latencies"])
        longest, took = max(one["seconds"] for one in answers), time.perf_counter() - before
        return {
            "requests": len(latencies),
            "per_second": len(latencies) / longest,
            "failures": sum(one["failures"] for one in answers),
            "bytes_each": sum(one["bytes"] for one in answers) / len(latencies),
            "p50": _rank(latencies, 0.50),
            "p90": _rank(latencies, 0.90),
            "p99": _rank(latencies, 0.99),
            "max": latencies[-1],
            "daemon_cores": (self.cpu() - cpu) / took,
            "daemon_waited_cores": (self.waited() - waited) / took,
            "load": os.getloadavg()[0],
            "memory": self.memory(),
        }


def _rank(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Start everything, and run the variants in turn; then the soak."""
    # What else runs here decides the latencies as much as the daemon does.
    shared = {"niceness": os.getpriority(os.PRIO_PROCESS, 0), "load_before": os.getloadavg()[0]}
    found: dict[str, Any] = {**shared, "rounds": {name: [] for name in VARIANTS}, "soak": []}
    daemon = Daemon(place, options.entries)
    with daemon:
        daemon.load(VARIANTS["both"], options, 3.0, options.rate)  # discarded
        for number in range(options.rounds):
            for name, paths in VARIANTS.items():
                method.note(f"round {number + 1} of {options.rounds}: {name}")
                sample = daemon.load(paths, options, options.seconds, options.rate)
                found["rounds"][name].append(sample)
        begun = time.monotonic()
        while time.monotonic() - begun < options.soak:
            span = min(20.0, options.soak)
            sample = daemon.load(VARIANTS["both"], options, span, options.soak_rate)
            found["soak"].append({"seconds": round(time.monotonic() - begun, 1), **sample})
            method.note(f"soak {found['soak'][-1]['seconds']:.0f} s: {sample['memory'] >> 20} MiB")
    found["churned"] = daemon.churned
    return found


def _report(options: argparse.Namespace, found: dict[str, Any]) -> None:
    rows, goals = [], []
    for name, rounds in found["rounds"].items():
        worst = max(rounds, key=lambda one: one["p99"])
        cells = [method.duration(worst[key]) for key in ("p50", "p90", "p99", "max")]
        slowest = min(one["per_second"] for one in rounds)
        cores = [f"{worst[key]:.2f}" for key in ("daemon_cores", "daemon_waited_cores")]
        rows.append([name, f"{slowest:,.0f}", *cells, *cores])
        if name == "floor":
            continue
        wanted = 0.99 * options.rate * len(VARIANTS[name])
        goals.append(Goal(f"{name}, requests a second", slowest, wanted, least=True, unit=""))
        goals.append(Goal(f"{name}, p99", worst["p99"], BOUND, least=False, unit=" s"))
    failures = sum(one["failures"] for rounds in found["rounds"].values() for one in rounds)
    failures += sum(one["failures"] for one in found["soak"])
    goals.append(Goal("answers that were no 200", failures, 0, least=False, unit=""))
    print(f"{options.entries:,} entries, {found['churned']:,} published, {method.cores()} cores")
    print("\nthe worst of the rounds")
    header = ["read", "a second", "p50", "p90", "p99", "max", "daemon's cores", "waited for"]
    print(method.table(header, rows))
    if len(found["soak"]) > 1:
        memory = [one["memory"] for one in found["soak"]]
        third = max(1, len(memory) // 3)
        early, late = (sum(some) / len(some) for some in (memory[:third], memory[-third:]))
        goals.append(Goal("memory, last third to first", late / early, 1.1, least=False, unit=""))
        spread = f"{min(memory) >> 20} to {max(memory) >> 20} MiB"
        worst_p99 = max(one["p99"] for one in found["soak"])
        print(f"\nsoak of {options.soak} s: {spread}, worst p99 {method.duration(worst_p99)}")
    print()
    for goal in goals:
        print(goal)
    method.write_result(
        options.json,
        {
            "benchmark": "daemon_load",
            "method": METHOD,
            "entries": options.entries,
            "rate": options.rate,
            "soak_rate": options.soak_rate,
            "clients": options.clients,
            "connections": options.clients * options.connections,
            "published_a_second": CHURN,
            "goals": [goal.to_json() for goal in goals],
            **found,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The daemon under load.")
    parser.add_argument("--entries", type=method.positive, default=5000)
    parser.add_argument("--rate", type=method.positive, default=1000, help="reads of each a second")
    parser.add_argument("--seconds", type=method.positive, default=10, help="of each round")
    parser.add_argument("--rounds", type=method.positive, default=3)
    parser.add_argument("--clients", type=method.positive, default=4, help="processes that ask")
    parser.add_argument("--connections", type=method.positive, default=4, help="of each of them")
    parser.add_argument("--soak", type=int, default=0, metavar="SECONDS", help="then go on so long")
    parser.add_argument("--json", metavar="FILE", help="write everything here")
    parser.add_argument("--soak-rate", type=method.positive, default=250, help="then, of each")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client is not None:
        print(json.dumps(client(json.loads(options.client))))
        return
    with method.scratch() as place:
        _report(options, measure(options, place))


if __name__ == "__main__":
    method.main(main)
