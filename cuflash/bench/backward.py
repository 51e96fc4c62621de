"""Gradients on one GPU beside PyTorch's FlashAttention-2 and cuDNN, and FlashAttention-3's build for JAX, where they are importable.

``python -m cuflash bench backward --json docs/backward-h200.json --markdown docs/performance.md``

cuflash and the peers take turns on the same inputs, in an order by chance; gradients are compared first. A turn is some calls in a row,
whose time on the GPU counts (autograd has the forward pass done before), but for JAX, whose calls the wall times: it has a stream of its
own. With deterministic=True, cuflash takes part a second time. TFLOP/s count useful work, 10 B H N N D, half of it when causal: five
products, all launches of a call in the time. Ratios and their bounds are those of ``bench prefill``.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import cuflash

from . import prefill, report
from .peers import DTYPES, as_cupy, as_torch

LENGTHS = (512, 1024, 2048, 8192, 16384)
TURNS, SECONDS_A_TURN = 9, 4e-3
JAX_MODULE = "dew_flash_attn"  # FlashAttention-3 forward and backward for JAX

Call = Callable[[], Any]  # (dq, dk, dv), (B, S, H, D)


def cases(only: str = "", dtypes: tuple[str, ...] = ("bfloat16",)) -> Iterator[prefill.Shape]:
    """The shapes whose name contains ``only``."""
    for dtype, d, n, causal in itertools.product(dtypes, prefill.HEAD_SIZES, LENGTHS, (False, True)):
        shape = prefill.Shape(d, n, causal, dtype)
        if only in shape.name:
            yield shape


def flops(shape: prefill.Shape) -> float:
    """Five products where the forward pass has two."""
    return 2.5 * shape.flops


class Side:
    """Some calls in a row on the default stream, which PyTorch shares."""

    def __init__(self, call: Call, copies: int):
        self.call, self.copies = call, copies

    def start(self) -> None:
        """Put the calls into the stream."""
        for _ in range(self.copies):
            self.call()

    def seconds(self) -> float:
        """Time of one call, from all of them."""
        import cupy

        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        self.start()
        end.record()
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3 / self.copies


class Wall(Side):
    """The same of a library with streams of its own, by the wall."""

    def seconds(self) -> float:
        import cupy

        jax = importlib.import_module("jax")
        cupy.cuda.Device().synchronize()
        begin = time.perf_counter()
        for _ in range(self.copies):
            last = self.call()
        jax.block_until_ready(last)
        return (time.perf_counter() - begin) / self.copies


def torch_sdpa(engine: str) -> Callable[..., Call]:
    """One of PyTorch's engines behind scaled_dot_product_attention."""

    def prepare(dout: Any, arrays: tuple[Any, ...], causal: bool) -> Call:
        torch, attention = importlib.import_module("torch"), importlib.import_module("torch.nn.attention")
        q, k, v = (as_torch(a).transpose(1, 2).detach().requires_grad_() for a in arrays)
        gradient = as_torch(dout).transpose(1, 2)
        with attention.sdpa_kernel(getattr(attention.SDPBackend, engine)):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        def call() -> Any:
            return tuple(g.transpose(1, 2) for g in torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))

        return call

    return prepare


def jax_flash_attention_3(dout: Any, arrays: tuple[Any, ...], causal: bool) -> Call:
    """FlashAttention-3 behind JAX."""
    jax, module = importlib.import_module("jax"), importlib.import_module(JAX_MODULE)
    given = [jax.numpy.from_dlpack(as_torch(a)) for a in (dout, *arrays)]
    scale, window = arrays[0].shape[-1] ** -0.5, (-1, -1)
    forward = jax.jit(lambda q, k, v: module._forward(q, k, v, None, None, scale, causal, window))
    backward = jax.jit(lambda g, q, k, v, o, lse: module._backward(g, q, k, v, o, lse, None, None, scale, causal, window))
    saved = forward(*given[1:])
    return lambda: backward(*given, *saved)


def importable() -> dict[str, tuple[Callable[..., Call], type[Side]]]:
    """Peers that this machine has, and how they are timed."""
    found: dict[str, tuple[Callable[..., Call], type[Side]]] = {}
    if importlib.util.find_spec("torch"):
        found["FA2 (PyTorch)"] = torch_sdpa("FLASH_ATTENTION"), Side
        found["cuDNN (PyTorch)"] = torch_sdpa("CUDNN_ATTENTION"), Side
        if importlib.util.find_spec("jax") and importlib.util.find_spec(JAX_MODULE):
            found["FA3 (JAX)"] = jax_flash_attention_3, Wall
    return found


def measure(shape: prefill.Shape, kernel: str, peers: dict[str, tuple[Callable[..., Call], type[Side]]]) -> dict[str, Any]:
    """Compare, then time, one shape against every peer."""
    import cupy

    arrays = shape.inputs()
    dout = cupy.random.default_rng(2).standard_normal(arrays[0].shape, np.float32).astype(DTYPES[shape.dtype])
    out, lse = cuflash.attention(*arrays, causal=shape.causal, return_lse=True)

    def ours(deterministic: bool) -> Any:
        options: dict[str, Any] = {"causal": shape.causal, "deterministic": deterministic, "kernel": kernel, "backend": "cuda"}
        g = cuflash.attention_backward(dout, *arrays, out, lse, **options)
        return g.dq, g.dk, g.dv

    plain, in_order = functools.partial(ours, False), functools.partial(ours, True)
    expected = [g.astype(np.float32) for g in plain()]
    check(in_order(), expected)
    once = Side(plain, 1)
    copies = max(2, min(20, int(SECONDS_A_TURN / min(once.seconds() for _ in range(3)))))
    sides: dict[str, Side] = {"cuflash": Side(plain, copies), "deterministic": Side(in_order, copies)}
    row: dict[str, Any] = {"kernel": kernel, "peers": {}, "failed": {}}
    for name, (prepare, kind) in peers.items():
        try:
            call = prepare(dout, arrays, shape.causal)
            check(call(), expected)
            sides[name] = kind(call, copies)
        except Exception as error:  # a peer that does not take the call, or is wrong, is no reason to measure nothing
            row["failed"][name] = prefill.refusal(error)
    times = prefill.take_turns(sides, TURNS)  # type: ignore[arg-type]
    mine = times.pop("cuflash")
    row["deterministic"] = report.cost(times.pop("deterministic"), mine)
    for name, theirs in times.items():
        row["peers"][name] = prefill.speed(flops(shape), theirs) | report.ratio(theirs, mine)
    if times:
        row["best"] = report.ratio(np.minimum.reduce(list(times.values())), mine)
    row |= prefill.speed(flops(shape), mine) | {"clock_mhz": prefill.clock_under(sides["cuflash"])}  # type: ignore[arg-type]
    del sides
    prefill.free_memory()
    return row


def check(found: tuple[Any, ...], expected: list[Any]) -> None:
    """Raise RuntimeError unless gradients are these (float32), within what rounding explains."""
    for name, gradient, want in zip(("dq", "dk", "dv"), found, expected, strict=True):
        if type(gradient).__module__.startswith("jax"):
            gradient = importlib.import_module("torch").from_dlpack(gradient)
        result = as_cupy(gradient)
        difference = float(abs(result.astype(np.float32) - want).max() / abs(want).max())
        if not difference <= 4 * prefill.tolerance(result.dtype):
            raise RuntimeError(f"its {name} differs from cuflash's by {difference:.2g} of the largest element")


def markdown(found: dict[str, Any]) -> str:
    """The tables of docs/performance.md."""
    costs = [(name, f"{r['deterministic']['cost']:.3f} ({r['deterministic']['upper']:.3f})") for name, r in found["results"].items()]
    own = report.markdown_table(("case", "time with deterministic=True / without (upper bound)"), costs)
    return prefill.markdown(found) + "\n" + "\n".join(own) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--markdown", type=Path, help="write the tables here, between marker lines if there are any")
    parser.add_argument("--only", default="", help="cases whose name contains this, such as 'D128 N2048'")
    parser.add_argument("--kernel", default="fa3", help="the kernel of cuflash's cuda backend")
    parser.add_argument("--dtype", default="bfloat16", choices=(*DTYPES, "both"), help="of the arrays")


def run(arguments: argparse.Namespace) -> str:
    """Measure; returns the Markdown."""
    report.require_gpu("bench backward")
    dtypes = tuple(DTYPES) if arguments.dtype == "both" else (arguments.dtype,)
    found: dict[str, Any] = {"environment": prefill.environment(), "results": {}}
    for shape in prefill.progress(list(cases(arguments.only, dtypes))):
        try:
            found["results"][shape.name] = measure(shape, arguments.kernel, importable())
        except cuflash.NoBackendError as error:
            found.setdefault("declined", {})[shape.name] = str(error).splitlines()[-1].strip()
            continue
        found["summary"] = prefill.summary(found["results"])
        if arguments.json:
            report.write_json(arguments.json, found)
    text = markdown(found)
    if arguments.markdown:
        report.write_markdown(arguments.markdown, f"backward tables of {arguments.kernel}", text)
    return text
