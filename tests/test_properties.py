"""Random shapes, strides, storages and options against the oracle, and what must hold whatever the numbers are."""

from __future__ import annotations

import math
from typing import NamedTuple

import compare
import numpy as np
import pytest
from calls import check, expected, gaps_untouched, present, run
from case import (
    BF16, DTYPES, F32, F64, Builder, Case, Packed, Shape, alibi, bias, causal, fixed, mask, prefix, relative_table, sinks,
    sqdist_per_feature, squash, strided_keys, upper_left,
)
from cases import TARGETS, Target
from hard import assert_result, assert_values, attend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.problem import build_attention

FAST = tuple(t for t in TARGETS if t.backend != "reference")
each_target = pytest.mark.parametrize("target", FAST, ids=lambda t: t.name)


def examples(count: int) -> settings:
    """So many examples, the same in every run; a failing one is printed with the blob that reproduces it."""
    large = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=count, deadline=None, derandomize=True, print_blob=True, suppress_health_check=large)


# One from each group at most. A packed case has no mask of Sq columns; a few groups only go with some storages.
POSITION = {
    "": None, "causal": causal, "upper_left": upper_left, "window9,0": fixed(window=(9, 0)), "window-1,4": fixed(window=(-1, 4)),
    "window70,-1": fixed(window=(70, -1)), "causal-window33": fixed(causal=True, window=(33, -1)),
    "upper_left-window5": fixed(causal="upper_left", window=(5, -1)),
}
SCORE = {
    "": None, "scale0.4": fixed(scale=0.4), "scale-0.2": fixed(scale=-0.2),
    "sqdist": fixed(score="sqdist", scale=0.05), "sqdist-features": sqdist_per_feature,
}
CAP = {"": None, "softcap2": fixed(softcap=2.0)}
ADDED = {
    "": None,
    "bias": bias(),
    "bias-keys": bias("1 Sk"),
    "bias-heads-hides": bias("Hq Sq Sk", hidden=0.3),
    "bias-rows": bias("B 1 Sq 1", dtype=F32),
}
SLOPES = {"": None, "alibi": alibi(), "alibi-batch": alibi("B Hq")}
MASKED = {"": None, "mask": mask(), "mask-keys": mask("B 1 1 Sk"), "mask-few": mask("1 Hq Sq Sk", visible=0.1)}
SINKS = {"": None, "sinks": sinks}
MODS = {
    "": None, "squash": fixed(score_mod=squash, mod_args={"limit": 2.0}), "table": relative_table,
    "prefix": fixed(mask_mod=prefix, mod_args={"length": 11}),
    "strided": fixed(mask_mod=strided_keys),
}
HOW = {"": None, "splits2": fixed(num_splits=2), "splits5": fixed(num_splits=5), "invariant": fixed(batch_invariant=True)}
GROUPS = (POSITION, SCORE, CAP, ADDED, SLOPES, MASKED, SINKS, MODS, HOW)

lengths = st.one_of(st.integers(0, 12), st.sampled_from([63, 64, 65, 127, 128, 129, 200, 260]))
head_sizes = st.sampled_from([1, 2, 3, 8, 16, 17, 40, 64, 80])


@st.composite
def options(draw: st.DrawFn) -> tuple[str, tuple[Builder, ...]]:
    """A name, and up to a few options."""
    chosen = [
        (name, group[name]) for group in GROUPS if draw(st.booleans()) for name in [draw(st.sampled_from(sorted(group)))] if name
    ]
    return "+".join(name for name, _ in chosen), tuple(builder for _, builder in chosen)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any case that the API takes."""
    storage = draw(st.sampled_from(["dense", "dense", "packed", "paged", "decode"]))
    names, builders = draw(options())
    b, hkv, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    sq, sk = draw(lengths), draw(lengths)
    if storage == "decode":
        sq = min(sq, 5)
    strides = draw(st.sampled_from(["contiguous", "transposed", "reversed", "offset", "padded", "every_other"]))
    fields: dict = {"layout": draw(st.sampled_from(["BSHD", "BHSD"])), "strides": strides}
    if storage == "packed":
        some_lengths = st.lists(lengths, min_size=b, max_size=b).map(tuple)
        fields["packed"] = Packed(draw(some_lengths), draw(some_lengths), draw(st.sampled_from([(0, 0), (3, 2)])))
        sq, sk = max(fields["packed"].q), max(fields["packed"].k)
    elif storage != "dense" or draw(st.booleans()):
        fields["kv_lengths"] = tuple(draw(st.integers(0, sk)) for _ in range(b))
        if draw(st.booleans()):
            fields["kv_start"] = tuple(draw(st.integers(0, n)) for n in fields["kv_lengths"])
    if storage == "paged" or storage == "decode" and draw(st.booleans()):
        fields["page_size"] = draw(st.sampled_from([1, 3, 16, 64]))
    if storage == "decode":
        fields["decode"] = True
        fields["new"] = draw(st.integers(0, min(3, *fields["kv_lengths"])))
        if fields["new"] and "kv_start" in fields:  # new keys are no padding
            fields["kv_start"] = tuple(
                min(s, n - fields["new"]) for s, n in zip(fields["kv_start"], fields["kv_lengths"], strict=True)
            )
    elif storage == "dense" and b == 1:
        fields["axes"] = draw(st.sampled_from([4, 3, 2] if hkv == ratio == 1 else [4, 3]))
    shape = Shape(b, sq, sk, hkv * ratio, hkv, draw(head_sizes), draw(head_sizes))
    return Case(f"drawn {storage} {names} seed {draw(st.integers(0, 2**16))}", shape, builders, **fields)


@each_target
@examples(80)
@given(case=cases(), dtype=st.sampled_from(DTYPES))
def test_any_call_agrees_with_the_oracle(target: Target, case: Case, dtype: np.dtype) -> None:
    call = present(case, dtype)
    run(call, target)
    check(call, expected(case, dtype))
    first = call.out.copy(), call.lse.copy()
    again = present(case, dtype)
    run(again, target)
    compare.assert_same_bits(first[0], again.out, "out of a second run")
    compare.assert_same_bits(first[1], again.lse, "lse of a second run")
    assert gaps_untouched(again.out) and gaps_untouched(again.lse)


# --- invariances ---------------------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """Random q, k and v with at least one key, printed by what makes them."""

    shape: Shape
    dtype: np.dtype
    seed: int

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        s, rng = self.shape, np.random.default_rng(self.seed)
        shapes = ((s.b, s.sq, s.hq, s.d), (s.b, s.sk, s.hkv, s.d), (s.b, s.sk, s.hkv, s.dv))
        return tuple(rng.standard_normal(shape).astype(self.dtype) for shape in shapes)


@st.composite
def drawn(draw: st.DrawFn, dtypes: tuple[np.dtype, ...] = DTYPES) -> Drawn:
    hkv = draw(st.integers(1, 2))
    b, hq, sizes = draw(st.integers(1, 2)), hkv * draw(st.integers(1, 3)), (draw(head_sizes), draw(head_sizes))
    shape = Shape(b, draw(lengths), draw(lengths.filter(bool)), hq, hkv, *sizes)
    return Drawn(shape, draw(st.sampled_from(dtypes)), draw(st.integers(0, 2**16)))


def assert_expected(got: tuple[np.ndarray, np.ndarray], want: compare.Expected) -> None:
    compare.assert_close(got[0], want.out[0], want.out_bound, "out")
    compare.assert_close(got[1], want.lse[0], want.lse_bound, "lse")


@each_target
@examples(25)
@given(data=drawn((F32, F64)), cut=st.integers(0, 260), softcap=st.sampled_from([None, 3.0]))
def test_two_halves_merge_into_the_whole(target: Target, data: Drawn, cut: int, softcap: float | None) -> None:
    q, k, v = data.arrays()
    want = compare.expect([build_attention(q, k, v, softcap=softcap)])
    cut = min(cut, k.shape[1])
    halves = [attend(target, q, k[:, part], v[:, part], softcap=softcap) for part in (slice(cut), slice(cut, None))]
    out, lse = cuflash.merge_states([o for o, _ in halves], [x for _, x in halves])
    # The shares of the halves are exp of differences of their LSE, whose errors they take on relative to values up to max|v|.
    of_shares = 2 * want.lse_bound * float(np.abs(v).max())
    compare.assert_close(out, want.out[0], want.out_bound + of_shares, "out")
    compare.assert_close(lse, want.lse[0], 2 * want.lse_bound, "lse")


@each_target
@examples(25)
@given(data=drawn(), seed=st.integers(0, 2**32), score=st.sampled_from(["dot", "sqdist"]))
def test_the_order_of_keys_does_not_matter(target: Target, data: Drawn, seed: int, score: str) -> None:
    q, k, v = data.arrays()
    order = np.random.default_rng(seed).permutation(k.shape[1])
    scale = 0.1 if score == "sqdist" else None
    want = compare.expect([build_attention(q, k, v, score=score, scale=scale)])
    assert_expected(attend(target, q, k[:, order], v[:, order], score=score, scale=scale), want)


@each_target
@examples(25)
@given(data=drawn(), seed=st.integers(0, 2**32), visible=st.sampled_from([0.05, 0.5, 1.0]))
def test_zero_queries_average_what_they_see(target: Target, data: Drawn, seed: int, visible: float) -> None:
    q, k, v = data.arrays()
    q[...] = 0
    v[...] = np.abs(v.astype(np.float64)) + 0.5  # positive: the mean cancels nothing
    seen = np.random.default_rng(seed).random((q.shape[1], k.shape[1])) < visible
    count = seen.sum(axis=1)
    values = v.astype(np.float64).repeat(q.shape[2] // v.shape[2], axis=2)
    mean = np.einsum("qk,bkhd->bqhd", seen, values) / np.maximum(count, 1)[None, :, None, None]
    with np.errstate(divide="ignore"):
        assert_result(attend(target, q, k, v, mask=seen), mean, np.log(count), k.shape[1])


@each_target
@examples(25)
@given(data=drawn((F32, F64, BF16)), shift=st.sampled_from([-1000.0, -88.0, -1.5, 0.25, 60.0, 30000.0]), is_causal=st.booleans())
def test_a_constant_bias_moves_the_lse_alone(target: Target, data: Drawn, shift: float, is_causal: bool) -> None:
    q, k, v = data.arrays()
    constant = np.full((1, 1), shift, F32)
    plain = compare.expect([build_attention(q, k, v, causal=is_causal)])
    shifted = compare.expect([build_attention(q, k, v, causal=is_causal, bias=constant)])
    out, lse = attend(target, q, k, v, causal=is_causal, bias=constant)
    # Logits of that size are rounded by half an eps of it, and the weights take that on as a relative error.
    of_logits = compare.eps(F64 if data.dtype == F64 else F32) * abs(shift) * float(np.abs(v).max())
    compare.assert_close(out, plain.out[0], shifted.out_bound + of_logits, "out")
    compare.assert_close(lse, plain.lse[0] + shift, shifted.lse_bound, "lse")


@each_target
@examples(20)
@given(data=drawn(), times=st.integers(2, 4))
def test_repeated_keys_add_their_logarithm(target: Target, data: Drawn, times: int) -> None:
    q, k, v = data.arrays()
    k, v = (np.concatenate([a] * times, axis=1) for a in (k, v))
    want = compare.expect([build_attention(q, k, v)])
    once = compare.expect([build_attention(*data.arrays())])
    out, lse = attend(target, q, k, v)
    compare.assert_close(out, once.out[0], want.out_bound, "out")
    compare.assert_close(lse, once.lse[0] + math.log(times), want.lse_bound, "lse")


@each_target
@examples(20)
@given(data=drawn(), value=st.sampled_from([1.0, -3.0, 0.375]))
def test_equal_values_come_out_as_they_are(target: Target, data: Drawn, value: float) -> None:
    q, k, v = data.arrays()
    v[...] = value
    out, lse = attend(target, q, k, v)
    assert_values(out, value, "out", k.shape[1])
    assert np.isfinite(lse).all()
