"""Fuzz the backward kernels: thousands of random problems against the oracle.

    python3 tests/fuzz_backward.py [--problems N] [--seed N] [--target cuda] [--kinds N] [--jobs N] [--seconds N]
    python3 tests/fuzz_backward.py --target cuda --run "Backward(...)"

As fuzz_forward.py, whose problems these are, with what comes in from behind: dout, dlse and the results, in memory of their own. Targets
are "cuda" (a GPU), "emulator" (the raw kernels on the host), both with "/fa3" or "/fa2", "numba-cuda/fa1", and "cpu/fa2".
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_forward  # first: it sets up the path and the environment
import calls
import compare
import cuflash
import numpy as np
from case import F32, F64
from cases import Target, absent
from cuflash import device, reference
from cuflash import problem as problems
from cuflash.types import Gradients, Problem
from fuzz_check import Built, build, indices_there, lay, with_device_indices
from hypothesis import strategies as st
from small import view

import devices
import fuzz
from fuzz import ANY_STRIDES, Example, Kind

NAMES = ("dq", "dk", "dv", "dbias", "dsinks")


@dataclass(frozen=True)
class Backward:
    """A problem of the backward pass."""

    of: Example  # of the forward pass
    dlse: bool = True
    memory: tuple[str, str, str, str] = ("contiguous",) * 4  # of dout, out, lse and dlse
    one_number: bool = False  # dout is one, seen everywhere
    magnitude: float = 1.0  # of dout
    garbage: bool = True  # NaN and infinities in dout of rows that see nothing
    deterministic: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "of"), name)


# --- drawing ---------------------------------------------------------------------------------------------------------


@st.composite
def backwards(draw: st.DrawFn, of: list[Kind], longest: int, hopper: int = 0) -> Backward:
    """A problem of one of these kinds; so many percent of those that fa3 could differentiate are for it."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    kind = draw(st.sampled_from(of))
    e = draw(fuzz.examples([kind], longest // (3 if kind.dtype == "float64" else 1), 0, hopper))  # whose oracle has no BLAS
    lies = st.one_of(st.just("contiguous"), st.sampled_from(ANY_STRIDES))
    return Backward(
        dataclasses.replace(e, give_out=True, lse="given", spoiled=""), dlse=one(True, True, False),
        memory=tuple(draw(lies) for _ in range(4)), one_number=one(False, False, False, True), magnitude=one(1.0, 1.0, 1.0, 0.01, 30.0),
        garbage=one(True, True, False), deterministic=one(False, False, True),
    )


def some_kinds(number: int, count: int, target: str) -> list[Kind]:
    """So many kinds; for raw kernels those that they take, which have no pages."""
    backend, _, kernel = target.partition("/")
    found = [kind for kind in fuzz.kinds(number, 6 * count) if kind.kernel == "fa2" and kind.out == kind.dtype and not kind.flat]
    if backend not in ("cpu", "reference"):
        found = [kind for kind in found if not kind.paged]
    if kernel == "fa3":
        found = [kind for kind in found if kind.hopper and not kind.softcap]
    return found[:count]


# --- building --------------------------------------------------------------------------------------------------------


@dataclass
class Given:
    """A call with its arrays, and the problems of the oracle."""

    example: Backward
    built: Built
    dout: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    dlse: np.ndarray | None
    problems: list[Problem]

    @property
    def args(self) -> tuple:
        """Of the public function."""
        return (self.dout, *self.built.call.args[:3], self.out, self.lse, *self.built.call.args[3:])

    @property
    def options(self) -> dict[str, Any]:
        more = {"deterministic": True} if self.example.deterministic else {}
        return {**self.built.call.options, "dlse": self.dlse, **more}

    @property
    def function(self) -> Callable:
        return cuflash.attention_backward if self.example.of.packed is None else cuflash.attention_varlen_backward


def present(b: Backward) -> Given:
    """The arrays of an example; results are the oracle's in their dtypes."""
    e, built = b.of, build(b.of)
    case, dtype = built.call.case, built.call.args[0].dtype
    lse_dtype = F64 if dtype == F64 else F32
    rng, s = np.random.default_rng(e.seed + 3), case.shape
    dout = (b.magnitude * rng.standard_normal((s.b, s.sq, s.hq, s.dv))).astype(dtype)
    dout = np.full_like(dout, b.magnitude) if b.one_number else dout
    dlse = rng.standard_normal((s.b, s.hq, s.sq)).astype(lse_dtype)
    outs, lses, todo = np.zeros_like(dout), np.full_like(dlse, -np.inf), []
    for n, p in enumerate(_with_bias_as_given(built)):
        part, rows = slice(None) if e.packed is None else slice(n, n + 1), p.q.shape[1]
        with np.errstate(over="ignore"):
            out, lse = (a.astype(t) for a, t in zip(reference.forward(p), (dtype, lse_dtype), strict=True))
        outs[part, :rows], lses[part, :, :rows] = out, lse
        incoming = {"dout": dout[part, :rows], "out": out, "lse": lse, "dlse": dlse[part, :, :rows] if b.dlse else None}
        todo.append(p.replace(op="backward", **{name: None if a is None else view(a.copy()) for name, a in incoming.items()}))
        if b.garbage and not b.one_number:
            empty = ~_sees(p).transpose(0, 2, 1)
            dout[part, :rows][empty] = rng.choice((np.nan, np.inf), size=(int(empty.sum()), 1))
    return Given(b, built, *_laid_out(b, built, dout, outs, lses, dlse), todo)


def _with_bias_as_given(built: Built) -> Iterator[Problem]:
    """A bias that is given as a view of all its rows has a gradient of all of them."""
    for p in built.problems:
        if p.bias is not None and built.example.bias_memory == "broadcast":
            p = p.replace(bias_shape=(*p.bias.shape[:3], (p.bias_shape or p.bias.shape)[-1]))
        yield p


def _sees(p: Problem) -> np.ndarray:
    """(B, H, Sq) bool: rows that see a key."""
    seen = np.zeros((p.batch, p.heads_q, p.seqlen_q), bool)
    with np.errstate(all="ignore"):
        for block in reference.blocks(p):
            attended = reference.visibility(p, block)
            if p.bias is not None:
                attended = attended & (p.bias.array[block.plane][block.rows, block.keys] != -np.inf)
            seen[block.lse_index] = attended.any(axis=1)
    return seen


def _laid_out(b: Backward, built: Built, dout: np.ndarray, out: np.ndarray, lse: np.ndarray, dlse: np.ndarray) -> list[np.ndarray | None]:
    """What comes in, as the user has it."""
    case, e = built.call.case, b.of
    if case.packed is None:
        user = [calls.to_user(dout, case), calls.to_user(out, case), *(a[(0,) * (4 - case.axes)] for a in (lse, dlse))]
    else:
        lengths, slack = case.packed.q, case.packed.slack[0]
        order = (0, 1, 2) if case.layout == "BSHD" else (1, 0, 2)
        user = [calls.pack(a, lengths, slack).transpose(order) for a in (dout, out)]
        user += [calls.pack(a.transpose(0, 2, 1), lengths, slack).T for a in (lse, dlse)]
    units = (e.kind.unit, e.kind.unit, 1, 1)
    laid: list[np.ndarray | None] = [
        lay(a, "every_other" if a.ndim < 2 and how == "every_other_row" else how, unit)
        for a, how, unit in zip(user, b.memory, units, strict=True)
    ]
    if b.one_number:
        laid[0] = np.broadcast_to(dout.dtype.type(b.magnitude), laid[0].shape)
    if not b.dlse:
        laid[3] = None
    return laid


# --- running ---------------------------------------------------------------------------------------------------------


def run(given: Given, target: Target) -> Gradients:
    """Gradients of a kernel; inputs must stay as they are."""
    function, on_device = given.function, given.example.of.on_device
    if on_device and target.backend in ("cuda", "numba-cuda"):
        function = with_device_indices(function, on_device, 6)
    arrays = [calls.root(a) for a in (*given.built.call.inputs(), given.dout, given.out, given.lse)]
    inputs = [(a, a.tobytes()) for a in arrays]
    options = {**given.options, "kernel": target.kernel, "backend": target.backend}
    found = devices.call(target, function, given.args, options, arrays=6)
    for a, before in inputs:
        assert a.tobytes() == before, "an input was changed"
    return found


def emulated(given: Given, kernel: str, made: Any, info: device.DeviceInfo) -> Gradients:
    """Gradients of a raw kernel on the host."""
    from emulated_gradients import differentiate

    e, options = given.example.of, given.options
    if e.packed is not None:
        for name in ("max_seqlen_q", "max_seqlen_k"):
            options.pop(name, None)
        options["varlen"] = (*given.args[6:8], *given.built.max_seqlens)
    problem = indices_there(problems.build_backward(*given.args[:6], **options), e)
    found = differentiate(made, problem, kernel, info, "end" if e.seed % 2 else "start")
    return problems.user_gradients(found, problem, e.layout, given.args[1].ndim)


# --- checking --------------------------------------------------------------------------------------------------------


def expected(given: Given, compute: Callable[[Problem], Gradients]) -> dict[str, list[np.ndarray]]:
    """Gradients of a call: sequence by sequence, but for those of a bias and of sinks, to which all sequences add."""
    each = [compute(p) for p in given.problems]
    parts = {name: [getattr(g, name) for g in each] for name in ("dq", "dk", "dv")}
    head = given.problems[0]
    if head.sinks is not None:
        parts["dsinks"] = [np.sum([g.dsinks for g in each], axis=0)]
    if head.bias is not None:
        a = given.built.call.options["bias"]
        whole = np.zeros((1,) * (4 - a.ndim) + a.shape, each[0].dbias.dtype)
        for n, g in enumerate(each):
            part = g.dbias[(None,) * (4 - g.dbias.ndim)]
            first = n if given.example.of.packed is not None and whole.shape[0] > 1 else 0
            whole[(slice(first, first + len(part)), *map(slice, part.shape[1:]))] += part
        parts["dbias"] = [whole.reshape(a.shape)]
    return parts


def parts(given: Given, name: str, gradient: np.ndarray) -> list[np.ndarray]:
    """A gradient as :func:`expected` has it; what belongs to no sequence must be 0."""
    case = given.built.call.case
    if name in ("dbias", "dsinks"):
        return [gradient]
    if case.page_size and name != "dq":
        return list(_from_pages(given, gradient, name))
    if case.packed is None:
        return [calls.from_user(gradient, case)]
    gradient = gradient if case.layout == "BSHD" else gradient.transpose(1, 0, 2)
    cu = calls.cumulative(case.packed.q if name == "dq" else case.packed.k)
    assert not gradient[cu[-1] :].any(), f"{name} of rows behind the last sequence must be 0"
    return [gradient[None, a:b] for a, b in zip(cu[:-1], cu[1:], strict=True)]


def _from_pages(given: Given, gradient: np.ndarray, name: str) -> Iterator[np.ndarray]:
    case = given.built.call.case
    pages = (gradient if case.layout == "BSHD" else gradient.swapaxes(1, 2)).copy()
    table, size, rows = np.asarray(given.built.call.options["page_table"]), case.page_size, np.arange(case.shape.sk)
    whole = np.zeros((case.shape.b, case.shape.sk, *pages.shape[2:]), pages.dtype)
    for b, n in enumerate(case.kv_lengths):
        place = table[b, rows[:n] // size], rows[:n] % size
        whole[b, :n] = pages[place]
        pages[place] = 0
    assert not pages.any(), f"{name} of slots that hold no key must be 0"
    if case.packed is None:
        yield whole
    else:
        yield from (whole[b : b + 1, :n] for b, n in enumerate(case.packed.k))


def check(given: Given, found: Gradients, delta_of_out: bool = False) -> float:
    """Compare with the oracle; the largest share that an error has of its bound, or infinity:

    With ``delta_of_out``, for kernels that take delta = rowsum(dO O) from O in 16 bits. Where many errors of it add up, as in a sum over
    keys that would else cancel, they leave the contract: then the gradients must be those of this delta, within bounds of a naive
    computation that rounds weights and gradients of scores as these kernels do. Those in float32 may also show that weights come from a
    log-sum-exp in units of log2.
    """
    head = given.problems[0]
    dtypes = {"dq": head.q.dtype, "dk": head.q.dtype, "dv": head.q.dtype, "dsinks": head.compute_dtype}
    if head.bias is not None:
        dtypes["dbias"] = head.bias.dtype
    want = expected(given, compare.exact_gradients)
    for name in ("dbias", "dsinks"):
        assert (getattr(found, name) is None) == (name not in want), name
    got = {name: parts(given, name, getattr(found, name)) for name in want}
    floor = _saturated(given.problems)
    bounds = {name: compare.error_bound(want[name], [], dtypes[name]) + floor for name in want}
    for runs in ([], [*compare.naive_runs(sum(a.size for a in want["dq"]))], compare.precise_runs(given.problems)):
        naive = [expected(given, lambda p, run=run: compare.naive_gradients(p, run)) for run in runs]
        for name, dtype in dtypes.items() if runs else ():
            if name in want:
                bounds[name] = compare.error_bound(want[name], [[a.astype(dtype) for a in run[name]] for run in naive], dtype) + floor
        try:
            return _compare(got, want, bounds)
        except AssertionError as error:
            wrong = error
    if not delta_of_out:
        raise wrong
    if head.bias is not None and head.bias.dtype == F32:
        shared = sum(p.heads_q * p.batch * p.seqlen_q * p.seqlen_k for p in given.problems) / max(1, want["dbias"][0].size)
        bounds["dbias"] += 2 * math.sqrt(shared) * max(map(_of_weights, given.problems))
    given = dataclasses.replace(given, problems=[with_delta_of_out(p) for p in given.problems])
    want = expected(given, compare.exact_gradients)
    naive = [
        expected(given, lambda p, run=run: compare.naive_gradients(p, run._replace(short=True))) for run in compare.naive_runs(1 << 20)
    ]
    for name in want:
        rounded = compare.error_bound(want[name], [[a.astype(dtypes[name]) for a in run[name]] for run in naive], dtypes[name])
        bounds[name] = max(bounds[name], rounded)
    _compare(got, want, bounds)
    return math.inf


def _largest(a: Any) -> float:
    return float(np.abs(a.array.astype(F64)[np.isfinite(a.array)]).max(initial=0.0))


def _saturated(of: list[Problem]) -> float:
    """What the oracle's rounding of 1 - tanh**2 makes of products that are 0 but for it."""
    p = of[0]
    if not p.softcap:
        return 0.0
    product = max(_largest(x.dout) * _largest(x.v) for x in of) * p.head_dim_v
    return float(np.finfo(F64).eps) * abs(float(p.scale)) * product * max(max(_largest(x.q), _largest(x.k)) for x in of)


def _of_weights(p: Problem) -> float:
    """Error of P (dP - delta) where the exponent of P is rounded twice, at the log-sum-exp in units of log2."""
    product = _largest(p.dout) * _largest(p.v) * math.sqrt(p.head_dim_v)
    return compare.eps(F32) * (1 + _largest(p.lse) / math.log(2)) * product


def with_delta_of_out(p: Problem) -> Problem:
    """The problem that has in exact arithmetic the delta which this one has with O as it was handed over: another dlse."""
    with np.errstate(all="ignore"):
        lost = reference.forward(p.replace(op="forward"))[0] - p.out.array.astype(F64)
        shift = (lost * p.dout.array.astype(F64)).sum(axis=-1).swapaxes(-1, -2)
    return p.replace(dlse=view(shift if p.dlse is None else p.dlse.array + shift))


def _compare(got: dict[str, list[np.ndarray]], want: dict[str, list[np.ndarray]], bounds: dict[str, float]) -> float:
    share = 0.0
    for name, exact in want.items():
        assert len(got[name]) == len(exact)
        for n, (a, b) in enumerate(zip(got[name], exact, strict=True)):
            compare.assert_close(a, b, bounds[name], f"{name} (part {n})")
            with np.errstate(all="ignore"):
                error = np.nan_to_num(np.abs(a.astype(F64) - b), nan=0.0, posinf=0.0).max(initial=0.0)
            share = max(share, float(error) / max(bounds[name], 1e-300))
    return share


def tester(target: str, folder: Path) -> Callable[[Backward], float]:
    """A function that examines one example on the target."""
    backend, _, kernel = target.partition("/")
    if backend == "emulator":
        from emulator.emulate import Emulator

        made, info = Emulator(folder), device.KNOWN["H200"]
        return lambda b: check(given := present(b), emulated(given, kernel or b.of.kernel, made, info), b.of.kind.itemsize == 2)
    return lambda b: examine(b, Target(backend, kernel or b.of.kernel))


def examine(b: Backward, target: Target) -> float:
    """Run an example and check everything."""
    if target.backend not in ("cuda", "numba-cuda"):
        b = dataclasses.replace(b, of=dataclasses.replace(b.of, on_device=""))
    given = present(b)
    found = run(given, target)
    error = check(given, found, target.backend == "cuda" and b.of.kind.itemsize == 2)
    if b.deterministic or b.of.twice:
        first = [None if (g := getattr(found, name)) is None else g.copy() for name in NAMES]
        found = Gradients(*first)
        again = run(given, target)
        fixed = b.deterministic or target.backend in ("cpu", "reference")
        for name in NAMES if fixed else ("dk", "dv"):
            if getattr(found, name) is not None:
                compare.assert_same_bits(getattr(found, name), getattr(again, name), f"{name} of a second run")
    return error


def may_decline(b: Backward, kernel: str, reason: str) -> bool:
    """As cases.py lists it."""
    return declines(b, Target("cuda", kernel), reason)


def declines(b: Backward, target: Target, reason: str) -> bool:
    """Whether cases.py lists it."""
    options = {**build(b.of).call.options, "deterministic": b.deterministic, "packed": b.of.packed}
    return any(words in reason for words in absent(target, fuzz.DTYPES[b.of.kind.dtype], options, gradients=True))


BACKWARD = fuzz_forward.Pass(
    Path(__file__), "{:.2f} of what is allowed", lambda kind, longest, _, hopper: backwards([kind], longest // 2, hopper), tester,
    may_decline, lambda number, count, info, target: some_kinds(number, count, target), None, (Backward, Example, Kind),
)

if __name__ == "__main__":
    sys.exit(fuzz_forward.main(BACKWARD))
