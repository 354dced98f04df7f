"""`tlcache key`: the fingerprint in every form, and what a difference does."""

from __future__ import annotations

import json
import re

import pytest

from tlcache import version_key


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    for name in version_key.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_the_key_its_facts_and_its_json_agree(tlcache):
    plain, short, told = tlcache("key"), tlcache("key", "--short"), tlcache("key", "--json").json
    assert short.out == told["key"] + "\n" and plain.err == short.err == ""
    lines = dict(re.split(r" {2,}", line, maxsplit=1) for line in plain.out.splitlines())
    assert lines.pop("key") == told["key"] and lines.pop("sha256") == told["sha256"]
    assert list(lines) == list(version_key.FIELDS.values())
    assert lines["TileLang"] == told["facts"]["tilelang"] and told["schema"] == 1


def test_a_target_is_in_the_key_as_its_canonical_name(tlcache):
    for spelling in ("sm90", "h100", "9.0"):
        assert "-sm_90a-" in tlcache("key", "--short", "--target", spelling).out
    ran = tlcache("key", "--target", "sm90000")
    assert ran.code == 2 and "hint: " in ran.err


def test_no_difference_exits_with_0_and_each_that_matters_with_1(tlcache, tmp_path):
    path = tmp_path / "there.json"
    path.write_text(tlcache("key", "--json").out)
    same = tlcache("key", "--compare", path)
    assert same.code == 0 and same.out.startswith("no difference: both are tl")
    document = json.loads(path.read_text())
    document["facts"]["torch"] = "1.0"
    path.write_text(json.dumps(document))
    harmless = tlcache("key", "--compare", path)
    assert harmless.code == 0 and harmless.out.startswith("nothing      torch: 1.0 there, ")
    document["facts"]["nvcc"] = "99.0.1"
    path.write_text(json.dumps(document))
    ran = tlcache("key", "--compare", path)
    assert ran.code == 1 and "stale hit    nvcc: 99.0.1 there" in ran.out
    assert "hint: " in ran.err and "hint: " not in ran.out
    told = tlcache("key", "--compare", path, "--json")
    assert told.code == 1
    assert {one["field"]: one["effect"] for one in told.json["differences"]} == {
        "torch": "nothing",
        "nvcc": "stale hit",
    }
    assert told.json["there"].startswith("tl") and told.json["here"] == document["key"]


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff", b'{"facts": {}, "variables": {}}'])
def test_a_file_that_is_no_fingerprint_is_wrong_input(tlcache, tmp_path, text):
    path = tmp_path / "there.json"
    path.write_bytes(text)
    ran = tlcache("key", "--compare", path)
    assert (ran.code, ran.out) == (2, "") and "hint: `tlcache key --json`" in ran.err


def test_a_file_that_is_not_there_is_wrong_input(tlcache):
    ran = tlcache("key", "--compare", "nowhere.json")
    assert ran.code == 2 and "error: nowhere.json cannot be read: no such file" in ran.err


def test_short_goes_alone(tlcache):
    assert tlcache("key", "--short", "--json").code == 2
