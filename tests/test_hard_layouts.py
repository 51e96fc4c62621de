"""Hard cases on heads, layouts, strides, sizes beyond an index type, and arguments that must be refused."""

from __future__ import annotations

import mmap

import compare
import devices
import numpy as np
import pytest
from calls import STRIDES
from case import BF16, F16, F32
from cases import TARGETS, Target
from hard import (
    along_keys,
    assert_only_value,
    assert_result,
    attend,
    every_dtype,
    every_target,
    log_counts,
    normal,
    running_mean,
    small_integers,
    zeros,
)

import cuflash
from cuflash.problem import build_attention

FAST = tuple(t for t in TARGETS if t.backend != "reference")  # the oracle loops in Python and has no index to overflow
TILED = tuple(t for t in FAST if t.kernel != "naive")  # naive needs the whole score matrix


@pytest.mark.parametrize("target", TILED, ids=lambda t: t.name)
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_case_13_sequences_beyond_int16(dtype: np.dtype, target: Target) -> None:
    n = 33728
    q, values = zeros(dtype, 1, n, 1, 16), small_integers(n)
    v = along_keys(values, q.shape, dtype)
    sums = np.concatenate([[0], np.cumsum(values)])
    low, high = np.maximum(np.arange(n) - 15, 0), np.arange(n) + 1
    result = attend(target, q, q, v, causal=True, window=(15, 0))
    assert_result(result, ((sums[high] - sums[low]) / (high - low))[None, :, None, None], np.log(high - low), 16)


@every_target
@every_dtype
def test_case_13_long_queries_or_long_keys(dtype: np.dtype, target: Target) -> None:
    n = 33728
    long, short, values = zeros(dtype, 1, n, 1, 16), zeros(dtype, 1, 3, 1, 16), small_integers(n)
    assert_result(attend(target, short, long, along_keys(values, long.shape, dtype)), values.mean(), np.log(n), n)
    visible = np.arange(n) + 3 - n + 1
    want = running_mean(np.array([1.0, 2.0, 6.0]), visible)[None, :, None, None], log_counts(visible)
    assert_result(attend(target, long, short, along_keys([1, 2, 6], short.shape, dtype), causal=True), *want)


@every_target
def test_case_25_storage_shorter_than_lengths(target: Target) -> None:
    q, rows = normal(0, (1, 3, 2, 16), F32), normal(1, (1, 10, 2, 16), F32)
    with pytest.raises(ValueError, match="v:"):
        attend(target, q, rows[:, :5], rows[:, :6])
    for lengths in ([20], [11], [-1]):
        with pytest.raises(ValueError, match="kv_lengths"):
            attend(target, q, rows, rows, kv_lengths=lengths)
    packed = {"function": cuflash.attention_varlen}
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        attend(target, q[0], rows[0], rows[0], [0, 3], [0, 20], **packed)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        attend(target, q[0], rows[0], rows[0], [0, 4], [0, 10], **packed)
    with pytest.raises(ValueError, match="v:"):
        attend(target, q[0], rows[0, :5], rows[0, :6], [0, 3], [0, 5], **packed)


@every_target
@every_dtype
@pytest.mark.parametrize(("hq", "hkv"), [(r, 1) for r in (5, 6, 7, 12, 16, 32, 64, 71)] + [(15, 3), (142, 2)])
def test_case_33_any_whole_ratio_of_heads(hq: int, hkv: int, dtype: np.dtype, target: Target) -> None:
    q, k = zeros(dtype, 1, 2, hq, 16), zeros(dtype, 1, 3, hkv, 16)
    v = np.array(np.broadcast_to(np.arange(hkv)[None, None, :, None], k.shape)).astype(dtype)
    q[..., 0] = np.arange(hq) % 8
    k[..., 0] = np.array([4, 0, -4])[None, :, None]
    logits = (np.arange(hq) % 8)[:, None] * np.array([1.0, 0, -1])
    out, lse = attend(target, q, k, v)
    assert_result(
        (out, lse), (np.arange(hq) // (hq // hkv))[None, None, :, None], np.log(np.exp(logits).sum(axis=1))[None, :, None]
    )


@every_target
def test_case_33_no_whole_ratio(target: Target) -> None:
    for hq, hkv in ((7, 2), (2, 7), (3, 2), (4, 0)):
        with pytest.raises(ValueError, match="heads"):
            attend(target, zeros(F32, 1, 2, hq, 16), zeros(F32, 1, 3, hkv, 16), zeros(F32, 1, 3, hkv, 16))


@every_target
@every_dtype
@pytest.mark.parametrize("strides", [name for name in STRIDES if name not in ("heads_of_packed", "expanded")])
def test_case_36_strides(strides: str, dtype: np.dtype, target: Target) -> None:
    """The same as contiguous copies, whichever of q, k and v is strided; a whole copy of an input is not needed for it."""
    q, k, v = normal(0, (2, 9, 4, 16), dtype), normal(1, (2, 130, 2, 16), dtype), normal(2, (2, 130, 2, 8), dtype)
    want = compare.expect([build_attention(q, k, v, causal=True)])
    lay = STRIDES[strides]
    for arrays in ((lay(q), k, v), (q, lay(k), v), (q, k, lay(v)), (lay(q), lay(k), lay(v))):
        out, lse = attend(target, *arrays, causal=True)
        compare.assert_close(out, want.out[0], want.out_bound, "out")
        compare.assert_close(lse, want.lse[0], want.lse_bound, "lse")


@every_target
@every_dtype
def test_case_36_negative_and_zero_strides(dtype: np.dtype, target: Target) -> None:
    q, k, v = (normal(n, (2, 66, 3, 16), dtype) for n in range(3))
    views = (
        (q[:, ::-1], k[..., ::-1], v[:, ::-1]),
        (q[..., ::-1], k[::-1], v[..., ::-1]),
        (q, k[:, ::-1, ::-1], v.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2)),
        (q, np.broadcast_to(k[:, :, :1], k.shape), np.broadcast_to(v[:, :1], v.shape)),
        (np.broadcast_to(q[..., :1], q.shape), k, np.broadcast_to(v[:1, :, :1], v.shape)),
        (q[:, 1::2], k[:, ::3], v[:, ::3]),
        (q, k[:, :, :1], v[:, :, 1:2]),
    )
    for arrays in views:
        copies = [np.ascontiguousarray(a) for a in arrays]
        before = [a.tobytes() for a in arrays]
        want = compare.expect([build_attention(*copies)])
        out, lse = attend(target, *arrays)
        compare.assert_close(out, want.out[0], want.out_bound, "out")
        compare.assert_close(lse, want.lse[0], want.lse_bound, "lse")
        assert [a.tobytes() for a in arrays] == before


@every_target
@every_dtype
def test_case_37_layouts_when_shapes_agree(dtype: np.dtype, target: Target) -> None:
    """S == H: a mixed-up layout raises no error, only wrong numbers."""
    q, k, v = (normal(n, (1, 4, 4, 16), dtype) for n in range(3))
    want = compare.expect([build_attention(q, k, v, causal=True)])
    heads_first = [np.ascontiguousarray(a.transpose(0, 2, 1, 3)) for a in (q, k, v)]
    out, lse = devices.run(target, cuflash.attention, *heads_first, causal=True, layout="BHSD", return_lse=True)
    compare.assert_close(out.transpose(0, 2, 1, 3), want.out[0], want.out_bound, "out")
    compare.assert_close(lse, want.lse[0], want.lse_bound, "lse")
    other, _ = devices.run(target, cuflash.attention, *heads_first, causal=True, return_lse=True)
    assert np.abs(other.astype(np.float64) - out.astype(np.float64)).max() > 0.1, "the two layouts must differ on these data"


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_case_38_offsets_beyond_int32(dtype: np.dtype, target: Target) -> None:
    """Rows 2**20 elements apart, in memory of which only the pages that hold them are ever touched."""
    rows, step = 2100, 1 << 20
    memory = mmap.mmap(
        -1, rows * step * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    )
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # a large page around every row would need all of it
    grid = np.frombuffer(memory, dtype).reshape(rows, step)
    k, v, wide_q, out = (grid[None, :, None, 64 * n:64 * n + 16] for n in range(4))
    q = normal(0, (1, 2, 1, 16), dtype)
    k[...], v[...] = normal(1, k.shape, dtype), normal(2, v.shape, dtype)
    want = compare.expect([build_attention(q, np.ascontiguousarray(k), np.ascontiguousarray(v))])
    got, lse = attend(target, q, k, v)
    compare.assert_close(got, want.out[0], want.out_bound, "out")
    compare.assert_close(lse, want.lse[0], want.lse_bound, "lse")
    # Far queries and far results: the last rows lie beyond 2**31 elements.
    wide_q[...] = normal(3, wide_q.shape, dtype)
    out[...] = np.nan
    few = (np.ascontiguousarray(a[:, :3]) for a in (k, v))
    devices.run(target, cuflash.attention, wide_q, *few, out=out)
    want = compare.expect([build_attention(np.ascontiguousarray(wide_q), k[:, :3], v[:, :3])])
    compare.assert_close(np.ascontiguousarray(out), want.out[0], want.out_bound, "out")
    del grid, k, v, wide_q, out, got, few


@pytest.mark.parametrize("target", FAST, ids=lambda t: t.name)
@pytest.mark.parametrize(("b", "hq", "hkv"), [(65537, 1, 1), (1, 65537, 65537), (1, 65538, 1), (2, 40000, 20000)])
def test_case_39_more_than_65535_batches_or_heads(b: int, hq: int, hkv: int, target: Target) -> None:
    q, k = zeros(F32, b, 1, hq, 16), zeros(F32, b, 1, hkv, 16)
    k[..., 0] = 4
    q[..., 0] = (np.arange(b)[:, None, None] + np.arange(hq)) % 251
    v = np.broadcast_to(((np.arange(b)[:, None] * 3 + np.arange(hkv)) % 241).astype(F32)[:, None, :, None], k.shape)
    heads = np.arange(hq) // (hq // hkv)
    want = (np.arange(b)[:, None] * 3 + heads) % 241
    out, lse = attend(target, q, k, v)
    assert_only_value(out[:, 0], want[..., None], target)
    assert (lse[:, :, 0] == q[:, 0, :, 0]).all()


@pytest.mark.parametrize("target", FAST, ids=lambda t: t.name)
def test_case_39_many_sequences_of_one(target: Target) -> None:
    n = 80000
    q = zeros(F32, n, 1, 16)
    v = np.broadcast_to((np.arange(n) % 241).astype(F32)[:, None, None], q.shape)
    out, lse = attend(target, q, q, v, np.arange(n + 1), np.arange(n + 1), function=cuflash.attention_varlen, causal=True)
    assert (out == v).all() and not lse.any()


@every_target
def test_case_46_bits_of_bfloat16(target: Target) -> None:
    """uint16 is never taken for bf16; the same bits under their right name are."""
    bits = np.full((1, 2, 1, 16), 16384, np.uint16)
    for arrays in ((bits, bits, bits), (bits.view(BF16), bits, bits.view(BF16)), (bits.view(BF16), bits.view(BF16), bits)):
        with pytest.raises(TypeError, match="uint16"):
            devices.run(target, cuflash.attention, *arrays)
    out, _ = attend(target, *[bits.view(BF16)] * 3)
    assert (out.view(np.uint16) == 16384).all() and (out == 2).all()
    with pytest.raises(TypeError, match="out"):
        devices.run(target, cuflash.attention, *[bits.view(BF16)] * 3, out=np.empty((1, 2, 1, 16), np.uint16))
