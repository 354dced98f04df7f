"""What is seen of a process from outside, asked of real processes that have real kernels mapped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tlcache.errors import EnvironmentFault, UsageError
from tlcache.store import layout, outside, record

# Maps the files in argv, says so, and waits for the end of its input.
HOLD = """
import mmap, sys
held = []
for name in sys.argv[1:]:
    with open(name, "rb") as file:
        held.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hold():
    """Have files mapped by processes of their own."""
    running = []

    def hold(*paths, before=(), source=HOLD):
        process = subprocess.Popen(
            [*before, sys.executable, "-c", source, *map(str, paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield hold
    for process in running:
        process.communicate()


def test_a_mapped_kernel_is_told_with_its_root_and_its_records_facts(filed, hold):
    record.write(filed.root, filed.record)
    process = hold(filed.library)
    seen = outside.look(process.pid)
    (loaded,) = seen.loaded
    assert (loaded.root, loaded.gone) == (str(filed.root), False)
    assert loaded.path == str(filed.library.parent)
    assert (loaded.entry.kernel, loaded.entry.target) == ("rms_norm", "cpu")
    assert loaded.entry.place.tilelang == "0.1.15"
    assert loaded.entry.bytes == filed.library.stat().st_size
    assert seen.command.startswith("python") and 0 <= seen.uptime < 300
    assert not seen.tilelang


def test_a_kernel_without_a_record_is_told_by_its_files(mixed, hold):
    paths = [
        one.path / name
        for one in layout.entries(mixed)
        for name in ("executable.so", "kernel_lib.so")
        if (one.path / name).exists()
    ]
    assert len({layout.holding(str(path))[1].tilelang for path in paths}) > 3
    seen = outside.look(hold(*paths).pid)
    assert {one.path for one in seen.loaded} == {str(path.parent) for path in paths}
    assert {one.root for one in seen.loaded} <= set(layout.roots(mixed))
    assert all(one.entry.kernel and one.entry.target for one in seen.loaded)


def test_a_kernel_that_was_deleted_or_compiled_again_is_known_by_its_path_alone(filed, hold):
    record.write(filed.root, filed.record)
    process = hold(filed.library)
    filed.library.unlink()
    for _ in range(2):
        (loaded,) = outside.look(process.pid).loaded
        assert loaded.gone
        assert loaded.path == str(filed.library.parent)
        assert (loaded.entry.kernel, loaded.entry.bytes) == (None, 0)
        filed.library.write_bytes(b"another")


def test_a_process_with_another_view_of_the_disk_is_followed_into_it(filed, hold, tmp_path):
    """As a container has the cache mounted elsewhere."""
    record.write(filed.root, filed.record)
    inside = tmp_path / "mounted"
    inside.mkdir()
    script = f'mount --bind {filed.root} {inside} && exec "$@"'
    before = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*before, "true"]).returncode:
        pytest.skip("mounting is not permitted here")
    library = inside / filed.record.entry / filed.library.name
    assert not library.exists()
    (loaded,) = outside.look(hold(library, before=before).pid).loaded
    assert (loaded.root, loaded.gone) == (str(inside), False)
    assert loaded.entry.kernel == "rms_norm"


# Compiles a kernel by TileLang alone, says so, and waits for the end of its input.
COMPILE = """
import sys
from ops.kernels.rms_norm import rms_norm
rms_norm(1, 64, 1e-6, "float32", "cpu")(block_m=1, threads=1, each=1, prefetch=False)
print("ready", flush=True)
sys.stdin.read()
"""


def test_what_a_process_compiled_itself_is_counted(cache_root, hold, monkeypatch):
    monkeypatch.setenv("TILELANG_PRINT_ON_COMPILATION", "0")
    for compiled, loaded in ((1, 0), (0, 1)):  # the second process finds the first one's entry
        seen = outside.look(hold(source=COMPILE).pid)
        assert seen.tilelang
        assert (len(seen.compiled), len(seen.loaded)) == (compiled, loaded)


def test_files_that_are_no_kernels_are_nothing(hold, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x")
    assert outside.look(hold(path).pid).loaded == ()


def test_there_must_be_such_a_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is dead, and still in /proc
    with pytest.raises(UsageError, match=f"there is no process {process.pid}"):
        outside.look(process.pid)
    process.wait()
    with pytest.raises(UsageError, match="there is no process") as caught:
        outside.look(process.pid)
    assert "`tlcache stats`" in caught.value.hint


def test_somebody_elses_process_is_not_looked_into(filed):
    if os.geteuid() != 0:
        pytest.skip("only root can be two users")
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            try:
                outside.look(os.getppid())
            except EnvironmentFault as error:
                said = f"pid {os.getppid()} belongs to root, so its memory may not be looked into"
                code = 0 if error.message == said and error.hint else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
