"""What a conformance case is made of: sizes, options that depend on them, and the call that they describe.

A case says nothing about right values: those come from the oracle, on plain contiguous (B, S, H, D) arrays, whatever layout, strides
and storage the case gives to the backend under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

F16, BF16, F32, F64 = (np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
DTYPES = (F16, BF16, F32, F64)


class Shape(NamedTuple):
    """Sizes of one call; for packed sequences sq and sk are the longest lengths."""

    b: int
    sq: int
    sk: int
    hq: int
    hkv: int
    d: int
    dv: int


Builder = Callable[[np.random.Generator, Shape, np.dtype], dict[str, Any]]


@dataclass(frozen=True)
class Packed:
    """Lengths of the sequences of a varlen call, and unused rows behind them in q and k."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    slack: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False)
class Case:
    """One call of attention(), of attention_varlen() with ``packed``, or of decode()."""

    name: str
    shape: Shape
    options: tuple[Builder, ...] = ()
    dtypes: tuple[np.dtype, ...] = DTYPES
    layout: str = "BSHD"
    axes: int = 4  # of the user's arrays
    strides: str = "contiguous"  # a name of calls.STRIDES
    kv_lengths: tuple[int, ...] | None = None  # keys behind these hold NaN
    kv_start: tuple[int, ...] | None = None
    packed: Packed | None = None
    page_size: int = 0  # paged cache; needs kv_lengths
    decode: bool = False
    new: int = 0  # keys that decode() appends; kv_lengths counts them already
    rope: tuple[str, int] | None = None  # style and features that are turned
    entries: tuple[int, ...] | None = None  # cache_batch_index of decode()

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(list(self.name.encode()))


# --- options -------------------------------------------------------------------------------------------------------


def fixed(**options: Any) -> Builder:
    """Options that do not depend on the data."""
    return lambda rng, shape, dtype: dict(options)


def sizes(shape: Shape, axes: str) -> tuple[int, ...]:
    """Axes like "1 Hq Sq Sk" as numbers."""
    known = {"B": shape.b, "Hq": shape.hq, "Sq": shape.sq, "Sk": shape.sk, "1": 1}
    return tuple(known[a] for a in axes.split())


def bias(axes: str = "B Hq Sq Sk", dtype: np.dtype | None = None, hidden: float = 0.0) -> Builder:
    """Random bias with these axes, in q's dtype by default; a share of it is -inf."""

    def build(rng: np.random.Generator, shape: Shape, q_dtype: np.dtype) -> dict[str, Any]:
        values = rng.standard_normal(sizes(shape, axes))
        values[rng.random(values.shape) < hidden] = -np.inf
        return {"bias": values.astype(q_dtype if dtype is None else dtype)}

    return build


def mask(axes: str = "B Hq Sq Sk", visible: float = 0.5) -> Builder:
    """Random boolean mask; some rows see nothing when few elements are visible."""
    return lambda rng, shape, dtype: {"mask": rng.random(sizes(shape, axes)) < visible}


def tree(rng: np.random.Generator, shape: Shape, dtype: np.dtype) -> dict[str, Any]:
    """Tree attention: each of the last Sq tokens sees its ancestors among them (some have none), and all earlier tokens."""
    visible = np.eye(shape.sq, dtype=bool)
    for token in range(1, shape.sq):
        parent = rng.integers(-1, token)
        if parent >= 0:
            visible[token] |= visible[parent]
    return {"mask": visible}


def alibi(axes: str = "Hq") -> Builder:
    return lambda rng, shape, dtype: {"alibi_slopes": rng.random(sizes(shape, axes))}


def sinks(rng: np.random.Generator, shape: Shape, dtype: np.dtype) -> dict[str, Any]:
    return {"sinks": 2 * rng.standard_normal(shape.hq)}


def sqdist_per_feature(rng: np.random.Generator, shape: Shape, dtype: np.dtype) -> dict[str, Any]:
    return {"score": "sqdist", "scale": 0.05 + 0.1 * rng.random(shape.d)}


def squash(s: Any, b: int, h: int, i: Any, j: Any, *, limit: float) -> Any:
    """A score_mod that changes the score itself and knows its head and batch."""
    return limit * np.tanh(s / limit) + 0.25 * h - 0.5 * b


def relative(s: Any, b: int, h: int, i: Any, j: Any, *, table: np.ndarray) -> Any:
    """A score_mod that looks a learned relative position up in a table."""
    return s + table[np.clip(i - j + len(table) // 2, 0, len(table) - 1)]


def prefix(b: int, h: int, i: Any, j: Any, *, length: int) -> Any:
    """A mask_mod: causal but for a prefix that all may see."""
    return (j <= i) | (j < length)


def strided_keys(b: int, h: int, i: Any, j: Any) -> Any:
    """A mask_mod that depends on the key alone and leaves its row axis out."""
    return (j + h + b) % 3 != 0


def relative_table(rng: np.random.Generator, shape: Shape, dtype: np.dtype) -> dict[str, Any]:
    return {"score_mod": relative, "mod_args": {"table": rng.standard_normal(17).astype(np.float32)}}


causal = fixed(causal=True)
upper_left = fixed(causal="upper_left")


def case(name: str, shape: str, *options: Builder, **fields: Any) -> Case:
    """A case from "B,Sq,Sk,Hq,Hkv,D" or "B,Sq,Sk,Hq,Hkv,D,Dv"."""
    numbers = [int(n) for n in shape.split(",")]
    if len(numbers) == 6:
        numbers.append(numbers[5])
    return Case(name, Shape(*numbers), options, **fields)


def in_miniature(c: Case) -> Case:
    """The same case in sizes that Numba's simulator can do, which takes a millisecond an element, and in one dtype.

    Longer stays longer, so that lengths, starts and new keys fit each other as before.
    """

    def short(n: int) -> int:
        return n if n <= 3 else 3 + math.ceil(math.log2(n / 3))

    def narrow(d: int) -> int:
        return min(d, 3) if d <= 16 else 5  # in one piece or in two

    s = c.shape
    hkv = min(s.hkv, 2)
    hq = hkv * min(s.hq // s.hkv, 3) if s.hkv else s.hq
    packed = c.packed and Packed(tuple(map(short, c.packed.q)), tuple(map(short, c.packed.k)), c.packed.slack)
    return replace(
        c,
        shape=Shape(s.b, short(s.sq), short(s.sk), hq, hkv, narrow(s.d), narrow(s.dv)),
        kv_lengths=c.kv_lengths and tuple(map(short, c.kv_lengths)),
        kv_start=c.kv_start and tuple(map(short, c.kv_start)),
        packed=packed,
        page_size=min(c.page_size, 3),
        new=short(c.new),
        rope=c.rope and (c.rope[0], 2),
        dtypes=(c.dtypes[len(c.name) % len(c.dtypes)],),
    )


def same_but_for_name(c: Case) -> tuple:
    """Equal for cases that differ in their name alone."""
    return tuple(getattr(c, f.name) for f in fields(c) if f.name not in ("name", "dtypes"))
