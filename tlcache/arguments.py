"""What a kernel's factory is called with, as JSON and back.

Numbers, texts, booleans and None stand for themselves. What JSON has no form for is an object with
one field, whose name says what it is: `{"$tuple": [1, 2]}`, `{"$list": …}`, `{"$dict": …}`,
`{"$float": "inf"}`, `{"$dtype": "float16"}` (TileLang's), `{"$torch": "bfloat16"}`,
`{"$device": "cuda:0"}`, `{"$import": "package.module:NAME"}`,
`{"$new": {"class": "package.module:Config", "fields": {"width": 8}}}` for a dataclass or a named
tuple, and `{"$tensor": {"shape": [4, 8], "dtype": "float16"}}`, of which only the form is kept.

Invariant: what is encoded and decoded makes the same kernel, or the encoding is refused. Encoding
imports nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tlcache.errors import FactoryError, TlcacheError

__all__ = ["FORMS", "NoForm", "decode", "encode", "is_form", "named", "text"]

_PLAIN = frozenset({str, int, bool, type(None)})
_SEQUENCES: dict[type, str] = {list: "$list", set: "$set", frozenset: "$set"}


class NoForm(TlcacheError):
    """A value has no JSON form."""


def encode(value: Any) -> Any:
    """The JSON form of an argument.

    Raises:
        NoForm: It has none.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is tuple or kind in _SEQUENCES or _is(value, "torch", "Size"):
        name = _SEQUENCES.get(kind, "$tuple")
        items = [encode(item) for item in value]
        return {name: sorted(items, key=json.dumps) if name == "$set" else items}
    if kind is dict and all(type(key) is str for key in value):
        return {"$dict": {key: encode(item) for key, item in value.items()}}
    if _is(value, "torch", "dtype"):
        return {"$torch": str(value).removeprefix("torch.")}
    if _is(value, "torch", "device"):
        return {"$device": str(value)}
    if kind.__module__ == "tvm_ffi._dtype" and isinstance(value, str):
        return {"$dtype": str(value)}
    if _is(value, "torch", "Tensor"):
        return {"$tensor": _form_of(value)}
    if (fields := _fields(value)) is not None:
        given = {name: encode(getattr(value, name)) for name in fields}
        return {"$new": {"class": _import_path(kind), "fields": given}}
    return {"$import": _import_path(value)}


def _fields(value: Any) -> list[str] | None:
    """The fields that an instance of a dataclass or a named tuple is made of; None for others."""
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.init]
    return list(value._fields) if isinstance(value, tuple) and hasattr(value, "_fields") else None


def _is(value: object, module: str, name: str) -> bool:
    """Whether a value is of a class of a module, without importing that."""
    found = getattr(sys.modules.get(module), name, None)
    return isinstance(found, type) and isinstance(value, found)


def _form_of(tensor: Any) -> dict[str, Any]:
    form = {
        "shape": [int(size) for size in tensor.shape],
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    if not tensor.is_contiguous():
        form["strides"] = [int(stride) for stride in tensor.stride()]
    return form


def _import_path(value: Any) -> str:
    """Where a member of an enumeration, a class or a function can be imported from."""
    owner = type(value) if isinstance(value, enum.Enum) else value
    module, name = getattr(owner, "__module__", None), getattr(owner, "__qualname__", None)
    if isinstance(value, enum.Enum):
        name = f"{name}.{value.name}"
    if isinstance(module, str) and isinstance(name, str) and module != "__main__":
        try:
            if named(f"{module}:{name}", sys.modules.get) is value:
                return f"{module}:{name}"
        except (ImportError, AttributeError):
            pass
    raise NoForm(f"a {type(value).__module__}.{type(value).__qualname__} has no JSON form")


def named(path: str, load: Callable[[str], Any] = importlib.import_module) -> Any:
    """What an import path like `package.module:Class.NAME` means.

    Raises:
        ImportError, AttributeError: There is no such thing.
    """
    module, _, name = path.partition(":")
    found = load(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def is_form(value: object) -> bool:
    """Whether a value is an object that `decode` reads, like `{"$tuple": [1, 2]}`."""
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in FORMS


def decode(value: Any) -> Any:
    """The argument that `encode` was given, or one that makes the same kernel.

    Raises:
        FactoryError: It is no form that there is, or names something that is not there.
    """
    if not isinstance(value, Mapping):
        return value
    if not is_form(value):
        raise FactoryError(f"{text(value)} is no argument; an object is one of {', '.join(FORMS)}")
    ((name, content),) = value.items()
    try:
        return FORMS[name](content)
    except FactoryError:
        raise
    except Exception as error:
        raise FactoryError(f"{text(value)} is no argument: {error}") from error


def _tensor(form: Mapping[str, Any]) -> Any:
    import torch

    shape, dtype = tuple(form["shape"]), getattr(torch, form["dtype"])
    if "strides" in form:
        return torch.empty_strided(shape, tuple(form["strides"]), dtype=dtype, device="meta")
    return torch.empty(shape, dtype=dtype, device="meta")


def _new(made: Mapping[str, Any]) -> Any:
    kind = named(made["class"])
    if not isinstance(kind, type):
        raise TypeError(f"{made['class']} is no class")
    return kind(**{name: decode(item) for name, item in made["fields"].items()})


def _dtype(name: str) -> Any:
    import tvm_ffi

    return tvm_ffi.dtype(name)


def _torch(name: str) -> Any:
    import torch

    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return found


def _device(name: str) -> Any:
    import torch

    return torch.device(name)


FORMS: Mapping[str, Callable[[Any], Any]] = {
    "$tuple": lambda items: tuple(decode(item) for item in items),
    "$list": lambda items: [decode(item) for item in items],
    "$set": lambda items: frozenset(decode(item) for item in items),
    "$dict": lambda items: {key: decode(item) for key, item in items.items()},
    "$float": float,
    "$dtype": _dtype,
    "$torch": _torch,
    "$device": _device,
    "$import": named,
    "$new": _new,
    "$tensor": _tensor,
}
"""The objects that `decode` reads, by the name of their one field."""


def text(value: Any) -> str:
    """An argument for people, like `fp16[4,8]` for a tensor."""
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    if isinstance(value, (str, int)):
        return str(value)
    if is_form(value):
        try:
            return _form_text(*next(iter(value.items())))
        except (KeyError, TypeError, ValueError, AttributeError):
            pass  # it is malformed, and shown as it is
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(text(item) for item in value) + "]"
    return json.dumps(value)


def _form_text(name: str, content: Any) -> str:
    if name == "$tensor":
        return f"{content['dtype']}[{','.join(map(str, content['shape']))}]"
    if name in ("$tuple", "$list", "$set"):
        inner = ",".join(text(item) for item in content)
        return f"[{inner}]" if name == "$list" else f"({inner})"
    if name == "$new":
        return str(content["class"]).rpartition(":")[2] + text(dict(content["fields"]))
    return text(dict(content)) if name == "$dict" else str(content)
