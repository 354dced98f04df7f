"""On a GPU: the corpus, made anew, found on disk, and restored, bit for bit; and one of them in a
CUDA graph.
"""

from __future__ import annotations

import json

import pytest

from tests.e2e.test_restored_corpus import all_restored, program, same

__all__ = ["program"]
pytestmark = pytest.mark.gpu


def test_a_restored_kernel_gives_what_a_new_one_gives_bit_for_bit(program, capsys):
    cold = program("cuda", "launch")
    disk = program("cuda", "launch", command=("run", "--no-restore", "--"))
    restored = program("cuda", "launch")
    checked = program("cuda", "launch", env={"TLCACHE_CHECK": "1"})
    runs = [cold, disk, restored, checked]
    kernels = same(runs, ("key",))
    for name in kernels:
        # Sums of atomic additions come in any order.
        if name != "split_k_matmul":
            assert len({run.json["kernels"][name]["outputs"] for run in runs}) == 1, name
    all_restored(restored, len(kernels))
    all_restored(checked, len(kernels))
    with capsys.disabled():
        for name in kernels:
            found = [run.json["kernels"][name]["ms"] for run in (cold, disk, restored)]
            print(name, *(json.dumps(one) for one in found))


GRAPH = """
import torch
from tests.corpus import cuda
kernel = cuda.softmax(32, 512)
assert type(kernel).__name__ == wanted, type(kernel)
x = torch.randn(32, 512, device="cuda", dtype=torch.float16)
plain = kernel(x)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = kernel(x)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(y, plain)
x.copy_(torch.randn(32, 512, device="cuda", dtype=torch.float16))
graph.replay()
torch.cuda.synchronize()
assert torch.equal(y, kernel(x))
assert kernel.out_idx == [1]
assert "softmax" in str(kernel.prim_func.attrs) or "main" in kernel.get_kernel_source()
"""


def test_a_restored_kernel_is_captured_in_a_graph(python, request):
    start = "import tlcache, tilelang; tlcache.accelerate()\n"
    place = str(request.config.rootpath)
    for wanted in ("JITKernel", "RestoredKernel"):
        ran = python(f"wanted = {wanted!r}\n{start}{GRAPH}", cwd=place)
        assert ran.code == 0, ran.err


CONTEXTS = """
import os, torch, tilelang
from tvm.target import Target
from tests.corpus import cuda
from tlcache.runtime.foreign import key
torch.zeros(1, device="cuda")
def asked(target):
    cuda.softmax.target = target
    found = key.context(cuda.softmax, key.surroundings())
    real = key.Context(cuda.softmax)
    assert (found.target, found.host, found.backend) == (real.target, real.host, real.backend)
    assert found.cache is real.cache
    return found
for target in ("auto", "cuda", None):
    first = asked(target)
    assert asked(target) is first
    os.environ["ANY_VARIABLE"] = str(target)  # as the toolkit's path may be one
    assert asked(target) is not first
with Target({"kind": "cuda", "arch": "sm_80"}):
    assert "sm_80" in asked("auto").target
assert "sm_80" not in asked("auto").target
"""


def test_the_target_of_a_call_is_what_tilelang_resolves_now(python, request):
    ran = python(CONTEXTS, cwd=str(request.config.rootpath))
    assert ran.code == 0, ran.err
