"""Classes and objects of the program's: what they are made of, and what they hold."""

from __future__ import annotations

import collections
import dataclasses
import enum
import os
import types
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from tlcache.runtime.foreign import outside
from tlcache.runtime.foreign.names import Names
from tlcache.runtime.foreign.stream import Unseen

__all__ = ["Objects"]


class Objects(Names):
    """The part of a `Finder` that goes into classes and objects."""

    def _instance(self, value: Any, kind: type) -> None:
        """An object of the program's: its class, and all that it holds."""
        if not self._first(value):
            return
        for base in kind.__mro__:
            plain = base in (
                *_LIBRARY_DICTS,
                object,
                tuple,
                list,
                dict,
                set,
                frozenset,
                str,
                int,
                float,
            )
            if not plain and outside.is_outside(base.__module__) and not _harmless(base):
                raise Unseen(f"an object of {base.__module__}.{base.__qualname__}")
        self.say("object")
        self._class(kind)
        for base, plain_kind in ((dict, dict), (list, list), (tuple, tuple), (set, set)):
            if isinstance(value, base):
                self.value(plain_kind(value))
        for plain_type in (str, int, float):
            if isinstance(value, plain_type):
                self.value(plain_type(value))
        if kind in _LIBRARY_DICTS:
            self.value(getattr(value, "default_factory", None))
        held = dict(getattr(value, "__dict__", {}))
        for base in kind.__mro__:
            for name in _names_of(base.__dict__.get("__slots__", ())):
                if name not in ("__dict__", "__weakref__"):
                    held[name] = getattr(value, name, None)
        self.say(str(len(held)))
        for name, item in held.items():
            self.say(name)
            self.value(item)

    def _class(self, kind: type) -> None:
        if self._outside(kind):
            return
        if not self._first(kind):
            return
        self.say("class", kind.__qualname__)
        for base in kind.__bases__:
            self.value(base)
        if type(kind) is not type:
            self.value(type(kind))
        if issubclass(kind, enum.Enum):
            for name, member in kind.__members__.items():
                self.say(name)
                self.value(member.value)
        if "__dataclass_fields__" in vars(kind):
            for field in vars(kind)["__dataclass_fields__"].values():
                self.say("field", field.name, str(field.init), str(field.kw_only))
                for default in (field.default, field.default_factory):
                    if default is not dataclasses.MISSING:
                        self.value(default)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            self.value(kind._fields)
            self.value(getattr(kind, "_field_defaults", None))
        for name in sorted(vars(kind)):
            item = vars(kind)[name]
            if name in _SKIPPED:
                continue
            if not _generated(kind, name, item):
                self.say(name)
                self.value(item)
            elif isinstance(inner := getattr(item, "__func__", item), FunctionType):
                # Of a class that was made of a text, its own methods look generated.
                self.say(name)
                self.code(inner.__code__)


_LIBRARY_DICTS = (collections.OrderedDict, collections.defaultdict, collections.Counter)
_SKIPPED = frozenset(
    [
        "__module__",
        "__dict__",
        "__weakref__",
        "__doc__",
        "__firstlineno__",
        "__static_attributes__",
        "__qualname__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__match_args__",
        "_abc_impl",
        "__abstractmethods__",
        "__slots__",
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__orig_bases__",
        "__parameters__",
        "__hash__",
    ]
)
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_MAKERS = ("<string>", f"{os.sep}dataclasses.py", f"{os.sep}reprlib.py")
_CODE = (FunctionType, staticmethod, classmethod, property)


def _generated(kind: type, name: str, item: Any) -> bool:
    """Whether Python made a class's attribute of what is digested otherwise."""
    if isinstance(item, _DESCRIPTORS) or type(item).__name__ == "_tuplegetter":
        return True
    inner = getattr(item, "__func__", item)
    made = isinstance(inner, FunctionType) and inner.__code__.co_filename.endswith(_MAKERS)
    if issubclass(kind, enum.Enum):
        return not isinstance(item, _CODE) or _of_library(inner)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return made or name in ("_fields", "_field_defaults") or _of_library(inner)
    return made and "__dataclass_fields__" in vars(kind)


def _of_library(value: Any) -> bool:
    return outside.is_outside(getattr(value, "__module__", None) or "")


def _harmless(base: type) -> bool:
    """Whether a class of the standard library holds nothing that its instances' dict does not."""
    return base.__module__ in ("typing", "abc", "enum", "types") or base is BaseException


def _names_of(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
