"""The memory of a paged cache: tokens in and out of pages, whatever the layout and with or without layers. Here that on the host."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import arrays, checks
from .types import HOST, ArrayView, Layout


class PageArrays:
    """Keys and values of all pages: (P, page, Hkv, D) or (P, Hkv, page, D), or with an axis of layers in front."""

    kind, device = "numpy", HOST

    def __init__(self, k_pages: Any, v_pages: Any, layout: Layout) -> None:
        self.layout, self.dtype = layout, k_pages.dtype
        self.num_layers = len(k_pages) if k_pages.ndim == 5 else None
        # Views (L, P, page, Hkv, D) of the same memory: the only form that the rest of the class works on.
        self._k, self._v = (self._canonical(p if p.ndim == 5 else p[None]) for p in (k_pages, v_pages))
        self.num_pages, self.page_size, self.heads_kv, self.head_dim = self._k.shape[1:]
        self.head_dim_v = self._v.shape[-1]

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: np.dtype, device: int) -> Any:
        """New pages, all 0."""
        return np.zeros(shape, dtype)

    def _canonical(self, x: Any) -> Any:
        """(..., tokens, heads, size) from the user's axis order, and the way back."""
        return x if self.layout == "BSHD" else x.swapaxes(-3, -2)

    def layers(self, layer: int | None) -> tuple[slice, bool]:
        """Which layers are meant, and whether tokens come and go with an axis for them."""
        if layer is None:
            return slice(None), self.num_layers is not None
        if self.num_layers is None:
            raise ValueError(f"layer: got {layer}; this cache was made without num_layers, it must be None")
        layer = checks.integer(layer, "layer", 0, self.num_layers - 1)
        return slice(layer, layer + 1), False

    def tokens(self, k: Any, v: Any, batch: int | None, layered: bool) -> tuple[Any, Any, int]:
        """Check tokens to be stored; returns them as (layers, B, n, Hkv, D), and n. ``batch`` is None for a bare id."""
        lead: tuple = (*((self.num_layers,) if layered else ()), *(() if batch is None else (batch,)))
        checked = []
        for name, x, size in (("k", k, self.head_dim), ("v", v, self.head_dim_v)):
            a = arrays.view(x, name)
            self._here(a, name)
            checks.dtype(a, name, self.dtype)
            axes = (*lead, "n", self.heads_kv, size) if self.layout == "BSHD" else (*lead, self.heads_kv, "n", size)
            if len(a.shape) != len(axes) or any(want not in ("n", came) for want, came in zip(axes, a.shape, strict=True)):
                raise ValueError(f"{name}: shape {a.shape}; it must be ({', '.join(map(str, axes))})")
            x = self._canonical(a.array)
            layers = self.num_layers if layered and self.num_layers is not None else 1
            checked.append(x.reshape(layers, 1 if batch is None else batch, *x.shape[-3:]))
        k, v = checked
        if k.shape[2] != v.shape[2]:
            raise ValueError(f"v: {v.shape[2]} tokens; they must be as many as those of k, {k.shape[2]}")
        return k, v, k.shape[2]

    def _here(self, a: ArrayView, name: str) -> None:
        """Tokens must lie where the pages do."""
        if (a.kind, a.device) != (self.kind, self.device):
            where = "host memory (NumPy)" if self.device == HOST else f"{self.kind}, GPU {self.device}"
            error = TypeError if a.kind != self.kind else ValueError
            raise error(f"{name}: in {arrays.where(a)}; the cache is in {where}")

    def write(self, held: Sequence[array], begins: list[int], k: Any, v: Any, layers: slice) -> None:
        """Store tokens (layers, B, n, Hkv, D) from position ``begins[b]`` of the sequence on that holds the pages ``held[b]``."""
        size, n = self.page_size, k.shape[2]
        # Plain lists: for the usual n of 1, an array operation for each sequence would cost ten times as much.
        pages = [[p[j // size] for j in range(begin, begin + n)] for p, begin in zip(held, begins, strict=True)]
        rows = [[j % size for j in range(begin, begin + n)] for begin in begins]
        slots = tuple(np.array(x, np.intp).reshape(len(held), n) for x in (pages, rows))
        # k and v may be views of these pages: NumPy copies a source that overlaps its target.
        self._k[layers][:, *slots] = k
        self._v[layers][:, *slots] = v

    def read(self, pages: Sequence[int], length: int, layer: int | None) -> tuple[Any, Any]:
        """A copy of the first tokens that lie in some pages, in the user's axis order."""
        layers, layered = self.layers(layer)
        copies = []
        for stored in (self._k, self._v):
            part = stored[layers][:, np.array(pages, np.intp)]
            part = self._canonical(part.reshape(len(part), -1, *part.shape[-2:])[:, :length])
            copies.append(np.ascontiguousarray(part if layered else part[0]))
        return copies[0], copies[1]

    def copy_pages(self, old: list[int], new: list[int]) -> None:
        """Copy pages in all layers; none is in both lists."""
        for stored in (self._k, self._v):
            stored[:, new] = stored[:, old]

    def index_arrays(self, **values: np.ndarray) -> list[Any]:
        """Index arrays as the user gets them: where the pages are."""
        return list(values.values())

    def refill(self, memory: Any, values: np.ndarray) -> None:
        """Bring an index array up to date with the values that `index_arrays` made it of; on the host it is these."""

    def numbers(self, value: Any, name: str) -> Any:
        """An index array of the user's as something that lies on the host."""
        return value


def check_pages(k_pages: Any, v_pages: Any) -> ArrayView:
    """Check pages of a user's making; returns the view of the first."""
    k, v = checks.same_place_and_dtype(k_pages=k_pages, v_pages=v_pages).values()
    if len(k.shape) not in (4, 5) or 0 in k.shape:
        raise ValueError(f"k_pages: shape {k.shape}; it must have 4 axes, 5 with layers, and none of size 0")
    if v.shape[:-1] != k.shape[:-1] or v.shape[-1] == 0:
        raise ValueError(f"v_pages: shape {v.shape}; it must be that of k_pages, {k.shape}, but for the last axis")
    for name, pages in (("k_pages", k), ("v_pages", v)):
        checks.writeable(pages, name)
    if arrays.overlap(k, v):
        raise ValueError("v_pages: overlaps k_pages in memory, or their strides are too involved to rule it out")
    return k
