"""RMSNorm in Triton: right values, clear refusals, and what torch.compile sees of each integration.

Without a GPU the kernel runs under Triton's interpreter, in processes of its own: Triton reads
TRITON_INTERPRET where a kernel is defined. The interpreter cuts bfloat16 off where a GPU rounds it,
so rounding is checked on a GPU only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
INTERPRETED = {"TRITON_INTERPRET": "1"}
NAMES = ["rms_norm_autotuned", "rms_norm_captured", "rms_norm_opaque", "rms_norm_wrapped"]

PRELUDE = """
import json, os, sys, torch
import ops.triton
from ops.triton import rms_norm_autotuned, rms_norm_captured, rms_norm_opaque, rms_norm_wrapped
ALL = (rms_norm_captured, rms_norm_wrapped, rms_norm_opaque, rms_norm_autotuned)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
interpreted = os.environ.get("TRITON_INTERPRET") == "1"
device = "cuda" if torch.cuda.is_available() and not interpreted else "cpu"
torch.manual_seed(0)

def inputs(*shape, dtype=torch.float32):
    x, w = torch.randn(*shape), torch.randn(shape[-1])
    return x.to(device, dtype), w.to(device, dtype)

def close(y, x, w, eps=1e-5):
    assert y.shape == x.shape and y.dtype == x.dtype and y.is_contiguous()
    want = torch.nn.functional.rms_norm(x.double(), (x.shape[-1],), w.double(), eps)
    off = ((y.double() - want).abs() / want.abs().clamp(min=1e-3)).max().item()
    assert off <= TOLERANCE[x.dtype], (x.dtype, list(x.shape), off)
"""

VALUES = """
dtype = getattr(torch, sys.argv[1])
for n in (1, 127, 3000, 4096, 40000):
    for rows in (1, 3):
        x, w = inputs(rows, n, dtype=dtype)
        for norm in ALL:
            close(norm(x, w, 1e-5), x, w)
"""

STRIDED = """
x, w = inputs(6, 160)
weight = torch.randn(320, device=device)[::2]
for strided in (
    x[::2],                      # rows apart: read in place
    x[:, :128],                  # the left part of each row
    x[:, ::2],                   # elements apart: copied
    x.t().reshape(80, 12).t(),
    x.view(2, 3, 160)[:, 1:],    # rows at two distances: copied
    x.view(2, 3, 160).transpose(0, 1),
    x[:1].expand(4, 160),        # one row four times
    x[0],                        # a vector is one row
    x[:, :1],                    # one element a row
):
    n = strided.shape[-1]
    for norm in ALL:
        y = norm(strided, weight[:n], 1e-5)
        close(y, strided, weight[:n])
        assert torch.equal(y, norm(strided.contiguous(), weight[:n].contiguous(), 1e-5))
"""

SPECIAL = """
x = torch.full((2, 64), 6e4, dtype=torch.float16, device=device)
w = torch.ones(64, dtype=torch.float16, device=device)
for norm in ALL:
    close(norm(x, w, 1e-5), x, w)
x, w = inputs(4, 64)
x[1, 3], x[2, 5], x[3, 7] = float("nan"), float("inf"), float("-inf")
want = torch.nn.functional.rms_norm(x, (64,), w, 1e-5)
for norm in ALL:
    y = norm(x, w, 1e-5)
    assert torch.equal(y.isnan(), want.isnan()) and torch.equal(y.isinf(), want.isinf())
"""

EMPTY = """
for shape in ((0, 48), (3, 0, 48)):
    x, w = inputs(*shape)
    for norm in ALL:
        y = norm(x, w, 1e-5)
        assert y.shape == shape and y.dtype == x.dtype
"""

DEFAULT_EPS = """
x, w = inputs(2, 64)
for norm in ALL:
    assert torch.equal(norm(x * 1e-3, w), norm(x * 1e-3, w, 1e-6))
"""


# --- anywhere ---


def test_importing_ops_and_its_operators_does_not_import_triton(python):
    done = python(
        "import torch, sys\n"
        "before = {m for m in sys.modules if m.partition('.')[0] == 'triton'}\n"
        "import ops, ops.norms, ops.catalog, ops.triton\n"
        "ops.rms_norm, ops.RMSNorm(64)\n"
        "assert before == {m for m in sys.modules if m.partition('.')[0] == 'triton'}\n"
        "assert 'ops.triton.rms_norm' not in sys.modules\n"
    )
    assert done.code == 0, done.err


def test_importing_the_package_alone_imports_neither_torch_nor_triton(python):
    done = python(
        "import sys, ops.triton\n"
        f"assert ops.triton.__all__ == {NAMES}, ops.triton.__all__\n"
        "assert set(ops.triton.__all__) <= set(dir(ops.triton))\n"
        "assert not hasattr(ops.triton, 'rms_norm_hidden')\n"
        "print({'torch', 'triton'} & set(sys.modules))"
    )
    assert done.code == 0, done.err
    assert done.out.strip() == "set()"


@pytest.mark.parametrize(
    ("stands_in", "says"),
    [
        ("None", "ops.triton needs Triton, which is not installed here"),
        ("old", "ops.triton needs Triton 3.4 or later; 3.3.1 is installed here"),
    ],
)
def test_a_triton_that_is_missing_or_too_old_is_named_with_what_to_install(python, stands_in, says):
    done = python(
        "import sys, types, torch\n"
        "old = types.ModuleType('triton'); old.__version__ = '3.3.1'; old.__path__ = []\n"
        "old.language = sys.modules['triton.language'] = types.ModuleType('triton.language')\n"
        f"sys.modules['triton'] = {stands_in}\n"
        "import ops.triton\n"
        "try:\n"
        "    ops.triton.rms_norm_captured\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert done.code == 0, done.err
    assert done.out.splitlines() == [says, "", "hint: `pip install 'tlcache[triton]'`"]


# --- under the interpreter ---

# Runs code in forks of one process, which has the prelude already: its imports take three seconds.
# What a fork writes goes into the files named.
FORKING = """
import traceback, triton.language
for line in sys.stdin:
    code, argv, out, err = json.loads(line)
    pid = os.fork()
    if not pid:
        for descriptor, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), descriptor)
        sys.argv[1:] = argv
        try:
            exec(code)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def interpreting(tmp_path_factory):
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + FORKING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path_factory.mktemp("interpreting"),
        env={**os.environ, **INTERPRETED},
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def interpreted(interpreting, tmp_path):
    """Run Python source after the prelude under the interpreter, in a process forked for it."""

    def interpreted(code, *argv):
        out, err = tmp_path / "out", tmp_path / "err"
        interpreting.stdin.write(json.dumps([code, argv, str(out), str(err)]) + "\n")
        interpreting.stdin.flush()
        ended = int(interpreting.stdout.readline())
        return SimpleNamespace(code=ended, out=out.read_text(), err=err.read_text())

    return interpreted


@needs_triton
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_interpreted_values_are_those_of_torch_for_every_row_length(interpreted, dtype):
    done = interpreted(VALUES, dtype)
    assert done.code == 0, done.err


@needs_triton
@pytest.mark.parametrize(
    "what",
    [STRIDED, SPECIAL, EMPTY, DEFAULT_EPS],
    ids=["strided", "overflow_nan_and_inf", "no_rows", "default_eps"],
)
def test_interpreted_special_inputs_give_what_torch_gives(interpreted, what):
    done = interpreted(what)
    assert done.code == 0, done.err


ERRORS = """
def said(norm, x, w):
    try:
        norm(x, w, 1e-5)
    except (TypeError, ValueError) as error:
        return [type(error).__name__, str(error)]

x, w = torch.randn(2, 64), torch.randn(64)
cases = {
    "dtype": (x.double(), w),
    "weight dtype": (x, w.half()),
    "weight shape": (x, torch.randn(2, 32)),
    "no elements": (x[:, :0], w[:0]),
    "x shape": (x[:, :63], w),
    "scalar": (torch.tensor(1.0), w),
    "devices": (x.to("meta"), w),
}
print(json.dumps({norm.__name__: {name: said(norm, *pair) for name, pair in cases.items()}
                  for norm in ALL}))
"""


@needs_triton
def test_inputs_that_do_not_fit_are_named_with_what_was_expected(interpreted):
    done = interpreted(ERRORS)
    assert done.code == 0, done.err
    takes = "this rms_norm takes"
    want = {
        "dtype": ["TypeError", f"x is torch.float64; {takes} bfloat16, float16 or float32"],
        "weight dtype": ["TypeError", f"weight is torch.float16; {takes} torch.float32, as x is"],
        "weight shape": ["ValueError", f"weight has shape [2, 32]; {takes} [N], N >= 1"],
        "no elements": ["ValueError", f"weight has shape [0]; {takes} [N], N >= 1"],
        "x shape": ["ValueError", f"x has shape [2, 63]; {takes} […, 64]"],
        "scalar": ["ValueError", f"x has shape []; {takes} […, 64]"],
        "devices": ["ValueError", "x is on meta and weight on cpu; they must be together"],
    }
    assert json.loads(done.out) == dict.fromkeys(sorted(NAMES), want)


@needs_triton
def test_tensors_of_the_cpu_are_refused_where_nothing_interprets(python):
    done = python(
        PRELUDE + "for norm in ALL:\n"
        "    try:\n"
        "        norm(torch.randn(2, 64), torch.randn(64))\n"
        "    except ValueError as error:\n"
        "        print(error)\n",
        env={"TRITON_INTERPRET": "0"},
    )
    says = "x is on cpu; Triton takes CUDA tensors, or any with TRITON_INTERPRET=1"
    assert done.out.splitlines() == [says] * 4, done.err


GRADIENTS = """
x, w = inputs(2, 64)
for tensor, name in ((x, "x"), (w, "weight")):
    tensor.requires_grad_()
    for norm in ALL:
        try:
            norm(x, w, 1e-5)
        except NotImplementedError as error:
            assert str(error).startswith(f"{name} requires a gradient, and {norm.__name__} has")
            assert "torch.no_grad()" in str(error)
        else:
            raise AssertionError(f"{norm.__name__} ran")
        with torch.no_grad():
            close(norm(x, w, 1e-5), x, w)
    tensor.requires_grad_(False)
x.requires_grad_()
for op in (torch.ops.tilelang_ops_triton.rms_norm_wrapped,
           torch.ops.tilelang_ops_triton.rms_norm_opaque):
    try:
        op(x, w, 1e-5).sum().backward()
    except RuntimeError as error:
        assert "no autograd formula" in str(error), error
    else:
        raise AssertionError(f"{op} has a gradient")
"""


@needs_triton
def test_a_gradient_that_would_be_needed_is_an_error_and_never_a_wrong_one(interpreted):
    done = interpreted(GRADIENTS)
    assert done.code == 0, done.err


OPCHECK = """
x, w = inputs(4, 64)
for op in (torch.ops.tilelang_ops_triton.rms_norm_wrapped.default,
           torch.ops.tilelang_ops_triton.rms_norm_opaque.default):
    utils = ["test_schema", "test_faketensor"]
    if interpreted and op is torch.ops.tilelang_ops_triton.rms_norm_wrapped.default:
        utils.pop()  # its fake is its own body, and the interpreter would run that
    for one in (x, x[:, ::2], x[:0], x[:1]):
        torch.library.opcheck(op, (one, w[:one.shape[-1]], 1e-5), test_utils=utils)
"""


@needs_triton
def test_the_dispatcher_ops_schemas_and_fakes_hold(interpreted):
    done = interpreted(OPCHECK)
    assert done.code == 0, done.err


# --- compiled, without a GPU ---

CROSS_COMPILED = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ops.triton import rms_norm as module
found = []
for n in (1, 127, 3000, 4096, 16384, 32768, 32769):
    for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
        block, warps = module.default_schedule(n, itemsize)
        found.append([n, dtype, block, warps])
        if n in (127, 4096, 16384):
            continue
        source = ASTSource(
            module._kernel,
            {"x": "*" + dtype, "w": "*" + dtype, "y": "*" + dtype, "stride": "i32", "eps": "fp32",
             "N": "constexpr", "BLOCK_N": "constexpr"},
            {(5,): n, (6,): block},
            {(i,): [["tt.divisibility", 16]] for i in range(3)},
        )
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32),
                                options={"num_warps": warps})
        assert kernel.asm["cubin"].startswith(b"\\x7fELF")
print(json.dumps(found))
"""


@needs_triton
def test_the_kernel_compiles_for_a_gpu_that_is_not_here_by_the_rule_for_its_blocks(
    python, tmp_path
):
    done = python(CROSS_COMPILED, env={"TRITON_CACHE_DIR": str(tmp_path / "triton")})
    assert done.code == 0, done.err
    schedules = {(n, dtype): (block, warps) for n, dtype, block, warps in done.json}
    assert {n: schedules[n, "bf16"] for n in (1, 127, 3000, 4096, 32768, 32769)} == {
        1: (1, 4),
        127: (128, 4),
        3000: (4096, 8),
        4096: (4096, 8),
        32768: (32768, 32),
        32769: (8192, 16),
    }
    assert schedules[16384, "fp32"] == (16384, 16)
    assert schedules[32768, "fp32"] == (8192, 16)


# Dynamo takes a kernel for one only where Triton has a driver, and AOTAutograd asks that for its
# GPU to find out what the kernel writes. Tensors are fake, so nothing is launched.
GRAPHS = """
import torch.utils._triton
import triton
from triton.backends.compiler import GPUTarget
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
torch.utils._triton.has_triton = lambda: True
names = lambda graph: [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
found = {}

def compile_fx(graph, inputs):
    found[norm.__name__].append(names(graph))
    return graph.forward

aot = aot_autograd(fw_compiler=compile_fx)

def backend(graph, inputs):
    found[norm.__name__] = [names(graph)]
    aot(graph, inputs)
    return lambda *args: inputs[:1]  # nothing can be launched here

with FakeTensorMode(), torch.no_grad():
    x = torch.empty(4, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.empty(4096, device="cuda", dtype=torch.bfloat16)
    for norm in ALL:
        torch._dynamo.reset()
        torch.compile(lambda x: norm(x, w, 1e-5) * 2, backend=backend, fullgraph=True)(x)
print("RESULT" + json.dumps(found))
"""


@needs_triton
def test_each_integration_shows_torch_compile_what_it_is_meant_to_show(python, tmp_path):
    done = python(PRELUDE + GRAPHS, env={"TRITON_CACHE_DIR": str(tmp_path / "triton")})
    assert done.code == 0, done.err
    found = json.loads(done.out.rpartition("RESULT")[2])

    def ours(graph):
        return [name for name in graph if "triton" in name]

    launch, functional = "triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional"
    # Dynamo's graph, then AOTAutograd's, which Inductor gets.
    assert {name: [ours(graph) for graph in graphs] for name, graphs in found.items()} == {
        "rms_norm_captured": [[launch], [functional]],
        "rms_norm_autotuned": [[launch], [functional]],
        "rms_norm_wrapped": [["tilelang_ops_triton.rms_norm_wrapped.default"], [functional]],
        "rms_norm_opaque": [["tilelang_ops_triton.rms_norm_opaque.default"]] * 2,
    }
    # Only y is known to be written: nothing of x or the weight is copied.
    for name in ("rms_norm_captured", "rms_norm_wrapped", "rms_norm_autotuned"):
        assert found[name][1].count("<built-in function getitem>") == 1


# --- on a GPU ---


@pytest.fixture
def caches(tmp_path):
    """The environment of a process with caches of its own, for each that starts with it."""
    return {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_on_the_gpu_are_those_of_torch_for_every_row_length(python, caches, dtype):
    done = python(PRELUDE + VALUES, dtype, env=caches)
    assert done.code == 0, done.err


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize(
    "what",
    [STRIDED, SPECIAL, EMPTY, OPCHECK],
    ids=["strided", "overflow_nan_and_inf", "no_rows", "opcheck"],
)
def test_special_inputs_on_the_gpu_give_what_torch_gives(python, caches, what):
    done = python(PRELUDE + what, env=caches)
    assert done.code == 0, done.err


ROUNDING = """
x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
w = torch.ones(512, device="cuda", dtype=torch.bfloat16)
want = torch.nn.functional.rms_norm(x.float(), (512,), w.float(), 1e-5).to(torch.bfloat16)
for norm in ALL:
    # The float32 sums differ in their order; a wrong rounding would differ in half of the places.
    assert (norm(x, w, 1e-5) != want).float().mean().item() < 0.01
"""


@needs_triton
@pytest.mark.gpu
def test_bfloat16_is_rounded_to_nearest_even_as_torch_rounds_it(python, caches):
    done = python(PRELUDE + ROUNDING, env=caches)
    assert done.code == 0, done.err


COMPILED = """
from torch._inductor.utils import run_and_get_code
found = {}
x, w = inputs(16, 4096, dtype=torch.bfloat16)
residual = torch.randn_like(x)
with torch.no_grad():
    for norm in ALL:
        torch._dynamo.reset()
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        def layer(x, residual):
            return norm(x, w, 1e-5) * 2 + residual
        compiled = torch.compile(layer, fullgraph=True)
        y, (code,) = run_and_get_code(compiled, x, residual)
        torch.testing.assert_close(y, layer(x, residual), rtol=1.6e-2, atol=3e-2)
        name = f"torch.ops.tilelang_ops_triton.{norm.__name__}.default("
        found[norm.__name__] = {
            "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs,
            "calls": code.count(name),
            "kernels of ours": code.count("@triton_heuristics.user_autotune("),
            "kernels of Inductor": code.count("@triton_heuristics.pointwise("),
        }
        close(torch.compile(norm, fullgraph=True)(x[:, ::2], w[::2], 1e-5), x[:, ::2], w[::2])
print("RESULT" + json.dumps(found))
"""


@needs_triton
@pytest.mark.gpu
def test_inductor_generates_code_around_each_with_fullgraph(python, caches):
    # Captured and wrapped become the same graph; without caches each is compiled for itself.
    env = {**caches, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = python(PRELUDE + COMPILED, env=env)
    assert done.code == 0, done.err
    visible = {"graphs": 1, "calls": 0, "kernels of ours": 1, "kernels of Inductor": 1}
    # `* 2 + residual` is one kernel of Inductor's beside ours in every case: without
    # `epilogue_fusion_user_defined_triton_kernel` it does not fuse into a kernel that it has not
    # written.
    assert json.loads(done.out.rpartition("RESULT")[2]) == {
        "rms_norm_captured": visible,
        "rms_norm_wrapped": visible,
        "rms_norm_autotuned": visible,
        "rms_norm_opaque": {**visible, "calls": 1, "kernels of ours": 0},
    }


ROWS = """
x, w = inputs(24, 4096, dtype=torch.bfloat16)
with torch.no_grad():
    for norm in ALL[:3]:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, eps: norm(x, w, eps), fullgraph=True)
        for rows in (16, 8, 24, 1):
            close(compiled(x[:rows], 1e-5), x[:rows], w)
        close(compiled(x, 1e-2), x, w, 1e-2)
        assert compiled(x[:0], 1e-5).shape == (0, 4096)
"""


@needs_triton
@pytest.mark.gpu
def test_other_rows_and_another_eps_give_right_values_when_compiled(python, caches):
    done = python(PRELUDE + ROWS, env=caches)
    assert done.code == 0, done.err


GRADIENT_COMPILED = """
x, w = inputs(16, 64)
w.requires_grad_()
for norm in ALL:
    torch._dynamo.reset()
    try:
        torch.compile(lambda x: norm(x, w, 1e-5).sum(), fullgraph=True)(x).backward()
    except Exception as error:
        assert "gradient" in str(error) or "autograd" in str(error), error
    else:
        raise AssertionError(f"{norm.__name__} has a gradient of {w.grad}")
"""


@needs_triton
@pytest.mark.gpu
def test_a_compiled_gradient_is_an_error_too(python, caches):
    done = python(PRELUDE + GRADIENT_COMPILED, env=caches)
    assert done.code == 0, done.err


TUNED = """
from triton.runtime.autotuner import Autotuner
timed = []
bench = Autotuner._bench
Autotuner._bench = lambda self, *a, **kw: timed.append(1) or bench(self, *a, **kw)
x, w = inputs(16, 4096, dtype=torch.bfloat16)
for rows in (16, 3):
    close(rms_norm_autotuned(x[:rows], w, 1e-5), x[:rows], w)
print("RESULT", len(timed))
"""


@needs_triton
@pytest.mark.gpu
def test_what_was_tuned_is_read_from_disk_by_the_next_process(python, caches, tmp_path):
    first = python(PRELUDE + TUNED, env=caches)
    assert first.code == 0, first.err
    assert first.out.split() == ["RESULT", "4"]  # one N, two numbers of rows: tuned once
    assert len(list((tmp_path / "triton").glob("*/*.autotune.json"))) == 1
    second = python(PRELUDE + TUNED, env=caches)
    assert second.code == 0, second.err
    assert second.out.split() == ["RESULT", "0"]


HITS = """
import triton
hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
x, w = inputs(16, 4096, dtype=torch.bfloat16)
for norm in (rms_norm_captured, rms_norm_wrapped, rms_norm_opaque):
    norm(x, w, 1e-5)
    norm(x[:3], w, 1e-5)
print("RESULT", *hits)
"""


@needs_triton
@pytest.mark.gpu
def test_all_three_launch_one_kernel_which_the_next_process_reads_from_disk(python, caches):
    first = python(PRELUDE + HITS, env=caches)
    assert first.out.split() == ["RESULT", "False"], first.err
    second = python(PRELUDE + HITS, env=caches)
    assert second.out.split() == ["RESULT", "True"], second.err
