"""decode.cu's tile for more than 64 rows on sm_90a, on the host: warpgroups that multiply, one that loads, a ring of stages between."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from case import BF16, F16, alibi, case, fixed, sinks
from cuflash.backends import cuda, cuda_decode
from emulator import emulate
from test_kernels_emulated import H200
from test_kernels_emulated_decode import (
    Run, build, check_that_a_second_kernel_merges_the_same_bits, compute, of_arrays, of_case, poison, setup,
)

EVERYTHING = (fixed(window=(200, 0), softcap=3.0), sinks, alibi())

CASES = (
    # Head sizes: blocks of 64 and of 32 columns, products of 128, 64 and 32; values of another size.
    *(case(f"d{d}", f"2,1,200,{rows},1,{d}", kv_lengths=(200, 70)) for d, rows in ((64, 65), (72, 99), (96, 100), (128, 128))),
    *(case(f"d{d}-dv{dv}", f"1,1,150,70,1,{d},{dv}") for d, dv in ((128, 64), (64, 128), (96, 128), (128, 96), (128, 32))),
    # Copies of less than 16 bytes, and rows left over.
    case("copies-of-8-bytes", "1,1,130,70,1,36"),
    case("copies-of-4-bytes", "1,1,130,70,1,34"),
    case("strided", "2,1,130,140,2,33", strides="every_other"),
    case("two-blocks-of-rows", "2,1,200,200,1,64", kv_lengths=(200, 3)),
    case("two-heads", "1,1,300,256,2,64"),
    # Pages.
    *(case(f"pages-of-{n}", "3,1,200,80,1,64", page_size=n, kv_lengths=(200, 0, 131)) for n in (1, 16, 48, 64)),
    case("pages-d72-dv96", "2,1,200,80,1,72,96", page_size=32, kv_lengths=(200, 77), kv_start=(33, 70)),
    case("pages-long", "2,1,1700,70,1,64", fixed(num_splits=2), page_size=16, kv_lengths=(1700, 1100)),
    case("pages-d128", "2,1,300,128,1,128", page_size=16, kv_lengths=(300, 65)),
    case("pages-strided", "1,1,100,70,1,33", page_size=5, kv_lengths=(61,), strides="every_other"),
    # Logits and keys that are not seen.
    case("window-softcap-sinks-alibi", "2,1,500,70,1,64", *EVERYTHING, kv_lengths=(500, 250)),
    case("window-softcap-sinks-alibi-d128", "1,1,300,128,1,128", *EVERYTHING),
    case("padded-start", "3,1,300,70,1,64", kv_lengths=(300, 200, 130), kv_start=(0, 130, 130)),
    # How the keys are cut; stages that are used again, and blocks with several parts.
    case("splits-3", "2,1,700,70,1,64", fixed(num_splits=3), kv_lengths=(700, 3)),
    case("splits-more-than-tiles", "2,1,300,70,1,64", fixed(num_splits=500), kv_lengths=(300, 0)),
    case("whole", "1,1,1100,100,1,64", fixed(num_splits=1)),
    case("whole-pages", "3,1,900,128,1,128", fixed(num_splits=1), page_size=16, kv_lengths=(900, 1, 610)),
    case("parts-dv", "1,1,1100,70,1,128,64", fixed(num_splits=2)),
    case("invariant", "2,1,1500,256,2,64", fixed(batch_invariant=True), kv_lengths=(1500, 700)),
    case("many-sequences", "24,1,130,66,1,64", kv_lengths=tuple((37 * b) % 131 for b in range(24))),
)

# Of GPUs with so many multiprocessors: two blocks together, which merge in their shared memory. Tiles that are left over, rows that are,
# two blocks of rows, several heads at a time and passes over them, other values.
PAIRS = (
    (8, case("pairs", "4,1,300,70,1,64")),
    (8, case("pairs-heads", "2,1,256,256,2,128", *EVERYTHING[1:])),
    (8, case("pairs-dv", "2,1,300,140,1,128,64")),
    (8, case("pairs-d96", "4,1,257,128,1,96", *EVERYTHING[1:])),
    (51, case("pairs-passes", "3,1,260,560,8,64")),
    (8, case("pairs-strided", "4,1,300,70,1,36")),
    (8, case("pairs-dv-32", "4,1,300,70,1,128,32")),
)


def arrays_of(d: int, dtype: np.dtype, rows: int = 70, keys: int = 400, batch: int = 2) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(d)
    return tuple(rng.standard_normal((batch, n, h, d)).astype(dtype) for n, h in ((1, rows), (keys, 1), (keys, 1)))


def hard_runs() -> Iterator[Run]:
    """NaN and infinities: in what nobody sees, in a query of one head, in keys and values that all see."""

    def unseen() -> tuple[np.ndarray, ...]:
        q, k, v = arrays_of(64, F16)
        for a in (k, v):
            a[0, 330:], a[1, :65], a[1, 200:] = np.nan, np.inf, np.nan
        return q, k, v

    def changed(which: int, at: tuple[int, ...], value: float) -> tuple[np.ndarray, ...]:
        arrays = tuple(abs(a) for a in arrays_of(64, BF16))
        arrays[which][at] = value
        return arrays

    yield of_arrays("unseen", H200, unseen, kv_lengths=[330, 200], kv_start=[0, 65])
    yield of_arrays("unseen-window", H200, lambda: changed(2, (0, 50, 0, 3), np.nan), window=(100, 0))
    yield of_arrays("nan-query", H200, lambda: changed(0, (0, 0, 67, 3), np.nan))
    yield of_arrays("infinite-key", H200, lambda: changed(1, (1, 60, 0, 3), np.inf), num_splits=3)
    yield of_arrays("nan-value", H200, lambda: changed(2, (0, 399, 0, 63), np.nan))
    yield of_arrays("infinite-value", H200, lambda: changed(2, (0, 0, 0, 0), np.inf))


RUNS = {run.name: run for run in (*(of_case(c, (F16, BF16)[n % 2], H200) for n, c in enumerate(CASES)), *hard_runs())}
RUNS |= {c.name: of_case(c, F16, dataclasses.replace(H200, multiprocessors=count))._replace(name=c.name) for count, c in PAIRS}


@pytest.fixture(scope="module")
def emulator(request, tmp_path_factory):
    def prepare(made, run):
        problem = run.build()[0]
        for source, *_ in cuda_decode.steps(problem, *setup(problem, run.gpu)):
            made.prepare_source(source, "DecodeParams", 800)

    with emulate.compiling_ahead(request, tmp_path_factory, RUNS, prepare) as made:
        yield made


@pytest.mark.parametrize("name", RUNS)
def test_results_and_accesses(emulator, name):
    """With the ends of all arrays at forbidden pages, or for every other run the beginnings."""
    run = RUNS[name]
    problem, check = run.build()
    instance, how = setup(problem, run.gpu)
    assert cuda.decline(problem, "decode") is None and instance.tile.wgmma == (instance.load > 2)
    assert instance.paired == any(c.name == name for _, c in PAIRS)
    poison(problem)
    emulator.run_decode(problem, run.gpu, instance, how, side="start" if len(name) % 2 else "end")
    check()


@pytest.mark.parametrize("name", ["d128", "splits-more-than-tiles", "window-softcap-sinks-alibi", "invariant", "two-blocks-of-rows"])
def test_a_second_kernel_merges_the_same_bits(emulator, name):
    (run,) = (RUNS[full] for dtype in ("float16", "bfloat16") if (full := f"{name}-{dtype}-{H200.name}") in RUNS)
    check_that_a_second_kernel_merges_the_same_bits(emulator, run)


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_bad_pages_are_not_followed(emulator, page_size):
    """Sequences that see a key of such a page become NaN, others stay as they were."""
    rng = np.random.default_rng(page_size)
    slots = 320 // page_size
    q = rng.standard_normal((4, 1, 70, 64)).astype(F16)
    k, v = (rng.standard_normal((4 * slots, page_size, 1, 64)).astype(F16) for _ in range(2))
    table = rng.permutation(4 * slots).reshape(4, slots)
    options = {"kv_lengths": [320, 300, 320, 200], "window": (200, 0)}
    right = compute(emulator, build(q, k, v, page_table=table, **options))
    broken = table.copy()
    broken[0, 200 // page_size] = 4 * slots  # seen
    broken[1, 0], broken[3, -1] = -1, 2**31 - 1  # before the window, behind the sequence
    found = compute(emulator, build(q, k, v, page_table=table, **options).replace(page_table=broken))
    assert np.isnan(found[0][0]).all() and np.isnan(found[1][0]).all()
    assert all((a[1:] == b[1:]).all() for a, b in zip(found, right, strict=True))
