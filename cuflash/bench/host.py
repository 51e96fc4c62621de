"""Host time of calls on a GPU whose signature is known, beside an empty launch and PyTorch's call: medians over interleaved batches.

``python -m cuflash bench host --json FILE --markdown FILE``
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import cuflash

from . import report
from .prefill import environment, heading

ROUNDS, BATCH, IDLE = 40, 60, 10  # of the calls of a batch, the first are not counted: they find the queue and the caches empty
LIMITS = {"attention": 25.0, "Plan.run beside an empty launch": 5.0, "decode": 40.0}  # microseconds


def calls() -> dict[str, Callable[[], Any]]:
    """What is timed, by its row."""
    import cupy

    rng = np.random.default_rng(0)
    q, k, v = (cupy.asarray(rng.standard_normal((1, 64, 8, 128)).astype(np.float16)) for _ in range(3))
    out = cupy.empty_like(q)
    lengths = cupy.asarray([50], np.int32)
    packed = [x[0] for x in (q, k, v)]
    ends = cupy.asarray([0, 20, 64], np.int32)
    plan, stream = cuflash.plan(q, k, v, causal=True), cupy.cuda.Stream(non_blocking=True)
    by_fa2 = cuflash.plan(q, k, v, causal=True, kernel="fa2")  # which has no tensor maps; on Hopper the other calls have
    turn = itertools.cycle(((q, k, v), tuple(x.copy() for x in (q, k, v))))
    empty = cupy.RawKernel(r'extern "C" __global__ void empty() {}', "empty")
    found: dict[str, Callable[[], Any]] = {
        "an empty RawKernel of CuPy": lambda: empty((1,), (128,), ()),
        "Plan.run(q, k, v, out=out)": lambda: plan.run(q, k, v, out=out),
        'Plan.run(q, k, v, out=out) of kernel="fa2"': lambda: by_fa2.run(q, k, v, out=out),
        "Plan.run(q, k, v)": lambda: plan.run(q, k, v),
        "attention(q, k, v, causal=True)": lambda: cuflash.attention(q, k, v, causal=True),
        'with kernel="fa2"': lambda: cuflash.attention(q, k, v, causal=True, kernel="fa2"),
        "with other arrays in every call": lambda: cuflash.attention(*next(turn), causal=True),
        'with other arrays in every call, kernel="fa2"': lambda: cuflash.attention(*next(turn), causal=True, kernel="fa2"),
        "with out=": lambda: cuflash.attention(q, k, v, causal=True, out=out),
        "with return_lse=True": lambda: cuflash.attention(q, k, v, causal=True, return_lse=True),
        "with stream=": lambda: cuflash.attention(q, k, v, causal=True, stream=stream),
        "with kv_lengths on the GPU": lambda: cuflash.attention(q, k, v, causal=True, kv_lengths=lengths),
        "with kv_lengths on the host, a copy a call": lambda: cuflash.attention(q, k, v, causal=True, kv_lengths=[50]),
        "attention_varlen, cu_seqlens on the GPU": lambda: cuflash.attention_varlen(*packed, ends, ends, max_seqlen_q=44, causal=True),
    }
    query, *new = (x[:, :1].copy() for x in (q, k, v))
    rope = (*(cupy.ones((64, 64), np.float32) for _ in range(2)), "half")
    table, pages = cupy.asarray([[3, 1, 0, 2]], np.int32), [x[0].reshape(4, 16, 8, 128) for x in (k, v)]
    more = {"k_new": new[0], "v_new": new[1], "rope": rope}
    for where, known in (("on the GPU", lengths), ("on the host", [50])):
        found[f"decode(), kv_lengths {where}"] = lambda known=known: cuflash.decode(query, k, v, known)  # type: ignore[misc]
        found[f"with a new key and an embedding, kv_lengths {where}"] = lambda known=known: cuflash.decode(  # type: ignore[misc]
            query, k, v, known, **more,
        )
        found[f"attention() over pages, kv_lengths {where}"] = lambda known=known: cuflash.attention(  # type: ignore[misc]
            query, *pages, kv_lengths=known, page_table=table,
        )
    try:
        import torch
    except ImportError:
        return found
    tensors = [torch.from_dlpack(x).transpose(1, 2) for x in (q, k, v)]
    found["PyTorch's scaled_dot_product_attention"] = lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
    found["attention of PyTorch's tensors"] = lambda: cuflash.attention(*tensors, causal=True, layout="BHSD")
    return found


def measure() -> dict[str, dict[str, float]]:
    """Median and first decile of each call in microseconds; the calls take turns, and the queue is empty when a batch begins."""
    import cupy

    device, clock = cupy.cuda.Device(), time.perf_counter_ns
    of = calls()
    times: dict[str, list[int]] = {name: [] for name in of}
    for call in of.values():
        for _ in range(3):
            call()
    for _ in range(ROUNDS):
        for name, call in of.items():
            device.synchronize()
            batch = []
            for _ in range(BATCH):
                begin = clock()
                call()
                batch.append(clock() - begin)
            times[name] += batch[IDLE:]
    return {name: {"median": float(np.median(t)) / 1e3, "decile": float(np.quantile(t, 0.1)) / 1e3} for name, t in times.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--markdown", type=Path, help="write the table here, between marker lines if there are any")


def run(arguments: argparse.Namespace) -> str:
    """Measure; returns the Markdown."""
    report.require_gpu("bench host")
    found, env = measure(), environment()
    rows = [[f"`{name}`" if "(" in name else name, f"{t['median']:.1f}", f"{t['decile']:.1f}"] for name, t in found.items()]
    table = report.markdown_table(("call", "us, median", "us, first decile"), rows)
    text = "\n".join([heading(env), "", *table]) + "\n"
    if arguments.json:
        report.write_json(arguments.json, {"environment": env, "limits": LIMITS, "results": found})
    if arguments.markdown:
        report.write_markdown(arguments.markdown, "host table", text)
    return text
