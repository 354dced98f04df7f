"""What an eager function takes from its tensors, restored: TileLang finds it out by tracing once.

This module imports TileLang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tvm
from tilelang.language.eager.builder import TirTemplate

from tlcache.store.calls import Style

__all__ = ["RestoredTemplate"]


class _Param(NamedTuple):
    name: str


class _Buffer(NamedTuple):
    dtype: Any
    shape: tuple[None, ...]
    strides: tuple[None, ...]


class _Function(NamedTuple):
    buffer_map: Mapping[_Param, _Buffer]


class RestoredTemplate(TirTemplate):  # type: ignore[misc]
    """A template that knows its constants, and is traced only where its kernel is asked for."""

    def __init__(
        self,
        function: Any,
        style: Style,
        front: str | None,
        make: Callable[[], Any],
    ) -> None:
        buffers = {
            _Param(name): _Buffer(tvm.DataType(dtype), (None,) * axes, (None,) * axes)
            for name, (dtype, axes) in style.buffers.items()
        }
        # TileLang reads names, dtypes and numbers of axes of it, in TileLang's own code.
        super().__init__(
            name=function.orig_func.__name__,
            prim_func=_Function(buffers),
            matcher={
                name: (param, kind, axis, name) for name, param, kind, axis in style.matcher or ()
            },
        )
        self._tlcache_front = front
        self._tlcache_make = make
        self._tlcache_lock = threading.Lock()
        self._tlcache_template: Any = None

    def get_tir(self, tensor_args: Any, given_tensor_args: Any, kwargs: Any) -> Any:
        with self._tlcache_lock:
            if self._tlcache_template is None:
                self._tlcache_template = self._tlcache_make()
        return self._tlcache_template.get_tir(tensor_args, given_tensor_args, kwargs)
