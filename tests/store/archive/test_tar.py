"""Tar headers: what tarfile reads of ours, and what is a name."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlcache.store.archive import tar

PARTS = st.text("abc019._-", min_size=1, max_size=70)


@given(st.lists(PARTS, min_size=1, max_size=4).map("/".join), st.integers(0, 8**11 - 1))
def test_tarfile_reads_what_is_written_and_so_does_parse(name, size):
    try:
        block = tar.header(name, size)
    except ValueError:
        assert len(name) > 100
        return
    assert len(block) == tar.BLOCK
    assert tar.parse(block) == (name, size)
    info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    assert (info.name, info.size, info.mode) == (name, size, 0o644)
    assert (info.mtime, info.uid, info.gid, info.uname, info.gname) == (0, 0, 0, "", "")
    assert info.isreg()


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513])
def test_members_are_padded_to_blocks(size):
    whole = tar.header("name", size) + bytes(size) + tar.padding(size) + tar.END
    assert len(whole) % tar.BLOCK == 0
    with tarfile.open(fileobj=io.BytesIO(whole)) as opened:
        assert [(one.name, one.size) for one in opened] == [("name", size)]


def test_what_does_not_fit_is_no_header():
    with pytest.raises(ValueError, match="too long"):
        tar.header("x" * 101, 0)
    with pytest.raises(ValueError, match="too large"):
        tar.header("x", 8**11)
