"""On a GPU: what was built without one is served there, and plain TileLang hits the same entries.

TLCACHE_BAKED_ROOT names a cache root that was warmed on another machine, without a GPU, by

    tlcache warm --shapes tests/e2e/gpu_shapes.json --target sm90 --cache-dir ROOT

for the GPU's family; without the variable these tests warm one here.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tlcache.store import layout, record

pytestmark = pytest.mark.gpu
SHAPES = Path(__file__).with_name("gpu_shapes.json")
PRELUDE = """
import json, os, sys, torch
from pathlib import Path
from ops import op
from ops.kernels import rms_norm as kernels
from tlcache import operators, runtime
from tlcache.warm import shapes
target = op.device_target(0)
document = shapes.load({shapes!r})
wanted = [one.spec for one in shapes.expand(document, {shapes!r}, [target])]
TOLERANCE = {{"float32": 1e-5, "float16": 1e-3, "bfloat16": 1.6e-2}}

F = torch.nn.functional


def rotated(x, cos, sin):
    left, right = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


REFERENCES = {{
    "rms_norm": lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
    "fused_add_rms_norm": lambda x, r, w: F.rms_norm(x + r, w.shape, w, 1e-5),
    "layer_norm": lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
    "silu_and_mul": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "softmax": lambda x: x.softmax(-1),
    "rope": rotated,
    "gemm": lambda x, w: x @ w.T,
}}


def right(spec, call):
    operator = operators.get(spec.name)
    m, dtype = spec.workload["M"], spec.workload["dtype"]
    for rows in ((1, 3, 300) if m == "dynamic" else (m,)):
        inputs = operator.example(operator.workload(**spec.workload), rows, "cuda")
        wide = [tensor.double() for tensor in inputs]
        if spec.name == "fused_add_rms_norm":  # the sum is rounded first
            wide = [(inputs[0] + inputs[1]).double(), torch.zeros_like(wide[0]), wide[2]]
        want, got = REFERENCES[spec.name](*wide), call(*inputs)
        got = (got[0] if isinstance(got, list) else got).double()
        if spec.name == "rms_norm":
            off = ((got - want).abs() / want.abs().clamp(min=1e-3)).max().item()
        else:
            off = ((got - want).norm() / want.norm()).item()
        assert off <= TOLERANCE[dtype], (str(spec), rows, off)
"""


@pytest.fixture(scope="module")
def baked(tmp_path_factory):
    """A warmed root: the one that was brought, or one made here."""
    root = tmp_path_factory.mktemp("baked") / "cache"
    if brought := os.environ.get("TLCACHE_BAKED_ROOT"):
        shutil.copytree(brought, root)
        return root
    import subprocess

    command = [sys.executable, "-c", "from tlcache.cli import main; main()", "warm"]
    subprocess.run(
        [*command, "--shapes", str(SHAPES), "--target", "auto", "--cache-dir", str(root)],
        check=True,
    )
    return root


def test_every_workload_of_the_build_host_is_restored_and_right(python, baked):
    done = python(
        PRELUDE.format(shapes=str(SHAPES))
        + """
for spec in wanted:
    right(spec, runtime.resolve(spec, on_miss="error").call)
c = runtime.counters()
assert (c.restored, c.compiled, c.disk, c.failed) == (len(wanted), 0, 0, 0), c
assert not {"tilelang", "tvm"} & set(sys.modules)
print("RESULT", len(wanted), c)
""",
        env={"TILELANG_CACHE_DIR": str(baked)},
    )
    assert done.code == 0, done.err
    print(done.out)


def test_plain_tilelang_with_target_auto_hits_the_same_entries(python, baked):
    done = python(
        PRELUDE.format(shapes=str(SHAPES))
        + """
import dataclasses, importlib
hits = {}
for spec in wanted:
    module, _, name = spec.kernel.partition(":")
    factory = getattr(importlib.import_module(module), name)
    impl = factory(**spec.workload, target=spec.target.name)
    kernel = dataclasses.replace(impl, target="auto")(**spec.schedule)
    assert kernel.artifact is None, f"{spec} was compiled"
    hits[spec.action_key()] = os.path.relpath(kernel._tilelang_cache_path,
    os.environ["TILELANG_CACHE_DIR"])
print("RESULT" + json.dumps(hits))
""",
        env={"TILELANG_CACHE_DIR": str(baked)},
    )
    assert done.code == 0, done.err
    hits = json.loads(done.out.rpartition("RESULT")[2])
    for key, entry in hits.items():
        assert record.read(baked, key).entry == entry
    assert len(hits) == len(list(layout.entries(baked)))


def test_restored_and_compiled_kernels_live_side_by_side(python, baked):
    done = python(
        PRELUDE.format(shapes=str(SHAPES))
        + """
first, second = wanted[:2]
right(first, runtime.resolve(first, on_miss="error").call)
assert "tilelang" not in sys.modules
other = kernels.OPERATOR.spec({"M": 11, "N": 96, "eps": 1e-5, "dtype": "float32"}, target)
right(other, runtime.resolve(other).call)
assert "tilelang" in sys.modules
right(second, runtime.resolve(second, on_miss="error").call)
right(first, runtime.resolve(first).call)
c = runtime.counters()
assert (c.restored, c.compiled, c.memory) == (2, 1, 1), c
""",
        env={"TILELANG_CACHE_DIR": str(baked)},
    )
    assert done.code == 0, done.err


def test_ops_run_on_the_gpu_and_under_torch_compile(python, baked):
    done = python(
        PRELUDE.format(shapes=str(SHAPES))
        + """
import ops
norm = ops.RMSNorm(4096, 1e-5, dtype=torch.bfloat16, device="cuda", on_miss="error")
x = torch.randn(2, 64, 4096, device="cuda", dtype=torch.bfloat16)
want = torch.nn.functional.rms_norm(x.float(), (4096,), norm.weight.float(), 1e-5)
with torch.no_grad():
    torch.testing.assert_close(norm(x).float(), want, rtol=1.6e-2, atol=1e-2)
    torch.testing.assert_close(norm(x[:, ::2]).float(), want[:, ::2], rtol=1.6e-2, atol=1e-2)
    assert norm(x[:0]).shape == (0, 64, 4096)
    compiled = torch.compile(lambda x: norm(x) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(x).float(), want + 1, rtol=1.6e-2, atol=2e-2)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = norm(x)
    side.synchronize()
    torch.testing.assert_close(y.float(), want, rtol=1.6e-2, atol=1e-2)
assert "tilelang" not in sys.modules
""",
        env={"TILELANG_CACHE_DIR": str(baked)},
    )
    assert done.code == 0, done.err


def test_a_graph_is_captured_once_the_kernel_is_warm_and_refused_while_it_is_not(
    python, cache_root
):
    done = python(
        PRELUDE.format(shapes=str(SHAPES))
        + """
import ops
from tlcache.errors import CaptureError
op = ops.RMSNormFwdOp(96, 1e-5, torch.float32)
x, w = torch.randn(4, 96, device="cuda"), torch.randn(96, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        op(x, w)
except CaptureError as error:
    assert "rms_norm M=dynamic N=96" in error.message and "warmup" in error.hint
else:
    raise AssertionError("a cold capture went through")
op.warmup([4])
op(x, w)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = op(x, w)
for _ in range(3):
    x.copy_(torch.randn(4, 96, device="cuda"))
    graph.replay()
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (96,), w, 1e-5))
"""
    )
    assert done.code == 0, done.err


def test_the_example_serves_on_the_gpu_and_its_second_start_compiles_nothing(run, cache_root):
    example = Path(__file__).parents[2] / "examples" / "serve.py"
    first = json.loads(run([sys.executable, str(example), "--json"]).out.splitlines()[-1])
    second = json.loads(run([sys.executable, str(example), "--json"]).out.splitlines()[-1])
    assert first["answer"] == second["answer"]
    assert (first["kernels_compiled"], second["kernels_compiled"]) == (1, 0)
    assert (first["tilelang_imported"], second["tilelang_imported"]) == (True, False)
    print(first, second)


def test_a_prune_spares_what_a_gpu_process_has_loaded_and_its_graphs_go_on(
    python, baked, cache_root
):
    shutil.copytree(baked, cache_root)
    done = python(
        PRELUDE.format(shapes=str(SHAPES))
        + """
import subprocess
from tlcache.store import record

def entry(spec):
    found = record.read(os.environ["TILELANG_CACHE_DIR"], spec.action_key())
    return None if found is None else found.entry

loaded = [spec for spec in wanted if spec.name in ("rms_norm", "gemm")]
calls = [runtime.resolve(spec, on_miss="error").call for spec in loaded]
for spec, call in zip(loaded, calls):
    right(spec, call)
kept = {entry(spec) for spec in loaded}
spec, call = next((s, c) for s, c in zip(loaded, calls) if type(s.workload["M"]) is int)
operator = operators.get(spec.name)
inputs = operator.example(operator.workload(**spec.workload), spec.workload["M"], "cuda")
want = call(*inputs)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    got = call(*inputs)
command = [sys.executable, "-c", "from tlcache.cli import main; main()", "prune", "--yes"]
pruned = subprocess.run([*command, "--target", "sm90"], capture_output=True, text=True)
assert f"loaded by pid {os.getpid()}" in pruned.stdout + pruned.stderr, pruned
assert {entry(spec) for spec in wanted} - {None} == kept and len(kept) < len(wanted)
graph.replay()
torch.testing.assert_close(got, want, rtol=0, atol=0)
for spec, call in zip(loaded, calls):
    right(spec, call)
print("RESULT", len(wanted), len(kept))
"""
    )
    assert done.code == 0, done.err
    print(done.out)
