"""RMSNorm on the CPU target: right values, one kernel where one serves, clear refusals."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch

import ops
from ops import op as op_module
from ops.kernels import rms_norm as kernels
from tlcache import runtime
from tlcache.errors import MissError, SpecError

pytestmark = pytest.mark.usefixtures("shared_root")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _inputs(rows, n, dtype):
    return torch.randn(rows, n).to(dtype), torch.randn(n).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 7, 127, 3000, 4096, 65536])
def test_values_are_those_of_torch_for_every_row_length(close, dtype, n):
    op = ops.RMSNormFwdOp(n, 1e-5, dtype)
    for rows in (1, 5):
        x, w = _inputs(rows, n, dtype)
        close(op(x, w), x, w)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_those_of_torch_for_an_exact_row_count(close, dtype):
    op = ops.RMSNormFwdOp(96, 1e-5, dtype, rows="exact")
    x, w = _inputs(17, 96, dtype)
    close(op(x, w), x, w)


def test_squares_that_overflow_float16_are_summed_in_float32(close):
    x = torch.full((2, 64), 6e4, dtype=torch.float16)
    w = torch.ones(64, dtype=torch.float16)
    close(ops.rms_norm(x, w, 1e-5), x, w)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_inf_come_out_where_torch_has_them(dtype):
    x, w = _inputs(4, 64, dtype)
    x[1, 3], x[2, 5], x[3, 7] = float("nan"), float("inf"), float("-inf")
    y, want = ops.rms_norm(x, w, 1e-5), torch.nn.functional.rms_norm(x, (64,), w, 1e-5)
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.isinf(), want.isinf())


def test_bfloat16_is_rounded_to_nearest_even_as_torch_rounds_it():
    x = torch.randn(64, 512, dtype=torch.bfloat16)
    w = torch.ones(512, dtype=torch.bfloat16)
    y = ops.rms_norm(x, w, 1e-5)
    want = torch.nn.functional.rms_norm(x.float(), (512,), w.float(), 1e-5).to(torch.bfloat16)
    # The float32 sums differ in their order; a wrong rounding would differ in half of the places.
    assert (y != want).float().mean().item() < 0.01


def test_zero_rows_need_no_kernel():
    op = ops.RMSNormFwdOp(48, 1e-5, torch.float32, on_miss="error")
    for shape in ((0, 48), (3, 0, 48)):
        assert op(torch.empty(shape), torch.ones(48)).shape == shape
    assert not op.state.kernels


def test_leading_axes_share_the_kernel_of_their_product(close):
    op = ops.RMSNormFwdOp(80, 1e-5, torch.float32, rows="exact")
    x, w = torch.randn(2, 3, 80), torch.randn(80)
    close(op(x, w), x, w)
    before = copy.copy(runtime.counters())
    close(op(x.view(6, 80), w), x.view(6, 80), w)
    assert len(op.state.kernels) == 1
    assert runtime.counters() == before


def test_strided_inputs_give_what_their_contiguous_copies_give():
    w = torch.randn(160)[::2]
    wide = torch.randn(6, 160)
    for x in (wide[:, ::2], wide[::2, :80], wide.t().reshape(80, 12).t()):
        assert not x.is_contiguous()
        y = ops.rms_norm(x, w, 1e-5)
        assert torch.equal(y, ops.rms_norm(x.contiguous(), w.contiguous(), 1e-5))
        assert y.is_contiguous()


def test_a_vector_is_one_row(close):
    x, w = torch.randn(80), torch.randn(80)
    close(ops.rms_norm(x, w, 1e-5), x, w)


def test_neither_addresses_nor_contents_are_part_of_a_key():
    op = ops.RMSNormFwdOp(72, 1e-5, torch.float32)
    for _ in range(3):
        x, w = _inputs(4, 72, torch.float32)
        op(x, w)
    assert list(op.state.kernels) == [(-1, 4)]
    assert op.instance_key == "rms_norm(N=72,eps=1e-05,dtype=float32)"


def test_importing_and_constructing_compile_nothing_and_touch_no_device(python):
    done = python(
        "import torch, sys\n"
        "torch.cuda._lazy_init = None\n"  # calling it now would raise
        "import ops\n"
        "norm = ops.RMSNorm(4096, dtype=torch.bfloat16)\n"
        "op = ops.RMSNormFwdOp(4096)\n"
        "from tlcache import runtime\n"
        "c = runtime.counters()\n"
        "assert c == runtime.Counters(), c\n"
        "assert 'tilelang' not in sys.modules\n"
        "assert 'tvm_ffi' not in sys.modules\n"
    )
    assert done.code == 0, done.err


@pytest.mark.parametrize("order", ["import ops, torch", "import torch, ops"])
def test_the_dispatcher_op_is_registered_whichever_import_is_first(python, order):
    done = python(f"{order}\nprint(torch.ops.tilelang_ops.rms_norm.default)")
    assert done.code == 0, done.err
    assert "tilelang_ops.rms_norm.default" in done.out


def test_importing_ops_alone_does_not_import_torch(python):
    done = python("import ops, ops.catalog, sys; print('torch' in sys.modules)")
    assert done.out.strip() == "False", done.err


@pytest.mark.parametrize(
    ("x", "w", "error", "says"),
    [
        (torch.randn(2, 64), torch.randn(63), ValueError, r"weight has shape \[63\].*takes \[64\]"),
        (torch.randn(2, 63), torch.randn(64), ValueError, r"x has shape \[2, 63\].*\[…, 64\]"),
        (torch.randn(2, 64).double(), torch.randn(64), TypeError, "x is torch.float64.*float32"),
        (torch.randn(2, 64), torch.randn(64).half(), TypeError, "weight is torch.float16.*float32"),
        (torch.tensor(1.0), torch.randn(64), ValueError, r"x has shape \[\]"),
        (torch.randn(2, 64, device="meta"), torch.randn(64), ValueError, "x is on meta and weight"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_named_with_what_was_expected(x, w, error, says):
    op = ops.RMSNormFwdOp(64, 1e-5, torch.float32)
    with torch.no_grad(), pytest.raises(error, match=says):
        op(x, w)


@pytest.mark.parametrize(
    "values",
    [
        {"N": 0},
        {"N": 65537},
        {"N": -4096},
        {"N": 64, "eps": float("nan")},
        {"N": 64, "eps": -1.0},
        {"N": 64, "dtype": torch.float64},
        {"N": 64, "rows": "some"},
        {"N": 64, "on_miss": "ignore"},
        {"N": 64, "schedule": {"block_m": 1}},
    ],
)
def test_an_op_with_impossible_values_is_refused_at_construction(values):
    with pytest.raises(SpecError):
        ops.RMSNormFwdOp(**values)


def test_on_miss_error_names_the_kernel_and_the_command_that_warms_it():
    op = ops.RMSNormFwdOp(88, 1e-5, torch.float32, on_miss="error")
    with pytest.raises(MissError) as caught:
        op(torch.randn(3, 88), torch.randn(88))
    assert "rms_norm M=dynamic N=88" in caught.value.message
    assert "tlcache warm --shapes shapes.json --target cpu" in str(caught.value.hint)


def test_auto_rows_take_the_exact_kernel_where_one_was_warmed():
    exact = ops.RMSNormFwdOp(104, 1e-5, torch.float32, rows="exact")
    exact.warmup([3], device=-1)
    op = ops.RMSNormFwdOp(104, 1e-5, torch.float32)
    w = torch.ones(104)
    op(torch.randn(3, 104), w)
    op(torch.randn(4, 104), w)
    op(torch.randn(5, 104), w)
    rows = {key: kernel.workload.M for key, kernel in op.state.kernels.items()}
    assert rows == {(-1, 3): 3, (-1, 4): "dynamic", (-1, 5): "dynamic"}


def test_ops_with_equal_keys_share_state_and_the_last_one_takes_it_along():
    first, second = ops.RMSNormFwdOp(56), ops.RMSNormFwdOp(56)
    assert first.state is second.state
    key = first.instance_key
    assert ops.RMSNormFwdOp(56, 2e-6).state is not first.state
    assert ops.RMSNormFwdOp(56, rows="exact").state is not first.state
    del first, second
    gc.collect()
    assert key not in op_module._live


def test_a_schedule_of_ones_own_is_part_of_the_key_and_survives_it():
    # Any schedule is checked on the CPU at construction, where 1 and 1 is the only one.
    op = ops.RMSNormFwdOp(56, schedule={"block_m": 1, "threads": 1})
    assert op.instance_key == (
        "rms_norm(N=56,eps=1e-06,dtype=bfloat16,schedule=block_m:1+threads:1)"
    )
    assert op_module.OpState(op.instance_key).schedule == {"block_m": 1, "threads": 1}


@pytest.mark.parametrize(
    "key",
    ["", "rms_norm", "rms_norm(", "rms_norm(N=1)x", "rms_norm(N=1,,eps=1)", "rms_norm(N)",
     "rms_norm(N=1,N=2)", "nothing(N=1)", "rms_norm(N=1,eps=1;import os)"],
)  # fmt: skip
def test_what_is_not_an_instance_key_is_refused(key):
    with pytest.raises(SpecError):
        op_module.state(key)


def test_modules_can_be_copied_pickled_and_moved_to_another_dtype(close):
    norm = ops.RMSNorm(64, 1e-5, rows="dynamic")
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert other.op.instance_key == norm.op.instance_key
        assert torch.equal(other.weight, norm.weight)
    norm = norm.to(torch.bfloat16)
    assert norm.op.instance_key == "rms_norm(N=64,eps=1e-05,dtype=bfloat16,rows=dynamic)"
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        close(norm(x), x, norm.weight)


def test_gradients_are_those_of_torch():
    x, w = torch.randn(3, 5, 64, dtype=torch.float32), torch.randn(64)
    pairs = []
    for norm in (ops.rms_norm, lambda x, w, eps: torch.nn.functional.rms_norm(x, (64,), w, eps)):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        norm(a, b, 1e-5).sin().sum().backward()
        pairs.append((a.grad, b.grad))
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_compile_with_fullgraph_holds_one_node_of_ours_and_equals_eager():
    norm = ops.RMSNorm(64, 1e-5)
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph.forward

    x = torch.randn(6, 64)
    with torch.no_grad():
        compiled = torch.compile(lambda x: norm(x) * 2, fullgraph=True, backend=backend)
        assert torch.equal(compiled(x), norm(x) * 2)
        both = torch.compile(
            lambda x: ops.rms_norm(x, norm.weight, 1e-5), fullgraph=True, backend=backend
        )
        assert torch.equal(both(x), norm(x))
    assert [[name for name in graph if "tilelang_ops" in name] for graph in graphs] == [
        ["tilelang_ops.rms_norm"],
        ["tilelang_ops.rms_norm"],
    ]


COLD = """
import torch, ops
from tlcache import runtime
norm = ops.RMSNorm(64, 1e-5)
x = torch.randn(6, 64)
with torch.no_grad():
    y = torch.compile(lambda x: norm(x) + 1, fullgraph=True)(x)
    want = torch.nn.functional.rms_norm(x, (64,), norm.weight, 1e-5) + 1
torch.testing.assert_close(y, want)
print(runtime.counters())
"""


def test_inductor_compiles_with_fullgraph_from_a_cold_start(python, tmp_path):
    done = python(COLD, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")})
    assert done.code == 0, done.err
    assert "compiled=1" in done.out


def test_opcheck_passes_for_contiguous_strided_and_empty_inputs():
    w = torch.randn(64)
    key = "rms_norm(N=64,eps=1e-05,dtype=float32)"
    for x in (
        torch.randn(4, 64),
        torch.randn(4, 128)[:, ::2],
        torch.empty(0, 64),
        torch.randn(1, 64),
    ):
        torch.library.opcheck(torch.ops.tilelang_ops.rms_norm.default, (x, w, key))


def test_each_kernel_factory_call_is_one_jit_impl(shared_root):
    kernels.rms_norm.cache_clear()
    first = kernels.rms_norm(9, 64, 1e-5, "float32", "cpu")
    assert kernels.rms_norm(9, 64, 1e-5, "float32", "cpu") is first
    assert kernels.rms_norm.cache_info().misses == 1
