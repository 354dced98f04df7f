"""Hooks on TileLang: each request that reaches its cache is counted, noted, recorded, and allowed
or not.

Invariant: the program gets what it would get without them, with two exceptions that are meant: a
list of output indices is never rewritten in place (a negative one would give later kernels another
key), and a compile that was ruled out is a MissError. What goes wrong in a hook is logged once and
does not reach the program. A launch passes no hook. TileLang's import is spared by the garbage
collector, and so is what it leaves, afterwards (`garbage.py`).

The hooks are wrapt's, installed when a module of TileLang is imported, or at once where it is
already; they call whatever is there, and whatever patches the same functions later calls them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import wrapt

from tlcache import targets
from tlcache.errors import MissError
from tlcache.fingerprint import key_environment
from tlcache.runtime import below, events, garbage, origin, ownership, recorder
from tlcache.runtime.counters import Outcome
from tlcache.runtime.foreign import accelerate
from tlcache.runtime.origin import Made, Origin
from tlcache.runtime.process import process
from tlcache.runtime.resolve import foreign, remembered
from tlcache.store import layout, roots

__all__ = ["factories", "install", "installed", "jits", "origin_of", "trouble"]

_log = logging.getLogger(__name__)
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def install() -> None:
    """Install the hooks, once, on TileLang's modules as they are imported."""
    if _state.installed:
        return
    _state.installed = True
    garbage.spare_import("tilelang")
    for module, name, wrapper in (
        ("tilelang.jit", "JITImpl.__post_init__", _made),
        ("tilelang.jit", "JITImpl.get_tir", _elaborated),
        ("tilelang.jit.kernel", "JITKernel.__init__", _initialized),
        ("tilelang.cache.kernel_cache", "KernelCache.cached", _requested),
        ("tilelang.cache.kernel_cache", "KernelCache._load_kernel_from_disk", _looked_for),
        ("tilelang.autotuner.tuner", "AutoTuner._load_result_from_disk", _tuned),
        ("tilelang.autotuner.tuner", "AutoTuner._prepare_compile_execution", _launched),
        ("tilelang.autotuner.tuner", "compile_grouped_unit_tvm_ffi", _grouped),
    ):
        wrapt.register_post_import_hook(_wrapping(name, wrapper), module)
    if accelerate.wanted():
        accelerate.start()


def installed() -> bool:
    """Whether `install` was called."""
    return _state.installed


def jits() -> list[Any]:
    """The JITImpls that there are, other than the resolver's own."""
    return [impl for reference, _ in list(_state.impls.values()) if (impl := reference())]


def factories() -> list[tuple[str, str]]:
    """Module and name of the functions that made JITImpls."""
    return list(_state.factories)


class _State:
    def __init__(self) -> None:
        self.installed = False
        self.impls: dict[int, tuple[weakref.ref[Any], Made]] = {}
        self.factories: dict[tuple[str, str], None] = {}
        self.troubled = False


_UNKNOWN = Origin("a prim_func", None, reason="nothing tells where it comes from")


class _Request:
    """One request for a kernel: what TileLang did for it so far."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.origin = _UNKNOWN
        self.loaded = False
        self.compiling = False
        self.started = time.perf_counter()


class _Thread(threading.local):
    request: _Request | None = None


_state = _State()
_thread = _Thread()


def _wrapping(name: str, wrapper: Callable[..., Any]) -> Callable[[Any], None]:
    def hook(module: Any) -> None:
        try:
            wrapt.wrap_function_wrapper(module, name, wrapper)
        except Exception as error:
            trouble(error)

    return hook


def trouble(error: BaseException) -> None:
    """Say, once, that a hook went wrong; the program goes on."""
    if not _state.troubled:
        _state.troubled = True
        _log.warning(
            "a hook of tlcache's went wrong, and later ones may stay silent: %s: %s",
            type(error).__name__,
            error,
            exc_info=_log.isEnabledFor(logging.DEBUG),
        )


# --- where kernels come from ---


def _made(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    try:
        if not ownership.is_own():
            function = getattr(instance.func, "orig_func", None)
            if function is not None:
                _remember(instance, origin.made_by(function))
    except Exception as error:
        trouble(error)
    return result


def _remember(impl: Any, made: Made) -> Made:
    number = id(impl)
    reference = weakref.ref(impl, lambda _: _state.impls.pop(number, None))
    _state.impls[number] = reference, made
    if made.factory is not None:
        _state.factories[made.module, made.factory] = None
    return made


def _elaborated(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    start = time.perf_counter()
    result = wrapped(*args, **kwargs)
    try:
        if not ownership.is_own():
            seconds = time.perf_counter() - start
            result._tlcache_origin = origin_of(instance, args, kwargs), seconds
    except Exception as error:
        trouble(error)
    return result


def origin_of(impl: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Origin:
    """Where the kernel comes from that a JITImpl makes of a call."""
    function = getattr(impl.func, "orig_func", None)
    if function is None:
        return Origin("a prim_func", None, reason="its JITImpl was made of a prim_func")
    reference, made = _state.impls.get(id(impl), (None, None))
    if made is None or reference is None or reference() is not impl:
        # It is older than the hooks; what its closure holds must tell.
        outer = function.__qualname__.partition(".<locals>")
        made = _remember(impl, Made(function.__module__, outer[0] if outer[1] else None))
    return origin.of_call(impl, function, made, args, kwargs)


# --- requests ---


def _requested(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = _undrifted(args, kwargs)
    if ownership.is_own():
        return wrapped(*args, **kwargs)
    request = _begun(args, kwargs)
    outer, _thread.request = _thread.request, request
    try:
        kernel = wrapped(*args, **kwargs)
    except BaseException as error:
        _settle(request, None, error)
        raise
    finally:
        _thread.request = outer
    _settle(request, kernel)
    return kernel


def _initialized(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = _undrifted(args, kwargs)
    request = _thread.request
    if kwargs.get("from_database", len(args) > 7 and args[7]):
        if request is not None:
            request.loaded = True
        return wrapped(*args, **kwargs)
    if ownership.is_own():
        return wrapped(*args, **kwargs)
    if request is not None:
        _permit(request)
        request.compiling = True
        return wrapped(*args, **kwargs)
    request = _begun(args, kwargs)  # past TileLang's cache
    request.compiling = True
    try:
        _permit(request)
        wrapped(*args, **kwargs)
    except BaseException as error:
        _settle(request, None, error)
        raise
    _settle(request, instance)
    return None


def _looked_for(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    if os.environ.get(roots.VARIABLE):
        try:
            below.fetch(instance._get_cache_path(args[0] if args else kwargs["key"]))
        except Exception as error:
            trouble(error)
    return wrapped(*args, **kwargs)


def _undrifted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    """The arguments with a list of output indices of the callee's own: it makes negative ones
    positive in place, and the list is the decorator's.
    """
    if len(args) > 1 and isinstance(args[1], list):
        args = (args[0], list(args[1]), *args[2:])
    elif isinstance(kwargs.get("out_idx"), list):
        kwargs = {**kwargs, "out_idx": list(kwargs["out_idx"])}
    return args, kwargs


def _begun(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Request:
    function = args[0] if args else kwargs.get("func")
    came = getattr(function, "_tlcache_origin", None)
    request = _Request(function)
    try:
        if came is not None:
            request.origin = came[0]
            request.started -= came[1]
        elif function is not None:
            given = {
                name: kwargs[name]
                for name in ("out_idx", "pass_configs", "compile_flags")
                if kwargs.get(name) is not None
            }
            if len(args) > 1 and args[1] is not None:
                given["out_idx"] = args[1]
            request.origin = origin.of_function(getattr(function, "orig_func", None), given)
    except Exception as error:
        trouble(error)
    return request


def _permit(request: _Request) -> None:
    """Let a compile begin, or not.

    Raises:
        MissError: Compiling was ruled out.
    """
    forbidden = process.forbids()
    if forbidden is None and not process.ready and process.on_compile() == "allow":
        return
    title = request.origin.title
    params = ", ".join(_params(request.function))
    if forbidden is not None:
        raise MissError(
            f"the kernel {title} ({params}) is not in the cache {layout.default_root()}, "
            f"and {forbidden}",
            hint=_hint(),
        )
    _log.warning(
        "TileLang compiles the kernel %s (%s)%s; %s",
        title,
        params,
        " after this process was marked ready" if process.ready else "",
        _hint(),
    )


def _hint() -> str:
    return (
        "`tlcache run --record shapes.json -- COMMAND` records what the program meets, and "
        "`tlcache warm --shapes shapes.json` compiles it beforehand"
    )


def _launched(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """A tuner passes over candidates that fail, says nothing, and keeps the best of the others. One
    that was refused ends the tuning instead.
    """
    launched = wrapped(*args, **kwargs)
    refusals: list[MissError] = []
    try:
        if process.forbids() is not None:
            pool, futures = launched[:2]
            pool.shutdown()  # after the last candidate
            refusals = [
                error
                for future in futures
                if future.exception() is None
                for *_, error in future.result()
                if isinstance(error, MissError)
            ]
    except Exception as error:
        trouble(error)
    if refusals:
        raise refusals[0]
    return launched


def _grouped(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Several candidates of a tuner in one module, past TileLang's cache: each is a compile."""
    begun: list[_Request] = []

    def elaborated(elaborate: Callable[..., Any], **config: Any) -> Any:
        request = _Request(None)
        begun.append(request)
        function = elaborate(**config)
        request = begun[-1] = _begun((function,), {})
        request.origin = dataclasses.replace(request.origin, workload=None, **_PAST_THE_CACHE)
        request.compiling = True
        _permit(request)
        return function

    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    given["elaborate_func"] = functools.partial(elaborated, given["elaborate_func"])
    results = wrapped(**given)
    try:
        numbers = [number for number, _ in given["unit_items"]]
        requests = dict(zip(numbers, begun, strict=True))
        for number, _, kernel, error in results:
            _settle(requests[number], kernel, error)
    except Exception as error:
        trouble(error)
    return results


_PAST_THE_CACHE = {
    "reason": "TileLang's autotuner compiled it in a group, past the cache that `warm` fills",
    "remedy": "tune beforehand, and copy the directory `autotuner` of the cache along",
}


def _settle(request: _Request, kernel: Any, error: BaseException | None = None) -> None:
    """Count, note and record what became of a request."""
    try:
        _settled(request, kernel, error)
    except Exception as wrong:
        trouble(wrong)


def _settled(request: _Request, kernel: Any, error: BaseException | None) -> None:
    seconds = time.perf_counter() - request.started
    came = request.origin
    name, key = came.kernel, getattr(kernel, "_tilelang_cache_key", None)
    workload = came.workload
    if kernel is not None and workload is not None:
        target = targets.of_tvm(kernel.target.export())
        workload = recorder.met(workload, came.place, key, key_environment(target.name))
    elif kernel is not None:
        recorder.met_unreplayable(name, _params(request.function), key, came.reason, came.remedy)
    outcome: Outcome
    if isinstance(error, MissError):
        told = _told(error)
        events.log.note("failed", came.title, origin="foreign", workload=workload, reason=told)
        return  # a refusal is no outcome
    if error is not None:
        outcome = "failed"
    elif request.compiling:
        outcome = "compiled"
    elif request.loaded:
        outcome = "disk"
    else:
        remembered(name)
        return
    path = getattr(kernel, "_tilelang_cache_path", None)
    foreign(
        name,
        outcome,
        came.title,
        seconds,
        entry=os.path.relpath(path, layout.default_root()) if path is not None else None,
        workload=workload,
        reason=_told(error) if error is not None else None,
    )


def _told(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _params(function: Any) -> list[str]:
    """The parameters of a prim_func, like `A float16[128,128]`."""
    found = []
    for var in getattr(function, "params", ()):
        buffer = function.buffer_map.get(var)
        if buffer is None:
            found.append(f"{var.name} {var.dtype}")
        else:
            shape = ",".join(str(size) for size in buffer.shape)
            found.append(f"{buffer.name} {buffer.dtype}[{shape}]")
    return found


def _tuned(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    start = time.perf_counter()
    result = wrapped(*args, **kwargs)
    try:
        if result is not None:
            seconds = time.perf_counter() - start
            function = getattr(instance.fn, "orig_func", instance.fn)
            name = f"{function.__module__}:{function.__qualname__}"
            recorder.met_unreplayable(
                name,
                _params(getattr(result, "func", None)),
                None,
                "it came from the results of TileLang's autotuner, which `warm` does not make",
                "copy the directory `autotuner` of the cache along",
            )
            foreign(name, "disk", name.rpartition(":")[2], seconds)
    except Exception as error:
        trouble(error)
    return result
