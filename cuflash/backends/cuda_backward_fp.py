"""Instances of backward_fp, the raw backward pass in float32 and float64: what it declines, its tiles, its launches.

Two kernels, one after the other: of rows, which leaves their statistics and dq, and of keys, for dk and dv. What they do not write and
the caller clears beforehand: rows of packed gradients, and of row_sink, that belong to no sequence; all of dbias, see `dbias_dtype`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from .. import jit, structs, tiles, tiles_backward_fp
from ..device import DeviceInfo
from ..tiles_backward_fp import BackwardTile
from ..types import ArrayView, Problem, name_of
from .cuda_instance import (
    ITEMSIZE, LARGEST_GRID, MASK_ARRAY, MASK_LEFT, MASK_LENGTH, MASK_RIGHT, SCORE_ALIBI, SCORE_BIAS, SCORE_BIAS32, SCORE_PLAIN,
    SCORE_SCALED, SCORE_SOFTCAP, SHORT_TYPES, kind_words, mask_kind, score_kind,
)

REALS = {"float32": "Exact32", "float64": "Exact64"}

PARAMS = np.dtype(  # of fp_backward_params.cuh
    [
        ("prefill", structs.PREFILL_PARAMS),
        *((name, np.uint64) for name in (
            "dout", "dlse", "dq", "dk", "dv", "dbias", "row_base", "row_inverse", "row_delta", "row_sink",
        )),
        *((f"{name}_stride", structs.STRIDES) for name in ("dout", "dlse", "dq", "dk", "dv", "dbias")),
        ("factor", np.float64), *((name, np.int32) for name in ("dq_vector", "keys_vector", "trusted", "shared", "longest")),
    ],
    align=True,
)


@dataclass(frozen=True)
class Instance:
    """What is fixed when backward_fp is compiled. ``load`` is 16 or, for any strides, the size of one number."""

    dtype: str
    kind: str  # of arithmetic, see tiles_fp
    d: int  # padded head sizes
    dv: int
    rows: BackwardTile
    keys: BackwardTile
    mask: int
    score: int
    load: int

    def tile(self, of_keys: bool) -> BackwardTile:
        return self.keys if of_keys else self.rows

    def slices(self, of_keys: bool) -> int:
        """Blocks that share the columns of the gradients of the same rows or keys."""
        return self.tile(of_keys).slices(max(self.d, self.dv) if of_keys else self.d)

    def shared_memory(self, of_keys: bool) -> int:
        """Bytes of a block."""
        return self.tile(of_keys).shared_memory(ITEMSIZE[self.dtype], self.d, self.dv, of_keys)

    def name(self, of_keys: bool) -> str:
        """Of the compiled function: "backward_fp_keys_fp32_simt_d64_m64n32w4s1_causal"."""
        t, slices = self.tile(of_keys), self.slices(of_keys)
        words = ["backward_fp", "keys" if of_keys else "rows", SHORT_TYPES[self.dtype], self.kind.lower()]
        words += [f"d{self.d}" if self.d == self.dv else f"d{self.d}v{self.dv}", f"m{t.m}n{t.n}w{t.warps}s{t.stages}"]
        words += [f"by{slices}"] * (slices > 1) + kind_words(self.mask, self.score) + ["strided"] * (self.load != 16)
        return "_".join(words)

    @property
    def source_of_rows(self) -> jit.Source:
        """The kernel of rows."""
        return _source(self, False)

    @property
    def source_of_keys(self) -> jit.Source:
        """The kernel of keys."""
        return _source(self, True)


@functools.lru_cache(maxsize=512)
def _source(chosen: Instance, of_keys: bool) -> jit.Source:
    t, name, function = chosen.tile(of_keys), chosen.name(of_keys), "backward_fp_keys" if of_keys else "backward_fp_rows"
    numbers = [chosen.d, chosen.dv, chosen.slices(of_keys), t.m, t.n, t.warps, t.stages]
    flags = [str(chosen.load == 16).lower(), chosen.mask, chosen.score, str(of_keys).lower()]
    arguments = ", ".join(map(str, [chosen.kind, REALS[chosen.dtype], *numbers, *flags]))
    stub = (
        f"using Instance = BackwardFp<{arguments}>;\n"
        f'static_assert(sizeof(FpBackwardParams) == {PARAMS.itemsize}, "cuda_backward_fp.py mirrors it");\n'
        f"static_assert(Instance::SMEM_BYTES == {chosen.shared_memory(of_keys)}, "
        '"tiles_backward_fp.py counts shared memory as the kernel does");\n'
        f'extern "C" __global__ void __launch_bounds__(Instance::THREADS, {t.resident}) {name}('
        "const __grid_constant__ FpBackwardParams p) {\n"
        "    extern __shared__ __align__(1024) unsigned char smem[];\n"
        f"    {function}<Instance>(p, smem);\n"
        "}\n"
    )
    return jit.Source("backward_fp.cu", stub, name)


def decline(problem: Problem) -> str | None:
    """Why it does not differentiate this call, or None."""
    dtype = name_of(problem.q.dtype)
    if dtype not in REALS:
        return f"{dtype} arrays; it takes float32 and float64"
    if problem.dout is not None and problem.dout.dtype != problem.q.dtype:
        return f"dout: {problem.dout.dtype} beside queries of {dtype}; it takes one dtype"
    absent = {
        "score_mod": problem.score_mod is not None, "mask_mod": problem.mask_mod is not None, "score='sqdist'": problem.score == "sqdist",
        "page_table": problem.paged,
    }
    for name, asked in absent.items():
        if asked:
            return f"it has no gradients with {name}"
    if problem.deterministic and problem.bias_is_shared:
        return "deterministic=True with a broadcast bias: its gradient is added up in no fixed order"
    if (reason := structs.out_of_range(problem)) is not None:
        return reason
    sizes = problem.head_dim, problem.head_dim_v
    if not all(1 <= size <= tiles.LARGEST_HEAD for size in sizes):
        return f"head sizes {sizes[0]} and {sizes[1]}; it takes 1 to {tiles.LARGEST_HEAD}"
    longest = max(problem.q.shape[-3], problem.k.shape[-3], problem.seqlen_q, problem.seqlen_k)
    if longest > structs.LONGEST:
        return f"sequences of {longest:,} rows; it takes at most {structs.LONGEST:,}"
    return None


def why_not_on(problem: Problem, info: DeviceInfo) -> str | None:
    """Why it does not differentiate this call on a GPU, or None; beside `decline`."""
    if info.cc < (7, 5):
        return f"{info.name} has compute capability {info.cc[0]}.{info.cc[1]}; it needs 7.5"
    chosen = instance(problem, info)
    if chosen is None:
        memory = f"{info.shared_memory_block:,} bytes of shared memory of {info.name}"
        return f"no tile for head sizes {problem.head_dim} and {problem.head_dim_v} fits the {memory}"
    if (most := max(grid(problem, chosen, of_keys) for of_keys in (False, True))) > LARGEST_GRID:
        return f"{most:,} tiles; it has numbers for {LARGEST_GRID:,}"
    return None


def dbias_dtype(problem: Problem) -> np.dtype:
    """Of the gradient of the bias as the kernel writes it: sums are added up in float64, whatever is asked for."""
    assert problem.bias is not None
    return np.dtype(np.float64) if problem.bias_is_shared else problem.bias.dtype


def instance(problem: Problem, info: DeviceInfo) -> Instance | None:
    """The kernel instance for these arrays, or None if no tile fits the GPU."""
    dtype = name_of(problem.q.dtype)
    d, dv = tiles.head_class(problem.head_dim), tiles.head_class(problem.head_dim_v)
    mask, score = mask_kind(problem), score_kind(problem)
    found = tiles_backward_fp.backward_fp(dtype, d, dv, info, needs_more(mask, score))
    if found is None:
        return None
    whole = structs.copy_bytes(tuple(a for a in (problem.q, problem.k, problem.v, problem.dout) if a is not None)) == 16
    kind, rows, keys = found
    return Instance(dtype, kind, d, dv, rows, keys, mask, score, 16 if whole else ITEMSIZE[dtype])


def needs_more(mask: int, score: int) -> bool:
    """Whether there is more than lengths, a window and a scale."""
    return bool(mask & MASK_ARRAY or score & ~SCORE_SCALED)


def work_sizes(problem: Problem) -> dict[str, int]:
    """Numbers of the compute dtype that the first kernel leaves, in arrays of the shape of the LSE.

    ``row_sink``, if there are sinks, is each row's share of the gradient of its head's sink: dsinks is its sum over the rows, to be taken
    in float64.
    """
    rows = int(np.prod(problem.lse_shape, dtype=np.int64))
    names = ("row_base", "row_inverse", "row_delta", *["row_sink"] * (problem.sinks is not None))
    return dict.fromkeys(names, rows)


def workspace(problem: Problem) -> int:
    """Bytes beyond inputs and gradients."""
    sums = dbias_dtype(problem).itemsize * math.prod(problem.bias_shape) if problem.bias_is_shared else 0  # type: ignore[arg-type]
    return problem.compute_dtype.itemsize * sum(work_sizes(problem).values()) + sums


def grid(problem: Problem, chosen: Instance, of_keys: bool) -> int:
    """Blocks of a kernel."""
    heads, length = (problem.heads_kv, problem.seqlen_k) if of_keys else (problem.heads_q, problem.seqlen_q)
    return problem.batch * heads * -(-length // chosen.tile(of_keys).m) * chosen.slices(of_keys)


def section(problem: Problem, chosen: Instance, of_keys: bool, info: DeviceInfo) -> int:
    """(batch, head) pairs whose tiles are handed out together.

    Where all tiles cost the same, one after the other keeps what its tiles share in the L2 cache; else as many as fit the cache, the
    longest tiles first.
    """
    heads, length = (problem.heads_kv, problem.seqlen_q * problem.group_size) if of_keys else (problem.heads_q, problem.seqlen_k)
    if not chosen.mask & (MASK_LEFT | MASK_RIGHT):
        return 1
    pairs = max(1, problem.batch * heads)
    shared = problem.q.dtype.itemsize * length * (problem.head_dim + problem.head_dim_v)
    m_tiles = max(1, -(-(problem.seqlen_k if of_keys else problem.seqlen_q) // chosen.tile(of_keys).m))
    most = max(1, min(pairs, info.l2_bytes * 3 // 4 // max(1, shared), LARGEST_GRID // m_tiles))
    return -(-pairs // -(-pairs // most))


def pack(
    problem: Problem, chosen: Instance, of_keys: bool, info: DeviceInfo, gradients: Mapping[str, ArrayView], pointers: Mapping[str, int],
    work: Mapping[str, int],
) -> np.ndarray:
    """The struct of the launch of a kernel.

    Parameters
    ----------
    problem : Problem
        With ``out``, ``lse`` and ``dout``.
    chosen : Instance
    of_keys : bool
        Which of the two kernels.
    info : DeviceInfo
    gradients : mapping
        dq, dk, dv and, with a bias, dbias (of the shape of problem.bias and `dbias_dtype`), which are written.
    pointers, work : mapping
        Device addresses: as for `structs.pack_prefill`, and of arrays of `work_sizes`.
    """
    p = np.zeros(1, PARAMS)
    r = p[0]
    factor_left = chosen.score == SCORE_PLAIN
    prefill = structs.pack_prefill(problem, chosen.rows.m, section(problem, chosen, of_keys, info), factor_left, dict(pointers))
    if of_keys:
        prefill["m_tiles"] = -(-problem.seqlen_k // chosen.keys.m)
    p["prefill"] = prefill
    for name, a in {"dout": problem.dout, **gradients}.items():
        axes = "bhrc" if name == "dbias" else "brhc" if len(a.shape) == 4 else "rhc"  # type: ignore[union-attr]
        r[name], r[f"{name}_stride"] = a.pointer, structs.element_strides(a, axes)  # type: ignore[union-attr,arg-type]
    if problem.dlse is not None:
        r["dlse"] = problem.dlse.pointer
        r["dlse_stride"] = structs.element_strides(problem.dlse, "bhr" if len(problem.dlse.shape) == 3 else "hr")
    for name, pointer in work.items():
        r[name] = pointer
    r["factor"] = float(problem.scale)  # type: ignore[arg-type]
    r["dq_vector"] = structs.copy_bytes((gradients["dq"],)) == 16
    r["keys_vector"] = structs.copy_bytes((gradients["dk"], gradients["dv"])) == 16
    r["shared"] = problem.bias_is_shared
    r["longest"] = -(-problem.seqlen_q // chosen.rows.m) * chosen.rows.m
    r["trusted"] = problem.out is not None and problem.out.dtype == problem.q.dtype
    return p


def kernels(problem: Problem, chosen: Instance) -> Iterator[tuple[bool, jit.Source, int, int, int]]:
    """What is launched, in this order: whether it is of keys, its source, blocks, threads, bytes of shared memory."""
    for of_keys, source in ((False, chosen.source_of_rows), (True, chosen.source_of_keys)):
        if blocks := grid(problem, chosen, of_keys):
            yield of_keys, source, blocks, chosen.tile(of_keys).threads, chosen.shared_memory(of_keys)


def common(info: DeviceInfo) -> Iterator[Instance]:
    """Equal head sizes, full and causal, aligned arrays; and one of each rarer kind."""
    def make(dtype: str, d: int, mask: int, score: int = SCORE_PLAIN, load: int = 16) -> Iterator[Instance]:
        found = tiles_backward_fp.backward_fp(dtype, d, d, info, needs_more(mask, score))
        if found is not None:
            yield Instance(dtype, found[0], d, d, *found[1:], mask, score, load)

    for dtype in REALS:
        for d in tiles.HEAD_CLASSES:
            for mask in (MASK_LENGTH, MASK_RIGHT):
                yield from make(dtype, d, mask)
        for d in (64, 128):
            yield from make(dtype, d, MASK_RIGHT | MASK_LEFT)
            yield from make(dtype, d, MASK_RIGHT, load=ITEMSIZE[dtype])
            for score in (SCORE_SCALED, SCORE_SOFTCAP, SCORE_ALIBI, SCORE_BIAS):
                yield from make(dtype, d, MASK_RIGHT, score)
            rarest = SCORE_SOFTCAP | SCORE_ALIBI | (SCORE_BIAS32 if dtype == "float64" else SCORE_BIAS)
            yield from make(dtype, d, MASK_RIGHT | MASK_LEFT | MASK_ARRAY, rarest, ITEMSIZE[dtype])
