"""Tile tables fit the GPUs they are for; plans and packed parameters, without a GPU; index maps of the kernels' shared memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import ml_dtypes
import numpy as np
import pytest
from cuflash import device, jit, planner, structs, tiles, tiles_fp
from cuflash import problem as problems
from cuflash.backends import cuda, numba_cuda
from cuflash.types import UNBOUNDED

F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
GPUS = sorted(device.KNOWN)


def problem(shape=(2, 256, 4, 64), heads_kv=None, dv=None, dtype=F16, sk=None, **options):
    """A problem on NumPy arrays: planning looks at shapes, strides and dtypes alone."""
    b, s, h, d = shape
    hk, sk = heads_kv or h, s if sk is None else sk
    q, k, v = np.zeros((b, s, h, d), dtype), np.zeros((b, sk, hk, d), dtype), np.zeros((b, sk, hk, dv or d), dtype)
    p = problems.build_attention(q, k, v, **options)
    return problems.with_outputs(p, None, None, True, "BSHD", 4)[0]


# ---- tables -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("d", tiles.HEAD_CLASSES)
@pytest.mark.parametrize("dv", tiles.HEAD_CLASSES)
def test_a_tile_fits_every_gpu(name, d, dv):
    info = device.KNOWN[name]
    for band, lean, extra, kind in itertools.product((False, True), (False, True), (0, 1, 2), ("", "softcap", 1, 16)):
        page_rows = kind if isinstance(kind, int) else 0
        tile = tiles.prefill_fa2(d, dv, band, lean, info, extra, kind == "softcap", page_rows)
        assert tile is not None
        assert tile.shared_memory(d, dv, page_rows) <= info.shared_memory_block
        assert tile.n % 32 == 0 or not extra or kind == "softcap"  # as MatrixTile has it
        assert tile.m % (16 * tile.warps) == 0 and tile.n % 16 == 0


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("d", tiles.HEAD_CLASSES)
def test_resident_blocks_fit_the_multiprocessor(name, d):
    """What launch bounds promise must not be undone by shared memory or threads."""
    info = device.KNOWN[name]
    for band, lean, extra, kind in itertools.product((False, True), (False, True), (0, 1, 2), ("", "softcap", 1, 16)):
        page_rows = kind if isinstance(kind, int) else 0
        tile = tiles.prefill_fa2(d, d, band, lean, info, extra, kind == "softcap", page_rows)
        reserved = tiles.RESERVED_SHARED_MEMORY if info.cc >= (8, 0) else 0
        assert tile.resident * (tile.shared_memory(d, d, page_rows) + reserved) <= info.shared_memory_sm
        assert tile.resident * tile.threads <= info.threads_sm


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("dtype, precision", [("float32", None), ("float32", "tf32"), ("float64", None)])
def test_a_tile_for_float32_and_float64_fits_every_gpu(name, dtype, precision):
    info, itemsize = device.KNOWN[name], np.dtype(dtype).itemsize
    kind = tiles_fp.arithmetic(dtype, precision, info)
    assert (kind == tiles_fp.SIMT) if info.cc < (8, 0) else (kind == tiles_fp.DMMA) == (dtype == "float64")
    for d, dv in itertools.product(tiles.HEAD_CLASSES, repeat=2):
        tile = tiles_fp.prefill_fp(kind, dtype, d, dv, info)
        assert tile is not None
        assert tile.shared_memory(itemsize, d, dv) <= info.shared_memory_block
        assert tile.m % (16 * tile.warps) == 0 and tile.m <= 32 * tile.warps
        assert tile.n % (8 if kind == tiles_fp.SIMT else 16) == 0
        slices = -(-dv // tile.slice(dv))
        assert tile.slice(dv) % 32 == 0 and tile.slice(dv) <= tile.columns and (slices - 1) * tile.slice(dv) < dv


@pytest.mark.parametrize("kind", tiles_fp.TILES)
def test_resident_blocks_for_float32_and_float64_fit_the_multiprocessor(kind):
    """What the first choice promises holds on the GPUs with the most shared memory; narrower heads and others get fewer blocks."""
    itemsize = 8 if kind in (tiles_fp.DMMA, "Simt float64") else 4
    for d, choice in tiles_fp.TILES[kind].items():
        if (kind, d) == (tiles_fp.DMMA, 256):
            d = 160  # above, the queries of 8 warps do not fit: it is the second choice
        tile = choice[0]
        needed = tile.shared_memory(itemsize, d, d) + tiles.RESERVED_SHARED_MEMORY
        assert tile.resident * needed <= device.KNOWN["H200"].shared_memory_sm


def test_float32_is_multiplied_by_what_is_fastest():
    kinds = {name: tiles_fp.arithmetic("float32", None, info) for name, info in device.KNOWN.items()}
    tensor = {name for name, kind in kinds.items() if kind == tiles_fp.TF32X3}
    assert tensor == {"A100", "H100", "H200", "B200"} and {kinds[name] for name in set(kinds) - tensor} == {tiles_fp.SIMT}


def test_head_classes():
    assert [tiles.head_class(d) for d in (1, 32, 33, 64, 72, 80, 96, 97, 128, 160, 192, 193, 256)] == [
        32, 32, 64, 64, 96, 96, 96, 128, 128, 160, 192, 256, 256]
    for d in range(1, tiles.LARGEST_HEAD + 1):
        padded = tiles.head_class(d)
        block = 64 if padded % 64 == 0 else 32
        assert padded - block < d <= padded  # only the last column block may hold padding: TileLoader relies on it


def test_known_gpus_get_the_tables_of_their_generation():
    families = {name: tiles.family(info) for name, info in device.KNOWN.items()}
    assert families == {
        "T4": "sm_75", "A100": "sm_80", "RTX 3090": "sm_86", "RTX 4090": "sm_86", "L4": "sm_86", "H100": "sm_90", "H200": "sm_90",
        "B200": "sm_100", "RTX 5090": "sm_86",
    }


# ---- plans --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GPUS)
def test_one_instance_serves_all_shapes(name):
    info, rng = device.KNOWN[name], np.random.default_rng(0)
    shapes = [(int(b), int(s), int(h), 64) for b, s, h in rng.integers(1, 9, (200, 3))]
    assert len({cuda.instance(problem(shape), info).name for shape in shapes}) == 1


def test_instances_tell_masks_and_scores_apart():
    info = device.KNOWN["H200"]

    def kinds(**options):
        chosen = cuda.instance(problem(**options), info)
        return chosen.mask, chosen.score

    assert kinds() == (cuda.MASK_LENGTH, cuda.SCORE_PLAIN)
    assert kinds(causal=True) == kinds(causal="upper_left") == kinds(window=(-1, 3)) == (cuda.MASK_RIGHT, cuda.SCORE_PLAIN)
    assert kinds(window=(7, 0)) == kinds(window=(7, -1)) == (cuda.MASK_RIGHT | cuda.MASK_LEFT, cuda.SCORE_PLAIN)
    assert kinds(kv_lengths=[3, 4]) == (cuda.MASK_LENGTH, cuda.SCORE_PLAIN)
    for scale in (-1.0, 0.0, 1e-35):
        assert kinds(scale=scale) == (cuda.MASK_LENGTH, cuda.SCORE_SCALED)
    assert kinds(softcap=3.0) == (cuda.MASK_LENGTH, cuda.SCORE_SOFTCAP)
    assert kinds(softcap=3.0, alibi_slopes=[1, 2, 3, 4]) == (cuda.MASK_LENGTH, cuda.SCORE_SOFTCAP | cuda.SCORE_ALIBI)


@pytest.mark.parametrize(
    "make, width",
    [
        (lambda: np.zeros((2, 8, 4, 64), F16), 16),
        (lambda: np.zeros((2, 8, 4, 72), F16), 16),
        (lambda: np.zeros((2, 8, 4, 20), F16), 8),
        (lambda: np.zeros((2, 8, 4, 18), F16), 4),
        (lambda: np.zeros((2, 8, 4, 17), F16), 2),
        (lambda: np.zeros((2, 8, 4, 128), F16)[..., ::2], 2),
        (lambda: np.zeros((2, 8, 4, 64), F16)[..., ::-1], 2),
        (lambda: np.zeros((2, 8, 4, 64), F16)[:, ::-1], 16),
        (lambda: np.broadcast_to(np.zeros((2, 8, 1, 64), F16), (2, 8, 4, 64)), 16),
        (lambda: np.zeros((2, 8, 4, 66), F16)[..., :64], 4),
        (lambda: np.zeros((2, 0, 4, 64), F16), 16),
    ],
)
def test_width_of_copies(make, width):
    a = make()
    from cuflash import arrays

    view = dataclasses.replace(arrays.view(a, "q"), pointer=1 << 12)
    assert structs.copy_bytes((view,)) == width
    for offset in (2, 4, 8):  # bytes off alignment
        shifted = structs.copy_bytes((dataclasses.replace(view, pointer=view.pointer + offset),))
        assert shifted == (min(width, offset) if a.size else 16)


def test_packed_parameters():
    p = problem((2, 300, 6, 80), heads_kv=2, dv=40, sk=500, window=(17, UNBOUNDED), scale=0.5)
    r = structs.pack_prefill(p, 128, 3, True, {"kv_lengths": 77})[0]
    assert (r["batch"], r["heads_q"], r["heads_kv"], r["group"], r["head_dim"], r["head_dim_v"]) == (2, 6, 2, 3, 80, 40)
    assert (r["q_rows"], r["k_rows"], r["m_tiles"], r["section"]) == (300, 500, 3, 3)
    assert (r["window_left"], r["window_right"], r["upper_left"]) == (17, structs.NO_LIMIT, 0)
    assert r["q_stride"].tolist() == [300 * 6 * 80, 6 * 80, 80, 1]
    assert r["v_stride"].tolist() == [500 * 2 * 40, 2 * 40, 40, 1]
    assert r["lse_stride"].tolist() == [6 * 300, 1, 300, 0]
    assert r["kv_lengths"] == 77 and r["kv_start"] == 0 and r["q"] == p.q.pointer
    assert math.isclose(r["logit_scale"], 0.5 * structs.LOG2E, rel_tol=1e-7)
    assert r["logit_scale64"] == 0.5 * structs.LOG2E and r["scale64"] == 0.5 * structs.LOG2E
    large = re.search(r"struct Fast32 .*? LARGE = ([\d.]+)f;", (jit.kernel_directory() / "include/reals.cuh").read_text(), re.DOTALL)
    assert math.isclose(r["large_score"] * r["logit_scale"], float(large[1]), rel_tol=1e-6)
    soft = structs.pack_prefill(problem(softcap=4.0, scale=0.5), 128, 1, False, {})[0]
    assert math.isclose(soft["scale"], 0.125) and soft["logit_scale"] == 1
    assert math.isclose(soft["softcap"], 4 * structs.LOG2E, rel_tol=1e-7)


@pytest.mark.parametrize("scale", [0.125, 1.0, 1e-3])
@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e4])
def test_series_of_a_softcap(softcap, scale):
    """Logits as the kernel computes them, from coefficients in float32, up to the limits that it compares with."""
    r = structs.pack_prefill(problem(softcap=softcap, scale=scale), 128, 1, True, {})[0]
    assert 0 < r["near_limit"] <= r["softcap_limit"]
    for limit, series in ((r["near_limit"], r["near_series"]), (r["softcap_limit"], r["softcap_series"])):
        if limit == r["near_limit"] and not series.any():  # float32 does not hold the longer one
            continue
        s = np.linspace(0, float(limit), 1001)[1:]
        got = s * np.polynomial.polynomial.polyval(s * s, series.astype(float))
        want = structs.LOG2E * softcap * np.tanh(scale * s / softcap)
        np.testing.assert_allclose(got, want, rtol=1.5 * np.finfo(np.float32).eps)
        assert series[-1] > 0  # the logit of -inf is -inf


def test_the_kernel_has_the_same_series_in_its_own_unit():
    """tanh(x) = x (c0 + c1 x^2 + ...) becomes a series in z = x / TANH_UNIT, whose leading coefficient is 1."""
    text = (jit.kernel_directory() / "include" / "softcap.cuh").read_text()
    unit = float(re.search(r"TANH_UNIT = ([\d.]+)f", text)[1])
    limit = float(re.search(r"SERIES_LIMIT = ([\d.]+)f / TANH_UNIT", text)[1])
    line = next(line for line in text.splitlines() if "u - " in line and "fmaf" in line)
    (third, *others), signs = [float(x) for x in re.findall(r"([\d.]+)f\b", line)], re.findall(r"(-?)[\d.]+f\b", line)
    kernel = [1.0, -third, *(-x if sign else x for sign, x in zip(signs[1:], others, strict=True))][::-1]
    wanted = [c * unit ** (2 * n + 1) for n, c in enumerate(structs.TANH_SERIES[1])]
    np.testing.assert_allclose(kernel, wanted, rtol=np.finfo(np.float32).eps)
    assert limit == structs.TANH_SERIES[0]


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "scale": -0.1}, {"softcap": 1e8}, {"softcap": 30.0, "scale": 1e-12}])
def test_no_series_where_it_cannot_serve(options):
    r = structs.pack_prefill(problem(**options), 128, 1, True, {})[0]
    assert r["near_limit"] == r["softcap_limit"] == -1


def test_negative_and_zero_strides_are_packed_as_they_are():
    a = np.zeros((2, 8, 4, 64), F16)
    q, k, v = a[:, ::-1], np.broadcast_to(a[:, :, :1], a.shape), a[..., ::-1]
    p = problems.with_outputs(problems.build_attention(q, k, v), None, None, False, "BSHD", 4)[0]
    r = structs.pack_prefill(p, 64, 1, True, {})[0]
    assert r["q_stride"].tolist() == [8 * 4 * 64, -4 * 64, 64, 1]
    assert r["k_stride"].tolist() == [8 * 4 * 64, 4 * 64, 0, 1]
    assert r["v_stride"].tolist() == [8 * 4 * 64, 4 * 64, 64, -1]
    assert r["lse"] == 0


def test_decline_says_why(monkeypatch):
    def reason(info, **options):
        p = problem(**options)
        p = p.replace(q=dataclasses.replace(p.q, device=0))
        monkeypatch.setattr(cuda, "unusable", lambda: None)
        monkeypatch.setattr(device, "probe", lambda ordinal: device.KNOWN[info])
        return cuda.decline(p, "fa2")

    assert reason("H200") is None and reason("T4") is None
    assert reason("H200", dtype=np.dtype(np.float32)) is None and reason("T4", dtype=np.dtype(np.float64)) is None
    assert "8.0" in reason("T4", dtype=BF16)
    assert "256" in reason("H200", shape=(1, 8, 1, 257))
    assert reason("H200", bias=np.zeros((256, 256), F16), mask=np.ones((256, 256), bool)) is None
    assert "score_mod" in reason("H200", score_mod="s")
    f32, f64 = np.dtype(np.float32), np.dtype(np.float64)
    assert "with float64 results" in reason("H200", dtype=f32, out_dtype=f64)
    assert "with float16 results" in reason("H200", dtype=BF16, out_dtype=F16)
    assert reason("H200", dtype=f64, out_dtype=f32) is None and reason("H200", dtype=F16, out_dtype=BF16) is None
    monkeypatch.setattr(cuda, "unusable", lambda: "no GPU")
    p = problem()
    assert cuda.decline(p.replace(q=dataclasses.replace(p.q, device=0)), "fa2") is None  # the kernel could; the planner asks for a GPU


@pytest.mark.parametrize(
    "dtype, options, word",
    [
        (F16, {"softcap": 3e38}, "softcap: 3e+38"),
        (F16, {"softcap": 2.4e38, "scale": 3e38}, "softcap: 2.4e+38"),
        (F16, {"softcap": 1e38}, "scale / softcap"),  # a denormal ratio
        (F16, {"softcap": 2e-38, "scale": -7e5}, "scale / softcap"),
        (F16, {"softcap": 2e-38, "scale": 1e6}, "scale / softcap"),
        (F16, {"scale": -2.4e38}, "scale: -2.4e+38"),
        (F16, {"alibi_slopes": [0, 1, -1e36, 2]}, "alibi_slopes"),
        (F16, {"sinks": [0, -np.inf, -3.4e38, 1]}, "sinks"),
        (np.float32, {"softcap": 2.4e38, "scale": 3e38}, "softcap: 2.4e+38"),
        (np.float64, {"softcap": 1.3e308, "scale": 1.0}, "softcap: 1.3e+308"),
        (np.float64, {"softcap": 1e308}, "scale / softcap"),
        (np.float64, {"softcap": 3e-308, "scale": 8.0}, "scale / softcap"),
        (np.float64, {"scale": 1.3e308}, "scale: 1.3e+308"),
    ],
)
def test_what_overflows_in_the_kernels_units_is_declined(dtype, options, word):
    """float16 and float32 have statistics of float32 alike."""
    reason = cuda.decline(problem(dtype=np.dtype(dtype), **options), "fa2")
    assert reason is not None and reason.startswith(word)
    assert planner.decline(numba_cuda, problem(dtype=np.dtype(dtype), **options), "fa1") is None


@pytest.mark.parametrize(
    "dtype, options",
    [
        (F16, {"softcap": 1e36}), (F16, {"softcap": 1e37, "scale": 0.0}), (F16, {"softcap": 2e-38, "scale": 0.125}),
        (F16, {"scale": 2.3e38}), (F16, {"scale": 1e-44}), (F16, {"sinks": [8e37, -8e37, -np.inf, 0]}),
        (F16, {"alibi_slopes": [0, 1, -1e35, 2]}), (np.float32, {"sinks": [3e38, -3e38, -np.inf, 0]}),
        (np.float64, {"softcap": 1e305}), (np.float64, {"scale": 1e308}),
    ],
)
def test_what_is_just_within_the_kernels_units_is_not_declined(dtype, options):
    p = problem(dtype=np.dtype(dtype), **options)
    assert cuda.decline(p, "fa2") is None
    pack = structs.pack_prefill(p, 128, 1, True, {})[0]
    number = "64" if dtype == np.float64 else ""
    assert all(np.isfinite(pack[f"{name}{number}"]) for name in ("scale", "softcap", "logit_scale"))
    assert np.isfinite(pack["large_score"]) and pack["large_score"] >= 0
    assert all(np.isfinite(a).all() or name == "sinks" for name, a in structs.small_arrays(p).items())


# ---- index maps of shared memory: the formulas of layout.cuh --------------------------------------------------------------


def offset(block: int, row: int, chunk: int) -> int:
    """SmemTile::offset."""
    swizzle = row & 7 if block == 64 else (row >> 1) & 3
    return row * 2 * block + ((chunk ^ swizzle) << 4)


def number_offset(itemsize: int, columns: int, row: int, chunk: int) -> int:
    """NumberTile::offset of fp_tile.cuh."""
    swizzle = row & 7 if itemsize == 4 else (row & 6) ^ (row & 1) << 2
    return row * columns * itemsize + ((chunk ^ swizzle) << 4)


@pytest.mark.parametrize("itemsize, columns", [(4, 32), (4, 96), (8, 32), (8, 64)])
def test_number_tile_is_a_permutation_without_bank_conflicts(itemsize, columns):
    chunks = columns * itemsize // 16

    def banks(places):
        return {number_offset(itemsize, columns, row, chunk) // 16 % 8 for row, chunk in places}

    places = {number_offset(itemsize, columns, row, chunk) for row in range(16) for chunk in range(chunks)}
    assert places == set(range(0, 16 * columns * itemsize, 16))
    for first, chunk in itertools.product((0, 8), range(0, chunks, 2)):
        for odd in (0, 1):  # V: 8 lanes read two chunks of every other row
            assert len(banks((first + 2 * t + odd, chunk + g) for t in range(4) for g in range(2))) == 8
    for first, chunk in itertools.product((0, 8), range(0, chunks, 4)):
        if itemsize == 4:  # ldmatrix
            assert len(banks((first + row, chunk) for row in range(8))) == 8
        else:
            for pair in range(0, 8, 2):
                assert len(banks((first + pair + g, chunk + t) for t in range(4) for g in range(2))) == 8


@pytest.mark.parametrize("block", [32, 64])
def test_smem_tile_is_a_permutation_without_bank_conflicts(block):
    chunks = block // 8
    places = {offset(block, row, chunk) for row in range(64) for chunk in range(chunks)}
    assert places == set(range(0, 64 * 2 * block, 16))
    for first, chunk in itertools.product(range(0, 64, 8), range(chunks)):
        banks = {offset(block, row, chunk) // 16 % 8 for row in range(first, first + 8)}
        assert len(banks) == 8  # eight rows of an ldmatrix touch all 32 banks once


@pytest.mark.parametrize("columns", tiles.HEAD_CLASSES)
@pytest.mark.parametrize("rows", [32, 64, 128])
def test_fragment_addresses(columns, rows):
    """SmemTile::fragment by exclusive or finds the chunks that SmemTile::offset stored."""
    block = 64 if columns % 64 == 0 else 32
    per_block, block_bytes = block // 16, rows * 2 * block
    for lane, row16, column16 in itertools.product(range(32), range(rows // 16), range(columns // 16)):
        for lane_row, lane_chunk in ((lane % 16, lane // 16), (lane // 16 * 8 + lane % 8, lane // 8 % 2)):  # A and V; K
            first = offset(block, lane_row, lane_chunk)
            found = (first ^ ((column16 % per_block) << 5)) + column16 // per_block * block_bytes + row16 * 16 * 2 * block
            chunk = column16 % per_block * 2 + lane_chunk
            assert found == column16 // per_block * block_bytes + offset(block, row16 * 16 + lane_row, chunk)


def test_every_tile_of_the_grid_is_done_once():
    """schedule.cuh's work_item, with sections that do not divide the number of heads."""
    for pairs, m_tiles, section in itertools.product((1, 2, 7, 12), (1, 3, 8), (1, 2, 5, 12)):
        section = min(section, pairs)
        done = []
        for block in range(pairs * m_tiles):
            first, rest = block // (section * m_tiles) * section, block % (section * m_tiles)
            size = min(section, pairs - first)
            done.append((first + rest % size, m_tiles - 1 - rest // size))
        assert sorted(done) == sorted(itertools.product(range(pairs), range(m_tiles)))


# ---- biases, masks and pages ----------------------------------------------------------------------------------------------


def test_pages_are_found_by_a_multiplication():
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 5, 7, 16, 17, 64, 100, 255, 256, 257, 65535, (1 << 20) + 1, 1 << 30, (1 << 31) - 1):
        magic, shift = structs.page_divisor(size)
        assert magic < 1 << 32 and shift < 64
        multiples = size * rng.integers(0, (1 << 31) // size + 1, 200)
        keys = np.concatenate([multiples - 1, multiples, multiples + 1, rng.integers(0, 1 << 31, 200), [0, (1 << 31) - 1]])
        keys = keys[(keys >= 0) & (keys < 1 << 31)]
        assert [int(k) * magic >> shift for k in keys] == (keys // size).tolist()


def test_which_biases_are_read_by_whole_instructions():
    p = problem((2, 256, 4, 64), bias=np.zeros((4, 256, 256), F16), mask=np.ones((256, 256), bool))

    def flags(**changes):
        r = structs.pack_prefill(p.replace(**changes), 128, 1, False, {})[0]
        return bool(r["bias_vector"]), bool(r["mask_vector"])

    def moved(a, pointer=1 << 12, **changes):
        return dataclasses.replace(a, pointer=pointer, **changes)

    assert flags(bias=moved(p.bias), mask=moved(p.mask)) == (True, True)
    assert flags(bias=moved(p.bias, (1 << 12) + 8), mask=moved(p.mask, (1 << 12) + 8)) == (False, True)
    assert flags(bias=moved(p.bias), mask=moved(p.mask, (1 << 12) + 4)) == (True, False)
    assert flags(bias=moved(p.bias), mask=moved(p.mask), mask_is_tail=True) == (True, False)
    assert flags(bias=moved(p.bias, strides=(0, 131072, 514, 2)), mask=moved(p.mask, strides=(0, 0, 256, 2))) == (False, False)
    r = structs.pack_prefill(p, 128, 1, False, {})[0]
    assert r["bias_stride"].tolist() == [0, 256, 65536, 1] and r["mask_stride"].tolist() == [0, 256, 0, 1]
    assert (r["matrix_rows"], r["bias_columns"], r["mask_columns"], r["mask_tail"]) == (256, 256, 256, 0)
    assert math.isclose(r["scale"], 0.125) and math.isclose(r["logit_scale"], structs.LOG2E, rel_tol=1e-7)  # natural logits


def test_entries_of_a_page_table_that_do_not_fit_are_bad():
    table = np.array([[0, 2**31 - 1, 2**31, -1, -(2**40), 2**40]])
    assert structs.page_entries(table).tolist() == [[0, 2**31 - 1, -1, -1, -1, -1]] and structs.page_entries(table).dtype == np.int32
