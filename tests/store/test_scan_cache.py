"""The scan cache: right while nothing changed, read anew when anything did, never in the way."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tarfile
from pathlib import Path

import pytest

from tlcache.store import entry, scan, scan_cache

FIXTURE = Path(__file__).parent / "fixtures" / "mixed_root.tar.xz"


@pytest.fixture
def root(cache_root, monkeypatch):
    """A root of several kernels, old enough to be kept; `read` counts those that are read."""
    monkeypatch.setattr(scan_cache, "_SETTLED", -1e9)
    with tarfile.open(FIXTURE) as archive:
        for member in archive:
            if "0.1.14" in member.name:
                path = cache_root / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.extractfile(member).read())
    return cache_root


@pytest.fixture
def read(monkeypatch):
    """The keys of the entries whose files a scan reads."""
    keys = []
    real = entry.facts_of

    def facts_of(place, found):
        keys.append(place.key[:4])
        return real(place, found)

    monkeypatch.setattr(entry, "facts_of", facts_of)
    return keys


ALL = ["56aa", "8a5f", "0941", "75e7", "fb5d"]


def scanned(root, read):
    """A scan's entries by their keys, and which of them were read."""
    read.clear()
    found = {one.place.key[:4]: one for one in scan.scan(root)}
    return found, list(read)


def kernel(root, key):
    (path,) = root.glob(f"0.1.14/linux-x86_64/kernels/{key}*")
    return path


def test_entries_are_read_once(root, read):
    first, reads = scanned(root, read)
    assert reads == ALL
    again, reads = scanned(root, read)
    assert reads == [] and again == first


def test_a_file_that_changed_is_read_anew_though_its_size_and_date_are_the_same(root, read):
    library = kernel(root, "75e7") / "executable.so"
    scanned(root, read)
    status, data = library.stat(), library.read_bytes()
    with open(library, "r+b") as file:
        file.write(b"\0" * 64)
    os.utime(library, ns=(status.st_atime_ns, status.st_mtime_ns))
    found, reads = scanned(root, read)
    assert reads == ["75e7"] and found["75e7"].target is None
    library.write_bytes(data)
    found, reads = scanned(root, read)
    assert reads == ["75e7"] and found["75e7"].target == "sm_90"


def test_a_file_that_came_or_went_shows(root, read):
    place = kernel(root, "75e7")
    before, _ = scanned(root, read)
    (place / "note").write_bytes(b"x" * 1000)
    found, reads = scanned(root, read)
    assert reads == [] and found["75e7"].bytes == before["75e7"].bytes + 1000
    with open(place / "note", "ab") as file:
        file.write(b"x" * 1000)  # the directory's date stays
    found, _ = scanned(root, read)
    assert found["75e7"].bytes == before["75e7"].bytes + 2000
    (place / "params.pkl").unlink()
    found, reads = scanned(root, read)
    assert reads == ["75e7"] and found["75e7"].params is None


def test_the_dates_are_those_of_now(root, read):
    library = kernel(root, "75e7") / "executable.so"
    scanned(root, read)
    os.utime(library, (2_000_000_000, 1_500_000_000))
    found, _ = scanned(root, read)
    assert found["75e7"].last_used.timestamp() == 2_000_000_000


def test_an_entry_that_was_replaced_by_another_is_read_anew(root, read):
    scanned(root, read)
    one, other = kernel(root, "75e7"), kernel(root, "fb5d")
    one.rename(root / "aside")
    shutil.copytree(other, one)
    shutil.rmtree(root / "aside")
    found, reads = scanned(root, read)
    assert reads == ["75e7"] and found["75e7"].target == "sm_80"


def test_what_is_young_is_not_kept(root, read, monkeypatch):
    monkeypatch.setattr(scan_cache, "_SETTLED", 3600.0)
    assert scanned(root, read)[1] == scanned(root, read)[1] == ALL


def test_a_file_that_could_not_be_read_is_asked_again(root, read, monkeypatch):
    real = entry.files.read

    def fails(path, *arguments, **options):
        if "75e7" in path:
            raise OSError(5, "Input/output error")
        return real(path, *arguments, **options)

    monkeypatch.setattr(entry.files, "read", fails)
    assert scanned(root, read)[0]["75e7"].target is None
    monkeypatch.setattr(entry.files, "read", real)
    found, reads = scanned(root, read)
    assert reads == ["75e7"] and found["75e7"].target == "sm_90"


def rows():
    database = sqlite3.connect(scan_cache.path())
    try:
        return sorted(key[:4] for (key,) in database.execute("SELECT key FROM facts"))
    finally:
        database.close()


def test_what_is_gone_is_forgotten(root, read):
    scanned(root, read)
    assert rows() == sorted(ALL)
    shutil.rmtree(kernel(root, "75e7"))
    scanned(root, read)
    assert rows() == sorted(set(ALL) - {"75e7"})
    shutil.rmtree(root / "0.1.14/cuda-binaries")
    scanned(root, read)
    assert rows() == sorted(set(ALL) - {"75e7", "56aa", "8a5f"})


def test_a_file_whose_name_is_no_text_leaves_the_other_entries_kept(root, read):
    (kernel(root, "75e7") / os.fsdecode(b"\xff")).write_bytes(b"x")
    scanned(root, read)
    assert scanned(root, read)[1] == ["75e7"]


def test_a_scan_that_was_left_early_forgets_nothing(root, read):
    scanned(root, read)
    next(scan.scan(root))
    assert rows() == sorted(ALL)


def test_several_roots_share_the_cache(root, read, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(root, other)
    scanned(root, read)
    assert scanned(other, read)[1] == ALL
    assert scanned(root, read)[1] == scanned(other, read)[1] == []


def test_a_relative_root_is_the_same_root(root, read, monkeypatch):
    scanned(root, read)
    monkeypatch.chdir(root.parent)
    assert scanned(Path(root.name), read)[1] == []
    monkeypatch.chdir(root)
    assert scanned(Path("."), read)[1] == []


# --- its faults ---


@pytest.mark.parametrize("data", [b"", b"x", b"SQLite format 3\0" + b"\xff" * 4096, b"\0" * 9000])
def test_a_cache_that_is_damaged_is_made_anew(root, read, data):
    path = Path(scan_cache.path())
    path.write_bytes(data)
    assert scanned(root, read)[1] == ALL
    scanned(root, read)
    assert scanned(root, read)[1] == []


def test_a_cache_that_is_damaged_in_the_middle_never_stops_a_scan(root, read):
    whole, _ = scanned(root, read)
    path = Path(scan_cache.path())
    sound = path.read_bytes()
    for place in range(0, len(sound), 97):
        path.write_bytes(sound[:place] + b"\xff" * 13 + sound[place + 13 :])
        found, _ = scanned(root, read)
        assert found.keys() == whole.keys()


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "[1,2,3,4,5,6]", "[" * 5000, '{"a": 1}', "[5,[],[],0,0,[]]"]
)
def test_facts_that_are_none_are_read_anew(root, read, text):
    first, _ = scanned(root, read)
    database = sqlite3.connect(scan_cache.path())
    with database:
        database.execute("UPDATE facts SET facts = ? WHERE key LIKE '75e7%'", (text,))
    database.close()
    found, reads = scanned(root, read)
    assert reads == ["75e7"] and found == first


def test_a_cache_of_another_version_is_made_anew(root, read):
    scanned(root, read)
    database = sqlite3.connect(scan_cache.path())
    database.execute("PRAGMA user_version = 99")
    database.close()
    assert scanned(root, read)[1] == ALL
    assert scanned(root, read)[1] == []


def test_a_cache_that_another_process_holds_is_done_without(root, read, monkeypatch):
    monkeypatch.setattr(scan_cache, "_PATIENCE", 0.01)
    scanned(root, read)
    database = sqlite3.connect(scan_cache.path(), isolation_level=None)
    database.execute("BEGIN EXCLUSIVE")
    assert scanned(root, read)[1] == ALL
    database.execute("ROLLBACK")
    database.close()
    assert scanned(root, read)[1] == []


@pytest.mark.parametrize("kind", ["directory", "under a file", "loop", "nul"])
def test_a_cache_that_cannot_be_there_is_done_without(root, read, tmp_path, monkeypatch, kind):
    path = tmp_path / "place"
    if kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "under a file":
        path.write_text("")
        path = path / "scan.sqlite"
    else:
        path = Path("/dev/null/scan.sqlite")
    monkeypatch.setenv("TLCACHE_SCAN_CACHE", str(path))
    assert scanned(root, read)[1] == scanned(root, read)[1] == ALL


def test_the_cache_is_the_users_own(root, read, tmp_path, monkeypatch):
    monkeypatch.delenv("TLCACHE_SCAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    scanned(root, read)
    path = tmp_path / "home/tlcache/scan.sqlite"
    assert scan_cache.path() == str(path)
    assert path.stat().st_mode & 0o077 == path.parent.stat().st_mode & 0o077 == 0


def test_a_root_without_entries_makes_no_cache(cache_root):
    cache_root.mkdir()
    assert list(scan.scan(cache_root)) == []
    assert not os.path.exists(scan_cache.path())
