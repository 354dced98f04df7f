"""`tlcache export` and `import` on kernels that were really compiled: what travels, and what each
of the two says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.fixture
def archives(warmed, tlcache, tmp_path) -> list[Path]:
    """An archive of each of the three."""
    made = []
    for name in ("whole", "one", "two"):
        path = tmp_path / f"{name}.tar.zst"
        done = tlcache("export", "-o", path, "--cache-dir", warmed / name)
        assert done.code == 0, done.err
        made.append(path)
    return made


def test_tilelang_itself_hits_what_was_imported(archives, warmed, tlcache, resolved, cache_root):
    assert tlcache("import", archives[0]).code == 0
    shutil.rmtree(cache_root / "tlcache" / "records")
    assert resolved(warmed / "whole") == {"restored": 0, "disk": 4, "compiled": 0}


def test_closures_come_along(archives, warmed, tlcache, cache_root):
    assert tlcache("import", archives[0]).code == 0
    names = sorted(path.name for path in (cache_root / "tlcache" / "closures").iterdir())
    assert names == sorted(path.name for path in (warmed / "whole/tlcache/closures").iterdir())
    assert names


def test_a_shapes_file_takes_its_kernels_and_says_which_are_missing(
    warmed, tlcache, tmp_path, cache_root
):
    path = tmp_path / "some.tar.zst"
    some = ("--shapes", warmed / "some.json", "--cache-dir", warmed / "whole")
    done = tlcache("export", "-o", path, *some, "--json")
    assert done.code == 0, done.err
    assert (done.json["kernels"], done.json["records"]) == (2, 2)
    assert done.json["coverage"]["asked"] == 2
    assert done.json["left"] == []
    path.unlink()
    lacking = ("--shapes", warmed / "whole.json", "--cache-dir", warmed / "one")
    missing = tlcache("export", "-o", path, *lacking)
    assert missing.code == 1
    assert "2 of 4 kernels of" in missing.err
    assert "hint: `tlcache warm --shapes" in missing.err
    assert not path.exists()


def test_the_digest_that_export_prints_is_the_one_that_import_takes(
    archives, warmed, tlcache, tmp_path
):
    again = tlcache("export", "-o", tmp_path / "again.tar.zst", "--cache-dir", warmed / "whole")
    digest = again.out.splitlines()[-1]
    assert digest.startswith("sha256:")
    assert tlcache("import", archives[0], "--digest", digest).code == 0


def test_import_tells_in_json_what_landed_and_what_was_there(archives, tlcache):
    assert tlcache("import", archives[1]).code == 0
    done = tlcache("import", archives[0], "--json")
    assert done.json["schema"] == 1
    assert done.json["imported"]["kernel"] == done.json["present"]["kernel"] == 2
    assert done.json["archives"][0]["coverage"]["targets"] == {"cpu": 4}
    assert done.json["left"] == []


def test_what_this_host_cannot_load_is_left_and_said(archives, tlcache, mixed_root, tmp_path):
    path = tmp_path / "mixed.tar.zst"
    assert tlcache("export", "-o", path, "--cache-dir", mixed_root).code == 0
    done = tlcache("import", path, archives[0], "--compatible", "--target", "sm80")
    assert done.code == 0, done.err
    assert "4 records" in done.out
    assert "of TileLang 0.1.14, not 0.1.15" in done.err
    assert "not sm80" in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["export", "-o", "x.tar.zst", "--cache-dir", "nowhere"], 3, "there is no cache root"),
        (["export"], 2, "Missing option '-o'"),
        (["import"], 2, "Missing argument"),
        (["import", "none.tar.zst"], 2, "none.tar.zst cannot be read: no such file"),
        (["import", "."], 2, "cannot be read"),
        (["import", "x", "--digest", "sha1:00"], 2, "is no digest"),
        (["import", "x", "--target", "sm80"], 2, "goes with `--compatible`"),
        (["import", "x", "--revoked", "y"], 2, "goes with `--verify`"),
        (["import", "*.none"], 2, "nothing matches"),
    ],
)
def test_wrong_usage_is_said(tlcache, arguments, code, said):
    done = tlcache(*arguments)
    assert done.code == code
    assert said in done.err
    assert "Traceback" not in done.err


def test_an_export_of_nothing_is_said_and_writes_nothing(warmed, tlcache, tmp_path):
    some = ("--cache-dir", warmed / "one", "--target", "sm90")
    done = tlcache("export", "-o", tmp_path / "x.tar.zst", *some)
    assert done.code == 1
    assert "so there is nothing to export" in done.err
    assert not (tmp_path / "x.tar.zst").exists()


def test_an_archive_that_cannot_be_written_is_said(warmed, tlcache, tmp_path):
    done = tlcache("export", "-o", tmp_path / "no/x.tar.zst", "--cache-dir", warmed / "one")
    assert done.code == 2
    assert "no/x.tar.zst cannot be written: no such file or directory" in done.err


def test_a_digest_of_several_archives_is_wrong_usage(archives, tlcache):
    done = tlcache("import", *archives, "--digest", "0" * 64)
    assert done.code == 2
    assert "`--digest` is of one archive, and these are 3" in done.err


def test_neither_command_brings_torch_or_tilelang(archives, warmed, python, cache_root, tmp_path):
    source = (
        "import sys\nfrom tlcache.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(*{'torch', 'tilelang', 'fsspec'} & set(sys.modules))\n"
    )
    place = str(warmed / "one")
    done = python(source, "export", "-o", str(tmp_path / "x.tar.zst"), "--cache-dir", place)
    assert done.out.splitlines()[-1] == ""
    assert python(source, "import", str(archives[0])).out.splitlines()[-1] == ""


def test_an_export_that_is_stopped_leaves_nothing_behind(warmed, tmp_path):
    signer = tmp_path / "bin" / "ssh-keygen"
    signer.parent.mkdir()
    signer.write_text("#!/bin/sh\necho $$ > started\nexec sleep 600\n")
    signer.chmod(0o755)
    (tmp_path / "key").touch()
    out = tmp_path / "out"
    out.mkdir()
    program = [sys.executable, "-c", "from tlcache.cli import main; main()", "export"]
    some = ["--cache-dir", warmed / "one", "-o", "out/x.tar.zst", "--sign", "key"]
    env = {**os.environ, "PATH": f"{signer.parent}{os.pathsep}{os.environ['PATH']}"}
    process = subprocess.Popen(
        [*program, *some], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        time.sleep(0.01)
    assert len(list(out.iterdir())) == 2  # what is to become the archive, and its signature
    process.terminate()
    assert "stopped; no archive was written" in process.communicate(timeout=60)[1]
    assert process.returncode == 143
    assert list(out.iterdir()) == []
