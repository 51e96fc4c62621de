"""PagedKVCache: keys and values of many sequences in one pool of fixed-size pages.

Bookkeeping (who owns which page) is plain Python and knows nothing of the arrays; the arrays are only indexed by it.
"""

from __future__ import annotations

import itertools
import operator
import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np

from .types import CacheFullError

DTYPES = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
NO_PAGE = -1  # fills the unused end of a page table row
INT32_MAX = 2**31 - 1  # tables and lengths leave the cache as int32


@dataclass(frozen=True, slots=True, eq=False)
class PagedBatch:
    """What a call of ``decode`` or ``attention`` needs to read some sequences of a cache.

    The index arrays are a snapshot: take a new one after the sequences grew, were truncated or were forked. The pages
    are the cache's own memory.

    Attributes
    ----------
    k_pages, v_pages : ndarray
        (P, page, Hkv, D) and (P, page, Hkv, Dv), or (P, Hkv, page, D) and (P, Hkv, page, Dv) with layout "BHSD"; one
        more axis in front, the layers, until ``layer`` picked one.
    page_table : ndarray
        (B, max_pages) int32, -1 after the last page of a sequence.
    kv_lengths : ndarray
        (B,) int32.
    layout : str
        "BSHD" or "BHSD".
    """

    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    kv_lengths: np.ndarray
    layout: Literal["BSHD", "BHSD"] = "BSHD"

    def layer(self, index: int) -> PagedBatch:
        """The same sequences in one layer of a cache made with ``num_layers``."""
        if self.k_pages.ndim != 5:
            raise ValueError("layer: these pages have no layer axis (the cache was made without num_layers)")
        index = _integer("layer", index, 0, len(self.k_pages) - 1)
        return replace(self, k_pages=self.k_pages[index], v_pages=self.v_pages[index])


class PagedKVCache:
    """Keys and values of many sequences, kept in pages of ``page_size`` tokens that are handed out on demand.

    A sequence holds exactly ceil(length / page_size) pages. Forked sequences share pages, which are copied when one of
    them writes (copy on write). All layers of a model share one page table.

    Parameters
    ----------
    num_pages : int
        Pages in the pool, at least 1. Host memory is touched only when a page is first written.
    page_size : int
        Tokens of one page, at least 1.
    heads_kv, head_dim : int
        Key/value heads and their size.
    head_dim_v : int, optional
        Size of a value head; ``head_dim`` if not given.
    num_layers : int, optional
        Puts a layer axis in front of ``k_pages`` and ``v_pages``. Without it the cache is that of one layer.
    dtype : dtype
        float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64.
    layout : {"BSHD", "BHSD"}
        Axis order of the pages and of the ``k`` and ``v`` handed in and out: (tokens, heads, size) or
        (heads, tokens, size).
    max_pages_per_seq : int, optional
        No sequence may hold more pages than this; ``num_pages`` if not given.

    Attributes
    ----------
    k_pages : ndarray
        (P, page, Hkv, D), or (P, Hkv, page, D) with layout "BHSD"; with ``num_layers`` (L, P, ...), so that
        ``k_pages[i]`` is layer i.
    v_pages : ndarray
        The same with Dv.

    Notes
    -----
    Pages are not cleared when they are freed: what lies beyond the length of a sequence is arbitrary, and no kernel
    reads it.

    Every method holds one lock, so threads may share a cache. Reading the pages (a running ``decode``) holds none:
    do not free, truncate or write a sequence in one thread while another attends to it. Sequence ids are never used
    twice; using one after ``free`` is a ValueError.

    Examples
    --------
    >>> import numpy as np
    >>> cache = PagedKVCache(num_pages=8, page_size=4, heads_kv=2, head_dim=16)
    >>> seq = cache.new_sequence()
    >>> cache.append(seq, np.ones((5, 2, 16), np.float32), np.ones((5, 2, 16), np.float32))
    0
    >>> cache.page_table([seq])
    array([[0, 1]], dtype=int32)

    One step of a model with many layers, for the sequences ``seqs`` together::

        cache.reserve(seqs, 1)                      # or CacheFullError, with nothing changed
        batch = cache.batch(seqs)
        for i, layer in enumerate(layers):
            q, k, v = layer.project(x)              # k, v: (B, 1, Hkv, D)
            cache.write(seqs, k, v, layer=i)        # the last token of each sequence
            b = batch.layer(i)
            x = layer.finish(x, cuflash.decode(q, b.k_pages, b.v_pages, b.kv_lengths, page_table=b.page_table))

    ``decode`` can write the new tokens itself: then the lengths it takes are those that ``reserve`` returned, and
    ``k_new=k, v_new=v`` stand in for ``write``.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int = 16,
        heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        num_layers: int | None = None,
        dtype: Any = np.float32,
        layout: Literal["BSHD", "BHSD"] = "BSHD",
        max_pages_per_seq: int | None = None,
    ) -> None:
        num_pages = _integer("num_pages", num_pages, 1, INT32_MAX)
        page_size = _integer("page_size", page_size, 1)
        heads_kv = _integer("heads_kv", heads_kv, 1)
        head_dim = _integer("head_dim", head_dim, 1)
        head_dim_v = head_dim if head_dim_v is None else _integer("head_dim_v", head_dim_v, 1)
        layers = () if num_layers is None else (_integer("num_layers", num_layers, 1),)
        dtype = _dtype("dtype", dtype)
        page = (page_size, heads_kv) if _layout(layout) == "BSHD" else (heads_kv, page_size)
        k_pages = np.zeros((*layers, num_pages, *page, head_dim), dtype)
        v_pages = np.zeros((*layers, num_pages, *page, head_dim_v), dtype)
        self._init(k_pages, v_pages, layout, max_pages_per_seq)

    @classmethod
    def from_pages(
        cls,
        k_pages: np.ndarray,
        v_pages: np.ndarray,
        *,
        layout: Literal["BSHD", "BHSD"] = "BSHD",
        max_pages_per_seq: int | None = None,
    ) -> PagedKVCache:
        """A cache over existing pages, without a copy; ``import_table`` or ``import_csr`` then names the sequences.

        Parameters
        ----------
        k_pages, v_pages : ndarray
            Shapes as the attributes of the same names, 4 axes or 5 with the layers in front; writable, any strides.
        layout, max_pages_per_seq
            As in the constructor.

        Returns
        -------
        PagedKVCache
            Holds no sequence yet; all its pages are free.
        """
        for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
            _ndarray(name, pages)
            _dtype(name, pages.dtype)
            if pages.ndim not in (4, 5) or 0 in pages.shape:
                raise ValueError(f"{name} has shape {pages.shape}, expected 4 axes (5 with layers), none of size 0")
            if not pages.flags.writeable:
                raise ValueError(f"{name} is read-only; a cache writes into its pages")
        if v_pages.dtype != k_pages.dtype:
            raise TypeError(f"v_pages is {v_pages.dtype}, k_pages is {k_pages.dtype}; they must agree")
        if v_pages.shape[:-1] != k_pages.shape[:-1]:
            raise ValueError(f"v_pages has shape {v_pages.shape}, k_pages {k_pages.shape}; only the last may differ")
        if np.may_share_memory(k_pages, v_pages) and np.shares_memory(k_pages, v_pages, max_work=1_000_000):
            raise ValueError("k_pages and v_pages overlap in memory")
        _layout(layout)
        cache = cls.__new__(cls)
        cache._init(k_pages, v_pages, layout, max_pages_per_seq)
        return cache

    def _init(self, k_pages: np.ndarray, v_pages: np.ndarray, layout: str, max_pages_per_seq: int | None) -> None:
        self.k_pages, self.v_pages, self.layout = k_pages, v_pages, layout
        # Views (L, P, page, Hkv, D) of the same memory: the only form the rest of the class works on.
        self._k, self._v = (
            np.swapaxes(p, -3, -2) if layout == "BHSD" else p
            for p in (p if p.ndim == 5 else p[None] for p in (k_pages, v_pages))
        )
        self.num_layers = len(k_pages) if k_pages.ndim == 5 else None
        self.num_pages, self.page_size, self.heads_kv, self.head_dim = self._k.shape[1:]
        self.head_dim_v = self._v.shape[-1]
        self.dtype = k_pages.dtype
        if max_pages_per_seq is None:
            max_pages_per_seq = self.num_pages
        self.max_pages_per_seq = _integer("max_pages_per_seq", max_pages_per_seq, 1)
        self._capacity = min(self.max_pages_per_seq * self.page_size, INT32_MAX)
        self._pool = _PagePool(self.num_pages)
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0
        self._lock = threading.RLock()
        self._version = 0  # counts changes of any page list or length; guards _slots_memo
        self._slots_memo: tuple = (None, None)

    # ---- sequences

    def new_sequence(self) -> int:
        """Start an empty sequence; returns its id. It holds no page yet."""
        with self._lock:
            return self._add(_Sequence())

    def fork(self, seq: int, length: int | None = None) -> int:
        """Start a sequence that shares the first ``length`` tokens of ``seq``; costs no page until one of them writes.

        Parameters
        ----------
        seq : int
            The sequence to share with; it is not changed.
        length : int, optional
            Tokens to share, at most the length of ``seq``; all of them if not given.

        Returns
        -------
        int
            Id of the new sequence.
        """
        with self._lock:
            source = self._sequence(seq)
            length = source.length if length is None else _integer("length", length, 0, source.length)
            pages = source.pages[: self._pages_for(length)]
            self._pool.share(pages)
            return self._add(_Sequence(pages, length))

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first ``length`` tokens of ``seq`` (at most its length) and give back the pages after them."""
        with self._lock:
            sequence = self._sequence(seq)
            self._cut(sequence, _integer("length", length, 0, sequence.length))

    def free(self, seqs: int | Iterable[int]) -> None:
        """End one sequence or several; pages that no other sequence shares become free. Their data is not cleared."""
        with self._lock:
            ids, _ = self._ids(seqs, distinct=True)
            for i in ids:
                self._cut(self._sequences.pop(i), 0)

    # ---- tokens

    def append(self, seqs: int | Iterable[int], k: np.ndarray, v: np.ndarray) -> int | np.ndarray:
        """Add n tokens to one sequence, or n tokens to each of several, in all layers.

        Parameters
        ----------
        seqs : int or sequence of int
            One id, or B different ids.
        k, v : ndarray
            (n, Hkv, D) and (n, Hkv, Dv) in the cache's dtype ((Hkv, n, D) with layout "BHSD"); with several ids
            (B, n, Hkv, D); in a cache with ``num_layers`` one more axis in front, the layers. Any strides.

        Returns
        -------
        int or ndarray
            Length before, i.e. the position of the first new token; (B,) int32 with several ids.

        Raises
        ------
        CacheFullError
            Fewer free pages than wanted. No sequence and no page has changed.
        ValueError
            Unknown or freed id, wrong shape, or a sequence would exceed ``max_pages_per_seq`` pages.
        TypeError
            Wrong dtype or kind of array.
        """
        with self._lock:
            ids, single = self._ids(seqs, distinct=True)
            k, v, n = self._tokens(k, v, None if single else len(ids), layered=self.num_layers is not None)
            begins = self._grow(ids, [n] * len(ids))
            try:
                self._scatter(ids, begins, k, v, slice(None))
            except BaseException:
                for i, begin in zip(ids, begins, strict=True):
                    self._cut(self._sequences[i], begin)
                raise
            return begins[0] if single else np.array(begins, np.int32)

    def reserve(self, seqs: int | Iterable[int], n: int | Sequence[int]) -> int | np.ndarray:
        """Make room for n more tokens in all layers, to be filled by ``write`` layer by layer.

        The lengths grow at once. Until they are written the new tokens hold arbitrary data; ``truncate`` to the
        returned position undoes a reservation.

        Parameters
        ----------
        seqs : int or sequence of int
            One id, or B different ids; either all of them grow or none.
        n : int or sequence of int
            Tokens for each; with several ids also one number per id.

        Returns
        -------
        int or ndarray
            Length before; (B,) int32 with several ids.

        Raises
        ------
        CacheFullError, ValueError
            As ``append``.
        """
        with self._lock:
            ids, single = self._ids(seqs, distinct=True)
            if single or np.ndim(n) == 0:
                counts = [_integer("n", n, 0)] * len(ids)
            else:
                counts = [_integer("n", c, 0) for c in n]
                if len(counts) != len(ids):
                    raise ValueError(f"n has {len(counts)} entries for {len(ids)} sequences")
            begins = self._grow(ids, counts)
            return begins[0] if single else np.array(begins, np.int32)

    def write(
        self,
        seqs: int | Iterable[int],
        k: np.ndarray,
        v: np.ndarray,
        *,
        layer: int | None = None,
        position: int | Sequence[int] | None = None,
    ) -> None:
        """Write n tokens that exist already (appended or reserved), in one layer or in all.

        Parameters
        ----------
        seqs : int or sequence of int
            One id, or B different ids.
        k, v : ndarray
            As in ``append``, but without the layer axis if ``layer`` is given.
        layer : int, optional
            The layer to write; all of them if not given. Only for caches with ``num_layers``.
        position : int or sequence of int, optional
            Position of the first token written (one for all, or one per id); by default the last n tokens.

        Raises
        ------
        CacheFullError
            A page is shared with a fork and none is free for its copy. Nothing has changed.
        ValueError, TypeError
            As ``append``, and for tokens that were not reserved.
        """
        with self._lock:
            ids, single = self._ids(seqs, distinct=True)
            layers, layered = self._layers(layer)
            k, v, n = self._tokens(k, v, None if single else len(ids), layered)
            begins = self._positions(ids, single, n, position)
            self._own([(self._sequences[i], b, b + n) for i, b in zip(ids, begins, strict=True)], "write")
            self._scatter(ids, begins, k, v, layers)

    def gather(self, seq: int, *, layer: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """A dense copy of the keys and values of one sequence.

        Returns
        -------
        k, v : ndarray
            (n, Hkv, D) and (n, Hkv, Dv), or (Hkv, n, D) with layout "BHSD"; in a cache with ``num_layers`` and no
            ``layer`` given, one more axis in front.
        """
        with self._lock:
            sequence = self._sequence(seq)
            layers, layered = self._layers(layer)
            pages = np.array(sequence.pages, np.intp)
            copies = []
            for stored in (self._k, self._v):
                part = stored[layers][:, pages]
                part = part.reshape(len(part), -1, *part.shape[-2:])[:, : sequence.length]
                part = np.swapaxes(part, -3, -2) if self.layout == "BHSD" else part
                copies.append(np.ascontiguousarray(part if layered else part[0]))
            return copies[0], copies[1]

    # ---- what kernels read

    def batch(self, seqs: int | Iterable[int] | None = None, *, max_pages: int | None = None) -> PagedBatch:
        """Pages, page table and lengths of some sequences (all, in order of creation, if not given), taken together.

        ``max_pages`` is the number of columns of the page table; see ``page_table``.
        """
        with self._lock:
            ids, _ = self._ids(seqs)
            table = self.page_table(ids, max_pages=max_pages)
            return PagedBatch(self.k_pages, self.v_pages, table, self.kv_lengths(ids), self.layout)

    def page_table(self, seqs: int | Iterable[int] | None = None, *, max_pages: int | None = None) -> np.ndarray:
        """The pages of some sequences (all if not given).

        Returns
        -------
        ndarray
            (B, max_pages) int32: token j of sequence b lies in page [b, j // page_size], row j % page_size. Unused
            entries are -1. Without ``max_pages`` there are as many columns as the longest sequence has pages, at
            least 1.
        """
        with self._lock:
            sequences = [self._sequences[i] for i in self._ids(seqs)[0]]
            longest = max((len(s.pages) for s in sequences), default=0)
            width = max(longest, 1) if max_pages is None else _integer("max_pages", max_pages, max(longest, 1))
            table = np.full((len(sequences), width), NO_PAGE, np.int32)
            for row, sequence in zip(table, sequences, strict=True):
                row[: len(sequence.pages)] = sequence.pages
            return table

    def kv_lengths(self, seqs: int | Iterable[int] | None = None) -> np.ndarray:
        """Lengths of some sequences (all if not given): (B,) int32."""
        with self._lock:
            return np.array([self._sequences[i].length for i in self._ids(seqs)[0]], np.int32)

    @property
    def lengths(self) -> dict[int, int]:
        """Length of every sequence by id, in order of creation."""
        with self._lock:
            return {i: s.length for i, s in self._sequences.items()}

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._pool.free)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, used or not."""
        return self.k_pages.nbytes + self.v_pages.nbytes

    def __len__(self) -> int:
        return len(self._sequences)

    def __repr__(self) -> str:
        layers = "" if self.num_layers is None else f"{self.num_layers} layers, "
        return (
            f"<PagedKVCache {len(self)} sequences, {self.num_pages - self.free_pages}/{self.num_pages} pages of "
            f"{self.page_size} tokens, {layers}heads_kv {self.heads_kv}, head_dim {self.head_dim}/{self.head_dim_v}, "
            f"{self.dtype.name}, {self.layout}>"
        )

    # ---- exchange of page tables with others

    def export_csr(self, seqs: int | Iterable[int] | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
            sequences = [self._sequences[i] for i in self._ids(seqs)[0]]
            indptr = np.zeros(len(sequences) + 1, np.int32)
            np.cumsum([len(s.pages) for s in sequences], out=indptr[1:])
            indices = np.concatenate([np.zeros(0, np.int32), *(np.array(s.pages, np.int32) for s in sequences)])
            before_last = [max(len(s.pages) - 1, 0) * self.page_size for s in sequences]
            last = [s.length - before for s, before in zip(sequences, before_last, strict=True)]
            return indptr, indices, np.array(last, np.int32)

    def import_table(self, page_table: Any, lengths: Any) -> list[int]:
        """Adopt sequences whose tokens lie in the pages already.

        Parameters
        ----------
        page_table : array_like of int
            (B, max_pages). Entries beyond ceil(length / page_size) are not looked at.
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
        table, lengths = _indices("page_table", page_table, 2), _indices("lengths", lengths, 1)
        if len(table) != len(lengths):
            raise ValueError(f"page_table has {len(table)} rows, lengths has {len(lengths)} entries")
        for b, length in enumerate(lengths):
            if not 0 <= length <= table.shape[1] * self.page_size:
                raise ValueError(
                    f"lengths[{b}] is {length}, allowed: 0 to {table.shape[1] * self.page_size} "
                    f"({table.shape[1]} columns of page_table, {self.page_size} tokens a page)"
                )
        rows = [row[: self._pages_for(length)] for row, length in zip(table, lengths.tolist(), strict=True)]
        return self._adopt("page_table", rows, lengths.tolist())

    def import_csr(self, indptr: Any, indices: Any, last_page_len: Any) -> list[int]:
        """Adopt sequences whose tokens lie in the pages already; arguments as ``export_csr`` returns them.

        Returns and raises as ``import_table``; ``last_page_len`` outside 1 to page_size (0 for a sequence without
        pages) is a ValueError.
        """
        indptr, indices = _indices("indptr", indptr, 1), _indices("indices", indices, 1)
        last = _indices("last_page_len", last_page_len, 1)
        if len(indptr) != len(last) + 1:
            raise ValueError(f"indptr has {len(indptr)} entries for {len(last)} sequences, expected {len(last) + 1}")
        if indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
            raise ValueError(f"indptr must rise from 0 to the {len(indices)} entries of indices, got {indptr.tolist()}")
        rows = [indices[begin:end] for begin, end in itertools.pairwise(indptr)]
        for b, (row, tail) in enumerate(zip(rows, last, strict=True)):
            low, high = (1, self.page_size) if len(row) else (0, 0)
            if not low <= tail <= high:
                raise ValueError(f"last_page_len[{b}] is {tail} with {len(row)} pages, allowed: {low} to {high}")
        lengths = [max(len(row) - 1, 0) * self.page_size + int(tail) for row, tail in zip(rows, last, strict=True)]
        return self._adopt("indices", rows, lengths)

    # ---- inside

    def _layers(self, layer: int | None) -> tuple[slice, bool]:
        """(which layers of the stored arrays, whether tokens come and go with a layer axis)."""
        if layer is None:
            return slice(None), self.num_layers is not None
        if self.num_layers is None:
            raise ValueError(f"layer={layer}: this cache was made without num_layers")
        layer = _integer("layer", layer, 0, self.num_layers - 1)
        return slice(layer, layer + 1), False

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _add(self, sequence: _Sequence) -> int:
        seq = self._next_id
        self._next_id += 1
        self._sequences[seq] = sequence
        self._version += 1
        return seq

    def _sequence(self, seq: Any) -> _Sequence:
        return self._sequences[self._id(seq)]

    def _id(self, seq: Any) -> int:
        seq = _index("seq", seq)
        if seq not in self._sequences:
            why = "it was freed" if 0 <= seq < self._next_id else "no such id was given out"
            raise ValueError(f"seq {seq} is not in the cache: {why}")
        return seq

    def _ids(self, seqs: Any, distinct: bool = False) -> tuple[list[int], bool]:
        """(ids, whether a bare id came in); all are known to the cache."""
        if seqs is None:
            return list(self._sequences), False
        if not isinstance(seqs, Iterable) or (isinstance(seqs, np.ndarray) and seqs.ndim == 0):
            return [self._id(seqs)], True
        ids = [self._id(seq) for seq in seqs]
        if distinct and len(set(ids)) != len(ids):
            raise ValueError(f"seqs names seq {Counter(ids).most_common(1)[0][0]} more than once")
        return ids, False

    def _cut(self, sequence: _Sequence, length: int) -> None:
        keep = self._pages_for(length)
        self._pool.release(sequence.pages[keep:])
        del sequence.pages[keep:]
        sequence.length = length
        self._version += 1

    def _grow(self, ids: list[int], counts: list[int]) -> list[int]:
        """Lengthen sequences, all or none; returns the lengths before."""
        begins = [self._sequences[i].length for i in ids]
        for i, begin, n in zip(ids, begins, counts, strict=True):
            if begin + n > self._capacity:
                raise ValueError(
                    f"seq {i} has {begin} tokens; {n} more exceed its capacity of {self._capacity} "
                    f"({self.max_pages_per_seq} pages of {self.page_size})"
                )
        spans = [(self._sequences[i], begin, begin + n) for i, begin, n in zip(ids, begins, counts, strict=True)]
        self._own(spans, "append")
        for sequence, _, end in spans:
            sequence.length = end
        self._version += 1
        return begins

    def _own(self, spans: list[tuple[_Sequence, int, int]], what: str) -> None:
        """Give each sequence pages of its own for tokens begin to end: new ones at its end, copies of shared ones."""
        pool = self._pool
        grow = sum(max(self._pages_for(end) - len(s.pages), 0) for s, _, end in spans)
        shared = [  # (sequence, index into its pages)
            (s, j)
            for s, begin, end in spans
            if end > begin
            for j in range(begin // self.page_size, min(self._pages_for(end), len(s.pages)))
            if pool.holders[s.pages[j]] > 1
        ]
        # The last holder of a page keeps it, so a page that only these sequences hold needs one copy fewer.
        touched = Counter(s.pages[j] for s, j in shared)
        copies = sum(count - (count == pool.holders[page]) for page, count in touched.items())
        if grow + copies > len(pool.free):
            raise CacheFullError(
                f"{what} wants {grow + copies} pages ({copies} of them copies of shared pages), "
                f"{len(pool.free)} of {self.num_pages} are free; nothing was changed"
            )
        for s, j in shared:
            old = s.pages[j]
            if pool.holders[old] > 1:
                (new,) = pool.take(1)
                for stored in (self._k, self._v):
                    stored[:, new] = stored[:, old]
                s.pages[j] = new
                pool.release((old,))
        for s, _, end in spans:
            s.pages.extend(pool.take(max(self._pages_for(end) - len(s.pages), 0)))
        if grow or shared:
            self._version += 1

    def _positions(self, ids: list[int], single: bool, n: int, position: Any) -> list[int]:
        lengths = [self._sequences[i].length for i in ids]
        if position is None:
            begins = [length - n for length in lengths]
        elif single or np.ndim(position) == 0:
            begins = [_index("position", position)] * len(ids)
        else:
            begins = [_index("position", p) for p in position]
            if len(begins) != len(ids):
                raise ValueError(f"position has {len(begins)} entries for {len(ids)} sequences")
        for i, begin, length in zip(ids, begins, lengths, strict=True):
            if begin < 0 or begin + n > length:
                raise ValueError(
                    f"write of {n} tokens at position {begin} of seq {i}, which has {length} tokens; reserve() them first"
                )
        return begins

    def _tokens(self, k: Any, v: Any, batch: int | None, layered: bool) -> tuple[np.ndarray, np.ndarray, int]:
        """Check k and v; returns them as (layers, B, n, Hkv, D) and n."""
        lead: tuple = (*((self.num_layers,) if layered else ()), *(() if batch is None else (batch,)))
        checked = []
        for name, x, size in (("k", k, self.head_dim), ("v", v, self.head_dim_v)):
            _ndarray(name, x)
            if x.dtype != self.dtype:
                raise TypeError(f"{name} is {x.dtype}, the cache holds {self.dtype}; convert it with astype")
            axes = (*lead, "n", self.heads_kv, size) if self.layout == "BSHD" else (*lead, self.heads_kv, "n", size)
            if x.ndim != len(axes) or any(a not in ("n", s) for a, s in zip(axes, x.shape, strict=True)):
                raise ValueError(f"{name} has shape {x.shape}, expected ({', '.join(map(str, axes))})")
            x = x if self.layout == "BSHD" else np.swapaxes(x, -3, -2)
            checked.append(x.reshape(self.num_layers if layered else 1, 1 if batch is None else batch, *x.shape[-3:]))
        k, v = checked
        if k.shape[2] != v.shape[2]:
            raise ValueError(f"v holds {v.shape[2]} tokens, k holds {k.shape[2]}")
        return k, v, k.shape[2]

    def _scatter(self, ids: list[int], begins: list[int], k: np.ndarray, v: np.ndarray, layers: slice) -> None:
        pages, rows = self._slots(ids, begins, k.shape[2])
        # k and v may be views of these pages: NumPy copies a source that overlaps its target.
        self._k[layers][:, pages, rows] = k
        self._v[layers][:, pages, rows] = v

    def _slots(self, ids: list[int], begins: list[int], n: int) -> tuple[np.ndarray, np.ndarray]:
        """Page and row of each of n tokens: (B, n) each. Remembered, as every layer of a step asks for the same."""
        key = (self._version, ids, begins, n)
        if self._slots_memo[0] != key:
            positions = np.array(begins, np.intp).reshape(-1, 1) + np.arange(n)
            pages, rows = np.divmod(positions, self.page_size)
            for row, i in zip(pages, ids, strict=True):
                row[:] = np.array(self._sequences[i].pages, np.intp)[row]
            self._slots_memo = (key, (pages, rows))
        return self._slots_memo[1]

    def _adopt(self, name: str, rows: list[np.ndarray], lengths: list[int]) -> list[int]:
        for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length > self._capacity:
                raise ValueError(f"sequence {b} has {length} tokens, its capacity is {self._capacity}")
            bad = row[(row < 0) | (row >= self.num_pages)]
            if bad.size:
                raise ValueError(f"{name} of sequence {b} names page {bad[0]}, allowed: 0 to {self.num_pages - 1}")
            if len(np.unique(row)) != len(row):
                raise ValueError(f"{name} of sequence {b} names a page more than once: {row.tolist()}")
        with self._lock:
            adopted = [_Sequence(array("i", row.tolist()), length) for row, length in zip(rows, lengths, strict=True)]
            self._pool.adopt([page for s in adopted for page in s.pages])
            return [self._add(s) for s in adopted]


@dataclass(slots=True)
class _Sequence:
    pages: array = field(default_factory=lambda: array("i"))
    length: int = 0


class _PagePool:
    """Which pages are free, and how many sequences hold each of the others."""

    def __init__(self, num_pages: int) -> None:
        self.free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is the likeliest in the CPU's cache
        self.holders = [0] * num_pages

    def take(self, n: int) -> list[int]:
        pages = [self.free.pop() for _ in range(n)]
        self.share(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self.free.append(page)

    def adopt(self, pages: list[int]) -> None:
        """Hold pages of someone else's choice, free or not."""
        self.share(pages)
        self.free = [page for page in self.free if self.holders[page] == 0]


def _index(name: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    value = _index(name, value)
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{name} is {value}, allowed: {allowed}")
    return value


def _layout(layout: Any) -> str:
    if layout not in ("BSHD", "BHSD"):
        raise ValueError(f"layout is {layout!r}, allowed: 'BSHD', 'BHSD'")
    return layout


def _dtype(name: str, dtype: Any) -> np.dtype:
    try:
        found = None if dtype is None else np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found not in DTYPES:  # to NumPy None means float64
        raise TypeError(f"{name} is {dtype}, allowed: {', '.join(d.name for d in DTYPES)}")
    return found


def _ndarray(name: str, x: Any) -> None:
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} must be a numpy.ndarray, got {type(x).__module__}.{type(x).__name__}")


def _indices(name: str, x: Any, ndim: int) -> np.ndarray:
    x = np.asarray(x)
    if x.dtype.kind not in "iu" and x.size:
        raise TypeError(f"{name} must hold integers, got {x.dtype}")
    if x.ndim != ndim:
        raise ValueError(f"{name} has shape {x.shape}, expected {ndim} axes")
    return x.astype(np.int64)
