"""What torch sees of an operator: one opaque node that can be checked, traced, exported, batched
and differentiated, or says clearly that it cannot.
"""

from __future__ import annotations

import collections
import os
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import ops
from tlcache import runtime
from tlcache.errors import GradientError

pytestmark = pytest.mark.usefixtures("shared_root")

F = torch.nn.functional
F32 = torch.float32
INFERENCE = [
    "fused_add_rms_norm",
    "layer_norm",
    "layer_norm_without_bias",
    "rope",
    "rope_interleaved",
    "softmax",
    "gemm",
]
# Torch's own, at the first use of the forward mode.
forward_mode = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Recording:
    """A backend that runs a graph as it is and keeps it."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward

    @property
    def called(self):
        """What each graph calls, getters aside."""
        return [
            [
                str(node.target)
                for node in graph.graph.nodes
                if node.op not in ("placeholder", "output", "get_attr")
                and "getitem" not in str(node.target)
            ]
            for graph in self.graphs
        ]


def _typical(case, rows=3):
    dtype = case.dtypes[0]
    return case.op(case.usual, dtype), case.inputs(rows, case.usual, dtype)


def _equal(have, want):
    assert len(have) == len(want)
    for one, two in zip(have, want, strict=True):
        assert torch.equal(one, two)


# --- registration ---


def test_each_operator_has_two_overloads(case):
    op, _ = _typical(case)
    packet = getattr(torch.ops.tilelang_ops, op.state.name)
    assert sorted(packet.overloads()) == ["default", "scalars"]
    schema = packet.default._schema
    assert schema.arguments[-1].name == "instance_key"
    assert schema.is_mutable is case.inplace
    assert op.dispatch is packet.default
    for overload in (packet.default, packet.scalars):
        assert torch.Tag.pt2_compliant_tag in overload.tags
    assert str(packet.scalars._schema).count("instance_key") == 0


def test_both_overloads_give_what_the_op_gives(case):
    op, inputs = _typical(case)
    want = case.outputs(op, *inputs)
    packet = getattr(torch.ops.tilelang_ops, op.state.name)
    _equal(case.outputs(lambda *args: packet(*args, op.instance_key), *inputs), want)
    scalars = case.scalars.values()
    _equal(case.outputs(lambda *args: packet.scalars(*args, *scalars), *inputs), want)


def test_an_op_that_writes_its_inputs_tells_autograds_version_counters(case_of):
    case = case_of("fused_add_rms_norm_")
    op, (x, residual, w) = _typical(case)
    packet = torch.ops.tilelang_ops.fused_add_rms_norm_
    for call in (
        op,
        lambda *args: packet(*args, op.instance_key),
        lambda *args: packet.scalars(*args, 1e-5),
        lambda x, residual, w: op(x.t().contiguous().t(), residual, w),
    ):
        before = [one._version for one in (residual, w)]
        call(x, residual, w)
        assert residual._version > before[0]
        assert w._version == before[1]
    with torch.inference_mode():
        call(torch.randn_like(x), torch.randn_like(x), w)


def test_a_gradient_through_what_was_overwritten_since_is_torchs_error(case_of):
    case = case_of("fused_add_rms_norm_")
    op, (x, residual, w) = _typical(case)
    weight = torch.randn(127, requires_grad=True)
    saved = residual * 1
    loss = (saved * weight).sum()
    with torch.no_grad():
        op(x, saved, w)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- opcheck ---


@pytest.mark.parametrize("overload", ["default", "scalars"])
def test_opcheck_passes(typed, overload, device):
    case, dtype = typed
    op = case.op(case.usual, dtype)
    rest = [op.instance_key] if overload == "default" else list(case.scalars.values())
    call = getattr(getattr(torch.ops.tilelang_ops, op.state.name), overload)
    for rows, strided in ((4, False), (4, True), (0, False), (1, False)):
        inputs = case.inputs(rows, case.usual, dtype, device)
        if strided:
            inputs = [one if one is None else torch.stack((one, one), -1)[..., 0] for one in inputs]
        torch.library.opcheck(call, (*inputs, *rest))


@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul"])
@pytest.mark.parametrize("overload", ["default", "scalars"])
def test_opcheck_passes_with_gradients(case_of, name, overload, device):
    case = case_of(name)
    op = case.op(case.usual, F32)
    rest = [op.instance_key] if overload == "default" else list(case.scalars.values())
    call = getattr(getattr(torch.ops.tilelang_ops, op.state.name), overload)
    for rows in (4, 0, 1):
        inputs = [one.requires_grad_() for one in case.inputs(rows, case.usual, F32, device)]
        torch.library.opcheck(call, (*inputs, *rest))


# --- torch.compile ---


@pytest.mark.parametrize("way", ["op", "function"])
def test_a_traced_graph_holds_the_ops_node_and_nothing_else_of_ours(case, way):
    op, inputs = _typical(case)
    backend = Recording()
    call = op if way == "op" else lambda *args: case.function(*args, **case.scalars)
    compiled = torch.compile(lambda *args: call(*args), fullgraph=True, backend=backend)
    have = case.outputs(compiled, *inputs)
    assert backend.called == [[f"tilelang_ops.{op.state.name}.default"]]
    (node,) = [node for node in backend.graphs[0].graph.nodes if node.op == "call_function"][:1]
    assert node.args[-1] == op.instance_key
    _equal(have, case.outputs(op, *inputs))


def test_a_module_is_traced_as_one_node_and_equals_eager():
    for module in (ops.RMSNorm(127, 1e-5), ops.LayerNorm(127), ops.LayerNorm(127, bias=False)):
        backend = Recording()
        x = torch.randn(3, 5, 127)
        with torch.no_grad():
            have = torch.compile(module, fullgraph=True, backend=backend)(x)
            assert torch.equal(have, module(x))
        name = module.op.state.name
        assert backend.called == [[f"tilelang_ops.{name}.default"]]


def test_aot_autograd_keeps_the_node_and_equals_eager(case):
    op, inputs = _typical(case)
    compiled = torch.compile(lambda *args: op(*args), fullgraph=True, backend="aot_eager")
    _equal(case.outputs(compiled, *inputs), case.outputs(op, *inputs))


def test_what_is_written_in_place_is_functionalized_right(case_of):
    case = case_of("fused_add_rms_norm_")
    op, inputs = _typical(case, rows=4)

    def call(x, residual, w):
        x, residual = x * 2, residual + 1
        view, left = x[1:], residual[:, :5]
        before = x.sum()
        op(x, residual, w)
        y = view + 0
        op(x, residual, w)
        return before, y, left + 0, x, residual

    want = call(*inputs)
    given = [one.clone() for one in inputs]
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        _equal(torch.compile(call, fullgraph=True, backend=backend)(*inputs), want)
        _equal(inputs, given)


def test_inputs_that_a_graph_writes_are_written_and_say_so(case_of):
    case = case_of("fused_add_rms_norm_")
    op, inputs = _typical(case)
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        x, residual, w = [one.clone() for one in inputs]
        versions = x._version, residual._version, w._version
        compiled = torch.compile(
            lambda x, residual, w: op(x, residual, w), fullgraph=True, backend=backend
        )
        compiled(x, residual, w)
        _equal((x, residual), case.outputs(op, *inputs))
        assert x._version > versions[0]
        assert residual._version > versions[1]
        assert w._version == versions[2]


class Block(nn.Module):
    """A layer of a transformer, out of all operators that there are."""

    def __init__(self, width=64, heads=2):
        super().__init__()
        self.heads = heads
        self.first, self.second = ops.RMSNorm(width, 1e-5), ops.LayerNorm(width)
        self.mix = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(2 * width, width) / width**0.5)
        self.last = nn.Parameter(torch.ones(width))

    def forward(self, x, cos, sin):
        width = x.shape[-1]
        y = self.first(x).unflatten(-1, (self.heads, -1))
        q = ops.rope(y, cos, sin)
        k = ops.rope(y, cos, sin, interleaved=True)
        y = y + ops.softmax((q * k).flatten(1)).unflatten(-1, (self.heads, -1))
        y, total = ops.fused_add_rms_norm(y.reshape(-1, width), x, self.last, 1e-5)
        y = ops.gemm(y.bfloat16(), self.mix.bfloat16()).float()
        y = ops.silu_and_mul(self.second(y) @ self.up.T)
        y, total = y + 0, total + 0
        ops.fused_add_rms_norm_(y, total, self.last, 1e-5)
        return y + total


def _block_inputs(rows=6):
    angles = torch.randn(rows, 16)
    return torch.randn(rows, 64), angles.cos(), angles.sin()


def test_twelve_blocks_that_are_compiled_one_by_one_share_one_graph():
    blocks = [Block().requires_grad_(False) for _ in range(12)]
    backend = Recording()
    x, cos, sin = _block_inputs()
    want = have = x
    for block in blocks:
        want = block(want, cos, sin)
    for block in blocks:
        block.compile(fullgraph=True, backend=backend)
    for block in blocks:
        have = block(have, cos, sin)
    assert torch.equal(have, want)
    assert len(backend.graphs) == 1
    ours = [name for name in backend.called[0] if "tilelang" in name]
    assert collections.Counter(name.split(".")[1] for name in ours) == {
        "rms_norm": 1,
        "layer_norm": 1,
        "rope": 2,
        "softmax": 1,
        "fused_add_rms_norm": 1,
        "fused_add_rms_norm_": 1,
        "gemm": 1,
        "silu_and_mul": 1,
    }


def test_ops_of_two_keys_are_two_graphs():
    norms = [ops.RMSNorm(64, eps).requires_grad_(False) for eps in (1e-5, 1e-5, 0.5)]
    backend = Recording()
    x = torch.randn(3, 64)
    for norm in norms:
        want = norm(x)
        norm.compile(fullgraph=True, backend=backend)
        assert torch.equal(norm(x), want)
    assert len(backend.graphs) == 2


def test_rows_that_are_marked_dynamic_make_one_graph_for_all_of_them(case):
    op, _ = _typical(case)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *args: op(*args), fullgraph=True, backend=counter)
    for rows in (5, 2, 9, 17, 300):
        inputs = case.inputs(rows, case.usual, case.dtypes[0])
        want = case.outputs(op, *inputs)

        def marked(*args, rows=rows):
            for one in args:
                if one is not None and one.shape[0] == rows:
                    torch._dynamo.mark_dynamic(one, 0)
            return compiled(*args)

        _equal(case.outputs(marked, *inputs), want)
    assert counter.frame_count == 1


def test_rows_of_the_functions_may_be_dynamic_too():
    backend = Recording()
    w = torch.randn(127)
    compiled = torch.compile(
        lambda x: ops.softmax(ops.rms_norm(x, w, 1e-5, rows="dynamic")),
        fullgraph=True,
        dynamic=True,
        backend=backend,
    )
    for shape in ((3, 127), (8, 127), (77, 127)):
        x = torch.randn(shape)
        assert torch.equal(compiled(x), ops.softmax(ops.rms_norm(x, w, 1e-5)))
    assert len(backend.graphs) == 1


def test_a_fault_under_compile_names_the_argument(case_of):
    case = case_of("rms_norm")
    op, (x, w) = _typical(case)
    compiled = torch.compile(lambda x, w: op(x, w), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"weight has shape \[126\]; this rms_norm takes \[127\]"):
        compiled(x, w[:-1])
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"x is torch.float64; this rms_norm takes torch.float32"):
        compiled(x.double(), w)


INDUCTOR = """
import sys, torch
sys.path.insert(0, {here!r})
from test_boundary import Block, _block_inputs
from tlcache import runtime
torch.manual_seed(0)
block = Block().requires_grad_(False)
inputs = _block_inputs()
compiled = torch.compile(block, fullgraph=True)
y = compiled(*inputs)
made = runtime.counters().compiled  # by the graph, which ran before anything else
torch.testing.assert_close(y, block(*inputs), rtol=1e-4, atol=1e-4)
assert runtime.counters().compiled == made
print("RESULT", made)
"""


def test_inductor_compiles_a_whole_block_from_a_cold_start(python, tmp_path):
    source = INDUCTOR.format(here=os.path.dirname(__file__))
    done = python(source, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")})
    assert done.code == 0, done.err
    assert int(done.out.split("RESULT")[1]) == 9  # as many kernels as `Block` calls


# --- export ---

LOAD = """
import sys, torch, ops
program, inputs, want = sys.argv[1:]
inputs, want = torch.load(inputs), torch.load(want)
exported = torch.export.load(program)
for given, expected in zip(inputs, want):
    have = exported.module()(*given)
    have = have if isinstance(have, tuple) else (have,)
    for one, two in zip(have, expected, strict=True):
        assert torch.equal(one, two), (one - two).abs().max()
from tlcache import runtime
c = runtime.counters()
assert c.compiled == 0 and c.restored, c
assert "tilelang" not in sys.modules
print("fine")
"""


# Torch's own, while it decomposes.
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
def test_an_exported_program_runs_in_a_process_that_never_saw_the_ops(
    tmp_path, run, shared_root, monkeypatch
):
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(shared_root))  # which `run` set to an empty one
    block = Block().requires_grad_(False)
    rows = torch.export.Dim("rows", min=2, max=4096)
    inputs = _block_inputs()
    program = torch.export.export(block, inputs, dynamic_shapes=[{0: rows}] * 3)
    ours = {
        str(node.target).split(".")[1]
        for node in program.graph.nodes
        if "tilelang" in str(node.target)
    }
    assert len(ours) == 8
    many = [inputs, _block_inputs(17)]
    want = [(block(*given),) for given in many]
    for given, (expected,) in zip(many, want, strict=True):
        assert torch.equal(program.module()(*given), expected)
    functional = program.run_decompositions()
    assert torch.equal(functional.module()(*many[1]), want[1][0])
    files = [str(tmp_path / name) for name in ("block.pt2", "inputs.pt", "want.pt")]
    torch.export.save(program, files[0])
    torch.save(many, files[1])
    torch.save(want, files[2])
    done = run([sys.executable, "-c", LOAD, *files])
    assert done.code == 0, done.err
    assert done.out.strip() == "fine"


# --- vmap ---


class Calls:
    """How often a host side is run, and with how many rows."""

    def __init__(self, monkeypatch, kind):
        self.shapes = []
        real = kind.run

        def run(state, *inputs):
            self.shapes.append(tuple(inputs[0].shape))
            return real(state, *inputs)

        monkeypatch.setattr(kind, "run", run)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_makes_a_batch_of_rows_more_rows_of_one_call(case, monkeypatch, batch, axis):
    op, _ = _typical(case)
    given = [case.inputs(4, case.usual, case.dtypes[0]) for _ in range(batch)]
    stacked, dims, plain = [], [], []
    for index, ones in enumerate(zip(*given, strict=True)):
        rows = ones[0] is not None and index != case.weight and ones[0].shape[0] == 4
        stacked.append(torch.stack(ones, axis) if rows else ones[0])
        dims.append(axis if rows else None)
        plain.append(ones if rows else (ones[0],) * batch)
    want = [case.outputs(op, *[one[index] for one in plain]) for index in range(batch)]
    calls = Calls(monkeypatch, type(op.state))
    if case.inplace:
        torch.func.vmap(lambda *args: op(*args), tuple(dims), None)(*stacked)
        have = tuple(one.movedim(axis, 0) for one in stacked[:2])
    else:
        have = torch.func.vmap(lambda *args: op(*args), tuple(dims))(*stacked)
        have = have if isinstance(have, tuple) else (have,)
    assert [shape[:2] for shape in calls.shapes] == [(batch, 4)]
    _equal(have, [torch.stack(parts) for parts in zip(*want, strict=True)])


def test_vmap_takes_a_batch_of_weights_one_by_one(case, monkeypatch):
    if case.weight is None or case.inplace:
        pytest.skip("it has no weight, or writes its inputs")
    op, inputs = _typical(case)
    weights = torch.stack([torch.randn_like(inputs[case.weight]) for _ in range(3)])
    want = []
    for weight in weights:
        inputs[case.weight] = weight
        want.append(case.outputs(op, *inputs))
    calls = Calls(monkeypatch, type(op.state))
    for batched in (False, True):
        inputs[case.weight] = weights
        dims = [None] * len(inputs)
        dims[case.weight] = 0
        given = list(inputs)
        if batched:
            given[0], dims[0] = inputs[0].expand(3, *inputs[0].shape), 0
        calls.shapes.clear()
        have = torch.func.vmap(lambda *args: op(*args), tuple(dims))(*given)
        assert len(calls.shapes) == 3
        have = have if isinstance(have, tuple) else (have,)
        _equal(have, [torch.stack(parts) for parts in zip(*want, strict=True)])


def test_vmap_spreads_rows_that_have_no_batch_over_it(case, monkeypatch):
    rows = [i for i in range(len(case.shapes(1, *case.usual))) if i != case.weight]
    if len(rows) < 2 or case.inplace or case.name.startswith("layer_norm"):
        pytest.skip("it has one input of rows, or writes them")
    op, inputs = _typical(case)
    for lonely in rows:
        batch = torch.stack([torch.rand_like(inputs[lonely]) for _ in range(3)])
        dims = [None] * len(inputs)
        dims[lonely] = 0
        given = [*inputs[:lonely], batch, *inputs[lonely + 1 :]]
        want = [case.outputs(op, *[*inputs[:lonely], one, *inputs[lonely + 1 :]]) for one in batch]
        with monkeypatch.context() as patch:
            calls = Calls(patch, type(op.state))
            have = torch.func.vmap(lambda *args: op(*args), tuple(dims))(*given)
        assert len(calls.shapes) == 1
        have = have if isinstance(have, tuple) else (have,)
        _equal(have, [torch.stack(parts) for parts in zip(*want, strict=True)])


@pytest.mark.parametrize("name", ["rope", "rope_interleaved"])
@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (0, 0, None)])
@pytest.mark.parametrize("lead", [(), (5,), (1, 5), (3, 1), (3, 5)])
def test_vmap_of_rope_lets_tables_broadcast_within_each_batch(case_of, name, dims, lead):
    # As many batches as sequences: a batch that met the wrong axis would go unnoticed by shapes.
    case = case_of(name)
    H, D = case.usual
    op = case.op(case.usual, F32)

    def made(dim, *shape):
        return torch.randn(*(() if dim is None else (3,)), *shape)

    x = made(dims[0], 3, 5, H, D)
    cos, sin = (made(dim, *lead, D // 2) for dim in dims[1:])
    have = torch.func.vmap(lambda *args: op(*args), dims)(x, cos, sin)
    for index in range(3):
        args = [
            one if dim is None else one[index] for one, dim in zip((x, cos, sin), dims, strict=True)
        ]
        assert torch.equal(have[index], op(*args))


def test_vmap_nests(case_of):
    case = case_of("rms_norm")
    op, (_, w) = _typical(case)
    x = torch.randn(2, 3, 4, 127)
    twice = torch.func.vmap(torch.func.vmap(lambda x: op(x, w)))
    assert torch.equal(twice(x), op(x, w))
    each = torch.randn(3, 127)
    have = torch.func.vmap(torch.func.vmap(lambda x, w: op(x, w)), (0, None))(x, each)
    assert torch.equal(have, torch.stack([op(x[:, i], each[i]) for i in range(3)], 1))


def test_vmap_under_compile_is_one_graph(case_of):
    case = case_of("rms_norm")
    op, (_, w) = _typical(case)
    x = torch.randn(3, 4, 127)
    compiled = torch.compile(
        lambda x: torch.func.vmap(lambda x: op(x, w))(x), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x), op(x, w))


@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, None), (0, 0, 0), (None, None, 0)])
def test_vmap_refuses_to_write_inputs_that_have_no_batch(case_of, dims):
    case = case_of("fused_add_rms_norm_")
    op, inputs = _typical(case)
    given = [
        one if dim is None else torch.stack([one] * 3)
        for one, dim in zip(inputs, dims, strict=True)
    ]
    before = [one.clone() for one in given]
    with pytest.raises(ValueError, match="fused_add_rms_norm_ writes its inputs, and under vmap"):
        torch.func.vmap(lambda *args: op(*args), dims, None)(*given)
    _equal(given, before)


# --- gradients ---


def _both(case):
    """The function here and the formula in torch, each with inputs of its own."""
    inputs = case.inputs(5, case.usual, F32)
    ours = [one.clone().requires_grad_() for one in inputs]
    theirs = [one.double().requires_grad_() for one in inputs]
    return ours, theirs


@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul"])
def test_gradients_are_those_of_torch(case_of, name):
    case = case_of(name)
    ours, theirs = _both(case)
    case.function(*ours, **case.scalars).sin().sum().backward()
    case.formula(*theirs)[0].sin().sum().backward()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad.double(), two.grad, rtol=1e-4, atol=1e-4)
        assert one.grad.dtype == F32


@pytest.mark.filterwarnings("ignore:.*not a double precision floating point:UserWarning")
@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul"])
def test_each_element_of_a_gradient_is_the_slope_there(case_of, name):
    case = case_of(name)
    inputs = [one.requires_grad_() for one in case.inputs(1, case.usual, F32)]
    call = lambda *args: case.function(*args, **case.scalars)  # noqa: E731
    assert torch.autograd.gradcheck(
        call, inputs, eps=1e-2, atol=5e-2, rtol=5e-2, nondet_tol=1e-6, fast_mode=True
    )


@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul"])
def test_gradients_of_gradients_are_those_of_torch(case_of, name):
    case = case_of(name)
    ours, theirs = _both(case)
    found = []
    for made, inputs in (
        (case.function(*ours, **case.scalars), ours),
        (case.formula(*theirs)[0], theirs),
    ):
        first = torch.autograd.grad(made.sin().sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum((one**2).sum() for one in first), inputs))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_have_their_inputs_dtype_and_accumulate_in_float32(case_of, name, dtype):
    case = case_of(name)
    inputs = [one.requires_grad_() for one in case.inputs(300, case.usual, dtype)]
    theirs = [one.detach().double().requires_grad_() for one in inputs]
    case.function(*inputs, **case.scalars).sum().backward()
    case.formula(*theirs)[0].sum().backward()
    for one, two in zip(inputs, theirs, strict=True):
        assert one.grad.dtype == dtype
        off = (one.grad.double() - two.grad).norm() / two.grad.norm()
        assert off < torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul"])
def test_gradients_under_compile_are_those_of_torch(case_of, name):
    case = case_of(name)
    ours, theirs = _both(case)
    compiled = torch.compile(
        lambda *args: case.function(*args, **case.scalars).sin().sum(),
        fullgraph=True,
        backend="aot_eager",
    )
    compiled(*ours).backward()
    case.formula(*theirs)[0].sin().sum().backward()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad.double(), two.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul"])
def test_gradients_of_torch_func_are_those_of_torch(case_of, name):
    case = case_of(name)
    inputs = case.inputs(5, case.usual, F32)
    every = tuple(range(len(inputs)))
    ours = torch.func.grad(lambda *a: case.function(*a, **case.scalars).sin().sum(), every)
    theirs = torch.func.grad(lambda *a: case.formula(*a)[0].sin().sum(), every)
    for one, two in zip(ours(*inputs), theirs(*[x.double() for x in inputs]), strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-4, atol=1e-4)
    dims = tuple(0 if index == 0 else None for index in every)
    for one, two in zip(
        torch.func.vmap(ours, dims)(*inputs),
        torch.func.vmap(theirs, dims)(*[x.double() for x in inputs]),
        strict=True,
    ):
        torch.testing.assert_close(one.double(), two, rtol=1e-4, atol=1e-4)


def test_a_gradient_of_one_input_alone_leaves_the_other_without():
    x, w = torch.randn(3, 127), torch.randn(127)
    for wanted, other in ((x, w), (w, x)):
        wanted.requires_grad_()
        ops.rms_norm(x, w, 1e-5).sum().backward()
        assert wanted.grad is not None
        assert other.grad is None
        wanted.requires_grad_(False).grad = None


def test_no_rows_have_gradients_of_nothing():
    x, w = torch.empty(0, 127, requires_grad=True), torch.randn(127, requires_grad=True)
    ops.rms_norm(x, w).sum().backward()
    assert x.grad.shape == (0, 127)
    assert torch.equal(w.grad, torch.zeros(127))
    x = torch.empty(0, 254, requires_grad=True)
    ops.silu_and_mul(x).sum().backward()
    assert x.grad.shape == (0, 254)


@pytest.mark.parametrize("name", INFERENCE)
def test_an_op_for_inference_runs_on_parameters_and_refuses_their_gradient(case_of, name):
    case = case_of(name)
    op, inputs = _typical(case)
    want = case.outputs(op, *inputs)
    for index, one in enumerate(inputs):
        if one is None:
            continue
        given = list(inputs)
        given[index] = one.clone().requires_grad_()
        for call in (op, lambda *args: case.function(*args, **case.scalars)):
            outputs = case.outputs(call, *given)
            _equal(outputs, want)
            assert all(made.requires_grad for made in outputs)
            with pytest.raises(GradientError, match=f"{op.state.name} is for inference only"):
                outputs[0].float().sum().backward()
        with torch.no_grad():
            assert not any(made.requires_grad for made in case.outputs(op, *given))


def test_an_op_that_writes_its_inputs_refuses_at_once_where_a_gradient_is_wanted(case_of):
    case = case_of("fused_add_rms_norm_")
    op, inputs = _typical(case)
    for index in range(3):
        given = [one.clone() for one in inputs]
        given[index].requires_grad_()
        before = [one.detach().clone() for one in given]
        with pytest.raises(GradientError, match="fused_add_rms_norm_ is for inference only"):
            op(*given)
        _equal([one.detach() for one in given], before)
        with torch.no_grad():
            op(*given)
        assert not torch.equal(given[0].detach(), before[0])


@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")  # torch's, of what we raise
@pytest.mark.parametrize("name", [*INFERENCE, "fused_add_rms_norm_"])
def test_under_compile_a_gradient_through_inference_is_refused_when_it_is_traced(case_of, name):
    case = case_of(name)
    op, inputs = _typical(case)

    def call(*args):
        if case.inplace:
            args = [args[0] * 1, *args[1:]]
        made = op(*args)
        return (args[0] if case.inplace else made[0] if isinstance(made, tuple) else made).sum()

    inputs[0].requires_grad_()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=f"{op.state.name} is for inference only"):
        compiled(*inputs).backward()
    assert inputs[0].grad is None


@forward_mode
@pytest.mark.parametrize("way", ["dual", "jvp", "dispatcher"])
def test_the_forward_mode_is_refused_and_not_dropped(case, way):
    op, inputs = _typical(case)
    says = "has no forward-mode gradient|is for inference only"
    tangent = torch.ones_like(inputs[0])

    def call(x):
        rest = [one if one is None else one.clone() for one in inputs[1:]]
        if way == "dispatcher":
            return op.dispatch(x, *rest, op.instance_key)
        made = op(x.clone(), *rest)
        return made[0] if isinstance(made, tuple) else x if made is None else made

    with pytest.raises(GradientError, match=says):
        if way == "jvp":
            torch.func.jvp(call, (inputs[0],), (tangent,))
        else:
            with torch.autograd.forward_ad.dual_level():
                call(torch.autograd.forward_ad.make_dual(inputs[0], tangent))


@forward_mode
def test_what_has_no_tangent_goes_through_the_forward_mode(case):
    op, inputs = _typical(case)
    want = case.outputs(op, *inputs)
    x = torch.randn(3)
    with torch.autograd.forward_ad.dual_level():
        torch.autograd.forward_ad.make_dual(x, x)
        _equal(case.outputs(op, *inputs), want)
    found = []
    torch.func.jvp(lambda x: found.append(case.outputs(op, *inputs)) or x, (x,), (x,))
    _equal(found[0], want)


# --- the same on a GPU ---


@pytest.mark.gpu
def test_on_a_gpu_a_graph_holds_the_ops_node_and_equals_eager(case, shared_root, warm):
    warm("cuda")
    dtype = case.dtypes[0]
    op = case.op(case.usual, dtype, rows="dynamic")
    inputs = case.inputs(7, case.usual, dtype, "cuda")
    backend = Recording()
    compiled = torch.compile(lambda *args: op(*args), fullgraph=True, backend=backend)
    _equal(case.outputs(compiled, *inputs), case.outputs(op, *inputs))
    assert backend.called == [[f"tilelang_ops.{op.state.name}.default"]]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_on_a_gpu_inductor_and_its_cuda_graphs_equal_eager(case, shared_root, warm, mode):
    warm("cuda")
    dtype = case.dtypes[0]
    op = case.op(case.usual, dtype)
    compiled = torch.compile(lambda *args: op(*args), fullgraph=True, mode=mode)
    for _ in range(4):
        inputs = case.inputs(7, case.usual, dtype, "cuda")
        _equal(case.outputs(compiled, *inputs), case.outputs(op, *inputs))
    assert runtime.counters().failed == 0
