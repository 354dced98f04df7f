"""The restart proof: what one process compiles, the next ones load without TileLang."""

from __future__ import annotations

import json

SERVE = """
import json, sys, torch, ops
from tlcache import runtime
torch.manual_seed(0)
bounds = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1.6e-2}
worst = {}
for name, bound in bounds.items():
    dtype = getattr(torch, name)
    for rows, n, policy in ((1, 4096, "exact"), (7, 1000, "exact"), (33, 513, "auto")):
        op = ops.RMSNormFwdOp(n, 1e-5, dtype, rows=policy)
        x, w = torch.randn(rows, n).to(dtype), torch.randn(n).to(dtype)
        want = torch.nn.functional.rms_norm(x.double(), (n,), w.double(), 1e-5)
        off = ((op(x, w).double() - want).abs() / want.abs().clamp(min=1e-3)).max().item()
        assert off <= bound, (name, rows, n, off)
counters = runtime.counters()
print("RESULT " + json.dumps({
    "tilelang": any(m == "tilelang" or m.startswith("tilelang.") or m == "tvm" for m in
    sys.modules), "compiled": counters.compiled, "restored": counters.restored, "disk":
    counters.disk, "failed": counters.failed,
}))
"""


def _result(out):
    return json.loads(out.rpartition("RESULT ")[2])


def test_a_second_process_restores_every_kernel_without_importing_tilelang(python):
    first = python(SERVE)
    assert first.code == 0, first.err
    assert _result(first.out) == {
        "tilelang": True, "compiled": 9, "restored": 0, "disk": 0, "failed": 0,
    }  # fmt: skip
    second = python(SERVE)
    assert second.code == 0, second.err
    assert _result(second.out) == {
        "tilelang": False, "compiled": 0, "restored": 9, "disk": 0, "failed": 0,
    }  # fmt: skip
