"""Remembered closures: taken exactly where computing them again would give the same."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tlcache import closure
from tlcache.closure import Closure
from tlcache.errors import UntrustedRootError
from tlcache.store import closures
from tlcache.store.trust import Trust

SOURCE = """
import json
from remembered.helpers import scale
try:
    import not_there_at_all
except ImportError:
    not_there_at_all = None

def factory(n):
    return scale(n)
"""
HELPERS = "def scale(n):\n    return 2 * n\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose factory's closure is two files and one absent module; nothing known of it."""
    directory = tmp_path / "lib" / "remembered"
    directory.mkdir(parents=True)
    (directory / "__init__.py").write_text("")
    (directory / "kern.py").write_text(SOURCE)
    (directory / "helpers.py").write_text(HELPERS)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "lib"), *sys.path])
    monkeypatch.setattr(closure, "_known", {})
    return directory


KERNEL = "remembered.kern:factory"


@pytest.fixture
def root(tmp_path, package):
    """A root that remembers the package's closure."""
    root = str(tmp_path / "root")
    closures.remember(root, KERNEL)
    closure._known.clear()
    return root


def _recalled(root: str) -> bool:
    closures.recall(root, KERNEL, Trust(root))
    return KERNEL in closure._known


def test_what_was_remembered_is_taken_and_is_what_would_be_computed(root):
    assert _recalled(root)
    taken = closure._known.pop(KERNEL)
    assert taken == closure.closure(KERNEL)
    assert set(taken.sources) == {"remembered.kern", "remembered.helpers"}
    assert "not_there_at_all" in taken.absent


@pytest.mark.parametrize("edited", ["kern.py", "helpers.py"])
def test_an_edit_of_any_file_that_was_read_makes_it_void(root, package, edited):
    path = package / edited
    path.write_text(path.read_text() + "\n# even a comment: the digest has to be computed\n")
    assert not _recalled(root)


def test_a_module_that_was_absent_and_appears_makes_it_void(root, package):
    (package.parent / "not_there_at_all.py").write_text("")
    assert not _recalled(root)


def test_a_module_that_disappears_makes_it_void(root, package):
    (package / "helpers.py").unlink()
    assert not _recalled(root)


def test_a_closure_of_another_algorithm_is_void(root, monkeypatch):
    monkeypatch.setattr(closure, "ALGORITHM", closure.ALGORITHM + 1)
    assert not _recalled(root)


def test_a_closure_with_another_version_of_a_package_is_void(package):
    computed = closure.closure(KERNEL)
    closure._known.clear()
    assert not closure.adopt(computed._replace(externals={"click": "click==0.0.1"}))
    assert closure.adopt(computed._replace(externals={"click": closure._external("click")}))


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"null", b'{"algorithm": 1}', b'{"kernel": 3}', b"\xff\xfe"]
)
def test_a_damaged_file_is_none(root, damage):
    directory = os.path.join(root, "tlcache", "closures")
    (name,) = os.listdir(directory)
    with open(os.path.join(directory, name), "wb") as file:
        file.write(damage)
    assert not _recalled(root)


def test_a_file_with_fields_of_other_types_is_none(root):
    directory = os.path.join(root, "tlcache", "closures")
    (name,) = os.listdir(directory)
    path = os.path.join(directory, name)
    with open(path) as file:
        sound = json.load(file)
    for field in Closure._fields[2:]:
        with open(path, "w") as file:
            json.dump({**sound, field: 7}, file)
        assert not _recalled(root), field


def test_a_file_that_others_can_write_is_refused(root):
    directory = os.path.join(root, "tlcache", "closures")
    (name,) = os.listdir(directory)
    os.chmod(os.path.join(directory, name), 0o666)
    with pytest.raises(UntrustedRootError):
        _recalled(root)


def test_the_digest_of_a_fixed_source_is_what_this_algorithm_gives(package):
    # If this fails, the same source has another digest than before: raise closure.ALGORITHM, so
    # that what was remembered under the old one is void, and write the new digest here.
    assert (closure.ALGORITHM, closure.factory_digest(KERNEL)) == (1, GOLDEN)


GOLDEN = "e1b1a58b2c688ee10f49891939e0b004c4cdfcce05d3a8e85efd401f85eb4764"
