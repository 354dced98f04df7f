"""Why a program's own call is not restored: each ingredient of its key, on files of calls, and no
cause that is not so.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import get_args

import pytest

from tlcache import fingerprint, targets, unrestored, why
from tlcache.spec import KernelSpec
from tlcache.store import calls, layout
from tlcache.store.answers import Answer, Style
from tlcache.store.record import Library
from tlcache.unrestored import Calls
from tlcache.warm.outcome import Asked, Outcome
from tlcache.why import Reader

KEY, OTHER, FRONT, TILELANGS = "a" * 64, "b" * 64, "f" * 64, "c" * 64
LIBRARY = b"a library"
MADE_OF = {
    "target": "cpu",
    "host": "c",
    "backend": "cython",
    "out_idx": "[-1]",
    "pass configs": "{}",
    "compile flags": "[]",
    "python": "cpython-311",
    "argument n": "8",
    "argument bias": "1.0",
    "function json.tool:main": "0123456789ab",
    "value json.tool.BY": "2.0",
    "value json.tool.TABLE": "ba9876543210",
}
# Of a module that is there, whose source nobody edits.
SPEC = KernelSpec(kernel="json.tool:main", workload={"n": 8}, schedule={}, target=targets.CPU)


@pytest.fixture
def root(cache_root):
    layout.make_skeleton(cache_root, fingerprint.tilelang_version(), fingerprint.platform_name())
    return cache_root


def entry() -> str:
    here = layout.namespace(fingerprint.tilelang_version(), fingerprint.platform_name())
    return os.path.join(here, "kernels", TILELANGS)


def file(root, key=OTHER, *, made_of=MADE_OF, **changes):
    """File a call, and its library."""
    path = root / entry()
    path.mkdir(parents=True, exist_ok=True)
    (path / "kernel_lib.so").write_bytes(LIBRARY)
    answer = Answer(
        kernel=SPEC.kernel,
        title="main n=8",
        entry=entry(),
        library=Library("kernel_lib.so", len(LIBRARY), hashlib.sha256(LIBRARY).hexdigest()),
        backend="cython",
        target="c",
        inputs=1,
        outputs=(1,),
        callee=False,
        signature="{}",
        pass_configs={},
        compile_flags=None,
        compile_seconds=1.0,
        versions=fingerprint.versions(),
        created="2026-01-01T00:00:00+00:00",
        made_of=json.dumps(made_of),
    )
    calls.write_answer(os.fspath(root), key, answer._replace(**changes))


def cause(root, *below, recorded=None, made_of=MADE_OF, **asked):
    told = Asked(key=KEY, front=FRONT, kernel=SPEC.kernel, made_of=made_of)._replace(**asked)
    outcome = Outcome("asked", asked=told)
    return Calls([root, *below], Reader(root, below)).cause(SPEC, outcome, recorded)


def test_a_call_that_is_filed_with_its_library_and_style_is_a_hit(root):
    file(root, KEY)
    assert cause(root).kind == "hit"
    gone = cause(root, styled=True)
    assert gone.kind == "vanished" and "how its function is called" in gone.detail
    calls.write_style(os.fspath(root), FRONT, Style("lazy", None, {}))
    assert cause(root, styled=True).kind == "hit"
    path = calls.path_of(root, FRONT)
    with open(path, "r+b") as opened:
        opened.write(b"?")
    assert cause(root, styled=True).kind == "damaged"


def test_a_call_is_looked_for_in_every_root(root, tmp_path):
    first = tmp_path / "first"
    assert "there is no cache root" in cause(first, tmp_path / "second").detail
    file(root, made_of={**MADE_OF, "argument bias": "2.0"})
    found = cause(first, root)
    assert (found.kind, found.root, found.nearest) == ("default", str(root), OTHER)
    file(root, KEY)
    found = cause(first, root, styled=True)
    assert found.kind == "vanished" and f"{first} or {root}" in found.detail
    calls.write_style(os.fspath(first), FRONT, Style("lazy", None, {}))
    found = cause(first, root, styled=True)
    assert (found.kind, found.root) == ("hit", str(root))
    assert cause(root, first).root is None


@pytest.mark.parametrize(
    ("name", "value", "kind", "detail"),
    [
        ("function json.tool:main", "f" * 12, "source", "json.tool:main has changed"),
        ("value json.tool.BY", "3.0", "source", "json.tool.BY was 3.0 and is 2.0"),
        ("value json.tool.TABLE", "f" * 12, "source", "json.tool.TABLE has changed"),
        ("argument bias", "2.0", "default", "its call had bias=2.0, which is bias=1.0 now"),
        ("target", "sm_90a", "other target", "compiled only for sm_90a, and cpu is asked for"),
        ("host", "llvm", "target spelling", "compiled for llvm, and is asked for c"),
        ("backend", "tvm_ffi", "backend", "the backend tvm_ffi, and is asked for by cython"),
        ("out_idx", "[1]", "output indices", "with out_idx=[1], and is asked for with [-1]"),
        ("pass configs", '{"a": 1}', "pass configs", 'configs {"a": 1}, and is asked for with {}'),
        ("compile flags", "['-O1']", "compile flags", "flags ['-O1'], and is asked for with []"),
        ("python", "cpython-310", "python", "the Python cpython-310, and this is cpython-311"),
        ("variable CC", "clang", "variable", "compiled with CC=clang, and here it is CC not set"),
    ],
)
def test_one_ingredient_that_differs_is_the_one_that_is_told(root, name, value, kind, detail):
    file(root, made_of={**MADE_OF, name: value})
    found = cause(root)
    assert (found.kind, len(found.differences)) == (kind, 1)
    assert found.detail.endswith(detail) and found.loadable and found.nearest == OTHER


@pytest.mark.parametrize(
    ("name", "kind"), [("tilelang", "tilelang"), ("tvm_ffi", "tvm-ffi"), ("platform", "platform")]
)
def test_another_version_is_told(root, name, kind):
    file(root, versions={**fingerprint.versions(), name: "0.0.1"})
    found = cause(root)
    assert found.kind == kind and "0.0.1" in found.detail
    assert fingerprint.versions()[name] in found.detail


def test_where_nothing_that_is_kept_differs_that_is_said(root):
    file(root)
    found = cause(root)
    assert found.kind == "unknown" and found.differences == ()
    assert "nothing that is told apart differs" in found.detail


def test_a_variable_of_the_start_is_told_once(root):
    file(root, made_of={**MADE_OF, "variable CC": "a", "variable start CC": "a"})
    assert len(cause(root).differences) == 1


def test_the_nearest_call_is_the_one_with_the_fewest_differences(root):
    file(root, "1" * 64, made_of={**MADE_OF, "target": "sm_90a"})
    file(root, "2" * 64, made_of={**MADE_OF, "out_idx": "[1]", "backend": "tvm_ffi"})
    file(root, "3" * 64, made_of={**MADE_OF, "out_idx": "[1]", "argument n": "9"})
    assert cause(root).nearest == "2" * 64


def test_a_call_of_other_arguments_is_no_cause(root):
    file(root, made_of={**MADE_OF, "argument n": "9"})
    found = cause(root)
    assert found.kind == "no record" and found.nearest is None
    assert found.detail == "no call with these arguments is filed; there are n=9 bias=1.0"
    closure = {"value json.tool:main.kernel.n": "8"}
    file(root, made_of={**MADE_OF, **closure, "argument n": "8"})
    found = cause(root, made_of={**MADE_OF, "value json.tool:main.kernel.n": "9"})
    assert found.kind == "no record"


def test_of_a_call_that_cannot_be_restored_the_reason_is_told_and_whether_it_is_compiled(root):
    unseen = {"key": None, "reason": "it uses torch.randn"}
    found = cause(root, **unseen)
    assert (found.kind, found.loadable) == ("not restorable", None)
    assert "it uses torch.randn; whether its cache has it is not known" in found.detail
    found = cause(root, **unseen, recorded=TILELANGS)
    assert found.loadable is None  # its replay came to another kernel
    asked = Asked(reason="it uses torch.randn", recorded=True)
    reader = Calls([root], Reader(root))
    lacking = reader.cause(SPEC, Outcome("asked", asked=asked), TILELANGS)
    assert lacking.loadable is False and "its cache lacks it" in lacking.detail
    file(root)
    there = reader.cause(SPEC, Outcome("asked", asked=asked), TILELANGS)
    assert there.loadable and there.detail.endswith("at each start: it uses torch.randn")


def test_a_recording_of_what_is_made_no_more_is_to_be_made_anew(root):
    assert "records it anew" in (cause(root, recorded=TILELANGS).hint or "")
    file(root, KEY)
    assert cause(root, recorded=TILELANGS).hint is None  # a hit all the same


def test_a_replay_that_fails_is_told_as_a_warm_tells_it(root):
    failed = Outcome("failed", error="the factory m:f cannot be imported: no\nmore", hint="mend it")
    found = Calls([root], Reader(root)).cause(SPEC, failed)
    assert (found.kind, found.hint) == ("failed", "mend it")
    assert found.detail == "the factory m:f cannot be imported: no"


def test_every_difference_has_a_sentence():
    told = {*unrestored._NAMED, "source"}
    assert told <= set(get_args(why.Kind))
    assert {kind for kind, _ in unrestored._VERSIONS} | set(unrestored._KINDS.values()) <= told
