"""Units are sound for systemd whatever the settings are, and as closed as what they do allows."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tlcache import config
from tlcache.errors import ConfigError, UsageError
from tlcache.units import rendering
from tlcache.units.rendering import CATALOG, render, templates

ROOT = Path(__file__).parents[2]
BOUNDS = {"max_size": "5GiB", "max_age": "30d"}
# In a user's service each of these brings a user namespace (systemd 254), or is without effect.
NAMESPACED = re.compile(
    r"^(Private\w+|Protect\w+|ReadWritePaths|ReadOnlyPaths|InaccessiblePaths|Bind\w+|"
    r"TemporaryFileSystem|RootDirectory|ProcSubset|DynamicUser|User|CapabilityBoundingSet)=",
    re.MULTILINE,
)


def analyze(*arguments, **kwargs) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        **kwargs,
    )


def text(units, name) -> str:
    (found,) = [unit.text for unit in units if unit.name == name]
    return found


def values(text: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)


@pytest.fixture
def written(tmp_path):
    """Write units into a folder of their own."""

    def written(units) -> Path:
        place = tmp_path / "units"
        place.mkdir(exist_ok=True)
        for unit in units:
            (place / unit.name).write_text(unit.text)
        return place

    return written


# --- what systemd says ---


@pytest.mark.parametrize("scope", ["system", "user"])
@pytest.mark.parametrize("user", ["root", "daemon"])
def test_systemd_finds_nothing_wrong_with_the_units(scope, user, wanted, written, tmp_path):
    place = written(render(wanted(scope, BOUNDS, user=user)))
    names = [name for name in CATALOG[scope] if not name.endswith(".conf")]
    paths = [place / name.replace("@.", "@vllm.") for name in names]
    (place / "tlcache-warm@vllm.service").symlink_to("tlcache-warm@.service")
    runtime = tmp_path / "runtime"
    runtime.mkdir(0o700)
    done = analyze(
        *(["--user"] if scope == "user" else []),
        "verify",
        "--man=no",
        *paths,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "SYSTEMD_UNIT_PATH": f"{place}:"},
    )
    about_ours = [line for line in done.stderr.splitlines() if "tlcache" in line]
    assert (done.returncode, about_ours) == (0, []), done.stderr


@pytest.mark.parametrize(
    ("unit", "user", "most"),
    [
        ("tlcached.service", "root", 2.5),
        ("tlcached.service", "daemon", 2.0),
        ("tlcache-prune.service", "root", 2.0),
    ],
)
def test_what_runs_long_is_exposed_by_no_more_than_three(unit, user, most, wanted, written):
    place = written(render(wanted("system", BOUNDS, user=user)))
    done = analyze("security", "--offline=true", f"--threshold={int(most * 10)}", place / unit)
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert exposure is not None, done.stdout + done.stderr
    assert float(exposure[1]) <= most <= 3.0, done.stdout
    assert done.returncode == 0
    report = json.loads(analyze("security", "--offline=true", "--json=short", place / unit).stdout)
    open_to = {row["json_field"] for row in report if row["set"] is False}
    assert "NoNewPrivileges" not in open_to and "ProtectSystem" not in open_to


def test_no_service_that_prunes_is_kept_from_seeing_what_processes_have_loaded(wanted):
    for user in ("root", "daemon"):
        units = render(wanted("system", BOUNDS, user=user))
        for name in ("tlcached.service", "tlcache-prune.service"):
            found = text(units, name)
            for key in ("PrivateUsers", "ProtectProc", "ProcSubset", "PrivatePIDs", "DynamicUser"):
                assert values(found, key) == []
            held = values(found, "CapabilityBoundingSet")[0].split()
            assert ("CAP_SYS_PTRACE" in held) == (user == "root")
    for unit in render(wanted("user", BOUNDS)):
        assert NAMESPACED.findall(unit.text) == [], unit.name


def test_the_time_of_the_timer_is_one_that_systemd_reads(wanted):
    assert analyze("calendar", config.load().prune_schedule).returncode == 0
    timer = text(
        render(wanted("system", {**BOUNDS, "prune_schedule": "Sun 03:00"})), "tlcache-prune.timer"
    )
    assert values(timer, "OnCalendar") == ["Sun 03:00"]


# --- what they say ---


def test_the_daemon_is_ready_when_it_says_so_and_is_watched(wanted):
    for scope in ("system", "user"):
        found = text(render(wanted(scope)), "tlcached.service")
        assert values(found, "Type") == ["notify"] and values(found, "WatchdogSec") == ["30"]
        assert values(found, "ExecReload") == ["/bin/kill -HUP $MAINPID"]
        assert values(found, "Requires") == ["tlcached.socket"]


def test_every_root_is_writable_and_waited_for(wanted):
    roots = (Path("/srv/a"), Path("/srv/b"))
    units = render(wanted("system", BOUNDS, roots=roots))
    found = text(units, "tlcached.service")
    assert values(found, "ReadWritePaths") == ["-/srv/a", "-/srv/b"]
    assert values(found, "RequiresMountsFor") == ["/srv/a /srv/b"]
    assert values(found, "ExecStart")[0].endswith("daemon run --root /srv/a --root /srv/b")
    pruned = values(text(units, "tlcache-prune.service"), "ExecStart")
    assert [line.split("prune ", 1)[1] for line in pruned] == [
        "--cache-dir /srv/a --unused-for 2592000s --yes",
        "--cache-dir /srv/a --max-size 5368709120 --yes",
        "--cache-dir /srv/b --unused-for 2592000s --yes",
        "--cache-dir /srv/b --max-size 5368709120 --yes",
    ]


def test_roots_of_a_file_are_read_by_the_daemon_and_not_given_to_it(wanted, monkeypatch, tmp_path):
    named = tmp_path / "named.toml"
    named.write_text('roots = ["/srv/a"]\ncache_dir = "/srv/mine"')
    monkeypatch.setenv("TLCACHE_CONFIG", str(named))
    units = render(wanted("system", config=str(named)))
    found = text(units, "tlcached.service")
    assert values(found, "ExecStart")[0].endswith(" daemon run")
    assert values(found, "ReadWritePaths") == ["-/srv/a"]
    assert f"TLCACHE_CONFIG={named}" in values(found, "Environment")
    warm = text(units, "tlcache-warm@.service")
    assert values(warm, "ReadWritePaths") == ["-/srv/mine"]
    assert values(warm, "ExecStart")[0].endswith("%i.json --cache-dir /srv/mine")


def test_a_machine_without_settings_has_one_root_and_a_user_the_usual_one(wanted):
    found = text(render(wanted("system")), "tlcached.service")
    assert values(found, "ExecStart")[0].endswith("--root /var/cache/tilelang")
    units = render(wanted("user", BOUNDS))
    assert values(text(units, "tlcached.service"), "ExecStart")[0].endswith(" daemon run")
    pruned = values(text(units, "tlcache-prune.service"), "ExecStart")
    assert [line.split("prune ", 1)[1] for line in pruned] == [
        "--unused-for 2592000s --yes",
        "--max-size 5368709120 --yes",
    ]


def test_without_a_bound_nothing_prunes(wanted):
    for scope in ("system", "user"):
        names = {unit.name for unit in render(wanted(scope))}
        assert names == {name for name in CATALOG[scope] if "prune" not in name}


def test_a_warm_unit_runs_before_the_server_that_it_is_named_for(wanted):
    for scope in ("system", "user"):
        found = text(render(wanted(scope)), "tlcache-warm@.service")
        assert values(found, "Before") == values(found, "WantedBy") == ["%i.service"]
        assert "--shapes %E/tlcache/shapes/%i.json" in values(found, "ExecStart")[0]


def test_the_socket_is_where_the_settings_say_and_for_their_group(wanted):
    units = render(wanted("system", {"socket": "/run/other/d.sock", "group": "ml"}))
    found = text(units, "tlcached.socket")
    assert values(found, "ListenStream") == ["/run/other/d.sock"]
    assert values(found, "SocketGroup") == ["ml"] and values(found, "SocketMode") == ["0660"]
    assert "d /run/other 0755 root root -" in text(units, "tlcache.tmpfiles.conf")
    assert "g ml -" in text(units, "tlcache.sysusers.conf")
    theirs = text(render(wanted("user")), "tlcached.socket")
    assert values(theirs, "ListenStream") == ["%t/tlcache/daemon.sock"]
    assert values(theirs, "SocketMode") == ["0600"]


@pytest.mark.parametrize("scope", ["system", "user"])
def test_no_placeholder_is_left(scope, wanted):
    for bounds in (None, BOUNDS):
        for unit in render(wanted(scope, bounds)):
            assert re.findall(r"@[a-z_]+@", unit.text) == [], unit.name


def test_the_templates_are_the_files_of_the_repository():
    for scope in ("system", "user"):
        place = ROOT / "systemd" / scope
        assert dict(templates(scope)) == {file.name: file.read_text() for file in place.iterdir()}


# --- hostile values ---


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_path_of_any_characters_stays_one_word_of_its_line(wanted, name):
    root = Path("/srv", name.replace("/", "_"))
    plain = render(wanted("system", BOUNDS, roots=(Path("/srv/plain"),)))
    try:
        units = render(wanted("system", BOUNDS, roots=(root,)))
    except ConfigError as error:
        assert not str(root).isprintable() and "cannot be written" in error.message
        return
    for one, other in zip(units, plain, strict=True):
        keys = [line.partition("=")[0] for line in one.text.splitlines() if "=" in line]
        assert len(one.text.splitlines()) == len(other.text.splitlines())
        assert [key for key in keys if key.isalpha()] == [
            key
            for line in other.text.splitlines()
            if (key := line.partition("=")[0]).isalpha() and "=" in line
        ]
    (line,) = values(text(units, "tlcached.service"), "ExecStart")
    words = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line)]
    assert words[-2:] == ["--root", str(root)]


def test_systemd_reads_a_path_of_special_characters_as_it_is(wanted, written, tmp_path):
    root = tmp_path / 'a b%c$d"e\\f@user@'
    place = written(render(wanted("system", BOUNDS, roots=(root,))))
    assert analyze("verify", "--man=no", place / "tlcache-prune.service").returncode == 0
    if shutil.which("systemd-tmpfiles") is None:
        pytest.skip("no systemd-tmpfiles here")
    image = tmp_path / "image"
    image.mkdir()
    subprocess.run(
        ["systemd-tmpfiles", f"--root={image}", "--create", place / "tlcache.tmpfiles.conf"],
        check=True,
    )
    assert (image / str(root).lstrip("/")).is_dir()


@pytest.mark.parametrize("user", ["", "a b", "root\nExecStart=/bin/sh", "%i", "-x"])
def test_a_users_name_that_is_none_is_refused(wanted, user):
    with pytest.raises(UsageError, match="no user's name"):
        render(wanted("system", user=user))


def test_the_daemons_units_are_of_the_catalog():
    for scope in ("system", "user"):
        assert set(rendering.DAEMON) <= set(CATALOG[scope])
