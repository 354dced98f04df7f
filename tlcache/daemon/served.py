"""What the server needs of the daemon behind it; `service.Service` is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tlcache.agents import Answer
from tlcache.daemon.broadcast import Broadcast
from tlcache.daemon.follow import Follower
from tlcache.daemon.history import History
from tlcache.daemon.index import Index

__all__ = ["Served", "Settings"]


class Settings(Protocol):
    """What of the settings is about the socket."""

    @property
    def group(self) -> str | None:
        """The group whose members may read."""
        ...

    @property
    def metrics_port(self) -> int | None:
        """The port on 127.0.0.1 that has the metrics, too."""
        ...


class Served(Protocol):
    """A daemon, as the server sees it."""

    @property
    def settings(self) -> Settings:
        """What it was told to do; another object when that changes."""
        ...

    @property
    def index(self) -> Index:
        """What is at the roots."""
        ...

    @property
    def events(self) -> Broadcast:
        """What happens."""
        ...

    @property
    def history(self) -> History:
        """What happened."""
        ...

    @property
    def followers(self) -> Sequence[Follower]:
        """The roots that are watched."""
        ...

    def agents(self) -> Sequence[Answer]:
        """What the agents of this host said last."""
        ...

    def health(self) -> dict[str, Any]:
        """How the daemon is: `status`, and `checks`."""
        ...

    def stats(self) -> dict[str, Any]:
        """Its figures."""
        ...
