"""The ladder naive -> fa1 -> fa2 on one GPU: what each step moves through memory, counted and measured, and how fast it is.

``python -m cuflash bench ladder --json docs/ladder-h200.json --markdown docs/kernels.md``

The kernels take turns (A B C A B C ...) on the same inputs, each replaying a CUDA graph of a few calls (naive: the calls themselves,
which take much longer on the GPU than on the host); outputs are compared first. A ratio is the time of the step before divided by that
of this one in the same turn: its median, and the lower end of a one-sided 95 % confidence interval. Bytes of device memory and
instructions are those of one call that runs under Nsight Compute (``ncu``) where that is installed, in a process of its own.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import device, launch, tiles, tiles_fa1
from . import prefill, report

KERNELS = ("naive", "fa1", "fa2")
CHANGES = {
    "naive": "scores and weights are stored: two matrix products of a library and a softmax between them",
    "fa1": "tiles of keys and an online softmax: scores stay on the chip; the warps of a block share the keys",
    "fa2": "the warps share the rows instead: no partial results between them, and O rescaled only where a maximum grows",
}
TURNS, SECONDS_A_TURN = 11, 4e-3
METRICS = {"dram__bytes_read.sum": "read", "dram__bytes_write.sum": "written", "smsp__inst_executed.sum": "instructions"}
MARKER = "ladder"


@dataclass(frozen=True)
class Shape:
    """Self-attention in bfloat16, layout (B, S, H, D)."""

    causal: bool
    batch: int = 2
    seqlen: int = 4096
    heads: int = 16
    head_dim: int = 128

    @property
    def name(self) -> str:
        return f"B{self.batch} N{self.seqlen} H{self.heads} D{self.head_dim} {'causal' if self.causal else 'full'}"

    @property
    def size(self) -> tuple[int, int, int, int]:
        return self.batch, self.seqlen, self.heads, self.head_dim

    @property
    def pairs(self) -> float:
        """Visible (query, key) pairs; causal counts half of them, as everywhere."""
        return self.batch * self.heads * self.seqlen**2 / (2 if self.causal else 1)

    @property
    def flops(self) -> float:
        return 4.0 * self.pairs * self.head_dim


SHAPES = (Shape(False), Shape(True))


# ---- counted ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """Bytes of one call by the kernel's own plan. ``l2`` and ``shared`` are None where a library plans."""

    memory: int  # device memory, each array once as often as it is stored or read as a whole
    l2: int | None = None  # from the L2 cache to the multiprocessors and back
    shared: int | None = None  # through shared memory, written and read


def counted(shape: Shape, kernel: str, info: device.DeviceInfo) -> Counted:
    """What one call moves."""
    batch, n, heads, d = shape.size
    pairs_of_heads = batch * heads
    row = 2 * d  # bytes of a row of q, k, v or out
    arrays = pairs_of_heads * 4 * n * row
    if kernel == "naive":  # float32 scores written and read, then weights of 16 bits in their place; for all pairs, causal or not
        return Counted(arrays + pairs_of_heads * n * n * (4 + 4 + 2 + 2))
    tile: Any = tile_of(shape, kernel, info)
    reach = [min(n, first + tile.m) if shape.causal else n for first in range(0, n, tile.m)]  # keys that a block of rows sees
    steps = sum(-(-keys // tile.n) for keys in reach)
    copies = 2 * tile.n * row  # of keys and values, in one step of a block
    if kernel == "fa1":
        queries, keys_and_values = tile.warps * tile.m * row, copies  # every warp has all rows, and its share of the keys
        between_warps = 2 * tile.warps * tile.m * 4 * d  # partial results, written and read
    else:
        queries, keys_and_values = tile.groups * tile.m * row * (not tile.q_registers), tile.warps // tile.groups * copies
        between_warps = (1 + tile.groups) * 2 * tile.m * tile.n if tile.groups > 1 else 0  # weights
    step = copies + queries + keys_and_values + between_warps
    return Counted(arrays, pairs_of_heads * (steps * copies + 2 * n * row), pairs_of_heads * steps * step)


def tile_of(shape: Shape, kernel: str, info: device.DeviceInfo) -> Any:
    """The tile that the kernel takes for contiguous arrays."""
    d = tiles.head_class(shape.head_dim)
    tile = tiles_fa1.prefill_fa1(d, d, info) if kernel == "fa1" else tiles.prefill_fa2(d, d, shape.causal, False, info)
    assert tile is not None
    return tile


# ---- measured ---------------------------------------------------------------------------------------------------------


def inputs(shape: Shape) -> tuple[Any, Any, Any]:
    """Random q, k and v."""
    import cupy

    rng = cupy.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape.size, np.float32).astype(prefill.BF16) for _ in range(3))
    return q, k, v


def measure(shape: Shape) -> dict[str, dict[str, Any]]:
    """Compare the kernels with one another, then time them in turns."""
    arrays = inputs(shape)
    calls = {kernel: prefill.ours(kernel)(arrays, shape.causal) for kernel in KERNELS}
    results = {kernel: call().astype(np.float32) for kernel, call in calls.items()}
    largest = float(abs(results["fa2"]).max())
    for kernel, result in results.items():
        error = float(abs(result - results["fa2"]).max())
        if not error <= prefill.TOLERANCE * largest:
            raise RuntimeError(f"{kernel} and fa2 differ by {error} on {shape.name}")
    del results
    timed = {}
    for kernel, call in calls.items():
        eager = kernel == "naive"  # calls cuBLAS through CuPy, which cannot be captured
        once = prefill.Timed(call, 1, eager=eager)
        copies = 2 if eager else max(1, min(40, int(SECONDS_A_TURN / min(once.seconds() for _ in range(3)))))
        timed[kernel] = prefill.Timed(call, copies, eager=eager)
        timed[kernel].seconds()
    turns = [{kernel: own.seconds() for kernel, own in timed.items()} for _ in range(TURNS)]
    found: dict[str, dict[str, Any]] = {}
    for before, kernel in zip((None, *KERNELS), KERNELS, strict=False):
        ms = 1e3 * float(np.median([turn[kernel] for turn in turns]))
        found[kernel] = {"ms": ms, "tflops": shape.flops / ms / 1e9}
        if before is not None:
            ratios = [turn[before] / turn[kernel] for turn in turns]
            found[kernel] |= {"ratio": float(np.median(ratios)), "lower": report.lower_bound(ratios)}
    return found


def profiler() -> str | None:
    """Path of Nsight Compute's command, or None."""
    places = sorted((str(path) for path in Path("/usr/local").glob("cuda*/bin/ncu")), reverse=True)
    return shutil.which("ncu") or next(iter(places), None)


def profiled(program: str, shape: Shape, kernel: str) -> dict[str, float] | str:
    """The METRICS of one call, summed over its kernels; or in words why there are none."""
    command = [
        program, "--clock-control", "none", "--profile-from-start", "off", "--metrics", ",".join(METRICS), "--csv", "--print-units", "base",
        sys.executable, "-m", "cuflash", "bench", "ladder", "--only", shape.name, "--one-call", kernel,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"ncu does not run: {error}"
    found = sums(done.stdout)
    if set(found) == set(METRICS.values()):
        return found
    complaints = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line] or ["it printed no figures"]
    return f"ncu measured nothing: {complaints[0].removeprefix('==ERROR== ')}"


def sums(text: str) -> dict[str, float]:
    """Sums of the METRICS over all kernels, from what ncu prints as CSV between lines of its own and of the program."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, float] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        name = METRICS.get(row.get("Metric Name") or "")
        if name is not None:
            found[name] = found.get(name, 0.0) + float(row["Metric Value"].replace(",", ""))
    return found


def one_call(shape: Shape, kernel: str) -> str:
    """What the profiler watches: one call, after one that compiles."""
    import cupy
    from cupyx.profiler import profile

    call = prefill.ours(kernel)(inputs(shape), shape.causal)
    call()
    cupy.cuda.Device().synchronize()
    with profile():
        call()
        cupy.cuda.Device().synchronize()
    return f"{kernel} has run once"


# ---- the table --------------------------------------------------------------------------------------------------------


def cells(name: str, kernel: str, r: dict[str, Any]) -> dict[str, str]:
    """A line of the table by the names of its columns: "" was not measured, "-" does not exist."""
    shape = next(shape for shape in SHAPES if shape.name == name)
    count = r["counted"]
    line = {
        "call": name, "kernel": kernel, "what changed": CHANGES[kernel],
        "memory MB, counted": megabytes(count["memory"]),
        "memory MB, measured (read + written)": megabytes(r["read"] + r["written"]) if "read" in r else "",
        "L2 MB, counted": megabytes(count["l2"]),
        "shared memory, bytes a pair, counted": f"{count['shared'] / shape.pairs:.0f}" if count["shared"] else "-",
        "issue slots a pair, measured": f"{r['instructions'] / shape.pairs:.2f}" if "instructions" in r else "",
        "ms": f"{r['ms']:.3f}" if "ms" in r else "",
        "TFLOP/s": f"{r['tflops']:.0f}" if "ms" in r else "",
        "step before / this (lower bound)": f"{r['ratio']:.2f} ({r['lower']:.2f})" if "ratio" in r else "-" if "ms" in r else "",
    }
    return line


def megabytes(count: float | None) -> str:
    """In millions of bytes."""
    return "-" if count is None else f"{count / 1e6:,.0f}"


def markdown(found: dict[str, Any]) -> str:
    """The table of docs/kernels.md."""
    rows = [cells(name, kernel, r) for name, kernels in found["results"].items() for kernel, r in kernels.items()]
    header = [column for column in rows[0] if any(row[column] for row in rows)]  # what nobody has measured is left out
    lines = [found["heading"], "", *report.markdown_table(header, ([row[column] or "-" for column in header] for row in rows))]
    if found.get("profiler"):
        lines += ["", found["profiler"]]
    return "\n".join(lines) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--markdown", type=Path, help="write the table here, between marker lines if there are any")
    parser.add_argument("--only", default="", help="calls whose name contains this: full or causal")
    parser.add_argument("--counted", action="store_true", help="what can be counted, for an H200; needs no GPU")
    parser.add_argument("--one-call", choices=KERNELS, metavar="KERNEL", help="call a kernel once, for a profiler, and measure nothing")


def run(arguments: argparse.Namespace) -> str:
    """Measure; returns the Markdown."""
    shapes = [shape for shape in SHAPES if arguments.only in shape.name]
    if not shapes:
        raise ValueError(f"--only: got {arguments.only!r}, which none of {', '.join(repr(shape.name) for shape in SHAPES)} contains")
    if not arguments.counted:
        report.require_gpu("bench ladder", "; --counted needs neither")
    if arguments.one_call:
        return "\n".join(one_call(shape, arguments.one_call) for shape in shapes)
    info = device.KNOWN["H200"] if arguments.counted else device.probe(launch.device_getter()())
    found: dict[str, Any] = {
        "results": {
            shape.name: {kernel: {"counted": vars(counted(shape, kernel, info))} for kernel in KERNELS} for shape in shapes
        }
    }
    if arguments.counted:
        found["heading"] = f"Counted for {info.name}; nothing is measured."
    else:
        found["environment"] = prefill.environment()
        found["heading"] = prefill.heading(found["environment"])
        measure_all(found, shapes)
    if arguments.json:
        report.write_json(arguments.json, found)
    text = markdown(found)
    if arguments.markdown:
        report.write_markdown(arguments.markdown, MARKER, text)
    return text


def measure_all(found: dict[str, Any], shapes: list[Shape]) -> None:
    """Times, and where Nsight Compute is there, bytes and instructions."""
    program = profiler()
    if program is None:
        found["profiler"] = "Bytes and instructions were not measured: ncu is not installed."
    for shape in prefill.progress(shapes):
        for kernel, figures in measure(shape).items():
            found["results"][shape.name][kernel] |= figures
        prefill.free_memory()
        for kernel in KERNELS:
            if program is None:
                break
            totals = profiled(program, shape, kernel)
            if isinstance(totals, str):
                found["profiler"] = f"Bytes and instructions were not measured: {totals}"
                program = None
            else:
                found["results"][shape.name][kernel] |= totals
