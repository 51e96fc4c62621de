"""Root-mean-square errors against float64 of prefill in 16 bits on one GPU, cuflash's and those of peers on the same inputs.

Inputs are normal numbers, or such with outliers: one element of a thousand has a normal number of standard deviation 10 added to it, as
activations of language models have them. Full attention, batch 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from . import report
from .peers import DTYPES, Arrays, Peer, as_cupy, ours

SEQLEN, WIDTH, HEAD_SIZES = 2048, 2048, (64, 128, 256)
DRAWS = {"normal": 0.0, "outliers": 1e-3}  # the share of elements that are outliers
OUTLIER = 10.0  # their standard deviation


def inputs(draw: str, dtype: np.dtype, head_dim: int) -> Arrays:
    """q, k and v, (1, N, H, D)."""
    import cupy

    rng = cupy.random.default_rng(0)
    size = (1, SEQLEN, WIDTH // head_dim, head_dim)

    def one() -> Any:
        numbers, more = (rng.standard_normal(size, np.float32) for _ in range(2))
        return (numbers + OUTLIER * more * (rng.random(size, np.float32) < DRAWS[draw])).astype(dtype)

    return one(), one(), one()


def exact(q: Any, k: Any, v: Any) -> Any:
    """Attention in float64, by products of whole matrices; of arrays (B, S, H, D) of NumPy or CuPy."""
    heads_first = [a.astype(np.float32).astype(np.float64).transpose(0, 2, 1, 3) for a in (q, k, v)]
    scores = heads_first[0] @ heads_first[1].swapaxes(-1, -2) * float(q.shape[3]) ** -0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights @ heads_first[2] / weights.sum(axis=-1, keepdims=True)).transpose(0, 2, 1, 3)


def rms(result: Any, right: Any) -> float:
    """Root of the mean square of the errors."""
    return float(np.sqrt(((result.astype(np.float32).astype(np.float64) - right) ** 2).mean()))


def measure(kernel: str, peers: dict[str, Peer], dtypes: Iterable[str]) -> dict[str, Any]:
    """For each dtype, head size and draw: the error of cuflash, and that of each peer that takes the call with ours / its."""
    found = {}
    for dtype, head_dim, draw in itertools.product(dtypes, HEAD_SIZES, DRAWS):
        arrays = inputs(draw, DTYPES[dtype], head_dim)
        right = exact(*arrays)
        own = rms(ours(kernel)(arrays, False)(), right)
        row: dict[str, Any] = {"rms": own, "peers": {}}
        for name, prepare in peers.items():
            try:
                error = rms(as_cupy(prepare(arrays, False)()), right)
            except Exception:  # noqa: BLE001  why it does not take such arrays stands beside the times
                continue
            row["peers"][name] = {"rms": error, "ratio": own / error}
        found[f"{dtype} D{head_dim} {draw}"] = row
    return found


def markdown(found: dict[str, Any]) -> list[str]:
    """The table."""
    peers = list(dict.fromkeys(peer for row in found.values() for peer in row["peers"]))
    rows = []
    for name, row in found.items():
        cells = [row["peers"].get(peer) for peer in peers]
        rows.append([name, f"{row['rms']:.3g}", *(f"{p['rms']:.3g}: {p['ratio']:.3f}" if p else "-" for p in cells)])
    return report.markdown_table(("RMS error against float64", "cuflash", *(f"{peer}: ours / its" for peer in peers)), rows)
