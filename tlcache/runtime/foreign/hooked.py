"""What is done in place of TileLang's own functions; see `accelerate.py`.

This module imports TileLang.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from tlcache import switches
from tlcache.errors import RestoreError
from tlcache.runtime import ownership
from tlcache.runtime.foreign import answering, place
from tlcache.runtime.foreign.accelerate import RESTORE
from tlcache.runtime.foreign.call import LAZY, Call, asked, forget, front, lazily, own_indices
from tlcache.runtime.foreign.mode import is_filing, making
from tlcache.runtime.foreign.stream import Unseen
from tlcache.runtime.foreign.template import RestoredTemplate
from tlcache.runtime.foreign.trouble import refuse, trouble
from tlcache.store import calls
from tlcache.store.calls import Style

__all__ = ["CHECK", "compiled", "inferred", "templated"]

CHECK = "TLCACHE_CHECK"
"""The environment variable that has every restored kernel made the slow way as well (1)."""


def _checking() -> bool:
    return switches.said(CHECK) is True


# --- how a function is called ---


def inferred(
    original: Callable[..., Any], impl: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    came, style, bound = None, None, None
    if impl.mode == "auto" and hasattr(impl.func, "_argument_binder"):
        try:
            bound, met = asked(impl.func, args, kwargs)
            came = met.said
            style = LAZY if lazily(impl, met) else met.style()
        except Unseen:
            pass  # `compile` comes to it again, and counts it
        except Exception as error:
            trouble(error)
    if style is not None and not _checking() and not is_filing():
        return style.mode
    with making():
        mode = original(impl, *args, **kwargs)
    if came is not None and bound is not None:
        if style is not None and style.mode != mode:
            raise _differs(impl, "mode", style.mode, mode)
        template = impl.func.p1_cache.get(bound.p1_key)
        if template is not None:
            template._tlcache_front = came
        if style is None and mode == "lazy" and impl.func.tensor_args:
            _file_style(came, LAZY)
    return mode


def templated(
    original: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    came, style = None, None
    if function.mode == "eager" and not args:
        try:
            met = front(function, kwargs)
            came = met.said
            style = met.style()
        except Unseen:
            pass
        except Exception as error:
            trouble(error)
    if style is not None and style.matcher is not None and not _checking() and not is_filing():
        return RestoredTemplate(
            function, style, came, functools.partial(_made, original, function, kwargs)
        )
    with making():
        template = original(function, *args, **kwargs)
    if came is not None:
        template._tlcache_front = came
        found = _style_of(template)
        if style is None:
            _file_style(came, found)
        elif style.matcher is not None and set(style.matcher) != set(found.matcher or ()):
            raise _differs(function, "constants", style.matcher, found.matcher)
    return template


def _made(original: Callable[..., Any], function: Any, kwargs: Mapping[str, Any]) -> Any:
    with making(), ownership.own():
        return original(function, **kwargs)


def _style_of(template: Any) -> Style:
    buffers = {
        str(param.name): (str(buffer.dtype), len(buffer.shape))
        for param, buffer in template.prim_func.buffer_map.items()
    }
    matcher = tuple(
        (str(name), str(param), kind, axis) for param, kind, axis, name in template.matcher.values()
    )
    return Style("eager", matcher, buffers)


def _file_style(came: str, style: Style) -> None:
    roots = place.in_force()
    if roots is not None:
        place.filed(lambda: calls.write_style(roots.path, came, style))


# --- kernels ---


def compiled(
    original: Callable[..., Any], impl: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    start = time.perf_counter()
    call = None
    try:
        call = Call(impl, args, kwargs)
    except Unseen as unseen:
        refuse(unseen)
    except RestoreError:
        raise
    except Exception as error:
        trouble(error)
    finally:
        forget()
    if call is None:
        return _original(original, impl, args, kwargs)
    with answering.flight(call.key):
        if not is_filing():
            kernel = answering.restored(call, original, start)
            if kernel is not None:
                if _checking():
                    _check(call, original, kernel)
                return kernel
        kernel = _original(original, impl, args, kwargs)
        try:
            answering.keep(call, kernel, time.perf_counter() - start)
        except Unseen as unseen:
            refuse(unseen)
        except Exception as error:
            trouble(error)
    return kernel


def _original(
    original: Callable[..., Any], impl: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """TileLang's own compile. What it makes negative output indices positive in is a list of its
    own then: it keeps it for the kernel.
    """
    own_indices(impl)
    with making():
        return original(impl, *args, **kwargs)


def _check(call: Call, original: Callable[..., Any], kernel: Any) -> None:
    with ownership.own():
        made = _original(original, call.impl, call.args, call.kwargs)
    if made._tilelang_cache_key != kernel._tilelang_cache_key:
        raise _differs(call.impl, "kernel", kernel._tilelang_cache_key, made._tilelang_cache_key)


def _differs(what: Any, part: str, kept: object, made: object) -> RestoreError:
    function = getattr(getattr(what, "func", what), "orig_func", what)
    name = f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', '?')}"
    return RestoreError(
        f"{CHECK}: the {part} of {name} would be restored as {kept}, and TileLang makes {made}",
        hint=f"report it, and set {RESTORE}=0 meanwhile",
    )
