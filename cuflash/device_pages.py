"""The memory of a paged cache on a GPU: arrays of CuPy, moved by few launches on CuPy's current stream, which nobody waits for."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import arrays, checks, edges, launch, staging
from .backends import cuda, cuda_pages
from .page_arrays import PageArrays
from .types import HOST, ArrayView, Layout, NoBackendError


class DevicePages(PageArrays):
    """As PageArrays, of CuPy arrays on one device."""

    kind = "cupy"

    def __init__(self, k_pages: Any, v_pages: Any, layout: Layout, k_scales: Any = None, v_scales: Any = None) -> None:
        super().__init__(k_pages, v_pages, layout, k_scales, v_scales)
        self.device = int(k_pages.device.id)  # type: ignore[misc]
        self._ranges = [arrays.byte_range(self._view(stored)) for stored in self._stored]

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: np.dtype, device: int) -> Any:
        with launch.place(device, None):
            pages = arrays.empty_here(shape, dtype)
            pages.data.memset_async(0, pages.nbytes)
        return pages

    def write(self, held: Sequence[array], begins: list[int], tokens: list[Any], layers: slice) -> None:
        n, size = tokens[0].shape[2], self.page_size
        if not n or not held:
            return
        places = [divmod(begin, size) for begin in begins]  # page and row of the first token
        if n == 1:
            table = [[pages[a]] for pages, (a, _) in zip(held, places, strict=True)]
        else:
            columns = max(-(-(row + n) // size) for _, row in places)
            rows = [pages[a : a + columns].tolist() for pages, (a, _) in zip(held, places, strict=True)]
            table = [row + [-1] * (columns - len(row)) for row in rows]  # in a sequence's last page the tokens end
        in_page = [row for _, row in places]
        with launch.place(self.device, None):
            views = [a if self._apart(a) else self._view(_copy(x)) for x, a in ((x, self._view(x)) for x in tokens)]
            numbers, rows_in_page = np.array(table, np.int32), np.array(in_page, np.int32)
            new, stored = _pairs(views), self._views(layers)
            if len(new) == len(stored):
                for target, source in zip(stored, new, strict=True):
                    cuda_pages.write(target, source, numbers, rows_in_page)
            else:
                cuda_pages.write(stored[0], new[0], numbers, rows_in_page, stored[1])

    def _apart(self, a: ArrayView) -> bool:
        """Whether tokens lie outside the pages."""
        begin, end = arrays.byte_range(a)
        return all(end <= first or last <= begin for first, last in self._ranges)

    def read(self, pages: Sequence[int], length: int, layer: int | None) -> tuple[Any, ...]:
        layers, layered = self.layers(layer)
        stored = self._views(layers)
        made, targets = [], []
        for a in itertools.chain(*stored):
            count, _, _, heads, size = a.shape
            axes = (length, heads, size) if self.layout == "BSHD" else (heads, length, size)
            copy = arrays.empty((count, *axes), a.dtype, a)
            made.append(copy if layered else copy[0])
            # The same as pages, one behind the other; of the last one those tokens that there are.
            tokens = self._view(self._canonical(copy))
            strides = (tokens.strides[0], self.page_size * tokens.strides[1], *tokens.strides[1:])
            shape = (count, len(pages), self.page_size, heads, size)
            targets.append(ArrayView(None, tokens.pointer, shape, strides, tokens.dtype, tokens.kind, tokens.device))
        if length:
            with launch.place(self.device, None):
                for source, target in zip(stored, _pairs(targets), strict=True):
                    cuda_pages.copy(source, target, pages, None, length)
        return (*made[:2], *(x[..., 0] for x in made[2:]))

    def copy_pages(self, old: list[int], new: list[int]) -> None:
        with launch.place(self.device, None):
            for stored in self._views(slice(None)):
                cuda_pages.copy(stored, stored, old, new, len(old) * self.page_size)

    def index_arrays(self, **values: np.ndarray) -> list[Any]:
        import cupy

        with launch.place(self.device, None):
            launch.refuse_capture(launch.copied(values))
            return [cupy.asarray(x) for x in values.values()]

    def refill(self, memory: Any, values: np.ndarray) -> None:
        with launch.place(self.device, None):
            launch.refuse_capture(launch.copied({"page_table, kv_lengths": values}))
            if values.size:
                staging.copy(values, memory.data.ptr, self.device)

    def numbers(self, value: Any, name: str) -> Any:
        if not arrays.on_device(value):
            return value
        found = arrays.read_back(arrays.view(value, name))
        if found is None:
            raise RuntimeError(f"{name}: on the device, and to be read back for the cache's bookkeeping; a stream capture cannot wait")
        return found

    def _view(self, x: Any) -> ArrayView:
        return arrays.wrap(x, self.kind)

    def _views(self, layers: slice) -> list[cuda_pages.Pages]:
        """Keys and values, and their scales if they have any."""
        return _pairs([self._view(stored[layers]) for stored in self._stored])


def _pairs(views: list[ArrayView]) -> list[cuda_pages.Pages]:
    return [cuda_pages.Pages(*views[n : n + 2]) for n in range(0, len(views), 2)]


def _copy(x: Any) -> Any:
    """Also of dtypes that CuPy does not compute with."""
    return x.view(f"u{x.dtype.itemsize}").copy().view(x.dtype)


def ordinal(device: Any) -> int:
    """The number of a GPU from what a user calls it, HOST for none."""
    if device is None or device == "cpu":
        return HOST
    if isinstance(device, str):
        kind, colon, number = device.partition(":")
        if kind != "cuda" or (colon and not number.isdecimal()):
            raise ValueError(f"device: got {device!r}; allowed are None, 'cpu', 'cuda', 'cuda:N' and the number of a GPU")
        device = int(number) if colon else None
    cupy = edges.base.need_cupy()
    reason = cuda.unusable()
    if reason is not None:
        raise NoBackendError(f"device: pages on a GPU: {reason}")
    if device is None:
        return int(cupy.cuda.runtime.getDevice())
    device = getattr(device, "id", device)  # of a cupy.cuda.Device
    return checks.integer(device, "device", 0, cupy.cuda.runtime.getDeviceCount() - 1)
