"""The calls that people make beside plain self-attention, each beside the plain call that it should cost as much as.

``python -m cuflash bench variants --json docs/variants.json``

Both calls of a pair take turns (A B A B ...), each in a CUDA graph of a few calls. The cost is the variant's time divided by the
plain call's, and by the share of its work where it has less: its median and the upper end of a one-sided 95 % confidence interval.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import cuflash

from . import decode_sides, prefill, report

TURNS, SECONDS_A_TURN = 11, 6e-3


@dataclass(frozen=True)
class Call:
    """A call of attention() in bfloat16.

    ``packed`` makes it attention_varlen() of sequences of equal lengths, which lie on the GPU; ``queries`` makes it the last chunk of a
    prefill, of so many rows, and ``page`` puts keys and values into pages of so many keys at random places.
    """

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    heads_kv: int = 0
    packed: bool = False
    longest_known: bool = True
    queries: int = 0
    page: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def prepare(self) -> Callable[[], Any]:
        """Random arrays; returns what computes."""
        import cupy

        rng = cupy.random.default_rng(1)
        keys = self.seqlen, self.heads_kv or self.heads
        sizes = [(self.batch, *rows_and_heads, self.head_dim) for rows_and_heads in ((self.queries or self.seqlen, self.heads), keys, keys)]
        q, k, v = (rng.standard_normal(size, np.float32).astype(prefill.BF16) for size in sizes)
        out = cupy.empty_like(q)
        options = {"backend": "cuda", "kernel": "fa2", **self.options}
        if self.page:
            pages = decode_sides.paged([(k, v)], self.page)
            expected = cuflash.attention(q, *pages.gathered()[0], **options).astype(np.float32)
            k, v = pages.pairs[0]
            options |= {"page_table": pages.table, "kv_lengths": pages.lengths}
            error = float(abs(cuflash.attention(q, k, v, **options).astype(np.float32) - expected).max())
            if not error <= prefill.TOLERANCE * float(abs(expected).max()):
                raise RuntimeError(f"pages of {self.page} keys and a dense cache differ by {error}")
        if not self.packed:
            return lambda: cuflash.attention(q, k, v, out=out, **options)
        q, k, v, out = (a.reshape(-1, *a.shape[2:]) for a in (q, k, v, out))
        ends = cupy.arange(self.batch + 1, dtype=np.int32) * self.seqlen
        if self.longest_known:
            options |= {"max_seqlen_q": self.seqlen, "max_seqlen_k": self.seqlen}
        return lambda: cuflash.attention_varlen(q, k, v, ends, ends, out=out, **options)


@dataclass(frozen=True)
class Pair:
    """A variant, the plain call, and the variant's share of its work; ``limit`` is the largest cost that is aimed at."""

    name: str
    variant: Call
    plain: Call
    share: float
    limit: float


def pairs() -> Iterator[Pair]:
    """What people use."""
    for causal in (False, True):
        kind = "causal" if causal else "full"
        mask = {"causal": causal}
        for d, heads in ((64, 32), (128, 16)):
            plain = Call(4, 4096, heads, d, options=mask)
            yield Pair(f"GQA {heads}/{heads // 4} D{d} {kind}", Call(4, 4096, heads, d, heads // 4, options=mask), plain, 1.0, 1.03)
            for known, name in ((True, "packed"), (False, "packed, longest unknown,")):
                packed = Call(4, 4096, heads, d, packed=True, longest_known=known, options=mask)
                yield Pair(f"{name} D{d} {kind}", packed, plain, 1.0, 1.03)
        for d, heads in ((72, 16), (80, 16), (96, 16), (160, 10)):
            more = -(-d // 64) * 64
            odd, plain = (Call(4, 4096, heads, size, options=mask) for size in (d, more))
            yield Pair(f"D{d} beside D{more} {kind}", odd, plain, 1.0, 1.0)
    for d, queries, page in itertools.product((64, 128), (512, 2048), (64, 16)):
        dense = Call(1, 8192 + queries, 32, d, 8, queries=queries, options={"causal": True})
        name = f"pages of {page}, {queries} queries after 8192 keys, D{d} causal"
        yield Pair(name, replace(dense, page=page), dense, 1.0, 1.03 if page == 64 else 1.1)
    seen = np.arange(128, 16384 + 1, 128)  # keys that 128 rows reach under a causal mask
    share = float(np.minimum(seen, 1024 + 128).sum() / seen.sum())
    for d, heads in ((64, 32), (128, 16)):
        plain = Call(1, 16384, heads, d, options={"causal": True})
        yield Pair(f"window 1024 of 16384 D{d}", Call(1, 16384, heads, d, options={"window": (1024, 0)}), plain, share, 1.3)
        capped = Call(4, 4096, heads, d, options={"softcap": 30.0})
        yield Pair(f"softcap D{d} full", capped, Call(4, 4096, heads, d), 1.0, 1.3)


def measure(pair: Pair) -> dict[str, float]:
    """Median and upper bound of the cost, and the variant's time."""
    sides = []
    for call in (pair.variant.prepare(), pair.plain.prepare()):
        once = prefill.Timed(call, 1)
        copies = max(2, min(40, int(SECONDS_A_TURN / min(once.seconds() for _ in range(3)))))
        sides.append(prefill.Timed(call, copies))
    turns = [tuple(side.seconds() for side in sides) for _ in range(TURNS)]
    costs = [a / b / pair.share for a, b in turns]
    upper = 1 / report.lower_bound([1 / c for c in costs])
    return {"ms": 1e3 * float(np.median([a for a, _ in turns])), "cost": float(np.median(costs)), "upper": upper, "limit": pair.limit}


def markdown(found: dict[str, Any]) -> str:
    """The table."""
    rows = found["results"]
    table = [[name, f"{r['ms']:.3f}", f"{r['cost']:.2f} ({r['upper']:.2f})", f"{r['limit']:.2f}"] for name, r in rows.items()]
    lines = [prefill.heading(found["environment"]), ""]
    lines += report.markdown_table(("call", "ms", "cost beside plain (upper bound)", "limit"), table)
    return "\n".join(lines) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--markdown", type=Path, help="write the table here, between marker lines if there are any")
    parser.add_argument("--only", default="", help="calls whose name contains this")


def run(arguments: argparse.Namespace) -> str:
    """Measure; returns the Markdown."""
    report.require_gpu("bench variants")
    found: dict[str, Any] = {"environment": prefill.environment(), "results": {}}
    for pair in prefill.progress([p for p in pairs() if arguments.only in p.name]):
        found["results"][pair.name] = measure(pair)
        prefill.free_memory()
        if arguments.json:
            report.write_json(arguments.json, found)
    text = markdown(found)
    if arguments.markdown:
        report.write_markdown(arguments.markdown, "variants table", text)
    return text
