"""The agent of this process, for programs: `tlcache.agent.start()`.

An agent answers `tlcache stats` and `curl --unix-socket` about the process that it lives in.
TLCACHE_AGENT=1 starts one when `tlcache.runtime` is imported; TLCACHE_AGENT=0 rules it out.

Invariant: a program never fails because the environment asks for an agent.
"""

from __future__ import annotations

import logging

from tlcache import switches
from tlcache.errors import AgentError

__all__ = ["ENV", "start", "start_by_environment", "stop"]

ENV = "TLCACHE_AGENT"
"""The environment variable that asks for an agent (1) or rules it out (0)."""

_log = logging.getLogger(__name__)


def start() -> str | None:
    """Have an agent in this process. Where there is one already, nothing happens.

    Returns:
        The path of its socket; None where TLCACHE_AGENT=0 rules it out.

    Raises:
        AgentError: The runtime directory is not this user's alone, or no socket is to be had there.
    """
    if switches.said(ENV) is False:
        return None
    from tlcache.runtime import agent

    return agent.start().path


def stop() -> None:
    """End the agent of this process and take its socket away, if it has one."""
    from tlcache.runtime import agent

    agent.stop()


def start_by_environment() -> None:
    """Start an agent if TLCACHE_AGENT=1; one that cannot start is a warning in the log."""
    if not switches.said(ENV):
        return
    try:
        start()
    except AgentError as error:
        _log.warning("no agent in this process: %s; %s", error.message, error.hint or "it goes on")
    except Exception:
        _log.warning("no agent in this process", exc_info=True)
