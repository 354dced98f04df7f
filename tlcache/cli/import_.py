"""`tlcache import`: archives checked, and their kernels published into a cache root."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from tlcache.cli import options, render
from tlcache.cli.signals import Terminated, terminable
from tlcache.errors import UsageError
from tlcache.store import layout
from tlcache.store.trust import set_umask

if TYPE_CHECKING:
    from tlcache.store.archive.receiving import Imported
    from tlcache.store.archive.shard import Lack

__all__ = ["command"]

_SHOWN = 8
_SPOKEN = {
    "kernel": ("kernel", "kernels"),
    "record": ("record", "records"),
    "cuda-binary": ("cuda-binary", "cuda-binaries"),
    "autotuner": ("tuner's result", "tuner's results"),
    "schedule": ("schedule", "schedules"),
    "closure": ("closure", "closures"),
    "call": ("call", "calls"),
    "warmed": ("note of a warm", "notes of a warm"),
    "style": ("calling convention", "calling conventions"),
    "text": ("analysis", "analyses"),
}


@click.command("import")
@click.argument("sources", nargs=-1, required=True, metavar="FILE|URL…")
@options.cache_dir
@click.option("--digest", metavar="sha256:…", help="Take only the archive that has this digest.")
@click.option(
    "--verify",
    "signers",
    metavar="SIGNERS",
    help="Take only what one of these signed: an allowed-signers file of ssh-keygen.",
)
@click.option(
    "--revoked",
    metavar="FILE",
    help="With --verify: keys that count no more, a revocation list or public keys.",
)
@click.option(
    "--compatible", is_flag=True, help="Import what this host can load, and say what is left."
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="TARGET",
    help="With --compatible: as if this host had such GPUs, like sm90.",
)
@options.json_output
def command(
    sources: tuple[str, ...],
    cache_dir: str | None,
    digest: str | None,
    signers: str | None,
    revoked: str | None,
    compatible: bool,
    targets: tuple[str, ...],
    json_wanted: bool,
) -> int:
    """Check archives, and take their kernels into a cache root.

    All of them are checked before anything lands. What is in the root already stays. A pattern,
    like 's3://bucket/*.tar.zst', means several. To run it again after it was killed goes on.
    """
    from tlcache.store.archive import compatible as judging
    from tlcache.store.archive import receiving, remote

    if targets and not compatible:
        raise UsageError("`--target` says what to leave out, so it goes with `--compatible`")
    if revoked is not None and signers is None:
        raise UsageError("`--revoked` says who may not have signed, so it goes with `--verify`")
    wanted = receiving.Verification(
        receiving.digest_of(digest) if digest is not None else None, signers, revoked
    )
    here = judging.host(targets) if compatible else None
    found = list(dict.fromkeys(each for source in sources for each in remote.expand(source)))
    if digest is not None and len(found) > 1:
        raise UsageError(f"`--digest` is of one archive, and these are {len(found)}")
    set_umask()
    root = os.path.abspath(layout.cache_root(cache_dir))
    try:
        with terminable():
            imported = receiving.receive(root, found, wanted, here=here, progress=_progress())
    except (Terminated, KeyboardInterrupt) as stopped:
        render.note("stopped; what was published is whole, and running this again goes on")
        return 143 if isinstance(stopped, Terminated) else 130
    finally:
        if sys.stderr.isatty():
            click.echo(f"\r{' ' * 40}\r", nl=False, err=True)
    if json_wanted:
        render.emit_json(_as_json(root, imported))
    else:
        _print(root, imported)
    return 0


def _progress() -> Callable[[str, int], None] | None:
    """A line on a terminal that says how far it is."""
    if not sys.stderr.isatty():
        return None
    done = told = 0

    def read(name: str, count: int) -> None:
        nonlocal done, told
        done += count
        if done - told > 4 * 1024 * 1024:
            told = done
            click.echo(f"\r{render.size(done)} checked ", nl=False, err=True)

    return read


def _as_json(root: str, imported: Imported) -> dict[str, Any]:
    published = imported.published
    return {
        "root": root,
        "archives": [
            {
                "archive": one.url,
                "digest": f"sha256:{one.sha256}",
                "bytes": one.size,
                "signer": one.signer,
                "builder": dict(one.index.builder),
                "coverage": dict(one.index.coverage),
            }
            for one in imported.archives
        ],
        "imported": {kind: published.new.get(kind, 0) for kind in _SPOKEN},
        "present": {kind: published.there.get(kind, 0) for kind in _SPOKEN},
        "bytes": published.bytes,
        "left": [{"path": path, "reason": why} for path, why in sorted(published.left.items())],
        "lacking": [
            {
                "deal": one.deal,
                "shards": one.total,
                "absent": list(one.absent),
                "short": {str(number): short for number, short in one.short.items()},
            }
            for one in imported.lacking
        ],
    }


def _print(root: str, imported: Imported) -> None:
    published = imported.published
    for one in imported.archives:
        if one.signer is not None:
            render.note(f"{one.url} is signed by {render.plain(one.signer)}")
    new = _told(published.new) or "nothing"
    there = _told(published.there)
    click.echo(
        f"imported {new}"
        + (f"; there already: {there}" if there else "")
        + f"      {render.size(published.bytes)} written to {root}"
    )
    reasons = Counter(published.left.values())
    for why, number in reasons.most_common(_SHOWN):
        render.note(f"left: {render.count(number, 'thing')} {render.plain(why)}")
    if len(reasons) > _SHOWN:
        render.note(f"left: for {len(reasons) - _SHOWN} more reasons, by `--json`")
    for lack in imported.lacking:
        _print_lack(lack)


def _print_lack(lack: Lack) -> None:
    """Say what a gathering of shards lacks, which is no fault of what was gathered."""
    deal = f"of {lack.total:,} (deal {lack.deal[:12]})"
    if lack.absent:
        some = ", ".join(map(str, lack.absent[:_SHOWN]))
        more = f" and {len(lack.absent) - _SHOWN:,} more" if len(lack.absent) > _SHOWN else ""
        render.note(
            f"lacking: {'shard' if len(lack.absent) == 1 else 'shards'} {some}{more} {deal}"
        )
    for number, short in list(lack.short.items())[:_SHOWN]:
        render.note(
            f"lacking: {render.count(short, 'kernel')} of shard {number} {deal}: what fails to "
            "compile there, or has no record, does not travel"
        )


def _told(counts: dict[str, int]) -> str:
    return ", ".join(
        f"{counts[kind]:,} {one if counts[kind] == 1 else several}"
        for kind, (one, several) in _SPOKEN.items()
        if counts.get(kind)
    )
