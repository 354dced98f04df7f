"""The transformer of the design: three blocks of two RMSNorms, prefill M=128, then decode M=1."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"

DESIGN = """
import json, sys
sys.path.insert(0, {examples!r})
import torch, serve
from ops.kernels import rms_norm as kernels
from tlcache import runtime
torch.manual_seed(0)
model = serve.Transformer(3, 4096, 8, 64, {rows!r}).eval()
answer = model.generate(torch.randint(64, (128,)), 4)
tables = {{}}
for module in model.modules():
    if isinstance(module, serve.ops.RMSNorm):
        tables[id(module.op.state)] = sorted(rows for _, rows in module.op.state.kernels)
info = kernels.rms_norm.cache_info()
print("RESULT " + json.dumps({{
    "jit_impls": info.misses, "compiled": runtime.counters().compiled,
    "states": list(tables.values()), "resolved": runtime.counters().memory,
}}))
"""


@pytest.mark.parametrize(("rows", "compiled", "from_memory"), [("exact", 2, 0), ("auto", 1, 1)])
def test_prefill_and_decode_compile_what_the_design_says(python, rows, compiled, from_memory):
    done = python(DESIGN.format(examples=str(EXAMPLES), rows=rows))
    assert done.code == 0, done.err
    result = json.loads(done.out.rpartition("RESULT ")[2])
    # Six norms share one state; its table has both row counts, whatever kernels stand behind them.
    assert result == {
        "jit_impls": compiled,
        "compiled": compiled,
        "states": [[1, 128]],
        "resolved": from_memory,
    }


class CountingDict(dict):
    probes = 0

    def get(self, key, default=None):
        self.probes += 1
        return super().get(key, default)

    def __getitem__(self, key):
        self.probes += 1
        return super().__getitem__(key)

    def __contains__(self, key):
        self.probes += 1
        return super().__contains__(key)


def test_a_warm_launch_is_one_dict_probe_and_nothing_of_the_layers_below(cache_root):
    import ops

    norm = ops.RMSNorm(64, 1e-5, dtype=torch.bfloat16, rows="exact")
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    called = []
    with torch.no_grad():
        norm(x)
        norm.op.state.kernels = CountingDict(norm.op.state.kernels)

        def profile(frame, event, _):
            if event == "call":
                module = frame.f_globals.get("__name__", "")
                if module.partition(".")[0] in ("ops", "tlcache", "tilelang", "tvm_ffi"):
                    called.append(f"{module}:{frame.f_code.co_name}")

        sys.setprofile(profile)
        try:
            norm(x)
        finally:
            sys.setprofile(None)
    assert norm.op.state.kernels.probes == 1
    assert [name for name in called if not name.startswith("tlcache.runtime.launcher:")] == [
        "ops.norms:forward",  # the module
        "ops.op:forward",
        "ops.op:direct",
        "ops.norms:run",
        "ops.inputs:fits",
        "ops.kernels.bound:launch",
        *["ops.kernels.bound:<listcomp>"] * (sys.version_info < (3, 12)),
    ]


def test_the_example_says_what_each_start_cost(run, cache_root):
    command = [sys.executable, str(EXAMPLES / "serve.py"), "--width", "256", "--json"]
    first, second = run(command), run(command)
    assert first.code == second.code == 0, first.err + second.err
    first, second = json.loads(first.out.splitlines()[-1]), json.loads(second.out.splitlines()[-1])
    assert first["answer"] == second["answer"]
    if not torch.cuda.is_available():
        assert (first["kernels_compiled"], first["tilelang_imported"]) == (1, True)
    assert (second["kernels_compiled"], second["tilelang_imported"]) == (0, False)
    assert second["kernels_restored"] == 1
    shown = run([sys.executable, str(EXAMPLES / "serve.py"), "--width", "256"])
    assert "0 compiled, 1 restored" in shown.out
    assert importlib.util.find_spec("serve") is None
