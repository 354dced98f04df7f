"""What a policy selects, and that nothing else is deleted, whatever happens in between."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.store.conftest import RECORD
from tlcache.errors import CacheRootError
from tlcache.store import candidates, evictions, files, locks, prune, record, removal, scan, trash
from tlcache.store.prune import Policy
from tlcache.store.select import Filter

NOW = time.time()
DAY = 86400
KERNELS = "0.1.15/linux-x86_64/kernels"
HYPOTHESIS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def age(path, days, used=None):
    """Let something be so many days old, and used so many days ago."""
    for one in [*Path(path).glob("**/*"), Path(path)]:
        now = time.time()  # not NOW: a kernel that was just written must be just written
        os.utime(one, (now - DAY * (days if used is None else used), now - DAY * days))


@pytest.fixture
def mixed(mixed):
    """Entries of six TileLang releases, all ten days old."""
    age(mixed, 10)
    return mixed


def plan(root, policy=None, **kwargs):
    found = candidates.gather(root).candidates
    kwargs.setdefault("installed", "0.1.15")
    return prune.make(found, policy or Policy(**_fields(kwargs)), installed=kwargs["installed"])


def _fields(kwargs):
    names = {field.name for field in dataclasses.fields(Policy)}
    filters = {name: kwargs[name] for name in kwargs if name not in {*names, "installed"}}
    return {"wanted": Filter(**filters), **{n: kwargs[n] for n in kwargs if n in names}}


def short(things):
    return sorted(one.candidate.entry.place.key[:4] for one in things)


def run(root, **kwargs):
    gathered = candidates.gather(root)
    installed = kwargs.pop("installed", "0.1.15")
    made = prune.make(gathered.candidates, Policy(**_fields(kwargs)), installed=installed)
    return made, removal.apply(made, gathered.filings, "--test", roots=tuple(gathered.filings))


def tree(root):
    """Everything under a root but tlcache's locks, log and trash, by its content."""
    found = {}
    for path in sorted(Path(root).glob("**/*")):
        name = str(path.relative_to(root))
        if not name.startswith(("tlcache/locks", "tlcache/trash", "tlcache/evictions")):
            is_file = path.is_file() and not path.is_symlink()
            found[name] = files.read(str(path), unseen=True) if is_file else None
    return found


def kernel(root, number, *, days=10, used=None, source=None, version="0.1.15", filed=False):
    """A kernel, by default of no known device code; with a record where `filed`."""
    key = hashlib.sha256(f"kernel {number}".encode()).hexdigest()
    path = Path(root, version, "linux-x86_64", "kernels", key)
    path.mkdir(parents=True)
    if source is None:
        (path / "kernel_lib.so").write_bytes(f"library {number}".encode() * 1000)
        (path / "params.json").write_text("[]")
    else:
        for file in source.iterdir():
            shutil.copy(file, path)
    if filed:
        name = str(path.relative_to(root))
        data = (path / "kernel_lib.so").read_bytes()
        one = dataclasses.replace(
            RECORD,
            entry=name,
            action_key=hashlib.sha256(f"action {number}".encode()).hexdigest(),
            library=RECORD.library._replace(
                size=len(data), sha256=hashlib.sha256(data).hexdigest()
            ),
        )
        age(record.write(root, one), days, used)
    age(path, days, used)
    return path


def the(root, start, kind="kernels"):
    (path,) = Path(root).glob(f"**/{kind}/{start}*")
    return path


# --- what is selected ---


def test_a_target_goes_with_its_cubins_and_its_records(mixed):
    entry = the(mixed, "fb5d")
    one = dataclasses.replace(RECORD, entry=str(entry.relative_to(mixed)))
    two = dataclasses.replace(one, action_key="d6" * 32)
    paths = [record.write(mixed, one), record.write(mixed, two)]
    # The tests' record is for the CPU, and a record is believed before a binary.
    _, done = run(mixed, targets=("cpu",), tilelang="==0.1.14")
    assert short(done.gone) == sorted(["0941", "fb5d", "56aa"])
    assert not any(path.exists() for path in paths)
    assert not list(mixed.glob("0.1.14/cuda-binaries/56aa*"))
    _, done = run(mixed, targets=("sm80",))
    assert short(done.gone) == sorted(["5cbf", "cb47", "d7de", "e9ec"])


def test_a_fat_binary_goes_only_with_all_of_its_targets(mixed):
    made = plan(mixed, targets=("sm80",))
    assert {one.why for one in made.stays} == {"also for sm_90"}
    assert short(made.stays) == ["f758"]
    assert {"6756", "f758"} <= set(short(plan(mixed, targets=("sm80", "sm_90")).goes))
    assert {"6756", "f758"} <= set(short(plan(mixed, tilelang="==0.1.15").goes))


def test_the_bytes_are_those_that_the_disk_gains(mixed):
    def usage():
        told = subprocess.run(
            ["du", "-sB1", "--exclude=tlcache", mixed], capture_output=True, text=True, check=True
        )
        return int(told.stdout.split()[0])

    before = usage()
    made, done = run(mixed, targets=("sm80", "sm90a"))
    assert done.bytes == made.bytes == before - usage() > 100_000
    assert list((mixed / "tlcache" / "trash").iterdir()) == []


def test_every_file_of_the_plan_goes_and_no_other(mixed):
    before = tree(mixed)
    made, done = run(mixed, targets=("sm80",))
    assert done.gone == made.goes and done.stays == ()
    named = [os.path.relpath(path, mixed) for one in made.goes for path, _ in one.candidate.files]
    kept = {
        name: data
        for name, data in before.items()
        if not any(name == gone or name.startswith(f"{gone}/") for gone in named)
    }
    assert tree(mixed) == {**kept, "tlcache": None}


def test_a_cubin_that_a_kept_kernel_was_made_from_stays(mixed):
    twin = kernel(mixed, 1, source=the(mixed, "7606"), days=1)
    made = plan(mixed, kernels=("scale",), targets=("sm_90a",), older_than=timedelta(days=5))
    assert "7606" in short(made.goes) and "3996" not in short(made.goes)
    (kept,) = made.stays
    assert kept.candidate.entry.place.key.startswith("3996")
    assert kept.why == "needed by a kernel that stays"
    shutil.rmtree(twin)
    assert "3996" in short(plan(mixed, targets=("sm_90a",)).goes)


def test_nothing_goes_without_a_policy(mixed):
    assert not Policy() and not Policy(wanted=Filter())
    for given_ in ({"max_size": 0}, {"keep_last": 0}, {"orphans": True}, {"targets": ("cpu",)}):
        assert Policy(**_fields(given_))


def test_the_least_recently_used_go_first_and_only_as_many_as_it_takes(cache_root):
    paths = [kernel(cache_root, n, days=20, used=u) for n, u in enumerate((3, 9, 1, 7, 5))]
    total = sum(one.physical for one in candidates.gather(cache_root).candidates)
    each = total // 5
    for count, gone in ((5, []), (4, [1]), (3, [1, 3]), (1, [1, 3, 4, 0]), (0, [1, 3, 4, 0, 2])):
        made = plan(cache_root, max_size=count * each)
        assert [one.candidate.location for one in made.goes] == [str(paths[n]) for n in gone]
        assert made.over == 0
    assert short(plan(cache_root, max_size=4 * each - 1).goes) == sorted(
        paths[n].name[:4] for n in (1, 3)
    )


def test_a_hit_of_tlcache_counts_as_a_use_where_the_file_system_notes_none(cache_root):
    old = kernel(cache_root, 1, days=20, filed=True)
    kernel(cache_root, 2, days=20, used=19)
    assert short(plan(cache_root, unused_for=timedelta(days=15)).goes) == sorted(
        [old.name[:4], hashlib.sha256(b"kernel 2").hexdigest()[:4]]
    )
    record.used(cache_root, hashlib.sha256(b"action 1").hexdigest())
    made = plan(cache_root, unused_for=timedelta(days=15))
    assert short(made.goes) == [hashlib.sha256(b"kernel 2").hexdigest()[:4]]
    each = made.goes[0].candidate.physical
    assert short(plan(cache_root, max_size=2 * each).goes) == short(made.goes)


def test_a_size_that_cannot_be_reached_says_by_how_much(mixed):
    made = plan(mixed, max_size=1000)
    left = sum(one.physical for one in candidates.gather(mixed).candidates) - made.bytes
    assert made.over == left - 1000 > 0
    assert {one.candidate.entry.place.kind for one in made.goes} == {"kernel", "cuda-binary"}


def test_a_size_with_a_filter_is_for_what_the_filter_means(mixed):
    made = plan(mixed, max_size=0, targets=("sm_90",), tilelang="==0.1.15")
    assert short(made.goes) == sorted(["a80a", "ee3f"])
    (fat,) = made.stays
    binary = the(mixed, "6756", "cuda-binaries")
    assert fat.why == "also for sm_80"
    assert made.over == fat.candidate.physical + candidates.snapshot(str(binary)).physical


def test_files_that_have_a_name_elsewhere_free_nothing(cache_root, tmp_path):
    path = kernel(cache_root, 1)
    os.link(path / "kernel_lib.so", tmp_path / "elsewhere.so")
    size = os.stat(path / "kernel_lib.so").st_blocks * 512
    (one,) = candidates.gather(cache_root).candidates
    made = plan(cache_root, max_size=0)
    assert made.bytes == one.physical - size


def test_the_last_of_each_kernel_and_target_stay(cache_root, mixed):
    made = plan(mixed, keep_last=1)
    kept = {
        (one.entry.kernel, one.entry.targets): one
        for one in candidates.gather(mixed).candidates
        if one.entry.place.kind == "kernel"
        and one.location not in {gone.candidate.location for gone in made.goes}
    }
    everything = {
        (one.entry.kernel, one.entry.targets)
        for one in candidates.gather(mixed).candidates
        if one.entry.place.kind == "kernel"
    }
    assert set(kept) == everything
    age(the(mixed, "cb47"), 10, used=1)
    assert "cb47" not in short(plan(mixed, keep_last=1).goes)
    assert plan(mixed, keep_last=100).goes == ()


def test_a_kernel_whose_name_is_not_known_is_not_the_last_but_one_of_any(cache_root):
    for number in range(3):
        kernel(cache_root, number)
    assert plan(cache_root, keep_last=0).goes == ()


def test_the_last_are_protected_from_whatever_else_is_asked(mixed):
    free, kept = plan(mixed, targets=("sm80",)), plan(mixed, targets=("sm80",), keep_last=1)
    assert set(short(kept.goes)) < set(short(free.goes))
    assert {one.why for one in kept.stays} >= {"among the last 1 of its kernel"}


def test_of_duplicates_the_recorded_or_else_the_last_used_stays(mixed):
    assert plan(mixed, duplicates=True).goes == ()
    for number, used in ((1, 3), (2, 1), (3, 5)):
        kernel(mixed, number, source=the(mixed, "7606"), used=used)
    age(the(mixed, "7606"), 10)  # to copy it was a use
    name = {n: hashlib.sha256(f"kernel {n}".encode()).hexdigest()[:4] for n in (1, 2, 3)}
    made = plan(mixed, duplicates=True)
    assert short(made.goes) == sorted(["7606", name[1], name[3]])
    assert made.goes[0].why == f"same as {hashlib.sha256(b'kernel 2').hexdigest()[:12]}"
    one = dataclasses.replace(RECORD, entry=str(the(mixed, name[3]).relative_to(mixed)))
    record.write(mixed, one)
    assert name[3] not in short(plan(mixed, duplicates=True).goes)
    narrow = plan(mixed, duplicates=True, kernels=("no_such",))
    assert narrow.goes == ()


def test_orphans_are_what_nothing_needs_and_nobody_is_writing(mixed):
    assert plan(mixed, orphans=True).goes == ()
    shutil.rmtree(the(mixed, "7606"))
    shutil.rmtree(the(mixed, "fb5d"))
    staging = mixed / "0.1.15/linux-x86_64/.staging/abc_12_00ff00ff"
    staging.mkdir(parents=True)
    (staging / "params.json").write_text("[")
    stray = record.write(mixed, RECORD)
    made = plan(mixed, orphans=True)
    assert short(made.goes) == sorted(["3996", "56aa", RECORD.action_key[:4]])
    age(staging, 1)
    done = run(mixed, orphans=True)[1]
    assert short(done.gone) == sorted(["3996", "56aa", "abc_", RECORD.action_key[:4]])
    assert not stray.exists() and not staging.exists()
    assert not list(mixed.glob("0.1.14/cuda-binaries/56aa*"))


def test_a_cubin_of_a_compile_that_is_still_running_is_no_orphan(mixed):
    shutil.rmtree(the(mixed, "7606"))
    age(the(mixed, "3996", "cuda-binaries"), 0.02)
    assert plan(mixed, orphans=True).goes == ()


def test_stale_versions_are_all_but_the_installed_one(mixed):
    made = plan(mixed, stale_versions=True)
    versions = {one.candidate.entry.place.tilelang for one in made.goes}
    assert versions == {"0.1.14", "0.1.13", "0.1.11", None}
    kinds = {one.candidate.entry.place.kind for one in made.goes}
    assert kinds == {"kernel", "cuda-binary", "autotuner"}
    run(mixed, stale_versions=True)
    left = candidates.gather(mixed).candidates
    assert {one.entry.place.tilelang for one in left} == {"0.1.15"}


def test_the_newest_version_is_not_stale_where_tilelang_is_not_installed(mixed):
    kernel(mixed, 1, version="0.1.9")
    made = plan(mixed, stale_versions=True, installed=None)
    versions = {one.candidate.entry.place.tilelang for one in made.goes}
    assert versions == {"0.1.14", "0.1.13", "0.1.11", "0.1.9", None}
    kernel(mixed, 2, version="0.1.150")
    made = plan(mixed, stale_versions=True, installed=None)
    assert "0.1.150" not in {one.candidate.entry.place.tilelang for one in made.goes}


def test_a_local_version_is_spelled_as_its_directory(mixed):
    kernel(mixed, 1, version="0.1.15_cu130.git1")
    made = plan(mixed, stale_versions=True, installed="0.1.15+cu130.git1")
    assert {one.candidate.entry.place.tilelang for one in made.goes} == {
        *("0.1.15", "0.1.14", "0.1.13", "0.1.11", None)
    }


def test_where_no_version_is_known_none_is_stale(cache_root, mixed_root):
    key = "1f2e81773da88637f70712502a87b06bf6bb7d07617ceb07706b6fdc46010553"
    shutil.copytree(mixed_root / key, cache_root / key)
    age(cache_root, 3)
    assert plan(cache_root, stale_versions=True, installed=None).goes == ()


def test_roots_below_a_base_are_pruned_each_by_itself(cache_root, mixed_root, tmp_path):
    base = tmp_path / "base"
    for name in ("one", "two"):
        shutil.copytree(mixed_root, base / name)
    age(base, 10)
    stray = record.write(base / "two", RECORD)
    _, done = run(base, targets=("sm80",), orphans=True)
    assert done.gone == ()
    assert stray.exists()  # it is for the CPU
    _, done = run(base, targets=("sm80",))
    assert len(done.gone) == 12
    assert len(evictions.recent(base / "one")) == len(evictions.recent(base / "two")) == 4
    assert not (base / "tlcache").exists()


def test_a_kernel_without_a_record_is_left_alone_while_it_may_get_one(cache_root):
    kernel(cache_root, 1, days=0)
    kernel(cache_root, 2, days=0, filed=True)
    made = plan(cache_root, max_size=0)
    assert short(made.goes) == [hashlib.sha256(b"kernel 2").hexdigest()[:4]]
    assert [one.why for one in made.stays] == ["written just now"]


# --- between the plan and the deletion ---


@pytest.fixture
def planned(cache_root):
    """Three kernels with records, all of them to go."""
    paths = [kernel(cache_root, number, filed=True) for number in range(3)]
    gathered = candidates.gather(cache_root)
    made = prune.make(gathered.candidates, Policy(max_size=0))
    assert len(made.goes) == 3

    def apply():
        return removal.apply(made, gathered.filings, "--max-size 0")

    return cache_root, paths, apply


def why(done):
    return [one.why for one in done.stays]


def test_evictions_are_noted_with_the_policy_and_the_records_key(planned):
    root, paths, apply = planned
    apply()
    noted = evictions.recent(root)
    assert {one.action_key for one in noted} == {
        hashlib.sha256(f"action {n}".encode()).hexdigest() for n in range(3)
    }
    assert {one.key for one in noted} == {path.name for path in paths}
    assert {one.why for one in noted} == {"--max-size 0"}


def test_what_was_used_since_stays(planned):
    root, paths, apply = planned
    os.utime(paths[0] / "kernel_lib.so", (NOW, (paths[0] / "kernel_lib.so").stat().st_mtime))
    record.used(root, hashlib.sha256(b"action 1").hexdigest())
    done = apply()
    assert len(done.gone) == 1 and not paths[2].exists()
    assert paths[0].exists() and paths[1].exists()
    assert all("since it was chosen" in reason for reason in why(done))


def test_to_read_a_record_is_no_use(planned):
    root, _, _ = planned
    for path in (root / "tlcache/records").glob("*/*.json"):
        os.utime(path, (NOW, path.stat().st_mtime))
        path.read_bytes()
    # Setting the times was a change; reading is none.
    gathered = candidates.gather(root)
    made = prune.make(gathered.candidates, Policy(max_size=0))
    for path in (root / "tlcache/records").glob("*/*.json"):
        path.read_bytes()
    assert len(removal.apply(made, gathered.filings, "").gone) == 3


def test_what_got_a_record_since_stays_with_all_its_records(planned):
    root, paths, apply = planned
    path = record.write(root, dataclasses.replace(RECORD, entry=str(paths[0].relative_to(root))))
    done = apply()
    assert why(done) == ["given a record since it was chosen"]
    assert paths[0].exists() and path.exists()
    assert len(list((root / "tlcache/records").glob("*/*.json"))) == 2


def test_what_is_being_compiled_stays(planned):
    root, paths, apply = planned
    with locks.compiling(root, hashlib.sha256(b"action 1").hexdigest()):
        done = apply()
    assert why(done) == ["being compiled"]
    assert paths[1].exists()


def test_a_record_is_not_filed_while_entries_are_taken_away(planned):
    root, _, _ = planned
    with locks.removing(root):
        filed = threading.Event()

        def file():
            with locks.recording(root):
                filed.set()

        thread = threading.Thread(target=file)
        thread.start()
        assert not filed.wait(0.2)
    thread.join()
    assert filed.is_set()
    with locks.recording(root), locks.recording(root):
        pass


def test_a_cubin_stays_if_its_kernel_does(mixed):
    gathered = candidates.gather(mixed)
    made = prune.make(gathered.candidates, Policy(Filter(targets=("sm_100a",))))
    assert short(made.goes) == sorted(["f21e", "8a66"])
    (the(mixed, "f21e") / "more").write_text("x")
    done = removal.apply(made, gathered.filings, "")
    assert why(done) == ["changed since it was chosen", "its kernel stays"]
    assert done.gone == () and the(mixed, "8a66", "cuda-binaries").exists()


def test_a_plan_is_made_once_though_it_is_applied_twice(planned):
    _, _, apply = planned
    assert len(apply().gone) == 3
    assert why(apply()) == ["gone already"] * 3


def _gone(path):
    shutil.rmtree(path)


def _renewed(path):
    data = {file.name: file.read_bytes() for file in path.iterdir()}
    shutil.rmtree(path)
    path.mkdir()
    for name, content in data.items():
        (path / name).write_bytes(content)
    age(path, 10)


def _rewritten(path):
    file = path / "kernel_lib.so"
    times = file.stat()
    file.write_bytes(b"y" * times.st_size)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def _linked(path):
    aside = path.parent.parent.parent.parent.parent / "aside"
    path.rename(aside / path.name)
    path.symlink_to(aside / path.name)


def _file(path):
    shutil.rmtree(path)
    path.write_text("a file")


def _linked_above(path):
    aside = path.parent.parent.parent.parent.parent / "aside"
    shutil.move(path.parent, aside / "kernels")
    path.parent.symlink_to(aside / "kernels")


def _linked_library(path):
    aside = path.parent.parent.parent.parent.parent / "aside"
    shutil.move(path / "kernel_lib.so", aside / "kernel_lib.so")
    (path / "kernel_lib.so").symlink_to(aside / "kernel_lib.so")


def _more(path):
    (path / "inner").mkdir()
    (path / "inner" / "file").write_text("x")


REPLACED = [_gone, _renewed, _rewritten, _linked, _file, _linked_above, _linked_library, _more]


@HYPOTHESIS
@given(st.lists(st.tuples(st.sampled_from(REPLACED), st.integers(0, 2)), max_size=4))
def test_what_took_the_place_of_a_planned_thing_is_not_deleted(
    cache_root, tmp_path_factory, changes
):
    place = tmp_path_factory.mktemp("replaced")
    (place / "aside").mkdir()
    root = place / "cache"
    paths = [kernel(root, number, filed=number == 0) for number in range(3)]
    gathered = candidates.gather(root)
    made = prune.make(gathered.candidates, Policy(max_size=0))
    touched = set()
    for change, number in changes:
        try:
            change(paths[number])
        except OSError:
            continue  # an earlier change has left nothing to change
        touched |= {0, 1, 2} if change is _linked_above else {number}
    before = tree(place)
    done = removal.apply(made, gathered.filings, "")
    expected = {str(paths[n]) for n in range(3) if n not in touched}
    assert {one.candidate.location for one in done.gone} == expected
    after = tree(place)
    for name, data in before.items():
        deleted = any(str(place / name).startswith(path) for path in expected)
        filed = name.startswith("cache/tlcache/records/") and data and 0 not in touched
        if not deleted and not filed and not name.startswith("cache/tlcache/"):
            assert after[name] == data, name
    if 0 in touched:
        assert any(name.startswith("cache/tlcache/records/") and after[name] for name in after)
    shutil.rmtree(place)


def test_an_entry_that_is_replaced_at_the_last_moment_is_put_back(planned, monkeypatch):
    root, paths, apply = planned
    real, replaced = os.rename, []

    def rename(source, target, **kwargs):
        if source == paths[1].name and not replaced:
            replaced.append(source)
            real(paths[1], root / "aside")
            shutil.copytree(root / "aside", paths[1])
        real(source, target, **kwargs)

    monkeypatch.setattr(trash.os, "rename", rename)
    done = apply()
    monkeypatch.undo()
    assert why(done) == ["replaced meanwhile"]
    assert (paths[1] / "kernel_lib.so").exists()
    assert len(list((root / "tlcache/records").glob("*/*.json"))) == 1
    assert not paths[0].exists() and not paths[2].exists()


def test_a_plan_that_names_what_is_outside_of_the_root_deletes_nothing(planned, tmp_path):
    root, _, _ = planned
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    gathered = candidates.gather(root)
    made = prune.make(gathered.candidates, Policy(max_size=0))
    outside = tmp_path / "mine"
    for path in (f"{root}/../mine", str(outside), f"{root}/tlcache", f"{root}/tlcache/records"):
        Path(path).mkdir(exist_ok=True)
        seen = candidates.snapshot(path)
        forged = dataclasses.replace(
            made.goes[0].candidate, files=((path, seen),), seen=seen, records=()
        )
        forged_plan = dataclasses.replace(
            made, goes=(dataclasses.replace(made.goes[0], candidate=forged),)
        )
        removal.apply(forged_plan, gathered.filings, "")
        assert (outside / "file").exists() and (root / "tlcache").is_dir(), path


names = st.one_of(
    st.sampled_from(
        [*("kernels", "cuda-binaries", "autotuner", ".staging", "tlcache", "0.1.15", "0.1.14")]
    ),
    st.sampled_from(["linux-x86_64", "0.1.11-x86_64", "7b" * 32, "a" * 63, "7B" * 32, "tmp"]),
    st.sampled_from(["...", "..x", "-rf", "*", " ", "\n", "a\\b", "trash", "records", "ü"]),
)
things = st.sampled_from(["file", "directory", "link out", "link in", "fifo", "empty"])


@HYPOTHESIS
@given(st.lists(st.tuples(st.lists(names, min_size=1, max_size=5), things), max_size=12))
@example([(["kernels"], "file"), (["tlcache"], "link out")])
@example([(["tlcache", "locks"], "link out")])
def test_whatever_lies_in_a_root_only_what_the_plan_names_is_deleted(
    cache_root, tmp_path_factory, made
):
    place = tmp_path_factory.mktemp("odd")
    outside, root = place / "outside", place / "cache"
    (outside / KERNELS / ("5a" * 32)).mkdir(parents=True)
    (outside / KERNELS / ("5a" * 32) / "kernel_lib.so").write_text("not ours")
    root.mkdir()
    kernel(root, 1)
    for parts, kind in made:
        path = root.joinpath(*parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(path):
                continue  # to write to a pipe would wait
            if kind == "directory":
                path.mkdir()
                (path / "executable.so").write_bytes(b"\x7fELF")
            elif kind.startswith("link"):
                path.symlink_to(outside if kind == "link out" else root)
            elif kind == "fifo":
                os.mkfifo(path)
            else:
                path.write_bytes(b"" if kind == "empty" else b"data")
        except OSError:
            continue
    age(root, 10) if not any(kind.startswith("link") for _, kind in made) else None
    before, everything = tree(outside), set(root.glob("**/*"))
    gathered = candidates.gather(root)
    policy = Policy(max_size=0, orphans=True, stale_versions=True, duplicates=True)
    plan_ = prune.make(gathered.candidates, policy, installed="0.1.15")
    try:
        removal.apply(plan_, gathered.filings, "", roots=tuple(gathered.filings))
    except CacheRootError:
        pass  # something lies where tlcache keeps its locks
    assert tree(outside) == before
    named = [path for one in plan_.goes for path, _ in one.candidate.files]
    for path in everything:
        inside = any(f"{path}/".startswith(f"{one}/") for one in named)
        own = str(path).startswith(f"{root}/tlcache/trash")
        if not inside and not own:
            assert os.path.lexists(path), path
    shutil.rmtree(place)


def test_what_a_killed_prune_left_in_the_trash_goes_with_the_next(planned):
    root, paths, apply = planned
    left = trash.move(root, paths[0], trash.TRASH)
    assert os.path.exists(left)
    done = apply()
    assert done.leftovers[0] == 2 and not os.path.exists(left)
    assert len(done.gone) == 2 and why(done) == ["gone already"]


def test_what_is_loaded_after_the_plan_stays(planned):
    _, paths, apply = planned
    hold = "import mmap,sys; f=open(sys.argv[1],'rb'); m=mmap.mmap(f.fileno(),0,prot=1)\n"
    hold += "print(1,flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", hold, str(paths[1] / "kernel_lib.so")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    process.stdout.readline()
    done = apply()
    process.communicate()
    assert [reason.split(" (")[0] for reason in why(done)] == [f"loaded by pid {process.pid}"]
    assert paths[1].exists() and len(done.gone) == 2


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 4 MiB, where a directory takes a block of its own."""
    image, place = tmp_path / "image", tmp_path / "disk"
    image.write_bytes(bytes(4 * 2**20))
    place.mkdir()
    try:
        subprocess.run(["mkfs.ext4", "-qF", "-m", "0", image], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, place], check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("filed", [True, False])
def test_a_disk_without_a_free_block_is_pruned(cache_root, small_disk, filed):
    root = small_disk / "cache"
    for number in range(6):
        kernel(root, number, filed=filed)
    kept = kernel(root, 7, used=1)
    for size in (65536, 512):
        try:
            with open(small_disk / f"filler{size}", "wb", 0) as file:
                while True:
                    file.write(b"x" * size)
        except OSError:
            pass
    with pytest.raises(OSError, match="No space left"):
        (root / "directory").mkdir()
    made, done = run(root, unused_for=timedelta(days=5))
    assert len(done.gone) == len(made.goes) == 6 and done.stays == ()
    assert [one.location for one in candidates.gather(root).candidates] == [str(kept)]
    assert not list(root.glob("tlcache/records/*/*.json"))


def test_a_root_that_cannot_be_written_is_an_error(mounted):
    root = mounted("size=1m") / "cache"
    kernel(root, 1)
    gathered = candidates.gather(root)
    made = prune.make(gathered.candidates, Policy(max_size=0))
    subprocess.run(["mount", "-o", "remount,ro", root.parent], check=True)
    with pytest.raises(CacheRootError, match="cannot be written"):
        removal.apply(made, gathered.filings, "")


def test_candidates_that_are_kept_are_looked_at_again_only_where_they_changed(cache_root):
    for number in range(4):
        kernel(cache_root, number, filed=True)
    filings = {}
    entries = list(scan.scan(cache_root, filings))
    first = candidates.among(str(cache_root), entries, filings).candidates
    known = {one.location: one for one in first}
    record.write(
        cache_root,
        dataclasses.replace(record.read(cache_root, _key(0)), action_key="f0" * 32),
    )
    filings[str(cache_root)].refresh()
    entries[1] = dataclasses.replace(entries[1])
    again = candidates.among(str(cache_root), entries, filings, known).candidates
    same = [one is known[one.location] for one in again]
    assert sorted(same) == [False, False, True, True]
    assert [one.location for one in first] == [one.location for one in again]
    assert max(len(one.records) for one in again) == 2


def _key(number):
    return hashlib.sha256(f"action {number}".encode()).hexdigest()


def test_how_long_a_kernel_is_left_to_who_may_be_filing_its_record_can_be_chosen(cache_root):
    kernel(cache_root, 1, days=0)
    found = candidates.gather(cache_root).candidates
    assert not prune.make(found, Policy(max_size=1)).goes
    assert prune.make(found, Policy(max_size=1), publishing=timedelta(0)).goes
