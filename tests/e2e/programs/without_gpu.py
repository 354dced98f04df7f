"""For programs here: a host without a GPU that looks as if it had an H200, to a compiler.
Tensors are on torch's meta device, and launches do nothing. Of the calls, EVERY says that only each
so many-th is made.
"""

import itertools
import os
import types

os.environ["TILELANG_DEFAULT_TARGET"] = '{"kind": "cuda", "arch": "sm_90a"}'

import tilelang
import torch

torch.set_default_device("meta")
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
    multi_processor_count=132, shared_memory_per_multiprocessor=228 * 1024, major=9, minor=0
)
tilelang.jit.__globals__["JITKernel"].__call__ = lambda self, *args, **kwargs: None


_number = itertools.count(1)


def attempt(function, *args, **kwargs):
    """Call a host function; what it makes of outputs that nothing computed is not of interest."""
    if next(_number) % int(os.environ.get("EVERY", "1")):
        return
    try:
        function(*args, **kwargs)
    except Exception as error:
        print(f"{getattr(function, '__name__', function)}: {type(error).__name__}: {error}"[:200])
