"""Launchers: which of TileLang's libraries a kernel needs, found in the kernel itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.environment import clean_environment
from tlcache import operators, targets
from tlcache.runtime import launcher
from tlcache.store import record

pytestmark = pytest.mark.nvcc
SM90 = targets.parse("sm90")
WORKLOADS = {
    "gemm": {"M": 128, "N": 256, "K": 256},
    "rms_norm": {"M": 4, "N": 256},
}


def spec(name):
    return operators.get(name).spec(WORKLOADS[name], SM90)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A root with a gemm, which copies by TMA, and an rms_norm, which does not, for sm_90a."""
    place = tmp_path_factory.mktemp("launched")
    workloads = [{"op": name, **values} for name, values in WORKLOADS.items()]
    (place / "shapes.json").write_text(json.dumps({"version": 1, "workloads": workloads}))
    kept = clean_environment()
    command = [sys.executable, "-c", "from tlcache.cli import main; main()", "warm"]
    subprocess.run(
        [*command, "--shapes", "shapes.json", "--target", "sm_90a"],
        cwd=place,
        env={**kept, "TILELANG_CACHE_DIR": str(place / "cache")},
        check=True,
        capture_output=True,
    )
    return place / "cache"


@pytest.mark.parametrize(("name", "calls"), [("gemm", True), ("rms_norm", False)])
def test_that_a_kernel_calls_tilelangs_library_is_seen_in_its_own(root, name, calls):
    found = record.read(root, spec(name).action_key())
    assert launcher._calls_tilelang(record.sound_library(root, found)) is calls


# Restores kernels, says which of TileLang's libraries are loaded, then compiles one for the CPU.
RESTORE = """
import json, sys, torch
from tlcache import operators, runtime, targets

def loaded():
    with open("/proc/self/maps") as maps:
        text = maps.read()
    return [name in text for name in ("libtvm_runtime", "libtilelang.so")]

gpu, told = targets.parse("sm90"), []
for name, values in json.loads(sys.argv[1]):
    launcher = runtime.resolve(operators.get(name).spec(values, gpu), on_miss="error")
    told.append([name, launcher.origin, callable(launcher.call), *loaded()])
assert not {"tilelang", "tvm"} & set(sys.modules)
import tilelang
spec = operators.get("rms_norm").spec({"M": 3, "N": 64, "dtype": "float32"}, targets.CPU)
launcher = runtime.resolve(spec)
x, w = torch.randn(3, 64), torch.randn(64)
want = torch.nn.functional.rms_norm(x, (64,), w, 1e-6)
torch.testing.assert_close(launcher(x, w), want, rtol=1e-5, atol=1e-6)
print("RESULT " + json.dumps([told, launcher.origin]))
"""


def test_tilelangs_library_is_loaded_for_a_kernel_that_calls_it_and_tilelang_works_after_that(
    python, root, cache_root
):
    import shutil

    shutil.copytree(root, cache_root)
    wanted = [[name, WORKLOADS[name]] for name in ("rms_norm", "gemm")]
    ran = python(RESTORE, json.dumps(wanted))
    assert ran.code == 0, ran.err
    assert json.loads(ran.out.rpartition("RESULT ")[2]) == [
        [["rms_norm", "restored", True, True, False], ["gemm", "restored", True, True, True]],
        "compiled",
    ]
