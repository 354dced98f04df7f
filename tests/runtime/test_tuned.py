"""Tuned schedules as a serving process takes them: from its root, checked, or not at all."""

from __future__ import annotations

import os

import pytest

from tlcache import operators, runtime, targets
from tlcache.errors import UntrustedRootError
from tlcache.runtime import Resolver
from tlcache.spec import KernelSpec
from tlcache.store import schedules
from tlcache.store.schedules import Tuned
from tlcache.warm import tuning

SM90 = targets.parse("sm90")
RMS_NORM = operators.get("rms_norm")
DEFAULT = RMS_NORM.spec({"M": 4, "N": 256}, SM90)
BEST = tuning.plan(RMS_NORM, DEFAULT).candidates[0]


def tuned(spec: KernelSpec = BEST) -> Tuned:
    return Tuned("rms_norm", spec, 1.5, dict(DEFAULT.schedule), 2.0, "NVIDIA H200", {})


@pytest.fixture
def root(cache_root):
    """A root that has one tuned schedule, and no kernel."""
    schedules.write(cache_root, tuned())
    return cache_root


def test_a_root_without_schedules_leaves_every_spec_as_it_is(cache_root):
    assert runtime.tuned(RMS_NORM, DEFAULT) == DEFAULT
    cache_root.mkdir()
    assert Resolver(cache_root).tuned(RMS_NORM, DEFAULT) == DEFAULT


def test_a_tuned_schedule_is_taken_and_other_workloads_are_left(root):
    assert runtime.tuned(RMS_NORM, DEFAULT) == BEST
    other = RMS_NORM.spec({"M": 5, "N": 256}, SM90)
    assert runtime.tuned(RMS_NORM, other) == other
    assert runtime.counters() == runtime.Counters()


def test_a_schedule_that_does_not_fit_any_more_is_logged_and_the_default_taken(cache_root, caplog):
    stale = KernelSpec(DEFAULT.kernel, DEFAULT.workload, {"stages": 2}, SM90)
    schedules.write(cache_root, tuned(stale))
    assert Resolver(cache_root).tuned(RMS_NORM, DEFAULT) == DEFAULT
    assert "(stages=2) does not fit the kernel any more; taking the default" in caplog.text


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"spec": {}}', "\xff"])
def test_a_damaged_record_means_the_default(root, text):
    (path,) = root.glob("tlcache/schedules/*/*.json")
    path.write_text(text)
    assert Resolver(root).tuned(RMS_NORM, DEFAULT) == DEFAULT


def test_a_record_without_one_of_its_fields_means_the_default(root):
    (path,) = root.glob("tlcache/schedules/*/*.json")
    for name in tuned().to_json():
        data = tuned().to_json()
        del data[name]
        path.write_text(schedules.json.dumps(data))
        assert Resolver(root).tuned(RMS_NORM, DEFAULT) == DEFAULT, name


@pytest.mark.parametrize("where", ["root", "record"])
def test_a_schedule_that_others_could_have_written_is_refused(root, where):
    (path,) = root.glob("tlcache/schedules/*/*.json")
    (root if where == "root" else path).chmod(0o666 if where == "record" else 0o777)
    with pytest.raises(UntrustedRootError):
        Resolver(root).tuned(RMS_NORM, DEFAULT)


def test_with_tilelangs_cache_disabled_no_schedule_is_read(root, monkeypatch):
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    assert Resolver(root).tuned(RMS_NORM, DEFAULT) == DEFAULT


def test_an_ops_own_schedule_wins_over_the_tuned_one(python, root):
    ran = python(
        "import json, sys, torch, ops\n"
        "from tlcache import targets\n"
        "gpu = targets.parse('sm90')\n"
        "for schedule in (None, json.loads(sys.argv[1])):\n"
        "    op = ops.RMSNormFwdOp(256, 1e-6, torch.bfloat16, schedule=schedule)\n"
        "    print(json.dumps(dict(op.state._chosen(4, gpu).schedule)))\n"
        "assert 'tilelang' not in sys.modules\n",
        schedules.json.dumps(dict(DEFAULT.schedule)),
    )
    assert ran.code == 0, ran.err
    first, second = map(schedules.json.loads, ran.out.splitlines())
    assert (first, second) == (dict(BEST.schedule), dict(DEFAULT.schedule))


def test_asking_for_a_tuned_schedule_never_tunes_or_writes(root):
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    for rows in (1, 4, "dynamic"):
        runtime.tuned(RMS_NORM, RMS_NORM.spec({"M": rows, "N": 512}, SM90))
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    assert os.listdir(root) == ["tlcache"]
