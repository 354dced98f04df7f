"""All that could decide which kernel a function of TileLang's makes, digested without making it.

A function is followed as it is in this process at this moment: its source and its bytecode, its
defaults, its closure, and what its names mean now, in turn. So an edit counts, and a helper that
was replaced in memory as well.

Invariant: what is digested has the same digest in every process in which it means the same, and
another one where it does not; what cannot be seen into raises `Unseen`. Nothing that is followed is
run.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import marshal
import opcode
import struct
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tlcache.runtime.foreign import outside, text
from tlcache.runtime.foreign.language import Language
from tlcache.runtime.foreign.names import BUILTINS
from tlcache.runtime.foreign.objects import Objects
from tlcache.runtime.foreign.source import Lines, cells, lines
from tlcache.runtime.foreign.stream import MISSING, Unseen
from tlcache.runtime.foreign.text import Text, Use

__all__ = ["Finder"]

_CONTAINERS = (list, dict, set, bytearray)
_LEAVES = frozenset({bool, int, str, bytes, type(None)})


class Finder(Objects, Language):
    """Digests values into one stream.

    Args:
        read: How the analysis of a function's lines is had; None where they are no definition.
    """

    def __init__(self, read: Callable[[Lines], Text | None] | None = None) -> None:
        super().__init__()
        self._read = read or _analyzed

    # --- values ---

    def value(self, value: Any) -> None:
        """Digest a value, whatever it is.

        Raises:
            Unseen: It cannot be seen into.
        """
        kind = type(value)
        if kind in _LEAVES:
            self.say(kind.__name__, value.hex() if kind is bytes else str(value))
        elif kind is float:
            self.say("float", struct.pack(">d", value).hex())
        elif kind is complex:
            self.say("complex", struct.pack(">dd", value.real, value.imag).hex())
        elif kind is tuple or kind is list:
            if kind is tuple or self._first(value):
                self.say(kind.__name__, str(len(value)))
                for item in value:
                    self.value(item)
        elif kind is dict or kind is types.MappingProxyType:
            if self._first(value):
                self.say("dict", str(len(value)))
                for key, item in value.items():
                    self.value(key)
                    self.value(item)
        elif kind is set or kind is frozenset:
            self._set(value)
        elif isinstance(value, (FunctionType, types.MethodType)):
            self._callable(value)
        elif isinstance(value, ModuleType):
            self._module(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, enum.Enum):
            self.say("member", value.name)
            self._class(kind)
        elif value is Ellipsis or value is NotImplemented:
            self.say(repr(value))
        elif kind is range or kind is slice:
            self.say(kind.__name__)
            self.value((value.start, value.stop, value.step))
        elif kind is bytearray:
            self.say("bytearray", value.hex())
        else:
            self._other(value, kind)

    def _set(self, value: set[Any] | frozenset[Any]) -> None:
        """A set, whose order differs between processes."""
        digests = []
        for item in value:
            if not isinstance(item, (str, int, float, bytes, bool, type(None), tuple)):
                raise Unseen(f"a set of {type(item).__qualname__}")
            one = Finder(self._read)
            one.value(item)
            digests.append(one.digest())
        self.say(type(value).__name__, *sorted(digests))

    def _other(self, value: Any, kind: type) -> None:
        module = kind.__module__
        if module == "torch" and kind.__name__ in ("dtype", "device", "Size"):
            self.say("torch", kind.__name__, str(value))
        elif module == "tvm_ffi._dtype" and isinstance(value, str):
            self.say("dtype", str(value))
        elif isinstance(value, functools.partial):
            self.say("partial")
            self.value(value.func)
            self.value(value.args)
            self.value(value.keywords)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._cached(value)
        elif isinstance(value, (staticmethod, classmethod)):
            self.say(kind.__name__)
            self.value(value.__func__)
        elif isinstance(value, property):
            self.say("property")
            for part in (value.fget, value.fset, value.fdel):
                self.value(part)
        elif isinstance(value, types.BuiltinFunctionType):
            self._builtin(value)
        elif module.partition(".")[0] in ("tilelang", "tvm", "tvm_ffi"):
            self._tilelang(value, kind)
        elif module == "typing" or kind in (types.GenericAlias, types.UnionType):
            self.say("typing", repr(value))
            self._each_argument(value)
        elif module == "logging" and kind.__name__ in ("Logger", "RootLogger"):
            self.say("logger")
        elif module == "numpy" and hasattr(value, "dtype") and getattr(value, "shape", 1) == ():
            self.say("numpy", str(value.dtype), value.tobytes().hex())
        elif kind.__qualname__ == "Pattern" and module == "re":
            self.say("pattern", repr(value.pattern), str(value.flags))
        else:
            self._instance(value, kind)

    def _each_argument(self, value: Any) -> None:
        for argument in typing.get_args(value):
            if isinstance(argument, (type, FunctionType)):
                self.value(argument)

    def _cached(self, value: Any) -> None:
        """A function under `functools.cache`. What it has kept it made of what was then: it counts
        only as long as that is what is now.
        """
        one = Finder(self._read)
        one._seen[id(value)] = 0
        one.value(value.__wrapped__)
        now = one.digest()
        if value.cache_info().currsize == 0:
            _cached_as[id(value)] = (value, now)
        elif _cached_as.setdefault(id(value), (value, now)) != (value, now):
            raise Unseen("a cached function of which something has changed since it was called")
        self._device = self._device or one._device
        self.say("cached", now)

    # --- functions ---

    def _callable(self, value: Any) -> None:
        if isinstance(value, types.MethodType):
            self.say("method")
            self.value(value.__func__)
            self.value(value.__self__)
            return
        if self._outside(value):
            return
        self.function(value)

    def function(self, function: FunctionType) -> None:
        """Digest a function of the program's, and all that it reaches.

        Raises:
            Unseen: Something in it cannot be seen into.
        """
        if not self._first(function):
            return
        self.say("function", function.__name__)
        self.code(function.__code__)
        self.value(function.__defaults__)
        self.value(function.__kwdefaults__)
        source = lines(function)
        read = self._read(source) if source is not None else None
        held = cells(function)
        named: set[str] = set()
        if read is not None and read.name == function.__code__.co_name:
            self.say("text", read.digest)
            for use in read.uses:
                named.add(use.head)
                self._use(use, held, function.__globals__)
        else:
            self._uses_of_code(function.__code__, function.__globals__)
        # The bytecode may have come from elsewhere than the text.
        for name in sorted(held.keys() - named):
            self.say(name)
            self.value(held[name])
        wrapped = function.__dict__.get("__wrapped__")
        if wrapped is not None:
            self.say("wraps")
            self.value(wrapped)

    def code(self, code: CodeType) -> None:
        """Digest bytecode, without where it stands."""
        known = _codes.get(id(code))
        if known is None:
            said = marshal.dumps(self._plain(code), 0)
            known = _codes[id(code)] = (code, hashlib.sha256(said).hexdigest())
        self.say("code", known[1])

    def _plain(self, code: CodeType) -> list[Any]:
        """Bytecode as values that `marshal` writes in one way only. No constant is a list, so that
        a list is told from one.
        """
        return [
            "code",
            code.co_name,
            code.co_code,
            code.co_flags,
            (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
            getattr(code, "co_exceptiontable", b""),
            (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
            tuple(map(self._constant, code.co_consts)),
        ]

    def _constant(self, constant: Any) -> Any:
        kind = type(constant)
        if kind in _LEAVES:
            return constant
        if kind is tuple:
            return tuple(map(self._constant, constant))
        if kind is CodeType:
            return self._plain(constant)
        one = Finder(self._read)
        one.value(constant)
        return ["value", one.digest()]

    def _uses_of_code(self, code: CodeType, globals_: Mapping[str, Any]) -> None:
        """What bytecode without a readable source names: all its names may be anything of it."""
        names: set[str] = set()
        waiting = [code]
        while waiting:
            one = waiting.pop()
            names.update(one.co_names)
            waiting += [part for part in one.co_consts if isinstance(part, CodeType)]
            if not _UNREADABLE.isdisjoint(one.co_code[::2]):
                raise Unseen("a function without source that imports, or assigns outside of it")
        for name in sorted(names):
            found = globals_.get(name, MISSING)
            if found is MISSING:
                if hasattr(BUILTINS, name) and name not in outside.BUILTINS:
                    raise Unseen(f"it calls {name}()")
            elif isinstance(found, _CONTAINERS):
                raise Unseen("a function without source that uses a list or a dict outside of it")
            elif isinstance(found, ModuleType):
                self._all_of(found, names, name)
            else:
                self.say(name)
                self.value(found)

    def _all_of(self, module: ModuleType, names: Iterable[str], path: str, depth: int = 0) -> None:
        if depth > 6:
            raise Unseen(f"the module {module.__name__} as a whole")
        for name in sorted(names):
            found = vars(module).get(name, MISSING)
            if found is MISSING or found is module:
                continue
            if isinstance(found, ModuleType):
                self._all_of(found, names, f"{path}.{name}", depth + 1)
            else:
                self._attributes(module, (name,), Use(path, (name,), "value"))


def _analyzed(lines: Lines) -> Text | None:
    return text.analyzed(lines.text)


_UNREADABLE = frozenset(
    opcode.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME")
)
_cached_as: dict[int, tuple[Any, str]] = {}
# Digests of bytecode, which cannot change.
_codes: dict[int, tuple[CodeType, str]] = {}
