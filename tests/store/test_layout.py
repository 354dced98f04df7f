"""Where things lie, for every layout that TileLang has had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tlcache.errors import CacheRootError
from tlcache.fingerprint import platform_name, tilelang_version
from tlcache.store import layout
from tlcache.store.layout import EntryPlace

KEY, OTHER = "0a" * 32, "f9" * 32


def entry(root: Path, *parts: str, files: tuple[str, ...] = ("device_kernel.cu",)) -> Path:
    place = root.joinpath(*parts)
    place.mkdir(parents=True)
    for name in files:
        (place / name).write_bytes(b"x")
    return place


# --- the root ---


def test_the_root_is_that_of_the_command_line_then_of_the_variable_then_the_default(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TILELANG_CACHE_DIR", "/some/where")
    assert layout.cache_root("/else/where") == Path("/else/where")
    assert layout.cache_root(Path("/else/where")) == Path("/else/where")
    assert layout.cache_root() == Path("/some/where")
    monkeypatch.setenv("TILELANG_CACHE_DIR", "")
    assert layout.cache_root() == tmp_path / ".tilelang/cache"
    monkeypatch.delenv("TILELANG_CACHE_DIR")
    assert layout.cache_root() == tmp_path / ".tilelang/cache"


def test_a_tilde_in_the_variable_is_not_expanded_because_tilelang_does_not(monkeypatch):
    monkeypatch.setenv("TILELANG_CACHE_DIR", "~/cache")
    assert layout.cache_root() == Path("~/cache")


@pytest.mark.parametrize(
    ("version", "place"),
    [
        ("0.1.15", "0.1.15/linux-x86_64"),
        ("0.1.15+cu128", "0.1.15_cu128/linux-x86_64"),
        ("0.1.15+cu128.gitabc", "0.1.15_cu128.gitabc/linux-x86_64"),
        ("0.2.0.dev1", "0.2.0.dev1/linux-x86_64"),
    ],
)
def test_a_namespace_is_the_version_and_the_platform(version, place):
    assert layout.namespace(version, "linux-x86_64") == place


# --- entries ---

LAYOUTS = [
    ((KEY,), None, None),  # 0.1.8 and earlier
    (("0.1.9-x86_64", "kernels", KEY), "0.1.9", "linux-x86_64"),
    (("0.1.10-aarch64", "kernels", KEY), "0.1.10", "linux-aarch64"),
    (("0.1.11-x86_64", "kernels", KEY), "0.1.11", "linux-x86_64"),
    (("0.1.11_cu128-x86_64", "kernels", KEY), "0.1.11_cu128", "linux-x86_64"),
    (("0.1.12", "linux-x86_64", "kernels", KEY), "0.1.12", "linux-x86_64"),
    (("0.1.15", "linux-x86_64", "kernels", KEY), "0.1.15", "linux-x86_64"),
    (("0.1.15_cu128", "linux-aarch64", "kernels", KEY), "0.1.15_cu128", "linux-aarch64"),
    (("0.2.0.dev1", "darwin-arm64", "kernels", KEY), "0.2.0.dev1", "darwin-arm64"),
]


@pytest.mark.parametrize(("parts", "version", "platform"), LAYOUTS)
def test_an_entry_is_found_in_every_layout(tmp_path, parts, version, platform):
    place = entry(tmp_path, *parts)
    assert list(layout.entries(tmp_path)) == [EntryPlace(KEY, str(place), version, platform)]


def test_entries_of_all_layouts_are_found_together_in_the_order_of_their_paths(tmp_path):
    places = [entry(tmp_path, *parts) for parts, _, _ in LAYOUTS]
    places += [entry(tmp_path, *parts[:-1], OTHER) for parts, _, _ in LAYOUTS if parts != (KEY,)]
    assert [found.path for found in layout.entries(tmp_path)] == sorted(places)


@pytest.mark.parametrize(
    "parts",
    [
        ("0.1.15", "cuda-binaries", KEY),
        ("0.1.15", "linux-x86_64", "autotuner", KEY),
        ("0.1.15", "linux-x86_64", ".staging", KEY),
        ("0.1.15", "linux-x86_64", "kernels", f"{KEY}_4711_0badcafe"),
        ("0.1.15", "linux-x86_64", "kernels", KEY.upper()),
        ("0.1.15", "linux-x86_64", "kernels", KEY[:-1]),
        ("0.1.15", "linux-x86_64", "kernels", KEY + "\n"),
        ("0.1.15", ".staging", "cuda-binaries", KEY),
        ("0.1.11-x86_64", "frontend", KEY),
        ("tlcache", "linux-x86_64", "kernels", KEY),
        ("tlcache", "trash", "kernels", KEY),
        (".hidden", "linux-x86_64", "kernels", KEY),
        ("lost+found",),
    ],
    ids="/".join,
)
def test_what_is_no_entry_is_not_taken_for_one(tmp_path, parts):
    entry(tmp_path, *parts)
    found = [place.path for place in layout.entries(tmp_path)]
    assert found == []


def test_files_and_links_in_the_place_of_directories_are_passed_over(tmp_path):
    root, outside = tmp_path / "root", entry(tmp_path, "outside", KEY)
    sound = entry(root, "0.1.15", "linux-x86_64", "kernels", KEY)
    (root / OTHER).write_text("a file")
    (root / "0.1.14").write_text("a file")
    (root / "0.1.13").mkdir()
    (root / "0.1.13/linux-x86_64").write_text("a file")
    (root / "0.1.12/linux-x86_64").mkdir(parents=True)
    (root / "0.1.12/linux-x86_64/kernels").write_text("a file")
    (sound.parent / OTHER).write_text("a file")
    (sound.parent / ("bb" * 32)).symlink_to(outside)
    (root / ("cc" * 32)).symlink_to(outside)
    (root / "0.1.10-x86_64").symlink_to("absent")
    os.mkfifo(sound.parent / ("dd" * 32))
    assert [place.path for place in layout.entries(root)] == [sound]


@pytest.mark.parametrize("root", ["absent", "file", "loop"])
def test_a_root_that_is_no_directory_has_no_entries_and_no_records(tmp_path, root):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    assert list(layout.entries(tmp_path / root)) == []
    assert list(layout.records(tmp_path / root)) == []


def test_entries_that_vanish_while_they_are_listed_do_no_harm(tmp_path):
    for parts, _, _ in LAYOUTS:
        entry(tmp_path, *parts)
    listing = layout.entries(tmp_path)
    first = next(listing)
    subprocess.run(["rm", "-rf", *map(str, tmp_path.iterdir())], check=True)
    rest = list(listing)
    assert first not in rest
    assert len(rest) < len(LAYOUTS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_directories_that_cannot_be_read_are_passed_over(tmp_path):
    sound = entry(tmp_path, "0.1.15", "linux-x86_64", "kernels", KEY)
    locked = entry(tmp_path, "0.1.14", "linux-x86_64", "kernels", KEY).parent
    locked.chmod(0)
    try:
        assert [place.path for place in layout.entries(tmp_path)] == [sound]
    finally:
        locked.chmod(0o755)


# --- records ---


def test_a_records_path_and_its_locks_tell_the_action_key(tmp_path):
    assert layout.record_path(tmp_path, KEY) == f"{tmp_path}/tlcache/records/0a/{KEY}.json"
    assert layout.lock_path(str(tmp_path), KEY) == f"{tmp_path}/tlcache/locks/{KEY}.lock"


def test_all_records_are_listed_and_nothing_else(tmp_path):
    wanted = [Path(layout.record_path(tmp_path, key)) for key in (KEY, "0a" + "1" * 62, OTHER)]
    for path in wanted:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
        (path.parent / f".{path.name}.17.0badcafe.tmp").write_text("half")
    (tmp_path / "tlcache/records/xy").mkdir()
    (tmp_path / "tlcache/records/xy" / f"{KEY}.json").write_text("{}")
    (tmp_path / "tlcache/records" / f"{KEY}.json").write_text("{}")
    assert list(layout.records(tmp_path)) == sorted(wanted)


# --- making directories ---


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_the_skeleton_is_what_tilelang_and_tlcache_expect(tmp_path):
    root = tmp_path / "deep/root"
    layout.make_skeleton(root, "0.1.15+cu128", "linux-x86_64")
    leaves = {path for path in tree(root) if not any((root / path).iterdir())}
    assert {
        "0.1.15_cu128/linux-x86_64/kernels",
        "0.1.15_cu128/linux-x86_64/.staging",
        "tlcache/records",
        "tlcache/locks",
    } <= leaves
    before = tree(root)
    layout.make_skeleton(root, "0.1.15+cu128", "linux-x86_64")
    assert tree(root) == before


def test_with_the_skeleton_tilelang_imports_from_a_read_only_root(python, mounted):
    root = mounted("size=64k")
    layout.make_skeleton(root, tilelang_version(), platform_name())
    before = tree(root)
    if subprocess.run(["mount", "-o", "remount,ro", str(root)], check=False).returncode:
        pytest.skip("remounting is not permitted here")
    done = python("import tilelang", env={"TILELANG_CACHE_DIR": str(root)})
    assert done.code == 0, done.err
    assert tree(root) == before


@pytest.mark.parametrize("inside", ["", "deeper/still"])
def test_a_skeleton_that_cannot_be_made_is_said(tmp_path, inside):
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / inside
    with pytest.raises(CacheRootError, match=f"the cache root {root} cannot be written") as caught:
        layout.make_skeleton(root, "0.1.15", "linux-x86_64")
    assert "`--cache-dir DIR`" in caught.value.hint


def test_a_skeleton_for_which_there_is_no_room_is_said(mounted):
    root = mounted("size=64k,nr_inodes=4")
    with pytest.raises(CacheRootError, match=f"the disk of the cache root {root} is full") as full:
        layout.make_skeleton(root, "0.1.15", "linux-x86_64")
    assert f"`df -h {root}`" in full.value.hint


def test_listing_needs_nothing_but_the_standard_library():
    source = (
        "import sys; before = set(sys.modules)\n"
        "from tlcache.store import layout\n"
        "tops = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(tops - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    assert done.stdout == "['tlcache']\n"


# --- from a file to its root ---


@pytest.mark.parametrize(
    ("path", "root", "version", "platform", "kind"),
    [
        (f"/r/0.1.15/linux-x86_64/kernels/{KEY}/executable.so", "/r", "0.1.15", "linux-x86_64",
         "kernel"),
        (f"/0.1.15/linux-x86_64/kernels/{KEY}/executable.so", "", "0.1.15", "linux-x86_64",
         "kernel"),
        (f"/a/b/0.1.14/linux-x86_64/autotuner/{KEY}/executable.so", "/a/b", "0.1.14",
         "linux-x86_64", "autotuner"),
        (f"/r/0.1.11-x86_64/kernels/{KEY}/executable.so", "/r", "0.1.11", "linux-x86_64",
         "kernel"),
        (f"/r/{KEY}/kernel_lib.so", "/r", None, None, "kernel"),
        (f"/r/autotuner/{KEY}/kernel_lib.so", "/r", None, None, "autotuner"),
    ],
)  # fmt: skip
def test_the_path_of_a_library_tells_its_root_in_every_layout(path, root, version, platform, kind):
    found, place = layout.holding(path)
    assert found == root
    assert place == (KEY, path.rpartition("/")[0], version, platform, kind)


@pytest.mark.parametrize("path", ["", "/", "[heap]", f"/{KEY}", f"/r/{KEY[:-1]}/x.so", "/usr/x.so"])
def test_other_paths_are_of_no_root(path):
    assert layout.holding(path) is None


def test_every_kernel_of_a_root_is_found_again_by_a_file_in_it(mixed_root):
    places = [one for one in layout.places(mixed_root) if one.kind in ("kernel", "autotuner")]
    assert len({one.tilelang for one in places}) > 3
    for one in places:
        assert layout.holding(f"{one.location}/any") == (layout.root_of(mixed_root, one), one)


@pytest.mark.parametrize(
    ("path", "kind", "location", "name"),
    [
        (f"0.1.15/linux-x86_64/kernels/{'ab' * 32}/executable.so", "kernel", -14, "executable.so"),
        (f"0.1.15/linux-x86_64/autotuner/{'ab' * 32}/a.json", "autotuner", -7, "a.json"),
        (f"0.1.15/cuda-binaries/{'ab' * 32}/kernel.cubin", "cuda-binary", -13, "kernel.cubin"),
        (f"0.1.14/cuda-binaries/{'ab' * 32}.cubin", "cuda-binary", None, f"{'ab' * 32}.cubin"),
        (f"0.1.11-x86_64/kernels/{'ab' * 32}/params.pkl", "kernel", -11, "params.pkl"),
        (f"{'ab' * 32}/kernel.cu", "kernel", -10, "kernel.cu"),
        (f"autotuner/{'ab' * 32}/out_idx.json", "autotuner", -13, "out_idx.json"),
    ],
)
def test_a_files_path_tells_what_it_belongs_to(path, kind, location, name):
    found = layout.file_of(path)
    assert found is not None
    place, called = found
    assert (place.kind, place.key, called) == (kind, "ab" * 32, name)
    assert place.location == path[:location]


def test_all_files_of_a_root_belong_to_its_places(mixed_root):
    for place in layout.places(mixed_root):
        if place.kind in ("kernel", "autotuner", "cuda-binary"):
            files = place.path.iterdir() if place.path.is_dir() else [place.path]
            for file in files:
                below = file.relative_to(mixed_root)
                found, _ = layout.file_of(str(below))
                assert mixed_root / found.location == place.path
                assert found._replace(location=place.location) == place


# --- one directory ---


def test_each_thing_of_a_root_is_an_item_of_the_shelf_that_it_lies_on(mixed_root):
    def things(shelf):
        for name, _, is_directory in layout.listed(shelf.path):
            item = shelf.item(name, is_directory)
            if isinstance(item, layout.Shelf):
                yield from things(item)
            elif item is not None:
                assert item.location == os.path.join(shelf.path, name)
                yield item

    found = list(things(layout.Shelf(str(mixed_root), "root")))
    assert sorted(found) == sorted(layout.places(mixed_root))


def test_a_checksum_touches_the_cubin_beside_it():
    shelf = layout.Shelf("/root/0.1.14/cuda-binaries", "keyed", "0.1.14", None, "cuda-binary")
    name = f"{KEY}.cubin.sha256"
    assert shelf.item(name, False) is None
    assert shelf.touched(name) == (name, f"{KEY}.cubin")
    assert shelf.item(f"{KEY}.cubin", False).key == KEY
    assert shelf._replace(kind="kernel").touched(name) == (name,)


def test_what_decides_whether_a_directory_is_a_root_is_itself_and_its_versions(tmp_path):
    for name in ("0.1.15", "0.1.11-x86_64", "notes"):
        (tmp_path / "base" / name).mkdir(parents=True)
    base = str(tmp_path / "base")
    assert set(layout.undecided(base)) == {base, f"{base}/0.1.15", f"{base}/0.1.11-x86_64"}
