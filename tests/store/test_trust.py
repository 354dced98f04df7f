"""Trust: nothing is loaded from below a path that somebody else can write. A library is code."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import pytest

from tlcache.errors import UntrustedRootError
from tlcache.store import record
from tlcache.store.trust import Trust

STRANGER = 54321  # a uid and gid that nobody here has
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    """No TLCACHE_TRUST, and no umask that would decide the tests."""
    monkeypatch.delenv("TLCACHE_TRUST", raising=False)
    before = os.umask(0o022)
    yield
    os.umask(before)


def given_away(path: Path, mode: int, *, uid: int = -1, gid: int = -1) -> Path:
    """Change a path's owner or group, then its mode."""
    os.chown(path, uid, gid)
    path.chmod(mode)
    return path


@pytest.fixture
def library(filed):
    """A library under a sound root, with its record beside it."""
    record.write(filed.root, filed.record)
    return filed.library


def refused(root: Path, path: Path) -> UntrustedRootError:
    with pytest.raises(UntrustedRootError) as caught:
        Trust(root).check(path)
    assert f"kernels are not loaded from {root}" in caught.value.message
    assert caught.value.exit_code == 3
    return caught.value


def test_what_only_the_user_can_write_is_loaded(filed, library):
    Trust(filed.root).check(library)
    assert record.read(filed.root, filed.record.action_key, Trust(filed.root)) == filed.record
    assert record.sound_library(filed.root, filed.record, Trust(filed.root)) == str(library)
    Trust(filed.root).check_root()


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o702, 0o1777])
def test_a_root_that_everybody_can_write_is_refused(filed, library, mode):
    filed.root.chmod(mode)
    error = refused(filed.root, library)
    assert f"{filed.root} can be written by everybody (mode {mode:04o})" in error.message
    assert error.hint == f"`chmod -R go-w {filed.root}` if you know what it holds"
    with pytest.raises(UntrustedRootError):
        record.read(filed.root, filed.record.action_key, Trust(filed.root))
    with pytest.raises(UntrustedRootError):
        record.sound_library(filed.root, filed.record, Trust(filed.root))
    with pytest.raises(UntrustedRootError):
        Trust(filed.root).check_root()


@pytest.mark.parametrize("where", ["entry", "library", "kernels", "records", "record"])
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_what_everybody_can_write_below_a_sound_root_is_refused(filed, library, where, mode):
    record_path = Path(record.layout.record_path(filed.root, filed.record.action_key))
    place = {
        "entry": library.parent,
        "library": library,
        "kernels": library.parent.parent,
        "records": record_path.parent,
        "record": record_path,
    }[where]
    place.chmod(mode)
    concerned = record_path if where.startswith("record") else library
    assert str(place) in refused(filed.root, concerned).message
    with pytest.raises(UntrustedRootError):
        if where.startswith("record"):
            record.read(filed.root, filed.record.action_key, Trust(filed.root))
        else:
            record.sound_library(filed.root, filed.record, Trust(filed.root))


def test_a_directory_above_the_root_that_everybody_can_write_is_refused(filed, library):
    filed.root.parent.chmod(0o777)
    assert str(filed.root.parent) in refused(filed.root, library).message


def test_a_sticky_directory_above_the_root_is_as_good_as_tmp(filed, library):
    filed.root.parent.chmod(0o1777)
    Trust(filed.root).check(library)


@as_root
def test_a_sticky_directory_of_somebody_else_above_the_root_is_refused(filed, library):
    given_away(filed.root.parent, 0o1777, uid=STRANGER)
    assert f"belongs to uid {STRANGER}" in refused(filed.root, library).message


# --- groups ---


@as_root
@pytest.mark.parametrize("mode", [0o775, 0o770, 0o2775])
def test_a_group_that_can_write_the_root_needs_trust_in_the_group(
    filed, library, mode, monkeypatch
):
    given_away(filed.root, mode, gid=STRANGER)
    error = refused(filed.root, library)
    assert f"can be written by group {STRANGER} (mode {mode:04o})" in error.message
    assert f"`chmod -R g-w {filed.root}`" in error.hint
    assert "TLCACHE_TRUST=group" in error.hint
    for level in ("group", " GROUP "):
        monkeypatch.setenv("TLCACHE_TRUST", level)
        Trust(filed.root).check(library)
    for level in ("", "none", "0", "groups"):
        monkeypatch.setenv("TLCACHE_TRUST", level)
        refused(filed.root, library)


@as_root
def test_a_group_that_can_write_the_library_needs_trust_in_the_group(filed, library, monkeypatch):
    given_away(library, 0o664, gid=STRANGER)
    refused(filed.root, library)
    monkeypatch.setenv("TLCACHE_TRUST", "group")
    Trust(filed.root).check(library)


@as_root
def test_a_group_that_can_only_read_needs_no_trust(filed, library):
    given_away(filed.root, 0o750, gid=STRANGER)
    Trust(filed.root).check(library)


@as_root
def test_trust_in_the_group_is_not_trust_in_everybody_or_in_another_owner(
    filed, library, monkeypatch
):
    monkeypatch.setenv("TLCACHE_TRUST", "group")
    given_away(filed.root, 0o777, gid=STRANGER)
    assert "everybody" in refused(filed.root, library).message
    given_away(filed.root, 0o770, uid=STRANGER)
    assert "belongs to uid" in refused(filed.root, library).message


def test_the_users_own_private_group_may_write(filed, library):
    import grp
    import pwd

    user = pwd.getpwuid(os.geteuid())
    group = grp.getgrgid(user.pw_gid)
    if group.gr_name != user.pw_name or set(group.gr_mem) > {user.pw_name}:
        pytest.skip("this user has no group of its own")
    given_away(filed.root, 0o775, gid=user.pw_gid)
    Trust(filed.root).check(library)


# --- owners ---


@as_root
@pytest.mark.parametrize("where", ["root", "above", "entry", "library"])
def test_what_belongs_to_somebody_else_is_refused(filed, library, where):
    place = {
        "root": filed.root,
        "above": filed.root.parent,
        "entry": library.parent,
        "library": library,
    }[where]
    given_away(place, 0o755, uid=STRANGER)
    assert f"{place} belongs to uid {STRANGER}" in refused(filed.root, library).message


@as_root
def test_another_user_may_load_what_belongs_to_root_and_nothing_of_a_third():
    import grp  # noqa: F401 -- the other user may not be able to read the standard library
    import pwd  # noqa: F401

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "root"
        root.mkdir()
        Path(directory).chmod(0o755)
        owners = {"of_root": 0, "of_the_user": STRANGER, "of_another": STRANGER + 1}
        for name, owner in owners.items():
            (root / name).touch()
            os.chown(root / name, owner, owner)
        child = os.fork()
        if child == 0:
            code = 9
            try:
                os.setgroups([])
                os.setgid(STRANGER)
                os.setuid(STRANGER)
                Trust(root).check(root / "of_root")
                Trust(root).check(root / "of_the_user")
                try:
                    Trust(root).check(root / "of_another")
                except UntrustedRootError:
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- any ---


def test_trust_in_anything_admits_everything_and_is_logged(filed, library, monkeypatch, caplog):
    filed.root.chmod(0o777)
    library.chmod(0o666)
    monkeypatch.setenv("TLCACHE_TRUST", "any")
    with caplog.at_level(logging.WARNING):
        checker = Trust(filed.root)
    assert f"trust is any: kernels are loaded from {filed.root}" in caplog.text
    checker.check(library)
    assert record.sound_library(filed.root, filed.record, checker) == str(library)


# --- links ---


def test_a_root_that_is_a_link_is_judged_by_where_it_leads(filed, library, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(filed.root)
    through = link / library.relative_to(filed.root)
    Trust(link).check(through)
    filed.root.chmod(0o777)
    refused(link, through)


def test_a_link_within_the_root_is_judged_by_where_it_leads(filed, library, tmp_path):
    outside = tmp_path / "outside"
    library.parent.rename(outside)
    library.parent.symlink_to(outside)
    Trust(filed.root).check(library)
    outside.chmod(0o777)
    assert str(outside) in refused(filed.root, library).message


def test_a_link_in_a_directory_that_everybody_can_write_is_refused(filed, library, tmp_path):
    """Whoever can write there can point it elsewhere between the check and the load."""
    shared = tmp_path / "shared"
    shared.mkdir()
    link = shared / "link"
    link.symlink_to(filed.root)
    Trust(link).check(link / library.relative_to(filed.root))
    shared.chmod(0o777)
    refused(link, link / library.relative_to(filed.root))


def test_a_link_through_a_directory_that_everybody_can_write_is_refused(filed, library, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    hop = shared / "hop"
    hop.symlink_to(filed.root)
    link = tmp_path / "link"
    link.symlink_to(hop)
    Trust(link).check(link / library.relative_to(filed.root))
    shared.chmod(0o777)
    refused(link, link / library.relative_to(filed.root))


@as_root
def test_a_link_of_somebody_else_in_a_sticky_directory_is_refused(filed, library, tmp_path):
    """Its owner can replace it, sticky or not."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    link = shared / "link"
    link.symlink_to(filed.root)
    Trust(link).check(link / library.relative_to(filed.root))
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    refused(link, link / library.relative_to(filed.root))


# --- the rest ---


def test_a_file_that_is_not_there_is_an_os_error(filed):
    with pytest.raises(FileNotFoundError):
        Trust(filed.root).check(filed.root / "absent")


def test_each_directory_is_looked_at_once(filed, library):
    checker = Trust(filed.root)
    checker.check(library)
    filed.root.chmod(0o777)
    checker.check(library)  # this process has made up its mind
    refused(filed.root, library)
    library.chmod(0o666)
    with pytest.raises(UntrustedRootError):
        checker.check(library)  # files are looked at each time


def test_a_root_is_checked_before_anything_is_compiled_into_it(filed, tlcache, shapes):
    filed.root.chmod(0o777)
    path = shapes({"op": "rms_norm", "M": 1, "N": 64}, targets=["cpu"])
    done = tlcache("warm", "--shapes", path, "--cache-dir", filed.root)
    assert done.code == 3
    assert "can be written by everybody (mode 0777)" in done.err
    assert "hint: `chmod -R go-w" in done.err
    assert not (filed.root / "0.1.15/linux-x86_64/.staging").exists()
