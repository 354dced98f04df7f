"""The digest of what a factory reaches: it follows every edit that counts, and no other.

A known limit, and not tested: what is looked up by a computed name (`getattr`, `importlib`, a
module's `__getattr__`) is not seen.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import itertools
import json
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlcache import closure
from tlcache.errors import FactoryError

INDENTED = {
    "pkg/__init__.py": "",
    "pkg/kern.py": '''
        """A kernel's module."""

        import functools
        import math
        from pkg import consts
        from pkg.base import Base
        from pkg.helpers import scale as scaled
        from .trace import traced
        from .shared import *

        WIDTH = 4
        TABLE = [1, 2]
        TABLE.append(3)
        UNROLL: int = 2
        UNROLL *= 4
        if WIDTH > 2:
            LANES = 8
        else:
            LANES = 16
        try:
            import absent_module
        except ImportError:
            absent_module = None

        def doubled(x):
            """Twice."""
            return x * 2

        def halved(x):
            return x / 2

        class Tile(Base):
            """A tile."""

            rows = 32

            def area(self):
                return self.rows * doubled(self.columns)

        def unrelated(x):
            return x - 1

        @functools.lru_cache(maxsize=32)
        @traced("factory")
        def factory(M, N, block=consts.BLOCK, *, stages=2):
            """The factory."""
            import tilelang.language as T

            # how wide
            def body(x: WIDTH):
                return [scaled(i) + shared(i) for i in range(UNROLL * LANES) if i in TABLE]

            return body, Tile().area(), math.sqrt(M), (lambda y: halved(y))(N), absent_module, T
    ''',
    "pkg/base.py": """
        from . import deeper

        class Base:
            columns = 7

            def depth(self):
                return deeper.DEPTH
    """,
    "pkg/deeper.py": "DEPTH = 3\nOTHER = 4\n",
    "pkg/consts.py": "BLOCK = 64\n",
    "pkg/helpers.py": """
        from pkg.factors import FACTOR

        REGISTRY = {}
        REGISTRY.update(a=1)

        def scale(x):
            return x * FACTOR

        def unused(x):
            return x
    """,
    "pkg/factors.py": "FACTOR = 5\nUNUSED = 6\n",
    "pkg/trace.py": """
        def traced(name):
            return lambda function: function
    """,
    "pkg/shared.py": """
        def shared(x):
            return x + 9
    """,
    "pkg/unrelated.py": "VALUE = 1\n",
}
PACKAGE = {path: textwrap.dedent(text) for path, text in INDENTED.items()}


def factory_digest(kernel):
    """`closure.factory_digest` as a fresh process has it, with nothing remembered."""
    spec = importlib.util.find_spec(closure.__name__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.factory_digest(kernel)


@pytest.fixture(scope="module")
def digest(tmp_path_factory):
    """The digest of a factory among files, as a process that has never seen them takes it."""
    counter = itertools.count()

    def digest(files, kernel="pkg.kern:factory"):
        root = tmp_path_factory.mktemp("sources") / str(next(counter))
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        before = set(sys.modules)
        sys.path.insert(0, str(root))
        try:
            importlib.invalidate_caches()
            return factory_digest(kernel)
        finally:
            sys.path.remove(str(root))
            for name in set(sys.modules) - before:
                if name.partition(".")[0] in {"pkg", "kern", "other", "spread"}:
                    del sys.modules[name]

    return digest


@pytest.fixture(scope="module")
def unedited(digest):
    """The digest of the factory of PACKAGE."""
    return digest(PACKAGE)


def edited(files, path, old, new):
    assert files[path].count(old) == 1, f"{old!r} is not in {path} once"
    return {**files, path: files[path].replace(old, new)}


def test_the_digest_is_64_hexadecimal_digits_and_the_same_each_time(digest):
    first = digest(PACKAGE)
    assert len(first) == 64
    assert int(first, 16) >= 0
    assert digest(PACKAGE) == first


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        pytest.param("pkg/kern.py", "i in TABLE", "i not in TABLE", id="the_body"),
        pytest.param("pkg/kern.py", "stages=2", "stages=3", id="a_default_argument"),
        pytest.param("pkg/kern.py", "M, N, block", "N, M, block", id="the_order_of_arguments"),
        pytest.param("pkg/kern.py", "maxsize=32", "maxsize=64", id="a_decorators_argument"),
        pytest.param("pkg/kern.py", '@traced("factory")', "", id="a_decorator"),
        pytest.param("pkg/kern.py", "return x * 2", "return x * 3", id="a_helper"),
        pytest.param("pkg/kern.py", "return x / 2", "return x // 2", id="a_helper_in_a_lambda"),
        pytest.param("pkg/kern.py", "WIDTH = 4", "WIDTH = 8", id="a_constant"),
        pytest.param("pkg/kern.py", "UNROLL *= 4", "UNROLL *= 2", id="an_augmented_constant"),
        pytest.param("pkg/kern.py", "LANES = 16", "LANES = 32", id="a_constant_under_an_if"),
        pytest.param("pkg/kern.py", "WIDTH > 2", "WIDTH > 9", id="the_condition_of_a_constant"),
        pytest.param(
            "pkg/kern.py", "absent_module = None", "absent_module = 0", id="a_fallback_of_an_import"
        ),
        pytest.param("pkg/kern.py", "append(3)", "append(4)", id="a_statement_with_effects"),
        pytest.param("pkg/kern.py", "rows = 32", "rows = 64", id="an_attribute_of_a_class"),
        pytest.param("pkg/kern.py", "class Tile(Base)", "class Tile", id="the_bases_of_a_class"),
        pytest.param("pkg/kern.py", "self.rows *", "self.rows +", id="a_method"),
        pytest.param("pkg/base.py", "columns = 7", "columns = 8", id="a_base_class"),
        pytest.param("pkg/deeper.py", "DEPTH = 3", "DEPTH = 4", id="what_a_base_class_reaches"),
        pytest.param("pkg/consts.py", "BLOCK = 64", "BLOCK = 128", id="a_constant_of_a_module"),
        pytest.param("pkg/helpers.py", "x * FACTOR", "x + FACTOR", id="a_helper_elsewhere"),
        pytest.param("pkg/helpers.py", "update(a=1)", "update(a=2)", id="effects_elsewhere"),
        pytest.param("pkg/factors.py", "FACTOR = 5", "FACTOR = 6", id="a_constant_elsewhere"),
        pytest.param("pkg/trace.py", "function: function", "function: 0", id="a_decorators_body"),
        pytest.param("pkg/shared.py", "x + 9", "x + 8", id="a_star_imported_helper"),
        pytest.param("pkg/kern.py", "tilelang.language as T", "math as T", id="an_inner_import"),
        pytest.param(
            "pkg/kern.py", "import scale as", "import unused as", id="what_an_import_brings"
        ),
        pytest.param("pkg/kern.py", "import math", "import cmath as math", id="an_external_module"),
        pytest.param("pkg/kern.py", "[1, 2]", "[1, 2.0]", id="the_type_of_a_number"),
        pytest.param("pkg/kern.py", "[1, 2]", '["1", b"2"]', id="the_type_of_a_text"),
    ],
)
def test_an_edit_that_can_change_the_kernel_changes_the_digest(digest, unedited, path, old, new):
    assert digest(edited(PACKAGE, path, old, new)) != unedited


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        pytest.param("pkg/kern.py", "# how wide", "# how very wide", id="a_comment"),
        pytest.param("pkg/kern.py", '"""The factory."""', '"""Makes it."""', id="a_docstring"),
        pytest.param("pkg/kern.py", '"""The factory."""', "", id="a_docstring_less"),
        pytest.param("pkg/kern.py", '"""Twice."""', '"""Double."""', id="a_helpers_docstring"),
        pytest.param("pkg/kern.py", '"""A tile."""', "", id="a_classs_docstring"),
        pytest.param("pkg/kern.py", '"""A kernel\'s module."""', "", id="a_modules_docstring"),
        pytest.param("pkg/kern.py", "WIDTH = 4", "\n\n\nWIDTH   =  4", id="blank_lines"),
        pytest.param("pkg/kern.py", "[1, 2]", "[\n    1,\n    2,\n]", id="line_breaks"),
        pytest.param("pkg/kern.py", "return x * 2", "return (x * 2)", id="parentheses"),
        pytest.param("pkg/kern.py", '"factory"', "u'factory'", id="quotes"),
        pytest.param("pkg/kern.py", "stages=2", "stages=0x2", id="how_a_number_is_written"),
        pytest.param("pkg/kern.py", "return x - 1", "return x - 2", id="an_unrelated_function"),
        pytest.param(
            "pkg/kern.py",
            "def unrelated(x):",
            "def another():\n    return 0\n\ndef unrelated(x):",
            id="one_more_unrelated_function",
        ),
        pytest.param(
            "pkg/kern.py",
            "import functools\nimport math",
            "import math\nimport functools",
            id="the_order_of_imports",
        ),
        pytest.param(
            "pkg/kern.py", "import math\n", "import math\nimport json\n", id="an_unused_one"
        ),
        pytest.param("pkg/helpers.py", "return x\n", "return -x\n", id="an_unused_helper"),
        pytest.param("pkg/factors.py", "UNUSED = 6", "UNUSED = 7", id="an_unused_constant"),
        pytest.param("pkg/unrelated.py", "VALUE = 1", "VALUE = 2", id="an_unrelated_module"),
    ],
)
def test_an_edit_that_cannot_change_the_kernel_leaves_the_digest_alone(
    digest, unedited, path, old, new
):
    assert digest(edited(PACKAGE, path, old, new)) == unedited


def test_a_helper_that_moves_within_its_module_leaves_the_digest_alone(digest):
    helper = "def halved(x):\n    return x / 2\n\n"
    moved = edited(PACKAGE, "pkg/kern.py", helper, "")
    moved["pkg/kern.py"] += "\n" + helper
    assert digest(moved) == digest(PACKAGE)


def kern(text, *, init="", **others):
    """A package of a factory's module and others beside it."""
    modules = {"__init__": init, "kern": text, **others}
    return {f"pkg/{name}.py": source for name, source in modules.items()}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            kern("from pkg.c import A as X, B as Y\ndef factory(): return X - Y", c="A = 1\nB = 2"),
            kern("from pkg.c import B as X, A as Y\ndef factory(): return X - Y", c="A = 1\nB = 2"),
            id="which_of_two_names_an_import_binds_them_to",
        ),
        pytest.param(
            kern("from math import sin as f, cos as g\ndef factory(): return f(g(1))"),
            kern("from math import cos as f, sin as g\ndef factory(): return f(g(1))"),
            id="which_of_two_external_names_an_import_binds_them_to",
        ),
        pytest.param(
            kern("import pkg.c as x, pkg.d as y\ndef factory(): return x.A", c="A = 1", d="A = 2"),
            kern("import pkg.d as x, pkg.c as y\ndef factory(): return x.A", c="A = 1", d="A = 2"),
            id="which_module_a_name_stands_for",
        ),
        pytest.param(
            kern("def factory():\n    from pkg import c\n    return c.A", c="A = 1"),
            kern("def factory():\n    from pkg import c\n    return c.A", c="A = 2"),
            id="a_module_that_is_imported_inside",
        ),
    ],
)
def test_what_an_import_brings_counts(digest, before, after):
    assert digest(before) != digest(after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("A = 1\nA = 2\n", "A = 2\nA = 1\n", id="the_order_of_assignments"),
        pytest.param("A = 1\nA *= 2\nA += 3\n", "A = 1\nA += 3\nA *= 2\n", id="of_augmented_ones"),
        pytest.param("A = 1\nA += 1\n", "A = 1\nA += 1\nA += 1\n", id="a_repeated_assignment"),
        pytest.param(
            "A = []\nA.append(1)\nA.append(2)\n",
            "A = []\nA.append(2)\nA.append(1)\n",
            id="the_order_of_calls",
        ),
        pytest.param(
            "A = []\nA.append(1)\n", "A = []\nA.append(1)\nA.append(1)\n", id="a_repeated_call"
        ),
        pytest.param(
            "def A(): return 1\ndef A(): return 2\n",
            "def A(): return 2\ndef A(): return 1\n",
            id="the_order_of_definitions",
        ),
    ],
)
def test_the_order_and_number_of_a_modules_statements_count(digest, before, after):
    factory = "def factory(): return A\n"
    assert digest(kern(before + factory)) != digest(kern(after + factory))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("c.A = 1", "c.A = 2", id="an_attribute_of_a_module"),
        pytest.param("c.T[0] = 1", "c.T[0] = 2", id="an_item"),
        pytest.param("del c.A", "del c.B", id="a_deletion"),
        pytest.param("for i in (1,): c.f(i)", "for i in (2,): c.f(i)", id="a_loop"),
        pytest.param("if c: c.f(1)", "if c: c.f(2)", id="a_call_under_an_if"),
        pytest.param(
            "if c:\n  X = 0\n  c.f(1)", "if c:\n  X = 0\n  c.f(2)", id="and_an_assignment"
        ),
        pytest.param(
            "try:\n  import json\n  c.f(1)\nexcept ImportError: pass",
            "try:\n  import json\n  c.f(2)\nexcept ImportError: pass",
            id="a_call_in_a_try_that_imports",
        ),
        pytest.param("with c.g(1): X = 0", "with c.g(2): X = 0", id="a_context"),
        pytest.param("assert c.f(1)", "assert c.f(2)", id="an_assertion"),
    ],
)
def test_a_statement_that_works_on_something_else_counts(digest, before, after):
    text = "from pkg import c\nfrom pkg.h import h\n{}\ndef factory(): return h()\n"
    others = {
        "c": "A = 0\nB = 0\nT = [0]\ndef f(x): A = x\ndef g(x): return x\n",
        "h": "from pkg import c\ndef h(): return c.A\n",
    }
    assert digest(kern(text.format(before), **others)) != digest(kern(text.format(after), **others))


@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        pytest.param("A = 1", "1", "2", id="assignment"),
        pytest.param("A: int = 1", "1", "2", id="annotated"),
        pytest.param("B, (A, *C) = 1, (2, 3)", "2", "4", id="unpacking"),
        pytest.param("B = A = 1", "1", "2", id="chained"),
        pytest.param("if True:\n  if True: A = 1", "1", "2", id="nested_ifs"),
        pytest.param("try: A = 1\nfinally: B = 2", "1", "3", id="try"),
        pytest.param("try: A = 1\nexcept* ValueError: B = 2", "1", "3", id="try_star"),
        pytest.param("try: pass\nexcept E: A = 1\nelse: A = 2", "2", "3", id="else"),
        pytest.param("while True:\n  A = 1\n  break", "1", "2", id="while"),
        pytest.param("for A in (1, 2): pass", "2", "3", id="the_variable_of_a_loop"),
        pytest.param("with open('1') as A: pass", "1", "2", id="the_variable_of_a_context"),
        pytest.param("match 1:\n  case int(): A = 1", "A = 1", "A = 2", id="match"),
        pytest.param("match 1:\n  case A: pass", "1", "2", id="a_captured_name"),
        pytest.param("print(A := 1)", "1", "2", id="walrus"),
        pytest.param("def f():\n  global A\n  A = 1\nf()", "1", "2", id="global"),
        pytest.param("async def A(): return 1", "1", "2", id="async"),
        pytest.param("class A: x = 1", "1", "2", id="class"),
        pytest.param("class A(metaclass=f(1)): pass", "1", "2", id="metaclass"),
        pytest.param("import pkg.b as A", "pkg.b", "pkg.kern", id="import"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        "from pkg.a import A\ndef factory(): return A",
        "from pkg import a\ndef factory(): return a.A",
        "from .a import *\ndef factory(): return A",
        "def factory():\n  import pkg.a\n  return pkg.a.A",
    ],
    ids=["by_name", "by_module", "by_star", "inside"],
)
def test_whatever_binds_a_name_of_another_module_counts(digest, source, old, new, use):
    if sys.version_info < (3, 11) and "except*" in source:
        pytest.skip("new in Python 3.11")
    assert source.count(old) == 1
    before = kern(use, a=source, b="B = 1")
    assert digest(before) != digest(kern(use, a=source.replace(old, new), b="B = 1"))


@pytest.mark.parametrize(
    ("files", "changed"),
    [
        pytest.param(
            kern(
                "from pkg import sub\ndef factory(): return sub.A",
                sub="A = 1",
                init="from . import sub",
            ),
            "pkg/sub.py",
            id="a_submodule_that_its_package_imports",
        ),
        pytest.param(
            kern(
                "from pkg import sub\ndef factory(): return sub.A",
                sub="A = 1",
                other="B = 2",
                init="from .other import *",
            ),
            "pkg/sub.py",
            id="a_submodule_of_a_package_with_a_star_import",
        ),
        pytest.param(
            kern("import pkg.sub\ndef factory(): return pkg.A", sub="", init="A = 1"),
            "pkg/__init__.py",
            id="the_package_above_an_imported_module",
        ),
        pytest.param(
            kern(
                "import pkg\ndef factory(): return pkg.sub.A",
                sub="A = 1",
                init="from pkg import sub",
            ),
            "pkg/sub.py",
            id="a_submodule_as_an_attribute",
        ),
        pytest.param(
            kern(
                "from . import api\ndef factory(): return api.A",
                api="from ._impl import A",
                _impl="A = 1",
            ),
            "pkg/_impl.py",
            id="a_name_that_is_handed_on",
        ),
        pytest.param(
            kern("from .inner.deep import factory", sub="A = 1")
            | {
                "pkg/inner/__init__.py": "",
                "pkg/inner/deep.py": "from ..sub import A\ndef factory(): return A",
            },
            "pkg/sub.py",
            id="a_relative_import_of_two_levels",
        ),
        pytest.param(
            {
                "spread/kern.py": "from spread.sub import A\ndef factory(): return A",
                "spread/sub.py": "A = 1",
            },
            "spread/sub.py",
            id="a_namespace_package",
        ),
        pytest.param(
            {
                "spread/kern.py": "from spread import sub\ndef factory(): return sub.A",
                "spread/sub.py": "A = 1",
            },
            "spread/sub.py",
            id="a_submodule_of_a_namespace_package",
        ),
        pytest.param(
            {
                "spread/kern.py": "from . import sub\ndef factory(): return sub.A",
                "spread/sub.py": "A = 1",
            },
            "spread/sub.py",
            id="a_relative_import_in_a_namespace_package",
        ),
        pytest.param(
            {
                "spread/inner/kern.py": "from spread.inner.sub import A\ndef factory(): return A",
                "spread/inner/sub.py": "A = 1",
            },
            "spread/inner/sub.py",
            id="a_namespace_package_in_a_namespace_package",
        ),
        pytest.param(
            {"kern.py": "import other\ndef factory(): return other.A", "other.py": "A = 1"},
            "other.py",
            id="a_top_level_module",
        ),
        pytest.param(
            kern("from other.sub import A\ndef factory(): return A")
            | {"other/__init__.py": "", "other/sub.py": "A = 1"},
            "other/sub.py",
            id="another_package_that_is_not_installed",
        ),
    ],
)
def test_a_module_is_followed_wherever_it_lies(digest, files, changed):
    top = next(name for name in files if name.endswith("kern.py"))
    kernel = top[: -len(".py")].replace("/", ".") + ":factory"
    after = {**files, changed: files[changed].replace("A = 1", "A = 2")}
    assert after != files
    assert digest(files, kernel) != digest(after, kernel)


@pytest.mark.parametrize("use", ["from pkg.fast import f", "from pkg import fast as f"])
def test_a_compiled_module_counts_by_its_bytes(digest, use):
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    files = kern(f"{use}\ndef factory(): return f")
    assert digest({**files, f"pkg/fast{suffix}": b"\x7fELF1"}) != digest(
        {**files, f"pkg/fast{suffix}": b"\x7fELF2"}
    )


def test_cycles_of_imports_names_and_stars_end(digest):
    files = kern(
        "from pkg.a import f\nfrom .kern import factory as again\n"
        "def factory(n): return f(n) if n else again(n - 1)",
        a="from pkg.b import *\nimport pkg.a\ndef f(n): return g(n)",
        b="from pkg.a import *\nfrom pkg import kern\ndef g(n): return f(n - 1) + 1",
    )
    before = digest(files)
    assert digest(edited(files, "pkg/b.py", "+ 1", "+ 2")) != before
    assert digest(edited(files, "pkg/a.py", "return g(n)", "return g(-n)")) != before


def test_a_factory_that_a_package_hands_on_is_found(digest):
    files = {"pkg/kern.py": "def factory(): return 1", "pkg/__init__.py": "from .kern import *"}
    by_name = {**files, "pkg/__init__.py": "from .kern import factory"}
    for handing in (files, by_name):
        before = digest(handing, "pkg:factory")
        assert (
            digest({**handing, "pkg/kern.py": "def factory(): return 2"}, "pkg:factory") != before
        )


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ("pkg.kern", "not an import path"),
        ("pkg.kern:", "not an import path"),
        (":factory", "not an import path"),
        ("", "not an import path"),
        ("pkg.nowhere:factory", "no module named 'pkg.nowhere'"),
        ("nowhere_at_all.kern:factory", "no module named 'nowhere_at_all.kern'"),
        ("pkg.kern.deeper:factory", "no module named 'pkg.kern.deeper'"),
        ("..:factory", "no module named '..'"),
        ("pkg..kern:factory", "no module named 'pkg..kern'"),
        ("pkg.kern:nothing", "defines no 'nothing'"),
        ("pkg.kern:factory:more", "defines no 'factory:more'"),
    ],
)
def test_what_cannot_be_found_is_a_factory_error_that_names_it(digest, kernel, says):
    with pytest.raises(FactoryError, match=says) as caught:
        digest(PACKAGE, kernel)
    assert repr(kernel) in caught.value.message or "defines no" in says


@pytest.mark.parametrize(
    "text",
    [
        "def factory(:\n",
        "  def factory(): pass\n",
        "def factory(): pass\0\n",
        b"def factory(): return '\xff'\n",
        b"# coding: klingon\ndef factory(): pass\n",
    ],
)
@pytest.mark.parametrize("where", ["pkg/kern.py", "pkg/helper.py"])
def test_source_that_python_cannot_read_is_a_factory_error_that_names_its_file(digest, text, where):
    files = kern("from pkg.helper import f\ndef factory(): return f", helper="def f(): pass")
    with pytest.raises(FactoryError, match="cannot read the source of") as caught:
        digest({**files, where: text})
    assert where in caught.value.message


def test_a_relative_import_out_of_the_package_is_a_factory_error(digest):
    for text in ("from ... import f", "from ..other import f"):
        with pytest.raises(FactoryError):
            digest(kern(f"{text}\ndef factory(): return f"))
    with pytest.raises(FactoryError):
        digest({"kern.py": "from . import f\ndef factory(): return f"}, "kern:factory")


@settings(max_examples=60, deadline=None)
@given(st.text() | st.from_regex(r"[a-z_.\0 ]{0,9}:[a-z_.]{0,9}"))
def test_any_kernel_name_is_found_or_a_factory_error(kernel):
    if kernel.partition(":")[0].partition(".")[0] in sys.stdlib_module_names:
        return
    with pytest.raises(FactoryError):
        factory_digest(kernel)


# --- what is imported ---

DIGEST = """
import json, sys
before = set(sys.modules)
from tlcache.closure import factory_digest
digest = factory_digest(sys.argv[1])
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
print("RESULT " + json.dumps([digest, sorted(tops - set(sys.stdlib_module_names))]))
"""


def test_neither_tilelang_nor_torch_is_imported_for_our_own_kernel(python):
    done = python(DIGEST, "ops.kernels.rms_norm:rms_norm")
    assert done.code == 0, done.err
    tops = set(json.loads(done.out.partition("RESULT ")[2])[1])
    assert not tops & {"torch", "tilelang", "tvm", "tvm_ffi", "numpy"}


@pytest.mark.parametrize(
    ("init", "helper"),
    [
        ("import torch\nimport tilelang\n", ""),
        ("from pkg.kern import factory\n", ""),
        ("raise RuntimeError('the package was executed')\n", ""),
        ("open('executed', 'w').close()\n", ""),
        ("", "open('executed', 'w').close()\nglobals()['lazy'] = len\n"),
    ],
    ids=["imports_it", "hands_on_a_kernel", "raises", "writes", "has_a_lazy_name"],
)
def test_a_package_is_read_and_not_executed(python, tmp_path, init, helper):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text(init)
    (tmp_path / "pkg/helper.py").write_text(helper)
    (tmp_path / "pkg/kern.py").write_text(
        "import tilelang\nfrom pkg.helper import lazy\ndef factory(): return tilelang, lazy\n"
    )
    done = python(DIGEST, "pkg.kern:factory", env={"PYTHONPATH": str(tmp_path)})
    assert done.code == 0, done.err
    tops = set(json.loads(done.out.partition("RESULT ")[2])[1])
    assert not tops & {"torch", "tilelang", "tvm", "tvm_ffi"}
    assert not (tmp_path / "executed").exists()


# --- syntax ---

SYNTAX = {
    "fstring": "return f'{a!r:>{b}} {{x}} {a=} {1+1:.3f}' f'{b:}' 'tail'",
    "nested_fstring": "return f'{a}{f\"{b}\"}' + rf'\\{a}'",
    "walrus": "return [y := 1, y ** 2] if (n := a) else n",
    "lambda": "return (lambda *x, y=a, **z: (x, y, z))(b)",
    "global": "global G\nG = a\nreturn G",
    "nonlocal": "x = a\ndef g():\n  nonlocal x\n  x += b\nreturn g",
    "match": (
        "match a:\n"
        "  case [1, *rest] if rest: return rest\n"
        "  case {'k': v, **more}: return v, more\n"
        "  case str() | bytes(): return b\n"
        "  case complex(real=0, imag=i) as z: return i, z\n"
        "  case None | -1 | 1+2j: return 0\n"
        "  case _: pass"
    ),
    "async": (
        "async def g():\n"
        "  async with a as x, b: pass\n"
        "  async for y in x: await y\n"
        "  return [z async for z in x if await z]\n"
        "return g"
    ),
    "generators": "yield a\nx = yield from b\nreturn (y for y in x for z in y if z)",
    "comprehensions": "return {k: v for k, v in a}, {x for x in b}, [x for x in b]",
    "slices": "return a[1:2, ::3, ...], a[b][-1], a[:, None], a[*b]",
    "calls": "return a(*b, *a, x=1, **a, **b)",
    "signature": "def g(p, q=1, /, r: int = 2, *s: str, t, u=b, **v) -> a: return p\nreturn g",
    "operators": "return not a < b <= a != b is not a not in b @ a // b ** -a ^ ~b | a << 1",
    "constants": "return 1e400, -0.0, 1_000, 0xff, 1j, ..., None, True, b'\\x00\\xff', '\\ud800'",
    "texts": "return 'a' \"b\" '''c\nd''', r'\\n', '\\n\\t\\x00', '\u00e9', '\U0001f600', u'x'",
    "with": "with a as (x, y), b as z.q: return x, y, z",
    "try": (
        "try: a\nexcept (A, B) as e: raise C from e\nexcept D: pass\nelse: b\nfinally: del a, b"
    ),
    "while": "while a:\n  if b: continue\n  break\nelse:\n  return 0\nassert a, b",
    "classes": "@a\nclass K(b, metaclass=a):\n  x: int\n  y: str = 'y'\n  __slots__ = ()\nreturn K",
    "annotation_without_value": "x: 'text'\n(y): int = 1\nz.w: int = 2\nreturn y",
    "starred": "x, *y = a\nreturn *y, x",
    "imports": "import os.path as p, sys\nfrom math import (sin as s, cos)\nreturn p, sys, s, cos",
    "docstring_of_an_inner_function": 'def g():\n  """Doc."""\n  return a\nreturn g',
    "elif_chain": "if a: return 0\n" + "elif b: return 1\n" * 50 + "else: return 2",
}
NEWER = {
    "try_star": ((3, 11), "try: a\nexcept* A as e: b"),
    "quotes_in_fstring": ((3, 12), "return f'{a['x']}' f\"{'\\n'.join(b)}\""),
    "type_parameters": ((3, 12), "def g[T: int, *U, **P](x: T) -> T: return x\nreturn g"),
    "type_alias": ((3, 12), "type X[T] = list[T]\nreturn X"),
}
SYNTAX |= {name: text for name, (least, text) in NEWER.items() if sys.version_info >= least}


@pytest.mark.parametrize("name", SYNTAX)
def test_code_that_is_written_anew_from_its_syntax_tree_has_the_same_digest(digest, name):
    source = "def factory(a, b):\n" + textwrap.indent(SYNTAX[name], "  ")
    before = digest(kern(source.encode("utf-8", "surrogatepass")))
    assert digest(kern(ast.unparse(ast.parse(source)).encode())) == before
    changed = source.replace("def factory(a, b)", "def factory(b, a)")
    assert digest(kern(changed.encode())) != before


def test_an_expression_of_any_length_has_a_digest_or_is_a_factory_error(digest):
    terms = " + ".join(["a"] * 1500)
    try:
        before = digest(kern(f"def factory(a): return {terms}"))
    except FactoryError:
        return
    assert digest(kern(f"def factory(a): return {terms} + a")) != before


def test_our_own_kernel_written_anew_has_the_same_digest(digest):
    import ops.kernels.rms_norm

    path = ops.kernels.rms_norm.__file__
    with open(path, encoding="utf-8") as file:
        source = file.read()
    files = {"pkg/__init__.py": "", "pkg/kern.py": source.encode()}
    anew = {"pkg/__init__.py": "", "pkg/kern.py": ast.unparse(ast.parse(source)).encode()}
    assert anew != files
    assert digest(anew, "pkg.kern:rms_norm") == digest(files, "pkg.kern:rms_norm")


EXPRESSIONS = st.recursive(
    st.sampled_from(["a", "b", "1", "1.5", "'x'", "None", "f'{a:>{b}}'", "(y := 2)", "-1"]),
    lambda inner: st.builds(
        lambda form, x, y: form.format(x, y),
        st.sampled_from(
            [
                "({} + {})",
                "({} if {} else 0)",
                "[{}, {}]",
                "{}[{}]",
                "f'{{{}!r}}{{{}}}'",
                "(lambda q={}: {})",
                "({} < {} < 3)",
                "{{**{}, 'k': {}}}",
                "g({}, *{})",
                "(not {} or {})",
            ]
        ),
        inner,
        inner,
    ),
    max_leaves=5,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(EXPRESSIONS, min_size=1, max_size=3))
def test_any_expression_written_anew_has_the_same_digest(digest, expressions):
    source = "def factory(a, b):\n" + "".join(f"  x = {text}\n" for text in expressions)
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a quote within an f-string, before Python 3.12
        return
    assert digest(kern(ast.unparse(tree))) == digest(kern(source))
