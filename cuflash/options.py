"""Checks of the options of attention(): each raises in the user's words or returns the clean value."""

from __future__ import annotations

import inspect
import keyword
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import arrays, checks, host, indices
from .types import UNBOUNDED, ArrayView, Problem, Rope


def causal(value: Any) -> tuple[bool, str]:
    """causal=False, True, "bottom_right" or "upper_left"."""
    if isinstance(value, bool | np.bool_):
        return bool(value), "bottom_right"
    allowed = ("bottom_right", "upper_left")
    if not isinstance(value, str) or value not in allowed:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"causal: got {value!r}; allowed are False, True, {', '.join(map(repr, allowed))}")
    return True, value


def window(value: Any, is_causal: bool) -> tuple[int, int]:
    """window=(left, right), inclusive, -1 or None unbounded; causal caps the right side at 0."""
    if value is None:
        sides = [UNBOUNDED, UNBOUNDED]
    else:
        try:
            sides = list(value)
        except TypeError:
            raise TypeError(f"window: got {value!r}; it must be (left, right) or None") from None
        if len(sides) != 2:
            raise ValueError(f"window: got {value!r}; it must have two entries, (left, right)")
        sides = [UNBOUNDED if s is None else checks.integer(s, "window", low=UNBOUNDED) for s in sides]
        sides = [UNBOUNDED if s > 2**62 else s for s in sides]  # beyond any position, and i + s still fits an int64
    if is_causal:
        sides[1] = 0
    return sides[0], sides[1]


def in_range(value: Any, name: str, problem: Problem) -> Any:
    """``value``, whose numbers must be finite in the dtype that the problem computes in."""
    most = float(np.finfo(problem.compute_dtype).max)
    if np.abs(value).max(initial=0.0) > most:
        raise ValueError(f"{name}: got {value}; the largest number of {problem.compute_dtype} arithmetic is {most:.4g}")
    return value


def scale(value: Any, score: str, problem: Problem) -> float | np.ndarray:
    """The softmax scale: 1/sqrt(D) for dot products (Vaswani et al. 2017, eq. 1), 1 for squared distances, by default."""
    head_dim = problem.head_dim
    if value is None:
        return 1.0 if score == "sqdist" else 1.0 / math.sqrt(head_dim)
    if not isinstance(value, list | tuple) and np.ndim(value) == 0:
        return in_range(checks.real(value, "scale"), "scale", problem)
    vector = arrays.host_floats(value, "scale")
    if score != "sqdist":
        raise ValueError(f"scale: shape {vector.shape}; an array (D,) is allowed only with score='sqdist'")
    if vector.shape != (head_dim,):
        raise ValueError(f"scale: shape {vector.shape}; it must be a number or ({head_dim},), one factor an element of the head")
    if not np.isfinite(vector).all():
        raise ValueError(f"scale: got {vector}; every factor must be finite")
    return in_range(vector, "scale", problem)


def softcap(value: Any, problem: Problem) -> float:
    """softcap > 0, or None for no cap."""
    if value is None:
        return 0.0
    cap = checks.real(value, "softcap")
    numbers = np.finfo(problem.compute_dtype)
    if cap <= 0:
        raise ValueError(f"softcap: got {cap}; it must be above 0, or None for no cap")
    if cap < float(numbers.tiny):
        least = f"at least {float(numbers.tiny):.4g}, the smallest normal number of {numbers.dtype}"
        raise ValueError(f"softcap: got {cap}; it must be {least}, or None for no cap")
    return cap if cap <= float(numbers.max) else 0.0  # beyond every number there is, it caps none


def modifier(value: Any, name: str) -> str | Callable | None:
    """score_mod or mask_mod: a Python callable (host backends) or a CUDA expression (CUDA backends)."""
    if value is None or isinstance(value, str) or callable(value):
        return value
    raise TypeError(f"{name}: got {value!r}; it must be a callable on NumPy arrays, a CUDA expression as str, or None")


def mod_args(value: Any, score_mod: Any, mask_mod: Any) -> Mapping[str, Any]:
    """mod_args: names that score_mod and mask_mod may use."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"mod_args: got {type(value).__qualname__}; it must be a dict from name to number or array")
    if score_mod is None and mask_mod is None:
        raise ValueError(f"mod_args: got {', '.join(map(str, value)) or '{}'}, but no score_mod or mask_mod that could use it")
    for key in value:
        if not isinstance(key, str) or not key.isidentifier() or keyword.iskeyword(key):
            raise ValueError(f"mod_args: {key!r} is not a name; every key must be one")
        if key in ("s", "b", "h", "i", "j"):
            raise ValueError(f"mod_args: {key!r} is taken; every name but s, b, h, i and j is allowed")
    return dict(value)


def fits_arguments(function: Any, name: str, given: int, mod_args: Mapping[str, Any]) -> None:
    """score_mod or mask_mod must take its ``given`` positional arguments and the names in mod_args."""
    if not callable(function):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C that does not tell
        return
    try:
        signature.bind(*range(given), **mod_args)
    except TypeError as error:
        takes = "(s, b, h, i, j, **mod_args)" if given == 5 else "(b, h, i, j, **mod_args)"
        raise TypeError(f"{name}: it cannot be called with {takes}, mod_args {list(mod_args)}: {error}") from None


def alibi(value: Any, problem: Problem) -> np.ndarray | None:
    """ALiBi slopes (Hq,) or (B, Hq), as (B, Hq) float64."""
    if value is None:
        return None
    slopes = arrays.host_floats(value, "alibi_slopes")
    full = (problem.batch, problem.heads_q)
    if slopes.shape not in (full, full[1:]):
        raise ValueError(f"alibi_slopes: shape {slopes.shape}; it must be {full[1:]}, one slope a query head, or {full}")
    if not np.isfinite(slopes).all():
        raise ValueError(f"alibi_slopes: got {slopes}; every slope must be finite")
    return np.array(np.broadcast_to(in_range(slopes, "alibi_slopes", problem), full))


def sinks(value: Any, problem: Problem) -> np.ndarray | None:
    """Attention sinks (Hq,): one extra logit a head that has no value. -inf means none."""
    if value is None:
        return None
    logits = arrays.host_floats(value, "sinks")
    if logits.shape != (problem.heads_q,):
        raise ValueError(f"sinks: shape {logits.shape}; it must be ({problem.heads_q},), one logit a query head")
    if np.isnan(logits).any() or (logits == np.inf).any():
        raise ValueError(f"sinks: got {logits}; every logit must be finite or -inf")
    in_range(logits[np.isfinite(logits)], "sinks", problem)
    return logits


def dtype(value: Any, name: str, e4m3: bool = False) -> np.dtype:
    """A floating dtype that attention takes, by whatever name NumPy knows it; or float8_e4m3fn, if ``e4m3``."""
    try:
        found = np.dtype(value)
    except (TypeError, ValueError):
        allowed = ", ".join((*arrays.FLOATS, *((arrays.E4M3,) if e4m3 else ())))
        raise TypeError(f"{name}: got {value!r}, which is no dtype; allowed are {allowed}") from None
    if not (e4m3 and arrays.is_e4m3(found)):
        arrays.check_float_dtype(found, name)
    return found


def backend_takes(backend: str, q: ArrayView) -> None:
    """A backend must be able to reach the memory that the arrays are in; nothing is moved silently."""
    on_gpu = q.device != arrays.HOST
    if on_gpu and backend in ("cpu", "reference"):
        raise TypeError(f"backend: {backend!r} takes NumPy arrays, but q is in {arrays.where(q)}; convert by cupy.asnumpy(x)")
    simulated = backend == "numba-cuda" and host.simulates_cuda()
    if not on_gpu and backend in ("cuda", "numba-cuda") and not simulated:
        cure = "move the arrays there first (NumPy: cupy.asarray(x))"
        raise TypeError(f"backend: {backend!r} takes GPU arrays, but q is in host memory; {cure}")


def stream(value: Any, q: ArrayView) -> None:
    """Streams order the work on a GPU; host memory has none."""
    if value is not None and q.device == arrays.HOST:
        raise TypeError(f"stream: got {value!r}, but the arrays are in host memory, where there are no streams; allowed is None")


def bias(value: Any, problem: Problem) -> tuple[ArrayView, tuple[int, ...]]:
    """Additive bias, float32 or q's dtype, broadcast to (B, Hq, Sq, Sk)."""
    a = checks.array_like(value, "bias", problem.q)
    if a.dtype not in (np.dtype(np.float32), problem.q.dtype):
        allowed = "float32" if problem.q.dtype == np.float32 else f"float32 and {problem.q.dtype} (q's)"
        hint = "; a boolean array is a mask: pass mask=" if a.dtype == np.bool_ else ""
        raise TypeError(f"bias: dtype {a.dtype}; allowed are {allowed}{hint}")
    return broadcast_rows(a, "bias", problem, columns=problem.seqlen_k), a.shape


def mask(value: Any, problem: Problem, kv_lengths: Any) -> tuple[ArrayView, bool]:
    """Boolean mask, True = visible, broadcast to (B, Hq, Sq, Sk), or with Sq columns for the last Sq keys.

    Returns the view and whether it covers the last Sq keys only.
    """
    a = checks.array_like(value, "mask", problem.q)
    if a.dtype != np.bool_:
        hint = "an additive mask is a bias: pass bias=" if arrays.is_float(a.dtype) else "convert it by mask.astype(bool)"
        raise TypeError(f"mask: dtype {a.dtype}; it must be bool, True = visible ({hint})")
    columns = a.shape[-1] if a.shape else 1
    is_tail = columns == problem.seqlen_q and columns not in (1, problem.seqlen_k)
    if is_tail:
        if problem.varlen:
            allowed = f"with cu_seqlens it must have 1 or {problem.seqlen_k} (the longest key sequence)"
            raise ValueError(f"mask: shape {a.shape} has {columns} columns; {allowed}")
        found = indices.numbers(kv_lengths)  # on a device, what a sequence lacks is cut off from the mask's first columns
        known = None if found is None else found[0]
        shortest = problem.seqlen_k if known is None else int(known.min(initial=problem.seqlen_k))
        if columns > shortest:
            came = f"shape {a.shape} has {columns} columns, for the last {columns} keys"
            raise ValueError(f"mask: {came}, but a sequence has only {shortest}; it must have 1 or {problem.seqlen_k} columns")
    return broadcast_rows(a, "mask", problem, columns=columns if is_tail else problem.seqlen_k), is_tail


def kv_scale(value: Any, name: str, a: ArrayView, q: ArrayView, layout: str) -> ArrayView | None:
    """k_scale or v_scale of canonical keys or values ``a``: float32 in their shape without the head size, repeated by strides of 0.

    A number, (heads,), or (..., seqlen, heads) in the order of ``layout``: for each token and head.
    """
    if value is None:
        return None
    if not arrays.is_e4m3(a.dtype):
        came = f"got {arrays.type_name(value)} beside arrays of {a.dtype}"
        raise TypeError(f"{name}: {came}; scales belong to keys and values in {arrays.E4M3}")
    shape = a.shape[:-1]
    swap = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    users = shape if layout == "BSHD" else tuple(shape[n] for n in swap)
    heads = shape[-1:]
    axes = np.ndim(value)
    if axes >= 2:  # of each token and head: may be large, and is written to
        scale = checks.array_like(value, name, q)
        if scale.dtype != np.float32:
            raise TypeError(f"{name}: dtype {scale.dtype}; it must be float32")
        while len(scale.shape) < len(shape):
            scale = arrays.expand(scale, 0)
        if scale.shape != users:
            raise ValueError(f"{name}: shape {tuple(value.shape)}; it must be a number, {heads}, or {users} (layout {layout!r})")
        scale = scale if layout == "BSHD" else arrays.transpose(scale, swap)
        *batch, token, head = scale.strides
        if scale.shape[-2] == 1 and token == 0:  # by which scales of heads are told
            scale = arrays.strided(scale, scale.shape, (*batch, scale.dtype.itemsize, head))
        return scale
    if arrays.on_device(value):
        scale = checks.array_like(value, name, q)
        checks.dtype(scale, name, np.dtype(np.float32))
    else:
        numbers = arrays.host_floats(value, name)
        if not (np.isfinite(numbers) & (numbers > 0)).all():
            raise ValueError(f"{name}: got {numbers}; every scale must be finite and above 0")
        scale = arrays.wrap(numbers.astype(np.float32), "numpy")
    if scale.shape not in ((), heads):
        raise ValueError(f"{name}: shape {scale.shape}; it must be a number, {heads}, or {users} (layout {layout!r})")
    return arrays.broadcast(scale, shape)


def rope(value: Any, problem: Problem) -> Rope | None:
    """rope=(cos, sin, "interleaved" or "half"), tables of (positions, rot / 2) in float32 or q's dtype."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 3:
        came = f"{len(value)} entries" if isinstance(value, list | tuple) else arrays.type_name(value)
        raise TypeError(f"rope: got {came}; it must be (cos, sin, 'interleaved') or (cos, sin, 'half')")
    checks.choice(value[2], "rope[2]", ("interleaved", "half"))
    tables = [checks.array_like(x, f"rope[{n}]", problem.q) for n, x in enumerate(value[:2])]
    for n, a in enumerate(tables):
        if a.dtype not in (np.dtype(np.float32), problem.q.dtype):
            allowed = "float32" if problem.q.dtype == np.float32 else f"float32 and {problem.q.dtype} (q's)"
            raise TypeError(f"rope[{n}]: dtype {a.dtype}; allowed are {allowed}")
        if len(a.shape) != 2 or not 2 <= 2 * a.shape[1] <= problem.head_dim:
            allowed = f"(positions, rot / 2) with rot / 2 from 1 to {problem.head_dim // 2}, half of the head size"
            raise ValueError(f"rope[{n}]: shape {a.shape}; it must be {allowed}")
    cos, sin = tables
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(f"rope[1]: sin {sin.shape} {sin.dtype} differs from cos {cos.shape} {cos.dtype}; shapes and dtypes must be equal")
    return Rope(cos, sin, value[2] == "interleaved")


def broadcast_rows(a: ArrayView, name: str, problem: Problem, columns: int) -> ArrayView:
    """Broadcast a bias or mask to (B, Hq, Sq, columns)."""
    target = (problem.batch, problem.heads_q, problem.seqlen_q, columns)
    shape = (1,) * (4 - len(a.shape)) + a.shape
    if len(a.shape) > 4 or any(n not in (1, t) for n, t in zip(shape, target, strict=True)):
        what = "(B, Hq, max_seqlen_q, max_seqlen_k)" if problem.varlen else "(B, Hq, Sq, Sk)"
        raise ValueError(f"{name}: shape {a.shape}; it must broadcast to {target}, {what}")
    return arrays.broadcast(a, target)
