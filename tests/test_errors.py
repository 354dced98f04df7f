"""The exception tree, and the public names of every module."""

from __future__ import annotations

import copy
import json
import pickle
import pkgutil
import re
import subprocess
import sys

import pytest

import ops
import tlcache
from tlcache import errors
from tlcache.operators import WorkloadError

KINDS = [getattr(errors, name) for name in errors.__all__]

MODULES = """
import importlib, inspect, json, sys
report = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", None)
    report[name] = {
        "listed": listed,
        "public": [
            key for key, value in vars(module).items()
            if not key.startswith("_")
            and (inspect.isclass(value) or inspect.isfunction(value))
            and value.__module__ == name and value.__qualname__ == key
        ],
        "wrong": [k for k in listed or () if listed.count(k) > 1 or not hasattr(module, k)],
    }
print("RESULT " + json.dumps(report))
"""


def module_names():
    for package in (tlcache, ops):
        yield package.__name__
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not found.name.endswith("__main__"):
                yield found.name


@pytest.fixture(scope="module")
def drawn():
    """The tree as the module's docstring draws it: name, depth, exit code."""
    rows = re.findall(r"^( +)([A-Z]\w+) +(\d|exit code)\b", errors.__doc__, re.MULTILINE)
    return [(name, len(indent), code) for indent, name, code in rows]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("hint", [None, "`tlcache doctor` tells"], ids=["bare", "hinted"])
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling_with_its_message_and_hint(kind, hint, protocol):
    error = kind("M is 0", hint=hint)
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is kind
    assert (again.message, again.hint, str(again)) == ("M is 0", hint, str(error))


@pytest.mark.parametrize("again", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_workload_error_survives_with_its_field(again):
    error = again(WorkloadError("schedule.threads", "threads is 3", hint="a power of two"))
    assert type(error) is WorkloadError
    assert error.field == "schedule.threads"
    assert str(error) == "threads is 3\n\nhint: a power of two"


def test_an_error_says_its_message_a_blank_line_and_its_hint():
    assert str(errors.MissError("it is not there")) == "it is not there"
    assert str(errors.MissError("it is not there", hint="warm")) == "it is not there\n\nhint: warm"


def test_the_tree_that_is_drawn_is_the_tree_that_is_there(drawn):
    assert drawn[0][0] == "TlcacheError"
    assert sorted(name for name, _, _ in drawn) == sorted(errors.__all__)
    above: list[tuple[str, int]] = []
    for name, depth, code in drawn:
        kind = getattr(errors, name)
        while above and above[-1][1] >= depth:
            above.pop()
        parent = above[-1][0] if above else "Exception"
        assert [base.__name__ for base in kind.__bases__] == [parent]
        if code.isdigit():
            assert kind.exit_code == int(code), name
        above.append((name, depth))


def test_an_exit_code_tells_a_wrong_request_from_a_wrong_machine_and_what_is_not_so():
    for kind in KINDS:
        wanted = {
            errors.UsageError: 2,
            errors.EnvironmentFault: 3,
            errors.KernelError: 1,
            errors.ArchiveError: 1,
        }
        families = [family for family in wanted if issubclass(kind, family)]
        assert len(families) == 1 or kind is errors.TlcacheError
        assert kind.exit_code == (wanted[families[0]] if families else 1)


@pytest.fixture(scope="module")
def modules():
    """What every module of both packages says of its names; all are imported, in one process."""
    done = subprocess.run(
        [sys.executable, "-c", MODULES, *module_names()],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.rpartition("RESULT ")[2])


def test_a_module_with_public_names_has_an_all(modules):
    bare = [name for name, found in modules.items() if found["listed"] is None and found["public"]]
    assert bare == []


def test_every_name_in_an_all_is_there_and_there_once(modules):
    wrong = {name: found["wrong"] for name, found in modules.items() if found["wrong"]}
    assert wrong == {}


def test_every_public_function_and_class_is_in_its_modules_all(modules):
    unlisted = {
        name: missing
        for name, found in modules.items()
        if (missing := sorted(set(found["public"]) - set(found["listed"] or ())))
    }
    assert unlisted == {}
