"""What a workload's fields may be, with one message for each kind of fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlcache.operators import WorkloadError
from tlcache.spec import Value

__all__ = ["MAX_ROWS", "ROW_DTYPES", "choice", "dtype", "flag", "is_int", "not_negative", "only"]
__all__ += ["rows", "schedule_fields", "size"]

MAX_ROWS = 2**31 - 1
ROW_DTYPES = ("bfloat16", "float16", "float32")
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def rows(workload: Any) -> None:
    """M is a positive integer, or "dynamic" for one kernel that takes any number of rows."""
    if workload.M != "dynamic" and not (is_int(workload.M) and 1 <= workload.M <= MAX_ROWS):
        raise WorkloadError("M", f"M is {workload.M!r}; rows are a positive integer, or 'dynamic'")


def size(workload: Any, name: str, most: int, what: tuple[str, str], multiple: int = 1) -> None:
    """A field is an integer from 1 to `most`, and a multiple of something."""
    value = getattr(workload, name)
    if not (is_int(value) and 1 <= value <= most):
        raise WorkloadError(name, f"{name} is {value!r}; {what[0]} from 1 to {most} {what[1]}")
    if value % multiple:
        raise WorkloadError(name, f"{name} is {value}; it is a multiple of {multiple}")


def not_negative(workload: Any, name: str) -> None:
    """A field is a finite number that is not negative; it is kept as a float."""
    value = getattr(workload, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e30:
        raise WorkloadError(
            name, f"{name} is {value!r}; it is a finite number that is not negative"
        )
    object.__setattr__(workload, name, float(value))


def flag(workload: Any, name: str) -> None:
    """A field is true or false."""
    value = getattr(workload, name)
    if not isinstance(value, bool):
        raise WorkloadError(name, f"{name} is {value!r}; it is true or false")


def dtype(workload: Any, known: tuple[str, ...] = ROW_DTYPES) -> None:
    """The dtype is a known one; short names are kept as long ones."""
    name = _ALIASES.get(str(workload.dtype), workload.dtype)
    if name not in known:
        raise WorkloadError(
            "dtype", f"dtype is {workload.dtype!r}; it is one of {', '.join(known)}"
        )
    object.__setattr__(workload, "dtype", name)


def schedule_fields(schedule: Mapping[str, Value], names: tuple[str, ...]) -> None:
    """A schedule has exactly these fields."""
    if set(schedule) != set(names):
        raise WorkloadError(
            "schedule",
            f"the schedule has {', '.join(sorted(schedule)) or 'no fields'}; "
            f"it takes {', '.join(names)}",
        )


def only(schedule: Mapping[str, Value], least: Mapping[str, Value]) -> None:
    """On the CPU there is one schedule."""
    if not all(_same(schedule[name], value) for name, value in least.items()):
        given = " ".join(f"{name}={value}" for name, value in schedule.items())
        wanted = " ".join(f"{name}={value}" for name, value in least.items())
        raise WorkloadError("schedule", f"{given}; the CPU kernel takes {wanted} only")


def choice(schedule: Mapping[str, Value], name: str, known: tuple[Value, ...]) -> None:
    """A field of a schedule is one of these values."""
    value = schedule[name]
    if not any(_same(value, one) for one in known):
        raise WorkloadError(
            f"schedule.{name}", f"{name} is {value!r}; it is one of {', '.join(map(str, known))}"
        )


def _same(value: Value, other: Value) -> bool:
    """Equal and of one type: 128.0 and True would make other specs than 128 and 1."""
    return type(value) is type(other) and value == other
