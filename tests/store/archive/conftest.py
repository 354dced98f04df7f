"""What the tests of archives share: a root of real entries with records and calls, what it packs
to, and archives that no `tlcache export` would write.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tlcache import targets
from tlcache.fingerprint import versions
from tlcache.spec import KernelSpec
from tlcache.store import calls, layout, record, schedules
from tlcache.store.archive import choosing, receiving, sending, tar
from tlcache.store.archive.receiving import Imported
from tlcache.store.calls import Answer, Style
from tlcache.store.record import Launch, Library, Param, Record
from tlcache.store.schedules import Tuned

CALLS = ["ca" * 32, "cb" * 32]
STYLE, TEXT = "57" * 32, "7e" * 32
COMPILED = "2026-01-31T12:00:00+00:00"


def record_of(root: Path, place: layout.EntryPlace, number: int) -> Record:
    """A record for a kernel of a root, as a warm would have filed it."""
    spec = KernelSpec(
        "ops.kernels.rms_norm:rms_norm",
        {"M": number, "N": 64, "eps": 1e-6, "dtype": "float32"},
        {"block_m": 1, "threads": 128},
        targets.parse("sm90"),
    )
    (library,) = place.path.glob("*.so")
    data = library.read_bytes()
    params = (Param("x", "float32", (number, 64)), Param("y", "float32", (number, 64)))
    return Record(
        action_key=hashlib.sha256(place.key.encode()).hexdigest(),
        spec=spec,
        entry=os.path.relpath(place.location, root),
        library=Library(library.name, len(data), hashlib.sha256(data).hexdigest()),
        launch=Launch("tvm_ffi", "main", params, (1,), ()),
        versions=versions(),
        toolkit={"nvcc": "13.0.88", "host_compiler": None, "driver": None},
        source_digest="0f" * 32,
        compile_seconds=2.0,
        created=COMPILED,
    )


def answer_of(root: Path, place: layout.EntryPlace) -> Answer:
    """The answer to a call that means a kernel of a root, as a program would have filed it."""
    library = next(path for path in place.path.iterdir() if path.suffix == ".so")
    return Answer(
        kernel="program.kernels:add",
        title="add n=8",
        entry=os.path.relpath(place.location, root),
        library=record.library_at(place.location, library.name),
        backend="tvm_ffi",
        target='{"kind":"cuda","arch":"sm_90"}',
        inputs=2,
        outputs=(1,),
        callee=True,
        signature="",
        pass_configs={},
        compile_flags=None,
        compile_seconds=2.0,
        versions=versions(),
        created=COMPILED,
    )


@pytest.fixture
def plain(mixed_root: Path, tmp_path: Path) -> Path:
    """A root of entries of many releases; those of 0.1.15 have records, one a tuned schedule."""
    root = tmp_path / "source"
    shutil.copytree(mixed_root, root)
    places = [place for place in layout.entries(root) if place.tilelang == "0.1.15"]
    found = [
        record_of(root, place, number)
        for number, place in enumerate(places, 1)
        if any(place.path.glob("*.so"))
    ]
    for one in found:
        record.write(root, one)
    spec = found[0].spec
    schedules.write(root, Tuned("rms_norm", spec, 1.0, spec.schedule, 2.0, "NVIDIA H200"))
    return root


@pytest.fixture
def source(plain: Path) -> Path:
    """The same, and calls mean kernels of 0.1.15 and 0.1.14, which has no records."""
    for number, version in enumerate(("0.1.15", "0.1.14")):
        place = next(
            place
            for place in layout.entries(plain)
            if place.tilelang == version and any(place.path.glob("*.so"))
        )
        calls.write_answer(str(plain), CALLS[number], answer_of(plain, place))
    calls.write_style(str(plain), STYLE, Style("lazy", None, {}))
    calls.write_texts(str(plain), TEXT, {"0" * 64: ["add", "00", []]})
    return plain


@pytest.fixture
def archive(source: Path, tmp_path: Path) -> Path:
    """All of that root in one file."""
    path = tmp_path / "all.tar.zst"
    sending.send(choosing.everything(str(source)), str(path))
    return path


@dataclass
class Forgery:
    """An archive taken apart, to be changed and put together again.

    Attributes:
        index: Its document.
        members: The headers and bytes of what follows.
        path: Where `pack` writes it.
    """

    index: dict[str, Any]
    members: list[tuple[bytes, bytes]]
    path: Path
    level: int = 3
    extra: bytes = field(default=b"")

    @property
    def kernel(self) -> str:
        """The first kernel of 0.1.15 that has a record."""
        return min(told["entry"] for told in self.index["records"].values())

    def names(self) -> list[str]:
        return list(self.index["files"])

    def add(self, name: str, data: bytes, *, header: bytes | None = None) -> None:
        """Add a file that the index names, too, before tlcache's."""
        sha256 = hashlib.sha256(data).hexdigest()
        number = next(n for n, each in enumerate(self.names()) if each.startswith("tlcache/"))
        told = list(self.index["files"].items())
        told.insert(number, (name, {"size": len(data), "sha256": sha256}))
        self.index["files"] = dict(told)
        self.members.insert(number, (header or tar.header(name, len(data)), data))

    def pack(self) -> Path:
        first = json.dumps(self.index).encode()
        parts = [(tar.header("index.json", len(first)), first), *self.members]
        body = b"".join(h + data + tar.padding(len(data)) for h, data in parts)
        packed = zstandard.ZstdCompressor(level=self.level).compress(body + tar.END)
        self.path.write_bytes(packed + self.extra)
        return self.path


@pytest.fixture
def forgery(archive: Path, tmp_path: Path) -> Forgery:
    members = []
    with archive.open("rb") as file:
        whole = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    with tarfile.open(fileobj=io.BytesIO(whole)) as opened:
        for member in opened:
            content = opened.extractfile(member)
            assert content is not None
            members.append((tar.header(member.name, member.size), content.read()))
    index = json.loads(members.pop(0)[1])
    return Forgery(index, members, tmp_path / "forged.tar.zst")


@pytest.fixture
def special() -> Callable[..., bytes]:
    """The header of a member that is no plain file: its name, its type, what it links to."""

    def special(name: str, kind: bytes, link: str = "") -> bytes:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, link
        return info.tobuf(tarfile.USTAR_FORMAT)

    return special


@pytest.fixture
def tree() -> Callable[[Path], dict[str, bytes | str]]:
    """All that is below a directory: the bytes of files, and what else there is."""

    def tree(root: Path) -> dict[str, bytes | str]:
        return {
            str(path.relative_to(root)): path.read_bytes()
            if path.is_file()
            else f"{path.lstat().st_mode:o}"
            for path in sorted(root.rglob("*"))
        }

    return tree


@pytest.fixture
def files(tree: Callable[[Path], dict[str, bytes | str]]) -> Callable[[Path], dict[str, bytes]]:
    """The files below a directory, but for locks."""

    def files(root: Path) -> dict[str, bytes]:
        return {
            name: data
            for name, data in tree(root).items()
            if isinstance(data, bytes) and not name.startswith("tlcache/locks")
        }

    return files


@pytest.fixture
def taken(cache_root: Path) -> Callable[..., Imported]:
    """Import archives into the test's cache root."""
    return lambda *sources, **more: receiving.receive(
        str(cache_root), [str(each) for each in sources], **more
    )
