"""What the fork server of a warm imports, once for all workers: the worker, and so TileLang.

Invariant: the workers share its pages, untouched by their collections.
"""

from __future__ import annotations

from tlcache.runtime import garbage

with garbage.spared(freeze=True):
    from tlcache.warm import worker as worker
