"""The import tiers, and the architecture's list of folders, held to what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

STORE = [
    "tlcache", "tlcache.spec", "tlcache.targets", "tlcache.closure", "tlcache.modules",
    "tlcache.fingerprint",
    "tlcache.operators", "tlcache.errors", "tlcache.store.layout", "tlcache.store.entry",
    "tlcache.store.record", "tlcache.store.trust", "tlcache.store.locks",
    "tlcache.store.closures", "tlcache.store.files", "tlcache.cli",
    "tlcache.cli.ls", "tlcache.cli.inspect", "tlcache.cli.warm", "tlcache.warm.shapes",
    "tlcache.warm.plan", "tlcache.warm.pool", "tlcache.warm.toolchain", "ops", "ops.catalog",
]  # fmt: skip


def _brought(python, module: str) -> set[str]:
    done = python(
        f"import {module}, sys\n"
        "heavy = {'torch', 'tilelang', 'tvm', 'tvm_ffi'}\n"
        "print(*heavy & {name.partition('.')[0] for name in sys.modules})"
    )
    assert done.code == 0, done.err
    return set(done.out.split())


@pytest.mark.parametrize("module", STORE)
def test_the_store_tier_brings_neither_torch_nor_tilelang(python, module):
    assert _brought(python, module) == set()


@pytest.mark.parametrize("module", ["tlcache.runtime", "ops.norms", "ops.kernels.rms_norm"])
def test_the_runtime_tier_does_not_bring_tilelang(python, module):
    assert _brought(python, module) <= {"torch"}


def test_every_module_of_the_packages_is_in_a_tier():
    compile_tier = {"tlcache.warm.compiling", "tlcache.warm.worker"}
    runtime_tier = {"tlcache.runtime", "ops.norms", "ops.op", "ops.boundary", "ops.kernels"}
    for path in [*ROOT.glob("tlcache/**/*.py"), *ROOT.glob("ops/**/*.py")]:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        known = {*STORE, *compile_tier, *runtime_tier, "tlcache.store", "tlcache.warm"}
        known |= {"tlcache.cli.render", "tlcache.cli.options", "tlcache.warm.outcome"}
        assert name in known or name.startswith(("tlcache.runtime.", "ops.kernels.")), name


def test_the_architecture_lists_the_folders_that_there_are():
    listed = set(re.findall(r"^\| `([\w/]+)/` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.M))
    packages = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("*/**/__init__.py")}
    tops = {
        path.name
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith((".", "_"))
    }
    tops -= {"build", "dist"}
    tops = {name for name in tops if not name.endswith(".egg-info")}
    assert listed == packages | tops
