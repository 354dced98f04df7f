"""tlcache: TileLang's persistent compile cache, inspected, prewarmed and restored.

This package is the *store* tier: importing it costs nothing and brings neither torch nor TileLang.
`tlcache.runtime` is what a serving process uses; `tlcache.warm` is what compiles.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
