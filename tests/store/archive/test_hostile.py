"""Archives that were made to harm: each is refused with the name of what is wrong, and the root is
as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.archive.conftest import CALLS, STYLE, TEXT
from tlcache.errors import ArchiveError, TlcacheError
from tlcache.store import calls, record, verify
from tlcache.store.archive import reading, receiving, tar

KEY = "ab" * 32


@pytest.fixture
def refused(cache_root, archive, tree, taken):
    """Import something into a root that holds things already; what it says."""
    taken(archive)
    kept = next(cache_root.glob("0.1.15/linux-x86_64/kernels/*"))
    for path in sorted(kept.iterdir()):
        path.unlink()
    kept.rmdir()  # so that there is something to publish
    before = tree(cache_root)

    def refused(path: Path) -> str:
        with pytest.raises(ArchiveError) as told:
            taken(path)
        assert tree(cache_root) == before
        assert str(path) in told.value.message
        return told.value.message

    return refused


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/etc/cron.d/evil", "an absolute path"),
        (f"../{KEY}/executable.so", "not below the root"),
        (f"0.1.15/linux-x86_64/kernels/../../../{KEY}/kernel_lib.so", "not below the root"),
        (f"0.1.15/linux-x86_64/kernels/{KEY}/../x.so", "not below the root"),
        (f"0.1.15/linux-x86_64/kernels/{KEY}/deeper/x.so", "no file of a cache root"),
        (f"0.1.15/linux-x86_64/kernels/{KEY}/.hidden", "no file of a cache root"),
        (f"0.1.15/linux-x86_64/.staging/{KEY}/x.so", "no file of a cache root"),
        (f"kernels/{KEY}/executable.so", "no file of a cache root"),
        (f"0.1.15/linux-x86_64/kernels/{KEY}/executable.so\0", "no file of a cache root"),
        (f"0.1.15/linux-x86_64/kernels/{KEY}/executable.so\n", "no file of a cache root"),
        (f"0.1.１５/linux-x86_64/kernels/{KEY}/executable.so", "no file of a cache root"),
        ("tlcache/trash/20260101-000000-00000000/x", "no file of a cache root"),
        ("tlcache/locks/prune.lock", "no file of a cache root"),
        (f"tlcache/records/cd/{KEY}.json", "no file of a cache root"),
        ("tlcache/evictions.jsonl", "no file of a cache root"),
        (f"tlcache/calls/cd/{KEY}.json", "no file of a cache root"),
        (f"tlcache/calls/ab/{KEY}.json\n", "no file of a cache root"),
        (f"tlcache/calls/ab/ab{KEY}.json", "no file of a cache root"),
        (f"tlcache/texts/ab/../ab/{KEY}.json", "not below the root"),
        ("", "no file of a cache root"),
    ],
)
def test_an_index_that_names_a_path_that_no_root_has_is_refused(forgery, refused, name, said):
    forgery.add(name, b"harm", header=tar.header("x", 4))
    assert said in refused(forgery.pack())


@pytest.mark.parametrize(
    ("kind", "link", "said"),
    [
        (tarfile.SYMTYPE, "/etc/passwd", "is a symbolic link to /etc/passwd"),
        (tarfile.SYMTYPE, "../../..", "is a symbolic link to ../../.."),
        (tarfile.LNKTYPE, "../../../etc/passwd", "is a hard link to ../../../etc/passwd"),
        (tarfile.CHRTYPE, "", "is a character device"),
        (tarfile.BLKTYPE, "", "is a block device"),
        (tarfile.FIFOTYPE, "", "is a pipe"),
        (tarfile.DIRTYPE, "", "is a directory"),
        (tarfile.XHDTYPE, "", "is of type 'x'"),
        (tarfile.GNUTYPE_LONGNAME, "", "is of type 'L'"),
        (tarfile.GNUTYPE_SPARSE, "", "is of type 'S'"),
        (tarfile.CONTTYPE, "", "is of type '7'"),
    ],
)
def test_whatever_is_no_plain_file_is_refused(forgery, refused, special, kind, link, said):
    name = f"0.1.15/linux-x86_64/kernels/{KEY}/executable.so"
    forgery.add(name, b"", header=special(name, kind, link))
    assert said in refused(forgery.pack())


def test_a_link_in_a_plain_files_place_is_refused_also_where_the_index_is_honest(
    forgery, refused, special
):
    name = forgery.names()[0]
    forgery.members[0] = (special(name, tarfile.SYMTYPE, "/etc/passwd"), b"")
    assert "symbolic link to /etc/passwd" in refused(forgery.pack())


def test_a_member_that_comes_twice_is_refused(forgery, refused):
    forgery.members.insert(1, forgery.members[0])
    assert f"holds {forgery.names()[0]} twice" in refused(forgery.pack())
    forgery.members.append(forgery.members.pop(1))
    assert "which its index does not name" in refused(forgery.pack())


def test_members_in_another_order_are_refused(forgery, refused):
    forgery.members[0], forgery.members[1] = forgery.members[1], forgery.members[0]
    assert "where its index names" in refused(forgery.pack())


def test_an_index_that_scatters_the_files_of_an_entry_is_refused(forgery, refused):
    files = forgery.index["files"]
    first = next(iter(files))
    files[first] = files.pop(first)
    assert "which belongs there" in refused(forgery.pack())


def test_a_member_that_lies_about_its_size_is_refused(forgery, refused):
    name, (_, data) = forgery.names()[0], forgery.members[0]
    forgery.members[0] = (tar.header(name, len(data) + 512), data)
    assert "by its index" in refused(forgery.pack())
    forgery.index["files"][name]["size"] += 512
    refused(forgery.pack())


def test_a_member_that_is_larger_than_the_archive_is_refused(forgery, refused):
    name = forgery.names()[-1]
    size = 60 * 1024 * 1024
    forgery.index["files"][name]["size"] = size
    forgery.members[-1] = (tar.header(name, size), b"short")
    assert "ends in the middle" in refused(forgery.pack())


def test_a_wrong_hash_is_refused(forgery, refused):
    header, data = forgery.members[3]
    forgery.members[3] = (header, data[:-1] + bytes([data[-1] ^ 1]))
    assert f"{forgery.names()[3]} has another sha256" in refused(forgery.pack())


def test_an_index_that_names_files_that_are_not_there_is_refused(forgery, refused):
    forgery.members.pop()
    assert f"names {forgery.names()[-1]}, which it does not hold" in refused(forgery.pack())


def test_a_file_that_the_index_does_not_name_is_refused(forgery, refused):
    name = f"0.1.15/linux-x86_64/kernels/{KEY}/executable.so"
    forgery.members.insert(0, (tar.header(name, 4), b"harm"))
    assert f"holds {name}, which its index does not name" in refused(forgery.pack())
    forgery.members.append(forgery.members.pop(0))
    assert f"holds {name}, which its index does not name" in refused(forgery.pack())


def test_an_entry_for_another_platform_is_refused(forgery, refused):
    name = f"0.1.15/linux-aarch64/kernels/{KEY}/executable.so"
    forgery.add(name, b"\x7fELF")
    told = refused(forgery.pack())
    assert f"0.1.15/linux-aarch64/kernels/{KEY} is for linux-aarch64" in told


def test_a_library_for_another_machine_than_its_directory_says_is_refused(forgery, refused):
    above = f"0.1.15/linux-x86_64/kernels/{KEY}"
    library = b"\x7fELF\x02\x01" + bytes(12) + (183).to_bytes(2, "little") + bytes(100)
    forgery.add(f"{above}/executable.so", library)
    forgery.add(f"{above}/params.json", b"{}")
    assert "is for the machine aarch64, not x86_64" in refused(forgery.pack())


def test_an_entry_that_its_own_manifest_belies_is_refused(forgery, refused):
    number = forgery.names().index(f"{forgery.kernel}/manifest.json")
    name, data = forgery.names()[number], forgery.members[number][1]
    document = json.loads(data)
    document["files"]["params.json"]["sha256"] = "00" * 32
    changed = json.dumps(document).encode()
    forgery.index["files"][name] = {
        "size": len(changed),
        "sha256": hashlib.sha256(changed).hexdigest(),
    }
    forgery.members[number] = (tar.header(name, len(changed)), changed)
    told = refused(forgery.pack())
    assert f"{os.path.dirname(name)} has another params.json" in told


def test_a_bomb_is_refused_before_anything_is_unpacked(forgery, refused):
    for number in range(20):
        name = f"0.1.15/linux-x86_64/kernels/{number:064x}/executable.so"
        forgery.add(name, b"")
        forgery.index["files"][name]["size"] = 60 * 1024 * 1024
    assert "would unpack to" in refused(forgery.pack())


def test_zeros_without_end_are_no_more_than_the_index_says(forgery, refused, tmp_path):
    name = forgery.names()[-1]
    forgery.members[-1] = (forgery.members[-1][0], bytes(300 * 1024 * 1024))
    forgery.level = 1
    assert os.path.getsize(forgery.pack()) < 1024 * 1024
    assert name in refused(forgery.path)


def test_an_index_that_is_a_bomb_is_refused(refused, tmp_path):
    path = tmp_path / "bomb.tar.zst"
    path.write_bytes(zstandard.compress(tar.header("index.json", 8**11 - 1) + bytes(1024 * 1024)))
    assert "its index is said to have 8,589,934,591 bytes" in refused(path)


def test_a_window_that_takes_all_memory_is_refused(refused, archive, tmp_path):
    params = zstandard.ZstdCompressionParameters.from_level(19, window_log=31, enable_ldm=True)
    path = tmp_path / "wide.tar.zst"
    packing = zstandard.ZstdCompressor(compression_params=params)
    with path.open("wb") as file, packing.stream_writer(file) as writer:
        writer.write(tar.header("index.json", 4) + b"{}  " + bytes(508))
    assert "no zstd data, or damaged" in refused(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda index: index.clear(), "not one of an archive of tlcache"),
        (lambda index: index.update(schema=3), "of schema 3, not 1 or 2"),
        (lambda index: index.update(schema=True), "of schema True, not 1 or 2"),
        (lambda index: index.update(schema=1), "tlcache/calls/57/5757"),
        (lambda index: index.update(files=[]), "does not tell its files"),
        (lambda index: index.pop("coverage"), "does not tell its coverage"),
        (lambda index: index["records"].update({"x": {}}), "does not describe the record x"),
        (lambda index: index["records"].popitem(), "in one place only"),
    ],
)
def test_an_index_that_is_none_is_refused(forgery, refused, change, said):
    change(forgery.index)
    assert said in refused(forgery.pack())


@pytest.mark.parametrize("field", ["size", "sha256"])
@pytest.mark.parametrize("value", [None, True, -1, 1.5, "", "x" * 64, 2**80, []])
def test_a_file_without_a_size_and_a_hash_is_refused(forgery, refused, field, value):
    forgery.index["files"][forgery.names()[0]][field] = value
    assert forgery.names()[0] in refused(forgery.pack())


def test_a_record_that_points_elsewhere_is_refused(forgery, refused):
    key = next(iter(forgery.index["records"]))
    forgery.index["records"][key]["entry"] = f"0.1.15/linux-x86_64/kernels/{KEY}"
    assert f"record {key[:12]} points at" in refused(forgery.pack())


def test_a_record_of_another_library_is_refused(forgery, refused):
    (key, told), (_, other), *_ = forgery.index["records"].items()
    told["entry"] = other["entry"]
    assert f"the record {key[:12]} is not what its index says" in refused(forgery.pack())


@pytest.mark.parametrize("folder", ["records", "schedules", "calls", "texts"])
def test_a_damaged_file_of_tlcaches_is_refused(forgery, refused, folder):
    number = next(n for n, x in enumerate(forgery.names()) if x.startswith(f"tlcache/{folder}"))
    name = forgery.names()[number]
    forgery.index["files"][name] = {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    forgery.members[number] = (tar.header(name, 2), b"{}")
    assert f"{name} is no" in refused(forgery.pack())


def path_of(key: str, folder: str = "calls") -> str:
    return calls.path_of("", key, folder)


def changed(forgery, path: str, **fields: object) -> None:
    """Give a file of calls other fields (`...` for none), and a checksum that holds."""
    number = forgery.names().index(path)
    values = {**record.contents(forgery.members[number][1]), **fields}
    data = record.encode({name: value for name, value in values.items() if value is not ...})
    told = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forgery.index["files"][path] = told
    forgery.members[number] = (tar.header(path, len(data)), data)


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        (path_of(CALLS[0]), {"entry": "/tmp/abab"}, "is not below the root"),
        (path_of(CALLS[0]), {"entry": "../abab"}, "is not below the root"),
        (
            path_of(CALLS[0]),
            {"entry": f"0.1.15/linux-x86_64/kernels/{KEY}"},
            f"points at 0.1.15/linux-x86_64/kernels/{KEY}, a kernel that it does not hold",
        ),
        (path_of(CALLS[0]), {"entry": "tlcache/calls"}, "a kernel that it does not hold"),
        (
            path_of(CALLS[0]),
            {"library": {"name": "executable.so", "size": 3, "sha256": "00" * 32}},
            "tells of another library than it holds",
        ),
        (
            path_of(CALLS[0]),
            {"library": {"name": "../x.so", "size": 3, "sha256": "00" * 32}},
            "is a path",
        ),
        (path_of(CALLS[0]), {"created": "yesterday"}, "is no sound call"),
        (path_of(CALLS[0]), {"key": CALLS[1]}, "filed under another key than its own"),
        (path_of(CALLS[0]), {"schema": 2}, "schema 2"),
        (path_of(CALLS[0]), {"kind": "style"}, "is no sound call"),
        (path_of(CALLS[0]), {"kind": "warmed"}, "is no sound call"),
        (
            path_of(CALLS[0]),
            {"kind": "warmed", "call": None, "reason": None, "entry": "tlcache/calls"},
            "a kernel that it does not hold",
        ),
        (path_of(STYLE), {"key": KEY}, "filed under another key than its own"),
        (path_of(STYLE), {"mode": "both"}, "is no sound call"),
        (path_of(TEXT, "texts"), {"key": KEY}, "filed under another key than its own"),
        (path_of(TEXT, "texts"), {"schema": True}, "schema True"),
        (path_of(TEXT, "texts"), {"key": ...}, "is no sound analysis of a text"),
    ],
)
def test_a_call_that_no_export_would_write_is_refused(forgery, refused, path, fields, said):
    changed(forgery, path, **fields)
    told = refused(forgery.pack())
    assert path in told and said in told


def test_a_call_that_comes_twice_is_refused(forgery, refused):
    number = forgery.names().index(path_of(CALLS[0]))
    forgery.members.insert(number, forgery.members[number])
    assert f"holds {path_of(CALLS[0])} twice" in refused(forgery.pack())


def test_a_call_before_its_kernel_is_refused(forgery, refused):
    number = forgery.names().index(path_of(CALLS[0]))
    forgery.members.insert(0, forgery.members.pop(number))
    told = list(forgery.index["files"].items())
    told.insert(0, told.pop(number))
    forgery.index["files"] = dict(told)
    assert "which belongs there" in refused(forgery.pack())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    st.sampled_from([path_of(CALLS[0]), path_of(STYLE), path_of(TEXT, "texts")]),
    st.sampled_from([*calls.Answer._fields, *calls.Style._fields, "schema", "key", "kind"]),
    values,
)
def test_whatever_a_call_says_the_root_is_as_it_was_or_sound(
    forgery, tmp_path, tree, path, field, value
):
    """Each with a checksum that holds: an import takes what `verify` finds nothing wrong with."""
    root, number = tmp_path / "any", forgery.names().index(path)
    kept = forgery.members[number], forgery.index["files"][path]
    changed(forgery, path, **{field: value})
    root.mkdir(exist_ok=True)
    try:
        receiving.receive(str(root), [str(forgery.pack())])
    except TlcacheError:
        assert tree(root) == {}
    else:
        assert {found.severity for found in verify.plan(root)} <= {"note"}
        shutil.rmtree(root)
    finally:
        forgery.members[number], forgery.index["files"][path] = kept


def test_a_closure_under_another_name_is_refused(forgery, refused):
    name = f"tlcache/closures/{'0' * 16}-{'0' * 16}.json"
    forgery.add(name, b'{"algorithm": 1}')
    assert f"{name} is no source closure" in refused(forgery.pack())


def test_what_follows_after_the_end_is_refused(forgery, refused):
    forgery.extra = b"more"
    assert "no zstd data, or damaged" in refused(forgery.pack())
    forgery.extra = zstandard.compress(b"more")
    assert "something follows after its end" in refused(forgery.pack())


@pytest.mark.parametrize("data", [b"", b"\0", b"PK\3\4", b"\x28\xb5\x2f\xfd", bytes(10_000)])
def test_what_is_no_archive_is_refused(refused, tmp_path, data):
    path = tmp_path / "none.tar.zst"
    path.write_bytes(data)
    refused(path)


def test_an_archive_that_is_cut_off_anywhere_is_refused(archive, refused, tmp_path):
    data, path = archive.read_bytes(), tmp_path / "cut.tar.zst"
    for share in (0.01, 0.2, 0.5, 0.9, 0.99):
        path.write_bytes(data[: int(len(data) * share)])
        refused(path)


@settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.data())
def test_whatever_the_bytes_are_the_root_is_as_it_was_or_has_all_of_the_archive(
    forgery, tmp_path, tree, files, source, data
):
    path, root = tmp_path / "any.tar.zst", tmp_path / "any"
    kind = data.draw(st.sampled_from(["raw", "tar", "packed"]))
    if kind == "packed":
        whole = bytearray(forgery.pack().read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    elif kind == "tar":
        packed = forgery.pack().read_bytes()
        plain = bytearray(zstandard.decompress(packed))
        for _ in range(data.draw(st.integers(1, 4))):
            plain[data.draw(st.integers(0, len(plain) - 1))] = data.draw(st.integers(0, 255))
        whole = bytearray(zstandard.compress(bytes(plain), 1))
    else:
        whole = bytearray(data.draw(st.binary(max_size=2000)))
    path.write_bytes(whole)
    root.mkdir(exist_ok=True)
    try:
        receiving.receive(str(root), [str(path)])
    except TlcacheError:
        assert tree(root) == {}
    else:
        assert files(root) == files(source)
        shutil.rmtree(root)


@settings(max_examples=200, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.binary(min_size=512, max_size=512))
def test_any_block_is_a_header_or_refused(block):
    try:
        name, size = tar.parse(block)
    except ArchiveError:
        return
    assert size >= 0 and isinstance(name, str)


def test_an_index_alone_can_be_read(archive):
    with archive.open("rb") as file:
        assert reading.read_index("x", file).records
