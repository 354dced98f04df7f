"""`tlcache why` of kernels that a program has of its own `@tilelang.jit`, warmed once and edited in
many ways; and what a warm says of such kernels.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import clean_environment
from tlcache.store import calls, files, layout
from tlcache.store.answers import Answer, Style, Warmed

TLCACHE = [sys.executable, "-c", "from tlcache.cli import main; main()"]

# One for each case. Each is another program, by its `term`: equal functions have one key.
MODULE = """\
import functools
import torch
import tilelang
import tilelang.language as T
from settings_{name} import doubled, OFFSET

CONFIGS = {{"tl.disable_warp_specialized": True}}
FLAGS = ["-O1"]


def lazy(n, bias=1.0):
    @tilelang.jit(out_idx=[-1], target="c", pass_configs=CONFIGS, compile_flags=FLAGS)
    def kernel(by=bias):
        @T.prim_func
        def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
            with T.Kernel(1) as _:
                for i in T.serial(n):
                    Y[i] = doubled(X[i]) + OFFSET + by + {term}
        return main
    return kernel


@tilelang.jit(target="c")
def eager(X):
    N = T.const("N")
    X: T.Tensor[[N], "float32"]
    Y = T.empty((N,), "float32")
    with T.Kernel(1) as _:
        for i in T.serial(N):
            Y[i] = X[i] + OFFSET + {term}
    return Y


@tilelang.jit(target="c")
def scalar(n):
    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), a: T.float32):
        with T.Kernel(1) as _:
            for i in T.serial(n):
                X[i] = X[i] * a
    return main


def several(n):
    return scalar(n), scalar(n + 1)


@tilelang.autotune(configs=[dict(by=1.0), dict(by=2.0)])
@tilelang.jit(out_idx=[-1], target="c")
def tuned(n, by=1.0):
    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(n):
                Y[i] = X[i] * by
    return main


@tilelang.jit(out_idx=[-1], target="c")
def random(n):
    by = float(torch.ones(1))
    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(n):
                Y[i] = X[i] * by
    return main


@functools.cache
def compiled(n):
    @T.prim_func
    def main(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(1) as _:
            for i in T.serial(n):
                Y[i] = X[i] + 1.0
    return tilelang.compile(main, out_idx=[-1], target="c")
"""
SETTINGS = """\
OFFSET = 10.0


def twice():
    return 2.0


def doubled(x):
    return x * twice()
"""
VECTOR = {"$tensor": {"shape": [8], "dtype": "float32"}}
FACTORIES = {
    "lazy": {"n": 8},
    "eager": {"X": VECTOR},
    "scalar": {"n": 8},
    "tuned": {"n": 8, "by": 2.0},
    "random": {"n": 8},
    "compiled": {"n": 8},
}
CONFIGURED = (
    'it was compiled with the pass configs {{"tl.disable_warp_specialized": {}}}, and is asked for '
    'with {{"tl.disable_warp_specialized": {}}}'
)
# The case: its factory, what is edited, what is said. Each is another module, compiled once.
EDITS = {
    "comment": ("lazy", ("module", "FLAGS =", "# no edit\nFLAGS ="), "hit", ""),
    "helper": (
        "lazy", ("settings", "return 2.0", "return 3.0"), "source",
        "settings_helper:twice has changed",
    ),
    "constant": (
        "lazy", ("settings", "OFFSET = 10.0", "OFFSET = 11.0"), "source",
        "m_constant.OFFSET was 10.0 and is 11.0",
    ),
    "imported": (
        "eager", ("settings", "OFFSET = 10.0", "OFFSET = 11.0"), "source",
        "m_imported.OFFSET was 10.0 and is 11.0",
    ),
    "body": (
        "lazy", ("module", "+ OFFSET + by", "- OFFSET + by"), "source",
        "m_body:lazy.kernel has changed",
    ),
    "configs": (
        "lazy", ("module", "specialized\": True", "specialized\": False"), "pass configs",
        CONFIGURED.format("true", "false"),
    ),
    "flags": (
        "lazy", ("module", '["-O1"]', '["-O2"]'), "compile flags",
        "it was compiled with the flags ['-O1'], and is asked for with ['-O2']",
    ),
    "broken": (
        "lazy", ("module", "import functools", "import no_such_module"), "failed",
        "No module named 'no_such_module'",
    ),
    "elsewhere": (
        "lazy", ("module", "    return kernel\n", "    return 7\n"), "failed",
        "yields a int, which is not a TileLang kernel",
    ),
}  # fmt: skip


NAMES = ["plain", *EDITS]
WARMED = ["plain", *(name for name in EDITS if EDITS[name][2] != "failed")]
TOTAL = len(FACTORIES) + len(WARMED) - 1


def wanted(name: str) -> list[dict]:
    factories = FACTORIES if name == "plain" else {EDITS[name][0]: FACTORIES[EDITS[name][0]]}
    return [{"kernel": f"m_{name}:{one}", "args": args} for one, args in factories.items()]


@pytest.fixture(scope="module")
def once(tmp_path_factory) -> tuple[Path, str]:
    """The modules, a document of all their kernels, a root that was warmed of it, and the screen of
    that.
    """
    place = tmp_path_factory.mktemp("own")
    for index, name in enumerate(NAMES):
        (place / f"m_{name}.py").write_text(MODULE.format(name=name, term=f"{index}.0"))
        (place / f"settings_{name}.py").write_text(SETTINGS)
    write(place / "all.json", [one for name in NAMES for one in wanted(name)])
    write(place / "warm.json", [one for name in WARMED for one in wanted(name)])
    write(place / "plain.json", wanted("plain"))
    ran = subprocess.run(
        [*TLCACHE, "warm", "--shapes", "warm.json", "--cache-dir", "cache"],
        cwd=place,
        env=clean_environment(),
        text=True,
        capture_output=True,
    )
    assert ran.returncode == 0, ran.stderr
    return place, ran.stdout + ran.stderr


def write(path: Path, workloads: list[dict]) -> None:
    path.write_text(json.dumps({"version": 1, "targets": ["cpu"], "workloads": workloads}))


@pytest.fixture
def own(once, cache_root, tmp_path):
    """A copy of it all, in force for the test's commands."""
    shutil.copytree(once[0] / "cache", cache_root)
    for path in [*once[0].glob("*.py"), *once[0].glob("*.json")]:
        shutil.copy2(path, tmp_path)
    return cache_root


def filed(root: Path, kernel: str) -> tuple[str, Path, Answer]:
    """The one call of a factory."""
    for key, path in calls.all_of(root):
        _, found = calls.decode(files.read(path))
        if isinstance(found, Answer) and found.kernel == kernel:
            return key, Path(path), found
    raise AssertionError(kernel)


def test_a_warm_says_by_what_a_start_will_get_each_kernel(once, own, tlcache):
    said = once[1]
    assert f"{TOTAL} kernels  {TOTAL} compiled  0 already there  0 failed" in said
    assert f"Restored without tracing: {TOTAL - 2} by call." in said
    assert "Traced at each start: 2, which only TileLang can load." in said
    assert "traced: 1, since it uses torch.ones" in said
    assert "traced: 1, since `tilelang.compile` of a prim_func" in said
    again = tlcache("warm", "--shapes", "warm.json")
    assert again.code == 0 and f"0 compiled  {TOTAL} already there" in again.out
    assert f"Restored without tracing: {TOTAL - 2} by call." in again.out
    checked = tlcache("warm", "--shapes", "plain.json", "--check", "--json")
    assert checked.code == 0
    expected = {
        f"m_plain:{name}": "tilelang" if name in ("random", "compiled") else "call"
        for name in FACTORIES
    }
    assert {one["kernel"]: one["way"] for one in checked.json["kernels"]} == expected
    layers = {"TLCACHE_ROOTS": f"{own.parent / 'first'}{os.pathsep}{own}"}
    below = tlcache("warm", "--shapes", "plain.json", "--check", "--json", env=layers)
    assert below.code == 0, below.out + below.err
    assert {one["kernel"]: one["way"] for one in below.json["kernels"]} == expected


def test_each_edit_is_told_by_what_it_changed_and_nothing_else_is(own, tlcache, tmp_path):
    for name, (_, (which, before, after), _, _) in EDITS.items():
        path = tmp_path / f"{'m' if which == 'module' else 'settings'}_{name}.py"
        text = path.read_text()
        assert text.count(before) == 1
        path.write_text(text.replace(before, after))
    ran = tlcache("why", "--shapes", "all.json", "--json")
    assert ran.code == 1, ran.err
    told = {one["kernel"]: one for one in ran.json["kernels"]}
    for name, (factory, _, cause, detail) in EDITS.items():
        one = told[f"m_{name}:{factory}"]
        assert one["cause"] == cause, one
        assert detail in one["detail"]
        if cause not in ("hit", "failed"):
            assert one["detail"] == detail and one["loadable"] and one["nearest"]
            assert len(one["differences"]) == 1
    for factory in ("lazy", "eager", "scalar", "tuned"):
        assert told[f"m_plain:{factory}"]["cause"] == "hit"
    for factory, why in (("random", "it uses torch.ones"), ("compiled", "of a prim_func")):
        one = told[f"m_plain:{factory}"]
        assert one["cause"] == "not restorable" and one["loadable"] and why in one["detail"]


def test_files_that_are_damaged_or_gone_are_told_and_mended_by_a_warm(own, tlcache):
    lazy, scalar = filed(own, "m_plain:lazy")[1], filed(own, "m_plain:scalar")[1]
    eager, tuned = filed(own, "m_plain:eager")[2], filed(own, "m_plain:tuned")[2]
    lazy.write_bytes(lazy.read_bytes().replace(b"cython", b"cythom"))
    library = own / eager.entry / eager.library.name
    library.write_bytes(library.read_bytes()[:-1])
    scalar.unlink()
    shutil.rmtree(own / tuned.entry)
    ran = tlcache("why", "--shapes", "plain.json")
    assert ran.code == 1
    assert f"its call {lazy} fails its checksum" in ran.out
    assert f"its library {library} is not what its call says" in ran.out
    assert "no call of m_plain:scalar is filed" in ran.out
    assert "its call is there, and its entry" in ran.out
    assert "4 of 6 kernels are missing" in ran.err and "traces 2 more" in ran.err
    assert "`tlcache warm --shapes plain.json` compiles what is missing" in ran.err
    warmed = tlcache("warm", "--shapes", "plain.json")
    assert warmed.code == 0, warmed.err
    again = tlcache("why", "--shapes", "plain.json")
    assert again.code == 0, again.out
    assert "6 kernels, all there, of which TileLang traces 2 at each start" in again.err


def test_a_pruned_kernel_another_workload_and_a_variable_are_told(own, tlcache, tmp_path):
    assert tlcache("prune", "--kernel", "tuned", "--yes").code == 0
    write(
        tmp_path / "some.json",
        [
            {"kernel": "m_plain:lazy", "args": {"n": [8, 9]}},
            {"kernel": "m_plain:eager", "args": {"X": VECTOR}},
            {"kernel": "m_plain:tuned", "args": FACTORIES["tuned"]},
            {"kernel": "m_plain:several", "args": {"n": 8}},
        ],
    )
    ran = tlcache("why", "--shapes", "some.json", "--json", env={"NVCC_APPEND_FLAGS": "-lineinfo"})
    eight, nine, eager, tuned, several = ran.json["kernels"]
    for one in (eight, eager):
        assert one["cause"] == "variable"
        assert "NVCC_APPEND_FLAGS=-lineinfo" in one["detail"]
    assert nine["cause"] == "no record"
    assert nine["detail"] == "no call with these arguments is filed; there are by=1.0 n=8"
    assert several["cause"] == "failed" and "yields a tuple" in several["detail"]
    assert tuned["cause"] == "evicted" and "`tlcache prune` deleted it" in tuned["detail"]


def test_a_call_that_a_lower_root_has_is_there(own, tlcache, tmp_path):
    first = tmp_path / "first"
    layout.make_skeleton(first, "0.1.15", "linux-x86_64")
    layers = {"TLCACHE_ROOTS": f"{first}{os.pathsep}{own}"}
    ran = tlcache("why", "m_plain:scalar", "n=8", "--json", env=layers)
    assert ran.code == 0, ran.out + ran.err
    (one,) = ran.json["kernels"]
    assert (one["cause"], one["root"]) == ("hit", str(own))


def test_inspect_says_that_a_call_restores_what_has_no_record(own, tlcache):
    _, _, answer = filed(own, "m_plain:scalar")
    assert "restored by what its call means" in tlcache("inspect", answer.key).out


def test_what_a_warm_came_to_is_swept_with_its_kernel(own):
    found = [calls.decode(files.read(path))[1] for _, path in calls.all_of(own)]
    warmed = [one for one in found if isinstance(one, Warmed)]
    assert len(warmed) == TOTAL
    shutil.rmtree(own / warmed[0].entry)
    assert calls.sweep(own) >= 1
    left = [calls.decode(files.read(path))[1] for _, path in calls.all_of(own)]
    assert all(isinstance(one, Style) or (own / one.entry).is_dir() for one in left)
