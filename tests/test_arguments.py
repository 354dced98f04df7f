"""Arguments as JSON and back: the same value, or a refusal."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections import namedtuple

import pytest
import torch
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as some

from tlcache import arguments
from tlcache.errors import FactoryError

SCALARS = some.none() | some.booleans() | some.integers() | some.floats() | some.text()
VALUES = some.recursive(
    SCALARS,
    lambda inner: (
        some.lists(inner) | some.lists(inner).map(tuple) | some.dictionaries(some.text(), inner)
    ),
)


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Config:
    width: int
    color: Color = Color.RED
    derived: int = dataclasses.field(default=3, init=False)


Point = namedtuple("Point", "x y")


def back(value):
    return arguments.decode(json.loads(json.dumps(arguments.encode(value), allow_nan=False)))


@given(VALUES)
def test_what_json_is_made_of_comes_back_with_its_types(value):
    assert repr(back(value)) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        Color.RED, Color, len, json.dumps, Config(4), Point(1, (2, 3)), torch.bfloat16,
        torch.float8_e4m3fn, torch.device("cuda:1"), torch.device("cpu"), frozenset({1, 2}),
        tvm_ffi.dtype("float16"), (torch.float16, [Config(1), {"a": Point(1, None)}]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_what_has_a_name_comes_back_equal(value, monkeypatch):
    assert back(value) == value
    assert type(back(value)) is type(value)


def test_of_a_tensor_the_form_comes_back_and_no_more():
    tensor = torch.ones(4, 8, dtype=torch.float16).t()
    found = back(tensor)
    assert (found.shape, found.stride(), found.dtype) == ((8, 4), (1, 8), torch.float16)
    assert found.device.type == "meta"


@pytest.mark.parametrize(
    "value", [object(), lambda: 0, Config, iter(()), {1: 2}, type("Local", (), {}), [open]]
)
def test_what_cannot_be_imported_by_its_name_is_refused(value, request):
    if value is Config or value == [open]:
        assert back(value) == value  # these can
        return
    with pytest.raises(arguments.NoForm, match="has no JSON form"):
        arguments.encode(value)


def test_a_size_of_torch_is_a_tuple():
    assert arguments.encode(torch.Size((2, 3))) == {"$tuple": [2, 3]}


@pytest.mark.parametrize(
    "form",
    [
        {}, {"$tuple": [1], "$list": [1]}, {"tuple": [1]}, {"$torch": "nothing"},
        {"$torch": "nn"}, {"$import": "no.such:thing"}, {"$import": "json:nothing"},
        {"$tensor": {"shape": [1]}}, {"$float": "much"}, {"$new": {"class": "json:dumps"}},
        {"$new": {"class": "json:JSONDecoder", "fields": {"nothing": 1}}}, {"$dtype": "much"},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_a_form_that_means_nothing_is_an_error_that_shows_it(form):
    with pytest.raises(FactoryError, match="is no argument"):
        arguments.decode(form)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-05, "1e-05"), (True, "True"), (None, "null"), ((1, [2.5, "a"]), "(1,[2.5,a])"),
        (torch.empty(2, 3, dtype=torch.float16), "float16[2,3]"), (torch.bfloat16, "bfloat16"),
        (Config(4), "Config{width:4,color:test_arguments:Color.RED}"),
    ],
)  # fmt: skip
def test_a_form_is_short_for_people(value, text):
    shown = arguments.text(arguments.encode(value))
    assert shown.replace(f"{__name__}:", "test_arguments:") == text
