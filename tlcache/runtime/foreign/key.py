"""The key of a call: everything that decides which kernel TileLang makes of it, without making it.

There are two. The *front* of a call is the function, all that it reaches, and the arguments that
are not tensors: it decides how TileLang treats the call at all. The *key* adds the constants that
an eager function takes from its tensors, the target, and how it is compiled.

Invariant: two calls have one key only if TileLang would have one key for what it makes of them. It
is computed before anything is made, of what is then.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from tlcache import fingerprint
from tlcache.runtime.foreign import text
from tlcache.runtime.foreign.reach import Finder
from tlcache.runtime.foreign.stream import Unseen
from tlcache.store import calls

__all__ = ["Context", "Surroundings", "context", "environment", "front", "key", "surroundings"]


class Surroundings(NamedTuple):
    """What is around a call.

    Attributes:
        environment: The environment variables that may change a kernel.
        number: How often any variable was seen to have changed.
        ambient: The target that the program has put around it.
    """

    environment: str
    number: int
    ambient: str


def surroundings() -> Surroundings:
    """What is around a call that is made now."""
    from tvm.target import Target

    said = _environment()
    return Surroundings(said, _known["number"], str(Target.current(allow_none=True)))


def front(
    function: Any, given: Mapping[str, Any], finder: Finder, surroundings: Surroundings
) -> str:
    """The key of how a function is to be called.

    Args:
        function: A JITFunc of TileLang's.
        given: The arguments that are not tensors, by name.
        finder: A new one.
        surroundings: What is around the call.

    Raises:
        Unseen: Something decides about the kernel that cannot be seen.
    """
    finder.say("front", _facts(), surroundings.environment, surroundings.ambient)
    _no_callbacks()
    finder.jit_function(function)
    finder.say("arguments", str(len(given)))
    for name, value in given.items():
        finder.say(name)
        finder.value(value)
    return finder.digest()


class Context:
    """How a JITImpl's kernels are compiled, as TileLang resolves it now.

    Attributes:
        cache: TileLang's cache for the execution backend.
        backend: The execution backend.
        target: The target with its host, as TVM says it.
        host: The host's target.
    """

    def __init__(self, impl: Any) -> None:
        from tilelang.cache import _resolve_cache_dispatch

        self.cache, resolved, _ = _resolve_cache_dispatch(
            impl.target, impl.target_host, impl.execution_backend, False
        )
        self.backend: str = resolved.execution_backend.name
        self.target = str(resolved.target)
        self.host = str(resolved.target_host)


_contexts: dict[tuple[str, ...], Context] = {}


def _resolved(impl: Any, surroundings: Surroundings) -> Context:
    """The context of a JITImpl; from memory where nothing has changed that it depends on."""
    from tilelang import env

    target = impl.target if impl.target is not None else env.get_default_target()
    backend = impl.execution_backend or env.get_default_execution_backend()
    basis = _basis(target, surroundings)
    if basis is None:
        return Context(impl)
    said = (repr(target), repr(impl.target_host), repr(backend), *basis)
    found = _contexts.get(said)
    if found is None:
        found = _contexts[said] = Context(impl)
    return found


def _basis(target: Any, surroundings: Surroundings) -> tuple[str, ...] | None:
    """What TileLang resolves a target by, besides the target; None where that is not known.

    One that is spelled out rests on nothing. For `auto` and `cuda` it asks for the target around
    the call, the toolkit, by environment variables, and the current GPU, which has one architecture
    as long as the process lives, once CUDA is in use.
    """
    if target == "c" or (isinstance(target, dict) and "arch" in target):
        return ()
    torch = sys.modules["torch"]
    if target not in ("auto", "cuda") or not torch.cuda.is_initialized():
        return None
    from tilelang.backend import target as targets

    detectors = getattr(targets, "_TARGET_DETECTORS", None)
    if detectors is None:
        return None
    device = torch.cuda.current_device()
    return (surroundings.ambient, str(device), str(surroundings.number), *detectors)


def context(impl: Any, surroundings: Surroundings) -> Context:
    """The context of a JITImpl.

    Args:
        impl: The JITImpl.
        surroundings: What is around the call.

    Raises:
        Unseen: Its kernels cannot be restored.
    """
    if impl.debug_root_path:
        raise Unseen("debug_root_path asks for the kernel's source")
    found = _resolved(impl, surroundings)
    if found.backend not in ("tvm_ffi", "cython"):
        raise Unseen(f"the backend {found.backend}, whose kernels cannot be restored")
    return found


def key(impl: Any, came: str, mode: str, constants: Mapping[str, Any], where: Context) -> str:
    """The key of the kernel that a call means.

    Args:
        impl: The JITImpl.
        came: The front of the call.
        mode: `lazy` or `eager`.
        constants: What an eager function takes from its tensors.
        where: The context of the JITImpl.

    Raises:
        Unseen: Something decides about the kernel that cannot be seen.
    """
    finder = Finder()
    finder.say("kernel", came, mode, where.backend, where.target, where.host, repr(impl.target))
    finder.value(list(impl.out_idx) if isinstance(impl.out_idx, (list, tuple)) else impl.out_idx)
    finder.value(
        None
        if impl.pass_configs is None
        else {_name(one): impl.pass_configs[one] for one in sorted(impl.pass_configs, key=_name)}
    )
    flags = impl.compile_flags
    finder.value(list(flags) if isinstance(flags, (list, tuple)) else flags)
    for name in sorted(constants):
        finder.say(name)
        finder.value(constants[name])
    return finder.digest()


def _name(config: Any) -> str:
    return str(getattr(config, "value", config))


@functools.cache
def _facts() -> str:
    """What holds for the whole process."""
    return "\n".join(
        (
            f"calls {calls.SCHEMA} texts {text.VERSION}",
            fingerprint.facts_text(fingerprint.versions(), {}),
            f"python {sys.implementation.cache_tag} optimize {sys.flags.optimize}",
        )
    )


# Variables of these families count, other than those that are known to change no kernel.
_FAMILIES = ("TILELANG_", "TL_", "TVM_", "NVCC_", "CUTLASS_", "CUTE_")
_ALSO = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CUDAFLAGS", "CPATH", "CPLUS_INCLUDE_PATH")
_NEUTRAL = frozenset(
    [
        "TILELANG_CACHE_DIR",
        "TILELANG_TMP_DIR",
        "TILELANG_PRINT_ON_COMPILATION",
        "TILELANG_DISABLE_CACHE",
        "TILELANG_CLEANUP_TEMP_FILES",
        "TILELANG_HIP_SAVE_TEMP_FILES",
        "TILELANG_JIT_DIAGNOSTICS",
        "TILELANG_COMPILE_TIMEOUT_SECONDS",
        "TILELANG_PASS_PROFILE",
        "TILELANG_PASS_PROFILE_THRESHOLD_MS",
        "TILELANG_VERBOSE",
        "TILELANG_DEFAULT_TARGET",
        "TILELANG_EXECUTION_BACKEND",
        "TILELANG_USE_GEMM_V1",
        "TILELANG_AUTO_TUNING_DISABLE_CACHE",
        "TILELANG_AUTO_TUNING_CPU_UTILITIES",
        "TILELANG_AUTO_TUNING_CPU_COUNTS",
        "TILELANG_AUTO_TUNING_MAX_CPU_COUNT",
        "TVM_LIBRARY_PATH",
        "TVM_IMPORT_PYTHON_PATH",
        "TVM_FFI_RELEASE_GIL_BY_DEFAULT",
        "TVM_HOME",
        "TVM_NUM_THREADS",
        "TVM_FFI_CACHE_DIR",
    ]
)


def _environment() -> str:
    """The environment variables that may change a kernel. The default target and backend are not
    among them: what they resolve to is. TileLang's own paths do not count by where they are.
    """
    plain = getattr(os.environ, "_data", None)
    forced = [variable._forced_value for variable in _variables()]
    if plain is None or _known.get("plain") != plain or _known.get("forced") != forced:
        home = str(fingerprint.tilelang_path())
        found = {
            name: value.replace(home, "<tilelang>")
            for name, value in os.environ.items()
            if _counts(name)
        }
        for name, value in _at_start().items():
            found[f"start {name}"] = value.replace(home, "<tilelang>")
        for name, value in _overridden().items():
            found[name] = value.replace(home, "<tilelang>")
        said = "\n".join(f"{name}={found[name]}" for name in sorted(found))
        number = _known.get("number", 0) + 1
        _known.update(plain=dict(plain or {}), forced=forced, said=said, number=number)
    return str(_known["said"])


def environment() -> dict[str, str]:
    """The environment variables that count, by name."""
    said = _environment()
    return dict(line.split("=", 1) for line in said.split("\n") if "=" in line)


def _counts(name: str) -> bool:
    family = name.startswith(_FAMILIES) and not name.startswith("TVM_FFI_")
    return (family or name in _ALSO) and name not in _NEUTRAL


@functools.cache
def _at_start() -> dict[str, str]:
    """The variables that the process was started with: some are read only once, at an import."""
    try:
        with open("/proc/self/environ", "rb") as file:
            parts = [os.fsdecode(part).partition("=") for part in file.read().split(b"\0")]
    except OSError:
        return {}
    return {name: value for name, _, value in parts if _counts(name)}


_known: dict[str, Any] = {}
"""The variables of the last look, what was said of them, and how often they were others."""


def _overridden() -> dict[str, str]:
    """What the program set in TileLang's `env` instead of in the environment."""
    return {
        f"env.{variable.key}": str(variable._forced_value)
        for variable in _variables()
        if variable._forced_value is not None
        and variable.key not in _NEUTRAL
        and str(variable._forced_value) != os.environ.get(variable.key)
    }


@functools.cache
def _variables() -> tuple[Any, ...]:
    from tilelang import env

    values = vars(type(env)).values()
    return tuple(value for value in values if type(value).__name__ == "EnvVar")


_CALLBACKS = tuple(
    f"tilelang_callback_{name}_postproc" for name in ("cuda", "hip", "c_host", "metal")
)


def _no_callbacks() -> None:
    import tvm_ffi

    for name in _CALLBACKS:
        if tvm_ffi.get_global_func(name, allow_missing=True) is not None:
            raise Unseen(f"a function is registered that rewrites what TileLang generates ({name})")
