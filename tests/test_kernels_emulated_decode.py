"""The raw decode kernel on the host: its tiles, how keys are split and parts merged, and all that it takes of the conformance suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import calls
import compare
import numpy as np
import pytest
from case import BF16, F16, F32, Case, alibi, case, causal, fixed, mask, sinks, tree
from cases import CASES, Target, absent
from cuflash import device, tiles_decode
from cuflash import problem as problems
from cuflash.backends import cuda, cuda_decode
from cuflash.tiles import HEAD_CLASSES
from cuflash.types import Problem
from emulator import emulate
from test_kernels_emulated import H200, T4

DECODE = Target("cuda", "decode")
RTX = device.KNOWN["RTX 3090"]


class Run(NamedTuple):
    """A problem on an emulated GPU; ``build`` gives the problem, with poisoned results, and what checks them afterwards."""

    name: str
    gpu: device.DeviceInfo
    build: Callable[[], tuple[Problem, Callable[[], None]]]


def setup(problem: Problem, gpu: device.DeviceInfo, **changes: Any) -> tuple[cuda_decode.Instance, cuda_decode.Split]:
    chosen = cuda.instance(problem, gpu, "decode")
    assert chosen is not None
    instance, how = cuda_decode.plan(problem, chosen, gpu).extra
    return instance, dataclasses.replace(how, **changes)


def of_case(c: Case, dtype: np.dtype, gpu: device.DeviceInfo) -> Run:
    """A case of the conformance suite; what decode() would append is in the cache already."""

    def build() -> tuple[Problem, Callable[[], None]]:
        plain = dataclasses.replace(c, decode=False, new=0)
        call = calls.present(plain, dtype)
        layout, ndim = call.options["layout"], call.args[0].ndim
        problem = problems.with_outputs(
            problems.build_attention(*call.args, **call.options), call.out, call.lse, True, layout, ndim
        )[0]
        return problem, lambda: calls.check(call, calls.expected(plain, dtype))

    return Run(f"{c.name}-{dtype.name}-{gpu.name}", gpu, build)


def tile_runs() -> Iterator[Run]:
    """Each tile that some GPU gets, with rows left over, two blocks of rows for the largest, and padded columns in every other one."""
    seen = set()
    for gpu in (H200, device.KNOWN["A100"], RTX, T4):
        for d in HEAD_CLASSES:
            for rows in (16, 32, 64, 128):
                tile = tiles_decode.decode(rows, d, d, gpu)
                key = d, tile, gpu.cc < (8, 0)
                if tile is None or key in seen:
                    continue
                seen.add(key)
                size = d - 8 * (len(seen) % 2)
                dtype = F16 if gpu.cc < (8, 0) or len(seen) % 3 == 0 else BF16
                group, keys = (6, 2 * tile.n + 9)
                queries = max(1, rows // group)
                name = f"tile-{d}-m{tile.m}n{tile.n}w{tile.warps}r{tile.row_warps}s{tile.stages}"
                yield of_case(case(name, f"1,{queries},{keys},{2 * group},2,{size}", causal), dtype, gpu)
                one = rows + 5 if rows >= 64 else rows - 3
                yield of_case(case(f"{name}-one", f"2,1,{keys},{one},1,{size}", kv_lengths=(keys, 3)), dtype, gpu)


MORE = (
    *(case(f"pages-of-{n}", "2,5,300,4,2,64", causal, page_size=n, kv_lengths=(300, 161)) for n in (1, 2, 7, 16, 64, 128)),
    *(case(f"one-query-pages-of-{n}", "3,1,300,8,2,128", page_size=n, kv_lengths=(300, 161, 0)) for n in (1, 16, 64)),
    case("pages-strided", "2,3,100,2,1,33", causal, page_size=5, kv_lengths=(100, 61), strides="every_other"),
    case("pages-dv", "2,3,100,2,1,32,64", page_size=5, kv_lengths=(100, 61), kv_start=(3, 0)),
    case("dv-of-smaller-class", "1,1,150,4,1,256,32"),
    case("one-query-window-softcap-sinks", "3,1,700,4,2,64", fixed(window=(200, 0), softcap=3.0), sinks, kv_lengths=(700, 3, 250)),
    case("one-query-alibi", "2,1,300,6,2,64", alibi("B Hq"), kv_lengths=(300, 77)),
    case("one-query-mask", "2,1,300,6,2,64", mask(visible=0.4)),
    case("mask-by-head", "2,3,136,6,2,64", mask(visible=0.8), causal),
    case("tree-of-64", "2,64,300,2,1,64", tree, kv_lengths=(300, 100)),
    case("tree-softcap-alibi", "2,6,300,8,2,128", tree, alibi(), fixed(softcap=5.0), kv_lengths=(300, 100)),
    case("padded-start", "3,2,400,4,2,64", causal, kv_lengths=(400, 300, 130), kv_start=(0, 130, 129)),
    case("many-sequences", "70,1,130,2,1,16", kv_lengths=tuple((37 * b) % 131 for b in range(70))),
    case("splits-2", "2,1,700,4,2,64", fixed(num_splits=2), kv_lengths=(700, 3)),
    case("splits-33", "2,3,2500,4,2,16", fixed(num_splits=33), causal, kv_lengths=(2500, 700)),
    case("splits-more-than-tiles", "2,1,300,4,2,64", fixed(num_splits=500), kv_lengths=(300, 0)),
    case("invariant", "3,2,1500,4,2,64", fixed(batch_invariant=True), causal, kv_lengths=(1500, 3, 700)),
    case("copies-of-8-bytes", "1,3,130,2,1,20", causal),
    case("copies-of-4-bytes", "1,3,130,2,1,34", causal),
    case("group-71", "1,2,130,71,1,16", causal),
    case("group-128", "2,1,130,128,1,64", kv_lengths=(130, 66)),
)


def kind_runs() -> Iterator[Run]:
    """The cases of the conformance suite that the kernel takes, on the newest code path or on the oldest."""
    taken = 0
    for c in (*CASES, *MORE):
        options: dict[str, object] = {}
        if F16 not in c.dtypes or c.packed is not None:
            continue
        for builder in c.options:
            options.update(builder(c.rng(), c.shape, F16))
        if absent(DECODE, F16, options):
            continue
        taken += 1
        newest = taken % 2 or c in MORE or options.get("out_dtype") == BF16 or c.shape.d > 160
        yield of_case(c, F16, H200 if newest else T4)


def of_arrays(name: str, gpu: device.DeviceInfo, arrays: Callable[[], tuple[np.ndarray, ...]], **options: Any) -> Run:
    def build() -> tuple[Problem, Callable[[], None]]:
        q, k, v = arrays()
        out = np.full((*q.shape[:3], v.shape[3]), np.nan, q.dtype)
        lse = np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, F32)
        plain = problems.build_attention(q, k, v, **options)

        def check() -> None:
            want = compare.expect([plain])
            compare.assert_close(out, want.out[0], want.out_bound, "out")
            compare.assert_close(lse, want.lse[0], want.lse_bound, "lse")

        return problems.with_outputs(plain, out, lse, True, "BSHD", 4)[0], check

    return Run(f"{name}-{gpu.name}", gpu, build)


def normal(d: int, dtype: np.dtype, rows: int = 9, keys: int = 400, heads: int = 2) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(d)
    return tuple(rng.standard_normal((1, n, h, d)).astype(dtype) for n, h in ((rows, heads), (keys, 1), (keys, 1)))


def not_finite_values(d: int, dtype: np.dtype, rows: int = 9) -> tuple[np.ndarray, ...]:
    """NaN and infinities in values that some queries see and others do not."""
    q, k, v = normal(d, dtype, rows)
    v[0, [399, 398, 397, 395, 393], 0, [3, d - 1, 0, 8, 1]] = np.nan, np.inf, -np.inf, np.nan, -np.inf
    return q, k, v


def with_value(which: int, row: int, value: float, dtype: np.dtype) -> tuple[np.ndarray, ...]:
    arrays = [abs(a) for a in normal(64, dtype)]
    arrays[which][0, row, 0, 3] = value
    return tuple(arrays)


def hidden_keys(dtype: np.dtype) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """NaN and infinities in keys that a mask hides from all rows, and in values that it hides from some."""
    q, k, v = normal(64, dtype)
    seen = np.random.default_rng(1).random((9, 400)) < 0.7
    k[0, [7, 90], 0, 5], v[0, [7, 90], 0, 5], seen[:, [7, 90]] = (np.nan, np.inf), np.nan, False
    v[0, [11, 395], 0, [4, 63]] = np.nan, np.inf
    seen[5] = False  # sees nothing
    return (q, k, v), {"mask": seen}


def hard_runs() -> Iterator[Run]:
    for gpu, dtype in ((H200, BF16), (T4, F16)):
        for d in (33, 64, 128):
            yield of_arrays(f"not-finite-values-causal-{d}", gpu, lambda d=d, t=dtype: not_finite_values(d, t), causal=True)
        yield of_arrays("not-finite-values-causal-rows", gpu, lambda t=dtype: not_finite_values(64, t, 60), causal=True)
        yield of_arrays("not-finite-values-window", gpu, lambda t=dtype: not_finite_values(64, t), window=(4, 0))
        yield of_arrays("nan-query", gpu, lambda t=dtype: with_value(0, 7, np.nan, t), causal=True)
        yield of_arrays("nan-key", gpu, lambda t=dtype: with_value(1, 396, np.nan, t), causal=True)
        yield of_arrays("infinite-key", gpu, lambda t=dtype: with_value(1, 60, np.inf, t), causal=True)
        yield of_arrays("infinite-key-splits", gpu, lambda t=dtype: with_value(1, 60, np.inf, t), causal=True, num_splits=5)
        arrays, options = hidden_keys(dtype)
        yield of_arrays("hidden-keys", gpu, lambda a=arrays: a, **options)
        yield of_arrays("hidden-keys-causal", gpu, lambda a=arrays: a, causal=True, softcap=5.0, **options)
        yield of_arrays("long-rows", gpu, lambda t=dtype: normal(32, t, rows=1, keys=5000))


RUNS = {run.name: run for runs in (tile_runs(), kind_runs(), hard_runs()) for run in runs}


@pytest.fixture(scope="module")
def emulator(request, tmp_path_factory):
    def prepare(made, run):
        problem = run.build()[0]
        instance, how = setup(problem, run.gpu)
        for source, *_ in cuda_decode.steps(problem, instance, how):
            made.prepare_source(source, "DecodeParams", emulate.decode_path(instance, run.gpu))

    with emulate.compiling_ahead(request, tmp_path_factory, RUNS, prepare) as made:
        yield made


def poison(problem: Problem) -> None:
    for a in (problem.out, problem.lse):
        a.array[...] = np.nan


def results(problem: Problem) -> list[np.ndarray]:
    return [np.array(a.array, order="C") for a in (problem.out, problem.lse)]


@pytest.mark.parametrize("name", RUNS)
def test_results_and_accesses(emulator, name):
    """The ends of all arrays at forbidden pages, or for every other run the beginnings; tiles with both, which agree bit for bit."""
    run = RUNS[name]
    problem, check = run.build()
    assert cuda.decline(problem, "decode") is None
    sides = ("end", "start") if name.startswith("tile-") else ("start",) if len(name) % 2 else ("end",)
    found = []
    for side in sides:
        poison(problem)
        emulator.run_decode(problem, run.gpu, *setup(problem, run.gpu), side=side)
        check()
        found.append(results(problem))
    for first, other in zip(found[0], found[-1], strict=True):
        compare.assert_same_bits(first, other)


COMBINED = (
    "decode-long", "splits-33", "splits-more-than-tiles", "invariant", "one-query-window-softcap-sinks", "many-sequences", "group-128",
)


def check_that_a_second_kernel_merges_the_same_bits(emulator: Any, run: Run) -> None:
    problem, check = run.build()
    instance, how = setup(problem, run.gpu)
    found = []
    for merges in (True, False):
        poison(problem)
        emulator.run_decode(problem, run.gpu, dataclasses.replace(instance, merges=merges), how)
        check()
        found.append(results(problem))
    for first, other in zip(*found, strict=True):
        compare.assert_same_bits(first, other)


@pytest.mark.parametrize("name", COMBINED)
def test_a_second_kernel_merges_the_same_bits(emulator, name):
    check_that_a_second_kernel_merges_the_same_bits(emulator, RUNS[f"{name}-float16-{H200.name}"])


# ---- lengths of which only the device knows, pages that do not exist ---------------------------------------------------


def build(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Problem:
    out, lse = np.full((*q.shape[:3], v.shape[3]), np.nan, q.dtype), np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, F32)
    return problems.with_outputs(problems.build_attention(q, k, v, **options), out, lse, True, "BSHD", 4)[0]


def compute(emulator: emulate.Emulator, problem: Problem, gpu: device.DeviceInfo = H200, **changes: Any) -> list[np.ndarray]:
    poison(problem)
    emulator.run_decode(problem, gpu, *setup(problem, gpu, **changes), side="start" if problem.batch % 2 else "end")
    return results(problem)


@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize("gpu", [H200, T4], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("name", ["kv_lengths", "kv_start"])
def test_lengths_are_clamped(emulator, name, gpu, width):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 2, 4, 16)).astype(F16)
    k, v = (rng.standard_normal((2, 300, 2, 16)).astype(F16) for _ in range(2))
    problem = build(q, k, v, kv_lengths=[300, 200], kv_start=[0, 0], causal=True)
    bad, right = {"kv_lengths": ([10**12, -3], [300, 0]), "kv_start": ([-(10**12), 201], [0, 200])}[name]
    numbers = np.clip(bad, np.iinfo(width).min, np.iinfo(width).max).astype(width)
    found = compute(emulator, problem.replace(**{name: numbers}), gpu)
    want = compare.expect([problem.replace(out=None, lse=None, **{name: np.array(right)})])
    compare.assert_close(found[0], want.out[0], want.out_bound, "out")
    compare.assert_close(found[1], want.lse[0], want.lse_bound, "lse")


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("gpu", [H200, T4], ids=lambda gpu: gpu.name)
def test_bad_pages_are_not_followed(emulator, gpu, page_size):
    """Rows that see a key of such a page become NaN, others stay as they were."""
    rng = np.random.default_rng(page_size)
    keys, slots = 192, 192 // page_size
    k, v = (rng.standard_normal((2, keys, 1, 16)).astype(F16) for _ in range(2))
    q = rng.standard_normal((2, 60, 2, 16)).astype(F16)
    table = rng.permutation(2 * slots).reshape(2, slots)
    pages = [np.empty((2 * slots, page_size, 1, 16), F16) for _ in range(2)]
    for a, source in zip(pages, (k, v), strict=True):
        a[table] = source.reshape(2, slots, page_size, 1, 16)
    problem = build(q, *pages, page_table=table, kv_lengths=[keys, keys], window=(20, 0))
    broken, hidden = table.copy(), np.zeros((2, keys), bool)
    for b, first, entry in ((0, 150 // page_size, -1), (1, 188 // page_size, 2 * slots)):
        broken[b, first], hidden[b, first * page_size : (first + 1) * page_size] = entry, True
    k[hidden] = np.nan
    want = compare.expect([problems.build_attention(q, k, np.where(hidden[..., None, None], F16.type(0), v), window=(20, 0))])
    assert 0 < np.isnan(want.lse[0]).sum() < want.lse[0].size
    found = compute(emulator, problem.replace(page_table=broken, kv_lengths=np.array([10**12, keys])), gpu)
    compare.assert_close(found[0], want.out[0], want.out_bound, "out")
    compare.assert_close(found[1], want.lse[0], want.lse_bound, "lse")


@pytest.mark.parametrize("d", [32, 64, 128])
def test_bad_pages_of_few_rows(emulator, d):
    """Where each warp loads what it multiplies: a bad page makes NaN of its sequence alone, and of none if nobody sees it."""
    rng = np.random.default_rng(d)
    q = rng.standard_normal((3, 1, 4, d)).astype(F16)
    pages = [rng.standard_normal((3 * 24, 8, 2, d)).astype(F16) for _ in range(2)]
    table, lengths = rng.permutation(3 * 24).reshape(3, 24), [192, 100, 190]
    right = compute(emulator, build(q, *pages, page_table=table, kv_lengths=lengths))
    problem, broken = build(q, *pages, page_table=table, kv_lengths=lengths), table.copy()
    broken[0, 17], broken[1, 13], broken[2, 0] = 3 * 24, -1, -(1 << 31)  # the second one lies behind its keys
    found = compute(emulator, problem.replace(page_table=broken))
    for name, x, y in zip(("out", "lse"), found, right, strict=True):
        assert np.isnan(x[[0, 2]]).all(), name
        compare.assert_same_bits(x[1], y[1], name)


def test_pages_from_the_last_to_the_first(emulator):
    """Offsets that are negative are found by copies of 8 bytes."""
    rng = np.random.default_rng(1)
    q, table = rng.standard_normal((2, 1, 4, 64)).astype(F16), rng.permutation(2 * 12).reshape(2, 12)
    pages = [rng.standard_normal((2 * 12, 16, 2, 64)).astype(F16) for _ in range(2)]
    options: dict[str, Any] = {"page_table": table, "kv_lengths": [192, 7]}
    backwards = build(q, pages[0][::-1].copy()[::-1], pages[1], **options)
    assert [setup(p, H200)[0].load for p in (build(q, *pages, **options), backwards)] == [16, 8]
    want = compute(emulator, build(q, *pages, **options))
    for name, x, y in zip(("out", "lse"), compute(emulator, backwards), want, strict=True):
        compare.assert_same_bits(x, y, name)


def test_splits_agree_and_ones_stay_ones(emulator):
    """Cases 18 and 19: whatever the number of parts, more than tiles included, in any order of heads (case 20)."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, 1, 8, 64)).astype(F16)
    k = rng.standard_normal((2, 4096, 2, 64)).astype(F16)
    v = np.ones_like(k)
    want = compare.expect([problems.build_attention(q, k, v, kv_lengths=[4096, 5])])
    for splits in (1, 2, 3, 16, 31, 32, 33, 64, 128):
        out, lse = compute(emulator, build(q, k, v, kv_lengths=[4096, 5], num_splits=splits))
        assert (out == 1).all()
        compare.assert_close(lse, want.lse[0], want.lse_bound, f"lse of {splits} splits")


@pytest.mark.parametrize("queries", [1, 5])
def test_a_row_does_not_depend_on_its_neighbours(emulator, queries):
    """Case 21: alone, among others, in a larger cache, over any number of blocks, and in pages of any order: the same bits."""
    rng = np.random.default_rng(queries)
    lengths = np.array([1300, 7, 900, 0, 513])
    q = rng.standard_normal((5, queries, 4, 64)).astype(F16)
    k, v = (rng.standard_normal((5, 1400, 2, 64)).astype(F16) for _ in range(2))
    options: dict[str, Any] = {"causal": True, "batch_invariant": True}
    whole = compute(emulator, build(q, k, v, kv_lengths=lengths, **options))
    for b, n in enumerate(lengths):
        alone = compute(emulator, build(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], **options))
        for name, one, all_of_them in zip(("out", "lse"), alone, whole, strict=True):
            compare.assert_same_bits(one[0], all_of_them[b], f"{name} of sequence {b}")
    few = compute(emulator, build(q, k, v, kv_lengths=lengths, **options), runs=3)
    paged = []
    for size in (16, 16, 8):
        count = 1408 // size
        table = rng.permutation(5 * count).reshape(5, count)
        pages = [np.full((5 * count, size, 2, 64), np.nan, F16) for _ in range(2)]
        for a, source in zip(pages, (k, v), strict=True):
            a[table] = np.concatenate([source, source[:, :8]], 1).reshape(5, count, size, 2, 64)
        paged.append(compute(emulator, build(q, *pages, page_table=table, kv_lengths=lengths, **options)))
    assert setup(build(q, *pages, page_table=table, kv_lengths=lengths, **options), H200)[0].tile.warps == 8  # dense caches have 4
    for b, n in enumerate(lengths):  # alone, in a table with room for no more than its keys
        own = table[b : b + 1, : max(1, -(-n // 8))]
        alone = compute(emulator, build(q[b : b + 1], *pages, page_table=own, kv_lengths=[n], **options))
        for name, x, y in zip(("out", "lse"), alone, paged[2], strict=True):
            compare.assert_same_bits(x[0], y[b], f"{name} of sequence {b} in pages")
    for one, other in ((few, whole), (paged[1], paged[0]), (paged[2], paged[0])):
        for name, x, y in zip(("out", "lse"), one, other, strict=True):
            compare.assert_same_bits(x, y, name)


@pytest.mark.parametrize("runs", [1, 2, 7, 40])
@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_any_number_of_runs_and_of_heads_at_once(emulator, runs, at_once):
    """Heads in several passes over a sequence, runs of less than a sequence and of several; more runs than tiles."""
    rng = np.random.default_rng(runs)
    q = rng.standard_normal((5, 3, 8, 16)).astype(F16)
    k, v = (rng.standard_normal((5, 400, 4, 16)).astype(F16) for _ in range(2))
    problem = build(q, k, v, kv_lengths=[400, 1, 128, 129, 0], causal=True)
    found = compute(emulator, problem, runs=runs, heads_at_once=at_once, least=1, slots=2 * runs * at_once)
    want = compare.expect([problem.replace(out=None, lse=None)])
    compare.assert_close(found[0], want.out[0], want.out_bound, "out")
    compare.assert_close(found[1], want.lse[0], want.lse_bound, "lse")
