"""Export and import from end to end: the same bytes for the same files, what lands, what stays, and
what a kill leaves.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import zstandard

from tests.store.archive.conftest import CALLS, COMPILED, STYLE, TEXT
from tlcache.errors import ArchiveError, CacheRootError, MissError, UntrustedRootError, UsageError
from tlcache.store import calls, layout, locks, record, scan, schedules, verify
from tlcache.store.answers import Warmed
from tlcache.store.archive import choosing, incoming, publishing, reading, receiving, sending
from tlcache.store.select import Filter


def sent(choice, path: Path):
    sending.send(choice, str(path))
    return path


def test_an_import_gives_the_files_that_were_exported(taken, archive, source, cache_root, files):
    imported = taken(archive)
    assert files(cache_root) == files(source)
    assert imported.published.new["kernel"] == sum(1 for _ in layout.entries(source))
    assert imported.published.new["record"] == sum(1 for _ in layout.records(source))
    assert not imported.published.left
    assert not (cache_root / "tlcache" / incoming.NAME).exists()


def test_a_root_that_was_imported_is_sound(taken, archive, cache_root):
    taken(archive)
    assert {found.severity for found in verify.plan(cache_root)} <= {"note"}


def test_the_same_files_give_the_same_bytes_wherever_they_lie(source, tmp_path, archive):
    other = tmp_path / "elsewhere" / "copy"
    shutil.copytree(source, other)
    for path in other.rglob("*"):
        os.utime(path, (5, 5))
        path.chmod(0o755)
    assert (
        sent(choosing.everything(str(other)), tmp_path / "b").read_bytes() == archive.read_bytes()
    )


def test_an_imported_root_packs_to_the_same_bytes(taken, archive, cache_root, tmp_path):
    taken(archive)
    again = sent(choosing.everything(str(cache_root)), tmp_path / "again.tar.zst")
    assert again.read_bytes() == archive.read_bytes()


def test_any_tar_program_unpacks_an_archive(archive, source, tmp_path, files):
    place = tmp_path / "plain"
    place.mkdir()
    with archive.open("rb") as file:
        plain = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    subprocess.run(["tar", "-x", "-C", place], input=plain, check=True)
    found = files(place)
    index = json.loads(found.pop("index.json"))
    assert found == files(source)
    assert list(index["files"]) == [*dict.fromkeys(index["files"])]
    assert set(index["files"]) == set(found)


def test_the_index_tells_who_built_it_and_what_it_covers(archive):
    with archive.open("rb") as file:
        index = reading.read_index("x", file)
    assert set(index.builder) == {"tlcache", "platform", "tilelang", "tvm_ffi", "glibc"}
    assert index.coverage["targets"] == {"sm_90a": len(index.records)}
    assert index.coverage["kernels"] > len(index.records)


def test_a_filter_takes_kernels_with_their_cuda_binaries_records_and_schedules(source, tmp_path):
    path = sent(choosing.by_filter(str(source), Filter(tilelang="0.1.15")), tmp_path / "some")
    with path.open("rb") as file:
        index = reading.read_index("x", file)
    assert {path.split("/")[0] for path in index.files} == {"0.1.15", "tlcache"}
    kinds = {thing.place.kind for thing in index.things.values()}
    assert {"kernel", "cuda-binary"} <= kinds
    assert any(name.startswith("tlcache/schedules/") for name in index.files)


def test_keys_take_the_kernels_of_their_records_alone(source, tmp_path):
    key = next(layout.records(source)).stem
    path = sent(choosing.by_keys(str(source), [key]), tmp_path / "one")
    with path.open("rb") as file:
        index = reading.read_index("x", file)
    assert set(index.records) == {key}
    assert index.coverage["asked"] == 1
    assert sum(thing.place.kind == "kernel" for thing in index.things.values()) == 1


def test_a_key_that_is_not_there_is_a_miss(source):
    with pytest.raises(MissError, match="the kernel cdcdcdcdcdcd is not in"):
        choosing.by_keys(str(source), ["cd" * 32])


def test_what_is_damaged_is_left_out_and_said(source, tmp_path, taken, cache_root):
    place = next(p for p in layout.entries(source) if p.tilelang == "0.1.15")
    (place.path / "params.json").write_text("{}")
    written = sending.send(choosing.everything(str(source)), str(tmp_path / "a.tar.zst"))
    below = os.path.relpath(place.location, source)
    assert written.left == ((below, "has another params.json than its manifest.json lists"),)
    taken(tmp_path / "a.tar.zst")
    assert not (cache_root / below).exists()
    assert {found.severity for found in verify.plan(cache_root)} <= {"note"}


def test_a_link_in_an_entry_is_not_followed(source, tmp_path):
    filed = record.read(source, next(layout.records(source)).stem)
    library = source / filed.entry / filed.library.name
    library.rename(tmp_path / "library")
    library.symlink_to(tmp_path / "library")
    written = sending.send(choosing.everything(str(source)), str(tmp_path / "a.tar.zst"))
    assert written.left[0][1] == "has no library"


def test_what_is_there_already_stays(taken, archive, cache_root, source, tree):
    shutil.copytree(source, cache_root)
    before = tree(cache_root)
    stamps = {path: path.stat().st_ino for path in cache_root.rglob("*") if path.is_file()}
    imported = taken(archive)
    assert imported.published.new == {}
    after = {name: data for name, data in tree(cache_root).items() if "locks" not in name}
    assert {name: data for name, data in after.items() if ".staging" not in name} == before
    assert all(path.stat().st_ino == inode for path, inode in stamps.items())


def test_two_archives_gathered_are_one_of_both(source, tmp_path, taken, cache_root, files):
    keys = sorted(path.stem for path in layout.records(source))
    halves = []
    for number in range(2):
        path = tmp_path / f"shard-{number}.tar.zst"
        halves.append(sent(choosing.by_keys(str(source), keys[number::2]), path))
    taken(*halves)
    assert sorted(path.stem for path in layout.records(cache_root)) == keys
    for key in keys:
        filed = record.read(cache_root, key)
        assert filed is not None
        assert record.sound_library(cache_root, filed) is not None
    assert {found.severity for found in verify.plan(cache_root)} <= {"note"}


def recompiled(root: Path, filed: record.Located) -> None:
    """Another compile of a kernel: the same code, of other bytes."""
    library = root / filed.entry / filed.library.name
    library.write_bytes(library.read_bytes() + b"another temporary path")
    manifest = root / filed.entry / "manifest.json"
    if manifest.exists():
        import hashlib

        document = json.loads(manifest.read_text())
        data = library.read_bytes()
        told = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        document["files"][library.name] = told
        manifest.write_text(json.dumps(document))


def test_a_record_comes_to_tell_of_the_library_that_somebody_else_compiled_before(
    taken, archive, source, cache_root
):
    shutil.copytree(source, cache_root)
    key = next(layout.records(source)).stem
    recompiled(cache_root, record.read(source, key))
    (cache_root / os.path.relpath(layout.record_path(source, key), source)).unlink()
    imported = taken(archive)
    assert imported.published.new == {"record": 1}
    filed, before = record.read(cache_root, key), record.read(source, key)
    assert record.sound_library(cache_root, filed) is not None
    assert replace(filed, library=before.library) == before


def test_a_record_that_does_not_hold_any_more_is_replaced(taken, archive, source, cache_root):
    shutil.copytree(source, cache_root)
    key = next(layout.records(source)).stem
    filed = record.read(cache_root, key)
    shutil.rmtree(cache_root / filed.entry)
    record.write(cache_root, replace(filed, library=filed.library._replace(sha256="00" * 32)))
    assert taken(archive).published.new == {"kernel": 1, "record": 1}
    assert record.read(cache_root, key) == record.read(source, key)


def test_a_record_is_not_filed_for_an_entry_that_is_damaged_there(
    taken, archive, source, cache_root
):
    shutil.copytree(source, cache_root)
    key = next(layout.records(source)).stem
    filed = record.read(cache_root, key)
    (cache_root / filed.entry / filed.library.name).write_bytes(b"broken")
    path = Path(layout.record_path(cache_root, key))
    path.unlink()
    imported = taken(archive)
    assert list(imported.published.left) == [str(path.relative_to(cache_root))]
    assert not path.exists()


def test_what_was_imported_does_not_look_used(taken, archive, cache_root, forgery):
    taken(archive)
    compiled = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
    recorded = [one for one in scan.kernels(cache_root) if one.record is not None]
    assert recorded
    now = datetime.now(timezone.utc)
    for one in recorded:
        assert one.last_used == compiled
        assert now - one.created < timedelta(minutes=5)
    # Nor is it old: to have come today is to be written today.
    assert not list(Filter(unused_for=timedelta(days=14)).select(recorded))


def test_use_after_an_import_is_seen(taken, archive, cache_root):
    taken(archive)
    key = next(layout.records(cache_root)).stem
    record.used(cache_root, key)
    one = next(
        one for one in scan.kernels(cache_root) if one.record and one.record.action_key == key
    )
    assert datetime.now(timezone.utc) - one.last_used < timedelta(minutes=5)


def test_a_root_is_made_where_there_is_none(taken, archive, cache_root):
    assert not cache_root.exists()
    taken(archive)
    for name in ("kernels", ".staging"):
        assert (cache_root / "0.1.15" / "linux-x86_64" / name).is_dir()


def test_a_refused_archive_makes_no_root(taken, tmp_path, cache_root):
    (tmp_path / "none.tar.zst").write_bytes(b"nothing")
    with pytest.raises(ArchiveError):
        taken(tmp_path / "none.tar.zst")
    assert not cache_root.exists()


def test_one_refused_archive_of_several_leaves_the_root_as_it_was(
    taken, archive, tmp_path, cache_root
):
    cut = tmp_path / "cut.tar.zst"
    cut.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(ArchiveError, match=r"cut\.tar\.zst is refused: it ends in the middle"):
        taken(archive, cut)
    assert not cache_root.exists()


def test_a_root_that_others_can_write_is_refused(taken, archive, cache_root):
    cache_root.mkdir()
    cache_root.chmod(0o777)
    with pytest.raises(UntrustedRootError):
        taken(archive)
    assert list(cache_root.iterdir()) == []


def test_a_link_where_the_staging_should_be_is_not_followed(taken, archive, cache_root, tmp_path):
    (tmp_path / "outside").mkdir()
    (cache_root / "tlcache").mkdir(parents=True)
    (cache_root / "tlcache" / incoming.NAME).symlink_to(tmp_path / "outside")
    with pytest.raises(CacheRootError, match="is a link"):
        taken(archive)
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_digest_is_compared_before_anything_is_read(taken, archive, tmp_path, cache_root):
    import hashlib

    right = hashlib.sha256(archive.read_bytes()).hexdigest()
    with pytest.raises(ArchiveError, match=f"its digest is sha256:{right}, not sha256:00"):
        taken(archive, verification=receiving.Verification(sha256="00" * 32))
    assert not cache_root.exists()
    imported = taken(archive, verification=receiving.Verification(sha256=right))
    assert imported.archives[0].sha256 == right


@pytest.mark.parametrize("text", ["", "sha256:", "md5:" + "0" * 64, "0" * 63, "g" * 64])
def test_what_is_no_digest_is_wrong_usage(text):
    with pytest.raises(UsageError, match="is no digest"):
        receiving.digest_of(text)


def test_a_full_disk_is_said_and_leaves_nothing(archive, mounted):
    root = mounted("size=1m,mode=755")
    with pytest.raises(CacheRootError, match="bytes free, and the archive unpacks to"):
        receiving.receive(str(root), [str(archive)])
    assert list(root.iterdir()) == []


IMPORT = """
import os, signal, sys
from tlcache.store.archive import publishing, receiving, sending

left = int(sys.argv[3])
def dies(call):
    def wrapped(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return wrapped

os.rename, os.replace, os.mkdir = dies(os.rename), dies(os.replace), dies(os.mkdir)
receiving.receive(sys.argv[1], [sys.argv[2]])
print("done")
"""


def answer_in(root: Path, key: str) -> calls.Answer | None:
    """A call's answer in a root; None where there is none."""
    path = Path(calls.path_of(root, key))
    if not path.exists():
        return None
    found = calls.told("calls", path.name, path.read_bytes())
    assert isinstance(found, calls.Answer)
    return found


def killed(root: Path, archive: Path, after: int) -> bool:
    """Import, and be killed at the so-many-th rename or mkdir; False where that did not come."""
    command = [sys.executable, "-c", IMPORT, str(root), str(archive), str(after)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL or done.stdout == "done\n", done.stderr
    return done.returncode == -signal.SIGKILL


def test_a_kill_at_any_point_leaves_a_root_that_is_whole_and_that_the_next_import_finishes(
    archive, source, cache_root, files
):
    after, deaths = 0, 0
    while killed(cache_root, archive, after):
        deaths += 1
        found = list(verify.plan(cache_root)) if cache_root.exists() else []
        faults = [one for one in found if one.severity != "note"]
        assert {one.kind for one in faults} <= {"stale"}, faults
        for path in layout.records(cache_root):
            filed = record.read(cache_root, path.stem)
            assert filed is not None
            assert record.sound_library(cache_root, filed) is not None
        for key in CALLS:
            answer = answer_in(cache_root, key)
            assert answer is None or record.sound_library(cache_root, answer) is not None
        after += 9
    assert deaths > 5
    assert files(cache_root) == files(source)
    assert {found.severity for found in verify.plan(cache_root)} <= {"note"}


def test_verify_puts_what_a_killed_import_left_into_quarantine(archive, cache_root):
    assert killed(cache_root, archive, 12)
    (found,) = [one for one in verify.plan(cache_root) if one.severity == "warning"]
    assert "left behind by an import that was killed" in found.what
    assert verify.repair(found, "quarantine/20260101-000000-00000000")
    assert list(incoming.left_behind(str(cache_root))) == []


def test_an_import_that_is_at_work_is_not_taken_for_a_killed_one(cache_root):
    with incoming.batch(str(cache_root)) as first:
        assert list(incoming.left_behind(str(cache_root))) == []
        with incoming.batch(str(cache_root)) as second:
            assert os.path.isdir(first) and os.path.isdir(second)
        assert os.path.isdir(first)
        assert not [one for one in verify.plan(cache_root) if one.severity != "note"]


def test_imports_at_the_same_time_give_what_one_gives(archive, source, cache_root, files):
    command = [sys.executable, "-c", IMPORT, str(cache_root), str(archive), "100000"]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(4)]
    for one in running:
        assert one.wait() == 0, one.stderr.read()
        one.stderr.close()
    assert files(cache_root) == files(source)
    assert {found.severity for found in verify.plan(cache_root)} <= {"note"}


def test_nothing_is_published_while_entries_are_taken_away(archive, cache_root):
    """A prune holds `records.lock` alone; an import waits for it."""
    command = [sys.executable, "-c", IMPORT, str(cache_root), str(archive), "100000"]
    with locks.removing(cache_root):
        running = subprocess.Popen(command)
        path = cache_root / "tlcache" / incoming.NAME
        while not any(path.glob("*/0/0.1.15/linux-x86_64/kernels/*")):
            assert running.poll() is None
        assert not list(layout.records(cache_root))
        assert not list(layout.entries(cache_root))
    assert running.wait() == 0
    assert list(layout.records(cache_root))


def test_the_schedule_that_is_there_stays(taken, archive, source, cache_root):
    (path,) = (source / "tlcache" / "schedules").rglob("*.json")
    tuned = schedules.Tuned.from_json(json.loads(path.read_text()))
    mine = replace(tuned, microseconds=0.5)
    schedules.write(cache_root, mine)
    assert taken(archive).published.there["schedule"] == 1
    assert schedules.find(cache_root, tuned.spec) == mine


def own(index) -> list[str]:
    return [path for path in index.own if path.split("/")[1] in ("calls", "texts")]


def test_the_calls_of_the_kernels_that_go_go_along_and_what_else_calls_need(source, tmp_path):
    choice = choosing.by_filter(str(source), Filter(tilelang="0.1.14"))
    path = sent(choice, tmp_path / "some.tar.zst")
    with path.open("rb") as file:
        index = reading.read_index("some", file)
    style, text = calls.path_of("", STYLE), calls.path_of("", TEXT, "texts")
    assert own(index) == [style, calls.path_of("", CALLS[1]), text]
    assert not index.records
    document = json.loads(index.encode())
    assert document["schema"] == 2
    assert document["coverage"]["records"] == 0


def test_where_no_call_goes_nothing_of_calls_does_and_an_older_tlcache_reads_it(source, tmp_path):
    for key in CALLS:
        os.unlink(calls.path_of(source, key))
    path = tmp_path / "none.tar.zst"
    written = sending.send(choosing.everything(str(source)), str(path))
    assert (written.calls, own(written.index)) == (0, [])
    assert json.loads(written.index.encode())["schema"] == 1


def test_a_root_without_calls_packs_as_ever_and_is_taken(plain, tmp_path, taken, cache_root, files):
    path = sent(choosing.everything(str(plain)), tmp_path / "plain.tar.zst")
    taken(path)
    assert files(cache_root) == files(plain)


@pytest.mark.parametrize("harm", ["bit", "key", "library", "kind", "link"])
def test_calls_that_are_damaged_or_of_another_library_stay_behind(
    source, tmp_path, taken, cache_root, harm
):
    path = Path(calls.path_of(source, CALLS[0]))
    answer = answer_in(source, CALLS[0])
    if harm == "bit":
        path.write_bytes(path.read_bytes().replace(b"add n=8", b"add n=9"))
    elif harm == "key":
        moved = Path(calls.path_of(source, CALLS[0][:-1] + "0"))
        path.rename(moved)
    elif harm == "library":
        other = answer.library._replace(sha256="00" * 32)
        calls.write_answer(str(source), CALLS[0], answer._replace(library=other))
    elif harm == "kind":
        binary = next(p for p in layout.places_in(str(source)) if p.kind == "cuda-binary")
        entry = os.path.relpath(os.path.dirname(binary.location), source)
        name = os.path.basename(binary.location)
        library = record.library_at(os.path.dirname(binary.location), name)
        calls.write_answer(str(source), CALLS[0], answer._replace(entry=entry, library=library))
    else:
        path.rename(tmp_path / "away.json")
        path.symlink_to(tmp_path / "away.json")
    text = Path(calls.path_of(source, TEXT, "texts"))
    text.write_bytes(text.read_bytes()[:-9])
    archive = tmp_path / "sound.tar.zst"
    written = sending.send(choosing.everything(str(source)), str(archive))
    assert written.calls == 1
    assert own(written.index) == [calls.path_of("", STYLE), calls.path_of("", CALLS[1])]
    taken(archive)
    assert {found.severity for found in verify.plan(cache_root)} <= {"note"}


def test_what_calls_need_besides_is_bounded_and_the_rest_is_said(source, tmp_path, monkeypatch):
    for number in range(20):
        calls.write_texts(str(source), f"{number:064x}", {"x": "x" * 1000})
    monkeypatch.setattr("tlcache.store.archive.filed.MOST_BESIDE", 10_000)
    first = tmp_path / "first.tar.zst"
    written = sending.send(choosing.everything(str(source)), str(first))
    sizes = [written.index.files[path].size for path in own(written.index)]
    answers = [written.index.files[calls.path_of("", key)].size for key in CALLS]
    assert 8_000 < sum(sizes) - sum(answers) <= 10_000
    ((path, why),) = written.left
    assert path == "tlcache/texts"
    assert why.endswith("more files than the 10,000 bytes that go along")
    receiving.receive(str(tmp_path / "root"), [str(first)])
    again = sent(choosing.everything(str(tmp_path / "root")), tmp_path / "again.tar.zst")
    assert again.read_bytes() == first.read_bytes()


def test_an_import_tells_what_came_and_what_was_there(taken, archive, source, cache_root):
    there = "call", "style", "text"
    published = taken(archive).published
    assert [published.new[kind] for kind in there] == [2, 1, 1]
    os.unlink(calls.path_of(cache_root, CALLS[0]))
    published = taken(archive).published
    assert [published.new.get(kind, 0) for kind in there] == [1, 0, 0]
    assert [published.there[kind] for kind in there] == [1, 1, 1]


def test_a_call_that_is_there_stays_while_its_kernel_does(taken, archive, source, cache_root):
    taken(archive)
    mine = answer_in(cache_root, CALLS[0])._replace(title="mine", compile_seconds=9.0)
    calls.write_answer(str(cache_root), CALLS[0], mine)
    calls.write_style(str(cache_root), STYLE, calls.Style("eager", (), {}))
    kept = Path(calls.path_of(cache_root, STYLE)).read_bytes()
    taken(archive)
    assert answer_in(cache_root, CALLS[0]) == mine
    assert Path(calls.path_of(cache_root, STYLE)).read_bytes() == kept
    gone = mine.library._replace(sha256="00" * 32)
    calls.write_answer(str(cache_root), CALLS[0], mine._replace(library=gone))
    taken(archive)
    assert answer_in(cache_root, CALLS[0]) == answer_in(source, CALLS[0])
    Path(calls.path_of(cache_root, CALLS[0])).write_bytes(b"{}")
    taken(archive)
    assert answer_in(cache_root, CALLS[0]) == answer_in(source, CALLS[0])


def test_a_call_comes_to_tell_of_the_library_that_somebody_else_compiled_before(
    taken, archive, source, cache_root
):
    """The same kernel under the same key of TileLang's, compiled to other bytes."""
    theirs = answer_in(source, CALLS[0])
    shutil.copytree(source / theirs.entry, cache_root / theirs.entry)
    recompiled(cache_root, theirs)
    assert not taken(archive).published.left
    answer = answer_in(cache_root, CALLS[0])
    assert record.sound_library(cache_root, answer) is not None
    assert answer != theirs
    assert answer._replace(library=theirs.library) == theirs
    assert {found.severity for found in verify.plan(cache_root)} <= {"note"}


def test_a_call_is_not_filed_for_a_kernel_that_is_damaged_there(taken, archive, source, cache_root):
    entry = answer_in(source, CALLS[0]).entry
    shutil.copytree(source / entry, cache_root / entry)
    library = answer_in(source, CALLS[0]).library.name
    (cache_root / entry / library).write_bytes(b"damaged")
    left = taken(archive).published.left
    assert left[calls.path_of("", CALLS[0])].endswith("is another there, and is not sound")
    assert answer_in(cache_root, CALLS[0]) is None


def test_a_call_that_was_imported_is_no_use_of_its_kernel(taken, archive, cache_root):
    taken(archive)
    used = calls.uses(cache_root)
    assert set(used.values()) == {datetime.fromisoformat(COMPILED).timestamp()}


def test_an_order_of_publishing_is_known_for_every_kind():
    assert set(publishing._ORDER) == {"kernel", "cuda-binary", "autotuner"}


def test_what_a_warm_came_to_goes_with_its_kernel_and_tells_of_the_library_that_is_there(
    taken, source, tmp_path, cache_root
):
    answer, key = answer_in(source, CALLS[0]), "a0" * 32
    warmed = Warmed(answer.entry, answer.library, CALLS[0], None, 2.0)
    calls.write_warmed(str(source), key, warmed)
    path = sent(choosing.everything(str(source)), tmp_path / "warmed.tar.zst")
    assert taken(path).published.new["warmed"] == 1
    assert calls.read_warmed(str(cache_root), key) == warmed
    os.unlink(calls.path_of(cache_root, key))
    assert taken(path).published.new["warmed"] == 1
    assert taken(path).published.there["warmed"] == 1
    other = sent(choosing.by_filter(str(source), Filter(tilelang="0.1.14")), tmp_path / "other")
    with other.open("rb") as file:
        assert calls.path_of("", key) not in own(reading.read_index("other", file))
