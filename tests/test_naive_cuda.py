"""The naive CUDA kernel without a GPU: its products and its softmax are done by NumPy at the very addresses that cuBLAS and the
kernel would get, so that pointers, strides, steps and ranges are tested on every case of the suite."""

from __future__ import annotations

import dataclasses
import ctypes
import re
import types

import compare
import ml_dtypes
import numpy as np
import pytest
from calls import check, expected, gaps_untouched, present
from cases import CASES, F16, F32, Case

import cuflash
from cuflash import backends, jit
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
                result = alpha * (left.astype(real) @ right.astype(real)).astype(real)
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
                x = x + self.of_keys(p, "bias", problem.bias, heads, rows, j).astype(real)
            x = np.where(visible, x, real.type(-np.inf))
            top = x.max(-1, keepdims=True, initial=-np.inf)
            top = np.where(np.isneginf(top), real.type(0), top)
            weights = np.exp(x - top)
            total = weights.sum(-1, keepdims=True)
            weights = weights * np.where(total == 0, 0, 1 / total)
            lse = (top + np.log(total))[..., 0]
        dtype = problem.v.dtype
        if dtype == np.float16:
            weights = weights / real.type(naive_cuda.SCALE_FP16)
        wide = real.itemsize // dtype.itemsize
        at(p["scores"], dtype, (heads, rows, keys), (rows * ld * wide, ld * wide, 1))[...] = weights
        if p["lse"]:
            at(p["lse"], real, (heads, rows), (p["lse_head"], p["lse_row"]))[...] = lse

    def of_keys(self, p, name, view, heads, rows, columns):
        """Elements of bias or mask for keys of which some may lie before its first column."""
        strides = [p[f"{name}_{axis}"] for axis in ("head", "row", "column")]
        return at(p[name], view.dtype, (heads, rows, view.shape[3]), strides)[:, :, np.clip(columns, 0, None)]


@pytest.fixture
def backend(monkeypatch):
    """The naive CUDA kernel in the place of the CPU backend's, on host arrays."""
    module = types.SimpleNamespace(
        KERNELS=("naive",),
        decline=lambda problem, kernel: naive_cuda._unsupported(problem),
        plan=lambda problem, kernel: Plan(kernel="naive", backend="cpu", reason="on the host"),
        run=lambda plan, problem: naive_cuda.compute(problem, Host(problem)),
    )
    monkeypatch.setattr(backends, "load", lambda name: module)


# What it may decline of the suite, in its own words.
NOT_THERE = r"no (page_table|alibi_slopes|sinks|score_mod|mask_mod|score='sqdist')|cuBLAS needs rows|not to \w+"


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
    assert len({source.name for source in instances}) == len(instances) == (8 if arch == "sm_75" else 11)
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
