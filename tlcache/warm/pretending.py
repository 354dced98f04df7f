"""A process without a GPU of the kind that a kernel is made for, which is to answer as if it had.

Invariant: what is told is true of every GPU of that compute capability. What differs between such
GPUs, as their number of multiprocessors, is not made up: who asks for that gets an error that says
so. Where the host has a GPU of the very kind, it is told what the driver says of that one. CUDA
itself is never asked: to import TileLang has initialized the driver, and a process that was forked
after that cannot use it. This module imports TileLang and torch.

TileLang's `auto`, `cuda` and no target at all mean whatever GPU is there; without one, `auto` is an
error, and `cuda` an architecture that nobody has. Elaborations ask torch, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tilelang.backend.target import register_target_detector, register_target_normalizer
from tilelang.cuda.target import normalize_cuda_target
from tvm.target import Target as TvmTarget

from tlcache import targets
from tlcache.errors import FactoryError
from tlcache.targets import Target

__all__ = ["pretending"]

# CUDA programming guide, "Technical specifications per compute capability": KiB of shared memory.
_SHARED = {
    (8, 0): 164,
    (8, 6): 100,
    (8, 9): 100,
    (9, 0): 228,
    (10, 0): 228,
    (10, 3): 228,
    (12, 0): 100,
}


class _Properties:
    """What a GPU's compute capability tells of it, under torch's names; all that the driver does
    where it is the GPU of this host.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self.major, self.minor = capability
        self.warp_size = 32
        if _here is not None and (_here["major"], _here["minor"]) == capability:
            vars(self).update(_here)
            return
        if (kib := _SHARED.get(capability)) is not None:
            self.shared_memory_per_multiprocessor = kib * 1024
            self.shared_memory_per_block_optin = (kib - 1) * 1024

    def __getattr__(self, name: str) -> Any:
        raise FactoryError(
            f"the kernel depends on the {name} of the GPU, which is not the same on all of "
            f"capability {self.major}.{self.minor}",
            hint="warm on a host with the GPU that it is for",
        )


class _Pretence:
    target: Target | None = None


_pretence = _Pretence()
_here = targets.gpu()  # asked once, by whoever forks the workers: they cannot


@contextmanager
def pretending(target: Target) -> Iterator[None]:
    """Be a process on a host with a GPU of this kind, or without one for the CPU; the whole process
    is.
    """
    told = {name: getattr(torch.cuda, name) for name in _asked}
    capability = _capability(target)
    _pretence.target = target
    if capability is not None:
        for name, answer in _asked.items():
            setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer(capability))
    try:
        yield
    finally:
        for name, answer in told.items():
            setattr(torch.cuda, name, answer)
        _pretence.target = None


_asked = {
    "is_available": lambda capability: _here is not None,
    "current_device": lambda capability: 0,
    "get_device_capability": lambda capability: capability,
    "get_device_properties": _Properties,
}


def _capability(target: Target) -> tuple[int, int] | None:
    match = re.fullmatch(r"sm_(\d+)(\d)[af]?", target.name)
    return (int(match[1]), int(match[2])) if match is not None else None


def _detected() -> Any:
    return TvmTarget(_pretence.target.config) if _pretence.target is not None else None


def _normalized(spelled: Any) -> Any:
    target = _pretence.target
    if target is not None and target.is_cuda and spelled == "cuda":
        return TvmTarget(target.config)
    return normalize_cuda_target(spelled)


register_target_detector("cuda", _detected, override=True)
register_target_normalizer("cuda", _normalized, override=True)
