"""What a serving process needs: a kernel for a spec, at the cost of reading a file.

`resolve(spec)` answers from process memory, else from a record (without importing TileLang), else
by compiling. Importing this package does not import TileLang; torch and tvm-ffi come with the first
launcher.
"""

from __future__ import annotations

import os

from tlcache import agent as _agent
from tlcache.runtime.counters import Counters
from tlcache.runtime.launcher import Launcher
from tlcache.runtime.resolve import (
    Resolver,
    capturing,
    counters,
    freeze,
    lookup,
    mark_ready,
    resolve,
    tuned,
)

__all__ = ["Counters", "Launcher", "Resolver"]
__all__ += ["capturing", "counters", "freeze", "lookup", "mark_ready", "resolve", "tuned"]

_agent.start_by_environment()
if os.environ.get("TLCACHE_RECORD"):
    from tlcache.runtime import recorder as _recorder

    _recorder.start(os.environ["TLCACHE_RECORD"])
