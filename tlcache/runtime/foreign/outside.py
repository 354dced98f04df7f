"""What code may use of the standard library, torch, TileLang and the builtins, if what it makes is
to be known without running it.

These count by name and version. So only what always answers the same is admitted; what answers for
the GPU (`DEVICE`) is admitted together with that GPU, and everything else is refused.
"""

from __future__ import annotations

import builtins
import os
import sys
from typing import Any

__all__ = ["BUILTINS", "READING", "device", "is_outside", "judge"]

_TOPS = frozenset({"torch", "tilelang", "tvm", "tvm_ffi", "typing_extensions", "numpy"})

_PURE_MODULES = frozenset(
    [
        "__future__",
        "abc",
        "bisect",
        "cmath",
        "collections",
        "copy",
        "dataclasses",
        "decimal",
        "enum",
        "fractions",
        "functools",
        "heapq",
        "itertools",
        "keyword",
        "math",
        "numbers",
        "operator",
        "re",
        "statistics",
        "string",
        "struct",
        "textwrap",
        "types",
        "typing",
        "typing_extensions",
        "warnings",
        "logging",
    ]
)

BUILTINS = frozenset(
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
) | frozenset(
    [
        "abs",
        "all",
        "any",
        "ascii",
        "bin",
        "bool",
        "bytearray",
        "bytes",
        "callable",
        "chr",
        "classmethod",
        "complex",
        "dict",
        "divmod",
        "enumerate",
        "filter",
        "float",
        "format",
        "frozenset",
        "getattr",
        "hasattr",
        "hex",
        "int",
        "isinstance",
        "issubclass",
        "iter",
        "len",
        "list",
        "map",
        "max",
        "min",
        "next",
        "object",
        "oct",
        "ord",
        "pow",
        "print",
        "property",
        "range",
        "repr",
        "reversed",
        "round",
        "set",
        "slice",
        "sorted",
        "staticmethod",
        "str",
        "sum",
        "super",
        "tuple",
        "type",
        "zip",
        "True",
        "False",
        "None",
        "NotImplemented",
        "Ellipsis",
        "__debug__",
        "__name__",
        "__build_class__",
    ]
)

READING: dict[type, frozenset[str]] = {
    list: frozenset({"copy", "count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    set: frozenset(
        [
            "copy",
            "difference",
            "intersection",
            "isdisjoint",
            "issubset",
            "issuperset",
            "symmetric_difference",
            "union",
        ]
    ),
    bytearray: frozenset({"find", "count", "index", "hex"}),
}
"""Methods of what can be changed that change nothing."""

_NUMPY = [
    "array",
    "arange",
    "bool_",
    "ceil",
    "dtype",
    "exp",
    "finfo",
    "float16",
    "float32",
    "float64",
    "floating",
    "floor",
    "iinfo",
    "inf",
    "int16",
    "int32",
    "int64",
    "int8",
    "integer",
    "log",
    "log2",
    "nan",
    "ndarray",
    "number",
    "pi",
    "prod",
    "sqrt",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
]

# What of TileLang and torch answers for the machine, the process, or a file, rather than always the
# same. The longest prefix decides.
_ADMITTED = {
    "tilelang": "no",
    "tilelang.PassConfigKey": "yes",
    "tilelang.PassConfig": "yes",
    "tilelang.TensorSupplyType": "yes",
    "tilelang.autotune": "yes",
    "tilelang.cdiv": "yes",
    "tilelang.next_power_of_2": "yes",
    "tilelang.jit": "yes",
    "tilelang.lazy_jit": "yes",
    "tilelang.compile": "no",
    "tilelang.par_compile": "no",
    "tilelang.dtypes": "yes",
    "tilelang.intrinsics": "yes",
    "tilelang.language": "yes",
    "tilelang.language.fp8": "device",
    "tilelang.layout": "yes",
    "tilelang.math": "yes",
    "tilelang.quantize": "yes",
    "tilelang.tileop": "yes",
    "tilelang.transform": "yes",
    "tilelang.cuda": "yes",
    "tilelang.tvm": "yes",
    "tilelang.utils.language": "yes",
    "tilelang.utils.target": "device",
    "tilelang.utils.tensor": "yes",
    "tilelang.backend.target": "device",
    "tilelang.carver": "device",
    "tilelang.utils.device": "device",
    "tilelang.contrib.nvcc.get_target_compute_version": "device",
    "tvm": "yes",
    "tvm.runtime": "no",
    "tvm.ffi": "no",
    "tvm.get_global_func": "no",
    "tvm.register_global_func": "no",
    "tvm_ffi": "no",
    "tvm_ffi.dtype": "yes",
    "tvm_ffi._dtype": "yes",
    "tvm_ffi.container": "yes",
    "torch": "no",
    "torch.Size": "yes",
    "torch.Tensor": "yes",
    "torch.device": "yes",
    "torch.dtype": "yes",
    "torch.finfo": "yes",
    "torch.iinfo": "yes",
    "torch.__version__": "yes",
    "torch.version": "yes",
    "torch.cuda.current_device": "device",
    "torch.cuda.device_count": "device",
    "torch.cuda.get_device_capability": "device",
    "torch.cuda.get_device_name": "device",
    "torch.cuda.get_device_properties": "device",
    "torch.cuda.is_available": "device",
    "numpy": "no",
    **dict.fromkeys(map("numpy.{}".format, _NUMPY), "yes"),
    "os": "no",
    "posixpath": "no",
    **{
        f"posixpath.{name}": "yes"
        for name in ["basename", "dirname", "join", "normpath", "split", "splitext"]
    },
    "sys": "no",
    "sys.maxsize": "yes",
    "sys.version_info": "yes",
    "inspect": "no",
    "inspect.signature": "yes",
    "inspect.Parameter": "yes",
    "contextlib": "yes",
    "builtins": "no",
}


def is_outside(module: str) -> bool:
    """Whether a module counts by its name and version."""
    top = module.partition(".")[0]
    return top in _TOPS or top in sys.stdlib_module_names


def judge(path: str) -> str:
    """What is to be said of something of these modules, by its full dotted path: `yes`, `no`, or
    `device` where it answers for the GPU.
    """
    found = path
    while found:
        said = _ADMITTED.get(found)
        if said is not None:
            return said
        found = found.rpartition(".")[0]
    return "yes" if path.partition(".")[0] in _PURE_MODULES else "no"


def device() -> str:
    """The GPU that this process would ask, and what it says to be its target: what kernels are
    chosen by.
    """
    told = os.environ.get("TILELANG_DEFAULT_TARGET", "")
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return f"{told} no GPU"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    names = (
        "name major minor multi_processor_count total_memory shared_memory_per_block_optin "
        "shared_memory_per_multiprocessor"
    )
    said = " ".join(str(getattr(properties, name, None)) for name in names.split())
    return f"{told} {said} {torch.cuda.device_count()}"
