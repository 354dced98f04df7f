"""Run by every Python that `tlcache run` starts, and by every Python that those start: installs the
hooks once TileLang is about to be imported.

Invariant: a program that never imports TileLang pays a few milliseconds at most, and sees nothing
of this but its environment variables. A `sitecustomize` that this one stands in front of runs as if
it did not. What goes wrong here is said on stderr, once, and the program goes on without hooks.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # `typing` is not worth its import here
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_WATCHED = "tilelang"


class _Watch:
    """A finder that has the hooks installed when TileLang is asked for, and finds then what the
    finders do that there are by now.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _WATCHED or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        _install()
        from importlib.util import find_spec

        return find_spec(name)


def _install() -> None:
    try:
        from tlcache.runtime import hooks

        hooks.install()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"tlcache: {sys.executable} runs without tlcache's hooks: {told}\n")


def _run_shadowed() -> None:
    """Run the `sitecustomize` that Python would have found without this directory, in this one's
    place.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != here]
    for finder in sys.meta_path:
        spec = finder.find_spec("sitecustomize", None)
        if spec is not None and spec.loader is not None:
            from importlib.util import module_from_spec

            module = module_from_spec(spec)
            sys.modules["sitecustomize"] = module
            spec.loader.exec_module(module)
            return


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Watch())
    _run_shadowed()
