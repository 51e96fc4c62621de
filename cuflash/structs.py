"""Parameter structs of the CUDA kernels, as NumPy dtypes that mirror kernels_cu/include/params.cuh, and how a problem fills them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import tensor_map
from .types import HOST, INDICES, UNBOUNDED, ArrayView, Problem

LOG2E = 1.4426950408889634
NO_LIMIT = 1 << 30  # a window side that is unbounded; sequences are shorter
LONGEST = NO_LIMIT - 1024  # keys or rows of a sequence, so that sums of positions fit 32 bits

# Polynomials of least relative error that are tanh(x) / x in powers of x**2 for |x| up to a limit: 1.1e-7 and 3e-8.
TANH_NEAR = 0.2, (0.999999894791, -0.333285908991, 0.13015407552)
TANH_SERIES = 0.55, (0.999999967637, -0.333327950236, 0.133188769145, -0.0525893198278, 0.0163154437238)
LARGE = 2.0**20  # Fast32::LARGE of reals.cuh, in log2 units
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 1e-37  # a little above what float32 holds in full, as is its inverse below

SCALES = ("k_scale", "v_scale")
STRIDES = np.dtype((np.int64, 4))  # batch, row, head, column, in elements

PREFILL_PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in (
            "q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "kv_lengths", "kv_start", "alibi_slopes", "sinks", "bias",
            "mask", "mod_data", "page_table",
        )),
        *((f"{name}_stride", STRIDES) for name in ("q", "k", "v", "out", "lse", "bias", "mask")),
        *((name, np.int32) for name in (
            "batch", "heads_q", "heads_kv", "group", "head_dim", "head_dim_v", "q_rows", "k_rows", "m_tiles", "section",
            "window_left", "window_right", "upper_left", "out_vector", "page_size", "max_pages",
        )),
        *((name, np.float32) for name in ("scale", "softcap", "logit_scale")),
        *((name, np.int32) for name in (
            "mask_tail", "matrix_rows", "bias_columns", "mask_columns", "bias_vector", "mask_vector", "pages",
        )),
        ("page_magic", np.uint32), ("page_shift", np.int32), ("index_bits", np.int32), ("tile_rows", np.int32),
        *((name, np.float64) for name in ("scale64", "softcap64", "logit_scale64")),
        *((name, np.float32) for name in ("near_limit", "softcap_limit")),
        ("near_series", (np.float32, 3)), ("softcap_series", (np.float32, 5)), ("large_score", np.float32),
    ],
    align=True,
)

DECODE_PARAMS = np.dtype(  # of decode_params.cuh
    [
        ("prefill", PREFILL_PARAMS), *((name, np.uint64) for name in ("part_out", "part_state", "arrived")),
        *((name, np.int32) for name in (
            "rows", "row_blocks", "heads_at_once", "runs", "least", "unit_tiles", "most_units", "passes",
        )),
        ("k_scale", np.uint64), ("v_scale", np.uint64), ("k_scale_stride", STRIDES), ("v_scale_stride", STRIDES),
        ("k_factor", np.float32), ("v_factor", np.float32),
    ],
    align=True,
)

PART_PARAMS = np.dtype(  # of fp_work.cuh
    [
        ("prefill", PREFILL_PARAMS), *((name, np.uint64) for name in ("part_out", "part_state")),
        *((name, np.int32) for name in ("parts", "least", "queries", "unused")),
    ],
    align=True,
)


BACKWARD_PARAMS = np.dtype(  # of backward_params.cuh
    [
        ("prefill", PREFILL_PARAMS),
        *((name, np.uint64) for name in ("dout", "dlse", "dq", "dk", "dv")),
        *((name, np.uint64) for name in ("row_lse", "row_delta", "dq_sum", "dbias", "dsinks", "dq_turns")),
        *((f"{name}_stride", STRIDES) for name in ("dout", "dlse", "dq", "dk", "dv", "dbias")),
        ("places", np.int64), *((name, np.int32) for name in ("tile_rows", "n_tiles", "dq_columns")), ("scale", np.float32),
        ("dbias_shared", np.int32), ("turn_keys", np.int32),
    ],
    align=True,
)

MAPS = ("q_map", "k_map", "v_map")
_FIRST_MAP = -(-PREFILL_PARAMS.itemsize // tensor_map.ALIGNMENT) * tensor_map.ALIGNMENT
_BEHIND_MAPS = _FIRST_MAP + len(MAPS) * tensor_map.BYTES
FA3_PARAMS = np.dtype(  # of fa3_params.cuh
    {
        "names": ["prefill", *MAPS, "counter", "tiles"],
        "formats": [PREFILL_PARAMS, *[f"V{tensor_map.BYTES}"] * len(MAPS), np.uint64, np.int32],
        "offsets": [0, *range(_FIRST_MAP, _BEHIND_MAPS, tensor_map.BYTES), _BEHIND_MAPS, _BEHIND_MAPS + 8],
        "itemsize": _BEHIND_MAPS + tensor_map.ALIGNMENT,
    }
)

BACKWARD_MAPS = (*MAPS, "dout_map")
_FIRST_BACKWARD_MAP = -(-BACKWARD_PARAMS.itemsize // tensor_map.ALIGNMENT) * tensor_map.ALIGNMENT
BACKWARD_FA3_PARAMS = np.dtype(  # of backward_fa3.cu
    {
        "names": ["backward", *BACKWARD_MAPS],
        "formats": [BACKWARD_PARAMS, *[f"V{tensor_map.BYTES}"] * len(BACKWARD_MAPS)],
        "offsets": [0, *(_FIRST_BACKWARD_MAP + n * tensor_map.BYTES for n in range(len(BACKWARD_MAPS)))],
        "itemsize": _FIRST_BACKWARD_MAP + len(BACKWARD_MAPS) * tensor_map.BYTES,
    }
)

PARAMS = {
    "PrefillParams": PREFILL_PARAMS, "DecodeParams": DECODE_PARAMS, "PartParams": PART_PARAMS, "Fa3Params": FA3_PARAMS,
    "BackwardParams": BACKWARD_PARAMS, "BackwardFa3Params": BACKWARD_FA3_PARAMS,
}


def element_strides(a: ArrayView, axes: str) -> tuple[int, int, int, int]:
    """Strides in elements as (batch, row, head, column); ``axes`` names the array's axes by their initials, such as "brhc"."""
    item = a.dtype.itemsize
    by_axis = {axis: stride // item if n > 1 else 0 for axis, n, stride in zip(axes, a.shape, a.strides, strict=True)}
    return tuple(by_axis.get(axis, 0) for axis in "brhc")  # type: ignore[return-value]


def flat_tiles(problem: Problem, m: int) -> int:
    """Tiles of m rows that packed sequences have together at most, whatever their lengths."""
    return problem.q.shape[-3] // m + problem.batch


def index_addresses(problem: Problem) -> tuple[int, ...]:
    """Addresses of the `index_views`, 0 for None."""
    return tuple(0 if a is None else a.pointer for a in index_views(problem))


def index_views(problem: Problem) -> tuple[ArrayView | None, ...]:
    """The index arrays on the device in the order of the members of PREFILL_PARAMS, None for others and for members in between.

    The four of INDICES; up to the page table if that is on the device; () if nothing is.
    """
    if not problem.indices_on_device:
        return ()
    views = tuple(a if isinstance(a, ArrayView) else None for a in (getattr(problem, name) for name in INDICES))
    return (*views, *(None,) * 5, problem.page_table) if isinstance(problem.page_table, ArrayView) else views


def copy_bytes(arrays: tuple[ArrayView, ...]) -> int:
    """The widest copy, 16, 8, 4 or 2 bytes, that suits all rows of arrays of 16-bit numbers; 2 allows any strides.

    Columns must be contiguous, and addresses, strides between rows and the number of columns whole multiples of it.
    """
    bits = 0
    for a in arrays:
        shape, strides, item = a.shape, a.strides, a.dtype.itemsize
        columns = shape[-1]
        if 0 in shape:
            continue
        if columns > 1 and strides[-1] != item:
            return 2
        bits |= a.pointer | columns * item
        for n, stride in zip(shape[:-1], strides, strict=False):
            if n > 1:
                bits |= stride
    return next((width for width in (16, 8, 4) if bits % width == 0), 2)


def rows_in_eights(a: ArrayView) -> bool:
    """Whether 8 neighbouring elements of any row, from a multiple of 8 on, can be read by whole, aligned instructions."""
    aligned = min(16, 8 * a.dtype.itemsize)
    contiguous = a.shape[-1] == 1 or a.strides[-1] == a.dtype.itemsize
    leading = (stride for n, stride in zip(a.shape[:-1], a.strides[:-1], strict=True) if n > 1)
    return contiguous and all(number % aligned == 0 for number in (a.pointer, *leading))


def page_divisor(page_size: int) -> tuple[int, int]:
    """(magic, shift) with key // page_size == key * magic >> shift for all keys below 2**31, and magic below 2**32."""
    shift = 31 + (page_size - 1).bit_length()
    return -(-(1 << shift) // page_size), shift


def logit_unit(problem: Problem) -> float:
    """What a natural logit of 1 is in the units of the kernel: log2(e), or 1 if a bias is added as it stands in its array."""
    return LOG2E if problem.bias is None else 1.0


def out_of_range(problem: Problem) -> str | None:
    """Which option the kernels' parameters do not hold, in words, or None.

    They have logits in log2 units, in which the largest natural ones overflow, and a softcap as its ratio to the scale, which is infinite
    or loses digits where the two are too far apart: infinity times a score of 0 would be NaN.
    """
    numbers, scale = np.finfo(problem.compute_dtype), float(problem.scale)  # type: ignore[arg-type]
    most = float(numbers.max) * (1 - float(numbers.eps)) / logit_unit(problem)  # the product with the unit is rounded
    bounds = [("softcap", problem.softcap, most) if problem.softcap else ("scale", scale, most)]
    if problem.alibi_slopes is not None:
        distance = problem.seqlen_q + problem.seqlen_k  # or less
        bounds.append(("alibi_slopes, the largest penalty", distance * float(np.abs(problem.alibi_slopes).max(initial=0.0)), most))
    if problem.sinks is not None and problem.q.dtype.itemsize == 2:  # the others have float64 for them
        finite = problem.sinks[np.isfinite(problem.sinks)]
        bounds.append(("sinks, the largest", float(np.abs(finite).max(initial=0.0)), float(numbers.max) / 4))  # FAR of score.cuh
    for name, value, limit in bounds:
        if not abs(value) <= limit:
            return f"{name}: {value:.4g} is beyond {limit:.4g}, above which the kernel's {problem.compute_dtype} overflows"
    least = 8 * float(numbers.tiny)
    if problem.softcap and scale and not least <= abs(scale) / problem.softcap <= 1 / least:
        ratio = f"{scale:.4g} / {problem.softcap:.4g}"
        return f"scale / softcap: {ratio} is not within {least:.4g} and {1 / least:.4g}, as the kernel's {problem.compute_dtype} needs"
    return None


def capped_series(scale: float, softcap: float, limit: float, series: tuple[float, ...]) -> tuple[float, tuple[float, ...]]:
    """A series of tanh(x) / x for |x| <= limit turned into one of logits: (limit, coefficients) of scores, in log2 units.

    The limit is -1 where the series cannot serve: without a softcap, for scales that are not positive, where float32 does not hold the
    coefficients, and where logits are too large for one rounding of the exponent (Fast32::LARGE in reals.cuh).
    """
    if softcap and scale > 0 and limit * softcap * LOG2E < 2**20:
        ratio = scale / softcap
        with contextlib.suppress(OverflowError):
            numbers = [softcap * LOG2E * c * ratio ** (2 * n + 1) for n, c in enumerate(series)]
            if all(SMALLEST < abs(x) < 1 / SMALLEST for x in (*numbers, limit / ratio)):
                return limit / ratio, tuple(numbers)
    return -1.0, (0.0,) * len(series)


def small_arrays(problem: Problem) -> dict[str, np.ndarray]:
    """Lengths, page table, slopes and sinks as kernels take them, by the names of the parameters; those that are on the host."""
    found: dict[str, np.ndarray] = {}
    for name in INDICES:
        value = getattr(problem, name)
        if isinstance(value, np.ndarray):
            found[name] = np.ascontiguousarray(value)
    if problem.alibi_slopes is not None:
        found["alibi_slopes"] = np.ascontiguousarray(problem.alibi_slopes * logit_unit(problem), problem.compute_dtype)
    if problem.sinks is not None and problem.q.dtype.itemsize >= 4:  # prefill_fp merges them in float64 and natural units
        found["sinks"] = np.ascontiguousarray(problem.sinks, np.float64)
    elif problem.sinks is not None:
        found["sinks"] = np.ascontiguousarray(problem.sinks * LOG2E, np.float32)
    if isinstance(problem.page_table, np.ndarray):
        found["page_table"] = page_entries(problem.page_table)
    for name in SCALES:
        scale = getattr(problem, name)
        if scale is not None and scale.device != problem.q.device and one_scale(scale) is None and scale.array.size:  # those of heads
            found[name] = np.ascontiguousarray(scale.array[(0,) * (len(scale.shape) - 1)])
    return found


def one_scale(scale: ArrayView | None) -> float | None:
    """The scale of all keys and heads as a number, where the host knows it to be one; else None."""
    if scale is None:
        return 1.0
    return float(scale.array.flat[0]) if scale.device == HOST and not any(scale.strides) and scale.array.size else None


def scale_values(problem: Problem, pointers: Mapping[str, int]) -> dict[str, Any]:
    """Scales of keys and values as structs have them. ``pointers``: device addresses of those that came from the host."""
    values: dict[str, Any] = {}
    for name in SCALES:
        scale = getattr(problem, name)
        one = one_scale(scale)
        if one is None:
            values[name], values[f"{name}_stride"] = pointers.get(name, scale.pointer), element_strides(scale, "brh")
        else:
            values[f"{name[0]}_factor"] = one
    return values


def scale_views(problem: Problem) -> tuple[ArrayView | None, ...]:
    """k_scale and v_scale that are on the device, None for others; () if neither is."""
    views = tuple(a if a is not None and a.device != HOST else None for a in (problem.k_scale, problem.v_scale))
    return views if views != (None, None) else ()


def page_entries(table: np.ndarray) -> np.ndarray:
    """A page table as kernels take it, int32 (batch, max_pages); what does not fit is -1, which no kernel follows."""
    return np.ascontiguousarray(np.where((table >= 0) & (table < 1 << 31), table, -1), np.int32)


def pack_prefill(
    problem: Problem, m: int, section: int, factor_left: bool, pointers: dict[str, int], flat: bool = False,
) -> np.ndarray:
    """The struct of one launch.

    Parameters
    ----------
    problem : Problem
        With ``out``.
    m : int
        Query rows of a block.
    section : int
        (batch, head) pairs whose tiles are handed out together.
    factor_left : bool
        Whether the score kind leaves a factor to the exponential: the scale, or the softcap if there is one.
    pointers : dict
        Device addresses of the :func:`small_arrays`, and of index arrays that are on the device, under their names.
    flat : bool
        Whether the sequences share one row of tiles, see `flat_tiles`.
    """
    p = np.zeros(1, PREFILL_PARAMS)
    r = p[0]
    out = problem.out
    assert out is not None
    dense, packed = "brhc", "rhc"
    for name, a in (("q", problem.q), ("k", problem.k), ("v", problem.v), ("out", out)):
        r[name] = a.pointer
        r[f"{name}_stride"] = element_strides(a, dense if len(a.shape) == 4 else packed)
    if problem.lse is not None:
        r["lse"] = problem.lse.pointer
        r["lse_stride"] = element_strides(problem.lse, "bhr" if len(problem.lse.shape) == 3 else "hr")
    for name, pointer in pointers.items():
        r[name] = pointer
    left, right = (NO_LIMIT if side == UNBOUNDED else min(side, NO_LIMIT) for side in problem.window)
    scale = float(problem.scale)  # type: ignore[arg-type]
    unit = logit_unit(problem)
    values = {
        "batch": problem.batch, "heads_q": problem.heads_q, "heads_kv": problem.heads_kv, "group": problem.group_size,
        "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v,
        "q_rows": problem.q.shape[-3], "k_rows": problem.seqlen_k if problem.paged else problem.k.shape[-3],
        "m_tiles": flat_tiles(problem, m) if flat else -(-problem.seqlen_q // m), "tile_rows": m, "section": section,
        "window_left": left, "window_right": right, "upper_left": problem.align == "upper_left",
        "out_vector": copy_bytes((out,)) == 16,
        "scale": scale / problem.softcap if problem.softcap else scale * unit,
        "softcap": problem.softcap * unit, "logit_scale": (problem.softcap or scale) * LOG2E if factor_left else LOG2E / unit,
        "mask_tail": problem.mask_is_tail, "matrix_rows": problem.seqlen_q,
        "index_bits": sum(1 << n for n, name in enumerate(INDICES) if getattr(getattr(problem, name), "dtype", None) == np.int32),
    }
    for name, matrix in (("bias", problem.bias), ("mask", problem.mask)):
        if matrix is not None:
            r[name] = matrix.pointer
            r[f"{name}_stride"] = element_strides(matrix, "bhrc")
            values[f"{name}_columns"] = matrix.shape[-1]
            values[f"{name}_vector"] = rows_in_eights(matrix) and not (name == "mask" and problem.mask_is_tail)
    if problem.page_table is not None:
        values |= {"page_size": problem.page_size, "max_pages": problem.page_table.shape[1], "pages": problem.k.shape[0]}
        values["page_magic"], values["page_shift"] = page_divisor(problem.page_size)
    values |= {f"{name}64": values[name] for name in ("scale", "softcap", "logit_scale")}
    values["large_score"] = min(LARGE / max(values["logit_scale"], SMALLEST), LARGEST)
    for name, (limit, series) in (("near", TANH_NEAR), ("softcap", TANH_SERIES)):
        values[f"{name}_limit"], values[f"{name}_series"] = capped_series(scale, problem.softcap, limit, series)
    values["softcap_limit"] = max(values["near_limit"], values["softcap_limit"])  # float32 holds the shorter series rather
    with np.errstate(over="ignore"):  # numbers of float64 problems, which have them in full as well
        for name, value in values.items():
            r[name] = value
    return p


def places(problem: Problem, tile_rows: int) -> int:
    """Places of all rows of a head in a backward pass, see backward_rows.cuh."""
    if problem.varlen:
        return flat_tiles(problem, tile_rows) * tile_rows
    return problem.batch * -(-problem.seqlen_q // tile_rows) * tile_rows


def pack_backward(
    problem: Problem, gradients: Mapping[str, ArrayView], tile_rows: int, n_tiles: int, section: int, factor_left: bool,
    pointers: Mapping[str, int], work: Mapping[str, int], dq_columns: int, turn_keys: int = 0,
) -> np.ndarray:
    """The struct of the launches of a backward pass.

    Parameters
    ----------
    problem : Problem
        With ``out``, ``lse`` and ``dout``.
    gradients : mapping
        dq, dk and dv, which are written; with a bias, dbias, broadcast as the bias is, which is added to: float64 if elements are
        shared, else float32; with sinks, dsinks of float32.
    tile_rows, n_tiles, section, dq_columns : int
        Queries of a step, tiles of keys of the longest sequence, (batch, key head) pairs whose tiles are handed out together, columns of
        dq_sum.
    factor_left : bool
        As for `pack_prefill`.
    pointers, work : mapping
        Device addresses: as for `pack_prefill`, and of row_lse, row_delta and dq_sum; of dq_turns, if dQ is added up in a fixed order.
    turn_keys : int
        Keys of a tile, if there is an order.
    """
    p = np.zeros(1, BACKWARD_PARAMS)
    r = p[0]
    p["prefill"] = pack_prefill(problem, tile_rows, section, factor_left, dict(pointers))
    arrays = {"dout": problem.dout, **gradients}
    for name, a in arrays.items():
        r[name] = a.pointer
        if name != "dsinks":
            r[f"{name}_stride"] = element_strides(a, "bhrc" if name == "dbias" else "brhc" if len(a.shape) == 4 else "rhc")
    if problem.dlse is not None:
        r["dlse"] = problem.dlse.pointer
        r["dlse_stride"] = element_strides(problem.dlse, "bhr" if len(problem.dlse.shape) == 3 else "hr")
    for name, pointer in work.items():
        r[name] = pointer
    r["places"], r["tile_rows"], r["n_tiles"], r["dq_columns"] = places(problem, tile_rows), tile_rows, n_tiles, dq_columns
    r["turn_keys"], r["dbias_shared"] = turn_keys, problem.bias_is_shared
    r["scale"] = float(problem.scale)  # type: ignore[arg-type]
    return p
