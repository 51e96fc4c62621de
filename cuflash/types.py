"""The dataclasses that travel between the layers. A leaf: it imports nothing of cuflash."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

UNBOUNDED = -1  # a window side without limit
HOST = -1  # device number of host memory
INDICES = ("cu_seqlens_q", "cu_seqlens_k", "kv_lengths", "kv_start")  # fields of a Problem, in the order of the kernels' structs

E4M3 = "float8_e4m3fn"  # of keys and values that have scales

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


@functools.lru_cache(maxsize=64)
def name_of(dtype: np.dtype) -> str:
    """dtype.name, which NumPy works out anew each time in microseconds."""
    return dtype.name


Layout = Literal["BSHD", "BHSD"]
LAYOUTS: tuple[str, ...] = get_args(Layout)


class NoBackendError(RuntimeError):
    """No backend can do what was asked; the message lists every backend's reason."""


class CacheFullError(RuntimeError):
    """A paged cache has no free page left; nothing was written."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrayView:
    """An array as cuflash sees it: where it lies and how it is laid out, in cuflash's own axis order.

    ``array`` is the user's memory seen through a (possibly transposed) ndarray of its own library; nothing is copied.
    """

    array: Any
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, may be 0 or negative
    dtype: np.dtype
    kind: str  # the library: "numpy" or "cupy"
    device: int  # CUDA ordinal, or -1 for host memory

    @property
    def by_token(self) -> bool:
        """Of k_scale or v_scale: whether it differs from token to token; those of a tensor or a head are repeated by a stride of 0."""
        return self.strides[-2] != 0

    @property
    def layout_key(self) -> tuple:
        """What a plan depends on: everything but the address, and but strides that lead nowhere (axes of length 1)."""
        strides = tuple(stride if n > 1 else 0 for n, stride in zip(self.shape, self.strides, strict=True))
        return (self.shape, strides, self.dtype.str if self.dtype.kind != "V" else name_of(self.dtype), self.kind, self.device)


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """A rotary embedding: features in pairs, each turned by an angle that grows with the position (Su et al. 2021).

    Row n of ``cos`` and ``sin`` (positions, rot / 2) is for position n; for position -n it is turned back. Pairs are (0, 1), (2, 3), ...
    if ``interleaved``, else (0, rot / 2), (1, rot / 2 + 1), ...; features from rot on stay as they are.
    """

    cos: ArrayView
    sin: ArrayView
    interleaved: bool


@dataclass(frozen=True, slots=True, eq=False)
class Append:
    """What decode() does before it attends: ``k_new`` and ``v_new`` go into the caches, ``rope`` turns k_new and q.

    New key t stands at position lengths + t; query row r where the causal mask has it.
    """

    lengths: Any  # keys before, (B,): int64 on the host, or an ArrayView of int32 or int64 on the device
    k_new: ArrayView | None = None  # (B, n, Hkv, D)
    v_new: ArrayView | None = None  # (B, n, Hkv, Dv)
    rope: Rope | None = None
    quantizes: bool = False  # k_new and v_new are of q's dtype, the caches float8_e4m3fn

    @property
    def count(self) -> int:
        """New keys of each sequence."""
        return 0 if self.k_new is None else self.k_new.shape[1]

    @property
    def inputs(self) -> dict[str, ArrayView]:
        """The arrays that are read, under the user's names."""
        named = {"k_new": self.k_new, "v_new": self.v_new}
        if self.rope is not None:
            named |= {"rope[0]": self.rope.cos, "rope[1]": self.rope.sin}
        return {name: a for name, a in named.items() if a is not None}


class Sequence(NamedTuple):
    """One sequence of a batch: which rows of q and which keys belong to it."""

    index: int  # type: ignore[assignment]  # b; hides tuple.index
    q_begin: int  # first row in the (varlen: packed) query array
    q_length: int
    k_begin: int  # first key in the (varlen: packed) key array; 0 when dense or paged
    kv_length: int  # keys that exist (kv_lengths, else the whole extent)
    kv_start: int  # keys before this one are padding, never visible
    position: int  # position i of the first query row: i = row + position


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One checked attention call in canonical form. problem.py builds it; backends only read it.

    Axis orders, whatever layout the user chose (views, never copies):

    =========== ======================= =========================== =======================
    array       dense                   varlen                      paged (k, v)
    =========== ======================= =========================== =======================
    q, dout     (B, Sq, Hq, D)          (total_q, Hq, D)            as dense or varlen
    k           (B, Sk, Hkv, D)         (total_k, Hkv, D)           (pages, page_size, Hkv, D)
    v           (B, Sk, Hkv, Dv)        (total_k, Hkv, Dv)          (pages, page_size, Hkv, Dv)
    out         (B, Sq, Hq, Dv)         (total_q, Hq, Dv)           as dense or varlen
    lse         (B, Hq, Sq)             (Hq, total_q)               as dense or varlen
    bias, mask  (B, Hq, Sq, columns)    (B, Hq, max_q, columns)     zero strides where broadcast
    weights     (B, Hq or 1, Sq, Sk)    -                           as dense; Sk of the whole table
    =========== ======================= =========================== =======================

    Query head h reads key/value head h // (heads_q // heads_kv).

    Logits of query row r at position i = r + position and key j of sequence b, in this order: score * scale; softcap;
    + bias - alibi * |i - j|; score_mod; then invisible keys (see ``window``, ``mask``, ``mask_mod``, kv_start <= j <
    kv_length) weigh exactly 0.
    """

    # arrays
    q: ArrayView
    k: ArrayView
    v: ArrayView
    k_scale: ArrayView | None = None  # factors of keys in float8_e4m3fn, float32, of k's shape without the head size; None: 1
    v_scale: ArrayView | None = None  # those of values
    out: ArrayView | None = None  # allocated before a backend runs
    lse: ArrayView | None = None  # None: the caller does not want it

    # sizes
    batch: int = 0
    heads_q: int = 0
    heads_kv: int = 0
    head_dim: int = 0
    head_dim_v: int = 0
    seqlen_q: int = 0  # Sq, or max_seqlen_q for varlen
    seqlen_k: int = 0  # Sk, max_seqlen_k for varlen, pages of one sequence * page_size for paged caches

    # logits
    score: Literal["dot", "sqdist"] = "dot"  # sqdist: -scale * |q - k|^2, subtract then square
    scale: float | np.ndarray = 1.0  # an array (D,) only for sqdist
    softcap: float = 0.0  # 0: none; else softcap * tanh(x / softcap)
    bias: ArrayView | None = None
    bias_shape: tuple[int, ...] | None = None  # as the user gave it: dbias has this shape
    alibi_slopes: np.ndarray | None = None  # (B, Hq), float64
    score_mod: str | Callable | None = None
    mod_args: Mapping[str, Any] = field(default_factory=dict)

    # visibility
    causal: bool = False  # informative: it is already in window
    align: Literal["bottom_right", "upper_left"] = "bottom_right"
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)  # causal included; i - left <= j <= i + right
    mask: ArrayView | None = None  # bool, True = visible
    mask_is_tail: bool = False  # columns are the last Sq keys; earlier keys are visible (tree attention)
    mask_mod: str | Callable | None = None

    # softmax
    sinks: np.ndarray | None = None  # (Hq,) float64: natural logits, unscaled, counted once in the LSE

    # sequences: int64 arrays on the host, or ArrayViews of int32 or int64 on the device, which nobody reads but kernels
    cu_seqlens_q: Any = None  # (B + 1,); varlen iff not None
    cu_seqlens_k: Any = None
    kv_lengths: Any = None  # (B,)
    kv_start: Any = None  # (B,)
    page_table: Any = None  # (B, max_pages); paged iff not None: int64 on the host, or an ArrayView of int32 on the device
    page_size: int = 0

    # how
    op: Literal["attention", "decode", "backward", "weights"] = "attention"
    out_dtype: np.dtype = np.dtype(np.float32)
    precision: str | None = None
    num_splits: int | None = None
    batch_invariant: bool = False
    kernel: str = "auto"
    backend: str | None = None
    stream: Any = None

    # backward only
    dout: ArrayView | None = None
    dlse: ArrayView | None = None  # shape of lse
    deterministic: bool = False

    # attention_weights only; v has no meaning there
    weights: ArrayView | None = None  # None while planning: cuflash will allocate them
    reduce: Literal["head_mean"] | None = None  # the mean over query heads: the head axis has length 1

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def indices_on_device(self) -> tuple[str, ...]:
        """Names of the index arrays whose numbers are not known on the host."""
        return tuple(name for name in (*INDICES, "page_table") if isinstance(getattr(self, name), ArrayView))

    @property
    def paged(self) -> bool:
        return self.page_table is not None

    @property
    def e4m3(self) -> bool:
        """Whether keys and values are float8_e4m3fn, under queries of another dtype."""
        return name_of(self.k.dtype) == E4M3

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @property
    def bias_is_shared(self) -> bool:
        """Whether several logits share an element of the bias, so that its gradient there is a sum."""
        if self.bias is None or self.bias_shape is None:
            return False
        return (1,) * (4 - len(self.bias_shape)) + tuple(self.bias_shape) != self.bias.shape

    @property
    def compute_dtype(self) -> np.dtype:
        """The dtype of softmax statistics and accumulation."""
        return _FLOAT64 if self.q.dtype == _FLOAT64 else _FLOAT32

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.varlen:
            return (self.heads_q, self.q.shape[0])
        return (self.batch, self.heads_q, self.seqlen_q)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.head_dim_v)

    @property
    def weights_shape(self) -> tuple[int, ...]:
        return (self.batch, self.heads_q if self.reduce is None else 1, self.seqlen_q, self.seqlen_k)

    def sequences(self) -> Iterator[Sequence]:
        """The sequences of the batch, with their lengths resolved; they must be known on the host."""
        if self.indices_on_device:
            raise ValueError(f"{', '.join(self.indices_on_device)}: on the device; here the numbers are needed, pass cupy.asnumpy(x)")
        for b in range(self.batch):
            q_begin, q_length = 0, self.seqlen_q
            if self.cu_seqlens_q is not None:
                q_begin = int(self.cu_seqlens_q[b])
                q_length = int(self.cu_seqlens_q[b + 1]) - q_begin
            k_begin, kv_length = 0, self.seqlen_k
            if self.cu_seqlens_k is not None:
                k_begin = int(self.cu_seqlens_k[b])
                kv_length = int(self.cu_seqlens_k[b + 1]) - k_begin
            if self.kv_lengths is not None:
                kv_length = int(self.kv_lengths[b])
            kv_start = int(self.kv_start[b]) if self.kv_start is not None else 0
            position = kv_length - q_length if self.align == "bottom_right" else 0
            yield Sequence(b, q_begin, q_length, k_begin, kv_length, kv_start, position)

    def replace(self, **changes: Any) -> Problem:
        """As dataclasses.replace, which takes three times as long."""
        values = dict(zip(_PROBLEM_FIELDS, _problem_values(self), strict=True))
        values.update(changes)
        return Problem(**values)


_PROBLEM_FIELDS = tuple(f.name for f in dataclasses.fields(Problem))
_problem_values = operator.attrgetter(*_PROBLEM_FIELDS)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What will run and why: immutable, printable, thread-safe.

    ``run`` takes other arrays of the same shapes, strides, dtypes and device as those it was made from.
    """

    kernel: str
    backend: str
    reason: str
    tile: tuple[int, int] = (0, 0)  # query rows, keys
    num_splits: int = 1
    threads: int = 1
    workspace: int = 0  # bytes beyond inputs and outputs
    declined: tuple[str, ...] = ()  # "backend/kernel: reason" of those asked before
    extra: Any = field(default=None, repr=False)  # the backend's own
    _run: Callable | None = field(default=None, repr=False)

    def bind(self, run: Callable) -> Plan:
        """This plan, able to run: ``run`` gets the plan and the arguments of the method of that name."""
        return dataclasses.replace(self, _run=run)

    def run(self, q: Any, k: Any, v: Any, *, out: Any = None, lse: Any = None, stream: Any = None) -> Any:
        """Run on arrays of the planned signature; returns out, or (out, lse) if the plan was made with return_lse."""
        if self._run is None:
            raise ValueError("this plan was not made by cuflash.plan() and cannot run")
        return self._run(self, q, k, v, out, lse, stream)


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Gradients of one attention call; each has the shape, dtype and kind of what it belongs to."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None

    def __iter__(self) -> Iterator[Any]:
        """dq, dk, dv, dbias, dsinks, so that they can be unpacked."""
        return iter((self.dq, self.dk, self.dv, self.dbias, self.dsinks))
