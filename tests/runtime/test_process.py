"""What is said about a process as a whole: that it compiles nothing, that it serves."""

from __future__ import annotations

import json

import pytest

from tlcache.store import layout

PRELUDE = """
import json, logging, os, sys
from tlcache import errors, operators, runtime, targets
from tlcache.runtime import Resolver

root = os.environ["TILELANG_CACHE_DIR"]


def spec(rows):
    return operators.get("rms_norm").spec({"M": rows, "N": 64, "dtype": "float32"}, targets.CPU)


def miss(resolve, rows):
    try:
        resolve(spec(rows))
    except errors.MissError as error:
        return error.message.rpartition(", and ")[2]
    return "compiled"


class Heard(logging.Handler):
    lines = []

    def emit(self, record):
        self.lines.append([record.levelname, record.getMessage()])


logging.getLogger("tlcache.runtime").addHandler(Heard())
told = {}
"""
SAY = """
print("RESULT " + json.dumps({**told, "heard": Heard.lines, "tilelang": "tilelang" in sys.modules}))
"""


@pytest.fixture
def told(python, cache_root):
    def told(source):
        ran = python(PRELUDE + source + SAY)
        assert ran.code == 0, ran.err
        return json.loads(ran.out.rpartition("RESULT ")[2])

    return told


def test_freezing_holds_for_every_root_of_the_process_and_is_lifted_for_all(told, cache_root):
    said = told(
        """
early = Resolver(root)
runtime.freeze()
late = Resolver(root + "2")
told["frozen"] = [miss(r, 1) for r in (early.resolve, late.resolve, runtime.resolve)]
os.environ["TILELANG_CACHE_DIR"] = root + "3"
told["frozen"].append(miss(runtime.resolve, 1))
told["lookup"] = runtime.lookup(spec(1))
told["written"] = [os.path.exists(root + name) for name in ("", "2", "3")]
told["early"] = "tilelang" in sys.modules
os.environ["TILELANG_CACHE_DIR"] = root
runtime.freeze(False)
told["lifted"] = [miss(r, rows) for r, rows in ((early.resolve, 1), (runtime.resolve, 2))]
runtime.freeze()
told["again"] = [miss(runtime.resolve, 3), Resolver(root).resolve(spec(1)).origin]
"""
    )
    assert said["frozen"] == ["resolving is frozen"] * 4
    assert said["lookup"] is None
    assert said["written"] == [False] * 3
    assert not said["early"]
    assert said["lifted"] == ["compiled"] * 2
    assert said["again"] == ["resolving is frozen", "restored"]


COUNTS = """
counts = lambda resolver: [getattr(resolver.counters, name)
                           for name in ("after_ready", "compiled", "disk", "restored", "memory")]
"""


def test_a_compile_in_a_process_that_was_marked_ready_is_counted_and_logged(told):
    said = told(
        COUNTS
        + """
first = Resolver(root)
first.resolve(spec(1))
told["before"] = [counts(first), list(Heard.lines)]
runtime.mark_ready()
second = Resolver(root)
second.resolve(spec(1))
second.resolve(spec(1))
told["restored"] = [counts(second), list(Heard.lines)]
second.resolve(spec(2))
told["compiled"] = [counts(second), list(Heard.lines)]
runtime.mark_ready(False)
second.resolve(spec(3))
told["taken back"] = [counts(second), len(Heard.lines)]
"""
    )
    assert said["before"] == [[0, 1, 0, 0, 0], []]
    assert said["restored"] == [[0, 0, 0, 1, 1], []]
    (counts, ((level, line),)) = said["compiled"]
    assert counts == [1, 1, 0, 1, 1]
    assert level == "WARNING"
    assert line.startswith("rms_norm M=2 N=64 ")
    assert " after this process was marked ready; put the workload into a shapes.json" in line
    assert said["taken back"] == [[1, 2, 0, 1, 1], 1]


def test_a_kernel_that_tilelang_finds_on_disk_after_ready_is_an_incident_too(told, cache_root):
    told("runtime.resolve(spec(1))")
    for path in layout.records(cache_root):
        path.unlink()
    said = told(
        COUNTS
        + """
runtime.mark_ready()
resolver = Resolver(root)
resolver.resolve(spec(1))
told["counts"] = counts(resolver)
"""
    )
    assert said["counts"] == [1, 0, 1, 0, 0]
    assert len(said["heard"]) == 1


# --- the policy of the environment ---


RESOLVED = """
told["first"] = miss(runtime.resolve, 1)
runtime.mark_ready()
told["ready"] = miss(runtime.resolve, 2)
try:
    runtime.resolve(spec(3))
except errors.MissError as error:
    told["hint"] = error.hint
"""


@pytest.fixture
def policy(told, monkeypatch):
    def policy(on_compile, since=None):
        monkeypatch.setenv("TLCACHE_ON_COMPILE", on_compile)
        if since is not None:
            monkeypatch.setenv("TLCACHE_ON_COMPILE_FROM", since)
        return told(RESOLVED)

    return policy


def test_error_holds_from_ready_on_and_says_what_to_warm(policy):
    said = policy("error")
    assert (said["first"], said["ready"]) == ("compiled", "TLCACHE_ON_COMPILE is error")
    assert "`tlcache warm --shapes shapes.json --target cpu`" in said["hint"]
    assert said["heard"] == []


def test_error_from_the_start_holds_from_the_first_kernel_on_and_restores_what_is_there(
    policy, told, cache_root
):
    said = policy("Error", "start")
    assert (said["first"], said["ready"]) == ("TLCACHE_ON_COMPILE is error",) * 2
    assert not said["tilelang"]
    told("del os.environ['TLCACHE_ON_COMPILE']\nruntime.resolve(spec(1))")
    said = told("told['origin'] = runtime.resolve(spec(1)).origin")
    assert said["origin"] == "restored"


def test_warn_from_the_start_logs_each_compile(policy):
    said = policy("warn", "start")
    assert (said["first"], said["ready"]) == ("compiled", "compiled")
    assert ["was compiled in" in line for _, line in said["heard"]] == [True] * 3
    assert " after this process was marked ready" not in said["heard"][0][1]
    assert " after this process was marked ready" in said["heard"][1][1]


@pytest.mark.parametrize("wrong", [("eror", "start"), ("error", "begin")])
def test_what_is_misspelt_is_said_once_and_allows(policy, wrong):
    said = policy(*wrong)
    assert (said["first"], said["ready"]) == ("compiled", "compiled")
    complaints = [line for _, line in said["heard"] if "compiles are allowed" in line]
    assert len(complaints) == 1
    assert repr(wrong[0]) in complaints[0]
