"""Attention for the example model: cuflash over a dense or paged cache, and the materialising form to check it by."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from smollm2_memory import AttentionMemory
from smollm2_model import Array
from smollm2_weights import Config

import cuflash


def to_layout(x: Array, layout: str) -> Array:
    """(B, S, H, D) to `layout` and back: swapping the two axes is its own inverse."""
    return x if layout == "BSHD" else x.swapaxes(1, 2)


class DenseAttention:
    """cuflash on a dense cache: prompts through `cuflash.attention`, single tokens through `cuflash.decode`.

    Parameters
    ----------
    config : Config
    capacity : int
        Positions to make room for.
    xp : module
        numpy or cupy.
    layout : {"BSHD", "BHSD"}
        Order in which cuflash is handed queries and caches; the model itself always uses (B, S, H, D).
    memory : AttentionMemory, optional
        Measures what the attention calls allocate.
    dtype : str, optional
        Of stored keys and values, and of queries as cuflash is handed them.
    """

    dtype = "float32"

    def __init__(
        self, config: Config, capacity: int, xp: Any, layout: str = "BSHD", memory: AttentionMemory | None = None,
        dtype: str | None = None,
    ) -> None:  # fmt: skip
        self.xp, self.layout, self.length, self.capacity = xp, layout, 0, capacity
        self.dtype = dtype or self.dtype
        self.memory = memory or AttentionMemory(xp, enabled=False)
        shape = self._ordered((1, capacity, config.kv_heads, config.head_size))
        self.keys = [xp.zeros(shape, self.dtype) for _ in range(config.layers)]
        self.values = [xp.zeros(shape, self.dtype) for _ in range(config.layers)]

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        keys, values, dtype = self.keys[layer], self.values[layer], q.dtype
        q, k, v = (to_layout(x, self.layout).astype(self.dtype, copy=False) for x in (q, k, v))
        if self.length + k.shape[self._axis] > self.capacity:
            raise ValueError(f"cache: {self.length} + {k.shape[self._axis]} positions, room for {self.capacity}")
        if q.shape[self._axis] == 1:
            with self.memory.layer(layer):
                out = self._decode(q, keys, values, k, v)
        else:
            end = self.length + k.shape[self._axis]
            self._positions(keys, self.length, end)[...] = k
            self._positions(values, self.length, end)[...] = v
            with self.memory.layer(layer):
                out = self._attention(q, self._positions(keys, 0, end), self._positions(values, 0, end))
        return to_layout(out, self.layout).astype(dtype, copy=False)

    def advance(self, count: int) -> None:
        self.length += count

    def _attention(self, q: Array, keys: Array, values: Array) -> Array:
        return cuflash.attention(q, keys, values, causal=True, layout=self.layout)

    def _decode(self, q: Array, keys: Array, values: Array, k: Array, v: Array) -> Array:
        # Appends k and v at position `length` of the cache and attends over all length + 1 keys, in one call.
        return cuflash.decode(q, keys, values, [self.length], k_new=k, v_new=v, layout=self.layout)

    @property
    def _axis(self) -> int:
        return self.layout.index("S")

    def _ordered(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(shape["BSHD".index(axis)] for axis in self.layout)

    def _positions(self, cache: Array, start: int, end: int) -> Array:
        return cache[:, start:end] if self.layout == "BSHD" else cache[:, :, start:end]


class MaterialisedAttention(DenseAttention):
    """The textbook form: the whole score matrix in memory, softmax over it, times V."""

    def _attention(self, q: Array, keys: Array, values: Array) -> Array:
        dtype = self.xp.result_type(self.dtype, "float32")  # of all arithmetic
        q, keys, values = (to_layout(x, self.layout).astype(dtype, copy=False) for x in (q, keys, values))
        return to_layout(_materialised(self.xp, q, keys, values), self.layout)

    def _decode(self, q: Array, keys: Array, values: Array, k: Array, v: Array) -> Array:
        end = self.length + 1
        self._positions(keys, self.length, end)[...] = k
        self._positions(values, self.length, end)[...] = v
        return self._attention(q, self._positions(keys, 0, end), self._positions(values, 0, end))


class Float64Attention(MaterialisedAttention):
    """The same with stored keys and values, and therefore all arithmetic, in float64."""

    dtype = "float64"


def _materialised(xp: Any, q: Array, k: Array, v: Array) -> Array:
    """(B, Sq, Hq, D), (B, Sk, Hkv, D) -> (B, Sq, Hq, D), causal, the last query seeing every key."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.swapaxes(1, 2), xp.repeat(k.swapaxes(1, 2), group, axis=1), xp.repeat(v.swapaxes(1, 2), group, axis=1)
    rows, columns = q.shape[2], k.shape[2]
    scores = (q @ k.swapaxes(2, 3)) * q.shape[-1] ** -0.5
    visible = xp.arange(columns)[None, :] <= xp.arange(rows)[:, None] + (columns - rows)
    scores = xp.where(visible, scores, -xp.inf)
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return ((weights / weights.sum(axis=-1, keepdims=True)) @ v).swapaxes(1, 2)


class PagedAttention:
    """cuflash on a `PagedKVCache`: keys and values in pages of 16 positions, taken from a pool as the text grows.

    Parameters are those of `DenseAttention`.
    """

    PAGE_SIZE = 16

    def __init__(
        self, config: Config, capacity: int, xp: Any, layout: str = "BSHD", memory: AttentionMemory | None = None,
        dtype: str = "float32",
    ) -> None:  # fmt: skip
        self.layout, self.length, self.dtype = layout, 0, dtype
        self.memory = memory or AttentionMemory(xp, enabled=False)
        self._cache = cuflash.PagedKVCache(
            num_pages=-(-capacity // self.PAGE_SIZE),
            page_size=self.PAGE_SIZE,
            heads_kv=config.kv_heads,
            head_dim=config.head_size,
            num_layers=config.layers,
            dtype=dtype,
            layout=layout,
        )
        self._sequence = self._cache.new_sequence()
        self._batch = None

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        count = q.shape[1]
        if layer == 0:
            # All layers share one page table, so room is made once; what a broken-off step had reserved is returned.
            self._cache.truncate(self._sequence, self.length)
            self._cache.reserve([self._sequence], count)
            self._batch = self._cache.batch([self._sequence], reserved=int(count == 1))  # decode() appends the one itself
        pages = self._batch.layer(layer)
        keys, values, lengths = pages.k_pages, pages.v_pages, pages.kv_lengths
        options, dtype = {"page_table": pages.page_table, "layout": self.layout}, q.dtype
        q, k, v = (to_layout(x, self.layout).astype(self.dtype, copy=False) for x in (q, k, v))
        if count == 1:
            with self.memory.layer(layer):
                out = cuflash.decode(q, keys, values, lengths, k_new=k, v_new=v, **options)
        else:
            self._cache.write([self._sequence], k, v, layer=layer)
            with self.memory.layer(layer):
                out = cuflash.attention(q, keys, values, causal=True, kv_lengths=lengths, **options)
        return to_layout(out, self.layout).astype(dtype, copy=False)

    def advance(self, count: int) -> None:
        self.length += count


class QuantizedAttention:
    """cuflash.decode alone, on a dense cache in float8_e4m3fn with a scale for each token and head: a quarter of float32's memory.

    Parameters are those of `DenseAttention`.
    """

    def __init__(
        self, config: Config, capacity: int, xp: Any, layout: str = "BSHD", memory: AttentionMemory | None = None
    ) -> None:
        self.layout, self.length = layout, 0
        self.memory = memory or AttentionMemory(xp, enabled=False)
        shape = (1, capacity, config.kv_heads, config.head_size)
        if layout == "BHSD":
            shape = (1, config.kv_heads, capacity, config.head_size)
        e4m3 = np.dtype(ml_dtypes.float8_e4m3fn)
        self._caches = [[xp.zeros(shape, np.uint8).view(e4m3) for _ in "kv"] for _ in range(config.layers)]
        self._scales = [[xp.zeros(shape[:-1], np.float32) for _ in "kv"] for _ in range(config.layers)]

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        q, k, v = (to_layout(x, self.layout) for x in (q, k, v))
        k_scale, v_scale = self._scales[layer]
        with self.memory.layer(layer):
            out = cuflash.decode(
                q, *self._caches[layer], [self.length], k_new=k, v_new=v, k_scale=k_scale, v_scale=v_scale, causal=True,
                layout=self.layout,
            )
        return to_layout(out, self.layout)

    def advance(self, count: int) -> None:
        self.length += count
