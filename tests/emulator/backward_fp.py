"""Run the kernels of backward_fp on the host, one after the other, as a backend would launch them."""

from __future__ import annotations

import dataclasses

import numpy as np
from cuflash import arrays, structs
from cuflash.backends import cuda_backward_fp
from cuflash.device import DeviceInfo
from cuflash.types import ArrayView, Gradients, Problem

from .emulate import EmulationError, Emulator
from .guarded import Guarded, Side


def code_path(chosen: cuda_backward_fp.Instance, info: DeviceInfo) -> int:
    """CUFLASH_ARCH; the GPUs from sm_80 on run the same code, but for products of float64."""
    return 750 if info.cc < (8, 0) else 900 if chosen.kind == "Dmma" and info.cc >= (9, 0) else 800


def prepare(emulator: Emulator, chosen: cuda_backward_fp.Instance, info: DeviceInfo) -> None:
    """Have both kernels compiled."""
    for source in (chosen.source_of_rows, chosen.source_of_keys):
        emulator.prepare_source(source, "FpBackwardParams", code_path(chosen, info))


def repeated(a: ArrayView, shape: tuple[int, ...]) -> ArrayView:
    """The array broadcast to a shape, by strides of 0."""
    seen = np.broadcast_to(a.array, shape)
    return dataclasses.replace(a, shape=seen.shape, strides=seen.strides, array=seen)


def run(
    emulator: Emulator, problem: Problem, info: DeviceInfo, chosen: cuda_backward_fp.Instance | None = None, side: Side = "end",
) -> Gradients:
    """Gradients in canonical axis order. Workspace and gradients hold NaN before, but for what a caller clears."""
    chosen = chosen or cuda_backward_fp.instance(problem, info)
    assert chosen is not None
    names = ("q", "k", "v", "out", "lse", "dout", "dlse", "bias", "mask")
    inputs = {name: Guarded(a, side) for name in names if (a := getattr(problem, name)) is not None}
    small = {name: Guarded(arrays.view(value, name), side) for name, value in structs.small_arrays(problem).items()}
    small |= {name: Guarded(getattr(problem, name), side) for name in problem.indices_on_device}
    found = {f"d{name}": np.full(getattr(problem, name).shape, np.nan, problem.q.dtype) for name in "qkv"}
    if problem.bias is not None:
        found["dbias"] = np.zeros(problem.bias_shape, cuda_backward_fp.dbias_dtype(problem))
    parts = {
        name: np.full(problem.lse_shape, 0 if name == "row_sink" else np.nan, problem.compute_dtype)
        for name in cuda_backward_fp.work_sizes(problem)
    }
    if problem.varlen:
        ends = (("dq", problem.cu_seqlens_q), ("dk", problem.cu_seqlens_k), ("dv", problem.cu_seqlens_k))
        for name, cu in ends:
            found[name][0 if isinstance(cu, ArrayView) else int(cu[-1]) :] = 0
    results = {name: Guarded(arrays.view(a, name), side, writable=True) for name, a in found.items()}
    work = {name: Guarded(arrays.view(a, name), side, writable=True) for name, a in parts.items()}
    moved = problem.replace(**{name: a.view for name, a in inputs.items()})
    gradients = {name: a.view for name, a in results.items()}
    if problem.bias is not None:
        gradients["dbias"] = repeated(gradients["dbias"], problem.bias.shape)
    given = [gradients, *({name: a.view.pointer for name, a in m.items()} for m in (small, work))]
    for of_keys, source, grid, threads, shared in cuda_backward_fp.kernels(problem, chosen):
        params = cuda_backward_fp.pack(moved, chosen, of_keys, info, *given)
        library = emulator.prepare_source(source, "FpBackwardParams", code_path(chosen, info)).result()
        try:
            emulator.execute(library, params, grid, threads, shared, {**inputs, **results, **small, **work})
        except EmulationError as error:
            raise EmulationError(f"{source.name}, {error}") from None
    for a in (*results.values(), *work.values()):
        a.write_back()
    dsinks = None
    if problem.sinks is not None:
        shares = parts["row_sink"].astype(np.float64)
        dsinks = shares.sum(axis=1 if problem.varlen else (0, 2)).astype(problem.compute_dtype)
    if problem.bias is not None:
        found["dbias"] = found["dbias"].astype(problem.bias.dtype)
    return Gradients(**found, dsinks=dsinks)
