"""tlcache: TileLang's persistent compile cache, inspected, prewarmed and restored.

This package is the *store* tier: importing it costs nothing and brings neither torch nor TileLang.
`tlcache.runtime` is what a serving process uses; `tlcache.warm` is what compiles.
"""

from __future__ import annotations

__all__ = ["__version__", "accelerate", "unaccelerate"]

__version__ = "0.1.0"


def accelerate() -> None:
    """Restore the kernels of TileLang programs from here on: what was made of a call once is loaded
    in later processes without being traced again. `tlcache run` does so by itself.

    TLCACHE_RESTORE=0 rules it out; TLCACHE_CHECK=1 makes every restored kernel the slow way, too,
    and raises where that is another one.
    """
    from tlcache.runtime.foreign import accelerate as hooks

    if hooks.wanted():
        hooks.start()


def unaccelerate() -> None:
    """Leave kernels to TileLang again, with its own functions in their places."""
    from tlcache.runtime.foreign import accelerate as hooks

    hooks.stop()
