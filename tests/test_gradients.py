"""The gradients of every backend that has a backward pass, against the float64 oracle.

The oracle's own gradients are held against finite differences elsewhere; here layouts, strides, packing and dtypes count.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import compare
import devices
import numpy as np
import pytest
from calls import STRIDES, Call, cumulative, from_user, pack, plain, present, sequences, to_user
from case import DTYPES, Case
from cases import DIFFERENTIATED, GRADIENT_CUDA, GRADIENT_TARGETS, GRADIENTS_ABSENT, Target

import cuflash
from cuflash import NoBackendError, reference
from cuflash.backends import cuda
from cuflash.problem import build_attention, build_backward
from cuflash.types import Gradients, Problem


@dataclasses.dataclass
class Differentiated:
    """A forward call with the gradients that come in, for the backend as for the oracle."""

    call: Call
    dout: np.ndarray  # as the user has it
    dlse: np.ndarray
    problems: list[Problem]


def differentiate(case: Case, dtype: np.dtype) -> Differentiated:
    """Results and incoming gradients of a case; out and lse are the oracle's, in their dtypes."""
    p, call = plain(case, dtype), present(case, dtype)
    s, lse_dtype = case.shape, call.lse.dtype
    dout = p.rng.standard_normal((s.b, s.sq, s.hq, s.dv)).astype(call.out.dtype)
    dlse = p.rng.standard_normal((s.b, s.hq, s.sq)).astype(lse_dtype)
    outs, lses, problems = np.zeros_like(dout), np.full_like(dlse, -np.inf), []
    for b, (q, k, v, options) in enumerate(sequences(case, p)):
        part, m = slice(None) if case.packed is None else slice(b, b + 1), q.shape[1]
        with np.errstate(over="ignore"):
            out, lse = (
                a.astype(t)
                for a, t in zip(reference.forward(build_attention(q, k, v, **options)), (dout.dtype, lse_dtype), strict=True)
            )
        outs[part, :m], lses[part, :, :m] = out, lse
        problems.append(build_backward(dout[part, :m], q, k, v, out, lse, dlse=dlse[part, :, :m], **options))
    lay = STRIDES[case.strides]
    if case.packed is None:
        call.out, dout = (lay(to_user(a, case)) for a in (outs, dout))
        call.lse, dlse = (lay(a[(0,) * (4 - case.axes)]) for a in (lses, dlse))
        return Differentiated(call, dout, dlse, problems)
    lengths, slack = case.packed.q, case.packed.slack[0]
    order = (0, 1, 2) if case.layout == "BSHD" else (1, 0, 2)
    call.out, dout = (lay(pack(a, lengths, slack).transpose(order)) for a in (outs, dout))
    call.lse, dlse = (lay(pack(a.transpose(0, 2, 1), lengths, slack).T) for a in (lses, dlse))
    return Differentiated(call, dout, dlse, problems)


def run_backward(given: Differentiated, target: Target, **more: Any) -> Gradients | None:
    """Gradients of a target; None if it declines, as it may by cases.py."""
    call = given.call
    inputs = [(a, a.tobytes()) for a in (*call.inputs(), given.dout, given.dlse, call.out, call.lse)]
    function = cuflash.attention_backward if call.case.packed is None else cuflash.attention_varlen_backward
    options = {**call.options, "kernel": target.kernel, "backend": target.backend, "dlse": given.dlse, **more}
    args = (given.dout, *call.args[:3], call.out, call.lse, *call.args[3:])
    try:
        result = devices.call(target, function, args, options, arrays=6)
    except NoBackendError as error:
        if devices.listed(target, function, args, options, error) is None:
            raise
        return None
    for a, before in inputs:
        assert a.tobytes() == before, "an input was changed"
    return result


def gradient_parts(name: str, gradient: np.ndarray, case: Case) -> list[np.ndarray]:
    """A gradient in canonical axis order, sequence by sequence; rows of no sequence must be 0."""
    if name in ("dbias", "dsinks"):
        return [gradient]
    if case.packed is None:
        return [from_user(gradient, case)]
    gradient = gradient if case.layout == "BSHD" else gradient.transpose(1, 0, 2)
    cu = cumulative(case.packed.q if name == "dq" else case.packed.k)
    assert not gradient[cu[-1]:].any(), f"{name}: rows behind the last sequence must be 0"
    return [gradient[None, a:b] for a, b in zip(cu[:-1], cu[1:], strict=True)]


def assert_expected(got: Gradients, given: Differentiated, want: compare.ExpectedGradients) -> None:
    """Shapes, dtypes and numbers of all gradients, and None for those of arrays that were not given."""
    q, k, v = given.call.args[:3]
    arrays = {"dq": q, "dk": k, "dv": v, "dbias": given.call.options.get("bias")}
    for name, parts in want.parts.items():
        gradient = getattr(got, name)
        if name in arrays:
            assert gradient.shape == arrays[name].shape and gradient.dtype == arrays[name].dtype
        if name == "dsinks":  # one for all sequences
            parts = [np.sum(parts, axis=0)]
        found = gradient_parts(name, gradient, given.call.case)
        assert len(found) == len(parts)
        for b, (part, exact) in enumerate(zip(found, parts, strict=True)):
            compare.assert_close(part, exact, want.bounds[name], f"{name} (part {b})")
    for name in ("dbias", "dsinks"):
        assert (getattr(got, name) is None) == (name not in want.parts)


@pytest.mark.parametrize("target", GRADIENT_TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize(
    ("case", "dtype"), [pytest.param(c, d, id=f"{c.name}-{d.name}") for c in DIFFERENTIATED for d in c.dtypes]
)
def test_gradients(case: Case, dtype: np.dtype, target: Target) -> None:
    given = differentiate(case, dtype)
    want = compare.expect_gradients(given.problems)
    got = run_backward(given, target)
    if got is None:
        pytest.skip("declined, as listed")
    assert_expected(got, given, want)
    if devices.SIMULATED:  # slow
        return
    fixed = run_backward(differentiate(case, dtype), target, deterministic=True)
    if target.backend == "cuda":  # another order is another kernel
        again = run_backward(differentiate(case, dtype), target)
        assert again is not None
        for name in ("dk", "dv"):
            compare.assert_same_bits(getattr(got, name), getattr(again, name), f"{name} of a second run")
        if fixed is not None:
            assert_expected(fixed, given, want)
        got, fixed = fixed, run_backward(differentiate(case, dtype), target, deterministic=True)
    if fixed is None:  # it adds up something in no fixed order, and says so
        return
    for name in want.parts:
        compare.assert_same_bits(getattr(got, name), getattr(fixed, name), f"{name} of a second run")


# What asks for an entry of GRADIENTS_ABSENT: shape of q, and options.
ASKED: dict[str, dict[str, Any]] = {
    "score_mod": {"score_mod": "s * s"}, "mask_mod": {"mask_mod": "i >= j"}, "softcap": {"softcap": 3.0},
    "deterministic": {"deterministic": True},
    "alibi_slopes": {"alibi_slopes": np.ones(2)}, "bias": {"bias": np.zeros((1, 2, 3, 3))}, "mask": {"mask": np.ones((3, 3), bool)},
    "sinks": {"sinks": np.zeros(2)}, "sqdist": {"score": "sqdist"}, "page_table": {"page_table": [[0]], "kv_lengths": [3]},
    "broadcast bias": {"bias": np.zeros((1, 1, 3, 3))}, "deterministic broadcast bias": {"bias": np.zeros((3, 1)), "deterministic": True},
}


@pytest.mark.parametrize(
    ("target", "entry"), [pytest.param(t, e, id=f"{t.name}-{e}") for t in GRADIENT_CUDA for e in GRADIENTS_ABSENT[t.name]]
)
def test_what_raw_kernels_may_decline_they_do(target: Target, entry: str) -> None:
    """Or the list is too long."""
    dtype, _, rest = entry.partition(" ")
    of = [d for d in DTYPES if d.name == dtype] or [d for d in DTYPES if target.kernel == "fa2" or d.itemsize == 2]
    options = dict(ASKED.get(rest if len(of) == 1 else entry, {}))
    for d in of:
        q = np.zeros((1, 3, 2, 12 if entry == "head sizes" else 16), d)
        if entry == "strides":
            q = q[..., ::-1]
        if "bias" in options:
            options["bias"] = options["bias"].astype(d)
        lse = np.zeros((1, 2, 3), np.float64 if d.itemsize == 8 else np.float32)
        reason = cuda.decline(build_backward(q, q, q, q, q, lse, **options), target.kernel)
        assert GRADIENTS_ABSENT[target.name][entry] in (reason or "nothing"), f"{d}: {reason}"
