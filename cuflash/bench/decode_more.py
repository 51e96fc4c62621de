"""The smaller tables of `bench decode`: float8, lengths that differ, numbers of splits, and what it costs to append."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import cuflash

from . import report
from .decode_sides import (
    HEAD_DIM, Expected, Shape, Side, beside, cost, costs, expected, gpu, ours, paged, random, take, take_turns,
)
from .peers import DTYPES

SECONDS = 5e-5  # of a call, about


@dataclass(frozen=True)
class Table:
    """A table of the benchmark: its cases, what measures one (case, dtype, turns), and its lines."""

    name: str
    cases: Sequence[Any]
    case_name: Callable[[Any], str]
    measure: Callable[[Any, str, int], dict[str, Any]]
    markdown: Callable[[dict[str, Any]], list[str]]


# ---- float8 ------------------------------------------------------------------------------------------------------------

FLOAT8 = tuple(Shape(batch, 32, 8, keys) for batch, keys in ((1, 8192), (1, 65536), (16, 8192), (64, 8192)))
FLOAT8_PAGES = (None, 64, 16)  # None: dense


def measure_float8(shape: Shape, dtype: str, turns: int) -> dict[str, Any]:
    """Keys and values in float8, with a scale for each token and head, beside those of 16 bits; pages in random order."""
    q, pairs = shape.inputs(DTYPES[dtype])
    sides = {}
    for size in FLOAT8_PAGES:
        pages, options = None, {}
        if size:
            pages = paged(pairs, size)
            options = {"page_table": pages.table, "kv_lengths": pages.lengths}
        both = Side([], []), Side([], [])
        for k, v in pages.pairs if pages else pairs:
            (k8, k_scale), (v8, v_scale) = cuflash.quantize_kv(k), cuflash.quantize_kv(v)
            scales = {"k_scale": k_scale, "v_scale": v_scale}
            exact = dequantized(k8, k_scale), dequantized(v8, v_scale)
            for side, arrays, seen, more in zip(both, ((k, v), (k8, v8)), ((k, v), exact), ({}, scales), strict=True):
                side.calls += ours(q, [arrays], **options, **more)
                side.wants.append(expected(q, *(take(x, pages.table) if pages else x for x in seen)))
        for bits, side in zip((16, 8), both, strict=True):
            side.check(f"cuflash with {float8_name(size)} of {bits} bits on {shape.name}")
            sides[bits, size] = side
    times = take_turns(sides, SECONDS, turns)
    return {
        float8_name(size): {"float8_us": 1e6 * float(np.median(times[8, size])), **beside(times[16, size], times[8, size])}
        for size in FLOAT8_PAGES
    }


def float8_name(size: int | None) -> str:
    return f"page {size}" if size else "dense"


def dequantized(codes: Any, scale: Any) -> Any:
    """codes * scale in float32."""
    import cupy

    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return cupy.asarray(numbers)[codes.view(np.uint8)] * scale[..., None]


def float8_table(found: dict[str, Any]) -> list[str]:
    rows = [
        [case, *(f"{x['us']:.1f}, {x['float8_us']:.1f}: {x['ratio']:.2f} ({x['lower']:.2f})" for x in r.values())]
        for case, r in found.items()
    ]
    return report.markdown_table(("16 bits us, float8 us: times faster", *map(float8_name, FLOAT8_PAGES)), rows)


# ---- lengths that differ -----------------------------------------------------------------------------------------------

RAGGED_PAGE = 16


def ragged_lengths(batch: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """From 1 to the longest, evenly on a logarithmic scale; and as many keys in all, to each sequence alike but for a key."""
    ragged = np.geomspace(1, longest, batch).round().astype(np.int64)
    share, rest = divmod(int(ragged.sum()), batch)
    return ragged, share + (np.arange(batch) < rest)


def measure_ragged(case: tuple[int, int], dtype: str, turns: int) -> dict[str, Any]:
    """32 query heads, 8 key heads, pages of 16 in random order; lengths and table on the GPU, and for the values on the host as well."""
    import cupy

    batch, longest = case
    both = ragged_lengths(batch, longest)
    pages = int(max((-(-lengths // RAGGED_PAGE)).sum() for lengths in both))
    q, k, v = (random(shape, DTYPES[dtype]) for shape in ((batch, 1, 32, HEAD_DIM), *[(pages, RAGGED_PAGE, 8, HEAD_DIM)] * 2))
    sides = {}
    for name, lengths in zip(("ragged", "equal"), both, strict=True):
        used = -(-lengths // RAGGED_PAGE)
        table = np.full((batch, -(-longest // RAGGED_PAGE)), -1, np.int32)
        table[np.arange(table.shape[1]) < used[:, None]] = np.random.default_rng(0).permutation(pages)[: used.sum()]
        there = cupy.asarray(table), cupy.asarray(lengths.astype(np.int32))
        alone = [
            expected(q[b : b + 1], *(take(a, there[0][b : b + 1, : used[b]])[:, : lengths[b]] for a in (k, v))) for b in range(batch)
        ]
        want = Expected(*(cupy.concatenate(parts) for parts in zip(*alone, strict=True)))
        for t in (table, there[0]):
            for n in (lengths, there[1]):
                (call,) = ours(q, [(k, v)], page_table=t, kv_lengths=n)
                sides[name] = Side([call], [want])  # the last one has both on the GPU
                sides[name].check(f"cuflash on {name} lengths, table in a {type(t).__name__}, lengths in a {type(n).__name__}")
    times = take_turns(sides, 5e-4, turns)
    total = 4 * int(both[0].sum()) * 8 * HEAD_DIM
    equal = 1e6 * float(np.median(times["equal"]))
    return {"bytes": total, "equal_us": equal, "equal_tbps": total / equal / 1e6, "ragged": cost(times["ragged"], times["equal"])}


def ragged_table(found: dict[str, Any]) -> list[str]:
    rows = [[name, f"{r['equal_us']:.1f}", f"{r['equal_tbps']:.2f}", costs(r["ragged"])] for name, r in found.items()]
    return report.markdown_table(("lengths, pages of 16", "equal ones of the same sum, us", "TB/s", "these: us, cost"), rows)


# ---- splits ------------------------------------------------------------------------------------------------------------

SPLITS = (1, 2, 4, 8, 16, 32, 64, None)


def measure_splits(shape: Shape, dtype: str, turns: int) -> dict[str, Any]:
    """Time over num_splits; multiprocessors are busy as far as there are blocks."""
    q, pairs = shape.inputs(DTYPES[dtype])
    wants = [expected(q, k, v) for k, v in pairs]
    sides = {split_name(n): Side(ours(q, pairs, num_splits=n), wants) for n in SPLITS}
    for name, side in sides.items():
        side.check(f"cuflash with num_splits={name} on {shape.name}")
    times = take_turns(sides, SECONDS, turns)
    found = {}
    for n in SPLITS:
        plan = cuflash.plan(q, *pairs[0], kernel="decode", backend="cuda", num_splits=n)
        us = 1e6 * float(np.median(times[split_name(n)]))
        blocks = plan.extra[1].grid  # the backend's own: the kernel's instance, and how keys are dealt out
        found[split_name(n)] = {"blocks": blocks, "busy": min(blocks, gpu().multiprocessors), "us": us, "tbps": shape.bytes / us / 1e6}
    return found


def split_name(splits: int | None) -> str:
    return "auto" if splits is None else str(splits)


def split_table(found: dict[str, Any]) -> list[str]:
    header = ["num_splits", *(f"{name}: busy SMs, us, TB/s" for name in found)]
    rows = [
        [split, *(f"{r[split]['busy']}, {r[split]['us']:.1f}, {r[split]['tbps']:.2f}" for r in found.values())]
        for split in map(split_name, SPLITS)
    ]
    return report.markdown_table(header, rows)


# ---- appending ---------------------------------------------------------------------------------------------------------

CAPACITY, LENGTH = 512, 300
CHECKED = 4  # sequences that the oracle looks at


def measure_append(batch: int, dtype: str, turns: int) -> dict[str, Any]:
    """decode() of 32 query heads over 8 key heads without and with one new key, and with an embedding."""
    import cupy

    kind = DTYPES[dtype]
    q, k_cache, v_cache, k_new, v_new = (
        random((batch, rows, heads, HEAD_DIM), kind) for rows, heads in ((1, 32), (CAPACITY, 8), (CAPACITY, 8), (1, 8), (1, 8))
    )
    angles = np.arange(CAPACITY)[:, None] * 1e4 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    rope = (*(cupy.asarray(f(angles), np.float32) for f in (np.cos, np.sin)), "half")
    lengths, out = cupy.full(batch, LENGTH, np.int32), cupy.empty_like(q)
    more: dict[str, dict[str, Any]] = {"alone": {}, "new": {"k_new": k_new, "v_new": v_new}}
    more["rope"] = more["new"] | {"rope": rope}
    sides = {}
    for name, options in more.items():
        call = functools.partial(cuflash.decode, q, k_cache, v_cache, lengths, out=out, backend="cuda", **options)
        check_append(call, f"decode() of {batch} sequences ({name})")
        sides[name] = Side([call])
    times = take_turns(sides, SECONDS, turns)
    alone = times["alone"]
    return {"us": 1e6 * float(np.median(alone))} | {
        name: {"us": 1e6 * float(np.median(times[name])), "more": 1e6 * float(np.median(times[name] - alone))} for name in ("new", "rope")
    }


def check_append(call: functools.partial, name: str) -> None:
    """Compare result and caches of the first sequences with the oracle's; raise RuntimeError where they differ."""

    def on_host(a: Any) -> Any:
        return a[:CHECKED].get() if hasattr(a, "get") else a

    q, k_cache, v_cache, lengths = map(on_host, call.args)
    options = {n: on_host(a) for n, a in call.keywords.items() if n in ("k_new", "v_new")}
    if "rope" in call.keywords:
        cos, sin, style = call.keywords["rope"]
        options["rope"] = (cos.get(), sin.get(), style)
    want = cuflash.decode(q, k_cache, v_cache, lengths, backend="reference", **options)
    got = call()
    tolerance = 4 * float(ml_dtypes.finfo(q.dtype).eps)  # a turned key may be rounded the other way
    for what, a, b in (("result", got, want), ("keys", call.args[1], k_cache), ("values", call.args[2], v_cache)):
        a, b = on_host(a).astype(np.float32), b.astype(np.float32)
        error = float(abs(a - b).max())
        if not error <= tolerance * float(abs(b).max()):
            raise RuntimeError(f"{name}: {what} with an error of {error}")


def append_table(found: dict[str, Any]) -> list[str]:
    rows = [
        [name, f"{r['us']:.1f}", *(f"{r[more]['us']:.1f}: {r[more]['more']:.1f} more" for more in ("new", "rope"))]
        for name, r in found.items()
    ]
    return report.markdown_table(("decode(), 300 keys", "nothing new, us", "a new key", "a new key and an embedding"), rows)


TABLES = {
    table.name: table
    for table in (
        Table("float8", FLOAT8, lambda shape: shape.name, measure_float8, float8_table),
        Table("ragged", ((32, 131072),), lambda case: f"B{case[0]}, 1 to {case[1]:,}", measure_ragged, ragged_table),
        Table("splits", (Shape(1, 32, 8, 8192), Shape(1, 32, 8, 131072)), lambda shape: shape.name, measure_splits, split_table),
        Table("append", (1, 64, 256), lambda batch: f"B{batch} 32/8", measure_append, append_table),
    )
}
