"""The sources that an entry holds: of the device's side, and of the host's.

Invariant: only regular files in the entry's own directory are read, and reading one does not count
as a use.
"""

from __future__ import annotations

from typing import NamedTuple

from tlcache.store import entry, files
from tlcache.store.entry import Entry

__all__ = ["SIDES", "Source", "read"]

# By side, in the order of preference: what 0.1.7 and later write, 0.1.6 and earlier, cutedsl and
# nvrtc.
_NAMES = {
    "device": ("device_kernel.cu", "kernel.cu", "device_kernel.py"),
    "host": ("host_kernel.cu", "wrapped_kernel.cu", "launcher.cpp", "kernel.py"),
}
SIDES = tuple(_NAMES)
_MOST = 16 * 1024 * 1024


class Source(NamedTuple):
    """A source file of an entry."""

    name: str
    data: bytes

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


def read(one: Entry, side: str) -> Source | None:
    """The source of one side, `device` or `host`; None where the entry has none that can be
    read.
    """
    there = entry.listing(one.place).names
    for name in _NAMES[side]:
        if name in there:
            try:
                data = files.read(f"{one.place.location}/{name}", _MOST, unseen=True)
            except OSError:
                continue
            return Source(name, data) if len(data) <= _MOST else None
    return None
