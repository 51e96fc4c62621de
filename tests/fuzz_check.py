"""Runs an example of fuzz.py on a kernel and holds it against the oracle."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import calls
import compare
import numpy as np
from case import F64
from cases import Target
from cuflash import arrays, reference, structs
from cuflash.problem import build_attention, build_varlen, with_outputs
from cuflash.types import INDICES, Problem

import devices
from fuzz import Example

GARBAGE = (np.nan, np.inf, -np.inf)


def lay(a: np.ndarray, how: str, unit: int) -> np.ndarray:
    """The same elements in other memory. Of the names in fuzz.ROWS, rows begin at multiples of ``unit`` elements; gaps are NaN."""
    leading = (slice(None, None, -1),) * (a.ndim - 1)
    if how == "padded":
        wide = np.full((*a.shape[:-1], a.shape[-1] + 3 * unit), np.nan, a.dtype)
        view = wide[..., unit : unit + a.shape[-1]]
    elif how == "offset":
        view = np.full(a.size + unit, np.nan, a.dtype)[unit:].reshape(a.shape)
    elif how == "every_other_row":
        view = np.full((*a.shape[:-2], 2 * a.shape[-2], a.shape[-1]), np.nan, a.dtype)[..., ::2, :]
    elif how == "rows_reversed":
        return np.ascontiguousarray(a[leading])[leading]
    elif how == "columns_reversed":
        return np.ascontiguousarray(a[..., ::-1])[..., ::-1]
    elif how == "axes_swapped":
        order = (*range(a.ndim - 1)[::-1], a.ndim - 1)
        return np.ascontiguousarray(a.transpose(order)).transpose(order)
    else:
        return calls.STRIDES[how](a)
    view[...] = a
    return view


@dataclass
class Built:
    """A call with its arrays, and what the oracle computes."""

    example: Example
    call: calls.Call
    problems: list[Problem]

    @property
    def max_seqlens(self) -> tuple[int, int]:
        """Rows and columns of a bias or mask that is not broadcast."""
        e, (q, k, *_) = self.example, self.call.args
        axis = 0 if e.layout == "BSHD" else 1
        unknown = e.longest is None and bool(e.on_device)
        rows, columns = (a.shape[axis] if unknown else n + (e.longest or 0) for a, n in ((q, e.sq), (k, e.sk)))
        return rows, len(self.call.options["page_table"][0]) * e.page_size if e.page_size else columns


# --- building --------------------------------------------------------------------------------------------------------


def build(e: Example) -> Built:
    """The arrays of an example; the same in every run."""
    case, dtype = e.case, np.dtype(compare.ml_dtypes.bfloat16) if e.kind.dtype == "bfloat16" else np.dtype(e.kind.dtype)
    p = calls.plain(case, dtype)
    if e.magnitude != 1:
        p = p._replace(**{name: (getattr(p, name).astype(F64) * e.magnitude).astype(dtype) for name in "qk"})
    if not e.expanded:
        _spoil(e, case, p)
    problems = [build_attention(q, k, v, **options) for q, k, v, options in calls.sequences(case, p)]
    shown = p._replace(k=p.k.copy(), v=p.v.copy(), options=dict(p.options))
    if e.hidden and not e.expanded:
        _hide(e, problems, shown)
    options = {**shown.options, "layout": e.layout}
    k, v = shown.k.copy(), shown.v.copy()
    for a in (k, v):
        a[calls.unused_keys(case)] = np.nan
    make = calls._present_packed if case.packed is not None else calls._present_attention
    call = make(case, shown, k, v, options, np.dtype(options.get("out_dtype", dtype)))
    built = Built(e, call, problems)
    call.args = (*_lay_out(e, call.args[:3]), *call.args[3:])
    call.out = lay(call.out, e.memory[3], e.kind.unit)
    if case.packed is not None and e.longest is not None:
        names = ("max_seqlen_q",) if e.page_size else ("max_seqlen_q", "max_seqlen_k")
        options.update(zip(names, built.max_seqlens, strict=False))
    for name, how in (("bias", e.bias_memory), ("mask", e.mask_memory)):
        if name in options:
            options[name] = _lay_rows(built, name, options[name], how)
    return built


def _spoil(e: Example, case: calls.Case, p: calls.Plain) -> None:
    """A NaN in a row of q, k or v that is there."""
    rng = np.random.default_rng(e.seed + 1)
    for name in e.spoiled:
        b = int(rng.integers(max(1, e.b)))
        rows = np.arange(e.sq if case.packed is None else case.packed.q[b]) if name == "q" else np.flatnonzero(~calls.unused_keys(case)[b])
        if len(rows):
            a = getattr(p, name)
            row = a[b, rng.choice(rows), rng.integers(a.shape[2])]
            row[rng.integers(len(row)) if name != "v" else slice(None)] = np.nan


def _hide(e: Example, problems: list[Problem], p: calls.Plain) -> None:
    """Garbage in keys and values that no row of their (batch, head) sees, and in biases where a mask hides the place."""
    rng = np.random.default_rng(e.seed + 2)
    seen = np.zeros(p.k.shape[:3], bool)
    hidden_bias = np.ones((e.b, p.q.shape[2], e.sq, e.sk), bool)
    for n, problem in enumerate(problems):
        for block in reference.blocks(problem):
            b = n if e.packed is not None else block.sequence.index
            seen[b, block.keys, block.head // problem.group_size] |= reference.visibility(problem, block).any(axis=0)
            hidden_bias[b, block.head, block.rows, block.keys] = ~reference.visibility(problem.replace(bias=None), block)
    for a in (p.k, p.v):
        garbage = rng.choice(GARBAGE, size=a.shape)
        a[...] = np.where(seen[..., None], a, garbage.astype(a.dtype))
    if e.kind.bias and p.options["bias"].shape == hidden_bias.shape:
        p.options["bias"] = np.where(hidden_bias, np.asarray(np.nan, p.options["bias"].dtype), p.options["bias"])


def _lay_out(e: Example, qkv: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """q, k and v in their memory, such that copies of them can be as wide as the kind says and no wider."""
    laid = list(qkv) if e.expanded else [lay(a, how, e.kind.unit) for a, how in zip(qkv, e.memory, strict=False)]
    for n, a in enumerate(laid):
        if structs.copy_bytes(tuple(arrays.view(x, "q") for x in laid)) > e.kind.load and a.size:
            laid[n] = lay(a, "offset", e.kind.unit)
    return laid


def _lay_rows(built: Built, name: str, a: np.ndarray, how: str) -> np.ndarray:
    """A bias or mask of all rows and columns that the call asks for; those of no sequence are NaN, or True."""
    e = built.example
    if e.packed is not None:
        filler = True if name == "mask" else np.nan
        axes = (e.bias_axes if name == "bias" else e.mask_axes).split()
        most = dict(zip(("Sq", "Sk"), built.max_seqlens, strict=True))
        sizes = tuple(n if n == 1 else most.get(axis, n) for n, axis in zip(a.shape, axes, strict=True))
        wide = np.full(sizes, filler, a.dtype)
        wide[tuple(slice(n) for n in a.shape)] = a
        a = wide
    if how == "broadcast":
        rows = built.max_seqlens[0] if e.packed is not None else e.sq
        return np.broadcast_to(a, (e.b, e.hkv * e.ratio, rows, a.shape[-1]))
    return a if a.ndim < 2 and how == "every_other_row" else lay(a, how, 1)


# --- running ---------------------------------------------------------------------------------------------------------


def run(built: Built, target: Target) -> tuple[np.ndarray, np.ndarray | None]:
    """Output and LSE of a kernel. Inputs must stay as they are, results must be where they were asked for."""
    e, call = built.example, built.call
    options: dict[str, Any] = {**call.options, "kernel": target.kernel, "backend": target.backend}
    call.out[...], call.lse[...] = np.nan, np.nan
    if e.give_out:
        options["out"] = call.out
    if e.lse == "given":
        options["lse"] = call.lse
    elif e.lse == "returned":
        options["return_lse"] = True
    function = call.function
    if e.on_device and target.backend in ("cuda", "numba-cuda"):
        function = with_device_indices(function, e.on_device)
    inputs = [(a, a.tobytes()) for a in call.inputs()]
    result = devices.call(target, function, call.args, options)
    out, lse = result if e.lse == "returned" else (result, call.lse if e.lse else None)
    assert not e.give_out or out is call.out
    for a, before in inputs:
        assert a.tobytes() == before, "an input was changed"
    return out, lse


def with_device_indices(function: Any, dtype: str, arrays: int = 3) -> Any:
    """The function with what follows so many arrays, and the options that are index arrays, on the device."""
    import cupy

    def there(x: Any) -> Any:
        return cupy.asarray(np.asarray(x, dtype))

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        moved = {name: there(options[name]) for name in INDICES if options.get(name) is not None}
        return function(*args[:arrays], *map(there, args[arrays:]), **{**options, **moved})

    return called


def emulated(built: Built) -> Problem:
    """The problem for the emulator: index arrays on the device are views, whose numbers only the kernel reads."""
    e, call = built.example, built.call
    call.out[...], call.lse[...] = np.nan, np.nan
    options = dict(call.options)
    if e.packed is not None and not e.page_size:
        options |= dict(zip(("max_seqlen_q", "max_seqlen_k"), built.max_seqlens, strict=True))
    make = build_varlen if e.packed is not None else build_attention
    problem = make(*call.args, **options)
    problem = with_outputs(problem, call.out, call.lse, True, e.layout, call.args[0].ndim)[0]
    return indices_there(problem, e)


def indices_there(problem: Problem, e: Example) -> Problem:
    """With views in the place of index arrays that the example has on the device."""
    if not e.on_device:
        return problem
    found = {name: np.asarray(x, e.on_device) for name in INDICES if (x := getattr(problem, name)) is not None}
    return problem.replace(**{name: arrays.view(x, name) for name, x in found.items()})


# --- checking --------------------------------------------------------------------------------------------------------


def parts(built: Built, out: np.ndarray, lse: np.ndarray | None) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """The results in canonical axis order, sequence by sequence; rows of no sequence are checked here."""
    case = built.call.case
    if case.packed is None:
        yield calls.from_user(out, case), None if lse is None else lse[(None,) * (4 - case.axes)]
        return
    out = out if case.layout == "BSHD" else out.transpose(1, 0, 2)
    cu = calls.cumulative(case.packed.q)
    assert not out[cu[-1] :].any(), "out of rows behind the last sequence must be 0"
    assert lse is None or (lse[:, cu[-1] :] == -np.inf).all(), "lse of rows behind the last sequence must be -inf"
    for a, b in zip(cu[:-1], cu[1:], strict=True):
        yield out[None, a:b], None if lse is None else lse[None, :, a:b]


def check(built: Built, out: np.ndarray, lse: np.ndarray | None) -> float:
    """Compare with the oracle; returns the output's largest error in units of max|ref| times eps of the coarser of q's and its dtype.

    The naive computation only widens the bounds of the contract: it runs where they are too narrow without it.
    """
    head = built.problems[0]
    got = list(parts(built, out, lse))
    exact = [reference.forward(p) for p in built.problems]
    wants = [o for o, _ in exact], [x for _, x in exact]
    bounds = [compare.error_bound(want, [], dtype) for want, dtype in zip(wants, (head.out_dtype, head.compute_dtype), strict=True)]
    for more_runs in (None, False, True):
        if more_runs is not None:
            want = (compare.expect_precisely if more_runs else compare.expect)(built.problems)
            wants, bounds = (want.out, want.lse), [want.out_bound, want.lse_bound]
        try:
            _compare(got, wants, bounds)
            break
        except AssertionError:
            if more_runs:
                raise
    with np.errstate(all="ignore"):
        errors = [np.nanmax(np.abs(o.astype(F64) - w), initial=0.0) for (o, _), w in zip(got, wants[0], strict=True)]
    largest = max((np.nanmax(np.abs(w), initial=0.0) for w in wants[0]), default=0.0)
    if not math.isfinite(max(errors, default=0.0)) or largest < 1e-30:  # which is less than some dtypes tell from 0
        return 0.0
    return float(max(errors) / (max(map(compare.eps, (head.out_dtype, head.q.dtype))) * largest))


def _compare(got: list, wants: tuple[list[np.ndarray], list[np.ndarray]], bounds: list[float]) -> None:
    for n, (out, lse) in enumerate(got):
        compare.assert_close(out, wants[0][n], bounds[0], f"out (part {n})")
        if lse is not None:
            compare.assert_close(lse, wants[1][n], bounds[1], f"lse (part {n})")


def examine(e: Example, target: Target) -> float:
    """Run an example and check everything; returns the error as :func:`check` does."""
    if target.backend not in ("cuda", "numba-cuda"):
        e = dataclasses.replace(e, on_device="")
    built = build(e)
    out, lse = run(built, target)
    error = check(built, out, lse)
    if e.twice:  # as a warm call, on other arrays
        first = out.copy(), None if lse is None else lse.copy()
        again = run(dataclasses.replace(built), target)
        compare.assert_same_bits(first[0], again[0], "out of a second run")
        if first[1] is not None:
            compare.assert_same_bits(first[1], again[1], "lse of a second run")
    if e.give_out:
        assert calls.gaps_untouched(built.call.out), "memory between the elements of out was written"
    return error

