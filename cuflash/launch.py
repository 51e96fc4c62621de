"""Parameter structs of the CUDA kernels, as NumPy dtypes that mirror kernels_cu/include/params.cuh; packing and launching."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from .types import HOST, UNBOUNDED, ArrayView, Problem

LOG2E = 1.4426950408889634
NO_LIMIT = 1 << 30  # a window side that is unbounded; sequences are shorter
LONGEST = NO_LIMIT - 1024  # keys or rows of a sequence, so that sums of positions fit 32 bits

_STRIDES = np.dtype((np.int64, 4))  # batch, row, head, column, in elements

PREFILL_PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in (
            "q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "kv_lengths", "kv_start", "alibi_slopes", "sinks", "bias",
            "mask", "mod_data", "page_table",
        )),
        *((f"{name}_stride", _STRIDES) for name in ("q", "k", "v", "out", "lse", "bias", "mask")),
        *((name, np.int32) for name in (
            "batch", "heads_q", "heads_kv", "group", "head_dim", "head_dim_v", "q_rows", "k_rows", "m_tiles", "section",
            "window_left", "window_right", "upper_left", "out_vector", "page_size", "max_pages",
        )),
        *((name, np.float32) for name in ("scale", "softcap", "logit_scale")),
        ("mask_tail", np.int32),
    ],
    align=True,
)


class StreamPointer:
    """A stream as CuPy's launches take it (``ptr``), and as another library's stream (``__cuda_stream__``)."""

    def __init__(self, ptr: int):
        self.ptr = ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


@contextlib.contextmanager
def place(device: int, stream: Any) -> Iterator[None]:
    """The arrays' device and the caller's stream as CuPy's current ones: results, scratch, copies and kernels all go there.

    For host arrays (device -1) there is nothing to do.
    """
    if device == HOST:
        yield
        return
    import cupy

    with cupy.cuda.Device(device):  # gives the former device back
        pointer = stream_pointer(stream)
        if stream is None or pointer == stream_pointer(None):
            yield
        else:
            with cupy.cuda.Stream.from_external(StreamPointer(pointer)):
                yield


def stream_pointer(stream: Any) -> int:
    """The cudaStream_t of what a user gave: None (CuPy's current one), an integer, or an object with .ptr or __cuda_stream__."""
    if stream is None:
        import cupy

        return int(cupy.cuda.get_current_stream().ptr)
    if hasattr(stream, "ptr"):
        return int(stream.ptr)
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    return int(stream)


def refuse_capture(what: str) -> None:
    """Raise RuntimeError if CuPy's current stream is being captured; the capture goes on without the call.

    ``what`` was made for this call alone: a replay would find something else in its memory.
    """
    import cupy

    if cupy.cuda.runtime.streamIsCapturing(cupy.cuda.get_current_stream().ptr):
        raise RuntimeError(f"the call cannot be captured in a CUDA graph: {what} would be gone when the graph is replayed")


def launch(function: Any, grid: int, threads: int, shared_memory: int, params: np.ndarray, stream: int) -> None:
    """Launch a one-dimensional grid whose only argument is a parameter struct, a structured array of one element."""
    if grid == 0:  # CuPy would launch one block
        return
    function((grid, 1, 1), (threads, 1, 1), (params,), shared_memory, StreamPointer(stream))


def element_strides(a: ArrayView, axes: str) -> tuple[int, int, int, int]:
    """Strides in elements as (batch, row, head, column); ``axes`` names the array's axes by their initials, such as "brhc"."""
    item = a.dtype.itemsize
    by_axis = {axis: stride // item if n > 1 else 0 for axis, n, stride in zip(axes, a.shape, a.strides, strict=True)}
    return tuple(by_axis.get(axis, 0) for axis in "brhc")  # type: ignore[return-value]


def copy_bytes(arrays: tuple[ArrayView, ...]) -> int:
    """The widest copy, 16, 8, 4 or 2 bytes, that suits all rows of arrays of 16-bit numbers; 2 allows any strides.

    Columns must be contiguous, and addresses, strides between rows and the number of columns whole multiples of it.
    """
    bits = 0
    for a in arrays:
        columns = a.shape[-1]
        if 0 in a.shape:
            continue
        if columns > 1 and a.strides[-1] != a.dtype.itemsize:
            return 2
        bits |= a.pointer | columns * a.dtype.itemsize
        for n, stride in zip(a.shape[:-1], a.strides[:-1], strict=True):
            if n > 1:
                bits |= stride
    return next((width for width in (16, 8, 4) if bits % width == 0), 2)


def pack_prefill(problem: Problem, m: int, section: int, plain: bool, pointers: dict[str, int]) -> np.ndarray:
    """The struct of one launch.

    Parameters
    ----------
    problem : Problem
        With ``out``.
    m : int
        Query rows of a block.
    section : int
        (batch, head) pairs whose tiles are handed out together.
    plain : bool
        Whether the score kind is SCORE_PLAIN, which takes the scale as part of the exponential.
    pointers : dict
        Device addresses of ``cu_seqlens_q``, ``cu_seqlens_k``, ``kv_lengths``, ``kv_start`` (int64), ``alibi_slopes`` and
        ``sinks`` (float32, times log2(e)), of those that there are.
    """
    p = np.zeros(1, PREFILL_PARAMS)
    r = p[0]
    out = problem.out
    assert out is not None
    dense, packed = "brhc", "rhc"
    for name, a in (("q", problem.q), ("k", problem.k), ("v", problem.v), ("out", out)):
        r[name] = a.pointer
        r[f"{name}_stride"] = element_strides(a, dense if len(a.shape) == 4 else packed)
    if problem.lse is not None:
        r["lse"] = problem.lse.pointer
        r["lse_stride"] = element_strides(problem.lse, "bhr" if len(problem.lse.shape) == 3 else "hr")
    for name, pointer in pointers.items():
        r[name] = pointer
    left, right = (NO_LIMIT if side == UNBOUNDED else min(side, NO_LIMIT) for side in problem.window)
    scale = float(problem.scale)  # type: ignore[arg-type]
    values = {
        "batch": problem.batch, "heads_q": problem.heads_q, "heads_kv": problem.heads_kv, "group": problem.group_size,
        "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v,
        "q_rows": problem.q.shape[-3], "k_rows": problem.k.shape[-3],
        "m_tiles": -(-problem.seqlen_q // m), "section": section, "window_left": left, "window_right": right,
        "upper_left": problem.align == "upper_left", "out_vector": copy_bytes((out,)) == 16,
        "scale": scale / problem.softcap if problem.softcap else scale * LOG2E,
        "softcap": problem.softcap * LOG2E, "logit_scale": scale * LOG2E if plain else 1.0,
    }
    for name, value in values.items():
        r[name] = value
    return p
