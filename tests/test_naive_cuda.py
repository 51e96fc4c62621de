"""The naive CUDA kernel without a GPU: its products are done by NumPy at the very addresses that cuBLAS would get, its two kernels
likewise by NumPy, or by their own text in the emulator, so that pointers, strides, steps and ranges are tested on every case of the
suite."""

from __future__ import annotations

import dataclasses
import ctypes
import math
import re
import types
from collections.abc import Iterator

import compare
import ml_dtypes
import numpy as np
import pytest
import test_hard_paged
import test_hard_rows
import test_hard_varlen
from calls import check, expected, gaps_untouched, present
from case import BF16, DTYPES, F16, F32, F64, Case
from cases import CASES, Target
from emulator import emulate
from emulator.guarded import Guarded

import cuflash
from cuflash import arrays, backends, jit
from cuflash.backends import naive_cuda
from cuflash.device import KNOWN, pretend
from cuflash.problem import build_attention
from cuflash.types import Plan, Problem

TYPES = {0: np.dtype(np.float32), 1: np.dtype(np.float64), 2: np.dtype(np.float16), 14: np.dtype(ml_dtypes.bfloat16)}


def at(pointer: int, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """The array at an address; strides in elements."""
    steps = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    low, high = sum(min(s, 0) for s in steps), sum(max(s, 0) for s in steps)
    memory = (ctypes.c_char * ((high - low + 1) * dtype.itemsize)).from_address(pointer + low * dtype.itemsize)
    flat = np.frombuffer(memory, dtype)
    return np.lib.stride_tricks.as_strided(flat[-low:], shape, [s * dtype.itemsize for s in strides])


class Host:
    """What ``naive_cuda.Gpu`` does, by NumPy."""

    def __init__(self, problem: Problem):
        self.problem = problem

    def empty(self, shape, dtype):
        return np.full((*shape, dtype.itemsize), 0xFF, np.uint8).view(dtype)[..., 0]  # NaN, whatever the float

    def pointer(self, array):
        return array.ctypes.data

    def gemm(self, ta, tb, m, n, k, alpha, a, a_type, lda, a_step, b, b_type, ldb, b_step, c, c_type, ldc, c_step, count):
        real = self.problem.compute_dtype
        for ld, rows in ((lda, k if ta else m), (ldb, n if tb else k), (ldc, m)):
            assert rows <= ld < 2**31  # cuBLAS refuses other leading dimensions

        def matrix(pointer, kind, rows, columns, ld, transpose, step, i):
            if transpose:
                return matrix(pointer, kind, columns, rows, ld, False, step, i).T
            return at(pointer + i * step * TYPES[kind].itemsize, TYPES[kind], (rows, columns), (1, ld))

        with np.errstate(all="ignore"):
            for i in range(count):
                left, right = matrix(a, a_type, m, k, lda, ta, a_step, i), matrix(b, b_type, k, n, ldb, tb, b_step, i)
                left, right = left.astype(real), right.astype(real)
                result = alpha * (left * right if k == 1 else left @ right)  # a single product keeps its sign, as in cuBLAS
                matrix(c, c_type, m, n, ldc, False, c_step, i)[...] = result

    def softmax(self, params):
        p = {name: params[name][0].item() for name in params.dtype.names}
        problem, real = self.problem, self.problem.compute_dtype
        heads, rows, keys, ld = problem.heads_q, p["rows"], p["keys"], p["ld"]
        assert ld % 4 == 0 and p["scores"] % 16 == 0
        x = at(p["scores"], real, (heads, rows, keys), (rows * ld, ld, 1)).copy()
        i = p["position"] + np.arange(rows)[:, None]
        j = p["first_key"] + np.arange(keys)
        visible = np.ones((heads, rows, keys), bool)
        if p["window_left"] >= 0:
            visible &= j >= i - p["window_left"]
        if p["window_right"] >= 0:
            visible &= j <= i + p["window_right"]
        if p["mask"]:
            mask = self.of_keys(p, "mask", problem.mask, heads, rows, j - p["mask_first"])
            visible &= mask | (j < p["mask_first"])
        with np.errstate(all="ignore"):
            if p["softcap"]:
                x = real.type(p["softcap"]) * np.tanh(x / real.type(p["softcap"]))
            if p["bias"]:
                bias = self.of_keys(p, "bias", problem.bias, heads, rows, j)
                x = x + bias.astype(real)
                visible &= bias != -np.inf
            x = np.where(visible, x, real.type(-np.inf))
            top = x.max(-1, keepdims=True, initial=-np.inf)
            top = np.where(np.isneginf(top), real.type(0), top)
            weights = np.exp(x - top)
            total = weights.sum(-1, keepdims=True)
            unseen = np.where(total == 0, real.type(-np.inf), real.type(-0.0))
            weights = np.where(np.isneginf(x), unseen, weights / total)
            lse = (top + np.log(total))[..., 0]
        dtype = problem.v.dtype
        if dtype == np.float16:
            weights = weights / real.type(naive_cuda.SCALE_FP16)
        wide = real.itemsize // dtype.itemsize
        at(p["scores"], dtype, (heads, rows, keys), (rows * ld * wide, ld * wide, 1))[...] = weights
        if p["lse"]:
            at(p["lse"], real, (heads, rows), (p["lse_head"], p["lse_row"]))[...] = lse

    def repair(self, params):
        p = {name: params[name][0].item() for name in params.dtype.names}
        problem, real, dtype = self.problem, self.problem.compute_dtype, self.problem.v.dtype
        rows, keys, columns, heads, ld = p["rows"], p["keys"], p["columns"], problem.heads_q, p["ld"]
        assert p["rows_total"] == heads * rows and p["group"] == problem.group_size
        out = at(p["out"], dtype, (heads, rows, columns), (p["out_head"], p["out_row"], 1))
        weights = at(p["weights"], dtype, (heads, rows, keys), (rows * ld, ld, 1))
        v = at(p["v"], dtype, (problem.heads_kv, keys, columns), (p["v_head"], p["v_key"], p["v_column"]))
        with np.errstate(all="ignore"):
            for h, r in np.argwhere(~np.isfinite(out).all(-1)):
                spoiled, w = ~np.isfinite(out[h, r]), weights[h, r].astype(real)
                if np.isneginf(w[0]):
                    out[h, r] = 0
                    continue
                seen = (w != 0) | ~np.signbit(w)
                values, w = v[h // p["group"]][seen][:, spoiled].astype(np.longdouble), w[seen, None]
                terms = np.where(w == 0, np.where(np.isfinite(values), 0, values), w * values)
                out[h, r, spoiled] = (terms.sum(0) * p["factor"]).astype(real)

    def of_keys(self, p, name, view, heads, rows, columns):
        """Elements of bias or mask for keys of which some may lie before its first column."""
        strides = [p[f"{name}_{axis}"] for axis in ("head", "row", "column")]
        return at(p[name], view.dtype, (heads, rows, view.shape[3]), strides)[:, :, np.clip(columns, 0, None)]


class Emulated(Host):
    """The two kernels thread by thread, on arrays of which one end lies at a forbidden page."""

    def __init__(self, problem: Problem, emulator: emulate.Emulator, side: str):
        self.emulator, self.side = emulator, side
        names = [name for name in ("q", "k", "v", "bias", "mask", "out", "lse") if getattr(problem, name) is not None]
        self.results = [name for name in names if name in ("out", "lse")]
        self.memory = {name: Guarded(getattr(problem, name), side, name in self.results) for name in names}
        super().__init__(problem.replace(**{name: self.memory[name].view for name in names}))

    def empty(self, shape, dtype):
        a = super().empty(shape, dtype)
        if a.size == 0:
            return a
        name = f"scratch {len(self.memory)}"
        self.memory[name] = Guarded(arrays.view(a, name), self.side, writable=True)
        return self.memory[name].view.array

    def launch(self, source, kind, params, blocks):
        arch = 750 if self.problem.q.dtype == F16 else 800  # both ways to round to float16 are there
        library = self.emulator.prepare_source(source, kind, arch).result()
        self.emulator.execute(library, params, blocks, naive_cuda.THREADS, 0, self.memory)

    def softmax(self, params):
        blocks = self.problem.heads_q * int(params["rows"][0])
        self.launch(naive_cuda.source(self.problem), "NaiveSoftmaxParams", params, blocks)

    def repair(self, params):
        source = naive_cuda.repair_source(self.problem.v.dtype.name)
        self.launch(source, "NaiveRepairParams", params, naive_cuda.repair_blocks(params))

    def compute(self):
        naive_cuda.compute(self.problem, self)
        for name in self.results:
            self.memory[name].write_back()


@pytest.fixture(scope="module")
def emulator(tmp_path_factory) -> Iterator[emulate.Emulator]:
    made = emulate.Emulator(tmp_path_factory.mktemp("emulated"))
    yield made
    made.close()


@pytest.fixture(params=["numpy", "emulated"])
def backend(request, monkeypatch):
    """The naive CUDA kernel in the place of the CPU backend's, on host arrays."""

    def run(plan: Plan, problem: Problem) -> None:
        if request.param == "numpy":
            naive_cuda.compute(problem, Host(problem))
            return
        side = ("end", "start")[DTYPES.index(problem.q.dtype) % 2]
        Emulated(problem, request.getfixturevalue("emulator"), side).compute()

    if request.param == "emulated" and (reason := emulate.why_unusable()):
        pytest.skip(f"kernels cannot be emulated here: {reason}")
    module = types.SimpleNamespace(
        KERNELS=("naive",),
        decline=lambda problem, kernel: naive_cuda._unsupported(problem),
        plan=lambda problem, kernel: Plan(kernel="naive", backend="cpu", reason="on the host"),
        run=run,
    )
    monkeypatch.setattr(backends, "load", lambda name: module)


# What it may decline of the suite, in its own words.
NOT_THERE = r"no (page_table|alibi_slopes|sinks|score_mod|mask_mod|score='sqdist')|cuBLAS needs rows|not to \w+|no scale of 0"


@pytest.mark.parametrize(("case", "dtype"), [pytest.param(c, d, id=f"{c.name}-{d.name}") for c in CASES for d in c.dtypes])
def test_case(backend, case: Case, dtype: np.dtype) -> None:
    call = present(case, dtype)
    options = {**call.options, "kernel": "naive", "backend": "cpu", "return_lse": True}
    try:
        call.function(*call.args, out=call.out, lse=call.lse, **options)
    except cuflash.NoBackendError as error:
        assert re.search(NOT_THERE, str(error))
        return
    check(call, expected(case, dtype))
    assert gaps_untouched(call.out) and gaps_untouched(call.lse)


# ---- what a product alone gets wrong ------------------------------------------------------------------------------------


class OnHost(Target):
    """The fixture's kernel, which may decline what the kernel on a GPU may."""

    name = "cuda/naive"


ON_HOST = OnHost("cpu", "naive")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
not_finite = pytest.mark.parametrize("filler", [np.nan, np.inf, -np.inf])


@every_dtype
@not_finite
@pytest.mark.parametrize("how", ["mask", "bias", "window", "upper_left"])
def test_garbage_in_keys_that_are_masked_for_all(backend, how, filler, dtype):
    test_hard_paged.test_case_14_garbage_in_keys_that_are_masked_for_all(how, filler, dtype, ON_HOST)


@every_dtype
@pytest.mark.parametrize(("where", "filler"), [("k", np.nan), ("k", np.inf), ("v", np.nan), ("v", np.inf), ("v", -np.inf)])
@pytest.mark.parametrize("at_key", [3, 64, 100])
def test_what_is_not_finite_reaches_who_sees_it(backend, at_key, where, filler, dtype):
    test_hard_rows.test_case_65_nan_in_a_key_reaches_who_sees_it(at_key, filler, where, dtype, ON_HOST)


@every_dtype
@not_finite
@pytest.mark.parametrize("how", ["mask", "bias"])
def test_a_value_that_half_of_the_rows_see(backend, how, filler, dtype):
    test_hard_rows.test_case_65_nan_in_a_value_that_half_of_the_rows_see(how, filler, dtype, ON_HOST)


@every_dtype
@pytest.mark.parametrize(("hq", "hkv"), [(1, 1), (4, 2)])
def test_rows_that_see_nothing_are_plus_zero(backend, hq, hkv, dtype):
    test_hard_varlen.test_case_6_many_causal_queries_over_one_key(hq, hkv, dtype, ON_HOST)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float64)


@pytest.mark.parametrize(("dtype", "gap"), [(F16, 40.0), (BF16, 95.0), (F32, 110.0), (F64, 744.5)], ids=str)
@pytest.mark.parametrize("hidden", ["mask", "bias", None])
def test_a_weight_of_zero_that_is_seen(backend, hidden, dtype, gap):
    """Key 1 weighs less than its type can hold, which makes an infinite value no less infinite; key 2 is hidden or finite."""
    q, k, v = ones(1, 40, 6, 1), ones(1, 3, 3, 1), ones(1, 3, 3, 35)
    k[0, 1] = 1 - gap
    v[0, 1, :, 1:5] = np.nan, np.inf, -np.inf, 5.0
    options = {"mask": {"mask": np.array([True, True, False])}, "bias": {"bias": np.array([0, 0, -np.inf]).astype(dtype)}, None: {}}[hidden]
    if hidden:
        k[0, 2], v[0, 2] = np.nan, np.nan
    q, k, v = (a.astype(dtype) for a in (q, k, v))
    out, lse = cuflash.attention(q, k, v, scale=1.0, kernel="naive", backend="cpu", return_lse=True, **options)
    want = np.ones(35)
    want[1:4] = np.nan, np.inf, -np.inf
    compare.assert_close(out, np.broadcast_to(want, out.shape), 4 * compare.eps(dtype), "out")
    compare.assert_close(lse, np.full(lse.shape, 1 + (0 if hidden else math.log(2))), 4 * compare.eps(lse.dtype), "lse")


@every_dtype
@pytest.mark.parametrize("rows_major", [True, False])
@pytest.mark.parametrize("out_axes", ["BSHD", "BHSD", "gaps"])
def test_a_repair_of_grouped_heads_in_any_strides(backend, rows_major, out_axes, dtype):
    """Head groups with bad values of their own, in two tiles of columns, beside one with none; finite columns keep their bits."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((2, n, h, d)).astype(dtype) for n, h, d in ((37, 6, 8), (70, 2, 8), (70, 2, 40)))
    if not rows_major:
        v = np.ascontiguousarray(v.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    out = {
        "BSHD": np.full((2, 37, 6, 40), np.nan, dtype),
        "BHSD": np.full((2, 6, 37, 40), np.nan, dtype).transpose(0, 2, 1, 3),
        "gaps": np.full((2, 6, 37, 80), np.nan, dtype)[..., ::2].transpose(0, 2, 1, 3),
    }[out_axes]
    options = {"causal": True, "kernel": "naive", "backend": "cpu", "out": out}
    clean = cuflash.attention(q, k, v, **options).copy()
    v[0, 50, 0, [3, 39]], v[0, 65, 0, 3], v[1, 0, 1, 33], v[1, 69, 1, 7] = np.inf, -np.inf, np.nan, np.inf
    want = compare.expect([build_attention(q, k, v, causal=True)])
    got = cuflash.attention(q, k, v, **options)
    compare.assert_close(got, want.out[0], want.out_bound, "out")
    same = np.isfinite(want.out[0]) & np.isfinite(v.astype(np.float64)).all(1).repeat(3, 1)[:, None]
    assert 0.9 * same.size < same.sum() < same.size
    compare.assert_same_bits(got[same], clean[same])


@pytest.mark.parametrize(("dtype", "big"), [(F16, 2.0**12), (BF16, 2.0**25), (F32, 2.0**30), (F64, 2.0**60)], ids=str)
def test_a_repaired_row_loses_nothing_to_rounding(backend, dtype, big):
    """Sums that no plain loop gets right: a repaired row cannot be further off than the product's rounding."""
    q, k, v = np.zeros((1, 5, 2, 1), dtype), np.zeros((1, 5, 1, 1), dtype), np.empty((1, 5, 1, 3), dtype)
    v[0, :, 0] = np.array([big, 1, -big, 1, np.nan])[:, None]
    out = cuflash.attention(q, k, v, mask=np.array([True] * 4 + [False]), kernel="naive", backend="cpu")
    assert (out == 0.5).all()


# ---- what is asked of it ------------------------------------------------------------------------------------------------


def signature(n: int, heads: int, dtype: np.dtype = F16, heads_kv: int | None = None) -> Problem:
    """A problem of that size in the memory of one element, as if it lay on a GPU."""
    q, k = (np.broadcast_to(np.zeros(1, dtype), (1, n, h, 128)) for h in (heads, heads_kv or heads))
    problem = build_attention(q, k, k)
    return problem.replace(q=dataclasses.replace(problem.q, device=0))


def test_the_scores_that_do_not_fit_are_refused_with_their_bytes(monkeypatch):
    for name in ("_unsupported", "_no_cublas"):
        monkeypatch.setattr(naive_cuda, name, lambda *_: None)
    monkeypatch.setattr(jit, "why_unusable", lambda: None)
    monkeypatch.setattr(naive_cuda, "available_bytes", lambda ordinal: 100 * 2**30)
    with pretend(KNOWN["H200"]):
        reason = naive_cuda.decline(signature(32768, 32))
        assert f"{128 * 2**30:,} bytes for 32 heads of 32768 queries and 32768 keys" in reason
        assert f"{100 * 2**30:,} are free" in reason
        assert naive_cuda.decline(signature(16384, 32)) is None
    with pretend(KNOWN["T4"]):
        assert "8.0" in naive_cuda.decline(signature(64, 1, np.dtype(ml_dtypes.bfloat16)))
    assert naive_cuda.plan(signature(16384, 32), "cuda").workspace == 32 * 2**30


@pytest.mark.parametrize(
    ("shape", "strides", "rows", "want"),
    [  # (batch, row, head, column) in elements -> (column-major, leading dimension)
        ((2, 6, 3, 4), (72, 12, 4, 1), 6, (False, 12)),
        ((2, 6, 3, 4), (72, 4, 24, 1), 6, (False, 4)),
        ((2, 6, 3, 4), (72, 1, 24, 6), 6, (True, 6)),
        ((2, 6, 3, 4), (0, 12, 0, 1), 6, (False, 12)),
        ((2, 6, 3, 4), (-72, 12, 4, 1), 6, (False, 12)),
        ((2, 6, 1, 4), (24, 4, -4, 1), 6, (False, 4)),
        ((2, 6, 3, 1), (18, 3, 1, 7), 6, (False, 3)),
        ((2, 1, 3, 4), (12, 99, 4, 1), 1, (False, 99)),
        ((2, 1, 3, 4), (12, 0, 4, 1), 1, (False, 4)),
        ((2, 1, 3, 4), (12, 99, 1, 3), 1, (True, 3)),
        ((2, 6, 3, 4), (72, 12, -4, 1), 6, None),
        ((2, 6, 3, 4), (72, 0, 4, 1), 6, None),
        ((2, 6, 3, 4), (72, -12, 4, 1), 6, None),
        ((2, 6, 3, 4), (144, 24, 8, 2), 6, None),
        ((2, 6, 3, 4), (72, 12, 4, -1), 6, None),
        ((2, 6, 3, 4), (72, 2**31, 4, 1), 6, None),
    ],
)
def test_how_cublas_sees_an_array(shape, strides, rows, want):
    view = types.SimpleNamespace(shape=shape, strides=tuple(4 * s for s in strides), dtype=F32, pointer=64)
    seen = naive_cuda._operand(view, rows)
    assert (seen and (seen.column_major, seen.ld)) == want
    odd = types.SimpleNamespace(shape=shape, strides=(2, *view.strides[1:]), dtype=F32, pointer=64)
    assert naive_cuda._operand(odd, rows) is None


@pytest.mark.parametrize(("heads", "heads_kv", "products"), [(6, 6, 1), (6, 3, 2), (6, 2, 2), (6, 1, 1), (12, 3, 3)])
def test_each_head_is_in_one_product(heads, heads_kv, products):
    problem = signature(16, heads, F32, heads_kv)
    done, count = {}, 0
    for q_head, q_step, kv_head, kv_step, batch in naive_cuda._head_groups(problem):
        count += 1
        for i in range(batch):
            assert q_head + i * q_step not in done
            done[q_head + i * q_step] = kv_head + i * kv_step
    assert count == products and done == {h: h // (heads // heads_kv) for h in range(heads)}


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_every_instance_compiles_without_spills(arch):
    if reason := jit.why_unusable():
        pytest.skip(reason)
    instances = list(naive_cuda.instances(arch))
    assert len({source.name for source in instances}) == len(instances) == (11 if arch == "sm_75" else 15)
    for source in instances:
        _, log = jit.compile_cubin(source, arch)
        assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", log), log


def test_the_instance_follows_the_problem():
    q = np.zeros((1, 4, 1, 8), np.float16)
    assert naive_cuda.source(build_attention(q, q, q, causal=True)).name == "naive_softmax_fp16"
    assert naive_cuda.source(build_attention(q, q, q, softcap=2.0)).name == "naive_softmax_fp16_options_bias_fp16"
    bias = np.zeros((4, 4), np.float32)
    assert naive_cuda.source(build_attention(q, q, q, bias=bias)).name == "naive_softmax_fp16_options_bias_fp32"
    assert compare.eps(F16) == 2.0**-10
