"""Several roots: the first is written to, what it lacks is read from the others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import clean_environment
from tlcache import operators, targets
from tlcache.errors import MissError, UntrustedRootError
from tlcache.runtime import Resolver
from tlcache.store import layout, roots

TLCACHE = [sys.executable, "-c", "from tlcache.cli import main; main()"]


def workload(*rows: int) -> dict:
    return {"op": "rms_norm", "M": list(rows), "N": 64, "dtype": "float32"}


def spec(rows: int):
    fields = {"M": rows, "N": 64, "dtype": "float32"}
    return operators.get("rms_norm").spec(fields, targets.CPU)


def tree(root: Path) -> dict:
    return {path: path.stat().st_mtime_ns for path in [root, *root.rglob("*")]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root that has one kernel; and one over it that has another."""
    place = tmp_path_factory.mktemp("made")
    kept = clean_environment()
    several = {"TLCACHE_ROOTS": f"{place / 'unused'}:{place / 'baked'}"}
    for rows, options in ((1, []), (2, ["--overlay", "overlay"])):
        document = {"version": 1, "targets": ["cpu"], "workloads": [workload(1, rows)]}
        (place / "shapes.json").write_text(json.dumps(document))
        subprocess.run(
            [*TLCACHE, "warm", "--shapes", "shapes.json", *options],
            cwd=place,
            env={**kept, **(several if options else {"TILELANG_CACHE_DIR": str(place / "baked")})},
            check=True,
            capture_output=True,
        )
    return place


@pytest.fixture
def both(made, cache_root, tmp_path, monkeypatch) -> tuple[Path, Path]:
    """Copies of both, in force."""
    overlay, baked = tmp_path / "overlay", tmp_path / "baked"
    shutil.copytree(made / "overlay", overlay)
    shutil.copytree(made / "baked", baked)
    monkeypatch.setenv("TLCACHE_ROOTS", f"{overlay}:{baked}")
    return overlay, baked


def test_what_is_new_is_written_to_the_overlay_and_nothing_twice(made):
    assert [len(list(layout.records(made / name))) for name in ("overlay", "baked")] == [1, 1]
    assert [len(list(layout.entries(made / name))) for name in ("overlay", "baked")] == [1, 1]
    assert not (made / "unused").exists()


def test_ls_and_inspect_and_diff_know_the_kernels_of_all_roots(tlcache, both):
    overlay, baked = both
    told = tlcache("ls", "--json").json
    assert (told["root"], told["below"]) == (str(overlay), [str(baked)])
    assert sorted(one["workload"]["M"] for one in told["entries"]) == [1, 2]
    shown = tlcache("ls").out
    assert str(overlay) in shown and str(baked) in shown
    keys = [one["key"] for one in told["entries"]]
    assert [tlcache("inspect", key).code for key in keys] == [0, 0]
    assert tlcache("diff", *keys).code == 0
    assert len(tlcache("ls", "--json", "--cache-dir", baked).json["entries"]) == 1


def test_why_and_a_check_find_what_any_root_has(tlcache, both, shapes):
    path = shapes(workload(1, 2), targets=["cpu"])
    assert tlcache("warm", "--shapes", path, "--check").code == 0
    ran = tlcache("why", "--shapes", path, "--json")
    assert (ran.code, ran.json["summary"]["hits"]) == (0, 2), ran.out
    ran = tlcache("why", "rms_norm", "M=3", "N=64", "dtype=float32", "--target", "cpu")
    assert ran.code == 1
    assert "no record of this workload; there are M=1" in ran.out and "M=2" in ran.out


def test_verify_looks_at_all_roots_and_repairs_the_first_only(tlcache, both):
    for root in both:
        library = next(root.rglob("kernel_lib.so"))
        library.write_bytes(library.read_bytes()[:-1] + b"\1")
    ran = tlcache("verify", "--repair", "--json")
    assert ran.code == 1
    found = {one["path"]: one["quarantined"] for one in ran.json["findings"]}
    assert {path.startswith(str(both[1])): moved is None for path, moved in found.items()} == {
        False: False,
        True: True,
    }


def test_prune_touches_the_first_root_only(tlcache, both):
    overlay, baked = both
    before = tree(baked)
    ran = tlcache("prune", "--target", "cpu", "--yes")
    assert ran.code == 0, ran.err
    assert not list(layout.records(overlay))
    assert tree(baked) == before


def test_a_resolver_restores_from_any_root_and_writes_to_none_below(both):
    overlay, baked = both
    before = tree(baked)
    resolver = Resolver(overlay, [baked])
    assert [resolver.resolve(spec(rows)).origin for rows in (1, 2)] == ["restored"] * 2
    assert tree(baked) == before
    with pytest.raises(MissError, match=f"not in the cache {overlay}:{baked}"):
        resolver.resolve(spec(3), on_miss="error")


def test_a_lower_root_that_others_can_write_is_refused_too(both):
    overlay, baked = both
    baked.chmod(0o777)
    with pytest.raises(UntrustedRootError, match=str(baked)):
        Resolver(overlay, [baked]).lookup(spec(1))


def test_what_a_process_compiles_goes_to_the_first_root(python, both):
    overlay, baked = both
    before = tree(baked)
    done = python(
        "import os\n"
        "from tlcache import operators, runtime, targets\n"
        "wanted = operators.get('rms_norm').spec("
        "{'M': 5, 'N': 64, 'dtype': 'float32'}, targets.CPU)\n"
        "print(runtime.resolve(wanted).origin, os.environ['TILELANG_CACHE_DIR'])\n"
    )
    assert done.out.splitlines()[-1].split() == ["compiled", str(overlay)], done.err
    assert os.path.exists(layout.record_path(overlay, spec(5).action_key()))
    assert tree(baked) == before


FOREIGN = """
import os, tilelang, tilelang.language as T, torch

@tilelang.jit(out_idx=[-1])
def twice(N):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(1):
            for i in T.serial(N):
                B[i] = A[i] * 2
    return main

if __name__ == "__main__":
    assert torch.equal(twice(4)(torch.ones(4)), torch.full((4,), 2.0))
    from tlcache import runtime
    print(runtime.counters().disk, runtime.counters().compiled)
"""


def test_a_programs_own_kernel_is_brought_from_a_lower_root_for_tilelang(
    tlcache, cache_root, tmp_path
):
    (tmp_path / "foreign.py").write_text(FOREIGN)
    target = {"TILELANG_DEFAULT_TARGET": "c"}
    program = ["--", sys.executable, "foreign.py"]
    first = tlcache("run", *program, env=target)
    assert first.out.splitlines()[-1] == "0 1", first.err
    before, overlay = tree(cache_root), tmp_path / "overlay"
    strict = ("run", "--overlay", overlay, "--on-compile", "error", "--from", "start")
    restored = tlcache(*strict, *program, env=target)
    assert restored.out.splitlines()[-1] == "0 0", restored.err
    assert list(layout.entries(overlay)) == []
    ran = tlcache(*strict, "--no-restore", *program, env=target)
    assert ran.out.splitlines()[-1] == "1 0", ran.err
    assert tree(cache_root) == before
    (entry,) = layout.entries(overlay)
    (original,) = layout.entries(cache_root)
    copies = {path.name: path.read_bytes() for path in entry.path.iterdir()}
    assert copies == {path.name: path.read_bytes() for path in original.path.iterdir()}


def test_the_variable_names_roots_once_and_passes_over_nothing(monkeypatch):
    monkeypatch.setenv("TILELANG_CACHE_DIR", "/alone")
    assert roots.chain() == [Path("/alone")]
    monkeypatch.setenv("TLCACHE_ROOTS", ":/a::/b:/a:")
    assert roots.chain() == [Path("/a"), Path("/b")]
    assert layout.default_root() == "/a"
    assert roots.chain("/c") == [Path("/c")]
    environment = dict(os.environ)
    roots.adopt(environment)
    assert environment["TILELANG_CACHE_DIR"] == "/a"
    assert roots.overlaid("/o", ["/a", "/o"]) == "/o:/a"
