"""The ladder naive -> fa1 -> fa2 -> fa3 on one GPU: what each step moves through memory, counted and measured, and how fast it is.

``python -m cuflash bench ladder --json docs/ladder-h200.json --markdown docs/kernels.md``

The kernels take turns on the same inputs, in an order by chance, each replaying a CUDA graph of a few calls (naive: the calls themselves,
which take much longer on the GPU than on the host); outputs are compared first. A ratio is the time of the step before divided by that
of this one in the same turn: its median, and the lower end of a one-sided 95 % confidence interval. Bytes, instructions and what the
tensor cores and the warps did are those of one call that runs under Nsight Compute (``ncu``) where that is installed, in a process of
its own. fa3 is a kernel for Hopper alone: on other GPUs the ladder ends with fa2.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import device, launch
from ..backends import cuda
from ..problem import build_attention
from . import peers, prefill, report

KERNELS = ("naive", "fa1", "fa2", "fa3")
CHANGES = {
    "naive": "scores and weights are stored: two matrix products of a library and a softmax between them",
    "fa1": "tiles of keys and an online softmax: scores stay on the chip; the warps of a block share the keys",
    "fa2": "the warps share the rows instead: no partial results between them, and O rescaled only where a maximum grows",
    "fa3": "copies (TMA) and products (wgmma, from shared memory) run on their own: one group's softmax beside the other's products",
}
TURNS, SECONDS_A_TURN = 11, 4e-3
METRICS = {
    "dram__bytes_read.sum": "read", "dram__bytes_write.sum": "written", "smsp__inst_executed.sum": "instructions",
    "l1tex__m_xbar2l1tex_read_bytes.sum": "l2_read",
}
# Of a kernel: the share of the time in which the tensor cores work, in percent, and warps that wait, for each instruction that is issued.
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
STALLS = {
    f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio": reason.replace("_", " ")
    for reason in (
        "barrier", "branch_resolving", "dispatch_stall", "gmma", "long_scoreboard", "math_pipe_throttle", "mio_throttle", "no_instruction",
        "not_selected", "short_scoreboard", "sleeping", "wait",
    )
}
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
    elif kernel == "fa3":
        queries, keys_and_values = tile.m * row, tile.m // 64 * copies  # read by the tensor cores, once for 64 rows
        between_warps = 0
    else:
        queries, keys_and_values = tile.groups * tile.m * row * (not tile.q_registers), tile.warps // tile.groups * copies
        between_warps = (1 + tile.groups) * 2 * tile.m * tile.n if tile.groups > 1 else 0  # weights
    step = copies + queries + keys_and_values + between_warps
    return Counted(arrays, pairs_of_heads * (steps * copies + 2 * n * row), pairs_of_heads * steps * step)


def tile_of(shape: Shape, kernel: str, info: device.DeviceInfo) -> Any:
    """The tile that the kernel takes for contiguous arrays."""
    q = np.empty(shape.size, peers.BF16)
    chosen = cuda.instance(build_attention(q, q, q, causal=shape.causal), info, kernel)
    assert chosen is not None
    return chosen.tile


def kernels_of(info: device.DeviceInfo) -> tuple[str, ...]:
    """Those that the GPU runs."""
    return KERNELS if info.cc == (9, 0) else KERNELS[:-1]


# ---- measured ---------------------------------------------------------------------------------------------------------


def inputs(shape: Shape) -> tuple[Any, Any, Any]:
    """Random q, k and v."""
    import cupy

    rng = cupy.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape.size, np.float32).astype(peers.BF16) for _ in range(3))
    return q, k, v


def measure(shape: Shape, kernels: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Compare the kernels with one another, then time them in turns."""
    arrays = inputs(shape)
    calls = {kernel: peers.ours(kernel)(arrays, shape.causal) for kernel in kernels}
    expected = calls["fa2"]().astype(np.float32)
    for call in calls.values():
        prefill.check(call, expected)
    del expected
    timed = {}
    for kernel, call in calls.items():
        eager = kernel == "naive"  # calls cuBLAS through CuPy, which cannot be captured
        once = prefill.Timed(call, 1, eager=eager)
        copies = 2 if eager else max(1, min(40, int(SECONDS_A_TURN / min(once.seconds() for _ in range(3)))))
        timed[kernel] = prefill.Timed(call, copies, eager=eager)
    times = prefill.take_turns(timed, TURNS)
    found = {kernel: prefill.speed(shape.flops, seconds) for kernel, seconds in times.items()}
    for before, kernel in itertools.pairwise(kernels):
        found[kernel] |= report.ratio(times[before], times[kernel])
    return found


def profiler() -> str | None:
    """Path of Nsight Compute's command, or None."""
    places = sorted((str(path) for path in Path("/usr/local").glob("cuda*/bin/ncu")), reverse=True)
    return shutil.which("ncu") or next(iter(places), None)


def profiled(program: str, shape: Shape, kernel: str) -> dict[str, Any] | str:
    """What figures() reads of one call; or in words why there is nothing."""
    metrics = ",".join((*METRICS, TENSOR, *STALLS))
    command = [
        program, "--clock-control", "none", "--profile-from-start", "off", "--metrics", metrics, "--csv", "--print-units", "base",
        sys.executable, "-m", "cuflash", "bench", "ladder", "--only", shape.name, "--one-call", kernel,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"ncu does not run: {error}"
    found = figures(done.stdout)
    if set(METRICS.values()) <= set(found):
        return found
    complaints = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line] or ["it printed no figures"]
    return f"ncu measured nothing: {complaints[0].removeprefix('==ERROR== ')}"


def figures(text: str) -> dict[str, Any]:
    """Sums of the METRICS over all kernels, from what ncu prints as CSV between lines of its own and of the program.

    Where it was one kernel, its ``tensor`` and ``stalls`` as well, which cannot be added up.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, Any] = {}
    stalls: dict[str, float] = {}
    kernels = set()
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        metric, number = row.get("Metric Name") or "", (row.get("Metric Value") or "").replace(",", "")
        if not re.fullmatch(r"[0-9.e+-]+", number):  # "n/a", or a line of the program
            continue
        kernels.add(row["ID"])
        if metric in METRICS:
            found[METRICS[metric]] = found.get(METRICS[metric], 0.0) + float(number)
        elif metric == TENSOR:
            found["tensor"] = float(number)
        elif metric in STALLS:
            stalls[STALLS[metric]] = float(number)
    if len(kernels) != 1:
        found.pop("tensor", None)
    elif stalls:
        found["stalls"] = stalls
    return found


def one_call(shape: Shape, kernel: str) -> str:
    """What the profiler watches: one call, after one that compiles."""
    import cupy
    from cupyx.profiler import profile

    call = peers.ours(kernel)(inputs(shape), shape.causal)
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
        "L2 MB, measured (read)": megabytes(r["l2_read"]) if "l2_read" in r else "",
        "shared memory, bytes a pair, counted": f"{count['shared'] / shape.pairs:.0f}" if count["shared"] else "-",
        "issue slots a pair, measured": f"{r['instructions'] / shape.pairs:.2f}" if "instructions" in r else "",
        "tensor cores at work, %": f"{r['tensor']:.0f}" if "tensor" in r else "",
        "warps that wait, for each instruction": ", ".join(f"{reason} {n:.1f}" for reason, n in most(r.get("stalls", {}))),
        "ms": f"{r['ms']:.3f}" if "ms" in r else "",
        "TFLOP/s": f"{r['tflops']:.0f}" if "ms" in r else "",
        "step before / this (lower bound)": f"{r['ratio']:.2f} ({r['lower']:.2f})" if "ratio" in r else "-" if "ms" in r else "",
    }
    return line


def most(stalls: dict[str, float]) -> list[tuple[str, float]]:
    """The four largest."""
    return sorted(stalls.items(), key=lambda item: -item[1])[:4]


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
            shape.name: {kernel: {"counted": vars(counted(shape, kernel, info))} for kernel in kernels_of(info)} for shape in shapes
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
        of_shape = found["results"][shape.name]
        for kernel, times in measure(shape, tuple(of_shape)).items():
            of_shape[kernel] |= times
        prefill.free_memory()
        for kernel in of_shape:
            if program is None:
                break
            counters = profiled(program, shape, kernel)
            if isinstance(counters, str):
                found["profiler"] = f"Bytes and instructions were not measured: {counters}"
                program = None
            else:
                of_shape[kernel] |= counters
