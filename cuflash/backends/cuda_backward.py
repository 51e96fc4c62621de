"""The backward pass of the raw CUDA backend: memory, and the launches one after the other.

16-bit arrays: the rows' statistics first (backward_prepare.cu), then the products by tiles of keys, which add up dQ in float32, then dQ in
its dtype. Where dQ must be the same in every run, tiles of keys add in turn, or backward_fa2_dq.cu computes it by tiles of queries. float32
and float64 (cuda_backward_fp.py): a kernel of rows, then one of keys.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .. import device, jit, launch, structs
from ..device import DeviceInfo
from ..types import ArrayView, Gradients, Plan, Problem, name_of
from . import cuda_backward_fa2, cuda_backward_fa3, cuda_backward_fp
from .cuda_instance import CUDA_TYPES, LARGEST_GRID, MASK_LENGTH, SHORT_TYPES, backward_stub, mask_kind

PREPARE_ROWS, PREPARE_THREADS = 32, 256  # as backward_prepare.cu has them
CONVERT_THREADS = 256
FIRST_TURN, TURNS = 4, 2  # as backward_params.cuh has them
FEW_TILES = 4
LEAST_KEYS = LEAST_ROWS = 32  # of a block

KERNELS = {"fa3": cuda_backward_fa3, "fa2": cuda_backward_fa2}
Instance = cuda_backward_fa3.Instance | cuda_backward_fa2.Instance


def work_sizes(problem: Problem, chosen: Instance) -> dict[str, int]:
    """Numbers of float32 that the launches hand to each other."""
    rows = problem.heads_q * structs.places(problem, chosen.tile_rows)
    sizes = {"row_lse": rows, "row_delta": rows, "dq_sum": rows * chosen.dq_columns}
    if turn_keys(chosen):
        sizes["dq_turns"] = FIRST_TURN + rows // chosen.tile_rows * TURNS  # integers
    return sizes


def turn_keys(chosen: Instance) -> int:
    """Keys of the tiles that add to dQ in a fixed order; 0 if there is none, or nothing is added."""
    return chosen.tile.n if isinstance(chosen, cuda_backward_fa3.Instance) and chosen.in_order else 0


def section(problem: Problem, info: DeviceInfo) -> int:
    """(batch, key head) pairs whose tiles of keys are handed out together: as many as fit the L2 cache with what their tiles share."""
    pairs = max(1, problem.batch * problem.heads_kv)
    row = problem.q.dtype.itemsize * (problem.head_dim + problem.head_dim_v) + 4 * problem.head_dim
    most = max(1, min(pairs, info.l2_bytes * 3 // 4 // max(1, row * problem.seqlen_q * problem.group_size)))
    return -(-pairs // -(-pairs // most))


def n_tiles(problem: Problem, chosen: Instance) -> int:
    """Tiles of keys of the longest sequence; all that are in memory have gradients."""
    return -(-problem.seqlen_k // chosen.tile.n)


def pack(
    problem: Problem, chosen: Instance, gradients: Mapping[str, ArrayView], pointers: Mapping[str, int], work: Mapping[str, int],
    info: DeviceInfo,
) -> np.ndarray:
    """The struct of all launches but that of backward_fa3.cu, which has it as its first member."""
    rows, tiles = chosen.tile_rows, n_tiles(problem, chosen)
    return structs.pack_backward(
        problem, gradients, rows, tiles, section(problem, info), chosen.factor_left, pointers, work, chosen.dq_columns, turn_keys(chosen),
    )


def kernels(
    problem: Problem, chosen: Instance, dq: ArrayView, info: DeviceInfo,
) -> list[tuple[jit.Source, str, int, int, int]]:
    """What is launched: source, type of the struct, blocks, threads, bytes of shared memory."""
    rows = problem.heads_q * structs.places(problem, chosen.tile_rows)
    vector = structs.copy_bytes((problem.out, problem.dout)) == 16
    prepare = prepare_source(name_of(problem.out.dtype), name_of(problem.dout.dtype), lanes(problem.head_dim_v), vector)
    blocks = problem.batch * problem.heads_kv * n_tiles(problem, chosen)
    first = (prepare, "BackwardParams", rows // PREPARE_ROWS, PREPARE_THREADS, 0)
    if isinstance(chosen, cuda_backward_fa2.Instance):
        others = cuda_backward_fa2.launches(problem, chosen, blocks, structs.copy_bytes((dq,)) == 16)
        return [first, *((source, "BackwardParams", *numbers) for source, *numbers in others)]
    # Of equal length, or of little work beside what a block's start takes. In order, a block has one tile: it may wait for those that have
    # begun before, and for nothing that one of them has still before it.
    if not chosen.in_order and (chosen.mask == MASK_LENGTH or n_tiles(problem, chosen) <= FEW_TILES):
        blocks = min(blocks, info.multiprocessors)
    converting = max(2, chosen.d // 64) * rows // chosen.tile_rows
    return [
        first,
        (chosen.source, chosen.PARAMS, blocks, chosen.tile.threads, chosen.shared_memory),
        (convert_source(chosen.dtype, chosen.tile_rows, chosen.d), "BackwardParams", converting, CONVERT_THREADS, 0),
    ]


def lanes(head_dim_v: int) -> int:
    """That have a row of out and of dout, 16 bytes each at a time."""
    return 8 if head_dim_v <= 64 else 16 if head_dim_v <= 128 else 32


@functools.cache
def prepare_source(out: str, dout: str, lanes: int, vector: bool) -> jit.Source:
    """The kernel that finds the rows' statistics, of results and their gradients in these dtypes."""
    name = f"backward_prepare_{SHORT_TYPES[out]}_{SHORT_TYPES[dout]}_lanes{lanes}" + "_strided" * (not vector)
    function = f"backward_prepare<{CUDA_TYPES[out]}, {CUDA_TYPES[dout]}, {lanes}, {str(vector).lower()}>"
    stub = backward_stub(
        name, function, PREPARE_THREADS, PREPARE_ROWS=PREPARE_ROWS, PREPARE_THREADS=PREPARE_THREADS, FIRST_TURN=FIRST_TURN, TURNS=TURNS
    )
    return jit.Source("backward_prepare.cu", stub, name)


@functools.cache
def convert_source(dtype: str, rows: int, columns: int) -> jit.Source:
    """The kernel that turns sums for dQ, in tiles of so many rows, into rows of this dtype."""
    name, function = f"backward_convert_{SHORT_TYPES[dtype]}_m{rows}d{columns}", f"backward_convert<{CUDA_TYPES[dtype]}, {rows}, {columns}>"
    return jit.Source("backward_convert.cu", backward_stub(name, function, CONVERT_THREADS, CONVERT_THREADS=CONVERT_THREADS), name)


def instances(info: DeviceInfo) -> Iterator[jit.Source]:
    """The common kernels for a GPU."""
    found: dict[jit.Source, None] = {}
    for chosen in (*cuda_backward_fa3.common(info), *cuda_backward_fa2.common(info)):
        found[prepare_source(chosen.dtype, chosen.dtype, lanes(chosen.dv), True)] = None
        if isinstance(chosen, cuda_backward_fa2.Instance):
            found |= dict.fromkeys(cuda_backward_fa2.sources(chosen))
        else:
            found[chosen.source] = found[convert_source(chosen.dtype, chosen.tile_rows, chosen.d)] = None
    yield from found
    for reals in cuda_backward_fp.common(info):
        yield from (reals.source_of_rows, reals.source_of_keys)


def copies_dout(problem: Problem, chosen: Instance) -> bool:
    """Whether a copy of dO is read instead."""
    return isinstance(chosen, cuda_backward_fa3.Instance) and cuda_backward_fa3.copies_dout(problem)


def workspace(problem: Problem, chosen: Instance) -> int:
    """Bytes beyond inputs and gradients."""
    copied = problem.q.dtype.itemsize * math.prod(problem.out_shape) if copies_dout(problem, chosen) else 0
    if problem.bias is not None and problem.bias.dtype != cuda_backward_fa2.dbias_dtype(problem):
        copied += cuda_backward_fa2.dbias_dtype(problem).itemsize * math.prod(problem.bias_shape)
    return 4 * sum(work_sizes(problem, chosen).values()) + copied


def decline(problem: Problem, kernel: str) -> str | None:
    """Why this kernel does not differentiate this call, or None; beside what every raw kernel declines."""
    if kernel not in KERNELS:
        return f"the backward pass of this backend is one of the kernels {', '.join(KERNELS)}"
    if of_reals(problem, kernel):
        return cuda_backward_fp.decline(problem)
    if (reason := KERNELS[kernel].decline(problem)) is not None:
        return reason
    most = max(problem.heads_q * structs.places(problem, 1), problem.batch * problem.heads_kv * -(-problem.seqlen_k // LEAST_KEYS))
    if kernel == "fa2":  # backward_fa2_dq.cu has tiles of the longest sequence for each
        most = max(most, problem.batch * problem.heads_q * -(-problem.seqlen_q // LEAST_ROWS))
    return f"{most:,} rows or tiles of all heads; it has numbers for {LARGEST_GRID:,}" if most > LARGEST_GRID else None


def of_reals(problem: Problem, kernel: str) -> bool:
    """Whether it is for cuda_backward_fp.py."""
    return kernel == "fa2" and name_of(problem.q.dtype) in cuda_backward_fp.REALS


def why_not_on(problem: Problem, kernel: str, info: DeviceInfo) -> str | None:
    """Why the kernel does not differentiate the call on a GPU, or None; beside `decline`."""
    if of_reals(problem, kernel):
        return cuda_backward_fp.why_not_on(problem, info)
    if instance(problem, kernel, info) is None:
        return f"no tile for head sizes {problem.head_dim} and {problem.head_dim_v} fits the shared memory of {info.name}"
    return None


def instance(problem: Problem, kernel: str, info: DeviceInfo) -> Instance | None:
    """The kernel instance for these arrays, or None if no tile fits the GPU."""
    if kernel == "fa2":
        return cuda_backward_fa2.instance(problem, info)
    return cuda_backward_fa3.instance(problem, mask_kind(problem))


def plan(problem: Problem, kernel: str, backend: str, info: DeviceInfo) -> Plan:
    """Tile, instance and workspace."""
    if of_reals(problem, kernel):
        reals = cuda_backward_fp.instance(problem, info)
        assert reals is not None  # else it was declined
        rows, keys = reals.rows, reals.keys
        why = f"gradients by recomputation in {problem.q.dtype}, statistics anew, {rows.m} rows a block, then {keys.m} keys a block"
        size = cuda_backward_fp.workspace(problem)
        return Plan(kernel=kernel, backend=backend, reason=why, tile=(rows.m, keys.m), threads=rows.threads, workspace=size, extra=reals)
    chosen = instance(problem, kernel, info)
    assert chosen is not None  # else it was declined
    t, units = chosen.tile, "wgmma" if kernel == "fa3" else "mma.sync"
    order = ", in a fixed order" if problem.deterministic else ""
    dq = "dQ by blocks of queries" if problem.deterministic and kernel == "fa2" else f"dQ by additions in float32{order}"
    why = f"gradients by recomputation, tensor cores ({units}), {t.n} keys a block, steps of {t.m} queries, {dq}"
    return Plan(
        kernel=kernel, backend=backend, reason=why, tile=(t.m, t.n), threads=t.threads, workspace=workspace(problem, chosen), extra=chosen
    )


def run(plan: Plan, problem: Problem, pointers: Mapping[str, int]) -> Gradients:
    """Gradients in canonical axis order. ``pointers``: device addresses of the problem's small arrays."""
    cupy = sys.modules["cupy"]
    chosen, place = plan.extra, problem.q.device
    info = device.probe(place)
    if isinstance(chosen, cuda_backward_fp.Instance):
        return _run_reals(chosen, problem, pointers, info)
    if copies_dout(problem, chosen):
        launch.refuse_capture("the copy of dout, whose rows the kernel cannot read as they lie,")
        problem = problem.replace(dout=_view(cupy.ascontiguousarray(problem.dout.array), place))
    found = {f"d{name}": _like(getattr(problem, name)) for name in "qkv"}
    views = {name: _view(a, place) for name, a in found.items()}
    if problem.bias is not None:
        found["dbias"], views["dbias"] = _bias_gradient(problem, cuda_backward_fa2.dbias_dtype(problem))
    if problem.sinks is not None:
        found["dsinks"] = cupy.empty(problem.heads_q, np.float32)
        views["dsinks"] = _view(found["dsinks"], place)
    steps = [  # before anything is written: what is not compiled yet fails in a stream capture
        (launch.Step(jit.function(source, place, shared), grid, threads, shared), kind)
        for source, kind, grid, threads, shared in kernels(problem, chosen, views["dq"], info)
    ]
    clear_slack(problem, found)
    sizes = work_sizes(problem, chosen)
    with launch.workspace(4 * sum(sizes.values()), place) as memory:
        starts = itertools.accumulate((4 * size for size in sizes.values()), initial=memory)
        params = pack(problem, chosen, views, pointers, dict(zip(sizes, starts, strict=False)), info)
        whole = cuda_backward_fa3.pack(problem, chosen, params) if isinstance(chosen, cuda_backward_fa3.Instance) else params
        stream = launch.stream_pointer(None)
        for step, kind in steps:
            launch.launch(step, params if kind == "BackwardParams" else whole, stream)
    return _gradients(problem, found)


def _run_reals(chosen: cuda_backward_fp.Instance, problem: Problem, pointers: Mapping[str, int], info: DeviceInfo) -> Gradients:
    cupy, place = sys.modules["cupy"], problem.q.device
    found = {f"d{name}": _like(getattr(problem, name)) for name in "qkv"}
    steps = [
        (launch.Step(jit.function(source, place, shared), blocks, threads, shared), of_keys)
        for of_keys, source, blocks, threads, shared in cuda_backward_fp.kernels(problem, chosen)
    ]
    clear_slack(problem, found)
    views = {name: _view(a, place) for name, a in found.items()}
    if problem.bias is not None:
        found["dbias"], views["dbias"] = _bias_gradient(problem, cuda_backward_fp.dbias_dtype(problem))
    sizes, item = cuda_backward_fp.work_sizes(problem), problem.compute_dtype.itemsize
    sizes.pop("row_sink", None)  # an array of its own, which CuPy sums up
    shares = cupy.zeros(problem.lse_shape, problem.compute_dtype) if problem.sinks is not None else None
    with launch.workspace(max(1, item * sum(sizes.values())), place) as memory:
        starts = itertools.accumulate((item * size for size in sizes.values()), initial=memory)
        work = dict(zip(sizes, starts, strict=False))
        if shares is not None:
            work["row_sink"] = int(shares.data.ptr)
        for step, of_keys in steps:
            params = cuda_backward_fp.pack(problem, chosen, of_keys, info, views, pointers, work)
            launch.launch(step, params, launch.stream_pointer(None))
    if shares is not None:
        axes = tuple(n for n in range(shares.ndim) if n != shares.ndim - 2)  # all but that of the heads
        found["dsinks"] = shares.sum(axis=axes, dtype=np.float64).astype(problem.compute_dtype)
    return _gradients(problem, found)


def _bias_gradient(problem: Problem, dtype: np.dtype) -> tuple[Any, ArrayView]:
    """Zeros of the shape of the user's bias, to which kernels add, and how they see them: as the bias is repeated."""
    cupy = sys.modules["cupy"]
    made = cupy.zeros(problem.bias_shape, dtype)
    return made, _view(cupy.broadcast_to(made, problem.bias.shape), problem.q.device)  # type: ignore[union-attr]


def _gradients(problem: Problem, found: Mapping[str, Any]) -> Gradients:
    """What was computed, that of the bias in its dtype."""
    g = Gradients(**found)
    if problem.bias is None or g.dbias.dtype == problem.bias.dtype:
        return g
    return dataclasses.replace(g, dbias=g.dbias.astype(problem.bias.dtype))


def clear_slack(problem: Problem, gradients: Mapping[str, Any]) -> None:
    """0 into the rows of packed gradients that belong to no sequence; into all where only the device knows which do."""
    if problem.varlen:
        for name, cu in (("dq", problem.cu_seqlens_q), ("dk", problem.cu_seqlens_k), ("dv", problem.cu_seqlens_k)):
            gradients[name][int(cu[-1]) if isinstance(cu, np.ndarray) else 0 :] = 0


def _view(a: Any, place: int) -> ArrayView:
    return ArrayView(a, int(a.data.ptr), a.shape, a.strides, a.dtype, "cupy", place)


def _like(a: ArrayView) -> Any:
    """An array for the gradient of another, with its axes in the same order in memory."""
    cupy = sys.modules["cupy"]
    order = sorted(range(len(a.shape)), key=lambda n: -a.strides[n] if a.shape[n] > 1 else -(1 << 62))
    made = cupy.empty(tuple(a.shape[n] for n in order), a.dtype)
    return made.transpose(tuple(np.argsort(order)))

