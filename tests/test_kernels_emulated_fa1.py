"""prefill_fa1, the raw kernel whose warps share the keys, on the host: its tiles, and all that it takes of the conformance suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import compare
import numpy as np
import pytest
from case import BF16, F16, case, causal, fixed
from cases import CASES, Target, absent
from cuflash import device, tiles_fa1
from cuflash import problem as problems
from cuflash.backends import cuda
from cuflash.tiles import HEAD_CLASSES
from emulator import emulate
from test_kernels_emulated import FURTHER, H200, T4, Run, large_logits, normal, not_finite_values, of_arrays, of_case, with_value

FA1 = Target("cuda", "fa1")
PLACES = tuple(device.KNOWN[name] for name in ("H200", "B200", "A100", "RTX 4090", "T4"))


def tile_runs() -> Iterator[Run]:
    """Each tile that some GPU gets: two blocks of rows, the second with few, and three tiles of keys, the last with few."""
    seen = set()
    for gpu in PLACES:
        for d in HEAD_CLASSES:
            tile = tiles_fa1.prefill_fa1(d, d, gpu)
            key = d, tile._replace(resident=0), gpu.cc < (8, 0)
            if key in seen:
                continue
            seen.add(key)
            size = d - 8 * (len(seen) % 2)
            dtype = F16 if gpu.cc < (8, 0) or len(seen) % 3 == 0 else BF16
            name, rows, keys = f"tile-{d}-m{tile.m}n{tile.n}w{tile.warps}", tile.m + 5, 2 * tile.n + 9
            yield of_case(case(f"{name}-full", f"1,{rows},{keys},1,1,{size}"), dtype, gpu)
            yield of_case(case(f"{name}-band", f"1,{rows},{keys},1,1,{size}", fixed(window=(keys // 2, 3))), dtype, gpu)
            yield of_case(case(f"{name}-strided", f"1,{rows},{keys},1,1,{d - 1}", causal), dtype, gpu)


MORE = (
    case("more-rows-than-a-tile-sees", "1,300,260,2,1,64", causal),
    case("keys-of-one-warp", "1,40,270,2,1,64", fixed(window=(5, 0))),
    case("one-key-beyond-a-tile", "2,33,257,2,1,64"),
    case("dv-of-other-class", "1,40,150,2,1,64,128", causal),
    case("dv-of-smaller-class", "1,40,150,2,1,256,32", causal),
)


def kind_runs() -> Iterator[Run]:
    """The cases of the conformance suite that the kernel takes, on the newest code path or on the oldest."""
    taken = 0
    for c in (*CASES, *FURTHER, *MORE):
        options: dict[str, object] = {}
        if F16 not in c.dtypes or c.decode or c.page_size:
            continue
        for builder in c.options:
            options.update(builder(c.rng(), c.shape, F16))
        if absent(FA1, F16, options):
            continue
        taken += 1
        yield of_case(c, F16, H200 if taken % 2 or c in MORE or options.get("out_dtype") == BF16 else T4)


def hard_runs() -> Iterator[Run]:
    for gpu, dtype in ((H200, BF16), (T4, F16)):
        for d in (33, 64, 128, 256):
            yield of_arrays(f"not-finite-values-causal-{d}", gpu, lambda d=d, t=dtype: not_finite_values(d, t), causal=True)
        yield of_arrays("not-finite-values-window", gpu, lambda t=dtype: not_finite_values(64, t), window=(20, 10))
        yield of_arrays("nan-query", gpu, lambda: with_value(0, 7, np.nan), causal=True)
        yield of_arrays("nan-key", gpu, lambda: with_value(1, 100, np.nan), causal=True)
        for n in (60, 149):  # of another warp than the diagonal's, and of the last one
            yield of_arrays(f"infinite-key-{n}", gpu, lambda n=n: with_value(1, n, np.inf), causal=True)
        yield of_arrays("nan-query-no-keys", gpu, lambda: with_value(0, 7, np.nan, keys=40), causal=True)
        yield of_arrays("long-rows", gpu, lambda t=dtype: normal(32, t, rows=17, keys=3000))
    yield of_arrays("large-logits", H200, large_logits)


RUNS = {run.name: run for runs in (tile_runs(), kind_runs(), hard_runs()) for run in runs}


@pytest.fixture(scope="module")
def emulator(request, tmp_path_factory):
    def prepare(made, run):
        made.prepare(emulate.chosen(run.build()[0], run.gpu, "fa1"), run.gpu)

    with emulate.compiling_ahead(request, tmp_path_factory, RUNS, prepare) as made:
        yield made


@pytest.mark.parametrize("name", RUNS)
def test_results_and_accesses(emulator, name):
    """The ends of all arrays at forbidden pages, or for every other run the beginnings; tiles with both, which agree bit for bit."""
    run = RUNS[name]
    problem, check = run.build()
    assert cuda.decline(problem, "fa1") is None
    sides = ("end", "start") if name.startswith("tile-") else ("start",) if len(name) % 2 else ("end",)
    found = []
    for side in sides:
        for a in (problem.out, problem.lse):
            a.array[...] = np.nan
        emulator.run(problem, run.gpu, emulate.chosen(problem, run.gpu, "fa1"), side=side)
        check()
        found.append([np.array(a.array, order="C") for a in (problem.out, problem.lse)])
    for first, other in zip(found[0], found[-1], strict=True):
        compare.assert_same_bits(first, other)


def test_what_is_left_to_fa2_is_declined_with_a_reason():
    a = np.zeros((1, 8, 2, 16), F16)
    options = {
        "softcap": 3.0, "alibi_slopes": [0.5, 0.1], "sinks": [0.0, 1.0], "bias": np.zeros((8, 8), F16), "mask": np.ones((8, 8), bool),
    }
    for name, value in options.items():
        assert f"no {name}" in cuda.decline(problems.build_attention(a, a, a, **{name: value}), "fa1")
    wide = a.astype(np.float32)
    assert "float32" in cuda.decline(problems.build_attention(wide, wide, wide), "fa1")
    long = np.zeros((1, 80, 2, 16), F16)
    assert "fa1" not in cuda.auto_kernels(problems.build_attention(long, long, long))
    with pytest.raises(Exception, match="fa1") as refusal:
        problems.build_attention(a, a, a, kernel="fa0")
    assert isinstance(refusal.value, ValueError)


@pytest.mark.parametrize("gpu", device.KNOWN.values(), ids=lambda gpu: gpu.name)
def test_a_tile_fits_every_gpu(gpu):
    for d in HEAD_CLASSES:
        for dv in HEAD_CLASSES:
            tile = tiles_fa1.prefill_fa1(d, dv, gpu)
            assert tile is not None and tile.shared_memory(d, dv) <= gpu.shared_memory_block
            assert tile.n % (16 * tile.warps) == 0 and dv // 8 % tile.warps == 0 and tile.m % 16 == 0
        same = tiles_fa1.prefill_fa1(d, d, gpu)
        assert same.resident * (same.shared_memory(d, d) + 1024 * (gpu.cc >= (8, 0))) <= gpu.shared_memory_sm


def test_a_plan_says_what_runs():
    problem = problems.with_outputs(problems.build_attention(*normal(64)), None, None, True, "BSHD", 4)[0]
    chosen = cuda.instance(problem, H200, "fa1")
    assert chosen.name == "prefill_fa1_fp16_d64_m32n256w4" and cuda.with_load(chosen, 4, H200) == dataclasses.replace(chosen, load=4)
    assert cuda.instance(problem, H200).name.startswith("prefill_fa2")
