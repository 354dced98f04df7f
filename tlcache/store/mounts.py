"""What is mounted on this host, and which file system a path is on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Mount", "holding", "read"]

_NETWORK = {
    *("nfs", "nfs3", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "gpfs", "beegfs"),
    *("afs", "ncpfs", "ocfs2", "gfs2", "glusterfs", "virtiofs", "pvfs2", "orangefs", "vboxsf"),
    *("fuse", "prl_fs", "panfs", "weka", "wekafs", "daos", "hf3fs"),
}
_LOCAL = {"fuse.fuse-overlayfs", "fuse.ntfs-3g", "fuse.exfat"}


class Mount(NamedTuple):
    """A line of a mount table.

    Attributes:
        place: Where it is mounted.
        kind: The file system's type, like `ext4`.
        options: Of this mount, like `rw,relatime`.
        whole: Of the file system as a whole.
    """

    place: str
    kind: str
    options: str
    whole: str

    @property
    def read_only(self) -> bool:
        return "ro" in self.options.split(",")

    @property
    def is_shared(self) -> bool:
        """Whether other hosts can be on this file system, too."""
        if self.kind in _LOCAL:
            return False
        return self.kind in _NETWORK or self.kind.startswith("fuse.")


def read(table: str) -> list[Mount]:
    """The mounts of a table as `/proc/self/mountinfo` is, the last mount of a place last; none
    where it cannot be read.
    """
    try:
        with open(table, "rb") as file:
            lines = file.read().decode(errors="surrogateescape").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        before, dash, after = line.partition(" - ")
        words, more = before.split(" "), after.split(" ")
        if dash and len(words) > 5:
            place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), words[4])
            found.append(Mount(place, more[0], words[5], more[-1]))
    return found


def holding(path: str | os.PathLike[str], mounts: Iterable[Mount]) -> Mount | None:
    """The mount that a path is on: the innermost, and of two on one place the last."""
    real = os.path.realpath(path)
    best: Mount | None = None
    for mount in mounts:
        inside = f"{real}/".startswith(mount.place.rstrip("/") + "/")
        if inside and (best is None or len(mount.place) >= len(best.place)):
            best = mount
    return best
