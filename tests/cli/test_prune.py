"""`tlcache prune`: whole commands, against running warms, prunes and TileLang processes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest

from tlcache.cli import prune as command
from tlcache.errors import EnvironmentFault
from tlcache.store import evictions, layout, mapped, record

TLCACHE = [sys.executable, "-c", "from tlcache.cli import main; main()"]

# Two kernels with records, by the runtime, and two without, by TileLang alone; run again, it tells
# where each came from.
MAKE = """
import sys
import tilelang
import tilelang.language as T
from tlcache import operators, runtime, targets
from tilelang.cache.kernel_cache import KernelCache

loaded = []
real = KernelCache._load_kernel_from_disk
def load(self, key, *args, **kwargs):
    kernel = real(self, key, *args, **kwargs)
    loaded.append([key, kernel is not None])
    return kernel
KernelCache._load_kernel_from_disk = load

for values in {"M": 128, "N": 64, "dtype": "float32"}, {"M": 16, "N": 100, "dtype": "bfloat16"}:
    runtime.resolve(operators.get("rms_norm").spec(values, targets.CPU))


@tilelang.jit(out_idx=[1], target={"kind": "c"}, execution_backend="cython")
def scale(N):
    @T.prim_func
    def scale(x: T.Tensor((N, 8), "float32"), y: T.Tensor((N, 8), "float32")):
        with T.Kernel(1):
            for i in T.serial(N):
                for j in T.serial(8):
                    y[i, j] = x[i, j] * 2.0

    return scale


scale(32)
scale(48)
if len(sys.argv) > 1:
    import json
    counters = runtime.counters()
    told = {"tilelang": loaded, "restored": counters.restored, "disk": counters.disk,
            "compiled": counters.compiled}
    print("RESULT " + json.dumps(told), flush=True)
    if sys.argv[1] == "hold":
        sys.stdin.read()
"""


@pytest.fixture
def settled(root):
    """The root, an hour old."""
    for path in root.glob("**/*"):
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    return root


def keys(root):
    return {place.key for place in layout.entries(root)}


def result(text):
    return json.loads(text.partition("RESULT ")[2])


def test_without_a_choice_it_is_an_error_and_nothing_goes(tlcache, settled):
    before = keys(settled)
    ran = tlcache("prune", "--yes")
    assert ran.code == 2 and ran.out == ""
    assert ran.err.startswith("error: nothing says what to prune\n\nhint: `tlcache prune ")
    assert keys(settled) == before


def test_without_a_terminal_it_needs_to_be_told_yes(tlcache, settled):
    before = keys(settled)
    ran = tlcache("prune", "--target", "cpu")
    assert ran.code == 2
    assert "there is no terminal to ask on\n\nhint: add `--yes`" in ran.err
    assert keys(settled) == before


def test_a_dry_run_shows_what_would_go_and_deletes_nothing(tlcache, settled):
    before = sorted(settled.glob("**/*"))
    ran = tlcache("prune", "--target", "cpu", "--dry-run")
    assert ran.code == 0, ran.err
    header, *rows, total = ran.out.splitlines()
    assert header.split("\t") == [
        *("KEY", "KIND", "KERNEL", "TARGET", "TILELANG", "SIZE", "USED", "WHY")
    ]
    assert {row.split("\t")[0] for row in rows} == {key[:12] for key in keys(settled)}
    assert total.startswith("4 kernels, with 2 records would go: ") and total.endswith("KiB")
    assert sorted(settled.glob("**/*")) == before


def test_json_of_a_dry_run_and_of_the_deletion_agree(tlcache, settled):
    dry = tlcache("prune", "--kernel", "rms_*", "--dry-run", "--json").json
    ran = tlcache("prune", "--kernel", "rms_*", "--yes", "--json")
    assert ran.code == 0
    done = ran.json
    assert list(done)[:4] == ["schema", "root", "dry_run", "deleted"]
    assert dry["dry_run"] and not done["dry_run"]
    assert done["deleted"] == dry["would_delete"] and done["bytes"] == dry["bytes"] > 0
    assert {one["kernel"] for one in done["deleted"]} == {"rms_norm"}
    assert all(len(one["records"]) == 1 and one["pids"] == [] for one in done["deleted"])
    assert done["kept"] == [] and len(keys(settled)) == 2
    assert list(layout.records(settled)) == []


def test_what_is_not_there_is_no_error(tlcache, settled, cache_root):
    ran = tlcache("prune", "--target", "sm80", "--yes")
    assert ran.code == 0 and ran.out == f"nothing to delete in {cache_root}\n"
    ran = tlcache("prune", "--target", "sm80", "--yes", "--cache-dir", cache_root / "none")
    assert ran.code == 0 and not (cache_root / "none").exists()


@pytest.mark.parametrize("answer, code", [("y", 0), ("n", 1), ("", 1)])
def test_on_a_terminal_it_shows_the_plan_and_asks(settled, answer, code):
    child = pexpect.spawn(
        TLCACHE[0], [*TLCACHE[1:], "prune", "--target", "cpu"], encoding="utf-8", timeout=30
    )
    child.expect(r"4 kernels, with 2 records: \d+ KiB")
    child.expect(r"Delete 4 kernels\? \[y/N\]")
    child.sendline(answer)
    child.expect("deleted 4 kernels" if code == 0 else "nothing was deleted")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == code
    assert len(keys(settled)) == (0 if code == 0 else 4)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--max-size", "much"], "'much' is no size"),
        (["--older-than", "long"], "'long' is no time span"),
        (["--target", "sm_eighty"], "unknown target"),
        (["--keep-last", "-1"], "Invalid value"),
    ],
)
def test_what_cannot_be_understood_deletes_nothing(tlcache, settled, words, message):
    ran = tlcache("prune", *words, "--yes")
    assert (ran.code, len(keys(settled))) == (2, 4) and message in ran.err


def test_a_network_file_system_needs_offline(settled, monkeypatch):
    monkeypatch.setattr(mapped, "network", lambda path: "nfs4")
    with pytest.raises(EnvironmentFault, match=r"network file system \(nfs4\)"):
        command._check(settled, True, False)
    command._check(settled, True, True)


def test_evictions_are_noted_with_the_command_that_chose(tlcache, settled):
    tlcache("prune", "--target", "cpu", "--keep-last", "1", "--op", "rms_norm", "--yes")
    (one,) = evictions.recent(settled)
    assert one.why == "--target cpu --op rms_norm --keep-last 1" and one.by == "prune"
    assert one.action_key is not None and one.kernel == "rms_norm"


def test_tilelang_and_tlcache_hit_all_that_was_meant_to_stay(tlcache, run, settled, tmp_path):
    before = {place.key for place in layout.entries(settled)}
    (path, gone) = sorted(layout.records(settled))
    kept = record.parse(path.read_bytes(), path)
    gone = record.parse(gone.read_bytes(), gone)
    place = settled / gone.entry
    for file in (*place.iterdir(), place):
        os.utime(file, (1e9, 1e9))
    os.utime(
        settled / "tlcache/records" / gone.action_key[:2] / f"{gone.action_key}.json", (1e9,) * 2
    )
    ran = tlcache("prune", "--unused-for", "400d", "--yes")
    assert ran.out.startswith("deleted 1 kernel, with 1 record: "), ran
    assert before - keys(settled) == {place.name}
    assert [one.name for one in layout.records(settled)] == [f"{kept.action_key}.json"]
    program, started = tmp_path / "again.py", time.time()  # TileLang wants to read the source
    program.write_text(MAKE)
    told = result(run([sys.executable, program, "tell"]).out)
    assert told["restored"] == 1 and told["compiled"] == 1
    assert path.stat().st_mtime > started - 1, "a restore is a use, and is noted"
    hits = {key for key, hit in told["tilelang"] if hit}
    assert hits == before - {place.name, Path(kept.entry).name}
    assert keys(settled) == before


def test_what_a_process_has_loaded_is_skipped_and_the_process_named(tlcache, settled, tmp_path):
    program = tmp_path / "serve.py"
    program.write_text(MAKE)
    process = subprocess.Popen(
        [sys.executable, program, "hold"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        while "RESULT" not in process.stdout.readline():
            pass
        ran = tlcache("prune", "--target", "cpu", "--yes")
        told = f"4 kept: loaded by pid {process.pid} ({Path(sys.executable).name} {program}"
        assert told[:70] in ran.err, ran.err
        assert ran.out == f"nothing to delete in {settled}\n" and len(keys(settled)) == 4
        told = tlcache("prune", "--max-size", "0", "--dry-run", "--json").json
        assert [one["pids"] for one in told["kept"]] == [[process.pid]] * 4
        assert told["over"] > 0
    finally:
        process.communicate()
    assert tlcache("prune", "--max-size", "0", "--yes").code == 0
    assert keys(settled) == set()


# --- at once with others ---


def many(root, count):
    """Copies of the real entries under other keys, half of them with records."""
    real = [place.path for place in layout.entries(root)]
    filed = {}
    for path in layout.records(root):
        one = record.parse(path.read_bytes(), path)
        filed[one.entry] = one
    for number in range(count):
        source = real[number % len(real)]
        key = hashlib.sha256(f"copy {number}".encode()).hexdigest()
        shutil.copytree(source, source.with_name(key))
        one = filed.get(str(source.relative_to(root)))
        if one is not None:
            action = hashlib.sha256(f"action {number}".encode()).hexdigest()
            entry = str(Path(one.entry).with_name(key))
            record.write(root, dataclasses.replace(one, action_key=action, entry=entry))
    for path in root.glob("**/kernels/*"):
        os.utime(path, (time.time() - 3600,) * 2)


def whole(root, tlcache):
    """Check that what is left in a root is whole."""
    ran = tlcache("verify", "--json")
    assert ran.code == 0, ran.out
    for path in layout.records(root):
        one = record.parse(path.read_bytes(), path)
        assert one is not None and record.sound_library(root, one) is not None
    for place in layout.entries(root):
        manifest = json.loads((place.path / "manifest.json").read_text())
        for name, told in manifest["files"].items():
            assert (place.path / name).stat().st_size == told["size"]


def recorded(root):
    """The keys of the entries that have records."""
    found = (record.parse(path.read_bytes(), path) for path in layout.records(root))
    return {Path(one.entry).name for one in found}


def test_a_prune_that_is_killed_anywhere_leaves_a_root_that_is_whole(tlcache, settled):
    dice = random.Random(7)
    policy = ["prune", "--kernel", "rms_norm", "--yes"]
    trash = settled / "tlcache" / "trash"
    saved = settled.with_name("saved")
    shutil.copytree(settled, saved)
    left = []
    for _ in range(5):
        shutil.rmtree(settled)
        shutil.copytree(saved, settled)
        many(settled, 80)
        before, mine = keys(settled), recorded(settled)
        stay = before - mine
        process = subprocess.Popen(
            [*TLCACHE, *policy], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and not (trash.is_dir() and any(trash.iterdir())):
            pass
        time.sleep(dice.random() * 0.02)  # what it does takes some 20 ms
        process.kill()
        process.wait()
        left.append(len(keys(settled)) - len(stay))
        assert stay <= keys(settled)
        whole(settled, tlcache)
        done = tlcache(*policy)
        assert done.code == 0 and list(trash.iterdir()) == []
        assert keys(settled) == stay and recorded(settled) == set()
    assert any(0 < count < len(mine) for count in left), left


def test_prunes_at_once_delete_each_thing_once(tlcache, settled):
    many(settled, 80)
    before = keys(settled)
    running = [
        subprocess.Popen(
            [*TLCACHE, "prune", *words, "--yes", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in (["--target", "cpu"], ["--max-size", "0"], ["--op", "rms_norm"])
    ]
    told = []
    for process in running:
        out, err = process.communicate()
        assert process.returncode == 0, err
        told.append(json.loads(out))
    deleted = [one["key"] for one in told[0]["deleted"] + told[1]["deleted"] + told[2]["deleted"]]
    assert sorted(deleted) == sorted(before) and keys(settled) == set()
    assert {one["why"] for doc in told for one in doc["kept"]} <= {"gone already"}
    assert list((settled / "tlcache/trash").iterdir()) == []
    assert list(layout.records(settled)) == []


def test_a_warm_at_once_with_prunes_files_no_record_without_its_kernel(tlcache, shapes, settled):
    workloads = [{"op": "rms_norm", "M": rows, "N": 64, "dtype": "float32"} for rows in range(1, 7)]
    path = shapes(*workloads)
    warm = subprocess.Popen(
        [*TLCACHE, "warm", "--shapes", str(path), "--target", "cpu", "--jobs", "2", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pruned = 0
    while warm.poll() is None:
        ran = tlcache("prune", "--max-size", "60KiB", "--yes", "--json")
        assert ran.code == 0, ran.err
        pruned += len(ran.json["deleted"])
    out, err = warm.communicate()
    assert warm.returncode == 0, out + err
    assert pruned > 0
    whole(settled, tlcache)
    for filed in layout.records(settled):
        assert (settled / record.parse(filed.read_bytes(), filed).entry).is_dir()
    present = tlcache("warm", "--shapes", path, "--target", "cpu", "--check", "--json").json
    wanted = {kernel["action_key"] for kernel in present["kernels"]}  # others may have stayed
    filed = {path.stem for path in layout.records(settled)}
    assert present["summary"]["present"] == len(wanted & filed)
