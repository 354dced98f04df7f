"""A program that comes to all kernels of a part of the corpus, and tells of each: how long its first
call took, TileLang's key, its class, and a digest of what a launch gives.

    python -m tests.corpus.program cpu|cuda [launch]
"""

from __future__ import annotations

import hashlib
import json
import sys
import time


def main(part: str, launch: bool) -> None:
    from tests.corpus import cases

    told = {}
    for case in cases.CPU if part == "cpu" else cases._cuda():
        start = time.perf_counter()
        kernel = case.kernel()
        seconds = time.perf_counter() - start
        told[case.name] = {
            "ms": round(seconds * 1e3, 3),
            "key": getattr(kernel, "_tilelang_cache_key", None),
            "class": type(kernel).__name__,
        }
        if launch:
            outputs = cases.launched(case, kernel, "cpu" if part == "cpu" else "cuda")
            data = hashlib.sha256()
            for one in outputs:
                data.update(one.cpu().contiguous().flatten().view(-1).numpy(force=True).tobytes()
                            if one.dtype.itemsize != 2 else one.cpu().contiguous().view(dtype=_int16()).numpy().tobytes())
            told[case.name]["outputs"] = data.hexdigest()
    refused, counted = _tlcache()
    print(json.dumps({"kernels": told, "refused": refused, "counted": counted}))


def _int16():
    import torch

    return torch.int16


def _tlcache():
    accelerate = sys.modules.get("tlcache.runtime.foreign.accelerate")
    resolve = sys.modules.get("tlcache.runtime.resolve")
    refused = accelerate.refusals() if accelerate else {}
    return refused, vars(resolve.counters()) if resolve else {}


if __name__ == "__main__":
    main(sys.argv[1], "launch" in sys.argv[2:])
