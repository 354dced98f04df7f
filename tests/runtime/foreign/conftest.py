"""A program to edit, and processes that are forked for it after TileLang was imported once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.environment import clean_environment

# Imports what takes long, and forks a process for each line: in one directory, with one
# environment, for one program, which leaves what it has to say in `told`.
SERVER = """
import json, os, sys, traceback
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # TileLang logs to the standard output
import torch, tilelang
assert not any(name.startswith("tlcache") for name in sys.modules)
for line in sys.stdin:
    asked = json.loads(line)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.environ.update(asked["env"])
        os.chdir(asked["place"])
        sys.path.insert(0, asked["place"])
        names = {"__name__": "program", "told": {}}
        try:
            from tilelang.cache.kernel_cache import KernelCache
            KernelCache._create_dirs()
            exec(asked["code"], names)
        except BaseException:
            names["told"]["error"] = traceback.format_exc()
        os.write(writing, json.dumps(names["told"]).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    out.write((said or b"{}").decode() + "\\n")
    out.flush()
"""

KERNELS = '''\
"""A kernel for the CPU, and all that it may take from elsewhere."""
import tilelang
import tilelang.language as T
import settings
from helpers import Shift, doubled, plus

FACTOR = 2.0


def make(width, scale, flags=None, configs=None):
    inner = scale * 1.0

    @tilelang.jit(out_idx=[-1], target="c", compile_flags=flags, pass_configs=configs)
    def kernel(n, bias=1.0):
        @T.prim_func
        def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
            with T.Kernel(1) as _:
                for i in T.serial(n):
                    Y[i] = doubled(X[i]) * FACTOR + settings.OFFSET + bias + inner
                    plus(Y, i)

        return main

    return kernel


@tilelang.jit(target="c")
def eager(X, shift: float = Shift().by):
    N = T.const("N")
    X: T.Tensor[[N], settings.DTYPE]
    Y = T.empty((N,), "float32")
    with T.Kernel(1) as _:
        for i in T.serial(N):
            Y[i] = X[i] * FACTOR + shift
            plus(Y, i)
    return Y
'''

HELPERS = """\
import dataclasses

import tilelang.language as T

TERM = 0.5


@dataclasses.dataclass(frozen=True)
class Shift:
    by: float = 3.0


def twice():
    return 2.0


def doubled(x):
    return x * twice()


@T.macro
def plus(Y, i):
    Y[i] = Y[i] + TERM


def unrelated():
    return 1
"""

SETTINGS = 'OFFSET = 10.0\nDTYPE = "float32"\nUNUSED = 1\n'


class Program:
    """Three modules in a directory of their own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.files = {"kernels.py": KERNELS, "helpers.py": HELPERS, "settings.py": SETTINGS}

    def edit(self, name: str, before: str, after: str) -> Program:
        """Replace what stands exactly once in a file."""
        assert self.files[name].count(before) == 1, (name, before)
        self.files[name] = self.files[name].replace(before, after)
        return self

    def write(self) -> str:
        self.place.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            (self.place / name).write_text(text)
        return str(self.place)


@pytest.fixture(scope="session")
def server() -> Iterator[subprocess.Popen[str]]:
    environment = clean_environment()
    environment |= {"TILELANG_PRINT_ON_COMPILATION": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="session")
def fork(server: subprocess.Popen[str]) -> Callable[..., dict[str, Any]]:
    """Run a program's text in a process of its own; returns what it left in `told`."""

    def run(place: str | Path, code: str, root: Path, **env: str) -> dict[str, Any]:
        asked = {"place": str(place), "code": code, "env": {"TILELANG_CACHE_DIR": str(root)}}
        asked["env"] |= env
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        told = json.loads(server.stdout.readline())
        assert "error" not in told, told["error"]
        return told

    return run


@pytest.fixture
def forked(fork: Callable[..., dict[str, Any]], cache_root: Path) -> Callable[..., dict[str, Any]]:
    """The same, with the test's root in force."""
    return lambda place, code, **env: fork(place, code, cache_root, **env)


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Program]:
    """A new copy of the program, under a name."""
    return lambda name="program": Program(tmp_path / name)
