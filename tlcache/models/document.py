"""A model's operators with their rows, as a shapes document.

Invariant: whatever is in the document expands for every target that its operators are for; what
they refuse is left out, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tlcache import operators, targets
from tlcache.errors import SpecError, UsageError
from tlcache.models.parts import Model, Part
from tlcache.spec import Value

__all__ = ["Line", "ModelShapes", "make"]

_STRICTEST = targets.parse(
    "sm90"
)  # what CUDA kernels refuse, the CPU's may take, never the reverse
_MOST = 10_000
_FIELDS = ("N", "K", "H", "D", "eps", "dtype", "interleaved")


@dataclass(frozen=True)
class Line:
    """A workload of the document, and the parts of the model that run it.

    Attributes:
        op: The operator.
        rows: The values of M.
        values: The workload's other fields.
        parts: Their places in the model.
    """

    op: str
    rows: tuple[int | str, ...]
    values: dict[str, Value]
    parts: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        rows = self.rows[0] if len(self.rows) == 1 else list(self.rows)
        return {"op": self.op, "M": rows, **self.values}


@dataclass(frozen=True)
class ModelShapes:
    """A shapes document.

    Attributes:
        lines: Its workloads, without repeats.
        left_out: What no kernel can be made for, as sentences.
    """

    lines: tuple[Line, ...]
    left_out: tuple[str, ...]

    @property
    def kernels(self) -> int:
        """How many kernels it has for each target."""
        return sum(len(line.rows) for line in self.lines)

    @property
    def text(self) -> str:
        """The document, a workload a line."""
        lines = ",\n    ".join(json.dumps(line.to_json()) for line in self.lines)
        return f'{{\n  "version": 1,\n  "workloads": [\n    {lines}\n  ]\n}}\n'


def make(
    model: Model, batches: Sequence[int], prompts: Sequence[int], *, exact: bool = False
) -> ModelShapes:
    """The workloads of a model.

    Args:
        model: Its parts.
        batches: Sequences that are decoded at a time: a row each.
        prompts: Lengths of prompts: a row for each token of each sequence. 1 sequence at a time
            where `batches` is empty.
        exact: Leave out the kernels for any number of rows, but where rows cannot be foreseen.

    Raises:
        UsageError: There are no rows, or too many.
    """
    if exact and not (batches or prompts):
        raise UsageError(
            "`--exact` without rows asks for nothing",
            hint="name them: `--batch 1,2,4 --prompt 128,2048`",
        )
    if len(batches) * len(prompts) > _MOST:
        raise UsageError(
            f"{len(batches):,} batches of {len(prompts):,} prompts are more than {_MOST:,} "
            "numbers of rows",
            hint="thin them out: the kernel for any number of rows serves the rest",
        )
    sequences = set(batches) or ({1} if prompts else set())
    tokens = sequences | {batch * prompt for batch in sequences for prompt in prompts}
    rows = {"tokens": tokens, "sequences": sequences, "routed": set[int]()}
    merged: dict[tuple[str, str], tuple[Part, set[int], list[str], bool]] = {}
    for part in model.parts:
        same = (part.op, json.dumps(part.values, sort_keys=True))
        _, numbers, places, _ = merged.setdefault(same, (part, set(), [], False))
        numbers |= {part.times * row for row in rows[part.rows]}
        places.append(part.what)
        merged[same] = (part, numbers, places, merged[same][3] or part.rows == "routed")
    return _checked(
        Line(
            part.op,
            (*sorted(numbers), *(() if exact and not routed else ("dynamic",))),
            {name: part.values[name] for name in _FIELDS if name in part.values},
            tuple(places),
        )
        for part, numbers, places, routed in merged.values()
    )


def _checked(lines: Iterable[Line]) -> ModelShapes:
    sound: list[Line] = []
    left_out: list[str] = []
    for line in lines:
        fit: list[int | str] = []
        reasons: list[str] = []
        for row in line.rows:
            try:
                operators.get(line.op).spec({"M": row, **line.values}, _STRICTEST)
                fit.append(row)
            except SpecError as error:
                reasons.append(error.message)
        if reasons:
            left_out.append(f"{', '.join(line.parts)}: {line.op}: {reasons[0]}")
        if fit:
            sound.append(replace(line, rows=tuple(fit)))
    if not sound:
        raise UsageError(
            "no operator can run any part of this model", hint="; ".join(left_out)[:500] or None
        )
    return ModelShapes(tuple(sound), tuple(left_out))
