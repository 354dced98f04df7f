"""What the tests share: an empty cache root, and the real commands in real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.environment import clean_environment

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a job in the background of a shell; what the tests start would be deaf to Ctrl-C, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

TLCACHE = [sys.executable, "-c", "from tlcache.cli import main; main()"]


@dataclass(frozen=True)
class Ran:
    """What a process left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache root, in force for this process and those that it starts."""
    root = tmp_path / "cache"
    for name in [name for name in os.environ if name.startswith(("TLCACHE_", "TILELANG_"))]:
        monkeypatch.delenv(name)
    for name in ("COLUMNS", "LINES"):  # which readline sets for what pytest-xdist starts
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(root))
    monkeypatch.setenv("TLCACHE_SCAN_CACHE", str(tmp_path / "scan.sqlite"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return root


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a directory once, for all workers where pytest-xdist runs several."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once"
    place.mkdir(exist_ok=True)

    def once(name: str, make: Callable[[Path], object]) -> Path:
        path, made = place / name, place / f"{name}.made"
        with FileLock(f"{path}.lock"):
            if not made.exists():
                path.mkdir(exist_ok=True)
                make(path)
                made.touch()
        return path

    return once


@pytest.fixture(scope="session")
def whole(once: Callable[..., Path]) -> Path:
    """A root with the CPU's kernels of rms_norm for 1 to 4 rows of 64 numbers in float32, as
    `whole.json` beside it asks for them; to be read only.
    """
    workload = {"op": "rms_norm", "M": [1, 2, 3, 4], "N": 64, "eps": 1e-6, "dtype": "float32"}
    document = {"version": 1, "targets": ["cpu"], "workloads": [workload]}

    def make(place: Path) -> None:
        (place / "whole.json").write_text(json.dumps(document))
        command = [*TLCACHE, "warm", "--shapes", "whole.json", "--cache-dir", "whole"]
        kept = clean_environment()
        subprocess.run(command, cwd=place, env=kept, check=True, capture_output=True)

    return once("whole", make) / "whole"


@pytest.fixture
def restorable(whole: Path, cache_root: Path) -> Path:
    """A copy of that root, in force for the test's commands."""
    shutil.copytree(whole, cache_root)
    return cache_root


@pytest.fixture(scope="session")
def mixed_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of many TileLang releases, as `test_mixed_root.py` tells it; to be read only."""
    root = tmp_path_factory.mktemp("mixed") / "root"
    with tarfile.open(Path(__file__).parent / "store/fixtures/mixed_root.tar.xz") as archive:
        for member in archive:
            path = root / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            file = archive.extractfile(member)
            assert file is not None
            path.write_bytes(file.read())
    return root


@pytest.fixture
def mixed(mixed_root: Path, cache_root: Path) -> Path:
    """A copy of that root, in force for the test's commands."""
    shutil.copytree(mixed_root, cache_root)
    return cache_root


@pytest.fixture
def run(cache_root: Path, tmp_path: Path) -> Callable[..., Ran]:
    """Run a command in a process of its own, in an empty directory."""

    def run(
        command: list[str],
        *,
        env: dict[str, str] | None = None,
        timeout: float = 300,
        **kwargs: Any,
    ) -> Ran:
        kwargs.setdefault("cwd", tmp_path)
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            check=False,
            **kwargs,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def tlcache(run: Callable[..., Ran]) -> Callable[..., Ran]:
    """Run `tlcache` with arguments."""
    return lambda *args, **kwargs: run([*TLCACHE, *map(str, args)], **kwargs)


@pytest.fixture
def python(run: Callable[..., Ran]) -> Callable[..., Ran]:
    """Run Python source in a fresh process."""
    return lambda source, *args, **kwargs: run([sys.executable, "-c", source, *args], **kwargs)


@pytest.fixture
def shapes(tmp_path: Path) -> Callable[..., Path]:
    """Write a shapes.json of workloads (or of any document), and return its path."""

    def write(*workloads: dict[str, Any], document: Any = None, **fields: Any) -> Path:
        path = tmp_path / "shapes.json"
        path.write_text(
            json.dumps(document or {"version": 1, "workloads": list(workloads), **fields})
        )
        return path

    return write


@pytest.fixture
def trial_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the package of `tests/warm/trial_op.py` for the processes that a test starts."""
    place = tmp_path / "installed"
    metadata = place / "trial_op-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: trial-op\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tlcache.ops]\ntrial = trial_op:OPERATORS\n")
    shutil.copy(Path(__file__).parent / "warm" / "trial_op.py", place)
    known = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), *known]))
    return place


def _has_nvcc() -> bool:
    return shutil.which("nvcc") is not None or os.path.exists("/usr/local/cuda/bin/nvcc")


def _has_gpu() -> bool:
    try:
        import ctypes

        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return (
        cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu, nvcc = _has_gpu(), _has_nvcc()
    for item in items:
        if "gpu" in item.keywords and not gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
        if "nvcc" in item.keywords and not nvcc:
            item.add_marker(pytest.mark.skip(reason="no nvcc here"))
