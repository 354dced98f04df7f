"""`tlcache export`: kernels of a cache as one file, or at a URL."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from tlcache.cli import options, render
from tlcache.cli.signals import Terminated, terminable
from tlcache.errors import CacheRootError, MissError, UsageError
from tlcache.store import layout

if TYPE_CHECKING:
    from tlcache.store.archive.choosing import Choice
    from tlcache.store.archive.writing import Written
    from tlcache.store.select import Filter

__all__ = ["command"]

_SHOWN = 5


@click.command("export")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE|URL",
    help="Where to: a .tar.zst, or a URL such as s3://bucket/kernels.tar.zst.",
)
@options.cache_dir
@options.filters
@click.option(
    "--shapes", "path", metavar="FILE", help="The kernels of this shapes file, all of them."
)
@click.option("--sign", "key", metavar="KEY", help="Sign it with this SSH key: FILE.sig beside it.")
@options.json_output
def command(
    output: str,
    cache_dir: str | None,
    wanted: Filter,
    path: str | None,
    key: str | None,
    json_wanted: bool,
) -> int:
    """Write kernels of a cache into one archive, to a file or URL.

    Their records go along, and the calls of programs that mean them. Without filters it is all
    kernels. The same kernels give the same bytes. What is damaged is left out, and said. `tlcache
    import` takes it in.
    """
    from tlcache.store.archive import sending

    root = os.path.abspath(layout.cache_root(cache_dir))
    if not os.path.isdir(root):
        raise CacheRootError(
            f"there is no cache root {root}", hint="name it with `--cache-dir DIR`"
        )
    choice = _choice(root, wanted, path)
    if not choice.places:
        raise MissError(
            f"no kernel in {root} is meant, so there is nothing to export",
            hint="`tlcache ls` lists them, and takes the same filters",
        )
    try:
        with terminable():
            written = sending.send(choice, output, key=key, progress=_progress(len(choice.places)))
    except (Terminated, KeyboardInterrupt) as stopped:
        render.note("stopped; no archive was written")
        return 143 if isinstance(stopped, Terminated) else 130
    if json_wanted:
        render.emit_json(_as_json(root, output, written, key))
        return 0
    _print(root, output, written, key)
    return 0


def _choice(root: str, wanted: Filter, path: str | None) -> Choice:
    from tlcache.store.archive import choosing

    if path is not None:
        return choosing.by_keys(root, _asked(root, wanted, path), wanted or None)
    choice = choosing.by_filter(root, wanted) if wanted else choosing.everything(root)
    for below in layout.roots(root)[1:]:
        render.note(f"note: {below} is a root of its own: `tlcache export --cache-dir {below}`")
    return choice


def _asked(root: str, wanted: Filter, path: str) -> list[str]:
    """The action keys of a shapes file's kernels.

    Raises:
        MissError: One of them is not there.
    """
    from pathlib import Path

    from tlcache.store import schedules
    from tlcache.targets import CPU, detect, parse
    from tlcache.warm import plan, shapes

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as `tlcache warm` does
    document = shapes.load(path)
    chosen = [parse(name) for name in wanted.targets] or shapes.targets(document, path)
    if not chosen:
        try:
            chosen = [detect()]
        except UsageError:
            chosen = [CPU]
    items = plan.make(shapes.expand(document, path, chosen, schedules.Chooser(root)), [Path(root)])
    missing = [item.wanted.spec.title for item in items if item.outcome is None]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise MissError(
            f"{len(missing)} of {render.count(len(items), 'kernel')} of {path} "
            f"{'is' if len(missing) == 1 else 'are'} not in {root}: "
            f"{', '.join(missing[:_SHOWN])}{more}",
            hint=f"`tlcache warm --shapes {path}` compiles them",
        )
    return [item.action_key for item in items]


def _progress(total: int) -> Callable[[int], None]:
    """A line on a terminal that says how far it is."""
    done = 0

    def packed(count: int) -> None:
        nonlocal done
        done += count
        end = f"\r{' ' * 40}\r" if done == total else ""
        click.echo(f"\r{done:,} of {total:,} packed {end}", nl=False, err=True)

    return packed if sys.stderr.isatty() else lambda count: None


def _as_json(root: str, output: str, written: Written, key: str | None) -> dict[str, Any]:
    from tlcache.store.archive import remote

    return {
        "root": root,
        "archive": remote.named(output),
        "digest": f"sha256:{written.sha256}",
        "bytes": written.size,
        "signature": f"{remote.named(output)}.sig" if key is not None else None,
        "kernels": written.kernels,
        "records": len(written.index.records),
        "calls": written.calls,
        "files": len(written.index.files),
        "unpacked_bytes": written.index.unpacked,
        "builder": dict(written.index.builder),
        "coverage": dict(written.index.coverage),
        "left": [{"path": path, "reason": why} for path, why in written.left],
    }


def _print(root: str, output: str, written: Written, key: str | None) -> None:
    from tlcache.store.archive import remote

    for path, why in written.left[:_SHOWN]:
        render.note(f"left out: {render.plain(path)} {why}")
    if len(written.left) > _SHOWN:
        render.note(f"left out: {len(written.left) - _SHOWN:,} more, by `--json`")
    place = remote.named(output)
    click.echo(
        f"{render.count(written.kernels, 'kernel')}  "
        f"{render.count(len(written.index.records), 'record')}  "
        + (f"{render.count(written.calls, 'call')}  " if written.calls else "")
        + f"{render.size(written.index.unpacked)} in {render.size(written.size)}: {place}"
    )
    click.echo(f"sha256:{written.sha256}")
    if key is not None:
        render.note(f"signed: {place}.sig")
    if any(not path.startswith("tlcache/") for path, _ in written.left):
        render.note("\nhint: `tlcache verify --repair` puts what is damaged into quarantine")
