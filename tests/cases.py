"""The conformance cases as data: what to compute, how the arrays lie in memory, and what a backend may decline.

case.py says what a case is, and calls.py turns it into arrays and a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import devices
import numpy as np
from case import (
    BF16, F16, F32, F64, Packed, alibi, bias, case, causal, fixed, in_miniature, mask, prefix, relative_table, same_but_for_name, sinks,
    sqdist_per_feature, squash, strided_keys, tree, upper_left,
)


class Target(NamedTuple):
    """A kernel of a backend that the suite runs."""

    backend: str
    kernel: str

    @property
    def name(self) -> str:
        return f"{self.backend}/{self.kernel}"


# Every pair that exists. A new backend is one more line here, and what it declines stands in ABSENT.
HOST = (Target("reference", "naive"), Target("cpu", "fa2"), Target("cpu", "decode"), Target("cpu", "naive"))
NUMBA_CUDA = (Target("numba-cuda", "fa1"), Target("numba-cuda", "decode"))
CUDA = (Target("cuda", "fa3"), Target("cuda", "fa2"), Target("cuda", "fa1"), Target("cuda", "decode"), Target("cuda", "naive"))
ALL_TARGETS = (*HOST, *NUMBA_CUDA, *CUDA)
GRADIENT_HOST = (Target("reference", "naive"), Target("cpu", "fa2"))
GRADIENT_CUDA = (Target("cuda", "fa3"), Target("cuda", "fa2"))

# What this process runs: in Numba's simulator only that (its threads are Python's: tiny cases), with a GPU what runs there.
if devices.SIMULATED:
    TARGETS, GRADIENT_TARGETS = NUMBA_CUDA, NUMBA_CUDA[:1]
elif devices.gpu_wanted():
    TARGETS = (*NUMBA_CUDA, *(t for t in CUDA if t.kernel != "fa3" or devices.hopper()))
    GRADIENT_TARGETS = (*NUMBA_CUDA[:1], *(t for t in GRADIENT_CUDA if t.kernel != "fa3" or devices.hopper()))
else:
    TARGETS, GRADIENT_TARGETS = HOST, GRADIENT_HOST


# Results with more digits than the arithmetic of the raw 16-bit kernels.
WIDER = {
    f"{dtype} to {out}": f"{dtype} arrays with {out} results"
    for dtype, out in (
        ("float16", "float32"), ("float16", "float64"), ("bfloat16", "float16"), ("bfloat16", "float32"), ("bfloat16", "float64"),
    )
}

# Options that a kernel of this version does not have, and the words of its reason; the list only shrinks.
ABSENT: dict[str, dict[str, str]] = {
    "cuda/fa2": {
        **{name: f"{name} is not part" for name in ("score_mod", "mask_mod")},
        **{f"{name} num_splits": "num_splits is not part" for name in ("float16", "bfloat16", "packed")},
        "sqdist": "score='sqdist' is not part",
        **WIDER, "float32 to float64": "float32 arrays with float64 results",
    },
    "cuda/fa3": {
        **{name: f"it has no {name}" for name in ("alibi_slopes", "bias", "mask")},
        **{name: f"{name} is not part" for name in ("score_mod", "mask_mod", "num_splits")},
        **{dtype: f"{dtype} arrays; it takes float16" for dtype in ("float32", "float64")},
        "sqdist": "score='sqdist' is not part", "strides": "it loads boxes", "results": "it stores 16",
        **WIDER,
    },
    "cuda/fa1": {
        **{name: f"it has no {name}" for name in ("softcap", "alibi_slopes", "sinks", "bias", "mask", "page_table")},
        **{name: f"{name} is not part" for name in ("score_mod", "mask_mod", "num_splits")},
        **{dtype: f"{dtype} arrays; it takes float16" for dtype in ("float32", "float64")},
        "sqdist": "score='sqdist' is not part",
        **WIDER,
    },
    "cuda/decode": {
        "packed": "it has no packed sequences", "bias": "it has no bias",
        **{name: f"{name} is not part" for name in ("score_mod", "mask_mod")},
        **{dtype: f"{dtype} arrays; it takes float16" for dtype in ("float32", "float64")},
        "sqdist": "score='sqdist' is not part",
        **WIDER,
    },
    "cuda/naive": {
        **{name: f"has no {name}" for name in ("page_table", "alibi_slopes", "sinks", "score_mod", "mask_mod")},
        "sqdist": "has no score='sqdist'", "out": "rounds its weights", "strides": "cuBLAS needs", "scale of 0": "has no scale of 0",
    },
}

# The same of gradients. A broadcast bias has a gradient that is a sum, for which kernels without atomics or without an order have no place.
GRADIENTS_ABSENT: dict[str, dict[str, str]] = {
    "numba-cuda/fa1": {"deterministic broadcast bias": "in no fixed order", "page_table": "several sequences share a page"},
    "cuda/fa2": {
        **{name: f"{name} is not part" for name in ("score_mod", "mask_mod")},
        "sqdist": "score='sqdist' is not part", "page_table": "page_table", "deterministic broadcast bias": "with a broadcast bias",
    },
    "cuda/fa3": {
        **{name: f"{name} is not part" for name in ("score_mod", "mask_mod")},
        **{name: f"{name}: kernel='fa2' has it" for name in ("softcap", "alibi_slopes", "bias", "mask", "page_table", "sinks")},
        **{dtype: f"{dtype} arrays; it multiplies 16-bit numbers" for dtype in ("float32", "float64")},
        "sqdist": "score='sqdist' is not part", "strides": "it loads boxes",
        "head sizes": "it takes multiples of 8",
    },
}


def absent(target: Target, dtype: np.dtype, options: Mapping[str, Any], gradients: bool = False) -> list[str]:
    """Words of the reasons for which a target may decline a call with these options, or to differentiate it."""
    of = target.name.replace("emulator", "cuda")  # which runs the same kernels
    asked = {name for name, value in options.items() if value is not None and not (name == "num_splits" and value == 1)}
    if gradients:
        asked |= _asked_of_gradients(options)
        asked -= set() if options.get("deterministic") else {"deterministic"}
    asked |= {f"{dtype.name} {name}" for name in asked} | ({f"packed {name}" for name in asked} if options.get("packed") else set())
    asked |= {dtype.name, "strides", "results", "head sizes"} | ({"sqdist"} if options.get("score") == "sqdist" else set())
    if np.ndim(options.get("scale")) == 0 and options.get("scale") == 0:
        asked.add("scale of 0")
    asked |= {"page_table"} if "cache_batch_index" in asked else set()  # which is one
    out_dtype = np.dtype(options.get("out_dtype", dtype))
    if out_dtype != dtype:
        asked |= {f"{dtype.name} to {out_dtype.name}"} | ({"out"} if target.kernel == "naive" else set())
    else:
        asked.discard("out")
    return [words for name, words in (GRADIENTS_ABSENT if gradients else ABSENT).get(of, {}).items() if name in asked]


def _asked_of_gradients(options: Mapping[str, Any]) -> set[str]:
    """What is asked of the backward pass besides; a bias of an axis of 1, of few axes, or that is such a view, is broadcast."""
    bias = options.get("bias")
    if bias is None or bias.ndim == 4 and 1 not in bias.shape and 0 not in bias.strides:
        return set()
    return {"broadcast bias"} | ({"deterministic broadcast bias"} if options.get("deterministic") else set())


TAILS = (1, 2, 63, 64, 65, 127, 128, 129, 257)
RATIOS = (1, 2, 3, 5, 6, 7, 12, 16, 32, 64, 71)
HEAD_SIZES = (1, 2, 3, 5, 8, 16, 33, 64, 72, 128, 192, 256)

PLAIN = (
    *(case(f"tail-square-causal-{n}", f"1,{n},{n},2,1,16", causal) for n in TAILS),
    *(case(f"tail-queries-{n}", f"1,{n},65,2,2,16") for n in TAILS),
    *(case(f"tail-keys-{n}", f"1,3,{n},2,1,16") for n in TAILS),
    *(case(f"tail-causal-more-keys-{n}", f"1,{n},{n + 64},1,1,8", causal) for n in TAILS),
    case("long-keys", "1,5,2100,2,1,16", causal),
    case("long-queries", "1,1025,130,1,1,8", causal),
    *(case(f"ratio-{r}", f"2,3,17,{r * (1 + r % 2)},{1 + r % 2},8", causal) for r in RATIOS),
    *(case(f"head-size-{d}", f"1,9,70,2,1,{d}", causal) for d in HEAD_SIZES),
    *(
        case(f"head-sizes-{d}-{dv}", f"1,9,70,2,1,{d},{dv}")
        for d, dv in ((16, 1), (1, 16), (64, 128), (192, 128), (33, 5), (72, 80), (5, 256))
    ),
    case("one-of-everything", "1,1,1,1,1,1"),
    case("batch", "5,33,40,3,3,16", causal),
)

EMPTY = (
    case("no-keys", "2,3,0,2,1,16"),
    case("no-keys-sinks", "2,3,0,2,1,16", sinks),
    case("no-queries", "2,0,3,2,1,16"),
    case("no-batch", "0,3,3,2,1,16"),
    case("no-heads", "2,3,3,0,0,16"),
    case("no-query-heads", "2,3,3,0,2,16"),
    *(case(f"causal-more-queries-{n}", f"1,{n},2,2,1,16", causal) for n in (4, 65, 130)),
    case("causal-more-queries-65-by-64", "1,130,65,2,1,16", causal),
    case("upper-left-window-behind-keys", "1,70,5,2,1,16", fixed(causal="upper_left", window=(2, 0))),
    case("mask-few-visible", "2,40,3,2,1,16", mask(visible=0.3)),
    case("mask-nothing-visible", "1,5,70,2,1,16", mask(visible=0.0)),
    case("mask-nothing-visible-sinks", "1,5,70,2,1,16", mask(visible=0.0), sinks),
    case("bias-few-visible", "2,40,3,2,1,16", bias(hidden=0.7)),
    case("zero-lengths", "4,3,70,2,1,16", kv_lengths=(0, 70, 1, 0)),
    case("all-padding", "3,2,70,2,1,16", kv_lengths=(70, 5, 64), kv_start=(70, 2, 63)),
)

POSITIONS = (
    case("upper-left", "1,70,130,2,1,16", upper_left),
    case("upper-left-more-queries", "1,130,70,2,1,16", upper_left),
    *(
        case(
            f"window{left},{right}{'-causal' if c else ''}-{sq}x{sk}", f"1,{sq},{sk},2,1,8", fixed(causal=c, window=(left, right))
        )
        for left, right, c, sq, sk in (
            (0, 0, False, 130, 130), (1, 0, False, 65, 130), (3, 5, False, 130, 65), (-1, 2, False, 70, 200),
            (2, -1, False, 70, 200), (64, 0, True, 200, 200), (7, -1, True, 129, 300), (100, 63, False, 257, 257),
            (-1, -1, True, 66, 66), (300, 300, False, 70, 70),
        )
    ),
    case("window-upper-left", "1,130,200,2,1,8", fixed(causal="upper_left", window=(10, -1))),
    case("window-right-upper-left-lengths", "2,70,130,2,1,8", upper_left, fixed(window=(64, 3)), kv_lengths=(100, 3)),
    case("lengths", "5,6,130,4,2,16", kv_lengths=(130, 1, 64, 65, 7)),
    case("lengths-causal", "5,6,130,4,2,16", causal, kv_lengths=(130, 1, 64, 65, 7)),
    case("lengths-window", "3,6,130,4,2,16", fixed(window=(10, 2)), kv_lengths=(130, 8, 64)),
    case("left-padding", "4,6,130,4,2,16", causal, kv_lengths=(130, 130, 129, 70), kv_start=(0, 100, 64, 69)),
    case("left-padding-only", "2,6,70,2,1,16", kv_start=(65, 1)),
)

LOGITS = (
    case("scale", "1,9,70,2,1,16", fixed(scale=0.7)),
    case("scale-negative", "1,9,70,2,1,16", fixed(scale=-0.3), causal),
    case("scale-zero", "1,9,70,2,1,16", fixed(scale=0.0), causal),
    case("softcap", "1,9,70,2,1,16", fixed(softcap=1.5, scale=1.0), causal),
    case("softcap-wide", "1,70,130,2,1,16", fixed(softcap=50.0, scale=8.0)),
    *(
        case(f"bias-{axes.replace(' ', '-')}", "2,6,70,4,2,16", bias(axes))
        for axes in (
            "B Hq Sq Sk", "1 Hq Sq Sk", "B 1 Sq Sk", "B Hq 1 Sk", "B Hq Sq 1", "1 1 1 1", "Hq Sq Sk", "Sq Sk", "1 Sk", "Sk", "1",
        )
    ),
    case("bias-float32", "2,66,70,2,1,16", bias(dtype=F32), causal),
    case("bias-hides", "2,66,130,2,1,16", bias(hidden=0.4)),
    *(
        case(f"mask-{axes.replace(' ', '-')}", "2,6,70,4,2,16", mask(axes))
        for axes in ("B Hq Sq Sk", "1 Hq Sq Sk", "B 1 1 Sk", "B Hq Sq 1", "Sq Sk", "Sk", "1")
    ),
    case("mask-causal", "2,66,130,2,1,16", mask(), causal),
    case("tree", "2,6,70,4,2,16", tree),
    case("tree-lengths", "3,6,70,4,2,16", tree, kv_lengths=(70, 6, 64)),
    case("tree-large", "1,66,200,2,1,16", tree),
    case("alibi", "2,66,130,6,3,16", alibi()),
    case("alibi-per-batch-causal", "2,66,130,6,3,16", alibi("B Hq"), causal),
    case("alibi-upper-left-lengths", "2,70,130,2,1,16", alibi(), upper_left, kv_lengths=(130, 9)),
    case("sinks", "2,66,130,6,3,16", sinks, causal),
    case("sqdist", "1,70,130,2,1,8", fixed(score="sqdist")),
    case("sqdist-scale", "1,70,130,4,2,33", fixed(score="sqdist", scale=0.02), causal),
    case("sqdist-per-feature", "2,9,130,4,2,5", sqdist_per_feature),
    case("sqdist-negative-scale", "1,9,70,1,1,3", fixed(score="sqdist", scale=-0.1)),
    case("score-mod", "2,9,70,4,2,16", fixed(score_mod=squash, mod_args={"limit": 1.5})),
    case("score-mod-table-causal", "2,66,130,2,1,16", relative_table, causal),
    case("mask-mod", "2,66,130,2,1,16", fixed(mask_mod=prefix, mod_args={"length": 20})),
    case("mask-mod-keys-only", "2,9,70,4,2,16", fixed(mask_mod=strided_keys)),
    case("out-float32", "1,9,70,2,1,16", fixed(out_dtype=F32)),
    case("out-float64", "1,9,70,2,1,16", fixed(out_dtype=F64)),
    case("out-bfloat16", "1,9,70,2,1,16", fixed(out_dtype=BF16)),
    case("out-float16", "1,9,70,2,1,16", fixed(out_dtype=F16)),
)

STRIDED = tuple(
    case(f"strides-{strides}-{layout}-{axes}axes", shape, causal, strides=strides, layout=layout, axes=axes)
    for strides in ("contiguous", "transposed", "reversed", "offset", "padded", "heads_of_packed", "expanded", "every_other")
    for layout, axes, shape in (
        ("BSHD", 4, "2,66,66,4,2,8"), ("BHSD", 4, "2,66,66,4,2,8"), ("BSHD", 3, "1,66,66,4,2,8"), ("BHSD", 3, "1,66,66,4,2,8"),
        ("BSHD", 2, "1,66,66,1,1,8"), ("BHSD", 2, "1,66,66,1,1,8"),
    )
) + (
    case("strides-bias-mask-transposed", "2,66,66,4,2,8", bias(), mask(), strides="transposed"),
    case("strides-bias-mask-reversed", "2,66,66,4,2,8", bias(), mask(), strides="reversed"),
    case("layout-heads-equal-length", "1,4,4,4,4,16", strides="transposed", layout="BHSD"),
)

PACKED = (
    case("packed", "3,70,130,4,2,16", packed=Packed((70, 1, 5), (130, 3, 64))),
    case("packed-causal", "4,76,130,4,2,16", causal, packed=Packed((70, 1, 5, 76), (130, 3, 64, 1))),
    case("packed-empty", "6,5,9,4,2,16", causal, packed=Packed((0, 5, 0, 1, 3, 0), (4, 9, 0, 0, 1, 0))),
    case("packed-slack", "3,9,70,4,2,16", causal, packed=Packed((3, 0, 9), (70, 2, 9), slack=(6, 4))),
    case("packed-slack-sinks", "2,9,70,4,2,16", sinks, packed=Packed((3, 9), (70, 9), slack=(6, 4))),
    case("packed-slack-splits", "2,9,70,4,2,16", sinks, fixed(num_splits=3), packed=Packed((3, 5), (70, 9), slack=(6, 4))),
    case("packed-heads-first", "3,9,70,4,2,16", causal, layout="BHSD", packed=Packed((3, 1, 9), (70, 2, 9), slack=(1, 0))),
    case("packed-transposed", "3,9,70,4,2,16", causal, strides="transposed", packed=Packed((3, 1, 9), (70, 2, 9), slack=(1, 3))),
    case("packed-no-sequence", "0,0,0,4,2,16", packed=Packed((), (), slack=(3, 2))),
    case("packed-bias-mask", "3,9,70,4,2,16", bias("B Hq Sq Sk"), mask("B 1 Sq Sk"), packed=Packed((3, 1, 9), (70, 2, 9))),
    case("packed-bias-broadcast", "3,9,70,4,2,16", bias("Hq 1 Sk"), packed=Packed((3, 1, 9), (70, 2, 9))),
    case("packed-window-alibi", "3,9,70,4,2,16", alibi("B Hq"), fixed(window=(6, 1)), packed=Packed((3, 1, 9), (70, 2, 9))),
    case("packed-upper-left", "2,70,66,2,1,16", upper_left, packed=Packed((70, 9), (66, 3))),
    case(
        "packed-lengths", "3,9,70,4,2,16", causal, kv_lengths=(64, 0, 9), kv_start=(3, 0, 8), packed=Packed((3, 1, 9), (70, 2, 9))
    ),
    case("packed-score-mod", "2,9,70,4,2,16", relative_table, packed=Packed((3, 9), (70, 9))),
)

PAGED = tuple(
    case(f"paged-{size}-{layout}", "4,3,130,4,2,16", causal, page_size=size, layout=layout, kv_lengths=(130, 1, 65, 0))
    for size in (1, 3, 16)
    for layout in ("BSHD", "BHSD")
) + (
    case("paged-strided", "2,3,70,4,2,16", causal, page_size=16, kv_lengths=(70, 5), strides="transposed"),
    case("paged-start-window", "2,3,70,4,2,16", fixed(window=(20, 0)), page_size=3, kv_lengths=(70, 66), kv_start=(3, 65)),
    case("paged-many-queries", "2,66,130,4,2,16", causal, page_size=16, kv_lengths=(130, 65)),
    case("paged-bias-sinks", "2,6,70,4,2,16", bias(), sinks, page_size=7, kv_lengths=(70, 66)),
    case("paged-tree", "2,6,70,4,2,16", tree, page_size=16, kv_lengths=(70, 6)),
    case("paged-sqdist", "2,6,70,4,2,3", fixed(score="sqdist"), page_size=16, kv_lengths=(70, 6)),
    case(
        "paged-packed", "3,9,70,4,2,16", causal, page_size=16, kv_lengths=(70, 0, 33),
        packed=Packed((3, 1, 9), (70, 0, 33), slack=(2, 0)),
    ),
)

DECODE = tuple(
    case(
        f"decode-{'paged' if page else 'dense'}-{layout}-{sq}-new{new}", f"4,{sq},200,6,2,16", causal, decode=True, new=new,
        page_size=page, layout=layout, kv_lengths=(200, 3, 64, 129),
    )
    for page in (0, 16)
    for layout in ("BSHD", "BHSD")
    for sq, new in ((1, 0), (1, 1), (3, 3))
) + (
    case("decode-page-1-new", "3,2,70,4,4,8", causal, decode=True, new=2, page_size=1, kv_lengths=(70, 2, 5)),
    case("decode-fewer-queries-than-new", "2,1,70,4,2,8", decode=True, new=5, page_size=3, kv_lengths=(70, 5)),
    case("decode-more-queries-than-new", "2,4,70,4,2,8", causal, decode=True, new=1, kv_lengths=(70, 5)),
    case("decode-one-sequence-3axes", "1,1,70,4,2,8", decode=True, new=1, axes=3, kv_lengths=(33,)),
    case("decode-empty-cache", "2,1,70,4,2,8", decode=True, kv_lengths=(0, 7)),
    case("decode-window-sinks", "2,1,200,4,2,16", fixed(window=(64, 0)), sinks, decode=True, kv_lengths=(200, 30)),
    case("decode-long", "1,1,4100,8,1,64", decode=True, kv_lengths=(4099,)),
    case("decode-group-of-100", "3,1,400,100,1,64", sinks, decode=True, kv_lengths=(400, 66, 0)),
    case("decode-group-of-128-pages", "2,1,400,256,2,72", fixed(softcap=5.0), decode=True, page_size=16, kv_lengths=(400, 17)),
    case("decode-transposed-new", "2,3,70,4,2,8", causal, decode=True, new=3, strides="transposed", kv_lengths=(70, 3)),
    *(
        case(
            f"decode-rope-{style}-{rot}-of-{d}-{'paged' if page else 'dense'}", f"3,{sq},70,4,2,{d}", causal, decode=True, new=new,
            page_size=page, rope=(style, rot), kv_lengths=(70, 3, 33),
        )
        for style, rot, d, sq, new, page in (
            ("half", 16, 16, 1, 1, 0), ("interleaved", 16, 16, 1, 1, 16), ("half", 8, 16, 3, 3, 3), ("interleaved", 6, 9, 3, 2, 0),
            ("half", 32, 64, 2, 0, 0),
        )
    ),
    case("decode-rope-heads-first", "2,2,70,4,2,16", causal, decode=True, new=2, rope=("half", 16), layout="BHSD", kv_lengths=(70, 3)),
    case("decode-rope-padding", "2,1,70,4,2,16", decode=True, new=1, rope=("half", 16), kv_lengths=(70, 30), kv_start=(3, 20)),
    case("decode-rope-more-queries-than-keys", "2,5,70,4,2,16", decode=True, new=1, rope=("half", 16), kv_lengths=(70, 3)),
    case("decode-rope-upper-left", "2,3,70,4,2,16", upper_left, decode=True, new=1, rope=("half", 16), kv_lengths=(70, 3)),
    case("decode-rope-strided", "2,3,70,4,2,16", causal, decode=True, new=3, rope=("half", 16), strides="every_other", kv_lengths=(70, 3)),
    case("decode-entries", "3,2,70,4,2,16", causal, decode=True, new=2, entries=(4, 0, 3), kv_lengths=(70, 3, 20)),
    case("decode-entries-heads-first", "3,1,70,4,2,16", causal, decode=True, entries=(1, 3, 0), layout="BHSD", kv_lengths=(70, 3, 20)),
    case("decode-splits-7", "2,1,700,4,2,16", fixed(num_splits=7), decode=True, kv_lengths=(700, 3)),
)

COMBINED = (
    case(
        "all-additive", "2,66,130,4,2,16", causal, fixed(softcap=3.0, window=(50, 0)), bias("1 Hq Sq Sk"), alibi(), sinks,
        mask(visible=0.8),
    ),
    case("sqdist-softcap-bias", "2,66,70,2,1,3", fixed(score="sqdist", softcap=2.0), bias(), causal),
    case("mods-after-bias", "2,9,70,2,1,16", fixed(score_mod=squash, mod_args={"limit": 2.0}), bias(), alibi(), causal),
    case("bias-hides-from-score-mod", "2,9,70,2,1,16", bias(hidden=0.4), fixed(score_mod=squash, mod_args={"limit": 2.0})),
    case(
        "lengths-start-alibi-mask", "3,9,130,4,2,16", causal, alibi("B Hq"), mask("B 1 Sq Sk", 0.7), kv_lengths=(130, 66, 9),
        kv_start=(5, 64, 0),
    ),
    case("softcap-sinks-strided", "2,70,70,4,2,16", fixed(softcap=2.0), sinks, strides="reversed", layout="BHSD"),
    case("batch-invariant", "3,9,130,4,2,16", fixed(batch_invariant=True), causal, kv_lengths=(130, 66, 9)),
    case("splits-3", "1,9,400,2,1,16", fixed(num_splits=3), causal),
)

CASES = (*PLAIN, *EMPTY, *POSITIONS, *LOGITS, *STRIDED, *PACKED, *PAGED, *DECODE, *COMBINED)

if devices.SIMULATED:  # once each; strides are NumPy's business there
    CASES = tuple({same_but_for_name(c): c for c in map(in_miniature, CASES) if c.strides in ("contiguous", "reversed")}.values())
    STRIDED = ()

# Cases whose gradients are compared as well.
BY_NAME = {c.name: c for c in CASES}
DIFFERENTIATED = tuple(
    BY_NAME[name]
    for name in (
        "tail-square-causal-1 tail-square-causal-65 tail-queries-129 tail-keys-64 ratio-3 ratio-7 head-sizes-64-128 "
        "head-sizes-33-5 no-keys no-queries causal-more-queries-65 mask-few-visible bias-few-visible zero-lengths "
        "all-padding upper-left window3,5-130x65 window64,0-causal-200x200 left-padding scale-negative scale-zero softcap "
        "bias-B-Hq-Sq-Sk bias-Hq-Sq-Sk bias-1-Sk bias-Sk bias-1-1-1-1 bias-float32 bias-hides mask-causal tree "
        "alibi-per-batch-causal sinks mask-nothing-visible-sinks sqdist-scale sqdist-per-feature score-mod "
        "score-mod-table-causal mask-mod layout-heads-equal-length packed-causal packed-empty packed-slack-sinks "
        "packed-heads-first packed-transposed all-additive sqdist-softcap-bias softcap-sinks-strided"
    ).split()
    if name in BY_NAME
) + tuple(
    c for c in STRIDED if c.strides in ("expanded", "reversed", "heads_of_packed", "every_other") and c.name.endswith("axes")
)
