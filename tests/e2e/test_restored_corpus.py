"""The corpus, made anew, found on disk by TileLang, and restored: one kernel, however it came."""

from __future__ import annotations

import os
import sys

import pytest

from tlcache.store import calls, layout

PROGRAM = [sys.executable, "-m", "tests.corpus.program"]
GPU = '{"kind": "cuda", "arch": "sm_90a"}'
# Of each style one; the whole of it is for machines with a GPU, and for the benchmark.
COMPILED = [
    "relu", "max_and_sum", "rms_norm", "swizzled_matmul", "dynamic_matmul", "split_k_matmul",
    "causal_attention", "scaled_in_place", "eager_matmul", "eager_strided",
]  # fmt: skip


@pytest.fixture
def program(tlcache, request, tmp_path):
    """Run the corpus under `tlcache run`; what it tells."""

    def program(*words: str, env: dict[str, str] | None = None, command=("run", "--")):
        place = str(request.config.rootpath)
        told = {"TLCACHE_RUNTIME_DIR": str(tmp_path / "run"), "TILELANG_PRINT_ON_COMPILATION": "0"}
        ran = tlcache(*command, *PROGRAM, *words, env=told | (env or {}), cwd=place, timeout=900)
        assert ran.code == 0, ran.err
        return ran

    return program


def same(runs, names=("key", "outputs")):
    """That every kernel of some runs is the same in them."""
    first = runs[0].json["kernels"]
    for run in runs[1:]:
        kernels = run.json["kernels"]
        assert {n: [k.get(f) for f in names] for n, k in kernels.items()} == {
            n: [k.get(f) for f in names] for n, k in first.items()
        }
    return first


def all_restored(run, count):
    assert {kernel["class"] for kernel in run.json["kernels"].values()} == {"RestoredKernel"}
    counted = run.json["counted"]
    assert (counted["restored"], counted["disk"], counted["compiled"]) == (count, 0, 0)
    assert run.json["refused"] == {}
    assert "cannot be restored" not in run.err, run.err


def test_on_the_cpu_a_restored_kernel_gives_what_a_new_one_gives_bit_for_bit(program):
    cold = program("cpu", "launch")
    disk = program("cpu", "launch", command=("run", "--no-restore", "--"))
    restored = program("cpu", "launch")
    checked = program("cpu", "launch", env={"TLCACHE_CHECK": "1"})
    kernels = same([cold, disk, restored, checked])
    assert len(kernels) == 26
    assert cold.json["counted"]["compiled"] == disk.json["counted"]["disk"] == 26
    all_restored(restored, 26)
    all_restored(checked, 26)


@pytest.mark.nvcc
def test_for_a_gpu_that_is_not_here_restored_kernels_have_tilelangs_keys(program):
    env = {"TILELANG_DEFAULT_TARGET": GPU}
    cold = program("cuda", *COMPILED, env=env)
    restored = program("cuda", *COMPILED, env=env)
    checked = program("cuda", *COMPILED, env=env | {"TLCACHE_CHECK": "1"})
    assert len(same([cold, restored, checked])) == len(COMPILED)
    all_restored(restored, len(COMPILED))
    all_restored(checked, len(COMPILED))


def test_what_is_recorded_and_warmed_is_restored(program, tlcache, tmp_path, request):
    names = ["add", "softmax", "factory", "any_rows", "eager_scale", "relu"]
    record, root = tmp_path / "shapes.json", tmp_path / "second"
    first = program("cpu", "launch", *names, command=("run", "--record", record, "--"))
    again = program("cpu", *names, command=("run", "--record", tmp_path / "again.json", "--"))
    all_restored(again, len(names))
    assert (tmp_path / "again.json").read_text() == record.read_text()
    warm = ["warm", "--shapes", record, "--target", "cpu", "--cache-dir", root, "--json"]
    warmed = tlcache(*warm, cwd=str(request.config.rootpath), timeout=300)
    assert warmed.code == 0, warmed.err
    strict = ("run", "--on-compile", "error", "--from", "start", "--")
    restored = program(
        "cpu", "launch", *names, command=strict, env={"TILELANG_CACHE_DIR": str(root)}
    )
    same([first, restored])
    all_restored(restored, len(names))
    verified = tlcache("verify", "--json", "--cache-dir", root)
    assert verified.code == 0, verified.out


STRICT = ("run", "--on-compile", "error", "--from", "start", "--")


def restores(program, tlcache, root, names):
    """That a root restores kernels by calls, and nothing else has to be made; the run."""
    ran = program("cpu", "launch", *names, command=STRICT, env={"TILELANG_CACHE_DIR": str(root)})
    all_restored(ran, len(names))
    verified = tlcache("verify", "--json", "--cache-dir", root)
    assert verified.code == 0, verified.out
    return ran


def test_an_imported_root_restores_what_the_exported_one_does(
    program, tlcache, tmp_path, cache_root
):
    names = ["add", "eager_scale"]
    cold = program("cpu", "launch", *names)
    archive, root = tmp_path / "all.tar.zst", tmp_path / "imported"
    exported = tlcache("export", "-o", archive)
    assert "2 kernels  0 records  2 calls" in exported.out
    styles = sum(1 for _ in calls.all_of(cache_root)) - 2
    imported = tlcache("import", archive, "--json", "--cache-dir", root).json["imported"]
    told = (imported["kernel"], imported["call"], imported["style"], imported["record"])
    assert told == (2, 2, styles, 0)
    texts = {path.name for path in (cache_root / "tlcache" / "texts").rglob("*.json")}
    assert {path.name for path in (root / "tlcache" / "texts").rglob("*.json")} == texts
    assert imported["text"] == len(texts) > 0
    same([cold, restores(program, tlcache, root, names)])

    # By a filter: one of the two, and what its call needs.
    first, second = sorted(place.key for place in layout.entries(cache_root))
    for place in (*layout.entries(cache_root), *layout.entries(root)):
        if place.key == first:
            os.utime(place.location, (1_000_000_000, 1_000_000_000))
    some, old = tmp_path / "some.tar.zst", ("--older-than", "30d")
    exported = tlcache("export", "-o", some, *old, "--json")
    assert exported.code == 0, exported.err
    assert (exported.json["kernels"], exported.json["calls"]) == (1, 1)
    part = tmp_path / "part"
    assert tlcache("import", some, "--cache-dir", part).code == 0
    (chosen,) = [name for name in names if cold.json["kernels"][name]["key"] == first]
    restores(program, tlcache, part, [chosen])

    # And a kernel that goes from there takes its call along.
    pruned = tlcache("prune", *old, "--yes", "--cache-dir", root)
    assert pruned.code == 0, pruned.err
    assert [os.path.basename(entry) for entry in calls.uses(root)] == [second]
    assert tlcache("verify", "--cache-dir", root).code == 0


def test_shards_of_recorded_kernels_gathered_restore_all_of_them(
    program, tlcache, tmp_path, request
):
    names = ["add", "eager_scale"]
    record, root = tmp_path / "shapes.json", tmp_path / "gathered"
    first = program("cpu", "launch", *names, command=("run", "--record", record, "--"))
    warm = ["warm", "--shapes", record, "--target", "cpu", "--publish", tmp_path / "shards"]
    for number in (1, 2):
        host = ["--cache-dir", tmp_path / f"host{number}", "--shard", f"{number}/2"]
        warmed = tlcache(*warm, *host, cwd=str(request.config.rootpath), timeout=300)
        assert warmed.code == 0, warmed.err
    shards = sorted(os.listdir(tmp_path / "shards"))
    assert len(shards) == 2
    gathered = tlcache("import", f"{tmp_path}/shards/*.tar.zst", "--cache-dir", root, "--json")
    assert gathered.code == 0, gathered.err
    assert (gathered.json["imported"]["call"], gathered.json["lacking"]) == (2, [])
    same([first, restores(program, tlcache, root, names)])


def test_the_ranks_of_torchrun_restore_each_for_itself(program, tlcache, tmp_path, request):
    program("cpu", "add", "eager_scale")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--master-port", "0", "--redirects", "1", "--log-dir", str(tmp_path / "logs")]
    ran = tlcache(
        *("run", "--", *torchrun, "-m", "tests.corpus.program", "cpu", "add", "eager_scale"),
        env={"TLCACHE_RUNTIME_DIR": str(tmp_path / "run")},
        cwd=str(request.config.rootpath),
        timeout=300,
    )
    assert ran.code == 0, ran.err
    told = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
    assert [text.count('"class": "RestoredKernel"') for text in told] == [2, 2]
