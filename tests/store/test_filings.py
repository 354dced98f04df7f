"""What the records of a root say: read once, and anew when their files changed."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import pytest

from tlcache.store import layout, record, scan, scan_cache
from tlcache.store.filings import Filing, Filings

OTHER = "bb" * 32


@pytest.fixture(autouse=True)
def _old_enough(cache_root, monkeypatch):
    monkeypatch.setattr(scan_cache, "_SETTLED", -1e9)


@pytest.fixture
def parsed(monkeypatch):
    """The contents of the records that are read."""
    found, real = [], record.decode

    def decode(data, spec=None):
        found.append(data)
        return real(data, spec)

    monkeypatch.setattr(record, "decode", decode)
    return found


def scanned(root, parsed):
    parsed.clear()
    return next(iter(scan.scan(root))), list(parsed)


def test_a_filing_says_what_its_record_does(filed):
    told = Filing.of(filed.record)
    spec = filed.record.spec
    assert (told.name, told.kernel, told.target) == (spec.name, spec.kernel, spec.target.name)
    assert json.loads(told.workload) == dict(spec.workload)
    assert json.loads(told.schedule) == dict(spec.schedule)
    assert (told.workload_text, told.schedule_text) == (spec.workload_text, spec.schedule_text)
    assert (told.is_cuda, told.nvcc) == (False, None)


def test_a_record_is_read_once(filed, parsed):
    record.write(filed.root, filed.record)
    first, reads = scanned(filed.root, parsed)
    assert first.record == Filing.of(filed.record) and len(reads) == 1
    again, reads = scanned(filed.root, parsed)
    assert again == first and reads == []


def test_a_record_that_was_written_anew_is_read_anew(filed, parsed):
    record.write(filed.root, filed.record)
    scanned(filed.root, parsed)
    record.write(filed.root, filed.but(compile_seconds=9.0, created="2026-02-02T00:00:00+00:00"))
    found, reads = scanned(filed.root, parsed)
    assert found.record.created.startswith("2026-02-02") and len(reads) == 1


def test_a_record_that_was_damaged_since_says_nothing_any_more(filed, parsed):
    path = record.write(filed.root, filed.record)
    scanned(filed.root, parsed)
    status, data = path.stat(), path.read_bytes()
    with open(path, "r+b") as file:
        file.write(data.replace(b"64", b"65", 1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    for _ in range(2):
        assert scanned(filed.root, parsed)[0].record is None
    path.write_bytes(data)
    assert scanned(filed.root, parsed)[0].record == Filing.of(filed.record)


def test_a_use_of_a_record_shows(filed, parsed):
    record.write(filed.root, filed.record)
    path = Path(layout.record_path(filed.root, filed.record.action_key))
    os.utime(path, (1e9, 1e9))
    os.utime(filed.library, (1e9, 1e9))
    before, _ = scanned(filed.root, parsed)
    record.used(filed.root, filed.record.action_key)
    assert scanned(filed.root, parsed)[0].last_used > before.last_used


def test_a_record_that_is_gone_is_forgotten(filed, parsed):
    path = record.write(filed.root, filed.record)
    scanned(filed.root, parsed)
    path.unlink()
    assert scanned(filed.root, parsed)[0].record is None
    with sqlite3.connect(scan_cache.path()) as database:
        assert database.execute("SELECT count(*) FROM filings").fetchone() == (0,)
    database.close()


@pytest.mark.parametrize("column", ["kernel", "stamp", "workload_text", "nvcc"])
def test_what_is_no_filing_in_the_cache_is_read_anew(filed, parsed, column):
    record.write(filed.root, filed.record)
    first, _ = scanned(filed.root, parsed)
    with sqlite3.connect(scan_cache.path()) as database:
        database.execute(f"UPDATE filings SET {column} = 7")
        database.execute(f"UPDATE filings SET {column} = CAST(7 AS BLOB)")
    database.close()
    again, reads = scanned(filed.root, parsed)
    assert again == first and len(reads) == 1


def test_records_that_come_and_go_show_at_the_next_look(filed):
    found = Filings(str(filed.root))
    location = str(filed.root / filed.record.entry)
    assert found.at(location) == frozenset() and found.newest(location) is None
    path = record.write(filed.root, filed.record)
    newer = filed.but(action_key=OTHER, created="2026-03-01T00:00:00+00:00")
    other = record.write(filed.root, newer)
    found.refresh()
    assert found.at(location) == {str(path), str(other)}
    assert found.newest(location)[0] == Filing.of(newer)
    other.unlink()
    found.refresh()
    assert found.at(location) == {str(path)}
    assert list(found.all()) == [(filed.record.entry, str(path))]


def test_a_record_of_a_name_that_is_none_is_passed_over(filed):
    path = record.write(filed.root, filed.record)
    for name in (".x.json", f"{OTHER}.json", f"{path.stem}.json.tmp", "readme"):
        (path.parent / name).write_bytes(path.read_bytes())
    assert list(Filings(str(filed.root)).all()) == [(filed.record.entry, str(path))]


def test_records_that_cannot_be_used_are_told_in_one_line(filed, caplog):
    for number in range(30):
        path = record.write(filed.root, filed.but(action_key=f"{number:02x}" * 32))
        path.write_bytes(path.read_bytes()[:-5])
    list(scan.scan(filed.root))
    (told,) = caplog.messages
    assert told == f"30 records in {filed.root} cannot be used; `tlcache verify` says why"


def test_one_record_is_read_again_and_tells_which_things_it_concerns(filed):
    filings = Filings(str(filed.root))
    path = record.write(filed.root, filed.record)
    place = str(filed.root / filed.record.entry)
    name = os.path.basename(path)
    assert filings.again(name[:2], name) == {place}
    assert filings.newest(place)[0].action_key == filed.record.action_key
    filings.refresh()
    assert filings.again(name[:2], name) == {place}  # another thread may have seen it before
    assert filings.again(name[:2]) == {place}
    assert filings.again(name[:2], ".other.tmp") == set()
    os.unlink(path)
    assert filings.again(name[:2], name) == {place}
    assert filings.newest(place) is None
    assert filings.again("zz") == set()
    assert name[:2] in filings.directories()
