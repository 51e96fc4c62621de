"""The memory of a paged cache: tokens in and out of pages, whatever the layout and with or without layers. Here that on the host."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import arrays, checks
from .backends import append
from .types import E4M3, HOST, ArrayView, Layout, name_of

QUANTIZED = ("float16", "bfloat16", "float32")  # dtypes of tokens that pages in float8_e4m3fn take beside their own


class PageArrays:
    """Keys and values of all pages: (P, page, Hkv, D) or (P, Hkv, page, D), or with an axis of layers in front.

    Those in float8_e4m3fn have scales, float32, of the same shapes without the last axis.
    """

    kind, device = "numpy", HOST

    def __init__(self, k_pages: Any, v_pages: Any, layout: Layout, k_scales: Any = None, v_scales: Any = None) -> None:
        self.layout, self.dtype = layout, k_pages.dtype
        self.memory = k_pages, v_pages, k_scales, v_scales
        self.quantizes = k_scales is not None
        self.num_layers = len(k_pages) if k_pages.ndim == 5 else None
        # Views (L, P, page, Hkv, D) of the same memory: the only form that the rest of the class works on. Scales have D = 1.
        scales = (k_scales[..., None], v_scales[..., None]) if self.quantizes else ()
        self._stored = [self._canonical(p if self.num_layers is not None else p[None]) for p in (k_pages, v_pages, *scales)]
        self.num_pages, self.page_size, self.heads_kv, self.head_dim = self._stored[0].shape[1:]
        self.head_dim_v = self._stored[1].shape[-1]

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

    def tokens(self, k: Any, v: Any, k_scale: Any, v_scale: Any, batch: int | None, layered: bool) -> tuple[list[Any], int]:
        """Check tokens to be stored; returns them as (layers, B, n, Hkv, D), and n. ``batch`` is None for a bare id.

        They are keys and values, and their scales with D = 1 if these came.
        """
        lead: tuple = (*((self.num_layers,) if layered else ()), *(() if batch is None else (batch,)))
        dtype = self._taken(k, {"k_scale": k_scale, "v_scale": v_scale})
        given: list[tuple] = [("k", k, dtype, (self.head_dim,)), ("v", v, dtype, (self.head_dim_v,))]
        if k_scale is not None:
            given += [(name, x, np.dtype(np.float32), ()) for name, x in (("k_scale", k_scale), ("v_scale", v_scale))]
        checked: list[Any] = []
        for name, x, dtype, size in given:
            a = arrays.view(x, name)
            self._here(a, name)
            checks.dtype(a, name, dtype)
            axes = (*lead, "n", self.heads_kv, *size) if self.layout == "BSHD" else (*lead, self.heads_kv, "n", *size)
            if len(a.shape) != len(axes) or any(want not in ("n", came) for want, came in zip(axes, a.shape, strict=True)):
                raise ValueError(f"{name}: shape {a.shape}; it must be ({', '.join(map(str, axes))})")
            x = self._canonical(a.array if size else a.array[..., None])
            layers = self.num_layers if layered and self.num_layers is not None else 1
            checked.append(x.reshape(layers, 1 if batch is None else batch, *x.shape[-3:]))
            if checked[-1].shape[2] != checked[0].shape[2]:
                came = checked[-1].shape[2]
                raise ValueError(f"{name}: {came} tokens; they must be as many as those of k, {checked[0].shape[2]}")
        return checked, checked[0].shape[2]

    def _taken(self, k: Any, scales: dict[str, Any]) -> np.dtype:
        """The dtype that tokens must have: the pages' own; where these quantize, that of k, if it can be quantized."""
        came = self.dtype
        if self.quantizes and name_of(arrays.view(k, "k").dtype) != E4M3:
            came = k.dtype
            if name_of(came) not in QUANTIZED:
                raise TypeError(f"k: dtype {came}; it must be one of {', '.join(QUANTIZED)}, or {E4M3} with scales")
        for name, scale in scales.items():
            if (scale is not None) is not arrays.is_e4m3(came):
                found = "None" if scale is None else arrays.type_name(scale)
                raise TypeError(f"{name}: got {found} beside tokens in {came}; {E4M3} has scales, others have none")
        return came

    def _here(self, a: ArrayView, name: str) -> None:
        """Tokens must lie where the pages do."""
        if (a.kind, a.device) != (self.kind, self.device):
            where = "host memory (NumPy)" if self.device == HOST else f"{self.kind}, GPU {self.device}"
            error = TypeError if a.kind != self.kind else ValueError
            raise error(f"{name}: in {arrays.where(a)}; the cache is in {where}")

    def write(self, held: Sequence[array], begins: list[int], tokens: list[Any], layers: slice) -> None:
        """Store `tokens` from position ``begins[b]`` of the sequence on that holds the pages ``held[b]``."""
        size, n = self.page_size, tokens[0].shape[2]
        # Plain lists: for the usual n of 1, an array operation for each sequence would cost ten times as much.
        pages = [[p[j // size] for j in range(begin, begin + n)] for p, begin in zip(held, begins, strict=True)]
        rows = [[j % size for j in range(begin, begin + n)] for begin in begins]
        slots = tuple(np.array(x, np.intp).reshape(len(held), n) for x in (pages, rows))
        if len(tokens) < len(self._stored):
            quantized = [append.quantized(x, None) for x in tokens]
            tokens = [codes for codes, _ in quantized] + [scale[..., None] for _, scale in quantized]
        # Tokens may be views of these pages: NumPy copies a source that overlaps its target.
        for stored, x in zip(self._stored, tokens, strict=True):
            stored[layers][:, *slots] = x

    def read(self, pages: Sequence[int], length: int, layer: int | None) -> tuple[Any, ...]:
        """A copy of the first tokens that lie in some pages, in the user's axis order: keys, values, and their scales if they have any."""
        layers, layered = self.layers(layer)
        copies = []
        for stored in self._stored:
            part = stored[layers][:, np.array(pages, np.intp)]
            part = self._canonical(part.reshape(len(part), -1, *part.shape[-2:])[:, :length])
            copies.append(np.ascontiguousarray(part if layered else part[0]))
        return (*copies[:2], *(x[..., 0] for x in copies[2:]))

    def copy_pages(self, old: list[int], new: list[int]) -> None:
        """Copy pages in all layers; none is in both lists."""
        for stored in self._stored:
            stored[:, new] = stored[:, old]

    def index_arrays(self, **values: np.ndarray) -> list[Any]:
        """Index arrays as the user gets them: where the pages are."""
        return list(values.values())

    def refill(self, memory: Any, values: np.ndarray) -> None:
        """Bring an index array up to date with the values that `index_arrays` made it of; on the host it is these."""

    def numbers(self, value: Any, name: str) -> Any:
        """An index array of the user's as something that lies on the host."""
        return value


def check_pages(k_pages: Any, v_pages: Any, k_scales: Any, v_scales: Any) -> ArrayView:
    """Check pages of a user's making, and scales of those in float8_e4m3fn; returns the view of the first."""
    k, v = checks.same_place_and_dtype(k_pages=k_pages, v_pages=v_pages).values()
    if len(k.shape) not in (4, 5) or 0 in k.shape:
        raise ValueError(f"k_pages: shape {k.shape}; it must have 4 axes, 5 with layers, and none of size 0")
    if v.shape[:-1] != k.shape[:-1] or v.shape[-1] == 0:
        raise ValueError(f"v_pages: shape {v.shape}; it must be that of k_pages, {k.shape}, but for the last axis")
    written = {"k_pages": k, "v_pages": v}
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if (scales is not None) is not arrays.is_e4m3(k.dtype):
            came = "None" if scales is None else arrays.type_name(scales)
            raise TypeError(f"{name}: got {came} beside pages in {k.dtype}; {E4M3} has scales, others have none")
        if scales is not None:
            written[name] = arrays.view(scales, name)
            checks.same_place(written[name], name, k, "k_pages")
            checks.dtype(written[name], name, np.dtype(np.float32))
            checks.shape(written[name], name, k.shape[:-1])
    for name, pages in written.items():
        checks.writeable(pages, name)
    for (other, a), (name, b) in itertools.combinations(written.items(), 2):
        if arrays.overlap(a, b):
            raise ValueError(f"{name}: overlaps {other} in memory, or their strides are too involved to rule it out")
    return k
