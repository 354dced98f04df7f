"""The environment of processes that tests start."""

from __future__ import annotations

import os

__all__ = ["clean_environment"]


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's, with nothing that tlcache or TileLang reads, and with some more."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TLCACHE_", "TILELANG_"))}
    return {**kept, **variables}
