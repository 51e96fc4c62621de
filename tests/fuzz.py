"""Problems for fuzzing the forward kernels: what to compute, how it lies in memory, and what must come out.

A :class:`Kind` is what an instance of a compiled kernel depends on: dtypes, padded head sizes, kinds of mask and score, width of
copies. An :class:`Example` is a problem of one kind: plain numbers from which all arrays follow, so that its ``repr`` reproduces it.
Hypothesis draws examples from a list of kinds; thousands of problems then need no more kernels than there are kinds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from case import BF16, F16, F32, F64, Builder, Case, Packed, Shape, bias, fixed, mask, tree
from cases import Target, absent
from cuflash import tiles
from hypothesis import strategies as st

DTYPES = {dtype.name: dtype for dtype in (F16, BF16, F32, F64)}
LONGEST = 600  # of queries and keys
MOST_WORK = 1 << 26  # products of one problem, which bound the oracle's time

BIAS_AXES = (
    "B Hq Sq Sk", "1 Hq Sq Sk", "B 1 Sq Sk", "B Hq 1 Sk", "B Hq Sq 1", "B 1 1 Sk", "1 1 Sq Sk", "Hq Sq Sk", "Sq Sk", "1 Sk", "Sk", "1",
)
MASK_AXES = ("B Hq Sq Sk", "1 Hq Sq Sk", "B 1 Sq Sk", "B 1 1 Sk", "B Hq Sq 1", "Sq Sk", "Sk", "1")
PAGE_SIZES = (1, 2, 3, 7, 16, 16, 17, 64, 128, 256)  # times 16 where fa3 would decline them
# How arrays lie; all but the last four have contiguous rows and keep their alignment.
ROWS = ("contiguous", "padded", "offset", "rows_reversed", "axes_swapped", "every_other_row")
BOXES = tuple(how for how in ROWS if how != "rows_reversed")  # that TMA can load
ANY_STRIDES = (*ROWS, "transposed", "reversed", "every_other", "columns_reversed")


@dataclass(frozen=True)
class Kind:
    """What decides which kernel is compiled."""

    kernel: str = "fa2"
    dtype: str = "float16"
    out: str = "float16"
    d: int = 64  # padded head sizes
    dv: int = 64
    side: str = ""  # of the window that has a limit: none, "right" or "left" (and perhaps right)
    mask: bool = False
    bias: str = ""  # or its dtype
    softcap: bool = False
    alibi: bool = False
    folded: bool = True  # scale above 0; without any of the three above, other scales take another kernel
    load: int = 16  # bytes of a copy
    paged: bool = False
    flat: bool = False  # packed sequences whose longest the host does not know

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def unit(self) -> int:
        """Elements of a copy."""
        return self.load // self.itemsize

    @property
    def naive(self) -> bool:
        """Whether the naive kernel takes such problems."""
        return self.kernel == "fa2" and self.out == self.dtype and not (self.paged or self.alibi or self.flat)

    @property
    def hopper(self) -> bool:
        """Whether prefill_fa3 takes such problems, if their arrays lie as its copies want them."""
        short = self.itemsize == 2 and self.out == self.dtype and self.load == 16
        return self.kernel == "fa2" and short and not (self.mask or self.bias or self.alibi)

    @property
    def exists(self) -> bool:
        """Whether the kernel has these options."""
        asked = {
            "bias": self.bias or None, "mask": self.mask or None, "page_table": self.paged or None, "softcap": self.softcap or None,
            "alibi_slopes": self.alibi or None, "out_dtype": self.out,
        }
        return not absent(Target("cuda", self.kernel), DTYPES[self.dtype], asked)


def kinds(seed: int, count: int) -> list[Kind]:
    """So many different kinds that exist, common and rare ones."""
    rng = np.random.default_rng(seed)
    found: dict[Kind, None] = {}
    while len(found) < count:
        found.setdefault(_kind(rng))
    return list(found)


def _kind(rng: np.random.Generator) -> Kind:
    def one(*values: object, weights: Sequence[float] | None = None) -> object:
        p = None if weights is None else np.array(weights) / sum(weights)
        return values[rng.choice(len(values), p=p)]

    while True:
        dtype = one("float16", "bfloat16", "float32", "float64", weights=(3, 4, 2, 1))
        small = dtype in ("float16", "bfloat16")
        others = ("float16", "bfloat16") if small else tuple(DTYPES)
        d = one(*tiles.HEAD_CLASSES, weights=(2, 3, 2, 3, 1, 1, 2))
        kind = Kind(
            dtype=dtype, out=one(dtype, *others, weights=(8, *(1 for _ in others))), d=d,
            dv=one(d, *tiles.HEAD_CLASSES, weights=(20, *(1 for _ in tiles.HEAD_CLASSES))),
            side=one("", "right", "left", weights=(3, 4, 3)),
            mask=bool(rng.random() < 0.25), bias=one("", dtype, "float32", weights=(6, 2, 1)), softcap=bool(rng.random() < 0.25),
            alibi=bool(rng.random() < 0.25), folded=bool(rng.random() < 0.85),
            load=one(16, 8, 4, 2, weights=(6, 1, 1, 2)) if small else one(16, DTYPES[dtype].itemsize, weights=(3, 1)),
            paged=bool(rng.random() < 0.2),
        )
        if small and not kind.paged and rng.random() < 0.1:
            kind = dataclasses.replace(kind, flat=True)
        if kind.softcap or kind.alibi or kind.bias:
            kind = dataclasses.replace(kind, folded=True)
        if rng.random() < 0.15:
            kind = dataclasses.replace(kind, kernel="fa1", flat=False)
        if kind.exists:
            return kind


@dataclass(frozen=True)
class Example:
    """A problem. Lengths are of the longest sequence where there are several; see calls.py for what is poisoned besides."""

    kind: Kind
    seed: int = 0
    kernel: str = "fa2"
    b: int = 1
    sq: int = 1
    sk: int = 1
    hkv: int = 1
    ratio: int = 1  # query heads of a key/value head
    d: int = 64
    dv: int = 64
    layout: str = "BSHD"
    axes: int = 4
    memory: tuple[str, str, str, str] = ("contiguous",) * 4  # of q, k, v and out
    expanded: bool = False  # q is one batch, k and v are one head, seen many times
    causal: bool | str = False
    window: tuple[int, int] | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi_axes: str = "Hq"
    bias_axes: str = "B Hq Sq Sk"
    bias_hidden: float = 0.0  # share of -inf
    bias_memory: str = "contiguous"
    mask_axes: str = "B Hq Sq Sk"  # or "tree"
    mask_visible: float = 0.5
    mask_memory: str = "contiguous"
    sinks: bool = False
    kv_lengths: tuple[int, ...] | None = None
    kv_start: tuple[int, ...] | None = None
    packed: tuple[tuple[int, ...], tuple[int, ...], tuple[int, int]] | None = None  # lengths of q and k, spare rows
    longest: int | None = None  # added to max_seqlen_q and max_seqlen_k; None: they are not given
    page_size: int = 0
    on_device: str = ""  # dtype of index arrays that lie there
    give_out: bool = True
    lse: str = "given"  # "given", "returned" or ""
    magnitude: float = 1.0  # of q and k
    hidden: bool = True  # NaN and infinities in keys and values that no row sees, and in biases at places that are masked
    spoiled: str = ""  # letters of q, k and v: there is a NaN in one row
    twice: bool = False

    @property
    def case(self) -> Case:
        s = Shape(self.b, self.sq, self.sk, self.hkv * self.ratio, self.hkv, self.d, self.dv)
        return Case(
            f"fuzz {self.seed}", s, tuple(self._builders()), layout=self.layout, axes=self.axes,
            strides="expanded" if self.expanded else "contiguous", kv_lengths=self.kv_lengths, kv_start=self.kv_start,
            packed=None if self.packed is None else Packed(*self.packed), page_size=self.page_size,
        )

    def _builders(self) -> list[Builder]:
        plain = {name: value for name in ("causal", "window", "scale", "softcap") if (value := getattr(self, name)) is not None}
        if self.kind.out != self.kind.dtype:
            plain["out_dtype"] = DTYPES[self.kind.out]
        found = [fixed(**plain)]
        if self.kind.bias:
            found.append(bias(self.bias_axes, DTYPES[self.kind.bias], self.bias_hidden))
        if self.kind.mask:
            found.append(tree if self.mask_axes == "tree" else mask(self.mask_axes, self.mask_visible))
        if self.kind.alibi:
            found.append(lambda rng, s, _: {"alibi_slopes": rng.random((s.b, s.hq)[self.alibi_axes == "Hq":]) - 0.1})
        if self.sinks:
            found.append(_sinks)
        return found


def _sinks(rng: np.random.Generator, shape: Shape, dtype: np.dtype) -> dict:
    return {"sinks": np.where(rng.random(shape.hq) < 0.1, -np.inf, 3 * rng.standard_normal(shape.hq))}


# --- drawing ---------------------------------------------------------------------------------------------------------

EDGES = (1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 81, 96, 112, 127, 128, 129, 191, 192, 193, 255, 256, 257, 384, 511, 512)


@st.composite
def lengths(draw: st.DrawFn, most: int) -> int:
    """From 0 to most: small, at edges of tiles, or any; seldom 0."""
    which = draw(st.integers(0, 15))
    if most == 0 or which == 15:
        return 0
    if which < 4:
        return draw(st.integers(1, min(most, 20)))
    return draw(st.integers(1, most) if which < 10 else st.sampled_from([n for n in EDGES if n <= most]))


@st.composite
def examples(draw: st.DrawFn, of: Sequence[Kind], longest: int = LONGEST, naive: int = 12, hopper: int = 0) -> Example:
    """A problem of one of these kinds. So many percent of those that they could compute are for the naive kernel, and for fa3."""

    def one(*values: object) -> object:
        return draw(st.sampled_from(values))

    def chance(percent: int) -> bool:
        return draw(st.integers(0, 99)) < percent

    kind = draw(st.sampled_from(list(of)))
    kernel = "naive" if kind.naive and chance(naive) else "fa3" if kind.hopper and chance(hopper) else kind.kernel
    d, dv = (draw(_head_sizes(c, kind.unit)) for c in (kind.d, kind.dv))
    b, hkv, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 3)), one(1, 1, 2, 3, 4, 7)
    fields: dict = {"kind": kind, "seed": draw(st.integers(0, 2**20)), "kernel": kernel, "d": d, "dv": dv}
    storage = "packed" if kind.flat else "paged" if kind.paged else one("dense", "dense", "dense", "packed")
    if kind.flat:
        b = max(b, 2)
    if kind.paged and chance(20):
        storage = "packed"
    sq, sk = draw(lengths(longest)), draw(lengths(longest))
    if storage == "packed":
        mine, keys = ([draw(lengths(n)) for _ in range(b)] for n in (sq, sk))
        if kind.flat and not sum(mine):
            mine[0] = 1
        sq, sk = max(mine), max(keys)
    sq = max(min(sq, MOST_WORK // max(1, b * hkv * ratio * sk * (d + dv))), min(sq, 1))
    if storage == "packed":
        fields["packed"] = tuple(min(n, sq) for n in mine), tuple(keys), one((0, 0), (0, 0), (5, 3))
        fields["longest"] = None if kind.flat else one(None, 0, 7)
    fields |= {"b": b, "sq": sq, "sk": sk, "hkv": hkv, "ratio": ratio}
    if kind.paged:
        fields["page_size"] = one(*PAGE_SIZES)
    if kind.paged or chance(30):
        limits = fields["packed"][1] if storage == "packed" else [sk] * b
        fields["kv_lengths"] = tuple(n if chance(30) else draw(st.integers(0, n)) for n in limits)
        if kind.paged and storage == "packed":
            fields["packed"] = fields["packed"][0], fields["kv_lengths"], fields["packed"][2]
    if chance(25):
        limits = fields.get("kv_lengths") or (fields["packed"][1] if storage == "packed" else [sk] * b)
        fields["kv_start"] = tuple(draw(st.integers(0, n)) for n in limits)
    fields |= _positions(draw, kind) | _scores(draw, kind)
    if kind.mask and storage != "packed" and 1 < sq <= min(fields.get("kv_lengths") or [sk]) and sq != sk and chance(30):
        fields["mask_axes"] = "tree"
    fields |= _memory(draw, kind)
    if storage != "dense" or "kv_lengths" in fields or "kv_start" in fields:
        fields["expanded"] = False  # what is hidden from one batch would be seen by another
    if kernel == "fa3" and not chance(10):  # it takes few of those as they have been drawn
        fields |= {"memory": tuple(how if how in BOXES else "contiguous" for how in fields["memory"]), "expanded": False}
        if kind.paged:
            fields["page_size"] *= 16 // math.gcd(fields["page_size"], 16)
    if storage == "dense" and b == 1:
        fields["axes"] = one(4, 3, 2) if hkv == ratio == 1 else one(4, 3)
    if kernel not in ("fa2", "fa3"):  # the others have neither sinks nor index arrays on the device
        return Example(**{**fields, "sinks": False})
    able = not kind.paged and fields.get("mask_axes") != "tree"
    if storage == "packed" and not kind.flat:  # else the call may be taken for one of which the longest is unknown
        able &= b == 1 or kind.itemsize > 2 or fields["longest"] is not None and sq + fields["longest"] < sum(fields["packed"][0])
    if kind.flat or able and (storage == "packed" or "kv_lengths" in fields or "kv_start" in fields) and chance(40):
        fields["on_device"] = one("int32", "int64")
    return Example(**fields)


def _head_sizes(padded: int, unit: int) -> st.SearchStrategy[int]:
    """Head sizes that are padded to this one, whole multiples of unit."""
    smallest = max((c for c in tiles.HEAD_CLASSES if c < padded), default=0) // unit + 1
    return st.one_of(st.just(padded), st.integers(smallest, padded // unit).map(lambda n: n * unit))


def _positions(draw: st.DrawFn, kind: Kind) -> dict:
    one = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    if kind.side == "":
        return {"window": one(None, None, (-1, -1))}
    near = st.one_of(st.integers(0, 9), st.sampled_from([63, 64, 65, 128, 300, 10**9]))
    if kind.side == "right":
        causal = one(True, True, "upper_left", False)
        window = None if causal and draw(st.booleans()) else (-1, draw(near))
        return {"causal": causal, "window": window}
    return {"causal": one(False, True, "upper_left"), "window": (draw(near), draw(st.one_of(st.just(-1), near)))}


def _scores(draw: st.DrawFn, kind: Kind) -> dict:
    one = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    above, other = (None, None, 0.07, 0.4, 1.0), (0.0, -0.3, -1.0, 1e-32)
    fields = {"scale": one(*(above if kind.folded else other))}
    if kind.softcap or kind.alibi or kind.bias:
        fields["scale"] = one(*above, *above, *other)
    if kind.softcap:
        fields["softcap"] = one(0.5, 2.0, 15.0, 50.0, 1e4)
    if kind.alibi:
        fields["alibi_axes"] = one("Hq", "B Hq")
    if kind.bias:
        fields |= {"bias_axes": one(*BIAS_AXES), "bias_hidden": one(0.0, 0.0, 0.3, 0.97), "bias_memory": one(*ANY_STRIDES, "broadcast")}
    if kind.mask:
        fields |= {"mask_axes": one(*MASK_AXES), "mask_visible": one(0.5, 0.9, 0.03, 0.0, 1.0)}
        fields["mask_memory"] = one(*ANY_STRIDES, "broadcast")
    fields["sinks"] = draw(st.integers(0, 3)) == 0
    return fields


def _memory(draw: st.DrawFn, kind: Kind) -> dict:
    one = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    inputs = (ROWS, ANY_STRIDES)[kind.load == kind.itemsize]
    lies = st.one_of(st.just("contiguous"), st.sampled_from(inputs))
    return {
        "memory": (draw(lies), draw(lies), draw(lies), one("contiguous", *ANY_STRIDES)),
        "layout": one("BSHD", "BHSD"),
        "expanded": draw(st.integers(0, 9)) == 0,
        "give_out": draw(st.integers(0, 3)) > 0,
        "lse": one("given", "given", "returned", ""),
        "magnitude": one(1.0, 1.0, 1.0, 1e-3, 6.0),
        "hidden": draw(st.integers(0, 3)) > 0,
        "spoiled": one("", "", "", "", "", "", "q", "k", "v", "qv"),
        "twice": draw(st.integers(0, 3)) == 0,
    }
