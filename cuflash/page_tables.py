"""Page tables of a cache, for kernels to read and for others to take or to hand in."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from . import checks, paged_batch
from .page_arrays import PageArrays
from .paged_batch import PagedBatch
from .pages import Sequences
from .types import Layout


class PageTables:
    """The part of PagedKVCache that knows no token: which sequences there are, how long they are, and which pages hold them."""

    layout: Layout
    _stored: PageArrays
    _sequences: Sequences
    _lock: threading.RLock  # which every method holds

    # ---- what kernels read

    def batch(
        self, seqs: int | Iterable[int] | None = None, *, max_pages: int | None = None, max_sequences: int | None = None, reserved: int = 0,
    ) -> PagedBatch:
        """Pages, page table and lengths of some sequences (all, in order of creation, if not given), taken together.

        Parameters
        ----------
        seqs : int or sequence of int, optional
            Their ids, in the order of the rows.
        max_pages : int, optional
            Columns of the page table; see ``page_table``.
        max_sequences : int, optional
            Rows of the arrays, at least as many as ``seqs``, which come first; the others have length 0. With room for what is to come, a
            CUDA graph is captured once over the batch, and ``refresh`` lets it follow.
        reserved : int, default 0
            Tokens at the end of each sequence that its length leaves out: reserved ones, which ``decode`` is to append (``k_new``).

        Returns
        -------
        PagedBatch
        """
        with self._lock:
            ids, _ = self._sequences.ids(seqs)
            rows = len(ids) if max_sequences is None else checks.integer(max_sequences, "max_sequences", len(ids))
            columns = self._sequences.columns(ids, max_pages)
            numbers = np.empty(rows * (columns + 2), np.int32)
            paged_batch.fill(numbers, rows, columns, self._sequences, ids, reserved)
            (memory,) = self._stored.index_arrays(page_table=numbers)
            parts = paged_batch.parts(memory, rows, columns)
            k_pages, v_pages, *scales = self._stored.memory
            return PagedBatch(k_pages, v_pages, *parts, self.layout, memory, numbers, self._stored, *scales)

    def refresh(self, batch: PagedBatch, seqs: int | Iterable[int] | None = None, *, reserved: int = 0) -> None:
        """Bring a batch up to date in place: for sequences that grew, were truncated, forked or moved, or for others than before.

        Its arrays keep their addresses, so that a CUDA graph captured over them finds the new numbers when it is next launched. On a GPU
        it is a small copy on CuPy's current stream; the graph is to be launched on the same stream, or behind it.

        Parameters
        ----------
        batch : PagedBatch
            One of this cache, or a ``layer`` of it. Layers share index arrays: one of them is enough.
        seqs, reserved
            As in ``batch``.

        Raises
        ------
        ValueError
            Another cache's batch, more sequences than the batch has rows, or more pages than its table has columns; nothing has changed.
        """
        if batch.stored is not self._stored:
            raise ValueError("batch: of another cache; it must come from batch() of this one")
        rows, columns = batch.page_table.shape
        with self._lock:
            ids, _ = self._sequences.ids(seqs)
            if len(ids) > rows:
                raise ValueError(f"seqs: {len(ids)} sequences; the batch has {rows} rows, make it with a larger max_sequences")
            longest = max(map(len, self._sequences.held(ids)), default=0)
            if longest > columns:
                raise ValueError(f"seqs: a sequence of {longest} pages; the batch's table has {columns} columns, make it with max_pages")
            paged_batch.fill(batch.numbers, rows, columns, self._sequences, ids, reserved)
            self._stored.refill(batch.memory, batch.numbers)

    def page_table(self, seqs: int | Iterable[int] | None = None, *, max_pages: int | None = None) -> Any:
        """The pages of some sequences (all if not given).

        Returns
        -------
        ndarray
            (B, max_pages) int32: token j of sequence b lies in page [b, j // page_size], row j % page_size. Unused
            entries are -1. Without ``max_pages`` there are as many columns as the longest sequence has pages, at
            least 1.
        """
        with self._lock:
            table = self._sequences.table(self._sequences.ids(seqs)[0], max_pages)
            return self._stored.index_arrays(page_table=table)[0]

    def kv_lengths(self, seqs: int | Iterable[int] | None = None) -> Any:
        """Lengths of some sequences (all if not given): (B,) int32. ``lengths`` has them as plain numbers."""
        with self._lock:
            lengths = np.array(self._sequences.lengths(self._sequences.ids(seqs)[0]), np.int32)
            return self._stored.index_arrays(kv_lengths=lengths)[0]

    @property
    def lengths(self) -> dict[int, int]:
        """Length of every sequence by id, in order of creation."""
        with self._lock:
            ids, _ = self._sequences.ids(None)
            return dict(zip(ids, self._sequences.lengths(ids), strict=True))

    # ---- exchange of page tables with others

    def export_csr(self, seqs: int | Iterable[int] | None = None) -> tuple[Any, Any, Any]:
        """The page table of some sequences (all if not given) without its padding.

        Returns
        -------
        indptr : ndarray
            (B + 1,) int32: sequence b holds pages indices[indptr[b]:indptr[b + 1]].
        indices : ndarray
            (indptr[B],) int32.
        last_page_len : ndarray
            (B,) int32: tokens in the last page, 1 to page_size, or 0 for an empty sequence.
        """
        with self._lock:
            indptr, indices, last = self._sequences.csr(self._sequences.ids(seqs)[0])
            return tuple(self._stored.index_arrays(indptr=indptr, indices=indices, last_page_len=last))  # type: ignore[return-value]

    def import_table(self, page_table: Any, lengths: Any) -> list[int]:
        """Adopt sequences whose tokens lie in the pages already.

        Parameters
        ----------
        page_table : array_like of int
            (B, max_pages). Entries beyond ceil(length / page_size) are not looked at. Arrays on the cache's GPU are read back, which
            waits for the device.
        lengths : array_like of int
            (B,).

        Returns
        -------
        list of int
            Ids of the B new sequences. A page that several rows name, or that a sequence of the cache holds, is shared
            (copied on write).

        Raises
        ------
        ValueError
            A length beyond the table or beyond ``max_pages_per_seq``; a used entry that is no page, or that comes twice
            in one row. Nothing has changed.
        """
        with self._lock:
            given = {"page_table": page_table, "lengths": lengths}
            return self._sequences.adopt_table(*(self._stored.numbers(x, name) for name, x in given.items()))

    def import_csr(self, indptr: Any, indices: Any, last_page_len: Any) -> list[int]:
        """Adopt sequences whose tokens lie in the pages already; arguments as ``export_csr`` returns them.

        Returns and raises as ``import_table``; ``last_page_len`` outside 1 to page_size (0 for a sequence without
        pages) is a ValueError.
        """
        with self._lock:
            given = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
            return self._sequences.adopt_csr(*(self._stored.numbers(x, name) for name, x in given.items()))
