"""The version key: a name for everything that decides which kernels an environment makes and can
load, like `tl0.1.15-cu13.0-sm_90a-3f9c2ab1`.

TileLang's own keys leave out the compilers and the headers, so one root that two environments share
may serve the one what the other's nvcc made. A root for each version key cannot.

Invariant: the readable parts and the hash cover every field but those in UNHASHED, which change
neither what is compiled nor where it is found. Nothing is imported that is described: neither torch
nor TileLang, so an entrypoint can afford it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tlcache import fingerprint, switches, targets
from tlcache.errors import TargetError, UsageError
from tlcache.store.digests import Digests
from tlcache.targets import Target

__all__ = ["FIELDS", "KEY", "UNHASHED", "VARIABLES", "Difference", "Environment", "compare"]
__all__ += ["describe", "keyed_base", "read"]

FIELDS = {
    "tilelang": "TileLang",
    "tilelang_library": "TileLang libraries",
    "tilelang_python": "TileLang Python",
    "tvm_ffi": "tvm-ffi",
    "torch": "torch",
    "nvcc": "nvcc",
    "host_compiler": "host compiler",
    "templates": "template headers",
    "cutlass": "CUTLASS headers",
    "glibc": "glibc",
    "platform": "platform",
    "gpu": "GPU",
    "driver": "driver",
}
"""The fields of an environment, and how they are called."""

UNHASHED = frozenset({"torch", "driver"})
"""Fields that are told and compared, and are not in the key: no kernel depends on torch's version,
and a host that builds a cache has no driver."""

VARIABLES = {
    "TILELANG_DEFAULT_TARGET": "miss",
    "TILELANG_EXECUTION_BACKEND": "miss",
    "TILELANG_KERNEL_CACHE_USE_LIB_STAMP": "miss",
    "TILELANG_LAYOUT_COST_MODEL": "miss",
    "TILELANG_CUTEDSL_HOST_LAUNCHER": "stale hit",
    "TILELANG_CUTEDSL_REQUIRE_CUTLASS_HOST": "stale hit",
    "TILELANG_CUTEDSL_REQUIRE_TVMFFI": "stale hit",
    "TVM_LIBRARY_PATH": "stale hit",
    "TVM_IMPORT_PYTHON_PATH": "stale hit",
    "NVCC_APPEND_FLAGS": "stale hit",
    "NVCC_PREPEND_FLAGS": "stale hit",
}
"""Variables that change which code is made, and what another value of them does to a lookup."""

KEY = r"(?a)tl[\w.]+(?:-[\w.]+)*-[0-9a-f]{8}"
"""The form of a version key, as text: few need it."""

_LIBRARIES = ("libtilelang.so", "libtvm_compiler.so", "libtvm_runtime.so")
_HINT = "`tlcache key --json` there writes such a file"


@dataclass(frozen=True)
class Environment:
    """One environment.

    Attributes:
        facts: A value for each of FIELDS; None where there is none, or it cannot be known.
        variables: Those of VARIABLES that are set.
    """

    facts: Mapping[str, str | None]
    variables: Mapping[str, str]

    @property
    def sha256(self) -> str:
        """Of all that the key depends on."""
        facts = {name: self.facts.get(name) for name in FIELDS if name not in UNHASHED}
        text = json.dumps([facts, dict(self.variables)], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def key(self) -> str:
        """Like `tl0.1.15-cu13.0-sm_90a-3f9c2ab1`; without nvcc or a GPU, without that part."""
        parts = [f"tl{self.facts.get('tilelang') or '0'}"]
        if nvcc := self.facts.get("nvcc"):
            parts.append("cu" + ".".join(nvcc.split(".")[:2]))
        if gpu := self.facts.get("gpu"):
            arch = re.search(r"sm_\d+[af]?", gpu)
            parts.append(arch[0] if arch else re.sub(r"\W+", "_", gpu)[:16])
        parts.append(self.sha256[:8])
        return "-".join(re.sub(r"[^\w.]", "_", part, flags=re.ASCII) for part in parts)

    def to_json(self) -> dict[str, Any]:
        """As `tlcache key --json` writes it; `read` takes it back."""
        return {
            "key": self.key,
            "sha256": self.sha256,
            "facts": dict(self.facts),
            "variables": dict(self.variables),
        }


def describe(target: Target | None = None, digests: Digests | None = None) -> Environment:
    """This environment.

    Args:
        target: What it is to compile for; the GPU that is here where None.
        digests: Where digests are remembered; in the user's cache directory where None.

    Raises:
        RuntimeLibraryError: TileLang or tvm-ffi is not installed.
    """
    from tlcache.warm import toolchain

    package = fingerprint.tilelang_path()
    tools = toolchain.provenance()
    memory = digests if digests is not None else Digests()
    facts = {
        "tilelang": fingerprint.tilelang_version(),
        "tilelang_library": memory.tree(package / "lib", names=_LIBRARIES),
        "tilelang_python": memory.tree(
            package, suffixes=(".py",), leaving_out=("3rdparty/cutlass",)
        ),
        "tvm_ffi": fingerprint.tvm_ffi_version(),
        "torch": fingerprint.torch_version(),
        "nvcc": tools["nvcc"],
        "host_compiler": tools["host_compiler"],
        "templates": memory.tree(_place("TL_TEMPLATE_PATH", package / "src")),
        "cutlass": memory.tree(_place("TL_CUTLASS_PATH", package / "3rdparty/cutlass/include")),
        "glibc": fingerprint.glibc_version(),
        "platform": fingerprint.platform_name(),
        "gpu": str(target) if target is not None else _gpu(),
        "driver": tools["driver"],
    }
    memory.save()
    return Environment(facts, _variables(package))


def _variables(package: Path) -> dict[str, str]:
    found = {name: os.environ.get(name, "").strip() for name in VARIABLES}
    # TileLang itself sets this one when it is imported, and so for all child processes.
    named = found["TVM_LIBRARY_PATH"].split(os.pathsep)
    if all(Path(place).is_relative_to(package) for place in named if place):
        del found["TVM_LIBRARY_PATH"]
    return {name: value for name, value in found.items() if value}


def _place(variable: str, otherwise: Path) -> Path:
    named = os.environ.get(variable)
    return Path(named) if named else otherwise


def _gpu() -> str | None:
    try:
        return str(targets.detect())
    except TargetError:
        return None


def keyed_base(root: str | os.PathLike[str]) -> Path:
    """The directory that keyed roots are made in: of a keyed root the one that it is in, else the
    root itself. So that what was set by `tlcache env` can be set again.
    """
    place = Path(os.path.abspath(root))
    return place.parent if re.fullmatch(KEY, place.name) else place


# --- comparing ---


def read(text: str, name: str) -> Environment:
    """Read what `tlcache key --json` wrote.

    Args:
        text: The document.
        name: Its file, for messages.

    Raises:
        UsageError: It is no such document.
    """
    try:
        document = json.loads(text)
        facts, variables = document["facts"], document["variables"]
        if not isinstance(facts, dict) or not isinstance(variables, dict):
            raise TypeError("facts and variables are objects")
        for value in (*facts.values(), *variables.values()):
            if value is not None and not (isinstance(value, str) and value.isprintable()):
                raise TypeError(f"{value!r} is not a text")
        if not any(field in facts for field in FIELDS) or None in variables.values():
            raise ValueError("it names none of an environment's facts")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{name} is no fingerprint: {reason}", hint=_HINT) from error
    return Environment(facts, variables)


@dataclass(frozen=True)
class Difference:
    """One field that differs, and what that does.

    Attributes:
        field: One of FIELDS or VARIABLES.
        there: Its value in the environment that made a cache.
        here: Its value in the one that is to use it.
        effect: `miss` (the kernel is compiled again), `stale hit` (the same key, and code that
            would not be made here), `cannot load`, or `nothing`.
        meaning: The same in a sentence.
    """

    field: str
    there: str | None
    here: str | None
    effect: str
    meaning: str


def compare(there: Environment, here: Environment) -> list[Difference]:
    """What differs between the environment that made a cache and the one that uses it.

    Facts that one of the two does not name, as another release of tlcache may not, are left out.
    """
    found = []
    for field in FIELDS:
        if field not in there.facts or field not in here.facts:
            continue
        old, new = there.facts[field], here.facts[field]
        # A driver may be too old for kernels that a host with the same one, or none, compiled.
        if old != new or field == "driver":
            effect, meaning = _effect(field, old, new, there, here)
            if old != new or effect != "nothing":
                found.append(Difference(field, old, new, effect, meaning))
    for variable in sorted({*there.variables, *here.variables}):
        old, new = there.variables.get(variable), here.variables.get(variable)
        if old != new:
            effect = VARIABLES.get(variable, "nothing")
            found.append(Difference(variable, old, new, effect, _OF_VARIABLES[effect]))
    if any(one.field in _EVERY_KEY and one.effect == "miss" for one in found):
        found = [_moot(one) if one.effect == "stale hit" else one for one in found]
    return found


_EVERY_KEY = ("tilelang", "tilelang_library", "platform")


def _moot(one: Difference) -> Difference:
    return replace(one, effect="nothing", meaning="TileLang finds no kernel from there anyway")


_OF_VARIABLES = {
    "miss": "it is in TileLang's keys: kernels from there are not found",
    "stale hit": "it changes the code and is in no key: kernels from there are served as they are",
    "nothing": "this release of tlcache does not know it",
}
_STALE = "is in no key: kernels from there are served as they were compiled there"


def _effect(
    field: str, old: str | None, new: str | None, there: Environment, here: Environment
) -> tuple[str, str]:
    """What it does that a field is `new` here and was `old` there."""
    if field == "tilelang":
        return "miss", "the version is in every key: all kernels are compiled again"
    if field in ("tilelang_library", "tilelang_python"):
        stamped = any(
            switches.meaning(one.variables.get("TILELANG_KERNEL_CACHE_USE_LIB_STAMP", ""))
            for one in (there, here)
        )
        if field == "tilelang_library" and stamped:
            return "miss", "TILELANG_KERNEL_CACHE_USE_LIB_STAMP puts the libraries into the keys"
        return "stale hit", f"another build of the same version {_STALE}"
    if field == "tvm_ffi":
        return "miss", "it is in the keys of records; TileLang itself still finds its entries"
    if field == "torch":
        return "nothing", "no kernel depends on it"
    if field == "nvcc":
        return _of_nvcc(old, new)
    if field == "host_compiler":
        return "stale hit", f"the host compiler {_STALE}"
    if field in ("templates", "cutlass"):
        return "stale hit", f"what a kernel includes {_STALE}"
    if field == "glibc":
        return _of_glibc(old, new)
    if field == "platform":
        return "miss", "TileLang keeps a directory for each platform"
    if field == "gpu":
        return _of_gpu(old, new)
    return _of_driver(new, there.facts.get("nvcc"))


def _of_nvcc(old: str | None, new: str | None) -> tuple[str, str]:
    if new is None:
        return (
            "nothing",
            "without nvcc, kernels from there are loaded, and others cannot be compiled",
        )
    if old is None:
        return "nothing", "there was no nvcc there, so no CUDA kernel comes from there"
    return "stale hit", f"the build of nvcc {_STALE}"


def _of_glibc(old: str | None, new: str | None) -> tuple[str, str]:
    if old is None or new is None:
        return "cannot load", "the C library is another one: libraries from there do not load"
    if _numbers(new) < _numbers(old):
        told = (
            "it is older here: what needs a newer one does not load, and TileLang deletes it then"
        )
        return "cannot load", told
    return "nothing", "libraries that were linked with an older one load"


def _of_gpu(old: str | None, new: str | None) -> tuple[str, str]:
    if new is None:
        return "cannot load", "without a GPU, CUDA kernels can be compiled, and not loaded"
    if old is None:
        return "nothing", "kernels that were compiled for this GPU without one are found"
    return "miss", "the target is in every key"


def _of_driver(driver: str | None, nvcc: str | None) -> tuple[str, str]:
    if driver is not None and nvcc is not None and _numbers(driver)[:1] < _numbers(nvcc)[:1]:
        return (
            "cannot load",
            f"the driver here knows {driver} at most, and nvcc {nvcc} made the kernels there",
        )
    return "nothing", "no kernel depends on it"


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d{1,9}", text)]
