"""What `bench decode` sets beside each other on the same arrays: calls of cuflash, a kernel that only reads, and peers."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cuflash

from .. import device
from . import peers, prefill, report
from .peers import Arrays, Call

HEAD_DIM = 128
TIMES_L2 = 4  # keys and values that rotate are so many times as large as the L2 cache
SECONDS_A_TURN, MOST_CALLS = 3e-3, 64  # of a graph
MOST_GROUP = 16  # query heads a key/value head that FlashInfer takes

# 16 bytes a thread and load, eight loads on their way; one half of the blocks reads keys, the other one values.
READ_THREADS = 512
READ = r"""
extern "C" __global__ void read(const uint4* k, const uint4* v, long long count, unsigned* seen) {
    const uint4* from = blockIdx.x % 2 ? v : k;
    const long long step = gridDim.x / 2 * (long long)blockDim.x;
    uint4 all = {0, 0, 0, 0};
    for (long long i = blockIdx.x / 2 * (long long)blockDim.x + threadIdx.x; i < count; i += 8 * step) {
        uint4 x[8];
        #pragma unroll
        for (int n = 0; n < 8; ++n) x[n] = i + n * step < count ? __ldcs(from + i + n * step) : uint4{0, 0, 0, 0};
        #pragma unroll
        for (int n = 0; n < 8; ++n) { all.x ^= x[n].x; all.y ^= x[n].y; all.z ^= x[n].z; all.w ^= x[n].w; }
    }
    if ((all.x ^ all.y ^ all.z ^ all.w) == 0x12345678) *seen = 1;  // so that no load can be left out
}
"""


@dataclass(frozen=True)
class Shape:
    """One query a sequence, head size 128."""

    batch: int
    heads_q: int
    heads_kv: int
    keys: int

    @property
    def name(self) -> str:
        return f"B{self.batch} {self.heads_q}/{self.heads_kv} N{self.keys}"

    @property
    def bytes(self) -> int:
        """Of keys and values in 16 bits."""
        return 4 * self.batch * self.keys * self.heads_kv * HEAD_DIM

    def copies(self, l2: int) -> int:
        """Pairs of keys and values that take turns, so that none is found in a cache of so many bytes."""
        return max(2, -(-TIMES_L2 * l2 // self.bytes))

    def inputs(self, dtype: np.dtype) -> tuple[Any, list[tuple[Any, Any]]]:
        """Random queries (B, 1, Hq, D), and pairs of keys and values (B, N, Hkv, D)."""
        cached = (self.batch, self.keys, self.heads_kv, HEAD_DIM)
        pairs = [(random(cached, dtype), random(cached, dtype)) for _ in range(self.copies(gpu().l2_bytes))]
        return random((self.batch, 1, self.heads_q, HEAD_DIM), dtype), pairs


def gpu() -> device.DeviceInfo:
    """CuPy's current one."""
    import cupy

    return device.actual(cupy.cuda.Device().id)


def random(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Normal numbers on the GPU, other ones in each call."""
    import cupy

    return cupy.random.standard_normal(shape, np.float32).astype(dtype)


class Expected(NamedTuple):
    """Right values in float32, (B, 1, Hq, D), and how far a result in 16 bits may lie from them, (B, 1, 1, 1)."""

    values: Any
    bound: Any


def expected(q: Any, k: Any, v: Any) -> Expected:
    """One query over all its keys, by products of whole matrices in float32, of arrays of NumPy or CuPy.

    The bound, of each sequence, is twice the largest error of the same computation with its weights and its result rounded to q's
    dtype, and twice the dtype's epsilon of the largest value.
    """
    grouped = q.astype(np.float32).reshape(q.shape[0], k.shape[2], -1, q.shape[3])
    keys, values = (a.astype(np.float32).transpose(0, 2, 1, 3) for a in (k, v))
    scores = grouped @ keys.swapaxes(-1, -2) * float(q.shape[3]) ** -0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    exact = weights @ values
    rounded = (weights.astype(q.dtype).astype(np.float32) @ values).astype(q.dtype).astype(np.float32)
    error, largest = (abs(a).max(axis=(1, 2, 3), keepdims=True) for a in (rounded - exact, exact))
    return Expected(exact.reshape(q.shape), 2 * error + 2 * float(ml_dtypes.finfo(q.dtype).eps) * largest)


@dataclass
class Side:
    """Calls that do the same on one pair of keys and values each, and what they must give; nothing of a kernel that only reads."""

    calls: list[Call]
    wants: list[Expected] = field(default_factory=list)
    of_torch: bool = False
    eager: bool = False

    def check(self, name: str) -> None:
        """Run each call once; raise RuntimeError for a wrong value."""
        for call, want in zip(self.calls, self.wants, strict=bool(self.wants)):
            result = peers.as_cupy(call())
            error = float((abs(result.reshape(want.values.shape).astype(np.float32) - want.values) / want.bound).max())
            if not error <= 1:
                raise RuntimeError(f"{name}: an error of {error:.3g} times what float32 with rounded weights allows")

    def timed(self, seconds: float) -> prefill.Timed:
        """A graph of calls that take turns, of which one is expected to take so long."""
        rounds = max(1, min(MOST_CALLS, int(SECONDS_A_TURN / seconds)) // len(self.calls))
        turn = itertools.cycle(self.calls)
        # Timed makes one call for itself, two of a peer: the rotation goes on from there.
        return prefill.Timed(lambda: next(turn)(), rounds * len(self.calls), self.of_torch, self.eager)


def take_turns(sides: dict[Any, Side], seconds: float, turns: int) -> dict[Any, np.ndarray]:
    """Seconds of a call, (turns,) for each side; all have been checked."""
    return prefill.take_turns({name: side.timed(seconds) for name, side in sides.items()}, turns)


def beside(theirs: np.ndarray, own: np.ndarray) -> dict[str, float]:
    """Microseconds of another side; its time / ours of the same turn, as a median with the lower end of its confidence interval."""
    return {"us": 1e6 * float(np.median(theirs))} | report.ratio(theirs, own)


def cost(variant: np.ndarray, plain: np.ndarray) -> dict[str, float]:
    """Microseconds of a variant; its time / that of the plain call, as a median with the upper end of its confidence interval."""
    return {"us": 1e6 * float(np.median(variant))} | report.cost(variant, plain)


def against(p: dict[str, float] | None) -> str:
    """Time and ratio of another side."""
    return f"{p['us']:.1f}: {p['ratio']:.2f} ({p['lower']:.2f})" if p else "-"


def costs(p: dict[str, float]) -> str:
    """Time and cost of a variant."""
    return f"{p['us']:.1f}: {p['cost']:.3f} ({p['upper']:.3f})"


# ---- cuflash, and reading ------------------------------------------------------------------------------------------------


def ours(q: Any, pairs: Sequence[tuple[Any, Any]], **options: Any) -> list[Call]:
    """Calls of the raw decode kernel, all with one buffer for the result."""
    import cupy

    options = {"kernel": "decode", "backend": "cuda", "out": cupy.empty_like(q), **options}
    return [functools.partial(cuflash.attention, q, k, v, **options) for k, v in pairs]


def reads(pairs: Sequence[tuple[Any, Any]]) -> list[Call]:
    """Reading the same bytes, one launch a pair."""
    import cupy

    kernel, seen = cupy.RawKernel(READ, "read"), cupy.zeros(1, np.uint32)
    blocks = 2 * gpu().multiprocessors
    return [
        functools.partial(kernel, (blocks,), (READ_THREADS,), (k.data, v.data, np.int64(k.nbytes // 16), seen.data)) for k, v in pairs
    ]


class Pages(NamedTuple):
    """Dense caches seen as pages that belong to the sequences in random order."""

    pairs: list[tuple[Any, Any]]  # (pages, page_size, Hkv, D)
    table: Any  # int32 (B, pages of a sequence), on the GPU
    lengths: Any  # int32 (B,), on the GPU

    def gathered(self) -> list[tuple[Any, Any]]:
        """Dense caches with what each sequence finds."""
        return [(take(k, self.table), take(v, self.table)) for k, v in self.pairs]


def take(pages: Any, table: Any) -> Any:
    """A dense copy (B, keys, Hkv, D) of the pages that a table (B, n) names."""
    bits = f"u{pages.dtype.itemsize}"  # CuPy's own indexing knows no dtypes of ml_dtypes
    return pages.view(bits)[table].view(pages.dtype).reshape(table.shape[0], -1, *pages.shape[2:])


def paged(pairs: Sequence[tuple[Any, Any]], page: int) -> Pages:
    import cupy

    batch, keys, heads, d = pairs[0][0].shape
    table = cupy.asarray(np.random.default_rng(1).permutation(batch * keys // page).astype(np.int32).reshape(batch, -1))
    in_pages: list[tuple[Any, Any]] = [(k.reshape(-1, page, heads, d), v.reshape(-1, page, heads, d)) for k, v in pairs]
    return Pages(in_pages, table, cupy.full(batch, keys, np.int32))


# ---- peers ---------------------------------------------------------------------------------------------------------------


def dense_peers() -> dict[str, Callable[[Arrays], Call]]:
    """Those that this machine has, from (q, k, v) to a call."""
    found: dict[str, Callable[[Arrays], Call]] = {}
    if importlib.util.find_spec("torch"):
        for name, engine in (("cuDNN", "CUDNN_ATTENTION"), ("FA2", "FLASH_ATTENTION")):
            sdpa = peers.torch_sdpa(engine)
            found[f"{name} (PyTorch)"] = lambda arrays, sdpa=sdpa: sdpa(arrays, False)  # type: ignore[misc]
        if importlib.util.find_spec("fa3_fwd_interface"):
            found["FA3"] = flash_attention_3
        found["naive (PyTorch)"] = naive_torch
    found["naive (cuflash)"] = lambda arrays: ours(arrays[0], [arrays[1:]], kernel="naive")[0]
    return found


def is_naive(peer: str) -> bool:
    """Whether it stores the scores."""
    return peer.startswith("naive")


def flash_attention_3(arrays: Arrays) -> Call:
    torch = importlib.import_module("torch")
    module = importlib.import_module("fa3_fwd_interface")
    q, k, v = map(peers.as_torch, arrays)
    lengths = torch.full((k.shape[0],), k.shape[1], device=k.device, dtype=torch.int32)
    return lambda: module.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)


def naive_torch(arrays: Arrays) -> Call:
    """Two products of matrices with a softmax between them."""
    torch = importlib.import_module("torch")
    q, k, v = map(peers.as_torch, arrays)
    grouped = q.view(q.shape[0], k.shape[2], -1, q.shape[3])

    def call() -> Any:
        scores = torch.matmul(grouped, k.permute(0, 2, 3, 1)) * q.shape[3] ** -0.5
        return torch.matmul(torch.softmax(scores.float(), -1).to(q.dtype), v.transpose(1, 2)).view(q.shape)

    return call


def flashinfer(q: Any, pages: Pages) -> list[Call]:
    """FlashInfer's decode on the same pages, planned once."""
    torch, module = importlib.import_module("torch"), importlib.import_module("flashinfer")
    batch, _, heads_q, d = q.shape
    _, page, heads_kv, _ = pages.pairs[0][0].shape
    indices = torch.from_dlpack(pages.table).flatten()
    indptr = torch.arange(batch + 1, device=indices.device, dtype=torch.int32) * pages.table.shape[1]
    last = torch.full((batch,), page, device=indices.device, dtype=torch.int32)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=indices.device), "NHD", use_cuda_graph=True, use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr.clone(), paged_kv_indices_buffer=indices.clone(), paged_kv_last_page_len_buffer=last.clone(),
    )
    query = peers.as_torch(q)[:, 0]
    wrapper.plan(indptr, indices, last, heads_q, heads_kv, d, page, q_data_type=query.dtype, kv_data_type=query.dtype)
    return [functools.partial(wrapper.run, query, tuple(map(peers.as_torch, pair))) for pair in pages.pairs]
