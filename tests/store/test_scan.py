"""Scanning a root that is damaged, changing, hostile or large: facts or None, never an error."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tlcache.store import binary, device_code, entry, layout, params, pickled, scan
from tlcache.store.elf import ElfError
from tlcache.store.entry import EntryParam, Facts
from tlcache.store.layout import EntryPlace

SHARED = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
FIXTURE = Path(__file__).parent / "fixtures" / "mixed_root.tar.xz"
KEY = "3c" * 32
KERNELS = "0.1.15/linux-x86_64/kernels"


@pytest.fixture(scope="module")
def files():
    """The files of the fixture by their paths."""
    with tarfile.open(FIXTURE) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


@pytest.fixture(scope="module")
def sample(files):
    """The files of one entry: tvm_ffi for sm_90a."""
    start = f"{KERNELS}/7606"
    return {name.rpartition("/")[2]: data for name, data in files.items() if name.startswith(start)}


@pytest.fixture
def place(cache_root, sample):
    path = cache_root / KERNELS / KEY
    path.mkdir(parents=True)
    for name, data in sample.items():
        (path / name).write_bytes(data)
    return EntryPlace(KEY, str(path), "0.1.15", "linux-x86_64")


def only(root):
    (found,) = scan.scan(root)
    return found


# --- damaged files ---


@pytest.mark.parametrize("share", [0, 1, 16, 63, 64, 200, 1000, 0.25, 0.5, 0.75, 0.999])
def test_a_library_that_is_cut_off_tells_nothing_and_the_rest_still_does(place, cache_root, share):
    library = place.path / "executable.so"
    data = library.read_bytes()
    library.write_bytes(data[: share if isinstance(share, int) else int(len(data) * share)])
    found = only(cache_root)
    assert (found.facts.targets, found.facts.toolkit, found.payload) == (None, None, None)
    assert found.kernel == "scale"  # by its source
    assert found.params == (EntryParam("float16", (128, 64)),) * 2
    assert found.backend == "tvm_ffi"


def test_an_entry_of_empty_files_tells_its_backend_alone(place, cache_root):
    for path in place.path.iterdir():
        path.write_bytes(b"")
    found = only(cache_root)
    assert found.facts == Facts()
    assert (found.backend, found.bytes, found.payload) == ("tvm_ffi", 0, None)


@pytest.mark.parametrize(
    "name", ["executable.so", "params.json", "device_kernel.cu", "manifest.json"]
)
def test_a_directory_where_a_file_should_be_is_no_file(place, cache_root, name):
    (place.path / name).unlink()
    (place.path / name / "inside").mkdir(parents=True)
    found = only(cache_root)
    assert (found.library is None) == (name == "executable.so")
    assert (found.params is None) == (name == "params.json")
    assert found.kernel == "scale"


def test_a_pipe_or_a_link_where_a_file_should_be_is_never_opened(place, cache_root, tmp_path):
    for path in list(place.path.iterdir()):
        path.unlink()
    os.mkfifo(place.path / "executable.so")
    (place.path / "params.json").symlink_to("/dev/zero")
    (place.path / "device_kernel.cu").symlink_to(tmp_path)
    assert only(cache_root).facts == Facts()


def test_a_file_that_becomes_a_pipe_after_it_was_listed_does_not_hold_the_scan_up(place):
    found = entry.listing(place)
    (place.path / "executable.so").unlink()
    os.mkfifo(place.path / "executable.so")
    facts, payload, _ = entry.facts_of(place, found)
    assert (facts.targets, payload) == (None, None)


@pytest.mark.parametrize("name", ["executable.so", "params.json", "device_kernel.cu"])
def test_a_file_that_vanishes_after_it_was_listed_tells_nothing_and_is_not_kept(place, name):
    found = entry.listing(place)
    (place.path / name).unlink()
    facts, _, sound = entry.facts_of(place, found)
    # The source is not asked where the library tells the name.
    assert sound == (name == "device_kernel.cu")
    assert (facts.targets is None) == (name == "executable.so")
    assert (facts.params is None) == (name == "params.json")


def test_entries_that_vanish_during_the_scan_do_no_harm(cache_root, place):
    for digit in "4567":
        shutil.copytree(place.location, place.path.with_name(digit * 64))
    found = scan.scan(cache_root)
    next(found)
    shutil.rmtree(cache_root)
    rest = list(found)
    assert len(rest) == 4
    assert all((one.facts, one.bytes, one.created) == (Facts(), 0, None) for one in rest)


@pytest.mark.parametrize(
    "name", ["x", "K" * 64, KEY[:-1], KEY.upper(), KEY + "0", "3c\n", "ü" * 64, "-rf", " "]
)
def test_what_is_not_named_by_a_key_is_reported_and_not_read(cache_root, place, name):
    shutil.move(place.location, place.path.with_name(name))
    found = only(cache_root)
    assert (found.place.kind, found.place.key, found.facts) == ("unknown", name, Facts())
    assert found.bytes > 20_000


def test_a_name_that_is_no_text_is_reported(cache_root, place):
    os.rename(place.location, os.fsencode(place.path.parent) + b"/\xff\xfe")
    found = only(cache_root)
    assert found.place.kind == "unknown"
    assert os.fsencode(found.place.key) == b"\xff\xfe"


def test_loops_of_links_are_reported_and_not_followed(cache_root, place):
    version = cache_root / "0.1.15"
    (version / "linux-x86_64" / "again").symlink_to(cache_root)
    (cache_root / "0.1.14").symlink_to(cache_root)
    (place.path.parent / ("aa" * 32)).symlink_to("aa" * 32)
    (place.path / "self").symlink_to(".")
    found = {one.place.key: one.place.kind for one in scan.scan(cache_root)}
    assert found == {
        KEY: "kernel",
        "again": "unknown",
        "0.1.14": "unknown",
        "aa" * 32: "unknown",
    }


@pytest.fixture
def open_place():
    """A directory that every user may enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        yield Path(place)


def test_what_may_not_be_read_is_listed_with_what_a_look_at_it_tells(cache_root, place, open_place):
    """As another user, since root may read everything."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    open_root = open_place / "root"
    shutil.copytree(cache_root, open_root)
    there = open_root / KERNELS / KEY
    locked = there.with_name("44" * 32)
    shutil.copytree(there, locked)
    (there / "executable.so").chmod(0)
    locked.chmod(0)
    closed = open_root / "0.1.14/linux-x86_64/kernels"
    closed.mkdir(parents=True)
    closed.chmod(0)
    source = (
        "import json, os, sqlite3, sys\n"
        "from tlcache.store import binary, params, scan\n"
        "os.setuid(65534)\n"
        "for one in scan.scan(sys.argv[1]):\n"
        "    print(json.dumps([one.place.key, one.place.kind, one.target, one.kernel, one.bytes]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, str(open_root)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    size = sum(path.stat().st_size for path in place.path.iterdir())
    assert [json.loads(row) for row in done.stdout.splitlines()] == [
        ["kernels", "unknown", None, None, 0],
        [KEY, "kernel", None, "scale", size],
        ["44" * 32, "kernel", None, None, 0],
    ]


# --- params ---


def graph(name):
    nodes = [
        {"type": "ffi.String", "data": "dtype"},
        {"type": "ffi.String", "data": "float32"},
        {"type": "ffi.String", "data": "shape"},
        {"type": "ffi.String", "data": name},
        {"type": "tirx.Var", "data": {"name": 3}},
        {"type": "ffi.Array", "data": [4]},
        {"type": "ffi.Map", "data": [0, 1, 2, 5]},
        {"type": "ffi.Array", "data": [6]},
    ]
    return json.dumps({"root_index": 7, "nodes": nodes}).encode()


def test_a_name_of_ten_thousand_characters_is_read_as_it_is(place, cache_root, tlcache):
    name = "n" * 10_000
    (place.path / "params.json").write_bytes(graph(name))
    assert only(cache_root).params == (EntryParam("float32", (name,)),)
    ran = tlcache("ls")
    assert ran.code == 0 and f"[{name}]" in ran.out


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"root_index": 0, "nodes": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        graph("n" * 100_000),
        b"1" * 10_000,
        b" " * (5 * 1024 * 1024) + b"{}",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_json_that_is_deep_or_huge_is_none(place, cache_root, text):
    (place.path / "params.json").write_bytes(text)
    found = only(cache_root)
    assert (found.params, found.target) == (None, "sm_90a")


def test_a_pickle_is_never_run(tmp_path):
    marker = tmp_path / "run"

    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    for protocol in range(6):
        assert params.from_pickle(pickle.dumps([Runs()], protocol)) is None
    assert not marker.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x05.",
        b"\x80\x05]\x94.",  # no parameters: an empty list
        b"\x80\x05r\xff\xff\xff\x7f.",  # a memo that would take 16 GiB
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a bytearray of 8 EiB
        b"\x80\x05(" + b"(" * 1000 + b"t" * 1000 + b".",
        b"cos\nsystem\n(S'true'\ntR.",
        b"]" * (300 * 1024) + b".",
        pickle.dumps({"a": 1}),
        pickle.dumps([1, 2, 3]),
        pickle.dumps(list(range(1000))),
        pickle.dumps([{"dtype": "float32", "shape": [1]}]),
    ],
    ids=lambda data: repr(data[:24]),
)
def test_a_pickle_that_is_no_list_of_parameters_is_none(data):
    assert params.from_pickle(data) in (None, ())


def pickles(files):
    return sorted({data for name, data in files.items() if name.endswith("params.pkl")})


def test_the_pickles_of_every_release_are_read(files):
    shapes = {tuple(param.shape for param in params.from_pickle(data)) for data in pickles(files)}
    assert shapes == {((128, 64),) * 2, ((8, 16),) * 2, (("rows", 64),) * 2}


# --- damage by hypothesis ---


@st.composite
def damage(draw, data):
    """Bytes with some cut out, overwritten, or put in."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([0, 1, 2, 4, 8, 64])))
        patch = draw(
            st.binary(max_size=8)
            | st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\x7fELF", b"\x50\xed\x55\xba"])
        )
        if draw(st.booleans()):
            patch = patch[: end - start].ljust(end - start, b"\0")
        data = data[:start] + patch + data[end:]
    return data


def sound(facts):
    """Whether facts are of the form that they should have."""
    assert facts.kernel is None or type(facts.kernel) is str
    assert facts.targets is None or all(type(target) is str for target in facts.targets)
    assert facts.targets != ()
    for param in facts.params or ():
        assert type(param.dtype) is str
        assert all(d is None or type(d) in (int, str) for d in param.shape)
    for kernel in facts.kernels:
        assert type(kernel.name) is str and type(kernel.shared) is int


@SHARED
@given(data=st.data())
def test_damage_to_any_file_of_any_entry_never_stops_a_scan(files, tmp_path_factory, data):
    names = sorted(
        name
        for name in files
        if name.endswith((".so", ".cubin", ".fatbin", ".json", ".pkl", ".cu"))
        and len(files[name]) < 200_000
    )
    name = data.draw(st.sampled_from(names))
    whole = data.draw(damage(files[name]))
    root = tmp_path_factory.mktemp("damaged")
    start = name.rpartition("/")[0]
    for other, content in files.items():
        if other.rpartition("/")[0] == start and len(content) < 200_000:
            path = root / other
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(whole if other == name else content)
    for place in layout.places(root):
        sound(entry.read(place).facts)
    shutil.rmtree(root)


@SHARED
@given(data=st.data())
def test_damage_within_device_code_yields_code_or_an_error_of_its_own(files, data):
    names = sorted(name for name in files if "/cuda-binaries/" in name and name.endswith("bin"))
    whole = data.draw(damage(files[data.draw(st.sampled_from(names))]))
    try:
        for part in device_code.read(whole):
            assert part.target is None or part.target.startswith(("sm_", "compute_"))
    except ElfError:
        pass


@SHARED
@given(
    st.sampled_from(["executable.so", "kernel_lib.so", "kernel.cubin", "kernel.py"]), st.binary()
)
def test_any_bytes_are_no_library(name, data):
    for beginning in (b"", b"\x7fELF\x02\x01\x01", b"\x50\xed\x55\xba\x01\0\x10\0"):
        told = binary.read(name, beginning + data)
        assert told.targets is None and told.code == ()


@SHARED
@given(data=st.data())
def test_a_damaged_pickle_is_parameters_or_none(files, data):
    whole = data.draw(damage(data.draw(st.sampled_from(pickles(files)))))
    sound(Facts(params=params.from_pickle(whole)))


@SHARED
@given(st.binary(max_size=40))
def test_any_bytes_are_a_pickle_or_refused(data):
    try:
        pickled.read(b"\x80\x04" + data + b".")
    except pickled.PickleError:
        pass


NAMES = st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=12)
TREES = st.recursive(
    st.binary(max_size=20) | st.none(),
    lambda inner: st.dictionaries(
        NAMES
        | st.sampled_from(
            [
                *(KEY, "0.1.15", "0.1.11-x86_64", "linux-x86_64", "kernels", "cuda-binaries"),
                *("autotuner", ".staging", "tmp", "frontend", "executable.so", "params.json"),
            ]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)


def plant(path, tree):
    if isinstance(tree, dict):
        path.mkdir()
        for name, inner in tree.items():
            try:
                plant(path / name, inner)
            except (OSError, ValueError):
                pass  # a name that this file system does not take, like `..`
    elif tree is None:
        path.symlink_to("..")
    else:
        path.write_bytes(tree)


@SHARED
@given(st.dictionaries(NAMES | st.sampled_from([KEY, "0.1.15", "tmp"]), TREES, max_size=4))
def test_any_tree_of_files_is_listed_and_left_as_it_is(tmp_path_factory, tree):
    root = tmp_path_factory.mktemp("tree") / "root"
    plant(root, tree)

    def look():
        return sorted((str(path), path.lstat().st_mtime_ns) for path in root.glob("**/*"))

    before = look()
    for place in layout.places(root):
        sound(entry.read(place).facts)
    assert look() == before
    shutil.rmtree(root)


# --- what a scan costs ---


def test_a_thousand_entries_take_little_memory_and_are_read_once(cache_root, sample, run):
    for number in range(1000):
        path = cache_root / KERNELS / f"{number:064x}"
        path.mkdir(parents=True)
        for name, data in sample.items():
            (path / name).write_bytes(data)
    time.sleep(2.1)
    source = (
        "import re, sys\n"
        "from tlcache.store import entry, scan\n"
        "read = entry.facts_of; calls = []\n"
        "entry.facts_of = lambda *arguments: calls.append(1) or read(*arguments)\n"
        "targets = {one.target for one in scan.scan(sys.argv[1])}\n"
        # Not ru_maxrss: a process inherits the peak of the one that forked it.
        "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
        "print(len(calls), *targets, int(peak) // 1024)"
    )
    first = run([sys.executable, "-c", source, str(cache_root)])
    again = run([sys.executable, "-c", source, str(cache_root)])
    assert first.out.split()[:2] == ["1000", "sm_90a"], first.err
    assert again.out.split()[:2] == ["0", "sm_90a"], again.err
    assert int(first.out.split()[2]) < 100 and int(again.out.split()[2]) < 100


def test_one_thing_is_seen_as_in_a_scan(mixed):
    filings = {}
    for one in scan.scan(mixed, filings):
        root = layout.root_of(mixed, one.place)
        assert scan.look(one.place, filings[root]) == one
        assert scan.look(one.place, filings[root], one) is one
        (shutil.rmtree if one.place.path.is_dir() else os.unlink)(one.place.path)
        assert scan.look(one.place, filings[root], one) is None
