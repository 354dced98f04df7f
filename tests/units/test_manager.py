"""A service manager runs the units as they are installed. It is a real one, systemd's for a user,
in namespaces of its own; the daemon is a program that says and hears what systemd has a daemon say.
Root's has the privileges that the sandbox of the machine's units needs, so those run there, too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import clean_environment
from tlcache.units import manager

SYSTEMD = "/usr/lib/systemd/systemd"
UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]

# A daemon's manners: the socket that systemd holds, readiness, the watchdog, reload, stop.
DAEMON = """
import json, os, signal, socket, sys
def daemon():
    def notify(text):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.sendto(text.encode(), os.environ["NOTIFY_SOCKET"])
    assert os.environ["LISTEN_FDS"] == "1" and int(os.environ["LISTEN_PID"]) == os.getpid()
    listening, said = socket.socket(fileno=3), {"reloads": 0, "argv": sys.argv[1:]}
    said["watchdog"] = os.environ["WATCHDOG_USEC"]
    place = os.environ.get("PLACE", "")
    def works(function):
        try:
            return bool(function())
        except OSError as error:
            return error.strerror
    if place:
        said["maps"] = works(lambda: open("/proc/%s/maps" % open(place + "/pid").read()).read())
        said["root"] = works(lambda: open(place + "/root/theirs/new", "w"))
        said["elsewhere"] = works(lambda: open(place + "/new", "w"))
        said["own"] = works(lambda: open(os.environ["STATE_DIRECTORY"] + "/history", "w"))
        said["tmp"] = works(lambda: open(os.environ["TMPDIR"] + "/new", "w"))
        said["chown"] = works(lambda: os.chown(place + "/root", 1, 1))
        lines = open("/proc/self/status").read().splitlines()
        said["status"] = dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
    def reload(*_):
        said["reloads"] += 1
    signal.signal(signal.SIGHUP, reload)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    notify("READY=1")
    while True:
        connection, _ = listening.accept()
        notify("WATCHDOG=1")
        connection.recv(65536)
        body = json.dumps({"status": "ok", "checks": [], "said": said})
        connection.sendall(f"HTTP/1.0 200 OK\\r\\n\\r\\n{body}".encode())
        connection.close()
if __name__ == "__main__" and sys.argv[1:3] == ["daemon", "run"]:
    daemon()
elif __name__ == "__main__":
    from tlcache.cli import main
    main()
"""

# What is done inside: everything by the commands that a user has.
SESSION = """
import json, os, subprocess, sys, time
home, program = sys.argv[1:3]
subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
os.makedirs("/run/systemd/system")
os.makedirs("/run/user/0", 0o700)
os.environ.update(HOME=home, XDG_CONFIG_HOME=home + "/.config", XDG_RUNTIME_DIR="/run/user/0",
                  TLCACHE_SOCKET="/run/user/0/tlcache/daemon.sock")
os.environ.pop("DBUS_SESSION_BUS_ADDRESS", None)
log = open(home + "/manager.log", "w")
manager = subprocess.Popen([sys.argv[3], "--user", "--log-target=console"], stdout=log, stderr=log)
def until(done, what):
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline and manager.poll() is None, what
        time.sleep(0.05)
systemctl = lambda *words: subprocess.run(
    ["systemctl", "--user", *words], capture_output=True, text=True)
until(lambda: systemctl("is-system-running").stdout.strip() in ("running", "degraded"), "a manager")
def tlcache(*words):
    done = subprocess.run([program, "daemon", *words], capture_output=True, text=True)
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}
def health():
    return json.loads(tlcache("status", "--user", "--json")["out"])["health"]
found = {"install": tlcache("install", "--user", "--now", "--executable", program)}
found["status"] = tlcache("status", "--user", "--json")
found["pid"] = systemctl("show", "-P", "MainPID", "tlcached").stdout.strip()
found["before"] = health()
systemctl("reload", "tlcached")
until(lambda: health()["said"]["reloads"] == 1, "a reload")
systemctl("kill", "--signal=KILL", "tlcached")
until(lambda: systemctl("show", "-P", "MainPID", "tlcached").stdout.strip()
      not in ("0", found["pid"]), "a restart")
found["after"] = health()
found["again"] = tlcache("install", "--user", "--now", "--executable", program)
found["changed"] = tlcache("install", "--user", "--now", "--executable", program, "--root", home)
found["restarted"] = health()
found["uninstall"] = tlcache("uninstall", "--user")
found["state"] = systemctl("show", "-P", "LoadState", "tlcached").stdout.strip()
found["left"] = [
    os.path.join(at, name) for at, _, names in os.walk(home + "/.config") for name in names]
# The machine's manager has these there, and root's own finds them nowhere else.
subprocess.run(["cp", "-a", "/run/user/0/systemd/inaccessible", "/run/systemd/"], check=True)
# The machine's units, with a root that somebody else owns and a process of theirs.
from pathlib import Path
from tlcache import config
from tlcache.units.rendering import Wanted, render
root = home + "/root"
os.makedirs(root + "/theirs")
os.chown(root + "/theirs", 4242, 4242)
other = subprocess.Popen(
    ["setpriv", "--reuid=4242", "--regid=4242", "--clear-groups", "sleep", "600"])
Path(home, "pid").write_text(str(other.pid))
units = Path(home, ".config/systemd/user")
settings = config.load({"max_size": "1TiB", "socket": os.environ["TLCACHE_SOCKET"]})
for unit in render(Wanted("system", Path(program), settings, (Path(root),))):
    (units / unit.name).write_text(unit.text.replace("SocketGroup=tlcache\\n", "").replace(
        "\\n[Install]", "Environment=PLACE=%s\\n\\n[Install]" % home).replace(
        "[Service]", "[Service]\\nStandardError=append:%s/service.log" % home))
systemctl("daemon-reload")
found["system"] = systemctl("start", "tlcached.service").stderr
found["sandboxed"] = health()
systemctl("stop", "tlcached.service", "tlcached.socket")
found["prune"] = systemctl("start", "tlcache-prune.service").stderr
shapes = Path(home, ".config/tlcache/shapes/model.json")
shapes.parent.mkdir(parents=True)
shapes.write_text(json.dumps({"version": 1, "targets": ["cpu"], "workloads": [
    {"op": "rms_norm", "M": 1, "N": 64, "dtype": "float32"}]}))
(units / "model.service").write_text("[Service]\\nType=oneshot\\nExecStart=/bin/sh -c "
    "'ls %s/root/tlcache/records/*/*.json >%s/model'\\n" % (home, home))
found["enable"] = systemctl("enable", "tlcache-warm@model").stderr
systemctl("daemon-reload")
systemctl("start", "model.service")
found["model"] = Path(home, "model").read_text().split()
other.kill()
found["said"] = Path(home, "service.log").read_text()
print("FOUND " + json.dumps(found))
manager.terminate()
manager.wait()
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> dict:
    """What a user's service manager made of an install, a reload, a kill and an uninstall."""
    if os.geteuid() != 0 or not os.path.exists(SYSTEMD) or shutil.which("unshare") is None:
        pytest.skip("needs root, systemd and unshare")
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces cannot be made here")
    home = tmp_path_factory.mktemp("home")
    program = home / "tlcache"
    program.write_text(f"#!{sys.executable}\n{DAEMON}")
    program.chmod(0o755)
    kept = clean_environment()
    done = subprocess.run(
        [*UNSHARE, sys.executable, "-c", SESSION, home, program, SYSTEMD],
        capture_output=True,
        text=True,
        timeout=240,
        env={**kept, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    log = (home / "manager.log").read_text() if (home / "manager.log").exists() else ""
    if "a manager" in done.stderr:
        pytest.skip(f"systemd does not run in these namespaces: {log[-300:]}")
    assert done.returncode == 0, done.stderr + log
    return json.loads(done.stdout.rpartition("FOUND ")[2])


def test_an_install_starts_the_daemon_and_waits_until_it_is_ready(session):
    assert session["install"]["code"] == 0, session["install"]["err"]
    assert "enabled and started" in session["install"]["err"]
    units = {one["unit"]: one for one in json.loads(session["status"]["out"])["units"]}
    assert session["status"]["code"] == 0
    assert units["tlcached.service"]["state"] == "active (running)"
    assert units["tlcached.socket"]["state"] == "active (running)"
    assert units["tlcached.service"]["enabled"] == "enabled"


def test_the_daemon_gets_its_socket_its_watchdog_and_a_look_at_other_processes(session):
    said = session["before"]["said"]
    assert said["argv"] == ["daemon", "run"] and said["watchdog"] == "30000000"


def test_a_killed_daemon_is_started_again_and_answers_at_the_same_socket(session):
    assert session["after"]["said"]["reloads"] == 0
    assert session["after"]["status"] == "ok"


def test_an_install_that_changes_nothing_says_so(session):
    assert session["again"]["code"] == 0
    assert {line.split()[0] for line in session["again"]["out"].splitlines()} == {"kept"}
    assert "enabled and started" in session["again"]["err"]


def test_an_install_that_changes_something_has_the_daemon_run_with_it(session):
    assert session["changed"]["code"] == 0, session["changed"]["err"]
    assert "enabled and restarted" in session["changed"]["err"]
    assert session["restarted"]["said"]["argv"][2] == "--root"


def test_an_uninstall_stops_the_daemon_and_leaves_no_file(session):
    assert session["uninstall"]["code"] == 0, session["uninstall"]["err"]
    assert session["state"] == "not-found" and session["left"] == []


def test_the_machines_daemon_writes_its_roots_and_its_own_state_and_nothing_else(session):
    said = session["sandboxed"]["said"]
    assert said["root"] is said["own"] is said["tmp"] is True
    assert said["elsewhere"] == "Read-only file system"
    assert said["chown"] == "Operation not permitted"


def test_the_machines_daemon_sees_what_others_have_loaded_and_has_no_more_privileges(session):
    said = session["sandboxed"]["said"]
    assert said["maps"] is True
    held = sum(1 << number for number in (1, 3, 19))  # DAC_OVERRIDE, FOWNER and SYS_PTRACE
    assert int(said["status"]["CapEff"], 16) == int(said["status"]["CapBnd"], 16) == held
    assert said["status"]["NoNewPrivs"] == "1" and said["status"]["Seccomp"] == "2"


def test_the_machines_prune_runs_in_its_sandbox(session):
    assert session["prune"] == "", session["said"]


def test_a_model_server_starts_after_its_kernels_are_warm(session):
    assert len(session["model"]) == 1, session["said"]


@pytest.mark.skipif(os.path.isdir("/run/systemd/system"), reason="systemd runs here")
def test_a_machine_that_systemd_does_not_run_is_known():
    assert manager.absence("system") == "systemd does not run this machine"


def test_a_command_that_is_not_here_says_nothing():
    assert manager.ask(["no-such-command-of-tlcache"]) is None
