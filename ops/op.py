"""What every operator shares: its state under a self-describing key, and layer 3, the workload
cache.

Invariant: ops with equal keys share one state, and a key is enough to rebuild it in a fresh
process. A state touches no device and compiles nothing until it is launched or warmed. After a
workload's first launch, a launch costs one dict probe. Neither a tensor's address nor its contents
are part of any key.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import is_grad_enabled
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ops.kernels.bound import BoundKernel
from tlcache import runtime, sources, targets
from tlcache.errors import CaptureError, KernelError, SpecError
from tlcache.operators import Operator
from tlcache.spec import KernelSpec, Value
from tlcache.targets import Target

__all__ = ["DTYPES", "DTYPE_NAMES", "OnMiss", "Op", "OpState", "Rows"]
__all__ += ["define", "direct", "instance_key", "of_key", "shared", "state", "states"]

Rows = Literal["auto", "exact", "dynamic"]
OnMiss = Literal["compile", "error"]
_DEFAULTS: dict[str, Value] = {"rows": "auto", "on_miss": "compile"}

DTYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


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
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# --- state ---


class OpState:
    """What ops with one key share; made by `state(key)` only. A subclass is an operator's host
    side: what its inputs must be, and how a kernel is launched on them.

    Attributes:
        operator: The operator.
        name: Its name in `torch.ops.tilelang_ops` and in keys; the operator's own where "".
        fixed: Fields of the workload that this host side determines.
        inputs: Its tensors as a dispatcher schema says them, like `Tensor x, Tensor weight`.
        scalars: What else describes a call, for the stateless overload, like `float eps`.
        outputs: What it returns, like `Tensor` or `(Tensor, Tensor)`.
        folds: For each input, how many trailing axes make up a row, so that those before them are
            rows, which `vmap` folds a batch into; 0 where none are.
        setup_context: With `backward`, the gradient as `torch.library.register_autograd` has it;
            without them the operator is for inference only.
        key: The self-describing key.
        values: The workload without M.
        rows: `exact` specializes on M; `dynamic` uses one kernel with a symbolic M; `auto` takes
            the exact kernel where one was warmed, else the dynamic one.
        on_miss: `compile` or `error`.
        schedule: A schedule of one's own, or None for the tuned or default one.
        kernels: Layer 3: (device index, M) to the bound kernel. Device -1 is the CPU.
        hits: How many launches found their kernel there.
        misses: How often layer 3 had to ask the layers below.
        instances: The ops that hold this state.
    """

    operator: ClassVar[Operator]
    name: ClassVar[str] = ""
    fixed: ClassVar[Mapping[str, Value]] = {}
    inputs: ClassVar[str]
    scalars: ClassVar[str] = ""
    outputs: ClassVar[str] = "Tensor"
    folds: ClassVar[tuple[int, ...]]
    setup_context: ClassVar[Any] = None
    backward: ClassVar[Any] = None

    def __init_subclass__(cls) -> None:
        if "operator" in cls.__dict__ and "name" not in cls.__dict__:
            cls.name = cls.operator.name

    def __init__(self, key: str) -> None:
        values = _parsed(key)[1]
        self.key = key
        self.rows: Rows = _one_of("rows", values.pop("rows", "auto"), Rows)
        self.on_miss: OnMiss = _one_of("on_miss", values.pop("on_miss", "compile"), OnMiss)
        schedule = values.pop("schedule", None)
        self.schedule = schedule if isinstance(schedule, dict) else None
        for name in ("M", *self.fixed):
            if name in values:
                raise SpecError(f"{key!r} is not an instance key of {self.name}: it says {name}")
        self.values = values
        self.kernels: dict[tuple[int, int], BoundKernel] = {}
        self.hits = 0
        self.misses = 0
        self.instances: weakref.WeakSet[Op] = weakref.WeakSet()
        workload = self._checked().workload
        self.values = {
            name: value
            for name, value in workload.items()
            if name != "M" and name not in self.fixed
        }
        self.dtype = DTYPES[str(workload["dtype"])]

    @classmethod
    def describe(cls, *arguments: Any) -> dict[str, Value]:
        """The workload without M of a call: its inputs, then its scalars. Sizes go through
        `operator.index`, by which Dynamo specializes a graph of symbolic shapes on them; `int` does
        not.

        Raises:
            TypeError: An input's dtype is none that the operator takes.
        """
        raise NotImplementedError

    def fault(self, *inputs: Any) -> Exception | None:
        """What is wrong with inputs, or None."""
        raise NotImplementedError

    def run(self, *inputs: Any) -> Any:
        """Launch the kernel on inputs, or say what is wrong with them."""
        raise NotImplementedError

    def fake(self, *inputs: Any) -> Any:
        """Outputs of the right shape, dtype, device and strides, without values."""
        raise NotImplementedError

    def _checked(self) -> KernelSpec:
        """Reject impossible values at construction, on no device; a schedule must fit some
        device.
        """
        fault: SpecError | None = None
        for target in (targets.CPU, targets.for_capability(9, 0)):
            try:
                return self.spec("dynamic", target)
            except SpecError as error:
                fault = error
        assert fault is not None
        raise fault

    def spec(self, rows: int | str, target: Target) -> KernelSpec:
        """The spec of one workload: with the op's own schedule, else the tuned one, else the
        default.
        """
        values = {"M": rows, **self.values, **self.fixed}
        if self.schedule is not None:
            return self.operator.spec(values, target, self.schedule)
        return self.operator.spec(values, target)

    def kernel(self, device: int, rows: int) -> BoundKernel:
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
        self.misses += 1
        target = device_target(device)
        if self.rows == "exact":
            spec, launcher = self._resolved(rows, target)
        elif self.rows == "dynamic":
            spec, launcher = self._resolved("dynamic", target)
        else:
            spec = self._chosen(rows, target)
            exact = runtime.lookup(spec)
            if exact is None:
                spec, launcher = self._resolved("dynamic", target)
            else:
                launcher = exact
        bound = BoundKernel.bind(spec, launcher.call)
        # Two threads may both come here; resolving is single-flight, and binding is cheap and pure.
        return self.kernels.setdefault((device, rows), bound)

    def forget(self) -> None:
        """Ask the layers below again at the next launch: there are better schedules now."""
        self.kernels.clear()

    def _resolved(self, rows: int | str, target: Target) -> tuple[KernelSpec, Any]:
        spec = self._chosen(rows, target)
        return spec, runtime.resolve(spec, self.on_miss)

    def _chosen(self, rows: int | str, target: Target) -> KernelSpec:
        spec = self.spec(rows, target)
        return spec if self.schedule is not None else runtime.tuned(self.operator, spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return (state, (self.key,))


def _one_of(name: str, value: Value, kind: Any) -> Any:
    if value not in get_args(kind):
        raise SpecError(f"{name} is {value!r}; it is one of {', '.join(get_args(kind))}")
    return value


@functools.cache
def device_target(device: int) -> Target:
    """The target of a device: what TileLang's auto-detection says on it; -1 is the CPU."""
    if device < 0:
        return targets.CPU
    return targets.for_capability(*torch.cuda.get_device_capability(device))


# --- registry ---

_kinds: dict[str, type[OpState]] = {}
_live: weakref.WeakValueDictionary[str, OpState] = weakref.WeakValueDictionary()
_rebuilt: dict[str, OpState] = {}
_lock = threading.Lock()


def define(kind: type[OpState]) -> None:
    """Make an operator known, so that keys that begin with its name can be rebuilt."""
    _kinds[kind.name] = kind


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
        name = _parsed(key)[0]
        if name not in _kinds:
            raise SpecError(f"{key!r} names the operator {name!r}; known are {', '.join(_kinds)}")
        with _lock:
            found = _live.get(key)
            if found is None:
                found = _live[key] = _kinds[name](key)
    if keep:
        _rebuilt.setdefault(key, found)
    return found


def states() -> list[OpState]:
    """The states that are alive now."""
    return [found for reference in _live.valuerefs() if (found := reference()) is not None]


def _told() -> list[dict[str, Any]]:
    return [
        {
            "op": state.name,
            "key": state.key,
            "instances": len(state.instances),
            "workloads": len(state.kernels),
            "hits": state.hits,
            "misses": state.misses,
        }
        for state in states()
    ]


sources.add("workload", _told)


# --- op ---


class Op:
    """Base of the operators: a key, and the state under it.

    Args:
        values: The workload without M.
        rows: See `OpState`.
        on_miss: What a kernel that is not cached means: `compile` it, or an `error`.
        schedule: A schedule of one's own; it is part of the key.

    Attributes:
        kind: The operator's host side.
        dispatch: Its dispatcher op; `ops.boundary.register` sets it.
    """

    kind: ClassVar[type[OpState]]
    dispatch: ClassVar[Any]

    def __init__(
        self,
        values: Mapping[str, Value],
        *,
        rows: Rows = "auto",
        on_miss: OnMiss = "compile",
        schedule: Mapping[str, Value] | None = None,
    ) -> None:
        extra: dict[str, Value] = {"rows": rows, "on_miss": on_miss}
        if schedule is not None:
            extra["schedule"] = dict(schedule)
        self._of(instance_key(self.kind.name, {**values, **extra}))

    def _of(self, key: str) -> None:
        self.instance_key = key
        self.state = state(key)
        self.state.instances.add(self)

    @property
    def dtype(self) -> torch.dtype:
        """Of the inputs and outputs."""
        return self.state.dtype

    @classmethod
    def traced(cls, *arguments: Any, rows: Rows = "auto") -> Any:
        """A call that a compiler traces: one node, with the key that describes it.

        Args:
            arguments: The inputs, then the scalars.
            rows: See `OpState`.
        """
        values = {**cls.kind.describe(*arguments), "rows": rows}
        inputs = arguments[: len(cls.kind.folds)]
        return cls.dispatch(*inputs, instance_key(cls.kind.name, values))

    def forward(self, *inputs: Any) -> Any:
        """Run the operator; see its class for the inputs."""
        if direct(*inputs):
            try:
                return self.state.run(*inputs)
            except (AttributeError, RuntimeError):
                # None or a tensor that has no strides, which torch says in its own words.
                if fault := self.state.fault(*inputs):
                    raise fault from None
                raise
        return self.dispatch(*inputs, self.instance_key)

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
            device = torch.cuda.current_device() if torch.cuda.is_available() else -1
        for count in rows:
            self.state.kernel(device, count)

    def tune(
        self, rows: Iterable[int | Literal["dynamic"]], *, limit: int | None = None
    ) -> dict[str, Any]:
        """Search the schedule space for these row counts on the current GPU, and use the best ones
        from now on. It takes minutes, and happens only where it is asked for.

        Runs `tlcache tune` in a process of its own; the schedules are filed in the cache root.

        Args:
            rows: Values of M, or "dynamic".
            limit: Candidates of a row count at most.

        Returns:
            What `tlcache tune --json` says.

        Raises:
            CaptureError: A CUDA graph is being captured.
            SpecError: The op has a schedule of its own.
            KernelError: The search failed; the message is that of the command.
        """
        name = self.state.operator.name
        if runtime.capturing():
            raise CaptureError(
                f"{name} was to be tuned while a CUDA graph is captured",
                hint="tune before the capture, or with `tlcache tune` beforehand",
            )
        if self.state.schedule is not None:
            raise SpecError(f"{self.instance_key} has a schedule of its own; there is none to find")
        workload = {**self.state.values, **self.state.fixed, "M": list(rows)}
        document = {"version": 1, "workloads": [{"op": name, **workload}]}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as shapes:
            json.dump(document, shapes)
            shapes.flush()
            command = [sys.executable, "-c", "from tlcache.cli import main; main()", "tune"]
            command += ["--shapes", shapes.name, "--json"]
            if limit is not None:
                command += ["--limit", str(limit)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise KernelError(
                f"`tlcache tune` of {self.instance_key} ended with {done.returncode}: "
                + (done.stderr.strip() or done.stdout.strip())[-500:]
            )
        self.state.forget()
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return (of_key, (type(self), self.instance_key))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.instance_key})"


def of_key(kind: type[Op], key: str) -> Op:
    """An op from its key: what copies and pickles are made of."""
    made = kind.__new__(kind)
    made._of(key)
    return made


@functools.lru_cache(maxsize=1024)
def shared(facade: type[Op], rows: Rows, *arguments: Any) -> Op:
    """The op that stands behind equal calls of a function.

    Raises:
        TypeError: An input's dtype, which is among the arguments, is none that an operator takes.
    """
    for dtype in arguments:
        if isinstance(dtype, torch.dtype) and dtype not in DTYPE_NAMES:
            raise TypeError(
                f"x is {dtype}; {facade.kind.name} takes a tensor of {', '.join(DTYPES)}"
            )
    return facade(*arguments, rows=rows)


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})


def direct(*inputs: Any) -> bool:
    """Whether a call may go to the kernel past torch's dispatcher, which costs about 5 µs.

    Not while anything watches or transforms it: a compiler, a gradient (of either mode), `vmap`, a
    dispatch mode, a tensor subclass; nor for tensors without data.
    """
    if is_compiling():
        return False
    for tensor in inputs:
        if type(tensor) not in _PLAIN:
            return False
    if is_grad_enabled():
        for tensor in inputs:
            if tensor is not None and tensor.requires_grad:
                return False
    return not (
        (inputs[0] is not None and inputs[0].is_meta)
        or forward_ad._current_level >= 0
        or _are_functorch_transforms_active()
        or _len_torch_dispatch_stack()
    )
