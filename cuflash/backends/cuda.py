"""The raw CUDA backend: which kernel instance a problem needs, and its launch. Importing it loads neither CuPy nor NVRTC."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import device, jit, launch, structs, tiles
from ..tiles import Tile
from ..types import HOST, INDICES, ArrayView, Gradients, Plan, Problem, name_of
from . import cuda_append, cuda_backward, cuda_decode, cuda_fa1, cuda_fa3, cuda_fp, cuda_merge, cuda_pages, cuda_parts, naive_cuda, packed
from .cuda_instance import (
    CLEAR_ROWS, CUDA_TYPES, LARGEST_GRID, MASK_ARRAY, MASK_LEFT, MASK_LENGTH, MASK_RIGHT, SCORE_ALIBI, SCORE_BIAS, SCORE_BIAS32,
    SCORE_PLAIN, SCORE_SCALED, SCORE_SOFTCAP, SHORT_TYPES, PrefillInstance, clear_source, mask_kind, score_kind,
)

NAME = "cuda"
KERNELS = ("fa3", "fa2", "fa1", "decode", "naive")

TYPES = ("float16", "bfloat16")  # of prefill_fa2 and prefill_fa1
LONG_TILES = 2048  # keys from which on tiles of prefill_fa3 are long
TAKES_E4M3 = ("decode",)
TAKES_DEVICE_INDICES = ("fa3", "fa2", "decode")  # kernels that read lengths and cu_seqlens where they are
# Arrays of a call that were made for it alone, or that results may overlap: with them no launch is prepared.
OWN_ARRAYS = ("alibi_slopes", "sinks", "bias", "mask")


@dataclass(frozen=True)
class Instance(PrefillInstance):
    """What is fixed when prefill_fa2 is compiled."""

    page_rows: int = 0  # keys that surely lie in one page: a divisor of page sizes; 0 without pages
    flat: bool = False  # the longest of the packed sequences is not known

    KERNEL, TILES = "prefill_fa2", "tiles.py"

    @property
    def shared_memory(self) -> int:
        return self.tile.shared_memory(self.d, self.dv, self.page_rows)

    @property
    def factor_left(self) -> bool:
        return self.score in (SCORE_PLAIN, SCORE_SOFTCAP)

    @property
    def tile_words(self) -> list[str]:
        t = self.tile
        return [f"m{t.m}n{t.n}w{t.warps}s{t.stages}" + f"g{t.groups}" * (t.groups > 1) + "q" * t.q_registers]

    @property
    def page_words(self) -> list[str]:
        return ["paged" + str(self.page_rows) * (self.page_rows > 1)] * (self.page_rows > 0)

    @property
    def arguments(self) -> list[Any]:
        t = self.tile
        numbers = [self.d, self.dv, t.m, t.n, t.warps, t.stages, t.groups, t.q_registers, self.load, self.mask, self.score]
        return [CUDA_TYPES[self.dtype], CUDA_TYPES[self.out], *numbers, self.page_rows, *[True] * self.flat]


AnyInstance = Instance | cuda_fp.Instance | cuda_fa1.Instance | cuda_fa3.Instance


def auto_kernels(problem: Problem) -> tuple[str, ...]:
    """Kernels for kernel="auto", best first. fa1 is there to be compared: fa2 does all that it does, faster."""
    if problem.e4m3:
        return TAKES_E4M3
    prefill = ("fa3", "fa2") if name_of(problem.q.dtype) in TYPES else ("fa2",)
    return ("decode", *prefill) if cuda_decode.suits(problem) else prefill


@functools.lru_cache(maxsize=1)
def unusable() -> str | None:
    """What in the installation stands in the way, with the command that mends it, or None."""
    reason = jit.why_unusable()
    if reason is not None:
        return reason
    try:
        from cupy_backends.cuda.api import runtime  # CuPy's own, without the rest of it

        if runtime.getDeviceCount() < 1:
            return "CUDA finds no GPU"
    except Exception as error:  # whatever CuPy or the driver raises, it is a reason and not a failure of the call
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        perhaps = "; or there is no NVIDIA driver" * ("InsufficientDriver" in first)
        return f"CuPy finds no GPU ({type(error).__name__}: {first}{perhaps})"
    return None


def decline(problem: Problem, kernel: str) -> str | None:
    """Why this backend does not run this problem with this kernel, or None."""
    if kernel == "naive":
        return naive_cuda.decline(problem)
    dtype, out = name_of(problem.q.dtype), name_of(problem.out_dtype)
    backward = problem.op == "backward"
    if backward:
        own = functools.partial(cuda_backward.decline, kernel=kernel)
    else:
        own = {"fa1": cuda_fa1.decline, "fa3": cuda_fa3.decline, "decode": cuda_decode.decline}.get(kernel)
    if dtype not in SHORT_TYPES or (dtype in TYPES and out not in TYPES):
        return f"{dtype} arrays with {out} results; it weighs values in 16 bits, so that it offers float16 and bfloat16 results only"
    if dtype == "bfloat16" and out == "float16":
        return "bfloat16 arrays with float16 results, which would show that it rounds its weights to bfloat16"
    if dtype == "float32" and out == "float64":
        return "float32 arrays with float64 results, which would show that its products keep 22 to 23 bits of 24"
    absent = {
        "score_mod": problem.score_mod is not None, "mask_mod": problem.mask_mod is not None, "score='sqdist'": problem.score == "sqdist",
        "num_splits": (problem.num_splits or 1) > 1 and kernel != "decode" and (dtype in TYPES or problem.varlen),
    }
    for name, asked in absent.items():
        if asked:
            return f"{name} is not part of this version of its kernels"
    if (reason := structs.out_of_range(problem)) is not None:
        return reason
    sizes = (problem.head_dim, problem.head_dim_v)
    if not all(1 <= size <= tiles.LARGEST_HEAD for size in sizes):
        return f"head sizes {sizes[0]} and {sizes[1]}; it takes 1 to {tiles.LARGEST_HEAD}"
    longest = max(problem.q.shape[-3], problem.k.shape[-3], problem.seqlen_q, problem.seqlen_k)
    if longest > structs.LONGEST:
        return f"sequences of {longest:,} rows; it takes at most {structs.LONGEST:,}"
    if own is not None and (reason := own(problem)) is not None:
        return reason
    if problem.q.device == HOST or unusable() is not None:  # what the kernel could do; the planner asks for the GPU itself
        return None
    info = device.probe(problem.q.device)
    if info.cc < (7, 5):
        return f"{info.name} has compute capability {info.cc[0]}.{info.cc[1]}; it needs 7.5"
    if "bfloat16" in (dtype, out) and info.cc < (8, 0):
        return f"bfloat16 needs compute capability 8.0, {info.name} has {info.cc[0]}.{info.cc[1]}; float16 runs"
    if kernel == "fa3" and (reason := cuda_fa3.why_not_on(info)) is not None:
        return reason
    if backward:
        return cuda_backward.why_not_on(problem, kernel, info)
    chosen = instance(problem, info, kernel)
    if chosen is None:
        if kernel == "decode":
            other = "" if problem.e4m3 else "; kernel='fa2' has one"
            return f"no tile for head sizes {sizes[0]} and {sizes[1]} and {problem.seqlen_q} queries on {info.name}{other}"
        memory = f"{info.shared_memory_block:,} bytes of shared memory of {info.name}"
        return f"no tile for head sizes {sizes[0]} and {sizes[1]} fits the {memory}"
    most = cuda_fa3.LARGEST_TILES if kernel == "fa3" else LARGEST_GRID
    if _grid(problem, chosen) > most:
        return f"{_grid(problem, chosen):,} tiles of rows; it has numbers for {most:,}"
    return None


def instance(problem: Problem, info: device.DeviceInfo, kernel: str = "fa2") -> AnyInstance | cuda_decode.Instance | None:
    """The kernel instance for these arrays, or None if no tile fits the GPU."""
    d, dv = tiles.head_class(problem.head_dim), tiles.head_class(problem.head_dim_v)
    mask, score = mask_kind(problem), score_kind(problem)
    if kernel == "decode":
        return cuda_decode.instance(problem, info, cuda_decode.copy_bytes(problem), score)
    load = structs.copy_bytes((problem.q, problem.k, problem.v))
    if kernel == "fa3":
        return cuda_fa3.instance(problem, mask, score, is_flat(problem), info)
    if kernel == "fa1":
        return cuda_fa1.instance(problem, mask, score, load, info)
    if name_of(problem.q.dtype) not in TYPES:
        return cuda_parts.instance(problem, mask, score, info) or cuda_fp.instance(problem, mask, score, info)
    flat = is_flat(problem)
    rows = page_rows(problem, load) if problem.paged else 0
    tile = tile_for(d, dv, mask, score, load, rows, flat, info)
    if tile is None:
        return None
    return Instance(name_of(problem.q.dtype), name_of(problem.out_dtype), d, dv, tile, mask, score, load, rows, flat)


def is_flat(problem: Problem) -> bool:
    """Whether packed sequences share one row of tiles, because nothing is known of the longest."""
    unknown = isinstance(problem.cu_seqlens_q, ArrayView) and problem.batch > 1 and problem.seqlen_q >= problem.q.shape[0]
    return unknown and name_of(problem.q.dtype) in TYPES


def page_rows(problem: Problem, load: int) -> int:
    """Keys that prefill_fa2 finds by one address, in pages of multiples of so many; in other pages, and for narrow copies, one."""
    return 16 if problem.page_size % 16 == 0 and load == 16 else 1


def tile_for(d: int, dv: int, mask: int, score: int, load: int, page_rows: int, flat: bool, info: device.DeviceInfo) -> Tile | None:
    """The tile of an instance for padded head sizes, or None if none fits the GPU."""
    lean = score != SCORE_PLAIN or load < 16 or ((page_rows > 0 or flat) and bool(mask & MASK_LEFT))
    arrays = bool(mask & MASK_ARRAY) + bool(score & SCORE_BIAS) + 2 * bool(score & SCORE_BIAS32)
    if arrays:
        arrays = min(2, arrays + (page_rows > 0 or load < 16))
    softcap = score == SCORE_SOFTCAP and load == 16 and not (arrays or page_rows or flat)
    return tiles.prefill_fa2(d, dv, bool(mask & (MASK_LEFT | MASK_RIGHT)), lean, info, arrays, softcap, page_rows)


def plan(problem: Problem, kernel: str) -> Plan:
    """Tile and instance."""
    if kernel == "naive":
        return naive_cuda.plan(problem, NAME)
    if problem.op == "backward":
        return cuda_backward.plan(problem, kernel, NAME, device.probe(problem.q.device))
    info = device.probe(problem.q.device)
    chosen = instance(problem, info, kernel)
    assert chosen is not None  # else it was declined
    if isinstance(chosen, cuda_decode.Instance):
        return cuda_decode.plan(problem, chosen, info)
    if isinstance(chosen, cuda_parts.Instance):
        return cuda_parts.plan(problem, chosen, info)
    t = chosen.tile
    units, whole = "tensor cores (mma.sync)", ""
    if isinstance(chosen, cuda_fp.Instance):
        units, whole = cuda_fp.why(chosen), cuda_parts.why_whole(problem, chosen, info)
    if isinstance(chosen, cuda_fa3.Instance):
        units, warps = "tensor cores (wgmma)", f"{t.warpgroups} warpgroups and one that loads"
        whole = f", rows of {problem.group_size} heads together" * chosen.packed
    else:
        warps = f"{t.warps} warps" + " that share the keys" * (kernel == "fa1")
    why = f"{units}, {t.m} rows x {t.n} keys a block of {warps}, {chosen.shared_memory:,} bytes of shared memory on {info.name}{whole}"
    extra = (chosen, _section(problem, chosen, info))
    return Plan(kernel=kernel, backend=NAME, reason=why, tile=(t.m, t.n), threads=t.threads, extra=extra)


def _section(problem: Problem, chosen: AnyInstance, info: device.DeviceInfo) -> int:
    """(batch, head) pairs whose tiles are handed out together.

    Where every row sees all keys, all tiles cost the same, and one head after the other keeps its keys and values in the L2 cache. Else
    the longest tiles of as many heads as fit most of the cache start together, so that none of them ends alone, and likewise those that
    read the same rows of a bias or mask; and sections are of equal size, as the long tiles of a small one at the end would leave most of
    the GPU idle (up to 10 % on an H200). Blocks of prefill_fa3 take one tile after the other; where tiles are long, more heads that leave
    fewer blocks idle in the end are worth more than the cache (4 % on an H200).
    """
    heads, rows = _heads_and_rows(problem, chosen)
    pairs = max(1, heads if chosen.flat else problem.batch * heads)
    shared = any(a is not None and a.strides[1] == 0 and a.strides[2] != 0 for a in (problem.bias, problem.mask))
    if not chosen.mask & (MASK_LEFT | MASK_RIGHT) and not shared:
        return 1
    keys = problem.k.shape[0] // problem.batch if chosen.flat else problem.seqlen_k  # in a flat grid, sequence comes after sequence
    bytes_per_pair = problem.q.dtype.itemsize * keys * (problem.head_dim + problem.head_dim_v) * problem.heads_kv // max(1, heads)
    m_tiles = max(1, structs.flat_tiles(problem, rows) if chosen.flat else -(-problem.seqlen_q // rows))
    budget = info.l2_bytes * 3 // 4 * (2 if isinstance(chosen, cuda_fa3.Instance) and keys >= LONG_TILES else 1)
    most = max(1, min(pairs, budget // max(1, bytes_per_pair), LARGEST_GRID // m_tiles))
    sections = -(-pairs // most)
    return -(-pairs // sections)


def _heads_and_rows(problem: Problem, chosen: AnyInstance) -> tuple[int, int]:
    """Heads that have tiles of their own, queries of a tile."""
    m = chosen.tile.m
    return (problem.heads_kv, m // problem.group_size) if chosen.packed else (problem.heads_q, m)


def _grid(problem: Problem, chosen: AnyInstance | cuda_decode.Instance) -> int:
    if isinstance(chosen, cuda_decode.Instance):
        return 0  # as many blocks as the GPU holds
    if isinstance(chosen, cuda_parts.Instance):
        return cuda_parts.blocks(problem, chosen)  # times the parts, which are fewer where these are many
    heads, rows = _heads_and_rows(problem, chosen)
    if chosen.flat:
        return heads * structs.flat_tiles(problem, rows) if problem.q.shape[0] else 0
    return problem.batch * heads * -(-problem.seqlen_q // rows) * chosen.slices


def run(plan: Plan, problem: Problem) -> None:
    """Write problem.out, and problem.lse unless it is None."""
    if plan.kernel == "naive":
        naive_cuda.run(plan, problem)
        return
    if (splits := _that_splits(plan)) is not None:
        splits.run(plan, problem, _small_arrays)
        return
    ready, steps = _steps(plan, problem)
    if not steps and not problem.varlen:
        return
    of_fa3 = isinstance(ready, cuda_fa3.Instance)
    with _small_arrays(problem) as pointers, cuda_fa3.counter(problem.q.device) if of_fa3 else contextlib.nullcontext(0) as counter:
        if isinstance(problem.cu_seqlens_q, np.ndarray):
            packed.clear_slack(problem)
        params = _params(plan, problem, ready, pointers, counter)
        for step in steps:
            launch.launch(step, params, launch.stream_pointer(None))


def run_backward(plan: Plan, problem: Problem) -> Gradients:
    """Gradients in canonical axis order, each in the dtype of what it belongs to."""
    with _small_arrays(problem) as pointers:
        return cuda_backward.run(plan, problem, pointers)


def prepare(plan: Plan, problem: Problem) -> launch.Prepared | None:
    """The launch of ``run`` for calls that differ in addresses alone; None if a call has more to do.

    It takes the addresses of q, k, v, out and lse, which must be aligned as those of the problem are; and where index arrays are on
    the device, those of `structs.index_views`, then of `structs.scale_views`.
    """
    if plan.kernel == "naive" or any(getattr(problem, name) is not None for name in OWN_ARRAYS):
        return None
    if any(isinstance(getattr(problem, name), np.ndarray) for name in (*INDICES, "page_table")):
        return None
    if any(name in structs.small_arrays(problem) for name in structs.SCALES):  # those of heads, from the host
        return None
    if (splits := _that_splits(plan)) is not None:
        return splits.prepare(plan, problem)
    ready, steps = _steps(plan, problem)
    if not steps:
        return None
    params, addresses = _params(plan, problem, ready, {}), 5 + len(structs.index_addresses(problem))
    if isinstance(ready, cuda_fa3.Instance):
        return cuda_fa3.prepare(steps, params, addresses, problem.q.device)
    return launch.Prepared(steps, params, addresses)


def make_ready(plan: Plan, problem: Problem) -> None:
    """Fail as ``run`` would: for want of a compiler, or in a stream capture that it cannot be part of. Nothing is launched."""
    if plan.kernel != "naive":
        splits = _that_splits(plan)
        (_steps if splits is None else splits.launches)(plan, problem)
        if wanted := structs.small_arrays(problem):
            launch.refuse_capture(launch.copied(wanted))


def _that_splits(plan: Plan) -> Any:
    """The module that has the launches of a plan whose keys are split, or None."""
    return {cuda_decode.Instance: cuda_decode, cuda_parts.Instance: cuda_parts}.get(type(plan.extra[0]))


def _steps(plan: Plan, problem: Problem) -> tuple[AnyInstance, list[launch.Step]]:
    """The planned instance for the arrays of this run, which may be aligned otherwise than those of the plan; and what is launched."""
    place, steps = problem.q.device, []
    ready, info = plan.extra[0], device.probe(place)
    if not isinstance(ready, cuda_fa3.Instance):
        ready = with_load(ready, structs.copy_bytes((problem.q, problem.k, problem.v)), info)
    elif (reason := cuda_fa3.why_not_these(problem)) is not None:
        if problem.kernel == "fa3":
            raise ValueError(reason)
        ready = instance(problem, info, "fa2")
        assert isinstance(ready, Instance)
    rows, grid = problem.q.shape[0], _grid(problem, ready)
    if isinstance(problem.cu_seqlens_q, ArrayView) and rows and problem.heads_q:
        clear = clear_source(problem.out_dtype.itemsize, problem.compute_dtype.itemsize, ready.flat)
        steps.append(launch.Step(jit.function(clear, place), -(-rows // CLEAR_ROWS), CLEAR_ROWS))
    if grid:
        grid = cuda_fa3.blocks(grid, info) if isinstance(ready, cuda_fa3.Instance) else grid
        function = jit.function(ready.source, place, ready.shared_memory)
        steps.append(launch.Step(function, grid, ready.tile.threads, ready.shared_memory))
    return ready, steps


def _params(plan: Plan, problem: Problem, ready: AnyInstance, pointers: dict[str, int], counter: int = 0) -> np.ndarray:
    if isinstance(ready, cuda_fa3.Instance):
        return cuda_fa3.pack(problem, ready, plan.extra[1], _grid(problem, ready), pointers, counter)
    return structs.pack_prefill(problem, ready.tile.m, plan.extra[1], ready.factor_left, pointers, ready.flat)


@functools.lru_cache(maxsize=512)
def with_load(chosen: AnyInstance, load: int, info: device.DeviceInfo) -> AnyInstance:
    """The instance for arrays that allow copies of ``load`` bytes."""
    if isinstance(chosen, cuda_fp.Instance):
        return cuda_fp.with_load(chosen, load)
    if load == chosen.load:
        return chosen
    if isinstance(chosen, cuda_fa1.Instance):
        return dataclasses.replace(chosen, load=load)
    rows = chosen.page_rows if load == 16 else min(chosen.page_rows, 1)
    tile = tile_for(chosen.d, chosen.dv, chosen.mask, chosen.score, load, rows, chosen.flat, info) or chosen.tile
    return dataclasses.replace(chosen, tile=tile, load=load, page_rows=rows)


@contextlib.contextmanager
def _small_arrays(problem: Problem) -> Iterator[dict[str, int]]:
    """Device addresses of the problem's small arrays; see `launch.uploaded`."""
    with launch.uploaded(structs.small_arrays(problem)) as pointers:
        yield {**{name: getattr(problem, name).pointer for name in problem.indices_on_device}, **pointers}


def instances(arch: str) -> Iterator[jit.Source]:
    """Every common instance for an architecture such as "sm_90a": for precompilation."""
    yield from (chosen.source for chosen in common(arch))
    yield from (chosen.source for chosen in cuda_fp.common(representative(arch)))
    yield from cuda_parts.instances(representative(arch))
    yield from (chosen.source for module in (cuda_fa1, cuda_fa3) for chosen in module.common(representative(arch)))
    for decodes in cuda_decode.common(representative(arch)):
        yield decodes.source
        if not decodes.merges:
            yield decodes.combine_source
    for flat in (False, True):
        yield clear_source(2, 4, flat)
    for itemsize in (4, 8):
        yield clear_source(itemsize, itemsize, False)
    yield from cuda_backward.instances(representative(arch))
    yield from naive_cuda.instances(arch)
    yield from cuda_append.instances(arch)
    yield from cuda_merge.instances(arch)
    yield from cuda_pages.instances(arch)


def common(arch: str) -> Iterator[Instance]:
    """Equal head sizes, full and causal or windowed, aligned arrays; and one of each rarer kind."""
    info = representative(arch)
    dtypes = ("float16",) if info.cc < (8, 0) else ("float16", "bfloat16")

    def make(
        dtype: str, d: int, mask: int, load: int = 16, score: int = SCORE_PLAIN, out: str | None = None, page_rows: int = 0,
        flat: bool = False,
    ) -> Instance:
        tile = tile_for(d, d, mask, score, load, page_rows, flat, info)
        assert tile is not None
        return Instance(dtype, out or dtype, d, d, tile, mask, score, load, page_rows, flat)

    for d in tiles.HEAD_CLASSES:
        for dtype in dtypes:
            for mask in (MASK_LENGTH, MASK_RIGHT):
                yield make(dtype, d, mask)
    for d in (64, 128):
        yield make("float16", d, MASK_RIGHT | MASK_LEFT)
        yield make("float16", d, MASK_RIGHT, flat=True)
        for load in (8, 4, 2):
            yield make("float16", d, MASK_RIGHT, load=load)
        for score in (SCORE_SCALED, SCORE_SOFTCAP, SCORE_ALIBI, SCORE_SOFTCAP | SCORE_ALIBI):
            yield make("float16", d, MASK_RIGHT, score=score)
        for mask, score in (
            (MASK_LENGTH, SCORE_BIAS), (MASK_RIGHT, SCORE_BIAS32), (MASK_LENGTH | MASK_ARRAY, SCORE_PLAIN),
            (MASK_RIGHT | MASK_ARRAY, SCORE_BIAS),
        ):
            yield make("float16", d, mask, score=score)
        everything = SCORE_SOFTCAP | SCORE_ALIBI | SCORE_BIAS32
        for rows in (1, 16):
            yield make("float16", d, MASK_RIGHT, page_rows=rows)
            yield make("float16", d, MASK_RIGHT | MASK_LEFT | MASK_ARRAY, score=everything, page_rows=rows)
    if "bfloat16" in dtypes:
        yield make("float16", 64, MASK_LENGTH, out="bfloat16")


def representative(arch: str) -> device.DeviceInfo:
    """A known GPU of an architecture, or of the next older one that there is."""
    number = int(jit.exact(arch).removeprefix("sm_").rstrip("af"))
    cc = (number // 10, number % 10)
    return max((info for info in device.KNOWN.values() if info.cc <= cc), key=lambda info: info.cc)
