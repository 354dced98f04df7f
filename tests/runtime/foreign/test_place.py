"""The roots that calls are looked up in, and what is in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.runtime.foreign.test_restoring import START
from tlcache.store import calls
from tlcache.store.trust import Trust

CODE = (
    START
    + """
told["class"] = [name(lazy()), name(kernels.eager.compile(X))]
told["out"] = [lazy()(X).tolist(), kernels.eager(X).tolist()]
told["refused"] = accelerate.refusals()
"""
)
RESTORED = ["RestoredKernel", "RestoredKernel"]


@pytest.fixture
def place(program):
    return program().write()


@pytest.fixture
def warm(forked, place):
    """The outputs of a cold run; the root has its kernels."""
    return forked(place, CODE)["out"]


def contents(root, folder):
    return {path: Path(path).read_bytes() for _, path in calls.all_of(root, folder)}


def files(root):
    return {path for path in root.rglob("*") if path.is_file()}


def test_what_the_first_root_lacks_is_restored_from_one_below(
    forked, place, warm, cache_root, tmp_path
):
    first, before = tmp_path / "first", files(cache_root)
    times = {path: path.stat().st_mtime_ns for path in before}
    layers = f"{first}{os.pathsep}{cache_root}"
    for directory in cache_root.rglob("*"):
        if directory.is_dir():
            directory.chmod(0o555)
    told = forked(place, CODE, TILELANG_CACHE_DIR=str(first), TLCACHE_ROOTS=layers)
    assert told == {"class": RESTORED, "out": warm, "refused": {}}
    assert {path: path.stat().st_mtime_ns for path in files(cache_root)} == times
    assert not list(first.rglob("*.so"))


def test_a_root_below_that_others_can_write_is_left_out(forked, place, warm, cache_root, tmp_path):
    first = tmp_path / "first"
    (cache_root / "tlcache" / "calls").chmod(0o777)
    layers = f"{first}{os.pathsep}{cache_root}"
    told = forked(place, CODE, TILELANG_CACHE_DIR=str(first), TLCACHE_ROOTS=layers)
    assert told == {"class": ["JITKernel", "JITKernel"], "out": warm, "refused": {}}


def test_a_kernel_that_is_gone_from_the_first_root_is_restored_from_one_below(
    forked, place, warm, cache_root, tmp_path
):
    first = tmp_path / "first"
    layers = f"{first}{os.pathsep}{cache_root}"
    where = {"TILELANG_CACHE_DIR": str(first)}
    assert forked(place, CODE, **where)["class"] == ["JITKernel", "JITKernel"]
    for library in first.rglob("*.so"):
        library.write_bytes(b"")
    told = forked(place, CODE, **where, TLCACHE_ROOTS=layers)
    assert told == {"class": RESTORED, "out": warm, "refused": {}}


def test_a_lazy_function_without_tensors_does_without_a_file_of_its_style(
    forked, place, warm, cache_root
):
    found = [calls.decode(data)[1] for data in contents(cache_root, "calls").values()]
    styles = [one.mode for one in found if isinstance(one, calls.Style)]
    assert styles == ["eager"]
    assert sorted(one.kernel for one in found if isinstance(one, calls.Answer)) == [
        "kernels:eager",
        "kernels:make",
    ]


ANALYSED = """
read = []
from tlcache.runtime.foreign import text
real = text.read
text.read = lambda source: read.append(source.split("(")[0].split()[-1]) or real(source)
"""


def test_the_analyses_of_a_source_file_are_one_file(forked, place, warm, cache_root):
    found = sorted(path for _, path in calls.all_of(cache_root, "texts"))
    assert len(found) == 2  # of kernels.py and helpers.py
    again = forked(place, START + ANALYSED + "lazy(); kernels.eager(X); told['read'] = read")
    assert again["read"] == []


def test_analyses_that_another_process_has_filed_meanwhile_are_kept(forked, place, cache_root):
    """One process asks for one of a file's functions, and the other one for another."""
    code = """
from tlcache.runtime.foreign import place, source, texts
read = texts.reading(place.in_force())
first = source.lines(helpers.twice)
read(first)
if os.fork() == 0:
    texts._files.clear()
    texts.reading(place.in_force())(source.lines(helpers.unrelated))
    os._exit(0)
os.wait()
read(source.lines(helpers.doubled))
"""
    forked(place, START + code)
    ((key, _),) = calls.all_of(cache_root, "texts")
    named = calls.read_texts(str(cache_root), key, Trust(cache_root))
    assert sorted(one[0] for one in named.values()) == ["doubled", "twice", "unrelated"]


@pytest.mark.parametrize("damage", [b"", b"{", b'{"texts": 1}'])
def test_damaged_analyses_are_made_again(forked, place, warm, cache_root, damage):
    before = contents(cache_root, "texts")
    for path in before:
        with open(path, "wb") as file:
            file.write(damage)
    told = forked(place, CODE)
    assert told == {"class": RESTORED, "out": warm, "refused": {}}
    assert contents(cache_root, "texts") == before
