"""`tlcache doctor`: one screen, its JSON, and its exit code."""

from __future__ import annotations

import sys

import pexpect
import pytest

TLCACHE = ["-c", "from tlcache.cli import main; main()"]


def test_a_sound_machine_exits_with_0_and_says_so(tlcache, cache_root):
    ran = tlcache("doctor")
    told = tlcache("doctor", "--json")
    levels = {one["level"] for one in told.json["findings"]}
    assert ran.code == told.code == (0 if levels == {"ok"} else 1)
    assert len(ran.out.splitlines()) >= len(told.json["findings"]) == 14
    assert told.json["root"] == str(cache_root) and told.err == ""
    assert not cache_root.exists()


def test_a_finding_exits_with_1_and_stands_with_its_hint(tlcache):
    ran = tlcache("doctor", env={"TILELANG_DISABLE_CACHE": "1"})
    assert ran.code == 1
    lines = ran.out.splitlines()
    (index,) = [i for i, line in enumerate(lines) if line.startswith("fail  caching ")]
    assert lines[index + 1].strip() == "hint: `unset TILELANG_DISABLE_CACHE`"
    told = tlcache("doctor", "--json", env={"TILELANG_DISABLE_CACHE": "1"})
    assert told.code == 1 and told.json["summary"]["fail"] == 1


def test_a_damaged_record_is_one_finding_and_no_flood_of_warnings(tlcache, cache_root):
    for digit in "abc":
        path = cache_root / "tlcache" / "records" / (digit * 2) / f"{digit * 64}.json"
        path.parent.mkdir(parents=True)
        path.write_text("{")
    ran = tlcache("doctor")
    assert ran.code == 1 and ran.err == ""
    assert "fail  damaged       3 records fail their own checksums" in ran.out


@pytest.mark.parametrize("name", ["TILELANG_CACHE_DIR", "HOME"])
def test_a_root_that_cannot_be_is_a_finding_and_no_error(tlcache, name):
    ran = tlcache("doctor", env={name: "/proc/nowhere"})
    assert ran.code in (0, 1) and "Traceback" not in ran.err and "error: " not in ran.err


def test_on_a_terminal_it_reads_the_same(cache_root, tmp_path):
    child = pexpect.spawn(
        sys.executable, [*TLCACHE, "doctor"], cwd=str(tmp_path), encoding="utf-8", timeout=60
    )
    child.expect(pexpect.EOF)
    assert "ok    caching       on" in child.before
