"""The units as files: what is there, what an install or an uninstall would do, and doing it.

The first line of each file that is written here has the sha256 of the rest.

Invariant: a file that was changed by hand is not overwritten or removed unless that is asked for;
one that was never written here is never removed; nothing is written outside the prefix.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tlcache import __version__
from tlcache.errors import EnvironmentFault, UsageError
from tlcache.units.rendering import CATALOG, Scope, Unit

__all__ = ["Action", "Found", "Place", "Standing", "Step", "apply", "install", "read", "sealed"]
__all__ += ["uninstall"]

Standing = Literal["absent", "ours", "edited", "foreign", "link"]
Action = Literal["write", "replace", "keep", "remove", "refuse"]

_SEAL = re.compile(r"# Written by tlcache (\S+), sha256 ([0-9a-f]{64})\b.*\n")


@dataclass(frozen=True)
class Place:
    """Where the files of a scope lie.

    Attributes:
        scope: `system` or `user`.
        prefix: The root of an image; None for this machine.
    """

    scope: Scope
    prefix: Path | None = None

    def path(self, name: str) -> Path:
        """The file of a template."""
        if name.endswith(".tmpfiles.conf"):
            inside = "/etc/tmpfiles.d/tlcache.conf"
        elif name.endswith(".sysusers.conf"):
            inside = "/etc/sysusers.d/tlcache.conf"
        elif self.scope == "user" and self.prefix is None:
            home = os.environ.get("XDG_CONFIG_HOME", "")
            if not os.path.isabs(home):
                home = os.path.expanduser("~/.config")
            return Path(home, "systemd/user", name)
        else:
            inside = f"/etc/systemd/{self.scope}/{name}"
        return Path(inside) if self.prefix is None else self.prefix / inside.lstrip("/")


class Found(NamedTuple):
    """A file that is or is not there.

    Attributes:
        standing: `absent`; `ours`, as it was written; `edited`, ours and changed; `foreign`, not
            written here; `link`, which may be a mask.
        version: The tlcache that wrote it.
        text: What it says below the first line, of ours.
    """

    standing: Standing
    version: str | None = None
    text: str | None = None


@dataclass(frozen=True)
class Step:
    """What is to be done about a file.

    Attributes:
        name: Its template.
        path: The file.
        action: `write` a new one, `replace` one, `keep` it as it is, `remove` it, or `refuse`.
        why: A word more, for the person.
        text: What is written.
    """

    name: str
    path: Path
    action: Action
    why: str = ""
    text: str | None = None


def sealed(unit: Unit) -> str:
    """The whole text of a unit's file."""
    digest = hashlib.sha256(unit.text.encode()).hexdigest()
    return (
        f"# Written by tlcache {__version__}, sha256 {digest}: change it by a drop-in, or by "
        f"tlcache.toml and `tlcache daemon install`\n{unit.text}"
    )


def read(path: Path) -> Found:
    """What stands at a path.

    Raises:
        EnvironmentFault: It cannot be read.
    """
    try:
        if path.is_symlink():
            return Found("link")
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return Found("absent")
    except (UnicodeDecodeError, IsADirectoryError):
        return Found("foreign")
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be read: {error.strerror}") from error
    match = _SEAL.match(text)
    if match is None:
        return Found("foreign")
    rest = text[match.end() :]
    same = hashlib.sha256(rest.encode()).hexdigest() == match[2]
    return Found("ours" if same else "edited", match[1], rest)


def install(place: Place, units: Sequence[Unit], *, force: bool = False) -> list[Step]:
    """What installing units would do.

    Args:
        place: Where.
        units: The units; what is there of others of the catalog is removed.
        force: Overwrite what was changed by hand, or not written by tlcache.
    """
    steps = []
    wanted = {unit.name: unit for unit in units}
    for name in CATALOG[place.scope]:
        path = place.path(name)
        found = read(path)
        if name in wanted:
            steps.append(_install_step(wanted[name], path, found, force))
        elif found.standing == "ours":
            steps.append(Step(name, path, "remove", "it has nothing to do any more"))
        elif found.standing == "edited":
            steps.append(Step(name, path, "keep", "it was changed by hand"))
    return steps


def _install_step(unit: Unit, path: Path, found: Found, force: bool) -> Step:
    text = sealed(unit)
    if found.standing == "absent":
        return Step(unit.name, path, "write", "", text)
    if found.standing == "ours":
        if found.text == unit.text:
            return Step(unit.name, path, "keep", "unchanged")
        return Step(unit.name, path, "replace", f"of tlcache {found.version}", text)
    why = {
        "edited": "it was changed by hand",
        "foreign": "tlcache did not write it",
        "link": "it is a link",
    }[found.standing]
    return Step(unit.name, path, "replace" if force else "refuse", why, text)


def uninstall(place: Place, *, force: bool = False) -> list[Step]:
    """What uninstalling would do.

    Args:
        place: Where.
        force: Remove what was changed by hand, too; never what tlcache did not write.
    """
    steps = []
    for name in CATALOG[place.scope]:
        path = place.path(name)
        standing = read(path).standing
        if standing == "ours" or (standing == "edited" and force):
            steps.append(Step(name, path, "remove"))
        elif standing == "edited":
            steps.append(Step(name, path, "refuse", "it was changed by hand"))
        elif standing != "absent":
            steps.append(Step(name, path, "keep", "tlcache did not write it"))
    return steps


def apply(place: Place, steps: Iterable[Step]) -> None:
    """Write and remove what steps say, each file whole or not at all.

    Raises:
        UsageError: A path leads out of the prefix.
        EnvironmentFault: A file cannot be written or removed.
    """
    for step in steps:
        try:
            if step.action in ("write", "replace"):
                _check_inside(place, step.path)
                step.path.parent.mkdir(parents=True, exist_ok=True)
                _write(step.path, step.text or "")
            elif step.action == "remove":
                _check_inside(place, step.path)
                step.path.unlink(missing_ok=True)
        except OSError as error:
            verb = "removed" if step.action == "remove" else "written"
            root = place.scope == "system" and place.prefix is None and os.geteuid()
            raise EnvironmentFault(
                f"{step.path} cannot be {verb}: {error.strerror}",
                hint="run it as root, or with `--user` for a service of your own" if root else None,
            ) from error


def _check_inside(place: Place, path: Path) -> None:
    """Links in an image may be absolute, and lead to the machine that builds it."""
    if place.prefix is None:
        return
    inside = os.path.realpath(place.prefix)
    parent = os.path.realpath(path.parent)
    if os.path.commonpath([inside, parent]) != inside:
        raise UsageError(
            f"{path.parent} leads to {parent}, which is outside of {place.prefix}",
            hint="make that link a relative one, or write without `--prefix` inside the image",
        )


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, 0o644)
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
