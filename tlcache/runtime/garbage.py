"""Python's garbage collector while TileLang is imported, and after it.

TileLang's import makes some 230,000 objects that stay for good. Python goes over all of them three
times during the import, and again whenever a quarter as many have come; each time it holds the GIL,
and so every other thread, the agent too, for 60 to 200 ms.

Invariant: the collector is left as the program set it. Where the program disabled it, or froze
objects itself, it decides for itself, and nothing is collected or frozen here.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

__all__ = ["spare_import", "spared"]


@contextmanager
def spared(*, freeze: bool) -> Iterator[None]:
    """Import something large without a collection in the middle: that takes a third less time.

    Args:
        freeze: Take what there is then out of later collections, for good. For that the garbage of
            before is collected first, when there is least to go over: what is garbage and frozen is
            never freed, and it may hold tensors. What comes of the import in cycles is a few dozen
            objects. (A process that is forked later shares what is frozen, too.)
    """
    if not gc.isenabled():
        yield
        return
    freeze = freeze and not gc.get_freeze_count()
    if freeze:
        gc.collect()
    gc.disable()
    try:
        yield
        if freeze:
            gc.freeze()
    finally:
        gc.enable()


def spare_import(name: str) -> None:
    """Have a top-level module imported under `spared`, whoever imports it, once."""
    if name not in sys.modules:
        sys.meta_path.insert(0, _Finder(name))


class _Finder:
    """Finds one module as the finders after it do, and spares its execution."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def spare(module: ModuleType) -> None:
                with spared(freeze=True):
                    execute(module)

            with suppress(AttributeError):  # a loader that cannot be told this imports as ever
                spec.loader.exec_module = spare  # type: ignore[method-assign]
        return spec
