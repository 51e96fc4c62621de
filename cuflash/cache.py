"""PagedKVCache: keys and values of many sequences in one pool of fixed-size pages.

``pages`` knows who holds which page, ``page_arrays`` and ``device_pages`` what lies in them; here the two meet under one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from . import arrays, checks, device_pages, options
from .device_pages import DevicePages
from .page_arrays import PageArrays, check_pages
from .page_tables import PageTables
from .pages import INT32_MAX, PageList, Sequences, per_id
from .types import HOST, LAYOUTS, Layout


class PagedKVCache(PageTables):
    """Keys and values of many sequences, kept in pages of ``page_size`` tokens that are handed out on demand.

    A sequence holds exactly ceil(length / page_size) pages. Forked sequences share pages, which are copied when one of
    them writes (copy on write). All layers of a model share one page table.

    Parameters
    ----------
    num_pages : int
        Pages in the pool, at least 1. Host memory is touched only when a page is first written; a GPU's is taken at once.
    page_size : int
        Tokens of one page, at least 1.
    heads_kv, head_dim : int
        Key/value heads and their size.
    head_dim_v : int, optional
        Size of a value head; ``head_dim`` if not given.
    num_layers : int, optional
        Puts an axis of layers in front of ``k_pages`` and ``v_pages``. Without it the cache is that of one layer.
    dtype : dtype
        float16, bfloat16 (``ml_dtypes.bfloat16``), float32, float64, or float8_e4m3fn (``ml_dtypes.float8_e4m3fn``): then every token and
        head has a scale beside its numbers, and what is written in 16 or 32 bits is quantized as by ``quantize_kv``.
    layout : {"BSHD", "BHSD"}
        Axis order of the pages and of the ``k`` and ``v`` handed in and out: (tokens, heads, size) or
        (heads, tokens, size).
    max_pages_per_seq : int, optional
        No sequence may hold more pages than this; ``num_pages`` if not given.
    device : int, str or cupy.cuda.Device, optional
        Where the pages live: in host memory (None, "cpu"), or on a GPU, by its number ("cuda" is CuPy's current device, "cuda:1" and 1
        another). All arrays that come and go are then of CuPy, on that device; ids, and what ``append`` and ``reserve`` return, stay
        on the host, where the bookkeeping is.

    Attributes
    ----------
    k_pages, v_pages : ndarray
        (P, page, Hkv, D) and (P, page, Hkv, Dv), or (P, Hkv, page, D) and (P, Hkv, page, Dv) with layout "BHSD"; with
        ``num_layers`` (L, P, ...), so that ``k_pages[i]`` is layer i.
    k_scales, v_scales : ndarray or None
        Scales of pages in float8_e4m3fn: float32, shaped as these but for the last axis. None with other dtypes.
    device : int
        Number of the GPU that the pages are on; -1 for host memory.

    Notes
    -----
    Freed pages are not cleared: what lies beyond the length of a sequence is arbitrary, and no kernel reads it.

    Every method holds one lock, so threads may share a cache. Reading the pages (a running ``decode``) holds none:
    do not free, truncate or write a sequence in one thread while another attends to it. Sequence ids are never used
    twice; using one after ``free`` is a ValueError.

    On a GPU a method submits its work to CuPy's current stream and returns; nothing waits. The bookkeeping is ahead of the device: a page
    that was freed may be given to another sequence at once, whose tokens are written behind all that was submitted to that stream before.
    So calls that use the cache belong on one stream; with several, the caller orders them by events, a ``free`` behind the last
    ``decode`` of the sequence included. None of the methods can be captured in a CUDA graph (they have numbers of the host to bring):
    ``refresh`` is what a graph's batch is kept up to date with, outside of it.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> cache = cuflash.PagedKVCache(num_pages=8, page_size=4, heads_kv=2, head_dim=16)
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

    ``decode`` can write the new tokens itself: then the lengths it takes are those without them, of ``cache.batch(seqs, reserved=1)``, and
    ``k_new=k, v_new=v`` stand in for ``write``. With ``k_scale=b.k_scales, v_scale=b.v_scales`` it reads caches in float8_e4m3fn; in others
    these are None.
    """

    def __init__(
        self, *, num_pages: int, page_size: int = 16, heads_kv: int, head_dim: int, head_dim_v: int | None = None,
        num_layers: int | None = None, dtype: Any = np.float32, layout: Layout = "BSHD",
        max_pages_per_seq: int | None = None, device: Any = None,
    ) -> None:
        num_pages = checks.integer(num_pages, "num_pages", 1, INT32_MAX)
        page_size = checks.integer(page_size, "page_size", 1)
        heads_kv = checks.integer(heads_kv, "heads_kv", 1)
        head_dim = checks.integer(head_dim, "head_dim", 1)
        head_dim_v = head_dim if head_dim_v is None else checks.integer(head_dim_v, "head_dim_v", 1)
        layers = () if num_layers is None else (checks.integer(num_layers, "num_layers", 1),)
        if dtype is None:  # to NumPy it would mean float64
            raise TypeError("dtype: got None; the pages need a dtype")
        dtype = options.dtype(dtype, "dtype", e4m3=True)
        checks.choice(layout, "layout", LAYOUTS)
        ordinal = device_pages.ordinal(device)
        store = PageArrays if ordinal == HOST else DevicePages
        page = (page_size, heads_kv) if layout == "BSHD" else (heads_kv, page_size)
        lead = (*layers, num_pages, *page)
        k_pages, v_pages = (store.empty((*lead, size), dtype, ordinal) for size in (head_dim, head_dim_v))
        scales = [store.empty(lead, np.dtype(np.float32), ordinal) for _ in "kv"] if arrays.is_e4m3(dtype) else []
        self._init(store(k_pages, v_pages, layout, *scales), max_pages_per_seq)

    @classmethod
    def from_pages(
        cls, k_pages: Any, v_pages: Any, *, layout: Layout = "BSHD",
        max_pages_per_seq: int | None = None, k_scales: Any = None, v_scales: Any = None,
    ) -> PagedKVCache:
        """A cache over existing pages, without a copy; ``import_table`` or ``import_csr`` then names the sequences.

        Parameters
        ----------
        k_pages, v_pages : ndarray
            Of NumPy or CuPy; shapes as the attributes of the same names; writeable, any strides, no element in common. Where the strides
            are so involved that this is too hard to decide, the arrays are refused.
        layout, max_pages_per_seq
            As in the constructor.
        k_scales, v_scales : ndarray, optional
            Of pages in float8_e4m3fn, which need them; as the attributes.

        Returns
        -------
        PagedKVCache
            Holds no sequence yet; all its pages are free.
        """
        checks.choice(layout, "layout", LAYOUTS)
        cache = cls.__new__(cls)
        store = PageArrays if check_pages(k_pages, v_pages, k_scales, v_scales).device == HOST else DevicePages
        cache._init(store(k_pages, v_pages, layout, k_scales, v_scales), max_pages_per_seq)
        return cache

    def _init(self, stored: PageArrays, max_pages_per_seq: int | None) -> None:
        self.k_pages, self.v_pages, self.k_scales, self.v_scales = stored.memory
        self.layout, self.dtype = stored.layout, stored.dtype
        self.num_layers, self.num_pages, self.page_size = stored.num_layers, stored.num_pages, stored.page_size
        self.heads_kv, self.head_dim, self.head_dim_v = stored.heads_kv, stored.head_dim, stored.head_dim_v
        self.device = stored.device
        most = self.num_pages if max_pages_per_seq is None else checks.integer(max_pages_per_seq, "max_pages_per_seq", 1)
        self.max_pages_per_seq = most
        self._stored = stored
        self._sequences = Sequences(self.num_pages, self.page_size, most, stored.copy_pages)
        self._lock = threading.RLock()

    # ---- sequences

    def new_sequence(self) -> int:
        """Start an empty sequence; returns its id. It holds no page yet."""
        with self._lock:
            return self._sequences.add(PageList())

    def fork(self, seq: int, length: int | None = None) -> int:
        """Start a sequence that shares the first ``length`` tokens of ``seq``, all if not given; returns its id.

        It costs no page until one of the two writes.
        """
        with self._lock:
            seq = self._sequences.id(seq)
            held = self._sequences[seq].length
            return self._sequences.fork(seq, held if length is None else checks.integer(length, "length", 0, held))

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first ``length`` tokens of ``seq`` (at most its length) and give back the pages after them."""
        with self._lock:
            seq = self._sequences.id(seq)
            self._sequences.cut(seq, checks.integer(length, "length", 0, self._sequences[seq].length))

    def free(self, seqs: int | Iterable[int]) -> None:
        """End one sequence or several; pages that no other sequence shares become free. Their data is not cleared."""
        with self._lock:
            for i in self._sequences.ids(seqs, distinct=True)[0]:
                self._sequences.remove(i)

    def defragment(self) -> int:
        """Move the pages in use to the front of the pool, so that ``k_pages[:used]`` holds all that there is; returns how many moved.

        Sequences keep their ids, lengths and tokens; page tables that were taken before are out of date. Attention needs none of it, as
        any page is as good as any other: it is for pools that are saved, sent or made smaller.
        """
        with self._lock:
            return self._sequences.compact()

    # ---- tokens

    def append(self, seqs: int | Iterable[int], k: Any, v: Any, *, k_scale: Any = None, v_scale: Any = None) -> int | np.ndarray:
        """Add n tokens to one sequence, or n tokens to each of several, in all layers.

        Parameters
        ----------
        seqs : int or sequence of int
            One id, or B different ids.
        k, v : ndarray
            (n, Hkv, D) and (n, Hkv, Dv) in the cache's dtype ((Hkv, n, D) with layout "BHSD"); with several ids
            (B, n, Hkv, D); in a cache with ``num_layers`` one more axis in front, the layers. Any strides. For a cache in float8_e4m3fn
            also both in float16, bfloat16 or float32: they are quantized (on a GPU with head sizes up to 256).
        k_scale, v_scale : ndarray of float32, optional
            Scales of k and v in float8_e4m3fn, which need them: of the same shapes without the head size.

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
            ids, single = self._sequences.ids(seqs, distinct=True)
            tokens, n = self._stored.tokens(k, v, k_scale, v_scale, None if single else len(ids), layered=self.num_layers is not None)
            begins = self._sequences.grow(ids, [n] * len(ids))
            try:
                self._write(ids, begins, tokens, slice(None))
            except BaseException:
                for i, begin in zip(ids, begins, strict=True):
                    self._sequences.cut(i, begin)
                raise
            return begins[0] if single else np.array(begins, np.int32)

    def reserve(self, seqs: int | Iterable[int], n: int | Sequence[int]) -> int | np.ndarray:
        """Make room for n more tokens in all layers, to be filled by ``write`` layer by layer.

        The lengths grow at once. Until they are written the new tokens hold arbitrary data; ``truncate`` to the
        returned position undoes a reservation. Of several sequences either all grow or none.

        Parameters
        ----------
        seqs
            As in ``append``.
        n : int or sequence of int
            Tokens for each sequence, or one number per id.

        Returns
        -------
        int or ndarray
            As ``append``; so are the errors.
        """
        with self._lock:
            ids, single = self._sequences.ids(seqs, distinct=True)
            begins = self._sequences.grow(ids, per_id(n, "n", ids))
            return begins[0] if single else np.array(begins, np.int32)

    def write(
        self, seqs: int | Iterable[int], k: Any, v: Any, *, layer: int | None = None,
        position: int | Sequence[int] | None = None, k_scale: Any = None, v_scale: Any = None,
    ) -> None:
        """Write n tokens that exist already (appended or reserved), in one layer or in all.

        Parameters
        ----------
        seqs, k, v, k_scale, v_scale
            As in ``append``; arrays are without the axis of layers if ``layer`` is given.
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
            ids, single = self._sequences.ids(seqs, distinct=True)
            layers, layered = self._stored.layers(layer)
            tokens, n = self._stored.tokens(k, v, k_scale, v_scale, None if single else len(ids), layered)
            begins = self._sequences.written(ids, n, position)
            self._sequences.own(ids, begins, [n] * len(ids), "write")
            self._write(ids, begins, tokens, layers)

    def gather(self, seq: int, *, layer: int | None = None) -> tuple[Any, ...]:
        """A dense copy of the keys and values of one sequence.

        Returns
        -------
        k, v : ndarray
            (n, Hkv, D) and (n, Hkv, Dv), or (Hkv, n, D) with layout "BHSD"; in a cache with ``num_layers`` and no
            ``layer`` given, one more axis in front.
        k_scale, v_scale : ndarray of float32
            From a cache in float8_e4m3fn: the four are what ``append`` takes, and hold every bit. ``k * k_scale[..., None]``, with k as
            float32, are the keys that attention sees.
        """
        with self._lock:
            sequence = self._sequences[self._sequences.id(seq)]
            return self._stored.read(sequence.pages, sequence.length, layer)

    # ---- the cache itself

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._sequences.pool.free)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, used or not, and of their scales."""
        return sum(a.nbytes for a in self._stored.memory if a is not None)

    def __len__(self) -> int:
        return len(self._sequences)

    def __repr__(self) -> str:
        layers = "" if self.num_layers is None else f"{self.num_layers} layers, "
        return (
            f"<PagedKVCache {len(self)} sequences, {self.num_pages - self.free_pages}/{self.num_pages} pages of "
            f"{self.page_size} tokens, {layers}heads_kv {self.heads_kv}, head_dim {self.head_dim}/{self.head_dim_v}, "
            f"{self.dtype.name}, {self.layout}{'' if self.device == HOST else f', GPU {self.device}'}>"
        )

    # ---- inside

    def _write(self, ids: list[int], begins: list[int], tokens: list[Any], layers: slice) -> None:
        self._stored.write(self._sequences.held(ids), begins, tokens, layers)
