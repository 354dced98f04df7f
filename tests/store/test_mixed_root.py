"""A real root with entries of six TileLang releases: what each of them tells, held to a table.

How it was made stands in `fixtures/make_entry.py`. Not in it, since nothing here can make one
without a GPU: an entry of the cutedsl backend.
"""

from __future__ import annotations

import io
import os
import shutil
from collections import Counter

import pytest

from tlcache.store import binary, device_code, entry, layout, scan, scan_cache
from tlcache.store.device_code import DeviceKernel
from tlcache.store.elf import Elf

elftools = pytest.importorskip("elftools.elf.elffile")
HALF, FULL = [("float16", (128, 64))] * 2, [("float32", (128, 64))] * 2
DYNAMIC, SMALL = [("float16", ("rows", 64))] * 2, [("float32", (8, 16))] * 2

# The first digits of the key, and what the entry tells: kind, version, kernel, backend, target,
# toolkit, host, parameters, and the registers and static shared memory of its kernels.
EXPECTED = """
1f2e kernel      -      scale     cython  sm_90a      13.0.88 x86_64 HALF    240/2048
b0f7 kernel      -      scale_cpu cython  cpu         -       x86_64 FULL    -
cd84 kernel      -      tuned     cython  cpu         -       x86_64 SMALL   -
e9ec kernel      -      scale     tvm_ffi sm_80       13.0.88 x86_64 HALF    12/0
abab autotuner   -      tuned     cython  cpu         -       x86_64 SMALL   -
1bb1 kernel      0.1.11 scale_cpu cython  cpu         -       x86_64 FULL    -
7cfe kernel      0.1.11 scale     tvm_ffi sm_90a      13.0.88 x86_64 HALF    12/1024
d7de kernel      0.1.11 scale     tvm_ffi sm_80       13.0.88 x86_64 HALF    12/0
5cbf cuda-binary 0.1.13 scale     -       sm_80       13.0.88 -      -       12/0
abab autotuner   0.1.13 tuned     cython  cpu         -       x86_64 SMALL   -
6cb7 kernel      0.1.13 tuned     cython  cpu         -       x86_64 SMALL   -
cb47 kernel      0.1.13 scale     tvm_ffi sm_80       13.0.88 x86_64 HALF    12/0
ccde kernel      0.1.13 scale_cpu cython  cpu         -       x86_64 FULL    -
56aa cuda-binary 0.1.14 scale     -       sm_80       13.0.88 -      -       12/0
8a5f cuda-binary 0.1.14 scale_dyn -       sm_90       13.0.88 -      -       11/1024
0941 kernel      0.1.14 scale_cpu cython  cpu         -       x86_64 FULL    -
75e7 kernel      0.1.14 scale_dyn tvm_ffi sm_90       13.0.88 x86_64 DYNAMIC 11/1024
fb5d kernel      0.1.14 scale     tvm_ffi sm_80       13.0.88 x86_64 HALF    12/0
3996 cuda-binary 0.1.15 scale     -       sm_90a      13.0.88 -      -       12/1024
6756 cuda-binary 0.1.15 scale_fat -       sm_80,sm_90 13.0.88 -      -       12/0,12/1024
84b6 cuda-binary 0.1.15 scale_dyn -       sm_90a      13.0.88 -      -       11/1024
8a66 cuda-binary 0.1.15 scale     -       sm_100a     13.0.88 -      -       12/1024
ee3f cuda-binary 0.1.15 scale     -       sm_90       13.0.88 -      -       12/1024
abab autotuner   0.1.15 tuned     cython  cpu         -       x86_64 SMALL   -
314d kernel      0.1.15 scale     nvrtc   sm_90a      -       -      HALF    12/1024
7606 kernel      0.1.15 scale     tvm_ffi sm_90a      13.0.88 x86_64 HALF    12/1024
9d21 kernel      0.1.15 scale     cython  sm_90a      13.0.88 x86_64 HALF    12/1024
a80a kernel      0.1.15 scale     tvm_ffi sm_90       13.0.88 x86_64 HALF    12/1024
f008 kernel      0.1.15 scale_dyn tvm_ffi sm_90a      13.0.88 x86_64 DYNAMIC 11/1024
f21e kernel      0.1.15 scale     tvm_ffi sm_100a     13.0.88 x86_64 HALF    12/1024
f758 kernel      0.1.15 scale_fat tvm_ffi sm_80,sm_90 13.0.88 x86_64 HALF    12/0,12/1024
f881 kernel      0.1.15 tuned     cython  cpu         -       x86_64 SMALL   -
fbd1 kernel      0.1.15 scale_cpu cython  cpu         -       x86_64 FULL    -
"""
# By content: the kernels, and the cuda-binaries that they were made from. 0.1.11 has none yet, and
# cython and nvrtc do not use them.
JOINED = {
    ("0.1.13", "cb47", "5cbf"),
    ("0.1.14", "fb5d", "56aa"),
    ("0.1.14", "75e7", "8a5f"),
    ("0.1.15", "7606", "3996"),
    ("0.1.15", "f758", "6756"),
    ("0.1.15", "f008", "84b6"),
    ("0.1.15", "f21e", "8a66"),
    ("0.1.15", "a80a", "ee3f"),
}


def line(one):
    names = {"HALF": HALF, "FULL": FULL, "DYNAMIC": DYNAMIC, "SMALL": SMALL}
    (params,) = [name for name, known in names.items() if list(one.params or ()) == known] or ["-"]
    kernels = [f"{kernel.registers}/{kernel.shared}" for kernel in one.facts.kernels]
    cells = [one.place.key[:4], one.place.kind, one.place.tilelang, one.kernel, one.backend]
    cells += [one.target, one.facts.toolkit, one.facts.host, params, ",".join(kernels)]
    return [cell or "-" for cell in cells]


def test_every_entry_of_every_release_tells_what_it_is(mixed):
    told = sorted(line(one) for one in scan.scan(mixed))
    assert told == sorted(row.split() for row in EXPECTED.strip().splitlines())


def test_a_second_scan_tells_the_same_as_the_first(mixed, monkeypatch):
    monkeypatch.setattr(scan_cache, "_SETTLED", -1e9)
    first = list(scan.scan(mixed))
    monkeypatch.setattr(entry, "facts_of", None)
    assert list(scan.scan(mixed)) == first


def test_kernels_and_cuda_binaries_join_by_content(mixed):
    found = list(scan.scan(mixed))
    joined = entry.cuda_binaries(found)
    pairs = {
        (one.place.tilelang, one.place.key[:4], made_from.place.key[:4])
        for one in found
        if one.place.kind == "kernel"
        for made_from in joined.get(one.payload, [])
    }
    assert pairs == JOINED


def test_a_base_directory_with_a_root_for_each_deployment_is_understood(mixed, tmp_path):
    base = tmp_path / "base"
    for name in ("tl0.1.15-cu13.0-3f9c2ab1", "tl0.1.14-cu13.0-77aa0001"):
        shutil.copytree(mixed, base / name)
    (base / "lost+found").mkdir()
    (base / "notes.txt").write_text("x")
    found = Counter(one.place.kind for one in scan.scan(base))
    once = Counter(one.place.kind for one in scan.scan(mixed))
    assert found == Counter({kind: 2 * count for kind, count in once.items()}) + Counter(unknown=2)
    assert layout.roots(base) == [str(base), *sorted(map(str, base.glob("tl*")))]


def test_the_listing_of_the_mixed_root_names_every_target(mixed, tlcache):
    ran = tlcache("ls", "--json")
    targets = {
        tuple(one["target"]) if isinstance(one["target"], list) else one["target"]
        for one in ran.json["entries"]
    }
    assert targets == {"cpu", "sm_80", "sm_90", "sm_90a", "sm_100a", ("sm_80", "sm_90")}
    assert ran.json["totals"]["others"].keys() == {"autotune", "binary"}
    fat = tlcache("inspect", "f758")
    assert "target          sm_80,sm_90\n" in fat.out
    assert "device code     scale_fat_kernel  12 registers, 1024 B shared\n" in fat.out
    assert "cuda-binary     67563ee4" in fat.out


# --- pyelftools reads the same ---


def libraries(root):
    for name in ("executable.so", "kernel_lib.so", "kernel.cubin"):
        yield from sorted(root.glob(f"**/{name}"))


def test_pyelftools_reads_the_same_sections_and_symbols(mixed_root):
    checked = 0
    for path in libraries(mixed_root):
        data = path.read_bytes()
        ours, theirs = Elf(data), elftools.ELFFile(io.BytesIO(data))
        assert ours.flags == theirs.header.e_flags
        assert ours.abi == theirs.header.e_ident.EI_ABIVERSION
        sections = list(theirs.iter_sections())
        assert [
            (section.name.decode(), section.address, section.offset, section.size)
            for section in ours.sections()
        ] == [(s.name, s["sh_addr"], s["sh_offset"], s["sh_size"]) for s in sections]
        for name, dynamic in ((".symtab", False), (".dynsym", True)):
            table = theirs.get_section_by_name(name)
            symbols = table.iter_symbols() if table is not None else ()
            assert [
                (symbol.name.decode(), symbol.value, symbol.size)
                for symbol in ours.symbols(dynamic=dynamic)
            ] == [(s.name, s["st_value"], s["st_size"]) for s in symbols]
        checked += 1
    assert checked > 20


# --- device code by itself ---


def cubin(mixed_root, key="3996"):
    (path,) = mixed_root.glob(f"0.1.15/cuda-binaries/{key}*/kernel.*")
    return path.read_bytes()


def test_an_architecture_that_is_told_by_half_is_not_told(mixed_root):
    """From nvcc 13 on only the compiler's note has the suffix."""
    data = cubin(mixed_root)
    assert device_code.read(data)[0].target == "sm_90a"
    assert device_code.read(data.replace(b"-arch sm_90a ", b"-march sm_90a"))[0].target is None
    assert device_code.read(data.replace(b"-arch sm_90a ", b"-arch sm_80  "))[0].target is None
    assert device_code.read(data.replace(b".note.nv.tkinfo", b".note.nv.tkxnfo"))[0] == (
        *(None, None),
        (DeviceKernel("scale_kernel", 12, 1024),),
    )


def test_an_architecture_before_there_were_suffixes_is_told_by_its_number(mixed_root):
    (fat,) = mixed_root.glob("0.1.14/cuda-binaries/56aa*.cubin")
    data = fat.read_bytes().replace(b".note.nv.tkinfo", b".note.nv.tkxnfo")
    assert device_code.read(data)[0].target == "sm_80"


def test_a_fat_binary_with_a_part_that_does_not_tell_has_no_targets(mixed_root):
    data = cubin(mixed_root, "6756")
    assert binary.read("kernel.fatbin", data).targets == ("sm_80", "sm_90")
    hidden = data.replace(b"-arch sm_90 ", b"-xxxx sm_90 ")
    assert hidden != data
    assert binary.read("kernel.fatbin", hidden).targets is None


def test_ptx_in_a_fat_binary_is_a_target_of_its_own(mixed_root):
    ptx = b"//\n.version 8.0\n.target sm_90a\n.address_size 64\n"
    ptx += b"\0" * (-len(ptx) % 8)
    part = b"\x01\0\x01\x01" + (64).to_bytes(4, "little") + len(ptx).to_bytes(8, "little")
    part = part.ljust(64, b"\0") + ptx
    data = cubin(mixed_root, "6756")
    size = int.from_bytes(data[8:16], "little") + len(part)
    whole = data[:8] + size.to_bytes(8, "little") + data[16:] + part
    assert binary.read("kernel.fatbin", whole).targets == ("sm_80", "sm_90", "compute_90a")


def test_an_entry_of_cutedsl_tells_its_architecture_by_its_compilers_option(tmp_path):
    text = b'options = "--enable-tvm-ffi --gpu-arch=sm_90a --opt-level 3"\n'
    assert binary.read("kernel.py", text).targets == ("sm_90a",)
    assert binary.read("kernel.py", text + text.replace(b"90a", b"80")).targets is None


def test_a_library_that_calls_a_gpu_runtime_is_not_for_the_cpu(mixed_root):
    path = next(mixed_root.glob("0.1.15/**/fbd1*/kernel_lib.so"))
    data = path.read_bytes()
    assert binary.read("kernel_lib.so", data).targets == ("cpu",)
    named = data.replace(b"__gmon_start__\0", b"hipInit\0xxxxxx\0")
    assert binary.read("kernel_lib.so", named).targets is None


def test_listing_reads_without_counting_as_a_use(mixed):
    libraries = [path for path in mixed.glob("**/*") if path.is_file()]
    for path in libraries:
        os.utime(path, (1_000_000_000, 1_500_000_000))
    list(scan.scan(mixed))
    assert {path.stat().st_atime for path in libraries} == {1_000_000_000}
