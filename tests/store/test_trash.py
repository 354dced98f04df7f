"""Putting things aside: one rename, through no link, and back again."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

from tlcache.store import layout, trash

KEY = "5e" * 32
KERNEL = f"0.1.15/linux-x86_64/kernels/{KEY}"


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "root"
    (root / KERNEL).mkdir(parents=True)
    (root / KERNEL / "params.json").write_text("{}")
    return root


def _identity(path: Path) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def test_a_moved_thing_keeps_its_path_and_moving_it_back_restores_it(root):
    batch = trash.batch(trash.TRASH)
    moved = trash.move(root, root / KERNEL, batch)
    assert moved == str(root / "tlcache" / batch / KERNEL)
    assert not (root / KERNEL).exists() and (root / KERNEL).parent.is_dir()
    assert list(layout.places(root)) == []
    os.rename(moved, root / KERNEL)
    assert (root / KERNEL / "params.json").read_text() == "{}"


def test_a_file_that_is_already_there_is_never_replaced(root):
    batch = trash.batch(trash.QUARANTINE)
    first = trash.move(root, root / KERNEL / "params.json", batch)
    (root / KERNEL / "params.json").write_text("second")
    second = trash.move(root, root / KERNEL / "params.json", batch)
    assert first != second
    assert [Path(path).read_text() for path in (first, second)] == ["{}", "second"]


def test_each_move_without_a_batch_gets_a_place_of_its_own(root):
    first = trash.move(root, root / KERNEL, trash.TRASH)
    (root / KERNEL).mkdir()
    second = trash.move(root, root / KERNEL, trash.TRASH)
    assert os.path.dirname(first) != os.path.dirname(second)


def test_a_record_can_be_moved_and_what_was_moved_cannot(root):
    path = root / "tlcache/records/5e/x.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    moved = trash.move(root, path, trash.TRASH)
    assert moved.endswith("/tlcache/records/5e/x.json")
    for kept in (moved, root / "tlcache", root / "tlcache/trash", root):
        with pytest.raises(ValueError):
            trash.move(root, kept, trash.TRASH)


@pytest.mark.parametrize("path", ["..", "../other", "0.1.15/../../other", "/etc/passwd"])
def test_what_is_not_below_the_root_is_not_moved(root, path):
    (root.parent / "other").mkdir()
    with pytest.raises(ValueError, match="is not below"):
        trash.move(root, root / path, trash.TRASH)
    assert (root.parent / "other").is_dir()


def test_a_link_is_moved_as_itself(root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (root / "link").symlink_to(tmp_path / "elsewhere")
    moved = trash.move(root, root / "link", trash.TRASH)
    assert os.path.islink(moved) and (tmp_path / "elsewhere").is_dir()


def test_nothing_is_moved_out_of_or_into_what_a_link_points_at(root, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "linux-x86_64").mkdir(parents=True)
    (root / "0.1.14").symlink_to(elsewhere)
    with pytest.raises(OSError):
        trash.move(root, root / "0.1.14/linux-x86_64", trash.TRASH)
    assert (elsewhere / "linux-x86_64").is_dir()
    (root / "tlcache").mkdir(exist_ok=True)
    os.rename(root / "tlcache", root / "was")
    (root / "tlcache").symlink_to(elsewhere)
    with pytest.raises(OSError):
        trash.move(root, root / KERNEL, trash.TRASH)
    assert (root / KERNEL).is_dir()
    assert os.listdir(elsewhere) == ["linux-x86_64"]


def test_what_took_the_place_of_a_thing_since_it_was_chosen_stays(root):
    seen = _identity(root / KERNEL)
    os.rename(root / KERNEL, root / "aside")
    (root / KERNEL).mkdir()
    with pytest.raises(FileNotFoundError):
        trash.move(root, root / KERNEL, trash.TRASH, seen=seen)
    assert (root / KERNEL).is_dir()


def test_what_is_published_between_the_last_look_and_the_rename_goes_back(root, monkeypatch):
    seen, real = _identity(root / KERNEL), os.rename

    def rename(source, target, **where):
        monkeypatch.undo()
        real(root / KERNEL, root / "aside")
        (root / KERNEL).mkdir()
        real(source, target, **where)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(FileNotFoundError):
        trash.move(root, root / KERNEL, trash.TRASH, seen=seen)
    assert (root / KERNEL).is_dir()


def test_what_has_vanished_is_said_to_be_gone(root):
    with pytest.raises(FileNotFoundError):
        trash.move(root, root / "0.1.15/nothing", trash.TRASH)


# --- emptying ---


def test_emptying_deletes_batches_and_says_how_much(root, tmp_path):
    (tmp_path / "kept").write_text("x" * 100)
    (root / KERNEL / "link").symlink_to(tmp_path / "kept")
    (root / KERNEL / "links").symlink_to(tmp_path)
    (root / KERNEL / "deep/er").mkdir(parents=True)
    (root / KERNEL / "deep/er/file").write_text("12345")
    trash.move(root, root / KERNEL, trash.TRASH)
    count, size = trash.empty(root)
    links = sum(len(str(path)) for path in (tmp_path / "kept", tmp_path))
    assert (count, size) == (4, 7 + links)
    assert os.listdir(root / "tlcache/trash") == []
    assert (tmp_path / "kept").read_text() == "x" * 100


def test_only_old_batches_are_deleted_and_never_what_is_no_batch(root):
    for name in ("20200101-120000-0123abcd", "99991231-000000-0123abcd", "mine", "2020"):
        (root / "tlcache/trash" / name).mkdir(parents=True)
        (root / "tlcache/trash" / name / "file").write_text("x")
    assert trash.empty(root, older_than=timedelta(days=30)) == (1, 1)
    assert trash.empty(root) == (1, 1)
    assert sorted(os.listdir(root / "tlcache/trash")) == ["2020", "mine"]


def test_one_batch_can_be_emptied_and_quarantine_is_not_trash(root):
    batch = trash.batch(trash.QUARANTINE)
    trash.move(root, root / KERNEL, batch)
    assert trash.empty(root) == (0, 0)
    assert trash.empty(root, trash.batch(trash.QUARANTINE)) == (0, 0)
    assert trash.empty(root, batch) == (1, 2)


def test_a_trash_that_is_a_link_is_not_emptied(root, tmp_path):
    outside = tmp_path / "outside/20200101-120000-0123abcd"
    outside.mkdir(parents=True)
    (root / "tlcache").mkdir()
    (root / "tlcache/trash").symlink_to(outside.parent)
    assert trash.empty(root) == (0, 0)
    assert outside.is_dir()


def test_a_read_only_root_leaves_the_thing_where_it_was(mounted):
    root = mounted("size=64k")
    (root / KERNEL).mkdir(parents=True)
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    with pytest.raises(OSError):
        trash.move(root, root / KERNEL, trash.TRASH)
    assert (root / KERNEL).is_dir()
