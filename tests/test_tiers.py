"""The import tiers, and the architecture's list of folders, held to what the code does."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

STORE = [
    "tlcache.switches",
    "tlcache", "tlcache.spec", "tlcache.targets", "tlcache.closure", "tlcache.modules",
    "tlcache.fingerprint",
    "tlcache.operators", "tlcache.errors", "tlcache.agent", "tlcache.sources",
    "tlcache.store.sockets", "tlcache.store.layout", "tlcache.store.entry", "tlcache.store.filings",
    "tlcache.store.record", "tlcache.store.trust", "tlcache.store.locks",
    "tlcache.store.closures", "tlcache.store.files", "tlcache.cli",
    "tlcache.cli.ls", "tlcache.cli.inspect", "tlcache.cli.signals", "tlcache.cli.warm",
    "tlcache.store.roots", "tlcache.store.coverage", "tlcache.warm.document", "tlcache.warm.ahead",
    "tlcache.warm.covering", "tlcache.warm.descendants", "tlcache.warm.sibling",
    "tlcache.warm.shapes", "tlcache.warm.plan", "tlcache.warm.pool",
    "tlcache.warm.comparing", "tlcache.warm.toolchain",
    "ops", "ops.catalog", "ops.triton",
    "tlcache.store.scan", "tlcache.store.scan_cache", "tlcache.store.binary", "tlcache.store.elf",
    "tlcache.store.device_code", "tlcache.store.params", "tlcache.store.pickled",
    "tlcache.store.select", "tlcache.store.machine_code", "tlcache.store.sources",
    "tlcache.store.disk_usage", "tlcache.cli.tree", "tlcache.cli.disassembly", "tlcache.cli.diff",
    "tlcache.cli.du",
    "tlcache.store.schedules", "tlcache.cli.tune", "tlcache.warm.tuning",
    "tlcache.store.digests", "tlcache.store.checkup", "tlcache.version_key", "tlcache.doctor",
    "tlcache.why", "tlcache.cli.key", "tlcache.cli.env", "tlcache.cli.doctor", "tlcache.cli.why",
    "tlcache.store.verify", "tlcache.store.soundness", "tlcache.store.opened",
    "tlcache.store.own_files", "tlcache.store.exposure", "tlcache.store.trash",
    "tlcache.cli.verify",
    "tlcache.store.prune", "tlcache.store.removal", "tlcache.store.candidates",
    "tlcache.config", "tlcache.settings", "tlcache.cli.config", "tlcache.units",
    "tlcache.units.rendering", "tlcache.units.files", "tlcache.units.manager",
    "tlcache.cli.daemon", "tlcache.cli.daemon_units", "tlcache.cli.daemon_status",
    "tlcache.store.mapped", "tlcache.store.mounts", "tlcache.store.evictions", "tlcache.cli.prune",
    "tlcache.arguments", "tlcache.recorded", "tlcache.bootstrap", "tlcache.bootstrap.sitecustomize",
    "tlcache.cli.run", "tlcache.cli.ahead", "tlcache.cli.record",
    "tlcache.models", "tlcache.models.config", "tlcache.models.parts", "tlcache.models.document",
    "tlcache.cli.shapes", "tlcache.agents", "tlcache.readings", "tlcache.advice",
    "tlcache.cli.stats", "tlcache.cli.top", "tlcache.cli.view", "tlcache.cli.overview",
    "tlcache.cli.single", "tlcache.cli.live", "tlcache.cli.outside", "tlcache.store.outside",
    "tlcache.store.archive", "tlcache.store.archive.tar", "tlcache.store.archive.index",
    "tlcache.store.archive.whole", "tlcache.store.archive.choosing",
    "tlcache.store.archive.writing", "tlcache.store.archive.filed",
    "tlcache.store.archive.packing", "tlcache.store.archive.incoming",
    "tlcache.store.archive.admitting",
    "tlcache.store.archive.reading", "tlcache.store.archive.publishing",
    "tlcache.store.archive.compatible", "tlcache.store.archive.signatures",
    "tlcache.store.archive.remote",
    "tlcache.store.archive.staging", "tlcache.store.archive.sending",
    "tlcache.store.archive.receiving",
    "tlcache.cli.export", "tlcache.cli.import_",
    "tlcache.store.archive.shard", "tlcache.cli.share", "tlcache.warm.shards",
    "tlcache.warm.schedulers", "tlcache.warm.costs",
    "tlcache.daemon", "tlcache.daemon.bounds", "tlcache.daemon.broadcast", "tlcache.daemon.follow",
    "tlcache.daemon.history", "tlcache.daemon.index", "tlcache.daemon.inotify",
    "tlcache.daemon.life", "tlcache.daemon.listening", "tlcache.daemon.notify",
    "tlcache.daemon.root", "tlcache.daemon.service", "tlcache.daemon.single",
    "tlcache.daemon.tally", "tlcache.daemon.watch", "tlcache.cli.daemon", "tlcache.cli.daemon_run",
    "tlcache.store.described", "tlcache.daemon.api", "tlcache.daemon.cached",
    "tlcache.daemon.changing", "tlcache.daemon.children", "tlcache.daemon.guard",
    "tlcache.daemon.jobs", "tlcache.daemon.listing", "tlcache.daemon.metrics",
    "tlcache.daemon.openapi", "tlcache.daemon.peers", "tlcache.daemon.reading",
    "tlcache.daemon.routes", "tlcache.daemon.schemas", "tlcache.daemon.served",
    "tlcache.daemon.server", "tlcache.daemon.serving", "tlcache.daemon.stream",
    "tlcache.store.calls", "tlcache.store.answers", "tlcache.unrestored", "tlcache.warm.questions",
    "tlcache.cli.warmed", "tlcache.cli.warming",
]  # fmt: skip
RUNTIME = [
    "tlcache.runtime", "tlcache.runtime.hooks", "tlcache.runtime.recorder",
    "tlcache.runtime.garbage",
    "tlcache.runtime.foreign", "tlcache.runtime.foreign.accelerate", "tlcache.runtime.foreign.key",
    "tlcache.runtime.foreign.reach", "tlcache.runtime.foreign.text",
    "tlcache.runtime.foreign.outside", "tlcache.runtime.foreign.telling",
    "tlcache.runtime.foreign.call", "tlcache.runtime.foreign.language",
    "tlcache.runtime.foreign.mode", "tlcache.runtime.foreign.names",
    "tlcache.runtime.foreign.objects", "tlcache.runtime.foreign.place",
    "tlcache.runtime.foreign.source", "tlcache.runtime.foreign.stream",
    "tlcache.runtime.foreign.texts", "tlcache.runtime.foreign.trouble",
    "tlcache.runtime.foreign.explaining",
    "ops.norms", "ops.activations", "ops.rotary", "ops.linear", "ops.op",
    "ops.boundary", "ops.inputs", "ops.jit_cache", "ops.triton.rms_norm", "ops.kernels",
]  # fmt: skip
COMPILE = [
    "tlcache.warm.compiling", "tlcache.warm.worker", "tlcache.warm.measuring",
    "tlcache.warm.replaying", "tlcache.warm.pretending", "tlcache.warm.preloaded",
    "tlcache.warm.asking",
    "tlcache.runtime.foreign.kernel", "tlcache.runtime.foreign.template",
    "tlcache.runtime.foreign.deferring", "tlcache.runtime.foreign.answering",
    "tlcache.runtime.foreign.hooked",
]  # fmt: skip


def _brought(python, modules, heavy, first="") -> dict[str, list[str]]:
    """What of some packages each module brings, imported in a fork of one process."""
    done = python(
        f"import importlib, os, sys\n{first}\n"
        "for name in sys.argv[1:]:\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        importlib.import_module(name)\n"
        "        roots = {one.partition('.')[0] for one in sys.modules}\n"
        f"        print(name, *sorted(roots & set({heavy})), flush=True)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0, name\n",
        *modules,
    )
    assert done.code == 0, done.err
    told = [line.split() for line in done.out.splitlines()]
    return {name: brought for name, *brought in told}


def test_no_module_of_the_store_tier_brings_torch_or_tilelang(python):
    heavy = ["torch", "tilelang", "tvm", "tvm_ffi"]
    assert _brought(python, STORE, heavy) == {name: [] for name in STORE}


def test_what_the_daemon_needs_is_brought_by_no_other_command(python):
    commands = [path.stem for path in ROOT.glob("tlcache/cli/[a-z]*.py")]
    done = python(
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(f'tlcache.cli.{name}')\n"
        "print(*{'aiohttp', 'prometheus_client', 'watchdog'} & set(sys.modules))",
        *commands,
    )
    assert done.code == 0, done.err
    assert done.out.split() == []


def test_no_module_of_the_runtime_tier_brings_tilelang(python):
    # They may bring torch, and importing that takes two seconds.
    kernels = [f"ops.kernels.{path.stem}" for path in ROOT.glob("ops/kernels/[a-z]*.py")]
    names = [*RUNTIME, *kernels]
    heavy = ["tilelang", "tvm", "tvm_ffi"]
    assert _brought(python, names, heavy, first="import torch") == {name: [] for name in names}


def test_the_triton_kernel_is_brought_only_by_its_own_module(python):
    assert "triton" not in python("import sys, ops.triton; print(*sys.modules)").out.split()


def test_every_module_of_the_packages_is_in_a_tier():
    for path in [*ROOT.glob("tlcache/**/*.py"), *ROOT.glob("ops/**/*.py")]:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        known = {*STORE, *COMPILE, *RUNTIME, "tlcache.store", "tlcache.warm"}
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
