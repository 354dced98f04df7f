"""shapes.json: the workloads to have warm, and their expansion into specs.

Invariant: whatever is wrong with a document is one ShapesError that names the file and the path in
it, like `workloads[2].M`; nothing is compiled of a document that has an error.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tlcache import arguments, operators
from tlcache.closure import factory_digest
from tlcache.errors import FactoryError, ShapesError, SpecError, TargetError
from tlcache.fingerprint import key_environment
from tlcache.operators import Operator, WorkloadError
from tlcache.spec import KernelSpec
from tlcache.targets import Target, parse

__all__ = ["FactoryWorkload", "OpWorkload", "Range", "Shapes", "Unreplayable", "Wanted"]
__all__ += ["checked", "expand", "have_found", "json_schema", "load", "targets"]

MOST = 100_000
"""Kernels that one document may expand to; more is a slip of the pen."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Range(_Model):
    """A range of integers, both ends included: by factors (`times`) or by steps (`step`, by default
    1).
    """

    first: StrictInt = Field(alias="from", description="The first value.")
    to: StrictInt = Field(description="The last value at most; included where the range meets it.")
    times: StrictInt | None = Field(
        None, ge=2, description="Each value is the last one times this."
    )
    step: StrictInt | None = Field(None, ge=1, description="Each value is the last one plus this.")

    @model_validator(mode="after")
    def _sound(self) -> Range:
        if self.times is not None and self.step is not None:
            raise ValueError("a range has times or step, not both")
        if self.first > self.to:
            raise ValueError(f"a range goes upwards, and this one from {self.first} to {self.to}")
        if self.times is not None and self.first < 1:
            raise ValueError(f"a range with times starts at 1 or more, not at {self.first}")
        return self

    def count(self) -> int:
        """How many values it has; it may be more than fit in a list."""
        if self.times is None:
            return (self.to - self.first) // (self.step or 1) + 1
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]
        value = self.first
        while value <= self.to:
            yield value
            value = value * self.times if self.times is not None else value + (self.step or 1)


def _known(form: dict[str, Any]) -> dict[str, Any]:
    if not arguments.is_form(form):
        raise PydanticCustomError("form", "an object is a range, or one of TileLang's arguments")
    return form


Scalar = StrictBool | StrictInt | StrictFloat | StrictStr
Values = Scalar | Range | list[Scalar | Range]
Form = Annotated[
    dict[str, Any],
    AfterValidator(_known),
    WithJsonSchema(
        {
            "type": "object",
            "description": 'An argument that is no plain value, like {"$tuple": [1, 2]}.',
            "propertyNames": {"enum": list(arguments.FORMS)},
            "minProperties": 1,
            "maxProperties": 1,
        }
    ),
]
Argument = Scalar | Form | None
Arguments = Scalar | Range | Form | list[Scalar | Range | Form | None] | None


class OpWorkload(_Model):
    """Workloads of an operator by name; every field of its workload is a value, a range, or a
    list.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Values]

    op: StrictStr = Field(description="An installed operator, like rms_norm.")
    schedule: Literal["default"] | dict[str, Scalar] = Field(
        "default",
        description="The operator's default schedule (the tuned one, if there is), or one's own.",
    )


class FactoryWorkload(_Model):
    """Workloads of a kernel by its factory's import path."""

    kernel: StrictStr = Field(
        description="Import path of the factory, like package.module:factory."
    )
    args: dict[str, Arguments] = Field(
        default_factory=dict, description="What the factory is called with."
    )
    schedule: dict[str, Argument] = Field(
        default_factory=dict,
        description="What the JITImpl that it returns is called with; for a prim_func, what "
        "tilelang.compile is.",
    )
    pass_configs: dict[str, Scalar] = Field(
        default_factory=dict, description="TileLang pass configs on top of the factory's own."
    )
    compile_flags: list[StrictStr] = Field(
        default_factory=list, description="Compiler flags on top of the factory's own."
    )
    tilelang_keys: dict[str, StrictStr] = Field(
        default_factory=dict,
        description="TileLang's keys for the kernel as it was recorded, by release, machine and "
        "target; a warm for the same must come to the same key.",
    )

    @model_validator(mode="after")
    def _one_kernel(self) -> FactoryWorkload:
        if self.tilelang_keys and any(_length(values) != 1 for values in self.args.values()):
            raise ValueError(
                "tilelang_keys are those of one kernel, and these args ask for several"
            )
        return self


class Unreplayable(BaseModel):
    """A kernel that a recording met and that cannot be made again; it is told, and nothing else."""

    model_config = ConfigDict(extra="allow", frozen=True)

    kernel: StrictStr = Field(description="What it is called.")
    params: list[StrictStr] = Field(default_factory=list, description="Its parameters.")
    reason: StrictStr = Field("", description="Why it cannot be made again.")
    remedy: StrictStr | None = Field(None, description="What to do about that.")


def _kind(value: Any) -> str:
    keys = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return "factory" if "kernel" in keys else "op"


Workload = Annotated[
    Annotated[OpWorkload, Tag("op")] | Annotated[FactoryWorkload, Tag("factory")],
    Discriminator(_kind),
]


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("the version is the number 1")
    return value


class Shapes(_Model):
    """A shapes document, version 1."""

    version: Annotated[Literal[1], BeforeValidator(_no_bool)]
    targets: list[StrictStr | dict[str, Any]] | None = Field(
        None,
        description="What to compile for, like sm90, cpu or TileLang's dicts; --target wins.",
    )
    workloads: list[Workload] = Field(
        description="What to have warm; each is expanded as a product."
    )
    paths: list[StrictStr] = Field(
        default_factory=list,
        description="Directories that a recorded program imported its kernels from.",
    )
    unreplayable: list[Unreplayable] = Field(
        default_factory=list, description="What a recording met and nothing can make again."
    )


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a shapes document, as published in `shapes.schema.json`."""
    schema = Shapes.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


@dataclass(frozen=True)
class Wanted:
    """One kernel that a document asks for.

    Attributes:
        spec: The kernel.
        where: The path in the document, like `workloads[0]`.
        op: The operator's name, or None for a factory's kernel.
        key: The key that TileLang is to have for it, where a recording tells it.
    """

    spec: KernelSpec
    where: str
    op: str | None
    key: str | None = None


# --- reading ---

_HINT = (
    "`tlcache warm --schema` prints the JSON Schema of a shapes document; the README has an example"
)


def load(path: str | Path) -> Shapes:
    """Read a shapes document.

    Raises:
        ShapesError: It is missing, not JSON, or not what the schema says.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ShapesError(
            f"{path} cannot be read: {(error.strerror or str(error)).lower()}",
            hint="`--shapes` takes a file like examples/shapes.json",
        ) from error
    except UnicodeDecodeError as error:
        raise ShapesError(f"{path} is not UTF-8 text: {error.reason}", hint=_HINT) from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShapesError(
            f"{path} is not JSON: {error}", hint=f"`python -m json.tool {shlex.quote(str(path))}`"
        ) from error
    return checked(document, path)


def checked(document: Any, path: str | Path) -> Shapes:
    """A shapes document that was read already.

    Args:
        document: What its JSON says.
        path: Its file, or another name for it, for messages.

    Raises:
        ShapesError: It is not what the schema says.
    """
    try:
        return Shapes.model_validate(document)
    except ValidationError as error:
        raise _explained(path, document, error) from error


def _explained(path: str | Path, document: Any, error: ValidationError) -> ShapesError:
    """The first fault of a document as a sentence with its path."""
    errors = error.errors(include_url=False, include_context=False)
    place, value = _place(document, errors[0]["loc"])
    # A value may be any of several things: then each of them says why it is not that one.
    same = [each for each in errors if _place(document, each["loc"])[0].startswith(place)]
    told = next((each for each in same if each["type"] == "value_error"), None)
    first = told or errors[0]
    place, value = _place(document, first["loc"])
    if all(each["type"] == "missing" for each in same):
        field = str(first["loc"][-1])
        where = f"{place}.{field}" if place else field
        return ShapesError(f"{path}: {where} is missing", hint=_HINT)
    if first["type"] == "extra_forbidden" and len(same) == 1:
        return ShapesError(
            f"{path}: {place} is not a field that a shapes document has there", hint=_HINT
        )
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    if told is not None:
        reason = told["msg"].removeprefix("Value error, ")
    elif len(same) > 1:
        reason = "it takes a number, a text, a range, or a list of these"
    else:
        reason = first["msg"][0].lower() + first["msg"][1:]
    return ShapesError(f"{path}: {place or 'the document'} is {shown}; {reason}", hint=_HINT)


def _place(document: Any, loc: tuple[int | str, ...]) -> tuple[str, Any]:
    """Where in the document pydantic's location is, as far as it goes, and the value there.

    Its locations also hold the tags of unions (`op`, `factory`, `int`), which are no fields.
    """
    place, value = "", document
    for depth, part in enumerate(loc):
        if depth == 2 and loc[0] == "workloads" and part in ("op", "factory"):
            continue
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            break
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    return place, value


def have_found(shapes: Shapes) -> None:
    """Have factories found where `python -m` would find them, and where a recorded program did."""
    for place in (os.getcwd(), *shapes.paths):
        if place not in sys.path and os.path.isdir(place):
            sys.path.append(place)


# --- expanding ---


def targets(shapes: Shapes, path: str | Path) -> list[Target]:
    """The document's own targets, in canonical form, without repeats.

    Raises:
        TargetError: One is unknown.
    """
    found: dict[Target, None] = {}
    for index, spelling in enumerate(shapes.targets or ()):
        try:
            found[parse(spelling)] = None
        except TargetError as error:
            raise TargetError(
                f"{path}: targets[{index}]: {error.message}", hint=error.hint or _HINT
            ) from error
    return list(found)


Choice = Callable[[Operator, KernelSpec], KernelSpec]
"""What to compile where a document says `"schedule": "default"`: the tuned schedule, say."""


def expand(
    shapes: Shapes,
    path: str | Path,
    chosen: Iterable[Target],
    choose: Choice = lambda operator, spec: spec,
) -> list[Wanted]:
    """All kernels that a document asks for, without repeats, in the document's order.

    Args:
        shapes: The document.
        path: Its file, for messages.
        chosen: The targets to compile for.
        choose: Chooses the schedule where the document leaves it open.

    Raises:
        ShapesError: An operator or factory is unknown, a value is impossible, or they are too many.
    """
    chosen = list(chosen)
    total = 0
    for index, workload in enumerate(shapes.workloads):
        sizes = [_length(values) for values in _fields(workload).values()]
        total += math.prod(sizes) * len(chosen)
        if total > MOST:
            raise ShapesError(
                f"{path}: workloads[{index}] asks for {total:,} kernels in all; at most {MOST:,}",
                hint='thin out a range, like {"from": 1, "to": 4096, "times": 2}',
            )
    found: dict[KernelSpec, Wanted] = {}
    for target in chosen:
        for index, workload in enumerate(shapes.workloads):
            for wanted in _expanded(workload, f"workloads[{index}]", path, target, choose):
                found.setdefault(wanted.spec, wanted)
    return list(found.values())


def _fields(workload: OpWorkload | FactoryWorkload) -> Mapping[str, Arguments]:
    if isinstance(workload, OpWorkload):
        return workload.model_extra or {}
    return workload.args


def _length(values: Arguments) -> int:
    items = values if isinstance(values, list) else [values]
    return sum(item.count() if isinstance(item, Range) else 1 for item in items)


def _listed(values: Arguments) -> list[Argument]:
    items = values if isinstance(values, list) else [values]
    flat: list[Argument] = []
    for item in items:
        if isinstance(item, Range):
            flat.extend(item)
        else:
            flat.append(item)
    return flat


def _expanded(
    workload: OpWorkload | FactoryWorkload,
    where: str,
    path: str | Path,
    target: Target,
    choose: Choice,
) -> Iterator[Wanted]:
    fields = _fields(workload)
    for name, values in fields.items():
        if not _length(values):
            args = ".args" if isinstance(workload, FactoryWorkload) else ""
            raise ShapesError(
                f"{path}: {where}{args}.{name} is an empty list; it asks for nothing", hint=_HINT
            )
    try:
        operator = operators.get(workload.op) if isinstance(workload, OpWorkload) else None
    except SpecError as error:
        raise ShapesError(
            f"{path}: {where}.op: {error.message}", hint=error.hint or _HINT
        ) from error
    for combination in itertools.product(*map(_listed, fields.values())):
        given = dict(zip(fields, combination, strict=True))
        try:
            if operator is not None and isinstance(workload, OpWorkload):
                if workload.schedule == "default":
                    spec = choose(operator, operator.spec(given, target))
                else:
                    spec = operator.spec(given, target, dict(workload.schedule))
                yield Wanted(spec, where, operator.name)
            elif isinstance(workload, FactoryWorkload):
                factory_digest(workload.kernel)  # there is such a factory
                yield Wanted(
                    KernelSpec(
                        workload.kernel,
                        given,
                        workload.schedule,
                        target,
                        pass_configs=workload.pass_configs,
                        compile_flags=workload.compile_flags,
                    ),
                    where,
                    None,
                    workload.tilelang_keys.get(key_environment(target.name))
                    if workload.tilelang_keys
                    else None,
                )
        except WorkloadError as error:
            raise ShapesError(
                f"{path}: {where}.{error.field}: {error.message}", hint=error.hint or _HINT
            ) from error
        except FactoryError as error:
            raise ShapesError(
                f"{path}: {where}.kernel: {error.message}", hint=error.hint or _HINT
            ) from error
        except SpecError as error:
            raise ShapesError(
                f"{path}: {where}: {error.message}", hint=error.hint or _HINT
            ) from error
