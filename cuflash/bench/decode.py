"""Decode on one GPU: one query a sequence over dense and paged caches, beside peers and beside a kernel that only reads.

``python -m cuflash bench decode --json docs/decode-h200.json --markdown docs/decode.md``

All sides of a row take turns on the same arrays, in an order by chance, each replaying a CUDA graph of calls that rotate through keys and
values larger than the L2 cache, so that neither host time nor cached keys count; every side's values are compared first. A ratio is
another side's time divided by cuflash's in the same turn: what counts is its median and the lower end of a one-sided 95 % confidence
interval of that median. A cost is the time of a variant divided by that of the plain call, with the upper end. TB/s count keys and
values once.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import decode_more, prefill, report
from .decode_sides import (
    MOST_GROUP, Shape, Side, against, beside, cost, costs, dense_peers, expected, flashinfer, is_naive, ours, paged, reads,
    take_turns,
)
from .peers import DTYPES

SHAPES = tuple(
    Shape(*numbers)
    for numbers in (
        (1, 32, 8, 8192), (1, 32, 8, 65536), (1, 32, 8, 131072), (1, 32, 32, 8192), (8, 64, 8, 32768), (16, 32, 8, 8192),
        (32, 32, 32, 4096), (64, 32, 8, 8192), (64, 128, 1, 8192), (128, 32, 8, 2048),
    )
)
QUICK = ("B1 32/8 N8192", "B16 32/8 N8192", "B64 128/1 N8192")
NAIVE = "32/8 N8192"  # shapes of an 8B model: naive stores and copies too much to be timed everywhere
PAGES = (64, 16, 1)
PAGES_OF_FLASHINFER = (64, 16)
TURNS, QUICK_TURNS = 11, 7
MARKER = "decode tables"
ABOUT = 3e12, 8e-6  # bytes a second and seconds a call from which the calls of a graph are counted


def measure(shape: Shape, dtype: str, turns: int, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Compare, then time, one shape: dense and in pages, against every peer."""
    q, pairs = shape.inputs(DTYPES[dtype])
    wants = [expected(q, k, v) for k, v in pairs]
    sides = {
        "cuflash": Side(ours(q, pairs), wants), "read": Side(reads(pairs)),
        "invariant": Side(ours(q, pairs, batch_invariant=True), wants),
    }
    peers: dict[str, Callable[[], Side]] = {}
    for name, prepare in dense_peers().items():
        of_cuflash = name.endswith("(cuflash)")
        if wanted(name) and (not is_naive(name) or NAIVE in shape.name):
            peers[name] = lambda prepare=prepare, own=of_cuflash: Side(  # type: ignore[misc]
                [prepare((q, k, v)) for k, v in pairs], wants, of_torch=not own, eager=own,
            )
    for size in PAGES:
        pages = paged(pairs, size)
        in_pages = [expected(q, k, v) for k, v in pages.gathered()]
        sides[page(size)] = Side(ours(q, pages.pairs, page_table=pages.table, kv_lengths=pages.lengths), in_pages)
        fits = size in PAGES_OF_FLASHINFER and shape.heads_q // shape.heads_kv <= MOST_GROUP
        if fits and wanted("FlashInfer") and importlib.util.find_spec("flashinfer"):
            peers[f"FlashInfer, {page(size)}"] = lambda pages=pages, wants=in_pages: Side(  # type: ignore[misc]
                flashinfer(q, pages), wants, of_torch=True,
            )
    for name, side in sides.items():
        side.check(f"cuflash ({name}) on {shape.name}")
    failed = {}
    for name, make in peers.items():
        try:
            side = make()
            side.check(name)
        except Exception as error:  # a peer that does not run, or is wrong, is no reason to measure nothing
            failed[name] = f"{type(error).__name__}: {error}"
        else:
            sides[name] = side
    speed, overhead = ABOUT
    times = take_turns(sides, shape.bytes / speed + overhead, turns)
    return row(shape, times) | {"failed": failed, "clock_mhz": prefill.clock_under(sides["cuflash"].timed(shape.bytes / speed + overhead))}


def page(size: int) -> str:
    return f"page {size}"


def row(shape: Shape, times: dict[str, np.ndarray]) -> dict[str, Any]:
    """The figures of one shape from the seconds of each turn, (turns,) for each side."""
    own = times["cuflash"]
    us = 1e6 * float(np.median(own))
    found: dict[str, Any] = {
        "bytes": shape.bytes, "us": us, "tbps": shape.bytes / us / 1e6, "read": beside(times["read"], own),
        "invariant": cost(times["invariant"], own), "peers": {}, "pages": {},
    }
    for name, seconds in times.items():
        if name.startswith("page"):
            found["pages"][name] = cost(seconds, own)
            theirs = times.get(f"FlashInfer, {name}")
            if theirs is not None:
                found["pages"][name]["FlashInfer"] = beside(theirs, seconds)
        elif name not in ("cuflash", "read", "invariant") and not name.startswith("FlashInfer"):
            found["peers"][name] = beside(seconds, own)
    for best, group in (("best", [n for n in found["peers"] if not is_naive(n)]), ("naive", [n for n in found["peers"] if is_naive(n)])):
        if group:
            found[best] = beside(np.minimum.reduce([times[name] for name in group]), own)
    return found


# ---- tables ------------------------------------------------------------------------------------------------------------


def markdown(found: dict[str, Any]) -> str:
    """All tables that were measured."""
    lines = [prefill.heading(found["environment"])]
    results = found.get("shapes", {})
    if results:
        peers = list(dict.fromkeys(peer for r in results.values() for peer in r["peers"]))
        header = ["case", "cuflash us", "TB/s", "read", *peers, "best peer", "`batch_invariant`"]
        rows = [
            [name, f"{r['us']:.1f}", f"{r['tbps']:.2f}", against(r["read"]), *(against(r["peers"].get(peer)) for peer in peers),
             f"{r['best']['ratio']:.2f} ({r['best']['lower']:.2f})" if "best" in r else "-", costs(r["invariant"])]
            for name, r in results.items()
        ]  # fmt: skip
        lines += ["", *report.markdown_table(header, rows)]
        header = ["case", "dense us", *map(page, PAGES), *(f"FlashInfer, {page(size)}" for size in PAGES_OF_FLASHINFER)]
        rows = [
            [name, f"{r['us']:.1f}", *(costs(r["pages"][page(size)]) for size in PAGES),
             *(against(r["pages"][page(size)].get("FlashInfer")) for size in PAGES_OF_FLASHINFER)]
            for name, r in results.items()
        ]  # fmt: skip
        lines += ["", *report.markdown_table(header, rows)]
        lines += ["", *report.markdown_table(("figure", "value"), ((name, f"{value:.4g}") for name, value in summary(results).items()))]
        failed = [f"{peer} on {name} ({why})" for name, r in results.items() for peer, why in r["failed"].items()]
        if failed:
            lines += ["", f"Not measured: {'; '.join(failed)}."]
    for table in decode_more.TABLES.values():
        if table.name in found:
            lines += ["", *table.markdown(found[table.name])]
    return "\n".join(lines) + "\n"


def summary(results: dict[str, Any]) -> dict[str, float]:
    """Geometric means and extremes of the ratios."""
    figures: dict[str, float] = {}
    clocks = [r["clock_mhz"] for r in results.values() if r.get("clock_mhz")]
    if clocks:
        figures |= {"clock under cuflash, smallest, MHz": min(clocks), "clock under cuflash, largest, MHz": max(clocks)}
    best = [r["best"] for r in results.values() if "best" in r]
    if best:
        figures["best peer / cuflash, geometric mean"] = report.geometric_mean(b["ratio"] for b in best)
        figures["best peer / cuflash, smallest lower bound"] = min(b["lower"] for b in best)
    naive = [r["naive"] for r in results.values() if "naive" in r]
    if naive:
        figures["the faster naive / cuflash, smallest lower bound"] = min(n["lower"] for n in naive)
    for size in map(page, PAGES):
        figures[f"{size} / dense, largest"] = max(r["pages"][size]["cost"] for r in results.values())
        theirs = [r["pages"][size]["FlashInfer"]["lower"] for r in results.values() if "FlashInfer" in r["pages"][size]]
        if theirs:
            figures[f"FlashInfer / cuflash, {size}, smallest lower bound"] = min(theirs)
    return figures


# ---- the command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tables = ("shapes", *decode_more.TABLES)
    parser.add_argument("--json", type=Path, help="write the results here; those of the same machine, versions and commit stay in the file")
    parser.add_argument("--markdown", type=Path, help="write the tables here, between marker lines if there are any")
    parser.add_argument("--only", default="", help="shapes whose name contains this, such as 'B64 32/8'")
    parser.add_argument("--dtype", default="bfloat16", choices=(*DTYPES, "both"), help="of queries, keys and values")
    parser.add_argument("--peers", help="names that contain one of these words, separated by commas (default: all)")
    parser.add_argument("--tables", nargs="+", default=tables, choices=tables, metavar="TABLE", help=f"some of {', '.join(tables)}")
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} in fewer turns, without FlashInfer, which compiles long")


def run(arguments: argparse.Namespace) -> str:
    """Measure; returns the Markdown."""
    report.require_gpu("bench decode")
    words = arguments.peers.split(",") if arguments.peers else ["cuDNN", "FA2", "FA3", "naive"] if arguments.quick else [""]
    turns = QUICK_TURNS if arguments.quick else TURNS
    found = kept(arguments.json, environment())
    todo = list(jobs(arguments, turns, lambda peer: any(word in peer for word in words)))
    for table, name, job in prefill.progress(todo):
        found.setdefault(table, {})[name] = job()
        prefill.free_memory()
        if arguments.json:  # after each row: what has been measured is kept
            report.write_json(arguments.json, found)
    text = markdown(found)
    if arguments.markdown:
        report.write_markdown(arguments.markdown, MARKER, text)
    return text


def jobs(
    arguments: argparse.Namespace, turns: int, wanted: Callable[[str], bool],
) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Table and row of what is to be measured, and what measures it."""
    for dtype in DTYPES if arguments.dtype == "both" else (arguments.dtype,):
        for shape in SHAPES if "shapes" in arguments.tables else ():
            if arguments.only in shape.name and (not arguments.quick or shape.name in QUICK):
                yield "shapes", f"{dtype} {shape.name}", functools.partial(measure, shape, dtype, turns, wanted)
        for table in decode_more.TABLES.values():
            for case in table.cases if table.name in arguments.tables else ():
                name = f"{dtype} {table.case_name(case)}"
                yield table.name, name, functools.partial(table.measure, case, dtype, turns)


def environment() -> dict[str, Any]:
    """As of `bench prefill`, with a FlashInfer that was unpacked and not installed."""
    found = prefill.environment()
    if importlib.util.find_spec("flashinfer") and "flashinfer-python" not in found["versions"]:
        found["versions"]["flashinfer"] = getattr(importlib.import_module("flashinfer"), "__version__", "unknown")
    return found


def kept(path: Path | None, environment: dict[str, Any]) -> dict[str, Any]:
    """What the file has of this machine, these versions and this commit."""
    before = json.loads(path.read_text()) if path and path.exists() else {}
    return before if before.get("environment") == environment else {"environment": environment}
