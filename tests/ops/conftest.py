"""What the tests of `ops` share."""

from __future__ import annotations

import pytest
import torch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}


def reference(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in float64."""
    return torch.nn.functional.rms_norm(x.double(), (x.shape[-1],), w.double(), eps)


@pytest.fixture
def close():
    """Assert that a result is rms_norm of its inputs, within the tolerance of its dtype."""

    def check(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, eps: float = 1e-5) -> None:
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        want = reference(x, w, eps)
        off = (y.double() - want).abs() / want.abs().clamp(min=1e-3)
        assert off.max().item() <= TOLERANCE[x.dtype], off.max().item()

    return check


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory: pytest.TempPathFactory):
    """One cache root for a module's tests, so that equal kernels compile once."""
    patch = pytest.MonkeyPatch()
    root = tmp_path_factory.mktemp("shared") / "cache"
    patch.setenv("TILELANG_CACHE_DIR", str(root))
    patch.setenv("TILELANG_PRINT_ON_COMPILATION", "0")
    yield root
    patch.undo()
