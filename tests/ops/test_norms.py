"""Norms: one kernel where one serves, modules that stand in for torch's, clear refusals."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import ops
from ops import catalog
from ops.kernels import rms_norm as kernels
from tlcache import runtime
from tlcache.errors import MissError, SpecError

pytestmark = pytest.mark.usefixtures("shared_root")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _inputs(rows, n, dtype):
    return torch.randn(rows, n).to(dtype), torch.randn(n).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_those_of_torch_for_an_exact_row_count(close, dtype):
    op = ops.RMSNormFwdOp(96, 1e-5, dtype, rows="exact")
    x, w = _inputs(17, 96, dtype)
    close(op(x, w), x, w)


def test_what_an_op_forgets_for_better_schedules_the_function_forgets_too():
    op = ops.RMSNormFwdOp(152, 1e-5, torch.float32)
    x, w = _inputs(3, 152, torch.float32)
    ops.rms_norm(x, w, 1e-5)
    ops.rms_norm(x, w, 1e-5)
    before = op.state.misses
    op.state.forget()
    assert torch.equal(ops.rms_norm(x, w, 1e-5), op(x, w))
    assert op.state.misses == before + 1


def test_leading_axes_share_the_kernel_of_their_product(close):
    op = ops.RMSNormFwdOp(80, 1e-5, torch.float32, rows="exact")
    x, w = torch.randn(2, 3, 80), torch.randn(80)
    close(op(x, w), x, w)
    before = copy.copy(runtime.counters())
    close(op(x.view(6, 80), w), x.view(6, 80), w)
    assert len(op.state.kernels) == 1
    assert runtime.counters() == before


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
        "ops.RMSNormFwdOp(4096), ops.FusedAddRMSNormFwdOp(4096), ops.LayerNorm(4096)\n"
        "ops.FusedAddRMSNormInplaceFwdOp(4096), ops.SiluAndMulFwdOp(4096), ops.SoftmaxFwdOp(9)\n"
        "ops.RopeFwdOp(32, 128), ops.GemmFwdOp(4096, 4096)\n"
        "from tlcache import runtime\n"
        "c = runtime.counters()\n"
        "assert c == runtime.Counters(), c\n"
        "assert 'tilelang' not in sys.modules\n"
        "assert 'tvm_ffi' not in sys.modules\n"
    )
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    "order",
    [
        "import ops, torch",
        "import torch, ops",
        "import ops.op, torch",
        "import ops.boundary, torch",
    ],
)
def test_the_dispatcher_ops_are_registered_whichever_import_is_first(python, order):
    names = [*catalog.OPERATORS, "fused_add_rms_norm_"]
    done = python(
        f"{order}\nfor name in {names}: print(getattr(torch.ops.tilelang_ops, name).default)"
    )
    assert done.code == 0, done.err
    assert done.out.split() == [f"tilelang_ops.{name}.default" for name in names]


def test_importing_ops_alone_does_not_import_torch(python):
    done = python("import ops, ops.catalog, sys; print('torch' in sys.modules)")
    assert done.out.strip() == "False", done.err


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


def test_a_schedule_of_ones_own_is_part_of_the_key_and_survives_it():
    schedule = {"block_m": 1, "threads": 1, "each": 1, "prefetch": False}  # the CPU's only one
    op = ops.RMSNormFwdOp(127, 1e-5, torch.float32, schedule=schedule)
    assert op.instance_key == (
        "rms_norm(N=127,eps=1e-05,dtype=float32,schedule=block_m:1+threads:1+each:1+prefetch:False)"
    )
    assert type(op.state)(op.instance_key).schedule == schedule
    x, w = _inputs(3, 127, torch.float32)
    assert torch.equal(op(x, w), ops.rms_norm(x, w, 1e-5))


def test_a_schedule_for_another_device_is_refused_where_it_does_not_fit():
    schedule = {"block_m": 4, "threads": 128, "each": 2, "prefetch": True}
    op = ops.RMSNormFwdOp(127, 1e-5, torch.float32, schedule=schedule)  # fits a GPU
    with pytest.raises(SpecError, match="the CPU kernel takes block_m=1 threads=1"):
        op(*_inputs(3, 127, torch.float32))
    with pytest.raises(SpecError, match="block_m is 3"):
        ops.RMSNormFwdOp(127, schedule={**schedule, "block_m": 3})


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


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_stands_in_for_torchs(bias):
    theirs, ours = torch.nn.LayerNorm(127, bias=bias), ops.LayerNorm(127, bias=bias)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    ours.load_state_dict(theirs.state_dict())
    assert [name for name, _ in ours.named_parameters()] == ["weight", "bias"][: 1 + bias]
    x = torch.randn(2, 3, 127)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
        ours, theirs = ours.to(torch.float16), theirs.to(torch.float16)
        assert ours.op.dtype == torch.float16
        torch.testing.assert_close(ours(x.half()), theirs(x.half()), rtol=2e-3, atol=2e-3)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert other.op.instance_key == ours.op.instance_key
        assert (other.bias is None) is (not bias)
    assert str(ours) == f"LayerNorm({ours.op.instance_key})"


def test_rms_norm_stands_in_for_torchs():
    theirs, ours = torch.nn.RMSNorm(127, 1e-5), ops.RMSNorm(127, 1e-5)
    with torch.no_grad():
        theirs.weight.normal_()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 127, requires_grad=True)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert ours(x).requires_grad
    assert ops.RMSNorm(8, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    assert ops.RMSNorm(8, device="meta").weight.is_meta
    moved = ops.RMSNorm(8, device="meta").to_empty(device="cpu")  # its values may be anything
    assert (moved.weight.device.type, moved.weight.shape) == ("cpu", (8,))


def test_a_module_says_so_where_a_dtype_has_no_kernel():
    with pytest.raises(SpecError, match="float64"):
        ops.RMSNorm(64).to(torch.float64)
    with pytest.raises(SpecError, match="float64"):
        ops.LayerNorm(64, dtype=torch.float64)


def test_a_moved_module_keeps_its_rows_and_what_a_miss_means():
    norm = ops.LayerNorm(64, rows="exact", on_miss="error", dtype=torch.float32)
    norm.bfloat16()
    assert norm.op.instance_key == (
        "layer_norm(N=64,eps=1e-05,dtype=bfloat16,bias=True,rows=exact,on_miss=error)"
    )


def test_each_kernel_factory_call_is_one_jit_impl(shared_root):
    kernels.rms_norm.cache_clear()
    first = kernels.rms_norm(9, 64, 1e-5, "float32", "cpu")
    assert kernels.rms_norm(9, 64, 1e-5, "float32", target="cpu") is first
    assert kernels.rms_norm.cache_info() == (1, 1, 128, 1, 0)
