"""Where a kernel comes from: the import path of what made it, and the arguments, so that another
process can make it again.

Invariant: an origin that can be replayed names something that can be imported, and arguments that
have a JSON form; everything else is one that cannot, with the reason. Whether a replay gives the
same kernel is for `tlcache warm` to see: it compares TileLang's keys.

How each form is found:

- `@tilelang.jit` on a module's function: by the function's module and name.
- `@tilelang.jit` inside a module's function (a factory, which may be under `lru_cache`): by the
outer
  function, and the arguments that its frame has while the decorator runs, else that the closure's
  cells hold.
- `tilelang.compile` inside a module's function under `functools.cache`: by that function's frame.
Only
  one that is cached is ever called again: what the others do besides is not known.
- `tilelang.compile` of a prim_func that a module's function made: by the closure's cells.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tlcache import arguments
from tlcache.arguments import NoForm
from tlcache.spec import workload_text

__all__ = ["Made", "Origin", "made_by", "of_call", "of_function", "place_of"]


@dataclass(frozen=True)
class Origin:
    """Where one kernel comes from.

    Attributes:
        kernel: What made it, like `package.module:factory`; for people where it cannot be replayed.
        workload: A workload of shapes.json that makes it again; None where there is none.
        place: A directory that must be on `sys.path` for that; None where it is installed.
        reason: Why it cannot be replayed.
        remedy: What to do about that.
    """

    kernel: str
    workload: Mapping[str, Any] | None
    place: str | None = None
    reason: str | None = None
    remedy: str | None = None

    @property
    def title(self) -> str:
        """The kernel in short, like `matmul M=1024 N=1024`."""
        workload = self.workload or {}
        given = {**workload.get("args", {}), **workload.get("schedule", {})}
        return " ".join(filter(None, (self.kernel.rpartition(":")[2], workload_text(given))))


class _Lost(Exception):
    """It cannot be replayed: the reason, and what to do."""

    def __init__(self, reason: str, remedy: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


_MOVE = "move it to the top level of a module, or into a function there that takes its parameters"


@dataclass(frozen=True)
class Made:
    """How a JITImpl came to be.

    Attributes:
        module: The module of the decorated function.
        factory: The name there of the outermost function around it; None for one at the top level.
        arguments: What that was called with, in JSON form; None where it was not seen.
        lost: Why it cannot be made again.
    """

    module: str
    factory: str | None
    arguments: Mapping[str, Any] | None = None
    lost: _Lost | None = None


def made_by(function: Any) -> Made:
    """How the function under a decorator came to be; to be asked while the decorator runs."""
    outer = _outer(function)
    if outer is None:
        return Made(function.__module__, None)
    frame = _frame_of(outer, function.__globals__)
    if frame is None:
        return Made(function.__module__, outer)
    try:
        return Made(function.__module__, outer, _called_with(frame))
    except _Lost as lost:
        return Made(function.__module__, outer, lost=lost)


def of_call(
    impl: Any, function: Any, made: Made, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Origin:
    """The origin of the kernel that a JITImpl gives for a call.

    Args:
        impl: The JITImpl.
        function: The function that it decorates.
        made: How it came to be.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call; what an autotuner adds is among them.
    """
    kernel = f"{made.module}:{made.factory or function.__qualname__}"
    try:
        if made.lost is not None:
            raise made.lost
        call = _bound(impl.signature, args, kwargs)
        if made.factory is None:
            path, place = _importable(made.module, function, impl)
            return Origin(path, _workload(path, call, {}), place)
        path, place = _importable_factory(made.module, made.factory)
        given = made.arguments
        if given is None:
            given = _cells(function, getattr(sys.modules[made.module], made.factory))
        return Origin(path, _workload(path, given, call), place)
    except _Lost as lost:
        return Origin(kernel, None, reason=lost.reason, remedy=lost.remedy)


def of_function(function: Any, compiled_with: Mapping[str, Any]) -> Origin:
    """The origin of a prim_func that was given to `tilelang.compile`.

    Args:
        function: The function that it was made of, or None.
        compiled_with: What `tilelang.compile` was given besides, if it was not the default.
    """
    name = (
        f"{function.__module__}:{function.__qualname__}" if function is not None else "a prim_func"
    )
    try:
        for frame, path, place in _cached_frames():
            return Origin(path, _workload(path, _called_with(frame), {}), place)
        if function is None:
            raise _Lost("its prim_func was made without `@T.prim_func`", _MOVE)
        given = {key: _encoded(key, value) for key, value in compiled_with.items()}
        outer = _outer(function)
        if outer is None:
            path, place = _importable(function.__module__, function, None)
            return Origin(path, _workload(path, {}, given), place)
        path, place = _importable_factory(function.__module__, outer)
        cells = _cells(function, getattr(sys.modules[function.__module__], outer))
        return Origin(path, _workload(path, cells, given), place)
    except _Lost as lost:
        return Origin(name, None, reason=lost.reason, remedy=lost.remedy)


def _workload(path: str, args: Mapping[str, Any], schedule: Mapping[str, Any]) -> dict[str, Any]:
    workload: dict[str, Any] = {"kernel": path, "args": dict(args)}
    if schedule:
        workload["schedule"] = dict(schedule)
    return workload


# --- arguments ---


def _encoded(name: str, value: Any) -> Any:
    try:
        return arguments.encode(value)
    except NoForm as error:
        raise _Lost(
            f"its argument {name} cannot be written down: {error.message}",
            "give it numbers, texts, dtypes, or tuples of these",
        ) from error


def _bound(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """A call's arguments by name. Those that the signature does not know are TileLang's to take,
    for `T.const`.
    """
    found = {}
    for parameter, value in zip(signature.parameters.values(), args, strict=False):
        if parameter.kind is parameter.VAR_POSITIONAL:
            break
        found[parameter.name] = _encoded(parameter.name, value)
    if len(found) < len(args):
        raise _Lost("it takes any number of arguments without names", "give them names")
    for name, value in kwargs.items():
        found[name] = _encoded(name, value)
    return found


def _called_with(frame: FrameType) -> dict[str, Any]:
    """What a function that is running was called with, as far as it has not assigned it anew."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[:count]
    local = frame.f_locals
    # A parameter that an inner function uses lives in a cell, and is among the locals all the same.
    given = {name: local[name] for name in names if name in local}
    if code.co_flags & inspect.CO_VARARGS:
        if local.get(code.co_varnames[count]):
            raise _Lost(
                f"{code.co_name} takes any number of arguments without names", "give them names"
            )
        count += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        given.update(local.get(code.co_varnames[count], {}))
    return {name: _encoded(name, value) for name, value in given.items()}


def _cells(function: Any, factory: Any) -> dict[str, Any]:
    """What the function around another was called with, as the inner one's closure has it."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError) as error:
        raise _Lost(f"what made it is no function that can be called again: {error}") from error
    names = function.__code__.co_freevars
    cells = dict(zip(names, function.__closure__ or (), strict=False))
    found = {}
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        try:
            found[name] = _encoded(name, cells[name].cell_contents)
        except (KeyError, ValueError):
            if parameter.default is parameter.empty:
                raise _Lost(
                    f"its closure does not tell the {name} of {factory.__qualname__}",
                    "decorate it by `@tilelang.jit`, or compile it in a function under "
                    "`functools.cache`, and start the program by `tlcache run`",
                ) from None
    return found


# --- frames and names ---


def _outer(function: Any) -> str | None:
    """The outermost function around another one; None for one at a module's top level."""
    head, local, _ = function.__qualname__.partition(".<locals>")
    return head if local else None


def _frame_of(name: str, globals_: Mapping[str, Any]) -> FrameType | None:
    """The innermost frame of a module's function of that name."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals is globals_ and frame.f_code.co_name == name:
            return frame
        frame = frame.f_back
    return None


def _cached_frames() -> Iterator[tuple[FrameType, str, str | None]]:
    """The frames of functions under `functools.cache` or `lru_cache` that are running, innermost
    first.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module, name = frame.f_globals.get("__name__"), frame.f_code.co_name
        found = frame.f_globals.get(name)
        if (
            isinstance(found, functools._lru_cache_wrapper)
            and getattr(found.__wrapped__, "__code__", None) is frame.f_code
            and isinstance(module, str)
            and not module.startswith(("tilelang.", "tvm."))
        ):
            path, place = _importable_factory(module, name)
            yield frame, path, place
        frame = frame.f_back


def _importable_factory(module: str, name: str) -> tuple[str, str | None]:
    if "." in name:
        raise _Lost(f"it is made in a method, {module}:{name}", _MOVE)
    if not callable(getattr(sys.modules.get(module), name, None)):
        raise _Lost(f"what made it, {module}:{name}, cannot be found by that name", _MOVE)
    path, place = place_of(module)
    return f"{path}:{name}", place


def _importable(module: str, function: Any, impl: Any) -> tuple[str, str | None]:
    """The import path of a decorated function; by its name, else by whatever name its module
    has.
    """
    namespace = vars(sys.modules[module]) if module in sys.modules else {}
    path, place = place_of(module)
    if _leads_to(namespace.get(function.__qualname__), function, impl):
        return f"{path}:{function.__qualname__}", place
    for name, found in list(namespace.items()):
        if _leads_to(found, function, impl):
            return f"{path}:{name}", place
    raise _Lost(f"{module} has no name for it", _MOVE)


def _leads_to(found: Any, function: Any, impl: Any) -> bool:
    """Whether a module's attribute is a JITImpl or a prim_func, or wraps one."""
    while found is not None:
        if found is impl or (impl is None and getattr(found, "orig_func", None) is function):
            return True
        attributes = getattr(found, "__dict__", {})
        found = attributes.get("jit_impl") or attributes.get("__wrapped__")
    return False


@functools.cache
def _loaded_from(module: str) -> tuple[str, str | None]:
    loaded = sys.modules.get(module)
    spec, file = getattr(loaded, "__spec__", None), getattr(loaded, "__file__", None)
    if module == "__main__":
        if spec is not None:
            module = spec.name
        elif file is None or not os.path.isfile(file):
            raise _Lost("it is defined in a program that is no file", "move it into a module")
        else:
            return _script(os.path.abspath(file))
    if file is None:
        raise _Lost(f"its module {module} has no file", "move it into a module that has")
    depth = len(module.split(".")) - (0 if os.path.basename(file).startswith("__init__.") else 1)
    root = os.path.dirname(os.path.abspath(file))
    for _ in range(depth):
        root = os.path.dirname(root)
    installed = {"site-packages", "dist-packages"} & set(root.split(os.sep))
    return module, None if installed else root


def _script(file: str) -> tuple[str, str]:
    """A script as the module that it is when its directory is on `sys.path`."""
    directory, name = os.path.split(file)
    stem, suffix = os.path.splitext(name)
    if suffix != ".py" or not stem.isidentifier():
        raise _Lost(f"it is defined in {name}, which cannot be imported", "move it into a module")
    with open(file, encoding="utf-8") as source:
        body = ast.parse(source.read()).body
    if not any(isinstance(node, ast.If) and "__name__" in ast.dump(node.test) for node in body):
        raise _Lost(
            f"it is defined in the script {name}, which would run as a whole where it is imported",
            'put what the script does under `if __name__ == "__main__":`, '
            "or move the kernel into a module",
        )
    return stem, directory


def place_of(module: str) -> tuple[str, str | None]:
    """The name by which another process imports a module, and the directory that has to be on
    `sys.path`.
    """
    return _loaded_from(module)
