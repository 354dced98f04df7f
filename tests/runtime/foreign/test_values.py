"""Values and texts have one digest exactly where they mean the same."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import math
import struct
import subprocess
import sys
import textwrap
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlcache.runtime.foreign import text
from tlcache.runtime.foreign.reach import Finder
from tlcache.runtime.foreign.stream import Unseen


def digest(value):
    finder = Finder()
    finder.value(value)
    return finder.digest()


def form(value):
    """What a value is, by its types and bits."""
    if isinstance(value, float):
        return ("float", struct.pack(">d", value))
    if isinstance(value, (list, tuple)):
        return (type(value), [form(item) for item in value])
    if isinstance(value, dict):
        return (dict, [(form(key), form(item)) for key, item in value.items()])
    if isinstance(value, (set, frozenset)):
        return (type(value), sorted(map(repr, map(form, value))))
    return (type(value), value)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
hashed = st.none() | st.booleans() | st.integers() | st.text()
values = st.recursive(
    scalars | st.frozensets(hashed, max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashed, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(values, values)
def test_values_have_one_digest_exactly_where_they_are_the_same(one, other):
    assert (digest(one) == digest(other)) == (form(one) == form(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0), (1, True), (1, 1.0), ("1", 1), ((1,), [1]), ([[1], 2], [[1, 2]]),
        (math.nan, math.inf), ({"a": 1}, {"a": True}), (b"a", "a"), ({1}, frozenset({1})),
        (["a", "b"], ["ab"]), (("int", "1"), 1), (range(3), range(4)), (slice(1), slice(1, 2)),
    ],
)  # fmt: skip
def test_what_python_or_json_takes_for_equal_is_not(one, other):
    assert digest(one) != digest(other)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Tile:
    m: int = 64
    inner: tuple[int, ...] = ()


class Pair(typing.NamedTuple):
    left: int
    right: int = 2


class Plain:
    def __init__(self, width):
        self.width = width


def test_objects_count_by_their_class_and_what_they_hold():
    objects = [
        Color.RED, Color.BLUE, Tile(), Tile(32), Tile(64, (1,)), Pair(1), Pair(2), Plain(1),
        Plain(2), Color, Tile, Plain,
        functools.partial(max, 1), functools.partial(max, 2), functools.partial(min, 1),
        collections.OrderedDict(a=1), {"a": 1}, collections.defaultdict(int, a=1),
    ]  # fmt: skip
    assert len({digest(value) for value in objects}) == len(objects)
    assert digest(Tile()) == digest(Tile(64, ()))
    assert digest(Plain(1)) == digest(Plain(1))


def test_what_refers_to_itself_has_a_digest():
    one: list[object] = [1]
    one.append(one)
    other: list[object] = [1]
    other.append([1, other])
    assert digest(one) != digest(other)
    node = Plain(1)
    node.width = node
    digest(node)


@pytest.mark.parametrize("value", [open, sys, iter([]), (x for x in ()), print.__self__])
def test_what_cannot_be_seen_into_has_none(value):
    with pytest.raises(Unseen):
        digest(value)


def test_a_set_has_its_digest_whatever_the_order():
    code = (
        "from tlcache.runtime.foreign.reach import Finder\n"
        "finder = Finder(); finder.value({'a', 'b', 'c', 'd', ('e', 1)}); print(finder.digest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in "123"
    }
    assert len(found) == 1


def uses(source):
    found = text.read(textwrap.dedent(source))
    assert found is not None
    return {".".join((use.head, *use.attributes)) for use in found.uses}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(a, *b, c=1, **d): return a + b + c + d + e", {"e"}),
        ("def f(): return [x for x in y if z]", {"y", "z"}),
        ("def f():\n    [x for x in y]\n    return x", {"x", "y"}),
        ("def f(): return (n := m) + n", {"m"}),
        ("def f(): return [(n := m) for _ in r] + [n]", {"m", "r"}),
        ("def f():\n    def g(x): return x + y\n    return g(z)", {"y", "z"}),
        ("def f():\n    y = 1\n    def g(): return y\n    return g", set()),
        ("def f():\n    def g():\n        y = 1\n    return y", {"y"}),
        ("def f():\n    global y\n    y = 1", {"y"}),
        ("def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2", set()),
        ("def f():\n    x: a.b[c] = d", {"a.b", "c", "d"}),
        ("def f(x: 'a.b[c]'): pass", {"a.b", "c"}),
        ("def f():\n    class A(b):\n        c = d\n        e = c\n    return A", {"b", "c", "d"}),
        ("def f():\n    x = 1\n    class A:\n        def g(self): return x", set()),
        ("def f():\n    class A:\n        x = 1\n        def g(self): return x", {"x"}),
        ("def f():\n    try: pass\n    except a as b: b\n    with c as d: d\n", {"a", "c"}),
        (
            "def f():\n    match a:\n        case [b, *c]: b, c\n        case {'d': e, **g}: e, g",
            {"a"},
        ),
        ("def f():\n    import a.b\n    a.b.c", {"module:a", "module:a.b.c"}),
        ("def f():\n    from a import b as c\n    c.d", {"module:a.b", "module:a.b.d"}),
        ("def f():\n    for i in a: i\n    del i", {"a"}),
        ("def f(): return lambda x, y=a: x + y + b", {"a", "b"}),
        ("def f(): return f'{a!r:>{b}}'", {"a", "b"}),
        ("def f(): return a.b(c).d", {"a.b", "c"}),
        ("@a\ndef f(x=b):\n    @c\n    def g(y=d): pass", {"c", "d"}),
    ],
)
def test_a_texts_names_from_outside_are_pythons(source, expected):
    assert uses(source) == expected


BODY = """
@decorated
def f(x):
    '''A docstring.'''
    y = x + 1  # a comment
    A: T.Tensor[[N], 'float32']
    return y
"""


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("# a comment", "# another", True),
        ("'''A docstring.'''", "'''Another.'''", True),
        ("y = x + 1", "y = (x\n         + 1)", True),
        ("\n    return", "\n\n    # why\n    return", True),
        ("x + 1", "x + 2", False),
        ("'float32'", "'float16'", False),
        ("[N]", "[M]", False),
        ("def f(x)", "def f(x, z)", False),
        ("return y", "return", False),
    ],
)
def test_a_text_is_the_program_and_not_its_layout(before, after, same):
    one, other = text.read(BODY), text.read(BODY.replace(before, after))
    assert one is not None and other is not None
    assert (one == other) == same


@pytest.mark.parametrize(
    "made",
    [
        "@dataclasses.dataclass\nclass C:\n    by: int = 1\n    def f(self): return {}",
        "class C(typing.NamedTuple):\n    by: int = 1\n    def f(self): return {}",
        "class C(enum.Enum):\n    BY = 1\n    def f(self): return {}",
        "class C:\n    def f(self): return {}",
    ],
)
def test_methods_of_classes_that_were_made_of_a_text_count(made):
    def of(value):
        names = {"dataclasses": dataclasses, "enum": enum, "typing": typing, "__name__": __name__}
        exec(made.format(value), names)
        return digest(names["C"])

    assert of("2.0") == of("2.0") != of("3.0")
