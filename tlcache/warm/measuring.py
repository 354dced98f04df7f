"""The measuring process of a tuner: one kernel in, its GPU time out. Importing this module imports
torch.

It is a process of its own because a kernel that goes wrong takes its process's CUDA context along,
and one that hangs can only be killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from tlcache import operators
from tlcache.errors import TlcacheError
from tlcache.operators import Operator
from tlcache.runtime.resolve import Resolver
from tlcache.spec import KernelSpec
from tlcache.store import files, record

__all__ = ["Measured", "Request", "serve"]

TOLERANCE = {"bfloat16": 3.2e-2, "float16": 4e-3, "float32": 1e-4}


class Request(NamedTuple):
    """What to measure.

    Attributes:
        op: The operator's name.
        spec: The kernel, as JSON.
        reference: The kernel with the default schedule, whose results must be the same.
        rows: Values of M; for a kernel with an M of its own, that one.
        reps: Launches to time.
    """

    op: str
    spec: dict[str, Any]
    reference: dict[str, Any]
    rows: tuple[int, ...]
    reps: int


class Measured(NamedTuple):
    """What came of it.

    Attributes:
        microseconds: GPU time of a launch, for each of the rows.
        reason: Why there are none, in one line.
        fatal: Whether this process is of no use any more.
    """

    microseconds: tuple[float, ...] = ()
    reason: str | None = None
    fatal: bool = False


def serve(pipe: Connection, root: str) -> None:
    """Measure what comes down the pipe until it closes.

    Args:
        pipe: `Request`s in, first the name of the GPU and then `Measured`s back.
        root: The cache root that the kernels are in.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TILELANG_CACHE_DIR"] = root
    os.environ["TILELANG_PRINT_ON_COMPILATION"] = "0"
    resolver = Resolver(root)
    pipe.send(torch.cuda.get_device_name())
    while True:
        try:
            request = Request(*pipe.recv())
        except (EOFError, OSError):
            return
        try:
            answer = _measure(resolver, request)
        except TlcacheError as error:
            answer = Measured(reason=error.message)
        except torch.cuda.OutOfMemoryError as error:
            answer = Measured(reason=f"out of GPU memory: {str(error).splitlines()[0]}")
        except Exception as error:
            lines = str(error).splitlines()
            text = f"{type(error).__name__}: {lines[0] if lines else ''}"
            answer = Measured(reason=text, fatal=True)
        pipe.send(tuple(answer))
        if answer.fatal:
            return


def _measure(resolver: Resolver, request: Request) -> Measured:
    operator = operators.get(request.op)
    spec = KernelSpec.from_json(request.spec)
    reference = KernelSpec.from_json(request.reference)
    if spec != reference and (spilled := _local_bytes(resolver.root, spec)):
        return Measured(reason=f"spills: {spilled} bytes of local memory a thread")
    call = resolver.resolve(spec, "error").call
    plain = resolver.resolve(reference, "error").call
    times = []
    for rows in request.rows:
        inputs = _inputs(operator, spec, rows)
        if spec != reference and not _same(plain, call, inputs, str(spec.workload.get("dtype"))):
            return Measured(reason=f"its result at {rows} rows is not that of the default schedule")
        times.append(_microseconds(call, inputs, request.reps))
    return Measured(tuple(times))


def _inputs(operator: Operator, spec: KernelSpec, rows: int) -> tuple[Any, ...]:
    assert operator.example is not None
    torch.manual_seed(0)
    return operator.example(operator.workload(**spec.workload), rows, "cuda")


def _same(
    plain: Callable[..., Any], call: Callable[..., Any], inputs: Sequence[Any], dtype: str
) -> bool:
    """Whether two kernels give the same, outputs and what they write over."""
    results = []
    for one in (plain, call):
        copies = [tensor.clone() for tensor in inputs]
        made = one(*copies)
        made = () if made is None else made if isinstance(made, (list, tuple)) else (made,)
        results.append([*made, *copies])
    limit = TOLERANCE.get(dtype, 3.2e-2)
    return all(
        torch.allclose(a.float(), b.float(), rtol=limit, atol=limit, equal_nan=True)
        for a, b in zip(*results, strict=True)
    )


def _microseconds(call: Callable[..., Any], inputs: Sequence[Any], reps: int) -> float:
    """GPU time of a launch by the profiler, L2 flushed before each: TileLang's own `do_bench`."""
    from tilelang.profiler import do_bench

    milliseconds = do_bench(lambda: call(*inputs), backend="cupti", _n_warmup=3, _n_repeat=reps)
    return float(milliseconds) * 1000


# --- spills ---

_LOCAL_SIZE_BYTES = 3  # CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES


def _local_bytes(root: str, spec: KernelSpec) -> int:
    """Local memory a thread of a compiled kernel, in bytes: what did not fit in registers."""
    filed = record.read(root, spec.action_key(), spec=spec)
    path = record.sound_library(root, filed) if filed is not None else None
    if path is None:
        return 0
    data = files.read(path)
    torch.cuda.synchronize()  # makes the context current
    cuda = ctypes.CDLL("libcuda.so.1")
    worst, at = 0, data.find(b"\x7fELF", 1)
    while at >= 0:
        if data[at + 18 : at + 20] == b"\xbe\x00":  # EM_CUDA
            worst = max(worst, _local_bytes_of(cuda, data[at:]))
        at = data.find(b"\x7fELF", at + 4)
    return worst


def _local_bytes_of(cuda: ctypes.CDLL, image: bytes) -> int:
    module, count, value = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_int()
    if cuda.cuModuleLoadData(ctypes.byref(module), image):
        return 0
    worst = 0
    try:
        if not cuda.cuModuleGetFunctionCount(ctypes.byref(count), module):
            functions = (ctypes.c_void_p * count.value)()
            cuda.cuModuleEnumerateFunctions(functions, count, module)
            for function in functions:
                handle = ctypes.c_void_p(function)
                cuda.cuFuncLoad(handle)
                if not cuda.cuFuncGetAttribute(ctypes.byref(value), _LOCAL_SIZE_BYTES, handle):
                    worst = max(worst, value.value)
    finally:
        cuda.cuModuleUnload(module)
    return worst
