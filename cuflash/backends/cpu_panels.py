"""What forward and backward of the compiled CPU kernels know of tasks, rows and panels: where they lie and what they see.

A panel is as many packed query rows (see cpu_params.TASK) as a micro-kernel has lanes. What its rows see, going by position,
are four numbers in ``limits``: the keys that some row sees, and those that all its rows see, each from and up to.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from . import cpu_simd
from .cpu_memory import WHOLE, compiled, get, put

NOWHERE = 2**62  # the first key that a row without keys sees


@intrinsic
def rows_of(typingctx, one):
    """Query rows of a wide panel, a constant of the dtype."""
    rows = cpu_simd.panel_rows(one.bitwidth // 8)

    def codegen(context, builder, sig, args):
        return context.get_constant(types.int64, rows)

    return types.int64(one), codegen


@compiled
def query_of(task, group, t):
    """Query row and query head of row t of a task."""
    packed = task.first + t
    if group == 1:  # two divisions saved per row
        return packed, task.kv_head
    return packed // group, task.kv_head * group + packed % group


@compiled
def key_address(p, s, task, pages, base, stride_b, stride_s, stride_h, j):
    """Address of key j's row of K or V: dense, packed or through the page table."""
    base += task.kv_head * stride_h
    if p.page_size > 0:
        page = pages[task.batch * p.max_pages + j // p.page_size]
        return base + page * stride_b + (j % p.page_size) * stride_s
    return base + task.batch * stride_b + (s.k_begin + j) * stride_s


@compiled
def describe_rows(one, p, s, task, slopes, lanes, slope, position, low, high, bias, mask):
    """For every lane: its position, the keys it can see, its ALiBi slope and where its rows of bias and mask start."""
    for t in range(lanes):
        r, head = query_of(task, p.group, min(t, task.rows - 1))
        i = r + s.position
        first, last = max(s.kv_start, task.k_begin), min(s.kv_length, task.k_end)
        if p.left >= 0:
            first = max(first, i - p.left)
        if p.right >= 0:
            last = min(last, i + p.right + 1)
        put(WHOLE, position, t, i)
        put(WHOLE, low, t, first)
        put(WHOLE, high, t, max(first, last))
        put(one, slope, t, slopes[task.batch * p.heads_q + head] if p.alibi else 0)
        put(WHOLE, bias, t, p.bias_address + task.batch * p.bias_b + head * p.bias_h + r * p.bias_s)
        put(WHOLE, mask, t, p.mask_address + task.batch * p.mask_b + head * p.mask_h + r * p.mask_s)


@compiled
def panel_limits(rows, panels, low, high, limits):
    """Per panel: the keys that some row sees, and those that all its rows see."""
    for panel in range(panels):
        some_low, some_high, all_low, all_high = NOWHERE, 0, 0, NOWHERE
        for t in range(panel * rows, (panel + 1) * rows):
            first, last = get(WHOLE, low, t), get(WHOLE, high, t)
            if first < last:
                some_low, some_high = min(some_low, first), max(some_high, last)
            all_low, all_high = max(all_low, first), min(all_high, last)
        put(WHOLE, limits, 4 * panel, some_low)
        put(WHOLE, limits, 4 * panel + 1, some_high)
        put(WHOLE, limits, 4 * panel + 2, all_low)
        put(WHOLE, limits, 4 * panel + 3, all_high)


@compiled
def panel_keys(limits, panel, begin, end):
    """The keys of a tile begin <= j < end that some row of a panel sees, from and up to; none if these cross."""
    return max(begin, get(WHOLE, limits, 4 * panel)), min(end, get(WHOLE, limits, 4 * panel + 1))


@compiled
def panel_is_cut(limits, panel, begin, end):
    """Whether some row of a panel does not see one of the keys begin <= j < end."""
    return begin < get(WHOLE, limits, 4 * panel + 2) or end > get(WHOLE, limits, 4 * panel + 3)


@compiled
def keys_of_panels(limits, panel, panels):
    """The keys that some row of a few panels sees, from and up to; from NOWHERE if there are none."""
    first, last = NOWHERE, 0
    for n in range(panel, panel + panels):
        first = min(first, get(WHOLE, limits, 4 * n))
        last = max(last, get(WHOLE, limits, 4 * n + 1))
    return first, last
