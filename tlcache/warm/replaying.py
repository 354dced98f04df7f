"""A spec's factory, called until there is a kernel: what a factory may be, and what it may give.

Invariant: nothing is launched. A kernel that is recorded is made as the program made it, so that
TileLang gives it the same key: with the arguments of the recording, and with the target from where
the program has it.

A factory may be a JITImpl of TileLang's (also under its autotuner, or under other wrappers), a
function that returns one, a compiled kernel, or a prim_func, or a function that compiles and
returns something else. This module imports TileLang.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tlcache import arguments
from tlcache.errors import FactoryError
from tlcache.spec import KernelSpec

__all__ = ["compare", "keep_drifted", "kernel", "keys_asked", "no_kernel", "watch"]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.made: list[Any] | None = None
        self.drifted: list[Callable[[], Any]] = []
        self.wanted: str | None = None
        self.keys: list[str] = []


class _Found(BaseException):
    """TileLang was asked for the key that is wanted; past whatever the factory catches."""


class _Other(BaseException):
    """It was asked for another one; in the place of a compile."""


_thread = _Thread()


def kernel(spec: KernelSpec, key: str | None = None, *, targeted: bool = False) -> Any:
    """The JITKernel of a spec, compiled or found by TileLang.

    Args:
        spec: The kernel.
        key: The key that TileLang is to have for it, where that is known.
        targeted: Whether TileLang's default target is the spec's already, as it is under
            `pretending`.

    Raises:
        FactoryError: The factory cannot be imported, or yields no kernel, or none of that key.
    """
    from tilelang.jit import JITKernel

    _thread.made, _thread.drifted = [], []
    try:
        found = _followed(spec, targeted)
        made = [*([found] if isinstance(found, JITKernel) else []), *_thread.made]
    finally:
        _thread.made = None
    if key is not None and made:
        for one in made:
            if getattr(one, "_tilelang_cache_key", None) == key:
                return one
        raise _differs(str(getattr(made[0], "_tilelang_cache_key", None)), key)
    if isinstance(found, JITKernel) or len(made) == 1:
        return made[0]
    raise no_kernel(spec, found)


def compare(spec: KernelSpec, key: str, *, targeted: bool = False) -> None:
    """Elaborate a spec until TileLang is asked for the kernel of a key; nothing is compiled. It
    needs `watch`.

    Args:
        spec: The kernel.
        key: The key that TileLang had for it.
        targeted: As for `kernel`.

    Raises:
        FactoryError: The factory cannot be imported, or yields no kernel, or none of that key.
    """
    asked, found = keys_asked(spec, key, targeted=targeted)
    if not asked:
        raise no_kernel(spec, found)
    if key not in asked:
        raise _differs(asked[0], key)


def keys_asked(
    spec: KernelSpec, key: str | None, *, targeted: bool = False
) -> tuple[list[str], Any]:
    """The keys of all kernels that TileLang is asked for by a replay, up to the one of `key`, and
    what the factory gave, if it came to that; nothing is compiled. It needs `watch`.

    Raises:
        FactoryError: The factory cannot be imported.
    """
    _thread.wanted, _thread.keys = key or "", []
    try:
        return _thread.keys, _followed(spec, targeted)
    except _Found:
        return _thread.keys, None
    except Exception:
        if not _thread.keys:
            raise
        return _thread.keys, None  # it went on with what is no kernel
    finally:
        _thread.wanted = None


def _differs(made: str, key: str) -> FactoryError:
    return FactoryError(
        f"its replay makes another kernel than the program had: TileLang's key is {made[:12]}, "
        f"and was {key[:12]}",
        hint="record it anew if its source has changed; otherwise something outside of its "
        "arguments decides what it is",
    )


def no_kernel(spec: KernelSpec, found: Any) -> FactoryError:
    """The error of a factory that yields something else."""
    return FactoryError(
        f"the factory {spec.kernel} yields a {type(found).__name__}, "
        "which is not a TileLang kernel",
        hint="it should return what `@tilelang.jit` makes, or a compiled kernel",
    )


def _followed(spec: KernelSpec, targeted: bool) -> Any:
    """What the factory gives at last."""
    from tilelang.jit import JITImpl
    from tvm.tirx import PrimFunc

    try:
        factory = arguments.named(spec.kernel)
    except (ImportError, AttributeError) as error:
        raise FactoryError(f"the factory {spec.kernel} cannot be imported: {error}") from error
    given, schedule = _decoded(spec.workload), _decoded(spec.schedule)
    inner = _unwrapped(factory)
    if isinstance(inner, JITImpl):
        return _called(_adapted(inner, spec, targeted), {**given, **schedule})
    if isinstance(inner, PrimFunc):
        return _compiled(inner, spec, schedule)
    if _takes(factory, "target"):
        given.setdefault("target", spec.target.name)  # a recorded program has given it one
    made = factory(**given)
    inner = _unwrapped(made)
    if isinstance(inner, JITImpl):
        return _called(_adapted(inner, spec, targeted), schedule)
    if isinstance(inner, PrimFunc):
        return _compiled(inner, spec, schedule)
    return made


def _decoded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arguments.decode(value) for name, value in values.items()}


def _unwrapped(value: Any) -> Any:
    """The JITImpl or prim_func that something wraps, else it itself."""
    from tilelang.jit import JITImpl
    from tvm.tirx import PrimFunc

    found = value
    while found is not None and not isinstance(found, (JITImpl, PrimFunc)):
        attributes = getattr(found, "__dict__", {})
        found = attributes.get("jit_impl") or attributes.get("__wrapped__")
    return value if found is None else found


def _adapted(impl: Any, spec: KernelSpec, targeted: bool) -> Any:
    """The JITImpl with the spec's own target, pass configs and flags where it does not set them
    itself; and elaborated anew, since an elaboration may ask for the target.
    """
    from tilelang.language.eager import JITFunc

    changes: dict[str, Any] = {}
    if impl.target is None and not targeted:
        changes["target"] = spec.target.config
    if spec.pass_configs:
        changes["pass_configs"] = {**(impl.pass_configs or {}), **_decoded(spec.pass_configs)}
    if spec.compile_flags:
        flags = impl.compile_flags or []
        changes["compile_flags"] = [
            *([flags] if isinstance(flags, str) else flags),
            *spec.compile_flags,
        ]
    if spec.execution_backend != spec.target.execution_backend:
        changes["execution_backend"] = spec.execution_backend
    if (changes or targeted) and isinstance(function := impl.func, JITFunc):
        changes["func"] = dataclasses.replace(function)
    return dataclasses.replace(impl, **changes) if changes else impl


def _called(impl: Any, given: dict[str, Any]) -> Any:
    """The kernel that a JITImpl gives for a call. A lazy one keeps it; an eager one would
    launch.
    """
    if impl.initialize_jit_mode(**given) == "lazy":
        return impl(**given)
    return impl.compile(**given)


def _compiled(function: Any, spec: KernelSpec, given: Mapping[str, Any]) -> Any:
    import tilelang

    return tilelang.compile(function, target=spec.target.config, **given)


def _takes(factory: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters


# --- in a worker of a warm, where nobody else compiles ---


def watch() -> None:
    """Have every kernel that TileLang is asked for noticed: `kernel` looks among them, and
    `keep_drifted` takes those with a negative output index.

    TileLang makes negative indices positive in place, in the decorator's own list, where it finds a
    kernel on disk. So what a program asks for after that has another key, unless it runs under
    `tlcache run`.
    """
    import wrapt

    module = "tilelang.cache.kernel_cache"
    wrapt.wrap_function_wrapper(module, "KernelCache.cached", _cached)
    wrapt.wrap_function_wrapper(module, "KernelCache._generate_key", _keyed)


def _keyed(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    key = wrapped(*args, **kwargs)
    if _thread.wanted is not None:
        _thread.keys.append(key)
        raise _Found if key == _thread.wanted else _Other
    return key


def keep_drifted() -> None:
    """Compile what `kernel` made last once more, under the keys that programs without hooks drift
    to.
    """
    for ask in _thread.drifted:
        ask()
    _thread.drifted = []


def _cached(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    function = args[0] if args else kwargs.pop("func")
    indices = args[1] if len(args) > 1 else kwargs.pop("out_idx", None)
    if _thread.wanted is not None:
        try:
            return wrapped(
                function,
                list(indices) if isinstance(indices, list) else indices,
                *args[2:],
                **kwargs,
            )
        except _Other:
            return None
    if not isinstance(indices, list) or _thread.made is None:
        kernel = wrapped(function, indices, *args[2:], **kwargs)
    else:
        kernel = wrapped(function, list(indices), *args[2:], **kwargs)
        declared = "tilelang_out_idx" in (function.attrs or {})  # by `T.empty`: a list made anew
        if not declared and any(index < 0 for index in indices):
            positive = [index % len(kernel.adapter.params) for index in indices]
            _thread.drifted.append(
                functools.partial(wrapped, function, positive, *args[2:], **kwargs)
            )
    if _thread.made is not None:
        _thread.made.append(kernel)
    return kernel
