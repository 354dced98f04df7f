"""A launcher for a spec: from process memory, else from a record, else by compiling.

Invariant: a spec is loaded or compiled at most once at a time, in this process (a lock for each
spec) and, for compiles, on this cache root (a file lock). A library is loaded only if it is what
its record says and nobody else could have written it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from tlcache.errors import CacheRootError, CaptureError, MissError, RuntimeLibraryError
from tlcache.runtime.counters import Counters
from tlcache.runtime.launcher import Launcher, load
from tlcache.spec import KernelSpec
from tlcache.store import closures, layout, record, schedules
from tlcache.store.trust import Trust

if TYPE_CHECKING:
    from tlcache.operators import Operator
    from tlcache.warm.compiling import Built

__all__ = ["Resolver", "capturing", "counters", "freeze", "lookup", "mark_ready", "resolve"]
__all__ += ["tuned"]

_log = logging.getLogger(__name__)
OnMiss = Literal["compile", "error"]


class Resolver:
    """Resolves specs against one cache root.

    Args:
        root: The cache root. TileLang compiles into the root that its environment variable names,
            so another one than `layout.cache_root()` can be read from, and not compiled into.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(root)
        self.counters = Counters()
        self._memory: dict[KernelSpec, Launcher] = {}
        self._lock = threading.Lock()
        self._flights: dict[KernelSpec, threading.Lock] = {}
        self._trust: Trust | None = None
        self._recalled: set[str] = set()
        self._schedules = False

    def resolve(self, spec: KernelSpec, on_miss: OnMiss = "compile") -> Launcher:
        """The launcher for a spec.

        Args:
            spec: The kernel.
            on_miss: What to do when it is neither in memory nor recorded: `compile`, or `error`.

        Raises:
            MissError: It is a miss, and `on_miss` is `error` or `freeze()` was called.
            CaptureError: It is a miss while a CUDA graph is captured.
            UntrustedRootError: Somebody else can write the cache root.
            CompileError, ToolchainError, FactoryError: The compile failed.
        """
        found = self.lookup(spec)
        if found is not None:
            return found
        with self._flight(spec):
            found = self._remembered(spec)
            if found is not None:
                return found
            if on_miss == "error" or _process.frozen:
                raise self._miss(spec)
            if capturing():
                raise CaptureError(
                    f"{spec} is not compiled yet, and a CUDA graph is being captured",
                    hint="call it once before the capture, or `op.warmup(rows=[…])`; "
                    + _warm_hint(spec),
                )
            try:
                return self._keep(self._compile(spec))
            except BaseException:
                with self._lock:
                    self.counters.failed += 1
                raise

    def lookup(self, spec: KernelSpec) -> Launcher | None:
        """The launcher for a spec from memory or from its record; None where it would be compiled.

        Raises:
            UntrustedRootError: Somebody else can write the cache root.
        """
        found = self._remembered(spec)
        if found is not None:
            return found
        with self._flight(spec):
            found = self._remembered(spec)
            if found is None and self._readable():
                found = self._restore(spec)
                if found is not None:
                    self._keep(found)
            return found

    def tuned(self, operator: Operator, spec: KernelSpec) -> KernelSpec:
        """The spec with the schedule that a tuner found best for it, else as it is.

        Raises:
            UntrustedRootError: Somebody else can write the cache root.
        """
        if not self._readable() or not self._has_schedules():
            return spec
        found = schedules.find(self.root, spec, self._trust)
        if found is None:
            return spec
        if operator.accepts(found.spec):
            return found.spec
        _log.warning(
            "the tuned schedule of %s (%s) does not fit the kernel any more; taking the default",
            spec.title,
            found.spec.schedule_text,
        )
        return spec

    def _has_schedules(self) -> bool:
        if not self._schedules:
            self._schedules = os.path.isdir(os.path.join(self.root, "tlcache", "schedules"))
        return self._schedules

    def _remembered(self, spec: KernelSpec) -> Launcher | None:
        found = self._memory.get(spec)
        if found is not None:
            with self._lock:
                self.counters.memory += 1
        return found

    def _keep(self, launcher: Launcher) -> Launcher:
        self._memory[launcher.spec] = launcher
        return launcher

    def _flight(self, spec: KernelSpec) -> threading.Lock:
        with self._lock:
            return self._flights.setdefault(spec, threading.Lock())

    def _readable(self) -> bool:
        """Whether records are to be read; checks the root before the first one."""
        if layout.caching_disabled():
            return False
        if self._trust is None:
            if not os.path.isdir(self.root):
                return False
            trust = Trust(self.root)
            trust.check_root()
            self._trust = trust
        return True

    def _restore(self, spec: KernelSpec) -> Launcher | None:
        start = time.perf_counter()
        assert self._trust is not None
        if spec.kernel not in self._recalled:
            closures.recall(self.root, spec.kernel, self._trust)
            self._recalled.add(spec.kernel)
        key = spec.action_key()
        found = record.read(self.root, key, self._trust, spec)
        if found is None:
            return None
        path = record.sound_library(self.root, found, self._trust, use=True)
        if path is None:
            return None
        call = _loaded(path, found)
        if call is None:
            return None
        record.used(self.root, key)
        launcher = Launcher(spec, "restored", call)
        with self._lock:
            self.counters.restored += 1
            self.counters.restore_seconds += time.perf_counter() - start
            self.counters.saved_seconds += found.compile_seconds
        return launcher

    def _compile(self, spec: KernelSpec) -> Launcher:
        from tlcache.store import locks

        try:
            with locks.compiling(self.root, spec.action_key()):
                # Whoever held the lock before us has probably made the record.
                return (self._restore(spec) if self._readable() else None) or self._build(spec)
        except CacheRootError as error:
            _log.warning("%s; compiling %s for this process alone", error.message, spec)
            return self._build(spec, keep=False)

    def _build(self, spec: KernelSpec, *, keep: bool = True) -> Launcher:
        from tlcache.warm import compiling

        start = time.perf_counter()
        built = compiling.build(spec, self.root, keep=keep)
        launcher = self._launcher(spec, built)
        seconds = time.perf_counter() - start
        if _process.ready:
            _log.warning(
                "%s was compiled in %.1f s after this process was marked ready; %s",
                spec,
                seconds,
                _warm_hint(spec),
            )
        with self._lock:
            self.counters.compile_seconds += seconds
            self.counters.after_ready += _process.ready
            if built.origin == "compiled":
                self.counters.compiled += 1
            else:
                self.counters.disk += 1
        return launcher

    def _launcher(self, spec: KernelSpec, built: Built) -> Launcher:
        """What was built, by the way that later processes take; by TileLang's own where there is
        none.
        """
        if built.record is not None:
            trust = self._trust or Trust(self.root)
            path = record.sound_library(self.root, built.record, trust, use=True)
            call = _loaded(path, built.record) if path is not None else None
            if call is not None:
                return Launcher(spec, built.origin, call)
        return Launcher(spec, built.origin, built.kernel.torch_function)

    def _miss(self, spec: KernelSpec) -> MissError:
        why = "resolving is frozen" if _process.frozen else "compiling was ruled out"
        return MissError(
            f"{spec} is not in the cache {self.root}, and {why}", hint=_warm_hint(spec)
        )


def _loaded(path: str, filed: record.Record) -> Callable[..., Any] | None:
    """A library's calling form, or None (and a warning) where this host cannot load it."""
    try:
        return load(path, filed.launch)
    except RuntimeLibraryError as error:
        _log.warning("%s; taken for a miss", error.message)
        return None


def _warm_hint(spec: KernelSpec) -> str:
    return (
        "put the workload into a shapes.json and run "
        f"`tlcache warm --shapes shapes.json --target {spec.target}` beforehand"
    )


def capturing() -> bool:
    """Whether torch is capturing a CUDA graph on the current stream. A CPU-only torch raises at the
    asking.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing())


class _Process:
    """What was said about this process as a whole."""

    frozen = False
    ready = False


_process = _Process()
_resolvers: dict[str, Resolver] = {}
_resolvers_lock = threading.Lock()


def _current() -> Resolver:
    """The resolver of the cache root that is in force now."""
    root = layout.default_root()
    found = _resolvers.get(root)
    if found is None:
        with _resolvers_lock:
            if not os.environ.get("TILELANG_CACHE_DIR") and root == layout.configured_root():
                os.environ["TILELANG_CACHE_DIR"] = root  # TileLang reads no tlcache.toml
            found = _resolvers.setdefault(root, Resolver(root))
    return found


def resolve(spec: KernelSpec, on_miss: OnMiss = "compile") -> Launcher:
    """`Resolver.resolve` on the cache root that is in force."""
    return _current().resolve(spec, on_miss)


def lookup(spec: KernelSpec) -> Launcher | None:
    """`Resolver.lookup` on the cache root that is in force."""
    return _current().lookup(spec)


def counters() -> Counters:
    """The counters of the resolver in force; they go on counting."""
    return _current().counters


def tuned(operator: Operator, spec: KernelSpec) -> KernelSpec:
    """`Resolver.tuned` on the cache root that is in force."""
    return _current().tuned(operator, spec)


def freeze(frozen: bool = True) -> None:
    """From here on a miss anywhere is an error: nothing compiles in this process any more.

    Args:
        frozen: False lets it compile again.
    """
    _process.frozen = frozen


def mark_ready(ready: bool = True) -> None:
    """Say that this process serves from here on: a compile is now an incident, which is logged as a
    warning and counted in `counters().after_ready`.

    Args:
        ready: False takes it back.
    """
    _process.ready = ready
