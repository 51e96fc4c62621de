"""Which option works where: asked of the backends themselves, so that the table in README.md cannot drift."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from . import backends, planner, problem
from .types import Problem

DTYPES = {
    name: np.dtype(t) for name, t in (("f16", np.float16), ("bf16", ml_dtypes.bfloat16), ("f32", np.float32), ("f64", np.float64))
}
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
ALL, NONE, LATER = "all", "-", "later"

_BATCH, _KEYS, _HEADS, _DIM, _PAGE = 2, 32, 2, 16, 16


@dataclass(frozen=True)
class Arrays:
    """Tiny arrays of zeros, of one dtype; ``rows`` query rows."""

    dtype: np.dtype
    rows: int

    def zeros(self, *shape: int) -> np.ndarray:
        return np.zeros(shape, self.dtype)

    @property
    def q(self) -> np.ndarray:
        return self.zeros(_BATCH, self.rows, _HEADS, _DIM)

    @property
    def k(self) -> np.ndarray:
        return self.zeros(_BATCH, _KEYS, _HEADS, _DIM)

    @property
    def v(self) -> np.ndarray:
        return self.k


Build = Callable[[Arrays], Problem]


def _attention(**options: Any) -> Build:
    return lambda a: problem.build_attention(a.q, a.k, a.v, **options)


def _heads_and_sizes(a: Arrays) -> Problem:
    return problem.build_attention(a.q, a.zeros(_BATCH, _KEYS, 1, _DIM), a.zeros(_BATCH, _KEYS, 1, 2 * _DIM))


def _paged(a: Arrays) -> Problem:
    pages = a.zeros(_BATCH * _KEYS // _PAGE, _PAGE, _HEADS, _DIM)
    table = np.arange(len(pages)).reshape(_BATCH, -1)
    return problem.build_attention(a.q, pages, pages, page_table=table, kv_lengths=[_KEYS] * _BATCH)


def _per_row(name: str, dtype: Any) -> Build:
    def build(a: Arrays) -> Problem:
        options: dict[str, Any] = {name: np.ones((a.rows, _KEYS), dtype or a.dtype)}
        return problem.build_attention(a.q, a.k, a.v, **options)

    return build


def _varlen(a: Arrays, **options: Any) -> Problem:
    q, kv = a.zeros(2 * a.rows, _HEADS, _DIM), a.zeros(2 * _KEYS, _HEADS, _DIM)
    return problem.build_varlen(q, kv, kv, [0, a.rows, 2 * a.rows], [0, _KEYS, 2 * _KEYS], **options)


def _decode(**options: Any) -> Build:
    return lambda a: problem.build_decode(a.q, a.k, a.v, [1] * _BATCH, **options)[0]


def _append(a: Arrays) -> Problem:
    new = a.zeros(_BATCH, a.rows, _HEADS, _DIM)
    return problem.build_decode(a.q, a.k, a.v, [1] * _BATCH, k_new=new, v_new=new)[0]


def _quantized(a: Arrays) -> Problem:
    cache, scale = np.zeros((_BATCH, _KEYS, _HEADS, _DIM), E4M3), np.ones((_BATCH, _KEYS, _HEADS), np.float32)
    new = a.zeros(_BATCH, a.rows, _HEADS, _DIM)
    scales = {"k_scale": scale, "v_scale": scale.copy()}
    return problem.build_decode(a.q, cache, cache.copy(), [1] * _BATCH, k_new=new, v_new=new, **scales)[0]


def _backward(a: Arrays) -> Problem:
    lse = np.zeros((_BATCH, _HEADS, a.rows), np.float64 if a.dtype == np.float64 else np.float32)
    return problem.build_backward(a.q, a.q, a.k, a.v, a.q, lse)


def _varlen_backward(a: Arrays) -> Problem:
    q, kv = a.zeros(2 * a.rows, _HEADS, _DIM), a.zeros(2 * _KEYS, _HEADS, _DIM)
    lse = np.zeros((_HEADS, 2 * a.rows), np.float64 if a.dtype == np.float64 else np.float32)
    packed = ([0, a.rows, 2 * a.rows], [0, _KEYS, 2 * _KEYS], None, None)
    return problem.build_backward(q, q, kv, kv, q, lse, varlen=packed)


def _weights(a: Arrays) -> Problem:
    return problem.build_weights(a.q, a.k)


def _twice(s: Any, b: int, h: int, i: Any, j: Any) -> Any:
    return 2 * s


def _past(b: int, h: int, i: Any, j: Any) -> Any:
    return j <= i


ROWS: dict[str, Build] = {
    "attention(q, k, v)": _attention(),
    "fewer heads in k and v, v of its own head size": _heads_and_sizes,
    'layout="BHSD"': lambda a: problem.build_attention(*(x.swapaxes(1, 2) for x in (a.q, a.k, a.v)), layout="BHSD"),
    "causal=True": _attention(causal=True),
    'causal="upper_left"': _attention(causal="upper_left"),
    "window": _attention(window=(4, 0)),
    "scale": _attention(scale=0.5),
    "softcap": _attention(softcap=30.0),
    "bias": _per_row("bias", None),
    "mask": _per_row("mask", bool),
    "alibi_slopes": _attention(alibi_slopes=np.full(_HEADS, 0.5)),
    "sinks": _attention(sinks=np.zeros(_HEADS)),
    'score="sqdist"': _attention(score="sqdist"),
    "score_mod, a Python function": _attention(score_mod=_twice),
    "score_mod, a CUDA expression": _attention(score_mod="2 * s"),
    "mask_mod, a Python function": _attention(mask_mod=_past),
    "mask_mod, a CUDA expression": _attention(mask_mod="j <= i"),
    "kv_lengths, kv_start": _attention(kv_lengths=[_KEYS, 4], kv_start=[2, 0]),
    "page_table": _paged,
    "num_splits": _attention(num_splits=2),
    "batch_invariant": _attention(batch_invariant=True),
    'precision="tf32"': _attention(precision="tf32"),
    "out_dtype": _attention(out_dtype=np.float32),
    "q_scale (float8)": _attention(q_scale=1.0),
    "attention_varlen": _varlen,
    "decode": _decode(),
    "decode: k_new, v_new": _append,
    "decode: caches in float8_e4m3fn, k_scale, v_scale": _quantized,
    "decode: rope": _decode(rope=(np.ones((_KEYS, 4), np.float32), np.zeros((_KEYS, 4), np.float32), "half")),
    "decode: cache_batch_index": _decode(cache_batch_index=[0, 1]),
    "attention_backward": _backward,
    "attention_varlen_backward": _varlen_backward,
    "attention_weights": _weights,
}


def columns() -> Iterator[tuple[backends.Backend, str]]:
    """Every (backend, kernel) of this version, in the order in which they are tried."""
    for name in backends.REGISTRY:
        backend = backends.load(name)
        if not isinstance(backend, str):
            for kernel in backend.KERNELS:
                yield backend, kernel


def cell(build: Build, backend: backends.Backend, kernel: str) -> str:
    """The dtypes with which one option works in one kernel: their names, or "all", "-" for none, "later"."""
    names = []
    for name, dtype in DTYPES.items():
        try:
            asked = build(Arrays(dtype, rows=1 if kernel == "decode" else 4))
        except NotImplementedError:
            return LATER
        if planner.decline(backend, asked, kernel) is None:
            names.append(name)
    return ALL if len(names) == len(DTYPES) else " ".join(names) or NONE


def table() -> str:
    """The support table in Markdown: an option a line, a kernel a column."""
    asked = list(columns())
    lines = [["option", *(f"{backend.NAME} {kernel}" for backend, kernel in asked)]]
    lines.append(["---"] * len(lines[0]))
    lines += [[f"`{name}`", *(cell(build, *column) for column in asked)] for name, build in ROWS.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
