"""Operators: kernels that have a name, and the table of those that are installed.

An operator knows which workloads it takes and which schedule it runs them with, so that `rms_norm`
and a few numbers in shapes.json become a complete spec. Packages add theirs through the entry-point
group `tlcache.ops`; an entry point yields a mapping of names to operators. Loading one must not
import torch or
TileLang: the command line does it only to read shapes.json.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from tlcache.errors import SpecError
from tlcache.spec import KernelSpec, Value
from tlcache.targets import Target

__all__ = [
    "GROUP",
    "Operator",
    "WorkloadError",
    "get",
    "installed",
    "origins",
    "owns",
    "shapes_entry",
]

GROUP = "tlcache.ops"


class WorkloadError(SpecError):
    """A value of a workload or schedule is impossible; `field` names it."""

    def __init__(self, field: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.field = field

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.field, self.message, self.hint))


def _rebuild(field: str, message: str, hint: str | None) -> WorkloadError:
    return WorkloadError(field, message, hint=hint)


@dataclass(frozen=True)
class Operator:
    """A kernel with a name.

    Attributes:
        name: As shapes.json says it.
        kernel: Import path of the factory.
        workload: A frozen dataclass whose fields are the factory's arguments, without the target.
            Its `__post_init__` raises WorkloadError for values that no kernel can be made for.
        schedule: The default schedule for a workload on a target, by the rule that its docstring
            states.
        check_schedule: Raises WorkloadError for a schedule that cannot work.
        candidates: The schedule space of a workload on a target, for `tlcache tune`; None where
            there is but one schedule.
        example: Inputs of a workload for so many rows on a device (of torch's naming), as the
            kernel takes them: contiguous, in its order. For tuning.
    """

    name: str
    kernel: str
    workload: type[Any]
    schedule: Callable[[Any, Target], dict[str, Value]]
    check_schedule: Callable[[Any, Mapping[str, Value], Target], None]
    candidates: Callable[[Any, Target], Iterable[dict[str, Value]]] | None = None
    example: Callable[[Any, int, str], tuple[Any, ...]] | None = None

    def __post_init__(self) -> None:
        _made.setdefault(self.kernel, []).append(self)
        shapes_entry.cache_clear()

    def spec(
        self,
        values: Mapping[str, Any],
        target: Target,
        schedule: Mapping[str, Value] | None = None,
    ) -> KernelSpec:
        """The spec of one workload.

        Args:
            values: The workload's fields by name; those with a default may be left out.
            target: What to compile for.
            schedule: A schedule of one's own; the default one where None.

        Raises:
            WorkloadError: A field is unknown, missing or impossible.
        """
        names = [field.name for field in fields(self.workload)]
        for name in values:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1, cutoff=0.5)
                raise WorkloadError(
                    name,
                    f"{self.name} has no field {name!r}; it takes {', '.join(names)}",
                    hint=f"did you mean `{near[0]}`?" if near else None,
                )
        for field in fields(self.workload):
            if field.name not in values and field.default is MISSING:
                raise WorkloadError(
                    field.name, f"{self.name} needs {field.name}; it takes {', '.join(names)}"
                )
        workload = self.workload(**values)
        if schedule is None:
            schedule = self.schedule(workload, target)
        else:
            self.check_schedule(workload, schedule, target)
        return KernelSpec(
            self.kernel, {name: getattr(workload, name) for name in names}, schedule, target
        )

    def accepts(self, spec: KernelSpec) -> bool:
        """Whether a spec is one of this operator's, workload and schedule. One that was written for
        an earlier version of it may be anything.
        """
        try:
            return self.spec(spec.workload, spec.target, spec.schedule) == spec
        except (SpecError, LookupError, TypeError, ValueError, AttributeError):
            return False


# Every operator that there is in this process, by its kernel: who has a spec of one has it, too.
_made: dict[str, list[Operator]] = {}


@functools.lru_cache(maxsize=4096)
def shapes_entry(spec: KernelSpec) -> Mapping[str, Any] | None:
    """The entry of a shapes.json's `workloads` that asks for exactly this kernel.

    It names the operator where one that this process knows owns the kernel, with a schedule only
    where it is not the default one; else the factory. Nothing is imported for it.

    Returns:
        The entry; None where a shapes.json cannot say it, since lists there are products.
    """
    for operator in _made.get(spec.kernel, ()):
        if operator.accepts(spec):  # so it has neither flags nor pass configs of its own
            entry = {"op": operator.name, **spec.workload}
            if operator.spec(spec.workload, spec.target).schedule != spec.schedule:
                entry["schedule"] = dict(spec.schedule)
            return entry
    said = {"args": spec.workload, "schedule": spec.schedule, "pass_configs": spec.pass_configs}
    values = [value for part in said.values() for value in part.values()]
    if (
        any(type(value) not in (bool, int, float, str) for value in values)
        or spec.execution_backend != spec.target.execution_backend
    ):
        return None
    entry = {"kernel": spec.kernel, **{name: dict(part) for name, part in said.items() if part}}
    if spec.compile_flags:
        entry["compile_flags"] = list(spec.compile_flags)
    return entry


@functools.cache
def installed() -> Mapping[str, Operator]:
    """All operators that installed packages offer, by name."""
    from importlib.metadata import entry_points

    found: dict[str, Operator] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        for name, operator in point.load().items():
            if name in found and found[name] != operator:
                raise SpecError(
                    f"two packages offer an operator {name!r}: "
                    f"{found[name].kernel} and {operator.kernel}"
                )
            found[name] = operator
    return found


def owns(kernel: str) -> bool:
    """Whether a factory is an operator's, so that processes ask for its kernels by specs; a
    program's own are asked for by calls.
    """
    return any(operator.kernel == kernel for operator in installed().values())


def get(name: str) -> Operator:
    """One operator by name.

    Raises:
        SpecError: No installed package offers it.
    """
    table = installed()
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, 1)
    raise SpecError(
        f"unknown operator {name!r}",
        hint=(f"did you mean `{near[0]}`? " if near else "")
        + f"installed: {', '.join(sorted(table))}",
    )


def origins(names: Iterable[str]) -> list[str]:
    """The import paths of the tables that installed packages offer these operators in, like
    `ops.catalog:OPERATORS`.
    """
    from importlib.metadata import entry_points

    wanted = set(names)
    points = entry_points(group=GROUP)
    return sorted({point.value for point in points if wanted & set(point.load())})
