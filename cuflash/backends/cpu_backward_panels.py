"""What the phases of the compiled backward pass share: where the arrays lie, tiles and panels, logits and dP."""

from __future__ import annotations

from .cpu_backward_simd import products, softcap_slope
from .cpu_logits import apply_alibi, apply_bias, apply_mask, apply_range
from .cpu_memory import compiled, get, put
from .cpu_panels import key_address, panel_is_cut, query_of, rows_of
from .cpu_rows import read_row
from .cpu_simd import UNROLL, distances

Q, K, V, OUT, DOUT, DQ, DK, DV = range(8)  # arrays of ``layout``
STRANGE_Q, STRANGE_DO = 1, 2  # a panel holds NaN or infinities


@compiled
def layout(p, g, which):
    """Address, strides over batch, sequence, head and element, and dtype code of an array."""
    if which == Q:
        return p.q_address, p.q_b, p.q_s, p.q_h, p.q_d, p.q_code
    if which == K:
        return p.k_address, p.k_b, p.k_s, p.k_h, p.k_d, p.k_code
    if which == V:
        return p.v_address, p.v_b, p.v_s, p.v_h, p.v_d, p.v_code
    if which == OUT:
        return p.out_address, p.out_b, p.out_s, p.out_h, p.out_d, p.out_code
    if which == DOUT:
        return g.dout_address, g.dout_b, g.dout_s, g.dout_h, g.dout_d, g.dout_code
    if which == DQ:
        return g.dq_address, g.dq_b, g.dq_s, g.dq_h, g.dq_d, g.dq_code
    if which == DK:
        return g.dk_address, g.dk_b, g.dk_s, g.dk_h, g.dk_d, g.dk_code
    return g.dv_address, g.dv_b, g.dv_s, g.dv_h, g.dv_d, g.dv_code


# One call of a function that reads rows compiles in half the time of two: hence the loops over two or three arrays.


@compiled
def pack_tiles(one, size, p, g, s, task, pages, begin, end, columns, columns_v, kt, vt):
    """Keys and values begin <= j < end into rows of padded length, the last repeated; says whether all of K is finite."""
    strange = 0
    for which in range(K, V + 1):
        base, stride_b, stride_s, stride_h, stride_d, code = layout(p, g, which)
        target, depth, padded = (kt, p.head_dim, columns) if which == K else (vt, p.head_dim_v, columns_v)
        for n in range(end - begin + UNROLL):
            row = target + n * padded * size
            j = min(begin + n, end - 1)
            read_row(one, row, key_address(p, s, task, pages, base, stride_b, stride_s, stride_h, j), stride_d, depth, code)
            if which == K:
                for d in range(depth):
                    x = get(one, row, d)
                    strange |= x - x != 0
            for d in range(depth, padded):
                put(one, row, d, 0)
    return strange == 0


@compiled
def row_address(s, task, group, t, base, stride_b, stride_s, stride_h):
    """Address of packed row t of a task in q, out, dout or dq."""
    r, head = query_of(task, group, t)
    return base + task.batch * stride_b + (s.q_begin + r) * stride_s + head * stride_h


@compiled
def copy_panel(one, size, p, g, s, task, first, columns, columns_v, q_rows, do_rows):
    """The rows of a panel of Q and dO as they are, padded; rows that do not exist are 0."""
    rows = rows_of(one)
    for n in range(2):
        base, stride_b, stride_s, stride_h, stride_d, code = layout(p, g, Q if n == 0 else DOUT)
        target, depth, padded = (q_rows, p.head_dim, columns) if n == 0 else (do_rows, p.head_dim_v, columns_v)
        for r in range(rows):
            row = target + r * padded * size
            filled = 0
            if first + r < task.rows:
                where = row_address(s, task, p.group, first + r, base, stride_b, stride_s, stride_h)
                read_row(one, row, where, stride_d, depth, code)
                filled = depth
            for d in range(filled, padded):
                put(one, row, d, 0)


@compiled
def panel_logits(one, size, p, g, s, kt, columns, lane, j, keys, st, slope, weights, top, row):
    """Final logits S^T of a panel and some keys, as in the forward pass; with softcap, also its slope."""
    rows, depth = rows_of(one), p.head_dim
    q_at = g.qt_at + lane * depth * size
    for n in range(0, keys, UNROLL):
        k_at, s_at = kt + n * columns * size, st + n * rows * size
        if p.distance:
            distances(one, k_at, columns, q_at, s_at, depth, weights, top)
        else:
            products(one, k_at, columns, q_at, s_at, depth, type(one)(p.scale))
    if p.softcap != 0:
        softcap_slope(one, st, slope, keys * rows, type(one)(p.softcap))
    if p.bias_address:
        apply_bias(one, p, st, keys, rows, g.bias_at + 8 * lane, j, row)
    if p.alibi:
        apply_alibi(one, st, keys, rows, g.slope_at + lane * size, g.position_at + 8 * lane, j)
    if p.mask_address:
        apply_mask(one, p, s, st, keys, rows, g.mask_at + 8 * lane, j, row)
    if panel_is_cut(g.limits_at, lane // rows, j, j + keys):
        apply_range(one, st, keys, rows, g.first_at + 8 * lane, g.last_at + 8 * lane, j)


@compiled
def panel_dp(one, size, p, g, vt, columns, lane, keys, dpt):
    """dP^T of a panel and some values."""
    rows, width = rows_of(one), p.head_dim_v
    for n in range(0, keys, UNROLL):
        products(one, vt + n * columns * size, columns, g.dot_at + lane * width * size, dpt + n * rows * size, width, type(one)(1))
