"""The hooks that restore kernels of TileLang's own `@tilelang.jit`, and file what was made of a
call.

Invariant: the program gets what it would get without them, sooner. What goes wrong in a hook is
logged once and leaves the call to TileLang. A launch passes no hook. While nobody patched the same
functions later, `stop` puts TileLang's own ones back, the very objects; otherwise the hooks stay in
between and do nothing.

Four functions are hooked. `JITImpl._infer_jit_mode` runs a function to see whether it returns a
kernel or launches one; `JITFunc._build_tir_template` runs an eager one to see what it takes from
its tensors; `JITImpl.compile` makes the kernel. And `mutate` rewrites a function's source, which is
put off (`deferring.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from types import FrameType
from typing import Any

from tlcache.errors import CacheRootError, RestoreError, UntrustedRootError
from tlcache.runtime import ownership
from tlcache.runtime.foreign import key as keys
from tlcache.runtime.foreign import text
from tlcache.runtime.foreign.reach import Finder, Unseen
from tlcache.runtime.foreign.text import Text, Use
from tlcache.store import calls, layout, locks, record
from tlcache.store.calls import Answer, Style
from tlcache.store.trust import Trust

__all__ = ["CHECK", "RESTORE", "Filed", "active", "call", "filing", "refusals", "start", "stop"]
__all__ += ["wanted"]

RESTORE = "TLCACHE_RESTORE"
"""The environment variable that rules restoring out (0)."""

CHECK = "TLCACHE_CHECK"
"""The environment variable that has every restored kernel made the slow way as well (1)."""

_log = logging.getLogger(__name__)
_LIBRARIES = {"tvm_ffi": "executable.so", "cython": "kernel_lib.so"}


class _State:
    def __init__(self) -> None:
        self.restoring = False
        self.patched: list[tuple[Any, str, Any, Any]] = []
        self.trusts: dict[str, Trust | None] = {}
        self.kernels: dict[tuple[str, str, str], Any] = {}
        self.flights: dict[str, threading.Lock] = {}
        self.refused: Counter[str] = Counter()
        self.told: set[str] = set()
        self.lock = threading.Lock()
        self.waiting = False
        self.call: Any = None


@dataclasses.dataclass
class Filed:
    """What came of the calls of a thread that files.

    Attributes:
        calls: The keys of the calls that are filed, by TileLang's key.
        refused: Why others are not.
    """

    calls: dict[str, str] = dataclasses.field(default_factory=dict)
    refused: list[str] = dataclasses.field(default_factory=list)


class _Thread(threading.local):
    making = False
    filing: Filed | None = None
    front: tuple[FrameType, Any, dict[str, Any], str] | None = None


_state = _State()
_thread = _Thread()


# --- switching ---


def wanted() -> bool:
    """Whether the environment lets kernels be restored."""
    said = os.environ.get(RESTORE, "").strip().lower()
    return said not in ("0", "false", "no", "off")


def start() -> None:
    """Restore kernels from here on; where TileLang is not imported yet, once it is."""
    _state.restoring = True
    _hook()


def stop() -> None:
    """Restore nothing any more. Kernels that were restored stay."""
    _state.restoring = False
    with _state.lock:
        left = []
        for owner, name, original, ours in reversed(_state.patched):
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)
            else:
                left.append((owner, name, original, ours))  # somebody's patch calls it
        _state.patched = left[::-1]


def active() -> bool:
    """Whether kernels are restored."""
    return _state.restoring


def refusals() -> dict[str, int]:
    """Why calls were left to TileLang, and how many."""
    return dict(_state.refused.most_common())


@contextmanager
def filing() -> Iterator[Filed]:
    """File what this thread makes meanwhile, though the resolver asked for it; restore nothing."""
    _hook()
    outer, _thread.filing = _thread.filing, Filed()
    try:
        yield _thread.filing
    finally:
        _thread.filing = outer


def _hook() -> None:
    if "tilelang.jit" in sys.modules and hasattr(sys.modules["tilelang.jit"], "JITImpl"):
        _patch()
    elif not _state.waiting:
        import wrapt

        _state.waiting = True
        wrapt.register_post_import_hook(lambda _: _patch_late(), "tilelang.jit")


def _patch_late() -> None:
    try:
        if _state.restoring:
            _patch()
    except Exception as error:
        _trouble(error)


def _patch() -> None:
    from tilelang.jit import JITImpl
    from tilelang.language.eager import builder

    # Here, where TileLang is imported anyway, rather than at the first kernel.
    from tlcache.runtime.foreign import deferring, kernel, telling, template  # noqa: F401

    with _state.lock:
        if _state.patched:
            return
        _state.call = JITImpl.__call__.__code__
        for owner, name, hook in (
            (JITImpl, "_infer_jit_mode", _inferred),
            (builder.JITFunc, "_build_tir_template", _templated),
            (JITImpl, "compile", _compiled),
        ):
            original = vars(owner)[name]
            ours = _wrapped(original, hook)
            setattr(owner, name, ours)
            _state.patched.append((owner, name, original, ours))
        mutate = builder.mutate

        @functools.wraps(mutate)
        def put_off(func: Any) -> Any:
            return deferring.deferred(func, mutate) if _state.restoring else mutate(func)

        builder.mutate = put_off
        _state.patched.append((builder, "mutate", mutate, put_off))


def _wrapped(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _thread.making or not (_thread.filing or (_state.restoring and not ownership.is_own())):
            return original(self, *args, **kwargs)
        return hook(original, self, args, kwargs)

    return wrapper


@contextmanager
def _making() -> Iterator[None]:
    """TileLang makes what it is asked for: nothing in it is restored."""
    outer, _thread.making = _thread.making, True
    _thread.front = None  # the program runs now
    try:
        yield
    finally:
        _thread.making = outer


def _checking() -> bool:
    return os.environ.get(CHECK, "").strip().lower() in ("1", "true", "yes", "on")


def _trouble(error: BaseException) -> None:
    """Say, once for each kind, that a hook went wrong; the program goes on."""
    said = f"{type(error).__name__}: {error}"
    if _thread.filing is not None:
        _thread.filing.refused.append(said)
    if said not in _state.told and len(_state.told) < 20:
        _state.told.add(said)
        _log.warning(
            "a kernel cannot be restored; TileLang makes it: %s",
            said,
            exc_info=_log.isEnabledFor(logging.DEBUG),
        )


def _refuse(unseen: Unseen) -> None:
    if _thread.filing is not None:
        _thread.filing.refused.append(unseen.reason)
    with _state.lock:
        _state.refused[unseen.reason] += 1


# --- where ---


class _Root:
    """A cache root, and who may have written what is in it."""

    def __init__(self, path: str, trust: Trust) -> None:
        self.path = path
        self.trust = trust


def _root() -> _Root | None:
    """The root in force, if it may be read; None where TileLang would not use it either."""
    from tilelang import env

    if layout.caching_disabled() or not env.is_cache_enabled():
        return None
    path = os.path.abspath(env.TILELANG_CACHE_DIR)
    if path not in _state.trusts:
        if not os.path.isdir(path):
            return None
        trust: Trust | None = Trust(path)
        try:
            assert trust is not None
            trust.check_root()
        except UntrustedRootError as error:
            _log.warning("%s", error)
            trust = None
        _state.trusts[path] = trust
    trust = _state.trusts[path]
    return None if trust is None else _Root(path, trust)


def _reading(root: _Root | None) -> Callable[[str], Text | None]:
    """How analyses of texts are had: from memory, else from the root, else anew; what is new is
    filed.
    """

    def read(source: str) -> Text | None:
        known = _texts.get(source, _texts)
        if known is not _texts:
            return known  # type: ignore[return-value]
        found: Text | None = None
        name = keys.text_key(source)
        if root is not None:
            found = _decoded(calls.read_text(root.path, name, root.trust))
        if found is None:
            found = text.read(source)
            if found is not None and root is not None:
                _filed(lambda: calls.write_text(root.path, name, found))
        _texts[source] = found
        return found

    return read


_texts: dict[str, Text | None] = {}


def _decoded(values: Any) -> Text | None:
    try:
        name, digest, uses = values
        return Text(name, digest, tuple(Use(h, tuple(a), k, c) for h, a, k, c in uses))
    except (TypeError, ValueError):
        return None


def _filed(write: Callable[[], None]) -> None:
    """Write a file, if the root can be written; that it cannot is told once."""
    try:
        write()
    except CacheRootError as error:
        if error.message not in _state.told:
            _state.told.add(error.message)
            _log.warning("what is made now is traced again at the next start: %s", error.message)


# --- how a function is called ---


def _front(function: Any, given: dict[str, Any], root: _Root | None) -> str:
    """The front of a call. Within one call of a JITImpl it is taken once, as long as nothing of the
    program's has run meanwhile.

    Raises:
        Unseen: Something decides about the kernel that cannot be seen.
    """
    frame = _calling()
    known = _thread.front
    if known is not None and frame is not None and known[0] is frame and known[1] is function:
        kept = known[2]
        if kept.keys() == given.keys() and all(kept[name] is given[name] for name in kept):
            return known[3]
    _thread.front = None
    found = keys.front(function, given, Finder(_reading(root)))
    if frame is not None:
        _thread.front = (frame, function, given, found)
    return found


def _calling() -> FrameType | None:
    """The frame of `JITImpl.__call__` that asks, if one does."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(12):
        if frame is None or frame.f_code is _state.call:
            return frame
        frame = frame.f_back
    return None


def _inferred(
    original: Callable[..., Any], impl: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    came, style, bound = None, None, None
    if impl.mode == "auto" and hasattr(impl.func, "_argument_binder"):
        try:
            root = _root()
            bound = impl.func._argument_binder.bind(args, kwargs)
            came = _front(impl.func, bound.compile_kwargs, root)
            style = calls.read_style(root.path, came, root.trust) if root is not None else None
        except Unseen:
            pass  # `compile` comes to it again, and counts it
        except Exception as error:
            _trouble(error)
    if style is not None and not _checking() and not _thread.filing:
        return style.mode
    with _making():
        mode = original(impl, *args, **kwargs)
    if came is not None and bound is not None:
        if style is not None and style.mode != mode:
            raise _differs(impl, "mode", style.mode, mode)
        template = impl.func.p1_cache.get(bound.p1_key)
        if template is not None:
            template._tlcache_front = came
        if style is None and mode == "lazy":
            _file_style(came, Style("lazy", None, {}))
    return mode


def _templated(
    original: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    came, style = None, None
    if function.mode == "eager" and not args:
        try:
            root = _root()
            came = _front(function, kwargs, root)
            style = calls.read_style(root.path, came, root.trust) if root is not None else None
        except Unseen:
            pass
        except Exception as error:
            _trouble(error)
    if style is not None and style.matcher is not None and not _checking() and not _thread.filing:
        from tlcache.runtime.foreign.template import RestoredTemplate

        return RestoredTemplate(
            function, style, came, functools.partial(_made, original, function, kwargs)
        )
    with _making():
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
    with _making(), ownership.own():
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
    root = _root()
    if root is not None:
        _filed(lambda: calls.write_style(root.path, came, style))


def _differs(what: Any, part: str, kept: object, made: object) -> RestoreError:
    function = getattr(getattr(what, "func", what), "orig_func", what)
    name = f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', '?')}"
    return RestoreError(
        f"{CHECK}: the {part} of {name} would be restored as {kept}, and TileLang makes {made}",
        hint=f"report it, and set {RESTORE}=0 meanwhile",
    )


# --- what a call means ---


class _Call:
    """A call of `JITImpl.compile`: its key, and what is needed to make its kernel later.

    Raises:
        Unseen: It cannot be restored.
    """

    def __init__(self, impl: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        function = impl.func
        if not hasattr(function, "_argument_binder"):
            raise Unseen("a prim_func, which is made already")
        self.root = _root()
        if self.root is None:
            raise Unseen("the cache is switched off, or others can write it")
        _own_indices(impl)
        self.impl = impl
        self.args, self.kwargs = args, kwargs
        if impl.mode == "auto":
            impl.initialize_jit_mode(*args, **kwargs)
        self.bound = function._argument_binder.bind(args, kwargs)
        self.where = keys.context(impl)
        self.front = _front(function, self.bound.compile_kwargs, self.root)
        template = function.p1_cache.get(self.bound.p1_key)
        self.fresh = template is None
        self.constants: dict[str, Any] = {}
        if impl.mode == "eager" and template is None:
            template = function._build_tir_template(**self.bound.compile_kwargs)
            function.p1_cache[self.bound.p1_key] = template
            self.fresh = False
        if template is not None:
            if getattr(template, "_tlcache_front", None) != self.front:
                raise Unseen("a call that was made before, of something that has changed since")
            if template.matcher is not None:
                values = template._parse_phase2_key(
                    **self.bound.tensor_args, **self.bound.compile_kwargs
                )
                names = [str(one[3]) for one in template.matcher.values()]
                self.constants = dict(zip(names, values, strict=True))
        self.key = keys.key(impl, self.front, impl.mode, self.constants, self.where)
        _thread.front = None

    def maker(self, original: Callable[..., Any]) -> Callable[[], Any]:
        """What makes the kernel, later, the slow way. It keeps no tensor alive: constants say what
        was taken from them.
        """
        impl, given = self.impl, {**self.bound.compile_kwargs, **self.constants}
        fields = ("execution_backend", "target", "target_host", "verbose", "mode")
        kept = {name: getattr(impl, name) for name in fields}
        kept["out_idx"] = list(impl.out_idx) if isinstance(impl.out_idx, list) else impl.out_idx
        kept["pass_configs"] = None if impl.pass_configs is None else dict(impl.pass_configs)
        flags = impl.compile_flags
        kept["compile_flags"] = list(flags) if isinstance(flags, list) else flags

        def make() -> Any:
            with _making(), ownership.own():
                return original(dataclasses.replace(impl, **kept), **given)

        return make


def call(impl: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    """A call of `JITImpl.compile`, for `why`: nothing is made of it.

    Raises:
        Unseen: It cannot be restored.
    """
    return _Call(impl, args, kwargs)


def _compiled(
    original: Callable[..., Any], impl: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    start = time.perf_counter()
    call = None
    try:
        call = _Call(impl, args, kwargs)
    except Unseen as unseen:
        _refuse(unseen)
    except RestoreError:
        raise
    except Exception as error:
        _trouble(error)
    if call is None:
        return _original(original, impl, args, kwargs)
    with _flight(call.key):
        if not _thread.filing:
            kernel = _restored(call, original, start)
            if kernel is not None:
                if _checking():
                    _check(call, original, kernel)
                return kernel
        kernel = _original(original, impl, args, kwargs)
        try:
            _keep(call, kernel, time.perf_counter() - start)
        except Unseen as unseen:
            _refuse(unseen)
        except Exception as error:
            _trouble(error)
    return kernel


def _original(
    original: Callable[..., Any], impl: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """TileLang's own compile. What it makes negative output indices positive in is a list of its
    own then: it keeps it for the kernel.
    """
    _own_indices(impl)
    with _making():
        return original(impl, *args, **kwargs)


def _own_indices(impl: Any) -> None:
    """Give a JITImpl a list of output indices that nobody has written in: TileLang would have
    another key for the next kernel.
    """
    indices = impl.out_idx
    if isinstance(indices, list):
        known = vars(impl).get("_tlcache_indices")
        declared = known[1] if known is not None and known[0] is indices else tuple(indices)
        fresh = list(declared)
        vars(impl)["_tlcache_indices"] = (fresh, declared)
        impl.out_idx = fresh


@contextmanager
def _flight(key: str) -> Iterator[None]:
    """One thread at a time for a key; another one finds what the first has made."""
    with _state.lock:
        lock = _state.flights.setdefault(key, threading.Lock())
    with lock:
        yield


def _check(call: _Call, original: Callable[..., Any], kernel: Any) -> None:
    with ownership.own():
        made = _original(original, call.impl, call.args, call.kwargs)
    if made._tilelang_cache_key != kernel._tilelang_cache_key:
        raise _differs(call.impl, "kernel", kernel._tilelang_cache_key, made._tilelang_cache_key)


def _restored(call: _Call, original: Callable[..., Any], start: float) -> Any:
    """The kernel of a call, from memory or from its file; None where TileLang has to make it."""
    root = call.root
    assert root is not None
    try:
        answer = calls.read_answer(root.path, call.key, root.trust)
        if answer is None:
            return None
        known = call.where.cache._memory_cache.get(answer.key)
        place = (root.path, answer.key, call.where.backend)
        known = known if known is not None else _state.kernels.get(place)
        if known is None:
            library = record.sound_library(root.path, answer, root.trust, use=True)
            if library is None:
                return None
            from tlcache.runtime.foreign.kernel import restored

            made = restored(answer, os.path.dirname(library), call.maker(original))
            kernel = _state.kernels.setdefault(place, made)
            calls.used(root.path, call.key)
        else:
            kernel = known
    except Exception as error:
        _trouble(error)
        return None
    from tlcache.runtime.foreign import telling

    telling.tell(call, answer, kernel, time.perf_counter() - start, known=known is not None)
    return kernel


def _keep(call: _Call, kernel: Any, seconds: float) -> None:
    """File what TileLang has made of a call."""
    root = call.root
    assert root is not None
    template = call.impl.func.p1_cache.get(call.bound.p1_key)
    if call.fresh and template is not None:
        template._tlcache_front = call.front
    answer = _answer(call, kernel, seconds)
    if _thread.filing is not None:
        _thread.filing.calls[answer.key] = call.key
    known = calls.read_answer(root.path, call.key, root.trust)
    if (
        known is not None
        and known._replace(created=answer.created, compile_seconds=answer.compile_seconds) == answer
    ):
        return

    def write() -> None:
        with locks.recording(root.path):
            calls.write_answer(root.path, call.key, answer)

    _filed(write)


def _answer(call: _Call, kernel: Any, seconds: float) -> Answer:
    from tlcache.fingerprint import versions
    from tlcache.runtime.foreign import explaining, telling

    path = getattr(kernel, "_tilelang_cache_path", None)
    root = call.root
    assert root is not None
    if path is None or os.path.relpath(path, root.path).startswith(os.pardir):
        raise Unseen("a kernel that TileLang did not keep")
    name = _LIBRARIES[kernel.execution_backend]
    try:
        library = record.library_at(path, name)
    except OSError:
        raise Unseen("a kernel that TileLang did not keep") from None
    adapter = kernel.adapter
    outputs = tuple(int(index) % len(adapter.params) for index in adapter.result_idx or ())
    callee = bool(getattr(adapter, "_ffi_callee_allocated_output_abi", False))
    signature = ""
    if kernel.execution_backend == "cython":
        signature = _signature(kernel.prim_func)
    elif outputs and not callee:
        raise Unseen("a kernel whose outputs its launcher allocates")
    origin = telling.origin_of(call)
    flags = kernel.compile_flags
    return Answer(
        kernel=origin.kernel,
        title=origin.title,
        entry=os.path.relpath(path, root.path),
        library=library,
        backend=kernel.execution_backend,
        target=call.where.target,
        inputs=len(adapter.params) - len(outputs),
        outputs=outputs,
        callee=callee,
        signature=signature,
        pass_configs=dict(kernel.pass_configs or {}) if signature else {},
        compile_flags=None if flags is None else tuple(map(str, flags)),
        compile_seconds=round(seconds, 3),
        versions=versions(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        made_of=explaining.made_of(call),
    )


def _signature(function: Any) -> str:
    """A prim_func without what it does, as JSON."""
    import tvm

    bare = tvm.tirx.PrimFunc(
        function.params,
        tvm.tirx.Evaluate(0),
        function.ret_type,
        function.buffer_map,
        attrs=function.attrs,
    )
    return str(tvm.ir.save_json(bare))


def _forked() -> None:
    """Locks that other threads of the parent held are held for ever in a fork."""
    _state.lock = threading.Lock()
    _state.flights = {}


os.register_at_fork(after_in_child=_forked)
