"""Telling the service manager how the daemon is, as sd_notify(3) says; nothing where there is none.

Invariant: it never fails and never waits: a service manager that does not listen is none.
"""

from __future__ import annotations

import os
import socket
import time

__all__ = ["ready", "reloading", "status", "stopping", "watchdog", "watchdog_seconds"]


def ready(what: str) -> None:
    """It serves; also after `reloading`."""
    _tell(f"READY=1\nSTATUS={what}")


def reloading() -> None:
    _tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")


def status(what: str) -> None:
    """One line for people."""
    _tell(f"STATUS={what}")


def stopping() -> None:
    _tell("STOPPING=1")


def watchdog() -> None:
    """It is alive."""
    _tell("WATCHDOG=1")


def watchdog_seconds() -> float | None:
    """How often the service manager wants to hear that; None where it does not."""
    try:
        seconds = int(os.environ.get("WATCHDOG_USEC", "")) / 1e6
        pid = int(os.environ.get("WATCHDOG_PID", "") or os.getpid())
    except ValueError:
        return None
    return seconds if pid == os.getpid() and seconds > 0 else None


def _tell(message: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as told:
            told.setblocking(False)
            told.sendto(message.encode(), address)
    except OSError:
        pass
