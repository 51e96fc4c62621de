"""Tiled attention for the CPU, compiled by Numba: one program for every option, one specialisation per compute dtype.

The loop order is FlashAttention-2's. A task is a block of query rows; its key and value tiles pass by once. Each tile is
packed into contiguous scratch (which is where pages, strides and 16-bit dtypes end), then every panel of the block
(see cpu_simd) takes three steps with it: scores, online softmax, weighted sum. A panel touches only the keys that some
of its rows can see, and looks at single elements only in tiles that the mask cuts.

Scratch is addressed by int64 addresses (see cpu_memory). ``one`` is the number 1 in the compute dtype and carries the type;
``size`` is its bytes.
"""

from __future__ import annotations

import math

import numpy as np
from numba import from_dtype, njit, types

from . import cpu_simd
from .cpu_cache import cached, compiled_kernel
from .cpu_logits import apply_alibi, apply_bias, apply_mask, apply_range, lane_maxima
from .cpu_memory import compiled, get, inlined, put
from .cpu_panels import (
    describe_rows,
    key_address,
    keys_of_panels,
    panel_is_cut,
    panel_keys,
    panel_limits,
    query_of,
    rows_of,
)
from .cpu_params import MERGE, PARAMS, SEQUENCE, TASK
from .cpu_rows import F32, F64, read_row, scale_row, store_row
from .cpu_simd import (
    NARROW_LANES,
    UNROLL,
    distances,
    distances_narrow,
    scores,
    scores_narrow,
    softcap_step,
    softmax_step,
    softmax_step_narrow,
    weighted_sum,
    weighted_sum_narrow,
)

INF = math.inf
NARROW_ROWS = 3 * NARROW_LANES  # packed query rows of a sequence up to which narrow panels cost less than a wide one


def scratch_sizes(head_dim: int, head_dim_v: int, block_rows: int, tile_keys: int, itemsize: int) -> tuple[int, int]:
    """Elements of the number scratch (a multiple of 16) and of the int64 scratch of a thread, see ``attend_task``."""
    rows = cpu_simd.panel_rows(itemsize)
    panels = -(-block_rows // rows)
    columns = -(-head_dim_v // UNROLL) * UNROLL
    keys = tile_keys + UNROLL
    block = panels * rows * (head_dim + columns + 3)
    tile = keys * (head_dim + columns + 2 * rows)
    numbers = block + tile + 2 * rows + max(head_dim, head_dim_v, tile_keys)
    return -(-numbers // 16) * 16, panels * (5 * rows + 4)


@compiled
def pack_keys(one, size, p, s, task, pages, begin, end, kt):
    """K tile into kt[keys][D]. The last row is repeated up to whole micro-kernels: a repeated score moves no maximum."""
    depth = p.head_dim
    for n in range(end - begin + UNROLL):
        j = min(begin + n, end - 1)
        where = key_address(p, s, task, pages, p.k_address, p.k_b, p.k_s, p.k_h, j)
        read_row(one, kt + n * depth * size, where, p.k_d, depth, p.k_code)
        if p.k_scale_address != 0:
            where = key_address(p, s, task, pages, p.k_scale_address, p.k_scale_b, p.k_scale_s, p.k_scale_h, j)
            scale_row(one, kt + n * depth * size, depth, where)


@compiled
def lies_ready(size, p, address, stride_b, stride_s, stride_h, stride_d, code):
    """Whether the micro-kernels can read K or V where it lies: rows of aligned numbers of the compute dtype, without pages."""
    whole = (address | stride_b | stride_s | stride_h) % size == 0
    return whole and stride_d == size and code == (F32 if size == 4 else F64) and p.page_size == 0


@compiled
def all_finite(one, row, stride, rows, width):
    """Whether ``rows`` rows, ``stride`` bytes apart, hold neither NaN nor infinities."""
    strange = 0
    for n in range(rows):
        for d in range(width):
            x = get(one, row + n * stride, d)
            strange |= x - x != 0
    return strange == 0


@compiled
def pack_values(one, size, p, s, task, pages, begin, end, columns, vt):
    """V tile into vt[keys][columns]; says whether all of it is finite."""
    strange = 0
    width = p.head_dim_v
    for n in range(end - begin):
        where = key_address(p, s, task, pages, p.v_address, p.v_b, p.v_s, p.v_h, begin + n)
        row = vt + n * columns * size
        read_row(one, row, where, p.v_d, width, p.v_code)
        if p.v_scale_address != 0:
            where = key_address(p, s, task, pages, p.v_scale_address, p.v_scale_b, p.v_scale_s, p.v_scale_h, begin + n)
            scale_row(one, row, width, where)
        for d in range(width):
            x = get(one, row, d)
            strange |= x - x != 0
        for d in range(width, columns):
            put(one, row, d, 0)
    return strange == 0


@compiled
def pack_queries(one, size, p, s, task, rows, qt, row):
    """The block's query rows, transposed into panels qt[panel][D][rows]; lanes without a row hold 0."""
    depth = p.head_dim
    if task.rows % rows:
        last = task.rows // rows * rows
        for n in range(last * depth, (last + rows) * depth):
            put(one, qt, n, 0)
    for t in range(task.rows):
        r, head = query_of(task, p.group, t)
        where = p.q_address + task.batch * p.q_b + (s.q_begin + r) * p.q_s + head * p.q_h
        read_row(one, row, where, p.q_d, depth, p.q_code)
        lane = qt + (t // rows * depth * rows + t % rows) * size
        for d in range(depth):
            put(one, lane, d * rows, get(one, row, d))


@compiled
def panel_scores(one, size, p, narrow, kt, k_row, qt, st, keys, rows, weights, top):
    """S^T of a panel and some keys, in whole micro-kernels; raises top to the scores' lane maxima."""
    depth, scale = p.head_dim, type(one)(p.scale)
    for n in range(0, keys, UNROLL):
        k_at, s_at = kt + n * k_row * size, st + n * rows * size
        if p.distance:
            if narrow:
                distances_narrow(one, k_at, k_row, qt, s_at, depth, weights, top)
            else:
                distances(one, k_at, k_row, qt, s_at, depth, weights, top)
        elif narrow:
            scores_narrow(one, k_at, k_row, qt, s_at, depth, scale, top)
        else:
            scores(one, k_at, k_row, qt, s_at, depth, scale, top)


@compiled
def panel_output(one, size, narrow, vt, v_row, columns, st, ot, keys, rows, alpha):
    """O^T of a panel takes in the weights and values of some keys."""
    for c in range(0, columns, UNROLL):
        if narrow:
            weighted_sum_narrow(one, vt + c * size, v_row, st, ot + c * rows * size, keys, alpha)
        else:
            weighted_sum(one, vt + c * size, v_row, st, ot + c * rows * size, keys, alpha)


@compiled
def weighted_sum_exact(one, size, st, logits, keys, rows, vt, v_row, width, ot, alpha):
    """The weighted sum where V holds infinities or NaN, which must not reach the rows that cannot see them."""
    for c in range(width):
        for r in range(rows):
            total = get(one, ot, c * rows + r) * get(one, alpha, r)
            for n in range(keys):
                if get(one, logits, n * rows + r) != -INF:
                    total += get(one, st, n * rows + r) * get(one, vt, n * v_row + c)
            put(one, ot, c * rows + r, total)


@compiled
def write_row(one, p, s, task, t, top, total, values, sinks):
    """Finish packed row t: the sink joins the sum, the output is normalised, rounded and stored, and so is the LSE."""
    row, head = query_of(task, p.group, t)
    r = s.q_begin + row
    base = top if top != -INF else 0.0
    whole, share = total, 1.0  # share of the weight that the keys have
    if p.sinks and total == total:
        sink = sinks[head]
        base = max(base, sink) if top != -INF else sink if sink != -INF else 0.0
        shrink = math.exp(top - base)
        whole = total * shrink + math.exp(sink - base)
        share = total * shrink / whole if whole != 0 else 0.0
    for d in range(p.head_dim_v):
        if total == 0:
            put(one, values, d, 0)
        elif share == 1.0:  # one division, so that the mean of equal values is exactly that value
            put(one, values, d, get(one, values, d) / type(one)(total))
        else:  # in float64: a large sink leaves a share below the range of float32
            put(one, values, d, type(one)(np.float64(get(one, values, d)) / total * share))
    where = p.out_address + task.batch * p.out_b + r * p.out_s + head * p.out_h
    store_row(one, values, where, p.out_d, p.head_dim_v, p.out_code)
    if p.lse_address:
        put(one, values, 0, type(one)(-INF if whole == 0 else base + math.log(whole)))
        store_row(one, values, p.lse_address + task.batch * p.lse_b + head * p.lse_h + r * p.lse_s, 8, 1, p.lse_code)


@inlined
def write_block(one, size, p, s, task, rows, columns, running_max, running_sum, ot, row, sinks, partials):
    """Hand over the block: final rows, or the unnormalised state of a split as [max, sum, O...] per row."""
    width = p.head_dim_v
    for t in range(task.rows):
        top, total = get(one, running_max, t), get(one, running_sum, t)
        lane = ot + (t // rows * columns * rows + t % rows) * size
        for d in range(width):
            put(one, row, d, get(one, lane, d * rows))
        if task.slot < 0:
            write_row(one, p, s, task, t, np.float64(top), np.float64(total), row, sinks)
            continue
        state = partials + ((task.slot * p.block_rows + t) * (width + 2)) * size
        put(one, state, 0, top)
        put(one, state, 1, total)
        for d in range(width):
            put(one, state, 2 + d, get(one, row, d))


@inlined
def attend_task(one, size, task, p, s, pages, slopes, sinks, weights, work, iwork, partials):
    """All of one task: see the module's docstring."""
    kind = type(one)
    narrow = s.q_length * p.group <= NARROW_ROWS
    rows = NARROW_LANES if narrow else rows_of(one)
    depth, width = p.head_dim, p.head_dim_v
    columns = (width + UNROLL - 1) // UNROLL * UNROLL
    panels = (task.rows + rows - 1) // rows
    lanes = panels * rows
    keys_padded = p.tile_keys + UNROLL

    # Scratch, in the order that scratch_sizes counts.
    qt = work
    ot = qt + lanes * depth * size
    running_max = ot + lanes * columns * size
    running_sum = running_max + lanes * size
    slope = running_sum + lanes * size
    kt = slope + lanes * size
    vt = kt + keys_padded * depth * size
    st = vt + keys_padded * columns * size
    logits = st + keys_padded * rows * size
    top = logits + keys_padded * rows * size
    alpha = top + rows * size
    row = alpha + rows * size
    position = iwork
    low = position + 8 * lanes
    high = low + 8 * lanes
    bias = high + 8 * lanes
    mask = bias + 8 * lanes
    limits = mask + 8 * lanes

    pack_queries(one, size, p, s, task, rows, qt, row)
    describe_rows(one, p, s, task, slopes, lanes, slope, position, low, high, bias, mask)
    panel_limits(rows, panels, low, high, limits)
    for n in range(lanes * columns):
        put(one, ot, n, 0)
    for n in range(lanes):
        put(one, running_sum, n, 0)
        put(one, running_max, n, kind(-INF))
    first, last = keys_of_panels(limits, 0, panels)
    # A few rows use a tile once or twice, which does not pay for a copy.
    ready_k = narrow and lies_ready(size, p, p.k_address, p.k_b, p.k_s, p.k_h, p.k_d, p.k_code)
    ready_v = narrow and columns == width and lies_ready(size, p, p.v_address, p.v_b, p.v_s, p.v_h, p.v_d, p.v_code)
    plain = p.softcap == 0 and not p.bias_address and not p.mask_address and not p.alibi

    # Tiles begin at multiples of their size: a row's sums are grouped alike whatever rows share its block.
    for aligned in range(first // p.tile_keys * p.tile_keys, last, p.tile_keys):
        begin, end = max(aligned, first), min(aligned + p.tile_keys, last)
        k_tile, k_row, v_tile, v_row = kt, depth, vt, columns
        in_place = ready_k and end + UNROLL <= s.kv_length  # whole micro-kernels run past the last key of a tile
        if in_place:
            k_tile, k_row = key_address(p, s, task, pages, p.k_address, p.k_b, p.k_s, p.k_h, begin), p.k_s // size
        else:
            pack_keys(one, size, p, s, task, pages, begin, end, kt)
        if ready_v:
            v_tile, v_row = key_address(p, s, task, pages, p.v_address, p.v_b, p.v_s, p.v_h, begin), p.v_s // size
            finite = all_finite(one, v_tile, p.v_s, end - begin, width)
        else:
            finite = pack_values(one, size, p, s, task, pages, begin, end, columns, vt)
        for panel in range(panels):
            j, stop = panel_keys(limits, panel, begin, end)
            keys = stop - j
            if keys <= 0:
                continue
            t = panel * rows
            old_max = running_max + t * size
            for r in range(rows):
                put(one, top, r, get(one, old_max, r))
            k_at = k_tile + (j - begin) * k_row * size
            q_at = qt + t * depth * size
            panel_scores(one, size, p, narrow, k_at, k_row, q_at, st, keys, rows, weights, top)
            # Whole micro-kernels may run past the last key; but for the end of a packed tile those are keys, not repetitions.
            cut = panel_is_cut(limits, panel, j, stop)
            if cut or not plain or ((in_place or stop < end) and keys % UNROLL):
                if p.softcap != 0:
                    softcap_step(one, st, keys * rows, kind(p.softcap))
                if p.bias_address:
                    apply_bias(one, p, st, keys, rows, bias + 8 * t, j, row)
                if p.alibi:
                    apply_alibi(one, st, keys, rows, slope + t * size, position + 8 * t, j)
                if p.mask_address:
                    apply_mask(one, p, s, st, keys, rows, mask + 8 * t, j, row)
                if cut:
                    apply_range(one, st, keys, rows, low + 8 * t, high + 8 * t, j)
                lane_maxima(one, st, keys, rows, old_max, top)
            if not finite:
                for n in range(keys * rows):
                    put(one, logits, n, get(one, st, n))
            if narrow:
                softmax_step_narrow(one, st, keys, old_max, top, running_sum + t * size, alpha)
            else:
                softmax_step(one, st, keys, old_max, top, running_sum + t * size, alpha)
            v_at = v_tile + (j - begin) * v_row * size
            o_at = ot + panel * columns * rows * size
            if finite:
                panel_output(one, size, narrow, v_at, v_row, columns, st, o_at, keys, rows, alpha)
            else:
                weighted_sum_exact(one, size, st, logits, keys, rows, v_at, v_row, width, o_at, alpha)

    write_block(one, size, p, s, task, rows, columns, running_max, running_sum, ot, row, sinks, partials)


@inlined
def merge_task(one, size, task, p, s, sinks, row, partials):
    """Merge the partial states of a split block and finish its rows."""
    width = p.head_dim_v
    for t in range(task.rows):
        top = -INF
        for slot in range(task.slot, task.slot + task.slots):
            top = max(top, np.float64(get(one, partials + ((slot * p.block_rows + t) * (width + 2)) * size, 0)))
        base = top if top != -INF else 0.0
        total = one - one
        for d in range(width):
            put(one, row, d, 0)
        for slot in range(task.slot, task.slot + task.slots):
            state = partials + ((slot * p.block_rows + t) * (width + 2)) * size
            part = get(one, state, 1)
            if part == 0:  # a split that saw no key of this row
                continue
            # Sum and output go through the same operations, so that the mean of equal values stays that value.
            factor = type(one)(math.exp(np.float64(get(one, state, 0)) - base))
            total += factor * part
            for d in range(width):
                put(one, row, d, get(one, row, d) + factor * get(one, state, 2 + d))
        write_row(one, p, s, task, t, top, np.float64(total), row, sinks)


@cached
@njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)
def attend(one, tasks, begin, end, merges, params, sequences, pages, slopes, sinks, weights, work, iwork, partials):
    """Tasks ``begin <= n < end``, then all the merges. The last four are addresses."""
    size = 4 if type(one) is np.float32 else 8
    p = params[0]
    for n in range(begin, end):
        task = tasks[n]
        attend_task(one, size, task, p, sequences[task.batch], pages, slopes, sinks, weights, work, iwork, partials)
    for n in range(len(merges)):
        merge = merges[n]
        merge_task(one, size, merge, p, sequences[merge.batch], sinks, work, partials)


def signature(itemsize: int):
    """The one signature of ``attend`` for a compute dtype."""
    number = types.float32 if itemsize == 4 else types.float64

    def flat(element):
        return types.Array(element, 1, "C")

    records = [flat(from_dtype(record)) for record in (MERGE, PARAMS, SEQUENCE)]
    tables = [flat(types.int64), flat(types.float64), flat(types.float64)]
    return types.void(number, flat(from_dtype(TASK)), types.int64, types.int64, *records, *tables, *[types.int64] * 4)


def compiled_attend(itemsize: int):
    """``attend`` for a compute dtype."""
    return compiled_kernel(attend, signature, itemsize, f"float{8 * itemsize}")
