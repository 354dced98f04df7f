"""`tlcache config show` says what is in force, and where each value comes from."""

from __future__ import annotations

import pytest

from tlcache.settings import FIELDS


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "config/tlcache/tlcache.toml"
    path.parent.mkdir(parents=True)
    return path


def test_every_value_is_shown_with_its_origin(tlcache, user_file, cache_root):
    user_file.write_text('max_size = "5GiB"\nmax_age = "30d"\njobs = 2\n')
    ran = tlcache("config", "show", env={"TLCACHE_JOBS": "3"})
    assert ran.code == 0, ran.err
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in ran.out.splitlines()}
    assert list(rows) == ["KEY", *FIELDS]
    assert rows["max_size"] == ["5.0 GiB", str(user_file), ""]
    assert rows["max_age"] == ["30 d", str(user_file), ""]
    assert rows["jobs"] == ["3", "TLCACHE_JOBS", str(user_file)]
    assert rows["cache_dir"] == [str(cache_root), "TILELANG_CACHE_DIR", ""]
    assert rows["trust"] == ["owner", "default", ""]
    assert f"read: {user_file}" in ran.err


def test_as_json_bytes_and_seconds_are_numbers(tlcache, user_file):
    user_file.write_text('max_size = "5GiB"\nmax_age = "30d"\nroots = ["/a", "/b"]\n')
    found = tlcache("config", "show", "--json").json
    shown = found["settings"]
    assert found["schema"] == 1 and list(shown) == list(FIELDS)
    assert shown["max_size"]["value"] == 5 << 30
    assert shown["max_age"]["value"] == 30 * 86400
    assert shown["roots"]["value"] == ["/a", "/b"]
    assert shown["max_size"]["origin"] == {"layer": "user", "where": str(user_file)}
    assert shown["socket"]["origin"] == {"layer": "default", "where": None}
    assert {"layer": "user", "path": str(user_file), "present": True} in found["files"]


@pytest.mark.parametrize("command", [["config", "show"], ["ls"], ["du"], ["daemon", "status"]])
def test_a_file_that_is_not_understood_is_an_error_of_every_command_that_reads_it(
    tlcache, user_file, command
):
    user_file.write_text('max_sise = "5GiB"\n')
    ran = tlcache(*command)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        f'error: {user_file} sets "max_sise", which is no setting\n\n'
        "hint: did you mean `max_size`?\n"
    )


def test_an_option_that_names_the_root_needs_no_file(tlcache, user_file, tmp_path):
    user_file.write_text("broken")
    assert tlcache("du", "--cache-dir", tmp_path / "none").code != 2


def test_a_variable_that_nothing_reads_is_told(tlcache):
    ran = tlcache("config", "show", env={"TLCACHE_MAXSIZE": "1"})
    assert ran.code == 0
    assert "TLCACHE_MAXSIZE is set, and nothing reads it; did you mean TLCACHE_MAX_SIZE?" in ran.err


def test_commands_work_on_the_root_of_the_file(tlcache, user_file, tmp_path):
    user_file.write_text(f'cache_dir = "{tmp_path / "elsewhere"}"\n')
    ran = tlcache("doctor", "--json", env={"TILELANG_CACHE_DIR": ""})
    assert ran.json["root"] == str(tmp_path / "elsewhere")


def test_a_runtime_compiles_into_the_root_of_the_file(python, user_file, tmp_path):
    root = tmp_path / "elsewhere"
    user_file.write_text(f'cache_dir = "{root}"\n')
    ran = python(
        "import os; del os.environ['TILELANG_CACHE_DIR']\n"
        "from tlcache import operators, runtime, targets\n"
        "workload = {'M': 1, 'N': 64, 'dtype': 'float32'}\n"
        "runtime.resolve(operators.get('rms_norm').spec(workload, targets.CPU))\n"
        "print(os.environ['TILELANG_CACHE_DIR'])\n"
    )
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[-1] == str(root)
    assert len(list((root / "tlcache/records").rglob("*.json"))) == 1


def test_a_command_reads_no_settings_where_there_is_no_file(python):
    ran = python(
        "import sys; from tlcache.store import layout; layout.cache_root(); layout.default_root()\n"
        "print(*{'tlcache.settings', 'tomllib', 'tomli'} & set(sys.modules))"
    )
    assert ran.out.strip() == ""
