"""The CPU backend, forward and backward, beside PyTorch's CPU attention and beside NumPy that materialises the scores.

``python -m cuflash.bench.cpu --json docs/performance-cpu.json --markdown docs/performance.md``

Each peer and cuflash take turns on the same inputs (A B A B ...), after their outputs were compared. What counts is the
ratio of the two times of a turn: its median, and the lower end of a one-sided 95 % confidence interval of that median.
PyTorch is measured where it is installed; cuflash never needs it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cuflash

from . import report

SHAPES = ((1, 8, 2048, 64), (1, 8, 4096, 128))  # B, H, N, D
DTYPES = ("float32", "float64")
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}
TURNS = {2048: 15, 4096: 7}
PAUSE = 0.05
MOST_WEIGHTS = 2**28  # bytes that NumPy may keep of a forward pass
PACKAGES = ("cuflash", "numpy", "numba", "llvmlite", "scipy", "torch")

Attention = Callable[[np.ndarray, np.ndarray, np.ndarray, bool], np.ndarray]
Gradients = tuple[np.ndarray, ...]  # dq, dk, dv
# From dout, q, k, v and causal: a function that computes the gradients, the forward pass being done.
Differentiator = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, bool], Callable[[], Gradients]]


@dataclass
class Result:
    """One case: times in milliseconds, speeds in GFLOP/s of useful work, ratios peer time / cuflash time."""

    dtype: str
    shape: tuple[int, int, int, int]
    causal: bool
    ms: float
    gflops: float
    gemm_gflops: float
    peers: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        b, h, n, d = self.shape
        return f"{self.dtype} B{b} H{h} N{n} D{d} {'causal' if self.causal else 'full'}"


def ours(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    return cuflash.attention(q, k, v, causal=causal, layout="BHSD", kernel="fa2", backend="cpu")


def numpy_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    """softmax(q k^T / sqrt(D)) v as it is usually written; the scores of all heads are in memory."""
    s = q @ k.swapaxes(-1, -2) * q.dtype.type(1 / math.sqrt(q.shape[-1]))
    if causal:
        s = np.where(_lower_triangle(s), s, -np.inf).astype(s.dtype, copy=False)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return (p / p.sum(axis=-1, keepdims=True)) @ v


def numpy_in_place(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    """The same by someone who minds temporaries: one score array, every step in place."""
    s = q @ k.swapaxes(-1, -2)
    s *= q.dtype.type(1 / math.sqrt(q.shape[-1]))
    if causal:
        s[..., ~_lower_triangle(s)] = -np.inf
    s -= s.max(axis=-1, keepdims=True)
    np.exp(s, out=s)
    s /= s.sum(axis=-1, keepdims=True)
    return s @ v


def _lower_triangle(s: np.ndarray) -> np.ndarray:
    rows, keys = s.shape[-2:]
    return np.tri(rows, keys, k=keys - rows, dtype=bool)


def torch_attention() -> Attention | None:
    """PyTorch's attention on the same threads, or None where PyTorch is missing."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    from cuflash.backends.cpu_threads import thread_count

    torch.set_num_threads(thread_count())

    def run(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(*map(torch.from_numpy, (q, k, v)), is_causal=causal).numpy()

    return run


def our_gradients(dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Callable[[], Gradients]:
    options: dict[str, Any] = {"causal": causal, "layout": "BHSD", "kernel": "fa2", "backend": "cpu"}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)

    def run() -> Gradients:
        g = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
        return g.dq, g.dk, g.dv

    return run


def torch_gradients(dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Callable[[], Gradients]:
    """The backward pass of PyTorch's attention alone: the graph of the forward pass is kept."""
    torch = importlib.import_module("torch")
    inputs = [torch.from_numpy(a).requires_grad_() for a in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal)
    gradient = torch.from_numpy(dout)

    def run() -> Gradients:
        for a in inputs:
            a.grad = None
        out.backward(gradient, retain_graph=True)
        return tuple(a.grad.numpy() for a in inputs)

    return run


def numpy_gradients(dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Callable[[], Gradients]:
    """The textbook formula head by head; the weights are kept from the forward pass, as autograd would keep them."""
    scale = q.dtype.type(1 / math.sqrt(q.shape[-1]))
    weights = np.empty((*q.shape[:-1], k.shape[-2]), q.dtype)
    for at in np.ndindex(*q.shape[:2]):
        s = q[at] @ k[at].T * scale
        if causal:
            s[~_lower_triangle(s)] = -np.inf
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        weights[at] = p / p.sum(axis=-1, keepdims=True)

    def run() -> Gradients:
        dq, dk, dv = (np.empty_like(a) for a in (q, k, v))
        for at in np.ndindex(*q.shape[:2]):
            p = weights[at]
            dp = dout[at] @ v[at].T
            ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * scale
            dq[at], dk[at], dv[at] = ds @ k[at], ds.T @ q[at], p.T @ dout[at]
        return dq, dk, dv

    return run


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Time of one call, after a pause in which the idle threads of the library that ran before stop spinning."""
    time.sleep(PAUSE)
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def gemm_gflops(dtype: str, n: int = 2048) -> float:
    """Speed of the best of a few BLAS products of square matrices: what the machine can do."""
    from scipy.linalg import blas  # type: ignore[import-untyped]

    a = np.asfortranarray(np.random.default_rng(0).standard_normal((n, n)).astype(dtype))
    gemm = blas.sgemm if dtype == "float32" else blas.dgemm
    return 2 * n**3 / min(seconds(gemm, 1.0, a, a) for _ in range(5)) / 1e9


def measure(dtype: str, shape: tuple[int, int, int, int], causal: bool, peers: dict[str, Attention], gemm: float) -> Result:
    """Compare, then time, one case against every peer."""
    b, h, n, d = shape
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for _ in range(3))
    expected = ours(q, k, v, causal)
    own_times: list[float] = []
    found = {}
    for name, peer in peers.items():
        error = float(np.abs(peer(q, k, v, causal) - expected).max())
        if not error <= TOLERANCE[dtype]:
            raise RuntimeError(f"{name} and cuflash differ by {error} on {dtype} {shape}, causal={causal}")
        turns = TURNS[n] if name == "PyTorch" else max(5, TURNS[n] // 3)
        pairs = [(seconds(peer, q, k, v, causal), seconds(ours, q, k, v, causal)) for _ in range(turns)]
        ratios = [theirs / own for theirs, own in pairs]
        own_times = own_times or [own for _, own in pairs]  # beside the first peer: the others leave gigabytes to clean up
        ms, ratio = 1e3 * float(np.median([t for t, _ in pairs])), float(np.median(ratios))
        found[name] = {"ms": ms, "ratio": ratio, "lower": report.lower_bound(ratios)}
    own = float(np.median(own_times))
    flops = 4 * b * h * n * n * d / (2 if causal else 1)
    return Result(dtype, shape, causal, 1e3 * own, flops / own / 1e9, gemm, found)


def measure_backward(
    dtype: str, shape: tuple[int, int, int, int], causal: bool, peers: dict[str, Differentiator], gemm: float
) -> Result:
    """Compare, then time, the gradients of one case against every peer."""
    b, h, n, d = shape
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(shape).astype(dtype) for _ in range(4)]
    run = our_gradients(*arrays, causal)
    expected = run()
    own_times: list[float] = []
    found = {}
    for name, prepare in peers.items():
        if name == "NumPy" and b * h * n * n * arrays[0].itemsize > MOST_WEIGHTS:
            continue
        peer = prepare(*arrays, causal)
        error = max(float(np.abs(theirs - own).max()) for theirs, own in zip(peer(), expected, strict=True))
        if not error <= 10 * TOLERANCE[dtype]:
            raise RuntimeError(f"gradients of {name} and cuflash differ by {error} on {dtype} {shape}, causal={causal}")
        turns = max(5, TURNS[n] // (1 if name == "PyTorch" else 3))
        pairs = [(seconds(peer), seconds(run)) for _ in range(turns)]
        ratios = [theirs / own for theirs, own in pairs]
        own_times = own_times or [own for _, own in pairs]
        found[name] = {
            "ms": 1e3 * float(np.median([t for t, _ in pairs])), "ratio": float(np.median(ratios)), "lower": report.lower_bound(ratios)
        }
    own = float(np.median(own_times))
    flops = 10 * b * h * n * n * d / (2 if causal else 1)
    return Result(dtype, shape, causal, 1e3 * own, flops / own / 1e9, gemm, found)


def environment() -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    from cuflash import host
    from cuflash.backends.cpu_simd import VECTOR_BYTES
    from cuflash.backends.cpu_threads import thread_count

    return {
        "cpu": host.cpu_model(),
        "threads": thread_count(),
        "vector_bits": 8 * VECTOR_BYTES,
        "system": f"{platform.system()} {platform.machine()}",
        "versions": report.versions(PACKAGES),
    }


def summary(results: dict[str, dict]) -> dict[str, float]:
    """The figures that docs/performance.md speaks of."""
    figures = {}

    def ratios(peer: str, wanted: Callable[[dict], bool] = lambda r: True) -> list[float]:
        return [r["peers"][peer]["ratio"] for r in results.values() if peer in r["peers"] and wanted(r)]

    against_torch = ratios("PyTorch")
    if against_torch:
        figures["PyTorch / cuflash, geometric mean"] = report.geometric_mean(against_torch)
        figures["PyTorch / cuflash, smallest"] = min(against_torch)
    for dtype in DTYPES:
        full = [r for r in results.values() if r["dtype"] == dtype and not r["causal"]]
        for peer in ("NumPy", "NumPy in place"):
            found = ratios(peer, full.__contains__)
            if found:
                figures[f"{peer} / cuflash, {dtype}, full, smallest"] = min(found)
        if full:
            shares = [r["gflops"] / r["gemm_gflops"] for r in full]
            figures[f"share of the speed of BLAS gemm, {dtype}, full, mean"] = sum(shares) / len(shares)
    twins = [(r, results.get(name.replace("causal", "full"))) for name, r in results.items() if r["causal"]]
    shares = [causal["ms"] / full["ms"] for causal, full in twins if full]
    if shares:
        figures["causal time / full time, largest"] = max(shares)
    return figures


def backward_summary(results: dict[str, dict]) -> dict[str, float]:
    """The same for the backward pass."""
    figures = {}
    for peer in dict.fromkeys(peer for r in results.values() for peer in r["peers"]):
        ratios = [r["peers"][peer]["ratio"] for r in results.values() if peer in r["peers"]]
        figures[f"backward: {peer} / cuflash, geometric mean"] = report.geometric_mean(ratios)
        figures[f"backward: {peer} / cuflash, smallest"] = min(ratios)
    return figures


def table(results: dict[str, dict], title: str) -> list[str]:
    """Lines of one table of cases."""
    peers = list(dict.fromkeys(peer for r in results.values() for peer in r["peers"]))
    header = [title, "cuflash ms", "GFLOP/s", "of gemm"]
    for peer in peers:
        header += [f"{peer} ms", f"{peer} / cuflash (lower bound)"]
    lines = ["", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for name, r in results.items():
        cells = [name, f"{r['ms']:.1f}", f"{r['gflops']:.0f}", f"{100 * r['gflops'] / r['gemm_gflops']:.0f} %"]
        for peer in peers:
            p = r["peers"].get(peer)
            cells += [f"{p['ms']:.1f}", f"{p['ratio']:.2f} ({p['lower']:.2f})"] if p else ["-", "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def markdown(found: dict) -> str:
    """The tables of docs/performance.md."""
    env, results, backward = found["environment"], found["results"], found.get("backward", {})
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    lines = [f"{env['cpu']}, {env['threads']} threads, {env['vector_bits']}-bit vectors; {versions}."]
    lines += table(results, "case") if results else []
    lines += table(backward, "backward") if backward else []
    lines += ["", "| figure | value |", "|---|---|"]
    lines += [f"| {name} | {value:.2f} |" for name, value in {**summary(results), **backward_summary(backward)}.items()]
    return "\n".join(lines) + "\n"


def cases(only: str) -> Iterator[tuple[str, tuple[int, int, int, int], bool]]:
    """Cases whose name contains ``only``."""
    for dtype in DTYPES:
        for shape in SHAPES:
            for causal in (False, True):
                if only in Result(dtype, shape, causal, 0, 0, 0).key:
                    yield dtype, shape, causal


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cuflash.bench.cpu", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the results here; cases measured before stay in the file")
    parser.add_argument("--markdown", type=Path, help="write the tables here; in a document between its marker lines")
    parser.add_argument("--only", default="", help="measure only cases whose name contains this, such as 'float32 B1 H8 N2048'")
    parser.add_argument("--pass", dest="which", choices=("forward", "backward", "both"), default="both")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {"environment": environment(), "results": {}, "backward": {}}
    if options.json and options.json.exists():
        before = json.loads(options.json.read_text())
        if before["environment"] == found["environment"]:
            found = {**found, **before}
    peers: dict[str, Attention] = {"NumPy": numpy_attention, "NumPy in place": numpy_in_place}
    backward_peers: dict[str, Differentiator] = {"NumPy": numpy_gradients}
    torch = torch_attention()
    if torch is None:
        print("PyTorch is not installed: NumPy is the only peer", file=sys.stderr)
    else:
        peers = {"PyTorch": torch, **peers}
        backward_peers = {"PyTorch": torch_gradients, **backward_peers}
    speeds: dict[str, float] = {}
    for dtype, shape, causal in cases(options.only):
        if dtype not in speeds:
            speeds[dtype] = gemm_gflops(dtype)
        for name, function, rivals in (("results", measure, peers), ("backward", measure_backward, backward_peers)):
            if options.which in ("both", "forward" if name == "results" else "backward"):
                result = function(dtype, shape, causal, rivals, speeds[dtype])  # type: ignore[operator]
                found[name][result.key] = asdict(result)
                print(f"{name} {result.key}: {result.ms:.1f} ms, {result.gflops:.0f} GFLOP/s", result.peers, flush=True)
    if options.json:
        report.write_json(options.json, found)
    if options.markdown:
        report.write_markdown(options.markdown, "cpu tables", markdown(found))
    else:
        print(markdown(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
