"""Recorded kernels made again: the same key, or a failure that says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tlcache.fingerprint import key_environment

KERNELS = """
import os
import torch
import tilelang, tilelang.language as T

def _copying(N):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(N):
                B[i] = A[i]
    return main

@tilelang.jit(out_idx=[1])
def plain(N):
    return _copying(N)

@tilelang.jit(out_idx=[1], target="cuda")
def hard_coded(N):
    return _copying(N)

def takes_target(N, target="auto"):
    return tilelang.compile(_copying(N), out_idx=[1], target=target)

@tilelang.jit(out_idx=[1])
def asks_the_gpu(what):
    if what == "capability":
        return _copying(torch.cuda.get_device_capability()[0])
    return _copying(getattr(torch.cuda.get_device_properties(0), what) // 1024)

def returns_nothing(N):
    takes_target(N)

def returns_two(N):
    return takes_target(N), takes_target(N + 1)

@tilelang.jit(out_idx=[1])
def depends_on_the_weather(N):
    return _copying(N + int(os.environ.get("WEATHER", "0")))
"""


@pytest.fixture
def warm(tlcache, tmp_path, shapes):
    (tmp_path / "kernels.py").write_text(KERNELS)

    def warm(*workloads, target="sm90", **env):
        path = shapes(*workloads)
        ran = tlcache("warm", "--shapes", path, "--target", target, "--json", env=env)
        assert ran.out, ran.err
        return [(kernel["status"], kernel["error"]) for kernel in ran.json["kernels"]]

    return warm


def test_a_replay_that_gives_another_key_fails_with_both(warm):
    asked = {"kernel": "kernels:plain", "args": {"N": 64}}
    recorded = {**asked, "tilelang_keys": {key_environment("cpu"): "0123456789abcdef" * 4}}
    ((status, error),) = warm(recorded, target="cpu")
    assert status == "failed"
    assert "its replay makes another kernel than the program had: TileLang's key is " in error
    assert error.endswith("and was 0123456789ab")
    assert warm(asked, target="cpu") == [("compiled", None)]
    # From here on it has its record; that is no answer to the recorded one.
    assert warm(recorded, target="cpu")[0][0] == "failed"


def test_keys_of_another_release_or_target_are_not_compared(warm):
    keys = {"0.1.14 x86_64 cpu": "0" * 64, "0.1.15 x86_64 sm_80": "0" * 64}
    asked = {"kernel": "kernels:plain", "args": {"N": 64}, "tilelang_keys": keys}
    assert warm(asked, target="cpu") == [("compiled", None)]


def test_keys_of_several_kernels_are_refused(tlcache, shapes, tmp_path):
    (tmp_path / "kernels.py").write_text(KERNELS)
    path = shapes({"kernel": "kernels:plain", "args": {"N": [1, 2]}, "tilelang_keys": {"a": "b"}})
    ran = tlcache("warm", "--shapes", path, "--target", "cpu")
    assert ran.code == 2
    assert "tilelang_keys are those of one kernel" in ran.err


@pytest.mark.nvcc
def test_what_a_program_says_of_whatever_gpu_there_is_means_the_target_that_is_asked_for(warm):
    assert warm(
        {"kernel": "kernels:plain", "args": {"N": 64}},
        {"kernel": "kernels:hard_coded", "args": {"N": 64}},
        {"kernel": "kernels:takes_target", "args": {"N": 64, "target": "auto"}},
        {"kernel": "kernels:takes_target", "args": {"N": 96, "target": "cuda"}},
        {"kernel": "kernels:asks_the_gpu", "args": {"what": "capability"}},
        {"kernel": "kernels:asks_the_gpu", "args": {"what": "shared_memory_per_multiprocessor"}},
    ) == 6 * [("compiled", None)]


@pytest.mark.nvcc
def test_what_is_not_the_same_on_all_such_gpus_is_not_made_up(warm):
    asked = {"kernel": "kernels:asks_the_gpu", "args": {"what": "multi_processor_count"}}
    ((status, error),) = warm(asked)
    assert status == "failed"
    assert "depends on the multi_processor_count of the GPU" in error


def test_a_factory_that_compiles_one_kernel_need_not_return_it(warm):
    kernels = [{"kernel": f"kernels:{name}", "args": {"N": 64}} for name in ("returns_nothing",)]
    assert warm(*kernels, target="cpu") == [("compiled", None)]


def test_of_several_kernels_the_key_says_which(warm, cache_root):
    asked = {"kernel": "kernels:returns_two", "args": {"N": 64}}
    ((status, error),) = warm(asked, target="cpu")
    assert status == "failed" and "yields a tuple, which is not a TileLang kernel" in error
    for entry in sorted(Path(cache_root).glob("*/*/kernels/*")):
        keyed = {**asked, "tilelang_keys": {key_environment("cpu"): entry.name}}
        assert warm(keyed, target="cpu")[0][0] in ("compiled", "present")


def test_a_target_that_the_environment_defaults_to_does_not_matter(warm):
    asked = {"kernel": "kernels:plain", "args": {"N": 64}}
    assert warm(asked, target="cpu", TILELANG_DEFAULT_TARGET=json.dumps({"kind": "hip"})) == [
        ("compiled", None)
    ]
