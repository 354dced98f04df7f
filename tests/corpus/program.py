"""A program that comes to kernels of the corpus, and tells of each how long its first call took,
TileLang's key for it, its class, and a digest of what a launch gives.

    python -m tests.corpus.program cpu|cuda [launch] [NAME …]
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

import tilelang  # noqa: F401 -- what a start costs is no kernel's
import torch

from tests.corpus import cases


def main(part: str, *words: str) -> None:
    chosen = cases.cpu() if part == "cpu" else cases.cuda()
    names = [word for word in words if word != "launch"]
    told = {}
    for case in chosen:
        if names and case.name not in names:
            continue
        start, cpu = time.perf_counter(), time.thread_time()
        kernel = case.kernel()
        seconds, cpu = time.perf_counter() - start, time.thread_time() - cpu
        told[case.name] = {
            "ms": round(seconds * 1e3, 3),
            "cpu_ms": round(cpu * 1e3, 3),
            "key": getattr(kernel, "_tilelang_cache_key", None),
            "class": type(kernel).__name__,
        }
        if "launch" in words:
            outputs = cases.launched(case, kernel, "cpu" if part == "cpu" else "cuda")
            told[case.name]["outputs"] = digest(outputs)
    accelerate = sys.modules.get("tlcache.runtime.foreign.accelerate")
    resolve = sys.modules.get("tlcache.runtime.resolve")
    refused = accelerate.refusals() if accelerate else {}
    counted = vars(resolve.counters()) if resolve else {}
    print(json.dumps({"kernels": told, "refused": refused, "counted": counted}))


def digest(tensors: list[torch.Tensor]) -> str:
    """Of the bits of tensors."""
    data = hashlib.sha256()
    for one in tensors:
        data.update(one.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return data.hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
