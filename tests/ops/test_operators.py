"""Every operator gives what torch gives, in float64 and rounded once, for every row length, dtype,
layout and kind of number. On a GPU the same tests run there.
"""

from __future__ import annotations

import copy

import pytest
import torch

from tlcache import runtime
from tlcache.errors import CaptureError

pytestmark = pytest.mark.usefixtures("shared_root")


def _strided(tensor):
    """The same values with gaps between them."""
    if tensor is None or not tensor.dim():
        return tensor
    return torch.stack((tensor, tensor), -1)[..., 0]


def _transposed(tensor):
    """The same values in column-major order."""
    if tensor is None or tensor.dim() < 2:
        return tensor
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def _misaligned(tensor):
    """The same values, contiguous, one element past an address that a kernel takes."""
    if tensor is None:
        return None
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:]
    made = room.view(tensor.shape).copy_(tensor)
    assert made.is_contiguous()
    assert not made.numel() or made.data_ptr() % 16
    return made


# --- the grid ---


def test_values_are_those_of_torch_for_one_row_for_five_and_for_many(kernel):
    device, case, size, dtype = kernel
    before = runtime.counters().compiled
    op = case.op(size, dtype)
    for rows in (1, 5, 300):
        if rows == 300 and device == "cpu" and max(size) > 4096:
            continue
        inputs = case.inputs(rows, size, dtype, device)
        case.close(case.outputs(op, *inputs), *inputs)
        case.close(case.outputs(lambda *args: case.function(*args, **case.scalars), *inputs),
                   *inputs)  # fmt: skip
    assert runtime.counters().compiled == before


def test_no_rows_need_no_kernel(typed, device):
    case, dtype = typed
    op = case.op(case.usual, dtype, rows="exact", on_miss="error")
    inputs = case.inputs(0, case.usual, dtype, device)
    case.close(case.outputs(op, *inputs), *inputs)
    assert not op.state.kernels


# --- layouts ---


@pytest.mark.parametrize("layout", [_strided, _transposed, _misaligned])
def test_any_layout_gives_what_a_contiguous_copy_gives(typed, layout, device):
    case, dtype = typed
    op = case.op(case.usual, dtype)
    inputs = case.inputs(6, case.usual, dtype, device)
    want = [one.clone() for one in case.outputs(op, *inputs)]
    every = [layout(one) for one in inputs]
    if case.inplace:  # `outputs` would copy the layout away
        op(*every)
        have = every[:2]
    else:
        have = case.outputs(op, *every)
        assert all(one.is_contiguous() for one in have)
        for index, one in enumerate(every):
            mixed = [*inputs[:index], one, *inputs[index + 1 :]]
            for left, right in zip(case.outputs(op, *mixed), want, strict=True):
                assert torch.equal(left, right)
    for left, right in zip(have, want, strict=True):
        assert torch.equal(left, right)


def test_leading_axes_are_rows(case, device):
    dtype = case.dtypes[0]
    op = case.op(case.usual, dtype)
    inputs = case.inputs(6, case.usual, dtype, device)
    want = case.outputs(op, *inputs)
    rows = [index for index in range(len(inputs)) if case.rotates or index != case.weight]
    rows = [i for i in rows if inputs[i] is not None and inputs[i].shape[0] == 6]
    for lead in ((2, 3), (1, 6, 1), (3, 1, 2)):
        shaped = [
            one.reshape(*lead, *one.shape[1:]) if index in rows else one
            for index, one in enumerate(inputs)
        ]
        for have, flat in zip(case.outputs(op, *shaped), want, strict=True):
            assert torch.equal(have, flat.reshape(*lead, *flat.shape[1:]))


def test_a_single_row_needs_no_leading_axis(case, device):
    dtype = case.dtypes[0]
    op = case.op(case.usual, dtype)
    inputs = case.inputs(1, case.usual, dtype, device)
    bare = [one if one is None or one.shape[0] != 1 else one[0] for one in inputs]
    for have, want in zip(case.outputs(op, *bare), case.outputs(op, *inputs), strict=True):
        assert torch.equal(have, want[0])


def test_an_expanded_input_is_read_as_its_copy(case, device):
    if case.inplace:
        pytest.skip("an expanded tensor cannot be written")
    dtype = case.dtypes[0]
    op = case.op(case.usual, dtype)
    inputs = case.inputs(1, case.usual, dtype, device)
    many = [
        one.expand(4, *one.shape[1:]) if one is not None and one.shape[0] == 1 else one
        for one in inputs
    ]
    for have, want in zip(case.outputs(op, *many), case.outputs(op, *inputs), strict=True):
        assert torch.equal(have, want.expand(4, *want.shape[1:]))


def test_what_a_function_is_given_is_left_as_it_was(case, device):
    if case.inplace:
        pytest.skip("it writes its inputs")
    inputs = case.inputs(5, case.usual, case.dtypes[0], device)
    before = [one if one is None else one.clone() for one in inputs]
    outputs = case.outputs(case.op(case.usual, case.dtypes[0]), *inputs)
    for one, two in zip(inputs, before, strict=True):
        assert one is None or torch.equal(one, two)
    addresses = {one.data_ptr() for one in inputs if one is not None}
    assert not addresses & {one.data_ptr() for one in outputs}


def test_rope_tables_broadcast_over_the_leading_axes(case_of, device):
    for name in ("rope", "rope_interleaved"):
        case = case_of(name)
        H, D = case.usual
        op = case.op(case.usual, torch.float32)
        x = torch.randn(2, 5, H, D, device=device)
        for lead in ((5,), (1, 5), (2, 1), (1, 1), ()):
            angles = torch.randn(*lead, D // 2, device=device)
            full = angles.expand(2, 5, D // 2)
            assert torch.equal(op(x, angles.cos(), angles.sin()), op(x, full.cos(), full.sin()))


def test_in_place_both_are_written_where_they_lie(case_of, device):
    case = case_of("fused_add_rms_norm_")
    op = case.op(case.usual, torch.float32)
    wide = torch.randn(4, 2 * case.usual[0], device=device)
    x, residual = wide.chunk(2, -1)  # side by side, and so neither contiguous nor apart
    w = torch.randn(case.usual, device=device)
    given = x.clone(), residual.clone(), w
    op(x, residual, w)
    case.close((wide.chunk(2, -1)[0], wide.chunk(2, -1)[1]), *given)


@pytest.mark.parametrize(("left", "right"), [((0, 4), (0, 4)), ((0, 4), (2, 6)), ((2, 6), (0, 4))])
def test_in_place_inputs_that_share_memory_are_refused(case_of, device, left, right):
    case = case_of("fused_add_rms_norm_")
    room = torch.randn(6, case.usual[0], device=device)
    before = room.clone()
    with pytest.raises(ValueError, match="x and residual share memory"):
        case.op(case.usual, torch.float32)(
            room[slice(*left)], room[slice(*right)], torch.randn(case.usual, device=device)
        )
    assert torch.equal(room, before)


# --- kinds of numbers ---


def _filled(case, dtype, device, make):
    """Inputs of whose rows `make(rows, width)` are the values."""
    inputs = case.inputs(6, case.usual, dtype, device)
    x = inputs[0]
    values = make(x.shape[0], x[0].numel()).reshape(x.shape)
    inputs[0] = values.to(device=device, dtype=dtype)
    if case.name.startswith("fused"):
        inputs[1] = torch.zeros_like(x)
    return inputs


@pytest.mark.parametrize(
    "make",
    [
        lambda m, n: torch.full((m, n), 6e4) * torch.randn(m, n).sign(),
        lambda m, n: torch.full((m, n), 6e4),
        lambda m, n: torch.rand(m, n) * 6e4,
        lambda m, n: torch.zeros(m, n),
        lambda m, n: -torch.zeros(m, n),
        lambda m, n: torch.full((m, n), 1.0),
        lambda m, n: torch.randn(m, n) + 1000,
        lambda m, n: torch.randn(m, n) * 1e-4,
    ],
    ids=["large", "all large", "spread", "zeros", "negative zeros", "ones", "far off", "small"],
)
def test_values_are_right_for_large_small_and_equal_numbers(typed, make, device):
    case, dtype = typed
    inputs = _filled(case, dtype, device, make)
    outputs = case.outputs(case.op(case.usual, dtype), *inputs)
    assert not any(one.isnan().any() for one in outputs)
    if case.name.startswith("layer_norm"):
        # What is left of a difference from a mean that dwarfs it is bounded by the mean.
        mean = inputs[0].double().mean(-1, keepdim=True).abs()
        spread = inputs[0].double().std(-1, correction=0, keepdim=True)
        scale = (mean * torch.finfo(torch.float32).eps / (spread**2 + 1e-5).sqrt()).max().item()
        bound = 8 * scale * inputs[1].abs().max().item()
        want = case.wide(*inputs)[0]
        off = (outputs[0].double() - want).abs() - bound
        assert (off <= 1.6e-2 * want.abs().clamp(min=0.3)).all()
        return
    case.close(outputs, *inputs)


def test_nan_and_infinities_come_out_where_torch_has_them(typed, device):
    case, dtype = typed
    nan, inf = float("nan"), float("inf")
    inputs = case.inputs(9, case.usual, dtype, device)
    x = inputs[0].view(9, -1)
    x[1, 3], x[2, 5], x[3, 7] = nan, inf, -inf
    x[4, 0], x[4, -1] = inf, -inf
    x[5], x[6], x[7] = inf, -inf, nan
    if case.name.startswith("fused"):
        inputs[1][2, 5] = -inf  # inf - inf is NaN in the sum already
        inputs[1][8, 0] = inf
    outputs = case.outputs(case.op(case.usual, dtype), *inputs)
    # As torch has it on the CPU, and the formula: of a row with an infinity, torch's own rms_norm
    # on CUDA makes NaN of every element.
    narrow = case.formula(*[one if one is None else one.float().cpu() for one in inputs])
    for have, want in zip((one.cpu() for one in outputs), narrow, strict=True):
        assert torch.equal(have.isnan(), want.isnan())
        assert torch.equal(have.isposinf(), want.isposinf())
        assert torch.equal(have.isneginf(), want.isneginf())
    rows = [0] if case.name.startswith("fused") else [0, 8]
    some = [one if one is None or one.shape[0] != 9 else one[rows] for one in inputs]
    case.close(tuple(one[rows] for one in outputs), *some)


def test_nan_in_a_weight_comes_out_in_its_column(typed, device):
    case, dtype = typed
    if case.weight is None:
        pytest.skip("it has no weight")
    inputs = case.inputs(3, case.usual, dtype, device)
    inputs[case.weight][2] = float("nan")
    y = case.outputs(case.op(case.usual, dtype), *inputs)[0]
    column = torch.zeros(y.shape[-1], dtype=torch.bool, device=device)
    column[2] = True
    assert torch.equal(y.isnan(), column.expand(y.shape))


def test_subnormal_numbers_count(typed, device):
    case, dtype = typed
    least = torch.finfo(dtype).smallest_normal
    step = 2.0**-24 if dtype is torch.float16 else least / 128
    inputs = _filled(
        case, dtype, device, lambda m, n: (torch.arange(m * n) % 128 - 64).double() * step
    )
    assert (inputs[0] != 0).any()
    if case.name == "silu_and_mul":
        inputs[0][:, case.usual[0] :] = 1  # the product of two of them is nothing in any dtype
    outputs = case.outputs(case.op(case.usual, dtype), *inputs)
    for have, want in zip(outputs, case.wide(*inputs), strict=True):
        if case.name == "gemm":
            off = (have.double() - want).norm() - want.norm() * 0.02
        else:
            off = (have.double() - want).abs() - want.abs() * 0.02
        assert off.max().item() <= 2 * step, case.name
    if not case.name.startswith(("softmax", "layer_norm")):
        assert outputs[-1].count_nonzero()


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm", "fused_add_rms_norm_"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_squares_past_float32_give_the_zeros_that_torch_gives(case_of, name, dtype, device):
    case = case_of(name)
    inputs = _filled(case, dtype, device, lambda m, n: torch.full((m, n), 1e30))
    y = case.outputs(case.op(case.usual, dtype), *inputs)[0]
    want = case.formula(*[one.float() for one in inputs])[0]
    assert torch.equal(y.float(), want)
    assert not want.any()


def test_rounding_is_to_nearest_even(case, device):
    if case.name == "gemm":
        pytest.skip("its sums differ from torch's in their order")
    inputs = case.inputs(300, case.usual, torch.bfloat16, device)
    outputs = case.outputs(case.op(case.usual, torch.bfloat16), *inputs)
    for have, want in zip(outputs, case.wide(*inputs), strict=True):
        # Sums in float32 differ from float64 in few roundings; a wrong mode, in half of them.
        assert (have != want.to(torch.bfloat16)).float().mean().item() < 0.01


def test_equal_calls_give_equal_bits(case, device):
    for dtype in case.dtypes:
        op = case.op(case.usual, dtype)
        inputs = case.inputs(5, case.usual, dtype, device)
        first, second = case.outputs(op, *inputs), case.outputs(op, *inputs)
        for one, two in zip(first, second, strict=True):
            assert torch.equal(one, two)


def test_a_row_does_not_depend_on_those_beside_it(case, device):
    dtype = case.dtypes[0]
    op = case.op(case.usual, dtype)
    inputs = case.inputs(37, case.usual, dtype, device)
    all_rows = case.outputs(op, *inputs)
    for row in (0, 17, 36):
        alone = [one if one is None or one.shape[0] != 37 else one[row : row + 1] for one in inputs]
        for have, many in zip(case.outputs(op, *alone), all_rows, strict=True):
            assert torch.equal(have[0], many[row])


# --- CUDA graphs ---


@pytest.mark.gpu
@pytest.mark.parametrize("call_first", [True, False], ids=["after a call", "after warmup"])
def test_a_graph_captures_each_op_once_it_is_warm_and_replays_it(
    case, shared_root, warm, call_first
):
    warm("cuda")
    dtype = torch.bfloat16
    op = case.op(case.usual, dtype)
    inputs = case.inputs(7, case.usual, dtype, "cuda")
    op.warmup([7])
    if call_first:
        case.outputs(op, *inputs)
    torch.cuda.synchronize()
    given = [one if one is None else one.clone() for one in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = op(*inputs)
    outputs = inputs[:2] if case.inplace else made if isinstance(made, tuple) else (made,)
    for _ in range(3):
        fresh = case.inputs(7, case.usual, dtype, "cuda")
        for one, new, kept in zip(inputs, fresh, given, strict=True):
            if one is not None:
                one.copy_(new)
                kept.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        case.close(tuple(outputs), *given)


@pytest.mark.gpu
def test_a_cold_capture_is_refused_for_each_op_and_leaves_it_usable(case, shared_root):
    size = (5, 46) if case.rotates else (48, 48) if case.name == "gemm" else (46,)
    op = case.op(size, torch.bfloat16)
    inputs = case.inputs(3, size, torch.bfloat16, "cuda")
    torch.cuda.synchronize()
    with (
        pytest.raises(CaptureError, match=op.state.operator.name) as caught,
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        op(*inputs)
    assert "warmup" in str(caught.value.hint)
    before = copy.copy(runtime.counters())
    case.close(case.outputs(op, *inputs), *inputs)
    assert runtime.counters().compiled == before.compiled + 1
