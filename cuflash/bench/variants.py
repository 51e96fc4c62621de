"""The calls that people make beside plain self-attention, each beside the plain call that it should cost as much as.

``python -m cuflash bench variants --kernel fa3 --json docs/variants-fa3-h200.json --markdown docs/performance.md``

Both calls of a pair take turns, each in a CUDA graph of a few calls. The cost is the variant's time divided by the plain call's, and by
the share of its work where it has less: its median and the upper end of a one-sided 95 % confidence interval. The same variant by
cuflash's fa2 and by FlashAttention-3 takes its turn with them, where they are there and have it.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import cuflash

from . import decode_sides, peers, prefill, report

TURNS, SECONDS_A_TURN = 11, 4e-3


@dataclass(frozen=True)
class Call:
    """A call of attention() in bfloat16.

    ``packed`` makes it attention_varlen() of sequences of equal lengths, which lie on the GPU; ``queries`` makes it the last chunk of a
    prefill, of so many rows, ``page`` puts keys and values into pages of so many keys at random places, and ``lengths`` gives kv_lengths
    on the GPU.
    """

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    heads_kv: int = 0
    head_dim_v: int = 0
    packed: bool = False
    longest_known: bool = True
    queries: int = 0
    page: int = 0
    lengths: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> peers.Arrays:
        """Random q, k and v, (B, S, H, D)."""
        import cupy

        rng = cupy.random.default_rng(1)
        keys = self.batch, self.seqlen, self.heads_kv or self.heads
        queries = self.batch, self.queries or self.seqlen, self.heads
        sizes = (*queries, self.head_dim), (*keys, self.head_dim), (*keys, self.head_dim_v or self.head_dim)
        q, k, v = (rng.standard_normal(size, np.float32).astype(peers.BF16) for size in sizes)
        return q, k, v

    def ours(self, arrays: peers.Arrays, kernel: str) -> peers.Call:
        """The call by a kernel of cuflash's."""
        import cupy

        q, k, v = arrays
        out = cupy.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
        options = {"backend": "cuda", "kernel": kernel, **self.options}
        if self.lengths:
            options["kv_lengths"] = cupy.full(self.batch, self.seqlen, np.int32)
        if self.page:
            pages = decode_sides.paged([(k, v)], self.page)
            dense = pages.gathered()[0]
            k, v = pages.pairs[0]
            paged = {"page_table": pages.table, "kv_lengths": pages.lengths}
            prefill.check(
                lambda: cuflash.attention(q, k, v, **options, **paged), cuflash.attention(q, *dense, **options).astype(np.float32)
            )
            options |= paged
        if not self.packed:
            return lambda: cuflash.attention(q, k, v, out=out, **options)
        rows = self.rows((q, k, v, out))
        if self.longest_known:
            options |= {"max_seqlen_q": self.seqlen, "max_seqlen_k": self.seqlen}
        ends = self.ends()

        def call() -> Any:
            cuflash.attention_varlen(*rows[:3], ends, ends, out=rows[3], **options)
            return out

        return call

    def flash_attention_3(self, arrays: peers.Arrays) -> peers.Call | None:
        """The call by FlashAttention-3, or None where it has no such call."""
        if self.page or self.lengths or not self.longest_known or not peers.has_flash_attention_3():
            return None
        names = {"window": "window_size", "softcap": "softcap"}
        options = {names[name]: value for name, value in self.options.items() if name in names}
        causal = self.options.get("causal", False)
        if not self.packed:
            return peers.flash_attention_3(arrays, causal, **options)
        ends = importlib.import_module("torch").from_dlpack(self.ends())
        longest = {"max_seqlen_q": self.seqlen, "max_seqlen_k": self.seqlen}
        q, k, v = self.rows(arrays)
        call = peers.flash_attention_3((q, k, v), causal, cu_seqlens_q=ends, cu_seqlens_k=ends, **longest, **options)
        return lambda: call().view(self.batch, self.seqlen, self.heads, -1)

    def rows(self, arrays: tuple[Any, ...]) -> list[Any]:
        """The sequences one after the other."""
        return [a.reshape(-1, *a.shape[2:]) for a in arrays]

    def ends(self) -> Any:
        """cu_seqlens, on the GPU."""
        import cupy

        return cupy.arange(self.batch + 1, dtype=np.int32) * self.seqlen


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
            yield Pair(f"lengths D{d} {kind}", replace(plain, lengths=True), plain, 1.0, 1.03)
        for d, heads in ((72, 16), (80, 16), (96, 16), (160, 10)):
            more = -(-d // 64) * 64
            odd, plain = (Call(4, 4096, heads, size, options=mask) for size in (d, more))
            yield Pair(f"D{d} beside D{more} {kind}", odd, plain, 1.0, 1.0)
        plain = Call(4, 4096, 10, 192, options=mask)
        yield Pair(f"D192/128 beside D192 {kind}", replace(plain, head_dim_v=128), plain, 1.0, 1.0)
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


def measure(pair: Pair, kernel: str) -> dict[str, Any]:
    """Median and upper bound of the cost, the variant's time, and those of others beside it; or why the kernel does not take it."""
    arrays = pair.variant.inputs()
    try:
        own = pair.variant.ours(arrays, kernel)
        expected = own().astype(np.float32)
    except cuflash.NoBackendError as error:
        return {"declined": str(error).splitlines()[-1].strip(), "limit": pair.limit}
    calls: dict[str, peers.Call] = {"variant": own, "plain": pair.plain.ours(pair.plain.inputs(), kernel)}
    failed: dict[str, str] = {}
    for name, make in others(pair.variant, kernel).items():
        try:
            call = make(arrays)
            if call is not None:
                prefill.check(call, expected)
                calls[name] = call
        except Exception as error:  # that it does not take the call, or is wrong, is no reason to measure nothing
            failed[name] = prefill.refusal(error)
    sides = {}
    for name, call in calls.items():
        of_torch = name == "FA3"
        once = prefill.Timed(call, 1, of_torch)
        copies = max(2, min(40, int(SECONDS_A_TURN / min(once.seconds() for _ in range(3)))))
        sides[name] = prefill.Timed(call, copies, of_torch)
    times = prefill.take_turns(sides, TURNS)
    variant, plain = times.pop("variant"), times.pop("plain")
    row: dict[str, Any] = {"ms": milliseconds(variant), **report.cost(variant, plain * pair.share), "limit": pair.limit, "failed": failed}
    row["beside"] = {name: {"ms": milliseconds(theirs)} | report.ratio(theirs, variant) for name, theirs in times.items()}
    return row


def milliseconds(seconds: np.ndarray) -> float:
    """The median."""
    return 1e3 * float(np.median(seconds))


def others(variant: Call, kernel: str) -> dict[str, Callable[[peers.Arrays], peers.Call | None]]:
    """What the variant is set beside: fa2 where another kernel is measured, and FlashAttention-3."""
    found: dict[str, Callable[[peers.Arrays], peers.Call | None]] = {}
    if kernel != "fa2":
        found["fa2"] = lambda arrays: variant.ours(arrays, "fa2")
    found["FA3"] = variant.flash_attention_3
    return found


def markdown(found: dict[str, Any]) -> str:
    """The table."""
    measured = {name: r for name, r in found["results"].items() if "declined" not in r}
    beside = list(dict.fromkeys(name for r in measured.values() for name in r["beside"]))
    table = []
    for name, r in measured.items():
        cells = [r["beside"].get(other) for other in beside]
        more = [f"{c['ms']:.3f}: {c['ratio']:.2f} ({c['lower']:.2f})" if c else "-" for c in cells]
        table.append([name, f"{r['ms']:.3f}", f"{r['cost']:.2f} ({r['upper']:.2f})", f"{r['limit']:.2f}", *more])
    lines = [prefill.heading(found["environment"]), ""]
    header = ("call", "ms", "cost beside plain (upper bound)", "limit", *(f"{name} ms: its time / ours (lower bound)" for name in beside))
    lines += report.markdown_table(header, table)
    declined = [f"{name} ({r['declined']})" for name, r in found["results"].items() if "declined" in r]
    if declined:
        lines += ["", f"Left to another kernel: {'; '.join(declined)}."]
    failed = [f"{other} for {name} ({why})" for name, r in measured.items() for other, why in r["failed"].items()]
    if failed:
        lines += ["", f"Not measured: {'; '.join(failed)}."]
    return "\n".join(lines) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--markdown", type=Path, help="write the table here, between marker lines if there are any")
    parser.add_argument("--only", default="", help="calls whose name contains this")
    parser.add_argument("--kernel", default="auto", help="the kernel of cuflash's cuda backend (default: what it takes for each call)")


def run(arguments: argparse.Namespace) -> str:
    """Measure; returns the Markdown."""
    report.require_gpu("bench variants")
    found: dict[str, Any] = {"environment": prefill.environment(), "results": {}}
    for pair in prefill.progress([p for p in pairs() if arguments.only in p.name]):
        found["results"][pair.name] = measure(pair, arguments.kernel)
        prefill.free_memory()
        if arguments.json:
            report.write_json(arguments.json, found)
    text = markdown(found)
    if arguments.markdown:
        report.write_markdown(arguments.markdown, f"variants table of {arguments.kernel}", text)
    return text
