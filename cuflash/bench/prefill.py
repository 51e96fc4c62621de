"""Prefill on one GPU beside whatever peers are importable: PyTorch's FlashAttention-2, cuDNN and math, FlashAttention-3, and our naive.

``python -m cuflash bench prefill --kernel fa3 --dtype both --json docs/prefill-fa3-h200.json --markdown docs/performance.md``

cuflash and the peers take turns on the same inputs, in an order by chance, each replaying a CUDA graph of a few calls, so that host time
stays out (but for our naive kernel, whose calls take much longer on the GPU than on the host); outputs are compared first. Peers that
store the scores take turns with cuflash alone. A ratio is the peer's time divided by cuflash's in the same turn, for the best peer the
smallest time of all that store no scores: what counts is its median and the lower end of a one-sided 95 % confidence interval of that
median. TFLOP/s count useful work, half of it when causal. Errors against float64 come along (accuracy.py).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

import cuflash

from . import accuracy, report
from .peers import DTYPES, Arrays, Call, Peer, as_cupy, importable, materialises, ours

TOKENS, WIDTH = 16384, 2048  # of every case: batch * length, heads * head size
HEAD_SIZES, LENGTHS = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)
TURNS = 11
SECONDS_A_TURN = 4e-3
MOST_NAIVE_BYTES = 64 << 30  # scores that a materialising peer may need
PACKAGES = ("cuflash", "numpy", "torch", "nvidia-cudnn-cu13", "flash-attn-3", "fa3-fwd", "flashinfer-python")


@dataclass(frozen=True)
class Shape:
    """Self-attention of equal lengths, layout (B, S, H, D)."""

    head_dim: int
    seqlen: int
    causal: bool
    dtype: str = "bfloat16"

    @property
    def batch(self) -> int:
        return TOKENS // self.seqlen

    @property
    def heads(self) -> int:
        return WIDTH // self.head_dim

    @property
    def flops(self) -> float:
        return 4.0 * self.batch * self.heads * self.seqlen**2 * self.head_dim / (2 if self.causal else 1)

    @property
    def scores(self) -> int:
        return self.batch * self.heads * self.seqlen**2

    @property
    def name(self) -> str:
        return f"{self.dtype} D{self.head_dim} N{self.seqlen} {'causal' if self.causal else 'full'}"

    def inputs(self) -> Arrays:
        """Random q, k and v."""
        import cupy

        rng = cupy.random.default_rng(1)
        size = (self.batch, self.seqlen, self.heads, self.head_dim)
        q, k, v = (rng.standard_normal(size, np.float32).astype(DTYPES[self.dtype]) for _ in range(3))
        return q, k, v


T = TypeVar("T")


def cases(only: str = "", dtypes: Iterable[str] = ("bfloat16",)) -> Iterator[Shape]:
    """The shapes whose name contains ``only``."""
    for dtype, d, n, causal in itertools.product(dtypes, HEAD_SIZES, LENGTHS, (False, True)):
        shape = Shape(d, n, causal, dtype)
        if only in shape.name:
            yield shape


def tolerance(dtype: np.dtype) -> float:
    """Largest difference of two results that are both right, relative to the largest element."""
    return 2 * float(ml_dtypes.finfo(dtype).eps)


class Timed:
    """Some calls in a row on a stream of its own: a CUDA graph, captured by the library that makes them, or (``eager``) as they are."""

    def __init__(self, call: Call, copies: int, of_torch: bool = False, eager: bool = False):
        import cupy

        self.stream, self.calls = cupy.cuda.Stream(non_blocking=True), [call] * copies
        self.graph: Any = None
        self.of_torch = of_torch
        with self.stream:
            call()
        cupy.cuda.Device().synchronize()
        if of_torch:
            torch = importlib.import_module("torch")
            call()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            gc.disable()  # a graph of before that is destroyed during the capture would end it
            try:
                with torch.cuda.graph(self.graph):
                    self.kept = [call() for call in self.calls]
            finally:
                gc.enable()
        elif not eager:
            with self.stream:
                self.stream.begin_capture()
                for call in self.calls:
                    call()
                self.graph = self.stream.end_capture()

    def start(self) -> None:
        """Put the calls into the stream."""
        if self.graph is None:
            with self.stream:
                for call in self.calls:
                    call()
        elif self.of_torch:
            torch = importlib.import_module("torch")
            with torch.cuda.stream(torch.cuda.ExternalStream(self.stream.ptr)):
                self.graph.replay()
        else:
            self.graph.launch(self.stream)

    def seconds(self) -> float:
        """Time of one call, from all of them."""
        import cupy

        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(self.stream)
        self.start()
        end.record(self.stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3 / len(self.calls)


def take_turns(sides: dict[T, Timed], turns: int) -> dict[T, np.ndarray]:
    """Seconds of a call, (turns,) for each side: all of them in each turn, in an order by chance.

    What is measured comes after as much of the same: the clock follows what has run before.
    """
    rng, names = np.random.default_rng(0), list(sides)
    found: dict[T, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for n in rng.permutation(len(names)):
            side = sides[names[n]]
            side.start()
            found[names[n]].append(side.seconds())
    return {name: np.array(seconds) for name, seconds in found.items()}


def measure(shape: Shape, kernel: str, peers: dict[str, Peer]) -> dict[str, Any]:
    """Compare, then time, one shape against every peer."""
    arrays = shape.inputs()
    call = ours(kernel)(arrays, shape.causal)
    expected = call().astype(np.float32)
    once = Timed(call, 1)
    copies = max(1, min(40, int(SECONDS_A_TURN / min(once.seconds() for _ in range(3)))))
    own = Timed(call, copies)
    row: dict[str, Any] = {"kernel": cuflash.plan(*arrays, causal=shape.causal, kernel=kernel, backend="cuda").kernel}
    row |= {"peers": {}, "failed": {}}
    fits = {name: peer for name, peer in peers.items() if not materialises(name) or shape.scores * 6 <= MOST_NAIVE_BYTES}
    together = [name for name in fits if not materialises(name)]
    own_times: list[float] = []
    for names in [together, *([name] for name in fits if materialises(name))]:
        sides: dict[str, Timed] = {}
        for name in names:
            try:
                peer = fits[name](arrays, shape.causal)
                check(peer, expected)
            except Exception as error:  # a peer that does not take the call, or is wrong, is no reason to measure nothing
                row["failed"][name] = refusal(error)
                continue
            of_cuflash = name.endswith("(cuflash)")  # its naive kernel calls cuBLAS through CuPy, which cannot be captured
            sides[name] = Timed(peer, 2 if materialises(name) else copies, not of_cuflash, of_cuflash)
        if names and not sides and not any(name in row["peers"] for name in fits):
            raise RuntimeError(f"{shape.name}: no peer gives what cuflash does: {row['failed']}")
        times = take_turns(sides | {"cuflash": own}, TURNS)
        mine = times.pop("cuflash")
        own_times += list(mine)
        for name, theirs in times.items():
            row["peers"][name] = speed(shape.flops, theirs) | report.ratio(theirs, mine)
        if names is together and times:
            row["best"] = report.ratio(np.minimum.reduce(list(times.values())), mine)
        del sides
        free_memory()
    return row | speed(shape.flops, own_times) | {"clock_mhz": clock_under(own)}


def speed(flops: float, seconds: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Median time, and useful work in that time."""
    ms = 1e3 * float(np.median(seconds))
    return {"ms": ms, "tflops": flops / ms / 1e9}


def check(call: Call, expected: Any) -> None:
    """Raise RuntimeError unless a call gives these values (float32), within what rounding explains."""
    result = as_cupy(call())
    difference = float(abs(result.astype(np.float32) - expected).max() / abs(expected).max())
    if not difference <= tolerance(result.dtype):
        raise RuntimeError(f"it differs from cuflash by {difference:.2g} of the largest element")


def refusal(error: Exception) -> str:
    """Why a peer does not take a call, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def clock_under(load: Timed) -> int | None:
    """The multiprocessors' clock in MHz while some calls run; None where nvidia-smi does not tell it."""
    text = nvidia_smi("clocks.sm", load.seconds)
    return int(text) if text.isdigit() else None


def nvidia_smi(what: str, meanwhile: Callable[[], Any] = lambda: None) -> str:
    """What nvidia-smi tells of CuPy's current device, while something runs over and over; "" where it does not tell it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    import cupy

    device = cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.Device().id)
    query = [program, f"--id={device}", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        while process.poll() is None:
            meanwhile()
        return process.stdout.read().strip() if process.stdout else ""


def free_memory() -> None:
    """Give both libraries' pools back, so that the next peer finds the memory."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def environment() -> dict[str, Any]:
    """Card, driver, CUDA, versions and commit."""
    import cupy
    from cupy_backends.cuda.libs import nvrtc

    runtime = cupy.cuda.runtime
    name = runtime.getDeviceProperties(runtime.getDevice())["name"]
    return {
        "card": name.decode() if isinstance(name, bytes) else name,
        "driver": nvidia_smi("driver_version"),
        "driver_cuda": runtime.driverGetVersion(),
        "runtime_cuda": runtime.runtimeGetVersion(),
        "commit": report.commit(),
        # As loaded: packages for several versions of CUDA may be installed side by side.
        "versions": report.versions(PACKAGES) | {"CuPy": cupy.__version__, "NVRTC": ".".join(map(str, nvrtc.getVersion()))},
    }


def summary(results: dict[str, Any]) -> dict[str, float]:
    """Geometric mean and smallest ratio against each peer, for each dtype."""
    figures: dict[str, float] = {}
    clocks = [r["clock_mhz"] for r in results.values() if r.get("clock_mhz")]
    if clocks:
        figures |= {"clock under cuflash, smallest, MHz": min(clocks), "clock under cuflash, largest, MHz": max(clocks)}
    for dtype in DTYPES:
        of_dtype = {name: r for name, r in results.items() if name.startswith(dtype)}
        peers = dict.fromkeys(peer for r in of_dtype.values() for peer in r["peers"])
        for peer in ("best peer", *peers):
            rows = {name: r.get("best") if peer == "best peer" else r["peers"].get(peer) for name, r in of_dtype.items()}
            found = {name: row for name, row in rows.items() if row}
            if not found:
                continue
            what, worst = f"{dtype}, {peer} / cuflash", min(found, key=lambda name: found[name]["ratio"])
            figures[f"{what}, geometric mean of {len(found)}"] = report.geometric_mean(row["ratio"] for row in found.values())
            figures[f"{what}, smallest ({worst.removeprefix(dtype).strip()})"] = found[worst]["ratio"]
            figures[f"{what}, smallest lower bound"] = min(row["lower"] for row in found.values())
    return figures


def heading(env: dict[str, Any]) -> str:
    """The environment in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    driver = f"driver {env['driver']}, " if env.get("driver") else ""
    cuda = f"{driver}CUDA {env['driver_cuda']} (driver) and {env['runtime_cuda']}"
    return f"{env['card']}, {cuda}; {versions}; commit {env['commit'] or 'unknown'}."


def markdown(found: dict[str, Any]) -> str:
    """The tables of docs/performance.md."""
    env, results = found["environment"], found["results"]
    peers = list(dict.fromkeys(peer for r in results.values() for peer in r["peers"]))
    header = ["case", "cuflash TFLOP/s", *(f"{peer} TFLOP/s: its time / ours (lower bound)" for peer in peers)]
    rows = []
    for name, r in results.items():
        cells = [r["peers"].get(peer) for peer in peers]
        rows.append([name, f"{r['tflops']:.0f}", *(f"{p['tflops']:.0f}: {p['ratio']:.2f} ({p['lower']:.2f})" if p else "-" for p in cells)])
    lines = [heading(env), ""]
    lines += report.markdown_table(header, rows)
    lines += ["", *report.markdown_table(("figure", "value"), ((name, f"{value:.4g}") for name, value in summary(results).items()))]
    failed = {(peer, name.split()[0], why): None for name, r in results.items() for peer, why in r.get("failed", {}).items()}
    if failed:
        lines += ["", f"Not measured: {'; '.join(f'{peer} in {dtype} ({why})' for peer, dtype, why in failed)}."]
    if "accuracy" in found:
        lines += ["", *accuracy.markdown(found["accuracy"])]
    return "\n".join(lines) + "\n"


def progress(what: list[T]) -> Iterable[T]:
    """A progress bar where tqdm is installed."""
    if importlib.util.find_spec("tqdm"):
        return importlib.import_module("tqdm").tqdm(what)
    return what


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--markdown", type=Path, help="write the tables here, between marker lines if there are any")
    parser.add_argument("--only", default="", help="cases whose name contains this, such as 'D128 N4096'")
    parser.add_argument("--kernel", default="auto", help="the kernel of cuflash's cuda backend (default: what it takes for each call)")
    parser.add_argument("--dtype", default="bfloat16", choices=(*DTYPES, "both"), help="of the arrays")
    parser.add_argument("--peers", help="names that contain one of these words, separated by commas (default: all)")


def run(arguments: argparse.Namespace) -> str:
    """Measure; returns the Markdown."""
    report.require_gpu("bench prefill")
    words = arguments.peers.split(",") if arguments.peers else [""]
    peers = {name: peer for name, peer in importable().items() if any(word in name for word in words)}
    dtypes = tuple(DTYPES) if arguments.dtype == "both" else (arguments.dtype,)
    found: dict[str, Any] = {"environment": environment(), "results": {}}
    if not arguments.only:
        found["accuracy"] = accuracy.measure(arguments.kernel, peers, dtypes)
    for shape in progress(list(cases(arguments.only, dtypes))):
        found["results"][shape.name] = measure(shape, arguments.kernel, peers)
        found["summary"] = summary(found["results"])
        if arguments.json:  # after each shape: what has been measured is kept
            report.write_json(arguments.json, found)
    text = markdown(found)
    if arguments.markdown:
        report.write_markdown(arguments.markdown, marker(found["results"]), text)
    return text


def marker(results: dict[str, Any]) -> str:
    """The name of the tables in a document: each kernel has its own."""
    return f"prefill tables of {'/'.join(sorted({r['kernel'] for r in results.values()}))}"
