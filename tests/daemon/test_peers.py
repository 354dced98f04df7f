from __future__ import annotations

import os
import socket

import pytest

from tlcache.daemon import peers
from tlcache.daemon.peers import Caller, Rules
from tlcache.errors import DaemonError


def test_who_calls_is_what_the_kernel_says():
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        found = peers.caller(one)
    assert (found.pid, found.uid) == (os.getpid(), os.geteuid())
    assert found.groups == {os.getegid(), *os.getgroups()}


@pytest.mark.parametrize(
    ("caller", "reads", "changes"),
    [
        (Caller(1, 0, frozenset({0})), True, True),
        (Caller(1, 1000, frozenset({1000})), True, True),
        (Caller(1, 1001, frozenset({1001, 77})), True, False),
        (Caller(1, 1001, frozenset({77})), True, False),
        (Caller(1, 1001, frozenset({1001})), False, False),
        (Caller(0, 65534, frozenset({65534})), False, False),
    ],
)
def test_the_owner_and_root_may_all_and_members_of_the_group_may_read(caller, reads, changes):
    rules = Rules(owner=1000, group=77)
    assert (rules.may_read(caller), rules.may_change(caller)) == (reads, changes)


def test_without_a_group_nobody_else_may_read():
    assert not Rules(1000, None).may_read(Caller(1, 1001, frozenset({1001, 77})))


def test_a_group_that_is_not_there_is_an_error_that_says_how_to_make_it():
    with pytest.raises(DaemonError, match="no group 'no-such-group'") as caught:
        peers.group_id("no-such-group")
    assert "groupadd" in caught.value.hint
    assert peers.group_id(None) is None
