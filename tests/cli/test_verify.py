"""`tlcache verify`: what it says of a real cache, what `--repair` does to it, and that TileLang
goes on with what is left.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys

import pexpect
import pytest

from tests.environment import clean_environment
from tlcache.store import layout

TLCACHE = [sys.executable, "-c", "from tlcache.cli import main; main()"]

# For each line of its input, which names a root and a kind, forks a process as if it started: that
# compiles kernels by TileLang alone and says which were written, and how often nvcc compiled. To
# import TileLang is most of a start, and is done once.
PROGRAM = """
import json, os, sys
import tilelang
import tilelang.language as T
from tilelang.cache.kernel_cache import KernelCache
from tilelang.contrib import nvcc

saved, compiled = [], []
real_save, real_compile = KernelCache._save_kernel_to_disk, nvcc.compile_cuda


def save(self, key, *args, **kwargs):
    saved.append(key)
    return real_save(self, key, *args, **kwargs)


def compile_cuda(*args, **kwargs):
    compiled.append(1)
    return real_compile(*args, **kwargs)


KernelCache._save_kernel_to_disk = save
nvcc.compile_cuda = compile_cuda


def scale(N, cuda):
    if cuda:
        @T.prim_func
        def scale(x: T.Tensor((N, 64), "float32"), y: T.Tensor((N, 64), "float32")):
            with T.Kernel(N, threads=64) as row:
                for j in T.Parallel(64):
                    y[row, j] = x[row, j] * 2.0
        target = {"kind": "cuda", "arch": "sm_90a"}
        return tilelang.compile(scale, out_idx=[1], target=target, execution_backend="tvm_ffi")

    @T.prim_func
    def scale(x: T.Tensor((N, 64), "float32"), y: T.Tensor((N, 64), "float32")):
        with T.Kernel(1):
            for i in T.serial(N):
                for j in T.serial(64):
                    y[i, j] = x[i, j] * 2.0
    return tilelang.compile(scale, out_idx=[1], target={"kind": "c"}, execution_backend="cython")


def start(kind):
    if kind == "cuda":
        scale(2, True)
        return
    import torch

    for rows in (2, 3):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(scale(rows, False)(x), x * 2)


for line in sys.stdin:
    root, kind = json.loads(line)
    pid = os.fork()
    if not pid:
        os.environ["TILELANG_CACHE_DIR"] = root
        start(kind)
        told = json.dumps({"saved": saved, "compiled": len(compiled)})
        os.write(1, f"RESULT {told}\\n".encode())
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        os.write(1, b"FAILED\\n")
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Start a program that uses TileLang alone, as PROGRAM says."""
    place = tmp_path_factory.mktemp("program")
    (place / "program.py").write_text(PROGRAM)
    kept = clean_environment()
    with (
        (place / "stderr").open("w") as stderr,
        subprocess.Popen(
            [sys.executable, str(place / "program.py")],
            env={**kept, "TILELANG_CACHE_DIR": str(place / "scratch")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):

        def start(root, kind):
            process.stdin.write(json.dumps([str(root), kind]) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith("RESULT "):
                    return json.loads(line.removeprefix("RESULT "))
                if line == "FAILED\n":
                    break
            raise AssertionError((place / "stderr").read_text())

        yield start
        process.stdin.close()


@pytest.fixture(scope="module")
def cpu_made(start, tmp_path_factory):
    root = tmp_path_factory.mktemp("cpu") / "cache"
    assert len(start(root, "cpu")["saved"]) == 2
    return root


@pytest.fixture
def root(cpu_made, cache_root):
    shutil.copytree(cpu_made, cache_root)
    return cache_root


def entries(root):
    return [place.path for place in layout.entries(root)]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# --- with TileLang ---


def test_tilelang_hits_what_was_left_and_compiles_what_was_quarantined(start, tlcache, root):
    broken, sound = entries(root)
    flip(broken / "host_kernel.cu")
    assert start(root, "cpu")["saved"] == []  # TileLang does not look at it
    ran = tlcache("verify")
    assert ran.code == 1
    assert ran.out.splitlines()[1].split("\t") == [
        "error",
        "damaged",
        os.path.relpath(broken, root),
        "host_kernel.cu fails its checksum in manifest.json",
    ]
    assert "hint: `tlcache verify --repair` puts 1 thing into quarantine" in ran.err
    ran = tlcache("verify", "--repair")
    assert ran.code == 0, ran.err
    assert "put into quarantine: host_kernel.cu fails its checksum" in ran.out
    assert not broken.exists() and sound.is_dir()
    assert start(root, "cpu")["saved"] == [broken.name]
    ran = tlcache("verify")
    assert (ran.code, ran.out) == (0, "")
    assert "checked 2 kernels (" in ran.err and ran.err.rstrip().endswith(": all sound")


def test_what_was_quarantined_can_be_moved_back(tlcache, root):
    broken = entries(root)[0]
    flip(broken / "kernel_lib.so")
    (finding,) = tlcache("verify", "--repair", "--json").json["findings"]
    assert finding["quarantined"].endswith(f"/{os.path.relpath(broken, root)}")
    os.rename(finding["quarantined"], broken)
    assert tlcache("verify").code == 1


@pytest.mark.nvcc
def test_a_corrupt_cuda_binary_is_replaced_only_after_a_repair(start, tlcache, cache_root):
    """TileLang compiles it at each start that needs it, and never replaces it."""
    assert start(cache_root, "cuda") == {"saved": [key(cache_root)], "compiled": 1}
    (binary,) = cache_root.glob("*/cuda-binaries/*/kernel.cubin")
    sound = binary.read_bytes()
    flip(binary)
    corrupt = binary.read_bytes()
    for _ in range(2):
        shutil.rmtree(entries(cache_root)[0])  # as prune, or a reader that could not load it
        assert start(cache_root, "cuda")["compiled"] == 1
        assert binary.read_bytes() == corrupt
    ran = tlcache("verify", "--json")
    assert ran.code == 1
    (finding,) = ran.json["findings"]
    assert finding["path"] == str(binary.parent) and finding["kind"] == "damaged"
    assert "it never replaces one that is there" in finding["remedy"]
    assert tlcache("verify", "--repair").code == 0
    shutil.rmtree(entries(cache_root)[0])
    assert start(cache_root, "cuda")["compiled"] == 1
    assert binary.stat().st_size == len(sound) and tlcache("verify").code == 0
    shutil.rmtree(entries(cache_root)[0])
    assert start(cache_root, "cuda")["compiled"] == 0


def key(root):
    return entries(root)[0].name


# --- what is said ---


def test_json_has_what_was_checked_what_was_found_and_what_remains(tlcache, root):
    flip(entries(root)[0] / "kernel_lib.so")
    (root / "notes.txt").write_text("x")
    ran = tlcache("verify", "--json")
    assert ran.code == 1 and ran.err == ""
    told = ran.json
    assert list(told) == ["schema", "root", "checked", "findings", "remaining"]
    assert told["checked"]["things"] == {"kernel": 2, "unknown": 1}
    assert told["remaining"] == 1
    note, error = sorted(told["findings"], key=lambda one: one["severity"], reverse=True)
    assert (note["kind"], note["remains"], note["quarantined"]) == ("unknown", False, None)
    assert (error["kind"], error["remains"], error["repairable"]) == ("damaged", True, True)
    after = tlcache("verify", "--repair", "--json")
    assert after.code == 0 and after.json["remaining"] == 0
    assert (root / "notes.txt").read_text() == "x"


def test_what_cannot_be_repaired_stays_and_exits_with_1(tlcache, root):
    entry = entries(root)[0]
    entry.chmod(0o777)
    for arguments in (["verify"], ["verify", "--repair"]):
        ran = tlcache(*arguments)
        assert ran.code == 1
        assert f"\n\nhint: `chmod -R go-w {entry}` if you know what it holds" in "\n" + ran.err
        assert "--repair" not in ran.err
    assert entry.is_dir()


def test_a_root_with_nothing_in_it_is_sound(tlcache, cache_root):
    ran = tlcache("verify")
    assert (ran.code, ran.out) == (0, "")
    assert "checked nothing in " in ran.err


def test_a_root_that_is_no_directory_is_an_error_of_the_environment(tlcache, cache_root):
    cache_root.write_text("x")
    ran = tlcache("verify")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.startswith(f"error: the cache root {cache_root} cannot be listed: not a dir")


def test_a_repair_on_a_read_only_root_says_so(tlcache, root):
    flip(entries(root)[0] / "kernel_lib.so")
    mount = ["mount", "--bind", "-o", "ro", str(root), str(root)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        ran = tlcache("verify", "--repair")
    finally:
        subprocess.run(["umount", str(root)], check=True)
    assert ran.code == 3, ran.out
    assert f"error: the cache root {root} cannot be written: " in ran.err
    assert os.strerror(errno.EROFS).lower() in ran.err


def test_hostile_names_reach_a_terminal_as_plain_text(root):
    (root / "\x1b[2J\udc80\n").write_text("x")
    manifest = entries(root)[0] / "manifest.json"
    manifest.write_text(json.dumps({"version": 1, "files": {"\x1b[31mred": {"size": 1}}}))
    child = pexpect.spawn(
        TLCACHE[0], [*TLCACHE[1:], "verify"], encoding="utf-8", dimensions=(30, 80), timeout=60
    )
    child.expect(pexpect.EOF)
    child.close()
    told = child.before.replace("\x1b[1m", "").replace("\x1b[0m", "").replace("\r\n", "\n")
    assert child.exitstatus == 1
    progress, _, told = told.rpartition("\r")
    assert progress.startswith("\r3 things checked, ")
    lines = told.splitlines()
    assert lines[0] == (
        f"error    damaged      0.1.15/linux-x86_64/kernels/{manifest.parent.name[:12]}…"
    )
    assert lines[1].startswith("         \\x1b[31mred is missing, ") and len(lines[1]) <= 80
    assert "note     unknown      \\x1b[2J\\udc80\\n" in lines
    assert "\x1b" not in told


def test_many_notes_of_one_kind_are_summed_up_for_a_person_and_listed_in_a_pipe(tlcache, root):
    for number in range(8):
        (root / f"notes{number}").write_text("x")
    assert tlcache("verify").out.count("notes") == 8
    told = pexpect.run(
        f"{TLCACHE[0]} -c '{TLCACHE[2]}' verify", encoding="utf-8", timeout=60
    ).replace("\r\n", "\n")
    assert told.count("unknown      notes") == 3
    assert "note     unknown      5 more: is nothing that TileLang or tlcache writes\n" in told


def test_a_pipe_gets_hostile_names_too_and_json_stays_json(tlcache, root):
    (root / "\x1b[2J\udc80\n").write_text("x")
    assert tlcache("verify").out.count("\n") == 2
    (one,) = tlcache("verify", "--json").json["findings"]
    assert one["path"] == f"{root}/\x1b[2J\udc80\n"
