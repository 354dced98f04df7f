"""Which shard a process is, by what its scheduler tells it in the environment.

    Kubernetes  indexed Job       JOB_COMPLETION_INDEX, from 0; the manifest sets JOB_COMPLETIONS,
    or
                                  JOB_PARALLELISM where all run at once
    Slurm       job array         SLURM_ARRAY_TASK_ID, _MIN, _MAX, _COUNT, _STEP
    torchrun                      RANK, from 0, and WORLD_SIZE

Invariant: what is said is taken whole or refused. Where two schedulers say different things, none
is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tlcache.errors import UsageError
from tlcache.warm.shards import MOST, Shard

__all__ = ["detect"]

_BY_HAND = "or name it: `--shard 2/8` is the second of eight"


class _Told(NamedTuple):
    """What a scheduler says: the shard, and the scheduler's own words for it."""

    shard: Shard
    words: str


def detect(environ: Mapping[str, str]) -> Shard:
    """The shard that the environment tells.

    Raises:
        UsageError: It tells none, half of one, nonsense, or two.
    """
    told = [found for ask in _SCHEDULERS if (found := ask(environ)) is not None]
    if not told:
        raise UsageError(
            "`--shard auto` finds no scheduler: neither JOB_COMPLETION_INDEX (Kubernetes), nor "
            "SLURM_ARRAY_TASK_ID (Slurm), nor RANK (torchrun) is set",
            hint=f"start it as an indexed job, an array or by torchrun, {_BY_HAND}",
        )
    if len({found.shard for found in told}) > 1:
        raise UsageError(
            f"`--shard auto` is told two things: {' and '.join(found.words for found in told)}",
            hint=f"unset the variables of the one that does not start the shards, {_BY_HAND}",
        )
    return told[0].shard


def _kubernetes(environ: Mapping[str, str]) -> _Told | None:
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    name = next((each for each in _COUNTS if environ.get(each)), None)
    if name is None:
        raise UsageError(
            "JOB_COMPLETION_INDEX is set, and neither JOB_COMPLETIONS nor JOB_PARALLELISM is: "
            "Kubernetes does not tell a pod how many there are",
            hint="set JOB_COMPLETIONS in the container's `env` to the Job's `completions`",
        )
    index, count = _number(environ, "JOB_COMPLETION_INDEX"), _number(environ, name)
    return _told(
        *("Kubernetes", index, count, f"JOB_COMPLETION_INDEX={index} {name}={count}"),
        hint="JOB_COMPLETIONS is the Job's `completions`; JOB_PARALLELISM serves where it is equal",
    )


_COUNTS = ("JOB_COMPLETIONS", "JOB_PARALLELISM")


def _slurm(environ: Mapping[str, str]) -> _Told | None:
    if "SLURM_ARRAY_TASK_ID" not in environ:
        return None
    task, first, last, count = (
        _number(environ, f"SLURM_ARRAY_TASK_{name}") for name in ("ID", "MIN", "MAX", "COUNT")
    )
    step = _number(environ, "SLURM_ARRAY_TASK_STEP") if "SLURM_ARRAY_TASK_STEP" in environ else 1
    words = f"SLURM_ARRAY_TASK_ID={task} of {first}-{last}:{step}, {count} tasks"
    even = step > 0 and last >= first and count == (last - first) // step + 1
    if not even or (task - first) % step:
        raise UsageError(
            f"the tasks of the Slurm array do not count evenly: {words}",
            hint=f"`sbatch --array=0-7` has eight that do, {_BY_HAND}",
        )
    return _told("Slurm", (task - first) // step, count, words)


def _torchrun(environ: Mapping[str, str]) -> _Told | None:
    if "RANK" not in environ:
        return None
    index, count = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    return _told("torchrun", index, count, f"RANK={index} WORLD_SIZE={count}")


_SCHEDULERS: tuple[Callable[[Mapping[str, str]], _Told | None], ...] = (
    _kubernetes,
    _slurm,
    _torchrun,
)


def _told(scheduler: str, index: int, count: int, words: str, *, hint: str | None = None) -> _Told:
    if not 0 <= index < count <= MOST:
        raise UsageError(
            f"{scheduler} tells of no shard that there can be: {words}",
            hint=hint or f"the first is 0, and the last one less than the number; {_BY_HAND}",
        )
    return _Told(Shard(index + 1, count), f"{words} ({scheduler})")


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 10):
        what = "is not set" if text is None else f"is {text!r}, which is no number from 0 on"
        raise UsageError(f"{name} {what}, so `--shard auto` cannot tell the shard", hint=_BY_NAME)
    return int(text)


_BY_NAME = "name the shard: `--shard 2/8` is the second of eight"
