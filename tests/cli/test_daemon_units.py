"""`tlcache daemon install` and `uninstall` do what they show, and say what they did."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has a system's service")


@pytest.fixture
def image(tmp_path) -> Path:
    """An image with a tlcache in it."""
    program = tmp_path / "image/opt/venv/bin/tlcache"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return tmp_path / "image"


@pytest.fixture
def install(tlcache, image):
    def install(*more, **options):
        return tlcache(
            "daemon", "install", "--system", "--prefix", image,
            "--executable", "/opt/venv/bin/tlcache", *more, **options,
        )  # fmt: skip

    return install


def written(image: Path) -> list[str]:
    return sorted(
        str(path.relative_to(image)) for path in (image / "etc").rglob("*") if path.is_file()
    )


def test_an_install_into_an_image_writes_what_it_says_and_nothing_else(install, image):
    ran = install("--root", "/srv/cache", env={"TLCACHE_MAX_SIZE": "5GiB"})
    assert ran.code == 0, ran.err
    said = [line.split()[1] for line in ran.out.splitlines()]
    assert sorted(said) == [str(image / path) for path in written(image)]
    assert written(image) == [
        "etc/systemd/system/tlcache-prune.service",
        "etc/systemd/system/tlcache-prune.timer",
        "etc/systemd/system/tlcache-warm@.service",
        "etc/systemd/system/tlcached.service",
        "etc/systemd/system/tlcached.socket",
        "etc/sysusers.d/tlcache.conf",
        "etc/tmpfiles.d/tlcache.conf",
    ]
    unit = (image / "etc/systemd/system/tlcached.service").read_text()
    assert "ExecStart=/opt/venv/bin/tlcache daemon run --root /srv/cache\n" in unit
    assert "watching /srv/cache" in ran.err


def test_a_dry_run_shows_each_file_whole_and_writes_none(install, image):
    ran = install("--dry-run")
    assert ran.code == 0 and not (image / "etc").exists()
    assert f"# {image}/etc/systemd/system/tlcached.service: would write\n" in ran.out
    assert "Type=notify\n" in ran.out
    shown = install("--dry-run", "--json").json
    assert {one["action"] for one in shown["files"]} == {"write"}
    install()
    for one in shown["files"]:
        assert Path(one["path"]).read_text() == one["text"]
    assert {one["action"] for one in install("--dry-run", "--json").json["files"]} == {"keep"}


def test_the_settings_of_the_image_count_and_not_those_of_the_machine(install, image, tmp_path):
    mine = tmp_path / "config/tlcache/tlcache.toml"
    mine.parent.mkdir(parents=True)
    mine.write_text('roots = ["/mine"]')
    theirs = image / "etc/tlcache/tlcache.toml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text('roots = ["/theirs"]')
    assert install(env={"TILELANG_CACHE_DIR": ""}).code == 0
    unit = (image / "etc/systemd/system/tlcached.service").read_text()
    assert "ReadWritePaths=-/theirs\n" in unit and "daemon run\n" in unit


def test_a_unit_that_was_changed_by_hand_stops_the_install_before_anything_is_written(
    install, image
):
    install("--root", "/a")
    unit = image / "etc/systemd/system/tlcached.socket"
    unit.write_text(unit.read_text() + "# mine\n")
    before = {path: (image / path).read_text() for path in written(image)}
    ran = install("--root", "/b")
    assert ran.code == 2 and str(unit) in ran.err and "changed by hand" in ran.err
    assert "--force" in ran.err and "nothing was written" in ran.err
    assert before == {path: (image / path).read_text() for path in written(image)}
    assert install("--root", "/b", "--force").code == 0
    assert "# mine" not in unit.read_text()


def test_an_uninstall_leaves_what_is_not_its_own(install, tlcache, image):
    install()
    (image / "etc/tlcache").mkdir()
    (image / "etc/tlcache/tlcache.toml").write_text("")
    edited = image / "etc/systemd/system/tlcached.socket"
    edited.write_text(edited.read_text() + "# mine\n")
    dry = tlcache("daemon", "uninstall", "--system", "--prefix", image, "--dry-run")
    assert dry.code == 1 and "tlcached.service: would remove" in dry.out
    assert "etc/systemd/system/tlcached.service" in written(image)
    ran = tlcache("daemon", "uninstall", "--system", "--prefix", image)
    assert ran.code == 1 and f"left     {edited} (it was changed by hand)" in ran.out
    assert written(image) == ["etc/systemd/system/tlcached.socket", "etc/tlcache/tlcache.toml"]
    assert tlcache("daemon", "uninstall", "--system", "--prefix", image, "--force").code == 0
    assert written(image) == ["etc/tlcache/tlcache.toml"]
    again = tlcache("daemon", "uninstall", "--system", "--prefix", image)
    assert again.code == 0 and "nothing of tlcache's is installed" in again.err


@pytest.mark.skipif(shutil.which("systemctl") is None, reason="no systemctl here")
def test_enabling_in_an_image_makes_the_links_and_uninstalling_takes_them_away(
    install, tlcache, image
):
    assert install("--enable").code == 0
    wants = image / "etc/systemd/system/multi-user.target.wants/tlcached.service"
    assert wants.is_symlink()
    assert tlcache("daemon", "uninstall", "--system", "--prefix", image).code == 0
    assert not wants.is_symlink()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--now"], "nothing can be started in an image"),
        (["--executable", "/opt/none"], "/opt/none is not there"),
        (["--user", "--run-as", "x"], "runs as that user"),
        (["--run-as", "a b"], "no user's name"),
    ],
)
def test_what_cannot_be_is_refused_with_a_hint(install, arguments, says, image):
    ran = install(*arguments)
    assert ran.code == 2 and says in ran.err and "hint: " in ran.err
    assert not (image / "etc").exists()


def test_an_image_that_is_not_there_is_refused(tlcache, tmp_path):
    ran = tlcache("daemon", "install", "--prefix", tmp_path / "none")
    assert ran.code == 2 and "is no directory" in ran.err


@pytest.mark.skipif(os.path.isdir("/run/systemd/system"), reason="systemd runs here")
def test_without_systemd_the_units_are_written_and_that_is_said(tlcache, tmp_path, image):
    ran = tlcache(
        "daemon", "install", "--user", "--now", "--executable", image / "opt/venv/bin/tlcache"
    )
    assert ran.code == 0
    assert "systemd does not run this machine" in ran.err and "tlcache daemon run" in ran.err
    assert (tmp_path / "config/systemd/user/tlcached.service").is_file()
    assert tlcache("daemon", "uninstall", "--user").code == 0
    assert not (tmp_path / "config/systemd/user/tlcached.service").exists()


@as_root
def test_root_does_not_run_a_program_that_somebody_else_can_change(tlcache, tmp_path, image):
    program = image / "opt/venv/bin/tlcache"
    os.chown(program, 4242, -1)
    ran = tlcache("daemon", "install", "--system", "--dry-run", "--executable", program)
    assert ran.code == 3 and "belongs to uid 4242" in ran.err and "--run-as" in ran.err
    for more in (["--force"], ["--run-as", "vllm"]):
        ran = tlcache("daemon", "install", "--system", "--dry-run", "--executable", program, *more)
        assert ran.code == 0, ran.err
