"""The digest of machine code: what two compiles agree in, and damage that it has to bear."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlcache.store import binary, machine_code, sources
from tlcache.store.elf import Elf
from tlcache.store.layout import EntryPlace
from tlcache.store.scan import entry

FIXTURE = Path(__file__).parent / "fixtures" / "mixed_root.tar.xz"
LIBRARIES = ("executable.so", "kernel_lib.so", "kernel.cubin", "kernel.fatbin")


@pytest.fixture(scope="module")
def files():
    with tarfile.open(FIXTURE) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


def one(files, key, name=None):
    """The library of the entry whose key begins so: its name and its bytes."""
    for path, data in sorted(files.items()):
        directory, _, last = path.rpartition("/")
        if directory.rpartition("/")[2].startswith(key) and last in LIBRARIES:
            return last, data
        if last.startswith(key) and last.endswith(".cubin"):
            return last, data
    raise KeyError(key)


@pytest.mark.parametrize(
    "same",
    [
        ("cb47", "5cbf", "fb5d", "56aa"),  # 0.1.13 and 0.1.14: libraries and their cuda-binaries
        ("d7de", "e9ec"),  # 0.1.11 and 0.1.8
        ("7606", "9d21", "a80a", "3996"),  # tvm_ffi and cython; sm_90a and sm_90
        ("f758", "6756"),  # a fat binary
        ("1bb1", "ccde", "0941", "fbd1", "b0f7"),  # the CPU
    ],
    ids=lambda same: same[0],
)
def test_compiles_of_one_kernel_have_one_digest(files, same):
    assert len({machine_code.digest(*one(files, key)) for key in same}) == 1
    assert machine_code.digest(*one(files, same[0])) is not None


def test_other_kernels_have_other_digests(files):
    keys = ("cb47", "d7de", "7606", "f758", "1bb1", "f21e", "f008", "314d", "1f2e", "f881")
    assert len({machine_code.digest(*one(files, key)) for key in keys}) == len(keys)


def section(data, name):
    """Where a section of a cubin lies."""
    found = Elf(data).section(name)
    return found.offset, found.offset + found.size


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        (b".text.scale_kernel", True),
        (b".nv.constant0.scale_kernel", True),
        (b".nv.info.scale_kernel", True),
        (b".debug_line", False),
        (b".debug_str", False),
        (b".nv_debug_ptx_txt", False),
        (b".note.nv.tkinfo", False),
    ],
)
def test_what_runs_counts_and_what_a_debugger_reads_does_not(files, name, counts):
    library, data = one(files, "3996")
    start, end = section(data, name)
    changed = data[:start] + bytes(byte ^ 1 for byte in data[start:end]) + data[end:]
    same = machine_code.digest(library, changed) == machine_code.digest(library, data)
    assert same != counts


def test_a_fat_binary_has_a_cubin_for_each_architecture_and_the_cpu_has_none(files):
    assert len(machine_code.cubins(*one(files, "f758"))) == 2
    # A library of cython's has the stub besides, in which there is no kernel.
    assert len(machine_code.cubins(*one(files, "9d21"))) == 1
    assert machine_code.cubins(*one(files, "fbd1")) == ()


def test_what_is_packed_or_no_machine_code_has_no_digest(files):
    library, data = one(files, "6756")
    (whole,) = binary.payloads(library, data)
    packed = whole.replace(b"\x7fELF", b"\x7fPAK", 1)
    assert machine_code.digest(library, packed) is None
    assert machine_code.digest("kernel.py", b"import os") is None
    assert machine_code.digest("executable.so", b"") is None


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_changes_the_digest_or_leaves_it_and_never_raises(files, data):
    key = data.draw(st.sampled_from(["3996", "6756", "7606", "fbd1", "314d", "b0f7"]))
    library, whole = one(files, key)
    start = data.draw(st.integers(0, len(whole)))
    patch = data.draw(st.binary(max_size=16))
    damaged = data.draw(st.sampled_from([whole[:start], whole[:start] + patch + whole[start:]]))
    damaged = damaged[: len(whole)] if data.draw(st.booleans()) else damaged
    for name in {library, *LIBRARIES}:
        digest = machine_code.digest(name, damaged)
        assert digest is None or len(digest) == 64
        assert isinstance(machine_code.cubins(name, damaged), tuple)


# --- sources ---


@pytest.fixture
def place(tmp_path):
    path = tmp_path / ("ab" * 32)
    path.mkdir()
    return EntryPlace(path.name, str(path), None, None)


@pytest.mark.parametrize(
    ("names", "device", "host"),
    [
        (["device_kernel.cu", "host_kernel.cu", "executable.so"], 0, 1),
        (["kernel.cu", "wrapped_kernel.cu", "kernel_lib.so"], 0, 1),
        (["device_kernel.py", "launcher.cpp", "kernel.py"], 0, 1),
        (["device_kernel.cu", "kernel.py", "kernel.cubin"], 0, 1),
        (["executable.so"], None, None),
    ],
)
def test_each_releases_sources_are_found_by_their_side(place, names, device, host):
    for name in names:
        (place.path / name).write_text(f"// {name} ü")
    found = entry.read(place)
    for side, index in (("device", device), ("host", host)):
        told = sources.read(found, side)
        if index is None:
            assert told is None
        else:
            assert (told.name, told.text) == (names[index], f"// {names[index]} ü")


def test_links_and_pipes_are_no_sources(place, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    (place.path / "device_kernel.cu").symlink_to(secret)

    os.mkfifo(place.path / "host_kernel.cu")
    found = entry.read(place)
    assert [sources.read(found, side) for side in sources.SIDES] == [None, None]


def test_a_source_that_is_no_text_is_shown_as_far_as_it_is(place):
    (place.path / "kernel.cu").write_bytes(b"int \xff\xfe;")
    assert sources.read(entry.read(place), "device").text == "int ��;"
