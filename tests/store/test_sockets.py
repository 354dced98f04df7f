"""The runtime directory and the sockets in it: whose they are, and which of them are dead."""

from __future__ import annotations

import os
import socket
import stat
import time
from contextlib import ExitStack

import pytest

from tlcache.errors import AgentError
from tlcache.store import sockets
from tlcache.store.sockets import Address

GONE = 2**22 - 1  # above the highest pid there is, by default


@pytest.fixture
def place(tmp_path):
    """A runtime directory, open."""
    with sockets.opened(str(tmp_path / "run"), create=True) as fd:
        yield fd


@pytest.fixture
def listening():
    """Listen in a directory until the test ends."""
    with ExitStack() as stack:

        def listening(fd, pid):
            server, name = sockets.listen(fd, pid)
            stack.enter_context(server)
            return name

        yield listening


def left_by_the_dead(fd, name):
    """A socket that nobody listens on."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{fd}/{name}")


# --- which directory ---


def test_a_directory_that_is_named_comes_first_and_is_the_only_one_to_look_in(
    monkeypatch, tmp_path
):
    monkeypatch.setenv(sockets.DIRECTORY, str(tmp_path / "here"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert sockets.directory() == str(tmp_path / "here")
    assert sockets.places() == {}
    (tmp_path / "here").mkdir()
    assert sockets.places() == {str(tmp_path / "here"): os.geteuid()}


def test_xdg_runtime_dir_counts_while_it_is_ones_own(monkeypatch, tmp_path):
    monkeypatch.delenv(sockets.DIRECTORY, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert sockets.directory() == str(tmp_path / "tlcache")
    for wrong in ("", "run/user", str(tmp_path / "missing")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", wrong)
        assert sockets.directory() in ("/run/tlcache/agents", f"/tmp/tlcache-{os.geteuid()}")
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, 12345)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        assert sockets.directory() == "/run/tlcache/agents"


# --- whose it is ---


def test_a_directory_is_made_for_its_user_alone_whatever_the_umask(tmp_path):
    path = tmp_path / "a" / "b" / "run"
    before = os.umask(0)
    try:
        with sockets.opened(str(path), create=True) as fd:
            assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o700
            server, name = sockets.listen(fd, os.getpid())
            assert stat.S_IMODE(os.stat(name, dir_fd=fd).st_mode) == 0o600
            server.close()
    finally:
        os.umask(before)


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o722, 0o755, 0o777, 0o1777])
def test_a_directory_that_others_can_get_into_is_refused_with_what_to_do(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(AgentError) as raised, sockets.opened(str(tmp_path), create=True):
        pass
    assert f"others can get into the runtime directory {tmp_path} (mode {mode:04o})" in str(
        raised.value
    )
    assert f"`chmod 700 {tmp_path}`" in raised.value.hint


def test_a_link_a_file_and_a_directory_that_cannot_be_made_are_refused(tmp_path):
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "file").touch()
    for name in ("link", "file", "file/run"):
        with (
            pytest.raises(AgentError, match=r"is a link or no directory|cannot be used"),
            sockets.opened(str(tmp_path / name), create=True),
        ):
            pass
    with (
        pytest.raises(AgentError, match="cannot be used: No such file"),
        sockets.opened(str(tmp_path / "missing")),
    ):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory away")
def test_a_directory_of_another_user_is_refused_and_root_may_say_whose_it_expects(tmp_path):
    tmp_path.chmod(0o700)
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(AgentError, match="belongs to uid 12345"), sockets.opened(str(tmp_path)):
        pass
    assert sockets.listed(str(tmp_path), owner=12345) == []


# --- names ---


def test_what_is_listed_is_sockets_of_pids_and_nothing_else(tmp_path, place, listening):
    listening(place, 30)
    listening(place, 4)
    for name in ("notes.txt", "x.sock", "-1.sock", ".7-0123abcd", "8.sock.bak"):
        (tmp_path / "run" / name).touch()
    left_by_the_dead(place, f"{os.getpid()}-4026531836.sock")
    assert [(one.name, one.pid) for one in sockets.listed(str(tmp_path / "run"))] == [
        ("4.sock", 4),
        ("30.sock", 30),
        (f"{os.getpid()}-4026531836.sock", os.getpid()),
    ]


def test_a_directory_may_be_deeper_than_a_sockets_address_can_say(tmp_path, listening):
    deep = tmp_path.joinpath(*["x" * 100] * 4)
    with sockets.opened(str(deep), create=True) as fd:
        name = listening(fd, os.getpid())
    (found,) = sockets.listed(str(deep))
    assert len(found.path) > 400
    with sockets.connect(found, 10) as client:
        assert sockets.peer(client) == (os.getpid(), os.geteuid())
    assert found.name == name


def test_a_socket_takes_the_place_of_a_dead_one_of_its_pid(tmp_path, place, listening):
    left_by_the_dead(place, "31.sock")
    assert listening(place, 31) == "31.sock"
    with sockets.connect(Address(str(tmp_path / "run"), "31.sock", 31), 10):
        pass


def test_of_two_containers_with_equal_pids_the_second_one_gets_another_name(place, listening):
    first, second = listening(place, 31), listening(place, 31)
    assert first == "31.sock"
    namespace = os.readlink("/proc/self/ns/pid")
    assert second == f"31-{namespace[len('pid:[') : -1]}.sock"


# --- the dead ---


def test_sockets_of_the_dead_are_removed_and_those_of_the_living_are_not(place, listening):
    left_by_the_dead(place, f"{GONE}.sock")
    left_by_the_dead(place, f"{GONE}-4026531836.sock")
    left_by_the_dead(place, f"{os.getpid()}.sock")  # about to be taken over, perhaps
    listening(place, GONE - 1)  # alive in another pid namespace
    os.close(os.open(f"{GONE - 2}.sock", os.O_CREAT, dir_fd=place))  # no socket at all
    sockets.clean(place)
    assert sorted(os.listdir(place)) == sorted(
        [f"{os.getpid()}.sock", f"{GONE - 1}.sock", f"{GONE - 2}.sock"]
    )


def test_what_a_process_left_that_was_killed_on_its_way_to_listen_is_removed_later(place):
    left_by_the_dead(place, f".{GONE}-0123abcd")
    sockets.clean(place)
    assert os.listdir(place) == [f".{GONE}-0123abcd"]
    long_ago = time.time() - 3600
    os.utime(f"/proc/self/fd/{place}/.{GONE}-0123abcd", (long_ago, long_ago))
    sockets.clean(place)
    assert os.listdir(place) == []


def test_a_socket_is_withdrawn_only_while_it_is_ones_own(place):
    server, name = sockets.listen(place, 31)
    inode = os.stat(name, dir_fd=place).st_ino
    sockets.withdraw(place, name, inode + 1)
    assert os.listdir(place) == [name]
    sockets.withdraw(place, name, inode)
    sockets.withdraw(place, name, inode)
    assert os.listdir(place) == []
    server.close()


def test_an_agent_that_cannot_be_reached_is_refused_not_waited_for(tmp_path, place):
    left_by_the_dead(place, "31.sock")
    for name, kind in (("31.sock", ConnectionRefusedError), ("32.sock", FileNotFoundError)):
        with pytest.raises(kind):
            sockets.connect(Address(str(tmp_path / "run"), name, 31), 10)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_a_client_does_not_talk_to_another_users_listener(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    tmp_path.chmod(0o711)
    os.chown(directory, 12345, 12345)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        os.chdir("/")
        os.setgid(12346)
        server = socket.socket(socket.AF_UNIX)
        # A directory that 12345 handed to somebody else, by a descriptor that root had opened.
        fd = os.open(directory, os.O_RDONLY)
        os.chmod(directory, 0o777)
        os.setuid(12346)
        server.bind(f"/proc/self/fd/{fd}/31.sock")
        os.chmod(f"/proc/self/fd/{fd}/31.sock", 0o777)
        server.listen(8)
        os.write(write, b"1")
        time.sleep(60)
        os._exit(0)
    try:
        os.close(write)
        assert os.read(read, 1) == b"1"
        os.chmod(directory, 0o700)
        with pytest.raises(AgentError, match="it is uid 12346 who listens"):
            sockets.connect(Address(str(directory), "31.sock", 31), 10, owner=12345)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
