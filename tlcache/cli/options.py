"""Options that several commands take."""

from __future__ import annotations

import click

__all__ = ["cache_dir", "json_output"]

cache_dir = click.option(
    "--cache-dir",
    metavar="DIR",
    help="The cache root; by default $TILELANG_CACHE_DIR, else ~/.tilelang/cache.",
)
json_output = click.option("--json", "json_wanted", is_flag=True, help="Write the result as JSON.")
