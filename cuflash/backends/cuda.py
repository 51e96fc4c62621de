"""The raw CUDA backend: which kernel instance a problem needs, and its launch. Importing it loads neither CuPy nor NVRTC."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .. import device, jit, launch, tiles
from ..tiles import Tile
from ..types import HOST, UNBOUNDED, Plan, Problem
from . import naive_cuda, packed

NAME = "cuda"
KERNELS = ("fa2", "naive")

MASK_LENGTH, MASK_RIGHT, MASK_LEFT = 0, 1, 2  # as in mask.cuh
SCORE_PLAIN, SCORE_SCALED, SCORE_SOFTCAP, SCORE_ALIBI = 0, 1, 2, 4  # as in score.cuh
TYPES = {"float16": "Fp16", "bfloat16": "Bf16"}
SHORT_TYPES = {"float16": "fp16", "bfloat16": "bf16"}
LARGEST_GRID = 2**31 - 1


@dataclass(frozen=True)
class Instance:
    """What is fixed when prefill_fa2 is compiled. ``load`` is the width of its copies in bytes, 2 for any strides."""

    dtype: str
    out: str
    d: int  # padded head sizes
    dv: int
    tile: Tile
    mask: int = MASK_LENGTH
    score: int = SCORE_PLAIN
    load: int = 16

    @property
    def name(self) -> str:
        heads = f"d{self.d}" if self.d == self.dv else f"d{self.d}v{self.dv}"
        t = self.tile
        tile = f"m{t.m}n{t.n}w{t.warps}s{t.stages}" + f"g{t.groups}" * (t.groups > 1) + "q" * t.q_registers
        words = ["prefill_fa2", SHORT_TYPES[self.dtype], heads, tile]
        if self.out != self.dtype:
            words.append(f"to_{SHORT_TYPES[self.out]}")
        if self.mask != MASK_LENGTH:
            words.append("window" if self.mask & MASK_LEFT else "causal")
        for bit, word in ((SCORE_SCALED, "scaled"), (SCORE_SOFTCAP, "softcap"), (SCORE_ALIBI, "alibi")):
            words += [word] * bool(self.score & bit)
        if self.load != 16:
            words.append("strided" if self.load == 2 else f"load{self.load}")
        return "_".join(words)

    @property
    def shared_memory(self) -> int:
        return self.tile.shared_memory(self.d, self.dv)

    @functools.cached_property
    def source(self) -> jit.Source:
        t = self.tile
        numbers = (self.d, self.dv, t.m, t.n, t.warps, t.stages, t.groups, str(t.q_registers).lower(), self.load, self.mask, self.score)
        stub = (
            f"using Instance = PrefillFa2<{TYPES[self.dtype]}, {TYPES[self.out]}, {', '.join(map(str, numbers))}>;\n"
            f'static_assert(sizeof(PrefillParams) == {launch.PREFILL_PARAMS.itemsize}, "launch.py mirrors params.cuh");\n'
            f'static_assert(Instance::SMEM_BYTES == {self.shared_memory}, "tiles.py counts shared memory as the kernel does");\n'
            f'extern "C" __global__ void __launch_bounds__(Instance::THREADS, {t.resident}) {self.name}('
            "const __grid_constant__ PrefillParams p) {\n"
            "    extern __shared__ __align__(1024) unsigned char smem[];\n"
            "    prefill_fa2<Instance>(p, smem);\n"
            "}\n"
        )
        return jit.Source("prefill_fa2.cu", stub, self.name)


def auto_kernels(problem: Problem) -> tuple[str, ...]:
    """Kernels for kernel="auto", best first."""
    return ("fa2",)


@functools.lru_cache(maxsize=1)
def unusable() -> str | None:
    """What in the installation stands in the way, with the command that mends it, or None."""
    reason = jit.why_unusable()
    if reason is not None:
        return reason
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() < 1:
            return "CUDA finds no GPU"
    except Exception as error:  # whatever CuPy or the driver raises, it is a reason and not a failure of the call
        return f"CuPy finds no GPU ({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''})"
    return None


def decline(problem: Problem, kernel: str) -> str | None:
    """Why this backend does not run this problem with this kernel, or None."""
    if kernel == "naive":
        return naive_cuda.decline(problem)
    dtype, out = problem.q.dtype.name, problem.out_dtype.name
    if dtype in ("float32", "float64"):
        return f"{dtype} arrays need the kernel prefill_fp, which is not part of this version; float16 and bfloat16 run"
    if dtype not in TYPES or out not in TYPES:
        return f"{dtype} arrays with {out} results; it weighs values in 16 bits, so that it offers float16 and bfloat16 results only"
    absent = {
        "page_table": problem.paged, "bias": problem.bias is not None, "mask": problem.mask is not None,
        "score_mod": problem.score_mod is not None, "mask_mod": problem.mask_mod is not None, "score='sqdist'": problem.score == "sqdist",
        "num_splits": (problem.num_splits or 1) > 1,
    }
    for name, asked in absent.items():
        if asked:
            return f"{name} is not part of this version of its kernels"
    sizes = (problem.head_dim, problem.head_dim_v)
    if not all(1 <= size <= tiles.LARGEST_HEAD for size in sizes):
        return f"head sizes {sizes[0]} and {sizes[1]}; it takes 1 to {tiles.LARGEST_HEAD}"
    longest = max(problem.q.shape[-3], problem.k.shape[-3], problem.seqlen_q, problem.seqlen_k)
    if longest > launch.LONGEST:
        return f"sequences of {longest:,} rows; it takes at most {launch.LONGEST:,}"
    if problem.op != "attention" and problem.op != "decode":
        return "it has no backward pass yet"
    if problem.q.device == HOST or unusable() is not None:  # what the kernel could do; the planner asks for the GPU itself
        return None
    info = device.probe(problem.q.device)
    if info.cc < (7, 5):
        return f"{info.name} has compute capability {info.cc[0]}.{info.cc[1]}; it needs 7.5"
    if "bfloat16" in (dtype, out) and info.cc < (8, 0):
        return f"bfloat16 needs compute capability 8.0, {info.name} has {info.cc[0]}.{info.cc[1]}; float16 runs"
    chosen = instance(problem, info)
    if chosen is None:
        memory = f"{info.shared_memory_block:,} bytes of shared memory of {info.name}"
        return f"no tile for head sizes {sizes[0]} and {sizes[1]} fits the {memory}"
    if _grid(problem, chosen.tile) > LARGEST_GRID:
        return f"{_grid(problem, chosen.tile):,} blocks; a grid has at most {LARGEST_GRID:,}"
    return None


def instance(problem: Problem, info: device.DeviceInfo) -> Instance | None:
    """The kernel instance for these arrays, or None if no tile fits the GPU."""
    d, dv = tiles.head_class(problem.head_dim), tiles.head_class(problem.head_dim_v)
    left, right = (side != UNBOUNDED for side in problem.window)
    mask = MASK_RIGHT | MASK_LEFT if left else MASK_RIGHT if right else MASK_LENGTH
    load, score = launch.copy_bytes((problem.q, problem.k, problem.v)), score_kind(problem)
    tile = tiles.prefill_fa2(d, dv, mask != MASK_LENGTH, score != SCORE_PLAIN or load <= 4, info)
    if tile is None:
        return None
    return Instance(problem.q.dtype.name, problem.out_dtype.name, d, dv, tile, mask, score, load)


def score_kind(problem: Problem) -> int:
    """SCORE_PLAIN where the scale can be folded into the exponential, else what the logits need."""
    kind = (SCORE_SOFTCAP if problem.softcap else 0) | (SCORE_ALIBI if problem.alibi_slopes is not None else 0)
    foldable = 1e-30 < float(problem.scale) * launch.LOG2E < 1e30  # type: ignore[arg-type]
    return kind if kind or foldable else SCORE_SCALED


def plan(problem: Problem, kernel: str) -> Plan:
    """Tile and instance."""
    if kernel == "naive":
        return naive_cuda.plan(problem, NAME)
    info = device.probe(problem.q.device)
    chosen = instance(problem, info)
    assert chosen is not None  # else it was declined
    t = chosen.tile
    why = (
        f"tensor cores (mma.sync), {t.m} rows x {t.n} keys a block of {t.warps} warps, {chosen.shared_memory:,} bytes of shared memory "
        f"on {info.name}"
    )
    extra = (chosen, _section(problem, chosen, info))
    return Plan(kernel=kernel, backend=NAME, reason=why, tile=(t.m, t.n), threads=t.threads, extra=extra)


def _section(problem: Problem, chosen: Instance, info: device.DeviceInfo) -> int:
    """(batch, head) pairs whose tiles are handed out together.

    Where every row sees all keys, all tiles cost the same, and one head after the other keeps its keys and values in the L2 cache. Else
    the longest tiles of as many heads as fit most of the cache start together, so that none of them ends alone; and sections are of
    equal size, as the long tiles of a small one at the end would leave most of the GPU idle (up to 10 % on an H200).
    """
    pairs = max(1, problem.batch * problem.heads_q)
    if chosen.mask == MASK_LENGTH:
        return 1
    bytes_per_pair = 2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v) // problem.group_size
    m_tiles = max(1, -(-problem.seqlen_q // chosen.tile.m))
    most = max(1, min(pairs, info.l2_bytes * 3 // 4 // max(1, bytes_per_pair), LARGEST_GRID // m_tiles))
    sections = -(-pairs // most)
    return -(-pairs // sections)


def _grid(problem: Problem, tile: Tile) -> int:
    return problem.batch * problem.heads_q * -(-problem.seqlen_q // tile.m)


def run(plan: Plan, problem: Problem) -> None:
    """Write problem.out, and problem.lse unless it is None."""
    if plan.kernel == "naive":
        naive_cuda.run(plan, problem)
        return
    chosen, section = plan.extra
    if problem.varlen:
        packed.clear_slack(problem)
    # The arrays of this run may be aligned otherwise than those that the plan was made for.
    ready = with_load(chosen, launch.copy_bytes((problem.q, problem.k, problem.v)), device.probe(problem.q.device))
    grid = _grid(problem, ready.tile)
    if grid == 0:
        return
    function = jit.function(ready.source, problem.q.device, ready.shared_memory)
    with _small_arrays(problem) as pointers:
        params = launch.pack_prefill(problem, ready.tile.m, section, ready.score == SCORE_PLAIN, pointers)
        launch.launch(function, grid, ready.tile.threads, ready.shared_memory, params, launch.stream_pointer(None))


@functools.lru_cache(maxsize=512)
def with_load(chosen: Instance, load: int, info: device.DeviceInfo) -> Instance:
    """The instance for arrays that allow copies of ``load`` bytes."""
    if load == chosen.load:
        return chosen
    tile = chosen.tile
    if load <= 4:
        tile = tiles.prefill_fa2(chosen.d, chosen.dv, chosen.mask != MASK_LENGTH, True, info) or tile
    return dataclasses.replace(chosen, tile=tile, load=load)


@contextlib.contextmanager
def _small_arrays(problem: Problem) -> Iterator[dict[str, int]]:
    """Device addresses of lengths, slopes and sinks; their memory goes back to the pool, in the stream's order, afterwards."""
    import cupy

    wanted: dict[str, np.ndarray] = {}
    for name in ("cu_seqlens_q", "cu_seqlens_k", "kv_lengths", "kv_start"):
        value = getattr(problem, name)
        if value is not None:
            wanted[name] = np.ascontiguousarray(value, np.int64)
    for name in ("alibi_slopes", "sinks"):
        value = getattr(problem, name)
        if value is not None:
            wanted[name] = np.ascontiguousarray(value * launch.LOG2E, np.float32)
    if not wanted:
        yield {}
        return
    launch.refuse_capture(f"the copy on the device of {', '.join(wanted)}, which came as a host array,")
    # One copy for all of them; each begins at a multiple of 8 bytes.
    offsets, parts, total = {}, [], 0
    for name, value in wanted.items():
        data = value.tobytes()
        data += bytes(-len(data) % 8)
        offsets[name] = total
        parts.append(data)
        total += len(data)
    on_device = cupy.asarray(np.frombuffer(b"".join(parts), np.uint8))
    yield {name: on_device.data.ptr + offset for name, offset in offsets.items()}


def instances(arch: str) -> Iterator[jit.Source]:
    """Every common instance for an architecture such as "sm_90a": for precompilation."""
    for chosen in common(arch):
        yield chosen.source
    yield from naive_cuda.instances(arch)


def common(arch: str) -> Iterator[Instance]:
    """Equal head sizes, full and causal or windowed, aligned arrays; and one of each rarer kind."""
    info = representative(arch)
    dtypes = ("float16",) if info.cc < (8, 0) else ("float16", "bfloat16")

    def make(dtype: str, d: int, mask: int, load: int = 16, score: int = SCORE_PLAIN, out: str | None = None) -> Instance:
        tile = tiles.prefill_fa2(d, d, mask != MASK_LENGTH, score != SCORE_PLAIN or load <= 4, info)
        assert tile is not None
        return Instance(dtype, out or dtype, d, d, tile, mask, score, load)

    for d in tiles.HEAD_CLASSES:
        for dtype in dtypes:
            for mask in (MASK_LENGTH, MASK_RIGHT):
                yield make(dtype, d, mask)
    for d in (64, 128):
        yield make("float16", d, MASK_RIGHT | MASK_LEFT)
        for load in (8, 4, 2):
            yield make("float16", d, MASK_RIGHT, load=load)
        for score in (SCORE_SCALED, SCORE_SOFTCAP, SCORE_ALIBI, SCORE_SOFTCAP | SCORE_ALIBI):
            yield make("float16", d, MASK_RIGHT, score=score)
    if "bfloat16" in dtypes:
        yield make("float16", 64, MASK_LENGTH, out="bfloat16")


def representative(arch: str) -> device.DeviceInfo:
    """A known GPU of an architecture, or of the next older one that there is."""
    number = int(jit.exact(arch).removeprefix("sm_").rstrip("af"))
    cc = (number // 10, number % 10)
    return max((info for info in device.KNOWN.values() if info.cc <= cc), key=lambda info: info.cc)
