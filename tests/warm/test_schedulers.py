"""What schedulers say of a shard: as each of them says it, and what nobody could mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlcache.errors import UsageError
from tlcache.warm import schedulers
from tlcache.warm.shards import Shard


def array(task: int, first: int, last: int, count: int, step: int | None = 1) -> dict[str, str]:
    told = {"ID": task, "MIN": first, "MAX": last, "COUNT": count, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{k}": str(v) for k, v in told.items() if v is not None}


def job(index: object, **counts: object) -> dict[str, str]:
    told = {"JOB_COMPLETION_INDEX": index, **counts}
    return {name: str(value) for name, value in told.items()}


@pytest.mark.parametrize(
    ("environ", "shard"),
    [
        (job(0, JOB_COMPLETIONS=1), (1, 1)),
        (job(7, JOB_COMPLETIONS=8), (8, 8)),
        (job(3, JOB_PARALLELISM=4), (4, 4)),
        (job(5, JOB_COMPLETIONS=8, JOB_PARALLELISM=4), (6, 8)),
        (job(5, JOB_COMPLETIONS="", JOB_PARALLELISM=8), (6, 8)),
        (array(0, 0, 7, 8), (1, 8)),
        (array(8, 1, 8, 8), (8, 8)),
        (array(5, 5, 5, 1), (1, 1)),
        (array(4, 0, 14, 8, 2), (3, 8)),
        (array(12, 0, 15, 4, 4), (4, 4)),
        (array(3, 0, 7, 8, None), (4, 8)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (4, 8)),
        ({"RANK": "1", "WORLD_SIZE": "2", **job(1, JOB_COMPLETIONS=2)}, (2, 2)),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "RANK": "0", "WORLD_SIZE": "2"}, (1, 2)),
    ],
)
def test_a_shard_is_told(environ, shard):
    assert schedulers.detect(environ) == Shard(*shard)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "finds no scheduler"),
        ({"WORLD_SIZE": "8", "JOB_COMPLETIONS": "8"}, "finds no scheduler"),
        (job(0), "neither JOB_COMPLETIONS nor JOB_PARALLELISM is"),
        (job(5, JOB_PARALLELISM=4), "Kubernetes tells of no shard that there can be"),
        (job(0, JOB_COMPLETIONS=0), "JOB_COMPLETION_INDEX=0 JOB_COMPLETIONS=0"),
        (job("", JOB_COMPLETIONS=8), "JOB_COMPLETION_INDEX is '', which is no number"),
        (job(-1, JOB_COMPLETIONS=8), "JOB_COMPLETION_INDEX is '-1', which is no number"),
        (job(0, JOB_COMPLETIONS="eight"), "JOB_COMPLETIONS is 'eight', which is no number"),
        (job(0, JOB_COMPLETIONS=10_001), "tells of no shard that there can be"),
        (job("²", JOB_COMPLETIONS=8), "JOB_COMPLETION_INDEX is '²', which is no number"),
        (array(3, 1, 7, 3), "do not count evenly: SLURM_ARRAY_TASK_ID=3 of 1-7:1, 3 tasks"),
        (array(3, 0, 6, 4, 2), "do not count evenly"),
        (array(9, 0, 7, 8), "Slurm tells of no shard that there can be"),
        (array(0, 1, 8, 8), "Slurm tells of no shard that there can be"),
        (array(0, 0, 7, 8, 0), "do not count evenly"),
        ({"SLURM_ARRAY_TASK_ID": "3"}, "SLURM_ARRAY_TASK_MIN is not set"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "torchrun tells of no shard that there can be"),
        ({"RANK": "0", "WORLD_SIZE": "4", **array(3, 0, 7, 8)}, "is told two things"),
        ({"RANK": "0", "WORLD_SIZE": "2", **job(1, JOB_COMPLETIONS=2)}, "is told two things"),
        ({"RANK": "x", "WORLD_SIZE": "2", **job(1, JOB_COMPLETIONS=2)}, "RANK is 'x'"),
    ],
)
def test_what_tells_no_shard_is_said(environ, said):
    with pytest.raises(UsageError) as caught:
        schedulers.detect(environ)
    assert said in caught.value.message
    assert "--shard" in caught.value.hint or "JOB_COMPLETIONS" in caught.value.hint


NAMES = [*array(0, 0, 0, 0), *job(0, JOB_COMPLETIONS=1, JOB_PARALLELISM=1), "RANK", "WORLD_SIZE"]


@given(st.dictionaries(st.sampled_from(NAMES), st.integers(-2, 12).map(str) | st.text(max_size=3)))
def test_whatever_the_environment_says_it_is_a_shard_or_a_usage_error(environ):
    try:
        shard = schedulers.detect(environ)
    except UsageError:
        return
    assert 1 <= shard.number <= shard.total


@given(st.integers(0, 20), st.integers(1, 9), st.integers(1, 30))
def test_the_tasks_of_an_even_array_are_all_shards_once(first, step, count):
    last = first + step * (count - 1)
    tasks = range(first, last + 1, step)
    told = [schedulers.detect(array(task, first, last, count, step)) for task in tasks]
    assert told == [Shard(number, count) for number in range(1, count + 1)]
