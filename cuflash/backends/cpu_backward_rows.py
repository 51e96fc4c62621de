"""The first phase of the compiled backward pass: packed panels of Q and dO, and the statistics of every row."""

from __future__ import annotations

import math

import numpy as np

from .cpu_backward_panels import (
    DOUT,
    OUT,
    STRANGE_DO,
    STRANGE_Q,
    Q,
    layout,
    pack_tiles,
    panel_dp,
    panel_logits,
    row_address,
)
from .cpu_backward_simd import row_products, statistics_step
from .cpu_logits import INF, lane_maxima
from .cpu_memory import WHOLE, compiled, get, inlined, load_f32, load_f64, put
from .cpu_panels import describe_rows, keys_of_panels, panel_keys, panel_limits, query_of, rows_of
from .cpu_rows import F32, read_row
from .cpu_simd import UNROLL

REFINE_LSE, REFINE_BOTH = 1, 2  # what is wanted of a row: maximum and normaliser, or delta, too


@compiled
def pack_panels(one, size, p, g, s, task, lane, row, ot):
    """The rows of Q, O and dO, transposed into panels [panel][depth][rows]; lanes without a row hold 0.

    Q and dO go to the workspace, O to ``ot``. Notes which panels of Q and dO hold NaN or infinities.
    """
    rows = rows_of(one)
    panels = (task.rows + rows - 1) // rows
    strange = g.strange_at + 8 * (lane // rows)
    for panel in range(panels):
        put(WHOLE, strange, panel, 0)
    for n in range(3):
        which = Q if n == 0 else OUT if n == 1 else DOUT
        depth = p.head_dim if which == Q else p.head_dim_v
        bit = STRANGE_Q if which == Q else STRANGE_DO if which == DOUT else 0
        target = g.qt_at + lane * depth * size if which == Q else g.dot_at + lane * depth * size if which == DOUT else ot
        base, stride_b, stride_s, stride_h, stride_d, code = layout(p, g, which)
        if task.rows % rows:
            for at in range((panels - 1) * rows * depth, panels * rows * depth):
                put(one, target, at, 0)
        for t in range(task.rows):
            read_row(one, row, row_address(s, task, p.group, t, base, stride_b, stride_s, stride_h), stride_d, depth, code)
            at = target + (t // rows * depth * rows + t % rows) * size
            wrong = 0
            for d in range(depth):
                x = get(one, row, d)
                wrong |= x - x != 0
                put(one, at, d * rows, x)
            if wrong:
                put(WHOLE, strange, t // rows, get(WHOLE, strange, t // rows) | bit)


@compiled
def read_one(address, code):
    """A number of an array in the compute dtype."""
    return np.float64(load_f32(address, 0)) if code == F32 else load_f64(address, 0)


@compiled
def row_statistics(one, size, p, g, s, task, unit, lane, ot):
    """LSE and delta of every row of a task; marks those for which ``refine_rows`` must do better, and says if there are any.

    ``ot`` is O, transposed into panels like dO.
    """
    rows, width = rows_of(one), p.head_dim_v
    for t in range(0, task.rows, rows):
        row_products(one, ot + t * width * size, g.dot_at + (lane + t) * width * size, width, g.delta_at + (lane + t) * size)
    found = 0
    for t in range(task.rows):
        r, head = query_of(task, p.group, t)
        where = task.batch * p.lse_b + head * p.lse_h + (s.q_begin + r) * p.lse_s
        lse = read_one(p.lse_address + where, p.lse_code)
        delta = np.float64(get(one, g.delta_at, lane + t))
        few = get(WHOLE, g.last_at, lane + t) - get(WHOLE, g.first_at, lane + t) <= g.few_keys
        # A row without keys may have any dO. With a sink its LSE is finite, and only its keys can tell.
        refine = 0
        if lse == -INF:
            delta = 0.0
        elif g.rounded != 0 or few or unit.rows <= g.few_rows or delta - delta != 0:
            refine = REFINE_BOTH
        else:
            delta -= read_dlse(g, s, task, r, head)
            refine = REFINE_LSE if abs(lse) >= g.large_lse else 0
        put(one, g.lse_at, lane + t, type(one)(lse))
        put(one, g.factor_at, lane + t, 1)
        put(one, g.delta_at, lane + t, type(one)(delta))
        put(WHOLE, g.refine_at, lane + t, refine)
        found |= refine
    return found != 0


@compiled
def read_dlse(g, s, task, r, head):
    """Gradient of the LSE of query row r."""
    if not g.dlse_address:
        return 0.0
    return read_one(g.dlse_address + task.batch * g.dlse_b + head * g.dlse_h + (s.q_begin + r) * g.dlse_s, g.dlse_code)


@inlined
def refine_rows(one, size, p, g, s, task, lane, pages, sinks, weights, work, columns, columns_v):
    """Maximum, normaliser and delta of the marked rows, from their keys: the rounding of O and of the LSE must not show."""
    rows = rows_of(one)
    panels = (task.rows + rows - 1) // rows
    keys_padded = p.tile_keys + UNROLL
    kt = work
    vt = kt + keys_padded * columns * size
    st = vt + keys_padded * columns_v * size
    dpt = st + keys_padded * rows * size
    slope = dpt + keys_padded * rows * size
    top = slope + keys_padded * rows * size
    running_max = top + rows * size
    sums = running_max + panels * rows * size
    row = sums + 4 * panels * rows * size
    for t in range(panels * rows):
        put(one, running_max, t, type(one)(-INF))
    for t in range(4 * panels * rows):
        put(one, sums, t, 0)
    first, last = keys_of_panels(g.limits_at, lane // rows, panels)
    for aligned in range(first // p.tile_keys * p.tile_keys, last, p.tile_keys):
        begin, end = max(aligned, first), min(aligned + p.tile_keys, last)
        pack_tiles(one, size, p, g, s, task, pages, begin, end, columns, columns_v, kt, vt)
        for panel in range(panels):
            at = lane + panel * rows
            wanted = 0
            for r in range(rows):
                wanted |= get(WHOLE, g.refine_at, at + r)
            j, stop = panel_keys(g.limits_at, at // rows, begin, end)
            keys = stop - j
            if keys <= 0 or not wanted:
                continue
            old_max = running_max + panel * rows * size
            panel_logits(one, size, p, g, s, kt + (j - begin) * columns * size, columns, at, j, keys, st, slope, weights, top, row)
            if wanted & REFINE_BOTH:  # else dpt is whatever it was, and the sum over it is not used
                panel_dp(one, size, p, g, vt + (j - begin) * columns_v * size, columns_v, at, keys, dpt)
            lane_maxima(one, st, keys, rows, old_max, top)
            statistics_step(one, st, dpt, keys, old_max, top, sums + 4 * panel * rows * size)
    for t in range(task.rows):
        if not get(WHOLE, g.refine_at, lane + t):
            continue
        r, head = query_of(task, p.group, t)
        state = sums + (t // rows * 4 * rows + t % rows) * size
        top_t, total = np.float64(get(one, running_max, t)), np.float64(get(one, state, 0))
        delta = np.float64(get(one, state, 2 * rows))
        whole, base = total, top_t if top_t != -INF else 0.0
        if p.sinks and not math.isnan(total):
            sink = sinks[head]
            base = max(base, sink) if top_t != -INF else sink if sink != -INF else 0.0
            base = np.float64(type(one)(base))  # as it is stored: the factor and the sink's weight refer to the same number
            shrink = math.exp(top_t - base)
            delta *= shrink
            whole = total * shrink + math.exp(sink - base)
        delta = delta / whole if total != 0 else 0.0
        if get(WHOLE, g.refine_at, lane + t) == REFINE_BOTH:
            put(one, g.delta_at, lane + t, type(one)(delta - read_dlse(g, s, task, r, head)))
        put(one, g.lse_at, lane + t, type(one)(base))
        put(one, g.factor_at, lane + t, type(one)(1 / whole if whole != 0 else 0.0))


@inlined
def row_task(one, size, p, g, s, task, unit, pages, slopes, sinks, weights, work, columns, columns_v):
    """The first phase for a block of rows."""
    rows = rows_of(one)
    lane = unit.lane + task.first
    lanes = (task.rows + rows - 1) // rows * rows
    ot = work + max(columns, columns_v) * size
    pack_panels(one, size, p, g, s, task, lane, work, ot)
    describe_rows(
        one, p, s, task, slopes, lanes, g.slope_at + lane * size, g.position_at + 8 * lane, g.first_at + 8 * lane, g.last_at + 8 * lane,
        g.bias_at + 8 * lane, g.mask_at + 8 * lane,
    )
    for t in range(lane + task.rows, lane + lanes):  # lanes without a row see nothing
        put(WHOLE, g.first_at, t, 0)
        put(WHOLE, g.last_at, t, 0)
        put(WHOLE, g.refine_at, t, 0)
        put(one, g.lse_at, t, 0)
        put(one, g.factor_at, t, 0)
        put(one, g.delta_at, t, 0)
    panel_limits(rows, lanes // rows, g.first_at + 8 * lane, g.last_at + 8 * lane, g.limits_at + 32 * (lane // rows))
    if row_statistics(one, size, p, g, s, task, unit, lane, ot):
        refine_rows(one, size, p, g, s, task, lane, pages, sinks, weights, work, columns, columns_v)
