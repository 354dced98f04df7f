"""Files of recorded workloads: what is there is kept, and no other document is touched."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tlcache import recorded
from tlcache.errors import ShapesError

WORKLOADS = some.lists(
    some.fixed_dictionaries(
        {"kernel": some.sampled_from(["m:f", "m:g"]), "args": some.just({"N": 1})},
        optional={
            "tilelang_keys": some.dictionaries(
                some.sampled_from(["a", "b"]), some.sampled_from(["1", "2"])
            )
        },
    )
)
DOCUMENTS = some.builds(
    lambda workloads, **rest: {"version": 1, "workloads": workloads, **rest}, WORKLOADS
)


def asked(document):
    return [recorded.identity(workload) for workload in document["workloads"]]


@given(DOCUMENTS, DOCUMENTS)
def test_a_merge_has_all_of_both_once_and_the_first_ones_first(one, other):
    both = recorded.merged(one, other)
    assert set(asked(both)) == {*asked(one), *asked(other)}
    assert len(asked(both)) == len(set(asked(both)))
    assert asked(both)[: len(set(asked(one)))] == list(dict.fromkeys(asked(one)))
    assert recorded.merged(both, other)["workloads"] == both["workloads"]


def test_keys_of_other_targets_are_added_and_a_newer_one_replaces():
    one = {"kernel": "m:f", "args": {}, "tilelang_keys": {"sm_80": "1", "sm_90a": "2"}}
    other = {**one, "tilelang_keys": {"sm_90a": "3", "cpu": "4"}}
    merged = recorded.merged(
        {"version": 1, "workloads": [one]}, {"version": 1, "workloads": [other]}
    )
    assert merged["workloads"] == [
        {**one, "tilelang_keys": {"sm_80": "1", "sm_90a": "3", "cpu": "4"}}
    ]


def test_what_a_person_wrote_into_the_file_stays(tmp_path):
    path = tmp_path / "shapes.json"
    written = {"version": 1, "targets": ["sm90"], "workloads": [{"op": "rms_norm", "M": [1, 2]}]}
    path.write_text(json.dumps(written))
    recorded.update(path, {"version": 1, "workloads": [{"op": "silu", "M": 1}], "paths": ["/a"]})
    assert json.loads(path.read_text()) == {
        **written,
        "workloads": [*written["workloads"], {"op": "silu", "M": 1}],
        "paths": ["/a"],
    }


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link.json").symlink_to("real.json")
    recorded.update(tmp_path / "link.json", {"version": 1, "workloads": [{"op": "a"}]})
    assert (tmp_path / "link.json").is_symlink()
    assert recorded.read(tmp_path / "real.json")["workloads"] == [{"op": "a"}]


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"1", b"\xff\xfe", b'{"version": 2, "workloads": []}', b'{"version": 1}',
     b'{"version": 1, "workloads": [1]}', b'{"version": 1, "workloads": [], "unreplayable": 1}',
     b"[" * 100_000],
    ids=lambda content: str(content[:40]),
)  # fmt: skip
def test_a_file_that_is_no_shapes_document_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "shapes.json"
    path.write_bytes(content)
    with pytest.raises(ShapesError, match="nothing was recorded into it") as caught:
        recorded.update(path, {"version": 1, "workloads": [{"op": "a"}]})
    assert str(path) in caught.value.message
    assert path.read_bytes() == content


def test_an_empty_file_is_taken_for_none(tmp_path):
    path = tmp_path / "shapes.json"
    path.touch()
    recorded.update(path, {"version": 1, "workloads": [{"op": "a"}]})
    assert recorded.read(path)["workloads"] == [{"op": "a"}]


def _record(path, first):
    for number in range(first, first + 10):
        recorded.update(path, {"version": 1, "workloads": [{"op": "a", "M": number}]})


def test_many_processes_that_record_at_once_lose_nothing(tmp_path):
    path = tmp_path / "shapes.json"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_record, args=(path, 10 * n)) for n in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    met = recorded.read(path)["workloads"]
    assert sorted(workload["M"] for workload in met) == list(range(60))
    assert sorted(os.listdir(tmp_path)) == [".shapes.json.lock", "shapes.json"]


def test_a_file_has_the_permissions_that_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        recorded.update(tmp_path / "shapes.json", {"version": 1, "workloads": [{"op": "a"}]})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "shapes.json").stat().st_mode) == 0o640
