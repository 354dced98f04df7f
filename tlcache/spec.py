"""KernelSpec: the complete name of one compiled kernel, and the action key under which it is
recorded.

Invariant: two specs are equal exactly when their canonical JSON is; the action key of a spec is the
same in every process, on every host, that would compile the same kernel for it with the same
TileLang.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from tlcache.arguments import text
from tlcache.errors import SpecError, TargetError
from tlcache.targets import Target, from_name

__all__ = ["RECORD_SCHEMA", "KernelSpec", "Scalar", "Value", "workload_text"]

RECORD_SCHEMA = 1
"""Version of the record's format; part of every action key, so a new format is a miss, not an
error.
"""

Scalar: TypeAlias = "str | int | float | bool | None"
Value: TypeAlias = "Scalar | list[Value] | dict[str, Value]"


class KernelSpec:
    """The complete name of one compiled kernel: frozen, hashable, printable, and JSON both ways.

    Args:
        kernel: Import path of the factory, like `ops.kernels.rms_norm:rms_norm`.
        workload: What the factory is called with (M, N, eps, dtype and so on): JSON values.
        schedule: What the JITImpl that it returns is called with (block_m, threads and so on).
        target: What the kernel is compiled for.
        pass_configs: TileLang pass configs on top of those that the factory sets itself.
        compile_flags: Compiler flags on top of those that the factory sets itself.
        execution_backend: TileLang's backend; by default the one that TileLang picks for the
            target.

    Raises:
        SpecError: A value is not JSON, or not finite.
    """

    __slots__ = (
        "_canonical",
        "_hash",
        "compile_flags",
        "execution_backend",
        "kernel",
        "pass_configs",
        "schedule",
        "target",
        "workload",
    )

    kernel: str
    workload: Mapping[str, Value]
    schedule: Mapping[str, Value]
    target: Target
    pass_configs: Mapping[str, Value]
    compile_flags: tuple[str, ...]
    execution_backend: str
    _canonical: str
    _hash: int

    def __init__(
        self,
        kernel: str,
        workload: Mapping[str, Value],
        schedule: Mapping[str, Value],
        target: Target,
        *,
        pass_configs: Mapping[str, Value] | None = None,
        compile_flags: str | Iterable[str] = (),
        execution_backend: str | None = None,
    ) -> None:
        assign = object.__setattr__
        assign(self, "kernel", kernel)
        assign(self, "target", target)
        flags = (compile_flags,) if isinstance(compile_flags, str) else tuple(compile_flags)
        assign(self, "compile_flags", flags)
        assign(self, "execution_backend", execution_backend or target.execution_backend)
        try:
            assign(self, "workload", _frozen(workload))
            assign(self, "schedule", _frozen(schedule))
            assign(self, "pass_configs", _frozen(pass_configs or {}))
            text = json.dumps(
                self.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise SpecError(
                f"the spec of {kernel} holds a value that is not JSON: {error}"
            ) from error
        assign(self, "_canonical", text)
        assign(self, "_hash", hash(text))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a KernelSpec is frozen; {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a KernelSpec is frozen; {name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KernelSpec):
            return NotImplemented
        return self._canonical == other._canonical

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return (KernelSpec.from_json, (self.to_json(),))

    def __repr__(self) -> str:
        return f"KernelSpec({self})"

    def __str__(self) -> str:
        return " ".join(
            filter(None, (self.name, self.workload_text, self.schedule_text, self.target.name))
        )

    @property
    def title(self) -> str:
        """The spec in short, like `rms_norm M=1 N=4096 eps=1e-05 bf16 sm_90a`."""
        return " ".join(filter(None, (self.name, self.workload_text, self.target.name)))

    @property
    def name(self) -> str:
        """The factory's own name, like `rms_norm`."""
        return self.kernel.rpartition(":")[2]

    @property
    def workload_text(self) -> str:
        """The workload for people, like `M=4096 N=4096 eps=1e-05 bf16`."""
        return workload_text(self.workload)

    @property
    def schedule_text(self) -> str:
        """The schedule for people, like `block_m=1 threads=256`."""
        return " ".join(f"{key}={text(value)}" for key, value in self.schedule.items())

    def to_json(self) -> dict[str, Value]:
        """The spec as JSON values; `from_json` reads it back."""
        return {
            "kernel": self.kernel,
            "workload": _thawed(self.workload),
            "schedule": _thawed(self.schedule),
            "target": self.target.name,
            "pass_configs": _thawed(self.pass_configs),
            "compile_flags": list(self.compile_flags),
            "execution_backend": self.execution_backend,
        }

    @classmethod
    def from_json(cls, data: object) -> KernelSpec:
        """Read what `to_json` wrote.

        Raises:
            SpecError: A field is missing, unknown or of the wrong type.
        """
        if not isinstance(data, Mapping):
            raise SpecError(f"a spec is a JSON object, not {type(data).__name__}")
        fields: dict[str, type] = {
            "kernel": str,
            "workload": Mapping,
            "schedule": Mapping,
            "target": str,
            "pass_configs": Mapping,
            "compile_flags": list,
            "execution_backend": str,
        }
        for name, kind in fields.items():
            if not isinstance(data.get(name), kind):
                raise SpecError(
                    f"a spec's {name} is {data.get(name)!r}, which is not a {kind.__name__}"
                )
        if unknown := sorted(set(data) - set(fields)):
            raise SpecError(f"a spec has no field {unknown[0]!r}")
        if not data["execution_backend"]:
            raise SpecError("a spec's execution_backend is empty")
        if not all(isinstance(flag, str) for flag in data["compile_flags"]):
            raise SpecError(f"a spec's compile_flags are strings, not {data['compile_flags']!r}")
        return cls(
            data["kernel"],
            data["workload"],
            data["schedule"],
            _canonical_target(data["target"]),
            pass_configs=data["pass_configs"],
            compile_flags=data["compile_flags"],
            execution_backend=data["execution_backend"],
        )

    def canonical(self) -> str:
        """The spec as canonical JSON: sorted keys, no spaces, ASCII."""
        return self._canonical

    def action_key(self) -> str:
        """The sha256 that names this kernel's record, as 64 hexadecimal digits.

        It covers the canonical JSON, the digest of the factory's source closure, the versions of
        TileLang and tvm-ffi, the platform, the environment variables that TileLang folds into its
        own key, and the record's schema.

        Raises:
            FactoryError: The factory cannot be found.
        """
        from tlcache.closure import factory_digest
        from tlcache.fingerprint import key_facts

        facts = f"{RECORD_SCHEMA}\n{key_facts()}\n{factory_digest(self.kernel)}\n"
        return hashlib.sha256((facts + self._canonical).encode()).hexdigest()


_SCALARS = frozenset({str, int, float, bool, type(None)})  # asked first: `Mapping` is slow to ask


def _frozen(value: Any) -> Any:
    """A copy of a JSON value that cannot be changed: lists as tuples, so that a factory can hash
    them.
    """
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a field's name is a text")
        return MappingProxyType({key: _frozen(item) for key, item in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _thawed(value: Any) -> Any:
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Mapping):
        return {key: _thawed(item) for key, item in value.items()}
    return [_thawed(item) for item in value] if isinstance(value, tuple) else value


def _canonical_target(name: str) -> Target:
    try:
        return from_name(name)
    except TargetError as error:
        raise SpecError(f"a spec's target is canonical: {error.message}") from error


_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def workload_text(workload: Mapping[str, Value]) -> str:
    """A workload for people, like `M=4096 N=4096 eps=1e-05 bf16`."""
    shown = [f"{key}={text(value)}" for key, value in workload.items() if key != "dtype"]
    if "dtype" in workload:
        dtype = text(workload["dtype"])
        shown.append(_SHORT.get(dtype, dtype))
    return " ".join(shown)
