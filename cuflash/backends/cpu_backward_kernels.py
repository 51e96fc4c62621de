"""The backward pass of tiled attention for the CPU, compiled by Numba: recomputation, no score matrix, no atomics.

Three phases, each over tasks that may run in any order:

rows    packs Q and dO into transposed panels, and finds delta = dO . O - dLSE and the LSE of every row;
keys    goes over a range of keys, tile by tile. Every panel of query rows takes six steps with a tile: scores, weights
        P = exp(S - LSE), dP = V dO, dS = P * (dP - delta), the sums over the rows dV += P dO and dK += dS Q, and the sum
        over the keys dQ += dS K. dK and dV of a tile are finished when the last panel has passed; dQ gathers in the
        workspace, for each range in a slot of its own;
finish  adds up the slots of dQ in their order, and stores it.

As all sums have a fixed order, results are the same bit for bit in every run. Scratch and workspace are addressed by int64
addresses (see cpu_memory); the logits are made by the functions of the forward pass.
"""

from __future__ import annotations

import numpy as np
from numba import from_dtype, njit, types

from .cpu_backward_panels import (
    DK,
    DQ,
    DV,
    STRANGE_DO,
    STRANGE_Q,
    copy_panel,
    layout,
    pack_tiles,
    panel_dp,
    panel_logits,
    row_address,
)
from .cpu_backward_params import GRADIENTS, UNIT
from .cpu_backward_rows import row_task
from .cpu_backward_simd import (
    distance_key_update,
    distance_row_update,
    gradient_step,
    key_update,
)
from .cpu_cache import cached, compiled_kernel
from .cpu_logits import INF
from .cpu_memory import WHOLE, compiled, get, inlined, put
from .cpu_panels import NOWHERE, key_address, panel_keys, query_of, rows_of
from .cpu_params import PARAMS, SEQUENCE, TASK
from .cpu_rows import read_row, store_row
from .cpu_simd import UNROLL, weighted_sum

ROWS, KEYS, FINISH = 0, 1, 2  # phases
BLOCK_ROWS = 256  # of a task of the first and last phase
WIDE = 1.0  # carries the type of float64 sums


def scratch_sizes(panel: int, columns: int, columns_v: int, tile_keys: int) -> int:
    """Elements of the number scratch of a thread: what ``key_task`` lays out, or ``row_task`` and ``refine_rows``, if more."""
    keys, row = tile_keys + UNROLL, max(columns, columns_v, tile_keys)
    of_keys = 2 * keys * (columns + columns_v) + 4 * keys * panel + panel * (columns + columns_v) + 2 * panel + row
    of_rows = max(BLOCK_ROWS * columns_v, keys * (columns + columns_v) + 3 * keys * panel + panel + 5 * BLOCK_ROWS) + row
    return max(of_keys, of_rows)


@compiled
def exact_key_update(one, size, a, logits, keys, x, columns, depth, out, k, distance):
    """The sum over rows where x or K holds NaN or infinities, which must reach only those keys that a row sees."""
    rows = rows_of(one)
    for n in range(keys):
        for r in range(rows):
            if get(one, logits, n * rows + r) != -INF:
                factor = get(one, a, n * rows + r)
                for d in range(depth):
                    value = get(one, x, r * columns + d)
                    if distance:
                        value -= get(one, k, n * columns + d)
                    put(one, out, n * columns + d, get(one, out, n * columns + d) + factor * value)


@compiled
def exact_row_update(one, ds, logits, keys, kt, columns, depth, qt, distance, dqt):
    """The sum over keys where K or Q holds NaN or infinities."""
    rows = rows_of(one)
    for d in range(depth):
        for r in range(rows):
            total = one - one
            for n in range(keys):
                if get(one, logits, n * rows + r) != -INF:
                    value = get(one, kt, n * columns + d)
                    if distance:
                        value = get(one, qt, d * rows + r) - value
                    total += get(one, ds, n * rows + r) * value
            put(one, dqt, d * rows + r, get(one, dqt, d * rows + r) + total)


@compiled
def apply_slope(one, st, slope, count):
    """The slope of the softcap where a key is not seen is 0, whatever it is."""
    for n in range(count):
        if get(one, st, n) == -INF:
            put(one, slope, n, 0)


@compiled
def add_bias_gradient(one, size, p, g, task, dst, keys, rows, first, j):
    """Add dS^T of a panel to dbias; axes along which the bias was broadcast have stride 0 there.

    Over all keys dS adds up to 0, so a sum along the keys is what the roundings leave. float32 is summed in float64; for
    float64 what each addition loses (Knuth's TwoSum) gathers beside the sum.
    """
    for r in range(min(rows, task.rows - first)):
        row, head = query_of(task, p.group, first + r)
        where = g.dbias_address + task.batch * g.dbias_b + head * g.dbias_h + row * g.dbias_s + j * g.dbias_c
        if g.dbias_lost:
            for n in range(keys):
                at = where + n * g.dbias_c
                old, term = get(WIDE, at, 0), np.float64(get(one, dst, n * rows + r))
                new = old + term
                added = new - old
                put(WIDE, at, 0, new)
                put(WIDE, at + g.dbias_lost, 0, get(WIDE, at + g.dbias_lost, 0) + ((old - (new - added)) + (term - added)))
        elif g.dbias_wide:
            for n in range(keys):
                at = where + n * g.dbias_c
                put(WIDE, at, 0, get(WIDE, at, 0) + np.float64(get(one, dst, n * rows + r)))
        else:
            for n in range(keys):
                put(one, where + n * g.dbias_c, 0, get(one, dst, n * rows + r))


@compiled
def store_tiles(one, size, p, g, s, task, pages, begin, end, columns, columns_v, dkt, dvt, weights, row):
    """Finish dK and dV of a tile: dK times the scale or the weights of the distance; rounded, and stored or added."""
    for which in range(DK, DV + 1):
        base, stride_b, stride_s, stride_h, stride_d, code = layout(p, g, which)
        tile, depth, padded = (dkt, p.head_dim, columns) if which == DK else (dvt, p.head_dim_v, columns_v)
        for n in range(end - begin):
            source = tile + n * padded * size
            if which == DK:
                for d in range(depth):
                    factor = 2 * get(one, weights, d) if p.distance else type(one)(p.scale)
                    put(one, source, d, get(one, source, d) * factor)
            where = key_address(p, s, task, pages, base, stride_b, stride_s, stride_h, begin + n)
            if p.page_size > 0:  # pages may be shared
                read_row(one, row, where, stride_d, depth, code)
                for d in range(depth):
                    put(one, source, d, get(one, source, d) + get(one, row, d))
            store_row(one, source, where, stride_d, depth, code)


@inlined
def key_task(one, size, p, g, s, task, unit, pages, weights, work, columns, columns_v):
    """The second phase for a range of keys."""
    rows, depth, width = rows_of(one), p.head_dim, p.head_dim_v
    panels = unit.lanes // rows
    keys_padded = p.tile_keys + UNROLL
    # Scratch, in the order that scratch_sizes counts.
    kt = work
    vt = kt + keys_padded * columns * size
    dkt = vt + keys_padded * columns_v * size
    dvt = dkt + keys_padded * columns * size
    st = dvt + keys_padded * columns_v * size
    dst = st + keys_padded * rows * size
    slope = dst + keys_padded * rows * size
    logits = slope + keys_padded * rows * size
    q_rows = logits + keys_padded * rows * size
    do_rows = q_rows + rows * columns * size
    top = do_rows + rows * columns_v * size
    ones = top + rows * size
    row = ones + rows * size
    for r in range(rows):
        put(one, ones, r, 1)
    dqt = g.dqt_at + (unit.dq_lane + task.slot * unit.lanes) * columns * size
    for n in range(unit.lanes * columns):
        put(one, dqt, n, 0)

    first_panel = 0
    for aligned in range(task.k_begin // p.tile_keys * p.tile_keys, task.k_end, p.tile_keys):
        begin, end = max(aligned, task.k_begin), min(aligned + p.tile_keys, task.k_end)
        k_strange = not pack_tiles(one, size, p, g, s, task, pages, begin, end, columns, columns_v, kt, vt)
        for n in range((end - begin + UNROLL) * columns):
            put(one, dkt, n, 0)
        for n in range((end - begin + UNROLL) * columns_v):
            put(one, dvt, n, 0)
        skipping = True
        for panel in range(first_panel, panels):
            lane = unit.lane + panel * rows
            low = get(WHOLE, g.limits_at, 4 * (lane // rows))
            j, stop = panel_keys(g.limits_at, lane // rows, begin, end)
            keys = stop - j
            # What a panel sees moves on with its rows, unless it sees nothing at all.
            if low >= end and low != NOWHERE:
                break
            if keys <= 0:
                if skipping:
                    first_panel = panel + 1
                continue
            skipping = False
            k_at, v_at = kt + (j - begin) * columns * size, vt + (j - begin) * columns_v * size
            dk_at, dv_at = dkt + (j - begin) * columns * size, dvt + (j - begin) * columns_v * size
            q_at, dq_at = g.qt_at + lane * depth * size, dqt + panel * rows * columns * size
            strange = get(WHOLE, g.strange_at, lane // rows)
            exact_v = strange & STRANGE_DO != 0
            exact_k = strange & STRANGE_Q != 0 or (p.distance != 0 and k_strange)
            exact_q = k_strange or (p.distance != 0 and strange & STRANGE_Q != 0)
            panel_logits(one, size, p, g, s, k_at, columns, lane, j, keys, st, slope, weights, top, row)
            panel_dp(one, size, p, g, v_at, columns_v, lane, keys, dst)
            if exact_v or exact_k or exact_q:
                for n in range(keys * rows):
                    put(one, logits, n, get(one, st, n))
            if p.softcap != 0:
                apply_slope(one, st, slope, keys * rows)
            gradient_step(one, st, dst, keys, g.lse_at + lane * size, g.factor_at + lane * size, g.delta_at + lane * size)
            if g.dbias_address:
                add_bias_gradient(one, size, p, g, task, dst, keys, rows, panel * rows, j)
            if p.softcap != 0:
                for n in range(keys * rows):
                    put(one, dst, n, get(one, dst, n) * get(one, slope, n))
            whole = (keys + UNROLL - 1) // UNROLL * UNROLL
            for n in range(keys * rows, whole * rows):
                put(one, st, n, 0)
                put(one, dst, n, 0)

            copy_panel(one, size, p, g, s, task, panel * rows, columns, columns_v, q_rows, do_rows)
            if exact_v:
                exact_key_update(one, size, st, logits, keys, do_rows, columns_v, width, dv_at, v_at, 0)
            else:
                for n in range(0, keys, UNROLL):
                    for d in range(0, width, rows):
                        key_update(
                            one, st + n * rows * size, rows, do_rows + d * size, columns_v, dv_at + (n * columns_v + d) * size, columns_v,
                            0, 0, rows,
                        )
            if exact_k:
                exact_key_update(one, size, dst, logits, keys, q_rows, columns, depth, dk_at, k_at, p.distance)
            else:
                for n in range(0, keys, UNROLL):
                    for d in range(0, depth, rows):
                        a, x, c = dst + n * rows * size, q_rows + d * size, dk_at + (n * columns + d) * size
                        if p.distance:
                            distance_key_update(one, a, rows, x, columns, c, columns, k_at + (n * columns + d) * size, columns, rows)
                        else:
                            key_update(one, a, rows, x, columns, c, columns, 0, 0, rows)
            if exact_q:
                exact_row_update(one, dst, logits, keys, k_at, columns, depth, q_at, p.distance, dq_at)
            else:
                for d in range(0, depth, UNROLL):
                    if p.distance:
                        distance_row_update(one, k_at + d * size, columns, dst, dq_at + d * rows * size, keys, q_at + d * rows * size)
                    else:
                        weighted_sum(one, k_at + d * size, columns, dst, dq_at + d * rows * size, keys, ones)

        store_tiles(one, size, p, g, s, task, pages, begin, end, columns, columns_v, dkt, dvt, weights, row)


@inlined
def finish_task(one, size, p, g, s, task, unit, weights, row, columns):
    """The last phase for a block of rows."""
    kind = type(one)
    rows = rows_of(one)
    for t in range(task.rows):
        packed = task.first + t
        at = g.dqt_at + (unit.dq_lane * columns + packed // rows * rows * columns + packed % rows) * size
        for d in range(p.head_dim):
            put(one, row, d, 0)
        for slot in range(unit.slots):
            for d in range(p.head_dim):
                put(one, row, d, get(one, row, d) + get(one, at, slot * unit.lanes * columns + d * rows))
        for d in range(p.head_dim):
            factor = kind(-2) * get(one, weights, d) if p.distance else kind(p.scale)
            put(one, row, d, get(one, row, d) * factor)
        base, stride_b, stride_s, stride_h, stride_d, code = layout(p, g, DQ)
        store_row(one, row, row_address(s, task, p.group, t, base, stride_b, stride_s, stride_h), stride_d, p.head_dim, code)


@cached
@njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)
def differentiate(one, phase, tasks, begin, end, params, gradients, units, sequences, pages, slopes, sinks, weights, work):
    """Tasks ``begin <= n < end`` of a phase. The last two are addresses."""
    size = 4 if type(one) is np.float32 else 8
    p, g = params[0], gradients[0]
    least = max(rows_of(one), UNROLL)
    columns = (p.head_dim + least - 1) // least * least
    columns_v = (p.head_dim_v + least - 1) // least * least
    for n in range(begin, end):
        task = tasks[n]
        s = sequences[task.batch]
        unit = units[task.batch * (p.heads_q // p.group) + task.kv_head]
        if phase == ROWS:
            row_task(one, size, p, g, s, task, unit, pages, slopes, sinks, weights, work, columns, columns_v)
        elif phase == KEYS:
            key_task(one, size, p, g, s, task, unit, pages, weights, work, columns, columns_v)
        else:
            finish_task(one, size, p, g, s, task, unit, weights, work, columns)


def signature(itemsize: int):
    """The one signature of ``differentiate`` for a compute dtype."""
    number = types.float32 if itemsize == 4 else types.float64

    def flat(element):
        return types.Array(element, 1, "C")

    records = [flat(from_dtype(record)) for record in (PARAMS, GRADIENTS, UNIT, SEQUENCE)]
    tables = [flat(types.int64), flat(types.float64), flat(types.float64)]
    return types.void(number, types.int64, flat(from_dtype(TASK)), types.int64, types.int64, *records, *tables, types.int64, types.int64)


def compiled_differentiate(itemsize: int):
    """``differentiate`` for a compute dtype."""
    return compiled_kernel(differentiate, signature, itemsize, f"the gradients of float{8 * itemsize}", seconds=10)
