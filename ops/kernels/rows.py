"""How a CUDA block holds rows: `threads // block_m` threads (lanes) to a row, each with vectors of
up to 16 bytes, as many as fit in registers; a longer row goes tile by tile. A group of lanes may
take several rows, all of which it loads before it reduces the first.

A reduction over a row is a shuffle within each warp and one exchange of the warps' results through
shared memory: one barrier, where TileLang's own `reduce_sum` takes two for each doubling above a
warp. Rows past the last one repeat it, so that every thread meets every barrier, and are not
written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ops.kernels import fields
from tlcache.operators import WorkloadError
from tlcache.spec import Value
from tlcache.targets import Target

__all__ = ["CPU_SCHEDULE", "FEW", "HELD", "MANY", "Macros", "Plan"]
__all__ += ["check_schedule", "default_schedule", "macros", "plan", "schedules"]

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
HELD = 128
"""Bytes of a row that a thread holds at most: 64 elements of 2 bytes are 125 registers (ptxas,
sm_90a); 128 take all 255.
"""
CPU_SCHEDULE: dict[str, Value] = {"block_m": 1, "threads": 1, "each": 1, "prefetch": False}
"""The one schedule on the CPU, and so the names of a schedule's fields."""


class Plan(NamedTuple):
    """How a row is spread over threads.

    Attributes:
        N: Elements a row.
        block_m: Groups of lanes a block.
        each: Rows a group.
        lanes: Threads a row; a multiple of 32.
        vec: Elements a load: as many as 16 bytes hold and N is a multiple of.
        vectors: Loads a thread and tile.
        tiles: Tiles a row; where there are several, a group has one row.
    """

    N: int
    block_m: int
    each: int
    lanes: int
    vec: int
    vectors: int
    tiles: int

    @property
    def held(self) -> int:
        """Elements of a row that a thread holds."""
        return self.vectors * self.vec

    @property
    def warps(self) -> int:
        """Warps a row."""
        return self.lanes // 32

    @property
    def rows(self) -> int:
        """Rows a block."""
        return self.block_m * self.each

    def clamped(self, row: Any, count: Any) -> Any:
        """The row that a thread reads: past the last one, that. A block of one row has none past
        it.
        """
        import tilelang.language as T

        return row if self.rows == 1 else T.min(row, count - 1)

    def within(self, row: Any, count: Any) -> Any:
        """Whether a row is to be written."""
        return True if self.rows == 1 else row < count

    @property
    def whole(self) -> bool:
        """Whether every load of every thread lies within the row."""
        return self.tiles * self.lanes * self.held == self.N


def plan(N: int, dtype: str, block_m: int, threads: int, each: int = 1, held: int = HELD) -> Plan:
    """The plan for rows of N elements.

    Args:
        N: Elements a row.
        dtype: Of the elements.
        block_m: Groups of lanes a block.
        threads: Threads a block, at least 32 a group.
        each: Rows a group.
        held: Bytes that a thread may hold of a row.
    """
    lanes = threads // block_m
    size = _BYTES[dtype]
    vec = 16 // size
    while N % vec:
        vec //= 2
    # 1024 threads have 64 registers each, which half as much fills.
    most = held // (2 if threads == 1024 else 1) // size // vec
    vectors = min(-(-N // (lanes * vec)), max(1, most))
    tiles = -(-N // (lanes * vec * vectors))
    return Plan(N, block_m, each if tiles == 1 else 1, lanes, vec, vectors, tiles)


class Macros(NamedTuple):
    """Pieces of a kernel body, as TileLang macros. `base` is where in the thread's own buffer.

    Attributes:
        load: `load(values, base, source, row, lane, tile, fill)`: a thread's share of one tile of a
            row; `fill` where the row has ended.
        vector: `vector(values, source, lane, tile)`: the same of a tensor that is one row.
        store: `store(target, values, base, row, lane, tile, guard)`: write it where `guard` holds.
        sums: `sums(values, partial, slot, lane)`: each of `each` values, summed over its row, in
            every lane; `partial` is a shared buffer (each, block_m, warps).
        greatest: The same for the greatest.
    """

    load: Any
    vector: Any
    store: Any
    sums: Any
    greatest: Any


def macros(plan: Plan) -> Macros:
    """The pieces for a plan."""
    import tilelang.language as T

    N, lanes, vec, vectors, warps, each = (
        plan.N, plan.lanes, plan.vec, plan.vectors, plan.warps, plan.each,
    )  # fmt: skip
    whole = plan.whole

    @T.macro
    def load(values, base, source, row, lane, tile, fill):
        for v in T.unroll(vectors):
            at = ((tile * vectors + v) * lanes + lane) * vec
            if whole:
                for j in T.vectorized(vec):
                    values[base + v * vec + j] = source[row, at + j]
            else:
                if at < N:
                    for j in T.vectorized(vec):
                        values[base + v * vec + j] = source[row, at + j]
                else:
                    for j in T.unroll(vec):
                        values[base + v * vec + j] = fill

    @T.macro
    def vector(values, source, lane, tile):
        for v in T.unroll(vectors):
            at = ((tile * vectors + v) * lanes + lane) * vec
            if whole or at < N:
                for j in T.vectorized(vec):
                    values[v * vec + j] = source[at + j]

    @T.macro
    def store(target, values, base, row, lane, tile, guard):
        for v in T.unroll(vectors):
            at = ((tile * vectors + v) * lanes + lane) * vec
            if guard and (whole or at < N):
                for j in T.vectorized(vec):
                    target[row, at + j] = values[base + v * vec + j]

    def over_row(within_warp: Callable[[Any], Any], both: Callable[[Any, Any], Any]) -> Any:
        @T.macro
        def reduced(values, partial, slot, lane):
            for e in T.unroll(each):
                values[e] = within_warp(values[e])
            if warps > 1:
                if lane % 32 == 0:
                    for e in T.unroll(each):
                        partial[e, slot, lane // 32] = values[e]
                T.sync_threads()
                for e in T.unroll(each):
                    values[e] = partial[e, slot, 0]
                    for i in T.unroll(warps - 1):
                        values[e] = both(values[e], partial[e, slot, i + 1])

        return reduced

    sums = over_row(T.warp_reduce_sum, lambda one, other: one + other)
    greatest = over_row(T.warp_reduce_max, T.max)
    return Macros(load, vector, store, sums, greatest)


# --- schedules ---


def check_schedule(schedule: Mapping[str, Value], target: Target) -> None:
    """Raise WorkloadError for a schedule that cannot work."""
    fields.schedule_fields(schedule, tuple(CPU_SCHEDULE))
    if not target.is_cuda:
        fields.only(schedule, CPU_SCHEDULE)
        return
    fields.choice(schedule, "threads", (32, 64, 128, 256, 512, 1024))
    fields.choice(schedule, "block_m", (1, 2, 4, 8, 16, 32))
    fields.choice(schedule, "each", (1, 2, 4))
    fields.choice(schedule, "prefetch", (False, True))
    block_m, threads = schedule["block_m"], schedule["threads"]
    if threads < 32 * block_m:  # type: ignore[operator]
        raise WorkloadError(
            "schedule.block_m",
            f"block_m is {block_m} with threads={threads}; a row takes at least 32 threads",
        )


def schedules(N: int, dtype: str, inputs: int = 1) -> Iterator[dict[str, Value]]:
    """Schedules worth trying for rows of N elements: one load to 128 bytes a thread over all that
    it holds, and blocks of 128 to 512 threads where a row takes fewer.

    Args:
        N: Elements a row.
        dtype: Of the elements.
        inputs: How many tensors of rows a thread holds at once.
    """
    budget = HELD // inputs
    for lanes in (32, 64, 128, 256, 512, 1024):
        spread = plan(N, dtype, 1, lanes)
        size = spread.held * _BYTES[dtype]
        if spread.tiles > 1 and lanes < 512 and N > 256:
            continue
        if lanes > 32 and lanes * spread.vec >= 2 * N:
            continue
        for each in (1, 2, 4):
            if each > 1 and (spread.tiles > 1 or size * each > budget):
                continue
            for block_m in (1, 2, 4, 8, 16):
                if not (128 <= lanes * block_m <= 512 or (block_m == 1 and lanes > 32)):
                    continue
                if block_m > 1 and (lanes >= 256 or each > 2):
                    continue
                for prefetch in (False, True):
                    if prefetch and spread.tiles > 1:
                        continue
                    yield {
                        "block_m": block_m,
                        "threads": lanes * block_m,
                        "each": each,
                        "prefetch": prefetch,
                    }


FEW = 32
"""Rows up to which a kernel waits for latencies, not for memory."""
MANY = 8192
"""Rows from which on more bytes in flight a thread beat more threads."""


def default_schedule(M: int | str, N: int, dtype: str, inputs: int = 1) -> dict[str, Value]:
    """The rule for a kernel over rows; each operator's docstring says what it was measured on.

    Args:
        M: Rows, or "dynamic".
        N: Elements a row.
        dtype: Of the elements.
        inputs: How many tensors of rows a thread holds at once.
    """
    size = N * _BYTES[dtype]
    count = 0 if M == "dynamic" else int(M)
    few = 0 < count <= FEW
    if size <= 2048:  # 1024 elements of 2 bytes
        lanes, share = 32, 16 if count < 1024 and not (few and inputs > 1) else 32
        while lanes * share < size and lanes < 128:
            lanes *= 2
        threads = 256 if FEW < count < 1024 else 128
        return _schedule(threads // lanes, threads, 1, count <= FEW)
    if few or inputs > 1:
        return _schedule(1, _threads(size, inputs, 16, 512), 1, True)
    threads = _threads(size, inputs, 32, 256)
    if size <= 8192 and count >= 1024:
        return _schedule(1, threads, 4, False) if count >= MANY else _schedule(1, 128, 2, True)
    each = 2 if size <= 16384 and count >= MANY else 1
    return _schedule(1, threads, each, count == 0 and size <= 64 * threads)


def _threads(size: int, inputs: int, share: int, most: int) -> int:
    """Threads for a row: `share` bytes each, but no more threads than `most` unless the row, or
    what is held of it, takes them.
    """
    threads = 128
    while threads * share < size and threads < most:
        threads *= 2
    while threads * HELD < size * inputs and threads < 1024:
        threads *= 2
    return threads


def _schedule(block_m: int, threads: int, each: int, prefetch: bool) -> dict[str, Value]:
    values = (block_m, threads, each, prefetch)
    return dict(zip(CPU_SCHEDULE, values, strict=True))
