"""Keys, shared state, layer 3, and which calls may go past torch's dispatcher."""

from __future__ import annotations

import copy
import gc
import importlib
import logging
import pickle
import threading
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import ops
from ops import op as op_module
from ops.op import instance_key, state
from tlcache import runtime
from tlcache.errors import CaptureError, KernelError, MissError, SpecError, TlcacheError

pytestmark = pytest.mark.usefixtures("shared_root")

F32 = torch.float32
EPS = 1e-5


def _factory(op):
    """Layer 2 of an op."""
    module, _, name = op.state.operator.kernel.partition(":")
    return getattr(importlib.import_module(module), name)


def _counts(op):
    """What the layers below layer 3 have done so far."""
    return copy.copy(runtime.counters()), _factory(op).cache_info(), op.state.misses


# --- keys ---

dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
eps = st.floats(0, 1e29, allow_nan=False)
flags = st.booleans()
row_schedules = st.sampled_from(
    [
        None,
        {"block_m": 1, "threads": 1, "each": 1, "prefetch": False},
        {"block_m": 4, "threads": 128, "each": 2, "prefetch": True},
    ]
)
common = {
    "rows": st.sampled_from(["auto", "exact", "dynamic"]),
    "on_miss": st.sampled_from(["compile", "error"]),
}
widths = st.integers(1, 65536)
norms = {"N": widths, "eps": eps, "dtype": dtypes, "schedule": row_schedules}
OPS = st.one_of(
    *[
        st.builds(kind, **arguments, **common)
        for kind, arguments in (
            (ops.RMSNormFwdOp, norms),
            (ops.FusedAddRMSNormFwdOp, norms),
            (ops.FusedAddRMSNormInplaceFwdOp, norms),
            (ops.LayerNormFwdOp, {**norms, "bias": flags}),
            (
                ops.SiluAndMulFwdOp,
                {
                    "N": st.integers(1, 262144),
                    "dtype": dtypes,
                    "schedule": st.sampled_from([None, {"threads": 64, "vectors": 2}]),
                },
            ),
            (
                ops.RopeFwdOp,
                {
                    "H": st.integers(1, 1024),
                    "D": st.integers(1, 512).map(lambda half: 2 * half),
                    "dtype": dtypes,
                    "interleaved": flags,
                    "schedule": st.sampled_from([None, {"threads": 1}, {"threads": 512}]),
                },
            ),
            (ops.SoftmaxFwdOp, {"N": widths, "dtype": dtypes}),
            (
                ops.GemmFwdOp,
                {
                    "N": st.integers(1, 2**20),
                    "K": st.integers(1, 2**20),
                    "dtype": st.sampled_from([torch.bfloat16, torch.float16]),
                },
            ),
        )
    ]
)


@given(OPS)
@settings(max_examples=300, deadline=None)
def test_a_key_says_all_that_a_fresh_process_needs_to_rebuild_the_state(op):
    key, held = op.instance_key, op.state
    fresh = type(held)(key)  # as `state(key)` does where no op holds one
    unused = {"kernels": {}, "hits": 0, "misses": 0, "instances": fresh.instances}
    assert vars(fresh) == {**vars(held), **unused}
    values = {**fresh.values, "rows": fresh.rows, "on_miss": fresh.on_miss}
    if fresh.schedule is not None:
        values["schedule"] = fresh.schedule
    assert instance_key(fresh.name, values) == key
    assert state(key) is held
    for other in (copy.copy(op), copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert type(other) is type(op)
        assert other.instance_key == key
        assert other.state is held
        assert other.dtype == op.dtype
    assert pickle.loads(pickle.dumps(held)) is held
    assert repr(op) == f"{type(op).__name__}({key})"


@given(OPS, OPS)
@settings(max_examples=100, deadline=None)
def test_ops_share_a_state_exactly_if_their_keys_are_equal(first, second):
    assert (first.state is second.state) == (first.instance_key == second.instance_key)


def test_what_is_the_default_is_not_in_a_key():
    assert ops.RMSNormFwdOp(64).instance_key == "rms_norm(N=64,eps=1e-06,dtype=bfloat16)"
    assert (
        ops.RopeFwdOp(2, 8, F32, True, rows="exact", on_miss="error").instance_key
        == "rope(H=2,D=8,dtype=float32,interleaved=True,rows=exact,on_miss=error)"
    )
    assert ops.FusedAddRMSNormInplaceFwdOp(64).instance_key.startswith("fused_add_rms_norm_(")


def test_fields_left_out_of_a_key_have_the_workloads_defaults():
    short, long = state("rms_norm(N=64)"), state("rms_norm(N=64,eps=1e-06,dtype=bfloat16)")
    assert short.values == long.values
    assert short.dtype == long.dtype == torch.bfloat16
    assert state("rms_norm(N=64,dtype=fp16)").dtype == torch.float16
    x = torch.randn(2, 127)
    assert torch.equal(
        state("layer_norm(N=127,dtype=fp32)").run(x, x[0], x[1]), ops.layer_norm(x, x[0], x[1])
    )


HOSTILE = [
    "",
    " ",
    "rms_norm",
    "rms_norm(",
    "rms_norm()",
    "rms_norm(N=64",
    "rms_norm(N=64)x",
    "rms_norm(N=64)\n",
    " rms_norm(N=64)",
    "rms_norm(N=64,,eps=1)",
    "rms_norm(N=64,)",
    "rms_norm(N)",
    "rms_norm(N=)",
    "rms_norm(=64)",
    "rms_norm(N=1,N=2)",
    "rms_norm(N=64;eps=1)",
    "rms_norm(N=64,eps=__import__('os'))",
    "rms_norm(N=64.0)",
    "rms_norm(N=True)",
    "rms_norm(N=six)",
    "rms_norm(N=0)",
    "rms_norm(N=-1)",
    "rms_norm(N=65537)",
    "rms_norm(N=" + "9" * 5000 + ")",
    "rms_norm(N=64,eps=nan)",
    "rms_norm(N=64,eps=inf)",
    "rms_norm(N=64,eps=-1)",
    "rms_norm(N=64,eps=True)",
    "rms_norm(N=64,dtype=float64)",
    "rms_norm(N=64,dtype=nan)",
    "rms_norm(N=64,rows=some)",
    "rms_norm(N=64,rows=1)",
    "rms_norm(N=64,on_miss=ignore)",
    "rms_norm(N=64,schedule=fast)",
    "rms_norm(N=64,schedule=block_m:1)",
    "rms_norm(N=64,schedule=block_m:1+threads:1+each:1+prefetch:maybe)",
    "rms_norm(N=64,schedule=block_m:3+threads:96+each:1+prefetch:False)",
    "rms_norm(N=64,M=5)",
    "rms_norm(M=dynamic,N=64)",
    "rms_norm(N=64,target=cpu)",
    "rms_norm(N=64,inplace=True)",
    "fused_add_rms_norm(N=64,inplace=True)",
    "fused_add_rms_norm(N=64,inplace=False)",
    "fused_add_rms_norm_(N=64,inplace=False)",
    "layer_norm(N=64,bias=1)",
    "layer_norm(N=64,bias=yes)",
    "rope(H=2)",
    "rope(H=2,D=7)",
    "rope(H=2,D=8,interleaved=0)",
    "gemm(N=8,K=8,dtype=float32)",
    "nothing(N=64)",
    "__class__(N=64)",
    "rms_norm_(N=64)",
]


@pytest.mark.parametrize("key", HOSTILE)
def test_a_key_that_says_something_impossible_is_refused_wherever_it_comes_in(key):
    with pytest.raises(SpecError):
        state(key)
    assert key not in op_module._live
    x = torch.randn(2, 64)
    for tensor in (x, x.to("meta")):
        with pytest.raises(SpecError):
            torch.ops.tilelang_ops.rms_norm(tensor, tensor[0], key)


FIELDS = st.lists(
    st.tuples(
        st.sampled_from(["N", "eps", "dtype", "rows", "M", "bias", "schedule", "inplace", "x"]),
        st.one_of(
            st.integers().map(str),
            st.floats().map(repr),
            st.sampled_from(["auto", "exact", "bfloat16", "True", "block_m:1", "a:b:c", "+", ""]),
            st.text(max_size=4),
        ),
    ),
    max_size=5,
)


@given(
    st.one_of(
        st.text(max_size=40),
        st.builds(
            lambda name, fields: f"{name}({','.join(f'{key}={value}' for key, value in fields)})",
            st.sampled_from(["rms_norm", "layer_norm", "fused_add_rms_norm_", "gemm", "other"]),
            FIELDS,
        ),
    )
)
@settings(max_examples=400, deadline=None)
def test_any_text_is_a_key_or_a_spec_error(text):
    try:
        found = state(text)
    except SpecError as error:
        assert str(error)
    else:
        assert found.key == text
        found.spec("dynamic", op_module.targets.CPU if found.schedule is None else _fitting(found))


def _fitting(found):
    for target in (op_module.targets.CPU, op_module.targets.for_capability(9, 0)):
        try:
            found.spec("dynamic", target)
        except SpecError:
            continue
        return target
    raise AssertionError("a state that fits no device")


# --- shared state ---


def test_a_state_goes_with_the_last_op_that_holds_it():
    first, second = ops.SoftmaxFwdOp(56), ops.SoftmaxFwdOp(56)
    key, held = first.instance_key, first.state
    assert second.state is held
    assert held in op_module.states()
    del first, held
    gc.collect()
    assert key in op_module._live
    del second
    gc.collect()
    assert key not in op_module._live


def test_a_state_that_the_dispatcher_asked_for_stays():
    key = "softmax(N=127,dtype=float32,on_miss=error,rows=dynamic)"
    x = torch.empty(0, 127)
    assert torch.ops.tilelang_ops.softmax(x, key).shape == (0, 127)
    gc.collect()
    assert op_module._live[key] is state(key)


def test_equal_calls_of_a_function_share_one_op():
    x = torch.randn(3, 127)
    ops.softmax(x)
    found = op_module.shared(ops.SoftmaxFwdOp, "auto", 127, F32)
    before = found.state.misses
    ops.softmax(x), ops.softmax(torch.randn(3, 127))
    assert op_module.shared(ops.SoftmaxFwdOp, "auto", 127, F32) is found
    assert found.state.misses == before


def test_sixteen_threads_get_one_state_for_one_key():
    key = "layer_norm(N=977,eps=0.5,dtype=float32,bias=True)"
    barrier = threading.Barrier(16)
    found = []

    def work():
        barrier.wait()
        found.append(state(key))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one) for one in found}) == 1


# --- rows and misses ---


def test_rows_say_which_kernels_there_are():
    x = torch.randn(6, 83)
    for rows, wanted in (
        ("dynamic", {2: "dynamic", 6: "dynamic"}),
        ("exact", {2: 2, 6: 6}),
        ("auto", {2: 2, 6: 6}),  # the exact ones are there now
    ):
        op = ops.SoftmaxFwdOp(83, F32, rows=rows)
        assert torch.equal(op(x[:2]), ops.SoftmaxFwdOp(83, F32, rows="dynamic")(x)[:2])
        op(x)
        found = {rows: kernel.workload["M"] for (_, rows), kernel in op.state.kernels.items()}
        assert found == wanted
    op = ops.SoftmaxFwdOp(83, F32)
    op(x[:3])
    assert op.state.kernels[-1, 3].workload["M"] == "dynamic"
    assert op.state.kernels[-1, 3].schedule == op.state.kernels[-1, 3].spec.schedule


def test_warmup_has_the_kernels_in_hand_before_the_first_launch():
    op = ops.SoftmaxFwdOp(127, F32, rows="dynamic")
    op.state.kernels.clear()
    op.warmup([1, 2, 64], device=-1)
    before = _counts(op)
    for rows in (1, 2, 64, 2, 1):
        op(torch.randn(rows, 127))
    assert _counts(op) == before


def test_a_state_may_be_asked_for_at_any_values_without_a_device(case):
    op = case.op(case.usual, case.dtypes[-1], rows="exact", on_miss="error")
    assert not op.state.kernels
    for target in (op_module.targets.CPU, op_module.targets.for_capability(9, 0)):
        assert op.state.spec(17, target).workload["M"] == 17


def test_forty_row_counts_in_a_cycle_ask_the_layers_below_once_each():
    op = ops.SoftmaxFwdOp(127, F32, rows="dynamic")
    op.state.kernels.clear()
    op.state.misses = 0
    tensors = [torch.randn(rows, 127) for rows in range(1, 41)]
    for x in tensors:
        op(x)
    assert op.state.misses == len(op.state.kernels) == 40
    before = _counts(op)
    for _ in range(3):
        for x in tensors:
            op(x)
    assert _counts(op) == before


def test_a_value_that_left_layer_two_costs_no_kernel_that_is_loaded():
    factory = _factory(ops.SoftmaxFwdOp(2))
    size = factory.cache_info().maxsize
    op = ops.SoftmaxFwdOp(59, F32, rows="exact")
    tensors = [torch.randn(rows, 59) for rows in (1, 2, 3)]
    factory.resize(2)
    try:
        gone = factory.cache_info().evictions
        wanted = [op(x) for x in tensors]
        assert factory.cache_info().evictions > gone
        before = _counts(op)
        for _ in range(3):
            for x, want in zip(tensors, wanted, strict=True):
                assert torch.equal(op(x), want)
        assert _counts(op) == before
    finally:
        factory.resize(size)


def test_sixteen_threads_on_one_cold_kernel_compile_it_once():
    op = ops.SoftmaxFwdOp(61, F32)
    x = torch.randn(4, 61)
    before, info, _ = _counts(op)
    barrier = threading.Barrier(16)
    results = []

    def work():
        barrier.wait()
        results.append(op(x))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after, now, _ = _counts(op)
    assert after.compiled == before.compiled + 1
    assert after.restored == before.restored
    assert now.misses == info.misses + 1
    assert len(results) == 16
    assert all(torch.equal(one, results[0]) for one in results)
    assert list(op.state.kernels) == [(-1, 4)]


# --- counts ---


def test_each_launch_is_counted_as_the_hit_or_the_miss_that_it_was(case):
    op = case.op(case.usual, F32 if F32 in case.dtypes else case.dtypes[0])
    state = op.state
    state.kernels.clear()
    state.hits = state.misses = 0
    for rows in 3, 3, 5, 3:
        op(*case.inputs(rows, case.usual, op.dtype))
    assert (state.hits, state.misses, len(state.kernels)) == (2, 2, 2)
    inputs = case.inputs(3, case.usual, op.dtype)
    op.dispatch(*inputs, op.instance_key)
    case.function(*inputs, **case.scalars)
    case.function(*case.inputs(3, case.usual, op.dtype), **case.scalars)
    assert (state.hits, state.misses) == (5, 2)
    op(*case.inputs(0, case.usual, op.dtype))
    op.warmup([3, 7], -1)
    assert (state.hits, state.misses) == (5, 3)


def test_a_launch_that_was_refused_is_no_hit():
    op, w = ops.RMSNormFwdOp(127, EPS, F32), torch.randn(127)
    ops.rms_norm(torch.randn(3, 127), w, EPS)
    ops.rms_norm(torch.randn(3, 127), w, EPS)
    before = op.state.hits
    with pytest.raises(ValueError, match=r"this rms_norm takes"):
        ops.rms_norm(torch.randn(3, 127), torch.randn(126), EPS)
    with pytest.raises(TypeError):
        op(torch.randn(3, 127).double(), w)
    assert op.state.hits == before


def test_threads_launch_at_once_and_no_hit_is_lost():
    op, x, w = ops.RMSNormFwdOp(127, EPS, F32), torch.randn(3, 127), torch.randn(127)
    op(x, w)
    before, barrier = op.state.hits, threading.Barrier(8)

    def launch():
        barrier.wait()
        for _ in range(2000):
            op(x, w)
            ops.rms_norm(x, w, EPS)

    threads = [threading.Thread(target=launch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert op.state.hits == before + 8 * 2 * 2000


def test_the_ops_that_hold_a_state_are_counted_while_they_live():
    state = ops.SoftmaxFwdOp(57).state
    gc.collect()
    assert len(state.instances) == 0
    first = ops.SoftmaxFwdOp(57)
    others = [copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    assert len(state.instances) == 4
    del first, others[1:]
    gc.collect()
    assert list(state.instances) == others


# --- freeze and ready ---


@pytest.fixture
def thawed():
    """Take back whatever a test says about the process."""
    yield
    ops.freeze(False)
    ops.mark_ready(False)


def test_a_frozen_process_says_what_is_missing_and_how_to_warm_it(thawed, case):
    size = {1: (89,), 2: (5, 90) if case.rotates else (89, 90)}[len(case.usual)]
    inputs = case.inputs(3, size, case.dtypes[0])
    warm = case.op(case.usual, case.dtypes[0])
    known = case.inputs(3, case.usual, case.dtypes[0])
    case.outputs(warm, *known)
    ops.freeze()
    cold = case.op(size, case.dtypes[0])
    for call in (
        cold,
        lambda *args: case.function(*args, **case.scalars),
        lambda *args: cold.dispatch(*args, cold.instance_key),
        lambda *args: cold.warmup([3], device=-1),
    ):
        with pytest.raises(MissError) as caught:
            call(*inputs)
        assert f"{cold.state.operator.name} M=" in caught.value.message
        assert all(f"={value} " in caught.value.message for value in size)
        assert "frozen" in caught.value.message
        assert "tlcache warm --shapes shapes.json --target cpu" in caught.value.hint
    case.outputs(warm, *known)  # what is loaded goes on serving
    assert not cold.state.kernels


def test_a_frozen_process_thaws(thawed):
    op = ops.SoftmaxFwdOp(67, F32)
    ops.freeze()
    with pytest.raises(TlcacheError):
        op(torch.randn(2, 67))
    ops.freeze(False)
    assert op(torch.randn(2, 67)).shape == (2, 67)


def test_a_frozen_process_still_restores_what_was_warmed(thawed, python, shared_root, monkeypatch):
    ops.softmax(torch.randn(2, 127))
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(shared_root))
    done = python(
        "import torch, ops\n"
        "ops.freeze()\n"
        "ops.softmax(torch.randn(2, 127))\n"
        "from tlcache import runtime\n"
        "print(runtime.counters().restored)"
    )
    assert done.code == 0, done.err
    assert done.out.strip() == "1"


def test_a_compile_after_the_process_was_marked_ready_is_logged_and_counted(thawed, caplog):
    ops.softmax(torch.randn(2, 127))
    ops.mark_ready()
    before = copy.copy(runtime.counters())
    with caplog.at_level(logging.WARNING, "tlcache"):
        ops.softmax(torch.randn(3, 127))
        assert not caplog.records
        ops.softmax(torch.randn(3, 71))
    after = runtime.counters()
    assert (after.after_ready, after.compiled) == (before.after_ready + 1, before.compiled + 1)
    (said,) = [one.getMessage() for one in caplog.records if one.name.startswith("tlcache")]
    assert "softmax M=dynamic N=71" in said
    assert "after this process was marked ready" in said
    assert "tlcache warm" in said
    ops.mark_ready(False)
    ops.softmax(torch.randn(3, 73))
    assert runtime.counters().after_ready == after.after_ready


def test_on_miss_error_holds_for_one_op_only():
    strict = ops.SoftmaxFwdOp(79, F32, on_miss="error")
    x = torch.randn(2, 79)
    with pytest.raises(MissError, match="softmax M=dynamic N=79"):
        strict(x)
    want = ops.SoftmaxFwdOp(79, F32)(x)
    assert torch.equal(strict(x), want)


# --- past the dispatcher, and not ---


class Watching(TorchDispatchMode):
    """Keeps the names of what goes by."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Tagged(torch.Tensor):
    """A subclass that unwraps itself, and counts how often it was asked."""

    asked: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.asked.append(str(func))
        plain = [one.inner if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


def _typical(case):
    dtype = case.dtypes[0]
    return case.op(case.usual, dtype), case.inputs(3, case.usual, dtype)


def test_a_plain_call_goes_past_the_dispatcher(case):
    inputs = _typical(case)[1]
    assert op_module.direct(*inputs)
    with torch.inference_mode():
        assert op_module.direct(*inputs)
        assert op_module.direct(*case.inputs(3, case.usual, case.dtypes[0]))
    with torch.no_grad():
        assert op_module.direct(*[one if one is None else one.requires_grad_() for one in inputs])
    for one in inputs:
        if one is not None:
            assert not op_module.direct(*inputs)
            one.requires_grad_(False)
    assert op_module.direct(*inputs)


def test_parameters_go_past_the_dispatcher_where_no_gradient_is_wanted():
    x, w = torch.randn(2, 127), torch.nn.Parameter(torch.randn(127))
    assert not op_module.direct(x, w)
    with torch.no_grad():
        assert op_module.direct(x, w)
    w.requires_grad_(False)
    assert op_module.direct(x, w)


def test_a_dispatch_mode_sees_each_op(case):
    op, inputs = _typical(case)
    want = case.outputs(op, *inputs)
    with Watching() as watching:
        assert not op_module.direct(*inputs)
        have = case.outputs(op, *inputs)
    name = f"tilelang_ops.{op.state.name}.default"
    assert [one for one in watching.seen if "tilelang" in one] == [name]
    for one, two in zip(have, want, strict=True):
        assert torch.equal(one, two)


def test_fake_tensors_get_fake_outputs(case):
    op, inputs = _typical(case)
    before = _counts(op)
    with FakeTensorMode() as mode:
        fakes = [one if one is None else mode.from_tensor(one) for one in inputs]
        made = op(*fakes)
        inside = op(*case.inputs(3, case.usual, case.dtypes[0]))
    assert not op_module.direct(*fakes)
    if case.inplace:
        assert made is inside is None
    else:
        for fake, real in zip(
            made if isinstance(made, tuple) else (made,), case.outputs(op, *inputs), strict=True
        ):
            assert fake.shape == real.shape
            assert (fake.dtype, fake.stride()) == (real.dtype, real.stride())
            assert type(fake).__name__ == "FakeTensor"
    assert _counts(op)[1] == before[1]


def test_meta_tensors_get_meta_outputs_and_no_kernel(case):
    op = case.op(case.usual, case.dtypes[0], on_miss="error", rows="exact")
    inputs = [
        one if one is None else one.to("meta")
        for one in case.inputs(977, case.usual, case.dtypes[0])
    ]
    assert not op_module.direct(*inputs)
    made = op(*inputs)
    if not case.inplace:
        for one in made if isinstance(made, tuple) else (made,):
            assert one.is_meta
            assert one.is_contiguous()
    assert not op.state.kernels


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_one_node(case, mode):
    op, inputs = _typical(case)
    graph = make_fx(lambda *args: op(*args), tracing_mode=mode)(*inputs)
    ours = [node for node in graph.graph.nodes if "tilelang" in str(node.target)]
    assert [str(node.target) for node in ours] == [f"tilelang_ops.{op.state.name}.default"]
    assert ours[0].args[-1] == op.instance_key
    other = case.inputs(3, case.usual, case.dtypes[0])
    for one, two in zip(case.outputs(graph, *other), case.outputs(op, *other), strict=True):
        assert torch.equal(one, two)


def test_a_subclass_is_asked_first():
    x = torch.randn(3, 127)
    tagged = Tagged(x)
    Tagged.asked.clear()
    assert not op_module.direct(tagged)
    assert torch.equal(ops.softmax(tagged), ops.softmax(x))
    assert Tagged.asked == ["tilelang_ops.softmax.default"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
def test_vmap_and_the_gradients_of_torch_func_are_not_passed_by():
    x = torch.randn(4, 127)
    seen = []

    def call(x):
        seen.append(op_module.direct(x))
        return x

    torch.func.vmap(call)(x)
    torch.func.grad(lambda x: call(x).sum())(x)
    torch.func.jvp(call, (x,), (x,))
    torch.func.functionalize(call)(x)
    with torch.autograd.forward_ad.dual_level():
        call(torch.autograd.forward_ad.make_dual(x, x))
    torch.compile(call, backend="eager", fullgraph=True)
    assert seen == [False] * 5


# --- tuning ---


def test_an_op_with_a_schedule_of_its_own_is_not_tuned():
    schedule = {"block_m": 1, "threads": 1, "each": 1, "prefetch": False}
    op = ops.RMSNormFwdOp(64, dtype=torch.float32, schedule=schedule)
    with pytest.raises(SpecError, match="has a schedule of its own"):
        op.tune([1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune on")
def test_tuning_without_a_gpu_says_what_the_command_says():
    with pytest.raises(KernelError, match=r"ended with 3: error: tuning measures kernels on a GPU"):
        ops.RMSNormFwdOp(64, dtype=torch.float32).tune([1, "dynamic"])


@pytest.mark.gpu
def test_what_an_op_was_tuned_to_is_what_it_launches_from_then_on(close, tmp_path, monkeypatch):
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    op = ops.RMSNormFwdOp(4096, 1e-5, torch.bfloat16, rows="exact")
    told = op.tune([3], limit=4)
    (task,) = told["tasks"]
    x = torch.randn(3, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    before = copy.copy(runtime.counters())
    close(op(x, w), x, w)
    assert dict(op.state.kernels[x.get_device(), 3].schedule) == task["tuned"]["spec"]["schedule"]
    assert runtime.counters().compiled == before.compiled == 0


@pytest.mark.gpu
def test_tuning_during_a_capture_is_refused():
    op = ops.RMSNormFwdOp(4096, 1e-5, torch.bfloat16)
    torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(CaptureError, match="tuned"):
        op.tune([1])
