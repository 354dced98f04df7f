"""A restored kernel: launched from its library, and TileLang's own in everything else.

Invariant: a launch does what TileLang's adapter would do with the same arguments, its errors
included. Whatever else is asked of a restored kernel is answered by the kernel that TileLang makes
of the call then, the slow way; if that turns out to be another one, it is an error.

This module imports TileLang.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import tvm_ffi
from tilelang.jit.kernel import JITKernel

from tlcache.errors import RestoreError
from tlcache.store.calls import Answer

__all__ = ["RestoredKernel", "restored"]

_OURS = frozenset({"torch_function", "latency", "config", "ref_latency"})


def _lent(name: str) -> property:
    """An attribute of the class that is the elaborated kernel's; as a default of the class it would
    hide that.
    """

    def read(self: RestoredKernel) -> Any:
        return getattr(self._tlcache_elaborated(), name)

    def write(self: RestoredKernel, value: Any) -> None:
        setattr(self._tlcache_elaborated(), name, value)

    return property(read, write)


class RestoredKernel(JITKernel):  # type: ignore[misc]
    """A JITKernel whose library was loaded, and nothing else made of it."""

    prim_func = _lent("prim_func")
    artifact = _lent("artifact")
    adapter = _lent("adapter")
    execution_backend_spec = _lent("execution_backend_spec")

    def __init__(
        self, answer: Answer, path: str, launch: Callable[..., Any], make: Callable[[], Any]
    ) -> None:
        # Not JITKernel's: that compiles. Who has patched it sees compiles and loads, not this.
        self.torch_function = launch
        self.execution_backend = answer.backend
        self._tilelang_cache_key = answer.key
        self._tilelang_cache_path = path
        self._tlcache_make = make
        self._tlcache_lock = threading.RLock()
        self._tlcache_kernel: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_tlcache_") or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._tlcache_elaborated(), name)

    def __reduce__(self) -> Any:
        return self._tlcache_elaborated().__reduce_ex__(2)

    def _tlcache_elaborated(self) -> Any:
        """The kernel that TileLang makes of the same call."""
        kernel = self._tlcache_kernel
        if kernel is not None:
            return kernel
        with self._tlcache_lock:
            if self._tlcache_kernel is None:
                kernel = self._tlcache_make()
                if kernel._tilelang_cache_key != self._tilelang_cache_key:
                    raise RestoreError(
                        f"the kernel {self._tilelang_cache_key[:12]} was restored, and TileLang "
                        f"makes {str(kernel._tilelang_cache_key)[:12]} of the same call now",
                        hint="if nothing that its function uses was changed since it was first "
                        "called, report it; TLCACHE_RESTORE=0 does without restoring",
                    )
                self._tlcache_kernel = kernel
        return self._tlcache_kernel


def restored(answer: Answer, path: str, make: Callable[[], Any]) -> RestoredKernel:
    """The kernel in a directory of TileLang's, which was verified.

    Args:
        answer: What it is.
        path: The directory.
        make: Makes the kernel by TileLang's own way.

    Raises:
        Exception: It cannot be loaded here.
    """
    library = os.path.join(path, answer.library.name)
    load = _tvm_ffi if answer.backend == "tvm_ffi" else _by_adapter
    return RestoredKernel(answer, path, load(answer, library), make)


def _tvm_ffi(answer: Answer, library: str) -> Callable[..., Any]:
    main = tvm_ffi.load_module(library)["main"]
    expected, count = answer.inputs, len(answer.outputs)

    def wrong(inputs: tuple[Any, ...]) -> ValueError:
        return ValueError(f"Kernel expected {expected} inputs, but {len(inputs)} are provided.")

    if not count:

        def launch(*inputs: Any) -> Any:
            if len(inputs) != expected:
                raise wrong(inputs)
            main(*inputs)
            return []

    else:

        def launch(*inputs: Any) -> Any:
            if len(inputs) != expected:
                raise wrong(inputs)
            anchor = next((one for one in inputs if isinstance(one, torch.Tensor)), None)
            if anchor is None:
                anchor = torch.empty(0, device=_current_device())
            result = main(*inputs, anchor)
            return result if count == 1 else list(result)

    return launch


def _current_device() -> torch.device:
    """As TileLang's adapters find it where no argument is a tensor."""
    from tilelang.jit.adapter.base import BaseKernelAdapter

    device: torch.device = BaseKernelAdapter.get_current_device_functor()()
    return device


def _by_adapter(answer: Answer, library: str) -> Callable[..., Any]:
    """The launch of TileLang's own adapter, from the kernel's signature."""
    import tvm
    from tilelang.engine.lower import extrac_params
    from tilelang.jit.adapter import CythonKernelAdapter
    from tilelang.jit.adapter.base import CachedTextSource

    # Not `tvm.ir.load_json`, which brings texts of other versions up to date and takes ten times as
    # long: the key is of this version.
    function = tvm_ffi.get_global_func("node.LoadJSON")(answer.signature)
    nothing = CachedTextSource()
    adapter = CythonKernelAdapter.from_database(
        params=extrac_params(function),
        result_idx=list(answer.outputs),
        target=tvm.target.Target(answer.target),
        func_or_mod=function,
        host_kernel_source=nothing,
        device_kernel_source=nothing,
        kernel_lib_path=library,
        pass_configs=dict(answer.pass_configs),
    )
    launch: Callable[..., Any] = adapter.func
    return launch
