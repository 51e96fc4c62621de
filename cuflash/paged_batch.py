"""PagedBatch: what kernels need to know of some sequences of a paged cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from . import checks
from .pages import Sequences
from .types import Layout


@dataclass(frozen=True, slots=True, eq=False)
class PagedBatch:
    """What a call of ``decode`` or ``attention`` needs to read some sequences of a cache.

    The index arrays are a snapshot, taken when the batch was made: after the sequences grew, were truncated or forked, take a new batch,
    or let ``PagedKVCache.refresh`` bring this one up to date in place. They lie where the pages do, which are the cache's own memory.

    Attributes
    ----------
    k_pages, v_pages : ndarray
        As those of the cache; without the axis of layers once ``layer`` has picked one.
    k_scales, v_scales : ndarray or None
        Likewise: ``k_scale`` and ``v_scale`` of a call.
    page_table : ndarray
        (B, max_pages) int32, -1 after the last page of a sequence.
    kv_lengths : ndarray
        (B,) int32; 0 for rows without a sequence.
    prefix_lengths : ndarray
        (B,) int32: keys that all sequences of the batch have in common, for ``decode_shared_prefix``: those in pages that are shared from
        the first on. 0 for rows without a sequence, and where there is but one sequence.
    layout : str
        "BSHD" or "BHSD".
    memory : ndarray
        (B * (max_pages + 2),) int32, of which the three index arrays are views: what ``refresh`` fills.
    numbers : ndarray
        What ``memory`` was made of, on the host, and may be itself: what ``refresh`` writes to first.
    stored : object
        That of the cache which the batch is of.
    """

    k_pages: Any = field(repr=False)
    v_pages: Any = field(repr=False)
    page_table: Any
    kv_lengths: Any
    prefix_lengths: Any
    layout: Layout = "BSHD"
    memory: Any = field(default=None, repr=False)
    numbers: Any = field(default=None, repr=False)
    stored: Any = field(default=None, repr=False)
    k_scales: Any = field(default=None, repr=False)
    v_scales: Any = field(default=None, repr=False)

    def layer(self, index: int) -> PagedBatch:
        """The same sequences in one layer of a cache made with ``num_layers``."""
        if self.k_pages.ndim != 5:
            raise ValueError("layer: these pages have no axis of layers (the cache was made without num_layers)")
        index = checks.integer(index, "layer", 0, len(self.k_pages) - 1)
        whole = {name: getattr(self, name) for name in ("k_pages", "v_pages", "k_scales", "v_scales")}
        return replace(self, **{name: a[index] for name, a in whole.items() if a is not None})


def parts(memory: Any, rows: int, columns: int) -> tuple[Any, Any, Any]:
    """Page table (rows, columns), lengths (rows,) and prefix lengths (rows,), which lie one behind the other."""
    end = rows * columns
    return memory[:end].reshape(rows, columns), memory[end : end + rows], memory[end + rows :]


def fill(numbers: np.ndarray, rows: int, columns: int, sequences: Sequences, ids: list[int], reserved: int) -> None:
    """Write the `parts` of some sequences, for which there are rows and columns enough.

    The sequences come first; other rows are empty. Lengths are without the last ``reserved`` tokens.
    """
    reserved = checks.integer(reserved, "reserved", 0)
    lengths = sequences.lengths(ids)
    if reserved > min(lengths, default=reserved):
        raise ValueError(f"reserved: {reserved} tokens; sequence {ids[int(np.argmin(lengths))]} has {min(lengths)}")
    lengths = [length - reserved for length in lengths]
    table, *counts = parts(numbers, rows, columns)
    sequences.fill(ids, table)
    n = len(ids)
    for held, values in zip(counts, (lengths, _common(table[:n], lengths, sequences.page_size)), strict=True):
        held[:n], held[n:] = values, 0


def _common(table: np.ndarray, lengths: list[int], page_size: int) -> int:
    """Keys of all sequences that lie in the same pages, from the first on; 0 if there is but one sequence."""
    if len(table) < 2:
        return 0
    differs = np.flatnonzero((table != table[0]).any(axis=0) | (table[0] < 0))
    pages = int(differs[0]) if differs.size else table.shape[1]
    return min(pages * page_size, *lengths)
