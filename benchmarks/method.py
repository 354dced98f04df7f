"""What the benchmarks share: fresh processes, interleaved rounds, medians, the host, tables, JSON.

Every figure is the time of a process that was started for it. The variants of a benchmark take
turns, round by round, so that a slow minute of the machine falls on all of them; a ratio is taken
within each round, and the median of the rounds' ratios is reported. One round before the first is
discarded: it fills the page cache and writes the bytecode of whatever is imported.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from tlcache import targets
from tlcache.errors import TlcacheError
from tlcache.spec import KernelSpec
from tlcache.targets import Target

_HERE = os.path.dirname(os.path.abspath(__file__))
# One of this folder's scripts is named as the package that it measures: packages come first.
sys.path[:] = [path for path in sys.path if os.path.abspath(path or os.curdir) != _HERE] + [_HERE]

__all__ = [
    "TLCACHE",
    "Failure",
    "Goal",
    "Ran",
    "answer",
    "cores",
    "duration",
    "environment",
    "host",
    "interleaved",
    "main",
    "note",
    "positive",
    "ratios",
    "run",
    "scratch",
    "specs",
    "spread",
    "table",
    "target",
    "visible_gpu",
    "warm",
    "workloads",
    "write_json",
    "write_result",
    "write_shapes",
]

_STARTED = time.perf_counter()
_DROPPED = ("TLCACHE_", "TILELANG_")
_SCRIPT = shutil.which("tlcache", path=os.path.dirname(sys.executable))
TLCACHE: list[str] = (
    [_SCRIPT]
    if _SCRIPT
    else [sys.executable, "-c", "import sys; from tlcache.cli import main; sys.exit(main())"]
)
"""The command `tlcache`: the script beside this interpreter, else the same by hand."""


class Failure(Exception):
    """A benchmark cannot go on; its text is for the person who ran it."""


# --- fresh processes ---


@dataclass(frozen=True)
class Ran:
    """A process that has ended.

    Attributes:
        code: Its exit status.
        out: Its standard output.
        err: Its standard error.
        seconds: From its start to its end, as the parent sees it.
    """

    code: int
    out: str
    err: str
    seconds: float


def environment(root: str | os.PathLike[str] | None = None, **more: str) -> dict[str, str]:
    """The environment of a measured process.

    It is this process's, without what would change the measurement: the settings of TileLang and
    tlcache, and PYTHONDONTWRITEBYTECODE, under which every import would be compiled anew.

    Args:
        root: The cache root that is in force in it.
        more: Further variables.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_DROPPED) and name != "PYTHONDONTWRITEBYTECODE"
    }
    if paths := [path for path in kept.get("PYTHONPATH", "").split(os.pathsep) if path]:
        # Measured processes run in another directory.
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths))
    kept["TILELANG_PRINT_ON_COMPILATION"] = "0"
    if root is not None:
        kept["TILELANG_CACHE_DIR"] = os.fspath(root)
    return {**kept, **more}


def run(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    codes: Sequence[int] = (0,),
    cwd: str | os.PathLike[str] | None = None,
    watch: Callable[[subprocess.Popen[Any]], None] | None = None,
) -> Ran:
    """Run a command in a process of its own, and time it from outside.

    Args:
        command: Program and arguments.
        env: Its whole environment.
        codes: Exit statuses that are no failure.
        cwd: Its working directory; an empty one by default, since a program given with `-c` looks
            there first for each module that it imports.
        watch: Called with the process as soon as it runs, in this thread.

    Raises:
        Failure: It ended with another exit status.
    """
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        tempfile.TemporaryDirectory(prefix="tlcache-benchmark-") as empty,
    ):
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(env),
            cwd=cwd or empty,
        )
        try:
            if watch is not None:
                watch(process)
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        seconds = time.perf_counter() - start
        out.seek(0)
        err.seek(0)
        ran = Ran(code, out.read(), err.read(), seconds)
    if ran.code not in codes:
        tail = "\n".join((ran.err or ran.out).strip().splitlines()[-15:])
        what = " ".join(part if "\n" not in part else "…" for part in command)
        raise Failure(f"`{what}` ended with {ran.code}:\n{tail}")
    return ran


_ANSWER = "ANSWER "


def answer(
    source: str,
    job: Mapping[str, Any] | str | os.PathLike[str],
    env: Mapping[str, str],
    cwd: str | os.PathLike[str] | None = None,
) -> tuple[dict[str, Any], Ran]:
    """Run Python source in a fresh interpreter, and read what it answers.

    Args:
        source: A program; it prints `ANSWER ` and a JSON object on a line of its own.
        job: Its only argument: a mapping is passed as JSON, a path as it is.
        env: Its environment.
        cwd: Its working directory.

    Raises:
        Failure: It failed, or gave no answer.
    """
    argument = json.dumps(dict(job)) if isinstance(job, Mapping) else os.fspath(job)
    ran = run([sys.executable, "-c", source, argument], env, cwd=cwd)
    for line in reversed(ran.out.splitlines()):
        if line.startswith(_ANSWER):
            return json.loads(line[len(_ANSWER) :]), ran
    raise Failure(f"a measured process gave no answer:\n{ran.out[-2000:]}{ran.err[-2000:]}")


@contextmanager
def scratch() -> Iterator[Path]:
    """A private directory that is removed afterwards; cache roots in it are trusted."""
    path = Path(tempfile.mkdtemp(prefix="tlcache-benchmark-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# --- rounds ---


def interleaved(
    variants: Sequence[str],
    rounds: int,
    measure: Callable[[str], dict[str, Any]],
    *,
    discarded: int = 1,
) -> dict[str, list[dict[str, Any]]]:
    """Measure variants in turn, round by round; each round begins with another one.

    Args:
        variants: Their names.
        rounds: How many rounds count.
        measure: Runs one variant in a fresh process and returns its sample.
        discarded: Rounds before these whose samples are thrown away.

    Returns:
        The samples of each variant, in the order of the rounds.
    """
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for number in range(-discarded, rounds):
        for place in range(len(variants)):
            name = variants[(place + number) % len(variants)]
            note(f"round {number + 1} of {rounds}: {name}" if number >= 0 else f"first: {name}")
            sample = measure(name)
            if number >= 0:
                samples[name].append(sample)
    note("")
    return samples


def note(text: str) -> None:
    """What is being done: on one line of a terminal that the next one replaces, else on lines with
    the time since the start, so that a run that was cut short tells how far it came.
    """
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(f"[{time.perf_counter() - _STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of some values."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """The ratio of two variants in each round."""
    return [one / other for one, other in zip(above, below, strict=True)]


@dataclass(frozen=True)
class Goal:
    """A figure, and what it should be.

    Attributes:
        name: What it is a figure of.
        value: The figure; None where it was not measured.
        bound: What it should reach, or stay within.
        least: Whether the bound is the least value that is good, or the greatest.
        unit: Written behind both.
    """

    name: str
    value: float | None
    bound: float
    least: bool
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bound if self.least else self.value <= self.bound

    def __str__(self) -> str:
        shown = (
            "not measured"
            if self.value is None
            else f"{self.value:.{1 if self.value >= 10 else 2}f}{self.unit}"
        )
        verdict = {True: "met", False: "missed", None: "open"}[self.met]
        direction = "at least" if self.least else "at most"
        return f"{self.name}: {shown} (goal: {direction} {self.bound:g}{self.unit}: {verdict})"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "at_least" if self.least else "at_most": self.bound,
            "met": self.met,
        }


# --- the kernels ---

_ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_WIDTHS = (1024, 2048, 4096, 5120, 7168, 8192, 12288, 16384)


def workloads(count: int, target: Target) -> list[dict[str, Any]]:
    """Distinct RMSNorm workloads: eight row lengths, for each row count in turn.

    Row lengths are those of common models, three of them no powers of two. Row counts are powers
    of two from 1 to 8192, and then odd numbers from 3, so that any count can be had. On CUDA the
    elements are bfloat16, on the CPU float32.
    """
    dtype = "bfloat16" if target.is_cuda else "float32"
    rows = itertools.chain(_ROW_COUNTS, itertools.count(3, 2))
    pairs = itertools.islice(((m, n) for m in rows for n in _WIDTHS), count)
    return [{"M": m, "N": n, "eps": 1e-6, "dtype": dtype} for m, n in pairs]


def specs(wanted: Sequence[Mapping[str, Any]], target: Target) -> list[KernelSpec]:
    """The specs of RMSNorm workloads, as the operator makes them."""
    from ops.catalog import OPERATORS

    operator = OPERATORS["rms_norm"]
    made = [operator.spec(workload, target) for workload in wanted]
    if len(set(made)) != len(made):
        raise Failure("two of the workloads have the same spec")
    return made


def write_shapes(path: Path, kernels: Sequence[KernelSpec]) -> None:
    """A shapes.json that asks for exactly these kernels.

    By the factory's import path rather than the operator's name: that works from a checkout that
    is not installed too, where no entry point is found, and makes the same specs.
    """
    document = {
        "version": 1,
        "workloads": [
            {"kernel": one.kernel, "args": dict(one.workload), "schedule": dict(one.schedule)}
            for one in kernels
        ],
    }
    path.write_text(json.dumps(document), encoding="utf-8")


def warm(
    shapes: Path,
    target: Target,
    root: Path,
    *,
    jobs: int | None = None,
    watch: Callable[[subprocess.Popen[Any]], None] | None = None,
) -> tuple[dict[str, Any], Ran]:
    """Run `tlcache warm` into a root, and return its `--json` and the process.

    Raises:
        Failure: A kernel failed.
    """
    command = [*TLCACHE, "warm", "--shapes", str(shapes), "--target", target.name]
    command += ["--cache-dir", str(root), "--json"]
    if jobs is not None:
        command += ["--jobs", str(jobs)]
    ran = run(command, environment(root), codes=(0, 1, 3), watch=watch)
    document = json.loads(ran.out) if ran.out.startswith("{") else {}
    if ran.code or not document:
        errors = {kernel["error"] for kernel in document.get("kernels", ()) if kernel["error"]}
        raise Failure(f"`tlcache warm` ended with {ran.code}: {'; '.join(errors) or ran.err}")
    return document, ran


# --- the host ---


def target(spelling: str) -> Target:
    """The target of a `--target` option; `auto` is the GPU here, else the CPU."""
    if spelling == "auto":
        return visible_gpu() or targets.CPU
    return targets.parse(spelling)


def visible_gpu() -> Target | None:
    """The target of the first GPU here, or None where there is none."""
    try:
        return targets.detect()
    except targets.TargetError:
        return None


def cores() -> int:
    """The cores that this process may use: its affinity, and its control group's quota."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return allowed
    return min(allowed, max(1, int(quota) // int(period))) if quota.isdigit() else allowed


def host() -> dict[str, Any]:
    """What was measured on: versions, CPU, memory, GPU, and when, in UTC."""
    from tlcache import __version__
    from tlcache.warm import toolchain

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "tlcache": __version__,
            **{
                name: _version(distribution)
                for name, distribution in (
                    ("torch", "torch"),
                    ("tilelang", "tilelang"),
                    ("tvm_ffi", "apache-tvm-ffi"),
                    ("click", "click"),
                )
            },
        },
        "toolkit": toolchain.provenance(),
        "os": platform.platform(),
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": _gpu_name(),
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu_name() -> str | None:
    """The first GPU's name, by the driver alone."""
    if visible_gpu() is None:
        return None
    cuda = ctypes.CDLL("libcuda.so.1")
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    if cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDeviceGetName(name, 256, device):
        return None
    return name.value.decode()


# --- reports ---


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns of plain text: the first to the left, the rest to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def duration(seconds: float) -> str:
    """A time for a table: milliseconds below ten seconds, else seconds."""
    return f"{seconds * 1000:,.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_result(path: str | None, document: Mapping[str, Any]) -> None:
    """Write a benchmark's result with the host it was measured on, where a file was asked for."""
    if path is not None:
        write_json(Path(path), {"schema": 1, **document, "host": host()})


def positive(text: str) -> int:
    """An argument that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def main(measured: Callable[[], None]) -> None:
    """Run a benchmark; what goes wrong is one message and exit status 1."""
    try:
        measured()
    except (Failure, TlcacheError) as failure:
        note("")
        print(f"error: {failure}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
