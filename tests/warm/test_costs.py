"""What earlier compiles took, as archives and roots tell it."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from tlcache import targets
from tlcache.errors import ArchiveError, UsageError
from tlcache.fingerprint import versions
from tlcache.spec import KernelSpec
from tlcache.store import record
from tlcache.store.archive import choosing, sending
from tlcache.store.record import Launch, Library, Param, Record
from tlcache.warm import costs

TOOK = {("rms_norm", 1, "sm90"): 2.0, ("rms_norm", 2, "sm90"): 4.0, ("gemm", 1, "cpu"): 9.0}


def spec_of(name: str, rows: int, target: str) -> KernelSpec:
    return KernelSpec(f"ops.kernels.{name}:{name}", {"M": rows}, {}, targets.parse(target))


def key_of(kernel: tuple[str, int, str]) -> str:
    return hashlib.sha256(repr(kernel).encode()).hexdigest()


@pytest.fixture
def root(tmp_path):
    """A root of three kernels, each with its record."""
    root = tmp_path / "root"
    params = (Param("x", "float32", (1,)), Param("y", "float32", (1,)))
    machine = b"\x7fELF\x02\x01" + bytes(12) + (62).to_bytes(2, "little") + bytes(44)
    for kernel, seconds in TOOK.items():
        key = key_of(kernel)
        entry = f"0.1.13/linux-x86_64/kernels/{key}"
        (root / entry).mkdir(parents=True)
        (root / entry / "executable.so").write_bytes(machine)
        (root / entry / "params.json").write_text("[]")
        library = Library("executable.so", len(machine), hashlib.sha256(machine).hexdigest())
        launch = Launch("tvm_ffi", "main", params, (1,), ())
        created = "2026-01-31T12:00:00+00:00"
        known = (versions(), {"nvcc": None, "host_compiler": None, "driver": None}, "0f" * 32)
        record.write(
            root, Record(key, spec_of(*kernel), entry, library, launch, *known, seconds, created)
        )
    return root


@pytest.fixture(params=["root", "archive", "file_url", "pattern", "memory"])
def source(request, root, tmp_path):
    """The same told by each kind of place."""
    if request.param == "root":
        return str(root)
    choice = choosing.everything(str(root))
    if request.param == "memory":
        sending.send(choice, "memory://costs/all.tar.zst")
        return "memory://costs/*.tar.zst"
    path = tmp_path / "all.tar.zst"
    sending.send(choice, str(path))
    return {"archive": str(path), "file_url": f"file://{path}", "pattern": f"{tmp_path}/*.zst"}[
        request.param
    ]


def test_a_kernel_took_what_it_took_and_its_like_the_mean(source):
    told = costs.of(source)
    wanted = {key_of(kernel): spec_of(*kernel) for kernel in TOOK}
    wanted |= {"new": spec_of("rms_norm", 3, "sm90"), "other": spec_of("rms_norm", 1, "cpu")}
    expected = {key_of(kernel): seconds for kernel, seconds in TOOK.items()}
    assert told.seconds(wanted) == {**expected, "new": 3.0}


def test_of_one_kernel_in_two_archives_the_longer_compile_counts(root, tmp_path):
    sending.send(choosing.everything(str(root)), str(tmp_path / "a.tar.zst"))
    key = key_of(("gemm", 1, "cpu"))
    record.write(root, replace(record.read(root, key), compile_seconds=11.0))
    sending.send(choosing.everything(str(root)), str(tmp_path / "b.tar.zst"))
    assert costs.of(f"{tmp_path}/*.zst").exact[key] == 11.0


def test_what_tells_nothing_is_said(tmp_path):
    (tmp_path / "damaged.tar.zst").write_bytes(b"no archive")
    with pytest.raises(ArchiveError, match=r"damaged\.tar\.zst is refused"):
        costs.of(str(tmp_path / "damaged.tar.zst"))
    with pytest.raises(UsageError, match="tells of no kernel what its compile took"):
        costs.of(str(tmp_path))
    with pytest.raises(UsageError, match="nothing matches"):
        costs.of(f"{tmp_path}/*.none")


@pytest.mark.parametrize(
    ("source", "published", "said"),
    [
        ("root", None, "the root that is warmed"),
        ("file://root", None, "the root that is warmed"),
        ("link", None, "the root that is warmed"),
        ("out/*.tar.zst", "out", "where `--publish` puts"),
        ("file://{here}/out/*", "out/", "where `--publish` puts"),
        ("s3://bucket/a/*.tar.zst", "s3://bucket/a/", "where `--publish` puts"),
    ],
)
def test_what_changes_while_hosts_deal_is_refused(
    root, tmp_path, monkeypatch, source, published, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(UsageError, match=said) as caught:
        costs.refuse_moving(source.format(here=tmp_path), root, published)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("source", "published"),
    [
        ("other", "out"),
        ("out/shard-1-of-2-0123456789ab.tar.zst", "out"),
        ("s3://bucket/a/*.tar.zst", "s3://bucket/ab"),
        ("earlier/*.tar.zst", "out"),
        ("root", None),
    ],
)
def test_what_stays_as_it_is_is_not_refused(tmp_path, monkeypatch, source, published):
    monkeypatch.chdir(tmp_path)
    costs.refuse_moving(source, tmp_path / "root", published)
