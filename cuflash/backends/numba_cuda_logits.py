"""What the Numba CUDA kernels share: stored elements in and out, and the way from a raw score to a logit.

Forward and backward use the same device functions, so that they cannot disagree on a mask or a bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda, float32, float64


@dataclass(frozen=True)
class Tile:
    """Threads of a block and what each computes: thread (ty, tx) owns ``rows`` consecutive rows and every threads_x-th key."""

    threads_y: int
    threads_x: int
    rows: int  # query rows a thread
    keys: int  # keys a thread

    @property
    def m(self) -> int:
        """Packed query rows of a block."""
        return self.threads_y * self.rows

    @property
    def n(self) -> int:
        """Keys of a step."""
        return self.threads_x * self.keys

    @property
    def threads(self) -> int:
        return self.threads_y * self.threads_x


@dataclass(frozen=True)
class Instance:
    """What a compiled kernel is fixed by: never sizes, lengths or strides."""

    storage: str  # what q, k and v hold: float16, bfloat16, float32 or float64
    out: str  # what out holds
    chunks: int  # ceil(D / CHUNK)
    chunks_v: int  # ceil(Dv / CHUNK)
    tile: Tile
    sqdist: bool = False
    bias: str = ""  # dtype of the bias, "" for none
    mask: bool = False
    score_mod: Callable | None = None  # device functions, see modifier()
    mask_mod: Callable | None = None

    @property
    def real(self) -> Any:
        """Numba type of statistics and accumulators."""
        return float64 if self.storage == "float64" else float32

    @property
    def number(self) -> type:
        """The same as a NumPy scalar type: in the simulator Numba's types make no scalars."""
        return np.float64 if self.storage == "float64" else np.float32


def reader(storage: str) -> Callable:
    """Device function: stored element -> float. bfloat16 is stored as its bits."""
    if storage == "bfloat16":

        @cuda.jit(device=True)
        def read(x):
            return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)

    elif storage == "float64":

        @cuda.jit(device=True)
        def read(x):
            return np.float64(x)

    else:

        @cuda.jit(device=True)
        def read(x):
            return np.float32(x)

    return read


def writer(storage: str) -> Callable:
    """Device function: float -> stored element, rounded to nearest even. bfloat16 is stored as its bits."""
    if storage == "bfloat16":

        @cuda.jit(device=True)
        def write(x):
            y = np.float32(x)
            if y != y:
                return np.uint16(0x7FC0)
            bits = np.int64(y.view(np.uint32))
            return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)

    elif storage == "float16":

        @cuda.jit(device=True)
        def write(x):
            return np.float16(x)

    elif storage == "float64":

        @cuda.jit(device=True)
        def write(x):
            return np.float64(x)

    else:

        @cuda.jit(device=True)
        def write(x):
            return np.float32(x)

    return write


@cuda.jit(device=True)
def in_window(i, j, left, right):
    """Whether key j lies in the window of the query at position i; a negative side is unbounded."""
    return (left < 0 or j >= i - left) and (right < 0 or j <= i + right)


@cuda.jit(device=True)
def key_place(page_table, page_size, b, j, k_batch, k_begin):
    """The first two indices of key j of sequence b in k and v."""
    if page_size > 0:
        return page_table[b, j // page_size], j % page_size
    return k_batch, k_begin + j


def logit_function(instance: Instance) -> Callable:
    """Device function: scaled score of a visible-by-position pair -> logit, -inf where a mask hides it."""
    number = instance.number
    has_bias, has_mask = bool(instance.bias), instance.mask
    has_score_mod, has_mask_mod = instance.score_mod is not None, instance.mask_mod is not None
    read_bias = reader(instance.bias or "float32")
    score_mod = instance.score_mod or _no_score_mod
    mask_mod = instance.mask_mod or _no_mask_mod
    minus_inf = number(-np.inf)

    @cuda.jit(device=True)
    def logit(x, b, h, row, i, j, softcap, bias, slopes, mask, mask_shift, mods):
        if has_mask:
            column = j - mask_shift
            if column >= 0 and not mask[b, h, row, column]:
                return minus_inf
        if has_mask_mod:
            if not mask_mod(b, h, i, j, mods):
                return minus_inf
        if has_bias:
            extra = number(read_bias(bias[b, h, row, j]))
            if extra == minus_inf:  # hides the key, whatever the score is
                return minus_inf
        if softcap > number(0):
            x = softcap * number(math.tanh(x / softcap))
        if has_bias:
            x += extra
        if slopes.shape[0] > 0:
            x -= slopes[b, h] * number(abs(i - j))
        if has_score_mod:
            x = number(score_mod(x, b, h, i, j, mods))
        return x

    return logit


def slope_function(instance: Instance) -> Callable:
    """Device function: d logit / d bias and d logit / d scaled score, for the backward pass, as a pair.

    score_mod is differentiated by central differences in float64, as in the oracle.
    """
    number = instance.number
    has_bias, has_score_mod = bool(instance.bias), instance.score_mod is not None
    read_bias = reader(instance.bias or "float32")
    score_mod = instance.score_mod or _no_score_mod
    step_factor = float(np.cbrt(np.finfo(np.float64).eps))

    @cuda.jit(device=True)
    def slope(x, b, h, row, i, j, softcap, bias, slopes, mods):
        outer = number(1)
        inner = number(1)
        if softcap > number(0):
            e = number(math.exp(number(-2) * abs(x / softcap)))
            inner = number(4) * e / ((number(1) + e) * (number(1) + e))  # 1 - tanh^2 without the difference of two near numbers
            x = softcap * number(math.tanh(x / softcap))
        if has_score_mod:
            if has_bias:
                x += number(read_bias(bias[b, h, row, j]))
            if slopes.shape[0] > 0:
                x -= slopes[b, h] * number(abs(i - j))
            center = np.float64(x)
            step = step_factor * max(1.0, abs(center))
            above = center + step
            below = center - step
            outer = number((score_mod(above, b, h, i, j, mods) - score_mod(below, b, h, i, j, mods)) / (above - below))
        return outer, outer * inner

    return slope


@cuda.jit(device=True)
def _no_score_mod(s, b, h, i, j, mods):
    return s


@cuda.jit(device=True)
def _no_mask_mod(b, h, i, j, mods):
    return True
