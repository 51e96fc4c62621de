"""Exact merging of partial attention results: the softmax state as an algebra.

Attention over a set of keys is determined by two things per query row, the normalised output O and the log-sum-exp LSE
of the logits. Results over disjoint sets of keys merge exactly and in any order: each is weighted by its share
exp(LSE_n) / sum_m exp(LSE_m) of the normaliser. Split key/value caches, shared prefixes and rings of devices rest on it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import arrays, checks, edges, launch
from .backends import cuda_merge
from .types import LAYOUTS, ArrayView


def merge_states(outs: Any, lses: Any, *, layout: str = "BSHD", out: Any = None, lse: Any = None) -> tuple[Any, Any]:
    """Merge partial attention results over disjoint sets of keys into the result over all of them.

    Parameters
    ----------
    outs : sequence of N arrays, or one array stacked on axis 0
        Outputs, each normalised over its own keys: (B, S, H, D), (S, H, D) (packed sequences likewise) or (S, D); with
        ``layout="BHSD"`` (B, H, S, D) or (H, S, D). All of one floating dtype.
    lses : sequence of N arrays, or one array stacked on axis 0
        Natural log-sum-exp of the logits behind each output: (B, H, S), (H, S) or (S,), in either layout.
    layout : {"BSHD", "BHSD"}
        Axis order of ``outs``.
    out, lse : array, optional
        Buffers for the results, of their exact shape and dtype; either may share memory with an input.

    Returns
    -------
    out : array
        Shape and dtype of one element of ``outs``.
    lse : array
        Shape of one element of ``lses``; float32, or float64 if any of ``outs`` or ``lses`` is.

    Raises
    ------
    TypeError
        If an argument is not a floating NumPy or CuPy array, or dtypes of ``outs`` or array libraries are mixed.
    ValueError
        If there is nothing to merge, numbers of parts, shapes or ``layout`` do not fit, or arrays lie on several devices.

    Notes
    -----
    A part with LSE -inf saw no key: it contributes nothing, and its output may be uninitialised memory. If all parts of
    a row are empty, the row is 0 with LSE -inf. An LSE of +inf or NaN makes the row NaN in both results; libraries that
    write +inf for an empty row must be translated first. Attention sinks are to be counted once, after all merges.
    Arithmetic is float32, or float64 where any input is float64. On a GPU up to 16 parts are merged by one launch on CuPy's current stream,
    which waits for nothing and can be captured once the kernel is loaded; parts of mixed precision take several launches.

    The rule is that of online softmax [1]_, in the form FlashAttention uses between blocks of keys [2]_.

    References
    ----------
    .. [1] M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018, arXiv:1805.02867.
    .. [2] T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Ré, "FlashAttention: Fast and Memory-Efficient Exact Attention with
       IO-Awareness", 2022, arXiv:2205.14135.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import merge_states
    >>> outs = [np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)]
    >>> lses = [np.log(np.array([3.0], np.float32)), np.zeros(1, np.float32)]  # three keys, one key
    >>> float(merge_states(outs, lses)[0][0, 0])
    0.25
    """
    first = outs[0] if type(outs) in (list, tuple) and outs else outs
    if edges.of(first) is not None:
        given = {"outs": outs, "lses": lses, "layout": layout, "out": out, "lse": lse}
        return edges.call(merge_states, given, head="outs")
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}; allowed are 'BSHD', 'BHSD'")
    outs, lses = _parts(outs, "outs"), _parts(lses, "lses")
    xp = _array_module([*outs, *lses], "outs, lses")
    _check_parts(outs, lses, layout)
    compute = np.dtype(np.float64 if any(x.dtype.itemsize >= 8 for x in [*outs, *lses]) else np.float32)
    _check_buffer(out, "out", outs[0], outs[0].shape, outs[0].dtype)
    _check_buffer(lse, "lse", outs[0], lses[0].shape, compute)
    if xp is not np:
        results = _in_one_launch(outs, lses, layout, out, lse, compute)
        if results is not None:
            return results

    with np.errstate(all="ignore"):  # infinities and NaN are meant
        shares, merged_lse = _shares([x.astype(compute) for x in lses], xp)
        merged = xp.zeros(outs[0].shape, compute)
        for part, share, part_lse in zip(outs, shares, lses, strict=True):
            weighted = part.astype(compute) * _per_row(share, part.ndim, layout, xp)
            # A part without keys is left out by a choice, not by its share of 0: its output may hold NaN.
            merged += xp.where(_per_row(part_lse == -math.inf, part.ndim, layout, xp), 0, weighted)
        merged = merged.astype(outs[0].dtype, copy=False)
    # Every input has been read by now, so that a buffer may be one of them.
    return _deliver(merged, out), _deliver(merged_lse, lse)


def _in_one_launch(outs: list, lses: list, layout: str, out: Any, lse: Any, compute: np.dtype) -> tuple[Any, Any] | None:
    """The results by merge_states.cu; None for what it does not do."""
    views, lse_views = ([arrays.view(x, f"{name}[{n}]") for n, x in enumerate(parts)] for name, parts in (("outs", outs), ("lses", lses)))
    first = views[0]
    for n, a in enumerate([*views, *lse_views]):
        if a.device != first.device:
            name = f"outs[{n}]" if n < len(views) else f"lses[{n - len(views)}]"
            raise ValueError(f"{name}: in {arrays.where(a)}, but outs[0] is in {arrays.where(first)}; all arrays must be on one device")
    if any(x.dtype != compute for x in lses) or cuda_merge.decline(first.dtype, first.device, len(outs), compute) is not None:
        return None
    results = []
    wanted = (out, "out", first.shape, first.dtype, views), (lse, "lse", lses[0].shape, compute, lse_views)
    for buffer, name, shape, dtype, same in wanted:
        if buffer is None or not _in_place(arrays.view(buffer, name), same, [*views, *lse_views]):
            results.append(arrays.empty(shape, dtype, first))
        else:
            results.append(buffer)
    axes = {2: ("rc", "r"), 3: ("rhc", "hr"), 4: ("brhc", "bhr")}[len(first.shape)]
    if layout == "BHSD":
        axes = axes[0].replace("rh", "hr"), axes[1]
    with launch.place(first.device, None):
        cuda_merge.run(views, lse_views, arrays.view(results[0], "out"), arrays.view(results[1], "lse"), axes)
        return _deliver(results[0], None if results[0] is out else out), _deliver(results[1], None if results[1] is lse else lse)


def _in_place(buffer: ArrayView, same: list[ArrayView], inputs: list[ArrayView]) -> bool:
    """Whether a row may be written as soon as it has been read: the buffer is an input itself, or apart from all of them."""
    return all(
        not arrays.overlap(buffer, a) or (any(a is x for x in same) and (a.pointer, a.strides) == (buffer.pointer, buffer.strides))
        for a in inputs
    )


def _shares(lses: list, xp: Any) -> tuple[list, Any]:
    """The share of each part in the common normaliser, and the log of that normaliser.

    Without any key the shares are 0/0, but then every part is empty and left out of the sum. An LSE of +inf makes the
    normaliser, and with it the row, NaN: inf - inf.
    """
    peak = lses[0]
    for lse in lses[1:]:
        peak = xp.maximum(peak, lse)
    weights = [xp.where(lse == -math.inf, 0, xp.exp(lse - peak)) for lse in lses]
    total = sum(weights[1:], start=weights[0])
    return [weight / total for weight in weights], peak + xp.log(total)


def _per_row(row_values: Any, ndim: int, layout: str, xp: Any) -> Any:
    """Values in the order of an LSE, shaped to broadcast against an output."""
    if ndim > 2 and layout == "BSHD":
        row_values = xp.swapaxes(row_values, -1, -2)
    return row_values[..., None]


def _deliver(result: Any, buffer: Any) -> Any:
    if buffer is None:
        return result
    buffer[...] = result
    return buffer


def merge_softmax_stats(m1: Any, l1: Any, m2: Any, l2: Any) -> tuple[Any, Any]:
    """Merge two running softmax states: the maximum m of the logits and the sum l of exp(logit - m).

    Parameters
    ----------
    m1, l1, m2, l2 : float or array
        The two states; arrays broadcast against each other. The empty state is m = -inf, l = 0.

    Returns
    -------
    m, l : float or array
        The merged state: Python floats if all four are Python numbers, else arrays of at least float32.
        A maximum of +inf or NaN makes both NaN. The log-sum-exp of the state is m + log(l).

    Raises
    ------
    TypeError
        If an argument is neither a real number nor a NumPy or CuPy array of real numbers, or libraries are mixed.

    Notes
    -----
    Merging is associative and commutative, with the empty state as its neutral element [1]_.

    References
    ----------
    .. [1] M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018, arXiv:1805.02867.

    Examples
    --------
    >>> from cuflash.merge import merge_softmax_stats
    >>> m, l = merge_softmax_stats(2, 3, 5, 1)
    >>> m, round(l, 6)
    (5.0, 1.149361)
    """
    named = {"m1": m1, "l1": l1, "m2": m2, "l2": l2}
    for name, x in named.items():
        if edges.of(x) is not None:
            return edges.call(merge_softmax_stats, named, head=name)
    scalars = [isinstance(x, (int, float)) and not isinstance(x, np.generic) for x in named.values()]
    arrays = [x for x, scalar in zip(named.values(), scalars, strict=True) if not scalar]
    for name, x in named.items():
        _check_real(x, name)
    xp = _array_module(arrays, "m1, l1, m2, l2") if arrays else np
    dtype = _real_dtype([x.dtype for x in arrays])
    m1, l1, m2, l2 = (xp.asarray(x, dtype=dtype) for x in named.values())
    with np.errstate(all="ignore"):
        m = xp.maximum(m1, m2)
        m = xp.where(m == math.inf, math.nan, m)  # the sum is NaN with it, as it is scaled by exp(m1 - m)
        total = sum(xp.where(mi == -math.inf, 0, li * xp.exp(mi - m)) for mi, li in ((m1, l1), (m2, l2)))
    return (m[()], total[()]) if arrays else (float(m), float(total))


# --- arguments -----------------------------------------------------------------------------------------------------


def _array_module(arrays: list, what: str) -> Any:
    """The library all these arrays belong to, found where it is loaded already instead of importing it."""
    modules = {_module_of(x) for x in arrays}
    if len(modules) > 1:
        names = ", ".join(sorted(module.__name__ for module in modules))
        raise TypeError(f"{what}: arrays of different libraries ({names}); bring them to one first")
    return modules.pop()


def _module_of(x: Any) -> Any:
    """The array library of x, or None if it belongs to none."""
    if isinstance(x, np.ma.MaskedArray):  # its mask would be lost
        return None
    if isinstance(x, (np.ndarray, np.generic)):
        return np
    for base in type(x).__mro__:  # the base too, for subclasses defined elsewhere
        module = sys.modules.get(base.__module__.partition(".")[0])
        if isinstance(x, getattr(module, "ndarray", ())):
            return module
    return None


def _parts(value: Any, name: str) -> list:
    """The N parts of ``outs`` or ``lses`` as a list of floating arrays."""
    if _module_of(value) is None and not isinstance(value, Sequence):
        raise TypeError(f"{name}: got {type(value).__name__}; allowed are a sequence of arrays and one stacked array")
    if getattr(value, "ndim", 1) == 0:
        raise ValueError(f"{name}: got a 0-d array; allowed are a sequence of arrays and one stacked array")
    parts = list(value)
    if not parts:
        raise ValueError(f"{name}: empty; at least one part is needed")
    for n, part in enumerate(parts):
        if _module_of(part) is None:
            raise TypeError(f"{name}[{n}]: got {type(part).__name__}; allowed are NumPy and CuPy arrays")
        if not _is_floating(part.dtype):
            raise TypeError(f"{name}[{n}]: dtype {part.dtype}; it must be a floating dtype")
    return parts


def _is_floating(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))  # ml_dtypes are of kind "V"


def _check_parts(outs: list, lses: list, layout: str) -> None:
    if len(outs) != len(lses):
        raise ValueError(f"lses: {len(lses)} parts, but outs has {len(outs)}; there must be one for each")
    shape = outs[0].shape
    if not 2 <= len(shape) <= 4:
        raise ValueError(f"outs[0]: shape {shape}; it must have 2 axes, (S, D), or 3 or 4 with heads")
    rows = shape[:-1]
    if layout == "BSHD" and len(rows) > 1:
        rows = (*rows[:-2], rows[-1], rows[-2])
    for n, (part, lse) in enumerate(zip(outs, lses, strict=True)):
        if part.shape != shape:
            raise ValueError(f"outs[{n}]: shape {part.shape}; it must be that of outs[0], {shape}")
        if part.dtype != outs[0].dtype:
            raise TypeError(f"outs[{n}]: dtype {part.dtype}; it must be that of outs[0], {outs[0].dtype}")
        if lse.shape != rows:
            raise ValueError(f"lses[{n}]: shape {lse.shape}; it must be {rows} for outs of shape {shape} in layout {layout}")


def _check_buffer(buffer: Any, name: str, first: Any, shape: tuple, dtype: np.dtype) -> None:
    """A buffer must lie where ``first``, outs[0], does."""
    if buffer is None:
        return
    xp = _module_of(first)
    if _module_of(buffer) is not xp:
        raise TypeError(f"{name}: got {type(buffer).__name__}; it must be a {xp.__name__} array like the inputs")
    if buffer.dtype != dtype:
        raise TypeError(f"{name}: dtype {buffer.dtype}; it must be {np.dtype(dtype)}")
    if buffer.shape != shape:
        raise ValueError(f"{name}: shape {buffer.shape}; it must be {shape}")
    if xp is not np:
        checks.same_place(arrays.view(buffer, name), name, arrays.view(first, "outs[0]"), "outs[0]")


def _check_real(x: Any, name: str) -> None:
    if isinstance(x, (int, float)):
        return
    if _module_of(x) is None:
        raise TypeError(f"{name}: got {type(x).__name__}; allowed are real numbers and NumPy and CuPy arrays")
    if x.dtype.kind not in "iufb" and not _is_floating(x.dtype):
        raise TypeError(f"{name}: dtype {x.dtype}; it must hold real numbers")


def _real_dtype(dtypes: list) -> np.dtype:
    """float64 for float64 and integers wider than float32 holds exactly, and for plain numbers; else float32."""
    narrow = all(_is_floating(dtype) and dtype.itemsize <= 4 or dtype.itemsize <= 2 for dtype in dtypes)
    return np.dtype(np.float32 if dtypes and narrow else np.float64)
