"""The raw kernels on the host, thread by thread: right results, and nothing that a GPU must not do. Needs a C++ compiler, no GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import calls
import compare
import devices
import numpy as np
import pytest
from case import BF16, F16, F32, F64, Case, alibi, bias, case, causal, fixed, mask
from cases import CASES, Target, absent
from cuflash import device, tiles
from cuflash import problem as problems
from cuflash.backends import cuda
from cuflash.tiles import Tile
from cuflash.tiles_fa3 import Fa3Tile
from cuflash.tiles_fp import FpTile
from cuflash.types import Problem
from emulator import emulate

reason = "the cases are others in Numba's simulator" if devices.SIMULATED else emulate.why_unusable()
if reason is not None:
    pytest.skip(f"kernels cannot be emulated here: {reason}", allow_module_level=True)

T4, H200 = device.KNOWN["T4"], device.KNOWN["H200"]
FA2 = Target("cuda", "fa2")
GPU_OF_FAMILY = {family: next(i for i in device.KNOWN.values() if tiles.family(i) == family) for family in tiles.PREFILL_FA2}


class Run(NamedTuple):
    """A problem on an emulated GPU. ``build`` gives the problem, with poisoned results, and what checks them afterwards."""

    name: str
    gpu: device.DeviceInfo
    build: Callable[[], tuple[Problem, Callable[[], None]]]
    tile: Tile | FpTile | Fa3Tile | None = None  # instead of the GPU's own

    def instance(self, problem: Problem, kernel: str = "fa2") -> emulate.Instance:
        instance = emulate.chosen(problem, self.gpu, kernel)
        return instance if self.tile is None else dataclasses.replace(instance, tile=self.tile)


def of_case(c: Case, dtype: np.dtype, gpu: device.DeviceInfo, tile: Tile | FpTile | Fa3Tile | None = None) -> Run:
    """A case of the conformance suite."""

    def build() -> tuple[Problem, Callable[[], None]]:
        call = calls.present(c, dtype)
        make = problems.build_varlen if c.packed is not None else problems.build_attention
        layout, ndim = call.options["layout"], call.args[0].ndim
        problem = problems.with_outputs(make(*call.args, **call.options), call.out, call.lse, True, layout, ndim)[0]
        return problem, lambda: calls.check(call, calls.expected(c, dtype))

    return Run(f"{c.name}-{dtype.name}-{gpu.name}", gpu, build, tile)


def of_arrays(name: str, gpu: device.DeviceInfo, arrays: Callable[[], tuple[np.ndarray, ...]], **options: object) -> Run:
    """A problem on arrays (B, S, H, D)."""

    def build() -> tuple[Problem, Callable[[], None]]:
        q, k, v = arrays()
        out = np.full((*q.shape[:3], v.shape[3]), np.nan, q.dtype)
        lse = np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, F64 if q.dtype == F64 else F32)
        plain = problems.build_attention(q, k, v, **options)

        def check() -> None:
            want = compare.expect([plain])
            compare.assert_close(out, want.out[0], want.out_bound, "out")
            compare.assert_close(lse, want.lse[0], want.lse_bound, "lse")

        return problems.with_outputs(plain, out, lse, True, "BSHD", 4)[0], check

    return Run(f"{name}-{gpu.name}", gpu, build)


def by_name(*generators: Iterable[Run]) -> dict[str, Run]:
    """Runs by their names, which must differ: of two with the same name only one would be tested."""
    found: dict[str, Run] = {}
    for run in itertools.chain(*generators):
        assert run.name not in found, run.name
        found[run.name] = run
    return found


# ---- every tile of the tables -------------------------------------------------------------------------------------------


def tile_runs() -> Iterator[Run]:
    """Each (head class, tile, code path) of the tables: full, causal, and the kinds that need more registers.

    Two blocks of rows, the second with few, and three tiles of keys, the last with few; every other class with padded columns.
    """
    seen = set()
    for family, table in tiles.PREFILL_FA2.items():
        gpu = GPU_OF_FAMILY[family]
        for d, choice in table.items():
            for kind in ("full", "band", "lean"):
                for tile in getattr(choice, kind):
                    key = d, tile._replace(resident=0), kind, gpu.cc < (8, 0)
                    if key in seen or (kind == "lean" and tile in choice.band):
                        continue
                    seen.add(key)
                    size = d - 8 * (len(seen) % 2)
                    rows, keys = tile.m + 5, 2 * tile.n + 9
                    dtype = F16 if gpu.cc < (8, 0) or len(seen) % 3 == 0 else BF16
                    name = f"tile-{d}-m{tile.m}n{tile.n}w{tile.warps}s{tile.stages}g{tile.groups}{'q' * tile.q_registers}-{kind}"
                    if kind == "full":
                        yield of_case(case(name, f"1,{rows},{keys},1,1,{size}"), dtype, gpu, tile)
                    elif kind == "band":
                        yield of_case(case(name, f"1,{rows},{max(rows, keys)},1,1,{size}", causal), dtype, gpu, tile)
                    else:
                        soft = case(f"{name}-softcap", f"1,{rows},{max(rows, keys)},1,1,{size}", causal, fixed(softcap=3.0))
                        yield of_case(soft, dtype, gpu, tile)
                        yield of_case(case(f"{name}-strided", f"1,{rows},{keys},1,1,{d - 1}"), dtype, gpu, tile)


def paged_tile_runs() -> Iterator[Run]:
    """Each tile for pages, with and without a bias: two tiles of keys and some more; pages that lie within a tile, and others."""
    seen = set()
    for family, table in tiles.PREFILL_FA2.items():
        gpu = GPU_OF_FAMILY[family]
        for d, (kind, options) in itertools.product(table, (("full", ()), ("causal", (causal,)), ("bias", (bias(),)))):
            tile = tiles.prefill_fa2(d, d, kind == "causal", False, gpu, 2 * (kind == "bias"), False, True)
            key = d, tile._replace(resident=0), kind, gpu.cc < (8, 0)
            if key in seen:
                continue
            seen.add(key)
            rows, keys, odd = tile.m + 5, 2 * tile.n + 9, len(seen) % 2
            name = f"tile-{d}-m{tile.m}n{tile.n}w{tile.warps}s{tile.stages}g{tile.groups}-pages-{kind}"
            paged = case(name, f"1,{rows},{max(rows, keys)},1,1,{d - 8 * odd}", *options, page_size=24 if odd else 16, kv_lengths=(keys,))
            yield of_case(paged, F16 if gpu.cc < (8, 0) or len(seen) % 3 == 0 else BF16, gpu)


def softcap_tile_runs() -> Iterator[Run]:
    """Each tile for a softcap alone: arguments of tanh for the short series, the longer one, and beyond."""
    for family, table in tiles.PREFILL_FA2_SOFTCAP.items():
        for d, tile in table.items():
            for softcap in (30.0, 3.0, 0.5):
                for kind in ((), (causal,)):
                    name = f"tile-{d}-m{tile.m}n{tile.n}w{tile.warps}s{tile.stages}-softcap{softcap}{'-causal' * len(kind)}"
                    soft = case(name, f"1,{tile.m + 5},{3 * tile.n + 9},1,1,{d}", *kind, fixed(softcap=softcap))
                    yield of_case(soft, BF16, GPU_OF_FAMILY[family])


def array_tile_runs() -> Iterator[Run]:
    """Each tile for bias and mask: the least and the most that waits in registers, read by whole instructions and one by one."""
    seen = set()
    for family, table in tiles.PREFILL_FA2.items():
        gpu = GPU_OF_FAMILY[family]
        for d in table:
            for extra, options in ((1, (bias(hidden=0.1),)), (2, (bias(dtype=F32, hidden=0.1), mask(visible=0.9)))):
                tile = tiles.prefill_fa2(d, d, False, False, gpu, extra)
                key = d, tile._replace(resident=0), extra, gpu.cc < (8, 0)
                if key in seen:
                    continue
                seen.add(key)
                dtype = F16 if gpu.cc < (8, 0) or len(seen) % 2 else BF16
                name = f"tile-{d}-m{tile.m}n{tile.n}w{tile.warps}s{tile.stages}g{tile.groups}-arrays{extra}"
                yield of_case(case(name, f"1,{tile.m + 5},{2 * tile.n + 8},1,1,{d}", *options), dtype, gpu)
                yield of_case(case(f"{name}-odd", f"1,20,{2 * tile.n + 9},1,1,{d - 8}", *options), dtype, gpu)


# ---- kinds of problems --------------------------------------------------------------------------------------------------

FURTHER = (
    case("copies-of-8-bytes", "1,70,130,2,1,20", causal),
    case("copies-of-4-bytes", "1,70,130,2,1,34", causal),
    case("softcap-alibi-window", "1,66,130,2,1,40", fixed(softcap=3.0, window=(50, 5), alibi_slopes=[0.5, 0.03])),
    *(
        case(f"pages-of-{size}", "2,33,300,2,1,64", causal, page_size=size, kv_lengths=(300, 161))
        for size in (1, 3, 16, 17, 64, 256)
    ),
    *(  # where the keys lie is worked out for many tiles at once: these have a few times as many, from where none needs a page
        case(f"pages-of-{size}-d{d}-long", f"1,40,{keys},1,1,{d}", causal, page_size=size, kv_lengths=(keys,), kv_start=(start,))
        for d, size, keys, start in ((64, 16, 3150, 5), (64, 48, 2100, 1030), (128, 32, 3100, 17), (128, 16, 2050, 0))
    ),
    case("pages-narrow-copies", "2,33,100,2,1,20", causal, page_size=5, kv_lengths=(100, 61)),
    case("pages-strided", "2,33,100,2,1,33", causal, page_size=5, kv_lengths=(100, 61), strides="every_other"),
    case("pages-dv", "2,33,100,2,1,32,64", page_size=5, kv_lengths=(100, 61), kv_start=(3, 0)),
    case(
        "pages-bias-mask-window", "2,33,104,4,2,64", fixed(window=(50, 3)), bias(), mask("B 1 Sq Sk", 0.8), page_size=8,
        kv_lengths=(104, 61),
    ),
    *(case(f"bias-columns-{n}", f"1,40,{n},2,1,64", bias(), mask("1 1 Sq Sk", 0.9)) for n in (1, 8, 31, 64, 65, 71, 72, 192)),
    case("bias-mask-by-elements", "1,40,192,2,1,64", bias(), mask(visible=0.9), strides="every_other"),
    case("chunk-of-a-prefill", "2,33,300,2,1,64", causal, bias("Hq 1 Sk"), kv_lengths=(300, 161)),
    case("softcap-alibi-bias32-mask", "1,66,136,2,1,64", fixed(softcap=3.0, window=(90, 5)), alibi(), bias(dtype=F32), mask(visible=0.9)),
    case("softcap-far", "1,40,130,2,1,64", fixed(softcap=40.0, scale=1e-3)),
    case("softcap-30", "1,70,330,2,1,64", fixed(softcap=30.0)),
    case("softcap-30-causal-mask-sinks", "2,70,330,2,1,128", causal, fixed(softcap=30.0, sinks=[0.5, -1.0]), mask(visible=0.7)),
    case("softcap-30-window-lengths", "2,70,330,2,1,40", fixed(softcap=30.0, window=(90, 5)), kv_lengths=(330, 97)),
    case("softcap-negative-scale", "1,40,330,2,1,64", fixed(softcap=30.0, scale=-0.125)),
    case("softcap-near", "1,40,130,2,1,64", fixed(softcap=2.0, scale=4.0)),
    case("window-128", "1,150,233,1,1,128", fixed(window=(70, 30))),
    case("window-256", "1,150,233,1,1,256", fixed(window=(70, 30))),
)


def kind_runs() -> Iterator[Run]:
    """All cases of the conformance suite that the kernel takes, on the newest and on the oldest code path, and some more."""
    for c in (*CASES, *FURTHER):
        if F16 not in c.dtypes or c.decode:
            continue
        options: dict[str, object] = {}
        for builder in c.options:
            options.update(builder(c.rng(), c.shape, F16))
        if not absent(FA2, F16, options):
            yield of_case(c, F16, H200)
            if options.get("out_dtype") != BF16:
                yield of_case(c, F16, T4)


def normal(d: int, dtype: np.dtype = F16, rows: int = 150, keys: int = 150) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(d)
    return tuple(rng.standard_normal((1, n, 1, d)).astype(dtype) for n in (rows, keys, keys))


def not_finite_values(d: int, dtype: np.dtype) -> tuple[np.ndarray, ...]:
    """NaN and infinities in values that some rows of a tile see and others do not."""
    q, k, v = normal(d, dtype)
    v[0, [149, 130, 131, 70, 5], 0, [3, d - 1, 0, 8, 1]] = np.nan, np.inf, -np.inf, np.nan, -np.inf
    return q, k, v


def with_value(which: int, row: int, value: float, keys: int = 150) -> tuple[np.ndarray, ...]:
    """Queries (0) or keys (1) with one number replaced, on features of one sign: an infinite key then gives infinite logits."""
    arrays = [abs(a) for a in normal(64, keys=keys)]
    arrays[which][0, row, 0, 3] = value
    return tuple(arrays)


def pages_not_filled(dtype: np.dtype) -> tuple[tuple[np.ndarray, ...], dict[str, object]]:
    """Sequences that begin and end within pages, which hold NaN before and behind them."""
    rng = np.random.default_rng(3)
    table, lengths, starts = rng.permutation(12).reshape(2, 6), (90, 37), (21, 5)
    q, pages = rng.standard_normal((2, 30, 2, 64)).astype(dtype), [np.full((12, 16, 1, 64), np.nan, dtype) for _ in range(2)]
    for row, length, start in zip(table, lengths, starts, strict=True):
        for a in pages:
            keys = np.full((96, 1, 64), np.nan, dtype)
            keys[start:length] = rng.standard_normal((length - start, 1, 64)).astype(dtype)
            a[row] = keys.reshape(6, 16, 1, 64)
    return (q, *pages), {"page_table": table, "kv_lengths": lengths, "kv_start": starts}


def hidden_keys(dtype: np.dtype, how: str) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """NaN and infinities in keys that a bias or mask hides from all rows, and in values that it hides from some."""
    q, k, v = normal(64, dtype)
    rng = np.random.default_rng(1)
    seen = rng.random((150, 150)) < 0.7
    k[0, [7, 90], 0, 5], v[0, [7, 90], 0, 5], seen[:, [7, 90]] = (np.nan, np.inf), np.nan, False
    v[0, [11, 95], 0, [4, 63]] = np.nan, np.inf
    seen[50] = False  # sees nothing
    q[0, 50, 0, 0] = np.nan
    return (q, k, v), {"mask": seen} if how == "mask" else {"bias": np.where(seen, 0.5, -np.inf).astype(F32 if how == "bias32" else dtype)}


def lowest_bias(dtype: np.dtype, bias_dtype: np.dtype) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """A row of the least finite biases, one with a larger one, one with -inf beside them, and an ordinary one."""
    lowest = float(compare.ml_dtypes.finfo(bias_dtype).min)
    values = np.zeros((5, 150), bias_dtype)
    values[0] = values[1] = values[2] = lowest
    values[1, 140], values[2, ::2], values[3] = 3.0, -np.inf, -np.inf
    return (normal(64, dtype, rows=5)), {"bias": values}


def far_bias(dtype: np.dtype, bias_dtype: np.dtype, d: int = 64) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """Rows whose largest biases would be infinite in log2 units: alone, in several tiles, beside others near to them and far, below 0."""
    most = float(compare.ml_dtypes.finfo(bias_dtype).max)
    values = np.random.default_rng(0).standard_normal((9, 150)).astype(bias_dtype)
    values[0, [3, 70, 140]] = most
    values[1, [3, 70, 140]] = 0.9 * most, most, 0.95 * most
    values[2] = most
    values[3, ::2], values[3, 1::2] = most, 0.7 * most
    values[4, [3, 140]] = most, -most
    values[5] = -most
    values[5, [3, 70, 140]] = -0.9 * most, -0.8 * most, -0.85 * most
    values[6, :75], values[6, 75:], values[6, 9] = 0.2 * most, 0.3 * most, 0.3 * most
    values[7, ::3], values[7, 1::3], values[7, 2::3] = -0.2 * most, -0.3 * most, -np.inf
    values[8, 40] = 0.26 * most
    return normal(d, dtype, rows=9), {"bias": values}


def no_query(dtype: np.dtype) -> tuple[np.ndarray, ...]:
    """Ordinary rows but one, whose scores are exactly 0."""
    q, k, v = normal(64, dtype, rows=5)
    q[:, 2] = 0
    return q, k, v


def large_logits() -> tuple[np.ndarray, ...]:
    """Logits of which float32 keeps too few digits for a fused product."""
    x = np.full((1, 1, 1, 64), 133120.0).astype(BF16)
    return x, np.concatenate([x, (0.5 * x).astype(BF16), x], 1), np.concatenate([x, (0 * x).astype(BF16), x], 1)


def distant_logits(dtype: np.dtype, base: float) -> tuple[np.ndarray, ...]:
    """Whole numbers near ``base`` as logits, exactly; with a causal mask the first two of the 40 rows see no key."""
    rng = np.random.default_rng(1)
    q, k = np.zeros((1, 40, 1, 16), dtype), np.zeros((1, 38, 1, 16), dtype)
    q[..., :2], k[..., 0], k[0, :, 0, 1] = 1, base, rng.integers(0, 4, 38)
    return q, k, rng.standard_normal(k.shape).astype(dtype)


def hard_runs() -> Iterator[Run]:
    for gpu, dtype in ((H200, BF16), (T4, F16)):
        for d in (33, 40, 64, 128, 256):
            yield of_arrays(f"not-finite-values-causal-{d}", gpu, lambda d=d, t=dtype: not_finite_values(d, t), causal=True)
        yield of_arrays("not-finite-values-window", gpu, lambda t=dtype: not_finite_values(64, t), window=(20, 10))
        yield of_arrays("nan-query", gpu, lambda: with_value(0, 7, np.nan), causal=True)
        yield of_arrays("nan-key", gpu, lambda: with_value(1, 100, np.nan), causal=True)
        yield of_arrays("infinite-key", gpu, lambda: with_value(1, 60, np.inf), causal=True)
        for softcap in (2e-38, 1e36):
            yield of_arrays(f"softcap-{softcap}", gpu, lambda t=dtype: no_query(t), softcap=softcap, scale=0.125)
        for value in (np.nan, np.inf, -np.inf):
            yield of_arrays(f"key-{value}-softcap", gpu, lambda x=value: with_value(1, 60, x), softcap=30.0, window=(90, 5))
        yield of_arrays("nan-query-no-keys", gpu, lambda: with_value(0, 7, np.nan, keys=40), causal=True)
        arrays, options = pages_not_filled(dtype)
        yield of_arrays("pages-not-filled", gpu, lambda a=arrays: a, **options)
        for how in ("mask", "bias", "bias32"):
            arrays, options = hidden_keys(dtype, how)
            yield of_arrays(f"hidden-keys-{how}", gpu, lambda a=arrays: a, **options)
            yield of_arrays(f"hidden-keys-{how}-causal", gpu, lambda a=arrays: a, causal=True, softcap=5.0, **options)
        for bias_dtype in (dtype, F32):
            arrays, options = lowest_bias(dtype, bias_dtype)
            yield of_arrays(f"lowest-bias-{bias_dtype.name}", gpu, lambda a=arrays: a, **options)
            if bias_dtype != F16:
                arrays, options = far_bias(dtype, bias_dtype)
                yield of_arrays(f"far-bias-{bias_dtype.name}", gpu, lambda a=arrays: a, **options)
                arrays_256, _ = far_bias(dtype, bias_dtype, 256)
                yield of_arrays(f"far-bias-{bias_dtype.name}-256", gpu, lambda a=arrays_256: a, alibi_slopes=[0.5], **options)
                for sink in (8e37, -8e37):
                    yield of_arrays(f"far-bias-{bias_dtype.name}-sink-{sink}", gpu, lambda a=arrays: a, sinks=[sink], **options)
    yield of_arrays("large-logits", H200, large_logits)
    yield of_arrays("beside-rows-without-keys", H200, lambda: distant_logits(F16, 2000), causal=True, scale=100.0)


RUNS = by_name(tile_runs(), paged_tile_runs(), softcap_tile_runs(), array_tile_runs(), kind_runs(), hard_runs())


# ---- the test -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulator(request, tmp_path_factory):
    def prepare(made, run):
        made.prepare(run.instance(run.build()[0]), run.gpu)

    with emulate.compiling_ahead(request, tmp_path_factory, RUNS, prepare) as made:
        yield made


@pytest.mark.parametrize("name", RUNS)
def test_results_and_accesses(emulator, name):
    """The ends of all arrays at forbidden pages, or for every other run the beginnings; tiles with both, which agree bit for bit."""
    run = RUNS[name]
    problem, check = run.build()
    assert cuda.decline(problem, "fa2") is None
    sides = ("end", "start") if name.startswith("tile-") else ("start",) if len(name) % 2 else ("end",)
    found = []
    for side in sides:
        for a in (problem.out, problem.lse):
            a.array[...] = np.nan
        emulator.run(problem, run.gpu, run.instance(problem), side=side)
        check()
        found.append([np.array(a.array, order="C") for a in (problem.out, problem.lse)])
    for first, other in zip(found[0], found[-1], strict=True):
        compare.assert_same_bits(first, other)


ON = (H200, "fa2"), (T4, "fa2"), (H200, "fa3")
IDS = [f"{gpu.name}-{kernel}" for gpu, kernel in ON]


@pytest.mark.parametrize("name", ["kv_lengths", "kv_start", "cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize(("gpu", "kernel"), ON, ids=IDS)
@pytest.mark.parametrize("width", [np.int32, np.int64])
def test_index_arrays_are_clamped(emulator, width, gpu, kernel, name):
    """What a GPU holds is not checked beforehand: the kernel reads and writes inside the arrays whatever it says."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((90, 2, 16)).astype(F16) for _ in range(3))
    plain = problems.build_varlen(q, k, v, [0, 40, 90], [0, 50, 90], kv_lengths=[50, 40], kv_start=[0, 0], causal=True)
    out, lse = np.full((90, 2, 16), np.nan, F16), np.full((2, 90), np.nan, F32)
    problem = problems.with_outputs(plain, out, lse, True, "BSHD", 3)[0]
    bad = {"kv_lengths": [10**12, -3], "kv_start": [-(10**12), 41], "cu_seqlens_q": [-5, 40, 90], "cu_seqlens_k": [50, 10**10, -1]}
    numbers = np.clip(bad[name], np.iinfo(width).min, np.iinfo(width).max).astype(width)
    chosen = emulate.chosen(problem, gpu, kernel)
    for side in ("end", "start"):
        emulator.run(problem.replace(**{name: numbers}), gpu, chosen, side)
    if name != "cu_seqlens_k":  # like 0 and an empty sequence, like all keys of the sequence and none, and like the right number
        right = {"kv_start": [0, 40], "kv_lengths": [50, 0], "cu_seqlens_q": [0, 40, 90]}
        clamped = plain.replace(**{name: np.array(right[name])})
        want = compare.expect([clamped])
        compare.assert_close(out, want.out[0], want.out_bound, "out")
        compare.assert_close(lse, want.lse[0], want.lse_bound, "lse")


def check_bad_pages(
    emulator: emulate.Emulator, gpu: device.DeviceInfo, page_size: int, dtype: np.dtype, kernel: str = "fa2",
) -> None:
    """Rows that see a key of such a page become NaN, others stay as they were; lengths beyond the table count as its capacity."""
    rng = np.random.default_rng(page_size)
    keys, slots = 96, 96 // page_size
    k, v = (rng.standard_normal((2, keys, 1, 16)).astype(dtype) for _ in range(2))
    q = rng.standard_normal((2, keys, 2, 16)).astype(dtype)
    table = rng.permutation(2 * slots).reshape(2, slots)
    pages = [np.empty((2 * slots, page_size, 1, 16), dtype) for _ in range(2)]
    for a, source in zip(pages, (k, v), strict=True):
        a[table] = source.reshape(2, slots, page_size, 1, 16)
    good = problems.build_attention(q, *pages, page_table=table, kv_lengths=[keys, keys], window=(40, 0))
    out, lse = np.full(q.shape, np.nan, dtype), np.full((2, 2, keys), np.nan, F64 if dtype == F64 else F32)
    problem = problems.with_outputs(good, out, lse, True, "BSHD", 4)[0]
    broken = table.copy()
    broken[0, 48 // page_size], broken[1, 90 // page_size] = -1, 2 * slots
    hidden = np.zeros((2, keys), bool)  # keys of bad pages
    for b, first in ((0, 48 // page_size), (1, 90 // page_size)):
        hidden[b, first * page_size : (first + 1) * page_size] = True
    k[hidden] = np.nan
    want = compare.expect([problems.build_attention(q, k, np.where(hidden[..., None, None], dtype.type(0), v), window=(40, 0))])
    assert 0 < np.isnan(want.lse[0]).sum() < want.lse[0].size
    broken_problem = problem.replace(page_table=broken, kv_lengths=np.array([10**12, keys]))
    for side in ("end", "start"):
        emulator.run(broken_problem, gpu, emulate.chosen(problem, gpu, kernel), side)
        compare.assert_close(out, want.out[0], want.out_bound, "out")
        compare.assert_close(lse, want.lse[0], want.lse_bound, "lse")


@pytest.mark.parametrize(
    ("gpu", "kernel", "page_size"), [*((gpu, "fa2", n) for gpu in (H200, T4) for n in (1, 3, 16)), (H200, "fa3", 16), (H200, "fa3", 48)],
)
def test_bad_pages_are_not_followed(emulator, gpu, kernel, page_size):
    check_bad_pages(emulator, gpu, page_size, F16, kernel)
