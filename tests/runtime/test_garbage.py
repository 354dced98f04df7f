"""The collector while TileLang is imported, and after it, in processes of their own."""

from __future__ import annotations

import gc
import json
import sys

import pytest

from tlcache.runtime import garbage

# Imports TileLang in some way, and tells what the collector did meanwhile, and how it was left.
TOLD = """
import gc, json, sys
ran = []
gc.callbacks.append(lambda phase, info: ran.append(info["generation"]) if phase == "start" else 0)
{before}
before = len(ran)
{imports}
import tilelang
print(json.dumps([ran[before:].count(2), gc.get_freeze_count() > 100_000, gc.isenabled()]))
"""
HOOKED = "from tlcache.runtime import hooks; hooks.install()"
COMPILES = """
import torch
from tlcache import operators, runtime, targets
{agent}
values = {{"M": 1, "N": 64, "dtype": "float32"}}
runtime.resolve(operators.get("rms_norm").spec(values, targets.CPU))
"""


@pytest.fixture
def told(python, runtime_dir):
    def told(before="", imports=""):
        ran = python(TOLD.format(before=before, imports=imports))
        assert ran.code == 0, ran.err
        return json.loads(ran.out.splitlines()[-1])

    return told


def test_the_hooks_have_tilelang_imported_after_one_collection_and_frozen(told):
    assert told(HOOKED) == [1, True, True]


@pytest.mark.parametrize(
    ("program", "enabled"), [("gc.disable()", False), ("gc.freeze()", True)], ids=["off", "frozen"]
)
def test_a_program_that_sees_to_its_collector_is_left_alone(told, program, enabled):
    collected, _, left = told(f"{HOOKED}\n{program}\nfrozen = gc.get_freeze_count()")
    assert (collected, left) == (0, enabled)


def test_who_compiles_with_an_agent_has_what_the_import_left_frozen(told):
    _, frozen, enabled = told(
        imports=COMPILES.format(agent="from tlcache import agent; agent.start()")
    )
    assert (frozen, enabled) == (True, True)


def test_without_an_agent_nothing_is_frozen(told):
    _, frozen, enabled = told(imports=COMPILES.format(agent=""))
    assert (frozen, enabled) == (False, True)


def test_an_import_that_fails_leaves_the_collector_on(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import gc\nassert not gc.isenabled()\n1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    garbage.spare_import("broken_module")
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    for _ in range(2):
        with pytest.raises((ZeroDivisionError, AssertionError)):
            __import__("broken_module")
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
    assert sys.meta_path == finders


def test_a_module_that_is_not_there_is_as_missing_as_ever():
    finders = list(sys.meta_path)
    garbage.spare_import("no_such_module_anywhere")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        __import__("no_such_module_anywhere")
    assert sys.meta_path == finders
