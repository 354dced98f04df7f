"""All that could decide which kernel a function of TileLang's makes, digested without making it.

A function is followed as it is in this process at this moment: its source and its bytecode, its
defaults, its closure, and what its names mean now, in turn. So an edit counts, and a helper that
was replaced in memory as well.

Invariant: what is digested has the same digest in every process in which it means the same, and
another one where it does not; what cannot be seen into raises `Unseen`. Nothing that is followed is
run.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import hashlib
import inspect
import linecache
import marshal
import opcode
import os
import struct
import sys
import time
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tlcache.runtime.foreign import outside, text
from tlcache.runtime.foreign.text import Text, Use

__all__ = ["Finder", "Unseen", "lines"]


class Unseen(Exception):
    """Something that decides about a kernel and cannot be seen into.

    Attributes:
        reason: What it is, as the end of a sentence; the same for all that are alike.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


_MISSING = object()
_LIBRARY_DICTS = (collections.OrderedDict, collections.defaultdict, collections.Counter)
_CONTAINERS = (list, dict, set, bytearray)
_LEAVES = frozenset({bool, int, str, bytes, type(None)})


class Finder:
    """Digests values into one stream.

    Args:
        read: How the analysis of a function's lines is had; None where they are no definition.
    """

    def __init__(self, read: Callable[[str], Text | None] = text.analyzed) -> None:
        self._read = read
        self._said: list[str] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # what was numbered stays alive, so that its number stays its
        self._device = False

    def digest(self) -> str:
        """The sha256 of all that came so far, as hexadecimal text."""
        try:
            # Without references: equal texts give equal bytes, whichever of them are one object.
            said = marshal.dumps(self._said, 0)
        except ValueError:  # a text of a class of its own
            said = marshal.dumps(["".join((one,)) for one in self._said], 0)
        return hashlib.sha256(said).hexdigest()

    def say(self, *words: str) -> None:
        """Put texts into the stream, each by itself."""
        self._said += words

    def _first(self, value: Any) -> bool:
        """Whether something is met for the first time; what comes again is said by its number."""
        number = self._seen.get(id(value))
        if number is not None:
            self.say("again", str(number))
            return False
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return True

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
        cells = _cells(function)
        named: set[str] = set()
        if read is not None and read.name == function.__code__.co_name:
            self.say("text", read.digest)
            for use in read.uses:
                named.add(use.head)
                self._use(use, cells, function.__globals__)
        else:
            self._uses_of_code(function.__code__, function.__globals__)
        # The bytecode may have come from elsewhere than the text.
        for name in sorted(cells.keys() - named):
            self.say(name)
            self.value(cells[name])
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
            found = globals_.get(name, _MISSING)
            if found is _MISSING:
                if hasattr(_BUILTINS, name) and name not in outside.BUILTINS:
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
            found = vars(module).get(name, _MISSING)
            if found is _MISSING or found is module:
                continue
            if isinstance(found, ModuleType):
                self._all_of(found, names, f"{path}.{name}", depth + 1)
            else:
                self._attributes(module, (name,), Use(path, (name,), "value"))

    # --- names ---

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
        elif hasattr(_BUILTINS, head):
            if head not in outside.BUILTINS:
                raise Unseen(f"it calls {head}()")
            return
        else:
            self.say("unbound")
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
                inner = vars(found).get(name, _MISSING)
                if inner is _MISSING:
                    inner = (
                        getattr(found, name, _MISSING) if "__getattr__" in vars(found) else inner
                    )
                    if inner is not _MISSING:
                        raise Unseen(f"the module {found.__name__} makes its attributes when asked")
                    inner = sys.modules.get(path, _MISSING)
                if inner is _MISSING:
                    self.say("unbound")
                    return
                found = inner
            elif isinstance(found, type):
                if outside.is_outside(found.__module__):
                    self.value(found)
                    return
                inner = _plain_of_class(found, name)
                if inner is _MISSING:
                    self.value(found)
                    return
                found = inner
            else:
                inner = _plain_of_instance(found, name)
                if inner is _MISSING:
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
        known = _admitted.get((id(module), rest))
        if (
            known is not None
            and known[0] is module
            and known[1] is vars(module).get(rest[0], _MISSING)
            and use.kind in ("value", "call", "item")
        ):
            self.say(*known[2])
            return
        before = len(self._said)
        self._outside_chain(module, rest, use)
        found = vars(module).get(rest[0], _MISSING)
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
            found = getattr(found, name, _MISSING)
            if found is _MISSING:
                break
        path = ".".join(names)
        if self._variable(path, rest, use):
            return
        if use.kind == "store":
            raise Unseen(f"it assigns to {path}")
        if found is _MISSING:
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
        said = outside.judge(path)
        home = getattr(found, "__module__", None)
        if isinstance(home, str) and isinstance(found, (FunctionType, type)):
            # TileLang's names lead to where they are defined, which may be more telling.
            defined = outside.judge(f"{home}.{getattr(found, '__name__', '')}")
            if defined == "device" and said == "yes":
                said = "device"
        if said == "no":
            raise Unseen(f"it uses {path}")
        self.say("outside", path)
        if said == "device":
            self._of_device()
        if type(found) in (int, float, str, bool):
            self.value(found)

    def _of_device(self) -> None:
        if not self._device:
            self._device = True
            try:
                self.say("device", outside.device())
            except Exception as error:
                raise Unseen(f"the GPU cannot be asked: {type(error).__name__}") from error

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
            if name not in _SKIPPED and not _generated(kind, name, item):
                self.say(name)
                self.value(item)

    # --- TileLang's own objects ---

    def _tilelang(self, value: Any, kind: type) -> None:
        name = kind.__name__
        if name == "Macro" and hasattr(value, "ir_gen"):
            if self._first(value):
                self.say("macro", value.name)
                self.value(value.orig_func)
                self._rewritten(value.ir_gen, value.orig_func)
                self._annotations(value.annotations)
        elif name == "JITFunc":
            self.jit_function(value)
        elif name == "JITImpl":
            self.say("jit")
            for field in ("out_idx", "execution_backend", "target_host", "pass_configs"):
                self.value(getattr(value, field))
            self.value(value.compile_flags)
            self.say(str(value.target))
            self.jit_function(value.func)
        elif name in ("Var", "SizeVar"):
            if self._first(value):
                self.say(name, str(value.name), str(value.dtype))
        elif name in ("IntImm", "FloatImm", "StringImm"):
            self.say(name, str(getattr(value, "dtype", "")))
            self.value(value.value)
        elif name == "Buffer":
            self._buffer(value)
        elif (known := _name_of(value)) is not None:
            self.say("outside", known)
        elif name == "Target":
            self.say("target", str(value))
        else:
            raise Unseen(f"an object of {kind.__module__}.{name}")

    def jit_function(self, function: Any) -> None:
        """Digest what `@tilelang.jit` made of a function: the function, and what it kept of it.

        Raises:
            Unseen: Something in it cannot be seen into.
        """
        if type(function).__name__ != "JITFunc":
            raise Unseen("a prim_func, which is made already")
        if not self._first(function):
            return
        self.say("jit function")
        self.value(function.orig_func)
        self._rewritten(function.ir_gen, function.orig_func)
        self._annotations(function.tensor_args)
        self._annotations(function.tensor_args_defaults)

    def _rewritten(self, generator: Any, function: FunctionType) -> None:
        """The function that TileLang rewrote: its closure is as it was when that was done."""
        self._annotations(generator.extra_type_hints)
        put_off = getattr(generator, "_tlcache_function", None)
        rewritten = generator.gen if put_off is None else put_off
        now, then = _cells(function), _cells(rewritten)
        for name in sorted(then):
            if then[name] is not rewritten and then[name] is not now.get(name, _MISSING):
                self.say("then", name)
                self.value(then[name])

    def _annotations(self, annotations: Mapping[str, Any]) -> None:
        for name, value in annotations.items():
            self.say("annotation", name)
            # TileLang names parameters after the arguments, when it first traces the function.
            if type(value).__name__ == "Var" and type(value).__module__.startswith("tvm."):
                if self._first(value):
                    self.say("parameter", str(value.dtype))
            elif type(value).__name__ == "Buffer" and type(value).__module__.startswith("tvm."):
                self._buffer(value, named=False)
            else:
                self.value(value)

    def _buffer(self, buffer: Any, named: bool = True) -> None:
        if not self._first(buffer):
            return
        self.say("buffer", str(buffer.name) if named else "", str(buffer.dtype))
        self.say(str(buffer.scope()))
        self.say(str(buffer.data_alignment), str(buffer.offset_factor))
        for part in (buffer.shape, buffer.strides):
            self.say(str(len(part)))
            for item in part:
                self.value(item)
        if buffer.elem_offset is not None:
            self.value(buffer.elem_offset)


# --- what Python and TileLang know of things ---

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
_THERE = frozenset({"posixpath.exists", "genericpath.exists"})
_UNREADABLE = frozenset(
    opcode.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME")
)
_BUILTINS = sys.modules["builtins"]
_cached_as: dict[int, tuple[Any, str]] = {}
# Of what cannot change: the digests of bytecode, and the lines of it as long as linecache has them.
_codes: dict[int, tuple[CodeType, str]] = {}
_texts: dict[int, tuple[CodeType, Any, str | None]] = {}
# Names of TileLang's that were admitted, as long as they mean the same.
_admitted: dict[tuple[int, tuple[str, ...]], tuple[ModuleType, Any, tuple[str, ...]]] = {}


_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def _generated(kind: type, name: str, item: Any) -> bool:
    """Whether Python made a class's attribute of what is digested otherwise."""
    if isinstance(item, _DESCRIPTORS) or type(item).__name__ == "_tuplegetter":
        return True
    inner = getattr(item, "__func__", item)
    file = inner.__code__.co_filename if isinstance(inner, FunctionType) else ""
    made = file.startswith("<") or os.path.basename(file) in ("dataclasses.py", "reprlib.py")
    if issubclass(kind, enum.Enum):
        return not isinstance(item, _CODE) or _of_library(inner)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return made or name in ("_fields", "_field_defaults") or _of_library(inner)
    return made and "__dataclass_fields__" in vars(kind)


_CODE = (FunctionType, staticmethod, classmethod, property)


def _of_library(value: Any) -> bool:
    return outside.is_outside(getattr(value, "__module__", None) or "")


def _harmless(base: type) -> bool:
    """Whether a class of the standard library holds nothing that its instances' dict does not."""
    return base.__module__ in ("typing", "abc", "enum", "types") or base is BaseException


def _names_of(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_tensor_like(value: Any) -> bool:
    """Whether to set its items is to write TileLang code, as `A[i] = x` is for a buffer."""
    return type(value).__name__ in ("Buffer", "Var") and type(value).__module__.startswith("tvm.")


def _environment(value: Any) -> bool:
    return value is os.environ


def _plain_of_class(kind: type, name: str) -> Any:
    """A class's attribute, if it is nothing but a value."""
    if type(kind) is not type:
        return _MISSING
    for base in kind.__mro__:
        if name in vars(base):
            found = vars(base)[name]
            return _MISSING if hasattr(found, "__get__") else found
    return _MISSING


def _plain_of_instance(value: Any, name: str) -> Any:
    """An object's attribute, if to ask for it runs nothing of the program's."""
    kind = type(value)
    if outside.is_outside(kind.__module__) or isinstance(value, (FunctionType, types.MethodType)):
        return _MISSING
    if any("__getattribute__" in vars(base) for base in kind.__mro__ if base is not object):
        return _MISSING
    for base in kind.__mro__:
        if name in vars(base) and hasattr(vars(base)[name], "__set__"):
            return _MISSING
    held = getattr(value, "__dict__", {})
    if name in held:
        return held[name]
    return _plain_of_class(kind, name)


def _cells(function: FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            pass  # it is empty yet
    return found


def _started() -> float:
    """When this process started, in seconds since the epoch, to a hundredth; where the system does
    not tell, when this module was imported.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()


_STARTED = _started()


def lines(function: FunctionType) -> str | None:
    """The lines of a function as TileLang would read them now; None where there are none.

    Raises:
        Unseen: The file was changed since this process read it, or began.
    """
    code = function.__code__
    name = code.co_filename
    known: Any = linecache.cache.get(name)
    try:
        status = os.stat(name)
    except OSError:
        status = None
    if status is not None:
        stale = isinstance(known, tuple) and len(known) > 1 and known[1] is not None
        if stale and (known[0], known[1]) != (status.st_size, status.st_mtime):
            raise Unseen("its source file was changed while the process runs")
        if status.st_mtime > _STARTED + 0.02:
            raise Unseen("its source file was changed while the process runs")
    held = linecache.getlines(name, function.__globals__)
    kept = _texts.get(id(code))
    if kept is not None and kept[0] is code and kept[1] is held:
        return kept[2]
    found = _block(code, held)
    _texts[id(code)] = (code, held, found)
    return found


def _block(code: CodeType, lines: list[str]) -> str | None:
    """The lines of one definition: those of its bytecode, and what follows and is indented."""
    first = code.co_firstlineno - 1
    if not lines or not 0 <= first < len(lines):
        return None
    last = _last_line(code)
    indent = _indent(lines[first])
    while last < len(lines) and (not lines[last].strip() or _indent(lines[last]) > indent):
        last += 1
    return "".join(lines[first:last])


def _last_line(code: CodeType) -> int:
    last = max((line for _, _, line in code.co_lines() if line is not None), default=0)
    inner = [_last_line(part) for part in code.co_consts if isinstance(part, CodeType)]
    return max(last, code.co_firstlineno, *inner, 0)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


@functools.cache
def _named() -> dict[int, tuple[Any, str]]:
    """The objects of TileLang's language that have names there but no name of their own."""
    found: dict[int, tuple[Any, str]] = {}
    for module in ("tilelang.language", "tvm.tirx", "tilelang"):
        for name, value in vars(sys.modules.get(module) or inspect).items():
            found.setdefault(id(value), (value, f"{module}.{name}"))
    return found


def _name_of(value: Any) -> str | None:
    known = _named().get(id(value))
    return known[1] if known is not None and known[0] is value else None
