"""prefill_fp, the raw kernel for float32 and float64, on the host: all its kinds of arithmetic, thread by thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import compare
import numpy as np
import pytest
from case import BF16, F16, F32, F64, alibi, bias, case, causal, fixed, mask, sinks, tree, upper_left
from cases import CASES, absent
from cuflash import arrays, device, tiles_fp
from cuflash import problem as problems
from cuflash.backends import cuda
from cuflash.tiles import HEAD_CLASSES
from cuflash.types import Problem
from emulator import emulate
from test_kernels_emulated import (
    FA2, FURTHER, Run, check_bad_pages, distant_logits, far_bias, hidden_keys, lowest_bias, no_query, normal, of_arrays, of_case,
)

A100, H200, T4, RTX = (device.KNOWN[name] for name in ("A100", "H200", "T4", "RTX 4090"))
# Every kind of arithmetic: three products of TF32, float64 tensor cores of two generations, multiply-adds.
PLACES = ((F32, H200), (F64, H200), (F32, T4), (F64, A100), (F32, RTX), (F64, T4))


def tile_runs() -> Iterator[Run]:
    """Each tile that some GPU gets: two blocks of rows, the second with few, and three tiles of keys, the last with few."""
    seen = set()
    for (dtype, gpu), d in ((place, d) for place in (*PLACES, (F64, RTX)) for d in HEAD_CLASSES):
        kind = tiles_fp.arithmetic(dtype.name, None, gpu)
        tile = tiles_fp.prefill_fp(kind, dtype.name, d, d, gpu)
        key = kind, dtype, d, tile._replace(resident=0), kind == tiles_fp.DMMA and gpu.cc < (9, 0)
        if key in seen:
            continue
        seen.add(key)
        shape = f"1,{tile.m + 5},{2 * tile.n + 9},1,1,{d - 3 * (len(seen) % 2)}"  # odd ones are copied number by number
        name = f"tile-{d}-m{tile.m}n{tile.n}w{tile.warps}s{tile.stages}"
        yield of_case(case(name, shape, causal), dtype, gpu)
        if d in (64, 256):  # bias and mask of whole pairs of columns and others; nothing else of these kinds depends on the head size
            arrays = bias(dtype=F32 if d == 256 else None, hidden=0.1), mask(visible=0.9)
            yield of_case(case(f"{name}-arrays", f"1,20,{2 * tile.n + 8 + d // 256},1,1,{d}", *arrays), dtype, gpu)
            yield of_case(case(f"{name}-pages", f"1,20,{2 * tile.n + 9},1,1,{d}", page_size=7, kv_lengths=(2 * tile.n + 9,)), dtype, gpu)


def kind_runs() -> Iterator[Run]:
    """All cases of the conformance suite that the kernel takes, each in one kind of arithmetic for float32 and one for float64."""
    taken = 0
    for c in (*CASES, *FURTHER):
        if not {F32, F64} <= set(c.dtypes) or c.decode:
            continue
        options: dict[str, object] = {"packed": c.packed is not None}
        for builder in c.options:
            options.update(builder(c.rng(), c.shape, F32))
        if absent(FA2, F64, options):
            continue
        taken += 1
        for dtype in (F32, F64):
            if absent(FA2, dtype, options):
                continue
            places = [gpu for t, gpu in PLACES if t == dtype]
            gpu = places[taken % 3]
            if not (options.get("out_dtype") == BF16 and gpu is T4):
                yield of_case(c, dtype, gpu)


def parts_runs() -> Iterator[Run]:
    """Keys that are split over the grid."""
    rows = {
        "one-query": case("", "2,1,700,6,2,64", fixed(num_splits=5)),
        "one-query-window-softcap-sinks": case("", "2,1,300,6,2,24", fixed(window=(170, 0), softcap=3.0, num_splits=3), sinks),
        "one-query-upper-left": case("", "2,1,300,6,2,24", upper_left, sinks),
        "one-query-alibi": case("", "2,1,300,6,2,16", alibi(), fixed(num_splits=3)),
        "one-query-bias-mask": case("", "2,1,300,6,2,16", bias(hidden=0.2), mask(visible=0.5), fixed(num_splits=3)),
        "group-of-140": case("", "1,1,200,140,1,16", sinks, fixed(num_splits=3)),
        "wide-values": case("", "1,1,200,4,2,33,200", fixed(num_splits=3)),
        "lengths": case("", "4,1,300,4,2,16", sinks, kv_lengths=(300, 1, 0, 77), kv_start=(3, 0, 0, 70)),
        "pages": case("", "3,1,300,4,2,16", page_size=7, kv_lengths=(300, 65, 3)),
        "causal-lengths-start": case("", "4,5,300,4,2,16", causal, alibi(), kv_lengths=(300, 3, 0, 77), kv_start=(3, 0, 0, 70)),
        "causal-pages-window": case("", "2,5,300,4,2,16", causal, fixed(window=(90, 0), num_splits=3), page_size=16, kv_lengths=(300, 65)),
        "tree": case("", "2,6,300,4,2,16", tree, fixed(num_splits=3)),
        "more-parts-than-tiles": case("", "2,3,100,4,2,16", causal, fixed(num_splits=500), kv_lengths=(100, 0)),
        "two-blocks-of-rows": case("", "1,140,300,2,1,16", causal, fixed(num_splits=3)),
        "out-float16": case("", "1,1,300,2,1,20", fixed(out_dtype=F16, num_splits=3)),
    }
    for n, (name, c) in enumerate(rows.items()):
        for dtype in (F32, F64):
            yield of_case(dataclasses.replace(c, name=f"parts-{name}"), dtype, [gpu for t, gpu in PLACES if t == dtype][n % 3])
    for dtype, gpu in PLACES:
        for number in (np.nan, np.inf):
            arrays = changed(64, dtype, 1, set_to(60, number))
            yield of_arrays(f"{dtype}-parts-key-{number}", gpu, lambda a=arrays: a, causal=True, num_splits=4)
        yield of_arrays(f"{dtype}-parts-not-finite-values", gpu, lambda t=dtype: changed(64, t, 2, spoil), causal=True, num_splits=4)
        yield of_arrays(f"{dtype}-parts-tiny-values", gpu, lambda t=dtype: tiny_values(t), causal=True, num_splits=4)


def changed(d: int, dtype: np.dtype, which: int, change: Callable[[np.ndarray], None]) -> tuple[np.ndarray, ...]:
    """Queries (0), keys (1) and values (2) of one sequence, one of them changed in place."""
    arrays = normal(d, dtype)
    change(arrays[which][0, :, 0])
    return arrays


def spoil(values: np.ndarray) -> None:
    """NaN and infinities that some rows of a tile see and others do not."""
    rows, columns = [149, 130, 131, 70, 5], [3, values.shape[1] - 1, 0, 8, 1]
    values[rows, columns] = np.nan, np.inf, -np.inf, np.nan, -np.inf


def set_to(row: int, value: float) -> Callable[[np.ndarray], None]:
    def change(a: np.ndarray) -> None:
        a[...] = abs(a)
        a[row, 3] = value

    return change


def hard_runs() -> Iterator[Run]:
    for dtype, gpu in PLACES:
        for d in (33, 128):
            yield of_arrays(f"{dtype}-not-finite-values-{d}", gpu, lambda d=d, t=dtype: changed(d, t, 2, spoil), causal=True)
        yield of_arrays(f"{dtype}-not-finite-values-window", gpu, lambda t=dtype: changed(64, t, 2, spoil), window=(20, 10))
        for value in (np.nan, np.inf, -np.inf):  # logits of every sign: the queries have both
            yield of_arrays(f"{dtype}-key-{value}", gpu, lambda t=dtype, x=value: changed(64, t, 1, set_to(60, x)), causal=True)
        yield of_arrays(f"{dtype}-beside-rows-without-keys", gpu, lambda t=dtype: distant_logits(t, 1e4), causal=True, scale=1.0)
        yield of_arrays(f"{dtype}-query-nan", gpu, lambda t=dtype: changed(64, t, 0, set_to(7, np.nan)), causal=True)
        yield of_arrays(f"{dtype}-values-of-1e-{38 if dtype == F32 else 308}", gpu, lambda t=dtype: tiny_values(t), causal=True)
        for how in ("mask", "bias", "bias32"):
            arrays, options = hidden_keys(dtype, how)
            yield of_arrays(f"{dtype}-hidden-keys-{how}", gpu, lambda a=arrays: a, **options)
            yield of_arrays(f"{dtype}-hidden-keys-{how}-causal", gpu, lambda a=arrays: a, causal=True, softcap=5.0, **options)
        for bias_dtype in (F32, *([F64] if dtype == F64 else [])):
            arrays, options = lowest_bias(dtype, bias_dtype)
            yield of_arrays(f"{dtype}-lowest-bias-{bias_dtype}", gpu, lambda a=arrays: a, **options)
            arrays, options = far_bias(dtype, bias_dtype)
            for more in ({}, {"sinks": [0.8 * float(np.finfo(dtype).max)]}):
                yield of_arrays(f"{dtype}-far-bias-{bias_dtype}{'-sink' * len(more)}", gpu, lambda a=arrays: a, **options, **more)
        for softcap in (2e-38, 1e36) if dtype == F32 else (4e-308, 1e305):
            yield of_arrays(f"{dtype}-softcap-{softcap}", gpu, lambda t=dtype: no_query(t), softcap=softcap, scale=0.125)
        yield of_arrays(f"{dtype}-softcap-window-sinks", gpu, lambda t=dtype: normal(40, t), softcap=3.0, window=(50, 5), sinks=[1.0])


def tiny_values(dtype: np.dtype) -> tuple[np.ndarray, ...]:
    """Normal numbers whose results need the digits of denormals."""
    q, k, v = normal(24, dtype)
    return q, k, (v * np.finfo(dtype).tiny).astype(dtype)


RUNS = {run.name: run for runs in (tile_runs(), kind_runs(), parts_runs(), hard_runs()) for run in runs}


@pytest.fixture(scope="module")
def emulator(request, tmp_path_factory):
    def prepare(made, run):
        made.prepare(run.instance(run.build()[0]), run.gpu)

    with emulate.compiling_ahead(request, tmp_path_factory, RUNS, prepare) as made:
        yield made


@pytest.mark.parametrize("name", RUNS)
def test_results_and_accesses(emulator, name):
    """The ends of all arrays at forbidden pages, or for every other run the beginnings."""
    run = RUNS[name]
    problem, check = run.build()
    assert cuda.decline(problem, "fa2") is None
    emulator.run(problem, run.gpu, run.instance(problem), side="start" if len(name) % 2 else "end")
    check()


def to_tf32(a: np.ndarray) -> np.ndarray:
    """Rounded to 11 bits, ties away from 0."""
    return ((a.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize("d", [24, 64, 128, 256])
def test_tf32_on_request(emulator, d):
    """Within twice the error of the naive computation on operands rounded to TF32, and not better: it is what was asked for."""
    arrays = normal(d, F32)
    plain = problems.build_attention(*arrays, causal=True, precision="tf32")
    out, lse = np.full(arrays[0].shape, np.nan, F32), np.full((1, 1, 150), np.nan, F32)
    emulator.run(problems.with_outputs(plain, out, lse, True, "BSHD", 4)[0], H200)
    want = compare.expect([plain])
    q, k, v = (to_tf32(a[0, :, 0]) for a in arrays)
    s = np.where(np.tri(150, dtype=bool), (q @ k.T) * np.float32(plain.scale), -np.inf).astype(np.float32)
    weights = np.exp(s - s.max(1, keepdims=True))
    naive = to_tf32(weights) @ v / weights.sum(1, keepdims=True)
    error = np.abs(naive - want.out[0][0, :, 0]).max()
    eps = 2.0**-10
    compare.assert_close(out, want.out[0], 2 * error + 2 * eps * np.abs(want.out[0]).max(), "out")
    naive_lse = s.max(1) + np.log(weights.sum(1))
    compare.assert_close(lse, want.lse[0], 2 * np.abs(naive_lse - want.lse[0][0, 0]).max() + 2 * eps * np.abs(want.lse[0]).max(), "lse")
    assert np.abs(out - want.out[0]).max() > want.out_bound  # so that TF32 was used at all


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("dtype", "gpu"), [(F32, H200), (F32, T4), (F64, H200), (F64, T4)], ids=str)
def test_bad_pages_are_not_followed(emulator, dtype, gpu, page_size):
    check_bad_pages(emulator, gpu, page_size, dtype)


@pytest.mark.parametrize("gpu", [H200, T4], ids=lambda gpu: gpu.name)
def test_long_rows_of_one_sign(emulator, gpu):
    """Rounding towards 0 does not add up over thousands of keys."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 1, 32)).astype(F32) for n in (4, 4096, 4096))
    plain: Problem = problems.build_attention(q, k, abs(v))
    out, lse = np.full(q.shape, np.nan, F32), np.full((1, 1, 4), np.nan, F32)
    emulator.run(problems.with_outputs(plain, out, lse, True, "BSHD", 4)[0], gpu)
    want = compare.expect([plain])
    compare.assert_close(out, want.out[0], want.out_bound, "out")
    compare.assert_close(lse, want.lse[0], want.lse_bound, "lse")


def computed(emulator: emulate.Emulator, gpu: device.DeviceInfo, *arrays: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """out and lse, as of decode()."""
    problem = problems.build_attention(*arrays, **options).replace(op="decode")
    out, lse = np.full(problem.out_shape, np.nan, problem.out_dtype), np.full(problem.lse_shape, np.nan, problem.compute_dtype)
    emulator.run(problems.with_outputs(problem, out, lse, True, "BSHD", 4)[0], gpu)
    return out, lse


@pytest.mark.parametrize("queries", [1, 5, 20])
@pytest.mark.parametrize(("dtype", "gpu"), [(F32, H200), (F64, H200), (F32, T4)], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(emulator, dtype, gpu, queries):
    """Case 21: alone, among others, in a larger cache and in pages of any order: the same bits."""
    rng = np.random.default_rng(queries)
    lengths = np.array([1300, 7, 0, 513])
    q, k, v = (rng.standard_normal((4, n, h, 16)).astype(dtype) for n, h in ((queries, 4), (1400, 2), (1400, 2)))
    options: dict[str, Any] = {"causal": True, "batch_invariant": True}
    whole = computed(emulator, gpu, q, k, v, kv_lengths=lengths, **options)
    table = rng.permutation(4 * 200).reshape(4, 200)
    pages = [np.full((4 * 200, 7, 2, 16), np.nan, dtype) for _ in "kv"]
    for a, source in zip(pages, (k, v), strict=True):
        a[table] = source.reshape(4, 200, 7, 2, 16)
    paged = computed(emulator, gpu, q, *pages, page_table=table, kv_lengths=lengths, **options)
    for b, n in enumerate(lengths):
        alone = computed(emulator, gpu, q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], **options)
        for name, one, others, of_pages in zip(("out", "lse"), alone, whole, paged, strict=True):
            compare.assert_same_bits(one[0], others[b], f"{name} of sequence {b}")
            compare.assert_same_bits(one[0], of_pages[b], f"{name} of sequence {b} in pages")


@pytest.mark.parametrize(("dtype", "gpu"), [(F32, H200), (F64, T4)], ids=str)
def test_packed_rows_are_those_of_padded_ones(emulator, dtype, gpu):
    """Case 21: with batch_invariant, attention() of one query and attention_varlen() among longer ones give the same bits."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, h, 16)).astype(dtype) for n, h in ((1, 4), (900, 2), (900, 2)))
    found = []
    for plain in (
        problems.build_attention(q, k, v, batch_invariant=True),
        problems.build_varlen(
            np.concatenate([q[0].repeat(70, 0), q[0]]), np.concatenate([k[0, :3], k[0]]), np.concatenate([v[0, :3], v[0]]), [0, 70, 71],
            [0, 3, 903], batch_invariant=True,
        ),
    ):
        out, lse = np.full(plain.out_shape, np.nan, dtype), np.full(plain.lse_shape, np.nan, dtype)
        emulator.run(problems.with_outputs(plain, out, lse, True, "BSHD", out.ndim)[0], gpu)
        found.append((out.reshape(-1, 4, 16)[-1], lse.reshape(4, -1)[:, -1].copy()))
    for name, one, other in zip(("out", "lse"), *found, strict=True):
        compare.assert_same_bits(one, other, name)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("gpu", [H200, T4], ids=lambda gpu: gpu.name)
def test_what_a_large_sink_leaves(emulator, gpu, splits):
    """The share of the keys is less than any float32, and the result is not."""
    sink, value, eps = 104.0, 2e36, float(np.finfo(F32).eps)
    q, k, v = np.zeros((1, 1, 1, 16), F32), np.zeros((1, 40, 1, 16), F32), np.full((1, 40, 1, 16), value, F32)
    out, lse = computed(emulator, gpu, q, k, v, sinks=[sink], num_splits=splits)
    np.testing.assert_allclose(out, 40 * value * np.exp(-sink), rtol=16 * eps)
    np.testing.assert_allclose(lse, sink, rtol=4 * eps)


@pytest.mark.parametrize("width", [np.int32, np.int64])
def test_lengths_on_the_device_are_followed(emulator, width):
    """Clamped to what the cache holds; a plan knows no more of them than its capacity."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((4, n, h, 16)).astype(F32) for n, h in ((1, 4), (300, 2), (300, 2)))
    lengths, start = np.array([300, 999, -5, 77], width), np.array([0, 290, 3, -1], width)
    problem = problems.build_attention(q, k, v, num_splits=3)
    out, lse = np.full(problem.out_shape, np.nan, F32), np.full(problem.lse_shape, np.nan, F32)
    there = {name: arrays.view(x, name) for name, x in (("kv_lengths", lengths), ("kv_start", start))}
    emulator.run(problems.with_outputs(problem.replace(**there), out, lse, True, "BSHD", 4)[0], H200)
    want = compare.expect([problems.build_attention(q, k, v, kv_lengths=lengths.clip(0, 300), kv_start=[0, 290, 0, 0])])
    compare.assert_close(out, want.out[0], want.out_bound, "out")
    compare.assert_close(lse, want.lse[0], want.lse_bound, "lse")


def test_the_runs_have_every_kind_of_arithmetic():
    kinds = {run.instance(run.build()[0]).kind for name, run in RUNS.items() if name.startswith("tile-")}
    assert kinds == {tiles_fp.SIMT, tiles_fp.TF32X3, tiles_fp.DMMA}
