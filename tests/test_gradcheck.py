"""Gradients of every option against differences of the forward pass of the same kernel, in float64.

A gradient is held against the derivative of the loss sum(dout * out) + sum(dlse * lse) along one random direction for each operand. A
central difference D(h) is off by c h**2 + d h**4 + ..., two of them combine to R(h) = (4 D(h/2) - D(h)) / 3, which is off by d h**4 / 4,
and two of those show how much that is: R(h/2) is off by a fifteenth of their difference. A loss that is off by u makes R(h/2) off by
6 u / h at most. With h = eps**(1/5) both are small.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import devices
import numpy as np
import pytest
from cases import GRADIENT_TARGETS, Target
from emulated_gradients import RUNS as EMULATED

import cuflash
from cuflash import problem

EPS = float(np.finfo(np.float64).eps)
STEP = EPS ** (1 / 5)
OPERANDS = ("q", "k", "v", "bias", "sinks")  # what is differentiated, if it is there


@dataclass
class Point:
    """Operands and options of a call, and what comes in from behind."""

    operands: dict[str, np.ndarray]
    options: dict[str, Any] = field(default_factory=dict)
    cu: tuple = ()
    slope: float = 0.0  # error of a gradient's factor, relative to 1
    backward: dict[str, Any] = field(default_factory=dict)  # options that only the backward pass has
    without: str = ""  # "dout": it is 0, "dlse": there is none

    @property
    def kind(self) -> tuple[Callable, Callable]:
        if self.cu:
            return cuflash.attention_varlen, cuflash.attention_varlen_backward
        return cuflash.attention, cuflash.attention_backward


def dense(
    b: int = 2, sq: int = 5, sk: int = 7, hq: int = 2, hkv: int = 1, d: int = 4, dv: int = 3, *, bias: tuple[int, ...] | None = None,
    sinks: bool = False, hides: float = 0.0, **options: Any,
) -> Point:
    rng = np.random.default_rng(b + 3 * sq + 7 * sk + 11 * hq + 13 * d)
    shapes = {"q": (b, sq, hq, d), "k": (b, sk, hkv, d), "v": (b, sk, hkv, dv)}
    operands = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if bias is not None:
        operands["bias"] = np.where(rng.random(bias) < hides, -np.inf, rng.standard_normal(bias))
    if sinks:
        operands["sinks"] = rng.standard_normal(hq)
    return Point(operands, options)


def heads_first(point: Point) -> Point:
    moved = {name: a.swapaxes(-3, -2) if name in "qkv" else a for name, a in point.operands.items()}
    return replace(point, operands=moved, options={**point.options, "layout": "BHSD"})


def packed(slack: int = 0, bias: tuple[int, ...] | None = None, **options: Any) -> Point:
    """Sequences of which one has no queries and one no keys."""
    point = dense(1, 9 + slack, 10 + slack, 4, 2, bias=bias, **options)
    operands = {name: a[0] if name in "qkv" else a for name, a in point.operands.items()}
    return replace(point, operands=operands, cu=([0, 4, 4, 5, 9], [0, 3, 5, 5, 10]))


def paged(shared: bool, **options: Any) -> Point:
    """Two sequences in pages of two; perhaps both have the first one, and one has another twice."""
    table = [[2, 0, 0], [2, 4, -1]] if shared else [[2, 0, 1], [3, 4, -1]]
    point = dense(5, 2, 2, 4, 2, **options, page_table=np.array(table), kv_lengths=[5, 3])
    return replace(point, operands={**point.operands, "q": point.operands["q"][:2].repeat(2, 1)[:, :3]})


def bend(s: Any, b: int, h: int, i: Any, j: Any, *, slope: float) -> Any:
    return s + slope * np.sin(s) + 0.1 * h - 0.05 * (i - 2 * j)


def checker(b: int, h: int, i: Any, j: Any) -> Any:
    return (i + 2 * j + b + h) % 3 != 0


def modified(point: Point) -> Point:
    """Slopes of Python functions are differences themselves, to about 1e-10 of the function's scale."""
    return replace(point, slope=1e-9)


MASK = np.random.default_rng(7).random((2, 1, 5, 7)) < 0.6
TAIL = np.tril(np.ones((5, 5), bool)) & ~np.eye(5, k=-1, dtype=bool)
BIASES = (
    (2, 2, 5, 7), (1, 2, 5, 7), (2, 1, 5, 7), (2, 2, 1, 7), (2, 2, 5, 1), (1, 1, 5, 7), (2, 1, 1, 1), (1, 1, 1, 1), (2, 5, 7), (5, 7),
    (1, 7), (7,), (1,),
)  # fmt: skip

POINTS: dict[str, Point] = {
    "plain": dense(),
    "without dlse": replace(dense(), without="dlse"),
    "dlse alone": replace(dense(sinks=True), without="dout"),
    "deterministic": replace(dense(causal=True), backward={"deterministic": True}),
    "causal": dense(causal=True),
    "causal, more queries": dense(sq=7, sk=4, causal=True),
    "upper left": dense(causal="upper_left"),
    "upper left, more queries": dense(sq=7, sk=4, causal="upper_left"),
    "window": dense(window=(2, 1)),
    "window to the left": dense(window=(1, -1)),
    "window to the right": dense(window=(-1, 1)),
    "window, causal": dense(window=(2, 0), causal=True),
    "window, upper left": dense(window=(1, 1), causal="upper_left"),
    "window with empty rows": dense(sq=7, sk=3, window=(0, 0)),
    "scale": dense(scale=0.9),
    "scale below 0": dense(scale=-0.7, causal=True),
    "scale 0": dense(scale=0.0),
    "softcap": dense(softcap=0.8, scale=1.0),
    "softcap, window": dense(softcap=2.0, window=(3, 1)),
    "ALiBi": dense(alibi_slopes=np.array([0.5, 0.25])),
    "ALiBi of each batch": dense(alibi_slopes=np.array([[0.5, 0.25], [1.0, -0.5]]), causal=True),
    **{f"bias {shape}".replace(" ", ""): dense(bias=shape) for shape in BIASES},
    "bias that hides": dense(bias=(2, 2, 5, 7), hides=0.4),
    "bias, causal, softcap": dense(bias=(2, 2, 5, 7), causal=True, softcap=1.5),
    "bias over rows, deterministic": replace(dense(bias=(2, 2, 1, 7)), backward={"deterministic": True}),
    "mask": dense(mask=MASK),
    "mask over rows": dense(mask=MASK[:, :, :1]),
    "mask of the last keys": dense(mask=TAIL),
    "sinks": dense(sinks=True),
    "sinks with empty rows": dense(sq=7, sk=4, sinks=True, causal=True),
    "heads of a group": dense(hq=6, hkv=2),
    "heads without groups": dense(hq=3, hkv=3, causal=True),
    "one head for all": dense(hq=5, hkv=1),
    "wide values": dense(d=3, dv=9),
    "wide keys": dense(d=17, dv=2),
    "lengths": dense(kv_lengths=[7, 3]),
    "lengths, causal": dense(kv_lengths=[2, 6], causal=True),
    "lengths, an empty sequence": dense(kv_lengths=[0, 5]),
    "starts": dense(kv_start=[1, 4], causal=True),
    "starts, lengths, window": dense(kv_start=[2, 0], kv_lengths=[6, 3], window=(3, -1)),
    "heads first": heads_first(dense(hq=4, hkv=2, causal=True)),
    "heads first, bias": heads_first(dense(bias=(2, 2, 5, 7), sinks=True)),
    "three axes": replace(one := dense(1), operands={name: a[0] for name, a in one.operands.items()}),
    "two axes": replace(one := dense(1, hq=1), operands={name: a[0, :, 0] for name, a in one.operands.items()}),
    "sqdist": dense(score="sqdist", scale=0.4),
    "sqdist, default scale": dense(score="sqdist", causal=True),
    "sqdist, a scale a feature": dense(score="sqdist", scale=np.array([0.3, 1.2, -0.1, 0.5])),
    "sqdist, softcap, bias": dense(score="sqdist", softcap=2.0, bias=(2, 5, 7), sinks=True),
    "score_mod": modified(dense(score_mod=bend, mod_args={"slope": 0.3})),
    "score_mod after all": modified(
        dense(score_mod=bend, mod_args={"slope": 0.3}, softcap=2.0, bias=(2, 1, 7), alibi_slopes=np.array([0.5, 0.25]), causal=True)
    ),
    "mask_mod": dense(mask_mod=checker),
    "packed": packed(),
    "packed, causal, slack": packed(2, causal=True),
    "packed, upper left, sinks": packed(causal="upper_left", sinks=True),
    "packed, longest given": packed(1, window=(2, 1), max_seqlen_q=4, max_seqlen_k=5),
    "packed, bias": packed(bias=(4, 4, 4, 5)),
    "packed, bias of heads": packed(bias=(4, 1, 5)),
    "packed, lengths": packed(kv_lengths=[2, 2, 0, 4], kv_start=[1, 0, 0, 2], causal=True),
    "packed, heads first": heads_first(packed(1, causal=True)),
    "packed, deterministic": replace(packed(causal=True), backward={"deterministic": True}),
    "pages": paged(False, causal=True),
    "pages that are shared": paged(True),
    "many at once": dense(
        2, 6, 8, 4, 2, bias=(4, 6, 8), sinks=True, softcap=1.5, window=(4, 2), alibi_slopes=np.array([0.1, 0.2, 0.3, 0.4]),
        kv_lengths=[8, 5], mask=np.random.default_rng(1).random((6, 8)) < 0.8,
    ),
}  # fmt: skip

RUNS = [*GRADIENT_TARGETS]
if not (devices.SIMULATED or devices.gpu_wanted()):
    RUNS += [target for target, dtype in EMULATED if dtype == np.float64]


def forward(target: Target, point: Point, moved: dict[str, np.ndarray] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE with some operands replaced. In the simulator, where a call takes seconds, those of the oracle."""
    if devices.SIMULATED:
        target = Target("reference", "naive")
    given = {**point.operands, **(moved or {})}
    q, k, v = (given.pop(name) for name in "qkv")
    return devices.run(target, point.kind[0], q, k, v, *point.cu, **point.options, **given, return_lse=True)


def backward(target: Target, point: Point, dout: np.ndarray, dlse: np.ndarray, out: np.ndarray, lse: np.ndarray) -> dict[str, np.ndarray]:
    """Gradients by operand."""
    given = dict(point.operands)
    args = (dout, *(given.pop(name) for name in "qkv"), out, lse, *point.cu)
    options = {**point.options, **given, **point.backward, "dlse": None if point.without == "dlse" else dlse}
    found = devices.run(target, point.kind[1], *args, arrays=6, **options)
    return {name: np.asarray(g) for name in OPERANDS if (g := getattr(found, f"d{name}")) is not None}


def loss(results: tuple[np.ndarray, np.ndarray], dout: np.ndarray, dlse: np.ndarray) -> np.ndarray:
    """The terms of the sum; an LSE of -inf does not change, and has no part in it."""
    out, lse = results
    return np.concatenate([(dout * out).ravel(), (dlse * np.where(lse == -np.inf, 0, lse)).ravel()]).astype(np.longdouble)


def incoming(point: Point, results: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(99)
    dout, dlse = (rng.standard_normal(a.shape) for a in results)
    return dout * (point.without != "dout"), dlse * (point.without != "dlse")


def derivative(evaluate: Callable[[float], np.ndarray], rounding: float) -> tuple[float, float]:
    """At 0, and a bound of its error; ``rounding``: that of one loss."""
    central = []
    for h in (STEP, STEP / 2, STEP / 4):
        central.append(float((evaluate(h) - evaluate(-h)).sum() / (2 * h)))
    coarse, fine = ((4 * b - a) / 3 for a, b in zip(central[:-1], central[1:], strict=True))
    return fine, abs(coarse - fine) + 6 * rounding / STEP


def slopes(target: Target, point: Point) -> tuple[dict[str, np.ndarray], dict[str, tuple[np.ndarray, float, float]]]:
    """Gradients, and for each operand a direction with the derivative along it and the error that the two may differ by."""
    results = forward(target, point)
    dout, dlse = incoming(point, results)
    gradients = backward(target, point, dout, dlse, *results)
    assert set(gradients) == set(point.operands)
    found, rng = {}, np.random.default_rng(5)
    terms = np.abs(loss(results, dout, dlse)).sum()
    for name, a in point.operands.items():
        along = rng.standard_normal(a.shape)
        size = float((np.abs(gradients[name]) * np.abs(along)).sum())
        # Each number of a result is off by a few eps of its largest, by the contract 2 eps and what the naive computation errs; moved
        # operands are off by half an eps of their own.
        inputs = float((np.abs(gradients[name]) * np.abs(np.where(np.isfinite(a), a, 0))).sum())
        rounding = EPS * (8 * float(terms) + inputs)

        def moved(h: float, name: str = name, a: np.ndarray = a, along: np.ndarray = along) -> np.ndarray:
            return loss(forward(target, point, {name: a + h * along}), dout, dlse)

        value, error = derivative(moved, rounding)
        found[name] = along, value, error + (point.slope + 64 * EPS) * size
    return gradients, found


@pytest.mark.parametrize("target", RUNS, ids=lambda t: t.name)
@pytest.mark.parametrize("name", POINTS)
def test_gradients_are_those_of_differences(name: str, target: Target) -> None:
    point = POINTS[name]
    gradients, found = slopes(target, point)
    for operand, (along, value, error) in found.items():
        gradient = gradients[operand]
        assert gradient.shape == point.operands[operand].shape and gradient.dtype == np.float64
        assert np.isfinite(gradient).all()
        size = float((np.abs(gradient) * np.abs(along)).sum())
        assert error <= 1e-8 * max(size, 1), "too coarse to see anything"
        got = float((gradient * along).sum())
        assert abs(got - value) <= error, f"d{operand}: {got:.12g} along a direction where the loss changes by {value:.12g} +- {error:.2g}"


@pytest.mark.parametrize("operand", OPERANDS)
def test_a_gradient_that_is_a_little_off_is_seen(operand: str) -> None:
    """One number, by a millionth of the largest."""
    gradients, found = slopes(GRADIENT_TARGETS[0] if not devices.SIMULATED else Target("reference", "naive"), POINTS["many at once"])
    gradient, (along, value, error) = gradients[operand].copy(), found[operand]
    largest = np.unravel_index(np.abs(gradient * along).argmax(), gradient.shape)
    gradient[largest] *= 1 + 1e-6
    assert abs(float((gradient * along).sum()) - value) > error


def test_every_option_has_a_point() -> None:
    """Every option that changes what is computed, not only how."""
    asked = {name for point in POINTS.values() for name in (*point.options, *point.operands, *point.backward)}
    every = {*inspect.signature(problem.with_options).parameters, *inspect.signature(cuflash.attention_varlen_backward).parameters}
    how = {"problem", "kernel", "backend", "stream", "num_splits", "batch_invariant", "precision", "options"}
    of_others = {"dout", "out", "lse", "dlse", "cu_seqlens_q", "cu_seqlens_k", "q_scale", "k_scale", "v_scale", "out_dtype"}
    assert every - how - of_others == asked
