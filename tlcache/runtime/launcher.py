"""Launchers: a compiled library made callable, without the compiler that made it.

Two ABIs. `tvm_ffi`: the library is a tvm-ffi module; `main(*inputs, anchor)` allocates the outputs
on the anchor's device and runs on torch's current stream. `c`: the library exports `call(pointers,
dimensions)`; the launcher allocates outputs, and checks every tensor first, since a wrong pointer
is memory corruption.

Invariant: a library, once loaded, is never unloaded: a captured CUDA graph may still point into it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tlcache.errors import RuntimeLibraryError
from tlcache.fingerprint import tilelang_path
from tlcache.spec import KernelSpec
from tlcache.store import files
from tlcache.store.record import Launch, Param

__all__ = ["Launcher", "load"]


class Launcher(NamedTuple):
    """A kernel that is ready to launch.

    Attributes:
        spec: What was compiled.
        origin: `restored`, `disk` or `compiled`: how this process came by it.
        call: Takes the inputs in parameter order and returns the output, or a list of several. A
            kernel without outputs takes all its parameters.
    """

    spec: KernelSpec
    origin: str
    call: Callable[..., Any]

    def __call__(self, *inputs: Any) -> Any:
        return self.call(*inputs)


def load(path: str, launch: Launch) -> Callable[..., Any]:
    """Load a library that was verified, and return its calling form.

    Raises:
        RuntimeLibraryError: The runtime library that it needs is not installed, or it cannot be
            loaded.
    """
    try:
        return _ABIS[launch.abi](path, launch)
    except (OSError, RuntimeError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RuntimeLibraryError(
            f"the compiled kernel {path} cannot be loaded: {error}"
        ) from error


def _load_tvm_ffi(path: str, launch: Launch) -> Callable[..., Any]:
    tvm_ffi = _tvm_ffi()
    if _calls_tilelang(path):
        _native(_TILELANG)
    function = tvm_ffi.load_module(path)[launch.symbol]
    if not launch.outputs:
        return function  # type: ignore[no-any-return]
    inputs = [param for index, param in enumerate(launch.params) if index not in launch.outputs]
    anchor = max(index for index, param in enumerate(inputs) if param.shape)
    if len(launch.outputs) > 1:
        return lambda *tensors: list(function(*tensors, tensors[anchor]))
    if len(inputs) == 2 and anchor == 1:
        return lambda x, w: function(x, w, w)
    return lambda *tensors: function(*tensors, tensors[anchor])


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection meanwhile: an import makes little garbage, and a full collection in the
    middle of one goes through all of torch's objects (60 ms).
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@functools.cache
def _tvm_ffi() -> Any:
    """tvm-ffi with TVM's runtime in it, which the modules' constructors are registered by."""
    with _collector_paused():
        import tvm_ffi

    _native("libtvm_runtime.so")
    return tvm_ffi


_TILELANG = "libtilelang.so"
_CALLED = (b"__tvm_tensormap_", b"__tvm_cuda_stream_")


def _calls_tilelang(path: str) -> bool:
    """Whether a library calls functions of TileLang's native library at each launch, as kernels do
    that copy by tensor maps (TMA). Loading that library takes 30 to 100 ms, once.
    """
    data = files.read(path)
    return any(name in data for name in _CALLED)


@functools.cache
def _native(name: str) -> None:
    """Load one of TileLang's native libraries, without its Python."""
    path = tilelang_path() / "lib" / name
    try:
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise RuntimeLibraryError(
            f"{name} cannot be loaded: {error}",
            hint="it comes with TileLang: `pip install tilelang`",
        ) from error


_C_TYPES = {"int32": ctypes.c_int32, "int64": ctypes.c_int64}


def _load_c(path: str, launch: Launch) -> Callable[..., Any]:
    import torch

    library = ctypes.CDLL(path)

    def last_error(otherwise: bytes) -> str:
        library.get_last_error.restype = ctypes.c_char_p
        return (library.get_last_error() or otherwise).decode(errors="replace")

    if library.init() != 0:
        raise OSError(last_error(b"its init failed"))
    function = library[launch.symbol]
    function.restype = ctypes.c_int
    function.argtypes = [ctypes.c_void_p] * len(launch.params) + [
        _C_TYPES[dim.dtype] for dim in launch.dynamic
    ]
    dtypes = [getattr(torch, param.dtype) for param in launch.params]
    places = [index for index in range(len(launch.params)) if index not in launch.outputs]
    empty = torch.empty

    def call(*inputs: Any) -> Any:
        if len(inputs) != len(places):
            raise TypeError(f"the kernel takes {len(places)} tensors, not {len(inputs)}")
        sizes: dict[str, int] = {}
        tensors: list[Any] = [None] * len(dtypes)
        for index, tensor in zip(places, inputs, strict=True):
            _check(launch.params[index], dtypes[index], tensor, sizes)
            tensors[index] = tensor
        for index in launch.outputs:
            shape = [sizes[d] if isinstance(d, str) else d for d in launch.params[index].shape]
            tensors[index] = empty(shape, dtype=dtypes[index])
        dimensions = [sizes[dim.name] for dim in launch.dynamic]
        if function(*[tensor.data_ptr() for tensor in tensors], *dimensions) != 0:
            raise RuntimeError(last_error(b"the kernel failed"))
        outputs = [tensors[index] for index in launch.outputs]
        return outputs[0] if len(outputs) == 1 else outputs or None

    return call


def _check(param: Param, dtype: Any, tensor: Any, sizes: dict[str, int]) -> None:
    """Check one tensor against its parameter, and bind dynamic dimensions."""
    shape = tensor.shape
    sound = len(shape) == len(param.shape) and all(
        sizes.setdefault(want, have) == have if isinstance(want, str) else want == have
        for want, have in zip(param.shape, shape, strict=True)
    )
    if not sound:
        want = [f"{d}={sizes[d]}" if isinstance(d, str) and d in sizes else d for d in param.shape]
        raise ValueError(
            f"{param.name} has shape {list(shape)}; the kernel takes [{', '.join(map(str, want))}]"
        )
    if tensor.dtype != dtype:
        raise TypeError(f"{param.name} is {tensor.dtype}; the kernel takes {dtype}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{param.name} is on {tensor.device}; the kernel takes CPU tensors")
    if not tensor.is_contiguous():
        raise ValueError(f"{param.name} is not contiguous; the kernel takes contiguous tensors")


_ABIS: dict[str, Callable[[str, Launch], Callable[..., Any]]] = {
    "tvm_ffi": _load_tvm_ffi,
    "c": _load_c,
}
