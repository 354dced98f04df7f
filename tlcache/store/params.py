"""A kernel's parameters as TileLang keeps them: `params.json` since 0.1.15, `params.pkl` before.

Invariant: both are read as data, and a file that is damaged or says something impossible yields
None, never a guess.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

__all__ = ["EntryParam", "from_json", "from_pickle"]

_MOST_JSON = 4 * 1024 * 1024
_DTYPE = r"[a-z][a-z0-9_]{0,63}"
_LONGEST_NAME = 20_000


class EntryParam(NamedTuple):
    """A parameter in call order; a dynamic dimension is its name, or None where it has none."""

    dtype: str
    shape: tuple[int | str | None, ...]


Params = tuple[EntryParam, ...]

_DAMAGE = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)


def from_json(data: bytes) -> Params | None:
    """The parameters in a params.json: a graph of nodes that point at each other by index."""
    if len(data) > _MOST_JSON:
        return None
    try:
        graph = json.loads(data)
        return _Graph(graph["nodes"]).params(graph["root_index"])
    except _DAMAGE:
        return None


class _Graph:
    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        self._nodes = nodes

    def _node(self, index: object) -> dict[str, Any]:
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ValueError(f"{index!r} is not the index of a node")
        return self._nodes[index]

    def _text(self, index: object) -> str:
        return _text(self._node(index)["data"])

    def params(self, root: object) -> Params:
        return tuple(map(self._param, self._node(root)["data"]))

    def _param(self, index: object) -> EntryParam:
        pairs = self._node(index)["data"]
        fields = {
            self._text(key): value for key, value in zip(pairs[::2], pairs[1::2], strict=True)
        }
        shape = tuple(map(self.dimension, self._node(fields["shape"])["data"]))
        return EntryParam(self._text(fields["dtype"]), shape)

    def dimension(self, index: object) -> int | str | None:
        node = self._node(index)
        data = node.get("data")
        if node["type"] == "int":
            return _number(data)
        if isinstance(data, dict) and "name" in data:
            return self._text(data["name"])
        return None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    if len(value) > _LONGEST_NAME:
        raise ValueError(f"a name of {len(value)} characters")
    value.encode()  # a lone surrogate is no text either
    return value


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a dimension")
    return value


def from_pickle(data: bytes) -> Params | None:
    """The parameters in a params.pkl: a list of `KernelParam`s, read without making one."""
    from tlcache.store import pickled

    try:
        found = pickled.read(data)
        if type(found) is not list:
            raise TypeError("it is not a list of parameters")
        return tuple(map(_pickled_param, found))
    except _DAMAGE:
        return None


def _pickled_param(built: Any) -> EntryParam:
    if built.maker.name != "KernelParam":
        raise TypeError(f"a {built.maker.name} is not a parameter")
    fields = built.state
    if fields is None:  # written by what takes them as arguments
        fields = dict(zip(("dtype", "shape"), built.arguments, strict=True))
    shape = fields["shape"]
    if type(shape) is not list and type(shape) is not tuple:
        raise TypeError("a shape is a list of dimensions")
    return EntryParam(_pickled_dtype(fields["dtype"]), tuple(map(_pickled_dimension, shape)))


def _pickled_dtype(value: Any) -> str:
    """`torch.float16` by its name, or `tvm_ffi`'s `dtype("float16")`."""
    from tlcache.store.pickled import Built, Global

    name = value
    if isinstance(value, Global) and value.module == "torch":
        name = value.name
    elif isinstance(value, Built) and type(value.arguments) is tuple and value.arguments:
        name = value.arguments[0]
    name = _text(name)
    if not re.fullmatch(_DTYPE, name):
        raise ValueError(f"{name!r} is not a dtype")
    return name


def _pickled_dimension(value: Any) -> int | str | None:
    """A number, or one of TVM's objects: its state has a JSON graph."""
    from tlcache.store.pickled import Built

    if not isinstance(value, Built):
        return _number(value)
    if type(value.state) is not dict or not isinstance(value.state.get("handle"), str):
        return None
    graph = json.loads(value.state["handle"])
    return _Graph(graph["nodes"]).dimension(graph["root_index"])
