"""prefill_fa3 on the host, thread by thread: right results, and nothing that a GPU must not do. Needs a C++ compiler, no GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import compare
import numpy as np
import pytest
from case import BF16, F16, Packed, case, causal, fixed, sinks, upper_left
from cases import CASES, Target, absent
from cuflash import arrays, tiles, tiles_fa3
from cuflash import problem as problems
from cuflash.backends import cuda
from cuflash.backends.cuda_instance import MASK_LEFT, MASK_LENGTH, MASK_RIGHT
from emulator import emulate
from test_kernels_emulated import (
    H200, Run, by_name, distant_logits, large_logits, no_query, not_finite_values, of_arrays, of_case, pages_not_filled, with_value,
)

FA3 = Target("cuda", "fa3")
BY_ARRAYS = {"it loads boxes", "it stores 16"}  # words of reasons that depend on how arrays lie
GRIDS = (1, 2, 3)  # blocks, fewer than the GPU has: each takes several tiles, one after the other
WINDOW = fixed(window=(150, 3))

# Name -> options of a case, and what tiles_fa3.py asks: the kind of mask, whether there is a softcap.
KINDS = {
    "full": ((), MASK_LENGTH, False), "causal": ((causal,), MASK_RIGHT, False), "window": ((WINDOW,), MASK_LEFT | MASK_RIGHT, False),
    "softcap": ((causal, fixed(softcap=3.0)), MASK_RIGHT, True),
}
HEADS = (*((d, d) for d in tiles.HEAD_CLASSES), (192, 128), (64, 256), (256, 32))


def tile_runs() -> Iterator[Run]:
    """Each tile of the table for each kind: two tiles of rows and a few more, three of keys; every other one with padded columns."""
    for n, (d, dv) in enumerate(HEADS):
        for (kind, (options, mask, scored)), pages in itertools.product(KINDS.items(), (0, 48)):
            for tile in tiles_fa3.starts(d, dv, mask, scored, pages > 0).values() if not pages or kind == "causal" else ():
                rows, keys = 2 * tile.m + 5, 2 * tile.n + 9
                name = f"tile-{d}-{dv}-m{tile.m}n{tile.n}-{kind}"
                shape = f"1,{rows},{max(rows, keys)},{2 if d <= 64 else 1},1,{d - 8 * (n % 2)},{dv - 8 * (n % 2)}"
                made = case(name, shape, *options)
                if pages:
                    made = case(f"{name}-pages", shape, *options, page_size=pages, kv_lengths=(max(rows, keys),))
                yield of_case(made, (F16, BF16)[n % 2], H200, tile)


FURTHER = (
    # Tiles and what is left of them.
    *(case(f"keys-{n}", f"1,70,{n},2,1,64") for n in (1, 15, 127, 128, 129, 256, 513)),
    *(case(f"keys-{n}-causal-128", f"1,{n},{n},1,1,128", causal) for n in (127, 128, 129, 257)),
    *(case(f"rows-{n}", f"1,{n},200,2,1,64", causal) for n in (1, 63, 65, 191, 193, 385)),
    *(case(f"upper-left-{n}", f"1,300,{n},2,1,128", upper_left) for n in (70, 300, 500)),
    case("groups-of-rows-that-see-nothing", "1,400,100,1,1,64", causal),
    case("windows-between-tiles", "1,500,500,1,1,64", fixed(window=(20, 0))),
    case("windows-right", "1,300,700,1,1,128", fixed(window=(-1, 40))),
    # Memory.
    *(case(f"lengths-{'-'.join(map(str, n))}", "2,200,300,2,1,64", causal, kv_lengths=n) for n in ((300, 77), (128, 256), (0, 1))),
    case("starts", "3,200,300,2,1,64", kv_lengths=(300, 280, 200), kv_start=(129, 3, 200)),
    case("starts-sinks-window", "2,200,300,4,2,96", sinks, WINDOW, kv_lengths=(300, 250), kv_start=(129, 3)),
    case("heads-first", "2,140,200,4,2,80", causal, layout="BHSD"),
    case("packed-64", "4,300,300,2,1,64", causal, packed=Packed((300, 1, 193, 76), (300, 64, 200, 1))),
    case("packed-slack-128", "3,200,300,4,2,128", sinks, packed=Packed((3, 0, 200), (70, 2, 300), slack=(6, 4))),
    # Pages.
    *(case(f"pages-of-{n}", "3,200,300,2,1,64", causal, page_size=n, kv_lengths=(300, 131, 1)) for n in (16, 48, 64, 128, 256)),
    case("pages-128", "2,140,400,4,2,128", page_size=32, kv_lengths=(400, 77), kv_start=(33, 70)),
    case("pages-256-window", "2,140,300,2,1,256", WINDOW, page_size=16, kv_lengths=(300, 170)),
    # Query heads that share a key/value head in the same tiles.
    *(case(f"groups-of-{g}-{name}", f"2,{q},200,{2 * g},2,64", *options) for g, q in ((2, 80), (8, 21), (64, 5)) for name, options in (
        ("full", ()), ("causal", (causal,)), ("window-sinks", (fixed(window=(20, 3)), sinks)), ("softcap", (causal, fixed(softcap=3.0))),
    )),
    case("groups-128", "2,50,300,8,2,128", causal, kv_lengths=(300, 70), kv_start=(5, 1)),
    case("groups-heads-first", "2,30,300,8,2,80,40", upper_left, layout="BHSD"),
    case("groups-pages", "2,70,200,8,1,64", causal, page_size=16, kv_lengths=(200, 70)),
    case("groups-packed", "3,30,300,16,2,64", causal, sinks, packed=Packed((30, 1, 19), (100, 2, 300), slack=(6, 4))),
    # Logits.
    *(case(f"softcap-{cap}", "1,200,330,2,1,64", fixed(softcap=cap)) for cap in (0.5, 30.0)),
    case("scale-0", "1,200,300,2,1,64", causal, fixed(scale=0.0)),
    case("scale-negative", "1,200,300,2,1,128", causal, fixed(scale=-0.5)),
    case("bfloat16-results", "1,200,300,2,1,64", fixed(out_dtype=BF16)),
)


def kind_runs() -> Iterator[Run]:
    """All cases of the conformance suite that the kernel takes, and some more."""
    for n, c in enumerate((*CASES, *FURTHER)):
        if F16 not in c.dtypes or c.decode:
            continue
        options: dict[str, object] = {}
        for builder in c.options:
            options.update(builder(c.rng(), c.shape, F16))
        if set(absent(FA3, F16, options | {"packed": c.packed})) <= BY_ARRAYS:  # which are seen when there are arrays
            yield of_case(c, BF16 if n % 2 and "out_dtype" not in options else F16, H200)


def spoiled(value: float, key: int) -> tuple[np.ndarray, ...]:
    """Logits that rounding of their sums moves by some units, and one value that is not finite."""
    rng = np.random.default_rng(0)
    q, k, v = ((size * rng.standard_normal((1, 130, 1, 64))).astype(F16) for size in (3000, 750, 1))
    v[0, key, 0, 3] = value
    return q, k, v


def one_key_of_small_weight(value: float, logit: float) -> tuple[np.ndarray, ...]:
    """Key 0, which all rows see, has this logit, a number or -inf, beside others of 0; its values are all the same."""
    q, k, v = (np.zeros((1, 40, 1, 64), F16) for _ in range(3))
    q[..., 0] = 1
    k[0, 0, 0, 0], v[...] = 8 * logit, 1
    v[0, 0] = value
    return q, k, v


def hidden_beside_huge_logits(keys: int, size: float) -> tuple[np.ndarray, ...]:
    """Logits whose sums in other orders differ by more than weights can show, and a value that is NaN, of the last key."""
    q, k, v = (np.random.default_rng(n).standard_normal((1, keys, 1, 64)) for n in range(3))
    v[0, -1] = np.nan
    return (size * q).astype(BF16), (size * k).astype(BF16), v.astype(BF16)


def hard_runs() -> Iterator[Run]:
    for value, logit in ((np.nan, -200), (np.nan, -np.inf), (np.inf, -np.inf)):
        yield of_arrays(f"one-key-{value}-{logit}", H200, lambda x=value, y=logit: one_key_of_small_weight(x, y), causal=True)
    yield of_arrays("one-key-2-full", H200, lambda: one_key_of_small_weight(2.0, -np.inf))  # with no mask its values must be finite
    for keys, size in ((2, 1e6), (130, 1e5)):
        yield of_arrays(f"hidden-{keys}", H200, lambda n=keys, x=size: hidden_beside_huge_logits(n, x), causal=True)
    for dtype in (F16, BF16):
        for d in (40, 64, 128, 256):
            yield of_arrays(f"not-finite-values-causal-{d}-{dtype.name}", H200, lambda d=d, t=dtype: not_finite_values(d, t), causal=True)
        for name, options in (("sinks", {"sinks": [0.5]}), ("softcap", {"softcap": 3.0}), ("scale", {"scale": 0.0})):
            arrays = not_finite_values(64, dtype)
            yield of_arrays(f"not-finite-values-{name}-{dtype.name}", H200, lambda a=arrays: a, window=(20, 10), **options)
        arrays, options = pages_not_filled(dtype)
        yield of_arrays(f"pages-not-filled-{dtype.name}", H200, lambda a=arrays: a, **options)
        for softcap in (2e-38, 1e36):
            yield of_arrays(f"softcap-{softcap}-{dtype.name}", H200, lambda t=dtype: no_query(t), softcap=softcap, scale=0.125)
    for options in ({"causal": True}, {"window": (20, 10), "sinks": [0.5] * 4}):  # rows of one tile that see different values
        arrays = not_finite_values(64, F16)
        arrays = (np.repeat(arrays[0][:, -20:], 4, 2), *arrays[1:])
        yield of_arrays(f"not-finite-values-groups-{'sinks' in options}", H200, lambda a=arrays: a, **options)
    for value, key in ((np.nan, 70), (np.inf, 0)):  # such rows are computed again: not with a sum of slightly other weights
        yield of_arrays(f"large-logits-{value}", H200, lambda x=value, n=key: spoiled(x, n), causal=True)
    yield of_arrays("nan-query", H200, lambda: with_value(0, 7, np.nan), causal=True)
    yield of_arrays("nan-key", H200, lambda: with_value(1, 100, np.nan), causal=True)
    for value in (np.nan, np.inf, -np.inf):
        yield of_arrays(f"key-{value}", H200, lambda x=value: with_value(1, 60, x), causal=True)
        yield of_arrays(f"key-{value}-softcap", H200, lambda x=value: with_value(1, 60, x), softcap=30.0, window=(90, 5))
    yield of_arrays("nan-query-no-keys", H200, lambda: with_value(0, 7, np.nan, keys=40), causal=True)
    yield of_arrays("large-logits", H200, large_logits)
    yield of_arrays("beside-rows-without-keys", H200, lambda: distant_logits(F16, 2000), causal=True, scale=100.0)


ALL = by_name(tile_runs(), kind_runs(), hard_runs())
LEFT = {name: reason for name, run in ALL.items() if (reason := cuda.decline(run.build()[0], "fa3")) is not None}  # to other kernels
RUNS = {name: run for name, run in ALL.items() if name not in LEFT}


@pytest.fixture(scope="module")
def emulator(request, tmp_path_factory):
    def prepare(made, run):
        made.prepare(run.instance(run.build()[0], "fa3"), run.gpu)

    with emulate.compiling_ahead(request, tmp_path_factory, RUNS, prepare) as made:
        yield made


@pytest.mark.parametrize("name", RUNS)
def test_results_and_accesses(emulator, name):
    """The ends of all arrays at forbidden pages, or for every other run the beginnings."""
    run = RUNS[name]
    problem, check = run.build()
    for a in (problem.out, problem.lse):
        a.array[...] = np.nan
    emulator.run(problem, run.gpu, run.instance(problem, "fa3"), "start" if len(name) % 2 else "end", grid=GRIDS[len(name) % 3])
    check()


def test_what_it_leaves_to_others_is_for_how_arrays_lie():
    """Cases of the suite; nothing that was written for its tiles, or to be hard."""
    assert [name for name, reason in LEFT.items() if not any(words in reason for words in BY_ARRAYS)] == []
    assert not LEFT.keys() & {run.name for run in (*tile_runs(), *hard_runs())}


def test_blocks_share_the_tiles_in_any_way(emulator):
    """Results are those of one block, bit for bit."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 450, 2, 64)).astype(F16) for _ in range(3))
    found = []
    for grid in (1, 3, 12, 100):
        out, lse = np.full(q.shape, np.nan, F16), np.full((2, 2, 450), np.nan, np.float32)
        problem = problems.with_outputs(problems.build_attention(q, k, v, causal=True), out, lse, True, "BSHD", 4)[0]
        emulator.run(problem, H200, emulate.chosen(problem, H200, "fa3"), grid=grid)
        found.append((out.view(np.uint16), lse.view(np.uint32)))
    assert all((a == b).all() for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_packed_sequences_of_which_only_the_device_knows_the_longest(emulator):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((700, 2, 64)).astype(F16) for _ in range(3))
    out, lse = np.full(q.shape, np.nan, F16), np.full((2, 700), np.nan, np.float32)
    plain = problems.build_varlen(q, k, v, [0, 0, 400, 401, 690], [0, 100, 300, 500, 700], causal=True)
    problem = problems.with_outputs(plain, out, lse, True, "BSHD", 3)[0]
    on_device = {name: arrays.view(np.array(getattr(problem, name)), name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    problem = problem.replace(seqlen_q=700, seqlen_k=700, **on_device)
    chosen = emulate.chosen(problem, H200, "fa3")
    assert chosen.flat
    emulator.run(problem, H200, chosen, grid=2)
    want = compare.expect([plain])
    compare.assert_close(out, want.out[0], want.out_bound, "out")
    compare.assert_close(lse, want.lse[0], want.lse_bound, "lse")


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("outliers", [0.0, 0.001])
def test_errors_are_those_of_weights_whose_largest_is_1(emulator, d, outliers):
    """Root mean square errors, beside those of softmax with the whole row's maximum and weights rounded to 16 bits: at most 2 % more."""
    rng = np.random.default_rng(d)
    shape = (1, 1024, 1, d)
    draws = rng.standard_normal((3, *shape))
    q, k, v = ((x + 10 * rng.standard_normal(shape) * (rng.random(shape) < outliers)).astype(BF16) for x in draws)
    q = q[:, :256]
    out, lse = np.full(q.shape, np.nan, BF16), np.full((1, 1, 256), np.nan, np.float32)
    problem = problems.with_outputs(problems.build_attention(q, k, v), out, lse, True, "BSHD", 4)[0]
    emulator.run(problem, H200, emulate.chosen(problem, H200, "fa3"), grid=2)
    scores, values = (np.float64(a[0, :, 0]) for a in (q, v))
    scores = scores @ np.float64(k[0, :, 0]).T / np.sqrt(d)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    sums = weights.sum(1, keepdims=True)
    best = np.float64((weights.astype(BF16).astype(np.float64) @ values / sums).astype(BF16))
    error, least = (np.sqrt(np.mean((x - weights @ values / sums) ** 2)) for x in (np.float64(out[0, :, 0]), best))
    assert error <= 1.02 * least


def test_values_so_large_that_products_of_two_are_infinite(emulator):
    """Under a mask, rows are looked through for what is not finite by such products; these are as they should be."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 130, 1, 64)) for _ in range(3))
    q, k, v = q.astype(BF16), k.astype(BF16), (1e25 * v).astype(BF16)
    out, lse = np.full(q.shape, np.nan, BF16), np.full((1, 1, 130), np.nan, np.float32)
    problem = problems.with_outputs(problems.build_attention(q, k, v, causal=True), out, lse, True, "BSHD", 4)[0]
    emulator.run(problem, H200, emulate.chosen(problem, H200, "fa3"), grid=2)
    want = compare.expect([problems.build_attention(q, k, v, causal=True)])
    compare.assert_close(out, want.out[0], want.out_bound, "out")
    compare.assert_close(lse, want.lse[0], want.lse_bound, "lse")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("watched", [0, 1])
def test_neighbours_change_nothing(emulator, causal, watched):
    """Rows of the next sequence come with the last ones of this one: bit for bit, whatever they are."""
    rng = np.random.default_rng(0)
    queries, k, v = 30 * rng.standard_normal((170, 2, 64)), *(rng.standard_normal((600, 2, 64)).astype(BF16) for _ in range(2))
    found = []
    for factor in (1.0, 2.0, 1e7):
        q = queries.copy()
        q[slice(100, 170) if watched == 0 else slice(100)] *= factor
        out, lse = np.full(q.shape, np.nan, BF16), np.full((2, 170), np.nan, np.float32)
        plain = problems.build_varlen(q.astype(BF16), k, v, [0, 100, 170], [0, 300, 600], causal=causal, batch_invariant=True)
        problem = problems.with_outputs(plain, out, lse, True, "BSHD", 3)[0]
        emulator.run(problem, H200, emulate.chosen(problem, H200, "fa3"), grid=2)
        own = slice(100) if watched == 0 else slice(100, 170)
        found.append((out[own].view(np.uint16), lse[:, own].view(np.uint32)))
    assert all((a == b).all() for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_alone_as_among_others(emulator):
    """batch_invariant: a long sequence in attention() and in attention_varlen()."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 300, 4, 64)).astype(F16) for _ in range(3))
    plain = (
        problems.build_attention(q, k, v, causal=True, batch_invariant=True),
        problems.build_varlen(q[0], k[0], v[0], [0, 300], [0, 300], causal=True, batch_invariant=True),
    )
    found = []
    for built, shape in zip(plain, (q.shape, q.shape[1:]), strict=True):
        out, lse = np.full(shape, np.nan, F16), np.full((4, 300), np.nan, np.float32)
        problem = problems.with_outputs(built, out, lse.reshape(1, 4, 300) if len(shape) == 4 else lse, True, "BSHD", len(shape))[0]
        chosen = emulate.chosen(problem, H200, "fa3")
        emulator.run(problem, H200, chosen, grid=2)
        found.append((chosen.tile, out.reshape(q.shape).tobytes(), lse.tobytes()))
    assert found[0] == found[1]
    for n in (200, 8192):  # the tile does not go by the length
        arrays_of_n = [np.broadcast_to(a[:1, :1], (1, n, 4, 64)) for a in (q, k, v)]
        tile = cuda.instance(problems.build_attention(*arrays_of_n, batch_invariant=True), H200, "fa3").tile
        assert tile == cuda.instance(problems.build_attention(*(a[:, :9] for a in (q, k, v)), batch_invariant=True), H200, "fa3").tile


@pytest.mark.parametrize("causal", [False, True])
def test_rows_beyond_the_longest_sequence_that_was_promised(emulator, causal):
    """They are 0, and all others right: lengths on the device may be others than the host was told."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((700, 2, 64)).astype(F16) for _ in range(3))
    out, lse = np.full(q.shape, np.nan, F16), np.full((2, 700), np.nan, np.float32)
    plain = problems.build_varlen(q, k, v, [0, 300, 350, 700], [0, 300, 500, 700], causal=causal)
    problem = problems.with_outputs(plain, out, lse, True, "BSHD", 3)[0]
    on_device = {name: arrays.view(np.array(getattr(problem, name)), name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    problem = problem.replace(seqlen_q=130, seqlen_k=300, **on_device)
    chosen = emulate.chosen(problem, H200, "fa3")
    emulator.run(problem, H200, chosen, grid=2)
    there = np.concatenate([np.arange(n) < -(-130 // chosen.tile.m) * chosen.tile.m for n in (300, 50, 350)])
    want = compare.expect([plain])
    compare.assert_close(out[there], want.out[0][there], want.out_bound[there] if np.ndim(want.out_bound) else want.out_bound, "out")
    assert (out[~there] == 0).all() and (lse[:, ~there] == -np.inf).all()
