"""Prefill on one GPU beside whatever peers are importable: PyTorch's FlashAttention-2, cuDNN and math, FlashAttention-3, and our naive.

``python -m cuflash bench prefill --json docs/prefill-h200.json --markdown docs/performance.md``

cuflash and a peer take turns on the same inputs (A B A B ...), each replaying a CUDA graph of a few calls, so that host time
stays out (but for our naive kernel, whose calls take much longer on the GPU than on the host); outputs are compared first. A ratio
is the peer's time divided by cuflash's in the same turn: what counts is its median and the lower end of a one-sided 95 %
confidence interval of that median. TFLOP/s count useful work, half of it when causal.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

import cuflash

from . import report

BF16 = np.dtype(ml_dtypes.bfloat16)
TOKENS, WIDTH = 16384, 2048  # of every case: batch * length, heads * head size
HEAD_SIZES, LENGTHS = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)
TURNS = 11
TOLERANCE = 2.0**-6  # of two results in bfloat16, relative to the largest element
SECONDS_A_TURN = 4e-3
MOST_NAIVE_BYTES = 64 << 30  # scores that a materialising peer may need
MARKER = "prefill tables"
PACKAGES = ("cuflash", "numpy", "torch", "nvidia-cudnn-cu13", "flash-attn-3", "fa3-fwd", "flashinfer-python")


@dataclass(frozen=True)
class Shape:
    """Self-attention of equal lengths in bfloat16, layout (B, S, H, D)."""

    head_dim: int
    seqlen: int
    causal: bool

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
        return f"D{self.head_dim} N{self.seqlen} {'causal' if self.causal else 'full'}"


T = TypeVar("T")
Arrays = tuple[Any, Any, Any]  # q, k, v as CuPy arrays
Call = Callable[[], Any]  # returns the output as an array with DLPack, (B, S, H, D)
Peer = Callable[[Arrays, bool], Call]


def cases(only: str = "") -> Iterator[Shape]:
    """The shapes whose name contains ``only``."""
    for d in HEAD_SIZES:
        for n in LENGTHS:
            for causal in (False, True):
                shape = Shape(d, n, causal)
                if only in shape.name:
                    yield shape


def ours(kernel: str) -> Peer:
    """A kernel of cuflash's cuda backend."""

    def prepare(arrays: Arrays, causal: bool) -> Call:
        import cupy

        out = cupy.empty_like(arrays[0])

        def call() -> Any:
            return cuflash.attention(*arrays, causal=causal, kernel=kernel, backend="cuda", out=out)

        return call

    return prepare


def torch_sdpa(backend: str) -> Peer:
    """One of PyTorch's engines behind scaled_dot_product_attention."""

    def prepare(arrays: Arrays, causal: bool) -> Call:
        torch = importlib.import_module("torch")
        attention = importlib.import_module("torch.nn.attention")
        q, k, v = (as_torch(a).transpose(1, 2) for a in arrays)

        def call() -> Any:
            with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)), torch.no_grad():
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
            return out.transpose(1, 2)

        return call

    return prepare


def flash_attention_3(arrays: Arrays, causal: bool) -> Call:
    module = importlib.import_module(_fa3_module() or "fa3_fwd_interface")
    q, k, v = map(as_torch, arrays)

    def call() -> Any:
        out = module.flash_attn_func(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return call


def _fa3_module() -> str | None:
    return next((name for name in ("fa3_fwd_interface", "flash_attn_interface") if importlib.util.find_spec(name)), None)


def as_torch(a: Any) -> Any:
    """The same memory as a PyTorch tensor of float16 or bfloat16."""
    torch = importlib.import_module("torch")
    return torch.from_dlpack(a.view(np.int16)).view(getattr(torch, a.dtype.name))


def from_torch(tensor: Any, dtype: np.dtype) -> Any:
    """A tensor of 16-bit numbers as a CuPy array."""
    import cupy

    return cupy.from_dlpack(tensor.contiguous().view(importlib.import_module("torch").int16)).view(dtype)


def importable_peers() -> dict[str, Peer]:
    """Peers that this machine has, the naive kernel of cuflash among them."""
    peers: dict[str, Peer] = {}
    if importlib.util.find_spec("torch"):
        peers["FA2 (PyTorch)"] = torch_sdpa("FLASH_ATTENTION")
        peers["cuDNN (PyTorch)"] = torch_sdpa("CUDNN_ATTENTION")
        peers["math (PyTorch)"] = torch_sdpa("MATH")
        if _fa3_module():
            peers["FA3"] = flash_attention_3
    peers["naive (cuflash)"] = ours("naive")
    return peers


def materialises(peer: str) -> bool:
    """Whether a peer stores the scores."""
    return peer.startswith(("math", "naive"))


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
            gc.collect()  # a graph of before that is destroyed during the capture would end it
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.kept = [call() for call in self.calls]
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


def measure(shape: Shape, kernel: str, peers: dict[str, Peer]) -> dict[str, Any]:
    """Compare, then time, one shape against every peer."""
    import cupy

    rng = cupy.random.default_rng(1)
    size = (shape.batch, shape.seqlen, shape.heads, shape.head_dim)
    arrays = tuple(rng.standard_normal(size, np.float32).astype(BF16) for _ in range(3))
    call = ours(kernel)(arrays, shape.causal)
    expected = call().astype(np.float32)
    largest = float(abs(expected).max())
    once = Timed(call, 1)
    copies = max(1, min(40, int(SECONDS_A_TURN / min(once.seconds() for _ in range(3)))))
    own = Timed(call, copies)
    found: dict[str, Any] = {}
    times: list[float] = []
    for name, prepare in peers.items():
        if materialises(name) and shape.scores * 6 > MOST_NAIVE_BYTES:
            continue
        peer = prepare(arrays, shape.causal)
        result = peer()
        found_out = result if isinstance(result, cupy.ndarray) else from_torch(result, BF16)
        error = float(abs(found_out.astype(np.float32) - expected).max())
        if not error <= TOLERANCE * largest:
            raise RuntimeError(f"{name} and cuflash differ by {error} on {shape.name}")
        del result, found_out
        of_cuflash = name.endswith("(cuflash)")  # its naive kernel calls cuBLAS through CuPy, which cannot be captured
        theirs = Timed(peer, 2 if materialises(name) else copies, not of_cuflash, of_cuflash)
        theirs.seconds(), own.seconds()
        pairs = [(theirs.seconds(), own.seconds()) for _ in range(TURNS)]
        times += [b for _, b in pairs]
        ratios = [a / b for a, b in pairs]
        ms = 1e3 * float(np.median([a for a, _ in pairs]))
        found[name] = {"ms": ms, "tflops": shape.flops / ms / 1e9, "ratio": float(np.median(ratios)), "lower": report.lower_bound(ratios)}
        del theirs, peer
        free_memory()
    ms = 1e3 * float(np.median(times or [own.seconds() for _ in range(TURNS)]))
    return {"ms": ms, "tflops": shape.flops / ms / 1e9, "kernel": kernel, "clock_mhz": clock_under(own), "peers": found}


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
    """Geometric mean and smallest ratio against each peer."""
    figures: dict[str, float] = {}
    clocks = [r["clock_mhz"] for r in results.values() if r.get("clock_mhz")]
    if clocks:
        figures |= {"clock under cuflash, smallest, MHz": min(clocks), "clock under cuflash, largest, MHz": max(clocks)}
    for peer in dict.fromkeys(peer for r in results.values() for peer in r["peers"]):
        rows = [r["peers"][peer] for r in results.values() if peer in r["peers"]]
        figures[f"{peer} / cuflash, geometric mean of {len(rows)}"] = report.geometric_mean(row["ratio"] for row in rows)
        figures[f"{peer} / cuflash, smallest"] = min(row["ratio"] for row in rows)
        figures[f"{peer} / cuflash, smallest lower bound"] = min(row["lower"] for row in rows)
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
    parser.add_argument("--kernel", default="fa2", help="the kernel of cuflash's cuda backend")
    parser.add_argument("--peers", help="names that contain one of these words, separated by commas (default: all)")


def run(arguments: argparse.Namespace) -> str:
    """Measure; returns the Markdown."""
    report.require_gpu("bench prefill")
    words = arguments.peers.split(",") if arguments.peers else [""]
    peers = {name: peer for name, peer in importable_peers().items() if any(word in name for word in words)}
    found: dict[str, Any] = {"environment": environment(), "results": {}}
    for shape in progress(list(cases(arguments.only))):
        found["results"][shape.name] = measure(shape, arguments.kernel, peers)
        if arguments.json:  # after each shape: what has been measured is kept
            report.write_json(arguments.json, found)
    text = markdown(found)
    if arguments.markdown:
        report.write_markdown(arguments.markdown, MARKER, text)
    return text
