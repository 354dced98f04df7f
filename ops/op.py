"""What every operator shares: its state under a self-describing key, and layer 3, the workload
cache.

Invariant: ops with equal keys share one state, and a key is enough to rebuild it in a fresh
process. A state touches no device and compiles nothing until it is launched or warmed. After a
workload's first launch, a launch costs one dict probe. Neither a tensor's address nor its contents
are part of any key.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from tlcache import runtime, targets
from tlcache.errors import SpecError
from tlcache.operators import Operator
from tlcache.spec import KernelSpec, Value
from tlcache.targets import Target

__all__ = ["Definition", "Op", "OpState", "define", "instance_key", "state"]

Rows = Literal["auto", "exact", "dynamic"]
OnMiss = Literal["compile", "error"]
_DEFAULTS: dict[str, Value] = {"rows": "auto", "on_miss": "compile"}


class Definition(NamedTuple):
    """An operator as this package runs it.

    Attributes:
        operator: Its name, workload and schedules.
        bind: Makes layer 3's value of a spec and its launcher.
    """

    operator: Operator
    bind: Callable[[KernelSpec, Callable[..., Any]], Any]


_definitions: dict[str, Definition] = {}


def define(definition: Definition) -> Definition:
    """Make an operator known by its name, so that keys that begin with the name can be rebuilt."""
    return _definitions.setdefault(definition.operator.name, definition)


# --- keys ---


def instance_key(name: str, values: Mapping[str, Value]) -> str:
    """The self-describing key, like `rms_norm(N=4096,eps=1e-05,dtype=bfloat16)`.

    Args:
        name: The operator's name.
        values: The workload without M, then `rows`, `on_miss` and `schedule` where they are not the
            default.
    """
    kept = {key: value for key, value in values.items() if _DEFAULTS.get(key) != value}
    return f"{name}({','.join(f'{key}={_written(value)}' for key, value in kept.items())})"


def _written(value: Value) -> str:
    if isinstance(value, Mapping):
        return "+".join(f"{key}:{_written(item)}" for key, item in value.items())
    return repr(value) if isinstance(value, float) else str(value)


_KEY = re.compile(r"(?P<name>\w+)\((?P<fields>[\w=,.:+-]*)\)")


def _parsed(key: str) -> tuple[str, dict[str, Value]]:
    match = _KEY.fullmatch(key)
    if match is None:
        raise SpecError(
            f"{key!r} is not an instance key, like rms_norm(N=4096,eps=1e-05,dtype=bfloat16)"
        )
    values: dict[str, Value] = {}
    for field in match["fields"].split(",") if match["fields"] else ():
        name, equals, text = field.partition("=")
        if not name or not equals or not text or name in values:
            raise SpecError(f"{key!r} is not an instance key: {field!r} is no field, or a repeat")
        if name == "schedule":
            pairs = (part.partition(":") for part in text.split("+"))
            values[name] = {left: _value(right) for left, _, right in pairs}
        else:
            values[name] = _value(text)
    return match["name"], values


def _value(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# --- state ---


class OpState:
    """What ops with one key share. Made by `state(key)` only.

    Attributes:
        key: The self-describing key.
        operator: The operator.
        values: The workload without M.
        rows: `exact` specializes on M; `dynamic` uses one kernel with a symbolic M; `auto` takes
            the exact kernel where one was warmed, else the dynamic one.
        on_miss: `compile` or `error`.
        schedule: A schedule of one's own, or None for the default.
        kernels: Layer 3: (device index, M) to the bound kernel.
    """

    def __init__(self, key: str) -> None:
        name, values = _parsed(key)
        if name not in _definitions:
            raise SpecError(
                f"{key!r} names the operator {name!r}; known are {', '.join(_definitions)}"
            )
        definition = _definitions[name]
        self.key = key
        self.operator = definition.operator
        self.rows: Rows = _one_of("rows", values.pop("rows", "auto"), Rows)
        self.on_miss: OnMiss = _one_of("on_miss", values.pop("on_miss", "compile"), OnMiss)
        schedule = values.pop("schedule", None)
        self.schedule = schedule if isinstance(schedule, dict) else None
        self.values = values
        self.kernels: dict[tuple[int, int], Any] = {}
        self._bind = definition.bind
        self._check()

    def _check(self) -> None:
        """Reject impossible values at construction, on no device; a schedule must fit some
        device.
        """
        fault: SpecError | None = None
        for target in (targets.CPU, targets.for_capability(9, 0)):
            try:
                self.spec("dynamic", target)
                return
            except SpecError as error:
                fault = error
        assert fault is not None
        raise fault

    def spec(self, rows: int | str, target: Target) -> KernelSpec:
        """The spec of one workload."""
        return self.operator.spec({"M": rows, **self.values}, target, self.schedule)

    def kernel(self, device: int, rows: int) -> Any:
        """Layer 3's value for a workload, resolved and kept on its first use.

        Args:
            device: CUDA device index, or -1 for the CPU.
            rows: M.

        Raises:
            MissError: It is not in the cache, and `on_miss` is `error` or resolving is frozen.
            CompileError, CaptureError, UntrustedRootError: See `tlcache.runtime.resolve`.
        """
        found = self.kernels.get((device, rows))
        if found is not None:
            return found
        target = device_target(device)
        if self.rows == "exact":
            spec = self.spec(rows, target)
            launcher = runtime.resolve(spec, self.on_miss)
        elif self.rows == "dynamic":
            spec = self.spec("dynamic", target)
            launcher = runtime.resolve(spec, self.on_miss)
        else:
            spec = self.spec(rows, target)
            exact = runtime.lookup(spec)
            if exact is None:
                spec = self.spec("dynamic", target)
            launcher = exact or runtime.resolve(spec, self.on_miss)
        bound = self._bind(spec, launcher.call)
        # Two threads may both come here; resolving is single-flight, and binding is cheap and pure.
        return self.kernels.setdefault((device, rows), bound)


def _one_of(name: str, value: Value, kind: Any) -> Any:
    if value not in get_args(kind):
        raise SpecError(f"{name} is {value!r}; it is one of {', '.join(get_args(kind))}")
    return value


@functools.cache
def device_target(device: int) -> Target:
    """The target of a device: what TileLang's auto-detection says on it; -1 is the CPU."""
    if device < 0:
        return targets.CPU
    import torch

    return targets.for_capability(*torch.cuda.get_device_capability(device))


_live: weakref.WeakValueDictionary[str, OpState] = weakref.WeakValueDictionary()
_rebuilt: dict[str, OpState] = {}
_lock = threading.Lock()


def state(key: str, *, keep: bool = False) -> OpState:
    """The state that all ops with this key share; rebuilt from the key where no op holds it.

    Args:
        key: A self-describing instance key.
        keep: Hold it from now on: for a graph that was exported or cached, and runs without an op.

    Raises:
        SpecError: It is not a key, or says something impossible.
    """
    found = _live.get(key)
    if found is None:
        with _lock:
            found = _live.get(key)
            if found is None:
                found = _live[key] = OpState(key)
    if keep:
        _rebuilt.setdefault(key, found)
    return found


# --- op ---


class Op:
    """Base of the operators: a key, and the state under it. Subclasses add `forward`.

    Args:
        name: The operator's name.
        values: The workload without M.
        rows: See `OpState`.
        on_miss: What a kernel that is not cached means: `compile` it, or an `error`.
        schedule: A schedule of one's own; it is part of the key.
    """

    def __init__(
        self,
        name: str,
        values: Mapping[str, Value],
        *,
        rows: Rows = "auto",
        on_miss: OnMiss = "compile",
        schedule: Mapping[str, Value] | None = None,
    ) -> None:
        extra: dict[str, Value] = {"rows": rows, "on_miss": on_miss}
        if schedule is not None:
            extra["schedule"] = dict(schedule)
        self.instance_key = instance_key(name, {**values, **extra})
        self.state = state(self.instance_key)

    def forward(self, *inputs: Any) -> Any:
        raise NotImplementedError

    def __call__(self, *inputs: Any) -> Any:
        return self.forward(*inputs)

    def warmup(self, rows: Iterable[int], device: int | None = None) -> None:
        """Have the kernels for these row counts in hand before the first launch.

        Args:
            rows: Values of M.
            device: CUDA device index, -1 for the CPU; by default the current CUDA device, else the
                CPU.
        """
        if device is None:
            import torch

            device = torch.cuda.current_device() if torch.cuda.is_available() else -1
        for count in rows:
            self.state.kernel(device, count)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.instance_key})"
