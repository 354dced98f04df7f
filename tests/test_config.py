"""Settings come from the highest layer that has them; what is not understood is told with the file,
the key, the value and what was expected.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tlcache import config
from tlcache.errors import ConfigError
from tlcache.settings import FIELDS
from tlcache.store import layout, roots
from tlcache.store.trust import Trust
from tlcache.warm import pool

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def layers(tmp_path, monkeypatch):
    """Write the files of a machine on which nothing else is set."""
    for name in list(os.environ):
        if name.startswith(("TLCACHE_", "TILELANG_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(config, "SYSTEM", str(tmp_path / "etc/tlcache/tlcache.toml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home/.config"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config._files.cache_clear()

    def write(layer: str, text: str | bytes) -> Path:
        path = {
            "system": tmp_path / "etc/tlcache/tlcache.toml",
            "user": tmp_path / "home/.config/tlcache/tlcache.toml",
            "file": tmp_path / "named.toml",
        }[layer]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(0o644)
        config._files.cache_clear()
        return path

    yield write
    config._files.cache_clear()


def refused(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config.load()
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert caught.value.hint
    return caught.value


# --- precedence ---


def test_without_any_file_every_setting_is_its_default(tmp_path):
    found = config.load()
    assert {origin.layer for origin in found.origins.values()} == {"default"}
    assert found.cache_dir == tmp_path / "home/.tilelang/cache"
    assert found.roots == (found.cache_dir,)
    assert (found.max_size, found.max_age, found.keep_free) == (None, None, None)
    assert found.trust == "owner" and found.interval == 5


def test_each_layer_wins_over_the_ones_before_it_and_says_so(layers, monkeypatch):
    system = layers("system", 'max_size = "1GiB"\nmax_age = "1d"\nkeep_free = "1MiB"\njobs = 1')
    user = layers("user", 'max_size = "2GiB"\nmax_age = "2d"\nkeep_free = "2MiB"')
    monkeypatch.setenv("TLCACHE_MAX_SIZE", "3GiB")
    monkeypatch.setenv("TLCACHE_MAX_AGE", "3d")
    found = config.load({"max_size": "4GiB", "jobs": None, "roots": ()})
    assert found.max_size == 4 << 30 and str(found.origins["max_size"]) == "--max-size"
    assert found.max_age == 3 * 86400 and str(found.origins["max_age"]) == "TLCACHE_MAX_AGE"
    assert found.keep_free == 2 << 20 and str(found.origins["keep_free"]) == str(user)
    assert found.jobs == 1 and str(found.origins["jobs"]) == str(system)
    assert [origin.layer for origin in found.shadowed["max_size"]] == [
        "environment",
        "user",
        "system",
    ]


def test_a_named_file_is_read_in_place_of_the_two(layers, monkeypatch):
    layers("system", "jobs = 1")
    layers("user", "interval = 'wrong'")
    named = layers("file", 'max_size = "1GiB"')
    monkeypatch.setenv("TLCACHE_CONFIG", str(named))
    found = config.load()
    assert found.max_size == 1 << 30 and found.jobs is None
    assert found.origins["max_size"] == ("file", str(named))


def test_a_named_file_that_is_not_there_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("TLCACHE_CONFIG", str(tmp_path / "none.toml"))
    refused("TLCACHE_CONFIG", str(tmp_path / "none.toml"), "no such file")


def test_an_image_has_its_own_system_file_and_no_users(layers, tmp_path, monkeypatch):
    layers("user", "jobs = 3")
    monkeypatch.setattr(config, "SYSTEM", "/etc/tlcache/tlcache.toml")
    inside = tmp_path / "image/etc/tlcache/tlcache.toml"
    inside.parent.mkdir(parents=True)
    inside.write_text('roots = ["/srv/cache"]')
    found = config.load(prefix=tmp_path / "image")
    assert found.roots == (Path("/srv/cache"),) and found.jobs is None


def test_a_bound_of_a_lower_layer_is_taken_back_by_none(layers, monkeypatch):
    layers("system", 'max_size = "1GiB"\nmax_age = "1d"')
    layers("user", 'max_size = "none"')
    monkeypatch.setenv("TLCACHE_MAX_AGE", "none")
    found = config.load()
    assert found.max_size is None and found.max_age is None


def test_an_empty_variable_says_nothing(layers, monkeypatch):
    layers("user", "jobs = 2")
    monkeypatch.setenv("TLCACHE_JOBS", " ")
    assert config.load().jobs == 2


def test_each_load_reads_the_files_anew(layers):
    layers("user", "jobs = 2")
    assert config.load().jobs == 2 and config.value("jobs") == 2
    layers("user", "jobs = 3")
    assert config.load().jobs == 3 and config.value("jobs") == 3


def test_roots_in_the_environment_have_colons_between_them(monkeypatch):
    monkeypatch.setenv("TLCACHE_DAEMON_ROOTS", "/a:/b/../c:/a")
    assert config.load().roots == (Path("/a"), Path("/c"))


def test_of_roots_in_layers_the_daemon_has_the_one_that_is_written_to(monkeypatch, layers):
    layers("user", "cache_dir = '/x'")
    monkeypatch.setenv("TLCACHE_ROOTS", "/a:/b")
    assert config.load().roots == (Path("/a"),)
    assert layout.cache_root() == Path("/a") and layout.default_root() == "/a"
    assert roots.chain() == [Path("/a"), Path("/b")]
    monkeypatch.delenv("TLCACHE_ROOTS")
    assert roots.chain() == [Path("/x")]


def test_the_default_history_is_where_the_service_manager_says(monkeypatch):
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/tlcache:/var/lib/other")
    assert config.load().history == Path("/var/lib/tlcache/history")


# --- what is refused ---


@pytest.mark.parametrize(
    ("written", "meant"),
    [("max_sise", "max_size"), ("MAX-SIZE", "max_size"), ("cachedir", "cache_dir"),
     ("intervall", "interval")],
)  # fmt: skip
def test_an_unknown_key_is_an_error_that_suggests_the_nearest(layers, written, meant):
    path = layers("user", f'{written} = "5GiB"')
    error = refused(str(path), f'"{written}"')
    assert error.hint == f"did you mean `{meant}`?"


def test_a_key_that_is_near_none_gets_them_all(layers):
    layers("system", "zzz = 1")
    assert all(name in (refused('"zzz"').hint or "") for name in FIELDS)


def test_keys_in_a_table_are_told_to_stand_at_the_top(layers):
    layers("user", '[limits]\nmax_size = "5GiB"')
    assert "top of the file" in (refused('"limits"').hint or "")


WRONG = [
    ("max_size", "'5 bananas'", '"5 bananas"', "a size like"),
    ("max_size", "true", "True", "a size like"),
    ("max_size", "0", "0", "more than 0"),
    ("max_size", "-1", "-1", "more than 0"),
    ("max_size", "1.5", "1.5", "a size like"),
    ("keep_free", "'1e9'", '"1e9"', "a size like"),
    ("max_age", "30", "30", "a time span like"),
    ("max_age", "'30'", '"30"', "a time span like"),
    ("max_age", "'0d'", '"0d"', "longer than 0"),
    ("interval", "''", '""', "a time span like"),
    ("cache_dir", "'relative/root'", '"relative/root"', "an absolute path"),
    ("cache_dir", "7", "7", "an absolute path"),
    ("roots", "[]", "[]", "a list of absolute paths"),
    ("roots", "['/a', 3]", "['/a', 3]", "a list of absolute paths"),
    ("roots", "{}", "{}", "a list of absolute paths"),
    ("jobs", "0", "0", "a number of processes"),
    ("jobs", "'many'", '"many"', "a number of processes"),
    ("metrics_port", "65536", "65536", "a port"),
    ("group", "'two words'", '"two words"', "the name of a group"),
    ("trust", "'everybody'", '"everybody"', '"owner", "group" or "any"'),
    ("log_level", "'loud'", '"loud"', '"debug", "info"'),
    ("prune_schedule", r'"daily\nExecStart=/bin/sh"', r'"daily\nExecStart=/bin/sh"', "one line"),
    ("socket", r'"/run/a\u0000b"', r'"/run/a\x00b"', "an absolute path"),
]


@pytest.mark.parametrize(("key", "text", "shown", "form"), WRONG)
def test_a_wrong_value_is_told_with_file_key_value_and_form(layers, key, text, shown, form):
    path = layers("user", f"{key} = {text}")
    error = refused(str(path), f"{key} in ", f"is {shown}:", "expected", form)
    assert f"{key} = " in (error.hint or "")


@pytest.mark.parametrize(
    ("key", "text"), [("max_size", "much"), ("jobs", "x"), ("roots", "a:b"), ("trust", "all")]
)
def test_a_wrong_variable_is_told_by_its_name(monkeypatch, key, text):
    variable = FIELDS[key].variable
    monkeypatch.setenv(variable, text)
    assert variable in (refused(f"{key} of {variable} is", text).hint or "")


def test_a_wrong_option_is_told_by_its_name():
    with pytest.raises(ConfigError, match="max_age of the command line") as caught:
        config.load({"max_age": "soon"})
    assert "--max-age" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"max_size", "no TOML"),
        (b'jobs = 1\njobs = 2', "no TOML"),
        (b"jobs = 1\n\xff", "line 2 is not UTF-8"),
        (b"a = " + b"[" * 100_000, "no TOML"),
        (b"jobs = " + b"9" * 5000, "no TOML"),
        (b"#" * (1 << 20) + b"#", "larger than 1 MiB"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_toml_is_told_by_its_path(layers, content, reason):
    path = layers("system", content)
    refused(str(path), reason)


def test_what_is_no_file_is_refused_and_not_waited_for(layers, monkeypatch):
    path = layers("user", "")
    path.unlink()
    os.mkfifo(path)
    refused(str(path), "no file")
    path.unlink()
    path.mkdir()
    refused(str(path))
    path.rmdir()
    monkeypatch.chdir(path.parent)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
        refused(str(path))


@pytest.mark.parametrize("mode", [0o666, 0o646])
def test_a_file_that_everybody_can_write_is_refused(layers, mode):
    path = layers("user", "trust = 'any'")
    path.chmod(mode)
    refused(str(path), "can be written by everybody")


@as_root
def test_a_file_of_somebody_else_is_refused(layers):
    path = layers("user", "trust = 'any'")
    os.chown(path, 4242, -1)
    refused(str(path), "belongs to uid 4242")


_values = st.recursive(
    st.none().map(lambda _: "''")
    | st.booleans().map(lambda value: str(value).lower())
    | st.integers().map(str)
    | st.floats(allow_nan=False, allow_infinity=False).map(repr)
    | st.text(max_size=20).map(lambda text: '"' + "".join(f"\\U{ord(c):08x}" for c in text) + '"')
    | st.sampled_from(["1979-05-27", "07:32:00", "inf", "nan", "0x10", "'5GiB'", "'none'"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | inner.map(lambda item: f"{{ x = {item} }}")
    ),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*FIELDS, "typo", "'a b'"]), _values, max_size=4))
@example({"max_size": "9223372036854775808"})
@example({"max_age": '"999999999999w"'})
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_hostile_toml_gives_settings_or_an_error_with_the_key(layers, table):
    layers("user", "\n".join(f"{key} = {value}" for key, value in table.items()))
    try:
        found = config.load()
    except ConfigError as error:
        text = str(error)
        assert "tlcache.toml" in text and error.hint
        assert "no TOML" in text or any(key.strip("'") in text for key in table)
        assert "\n" not in error.message and len(error.message) < 600
    else:
        assert {found.origins[key].layer for key in table} <= {"user"}


@given(st.binary(max_size=200))
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_bytes_give_settings_or_an_error_with_the_path(layers, content):
    path = layers("user", content)
    try:
        config.load()
    except ConfigError as error:
        assert str(path) in error.message


# --- who asks ---


def test_the_roots_of_the_commands_and_of_the_runtime_are_those_of_the_file(layers):
    layers("user", 'cache_dir = "~/kernels"')
    wanted = Path(os.environ["HOME"]) / "kernels"
    assert layout.cache_root() == wanted
    assert layout.default_root() == os.fspath(wanted)
    assert layout.cache_root("/given") == Path("/given")


def test_tilelangs_variable_wins_over_the_file_and_is_taken_as_tilelang_takes_it(
    layers, monkeypatch
):
    layers("user", 'cache_dir = "/kernels"')
    monkeypatch.setenv("TILELANG_CACHE_DIR", "~/here")
    assert layout.cache_root() == Path("~/here")
    assert config.load().origins["cache_dir"].where == "TILELANG_CACHE_DIR"


def test_commands_refuse_an_unknown_key_and_a_serving_process_minds_only_its_own(layers):
    layers("user", 'cache_dir = "/kernels"\nlater = 1')
    assert layout.default_root() == "/kernels"
    with pytest.raises(ConfigError):
        layout.cache_root()


def test_trust_and_jobs_are_those_of_the_file_unless_a_variable_says_otherwise(
    layers, monkeypatch, tmp_path
):
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o777)
    layers("user", 'trust = "any"\njobs = 3')
    assert Trust(root).fault(os.fspath(root), root.stat()) is None
    assert pool.default_jobs() == 3
    monkeypatch.setenv("TLCACHE_TRUST", "owner")
    assert Trust(root).fault(os.fspath(root), root.stat()) is not None
    monkeypatch.setenv("TLCACHE_JOBS", "5")
    assert pool.default_jobs() == 5


def test_what_kubernetes_sets_for_a_service_is_no_port(monkeypatch):
    monkeypatch.setenv("TLCACHE_METRICS_PORT", "tcp://10.0.0.1:9464")
    assert config.load().metrics_port is None


def test_a_variable_that_is_nearly_a_settings_is_found(monkeypatch):
    monkeypatch.setenv("TLCACHE_MAXSIZE", "1")
    monkeypatch.setenv("TLCACHE_CACHE_DIR", "/x")
    monkeypatch.setenv("TLCACHE_RUNTIME_DIR", "/x")
    monkeypatch.setenv("TLCACHE_SERVICE_HOST", "10.0.0.1")
    assert config.misspelled() == {
        "TLCACHE_MAXSIZE": "TLCACHE_MAX_SIZE",
        "TLCACHE_CACHE_DIR": "TILELANG_CACHE_DIR",
    }
