"""Who has which files mapped, asked of real processes; and which file systems are shared."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tlcache.store import mapped

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

    def hold(*paths, program=sys.executable, **kwargs):
        process = subprocess.Popen(
            [program, "-c", HOLD, *map(str, paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **kwargs,
        )
        running.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield hold
    for process in running:
        process.communicate()


@pytest.fixture
def library(tmp_path):
    path = tmp_path / "3c3c" / "kernel_lib.so"
    path.parent.mkdir()
    path.write_bytes(b"x" * 5000)
    return path


def holders(path, as_path=None, device=None):
    status = os.stat(path)
    seen = mapped.look([status.st_ino])
    return seen.holders(str(as_path or path), device or status.st_dev, status.st_ino)


def test_a_process_that_has_a_file_mapped_is_named(hold, library):
    assert holders(library) == ()
    one, other = hold(library), hold(library)
    found = holders(library)
    assert {process.pid for process in found} == {one.pid, other.pid}
    assert str(found[0]).startswith(f"pid {found[0].pid} (python")
    assert len(found[0].command) <= 60 and "\n" not in found[0].command


def test_a_mapping_is_found_under_whatever_name_the_file_has_now(hold, library, tmp_path):
    process = hold(library)
    moved = tmp_path / "moved.so"
    os.rename(library, moved)
    assert [one.pid for one in holders(moved)] == [process.pid]
    os.link(moved, tmp_path / "other.so")
    os.unlink(moved)
    assert [one.pid for one in holders(tmp_path / "other.so")] == [process.pid]


def test_a_copy_of_what_is_mapped_is_not_mapped(hold, library, tmp_path):
    hold(library)
    copy = shutil.copy(library, tmp_path / "copy.so")
    assert holders(copy) == ()


def test_a_device_that_proc_tells_differently_is_overlooked_where_the_path_agrees(hold, library):
    """As in overlays and on btrfs, and where a container has the root mounted elsewhere."""
    process = hold(library)
    elsewhere = f"/mnt/cache/{library.parent.name}/{library.name}"
    assert [one.pid for one in holders(library, elsewhere, device=1)] == [process.pid]
    assert holders(library, f"/mnt/cache/other/{library.name}", device=1) == ()


def test_paths_with_odd_letters_are_read(hold, tmp_path):
    path = tmp_path / "a b\nc (deleted)" / "ü.so"
    path.parent.mkdir()
    path.write_bytes(b"x")
    process = hold(path)
    assert [one.pid for one in holders(path, device=1)] == [process.pid]


def test_the_command_line_of_a_process_cannot_write_on_the_terminal(hold, library, tmp_path):
    odd = tmp_path / "\x1b[31mred\n.so"
    odd.write_bytes(b"x")
    hold(library, odd, program=sys.executable)
    (process,) = holders(library)
    assert process.command.isprintable()


def test_a_process_of_another_user_that_cannot_be_read_is_counted(hold, library):
    if os.geteuid() != 0:
        pytest.skip("only root can start processes of two users")
    hold(library)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            seen = mapped.look([os.stat(library).st_ino])
            code = 0 if seen.unreadable.get(0, 0) >= 1 and not seen.files else 2
        except PermissionError:
            # The test's directory is private: then only the count can be asked for.
            code = 0 if mapped.look([]).unreadable.get(0, 0) >= 1 else 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_processes_that_end_meanwhile_and_those_without_memory_are_nothing(monkeypatch, tmp_path):
    """A `/proc` with what a real one has only by chance."""
    for pid, maps, cmdline in (("10", None, b""), ("11", "directory", b""), ("12", None, b"x")):
        place = tmp_path / pid
        place.mkdir()
        (place / "cmdline").write_bytes(cmdline)
        if maps == "directory":
            (place / "maps").mkdir()  # unreadable, and no command: a kernel thread
    (tmp_path / "13").mkdir()
    (tmp_path / "13" / "maps").mkdir()
    (tmp_path / "13" / "cmdline").write_bytes(b"python\0serve.py\0")
    monkeypatch.setattr(mapped, "_PROC", str(tmp_path))
    assert mapped.look([1]).unreadable == {os.getuid(): 1}


@pytest.fixture
def mountinfo(tmp_path, monkeypatch):
    """A `/proc/self/mountinfo` with these mounts: file systems that cannot be mounted here."""

    def write(*mounts):
        lines = [
            f"{n} 1 0:{n} / {place} rw,relatime shared:1 - {kind} source rw{more}"
            for n, (place, kind, more) in enumerate(mounts, 30)
        ]
        (tmp_path / "self").mkdir()
        (tmp_path / "self" / "mountinfo").write_text("\n".join(lines) + "\n")
        monkeypatch.setattr(mapped, "_PROC", str(tmp_path))

    return write


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "fuse.sshfs", "fuse", "lustre", "ceph", "9p", "virtiofs"]
)
def test_a_network_file_system_is_known_by_its_type(mountinfo, kind):
    mountinfo(("/", "ext4", ""), ("/data", kind, ""))
    assert mapped.network("/data/cache") == kind
    assert mapped.network("/data") == kind
    assert mapped.network("/database/cache") is None


@pytest.mark.parametrize("kind", ["ext4", "overlay", "fuseblk", "fuse.fuse-overlayfs"])
def test_a_local_file_system_is_known_by_its_type(mountinfo, kind):
    mountinfo(("/", "nfs4", ""), ("/data", kind, ""))
    assert mapped.network("/data/cache") is None


def test_the_innermost_mount_counts_and_of_two_on_one_place_the_last(mountinfo):
    mountinfo(("/", "nfs4", ""), ("/a\\040b", "ext4", ""), ("/c", "nfs", ""), ("/c", "fuseblk", ""))
    assert mapped.network("/a b/cache") is None
    assert mapped.network("/a/cache") == "nfs4"
    assert mapped.network("/c/cache") is None


def test_a_link_to_a_network_file_system_is_on_it(mountinfo, tmp_path):
    (tmp_path / "link").symlink_to("/data/cache")
    mountinfo(("/", "ext4", ""), ("/data", "nfs4", ""))
    assert mapped.network(tmp_path / "link") == "nfs4"


def test_this_hosts_own_file_systems_are_local(tmp_path, mounted):
    assert mapped.network(tmp_path) is None
    assert mapped.network(mounted("size=64k")) is None
    assert mapped.network(Path("/proc")) is None
