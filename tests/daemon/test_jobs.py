from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import psutil
import pytest

from tests.daemon.conftest import PATIENCE, publish, until
from tlcache.daemon.broadcast import Broadcast
from tlcache.daemon.children import LISTED, Work
from tlcache.daemon.jobs import _KEPT, _QUEUED, Job, Jobs, QueueFull


@pytest.fixture
def jobs(cache_root):
    made = Jobs(Broadcast())
    cache_root.mkdir()
    yield made
    made.stop(PATIENCE)


def _ended(job: Job) -> Job:
    job.over.result(PATIENCE)
    return job


def _old(root: Path, number: int) -> Path:
    """A kernel that was not written just now, which prune leaves alone."""
    place = publish(root, number, size=1)
    os.utime(place, (10**9, 10**9))
    return place


def _document(*rows: int, op: str = "rms_norm", **more) -> str:
    workload = {"op": op, "M": list(rows), "N": 64, "dtype": "float32"}
    return json.dumps({"version": 1, "targets": ["cpu"], "workloads": [workload], **more})


def _warm(root: Path, *rows: int, **more) -> Work:
    return Work("warm", str(root), ("--timeout=900",), _document(*rows, **more))


def test_a_warm_compiles_and_tells_how_far_it_is(jobs, cache_root, tlcache):
    job = jobs.submit(_warm(cache_root, 1, 2))
    until(lambda: job.kernels["total"] == 2 or job.over.done())
    assert _ended(job).state == "done", job.error
    assert (job.kernels, job.left, job.exit_code) == ({"total": 2, "compiled": 2}, 0, 0)
    assert job.result["summary"]["compiled"] == 2
    assert jobs.kernels() == {"compiled": 2, "present": 0, "failed": 0, "left": 0}
    assert len(tlcache("ls", "--json").json["entries"]) == 2
    again = _ended(jobs.submit(_warm(cache_root, 1, 2)))
    assert (again is not job, again.kernels) == (True, {"total": 2, "present": 2})


def test_however_many_ask_for_the_same_it_is_one_job(jobs, cache_root):
    found: list[Job] = []

    def ask() -> None:
        found.append(jobs.submit(_warm(cache_root, 1)))

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len({job.id for job in found}) == 1
    assert _ended(found[0]).kernels == {"total": 1, "compiled": 1}


def test_what_two_documents_have_in_common_is_compiled_once(jobs, cache_root):
    first, second = jobs.submit(_warm(cache_root, 1, 2)), jobs.submit(_warm(cache_root, 2, 3))
    assert first is not second
    assert _ended(first).kernels == {"total": 2, "compiled": 2}
    assert _ended(second).kernels == {"total": 2, "compiled": 1, "present": 1}


def test_a_kernel_that_does_not_compile_makes_a_failed_job_with_what_it_did(jobs, cache_root):
    bad = {"kernel": "no_such_module:factory", "args": {"M": 1}}
    job = _ended(jobs.submit(_warm(cache_root, 1, workloads=[bad])))
    assert job.state == "failed"
    assert "no_such_module" in job.error
    assert job.error.startswith("the document: workloads[0]")


def test_a_prune_does_not_wait_for_compiles(jobs, cache_root):
    warm = jobs.submit(_warm(cache_root, *range(1, 40)))
    until(lambda: warm.state == "running")
    place = _old(cache_root, 7)
    work = Work("prune", str(cache_root), ("--larger-than=1", "--dry-run"))
    prune = _ended(jobs.submit(work))
    assert (prune.state, warm.state) == ("done", "running")
    assert [one["path"] for one in prune.result["would_delete"]] == [str(place)]
    assert place.exists()
    jobs.cancel(warm)
    assert _ended(warm).state == "cancelled"


def test_a_prune_that_is_meant_deletes(jobs, cache_root):
    place = _old(cache_root, 7)
    job = _ended(jobs.submit(Work("prune", str(cache_root), ("--larger-than=1", "--yes"))))
    assert job.state == "done"
    assert [one["path"] for one in job.result["deleted"]] == [str(place)]
    assert not place.exists()


def test_what_verify_finds_is_its_result_and_no_failure(jobs, cache_root):
    place = publish(cache_root, 7)
    (place / "manifest.json").write_text("{}")
    job = _ended(jobs.submit(Work("verify", str(cache_root))))
    assert (job.state, job.exit_code) == ("done", 1)
    assert job.result["remaining"] > 0


def test_a_cancelled_job_ends_with_everything_that_it_started(jobs, cache_root):
    def children() -> list[psutil.Process]:
        return psutil.Process(os.getpid()).children(recursive=True)

    before = {one.pid for one in children()}
    job = jobs.submit(_warm(cache_root, *range(1, 60)))
    until(lambda: job.current)
    started = [one for one in children() if one.pid not in before]
    assert started
    assert {one.nice() for one in started} == {os.getpriority(os.PRIO_PROCESS, 0) + 5}
    waiting = jobs.submit(_warm(cache_root, 99))
    jobs.cancel(waiting)
    assert waiting.state == "cancelled"
    jobs.cancel(job)
    assert _ended(job).state == "cancelled"
    assert (job.left, job.current) == (0, {})
    until(lambda: not [one for one in started if one.is_running() and one.status() != "zombie"])
    jobs.cancel(job)


def test_a_child_that_is_killed_is_a_failed_job(jobs, cache_root):
    job = jobs.submit(_warm(cache_root, *range(1, 60)))
    until(lambda: job.current)
    for one in psutil.Process(os.getpid()).children():
        if "warm" in one.cmdline():
            one.kill()
    assert _ended(job).state == "failed"
    assert "SIGKILL" in job.error


def test_there_are_only_so_many_jobs_and_the_oldest_are_forgotten(jobs, cache_root, monkeypatch):
    monkeypatch.setattr(jobs, "_start", lambda: None)
    waiting = [jobs.submit(_warm(cache_root, number)) for number in range(1, _QUEUED + 1)]
    with pytest.raises(QueueFull):
        jobs.submit(_warm(cache_root, 1000))
    assert jobs.submit(_warm(cache_root, 1)) is waiting[0]
    for one in waiting:
        jobs.cancel(one)
    for number in range(_KEPT + 20):
        jobs.cancel(jobs.submit(Work("verify", str(cache_root), (f"--x={number}",))))
    assert len(jobs.all()) <= _KEPT + 1
    assert jobs.get(waiting[0].id) is None


def test_a_long_list_in_a_result_is_cut_and_says_so(jobs, cache_root):
    for number in range(LISTED + 10):
        _old(cache_root, number)
    work = Work("prune", str(cache_root), ("--larger-than=1", "--dry-run"))
    job = _ended(jobs.submit(work))
    assert len(job.result["would_delete"]) == LISTED
    assert job.result["cut"] == {"would_delete": LISTED + 10}


def test_what_becomes_of_jobs_is_told(cache_root):
    cache_root.mkdir()
    events = Broadcast()
    jobs = Jobs(events)
    job = _ended(jobs.submit(Work("verify", str(cache_root))))
    told = [(one["kind"], one["job"], one["state"]) for one in events.recent()]
    assert told == [
        ("job-queued", job.id, "queued"),
        ("job-started", job.id, "running"),
        ("job-ended", job.id, "done"),
    ]
    jobs.stop(PATIENCE)


def test_jobs_are_asked_for_over_the_socket(daemon, cache_root):
    one = daemon()
    document = json.loads(_document(1))
    first, second = one.post("/v1/warm", document), one.post("/v1/warm?wait=25", document)
    assert first.status == 202
    assert first.headers["Location"] == f"/v1/jobs/{first.json['job']['id']}"
    assert first.json["job"]["id"] == second.json["job"]["id"]
    job = one.job(second)
    assert (job["state"], job["kernels"]) == ("done", {"total": 1, "compiled": 1, "left": 0})
    assert job["command"].startswith("tlcache warm --shapes=shapes.json --timeout=900")
    (entry,) = until(lambda: one.json("/v1/entries?op=rms_norm")["entries"])
    assert entry["workload"]["M"] == 1
    would = one.job(one.post("/v1/prune", {"op": ["rms_norm"]}))
    assert [each["key"] for each in would["result"]["would_delete"]] == [entry["key"]]
    assert one.json("/v1/entries")["entries"]
    done = one.job(one.post("/v1/prune", {"op": ["rms_norm"], "dry_run": False}))
    assert [each["key"] for each in done["result"]["deleted"]] == [entry["key"]]
    until(lambda: not one.json("/v1/entries")["entries"])
    kept = one.json("/v1/jobs")["jobs"]
    assert [each["kind"] for each in kept] == ["prune", "prune", "warm"]
    assert b'tlcache_job_kernels{state="compiled"} 1.0' in one.ask("/metrics").body


def test_an_option_cannot_be_smuggled_into_a_command(daemon):
    one = daemon()
    job = one.job(one.post("/v1/prune", {"kernel": ["--yes", "-y"], "toolkit": "--yes"}))
    assert job["result"]["dry_run"] is True
    assert "--kernel=--yes" in job["command"]
