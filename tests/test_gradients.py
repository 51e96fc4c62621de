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
from case import Case
from cases import DIFFERENTIATED, GRADIENT_TARGETS, Target

import cuflash
from cuflash import NoBackendError, reference
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
    call = given.call
    inputs = [(a, a.tobytes()) for a in (*call.inputs(), given.dout, given.dlse, call.out, call.lse)]
    function = cuflash.attention_backward if call.case.packed is None else cuflash.attention_varlen_backward
    options = {**call.options, "kernel": target.kernel, "backend": target.backend, "dlse": given.dlse, **more}
    args = (given.dout, *call.args[:3], call.out, call.lse, *call.args[3:])
    try:
        result = devices.call(target, function, args, options, arrays=6)
    except NoBackendError as error:
        if "deterministic" in more and target.backend == "numba-cuda" and "no fixed order" in str(error):
            return None
        raise
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


@pytest.mark.parametrize("target", GRADIENT_TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize(
    ("case", "dtype"), [pytest.param(c, d, id=f"{c.name}-{d.name}") for c in DIFFERENTIATED for d in c.dtypes]
)
def test_gradients(case: Case, dtype: np.dtype, target: Target) -> None:
    given = differentiate(case, dtype)
    want = compare.expect_gradients(given.problems)
    got = run_backward(given, target)
    assert got is not None
    for name, parts in want.parts.items():
        gradient = getattr(got, name)
        shapes = {
            "dq": given.call.args[0],
            "dk": given.call.args[1],
            "dv": given.call.args[2],
            "dbias": given.call.options.get("bias"),
        }
        if name in shapes:
            assert gradient.shape == shapes[name].shape and gradient.dtype == shapes[name].dtype
        if name == "dsinks":  # one for all sequences
            parts = [np.sum(parts, axis=0)]
        found = gradient_parts(name, gradient, case)
        assert len(found) == len(parts)
        for b, (part, exact) in enumerate(zip(found, parts, strict=True)):
            compare.assert_close(part, exact, want.bounds[name], f"{name} (part {b})")
    for name in ("dbias", "dsinks"):
        assert (getattr(got, name) is None) == (name not in want.parts)
    if devices.SIMULATED:  # slow
        return
    again = run_backward(differentiate(case, dtype), target, deterministic=True)
    if again is None:  # it adds up the gradient of a broadcast bias in no fixed order, and says so
        return
    for name in want.parts:
        compare.assert_same_bits(getattr(got, name), getattr(again, name), f"{name} of a second run")
