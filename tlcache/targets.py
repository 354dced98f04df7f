"""The spelling of targets: many ways in, one canonical form out.

Invariant: a `Target` for a compute capability is what TileLang's own auto-detection says on a GPU
of that capability, so that a kernel warmed for it is the kernel that `target="auto"` asks for. From
capability 9.0 up that is the architecture *with* the `a` suffix: a kernel warmed for plain `sm_90`
is never hit on an H100. Who really wants `sm_90` says so with a dict, which is taken to the letter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tlcache.errors import TargetError

__all__ = ["CPU", "Target", "detect", "for_capability", "from_config", "from_name", "matches"]
__all__ += ["gpu", "note", "of_tvm", "parse"]

_GPU_NAMES: dict[str, tuple[int, int]] = {
    "v100": (7, 0),
    "t4": (7, 5),
    "a100": (8, 0),
    "a800": (8, 0),
    "a30": (8, 0),
    "a10": (8, 6),
    "a10g": (8, 6),
    "a40": (8, 6),
    "a6000": (8, 6),
    "l4": (8, 9),
    "l40": (8, 9),
    "l40s": (8, 9),
    "rtx4090": (8, 9),
    "h20": (9, 0),
    "h100": (9, 0),
    "h200": (9, 0),
    "h800": (9, 0),
    "gh200": (9, 0),
    "b200": (10, 0),
    "gb200": (10, 0),
    "b300": (10, 3),
    "gb300": (10, 3),
    "rtx5090": (12, 0),
}
_SUGGESTED = ["auto", "cpu", "sm80", "sm89", "sm90", "sm100", *_GPU_NAMES]
# As text: a start that parses no target need not compile them.
_SM = r"(?a)sm_?(\d{2,3})([af]?)"
_CAPABILITY = r"(?a)(\d{1,2})\.(\d)"
_ARCH = r"(?a)sm_\d{2,3}[af]?"


class Target(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        name: The canonical text: `sm_90a`, `cpu`, or the canonical JSON of a target dict with
            further attributes. Two targets are equal when their names are.
    """

    name: str

    @property
    def is_cuda(self) -> bool:
        return self.name != "cpu" and self.kind == "cuda"

    @property
    def kind(self) -> str:
        """TVM's target kind: `cuda`, `c`, and so on."""
        if self.name == "cpu":
            return "c"
        return str(json.loads(self.name)["kind"]) if self.name.startswith("{") else "cuda"

    @property
    def config(self) -> dict[str, object]:
        """The dict that TileLang takes as `target=`."""
        if self.name == "cpu":
            return {"kind": "c"}
        if self.name.startswith("{"):
            return dict(json.loads(self.name))
        return {"kind": "cuda", "arch": self.name}

    @property
    def execution_backend(self) -> str:
        """The backend that TileLang's `auto` picks for this target: `tvm_ffi`, or `cython` for
        `c`.
        """
        return "cython" if self.kind == "c" else "tvm_ffi"

    def __str__(self) -> str:
        return self.name


CPU = Target("cpu")


def for_capability(major: int, minor: int) -> Target:
    """The target that TileLang's auto-detection gives on a GPU of compute capability
    `major.minor`.
    """
    return Target(f"sm_{major}{minor}{'a' if major >= 9 else ''}")


def of_tvm(exported: Mapping[str, Any]) -> Target:
    """The target that a TVM target's `export()` describes, leaving out what TVM adds to it."""
    kind = exported["kind"]
    kind = str(kind["name"] if isinstance(kind, Mapping) else kind)
    if kind == "c":
        return CPU
    if kind == "cuda" and "code" not in exported:
        return Target(str(exported.get("arch")))
    kept = {name: _plain(exported[name]) for name in ("arch", "code") if name in exported}
    return Target(json.dumps({"kind": kind, **kept}, sort_keys=True, separators=(",", ":")))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (int, float, bool)):
        return value
    return str(value) if isinstance(value, str) else [_plain(item) for item in value]


def from_config(config: Mapping[str, object]) -> Target:
    """The target for one of TileLang's target dicts, to the letter.

    Raises:
        TargetError: It has no `kind`, or a CUDA `arch` that is not an exact SM token.
    """
    kind = config.get("kind")
    if not isinstance(kind, str):
        raise TargetError(
            f"the target {dict(config)!r} has no kind",
            hint='write it as {"kind": "cuda", "arch": "sm_90a"}',
        )
    if kind == "c" and len(config) == 1:
        return CPU
    if kind == "cuda":
        arch = config.get("arch")
        if arch is None and len(config) == 1:
            return detect()
        if not isinstance(arch, str) or not re.fullmatch(_ARCH, arch):
            raise TargetError(
                f"the target's arch {arch!r} is not an exact SM token",
                hint="write it like sm_80 or sm_90a",
            )
        if len(config) == 2:
            return Target(arch)
    try:
        text = json.dumps(dict(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TargetError(f"the target {dict(config)!r} is not JSON: {error}") from error
    return Target(text)


def from_name(name: str) -> Target:
    """The target of a canonical name, as a spec or a record has it.

    Raises:
        TargetError: The name is not canonical.
    """
    if name == CPU.name or re.fullmatch(_ARCH, name):
        return Target(name)
    if name.startswith("{") and parse(name).name == name:
        return Target(name)
    raise TargetError(f"{name!r} is not a target's canonical name")


def parse(spelling: str | Mapping[str, object]) -> Target:
    """Read a target as people write it.

    Args:
        spelling: `sm80`, `sm_80`, `8.0`, `a100`, `h100`, `sm90`, `sm_90a`, `cpu`, `c`; one of
            TileLang's dicts, or such a dict as JSON text; `auto`, `cuda` or `native` for the GPU
            that is here. Spellings of a capability mean what TileLang detects on it (`sm90` and
            `sm_90` are `sm_90a`); dicts are taken to the letter.

    Raises:
        TargetError: The spelling is unknown, or asks for a GPU that is not here.
    """
    if isinstance(spelling, Mapping):
        return from_config(spelling)
    text = spelling.strip()
    if text.startswith("{"):
        try:
            config = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TargetError(
                f"the target {text[:60]!r} looks like JSON, and is not: {error}",
                hint='write it as {"kind": "cuda", "arch": "sm_90a"}',
            ) from error
        return from_config(config)
    low = text.lower()
    if low in {"cpu", "c"}:
        return CPU
    if low in {"auto", "cuda", "native"}:
        return detect(low)
    if match := re.fullmatch(_SM, low):
        digits, suffix = match.groups()
        if suffix:
            return Target(f"sm_{digits}{suffix}")
        return for_capability(int(digits[:-1]), int(digits[-1]))
    if match := re.fullmatch(_CAPABILITY, low):
        return for_capability(int(match[1]), int(match[2]))
    if capability := _GPU_NAMES.get(re.sub(r"[\s_-]|nvidia", "", low)):
        return for_capability(*capability)
    import difflib

    near = difflib.get_close_matches(low, _SUGGESTED, 1)
    raise TargetError(
        f"unknown target {text!r}",
        hint=(f"did you mean `{near[0]}`? " if near else "")
        + "targets are written like sm80, sm_90a, 8.0, h100, cpu, or as TileLang's dict in JSON",
    )


def note(spelling: str | Mapping[str, object], target: Target) -> str | None:
    """A sentence for the user where `parse` understood more than was written, else None."""
    if not isinstance(spelling, str) or spelling.strip().startswith("{"):
        return None
    text = spelling.strip()
    if target.name.endswith("a") and not text.lower().endswith("a"):
        return f"Target {text} means {target}, which is what TileLang detects on this GPU family."
    if text.lower() in {"auto", "cuda", "native"}:
        return f"Target {text} means {target} on this machine."
    return None


def matches(pattern: str, target: str) -> bool:
    """Whether a filter such as `--target sm90` selects a canonical target name.

    `sm90` selects `sm_90` and `sm_90a`; a spelling with the underscore (`sm_90`, `sm_90a`) selects
    only itself; a GPU's name or a capability selects its whole family, like `sm90`.
    """
    low = pattern.strip().lower()
    if low.startswith("{"):
        return target == parse(pattern).name
    if low.startswith("sm_"):
        return target == low
    wanted = parse(low).name
    exact = not wanted.startswith("sm_") or (low.startswith("sm") and low[-1] in "af")
    return target == wanted if exact else target.rstrip("af") == wanted.rstrip("af")


def detect(spelling: str = "auto") -> Target:
    """The target of the first visible GPU, by the driver alone: no torch, no CUDA context.

    Raises:
        TargetError: No driver, or no visible GPU.
    """
    capability = _driver_capability()
    if capability is None:
        raise TargetError(
            f"target {spelling!r} means the GPU of this machine, and no GPU is visible here",
            hint="name the architecture, like `--target sm90`, or use `--target cpu`",
        )
    return for_capability(*capability)


def _driver_capability() -> tuple[int, int] | None:
    found = gpu()
    return (found["major"], found["minor"]) if found is not None else None


# CU_DEVICE_ATTRIBUTE_… of cuda.h, under the names that torch has for them.
_ATTRIBUTES = {
    "major": 75,
    "minor": 76,
    "multi_processor_count": 16,
    "warp_size": 10,
    "max_threads_per_multi_processor": 39,
    "regs_per_multiprocessor": 82,
    "shared_memory_per_block": 8,
    "shared_memory_per_block_optin": 97,
    "shared_memory_per_multiprocessor": 81,
    "L2_cache_size": 38,
}


def gpu() -> dict[str, int] | None:
    """What the driver tells of the first visible GPU, under torch's names, sizes in bytes: no
    torch, no CUDA context. None where there is none.
    """
    import ctypes

    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, count, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value < 1:
        return None
    if cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    found = {}
    for name, number in _ATTRIBUTES.items():
        if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device):
            return None
        found[name] = value.value
    return found
