"""No stale hit: whatever may change what a kernel is changes its key, or makes it no hit at all."""

from __future__ import annotations

import pytest

# The keys of a lazy and an eager call, or why there is none. Nothing is compiled.
KEYS = """
import os, torch
os.makedirs(os.environ["TILELANG_CACHE_DIR"], exist_ok=True)
{before}
import tlcache, kernels, helpers, settings
tlcache.accelerate()
from tlcache.runtime.foreign.call import Call
from tlcache.runtime.foreign.stream import Unseen
{patch}
def key(impl, *args):
    try:
        return Call(impl, args, {{}}).key
    except Unseen as unseen:
        return "refused: " + unseen.reason
told["lazy"] = key({lazy}, 8)
told["eager"] = key({eager}, torch.empty(8))
"""


@pytest.fixture
def keys(forked, program):
    """The keys of a program after an edit."""
    count = iter(range(100))

    def keys(
        *edits, patch="", before="", lazy="kernels.make(4, 1.0)", eager="kernels.eager", **env
    ):
        one = program(f"p{next(count)}")
        for edit in edits:
            one.edit(*edit)
        code = KEYS.format(patch=patch, before=before, lazy=lazy, eager=eager)
        return forked(one.write(), code, **env)

    return keys


@pytest.fixture
def plain(keys):
    found = keys()
    assert all(len(key) == 64 for key in found.values()), found
    return found


BOTH = ("lazy", "eager")
EDITS = {
    "the kernel's body": (
        BOTH,
        [("kernels.py", "Y[i] = doubled(X[i]) * FACTOR", "Y[i] = doubled(X[i]) / FACTOR"),
         ("kernels.py", "Y[i] = X[i] * FACTOR", "Y[i] = X[i] / FACTOR")],
    ),
    "a helper": (("lazy",), [("helpers.py", "return x * twice()", "return x + twice()")]),
    "a helper's helper": (("lazy",), [("helpers.py", "return 2.0", "return 3.0")]),
    "a global constant": (BOTH, [("kernels.py", "FACTOR = 2.0", "FACTOR = 2.5")]),
    "its type": (BOTH, [("kernels.py", "FACTOR = 2.0", "FACTOR = 2")]),
    "another module's constant": (("lazy",), [("settings.py", "OFFSET = 10.0", "OFFSET = 11.0")]),
    "what only an annotation names": (("eager",), [("settings.py", '"float32"', '"float16"')]),
    "an annotation": (
        ("eager",), [("kernels.py", "T.Tensor[[N], settings.DTYPE]", 'T.Tensor[[N], "float16"]')]
    ),
    "a default argument": (("lazy",), [("kernels.py", "bias=1.0", "bias=2.0")]),
    "a computed default": (("eager",), [("helpers.py", "by: float = 3.0", "by: float = 4.0")]),
    "a closure value": (("lazy",), [("kernels.py", "scale * 1.0", "scale * 4.0")]),
    "a macro": (BOTH, [("helpers.py", "Y[i] + TERM", "Y[i] - TERM")]),
    "a macro's constant": (BOTH, [("helpers.py", "TERM = 0.5", "TERM = 0.75")]),
    "the output indices": (("lazy",), [("kernels.py", "out_idx=[-1]", "out_idx=[1]")]),
    "the target": (("eager",), [("kernels.py", '@tilelang.jit(target="c")',
                                 '@tilelang.jit(target={"kind": "c", "keys": ["x"]})')]),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_that_may_change_a_kernel_changes_its_key(keys, plain, edit):
    changed, edits = EDITS[edit]
    found = keys(*edits)
    assert {name for name in BOTH if found[name] != plain[name]} == set(changed), found


@pytest.mark.parametrize(
    "edits",
    [
        [("kernels.py", "FACTOR = 2.0", "# a comment\n\n\nFACTOR = 2.0  # another")],
        [("kernels.py", "    inner = scale", "    # why\n\n    inner = scale")],
        [("kernels.py", "in T.serial(n):\n", "in T.serial(n):  # of them\n")],
        [("helpers.py", "def unrelated():\n    return 1", "def unrelated():\n    return 2")],
        [("settings.py", "UNUSED = 1", "UNUSED = 2")],
        [("helpers.py", "def doubled", "def new():\n    return unrelated()\n\n\ndef doubled")],
        [("kernels.py", "import settings\n", "import os\nimport settings\n")],
    ],
    ids=["comments", "in a function", "in a kernel", "unrelated", "unused", "moved", "import"],
)  # fmt: skip
def test_comments_lines_and_unrelated_edits_leave_the_key_alone(keys, plain, edits):
    assert keys(*edits) == plain


@pytest.mark.parametrize(
    ("patch", "changed"),
    [
        ("helpers.twice = lambda: 5.0", {"lazy"}),
        ("kernels.doubled = lambda x: x * 7.0", {"lazy"}),
        ("settings.OFFSET = 12.0", {"lazy"}),
        ("kernels.FACTOR = 9.0", {"lazy", "eager"}),
        ("helpers.twice.__code__ = (lambda: 5.0).__code__", {"lazy"}),
        ("helpers.doubled.__defaults__ = (1,)", {"lazy"}),
        ("helpers.TERM = 1.0", {"lazy", "eager"}),
        ("import tilelang.language as T\nT.serial = lambda n: T.unroll(n)", {"lazy", "eager"}),
    ],
)
def test_what_was_replaced_in_memory_counts(keys, plain, patch, changed):
    found = keys(patch=patch)
    assert {name for name in BOTH if found[name] != plain[name]} == changed, found


@pytest.mark.parametrize(
    "lazy",
    [
        "kernels.make(4, 2.0)",
        'kernels.make(4, 1.0, ["-O1"])',
        'kernels.make(4, 1.0, "-O1")',
        'kernels.make(4, 1.0, None, {"tl.disable_safe_memory_legalize": True})',
    ],
)
def test_arguments_flags_and_pass_configs_count(keys, plain, lazy):
    assert keys(lazy=lazy)["lazy"] != plain["lazy"]


def test_what_the_closure_does_not_hold_does_not_count(keys, plain):
    assert keys(lazy="kernels.make(5, 1)") == plain


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TILELANG_LAYOUT_COST_MODEL", "x"),
        ("TILELANG_SOMETHING_NEW", "1"),
        ("TL_TEMPLATE_PATH", "/elsewhere"),
        ("NVCC_APPEND_FLAGS", "-O1"),
        ("CXX", "clang++"),
    ],
)
def test_variables_that_may_change_a_kernel_count(keys, plain, name, value):
    found = keys(**{name: value})
    assert found["lazy"] != plain["lazy"]
    assert found["eager"] != plain["eager"]


@pytest.mark.parametrize("name", ["TILELANG_VERBOSE", "TILELANG_CLEANUP_TEMP_FILES", "HOME"])
def test_other_variables_do_not(keys, plain, name):
    assert keys(**{name: "0"}) == plain


def test_what_is_set_in_tilelangs_env_counts_like_the_variable(keys, plain):
    patch = "from tilelang import env\nenv.TILELANG_LAYOUT_COST_MODEL = 'x'"
    assert keys(patch=patch)["lazy"] != plain["lazy"]


@pytest.mark.parametrize("package", ["tilelang", "tvm_ffi"])
def test_another_version_is_another_key(keys, plain, package):
    before = (
        "import tilelang; tilelang.__version__ = '0.0.0'"
        if package == "tilelang"
        else "from tlcache import fingerprint; fingerprint.tvm_ffi_version = lambda: '0.0.0'"
    )
    found = keys(before=before)
    assert found["lazy"] != plain["lazy"]
    assert found["eager"] != plain["eager"]


def test_a_key_is_the_same_in_every_process(keys, plain):
    assert keys() == plain
    assert keys(PYTHONHASHSEED="7") == plain


IMPURE = {
    "a file": "float(open('settings.py').read()[9:13])",
    "any variable": "float(len(__import__('os').environ))",
    "the time": "__import__('time').time()",
    "a module": "float(hash(settings))",
    "eval": "eval('1.0')",
    "globals": "globals()['FACTOR']",
}


@pytest.mark.parametrize("what", IMPURE)
def test_what_cannot_be_seen_is_refused(keys, what):
    found = keys(("helpers.py", "return 2.0", f"return {IMPURE[what]}"))
    assert found["lazy"].startswith("refused: "), found


@pytest.mark.parametrize(
    ("module", "expression"),
    [
        ("import random", "random.random()"),
        ("import os", "float(os.getpid())"),
        ("import torch", "float(torch.get_num_threads())"),
        ("import torch\nHELD = torch.ones(1)", "float(HELD[0])"),
        ("import itertools\nCOUNT = itertools.count()", "float(next(COUNT))"),
        ("STATE = {'n': 0}", "float(STATE.setdefault('n', 1))"),
        ("import threading\nHELD = threading.Lock()", "float(HELD.locked())"),
    ],
)
def test_state_is_refused(keys, module, expression):
    found = keys(
        ("helpers.py", "import dataclasses\n", f"import dataclasses\n{module}\n"),
        ("helpers.py", "return 2.0", f"return {expression}"),
    )
    assert found["lazy"].startswith("refused: "), found


def test_what_a_kernel_would_leave_behind_is_refused(keys):
    found = keys(
        ("helpers.py", "TERM = 0.5", "TERM = 0.5\nMADE = {}"),
        ("helpers.py", "return x * twice()", "MADE['x'] = 1\n    return x * twice()"),
    )
    assert found["lazy"].startswith("refused: "), found


def test_one_variable_counts_by_its_value(keys):
    edits = [
        ("helpers.py", "import dataclasses\n", "import dataclasses\nimport os\n"),
        ("helpers.py", "return 2.0", 'return float(os.environ.get("MY_TERM", "2"))'),
    ]
    first, second, again = keys(*edits), keys(*edits, MY_TERM="3"), keys(*edits)
    assert len(first["lazy"]) == 64
    assert first["lazy"] != second["lazy"]
    assert first == again


def test_whether_one_file_is_there_counts(keys, tmp_path):
    path = tmp_path / "marker"
    edits = [
        ("helpers.py", "import dataclasses\n", "import dataclasses\nimport os\n"),
        ("helpers.py", "return 2.0", f"return 2.0 if os.path.exists({str(path)!r}) else 3.0"),
    ]
    first = keys(*edits)
    assert len(first["lazy"]) == 64
    path.touch()
    assert keys(*edits)["lazy"] != first["lazy"]


def test_a_mutable_constant_counts_by_what_it_holds(keys):
    edits = [
        ("helpers.py", "TERM = 0.5", "TERM = 0.5\nTABLE = {'a': [1.0, 2.0]}"),
        ("helpers.py", "return 2.0", 'return TABLE["a"][1]'),
    ]
    first = keys(*edits)
    assert len(first["lazy"]) == 64
    assert keys(*edits, patch="helpers.TABLE['a'][1] = 3.0")["lazy"] != first["lazy"]


def test_a_cached_helper_that_something_was_changed_under_is_refused(keys):
    edits = [
        ("helpers.py", "import dataclasses\n", "import dataclasses\nimport functools\n"),
        ("helpers.py", "def twice():\n    return 2.0",
         "@functools.cache\ndef twice():\n    return 4 * TERM"),
    ]  # fmt: skip
    patch = "helpers.twice()\nCall(kernels.make(4, 1.0), (8,), {})\nhelpers.TERM = 1.0"
    assert keys(*edits)["lazy"] != keys(*edits, patch="helpers.TERM = 1.0")["lazy"]
    assert keys(*edits, patch=patch)["lazy"].startswith("refused: ")


def test_a_source_file_that_changes_under_the_process_is_refused(keys):
    patch = (
        "import pathlib\n"
        "path = pathlib.Path('helpers.py')\n"
        "path.write_text(path.read_text().replace('return 2.0', 'return 3.0'))"
    )
    found = keys(patch=patch)
    assert found["lazy"] == "refused: its source file was changed while the process runs"


@pytest.mark.parametrize("change", ["T.serial = lambda n: real(n // 2)", "T.serial = T.unroll"])
def test_a_name_of_tilelangs_that_was_replaced_counts_though_it_was_met_before(keys, change):
    before = "import tilelang.language as T\nreal = T.serial"
    patch = "Call(kernels.make(4, 1.0), (8,), {})\n" + change
    plain = keys()
    replaced = keys(before=before, patch=patch)
    assert replaced["lazy"] != plain["lazy"]
    assert replaced["eager"] != plain["eager"]


def test_a_dtype_of_tilelangs_that_was_replaced_counts(keys):
    edit = ("kernels.py", 'Y: T.Tensor((n,), "float32")', "Y: T.Tensor((n,), T.float32)")
    before = "import tilelang.language as T\n"
    replaced = keys(edit, before=before + "T.float32 = T.float16")
    assert replaced["lazy"] != keys(edit)["lazy"]
