"""Hard cases on keys split over workers, merges and independence of the batch. Numbers are the cases'."""

from __future__ import annotations

import compare
import numpy as np
import pytest
from case import BF16, DTYPES, F32
from cases import Target
from hard import assert_result, attend, every_dtype, every_target, normal

import cuflash
from cuflash.problem import build_attention


def assert_oracle(got: tuple[np.ndarray, np.ndarray], want: compare.Expected, name: str) -> None:
    compare.assert_close(got[0], want.out[0], want.out_bound, f"out, {name}")
    compare.assert_close(got[1], want.lse[0], want.lse_bound, f"lse, {name}")


@every_target
@every_dtype
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 63, 64, 65, 128])
def test_case_18_more_splits_than_keys(length: int, dtype: np.dtype, target: Target) -> None:
    q, k, v = normal(0, (2, 1, 4, 16), dtype), normal(1, (2, 128, 2, 16), dtype), normal(2, (2, 128, 2, 16), dtype)
    for options in ({"kv_lengths": [length, 1]}, {"kv_lengths": [length, 0], "causal": True}):
        want = compare.expect([build_attention(q, k, v, **options)])
        for splits in (1, 8, 200):
            assert_oracle(attend(target, q, k, v, num_splits=splits, **options), want, f"{splits} splits")


@every_target
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("sq", [1, 5])
def test_case_19_any_number_of_splits(sq: int, dtype: np.dtype, target: Target) -> None:
    q, k, v = normal(0, (1, sq, 16, 128), dtype), normal(1, (1, 4096, 8, 128), dtype), normal(2, (1, 4096, 8, 128), dtype)
    want = compare.expect([build_attention(q, k, v, causal=True)])
    ones = np.ones_like(v)
    for splits in (1, 2, 3, 16, 31, 32, 33, 64, 128, 5000):
        assert_oracle(attend(target, q, k, v, causal=True, num_splits=splits), want, f"{splits} splits")
        out, lse = attend(target, q, k, ones, causal=True, num_splits=splits)
        assert_oracle(
            (v[:, :sq].repeat(2, 2), lse),
            want._replace(out=[v[:, :sq].repeat(2, 2).astype(np.float64)]),
            f"{splits} splits, v = 1",
        )
        if dtype == BF16:
            assert (out == 1).all(), f"{splits} splits: weights must add up to 1"
        else:
            compare.assert_close(out, np.ones(out.shape), 2 * compare.eps(dtype) + want.lse_bound, "out for v = 1")
        if target.backend == "reference":
            break  # it takes no notice of splits


@every_target
@every_dtype
@pytest.mark.parametrize(("hq", "hkv", "sq"), [(8, 2, 1), (6, 2, 3), (7, 1, 1), (16, 16, 1)])
def test_case_20_lse_of_each_head(hq: int, hkv: int, sq: int, dtype: np.dtype, target: Target) -> None:
    """Every (sequence, head, row) has a log-sum-exp of its own size, so that swapped heads show."""
    q, k, v = normal(0, (2, sq, hq, 16), dtype), np.ones((2, 700, hkv, 16), dtype), normal(1, (2, 700, hkv, 16), dtype)
    q[...] = np.arange(2 * sq * hq).reshape(2, sq, hq, 1) / 4  # exact in every dtype
    want = 4 * np.arange(2 * sq * hq).reshape(2, sq, hq) / 4 + np.log(700)
    mean = v.astype(np.float64).mean(axis=1).repeat(hq // hkv, 1)[:, None]
    for splits in (1, 4):
        out, lse = attend(target, q, k, v, num_splits=splits)
        compare.assert_close(
            lse, want.transpose(0, 2, 1), 2 * compare.eps(lse.dtype) * float(want.max()), f"lse, {splits} splits"
        )
        compare.assert_close(out, np.broadcast_to(mean, out.shape), 2 * compare.eps(dtype), f"out, {splits} splits")


@every_target
@every_dtype
@pytest.mark.parametrize("sq", [1, 3])
def test_case_21_batch_invariant(sq: int, dtype: np.dtype, target: Target) -> None:
    """Bit for bit the same alone and among others of other lengths, wherever in the batch."""
    others = 20 if target.backend == "reference" else 200
    size, rng = others + 1, np.random.default_rng(3)
    q, k, v = normal(0, (size, sq, 4, 16), dtype), normal(1, (size, 130, 2, 16), dtype), normal(2, (size, 130, 2, 16), dtype)
    lengths = rng.integers(0, 131, size)
    lengths[:4] = 130, 1, 65, 127
    how = {"causal": True, "batch_invariant": True}
    for n in (1, 33, others):
        together = attend(target, q[: n + 1], k[: n + 1], v[: n + 1], kv_lengths=lengths[: n + 1], **how)
        for b in {0, min(n, 2), min(n, 3), n}:
            alone = attend(target, q[b:b + 1], k[b:b + 1], v[b:b + 1], kv_lengths=lengths[b:b + 1], **how)
            compare.assert_same_bits(together[0][b:b + 1], alone[0], f"out of sequence {b} of {n + 1}")
            compare.assert_same_bits(together[1][b:b + 1], alone[1], f"lse of sequence {b} of {n + 1}")


@every_target
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_case_21_batch_invariant_with_long_keys_and_packed(dtype: np.dtype, target: Target) -> None:
    q, k, v = normal(0, (3, 1, 4, 16), dtype), normal(1, (3, 5000, 2, 16), dtype), normal(2, (3, 5000, 2, 16), dtype)
    alone = attend(target, q[:1], k[:1], v[:1], batch_invariant=True)
    together = attend(target, q, k, v, kv_lengths=[5000, 3, 4100], batch_invariant=True)
    compare.assert_same_bits(together[0][:1], alone[0], "out")
    compare.assert_same_bits(together[1][:1], alone[1], "lse")
    packed_k, packed_v = (np.concatenate([a[1, :3], a[0]]) for a in (k, v))
    out, lse = attend(
        target,
        q[:, 0][[1, 0]],
        packed_k,
        packed_v,
        [0, 1, 2],
        [0, 3, 5003],
        function=cuflash.attention_varlen,
        batch_invariant=True,
    )
    compare.assert_same_bits(out[1:2], alone[0][0], "out, packed")
    compare.assert_same_bits(np.ascontiguousarray(lse[:, 1]), np.ascontiguousarray(alone[1][0, :, 0]), "lse, packed")


@every_target
@every_dtype
def test_case_16_natural_logarithms_across_a_merge(dtype: np.dtype, target: Target) -> None:
    """A prefix of 3072 keys and a suffix of 64, all logits 0: results of attention() go into merge_states() as they are."""
    q, k = np.zeros((1, 2, 2, 16), dtype), np.zeros((1, 3136, 2, 16), dtype)
    v = np.zeros_like(k)
    v[:, 3072:] = 1
    halves = [attend(target, q, k[:, part], v[:, part]) for part in (slice(3072), slice(3072, None))]
    assert_result(cuflash.merge_states([o for o, _ in halves], [lse for _, lse in halves]), 64 / 3136, np.log(3136), 64)


@every_target
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_51_a_part_without_keys_changes_nothing(dtype: np.dtype, target: Target) -> None:
    """What a ring's first step under a causal mask hands over: rows without any key, at the LSE -inf."""
    q, k, v = (normal(n, (1, 4, 2, 16), dtype) for n in range(3))
    whole = attend(target, q, k, v, causal=True)
    empty = attend(target, q, k, v, mask=np.zeros((4, 4), bool))
    for order in ([whole, empty], [empty, whole], [empty, empty, whole]):
        out, lse = cuflash.merge_states([o for o, _ in order], [s for _, s in order])
        compare.assert_same_bits(out, whole[0], "out")
        compare.assert_same_bits(lse, whole[1], "lse")


@pytest.mark.parametrize("value", [0.0, np.nan], ids=["plain", "nan"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (300, 0)}], ids=str)
def test_case_21_batch_invariance_with_splits_and_masks(options: dict, value: float) -> None:
    """Blocks, splits and the treatment of a NaN in V depend on the sequence alone, not on how many others there are."""
    sizes = (700, 3, 16)
    q, k, v = (normal(seed, (9, *sizes), F32) for seed in range(3))
    v[:, 650] += value
    options = {**options, "num_splits": 3, "batch_invariant": True, "backend": "cpu", "kernel": "fa2"}
    alone = cuflash.attention(q[:1], k[:1], v[:1], **options)
    for batch in (2, 9):
        compare.assert_same_bits(cuflash.attention(q[:batch], k[:batch], v[:batch], **options)[:1], alone, f"row in a batch of {batch}")
