"""What the names in a function lead to: values, attributes of modules, classes and objects, and
what is used of the standard library, torch and TileLang, which counts by its name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

from tlcache.runtime.foreign import outside
from tlcache.runtime.foreign.stream import MISSING, Stream, Unseen
from tlcache.runtime.foreign.text import Use

__all__ = ["BUILTINS", "Names"]

BUILTINS = sys.modules["builtins"]


class Names(Stream):
    """The part of a `Finder` that follows names."""

    def _use(self, use: Use, cells: Mapping[str, Any], globals_: Mapping[str, Any]) -> None:
        head = use.head
        self.say("use")
        if head.startswith("module:"):
            self._imported(use, head.removeprefix("module:"), globals_)
            return
        if use.kind == "bind":
            raise Unseen("it assigns to names outside of it")
        if head in cells:
            found = cells[head]
        elif head in globals_:
            found = globals_[head]
        elif head in ("__class__",):
            return
        elif hasattr(BUILTINS, head):
            if head not in outside.BUILTINS:
                raise Unseen(f"it calls {head}()")
            return
        else:
            self.say("unbound")
            return
        known = _admitted.get((id(found), use.attributes))
        if (
            known is not None
            and known[0] is found
            and known[1] is vars(found).get(use.attributes[0], MISSING)
            and use.kind in _READS
        ):
            self.say(*known[2])
            return
        self._attributes(found, use.attributes, use)

    def _imported(self, use: Use, name: str, globals_: Mapping[str, Any]) -> None:
        if name.startswith("."):
            package = globals_.get("__package__") or ""
            parts = package.split(".")
            up = len(name) - len(name.lstrip("."))
            name = ".".join([*parts[: len(parts) - up + 1], name.lstrip(".")]).rstrip(".")
        module = sys.modules.get(name)
        if module is None:
            if (
                outside.is_outside(name)
                and outside.judge(".".join((name, *use.attributes))) == "yes"
            ):
                return
            raise Unseen(f"it imports {name} while it is made")
        if use.kind == "import" and (not use.attributes or use.attributes == ("*",)):
            return  # what is used of it is a use by itself
        attributes = use.attributes
        while attributes and not hasattr(module, attributes[0]):
            inner = sys.modules.get(f"{module.__name__}.{attributes[0]}")
            if inner is None:
                self.say("unbound")
                return
            module, attributes = inner, attributes[1:]
        self._attributes(module, attributes, use)

    def _attributes(self, found: Any, attributes: tuple[str, ...], use: Use) -> None:
        """Follow attributes from a value to what is used at last."""
        path = ""
        for index, name in enumerate(attributes):
            rest = attributes[index:]
            if isinstance(found, ModuleType):
                path = f"{found.__name__}.{name}"
                if outside.is_outside(found.__name__):
                    self._outside_module(found, rest, use)
                    return
                inner = vars(found).get(name, MISSING)
                if inner is MISSING:
                    inner = getattr(found, name, MISSING) if "__getattr__" in vars(found) else inner
                    if inner is not MISSING:
                        raise Unseen(f"the module {found.__name__} makes its attributes when asked")
                    inner = sys.modules.get(path, MISSING)
                if inner is MISSING:
                    self.say("unbound")
                    return
                found = inner
            elif isinstance(found, type):
                if outside.is_outside(found.__module__):
                    self.value(found)
                    return
                inner = _plain_of_class(found, name)
                if inner is MISSING:
                    self.value(found)
                    return
                found = inner
            else:
                inner = _plain_of_instance(found, name)
                if inner is MISSING:
                    self._asked(found, rest, use)
                    return
                self.say(type(found).__qualname__)
                found = inner
        if use.kind == "store":
            if isinstance(found, ModuleType):
                raise Unseen("it assigns to a module's attributes")
            if not _is_tensor_like(found):
                raise Unseen("it changes what is outside of it")
        self.value(found)

    def _asked(self, found: Any, rest: tuple[str, ...], use: Use) -> None:
        """A value of which attributes are asked that only it knows, or that is called a method."""
        reading = next(
            (names for kind, names in outside.READING.items() if type(found) is kind), None
        )
        if reading is not None and rest[0] not in reading:
            raise Unseen("it changes what is outside of it")
        if use.kind == "store":
            raise Unseen("it changes what is outside of it")
        self.value(found)
        if isinstance(found, FunctionType) and not outside.is_outside(found.__module__ or ""):
            self.value(getattr(found, rest[0], None))

    # --- the standard library, torch, TileLang ---

    def _module(self, module: ModuleType) -> None:
        """A module that is passed on as a value: who knows what is asked of it?"""
        if not outside.is_outside(module.__name__) or outside.judge(module.__name__) != "yes":
            raise Unseen(f"it passes on the module {module.__name__}")
        self.say("module", module.__name__)

    def _outside_module(self, module: ModuleType, rest: tuple[str, ...], use: Use) -> None:
        before = len(self._said)
        self._outside_chain(module, rest, use)
        found = vars(module).get(rest[0], MISSING)
        lasting = isinstance(found, (FunctionType, type, str))
        if len(rest) == 1 and lasting and self._said[before : before + 1] == ["outside"]:
            words = tuple(self._said[before:])
            if "device" not in words:
                _admitted[id(module), rest] = (module, found, words)

    def _outside_chain(self, module: ModuleType, rest: tuple[str, ...], use: Use) -> None:
        found: Any = module
        names = [module.__name__]
        for name in rest:
            if isinstance(found, ModuleType):
                names = [found.__name__]
            elif _environment(found):
                break
            names.append(name)
            found = getattr(found, name, MISSING)
            if found is MISSING:
                break
        path = ".".join(names)
        if self._variable(path, rest, use):
            return
        if use.kind == "store":
            raise Unseen(f"it assigns to {path}")
        if found is MISSING:
            found = None
        if isinstance(found, (FunctionType, type)) and not outside.is_outside(
            getattr(found, "__module__", None) or ""
        ):
            self.say("replaced")
            self.value(found)  # somebody put another one in its place
            return
        if isinstance(found, ModuleType):
            self._module(found)
            return
        self._admit(path, found)

    def _variable(self, path: str, rest: tuple[str, ...], use: Use) -> bool:
        """Whether it is a look at one environment variable, or whether one file is there; it counts
        by what is seen then.
        """
        if use.kind == "call" and use.constant is not None and path in _THERE:
            self.say("there", use.constant, str(os.path.exists(use.constant)))
            return True
        asked = path == "os.getenv" and use.kind == "call"
        asked |= path.startswith("os.environ") and (
            use.kind == "item" or (use.kind == "call" and rest[-1] == "get")
        )
        if not asked or use.constant is None:
            return False
        self.say("variable", use.constant, repr(os.environ.get(use.constant)))
        return True

    def _admit(self, path: str, found: Any) -> None:
        """Something of the standard library, torch or TileLang, by its name."""
        if type(found).__module__ == "torch" and type(found).__name__ == "dtype":
            self.say(str(found))
            return
        said, words = outside.judge(path), ["outside", path]
        home = getattr(found, "__module__", None)
        if isinstance(home, str) and isinstance(found, (FunctionType, type)):
            # TileLang's names lead to where they are defined, which may be more telling.
            words.append(f"{home}.{found.__qualname__}")
            if outside.judge(f"{home}.{found.__name__}") == "device" and said == "yes":
                said = "device"
        if said == "no":
            raise Unseen(f"it uses {path}")
        self.say(*words)
        if said == "device":
            self._of_device()
        if type(found) in (int, float, str, bool):
            self.value(found)
        elif isinstance(found, str):  # TileLang's dtypes
            self.say(type(found).__qualname__, str(found))

    def _outside(self, value: Any) -> bool:
        """Digest a function or class that counts by its name, if it is one."""
        module = getattr(value, "__module__", None)
        if not isinstance(module, str) or not outside.is_outside(module):
            return False
        if module == "builtins":
            self.say("builtin", value.__qualname__)
            return True
        if (
            isinstance(value, FunctionType)
            and value.__closure__
            and "<locals>" in value.__qualname__
        ):
            raise Unseen(f"a function that {module} made")
        self._admit(f"{module}.{value.__qualname__}", value)
        return True

    def _builtin(self, value: Any) -> None:
        module, name = getattr(value, "__module__", None), value.__qualname__
        if module == "builtins" and name in outside.BUILTINS:
            self.say("builtin", name)
        elif (
            isinstance(module, str) and outside.judge(f"{module.lstrip('_')}.{name}") == "yes"
        ) or (isinstance(module, str) and module.lstrip("_") in ("operator", "functools")):
            self.say("outside", module, name)
        else:
            raise Unseen(f"it uses {module}.{name}")


_THERE = frozenset({"posixpath.exists", "genericpath.exists"})
_READS = frozenset({"value", "call", "item"})
# Names of TileLang's that were admitted, as long as they mean the same.
_admitted: dict[tuple[int, tuple[str, ...]], tuple[ModuleType, Any, tuple[str, ...]]] = {}


def _is_tensor_like(value: Any) -> bool:
    """Whether to set its items is to write TileLang code, as `A[i] = x` is for a buffer."""
    return type(value).__name__ in ("Buffer", "Var") and type(value).__module__.startswith("tvm.")


def _environment(value: Any) -> bool:
    return value is os.environ


def _plain_of_class(kind: type, name: str) -> Any:
    """A class's attribute, if it is nothing but a value."""
    if type(kind) is not type:
        return MISSING
    for base in kind.__mro__:
        if name in vars(base):
            found = vars(base)[name]
            return MISSING if hasattr(found, "__get__") else found
    return MISSING


def _plain_of_instance(value: Any, name: str) -> Any:
    """An object's attribute, if to ask for it runs nothing of the program's."""
    kind = type(value)
    if outside.is_outside(kind.__module__) or isinstance(value, (FunctionType, MethodType)):
        return MISSING
    if any("__getattribute__" in vars(base) for base in kind.__mro__ if base is not object):
        return MISSING
    for base in kind.__mro__:
        if name in vars(base) and hasattr(vars(base)[name], "__set__"):
            return MISSING
    held = getattr(value, "__dict__", {})
    if name in held:
        return held[name]
    return _plain_of_class(kind, name)
