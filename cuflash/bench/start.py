"""How long the first attention() of a process takes on a GPU beyond ``import cupy; cupy.zeros(1)``, its cache empty or filled.

``python -m cuflash bench start``
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy as np


from . import report

LIMITS = {"cold": 1.5, "warm": 0.3}  # seconds
PROGRAM = """
import json, time
import cupy, numpy
cupy.zeros(1)
cupy.cuda.Device().synchronize()
q = cupy.asarray(numpy.ones((1, 1024, 8, 128), numpy.float16))
cupy.cuda.Device().synchronize()
start = time.perf_counter()
import cuflash
imported = time.perf_counter()
cuflash.attention(q, q, q, causal=True)
cupy.cuda.Device().synchronize()
first = time.perf_counter()
for _ in range(200):
    cuflash.attention(q[:, :64], q[:, :64], q[:, :64], causal=True)
host = (time.perf_counter() - first) / 200
print(json.dumps({"import": imported - start, "first": first - start, "call": host}))
"""


def measure(runs: int) -> dict[str, dict[str, float]]:
    """Medians in seconds, of processes with a cache of their own and of as many with one that is filled."""
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                # NVRTC keeps what it has compiled as well, where the driver keeps its own.
                environment = {**os.environ, "CUFLASH_CACHE_DIR": cache, "CUDA_CACHE_PATH": os.path.join(cache, "cuda")}
                done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
                found[state].append(json.loads(done.stdout))
    return {state: {name: float(np.median([one[name] for one in all_])) for name in all_[0]} for state, all_ in found.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=3, help="processes of each kind")


def run(arguments: argparse.Namespace) -> str:
    """Measure; returns the Markdown."""
    report.require_gpu("bench start")
    found = measure(arguments.runs)
    rows = [
        [state, f"{t['import']:.3f}", f"{t['first']:.3f}", f"{LIMITS[state]}", f"{1e6 * t['call']:.0f}"] for state, t in found.items()
    ]
    header = ("cache", "import cuflash, s", "until the first result, s", "limit, s", "a later call on the host, us")
    return "\n".join(report.markdown_table(header, rows)) + "\n"
