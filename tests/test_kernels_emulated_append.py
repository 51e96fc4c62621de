"""kv_append, the raw kernel that appends and turns, on the host, thread by thread, against the same in NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import compare
import devices
import numpy as np
import pytest
from case import BF16, DTYPES, F16, F32, F64
from cuflash import arrays, device, reference
from cuflash import problem as problems
from cuflash.backends import append, cuda_append
from cuflash.types import Append, Problem
from emulator import emulate

reason = "the cases are others in Numba's simulator" if devices.SIMULATED else emulate.why_unusable()
if reason is not None:
    pytest.skip(f"kernels cannot be emulated here: {reason}", allow_module_level=True)

H200, T4 = device.KNOWN["H200"], device.KNOWN["T4"]
B, KEYS = 3, 24


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    made = emulate.Emulator(tmp_path_factory.mktemp("emulated"))
    yield made
    made.close()


class Shape(NamedTuple):
    new: int = 2
    rows: int = 2
    d: int = 16
    dv: int = 16
    page: int = 0
    layout: str = "BSHD"
    strides: str = "contiguous"
    rot: int = 0
    style: str = "half"
    table: np.dtype = F32
    lengths: tuple[int, ...] = (0, 9, 22)
    entries: tuple[int, ...] = ()  # cache_batch_index
    options: tuple[tuple[str, Any], ...] = ()


def lay(a: np.ndarray, how: str) -> np.ndarray:
    """The same numbers otherwise in memory, NaN between them."""
    n = a.shape[-1]
    if how == "every other":
        view = np.full((*a.shape[:-1], 2 * n + 1), np.nan, a.dtype)[..., 1::2]
    elif how == "odd":
        view = np.full((*a.shape[:-1], n + 2), np.nan, a.dtype)[..., 1 : n + 1]
    elif how == "gaps":
        view = np.full((*a.shape[:-2], a.shape[-2] + 1, n), np.nan, a.dtype)[..., :-1, :]
    else:
        return {"contiguous": a, "reversed": a[::-1].copy()[::-1]}[how]
    view[...] = a
    return view


def rope_table(positions: int, pairs: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(pairs) / pairs)
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


class Given(NamedTuple):
    """The arguments of a decode call."""

    args: list[np.ndarray]
    options: dict[str, Any]


def given(s: Shape, dtype: np.dtype) -> Given:
    rng = np.random.default_rng(abs(hash((s.new, s.d, s.dv, s.page, s.rot))))

    def normal(*shape: int) -> np.ndarray:
        a = rng.standard_normal(shape).astype(dtype)
        return lay(np.ascontiguousarray(a.swapaxes(1, 2)) if s.layout == "BHSD" else a, s.strides)

    options: dict[str, Any] = {"layout": s.layout, **dict(s.options)}
    if s.page:
        slots = KEYS // s.page
        options["page_table"] = rng.permutation(B * slots + 2)[: B * slots].reshape(B, slots)
        caches = [normal(B * slots + 2, s.page, 2, n) for n in (s.d, s.dv)]
    else:
        caches = [normal(B + 2 * bool(s.entries), KEYS, 2, n) for n in (s.d, s.dv)]
    if s.entries:
        options["cache_batch_index"] = list(s.entries)
    if s.new:
        options["k_new"], options["v_new"] = normal(B, s.new, 2, s.d), normal(B, s.new, 2, s.dv)
    if s.rot:
        options["rope"] = (*rope_table(KEYS, s.rot // 2, s.table if dtype != F32 else F32), s.style)
    return Given([normal(B, s.rows, 4, s.d), *caches, np.array(s.lengths)], options)


def copied(g: Given) -> Given:
    """With caches of its own."""
    return Given([g.args[0], *(lay_like(a) for a in g.args[1:3]), g.args[3]], g.options)


def lay_like(a: np.ndarray) -> np.ndarray:
    base = devices.root(a).copy()
    offset = a.__array_interface__["data"][0] - devices.root(a).__array_interface__["data"][0]
    return np.ndarray(a.shape, a.dtype, base, offset, a.strides)


def on_device(problem: Problem, new: Append, width: type = np.int32) -> tuple[Problem, Append]:
    """With lengths and page table where the kernel finds those of a device; the lengths are then those before the append."""
    lengths = arrays.view(new.lengths.astype(width), "kv_lengths")
    table = problem.page_table
    if table is not None:
        table = arrays.view(np.where(abs(table) < 2**31, table, -1).astype(np.int32), "page_table")
    return problem.replace(kv_lengths=lengths, page_table=table), dataclasses.replace(new, lengths=lengths)


def same(got: np.ndarray, want: np.ndarray, what: str, exact: bool) -> None:
    if exact:
        compare.assert_same_bits(np.ascontiguousarray(got), np.ascontiguousarray(want), what)
        return
    bound = 4 * float(compare.ml_dtypes.finfo(got.dtype).eps) * float(np.nanmax(abs(want.astype(np.float64)), initial=1.0))
    compare.assert_close(np.ascontiguousarray(got), np.ascontiguousarray(want).astype(np.float64), bound, what)


SHAPES = {
    "plain": Shape(),
    "one": Shape(new=1, rows=1),
    "many": Shape(new=15, lengths=(0, 9, 1)),
    "odd head sizes": Shape(d=7, dv=5),
    "one vector, one not": Shape(d=16, dv=9, rot=8),
    "heads first": Shape(layout="BHSD", page=4, rot=16),
    **{f"strides {how}": Shape(strides=how, rot=8) for how in ("every other", "odd", "gaps", "reversed")},
    **{f"pages of {n}": Shape(page=n, new=5, lengths=(0, 9, 19)) for n in (1, 3, 4, 8, 24)},
    **{
        f"{style} {rot} of {d}, {table} {n}": Shape(new=3, rows=n, d=d, rot=rot, style=style, table=table, lengths=(0, 9, 21))
        for style in ("half", "interleaved")
        for rot, d, table in ((32, 32, F32), (16, 32, BF16), (24, 32, F32), (6, 16, F32), (10, 11, F32))
        for n in (1, 3)
    },
    "interleaved pages": Shape(page=3, rot=16, style="interleaved", d=32),
    "more queries than keys": Shape(new=0, rows=5, rot=16, lengths=(0, 2, 9)),
    "upper left": Shape(rot=16, options=(("causal", "upper_left"),)),
    "queries alone": Shape(new=0, rot=16),
    "no new keys": Shape(new=0, rot=16, page=4),
    "entries of a cache": Shape(entries=(4, 0, 2), rot=16),
    "entries of a cache, heads first": Shape(entries=(4, 0, 2), layout="BHSD"),
    "all of it new": Shape(new=24, lengths=(0, 0, 0), rot=16),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_as_in_numpy(emulator, dtype, name):
    """Lengths on the host and on the device; the same bits where nothing is turned, nothing written beside the new keys."""
    s = SHAPES[name]
    table = BF16 if s.table == BF16 and dtype == BF16 else F32
    s = s._replace(table=table)
    plain = given(s, dtype)
    want_problem, want_new = problems.build_decode(*copied(plain).args, **plain.options)
    for turn, width in enumerate((None, np.int32, np.int64)):
        mine = copied(plain)
        problem, new = problems.build_decode(*mine.args, **mine.options)
        if new is None:
            assert s.new == s.rot == 0
            return
        if turn == 0:
            with append.appended(want_problem, want_new) as want:
                pass
        if width is not None:
            problem, new = on_device(problem, new, width)
        got = emulator.append(problem, new, 750 if dtype != BF16 and turn == 2 else 800, side=("end", "start")[turn % 2])
        for side, a, b in (("k", problem.k, want_problem.k), ("v", problem.v, want_problem.v)):
            same(a.array, b.array, side, exact=side == "v" or not s.rot)
        if s.rot:
            same(got.q.array, want.q.array, "q", exact=False)
        if width is not None and s.new:
            assert got.kv_lengths.array.tolist() == want_problem.kv_lengths.tolist()


def test_a_rotary_embedding_is_what_the_formula_says(emulator):
    """In NumPy as well: cos and sin of the very angles, in complex numbers, in both styles."""
    for style in ("half", "interleaved"):
        g = given(Shape(new=3, rows=5, d=12, rot=8, style=style, lengths=(0, 9, 4)), F64)
        k_new, q = g.options["k_new"].copy(), g.args[0].copy()
        problem, new = problems.build_decode(*g.args, **g.options)
        with append.appended(problem, new) as left:
            pass
        pairs = [(i, i + 4) if style == "half" else (2 * i, 2 * i + 1) for i in range(4)]
        for b, before in enumerate((0, 9, 4)):
            for t in range(3):
                for i, (x, y) in enumerate(pairs):
                    z = (k_new[b, t, :, x] + 1j * k_new[b, t, :, y]) * np.exp(1j * (before + t) * 10000.0 ** (-i / 4))
                    row = g.args[1][b, before + t]
                    np.testing.assert_allclose([row[:, x], row[:, y]], [z.real, z.imag], rtol=1e-6, atol=1e-6)  # the table is float32
                np.testing.assert_array_equal(g.args[1][b, before + t, :, 8:], k_new[b, t, :, 8:])
            for r in range(5):
                position = before + 3 - 5 + r
                for i, (x, y) in enumerate(pairs):
                    z = (q[b, r, :, x] + 1j * q[b, r, :, y]) * np.exp(1j * position * 10000.0 ** (-i / 4))
                    np.testing.assert_allclose(left.q.array[b, r][:, [x, y]], np.stack([z.real, z.imag], 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("width", [np.int32, np.int64])
def test_what_does_not_fit_is_left_out(emulator, page, width):
    """Lengths on a device that leave no room, or are none: nothing is written for that sequence, and its length is clamped."""
    extremes = (22, 23, 24, 25, -1, 2**31 - 1, -(2**31), *((2**63 - 1, -(2**63)) if width == np.int64 else ()))
    for bad in extremes:
        g = given(Shape(new=2, page=page, rot=8), F16)
        problem, new = problems.build_decode(*g.args, **g.options)
        problem, new = on_device(problem, new, width)
        new.lengths.array[:] = (3, bad, 9)
        before = problem.k.array.copy(), problem.v.array.copy()
        left = emulator.append(problem, new, side="start" if bad < 0 else "end")
        fits = 0 <= bad <= KEYS - 2
        assert left.kv_lengths.array.tolist() == [5, bad + 2 if fits else min(max(bad, 0), KEYS), 11]
        for a, old in zip((problem.k.array, problem.v.array), before, strict=True):
            assert np.any(a != old, axis=(2, 3)).sum() == 2 * (2 + fits)
        position = (left.kv_lengths.array[1] - 2) + np.arange(2)
        known = abs(position) < KEYS
        assert np.isnan(left.q.array[1].astype(np.float32)).any(axis=(1, 2)).tolist() == (~known).tolist()


@pytest.mark.parametrize("bad", [-1, 10**9, 26 // 4 * B + 2])
def test_bad_pages_are_not_written(emulator, bad):
    """Nor anything beside them; the other keys of the append are."""
    for layout in ("BSHD", "BHSD"):
        g = given(Shape(new=3, page=4, layout=layout, lengths=(3, 9, 17)), F32)
        problem, new = problems.build_decode(*g.args, **g.options)
        problem, new = on_device(problem, new)
        problem.page_table.array[0, 1] = bad if bad in (-1, 10**9) else problem.k.shape[0]
        before = problem.k.array.copy()
        emulator.append(problem, new)
        assert np.any(problem.k.array != before, axis=(2, 3)).sum() == 1 + 3 + 3


def test_positions_beyond_the_table_become_nan(emulator):
    g = given(Shape(new=2, rot=8, lengths=(3, 9, 17)), F16)
    problem, new = problems.build_decode(*g.args, **g.options)
    problem, new = on_device(problem, new)
    short = arrays.view(new.rope.cos.array[:10].copy(), "cos"), arrays.view(new.rope.sin.array[:10].copy(), "sin")
    new = dataclasses.replace(new, rope=dataclasses.replace(new.rope, cos=short[0], sin=short[1]))
    left = emulator.append(problem, new)
    for b, known in ((0, (True, True)), (1, (True, False)), (2, (False, False))):
        for t in range(2):
            j = (3, 9, 17)[b] + t
            key = problem.k.array[b, j].astype(np.float32)
            assert np.isfinite(key[:, 8:]).all() and np.isnan(key[:, :8]).all() == np.isnan(key).any() == (not known[t])
            assert np.isnan(left.q.array[b, t, :, :8].astype(np.float32)).all() == (not known[t])


@pytest.mark.parametrize(("dtype", "gpu"), [(F16, H200), (BF16, H200), (F16, T4), (F32, H200), (F64, H200)], ids=str)
@pytest.mark.parametrize("page", [0, 1, 3, 8])
def test_append_and_attend(emulator, dtype, gpu, page):
    """The two kernels one after the other, with lengths and page table on the device, against the oracle over the lengthened cache."""
    s = Shape(new=3, rows=3, page=page, rot=12, style="interleaved", lengths=(0, 9, 21), options=(("causal", True),))
    g = given(s, dtype)
    mine, theirs = copied(g), copied(g)
    want_problem, want_new = problems.build_decode(*theirs.args, **theirs.options)
    problem, new = problems.build_decode(*mine.args, **mine.options)
    out, lse = np.full(g.args[0].shape, np.nan, dtype), np.full((B, 4, 3), np.nan, F64 if dtype == F64 else F32)
    problem = problems.with_outputs(problem, out, lse, True, "BSHD", 4, new)[0]
    left = emulator.append(*on_device(problem, new), 750 if gpu is T4 else 800)
    emulator.run(left, gpu)
    with append.appended(want_problem, want_new) as ready:
        want = compare.expect([ready])
        exact = reference.forward(ready)
    assert np.array_equal(exact[0], want.out[0])
    compare.assert_close(out, want.out[0], want.out_bound, "out")
    compare.assert_close(lse, want.lse[0], want.lse_bound, "lse")


def test_a_row_that_sees_a_key_of_a_bad_page_is_nan_and_no_other(emulator):
    g = given(Shape(new=2, rows=2, page=4, lengths=(4, 9, 17), options=(("causal", True),)), F16)
    problem, new = problems.build_decode(*g.args, **g.options)
    out, lse = np.full(g.args[0].shape, np.nan, F16), np.full((B, 4, 2), np.nan, F32)
    problem = problems.with_outputs(problem, out, lse, True, "BSHD", 4, new)[0]
    problem, new = on_device(problem, new)
    problem.page_table.array[0, 1] = -1  # where its new keys go
    emulator.run(emulator.append(problem, new), H200)
    assert np.isnan(out[0].astype(F32)).all() and np.isfinite(out[1:].astype(F32)).all()


def test_instances():
    kinds = ("fp16", "bf16", "fp32", "fp64", "e4m3", "fp16_e4m3", "bf16_e4m3", "fp32_e4m3")
    assert {s.name for s in cuda_append.instances("sm_90a")} == {f"kv_append_{kind}" for kind in kinds}
    assert not any("bf16" in s.name for s in cuda_append.instances("sm_75"))


@pytest.mark.parametrize(("dtype", "gpu"), [(F16, H200), (F16, T4), (F32, H200), (F64, T4)], ids=str)
@pytest.mark.parametrize("page", [0, 4])
def test_a_tree_of_which_the_device_knows_where_it_hangs(emulator, dtype, gpu, page):
    """A mask of the last keys beside lengths on the device; where a sequence has fewer keys than the tree, its last columns count."""
    rng = np.random.default_rng(3)
    rows, lengths = 4, (24, 9, 2)
    tree = np.tril(rng.random((rows, rows)) < 0.6) | np.eye(rows, dtype=bool)
    g = given(Shape(new=0, rows=rows, page=page, lengths=(24, 9, 4)), dtype)
    problem, _ = problems.build_decode(*g.args, **g.options, mask=tree)
    assert problem.mask_is_tail
    out, lse = np.full(g.args[0].shape, np.nan, dtype), np.full((B, 4, rows), np.nan, F64 if dtype == F64 else F32)
    problem = problems.with_outputs(problem, out, lse, True, "BSHD", 4)[0]
    whole = np.ones((B, 1, rows, KEYS), bool)
    for b, n in enumerate(lengths):
        whole[b, 0, :, max(0, n - rows) : n] = tree[:, max(0, rows - n) :]
    want_problem, _ = problems.build_decode(*g.args[:3], np.array(lengths), **g.options, mask=whole)
    moved, _ = on_device(problem, Append(np.array(lengths)))
    emulator.run(moved, gpu)
    want = compare.expect([want_problem])
    compare.assert_close(out, want.out[0], want.out_bound, "out")
    compare.assert_close(lse, want.lse[0], want.lse_bound, "lse")
