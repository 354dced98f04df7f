"""One spec compiled by TileLang, and its record written. This module imports TileLang.

Invariant: a record is written only after the entry that it points at is on disk, complete and
hashed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from tlcache import operators, targets
from tlcache.closure import factory_digest
from tlcache.errors import CacheRootError, CompileError, FactoryError, TlcacheError
from tlcache.fingerprint import versions
from tlcache.runtime import ownership
from tlcache.runtime.foreign import accelerate
from tlcache.runtime.foreign.mode import Filed
from tlcache.spec import KernelSpec
from tlcache.store import calls, closures, layout, locks, record
from tlcache.store.answers import Warmed
from tlcache.store.record import Dynamic, Launch, Library, Param, Record
from tlcache.warm import replaying, toolchain
from tlcache.warm.outcome import Way

__all__ = ["Built", "build", "compiler_says"]

_log = logging.getLogger(__name__)
_LIBRARIES = {"tvm_ffi": "executable.so", "cython": "kernel_lib.so"}


@dataclass(frozen=True)
class Built:
    """What came of a compile.

    Attributes:
        kernel: TileLang's JITKernel.
        origin: `compiled`, or `disk` where TileLang found its own entry.
        seconds: What it took, elaboration included.
        record: The record that was written; None where the kernel cannot be restored without
            TileLang.
        fault: Why nothing could be written.
        way: How a process gets the kernel.
        reason: Why a program's own call does not restore it.
    """

    kernel: Any
    origin: str
    seconds: float
    record: Record | None
    fault: CacheRootError | None = None
    way: Way = "tilelang"
    reason: str | None = None


def build(
    spec: KernelSpec,
    root: str | os.PathLike[str],
    *,
    keep: bool = True,
    key: str | None = None,
    targeted: bool = False,
) -> Built:
    """Compile one spec with TileLang, into the root that TILELANG_CACHE_DIR names, and write its
    record.

    Args:
        spec: The kernel.
        root: The cache root. A record is written if it is the one that TileLang uses.
        keep: False compiles for this process alone, past TileLang's cache: TileLang itself cannot
            compile with a root that it cannot write.
        key: TileLang's key for the kernel, where a recording tells it.
        targeted: Whether TileLang's default target is the spec's already.

    Raises:
        ToolchainError: A compiler is missing.
        FactoryError: The factory cannot be imported, or does not yield a kernel for this target, or
            of that key.
        CompileError: TileLang, nvcc or the host compiler rejects the kernel.
    """
    if (fault := toolchain.missing(spec.target)) is not None:
        raise fault
    start = time.perf_counter()
    try:
        with nullcontext() if keep else _uncached(), ownership.own(), _filing(spec, keep) as filed:
            kernel = replaying.kernel(spec, key, targeted=targeted)
    except TlcacheError:
        raise
    except Exception as error:
        if (full := _disk_fault(error, root)) is not None:
            raise full from error
        raise CompileError(f"{spec} does not compile: {_reason(error)}") from error
    seconds = time.perf_counter() - start
    if (target := targets.of_tvm(kernel.target.export())) != spec.target:
        raise FactoryError(
            f"{spec.kernel} was asked for {spec.target} and compiles for {target}",
            hint="let the factory take a `target`, or leave the target of its decorator unset",
        )
    origin = "disk" if kernel.artifact is None else "compiled"
    if not keep:
        return Built(kernel, origin, seconds, None)
    with ownership.own():
        replaying.keep_drifted()
    try:
        toolchain.provenance()  # asks the compilers, the first time: not while others wait
        with locks.recording(root):
            made = _record(spec, kernel, seconds, root)
            if made is not None:
                record.write(root, made)
            warmed = None if filed is None else _warmed(kernel, filed, seconds, root)
            if warmed is not None:
                calls.write_warmed(os.fspath(root), spec.action_key(), warmed)
        if made is not None:
            closures.remember(os.fspath(root), spec.kernel)
    except CacheRootError as error:
        _log.warning("%s", error.message)
        return Built(kernel, origin, seconds, None, error)
    if filed is None:
        return Built(kernel, origin, seconds, made, way="record" if made else "tilelang")
    by_call = warmed is not None and warmed.call is not None
    return Built(
        kernel,
        origin,
        seconds,
        made,
        way="call" if by_call else "tilelang",
        reason=warmed.reason if warmed is not None else None,
    )


def _filing(spec: KernelSpec, keep: bool) -> AbstractContextManager[Filed | None]:
    """What is made of a program's own function is filed by its call, too: the program asks by that,
    not by a spec.
    """
    if operators.owns(spec.kernel) or not keep:
        return nullcontext()
    return accelerate.filing()


def _warmed(
    kernel: Any, filed: Filed, seconds: float, root: str | os.PathLike[str]
) -> Warmed | None:
    """What came of a kernel of a program's own; None where TileLang kept nothing of it."""
    path = getattr(kernel, "_tilelang_cache_path", None)
    name = _LIBRARIES.get(kernel.execution_backend, "manifest.json")
    if path is None or (entry := os.path.relpath(path, root)).startswith(os.pardir):
        return None
    call = filed.calls.get(os.path.basename(path))
    reason = None
    if call is None:
        reason = filed.refused[-1] if filed.refused else "`tilelang.compile` of a prim_func"
    try:
        library = record.library_at(path, name)
    except OSError:
        return None
    return Warmed(entry, library, call, reason, round(seconds, 3))


@contextmanager
def _uncached() -> Iterator[None]:
    """TileLang's cache switched off, for the whole process."""
    from tilelang import env

    with _switching:
        enabled = env.is_cache_enabled()
        env.disable_cache()
        try:
            yield
        finally:
            if enabled:
                env.enable_cache()


_switching = threading.Lock()


def _record(
    spec: KernelSpec, kernel: Any, seconds: float, root: str | os.PathLike[str]
) -> Record | None:
    launch = _launch(kernel)
    path = getattr(kernel, "_tilelang_cache_path", None)
    name = _LIBRARIES.get(kernel.execution_backend)
    if launch is None or path is None or name is None:
        return None
    entry = os.path.relpath(path, root)
    if entry.startswith(os.pardir):
        return None  # TileLang compiled into another root than this one
    try:
        with open(os.path.join(path, name), "rb") as file:
            data = file.read()
    except OSError as error:
        # TileLang logs a failed save and goes on.
        raise _why_unsaved(spec, error, root) from error
    return Record(
        action_key=spec.action_key(),
        spec=spec,
        entry=entry,
        library=Library(name, len(data), hashlib.sha256(data).hexdigest()),
        launch=launch,
        versions=versions(),
        toolkit=toolchain.provenance(),
        source_digest=factory_digest(spec.kernel),
        compile_seconds=round(seconds, 3),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _disk_fault(error: BaseException, root: str | os.PathLike[str]) -> CacheRootError | None:
    """The cache root's fault behind a failed compile: TileLang saves cubins in the middle of
    one.
    """
    while error is not None:
        if isinstance(error, OSError) and str(error.filename or "").startswith(os.fspath(root)):
            return layout.unwritable(root, error)
        following = error.__cause__ or error.__context__
        if following is None:
            break
        error = following
    return None


def _why_unsaved(spec: KernelSpec, error: OSError, root: str | os.PathLike[str]) -> CacheRootError:
    """Find out why TileLang kept no entry, by writing where it would have."""
    probe = os.path.join(root, f".tlcache-probe-{os.getpid()}")
    try:
        try:
            with open(probe, "wb") as file:
                file.write(b"\0" * 2**20)
                file.flush()
                os.fsync(file.fileno())
        finally:
            if os.path.exists(probe):
                os.unlink(probe)
    except OSError as reason:
        return layout.unwritable(root, reason)
    return CacheRootError(
        f"TileLang kept no entry for {spec} under {root}: {error.strerror}",
        hint="`tlcache warm --verbose` shows its own message; is TILELANG_DISABLE_CACHE set?",
    )


def _launch(kernel: Any) -> Launch | None:
    """How the kernel's library is called, or None where it cannot be called without TileLang."""
    from tvm import tirx

    adapter, function = kernel.adapter, kernel.prim_func
    outputs = tuple(int(index) % len(function.params) for index in adapter.result_idx or [])
    if kernel.execution_backend == "tvm_ffi" and kernel.target.kind.name == "cuda":
        abi, symbol = "tvm_ffi", "main"
        if outputs and not adapter._ffi_callee_allocated_output_abi:
            return None
    elif kernel.execution_backend == "cython" and kernel.target.kind.name == "c":
        abi, symbol = "c", "call"
    else:
        return None
    params: list[Param] = []
    dynamic: dict[str, Dynamic] = {}
    for index, var in enumerate(function.params):
        if var not in function.buffer_map:
            return None  # a scalar argument: TileLang's own launcher converts it
        buffer = function.buffer_map[var]
        shape: list[int | str] = []
        for axis, dim in enumerate(buffer.shape):
            if isinstance(dim, tirx.IntImm):
                shape.append(int(dim))
            elif isinstance(dim, tirx.Var):
                shape.append(str(dim.name))
                dynamic.setdefault(
                    str(dim.name), Dynamic(str(dim.name), str(dim.dtype), index, axis)
                )
            else:
                return None  # a dimension that is an expression
        params.append(Param(str(buffer.name), str(buffer.dtype), tuple(shape)))
    if any(not params[i].shape for i in outputs) or len(outputs) == len(params):
        return None
    if abi == "c" and any(
        d.param in outputs or d.dtype not in ("int32", "int64") for d in dynamic.values()
    ):
        return None
    return Launch(abi, symbol, tuple(params), outputs, tuple(dynamic.values()))


_COMPILER_SAYS = re.compile(r"\berror: \S.*")


def compiler_says(output: str) -> str | None:
    """The first error in a compiler's output, like `error: identifier "x" is undefined`."""
    match = _COMPILER_SAYS.search(output)
    return match[0][:300] if match else None


def _reason(error: BaseException) -> str:
    """One line of an error that may be pages of source and compiler output."""
    if (said := compiler_says(str(error))) is not None:
        return said
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
