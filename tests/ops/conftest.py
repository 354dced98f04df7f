"""What the tests of `ops` share: every operator as a case, with its reference in float64, and one
cache root.

A test that takes `case` runs once for each operator; one that takes `typed`, once for each of its
dtypes; one that takes `kernel`, once for each kernel
of the grid; one that takes `device`, on the CPU and, where there is one, on a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import ops

F = torch.nn.functional
EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
ALL = (torch.float32, torch.float16, torch.bfloat16)
Size = tuple[int, ...]


# --- references ---


def reference(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """RMSNorm in float64."""
    return F.rms_norm(x.double(), (x.shape[-1],), w.double(), eps)


def _rms(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (F.rms_norm(x, (x.shape[-1],), w, EPS),)


def _fused(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    total = x + residual
    return *_rms(total, w), total


def _layer(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, ...]:
    return (F.layer_norm(x, (x.shape[-1],), w, b, EPS),)


def _silu(x: Tensor) -> tuple[Tensor, ...]:
    gate, up = x.chunk(2, -1)
    return (F.silu(gate) * up,)


def _rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> tuple[Tensor, ...]:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return (torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2),)
    a, b = x.chunk(2, -1)
    return (torch.cat((a * cos - b * sin, b * cos + a * sin), -1),)


def _softmax(x: Tensor) -> tuple[Tensor, ...]:
    return (F.softmax(x, -1),)


def _gemm(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (x @ w.T,)


# --- cases ---


@dataclass(frozen=True)
class Case:
    """One operator.

    Attributes:
        name: Of the case.
        facade: Its op class; `facade(*size, **options, dtype=…)`.
        function: The function in front of it; `function(*inputs, **scalars)`.
        formula: The same in torch, of inputs of any floating dtype, as a tuple.
        options: Keyword arguments of the op class.
        scalars: Keyword arguments of the function, and the last arguments of `.scalars`.
        shapes: From rows and a size to the shape of each input, x first.
        grid: Sizes to test, the usual one first; that has every dtype.
        gpu: Sizes to test on a GPU, each with every dtype.
        dtypes: That it takes.
        floor: Below which magnitude an error is no longer relative.
    """

    name: str
    facade: type[ops.RMSNormFwdOp]
    function: Callable[..., Any]
    formula: Callable[..., tuple[Tensor, ...]]
    options: dict[str, Any]
    scalars: dict[str, Any]
    shapes: Callable[..., tuple[Size | None, ...]]
    grid: tuple[Size, ...] = ((127,), (1,), (3000,), (4096,), (65536,))
    gpu: tuple[Size, ...] = ((127,), (1,), (3000,), (4096,), (65536,))
    dtypes: tuple[torch.dtype, ...] = ALL
    floor: float = 1e-3

    @property
    def usual(self) -> Size:
        return self.grid[0]

    @property
    def inplace(self) -> bool:
        return self.name.endswith("_")

    @property
    def sibling(self) -> bool:
        """Whether it is another one's kernel but for a line."""
        return self.inplace or self.name == "layer_norm_without_bias"

    @property
    def rotates(self) -> bool:
        return self.formula.__class__ is partial

    @property
    def weight(self) -> int | None:
        """Which input is not rows."""
        shapes = self.shapes(2, *self.usual)
        last = len(shapes) - 1 - (shapes[-1] is None)
        if self.name.startswith("layer_norm"):
            return 1
        return None if self.rotates or last == 0 else last

    def op(self, size: Size, dtype: torch.dtype, **kwargs: Any) -> Any:
        return self.facade(*size, **self.options, dtype=dtype, **kwargs)

    def inputs(
        self, rows: int, size: Size, dtype: torch.dtype, device: str = "cpu"
    ) -> list[Tensor | None]:
        """Random inputs; the tables of a rotation are cosines and sines in float32."""
        made = [
            None if shape is None else torch.randn(shape, device=device)
            for shape in self.shapes(rows, *size)
        ]
        if self.rotates:
            x, angles, _ = made
            return [x.to(dtype), angles.cos(), angles.sin()]
        return [one if one is None else one.to(dtype) for one in made]

    def outputs(self, call: Callable[..., Any], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """What a call returns, or leaves in the first two inputs, which are kept from it."""
        if self.inplace:
            kept = [one.clone(memory_format=torch.preserve_format) for one in inputs[:2]]
            for copy, one in zip(kept, inputs, strict=False):
                if copy.stride() != one.stride():  # of an expanded or overlapping one
                    raise ValueError("written inputs are dense")
            assert call(*kept, *inputs[2:]) is None
            return tuple(kept)
        made = call(*inputs)
        return made if isinstance(made, tuple) else (made,)

    def wide(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """The reference in float64; a sum that is kept is rounded to the dtype first."""
        if self.formula is _fused:
            x, residual, w = inputs
            total = x + residual
            return *_rms(total.double(), w.double()), total.double()
        return self.formula(*[one if one is None else one.double() for one in inputs])

    def close(self, outputs: tuple[Tensor, ...], *inputs: Tensor | None) -> None:
        """Assert that outputs are those of inputs, within the tolerance of the dtype."""
        x = inputs[0]
        want = self.wide(*inputs)
        assert len(outputs) == len(want)
        for have, exact in zip(outputs, want, strict=True):
            assert have.shape == exact.shape
            assert (have.dtype, have.device) == (x.dtype, x.device)
            if not have.numel():
                continue
            rounded = exact.to(have.dtype)
            finite = rounded.isfinite()
            assert torch.equal(have[~finite].nan_to_num(7.0), rounded[~finite].nan_to_num(7.0))
            have, exact = have.double()[finite], exact[finite]
            if self.name == "gemm":
                off = (have - exact).norm() / exact.norm().clamp(min=1e-30)
            else:
                # A rotation is a difference of products of numbers of x's size.
                size = x[x.isfinite()].abs().max().item() if self.rotates else 1.0
                least = max(self.floor * size, torch.finfo(x.dtype).smallest_normal)
                off = (have - exact).abs() / exact.abs().clamp(min=least)
            worst = off.max().item() if off.numel() else 0.0
            assert worst <= TOLERANCE[x.dtype], (self.name, list(x.shape), x.dtype, worst)


def _cases() -> dict[str, Case]:
    def rows(count: int) -> Callable[..., tuple[Size | None, ...]]:
        return lambda m, n: (*[(m, n)] * count, (n,))

    def rotated(m: int, h: int, d: int) -> tuple[Size | None, ...]:
        return (m, h, d), (m, d // 2), (m, d // 2)

    heads = {"grid": ((3, 34), (1, 2), (8, 128)), "gpu": ((3, 34), (1, 2), (8, 128), (32, 1000))}
    eps = {"eps": EPS}
    made = [
        Case("rms_norm", ops.RMSNormFwdOp, ops.rms_norm, _rms, eps, eps, rows(1)),
        Case(
            "fused_add_rms_norm", ops.FusedAddRMSNormFwdOp, ops.fused_add_rms_norm, _fused, eps,
            eps, rows(2),
        ),
        Case(
            "fused_add_rms_norm_", ops.FusedAddRMSNormInplaceFwdOp, ops.fused_add_rms_norm_,
            _fused, eps, eps, rows(2),
        ),
        Case(
            "layer_norm", ops.LayerNormFwdOp, ops.layer_norm, _layer, eps, eps,
            lambda m, n: ((m, n), (n,), (n,)), floor=0.3,
        ),
        Case(
            "layer_norm_without_bias", ops.LayerNormFwdOp, ops.layer_norm, _layer,
            {**eps, "bias": False}, eps, lambda m, n: ((m, n), (n,), None), floor=0.3,
        ),
        Case(
            "silu_and_mul", ops.SiluAndMulFwdOp, ops.silu_and_mul, _silu, {}, {},
            lambda m, n: ((m, 2 * n),),
        ),
        Case(
            "rope", ops.RopeFwdOp, ops.rope, partial(_rope, interleaved=False), {},
            {"interleaved": False}, rotated, floor=0.1, **heads,
        ),
        Case(
            "rope_interleaved", ops.RopeFwdOp, ops.rope, partial(_rope, interleaved=True),
            {"interleaved": True}, {"interleaved": True}, rotated, floor=0.1, **heads,
        ),
        Case(
            "softmax", ops.SoftmaxFwdOp, ops.softmax, _softmax, {}, {},
            lambda m, n: ((m, n),), floor=0.0,
        ),
        Case(
            "gemm", ops.GemmFwdOp, ops.gemm, _gemm, {}, {}, lambda m, n, k: ((m, k), (n, k)),
            grid=((40, 72), (1, 1), (33, 127)), gpu=((40, 72), (8, 8), (256, 1000), (3000, 4096)),
            dtypes=(torch.bfloat16, torch.float16),
        ),
    ]  # fmt: skip
    return {case.name: case for case in made}


CASES = _cases()


def grid(device: str) -> list[tuple[Case, Size, torch.dtype]]:
    """The kernels that are tested on a device. On the CPU, where sizes make no difference to a
    kernel but in what is left over of 8, one dtype each beside the usual size.
    """
    found = []
    for case in CASES.values():
        found += [(case, case.usual, dtype) for dtype in case.dtypes]
        sizes = case.gpu if device == "cuda" else case.grid[: 2 if case.sibling else None]
        for index, size in enumerate(sizes[1:]):
            some = case.dtypes if device == "cuda" else [case.dtypes[index % len(case.dtypes)]]
            found += [(case, size, dtype) for dtype in some]
    return found


# --- fixtures ---


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernel" in metafunc.fixturenames:
        params = []
        for device in ("cpu", "cuda"):
            marks = [pytest.mark.gpu] if device == "cuda" else []
            for case, size, dtype in grid(device):
                label = f"{device}-{case.name}-{'x'.join(map(str, size))}-{str(dtype)[6:]}"
                value = (device, case.name, size, dtype)
                params.append(pytest.param(value, marks=marks, id=label))
        metafunc.parametrize("kernel", params, indirect=True)
    elif "device" in metafunc.fixturenames:
        both = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
        metafunc.parametrize("device", both, indirect=True)
    if "typed" in metafunc.fixturenames:
        every = [(case.name, dtype) for case in CASES.values() for dtype in case.dtypes]
        ids = [f"{name}-{str(dtype)[6:]}" for name, dtype in every]
        metafunc.parametrize("typed", every, indirect=True, ids=ids)
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES, indirect=True)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    """Each operator."""
    return CASES[request.param]


@pytest.fixture
def typed(request: pytest.FixtureRequest) -> tuple[Case, torch.dtype]:
    """Each operator with each dtype that it takes."""
    name, dtype = request.param
    return CASES[name], dtype


@pytest.fixture(scope="session")
def case_of() -> Callable[[str], Case]:
    """An operator by name."""
    return CASES.__getitem__


@pytest.fixture(scope="session")
def session_root(once: Callable[..., Any]) -> Any:
    """Where equal kernels compile once."""
    return once("ops", lambda place: None) / "cache"


@pytest.fixture(scope="module")
def shared_root(session_root: Any) -> Any:
    """The cache root of all modules that ask for it, in force while they run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILELANG_CACHE_DIR", str(session_root))
        patch.setenv("TILELANG_PRINT_ON_COMPILATION", "0")
        yield session_root


@pytest.fixture(scope="session")
def warm(session_root: Any, once: Callable[..., Any]) -> Callable[[str], None]:
    """Warm the grid of a device by the real command, once a session."""

    def compiled(device: str, place: Any) -> None:
        workloads = []
        for case, size, dtype in grid(device):
            state = case.op(size, dtype).state
            fixed = {**state.values, **state.fixed}
            workloads.append({"op": state.operator.name, "M": "dynamic", **fixed})
        path = place / "shapes.json"
        path.write_text(json.dumps({"version": 1, "workloads": workloads}))
        target = "cpu" if device == "cpu" else "auto"
        command = [sys.executable, "-c", "from tlcache.cli import main; main()", "warm"]
        command += ["--shapes", str(path), "--target", target, "--cache-dir", str(session_root)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr

    done: set[str] = set()

    def warm(device: str) -> None:
        if device not in done:
            once(f"ops-{device}", lambda place: compiled(device, place))
            done.add(device)

    return warm


@pytest.fixture
def device(request: pytest.FixtureRequest, shared_root: Any, warm: Callable[[str], None]) -> str:
    """Where to run, with the kernels of the grid warm there."""
    warm(request.param)
    return str(request.param)


@pytest.fixture
def kernel(request: pytest.FixtureRequest, shared_root: Any, warm: Callable[[str], None]) -> Any:
    """(device, case, size, dtype) of each kernel of the grid, warm."""
    device, name, size, dtype = request.param
    warm(device)
    return device, CASES[name], size, dtype


@pytest.fixture
def close() -> Callable[..., None]:
    """Assert that a result is rms_norm of its inputs, within the tolerance of its dtype."""

    def check(y: Tensor, x: Tensor, w: Tensor, eps: float = EPS) -> None:
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        want = reference(x, w, eps)
        off = (y.double() - want).abs() / want.abs().clamp(min=1e-3)
        assert off.max().item() <= TOLERANCE[x.dtype], off.max().item()

    return check
