"""Digests of trees: of names and contents alone, remembered, and never wrong for it."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from tlcache.store import digests
from tlcache.store.digests import Digests


@pytest.fixture
def tree(tmp_path):
    place = tmp_path / "tree"
    (place / "inner" / "__pycache__").mkdir(parents=True)
    (place / "a.h").write_text("a")
    (place / "inner" / "b.h").write_text("b")
    (place / "inner" / "c.py").write_text("c")
    (place / "inner" / "__pycache__" / "c.pyc").write_text("c")
    age(place)
    return place


def age(place, seconds=1000):
    for directory, _, names in os.walk(place):
        for name in names:
            path = os.path.join(directory, name)
            os.utime(path, (time.time() - seconds,) * 2)


@pytest.fixture
def memory(tmp_path):
    return str(tmp_path / "memory" / "digests.json")


def test_a_copy_elsewhere_with_other_times_has_the_same_digest(tree, tmp_path, memory):
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy)
    age(copy, 5)
    assert Digests(memory).tree(copy) == Digests(memory).tree(tree)


@pytest.mark.parametrize("edit", ["content", "name", "more", "less"])
def test_each_edit_changes_the_digest_also_where_the_old_one_is_remembered(tree, memory, edit):
    asked = Digests(memory)
    before = asked.tree(tree)
    asked.save()
    if edit == "content":
        (tree / "inner" / "b.h").write_text("B")
    elif edit == "name":
        (tree / "inner" / "b.h").rename(tree / "inner" / "d.h")
    elif edit == "more":
        (tree / "inner" / "d.h").write_text("")
    else:
        (tree / "inner" / "b.h").unlink()
    assert Digests(memory).tree(tree) != before


def test_the_bytes_are_read_once_while_sizes_and_times_stay(tree, memory, monkeypatch):
    first = Digests(memory)
    digest = first.tree(tree)
    first.save()
    monkeypatch.setattr(digests, "_digest", lambda place, names: pytest.fail("read again"))
    assert Digests(memory).tree(tree) == digest


def test_a_file_that_is_still_young_is_not_remembered(tree, memory):
    (tree / "a.h").write_text("x")
    first = Digests(memory)
    first.tree(tree)
    first.save()
    assert not os.path.exists(memory)


def test_only_the_files_that_were_asked_for_count(tree, memory):
    asked = Digests(memory)
    sources = asked.tree(tree, suffixes=(".py",))
    headers = asked.tree(tree, suffixes=(".h",), leaving_out=("inner",))
    named = asked.tree(tree, names=("a.h", "missing.h"))
    assert headers == named and len({sources, headers, asked.tree(tree)}) == 3
    (tree / "inner" / "b.h").write_text("other")
    assert asked.tree(tree, suffixes=(".py",)) == sources
    (tree / "inner" / "__pycache__" / "d.pyc").write_text("new")
    assert asked.tree(tree, suffixes=(".py",)) == sources


def test_what_is_not_there_has_no_digest(tmp_path, memory):
    assert Digests(memory).tree(tmp_path / "nowhere") is None
    assert Digests(memory).tree(tmp_path, names=("nothing",)) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 1}',
        '{"version": 1, "digests": {"a": [1, 2]}}',
        '{"version": 1, "digests": {"a": "b"}}',
        '{"version": 2, "digests": {}}',
        "\udcff",
        "[" * 9999,
    ],
)
def test_a_damaged_memory_is_none_and_is_replaced(tree, memory, text):
    os.makedirs(os.path.dirname(memory))
    with open(memory, "w", errors="surrogateescape") as file:
        file.write(text)
    asked = Digests(memory)
    digest = asked.tree(tree)
    asked.save()
    assert digest == Digests("/proc/nowhere").tree(tree)
    assert next(iter(Digests(memory)._known.values()))[1] == digest


def test_a_memory_that_cannot_be_written_costs_nothing_but_time(tree, tmp_path):
    (tmp_path / "file").write_text("")
    asked = Digests(str(tmp_path / "file" / "digests.json"))
    assert asked.tree(tree)
    asked.save()


def test_two_processes_remember_what_both_of_them_read(tree, memory):
    one, other = Digests(memory), Digests(memory)
    one.tree(tree, suffixes=(".h",))
    other.tree(tree, suffixes=(".py",))
    one.save()
    other.save()
    assert len(Digests(memory)._known) == 2


def test_the_memory_lies_where_the_user_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert digests.path() == str(tmp_path / "tlcache" / "digests.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert digests.path() == "/home/me/.cache/tlcache/digests.json"
