"""The raw kernels on the host for keys and values in float8_e4m3fn: decode over them, the append that quantizes, and quantize_kv()."""

from __future__ import annotations

import itertools
from typing import Any

import compare
import devices
import ml_dtypes
import numpy as np
import pytest
from case import BF16, F16, F32
from cuflash import arrays, device, tiles_decode
from cuflash import problem as problems
from cuflash.backends import append, cuda, cuda_append, cuda_decode
from cuflash.types import Problem
from emulator import emulate
from emulator.guarded import Guarded

import cuflash

reason = "the cases are others in Numba's simulator" if devices.SIMULATED else emulate.why_unusable()
if reason is not None:
    pytest.skip(f"kernels cannot be emulated here: {reason}", allow_module_level=True)

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
H200, A100, T4 = (device.KNOWN[name] for name in ("H200", "A100", "T4"))
GPUS = ((H200, BF16), (H200, F16), (A100, BF16), (T4, F16))  # the newest conversion, and the bit by bit one


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    made = emulate.Emulator(tmp_path_factory.mktemp("emulated"))
    yield made
    made.close()


def codes(rng: np.random.Generator, size: float, *shape: int) -> np.ndarray:
    return np.clip(rng.standard_normal(shape) * size, -448, 448).astype(E4M3)


def call(
    dtype: np.dtype, *, batch: int = 2, queries: int = 1, keys: int = 300, heads: tuple[int, int] = (8, 2), d: int = 128, dv: int = 0,
    kind: str = "token", page: int = 0, spread: float = 0, short: int = 77, seed: int = 0, **options: Any,
) -> Problem:
    """A problem with NaN in all that lies behind the lengths, and in its results."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, queries, heads[0], d)).astype(dtype)
    size = 1 if kind == "none" else 100
    k, v = codes(rng, size, batch, keys, heads[1], d), codes(rng, size, batch, keys, heads[1], dv or d)
    by_token = [rng.uniform(0.005, 0.03, (batch, keys, heads[1])).astype(F32) for _ in range(2)]
    by_token[1] *= np.float32(10) ** rng.uniform(-spread, spread, by_token[1].shape).astype(F32)
    found: Any = {"token": by_token, "head": [a[0, 0] for a in by_token], "tensor": [0.01, 0.02], "none": [None, None]}[kind]
    lengths = np.array([keys, *[short] * (batch - 1)])
    stored = []
    count = -(-keys // page) if page else 0
    table = rng.permutation(batch * count).reshape(batch, count)
    for a in (k, v, *found):
        if isinstance(a, np.ndarray) and a.ndim > 2:
            for b, n in enumerate(lengths):
                a[b, n:] = np.nan
            if page:
                padded = np.full((batch, count * page, *a.shape[2:]), np.nan, a.dtype)
                padded[:, :keys] = a
                a = np.empty((batch * count, page, *a.shape[2:]), a.dtype)
                a[table] = padded.reshape(batch, count, page, *a.shape[2:])
        stored.append(a)
    if page:
        options["page_table"] = table
    out, lse = np.full((*q.shape[:3], dv or d), np.nan, dtype), np.full((batch, heads[0], queries), np.nan, F32)
    problem = problems.build_attention(q, *stored[:2], k_scale=stored[2], v_scale=stored[3], kv_lengths=lengths, **options)
    return problems.with_outputs(problem, out, lse, True, "BSHD", 4)[0]


def check(emulator: emulate.Emulator, problem: Problem, gpu: device.DeviceInfo, side: emulate.Side = "end", **tile: Any) -> str:
    """Run it and compare; the tile of the GPU or a changed one. Returns the instance's name."""
    assert cuda.decline(problem, "decode") is None
    instance, how = cuda_decode.plan(problem, cuda.instance(problem, gpu, "decode"), gpu).extra
    emulator.run_decode(problem, gpu, instance, how, side=side)
    want = compare.expect([problem.replace(out=None, lse=None)])
    compare.assert_close(problem.out.array, want.out[0], want.out_bound, "out")
    compare.assert_close(problem.lse.array, want.lse[0], want.lse_bound, "lse")
    return instance.name


@pytest.mark.parametrize("kind", ["token", "head", "tensor", "none"])
@pytest.mark.parametrize(("gpu", "dtype"), GPUS, ids=lambda x: getattr(x, "name", str(x)))
def test_scales(emulator, gpu, dtype, kind):
    assert "_e4m3_" in check(emulator, call(dtype, kind=kind), gpu)
    check(emulator, call(dtype, kind=kind, page=16, keys=200), gpu, "start")


CALLS: dict[str, dict[str, Any]] = {
    **{f"d{d}": {"d": d, "keys": 150} for d in (4, 20, 32, 64, 72, 96, 160, 192, 256)},
    **{f"d{d}-dv{dv}": {"d": d, "dv": dv} for d, dv in ((128, 64), (64, 256))},
    "pages-d64-dv128": {"d": 64, "dv": 128, "page": 7},
    **{f"group-{n}": {"heads": (n, 1)} for n in (1, 8, 9, 32, 64, 128)},
    "many-queries": {"queries": 20, "causal": True},
    **{f"pages-of-{n}": {"page": n, "queries": 3, "causal": True} for n in (1, 16, 64)},
    "window": {"queries": 2, "window": (40, 0)},
    "softcap-sinks": {"softcap": 3.0, "sinks": np.linspace(-1, 1, 8)},
    "alibi": {"queries": 2, "alibi_slopes": np.linspace(0.1, 1, 8)},
    "tree": {"queries": 2, "mask": np.tril(np.ones((2, 2), bool))},
    "tree-of-6": {"queries": 6, "mask": np.tril(np.ones((6, 6), bool))},
    "splits": {"num_splits": 3},
    "invariant": {"batch_invariant": True, "keys": 1500},
    "negative-scale": {"scale": -0.1},
    "values-of-many-sizes": {"spread": 3, "keys": 600},
    "empty": {"short": 0},
}


@pytest.mark.parametrize("name", CALLS)
def test_options(emulator, name):
    n = list(CALLS).index(name)
    for gpu, dtype in GPUS[n % 2 :: 2]:
        check(emulator, call(dtype, seed=n, **CALLS[name]), gpu, "start" if n % 3 else "end")


@pytest.mark.parametrize("queries", [2, 9])
@pytest.mark.parametrize(("gpu", "dtype"), [GPUS[0], GPUS[3]], ids=lambda x: getattr(x, "name", str(x)))
def test_nan_is_seen_by_those_who_see_it(emulator, gpu, dtype, queries):
    """In keys, values and their scales, each at a key that some of the queries see."""
    for name, bits in (("k", 0x7F), ("k", 0xFF), ("v", 0x7F), ("v", 0xFF), ("k_scale", None)):
        problem = call(dtype, queries=queries, heads=(2, 2), causal=True, short=60)
        key = 300 - 2
        a = getattr(problem, name).array
        a[0, key, 1, ...] = np.nan
        if bits:
            a[0, key, 1] = codes(np.random.default_rng(5), 100, 128)
            a.view(np.uint8)[0, key, 1, 77] = bits
        check(emulator, problem, gpu)
        seen = np.isnan(problem.out.array.astype(F32)).any(axis=-1)
        assert seen[0, -2:, 1].all() and seen.sum() == 2


def test_large_and_tiny_queries(emulator):
    """bfloat16 queries go to fp16 by a power of two for each row: the range of neither is lost."""
    for size in (1e30, 1e-30, 1e-37):
        problem = call(BF16, kind="tensor", heads=(4, 1), scale=1 / size)
        problem.q.array[...] = (problem.q.array.astype(np.float64) * size * np.array([1, 1e-3, 1e-6, 1.0])[:, None]).astype(BF16)
        check(emulator, problem, H200)
    problem = call(BF16, heads=(4, 1))
    problem.q.array[0, 0, 1, 5], problem.q.array[0, 0, 2, 7], problem.q.array[0, 0, 3] = np.nan, np.inf, 0
    check(emulator, problem, H200)


def test_bad_pages_are_not_followed(emulator):
    """Rows that see a key of such a page become NaN, others stay as they were."""
    problem = call(F16, page=16, queries=5, window=(20, 0), keys=160, short=160)
    table = problem.page_table.copy()
    table[0, 9], table[1, 2] = -1, len(problem.k.array)
    instance, how = cuda_decode.plan(problem, cuda.instance(problem, H200, "decode"), H200).extra
    emulator.run_decode(problem.replace(page_table=table), H200, instance, how)
    assert np.isnan(problem.out.array[0].astype(F32)).all()
    want = compare.expect([problem.replace(out=None, lse=None)])
    compare.assert_close(problem.out.array[1], want.out[0][1], want.out_bound, "out")


# ---- appends ----------------------------------------------------------------------------------------------------------


def same_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    """Bit for bit, but for the sign of NaN."""
    nan = np.isnan(a.astype(F32)) & np.isnan(b.astype(F32))
    return bool(((a.view(np.uint8) == b.view(np.uint8)) | nan).all())


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("kind", ["token", "head", "tensor", "none", "codes"])
@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("style", ["", "half", "interleaved"])
def test_appends_are_those_of_numpy(emulator, dtype, kind, page, style):
    """The same bits in caches and scales, whether the lengths are on the host or on the device."""
    if kind == "codes" and style:
        pytest.skip("nothing is turned that is quantized already")
    rng = np.random.default_rng(1)
    for new_keys, on_device in itertools.product((1, 3), (False, True)):
        q, k_new, v_new = (rng.standard_normal((2, new_keys, h, 40)).astype(dtype) for h in (4, 2, 2))
        if kind == "codes":
            k_new, v_new = codes(rng, 100, *k_new.shape), codes(rng, 100, *v_new.shape)
        shape = (32 // page, page, 2) if page else (2, 16, 2)
        options: dict[str, Any] = {"causal": True}
        if page:
            options["page_table"] = rng.permutation(32 // page).reshape(2, -1)
        if style:
            angle = rng.uniform(0, 6, (20, 8)).astype(F32)
            options["rope"] = np.cos(angle), np.sin(angle), style
        made = []
        for _ in range(2):
            caches = [np.zeros((*shape, 40), np.uint8).view(E4M3) for _ in range(2)]
            scale: Any = {"head": [np.array([0.01, 0.02], F32)] * 2, "tensor": [0.01, 0.02]}.get(kind, [None, None])
            if kind in ("token", "codes"):
                scale = [np.full(shape, 5, F32) for _ in range(2)]
            given = {"k_new": k_new, "v_new": v_new, "k_scale": scale[0], "v_scale": scale[1], **options}
            problem, new = problems.build_decode(q, *caches, [5, 12], **given)
            made.append((problem, new, [*caches, *(s for s in scale if isinstance(s, np.ndarray))]))
        with append.appended(*made[0][:2]) as ready:
            pass
        problem, new, _ = made[1]
        if on_device:
            lengths = arrays.view(np.array([5, 12], np.int32), "kv_lengths")
            problem, new = problem.replace(kv_lengths=lengths), problems.Append(lengths, new.k_new, new.v_new, new.rope, new.quantizes)
        other = emulator.append(problem, new)
        for a, b in zip(made[0][2], made[1][2], strict=True):
            compare.assert_same_bits(a, b)
        assert np.abs(ready.q.array.astype(F32) - other.q.array.astype(F32)).max() <= 2 * compare.eps(dtype) * 4


@pytest.mark.parametrize("by", ["token", "head", "tensor"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_quantizing_is_that_of_numpy(emulator, dtype, by):
    """All float16 numbers, by a scale for all; rows with zeros, NaN and infinities, by scales that are found."""
    if by == "tensor":
        with np.errstate(invalid="ignore"):  # NaN with a payload
            x = np.arange(1 << 16, dtype=np.uint16).view(F16).reshape(1, 256, 1, 256).astype(dtype)
        scale: Any = 1.0
    else:
        x = np.random.default_rng(0).standard_normal((2, 5, 3, 72)).astype(dtype)
        x[0, 1], x[1, 2, 0, 3], x[1, 3, 1, 7] = 0, np.inf, np.nan
        scale = np.full((2, 5, 3), 9, F32) if by == "token" else np.array([0.01, 0.02, 0.03], F32)
    found = np.zeros(x.shape, np.uint8).view(E4M3)
    memory = {"x": Guarded(arrays.view(x, "x"), "end"), "codes": Guarded(arrays.view(found, "codes"), "start", writable=True)}
    if by != "tensor":
        memory["scale"] = Guarded(arrays.view(scale, "scale"), "end", writable=True)
    place: Any = scale
    if by != "tensor":
        place = memory["scale"].view if by == "token" else arrays.broadcast(memory["scale"].view, x.shape[:-1])
    threads, params = cuda_append.pack_quantize(memory["x"].view, memory["codes"].view, place)
    library = emulator.prepare_source(cuda_append.source(dtype.name, E4M3.name), "AppendParams", 800).result()
    emulator.execute(library, params, -(-threads // cuda_append.THREADS), cuda_append.THREADS, 0, memory)
    for name in memory.keys() - {"x"}:
        memory[name].write_back()
    want, its_scale = cuflash.quantize_kv(x, None if by == "token" else scale)
    assert same_numbers(found, want)
    if by == "token":
        compare.assert_same_bits(scale, its_scale)


def test_every_tile_has_room_for_scales():
    """Threads are a multiple of keys: each copies the scales of one."""
    for gpu, d, rows in itertools.product((H200, A100, T4), (64, 128, 192, 256), (1, 8, 16, 32, 64, 128)):
        tile = tiles_decode.decode(rows, d, d, gpu, itemsize=1)
        if tile is None and gpu is not H200:
            continue
        assert tile.threads % tile.n == 0 and tile.shared_memory(d, d, 1) <= gpu.shared_memory_block
