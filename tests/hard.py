"""Shared by the hard cases: run one kernel on plain arrays into poisoned buffers, and compare with values known beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import compare
import devices
import numpy as np
import pytest
from case import DTYPES, F32, F64
from cases import TARGETS, Target

import cuflash

every_target = pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)


def attend(
    target: Target,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *index: Any,
    function: Callable = cuflash.attention,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE of one kernel, in layout BSHD, from buffers that held NaN before."""
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, options.get("out_dtype", q.dtype))
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])
    lse = np.full(lse_shape, np.nan, F64 if q.dtype == F64 else F32)
    devices.run(target, function, q, k, v, *index, **options, out=out, lse=lse, return_lse=True)
    return out, lse


def assert_values(got: np.ndarray, want: Any, name: str, terms: int = 1) -> None:
    """A result must be this exact value, rounded, as a sum of so many positive terms in the compute dtype can be.

    That is 2 eps of the result's dtype, and half an eps of the compute dtype for each term, of the largest element.
    """
    want = np.array(np.broadcast_to(np.asarray(want, np.float64), got.shape))
    largest = float(np.abs(want[np.isfinite(want)]).max(initial=0.0))
    compute = F64 if got.dtype == F64 else F32
    compare.assert_close(got, want, (2 * compare.eps(got.dtype) + terms / 2 * compare.eps(compute)) * largest, name)


def assert_result(result: tuple[np.ndarray, np.ndarray], out: Any, lse: Any, terms: int = 1) -> None:
    """Output, the mean of so many values, and LSE, which counts them: a sum of ones is exact."""
    assert_values(result[0], out, "out", terms)
    assert_values(result[1], lse, "lse", 0)


def assert_only_value(got: np.ndarray, want: Any, target: Target) -> None:
    """Rows that see one key: its value, exactly; within the contract where its weight is 1 but for a rounding and the result shows it.

    prefill_fp rounds logit and reference apart from each other, and its float32 products are sums of TF32 ones, of 22 bits.
    """
    if target.name == "cuda/fa2" and got.dtype in (F32, F64):
        assert_values(got, want, "out")
    else:
        assert (got == want).all(), "one visible key: its value, exactly"


def zeros(dtype: np.dtype, *shape: int) -> np.ndarray:
    return np.zeros(shape, dtype)


def along_keys(values: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A (B, Sk, Hkv, Dv) array whose row j holds values[j] everywhere."""
    return np.array(np.broadcast_to(np.asarray(values, np.float64)[None, :, None, None], shape)).astype(dtype)


def normal(seed: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def small_integers(n: int) -> np.ndarray:
    """n integers from 1 to 8 in no simple order; exact in every dtype, and as all are positive, their mean cancels nothing."""
    return (np.arange(n) * 5 + np.arange(n) // 3) % 8 + 1.0


def running_mean(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mean of the first counts[r] values; 0 where none."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    counts = np.maximum(counts, 0)
    return sums[counts] / np.maximum(counts, 1)


def log_counts(counts: np.ndarray) -> np.ndarray:
    """LSE of rows that see so many keys of logit 0."""
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(counts, 0))
