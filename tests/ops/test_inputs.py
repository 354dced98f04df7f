"""Inputs that do not fit are refused in one sentence: the argument, what it is, what was wanted."""

from __future__ import annotations

import re

import pytest
import torch

import ops
from ops import inputs
from tlcache.errors import SpecError

pytestmark = pytest.mark.usefixtures("shared_root")

F32, F16, F64 = torch.float32, torch.float16, torch.float64


# --- the words ---


def test_the_first_fault_is_said_dtypes_before_shapes_before_devices():
    x, w = torch.empty(2, 3, dtype=F64), torch.empty(5, dtype=F16)
    say = lambda x, w: str(inputs.fault("op", F32, {"x": (x, ("…", 4)), "w": (w, (4,))}))  # noqa: E731
    assert say(x, w) == "x is torch.float64; this op takes torch.float32"
    assert say(x.float(), w) == "w is torch.float16; this op takes torch.float32"
    assert say(x.float(), w.float()) == "x has shape [2, 3]; this op takes […, 4]"
    assert say(torch.empty(2, 4), w.float()) == "w has shape [5]; this op takes [4]"
    meta = torch.empty(4, device="meta")
    assert say(torch.empty(2, 4), meta) == "x is on cpu and w on meta; they must be together"
    assert inputs.fault("op", F32, {"x": (torch.empty(2, 4), ("…", 4))}) is None


@pytest.mark.parametrize(
    ("shape", "wanted", "fits"),
    [
        ((4,), ("…", 4), True),
        ((), ("…", 4), False),
        ((4,), (4,), True),
        ((1, 4), (4,), False),
        ((2, 0, 4), ("…", 4), True),
        ((2, 3, 4), ("…", 3, 4), True),
        ((3, 4), ("…", 3, 4), True),
        ((4,), ("…", 3, 4), False),
        ((4, 3), ("…", 3, 4), False),
        ((), (), True),
        ((7, 4), ("rows", 4), True),
    ],
)
def test_a_leading_ellipsis_stands_for_any_axes_even_none(shape, wanted, fits):
    fault = inputs.fault("op", F32, {"x": (torch.empty(shape), wanted)})
    assert (fault is None) is fits


def test_an_input_may_have_a_dtype_of_its_own():
    expected = {"x": (torch.empty(2, dtype=F16), (2,)), "cos": (torch.empty(2), (2,))}
    assert inputs.fault("op", F16, expected, {"cos": F32}) is None
    assert "cos is torch.float32" in str(inputs.fault("op", F16, expected))


@pytest.mark.parametrize("value", [None, 1.0, [1.0], "x", torch.Size([4])])
def test_what_is_no_tensor_is_called_by_its_type(value):
    fault = inputs.fault("op", F32, {"x": (value, ("…", 4))})
    assert isinstance(fault, TypeError)
    assert str(fault) == f"x is a {type(value).__name__}; this op takes a tensor"
    with pytest.raises(TypeError, match=f"x is a {type(value).__name__}; op takes a tensor of"):
        inputs.dtype_name("op", "x", value)


@pytest.mark.parametrize(
    "dtype", [F64, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]
)
def test_other_dtypes_have_no_name_here(dtype):
    with pytest.raises(TypeError, match=f"x is {re.escape(str(dtype))}; op takes a tensor of bfl"):
        inputs.dtype_name("op", "x", torch.empty(2, dtype=dtype))


# --- made fit ---


def test_a_kernel_takes_contiguous_tensors_at_multiples_of_sixteen_bytes():
    room = torch.arange(65, dtype=F32)
    for tensor, fits in (
        (room[:64], True),
        (room[4:], True),
        (room[1:], False),
        (room[2:], False),
        (room[::2], False),
        (room[:64].view(8, 8).t(), False),
        (room[:1].expand(4), False),
        (room[:0], True),
    ):
        assert inputs.fits(tensor) is fits
        made = inputs.fit(tensor)
        assert inputs.fits(made)
        assert torch.equal(made, tensor)
        assert (made is tensor) is fits
    assert inputs.fits()
    assert not inputs.fits(room[:64], room[1:])


# --- the operators ---


def _wrong(case):
    """(which input, wrong tensor, error, message) for an operator at its usual size."""
    dtype = case.dtypes[0]
    good = case.inputs(4, case.usual, dtype)
    for index, one in enumerate(good):
        if one is None:
            continue
        yield index, one.double(), TypeError, "is torch.float64; .* takes torch"
        yield index, one.to(torch.int32), TypeError, "is torch.int32; .* takes torch"
        yield index, one[..., :-1], ValueError, r"has shape \[.*\]; .* takes"
        yield index, torch.cat((one, one), -1), ValueError, r"has shape \[.*\]; .* takes"
        yield index, one.sum(), ValueError, r"has shape \[\]; .* takes"
        if len([one for one in good if one is not None]) > 1:
            yield index, one.to("meta"), ValueError, "(is|on) .*meta"


NAMES = {
    "rms_norm": ["x", "weight"],
    "fused_add_rms_norm": ["x", "residual", "weight"],
    "layer_norm": ["x", "weight", "bias"],
    "silu_and_mul": ["x"],
    "softmax": ["x"],
    "rope": ["x", "cos", "sin"],
    "gemm": ["x", "weight"],
}


def test_each_input_of_each_op_that_does_not_fit_is_named_with_what_it_is(case):
    dtype = case.dtypes[0]
    op = case.op(case.usual, dtype, on_miss="error")
    names = NAMES[op.state.operator.name]
    for index, wrong, error, says in _wrong(case):
        given = case.inputs(4, case.usual, dtype)
        before = [one if one is None else one.clone() for one in given]
        given[index] = wrong
        with pytest.raises(error, match=says) as caught:
            op(*given)
        assert re.search(rf"\b{names[index]}\b", str(caught.value)), str(caught.value)
        for position, (one, two) in enumerate(zip(given, before, strict=True)):
            assert position == index or one is None or torch.equal(one, two)


def test_a_layout_without_strides_is_refused_by_name(case, device):
    op = case.op(case.usual, case.dtypes[0])
    for index, name in enumerate(NAMES[op.state.operator.name]):
        given = case.inputs(4, case.usual, case.dtypes[0], device)
        if given[index] is None:
            continue
        given[index] = given[index].to_sparse()
        says = f"{name} is torch.sparse_coo; this {op.state.name} takes torch.strided"
        with pytest.raises(TypeError, match=says):
            op(*given)


def test_the_same_faults_are_said_by_the_dispatcher_op(case):
    dtype = case.dtypes[0]
    op = case.op(case.usual, dtype)
    for index, wrong, error, says in _wrong(case):
        if wrong.is_meta:
            continue  # torch itself has no kernel for two devices
        given = case.inputs(4, case.usual, dtype)
        given[index] = wrong
        with pytest.raises(error, match=says):
            op.dispatch(*given, op.instance_key)
        meta = [one if one is None else one.to("meta") for one in given]
        with pytest.raises(error, match=says):
            op.dispatch(*meta, op.instance_key)


@pytest.mark.parametrize("value", [None, [1.0], 3])
def test_what_is_no_tensor_is_refused_by_name(case, value):
    op = case.op(case.usual, case.dtypes[0])
    names = NAMES[op.state.operator.name]
    for index, name in enumerate(names):
        given = case.inputs(2, case.usual, case.dtypes[0])
        if given[index] is None:
            continue
        given[index] = value
        with pytest.raises((TypeError, RuntimeError), match=rf"\b{name}\b"):
            op(*given)


@pytest.mark.parametrize("dtype", [F64, torch.int64, torch.float8_e5m2], ids=str)
def test_functions_say_which_dtypes_there_are(case, dtype):
    given = case.inputs(2, case.usual, case.dtypes[0])
    given[0] = given[0].to(dtype)
    with pytest.raises(TypeError, match=f"x is {dtype}; .* takes .*bfloat16"):
        case.function(*given, **case.scalars)


def test_gemm_takes_no_float32():
    with pytest.raises((TypeError, SpecError), match=r"float32.*bfloat16"):
        ops.gemm(torch.randn(2, 8), torch.randn(4, 8))
    with pytest.raises(SpecError, match="dtype is 'float32'"):
        ops.GemmFwdOp(8, 8, torch.float32)


def test_a_bias_is_there_or_not_as_the_op_says():
    x, w = torch.randn(2, 127), torch.randn(127)
    with pytest.raises(TypeError, match="layer_norm takes a bias, and was given none"):
        ops.LayerNormFwdOp(127, 1e-5, F32)(x, w)
    with pytest.raises(TypeError, match="layer_norm takes no bias, and was given one"):
        ops.LayerNormFwdOp(127, 1e-5, F32, bias=False)(x, w, w)


@pytest.mark.parametrize("width", [1, 3, 127])
def test_a_row_of_odd_length_is_no_gate_and_up(width):
    with pytest.raises(ValueError, match=rf"x has shape \[2, {width}\]; silu_and_mul takes .*2N"):
        ops.silu_and_mul(torch.randn(2, width))


@pytest.mark.parametrize(
    ("shape", "table"),
    [
        ((2, 5, 3, 34), (4, 17)),
        ((2, 5, 3, 34), (2, 17)),
        ((2, 5, 3, 34), (3, 5, 17)),
        ((5, 3, 34), (1, 5, 17)),
        ((3, 34), (1, 17)),
    ],
)
def test_tables_that_do_not_broadcast_over_the_tokens_are_refused(shape, table):
    op = ops.RopeFwdOp(3, 34, F32)
    x, cos = torch.randn(shape), torch.randn(table)
    with pytest.raises(ValueError, match=r"cos has shape .* rope takes .*broadcasts to it"):
        op(x, cos, cos)
    right = torch.randn(17)
    with pytest.raises(ValueError, match="sin has shape"):
        op(x, right, cos)


def test_x_without_axes_is_refused_by_the_functions():
    scalar = torch.tensor(1.0)
    for call in (
        lambda: ops.softmax(scalar),
        lambda: ops.silu_and_mul(scalar),
        lambda: ops.rms_norm(scalar, torch.ones(1)),
        lambda: ops.layer_norm(scalar, torch.ones(1)),
        lambda: ops.rope(scalar, scalar, scalar),
    ):
        with pytest.raises(ValueError, match=r"x has shape \[\]"):
            call()


def test_rows_of_no_elements_are_refused(case):
    if case.rotates or case.name == "gemm":
        pytest.skip("it has other sizes")
    with pytest.raises(SpecError, match="N is 0"):
        case.op((0,), case.dtypes[0])
    with pytest.raises((SpecError, ValueError)):
        case.function(*case.inputs(2, (0,), case.dtypes[0]), **case.scalars)


@pytest.mark.gpu
def test_tensors_of_two_devices_are_refused_with_both(case):
    given = case.inputs(2, case.usual, case.dtypes[0], "cuda")
    if len(given) == 1:
        pytest.skip("it has one input")
    given[0] = given[0].cpu()
    with pytest.raises(ValueError, match=r"x is on cpu and .* on cuda:0; they must be together"):
        case.op(case.usual, case.dtypes[0])(*given)
