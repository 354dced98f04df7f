"""What the command line costs before it does anything, against `python -c 'import click'`.

Measured is the whole process, as its parent sees it, of

    click      `python -c 'import click'`: what any command line built on click costs
    --version  `tlcache --version`
    --help     `tlcache --help`
    ls         `tlcache ls` over 100 entries, into a pipe
    ls (tty)   the same onto a terminal, where it draws a table

The processes take turns, round by round; the ratio to `import click` is taken within each round,
and the median of the rounds' ratios is reported. The 100 entries are two kernels that were really
compiled for the CPU, copied with their records under other keys and row counts.

It also checks that none of the commands imports torch or TileLang.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pty
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import method
from method import Goal

from tlcache.store import entry as entry_store
from tlcache.store import layout, record
from tlcache.store.record import Record
from tlcache.targets import CPU

METHOD = (
    "Whole processes, timed by their parent and interleaved round by round; page cache and "
    "bytecode warm; ratio to `python -c 'import click'` within each round, median of the rounds."
)
BOUNDS = {"--version": 1.3, "--help": 1.5, "ls": 3.0, "ls (tty)": 3.0}
HEAVY = ("torch", "tilelang", "tvm", "tvm_ffi")

IMPORTS = f"""
import json, sys
from tlcache.cli import main
try:
    main(json.loads(sys.argv[1])["arguments"])
except SystemExit as end:
    assert not end.code, end.code
print("\\nANSWER " + json.dumps({{"imported": [m for m in {HEAVY!r} if m in sys.modules]}}))
"""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Start-up time of the command line.")
    parser.add_argument("--rounds", type=method.positive, default=25, help="rounds (25)")
    parser.add_argument("--entries", type=method.positive, default=100, help="entries (100)")
    parser.add_argument("--json", metavar="FILE", help="write all samples here")
    return parser.parse_args()


def prepare(place: Path, entries: int) -> Path:
    """A cache root with so many entries, each with its record: two real ones, and copies."""
    root = place / "root"
    kernels = method.specs(method.workloads(2, CPU), CPU)
    method.write_shapes(place / "shapes.json", kernels)
    method.warm(place / "shapes.json", CPU, root)
    originals = [_read(path) for path in layout.records(root)]
    for number in range(entries - len(originals)):
        original = originals[number % len(originals)]
        rows = number + 2
        entry = Path(original.entry).with_name(_key(f"entry {number}"))
        shutil.copytree(root / original.entry, root / entry)
        data = original.to_json()
        data["action_key"], data["entry"] = _key(f"record {number}"), str(entry)
        data["spec"]["workload"]["M"] = rows
        for param in data["launch"]["params"]:
            if len(param["shape"]) == 2:
                param["shape"] = [rows, *param["shape"][1:]]
        record.write(root, Record.from_json(json.loads(json.dumps(data))))
    found = [one.record for one in entry_store.scan(root)]
    if len(found) != entries or None in found:
        raise method.Failure(f"the root {root} has not the {entries} entries that were made")
    return root


def _read(path: Path) -> Record:
    found = record.parse(path.read_bytes(), path)
    if found is None:
        raise method.Failure(f"`tlcache warm` left the record {path}, which is damaged")
    return found


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _process(command: Sequence[str], env: dict[str, str], cwd: Path) -> float:
    """The seconds of one process whose output nobody reads."""
    start = time.perf_counter()
    subprocess.run(
        command,
        check=True,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def _on_terminal(command: Sequence[str], env: dict[str, str], cwd: Path) -> float:
    """The seconds of one process that writes to a terminal; what it writes is read and dropped."""
    ours, theirs = pty.openpty()

    def drain() -> None:
        try:
            while os.read(ours, 65536):
                pass
        except OSError:
            pass  # the other side is closed

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    try:
        start = time.perf_counter()
        subprocess.run(
            command,
            check=True,
            env={**env, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "50"},
            cwd=cwd,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        return time.perf_counter() - start
    finally:
        os.close(theirs)
        reader.join(5)
        os.close(ours)


def _imports(root: Path) -> dict[str, list[str]]:
    """What each command imports of that which it must not."""
    return {
        " ".join(arguments): method.answer(
            IMPORTS, {"arguments": arguments}, method.environment(root)
        )[0]["imported"]
        for arguments in (["--version"], ["--help"], ["ls"])
    }


def main() -> None:
    options = _arguments()
    with method.scratch() as place:
        method.note("preparing the entries")
        root = prepare(place, options.entries)
        env = method.environment(root)
        commands = {
            "click": [sys.executable, "-c", "import click"],
            "--version": [*method.TLCACHE, "--version"],
            "--help": [*method.TLCACHE, "--help"],
            "ls": [*method.TLCACHE, "ls"],
            "ls (tty)": [*method.TLCACHE, "ls"],
        }

        def measure(name: str) -> dict[str, Any]:
            run = _on_terminal if name == "ls (tty)" else _process
            return {"seconds": run(commands[name], env, place)}

        samples = method.interleaved(list(commands), options.rounds, measure)
        imported = _imports(root)
    _report(options, commands, samples, imported)


def _report(
    options: argparse.Namespace,
    commands: dict[str, list[str]],
    samples: dict[str, list[dict[str, Any]]],
    imported: dict[str, list[str]],
) -> None:
    seconds = {name: [one["seconds"] for one in found] for name, found in samples.items()}
    by_round = {name: method.ratios(seconds[name], seconds["click"]) for name in BOUNDS}
    goals = [
        Goal(f"tlcache {name}", method.spread(by_round[name])["median"], bound, least=False)
        for name, bound in BOUNDS.items()
    ]
    rows = []
    for name, values in seconds.items():
        found = method.spread(values)
        ratio = method.spread(by_round[name])["median"] if name in by_round else 1.0
        what = "python -c 'import click'" if name == "click" else f"tlcache {name}"
        times = [method.duration(found[key]) for key in ("median", "min", "max")]
        rows.append([what, *times, f"{ratio:.2f}x"])
    print(f"{options.rounds} rounds; ls lists {options.entries} entries")
    print()
    print(method.table(["process", "median", "min", "max", "ratio"], rows))
    print()
    for goal in goals:
        print(goal)
    for name, modules in imported.items():
        print(f"tlcache {name} imports {', '.join(modules) or 'neither torch nor TileLang'}")
    method.write_result(
        options.json,
        {
            "benchmark": "startup",
            "method": METHOD,
            "entries": options.entries,
            "commands": {n: [Path(c[0]).name, *c[1:]] for n, c in commands.items()},
            "seconds": {name: method.spread(values) for name, values in seconds.items()},
            "ratios": by_round,
            "imported": imported,
            "goals": [goal.to_json() for goal in goals],
            "samples": samples,
        },
    )
    if any(imported.values()):
        raise method.Failure("a command imports what it must not")


if __name__ == "__main__":
    method.main(main)
