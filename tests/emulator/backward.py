"""Run the backward kernels on the host, as cuda_backward.py launches them."""

from __future__ import annotations

import numpy as np
from cuflash import arrays, structs
from cuflash.backends import cuda_backward, cuda_backward_fa3
from cuflash.device import DeviceInfo
from cuflash.types import Gradients, Problem

from .emulate import EmulationError, Emulator, tensor_maps
from .guarded import Guarded, Side


def run(
    emulator: Emulator, problem: Problem, chosen: cuda_backward.Instance, info: DeviceInfo, side: Side = "end", blocks: int = 2,
) -> Gradients:
    """Gradients in canonical axis order. Workspace and gradients hold NaN before.

    ``blocks``: that share the tiles of keys; where there is an order, each has one, as they come one after the other here.
    """
    names = ("q", "k", "v", "out", "lse", "dout", "dlse")
    inputs = {name: Guarded(a, side, aligned=True) for name in names if (a := getattr(problem, name)) is not None}
    small = {name: Guarded(arrays.view(value, name), side) for name, value in structs.small_arrays(problem).items()}
    small |= {name: Guarded(getattr(problem, name), side) for name in problem.indices_on_device}
    found = {
        f"d{name}": np.frombuffer(b"\xff" * a.array.nbytes, a.dtype).reshape(a.shape).copy()
        for name, a in (("q", problem.q), ("k", problem.k), ("v", problem.v))
    }
    cuda_backward.clear_slack(problem, found)
    results = {name: Guarded(arrays.view(a, name), side, writable=True) for name, a in found.items()}
    work = {
        name: Guarded(arrays.view(np.full(size, np.nan, np.float32), name), side, writable=True)
        for name, size in cuda_backward.work_sizes(problem, chosen).items()
    }
    moved = problem.replace(**{name: a.view for name, a in inputs.items()})
    pointers = {name: a.view.pointer for name, a in small.items()}
    params = cuda_backward.pack(
        moved, chosen, {name: a.view for name, a in results.items()}, pointers, {name: a.view.pointer for name, a in work.items()}, info,
    )
    with tensor_maps():
        whole = cuda_backward_fa3.pack(moved, chosen, params)
    for source, kind, grid, threads, shared in cuda_backward.kernels(problem, chosen, results["dq"].view, info):
        if kind != "BackwardParams" and not cuda_backward.turn_keys(chosen):
            grid = min(grid, blocks)
        library = emulator.prepare_source(source, kind, 900).result()
        try:
            given = params if kind == "BackwardParams" else whole
            emulator.execute(library, given, grid, threads, shared, {**inputs, **results, **small, **work})
        except EmulationError as error:
            raise EmulationError(f"{source.name}, {error}") from None
    for a in results.values():
        a.write_back()
    return Gradients(**found)
