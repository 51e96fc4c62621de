"""The Numba CUDA backend: for GPUs and options that the raw kernels do not cover, and in Numba's simulator on NumPy arrays."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import launch
from ..host import simulates_cuda
from ..types import Gradients, NoBackendError, Plan, Problem
from . import packed

NAME = "numba-cuda"
KERNELS = ("fa1", "decode")
LARGEST_HEAD = 512
SHORT_QUERY = 16  # packed query rows up to which "decode" splits the keys
SPLIT_KEYS = 256  # at least so many keys a split
BLOCKS_PER_MULTIPROCESSOR = 8  # that decode splits the keys for: the loads are narrow, so many must be under way
MULTIPROCESSORS = 4  # in the simulator
SUM_ELEMENTS = 1 << 18  # for the gradient of a broadcast bias


def auto_kernels(problem: Problem) -> tuple[str, ...]:
    """Kernels for kernel="auto", best first."""
    short = problem.seqlen_q * problem.group_size <= SHORT_QUERY
    return ("decode", "fa1") if short else ("fa1",)


@functools.lru_cache(maxsize=1)
def unusable() -> str | None:
    """What in the installation stands in the way, with the command that mends it, or None."""
    if simulates_cuda():
        return None
    try:
        import numba_cuda  # noqa: F401
    except ImportError:
        return "numba-cuda is not installed; pip install 'cuflash[cuda13-full]' (or cuda12-full) brings it"
    from importlib.metadata import version

    numba_cuda_version = tuple(int(x) for x in version("numba-cuda").split(".")[:2] if x.isdigit())
    if numba_cuda_version < (0, 31) and not hasattr(np, "row_stack"):
        return f"numba-cuda {version('numba-cuda')} does not run with NumPy {np.__version__}; pip install 'numpy<2.5'"
    try:
        from numba import cuda

        if not cuda.is_available():
            return f"Numba finds no CUDA GPU ({cuda.cuda_error()})"
        from numba.cuda.cudadrv.nvvm import NVVM

        NVVM()
    except Exception as error:  # whatever the driver or NVVM raises, it is a reason and not a failure of the call
        first = next(iter(str(error).strip().splitlines()), "")
        return f"Numba cannot use CUDA here ({type(error).__name__}: {first}); pip install 'numba-cuda[cu13]' (or [cu12]) brings NVVM"
    return None


def decline(problem: Problem, kernel: str) -> str | None:
    """Why this backend does not run this problem with this kernel, or None."""
    for name in ("score_mod", "mask_mod"):
        given = getattr(problem, name)
        if isinstance(given, str):
            return f"{name} is a CUDA expression; this backend compiles a Python function on numbers"
        if given is not None and not hasattr(given, "__code__"):
            return f"{name} is a {type(given).__name__}; this backend compiles a Python function (def or lambda)"
        if given is not None and given.__code__.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
            return f"{name} takes *args or **kwargs, which this backend cannot compile"
    if max(problem.head_dim, problem.head_dim_v) > LARGEST_HEAD:
        return f"head sizes {problem.head_dim} and {problem.head_dim_v}; it goes up to {LARGEST_HEAD}"
    if problem.op == "backward":
        if kernel == "decode":
            return "the decode kernel has no backward pass; fa1 has"
        if problem.paged and _pages_shared(problem):
            return "several sequences share a page, whose gradient would be a sum over them"
        if problem.deterministic and problem.bias_is_shared:
            return "deterministic=True with a broadcast bias: its gradient is added up in no fixed order"
    return None


def _pages_shared(problem: Problem) -> bool:
    used = [problem.page_table[s.index, : -(-s.kv_length // problem.page_size)] for s in problem.sequences()]
    pages = np.concatenate(used) if used else np.empty(0, np.int64)
    return np.unique(pages).size < pages.size


def plan(problem: Problem, kernel: str) -> Plan:
    """Tile and splits."""
    from .numba_cuda_logits import Tile

    rows = problem.seqlen_q * problem.group_size
    if simulates_cuda():
        tile = Tile(2, 2, 2, 4)
    elif problem.op == "backward":
        small = problem.compute_dtype == np.float32 and max(problem.head_dim, problem.head_dim_v) <= 128  # fits the registers
        tile = Tile(16, 8, 4, 4) if small else Tile(16, 16, 2, 2)
    elif problem.compute_dtype == np.float64:
        tile = Tile(8, 8, 4, 4)
    elif kernel == "decode" or rows <= SHORT_QUERY:
        tile = Tile(8, 16, 2, 4)
    else:
        tile = Tile(16, 8, 4, 4)
    m_blocks = -(-rows // tile.m)
    splits = 1
    if kernel == "decode":
        splits = problem.num_splits or _split(problem, m_blocks)
    split_keys = max(1, -(-problem.seqlen_k // splits))
    splits = max(1, -(-problem.seqlen_k // split_keys)) if problem.seqlen_k else 1
    lse_elements = int(np.prod(problem.lse_shape))
    workspace = splits * lse_elements * (problem.head_dim_v + 2) * problem.compute_dtype.itemsize if splits > 1 else 0
    why = "keys split over the grid, then merged" if splits > 1 else "tiled online softmax in Numba CUDA, any GPU"
    return Plan(
        kernel=kernel, backend=NAME, reason=why, tile=(tile.m, tile.n), num_splits=splits, threads=tile.threads, workspace=workspace,
        extra=(tile, split_keys, m_blocks),
    )


def _split(problem: Problem, m_blocks: int) -> int:
    """Enough splits to fill the GPU; by the capacity alone where a row must not depend on its neighbours."""
    most = max(1, -(-problem.seqlen_k // SPLIT_KEYS))
    if problem.batch_invariant:
        return min(most, 32)
    blocks = max(1, m_blocks * problem.heads_kv * problem.batch)
    return max(1, min(most, -(-BLOCKS_PER_MULTIPROCESSOR * _multiprocessors(problem.q.device) // blocks)))


@functools.lru_cache(maxsize=None)
def _multiprocessors(device: int) -> int:
    if simulates_cuda():
        return MULTIPROCESSORS
    return int(sys.modules["cupy"].cuda.Device(device).attributes["MultiProcessorCount"])


class Device:
    """The memory and the stream of one call: arrays as Numba takes them, scratch, launches."""

    def __init__(self, problem: Problem):
        from numba import cuda

        self.cuda, self.problem = cuda, problem
        self.modified = problem.score_mod is not None or problem.mask_mod is not None
        self.copies: list[tuple[np.ndarray, Any]] = []  # the simulator's arrays are copies, brought back at the end
        if not simulates_cuda():
            launch.refuse_capture("the lengths that this backend copies to the device")
        self.stream: Any = 0 if simulates_cuda() else cuda.external_stream(sys.modules["cupy"].cuda.get_current_stream().ptr)

    def array(self, a: Any, ndim: int | None = None, write: bool = False) -> Any:
        """An ndarray as a device array; bfloat16 as its bits, axes of length 1 in front up to ``ndim``."""
        if a.dtype.name == "bfloat16":
            a = a.view(np.uint16)
        while ndim is not None and a.ndim < ndim:
            a = a[None]
        if not simulates_cuda():
            return self.cuda.as_cuda_array(a, sync=False)
        copy = self.cuda.to_device(np.array(a, order="C"))
        if write:
            self.copies.append((a, copy))
        return copy

    def host(self, a: np.ndarray) -> Any:
        """A small host array, copied to the device."""
        return self.array(a if simulates_cuda() else sys.modules["cupy"].asarray(a))

    def nothing(self, dtype: Any, ndim: int) -> Any:
        """Stands for an option that the call does not have."""
        return _nothing(np.dtype(dtype), ndim, self.problem.q.device)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Scratch as an ndarray of the problem's library."""
        return sys.modules[self.problem.q.kind].empty(shape, np.dtype(dtype))

    def launch(self, kernel: Any, grid: int, threads: int, *args: Any) -> None:
        """Launch on the caller's stream; a kernel is compiled once for any strides."""
        if grid == 0:
            return
        if simulates_cuda():
            kernel[grid, threads](*args)
        else:
            _compiled(kernel, tuple(map(_kind, args)), self.modified)[grid, threads, self.stream](*args)

    def finish(self) -> None:
        """Bring the simulator's results back."""
        for target, copy in self.copies:
            target[...] = copy.copy_to_host().reshape(target.shape)


@functools.lru_cache(maxsize=None)
def _nothing(dtype: np.dtype, ndim: int, device: int) -> Any:
    from numba import cuda

    empty = np.zeros((0,) * ndim, dtype)
    if simulates_cuda():
        return cuda.to_device(empty)
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device):
        return cuda.as_cuda_array(cupy.asarray(empty), sync=False)


def _kind(a: Any) -> Any:
    """What a kernel is compiled for: dtype and axes of an array, the type of a number; never strides or values."""
    if isinstance(a, tuple):
        return tuple(map(_kind, a))
    return (a.dtype, a.ndim) if hasattr(a, "copy_to_host") else type(a)


def _numba_type(kind: Any) -> Any:
    from numba import types
    from numba.np.numpy_support import from_dtype

    if isinstance(kind, tuple):
        if len(kind) == 2 and isinstance(kind[0], np.dtype):
            return types.Array(from_dtype(kind[0]), kind[1], "A")
        return types.BaseTuple.from_types([_numba_type(k) for k in kind])
    return {bool: types.boolean, int: types.int64, float: types.float64}.get(kind) or from_dtype(np.dtype(kind))


@functools.lru_cache(maxsize=256)
def _compiled(kernel: Any, kinds: tuple, modified: bool) -> Any:
    from numba import cuda, types
    from numba.core.errors import NumbaError

    try:
        return cuda.jit(types.void(*map(_numba_type, kinds)))(kernel.py_func)
    except NumbaError as error:
        if not modified:
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise NoBackendError(f"{NAME}: score_mod or mask_mod cannot be compiled for numbers on a GPU: {'; '.join(lines[:3])}") from error


def instance(problem: Problem, plan: Plan) -> Any:
    """The compiled kernel's fixed part."""
    from .numba_cuda_forward import CHUNK
    from .numba_cuda_logits import Instance

    return Instance(
        storage=problem.q.dtype.name, out=problem.out.dtype.name,
        chunks=-(-problem.head_dim // CHUNK), chunks_v=-(-problem.head_dim_v // CHUNK),
        tile=plan.extra[0], sqdist=problem.score == "sqdist", bias="" if problem.bias is None else problem.bias.dtype.name,
        mask=problem.mask is not None, score_mod=_modifier(problem.score_mod, "s, b, h, i, j", tuple(problem.mod_args)),
        mask_mod=_modifier(problem.mask_mod, "b, h, i, j", tuple(problem.mod_args)),
    )


def _modifier(function: Callable | None, arguments: str, names: tuple[str, ...]) -> Callable | None:
    from .numba_cuda_modifiers import modifier

    return None if function is None else modifier(function, arguments, names)


def options(problem: Problem, device: Device) -> dict[str, Any]:
    """The arguments that forward and backward share."""
    number = problem.compute_dtype.type
    seqs = list(problem.sequences())
    # Rows: first query row, query rows, first key, keys, first key that is no padding, position of row 0, batch index in q, in k.
    meta = np.zeros((8, max(1, problem.batch)), np.int64)
    for s in seqs:
        batch = 0 if problem.varlen else s.index
        k_batch = 0 if problem.cu_seqlens_k is not None else s.index
        meta[:, s.index] = (s.q_begin, s.q_length, s.k_begin, s.kv_length, s.kv_start, s.position, batch, k_batch)
    scale = np.atleast_1d(np.asarray(problem.scale, problem.compute_dtype))
    if problem.score == "sqdist":
        scale = np.ascontiguousarray(np.broadcast_to(scale, (problem.head_dim,)))
    slopes, sinks = problem.alibi_slopes, problem.sinks
    table = problem.page_table
    return {
        "meta": device.host(meta),
        "page_table": device.nothing(np.int64, 2) if table is None else device.host(table),
        "page_size": int(problem.page_size),
        "bias": device.nothing(np.float32, 4) if problem.bias is None else device.array(problem.bias.array),
        "mask": device.nothing(np.bool_, 4) if problem.mask is None else device.array(problem.mask.array),
        "mask_tail": problem.mask_is_tail,
        "slopes": device.nothing(number, 2) if slopes is None else device.host(slopes.astype(number)),
        "sinks": device.nothing(number, 1) if sinks is None else device.host(sinks.astype(number)),
        "scale": device.host(scale),
        "softcap": number(problem.softcap),
        "window_left": int(problem.window[0]),
        "window_right": int(problem.window[1]),
        "mods": tuple(_mod_arg(x, device) for x in problem.mod_args.values()),
    }


def _mod_arg(x: Any, device: Device) -> Any:
    if isinstance(x, (bool, int, float)):
        return x
    if hasattr(x, "__cuda_array_interface__"):
        return device.array(x)
    x = np.asarray(x)
    return x.item() if x.ndim == 0 else device.host(x)


def run(plan: Plan, problem: Problem) -> None:
    """Write problem.out, and problem.lse unless it is None."""
    from .numba_cuda_forward import combine_kernel, forward_kernel

    fixed, device, splits = instance(problem, plan), Device(problem), plan.num_splits
    tile, split_keys, m_blocks = plan.extra
    real = problem.compute_dtype
    out = device.array(problem.out.array, 4, write=True)
    lse = device.nothing(real, 3) if problem.lse is None else device.array(problem.lse.array, 3, write=True)
    q_rows = problem.q.shape[0] if problem.varlen else problem.seqlen_q
    batches = 1 if problem.varlen else problem.batch
    partial_array = device.empty((splits if splits > 1 else 0, batches, problem.heads_q, q_rows, problem.head_dim_v + 2), real)
    partial = device.array(partial_array)
    o = options(problem, device)
    device.launch(
        forward_kernel(fixed), m_blocks * problem.batch * problem.heads_kv * splits, tile.threads,
        device.array(problem.q.array, 4), device.array(problem.k.array, 4), device.array(problem.v.array, 4), out, lse, partial,
        o["meta"], o["page_table"], o["page_size"], o["bias"], o["mask"], o["mask_tail"], o["slopes"], o["sinks"], o["scale"], o["softcap"],
        o["window_left"], o["window_right"], problem.heads_kv, problem.group_size, problem.head_dim, problem.head_dim_v, splits, split_keys,
        m_blocks, o["mods"],
    )
    if splits > 1:
        rows = q_rows if problem.cu_seqlens_q is None else int(problem.cu_seqlens_q[-1])  # behind the last sequence nothing was computed
        total = batches * rows * problem.heads_q * problem.head_dim_v
        sinks = o["sinks"]
        device.launch(
            combine_kernel(fixed.storage, fixed.out), -(-total // 128), 128, partial, out, lse, sinks, rows, problem.heads_q,
            problem.head_dim_v, splits, total,
        )
    device.finish()
    if problem.varlen:
        packed.clear_slack(problem)


def run_backward(plan: Plan, problem: Problem) -> Gradients:
    """Gradients in canonical axis order, each in the dtype of what it belongs to."""
    from .numba_cuda_backward import backward_kernel

    fixed, device, tile = instance(problem, plan), Device(problem), plan.extra[0]
    real = problem.compute_dtype
    storage = problem.dout.dtype.name
    zeros = sys.modules[problem.q.kind].zeros
    dq, dk, dv = (zeros(a.shape, a.dtype) for a in (problem.q, problem.k, problem.v))
    q_rows = problem.q.shape[0] if problem.varlen else problem.seqlen_q
    state_array = zeros((3, 1 if problem.varlen else problem.batch, problem.heads_q, q_rows), real)
    state = device.array(state_array, write=True)
    dlse = device.nothing(real, 3) if problem.dlse is None else device.array(problem.dlse.array, 3)
    dout = device.array(problem.dout.array, 4)
    dbias_kind, dbias_array = "", zeros((1, 1, 1, 1, 1), real)
    if problem.bias is not None:
        shape = (1,) * (4 - len(problem.bias_shape)) + tuple(problem.bias_shape)
        dbias_kind = "add" if problem.bias_is_shared else "store"
        # Long sums: in float64, and in copies that are added at the end, which keeps digits and the atomic additions apart.
        copies = max(1, min(1024, SUM_ELEMENTS // max(1, math.prod(shape)))) if dbias_kind == "add" else 1
        dbias_array = zeros((copies, *shape), np.float64 if dbias_kind == "add" else real)
    o = options(problem, device)
    common = (
        o["meta"], o["page_table"], o["page_size"], o["bias"], o["mask"], o["mask_tail"], o["slopes"], o["sinks"], o["scale"],
        o["softcap"], o["window_left"], o["window_right"], problem.heads_kv, problem.group_size, problem.head_dim, problem.head_dim_v,
    )
    q, k, v = (device.array(a.array, 4) for a in (problem.q, problem.k, problem.v))
    for of_keys in (False, True):  # the rows' statistics come first
        extent, size = (problem.seqlen_k, tile.n) if of_keys else (problem.seqlen_q * problem.group_size, tile.m)
        tiles = -(-extent // size)
        grad_a = device.array(dk if of_keys else dq, 4, write=True)
        grad_v = device.array(dv, 4, write=of_keys)
        grad_bias = device.array(dbias_array, write=of_keys)
        device.launch(
            backward_kernel(fixed, storage, of_keys, dbias_kind if of_keys else ""), tiles * problem.batch * problem.heads_kv, tile.threads,
            q, k, v, dout, dlse, state, grad_a, grad_v, grad_bias, *common, tiles, o["mods"],
        )
    device.finish()
    dbias = None if problem.bias is None else dbias_array.sum(axis=0).astype(problem.bias.dtype).reshape(problem.bias_shape)
    dsinks = None
    if problem.sinks is not None:
        dsinks = _sink_gradient(problem, state_array)
    return Gradients(dq, dk, dv, dbias, dsinks)


def _sink_gradient(problem: Problem, state: Any) -> Any:
    """dsinks = -sum over rows of the sink's weight * delta: the sink is a logit whose value is 0."""
    xp = sys.modules[problem.q.kind]
    end = state.shape[-1] if problem.cu_seqlens_q is None else int(problem.cu_seqlens_q[-1])
    base, factor, delta = state[..., :end].astype(np.float64)
    sinks = xp.asarray(problem.sinks.astype(problem.compute_dtype), np.float64)[None, :, None]  # as the kernel saw them
    with np.errstate(invalid="ignore"):  # an empty row and a sink of -inf
        weight = xp.where(xp.isneginf(sinks), 0.0, xp.exp(sinks - base) * factor)
    return -(weight * delta).sum(axis=(0, 2)).astype(problem.compute_dtype)
