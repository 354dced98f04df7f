"""The part that one of several hosts has in a warm: which kernels are its own, and where they go
when they are done.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tlcache.cli import render
from tlcache.errors import UsageError
from tlcache.warm import schedulers, shards
from tlcache.warm.shards import Shard

if TYPE_CHECKING:
    from tlcache.store.archive.shard import Part
    from tlcache.store.archive.writing import Written
    from tlcache.warm.plan import Item
    from tlcache.warm.shapes import Wanted

__all__ = ["Published", "Share", "options"]


@dataclass(frozen=True)
class Share:
    """What the options say of it.

    Attributes:
        shard: Which shard; None for all kernels.
        balance: Where the seconds are told that shards are balanced by; None to deal by numbers.
        place: Where an archive of it is to be put; None for none.
        key: The SSH key that signs that.
        part: The shard as an archive tells it, once kernels were dealt.
    """

    shard: Shard | None
    balance: str | None
    place: str | None
    key: str | None
    part: Part | None = None

    @property
    def is_partial(self) -> bool:
        """Whether other hosts have kernels of the same document."""
        return self.shard is not None and self.shard.total > 1

    def ready(self, root: Path) -> None:
        """Find out what would go wrong at the end, before anything is compiled.

        Raises:
            UsageError, TransferError: It cannot be published.
        """
        from tlcache.store.archive import remote, signatures

        if self.balance is not None:
            from tlcache.warm import costs

            costs.refuse_moving(self.balance, root, self.place)
        if self.place is not None:
            where = remote.below(self.place, "")
            if remote.is_url(where):
                remote.known(where)
            else:
                _make(where)
        if self.key is not None:
            with open(os.devnull, "rb") as nothing:
                signatures.sign(nothing, self.key)

    def taken(self, wanted: Sequence[Wanted]) -> tuple[list[Wanted], Share]:
        """The kernels that are its own."""
        if self.shard is None and self.place is None:
            return list(wanted), self
        from tlcache.store.archive.shard import Part
        from tlcache.warm import costs

        keys = [one.spec.action_key() for one in wanted]
        specs = {key: one.spec for key, one in zip(keys, wanted, strict=True)}
        seconds = costs.of(self.balance).seconds(specs) if self.balance is not None else {}
        shard = self.shard or Shard(1, 1)
        deal = shards.deal(specs, shard.total, seconds)
        own = {key for key, number in deal.shard_of.items() if number == shard.number}
        if self.shard is not None:
            all_kernels = render.count(len(specs), "kernel")
            told = f"shard {shard.number} of {shard.total}: {len(own):,} of {all_kernels}"
            if seconds:
                mine, whole = deal.seconds[shard.number - 1], sum(deal.seconds)
                told += f", {render.duration(mine)} of {render.duration(whole)} of compiling"
            render.note(told)
        part = Part(shard.number, shard.total, deal.name, len(own))
        kept = [one for key, one in zip(keys, wanted, strict=True) if key in own]
        return kept, replace(self, part=part)

    def published(self, root: Path, items: Sequence[Item]) -> Published | None:
        """Publish what there is of the shard, if that is wanted and all of it was tried.

        Raises:
            UsageError, TransferError: It cannot be sent.
            MissError: A kernel has gone meanwhile.
        """
        statuses = [item.outcome.status if item.outcome else "missing" for item in items]
        if self.place is None or self.part is None:
            return None
        if (unreached := statuses.count("missing")) > 0:
            render.note(f"not published: {render.count(unreached, 'kernel')} not reached")
            return None
        from tlcache.store.archive import choosing, remote, sending

        keys = [
            item.action_key
            for item in items
            if (outcome := item.outcome) is not None
            and outcome.status in ("compiled", "present")
            and outcome.entry is None  # it has a record
        ]
        choice = replace(choosing.by_keys(os.path.abspath(root), keys), part=self.part)
        url = remote.below(self.place, self.part.file)
        return Published(url, sending.send(choice, url, key=self.key), self.key is not None)

    def words(self) -> list[str]:
        """The options that mean the same kernels again."""
        if self.shard is None:
            return []
        return ["--shard", str(self.shard), *(["--balance", self.balance] if self.balance else [])]

    def as_json(self) -> dict[str, Any] | None:
        return self.part._asdict() if self.part is not None and self.shard is not None else None


@dataclass(frozen=True)
class Published:
    """A shard that was published.

    Attributes:
        url: Where.
        written: What.
        signed: Whether a signature lies beside it.
    """

    url: str
    written: Written
    signed: bool

    def as_json(self) -> dict[str, Any]:
        from tlcache.store.archive import remote

        name = remote.named(self.url)
        return {
            "archive": name,
            "digest": f"sha256:{self.written.sha256}",
            "bytes": self.written.size,
            "kernels": self.written.kernels,
            "signature": f"{name}.sig" if self.signed else None,
        }

    def show(self) -> None:
        told = self.as_json()
        number, size = render.count(told["kernels"], "kernel"), render.size(told["bytes"])
        click.echo(f"published {number} in {size}: {told['archive']}")
        click.echo(told["digest"])


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `tlcache warm` for one of several hosts; the command gets them as its argument
    `share`.
    """

    @functools.wraps(command)
    def with_share(*args: Any, **kwargs: Any) -> Any:
        text, balance = kwargs.pop("shard"), kwargs.pop("balance")
        place, key = kwargs.pop("publish"), kwargs.pop("key")
        if balance is not None and text is None:
            raise UsageError("`--balance` says how kernels are dealt, so it goes with `--shard`")
        if key is not None and place is None:
            raise UsageError("`--sign` signs what is published, so it goes with `--publish`")
        if place is not None and (kwargs["check"] or kwargs["dry_run"]):
            option = "--check" if kwargs["check"] else "--dry-run"
            raise UsageError(
                f"`{option}` compiles nothing, so there is nothing to `--publish`",
                hint="`tlcache export` writes an archive of what is there",
            )
        shard = None
        if text is not None:
            shard = schedulers.detect(os.environ) if text == "auto" else shards.parse(text)
        return command(*args, share=Share(shard, balance, place, key), **kwargs)

    for option in reversed(_OPTIONS):
        with_share = option(with_share)
    return with_share


_OPTIONS = (
    click.option(
        "--shard",
        metavar="I/N|auto",
        help="Only the kernels of the I-th of N hosts; auto: as Kubernetes, Slurm or torchrun say.",
    ),
    click.option(
        "--balance",
        metavar="ARCHIVE|URL|DIR",
        help="With --shard: deal by the compile seconds that archives or another root tell.",
    ),
    click.option(
        "--publish",
        metavar="DIR|URL",
        help="When done, put an archive of these kernels there, under a name of its own.",
    ),
    click.option("--sign", "key", metavar="KEY", help="With --publish: sign it with this SSH key."),
)


def _make(directory: str) -> None:
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{shlex.quote(directory)} cannot be made: {reason}") from error
