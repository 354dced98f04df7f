"""What was changed by hand is left alone, what tlcache did not write is never removed, and an image
is not left.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tlcache.errors import EnvironmentFault, UsageError
from tlcache.units import files
from tlcache.units.files import Place
from tlcache.units.rendering import Unit, render


@pytest.fixture
def place(tmp_path) -> Place:
    return Place("system", tmp_path / "image")


@pytest.fixture
def units(wanted) -> list[Unit]:
    return render(wanted("system", {"max_size": "5GiB"}))


def installed(place, units, **options):
    steps = files.install(place, units, **options)
    files.apply(place, steps)
    return {step.name: step.action for step in steps}


def test_an_install_writes_what_is_missing_and_leaves_what_is_the_same(place, units):
    assert set(installed(place, units).values()) == {"write"}
    before = {unit.name: place.path(unit.name).stat().st_mtime_ns for unit in units}
    assert set(installed(place, units).values()) == {"keep"}
    assert before == {unit.name: place.path(unit.name).stat().st_mtime_ns for unit in units}
    for unit in units:
        found = files.read(place.path(unit.name))
        assert (found.standing, found.text) == ("ours", unit.text)
        assert place.path(unit.name).stat().st_mode & 0o777 == 0o644


def test_an_install_replaces_what_it_wrote_before(place, units, wanted):
    installed(place, units)
    actions = installed(place, render(wanted("system", {"max_size": "6GiB"})))
    assert actions["tlcache-prune.service"] == "replace"
    assert set(actions.values()) == {"replace", "keep"}


def test_units_that_have_nothing_to_do_any_more_are_removed(place, units, wanted):
    installed(place, units)
    actions = installed(place, render(wanted("system")))
    assert actions["tlcache-prune.timer"] == actions["tlcache-prune.service"] == "remove"
    assert not place.path("tlcache-prune.timer").exists()


def test_what_was_changed_by_hand_is_refused_and_overwritten_only_by_force(place, units):
    installed(place, units)
    path = place.path("tlcached.service")
    path.write_text(path.read_text().replace("WatchdogSec=30", "WatchdogSec=90"))
    assert installed(place, units)["tlcached.service"] == "refuse"
    assert "WatchdogSec=90" in path.read_text()
    assert installed(place, units, force=True)["tlcached.service"] == "replace"
    assert "WatchdogSec=30" in path.read_text()


@pytest.mark.parametrize("content", [b"[Unit]\n", b"", b"\xff\xfe"])
def test_what_tlcache_did_not_write_is_refused_and_never_removed(place, units, content):
    path = place.path("tlcached.service")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert installed(place, units)["tlcached.service"] == "refuse"
    for force in (False, True):
        files.apply(place, files.uninstall(place, force=force))
        assert path.read_bytes() == content


def test_a_mask_is_left_alone(place, units):
    path = place.path("tlcached.service")
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/null")
    assert installed(place, units)["tlcached.service"] == "refuse"
    files.apply(place, files.uninstall(place, force=True))
    assert os.readlink(path) == "/dev/null"


def test_an_uninstall_removes_what_was_installed_and_nothing_else(place, units):
    installed(place, units)
    mine = place.path("tlcached.service").with_name("mine.service")
    mine.write_text("[Unit]\n")
    dropin = place.path("tlcached.service.d").parent / "tlcached.service.d/more.conf"
    dropin.parent.mkdir()
    dropin.write_text("[Service]\n")
    edited = place.path("tlcached.socket")
    edited.write_text(edited.read_text() + "# mine\n")
    files.apply(place, files.uninstall(place))
    left = {path for path in place.prefix.rglob("*") if path.is_file()}
    assert left == {mine, dropin, edited}
    files.apply(place, files.uninstall(place, force=True))
    assert {path for path in place.prefix.rglob("*") if path.is_file()} == {mine, dropin}


@pytest.mark.parametrize("target", ["absolute", "relative"])
def test_a_link_that_leads_out_of_the_image_is_not_followed(place, units, tmp_path, target):
    outside = tmp_path / "outside"
    outside.mkdir()
    (place.prefix / "etc").mkdir(parents=True)
    link = place.prefix / "etc/systemd"
    link.symlink_to(outside if target == "absolute" else "../../outside")
    with pytest.raises(UsageError, match="outside of"):
        installed(place, units)
    assert list(outside.iterdir()) == []


def test_a_link_within_the_image_is_followed(place, units):
    (place.prefix / "usr/systemd").mkdir(parents=True)
    (place.prefix / "etc").mkdir()
    (place.prefix / "etc/systemd").symlink_to("../usr/systemd")
    installed(place, units)
    assert (place.prefix / "usr/systemd/system/tlcached.service").is_file()


def test_a_folder_that_cannot_be_written_is_told(place, units):
    (place.prefix / "etc").mkdir(parents=True)
    (place.prefix / "etc/systemd").write_text("")
    with pytest.raises(EnvironmentFault, match=r"cannot be written"):
        installed(place, units)


def test_a_failed_write_leaves_no_temporary_file(place, units):
    path = place.path("tlcached.service")
    path.mkdir(parents=True)
    with pytest.raises(EnvironmentFault):
        installed(place, [unit for unit in units if unit.name == "tlcached.service"], force=True)
    assert list(path.parent.iterdir()) == [path]


def test_a_users_units_are_in_their_home_and_in_an_image_for_all_users(tmp_path):
    assert Place("user").path("x.service") == tmp_path / "config/systemd/user/x.service"
    assert Place("user", Path("/image")).path("x.service") == Path(
        "/image/etc/systemd/user/x.service"
    )
