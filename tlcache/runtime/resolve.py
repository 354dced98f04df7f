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
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from tlcache.errors import CacheRootError, CaptureError, MissError, RuntimeLibraryError
from tlcache.runtime import events, garbage
from tlcache.runtime.counters import Counters, Ledger, Outcome
from tlcache.runtime.launcher import Launcher, load
from tlcache.runtime.process import freeze, mark_ready
from tlcache.runtime.process import process as _process
from tlcache.spec import KernelSpec
from tlcache.store import closures, layout, record, roots, schedules
from tlcache.store.trust import Trust

if TYPE_CHECKING:
    from tlcache.operators import Operator
    from tlcache.warm.compiling import Built

__all__ = ["Resolver", "capturing", "counters", "foreign", "freeze", "ledgers", "lookup"]
__all__ += ["mark_ready", "on_new", "remembered", "resolve", "resolvers", "tuned"]

_log = logging.getLogger(__name__)
OnMiss = Literal["compile", "error"]
on_new: list[Callable[[], None]] = []
"""Called when a resolver has got a launcher for another spec."""


class Resolver:
    """Resolves specs against one cache root, or one over others that are only read.

    Args:
        root: The cache root. TileLang compiles into the root that its environment variable names,
            so another one than `layout.cache_root()` can be read from, and not compiled into.
        below: Roots that are looked into for what that one does not have, in their order.
    """

    def __init__(
        self, root: str | os.PathLike[str], below: Iterable[str | os.PathLike[str]] = ()
    ) -> None:
        self.root = os.path.abspath(root)
        self.roots = (self.root, *map(os.path.abspath, below))
        self.ledger = Ledger()
        self.counters = self.ledger.total
        self._memory: dict[KernelSpec, Launcher] = {}
        self._lock = threading.Lock()
        self._flights: dict[KernelSpec, threading.Lock] = {}
        self._trusts: dict[str, Trust] = {}
        self._recalled: set[str] = set()
        self._refused: set[KernelSpec] = set()
        self._schedules = False

    def resolve(self, spec: KernelSpec, on_miss: OnMiss = "compile") -> Launcher:
        """The launcher for a spec.

        Args:
            spec: The kernel.
            on_miss: What to do when it is neither in memory nor recorded: `compile`, or `error`.

        Raises:
            MissError: It is a miss, and `on_miss` is `error`, `freeze()` was called, or
                TLCACHE_ON_COMPILE rules compiles out.
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
            forbidden = _process.forbids()
            if on_miss == "error" or forbidden is not None:
                raise self._refusal(spec, forbidden or "compiling was ruled out")
            if capturing():
                raise CaptureError(
                    f"{spec} is not compiled yet, and a CUDA graph is being captured",
                    hint="call it once before the capture, or `op.warmup(rows=[…])`; "
                    + _warm_hint(spec),
                )
            start = time.perf_counter()
            try:
                return self._keep(self._compile(spec))
            except BaseException as error:
                seconds = time.perf_counter() - start
                self._note(spec, "failed", seconds, reason=_told(error))
                raise

    def _refusal(self, spec: KernelSpec, why: str) -> MissError:
        """The error of a miss that may not compile. It is no outcome to be counted, and an event
        the first time only, since a program may ask for it at each of its requests.
        """
        if spec not in self._refused:
            self._refused.add(spec)
            events.log.note("failed", spec.title, spec=spec, reason=f"MissError: {why}")
        return MissError(
            f"{spec} is not in the cache {os.pathsep.join(self.roots)}, and {why}",
            hint=_warm_hint(spec),
        )

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
            if found is None and (places := self._readable()):
                found = self._restore(spec, places)
                if found is not None:
                    self._keep(found)
            return found

    def tuned(self, operator: Operator, spec: KernelSpec) -> KernelSpec:
        """The spec with the schedule that a tuner found best for it, else as it is.

        Raises:
            UntrustedRootError: Somebody else can write the cache root.
        """
        places = self._readable()
        if not places or not self._has_schedules():
            return spec
        told = (schedules.find(place, spec, self._trusts[place]) for place in places)
        found = next(filter(None, told), None)
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

    def specs(self) -> list[KernelSpec]:
        """The specs that it has launchers for."""
        return list(self._memory)

    def _has_schedules(self) -> bool:
        if not self._schedules:
            self._schedules = any(
                os.path.isdir(os.path.join(root, "tlcache", "schedules")) for root in self.roots
            )
        return self._schedules

    def _remembered(self, spec: KernelSpec) -> Launcher | None:
        found = self._memory.get(spec)
        if found is not None:
            self.ledger.remembered(spec.kernel)
        return found

    def _note(
        self,
        spec: KernelSpec,
        outcome: Outcome,
        seconds: float,
        *,
        saved: float = 0.0,
        entry: str | None = None,
        reason: str | None = None,
    ) -> None:
        """Count an outcome, and note it as an event and as a kernel that is in memory."""
        self.ledger.add(spec.kernel, outcome, seconds, saved=saved, after_ready=_process.ready)
        if outcome != "failed":
            self.ledger.hold(spec.title, outcome, seconds, spec=spec, entry=entry)
        events.log.note(outcome, spec.title, seconds=seconds, spec=spec, reason=reason)

    def _keep(self, launcher: Launcher) -> Launcher:
        self._memory[launcher.spec] = launcher
        for tell in on_new:
            tell()
        return launcher

    def _flight(self, spec: KernelSpec) -> threading.Lock:
        with self._lock:
            return self._flights.setdefault(spec, threading.Lock())

    def _readable(self) -> tuple[str, ...]:
        """The roots that records are to be read from; each is checked before the first one."""
        if layout.caching_disabled():
            return ()
        if len(self._trusts) < len(self.roots):
            for root in self.roots:
                if root not in self._trusts and os.path.isdir(root):
                    trust = Trust(root)
                    trust.check_root()
                    self._trusts[root] = trust
        return tuple(root for root in self.roots if root in self._trusts)

    def _restore(self, spec: KernelSpec, places: Iterable[str]) -> Launcher | None:
        start = time.perf_counter()
        if spec.kernel not in self._recalled:
            for root in places:
                closures.recall(root, spec.kernel, self._trusts[root])
            self._recalled.add(spec.kernel)
        key = spec.action_key()
        for root in places:
            found = record.read(root, key, self._trusts[root], spec)
            if found is None:
                continue
            path = record.sound_library(root, found, self._trusts[root], use=True)
            call = _loaded(path, found) if path is not None else None
            if call is None:
                continue
            if root == self.root:
                record.used(root, key)
            seconds = time.perf_counter() - start
            self._note(spec, "restored", seconds, saved=found.compile_seconds, entry=found.entry)
            return Launcher(spec, "restored", call)
        return None

    def _compile(self, spec: KernelSpec) -> Launcher:
        from tlcache.store import locks

        try:
            with locks.compiling(self.root, spec.action_key()):
                # Whoever held the lock before us has probably made the record.
                return self._restore(spec, self._readable()) or self._build(spec)
        except CacheRootError as error:
            _log.warning("%s; compiling %s for this process alone", error.message, spec)
            return self._build(spec, keep=False)

    def _build(self, spec: KernelSpec, *, keep: bool = True) -> Launcher:
        from tlcache.runtime import agent

        with garbage.spared(freeze=agent.running() is not None):
            from tlcache.warm import compiling
        start = time.perf_counter()
        built = compiling.build(spec, self.root, keep=keep)
        launcher = self._launcher(spec, built)
        seconds = time.perf_counter() - start
        if _process.ready or _process.on_compile() == "warn":
            when = " after this process was marked ready" if _process.ready else ""
            _log.warning("%s was compiled in %.1f s%s; %s", spec, seconds, when, _warm_hint(spec))
        entry = None if built.record is None else built.record.entry
        outcome: Outcome = "compiled" if built.origin == "compiled" else "disk"
        self._note(spec, outcome, seconds, entry=entry)
        return launcher

    def _launcher(self, spec: KernelSpec, built: Built) -> Launcher:
        """What was built, by the way that later processes take; by TileLang's own where there is
        none.
        """
        if built.record is not None:
            trust = self._trusts.get(self.root) or Trust(self.root)
            path = record.sound_library(self.root, built.record, trust, use=True)
            call = _loaded(path, built.record) if path is not None else None
            if call is not None:
                return Launcher(spec, built.origin, call)
        return Launcher(spec, built.origin, built.kernel.torch_function)


def _loaded(path: str, filed: record.Record) -> Callable[..., Any] | None:
    """A library's calling form, or None (and a warning) where this host cannot load it."""
    try:
        return load(path, filed.launch)
    except RuntimeLibraryError as error:
        _log.warning("%s; taken for a miss", error.message)
        return None


def _told(error: BaseException) -> str:
    message = getattr(error, "message", None) or str(error)
    return f"{type(error).__name__}: {message}"[:300]


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


_resolvers: dict[str, Resolver] = {}
_resolvers_lock = threading.Lock()


def _current() -> Resolver:
    """The resolver of the cache roots that are in force now."""
    named = (
        os.environ.get(roots.VARIABLE)
        or os.environ.get("TILELANG_CACHE_DIR")
        or layout.default_root()
    )
    found = _resolvers.get(named)
    if found is None:
        with _resolvers_lock:
            roots.adopt()
            if not os.environ.get("TILELANG_CACHE_DIR") and named == layout.configured_root():
                os.environ["TILELANG_CACHE_DIR"] = named  # TileLang reads no tlcache.toml
            first, *below = roots.named() or [named]
            found = _resolvers.setdefault(named, Resolver(first, below))
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


def ledgers() -> list[Ledger]:
    """The ledger of each cache root that was in force in this process."""
    return [resolver.ledger for resolver in list(_resolvers.values())]


def foreign(
    kernel: str,
    outcome: Outcome,
    title: str,
    seconds: float,
    *,
    entry: str | None = None,
    workload: Mapping[str, Any] | None = None,
    reason: str | None = None,
    saved: float = 0.0,
) -> None:
    """Count a kernel that a program had from TileLang itself, and note it as an event.

    Args:
        kernel: What it is counted under: its factory's import path, where it has one.
        outcome: What became of it.
        title: The kernel for people.
        seconds: How long it took.
        entry: Its TileLang entry, relative to the cache root.
        workload: The entry of a shapes.json that would have warmed it.
        reason: Why it failed.
        saved: For one that was restored, what its compile took.
    """
    ledger = _current().ledger
    ledger.add(kernel, outcome, seconds, saved=saved, after_ready=_process.ready)
    if outcome != "failed":
        ledger.hold(title, outcome, seconds, origin="foreign", entry=entry)
    events.log.note(
        outcome, title, seconds=seconds, origin="foreign", workload=workload, reason=reason
    )


def remembered(kernel: str) -> None:
    """Count a kernel that TileLang had in memory for a program; see `foreign`."""
    _current().ledger.remembered(kernel)


def resolvers() -> list[Resolver]:
    """The resolvers of this process, one to a cache root that was in force."""
    return list(_resolvers.values())


def tuned(operator: Operator, spec: KernelSpec) -> KernelSpec:
    """`Resolver.tuned` on the cache root that is in force."""
    return _current().tuned(operator, spec)
