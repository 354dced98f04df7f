"""What kernels took to compile where they were compiled before, as archives and other roots tell
it.

Invariant: what is told depends on nothing but these, so hosts that read the same are told the same.
The root that is warmed is not asked, nor a place where shards of this warm land: both change while
hosts deal, each host would deal another way, and a kernel could be nobody's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from tlcache.errors import UsageError
from tlcache.spec import KernelSpec
from tlcache.store import layout, record
from tlcache.store.archive import reading, remote

__all__ = ["Costs", "of", "refuse_moving"]


class Costs(NamedTuple):
    """Seconds of compiling.

    Attributes:
        exact: By action key.
        alike: The means of kernels of one name and target: by `alike_of`.
    """

    exact: Mapping[str, float]
    alike: Mapping[str, float]

    def seconds(self, specs: Mapping[str, KernelSpec]) -> dict[str, float]:
        """What these kernels, by their action keys, will take, as far as it is known."""
        found = {}
        for key, spec in specs.items():
            told = self.exact.get(key, self.alike.get(_alike(spec)))
            if told is not None:
                found[key] = told
        return found


def of(source: str) -> Costs:
    """What archives or a root tell.

    Args:
        source: An archive, a URL of one, a pattern of several, or a cache root.

    Raises:
        ArchiveError: It is no archive.
        TransferError, UsageError: It cannot be read, or tells of no kernel.
    """
    exact: dict[str, float] = {}
    grouped: dict[str, list[float]] = {}
    for key, alike, seconds in sorted(_told(source)):
        exact[key] = seconds
        grouped.setdefault(alike, []).append(seconds)
    if not exact:
        raise UsageError(
            f"{remote.named(source)} tells of no kernel what its compile took",
            hint="`--balance` reads records: an archive of `tlcache export`, or a cache root",
        )
    return Costs(exact, {alike: sum(some) / len(some) for alike, some in grouped.items()})


def refuse_moving(source: str, root: str | os.PathLike[str], published: str | None) -> None:
    """Refuse what this warm, or one of its other shards, changes.

    Args:
        source: As for `of`.
        root: The root that is warmed.
        published: Where shards land.

    Raises:
        UsageError: It is one of these.
    """
    path = source.removeprefix("file://")
    if os.path.isdir(path) and os.path.exists(root) and os.path.samefile(path, root):
        raise UsageError(
            f"`--balance {source}` names the root that is warmed, which tells each host another "
            "thing while they work",
            hint="name an archive of it: `tlcache export -o FILE` writes one",
        )
    if published is not None and "*" in source and _place(source).startswith(_place(published)):
        raise UsageError(
            f"`--balance` reads {remote.named(source)}, where `--publish` puts the shards of this "
            "warm, so each host would deal by others",
            hint="name archives of an earlier warm that stay as they are",
        )


def _place(text: str) -> str:
    if not remote.is_url(text):
        text = os.path.abspath(text.removeprefix("file://"))
    return f"{text.rstrip('/')}/"


def _told(source: str) -> Iterator[tuple[str, str, float]]:
    """Action key, name and target, and seconds, of each record."""
    path = source.removeprefix("file://")
    if not remote.is_url(source) and os.path.isdir(path):
        for place in layout.records(path):
            if (found := record.read(path, place.stem)) is not None:
                yield found.action_key, _alike(found.spec), found.compile_seconds
        return
    with tempfile.TemporaryDirectory(prefix="tlcache-") as directory:
        for number, each in enumerate(remote.expand(source)):
            if remote.is_url(each):
                local = os.path.join(directory, str(number))
                remote.fetch(each, local)
            else:
                local = each
            yield from _indexed(remote.named(each), local)


def _indexed(name: str, path: str) -> Iterable[tuple[str, str, float]]:
    try:
        with open(path, "rb") as file:
            index = reading.read_index(name, file)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{name} cannot be read: {reason}") from error
    for key, told in index.records.items():
        yield key, f"{told.title.partition(' ')[0]} {told.target}", told.compile_seconds


def _alike(spec: KernelSpec) -> str:
    return f"{spec.kernel.rpartition(':')[2]} {spec.target.name}"
