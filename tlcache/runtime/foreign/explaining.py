"""What the key of a call was made of, as names and short texts, for `tlcache why`: the functions
that are reached and the constants that they take, the arguments, and how the kernel is compiled.

It tells apart what is common and leaves out the rest; the key (`key.py`) leaves out nothing. So two
equal explanations may be of two keys.

Invariant: what is named decides about the key. A text of 12 hexadecimal digits is a digest, any
other one the value itself. Nothing that is followed is run.
"""

from __future__ import annotations

import functools
import json
import sys
import types
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from tlcache import targets
from tlcache.runtime.foreign import key as keys
from tlcache.runtime.foreign import outside, text
from tlcache.runtime.foreign.reach import Finder
from tlcache.runtime.foreign.source import cells, lines

__all__ = ["made_of"]

MOST = 200
"""Functions that are looked at; what lies beyond them is not told apart."""
_SHORT = 60


def made_of(call: Any) -> dict[str, str]:
    """What the key of a call was made of, by names like `argument n`, `function package.module:f`,
    `value package.module.NAME`, `variable NVCC_APPEND_FLAGS` or `pass configs`.

    Args:
        call: A call of `accelerate`'s. Nothing is raised: what goes wrong is left out.
    """
    found: dict[str, str] = {}
    for part in (_compiled, _given, _reached):
        try:
            found.update(part(call))
        except Exception:
            pass  # an explanation that lacks something, rather than a kernel
    return found


def _compiled(call: Any) -> Iterator[tuple[str, str]]:
    import tvm

    impl, where = call.impl, call.where
    yield "target", targets.of_tvm(tvm.target.Target(where.target).export()).name
    yield "host", where.host
    yield "backend", where.backend
    yield "out_idx", _shown(impl.out_idx)
    configs = impl.pass_configs or {}
    yield "pass configs", _shown({str(getattr(k, "value", k)): v for k, v in configs.items()})
    flags = impl.compile_flags
    yield "compile flags", _shown([flags] if isinstance(flags, str) else list(flags or ()))
    yield "python", sys.implementation.cache_tag or sys.version
    for name, value in keys.environment().items():
        yield f"variable {name}", value


def _given(call: Any) -> Iterator[tuple[str, str]]:
    for name, value in call.bound.compile_kwargs.items():
        yield f"argument {name}", _shown(value)
    for name, value in call.constants.items():
        yield f"constant {name}", _shown(value)


# --- what is reached ---


def _reached(call: Any) -> dict[str, str]:
    """The functions, and the values that they name."""
    found: dict[str, str] = {}
    waiting = [_function_of(call.impl.func)]
    seen: set[int] = set()
    while waiting and len(seen) < MOST:
        function = waiting.pop()
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        name = f"{function.__module__}:{function.__qualname__.replace('.<locals>', '')}"
        source = lines(function)
        read = text.analyzed(source.text) if source is not None else None
        found[f"function {name}"] = _digest(function, read)
        for path, value in _named(function, name, read):
            inner = _function_of(value)
            if inner is not None:
                waiting.append(inner)
            elif not isinstance(value, ModuleType):
                try:
                    found[f"value {path}"] = _shown(value)
                except Exception:
                    pass  # the key is refused for it, or has it by another name
    return found


def _function_of(value: Any) -> FunctionType | None:
    """The program's function that something is, or is made of."""
    for _ in range(8):
        if isinstance(value, FunctionType):
            return None if outside.is_outside(value.__module__ or "") else value
        kind = type(value).__name__
        if isinstance(value, functools._lru_cache_wrapper):
            value = value.__wrapped__
        elif isinstance(value, types.MethodType):
            value = value.__func__
        elif kind == "JITImpl":
            value = value.func
        elif kind in ("JITFunc", "Macro"):
            value = getattr(value, "orig_func", None)
        else:
            return None
    return None


def _digest(function: FunctionType, read: text.Text | None) -> str:
    finder = Finder()
    finder.say(read.digest if read is not None else "no source")
    finder.code(function.__code__)
    finder.value(function.__defaults__)
    finder.value(function.__kwdefaults__)
    return finder.digest()[:12]


def _named(function: FunctionType, name: str, read: text.Text | None) -> Iterator[tuple[str, Any]]:
    """What a function takes from outside of itself, with a name for it."""
    held = cells(function)
    for head, attributes in sorted(
        {(use.head, use.attributes) for use in read.uses} if read else ()
    ):
        if head in held:
            yield from _attribute(f"{name}.{head}", held[head], attributes)
        elif head in function.__globals__:
            path = f"{function.__module__}.{head}"
            yield from _attribute(path, function.__globals__[head], attributes)
        elif (module := sys.modules.get(head.removeprefix("module:"))) is not None:
            yield from _attribute(module.__name__, module, attributes)


def _attribute(path: str, value: Any, attributes: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """An attribute of a module of the program's; of anything else, that as a whole."""
    for attribute in attributes:
        if not isinstance(value, ModuleType):
            break
        if outside.is_outside(value.__name__) or attribute not in vars(value):
            return
        path, value = f"{value.__name__}.{attribute}", vars(value)[attribute]
    home = value if isinstance(value, type) else type(value)
    if isinstance(value, (FunctionType, type)) or home.__module__ != "builtins":
        module = getattr(value, "__module__", None)
        if isinstance(module, str) and outside.is_outside(module):
            return
    yield path, value


# --- values ---


def _shown(value: Any) -> str:
    """A value as text, if it is plain and short, else its digest."""
    if _is_plain(value):
        said = json.dumps(value, default=repr) if isinstance(value, dict) else repr(value)
        if len(said) <= _SHORT:
            return said
    elif type(value).__name__ == "dtype":
        return str(value)
    finder = Finder()
    finder.value(value)
    return finder.digest()[:12]


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(part) for item in value.items() for part in item)
    return type(value) in (bool, int, float, str, type(None))
