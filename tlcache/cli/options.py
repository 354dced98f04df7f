"""Options that several commands take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

__all__ = ["cache_dir", "filters", "json_output"]

cache_dir = click.option(
    "--cache-dir",
    metavar="DIR",
    help="The cache root; by default $TILELANG_CACHE_DIR, else tlcache.toml's, else "
    "~/.tilelang/cache.",
)
json_output = click.option("--json", "json_wanted", is_flag=True, help="Write the result as JSON.")


def filters(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that choose among entries; the command gets them as one `select.Filter`, as its
    argument `wanted`.
    """

    @functools.wraps(command)
    def with_filter(*args: Any, **kwargs: Any) -> Any:
        from tlcache.store import select

        older, unused = kwargs.pop("older_than"), kwargs.pop("unused_for")
        larger = kwargs.pop("larger_than")
        wanted = select.Filter(
            targets=kwargs.pop("targets"),
            ops=kwargs.pop("ops"),
            kernels=kwargs.pop("kernels"),
            tilelang=kwargs.pop("tilelang"),
            toolkit=kwargs.pop("toolkit"),
            older_than=select.age(older) if older is not None else None,
            unused_for=select.age(unused) if unused is not None else None,
            larger_than=select.bytes_of(larger) if larger is not None else None,
            no_record=kwargs.pop("no_record"),
        )
        return command(*args, wanted=wanted, **kwargs)

    for option in reversed(_FILTERS):
        with_filter = option(with_filter)
    return with_filter


_FILTERS = (
    click.option(
        "--target",
        "targets",
        multiple=True,
        metavar="TARGET",
        help="Kernels for this target; sm90 means sm_90 and sm_90a, sm_90a only itself.",
    ),
    click.option("--op", "ops", multiple=True, metavar="NAME", help="Kernels of this operator."),
    click.option(
        "--kernel",
        "kernels",
        multiple=True,
        metavar="PATTERN",
        help="Kernels named so, like rms_*.",
    ),
    click.option("--tilelang", metavar="VERSIONS", help="Written by these, like '<0.1.14'."),
    click.option("--toolkit", metavar="BUILD", help="Compiled by this nvcc, like 13.0 or 13.0.88."),
    click.option("--older-than", metavar="SPAN", help="Written so long ago, like 30d."),
    click.option("--unused-for", metavar="SPAN", help="Not used for so long, like 14d."),
    click.option("--larger-than", metavar="SIZE", help="At least so large, like 1MiB."),
    click.option("--no-record", is_flag=True, help="Kernels that have no record."),
)
