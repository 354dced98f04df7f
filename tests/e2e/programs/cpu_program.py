"""A program that launches its kernels and checks what they compute."""

import cpu_kernels as kernels
import torch


def main():
    x = torch.arange(8, dtype=torch.float32)
    for size in (4, 6, 8):
        assert torch.equal(kernels.add(size)(x[:size], x[:size]), 2 * x[:size])
    config = kernels.Config(kernels.Mode.TWICE, offset=0.5)
    twice, shifted = kernels.scaled(8, config)(3)(x)
    assert torch.equal(twice, 2 * x)
    assert torch.equal(shifted, x + 3.5)
    assert torch.equal(kernels.negated(x), -x)
    assert torch.equal(kernels.negated(x[:4], step=2), -2 * x[:4])
    rows = kernels.any_rows(4)
    assert torch.equal(rows(x.view(2, 4)), x.view(2, 4) + 1)
    assert torch.equal(kernels.compiled(8, factor=3.0)(x), 3 * x)


if __name__ == "__main__":
    main()
    print("done")
