"""The Numba CUDA backend alone: it is there for what the raw kernels do not cover, and must be right and not embarrassing.

``python -m cuflash bench fallback``
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from typing import Any

import ml_dtypes
import numpy as np

import cuflash

from . import prefill, report

# batch, heads, length, head size, dtype, causal, backward
CASES = (
    (1, 8, 8192, 64, "float32", False, False), (1, 8, 8192, 64, "float32", True, False), (1, 8, 8192, 128, "float32", False, False),
    (1, 8, 8192, 64, "bfloat16", False, False), (1, 8, 8192, 64, "float64", False, False), (1, 8, 131072, 64, "float32", False, False),
    (1, 8, 4096, 64, "float32", False, True), (1, 8, 4096, 128, "float32", False, True), (1, 8, 4096, 64, "float64", False, True),
)  # fmt: skip


def measure(b: int, h: int, n: int, d: int, name: str, causal: bool, backward: bool) -> dict[str, Any]:
    """TFLOP/s of the best of three calls, seconds of the first one, which compiles, and bytes that a call takes beside its results."""
    import cupy

    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    q, k, v = (cupy.random.default_rng(seed).standard_normal((b, n, h, d), np.float32).astype(dtype) for seed in range(3))
    options = {"causal": causal, "backend": "numba-cuda", "kernel": "fa1"}
    out = cupy.empty_like(q)
    lse = cuflash.attention(q, k, v, out=out, return_lse=True, **options)[1] if backward else None

    def call() -> None:
        if backward:
            cuflash.attention_backward(q, q, k, v, out, lse, **options)
        else:
            cuflash.attention(q, k, v, out=out, **options)

    cupy.cuda.Device().synchronize()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before, start = pool.total_bytes(), time.perf_counter()
    call()
    cupy.cuda.Device().synchronize()
    first, grown = time.perf_counter() - start, pool.total_bytes() - before
    times = []
    for _ in range(3):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    flops = (10 if backward else 4) * b * h * n * n * d / (2 if causal else 1)
    return {"tflops": flops / min(times) / 1e12, "first": first, "grown": grown}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def run(arguments: argparse.Namespace) -> str:
    """Measure; returns the Markdown."""
    report.require_gpu("bench fallback")
    if importlib.util.find_spec("numba_cuda") is None:
        raise cuflash.NoBackendError("bench fallback needs a GPU, CuPy and numba-cuda: pip install 'cuflash[cuda13-full]'")
    rows = []
    for case in CASES:
        b, h, n, d, dtype, causal, backward = case
        found = measure(*case)
        what = f"{'backward' if backward else 'forward'} B{b} H{h} N{n} D{d}{' causal' if causal else ''}"
        rows.append([what, dtype, f"{found['tflops']:.1f}", f"{found['first']:.1f}", f"{found['grown'] / 2**20:.1f}"])
    header = ("call", "dtype", "TFLOP/s", "first call, s", "memory beside the arrays, MiB")
    environment = prefill.environment()
    return f"{environment['card']}; {environment['versions']}\n\n" + "\n".join(report.markdown_table(header, rows)) + "\n"
